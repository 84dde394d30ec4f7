"""A compressed all-reduce in two levels: exact inside a node, comm/blockwise.py between nodes.

    inside     reduce-scatter in fp32: this rank has the node's sum of its slice of the piece
    between    the stages of comm/blockwise.py on this slice, with the ranks at the same place in the other nodes
    inside     all-gather of the finished slices

While one piece travels between nodes, the next travels inside, so the slow link is never idle. Where nodes differ in size, and on
a GPU, comm/hierarchical.py does the same without overlap.
"""

from collections.abc import Iterator

from torch import Tensor

from rankloom.base.cost import Bill
from rankloom.comm.blockwise import Blockwise, staggered
from rankloom.comm.hierarchical import hierarchical_all_reduce, hierarchical_all_reduce_bill
from rankloom.comm.lossy import LABEL, Compressed
from rankloom.comm.messages import post
from rankloom.comm.subgroup import Subgroup
from rankloom.world.group import Group


class TwoLevels(Compressed):
    """The all-reduce of this file, over the nodes of the group's topology.

    sent:   inside a node of s ranks 2(s-1) messages for each piece, 2n(s-1)/s fp32 values; between nodes as `between`, of n/s values
    memory: the errors, as `between` keeps them for n/s values
    source: Jia et al. 2018, "Highly scalable deep learning training system with mixed-precision"; see comm/blockwise.py
    """

    def __init__(self, between: Blockwise):
        super().__init__()
        self.between = between

    def _sum(self, values: Tensor, group: Group) -> None:
        nodes, node = group.topology.nodes, group.topology.node_of(group.rank)
        if not _overlaps(group):
            hierarchical_all_reduce(values, group, nodes, between=self.between)
            return
        inside = Subgroup(group, nodes[node])
        across = Subgroup(group, [other[inside.rank] for other in nodes])
        step = self.between.step(across.size)   # values of a slice
        pieces = [[values[start:end] for start, end in spans] for spans in cut_in_pieces(len(values), step, inside.size)]
        self.between.remember(sum(len(slices[inside.rank]) for slices in pieces), across)
        staggered([self._stages(at * step, slices, inside, across) for at, slices in enumerate(pieces)])

    def _stages(self, at: int, slices: list[Tensor], inside: Group, across: Group) -> Iterator[None]:
        """Sum one piece, cut in slices. at: where this rank's slice begins among all its slices"""
        mine = slices[inside.rank]
        inbox = list(mine.new_empty(inside.size, len(mine)))
        arrived = post(slices, inbox, inside, label=LABEL)
        yield
        arrived()
        for rank, part in enumerate(inbox):
            if rank != inside.rank:
                mine.add_(part)
        yield from self.between.stages(at, mine, across)
        arrived = post([mine] * inside.size, slices, inside, label=LABEL)
        yield
        arrived()

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
        for spans in cut_in_pieces(n, self.between.step(len(nodes)), len(nodes[node])):
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
    pieces = [(start, min(start + s * step, n)) for start in range(0, n, s * step)]
    each = [(end - start + s - 1) // s for start, end in pieces]
    return [[(min(start + k * length, end), min(start + (k + 1) * length, end)) for k in range(s)]
            for (start, end), length in zip(pieces, each)]


def _overlaps(group: Group) -> bool:
    return group.device.type == "cpu" and len(group.topology.nodes) > 1 and group.topology.is_even()
