"""Which all-reduce sums the gradients: by name, from one table that a program may add to.

The hook point for collectives of your own, compressed ones for instance: `register_all_reduce("name", algorithm)`, then
`[comm] all_reduce = "name"` or `rl.data_parallel(..., all_reduce="name")`.
"""

from collections.abc import Callable

from torch import Tensor

from rankloom.base.errors import ConfigError, did_you_mean
from rankloom.comm.ring import ring_all_reduce
from rankloom.world.group import Group

AllReduce = Callable[[Tensor, Group], Tensor]
"""Sums a contiguous buffer over the group, in place, and returns it. Every rank must end with the same bits."""

BACKEND = "backend"
_ALGORITHMS: dict[str, AllReduce | None] = {BACKEND: None, "ring": ring_all_reduce}


def register_all_reduce(name: str, algorithm: AllReduce) -> None:
    """Make `algorithm` selectable as `name`; every rank must register it. A taken name is an error."""
    if name in _ALGORITHMS:
        raise ConfigError(f"there is already an all-reduce named {name!r}")
    _ALGORITHMS[name] = algorithm


def all_reduce_named(name: str) -> AllReduce | None:
    """The algorithm of that name; None means the backend's own, which runs asynchronously by itself."""
    if name not in _ALGORITHMS:
        raise ConfigError(f"there is no all-reduce {name!r}. {did_you_mean(name, _ALGORITHMS)}")
    return _ALGORITHMS[name]
