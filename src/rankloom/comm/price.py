"""What a collective should take: the way its bytes go over the links of a topology, times what links cost.

Two things make a rank wait: the longest chain of messages (a Path), and the work of all ranks of its node, which share its cores
and its memory (the Bills of them all, over the link that is called `host`). Where ranks are more than cores, work is all that counts.

A flat algorithm on several nodes is priced as if its whole path went between nodes: at every step some rank waits for a slow
link. The bandwidth between nodes is that of a whole node; where all of its ranks send to other nodes at once, they share it.
Read `base/topology.py` and `comm/algorithms.py` before.
"""

from dataclasses import dataclass

from rankloom.base.compression import BACKEND as BACKEND
from rankloom.base.cost import Path
from rankloom.base.errors import ConfigError, did_you_mean
from rankloom.base.quantities import bus_factor
from rankloom.base.topology import Links, Topology
from rankloom.comm.algorithms import ALGORITHMS, Algorithm, on_nodes
from rankloom.comm.hierarchical import hierarchical_all_reduce_paths, hierarchical_all_to_all_paths

LEVELS = {"all_reduce": hierarchical_all_reduce_paths, "all_to_all": hierarchical_all_to_all_paths}
CROWDED = ("halving", "doubling", "pairwise")   # in which all ranks of a node send to other nodes at once


@dataclass(frozen=True, slots=True)
class Route:
    """The path of a collective, by the kind of link it takes: names of `Links`. What it adds is in the paths too."""

    parts: tuple[tuple[str, Path], ...]


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds: of messages that wait for each other, and of bytes that travel and are added."""

    latency: float
    bandwidth: float

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.latency + self.bandwidth

    @property
    def reason(self) -> str:
        """Which of both weighs more, and how much.

        >>> Price(latency=3e-4, bandwidth=1e-4).reason
        'latency 75 %'
        """
        name, part = ("latency", self.latency) if self.latency >= self.bandwidth else ("bandwidth", self.bandwidth)
        return f"{name} {100 * part / self.seconds:.0f} %" if self.seconds else "nothing to do"


def algorithms_on(collective: str, topology: Topology) -> dict[str, Algorithm]:
    """The algorithms of a collective by name; those in two levels only where there are two.

    raises: ConfigError for a collective that does not exist
    """
    if collective not in ALGORITHMS:
        raise ConfigError(f"there is no collective {collective!r}. {did_you_mean(collective, ALGORITHMS)}")
    two_levels = 1 < len(topology.nodes) < topology.size
    return ALGORITHMS[collective] | (on_nodes(topology.nodes).get(collective, {}) if two_levels else {})


def route(collective: str, name: str, nbytes: int, topology: Topology, *, wide: int = 1) -> Route:
    """How `nbytes` go when algorithm `name` does a collective on all ranks of a topology. wide: see comm/algorithms.py"""
    several, p = len(topology.nodes) > 1, topology.size
    if name == BACKEND:
        return Route((("backend_between" if several else "backend", least_path(collective, nbytes, p)),))
    chosen = algorithms_on(collective, topology)[name]
    largest = max(topology.nodes, key=len)
    bills = [chosen.bill(nbytes, p, 1, rank, wide=wide) for rank in largest]
    work = ("host", Path(sum(bill.messages for bill in bills), sum(bill.sent for bill in bills)))
    if name == "hierarchical":
        inside, between = LEVELS[collective](nbytes, topology.nodes, wide=wide)
        return Route((("inside", inside), ("between", _shared(between, len(largest) if topology.is_even() else 1)), work))
    path = chosen.path(nbytes, p, wide=wide)
    way = ("between", _shared(path, len(largest) if name in CROWDED else 1)) if several else ("inside", path)
    return Route((way, work))


def least_path(collective: str, nbytes: int, ranks: int) -> Path:
    """The fewest steps and bytes that any algorithm needs: what a backend's own is charged, since what it does is not ours to know.

    >>> least_path("all_reduce", 1000, 4)
    Path(steps=4, bytes=1500, added=0)
    """
    rounds = (ranks - 1).bit_length()
    return Path(rounds * (2 if collective == "all_reduce" else 1), round(nbytes * bus_factor(collective, ranks)) if ranks > 1 else 0)


def _shared(path: Path, ranks: int) -> Path:
    """A path whose bytes go over a link that so many ranks use at once."""
    return Path(path.steps, path.bytes * ranks, path.added)


def price(way: Route, links: Links) -> Price:
    """What a route costs."""
    latency = bandwidth = 0.0
    for kind, path in way.parts:
        link = links.named(kind)
        latency += path.steps * link.alpha
        bandwidth += path.bytes * link.beta + path.added * links.gamma
    return Price(latency, bandwidth)
