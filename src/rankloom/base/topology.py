"""Which ranks share a node, and what a message costs inside a node and between nodes. Values only.

`world/cluster.py` makes a Topology from a launcher's variables or from a file, and hierarchical algorithms follow it;
`comm/choose.py` prices algorithms on it. A cluster file, every key of which may be left out:

    nodes = [[0, 1], [2, 3]]     # the ranks of each node; or: nodes = 2 with ranks_per_node = 2
    [links]
    adding_gbps = 80.0           # how fast a rank adds what it has received, in gigabits per second
    [links.inside]               # and the same for links.between; for the backend's own: links.backend, links.backend_between
    latency_us = 100.0           # of a message, before its first byte
    bandwidth_gbps = 20.0        # gigabits per second; between nodes, those of a whole node
    [links.host]                 # what its ranks share: the time of all messages and bytes of a node adds up
    latency_us = 10.0
    bandwidth_gbps = 100.0

What a file leaves out is as the launcher says (nodes) or a default (links). `rankloom bench --save` writes measured links.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeGuard, TypeVar

from rankloom.base.errors import ConfigError, did_you_mean

FASTEST = 1e6   # Gbit/s; what a fit that finds no cost per byte says, since JSON knows no infinity
LATENCIES = (0.0, 1e12)   # microseconds: 1e12 are 12 days
RATES = (1e-9, 1e12)      # Gbit/s: 1e-9 is one bit a second. Numbers in these ranges give finite prices
ADDING = "adding_gbps"
T = TypeVar("T")


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _expect_number(key: str, value: object, limits: tuple[float, float]) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not limits[0] <= value <= limits[1]:   # NaN is in no range
        raise ConfigError(f"{key} = {_shown(value)}: must be a number from {limits[0]:g} to {limits[1]:g}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:40]}... ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class Link:
    """What a message over one kind of link costs: a latency, then a time for each byte.

    >>> Link(latency_us=100.0, bandwidth_gbps=8.0).beta
    1e-09
    """

    latency_us: float
    bandwidth_gbps: float

    def __post_init__(self) -> None:
        _expect_number("latency_us", self.latency_us, LATENCIES)
        _expect_number("bandwidth_gbps", self.bandwidth_gbps, RATES)

    @property
    def alpha(self) -> float:
        """Seconds per message."""
        return self.latency_us * 1e-6

    @property
    def beta(self) -> float:
        """Seconds per byte."""
        return 8e-9 / self.bandwidth_gbps

    @classmethod
    def of(cls, alpha: float, beta: float) -> "Link":
        """The link with so many seconds per message and per byte."""
        return cls(alpha * 1e6, max(RATES[0], min(8e-9 / beta, FASTEST)) if beta else FASTEST)


@dataclass(frozen=True, slots=True)
class Links:
    """What messages and additions cost.

    The defaults are guesses for messages of Python over gloo, on hosts with 10 Gbit/s between them. Until something was measured,
    the backend's own collectives are taken for the fastest on one node.
    """

    inside: Link = Link(50.0, 20.0)
    host: Link = Link(10.0, 100.0)        # what each message and byte costs all ranks of its node, which share cores and memory
    between: Link = Link(150.0, 10.0)
    backend: Link = Link(20.0, 40.0)      # steps of the backend's own collectives, on one node
    backend_between: Link | None = None   # the same on several nodes; None: it cannot be faster than `between`
    adding_gbps: float = 80.0

    def __post_init__(self) -> None:
        _expect_number(ADDING, self.adding_gbps, RATES)

    @property
    def gamma(self) -> float:
        """Seconds to add one received byte."""
        return Link(0.0, self.adding_gbps).beta

    def named(self, kind: str) -> Link:
        """The link of that name."""
        link = getattr(self, kind)
        return self.between if link is None else link

    def as_table(self) -> dict[str, Any]:
        """The [links] of a cluster file."""
        return {name: value for name, value in asdict(self).items() if value is not None}


GPU_LINKS = Links(   # guesses too: messages of Python over NCCL, beside the latencies that NCCL's own tuning takes for a step
    inside=Link(30.0, 400.0), host=Link(5.0, 4000.0), between=Link(40.0, 200.0), backend=Link(7.0, 1600.0),
    backend_between=Link(14.0, 200.0), adding_gbps=8000.0,
)


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of each node, and the links. Equal on all ranks of a group, so that all decide the same.

    >>> cluster = Topology.even(nodes=2, ranks_per_node=2)
    >>> cluster.node_of(2)
    1
    >>> cluster.among([1, 3]).nodes   # the same, as a group of ranks 1 and 3 numbers it
    ((0,), (1,))
    """

    nodes: tuple[tuple[int, ...], ...]
    links: Links = Links()

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", _as_tuples(self.nodes))   # lists would have no hash
        ranks = sorted(rank for node in self.nodes for rank in node)
        if not ranks:
            raise ConfigError("nodes: there is no rank in them")
        for node in self.nodes:
            if not node:
                raise ConfigError("nodes: a node has no ranks; leave it out")
        for at, rank in enumerate(ranks):
            if at and rank == ranks[at - 1]:
                raise ConfigError(f"nodes: rank {rank} is there twice")
            if rank != at:
                raise ConfigError(f"nodes: rank {at if rank > at else rank} is {'missing' if rank > at else 'no rank'}; "
                                  f"{len(ranks)} ranks are numbered 0 to {len(ranks) - 1}")

    @classmethod
    def even(cls, nodes: int, ranks_per_node: int, links: Links = Links()) -> "Topology":
        """Nodes of equally many ranks, numbered one node after the other."""
        return cls(tuple(tuple(range(node * ranks_per_node, (node + 1) * ranks_per_node)) for node in range(nodes)), links)

    @classmethod
    def of_names(cls, names: Sequence[Hashable], links: Links = Links()) -> "Topology":
        """Ranks that have the same name share a node. names: one for each rank

        >>> Topology.of_names(["a", "b", "a"]).nodes
        ((0, 2), (1,))
        """
        nodes: dict[Hashable, list[int]] = {}
        for rank, name in enumerate(names):
            nodes.setdefault(name, []).append(rank)
        return cls(tuple(tuple(node) for node in nodes.values()), links)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return sum(map(len, self.nodes))

    def node_of(self, rank: int) -> int:
        """The number of the node that `rank` is on. raises: ConfigError"""
        for number, node in enumerate(self.nodes):
            if rank in node:
                return number
        raise ConfigError(f"there is no rank {rank!r} on {self}: ranks are numbered from 0 to {self.size - 1}")

    def is_even(self) -> bool:
        """Whether all nodes have equally many ranks."""
        return are_even(self.nodes)

    def among(self, ranks: Sequence[int]) -> "Topology":
        """The topology of a group of `ranks`, each numbered by its place in it. raises: ConfigError"""
        return self if tuple(ranks) == tuple(range(self.size)) else Topology.of_names([self.node_of(rank) for rank in ranks], self.links)

    def as_table(self) -> dict[str, Any]:
        """What a cluster file would say."""
        return {"nodes": [list(node) for node in self.nodes], "links": self.links.as_table()}

    def __str__(self) -> str:
        if self.is_even():
            return f"{len(self.nodes)} node{'s' * (len(self.nodes) > 1)} of {_ranks(len(self.nodes[0]))}"
        return f"{len(self.nodes)} nodes of {', '.join(str(len(node)) for node in self.nodes)} ranks"


def node_with(nodes: Sequence[Sequence[int]], rank: int) -> int:
    """The number of the node that has this rank."""
    return next(at for at, node in enumerate(nodes) if rank in node)


def are_even(nodes: Sequence[Sequence[int]]) -> bool:
    """Whether all nodes have equally many ranks."""
    return len({len(node) for node in nodes}) == 1


def _as_tuples(nodes: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(nodes, list | tuple) and all(isinstance(node, list | tuple) and all(type(rank) is int for rank in node)
                                              for node in nodes):
        return tuple(map(tuple, nodes))
    raise ConfigError(f"nodes = {_shown(nodes)}: must be a list of ranks for each node, such as [[0, 1], [2, 3]]")


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


# ------------------------------------------------------------------ a cluster file's tables


def parse_topology(table: Mapping[str, Any], size: int, otherwise: Topology) -> Topology:
    """A Topology of `size` ranks from the tables of a cluster file; what it leaves out is as in `otherwise`.

    raises: ConfigError that begins with the key, for an unknown key, a wrong value, or ranks that do not fit
    """
    _expect_keys(table, ("nodes", "ranks_per_node", "links"), "")
    links = parse_links(table.get("links", {}), otherwise.links)
    if "nodes" not in table:
        if "ranks_per_node" in table:
            raise ConfigError("ranks_per_node: has no meaning without nodes, the number of nodes")
        return replace(otherwise, links=links)
    return _parse_nodes(table["nodes"], table.get("ranks_per_node"), size, links)


def _parse_nodes(nodes: object, per_node: object, size: int, links: Links) -> Topology:
    if _is_count(nodes):
        if not _is_count(per_node):
            raise ConfigError(f"nodes = {_shown(nodes)}: needs ranks_per_node beside it, 1 or more; or list the ranks: "
                              "nodes = [[0, 1], [2, 3]]")
        _expect_ranks(nodes * per_node, size)   # before a list of them is made
        return Topology.even(nodes, per_node, links)
    if per_node is not None:
        raise ConfigError("ranks_per_node: has no meaning beside nodes that list their ranks")
    if not isinstance(nodes, list):
        raise ConfigError(f"nodes = {_shown(nodes)}: must be a list of ranks for each node, such as [[0, 1], [2, 3]], or a number of nodes")
    found = Topology(tuple(sorted(tuple(sorted(node)) for node in _as_tuples(nodes))), links)
    _expect_ranks(found.size, size)
    return found


def _expect_ranks(count: int, size: int) -> None:
    if count != size:
        raise ConfigError(f"nodes: has {_ranks(count)}, but the job has {size}")


def parse_links(table: object, otherwise: Links = Links()) -> Links:
    """Links from the [links] of a cluster file; what it leaves out is as in `otherwise`."""
    table = _expect_keys(table, [f.name for f in fields(Links)], "links")
    found = {name: _parse_link(value, otherwise.named(name), f"links.{name}") for name, value in table.items() if name != ADDING}
    return _replaced(otherwise, {ADDING: table[ADDING]} | found if ADDING in table else found, "links")


def _parse_link(table: object, otherwise: Link, where: str) -> Link:
    return _replaced(otherwise, _expect_keys(table, [f.name for f in fields(Link)], where), where)


def _replaced(otherwise: T, values: Mapping[str, Any], where: str) -> T:
    try:
        return replace(otherwise, **values)   # type: ignore[type-var]
    except ConfigError as error:
        raise ConfigError(f"[{where}] {error}") from None


def _expect_keys(table: object, known: Sequence[str], where: str) -> Mapping[str, Any]:
    place = f"[{where}] " if where else ""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{place}must be a section of `key = value` lines")
    for key in table:
        if key not in known:
            raise ConfigError(f"{place}unknown key {key!r}. {did_you_mean(key, known)}")
    return table
