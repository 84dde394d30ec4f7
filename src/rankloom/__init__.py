"""rankloom: distributed training, proven equal to one process.

The public names are loaded when they are first used (PEP 562), so that `import rankloom` and `rankloom --help`
do not import torch. The list below is the whole public API; docs/start.md has examples of nearly all of it, docstrings of the rest.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Mesh": "base.mesh",
    "Topology": "base.topology",
    "Bill": "base.cost",
    "Group": "world.group",
    "World": "world.world",
    "init": "world.join",
    "simulate": "world.simulate",
    "spawn": "world.spawn",
    "ring_all_reduce": "comm.ring",
    "canonical_all_reduce": "comm.canonical",
    "register_all_reduce": "comm.choose",
    "compressed_all_reduce": "comm.compress",
    "data_parallel": "parallel.data",
    "tensor_parallel": "parallel.tensor.apply",
    "pipeline": "parallel.pipeline.build",
    "fully_shard": "parallel.fully_shard",
    "prepare": "train.prepare",
    "Engine": "train.engine",
    "Report": "train.engine",
    "Precision": "train.precision",
    "Pipe": "train.pipeline.pipe",
    "GPT": "models.gpt",
    "GPTConfig": "models.config",
}
_ERRORS = (
    "RankloomError", "ConfigError", "MeshError", "BatchError", "StorageError", "DataError", "LossError", "NotContiguous", "ShapeMismatch",
    "ModelMismatch", "CollectiveMismatch", "CollectiveTimeout", "RankLost", "DeviceError", "UnitError", "NonFinite", "RankFailed",
    "WrongResult",
)
_HOME |= dict.fromkeys(_ERRORS, "base.errors")

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rankloom' has no attribute {name!r}")
    return getattr(import_module(f"rankloom.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
