"""Compare, before the first step, what all ranks must have been given alike. A host with an older file, or a rate that depends on the
rank, would not be an error later: training would only be wrong.
"""

import hashlib
from collections.abc import Mapping
from types import CodeType
from typing import Any

from torch import Tensor, nn

from rankloom.base.alike import first_difference
from rankloom.base.errors import ConfigError
from rankloom.shard.optimizer import Optimizer
from rankloom.world.group import Group


def expect_alike(group: Group, what: str, mine: Mapping[str, Any]) -> None:
    """Raise ConfigError, on all ranks, unless all have equal values, by name.

    sent: the values as text, once to every rank
    """
    everyone = group.all_gather_object({name: repr(value) for name, value in mine.items()}, label=f"the same {what}")
    if problem := first_difference(what, everyone, group.ranks):
        raise ConfigError(problem)


def code_of(model: nn.Module) -> dict[str, str]:
    """A hash of the functions of each module class of a model, torch's own excepted: of their bytecode, not of the file."""
    digests: dict[str, set[str]] = {}
    for kind in {type(module) for module in model.modules()}:
        if not kind.__module__.startswith("torch."):
            digests.setdefault(f"the code of {kind.__qualname__}", set()).add(_digest(kind))   # several classes may have one name
    return {name: " ".join(sorted(digests[name])) for name in sorted(digests)}


def _digest(kind: type) -> str:
    functions = [code for value in vars(kind).values() if (code := getattr(value, "__code__", None))]
    return hashlib.sha256(repr(list(map(_parts, functions))).encode()).hexdigest()[:8]


def _parts(constant: Any) -> Any:
    """A function's bytecode and its constants, in a fixed order: that of a set differs between processes."""
    if isinstance(constant, CodeType):
        return constant.co_code, constant.co_names, constant.co_varnames, list(map(_parts, constant.co_consts))
    if isinstance(constant, frozenset):
        return sorted(map(repr, constant))
    return list(map(_parts, constant)) if isinstance(constant, tuple) else repr(constant)


def numbers_of(optimizer: Optimizer) -> dict[str, Any]:
    """The learning rate, weight decay ... of each param group. A rate may be a tensor on this rank's device."""
    plain = int | float | str | tuple | list | None
    parts = [(at, key, value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
             for at, part in enumerate(optimizer.param_groups) for key, value in part.items() if key not in ("params", "param_names")]
    return {f"{key} of group {at}": value for at, key, value in parts if isinstance(value, plain)}
