"""The time a collective should take: its route over the links of a topology, times what links cost.

A rank waits for two things: the longest chain of messages (a Path), and the work of all ranks of its node, which share cores
and memory (the sum of their Bills, over the link `host`). With more ranks than cores, work is nearly all of the time.

A flat algorithm on several nodes is priced as if its whole path went between nodes: at every step some rank waits for a slow
link. The bandwidth between nodes is that of a whole node; its ranks share it where all send to other nodes at once.
Read `base/topology.py` and `comm/algorithms.py` first.
"""

from dataclasses import dataclass

from rankloom.base.compression import BACKEND as BACKEND
from rankloom.base.cost import Path
from rankloom.base.errors import ConfigError, did_you_mean
from rankloom.base.quantities import bus_factor
from rankloom.base.topology import Links, Topology
from rankloom.comm.algorithms import ALGORITHMS, Algorithm, on_nodes


@dataclass(frozen=True, slots=True)
class Route:
    """The paths of a collective, each with its kind of link (a name in `Links`). Paths also count the bytes added."""

    parts: tuple[tuple[str, Path], ...]


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds for messages that wait for each other (latency), and for bytes sent and added (bandwidth)."""

    latency: float
    bandwidth: float

    @property
    def seconds(self) -> float:
        """The sum of both."""
        return self.latency + self.bandwidth

    @property
    def reason(self) -> str:
        """The larger of the two, and its share.

        >>> Price(latency=3e-4, bandwidth=1e-4).reason
        'latency 75 %'
        """
        name, part = ("latency", self.latency) if self.latency >= self.bandwidth else ("bandwidth", self.bandwidth)
        return f"{name} {100 * part / self.seconds:.0f} %" if self.seconds else "nothing to do"


def algorithms_on(collective: str, topology: Topology) -> dict[str, Algorithm]:
    """The algorithms of a collective by name; two-level ones only if the topology has several nodes of several ranks.

    raises: ConfigError for a collective that does not exist
    """
    if collective not in ALGORITHMS:
        raise ConfigError(f"there is no collective {collective!r}. {did_you_mean(collective, ALGORITHMS)}")
    two_levels = 1 < len(topology.nodes) < topology.size
    return ALGORITHMS[collective] | (on_nodes(topology.nodes).get(collective, {}) if two_levels else {})


def needs_tags(collective: str, name: str, topology: Topology) -> bool:
    """Whether algorithm `name` cannot run on a group whose messages ignore tags. The backend's own can."""
    return name != BACKEND and algorithms_on(collective, topology)[name].needs_tags


def route(collective: str, name: str, nbytes: int, topology: Topology, *, wide: int = 1) -> Route:
    """The route of `nbytes` in a collective by algorithm `name` over all ranks of a topology. wide: see comm/algorithms.py"""
    several, p = len(topology.nodes) > 1, topology.size
    if name == BACKEND:
        return Route((("backend_between" if several else "backend", least_path(collective, nbytes, p)),))
    chosen = algorithms_on(collective, topology)[name]
    largest = max(topology.nodes, key=len)
    bills = [chosen.bill(nbytes, p, 1, rank, wide=wide) for rank in largest]
    work = ("host", Path(sum(bill.messages for bill in bills), sum(bill.sent for bill in bills)))
    if chosen.levels:
        inside, between = chosen.levels(nbytes, p, wide=wide)
        return Route((("inside", inside), ("between", _shared(between, len(largest) if topology.is_even() else 1)), work))
    path = chosen.path(nbytes, p, wide=wide)
    way = ("between", _shared(path, len(largest) if chosen.crowded else 1)) if several else ("inside", path)
    return Route((way, work))


def least_path(collective: str, nbytes: int, ranks: int) -> Path:
    """The fewest steps and bytes that any algorithm needs. A backend's own collectives count as this, since we do not know them.

    >>> least_path("all_reduce", 1000, 4)
    Path(steps=4, bytes=1500, added=0)
    """
    rounds = (ranks - 1).bit_length()
    return Path(rounds * (2 if collective == "all_reduce" else 1), round(nbytes * bus_factor(collective, ranks)) if ranks > 1 else 0)


def _shared(path: Path, ranks: int) -> Path:
    """The path when `ranks` ranks share its link."""
    return Path(path.steps, path.bytes * ranks, path.added)


def price(way: Route, links: Links) -> Price:
    """What a route costs."""
    latency = bandwidth = 0.0
    for kind, path in way.parts:
        link = links.named(kind)
        latency += path.steps * link.alpha
        bandwidth += path.bytes * link.beta + path.added * links.gamma
    return Price(latency, bandwidth)
