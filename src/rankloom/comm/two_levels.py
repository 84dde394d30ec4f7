"""The all-reduce of comm/hierarchical.py piece by piece: while one travels between nodes, the next travels inside.

    inside     reduce-scatter: this rank has the node's sum of its slice of the piece
    between    an all-reduce of this slice with the ranks at the same place in the other nodes: exact, or that of comm/blockwise.py
    inside     all-gather of the finished slices

So the slow link is never idle. Where nodes differ in size, and on a GPU, comm/hierarchical.py does the same without overlap.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor

from rankloom.base.cost import Bill
from rankloom.comm.blockwise import Blockwise, staggered
from rankloom.comm.hierarchical import hierarchical_all_reduce, hierarchical_all_reduce_bill
from rankloom.comm.lossy import LABEL, Compressed
from rankloom.comm.messages import post
from rankloom.comm.operands import summand, summing_dtype
from rankloom.comm.subgroup import Subgroup
from rankloom.world.group import Group

EXACT_LABEL = "hierarchical_all_reduce"
PIECE = 1 << 18   # of an exact sum: values of a slice that travel together


def all_reduce_in_pieces(x: Tensor, group: Group) -> Tensor:
    """Sum `x` over the group, in place: exact, over the nodes of the group's topology. Every rank ends with the same bits.

    x:      any shape of n elements, contiguous, the same on each of p ranks
    sent:   as much as by `hierarchical_all_reduce`, in 2(s-1) + 2(m-1) messages for each piece, with s ranks in each of m nodes
    memory: two pieces
    raises: NotContiguous; ConfigError for bool
    """
    flat = summand(x, group, EXACT_LABEL)
    if not _overlaps(group) or flat.dtype != summing_dtype(flat.dtype):
        return hierarchical_all_reduce(x, group, group.topology.nodes)
    inside, across = _levels_of(group)

    def between(mine: Tensor) -> Iterator[None]:
        return _sum_slices(mine.tensor_split(across.size), across, EXACT_LABEL)

    pieces = flat.split(PIECE * inside.size)
    staggered([_sum_slices(piece.tensor_split(inside.size), inside, EXACT_LABEL, between) for piece in pieces])
    return x


class TwoLevels(Compressed):
    """The all-reduce of this file, compressed between nodes, over the nodes of the group's topology.

    sent:   inside a node of s ranks 2(s-1) messages for each piece, 2n(s-1)/s fp32 values; between nodes as `between`, of n/s values
    memory: the errors, as `between` keeps them for n/s values
    source: Jia et al. 2018, "Highly scalable deep learning training system with mixed-precision"; see comm/blockwise.py
    """

    def __init__(self, between: Blockwise):
        super().__init__()
        self.between = between

    def _sum(self, values: Tensor, group: Group) -> None:
        if not _overlaps(group):
            hierarchical_all_reduce(values, group, group.topology.nodes, between=self.between)
            return
        inside, across = _levels_of(group)
        step = self.between.values_in_piece(across.size)   # values of a slice
        pieces = [[values[start:end] for start, end in spans] for spans in cut_in_pieces(len(values), step, inside.size)]
        self.between.remember(sum(len(slices[inside.rank]) for slices in pieces), across)
        staggered([_sum_slices(slices, inside, LABEL, partial(self.between.stages, at * step, group=across))
                   for at, slices in enumerate(pieces)])

    def held(self) -> int:
        """Bytes kept between steps."""
        return self.between.held()

    def rescale(self, factor: float) -> None:
        """Multiply the errors."""
        self.between.rescale(factor)

    def bill(self, n: int, group: Group) -> Bill:
        """What this rank of `group` sends for n values."""
        nodes, node = group.topology.nodes, group.topology.node_of(group.rank)
        if n and not _overlaps(group):
            return hierarchical_all_reduce_bill(n, nodes, 4, group.rank, between=lambda n, m, itemsize, rank: self.between.bill_for(n, m))
        place, total = nodes[node].index(group.rank), Bill()
        for spans in cut_in_pieces(n, self.between.values_in_piece(len(nodes)), len(nodes[node])):
            lengths = [end - start for start, end in spans]
            mine = lengths.pop(place)
            total += Bill(sent=4 * (sum(lengths) + len(lengths) * mine), messages=sum(map(bool, lengths)) + len(lengths) * bool(mine))
            total += self.between.bill_for(mine, len(nodes))
        return total


def cut_in_pieces(n: int, step: int, s: int) -> list[list[tuple[int, int]]]:
    """Cut n values in pieces of s slices of `step` values: where each slice begins and ends. The last piece's may be short or empty.

    >>> cut_in_pieces(10, step=2, s=3)
    [[(0, 2), (2, 4), (4, 6)], [(6, 8), (8, 10), (10, 10)]]
    """
    pieces = []
    for start in range(0, n, s * step):
        end = min(start + s * step, n)
        each = -(-(end - start) // s)
        cuts = [min(start + k * each, end) for k in range(s + 1)]
        pieces.append(list(pairwise(cuts)))
    return pieces


def _sum_slices(slices: Sequence[Tensor], group: Group, label: str,
                then: Callable[[Tensor], Iterator[None]] | None = None) -> Iterator[None]:
    """Sum slices over the group, in place: each rank its own one, and all get all. Each stage starts messages that the next waits for.

    slices: one for each rank, of the same sizes on all ranks
    then:   more stages, of this rank's sum, before it is sent to the others
    """
    mine = slices[group.rank]
    inbox = list(mine.new_empty(group.size - 1, len(mine)))
    arrived = post(slices, [*inbox[: group.rank], mine, *inbox[group.rank :]], group, label=label)
    yield
    arrived()
    while inbox:   # in rank order; a piece that travels between nodes needs no more room for this
        mine.add_(inbox.pop(0))
    del arrived
    if then:
        yield from then(mine)
    arrived = post([mine] * group.size, slices, group, label=label)
    yield
    arrived()


def _levels_of(group: Group) -> tuple[Subgroup, Subgroup]:
    """The ranks of this rank's node, and those at its place in each node."""
    nodes = group.topology.nodes
    inside = Subgroup(group, nodes[group.topology.node_of(group.rank)])
    return inside, Subgroup(group, [node[inside.rank] for node in nodes])


def _overlaps(group: Group) -> bool:
    return group.device.type == "cpu" and len(group.topology.nodes) > 1 and group.topology.is_even()
