"""Choose the all-reduce for gradients: by name, or the one that should be fastest for a size on a topology ("auto").

A program may add its own: `register_all_reduce("name", algorithm)`, then `rl.prepare(..., all_reduce="name")` or
`rl.data_parallel(..., all_reduce="name")`. A config file knows the built-in names only. "auto" takes the cheapest for each buffer
(comm/price.py). Its choice is a pure function of bytes, topology and links. These are equal on all ranks, so all ranks choose the
same without a message.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

from torch import Tensor

from rankloom.base.compression import HIERARCHICAL
from rankloom.base.errors import ConfigError, ShapeMismatch, did_you_mean
from rankloom.base.expect import expect_callable
from rankloom.base.quantities import show_bytes, show_seconds
from rankloom.base.topology import Topology
from rankloom.comm.algorithms import ALGORITHMS
from rankloom.comm.hierarchical import hierarchical_all_reduce
from rankloom.comm.operands import widening
from rankloom.comm.price import BACKEND, Price, algorithms_on, needs_tags, price, route
from rankloom.comm.two_levels import all_reduce_in_pieces
from rankloom.world.group import Group

AllReduce = Callable[[Tensor, Group], Tensor]
"""Sums a contiguous buffer over the group, in place, and returns it. Every rank must end with the same bits."""

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm and the time it should take."""

    name: str
    price: Price


@dataclass(frozen=True, slots=True)
class Decision:
    """All candidates for a number of bytes on a topology, the cheapest first."""

    nbytes: int
    candidates: tuple[Candidate, ...]

    @property
    def winner(self) -> Candidate:
        """The cheapest."""
        return self.candidates[0]

    def __str__(self) -> str:
        rows = [f"{one.name}: {show_seconds(one.price.seconds)} ({one.price.reason})" for one in self.candidates]
        return f"{show_bytes(self.nbytes)}: {', '.join(rows)}"


@lru_cache(maxsize=4096)
def decide(nbytes: int, topology: Topology, *, wide: int = 1) -> Decision:
    """Price every all-reduce of `nbytes` over all ranks of `topology`. wide: see comm/algorithms.py

    >>> [decide(n, Topology.even(1, 8)).winner.price.reason.split()[0] for n in (1 << 10, 1 << 26)]
    ['latency', 'bandwidth']
    """
    names = [BACKEND, *algorithms_on("all_reduce", topology)]
    found = [Candidate(name, price(route("all_reduce", name, nbytes, topology, wide=wide), topology.links)) for name in names]
    return Decision(nbytes, tuple(sorted(found, key=lambda one: one.price.seconds)))


def describe_decisions(topology: Topology) -> str:
    """One line: which all-reduce "auto" takes, up to which size, for dtypes that are summed as they are, such as fp32.

    >>> describe_decisions(Topology.even(1, 1))
    'backend at any size'
    """
    sizes = [1 << k for k in range(10, 31)]
    winners = [decide(size, topology).winner.name for size in sizes]
    ends = [f"{name} up to {show_bytes(size)}" for size, (name, following) in zip(sizes, pairwise(winners)) if following != name]
    return ", ".join([*ends, f"{winners[-1]} above"]) if ends else f"{winners[0]} at any size"


def auto_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum `x` over the group, in place, with the all-reduce that should be fastest for its size. x: any shape, contiguous"""
    candidates = [one.name for one in decide(x.nbytes, group.topology, wide=widening(x.dtype)).candidates]
    able = (name for name in candidates if not (group.in_order and needs_tags("all_reduce", name, group.topology)))
    algorithm = all_reduce_named(next(able))
    return group.all_reduce(x) if algorithm is None else algorithm(x, group)


def in_two_levels(between: AllReduce) -> AllReduce:
    """The hierarchical all-reduce over the nodes of the group's topology. between: the all-reduce between nodes"""
    return lambda x, group: hierarchical_all_reduce(x, group, group.topology.nodes, between=between)


_ALL_REDUCES: dict[str, AllReduce | None] = {
    BACKEND: None, AUTO: auto_all_reduce, **{name: algorithm.run for name, algorithm in ALGORITHMS["all_reduce"].items()},
    HIERARCHICAL: all_reduce_in_pieces,
}


def register_all_reduce(name: str, algorithm: AllReduce) -> None:
    """Make `algorithm` known as `name`. Every rank that uses it must call this.

    algorithm: algorithm(x, group) sums the contiguous buffer `x` over the group, in place, or returns the sum as a tensor like it
    raises:    ConfigError for a name that is in use, and for what is no name or no function
    """
    if not (isinstance(name, str) and name):
        raise ConfigError(f"register_all_reduce: the name is {name!r}, expected a text")
    expect_callable(f"register_all_reduce({name!r}): algorithm", algorithm, "a function of a tensor and a group")
    if name in _ALL_REDUCES:
        raise ConfigError(f"there is already an all-reduce named {name!r}")
    _ALL_REDUCES[name] = partial(_run_registered, name, algorithm)


def _run_registered(name: str, algorithm: AllReduce, x: Tensor, group: Group) -> Tensor:
    """Sum `x` in place by a user's all-reduce, which may have put the sum elsewhere."""
    total = algorithm(x, group)
    if total is None or total is x:   # a user's function, which may return nothing
        return x
    if not isinstance(total, Tensor) or (total.shape, total.dtype) != (x.shape, x.dtype):
        shown = f"{tuple(total.shape)} of {total.dtype}" if isinstance(total, Tensor) else f"a {type(total).__name__}"
        raise ShapeMismatch(f"{group.where(name)}: the registered all-reduce returned {shown}, expected the sum, {tuple(x.shape)} of "
                            f"{x.dtype}")
    return x.copy_(total)


def all_reduce_named(name: str) -> AllReduce | None:
    """The algorithm `name`; None means the backend's own, which runs in the background. raises: ConfigError for an unknown name"""
    if name not in _ALL_REDUCES:
        raise ConfigError(f"there is no all-reduce {name!r}. {did_you_mean(name, _ALL_REDUCES)}")
    return _ALL_REDUCES[name]
