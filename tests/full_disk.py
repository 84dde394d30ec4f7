"""A disk that is full for one rank."""

from rankloom.base.errors import StorageError
from rankloom.train import checkpoint


def fill_disk_of_rank_1(monkeypatch):
    """From now on rank 1 cannot write its file of a checkpoint."""
    real = checkpoint.write_parts

    def full(path, parts):
        if path.name.endswith("-00001.safetensors"):
            raise StorageError(f"{path}: cannot be written (No space left on device)")
        return real(path, parts)

    monkeypatch.setattr(checkpoint, "write_parts", full)
