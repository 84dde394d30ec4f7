"""The files of a checkpoint: each rank writes one, and reads boxes of tensors from all of them. Read manifest.py first.

A rank's file is in the safetensors format, written tensor by tensor, without a second copy of the state in memory. It is synced to the
disk before the manifest names it, and hashed meanwhile.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rankloom.base.errors import ConfigError, DataError, StorageError
from rankloom.base.files import replacing
from rankloom.base.spans import Box, intersection, shape_of, within
from rankloom.base.tensors import bytes_of
from rankloom.checkpoint.manifest import Manifest, Part, SavedFile, StoredBox, from_json, key_of, to_json

MANIFEST = "manifest.json"
LOCK = ".rankloom-save.lock"   # there during a save; one that a killed job has left is taken over
CURE = "copy it again from where it is whole, or take another checkpoint"
RANK_FILE = re.compile(r"[0-9a-f]{12}-\d{5,}\.safetensors")
REMOVABLE = re.compile(rf"{RANK_FILE.pattern}|\.{re.escape(MANIFEST)}\.[0-9a-f]{{12}}\.tmp")   # nothing else in a folder is ever removed
FORMATS = {   # as safetensors calls them
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64",
    torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64"}


def file_name(token: str, rank: int) -> str:
    """The name of a rank's file. token: 12 hexadecimal digits, new for each checkpoint"""
    return f"{token}-{rank:05}.safetensors"


def expect_writable(parts: Iterable[Part]) -> None:
    """Raise ConfigError for a tensor that the format cannot store, or that could not be loaded in place."""
    for part in parts:
        values = part.values
        if values.layout is not torch.strided:
            raise ConfigError(f"{part.name} is {values.layout}: a checkpoint keeps dense tensors only")
        if values.dtype not in FORMATS:
            raise ConfigError(f"{part.name} is {values.dtype}, which a checkpoint cannot store; "
                              f"it stores {', '.join(str(dtype).removeprefix('torch.') for dtype in FORMATS)}")
        if any(length > 1 and stride == 0 for length, stride in zip(values.shape, values.stride())):
            raise ConfigError(f"{part.name} is expanded: several elements share memory, so it cannot be read back; keep `x.contiguous()`")


@torch.no_grad()
def write_parts(path: Path, parts: Sequence[Part]) -> SavedFile:
    """Write these parts. When this returns, the file is complete and synced; on an error it is removed.

    memory: a copy of one part at a time
    raises: StorageError that names the file
    """
    header = _header_of(parts)
    try:
        with open(path, "xb") as file:
            file.write(header)
            for part in parts:
                file.write(_bytes_of(part))
            file.flush()
            with ThreadPoolExecutor(1) as beside:
                synced = beside.submit(os.fsync, file.fileno())   # mostly waiting, so hash meanwhile
                digest = _digest_of(path)
                synced.result()
        return SavedFile(path.name, path.stat().st_size, digest)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StorageError(f"{path}: cannot be written ({error.strerror or error})") from None


def _header_of(parts: Iterable[Part]) -> bytes:
    """What a safetensors file begins with: the length of a JSON text, and the text, which says where in the file each tensor is."""
    entries: dict[str, Any] = {}
    start = 0
    for part in parts:
        stop = start + part.values.nbytes
        entries[key_of(part.name, part.box)] = {
            "dtype": FORMATS[part.values.dtype], "shape": shape_of(part.box), "data_offsets": (start, stop)}
        start = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)   # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bytes_of(part: Part) -> Any:   # a buffer
    return bytes_of(part.values.detach().cpu()).numpy().data   # moved first: no second copy on the device


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Keep other saves out of the folder: each ends by removing the files of all others. No help where the file system has no locks.

    raises: StorageError when another save is going on, or nothing can be written
    """
    path = folder / LOCK   # a file, not the folder: network disks lock only what is open for writing
    try:
        lock = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error.strerror or error}); give another folder") from None
    try:
        if not _try_lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
            raise StorageError(f"{folder}: another job is saving into this folder; give each job its own")
        try:
            yield
        finally:
            with suppress(OSError):   # what is left is taken over
                path.unlink()
    finally:
        os.close(lock)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """A context in which nobody removes files from the folder: a save, or a run with old checkpoints, leaves that to the next one.

    No help where the file system has no locks of folders.
    """
    with _locked(folder, fcntl.LOCK_SH):   # waits for one that is removing files
        yield


def removing(folder: Path) -> AbstractContextManager[bool]:
    """A context in which nobody begins to read the folder; False when somebody is `reading` it."""
    return _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[bool]:
    """A context that tries to hold a lock: False if another has it. It is a lock of the folder, so that readers need not write there."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError:   # what is done next tells why
        yield True
        return
    try:
        yield _try_lock(lock, how)
    finally:
        os.close(lock)


def _try_lock(lock: int, how: int) -> bool:
    """Lock an open file or folder. Returns whether that is so; True, too, where there are no locks."""
    try:
        fcntl.flock(lock, how)
        return os.fstat(lock).st_nlink > 0   # else a save has ended since the file was opened, and a third may have begun
    except BlockingIOError:
        return False
    except OSError:   # a file system without locks
        return True


def commit(folder: Path, manifest: Manifest) -> None:
    """Make this the checkpoint in `folder`, by one rename; then remove the files of the earlier one.

    raises: StorageError, with the earlier checkpoint unchanged
    """
    try:
        for saved in manifest.files:
            if problem := _misfit(folder, saved):
                raise StorageError(f"{problem}; another rank has written it: give a folder that all hosts share")
        with replacing(folder / MANIFEST) as temporary, open(temporary, "w", encoding="utf-8") as file:
            file.write(to_json(manifest))
            file.flush()
            os.fsync(file.fileno())
    except (OSError, MemoryError) as error:
        why = error.strerror if isinstance(error, OSError) else f"no memory for its manifest {error}".strip()
        raise StorageError(f"{folder}: the checkpoint cannot be written ({why or error})") from None
    # The checkpoint is saved: an error from here on would make the caller remove its files. Some network disks cannot sync a folder.
    with suppress(OSError):
        _sync_folder(folder)
    with suppress(OSError), removing(folder) as unread:   # the error of listing the folder
        if unread:
            _remove_unnamed(folder, {saved.name for saved in manifest.files})


def _remove_unnamed(folder: Path, named: set[str]) -> None:
    """Remove files of earlier or unfinished checkpoints. If that fails, the next checkpoint tries again."""
    for path in folder.iterdir():
        if REMOVABLE.fullmatch(path.name) and path.name not in named:
            with suppress(OSError):
                path.unlink()


def expect_free(folder: Path) -> None:
    """Raise ConfigError when a checkpoint would overwrite another program's manifest, or a damaged one."""
    path = folder / MANIFEST
    try:
        from_json(path.read_text(encoding="utf-8"), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return
    except (DataError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is there, and not of a checkpoint that can be read, so it is not overwritten ({error}); give another "
                          "folder, or move it away") from None


def _sync_folder(folder: Path) -> None:
    """Sync a rename to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _misfit(folder: Path, saved: SavedFile) -> str | None:
    """What is wrong with a file, if it is missing or has another size."""
    path = folder / saved.name
    if not path.exists():
        return f"{path}: is not here"
    found = path.stat().st_size
    return None if found == saved.nbytes else f"{path}: has {found} bytes, expected {saved.nbytes}"


def read_manifest(folder: Path) -> tuple[str, Manifest]:
    """The manifest, as text and parsed.

    raises: DataError, also when a file is missing or has another size
    """
    with reading(folder):
        return _read_manifest(folder)


def _read_manifest(folder: Path) -> tuple[str, Manifest]:
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        reason = "no such folder" if not folder.exists() else f"holds no {MANIFEST}, so there is no checkpoint; was it still being written?"
        raise DataError(f"{folder}: {reason}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    manifest = from_json(text, str(path))
    for saved in manifest.files:
        if not RANK_FILE.fullmatch(saved.name):
            raise DataError(f"{path}: names {saved.name!r}, expected files beside it such as {file_name('0' * 12, 0)}; it is damaged")
        try:
            problem = _misfit(folder, saved)
        except OSError as error:
            problem = f"{folder / saved.name}: cannot be read ({error.strerror})"
        if problem:
            raise DataError(f"{problem}: the checkpoint is damaged; {CURE}")
    return text, manifest


def expect_unchanged(folder: Path, files: Iterable[SavedFile]) -> None:
    """Raise DataError for a file whose SHA-256 has changed."""
    for saved in files:
        try:
            found = _digest_of(folder / saved.name)
        except OSError as error:
            raise DataError(f"{folder / saved.name}: cannot be read ({error.strerror})") from None
        if found != saved.sha256:
            raise DataError(f"{folder / saved.name}: has SHA-256 {found[:12]}..., expected {saved.sha256[:12]}...; the file is damaged; "
                            f"{CURE}")


class Reader(ExitStack):
    """Reads boxes of a checkpoint's tensors, as a context. Files are memory-mapped, so only these boxes are read."""

    def __init__(self, folder: Path, manifest: Manifest):
        super().__init__()
        self.folder, self.manifest = folder, manifest
        self._open: dict[int, Any] = {}

    @torch.no_grad()
    def fill(self, part: Part) -> None:
        """Load the saved elements of a part's box into its memory, cast to its dtype.

        raises: DataError
        """
        saved = self.manifest.tensors[part.name]
        for piece in saved.pieces:
            if (overlap := intersection(piece.box, part.box)) is not None:
                values = self._read(part.name, piece, overlap)
                if values.dtype != saved.dtype:
                    raise DataError(f"{self.folder}: {part.name} is {values.dtype} in its file, and the manifest says {saved.dtype}")
                part.values[within(overlap, part.box)].copy_(values)

    def _read(self, name: str, piece: StoredBox, overlap: Box) -> Tensor:
        """The elements of `overlap`, a box inside that of the piece."""
        key, where = key_of(name, piece.box), within(overlap, piece.box)
        try:
            file = self._file(piece.file)
            with torch.device("cpu"):   # safetensors makes a slice on torch's default device
                return file.get_slice(key)[where] if where else file.get_tensor(key)   # type: ignore[no-any-return]
        except (OSError, SafetensorError) as error:
            raise DataError(f"{self.folder / self.manifest.files[piece.file].name}: {name} cannot be read ({error})") from None

    def _file(self, number: int) -> Any:
        if number not in self._open:
            self._open[number] = self.enter_context(safe_open(self.folder / self.manifest.files[number].name, "pt"))
        return self._open[number]


def sizes_of(manifest: Manifest, prefix: str) -> Mapping[str, torch.Size]:
    """The shapes of saved tensors whose names begin with `prefix`, by the rest of the name."""
    return {name.removeprefix(prefix): torch.Size(saved.shape) for name, saved in manifest.tensors.items() if name.startswith(prefix)}
