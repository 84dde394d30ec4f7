"""Every error rankloom raises on purpose: each names rank, thing, expected, actual, and what to do.

`RankloomError` is the family. What the user can mend in their input is also a `ValueError`;
what happens to a running job (a lost rank, a mismatch between ranks) is also a `RuntimeError`.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from functools import partial
from typing import Any


class RankloomError(Exception):
    """The family of all errors that rankloom raises on purpose."""


class ConfigError(RankloomError, ValueError):
    """A setting, an argument or a config file asks for something that cannot be."""


class MeshError(ConfigError):
    """The mesh does not fit the ranks there are."""


class BatchError(ConfigError):
    """A batch cannot be cut over ranks and micro-batches as asked."""


class StorageError(ConfigError):
    """A file or a folder cannot be written: the disk is full, or read-only, or not the user's."""


class DataError(RankloomError, ValueError):
    """Training data is missing, empty, damaged or of the wrong kind."""


class LossError(RankloomError, ValueError):
    """The loss function did not return `(sum, count)`."""


class NotContiguous(RankloomError, ValueError):
    """A tensor with gaps was given to a collective; gloo would move the wrong bytes silently."""


class ShapeMismatch(RankloomError, ValueError):
    """A tensor on one rank does not have the shape, dtype or length that was expected."""


class ModelMismatch(RankloomError, ValueError):
    """Ranks hold models that differ in names, shapes or dtypes."""


class CollectiveMismatch(RankloomError, RuntimeError):
    """Ranks called different collectives, or the same in another order, or send something else than is expected (over gloo and NCCL:
    noticed in debug mode; among threads, always)."""


class RankLost(RankloomError, RuntimeError):
    """A peer is gone: it died, left or aborted, its connection closed, or it never joined."""


class CollectiveTimeout(RankLost):
    """A peer did not take part in time: it is slow, stopped or stuck, or it skipped this call."""


class DeviceError(RankloomError, RuntimeError):
    """A device driver refused a request."""


class WrongResult(RankloomError, RuntimeError):
    """A collective returned a wrong result; found by `rankloom bench`, which checks every one."""


class UnitError(RankloomError, RuntimeError):
    """Sharded parameters were used, replaced or reduced at the wrong time."""


class NonFinite(RankloomError, RuntimeError):
    """A loss or a gradient is NaN or infinite; every rank raises this in the same step."""


class RankFailed(RankloomError, RuntimeError):
    """The first rank that failed in `simulate` or `spawn`; its own exception is the cause."""

    def __init__(self, message: str, *, rank: int):
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), rank=self.rank), self.args


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint that names the nearest known word, or all of them when none is near.

    >>> did_you_mean("tenosr", ["tensor", "shard"])
    "Did you mean 'tensor'?"
    >>> did_you_mean("qqq", ["tensor", "shard"])
    'Known: shard, tensor.'
    """
    known = sorted(known)
    near = get_close_matches(str(word), known, n=1)
    return f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
