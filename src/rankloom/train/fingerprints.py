"""What of a model and an optimizer must be the same on all ranks, as small values to compare (parallel/replicas/equal_start.py).

A host with an older file, or a learning rate that depends on the rank, would raise no error: training would only be wrong.
"""

import hashlib
from array import array
from types import CodeType
from typing import Any
from zlib import crc32

from torch import Tensor, nn

from rankloom.shard.optimizer import Optimizer

TENSORS = ("params", "param_names")   # keys of a param group that hold no numbers
SAME_NUMBERS = (", or they diverge. A scheduler that looks at a metric must see one of all ranks, such as the loss of `engine.evaluate`; "
                "an optimizer that measures all parameters together (Prodigy, D-Adaptation) must have all of them on each rank: stage 0")


def code_of(model: nn.Module) -> dict[str, str]:
    """A hash of the functions of each module class of a model, torch's own excepted: of their bytecode, not of the file."""
    digests: dict[str, set[str]] = {}
    for kind in {type(module) for module in model.modules()}:
        if not kind.__module__.startswith("torch."):
            functions = [code for value in vars(kind).values() if (code := getattr(value, "__code__", None))]
            digest = hashlib.sha256(repr(list(map(_contents, functions))).encode()).hexdigest()[:8]
            digests.setdefault(f"the code of {kind.__qualname__}", set()).add(digest)   # several classes may have one name
    return {name: " ".join(sorted(digests[name])) for name in sorted(digests)}


def _contents(constant: Any) -> Any:
    """A function's bytecode and its constants, in a fixed order: that of a set differs between processes."""
    if isinstance(constant, CodeType):
        return constant.co_code, constant.co_names, constant.co_varnames, list(map(_contents, constant.co_consts))
    if isinstance(constant, frozenset):
        return sorted(map(repr, constant))
    return list(map(_contents, constant)) if isinstance(constant, tuple) else repr(constant)


def numbers_of(optimizer: Optimizer) -> dict[str, Any]:
    """The learning rate, weight decay ... of each param group. A rate may be a tensor on this rank's device."""
    plain = int | float | str | tuple | list | None
    parts = [(at, key, value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
             for at, part in enumerate(optimizer.param_groups) for key, value in part.items() if key not in TENSORS]
    return {f"{key} of group {at}": value for at, key, value in parts if isinstance(value, plain)}


class OptimizerMark:
    """One hash of all numeric settings of an optimizer, so that ranks compare them in each step by a single integer.

    Tensors on a GPU are left out: reading one would wait for the device.
    price: 3 us per parameter group
    """

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._mark = 0

    def of(self, optimizer: Optimizer) -> int:
        """A hash of the numbers as they are now, below 2**31: the same on all ranks that have the same numbers."""
        now: list[float] = []
        for part in optimizer.param_groups:
            for key, value in part.items():
                if type(value) in (float, bool, int):   # most are, and `isinstance` takes twice as long
                    now.append(value)
                elif value is not None and key not in TENSORS:
                    now += _numbers_in(value)
        if now != self._seen:
            self._seen, self._mark = now, crc32(array("d", now)) >> 1   # as fp64: 1, 1.0 and True are the same number
        return self._mark


def _numbers_in(value: Any) -> list[float]:
    """A value that is a number, or a tensor of one; the numbers in a tuple or list; of anything else none."""
    if isinstance(value, (tuple, list)):
        return [number for one in value for number in _numbers_in(one)]
    if isinstance(value, (int, float)):
        return [value]
    return [value.item()] if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu" else []
