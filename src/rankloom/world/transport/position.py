"""Where a rank stands among the hosts of its group, and whose data it carries between them. Pure arithmetic, once for each group.

levels.py uses this file.
"""

from collections.abc import Sequence
from itertools import zip_longest

from rankloom.base.topology import are_even, node_with


class Position:
    """What one rank knows of it. A lane is what one rank gives, or gets.

    nodes:    the ranks of each host
    here:     the number of this rank's host
    node:     its ranks, this one among them
    place:    of this rank in its node
    is_even:  whether all hosts have equally many ranks
    team:     the ranks that carry a share of each tensor between the hosts, one of each host, if this rank is among them
    firsts:   the first ranks of the other hosts
    deputies: for each host, the rank there that handles this rank's lane between hosts; at home, this rank
    rounds:   rounds[i][place]: whose lane the rank at `place` of this host carries in round i, or None; round 0 is their own
    """

    def __init__(self, nodes: Sequence[Sequence[int]], rank: int):
        self.nodes, self.rank = nodes, rank
        self.here = node_with(nodes, rank)
        self.node = nodes[self.here]
        self.place = self.node.index(rank)
        self.is_even = are_even(nodes)
        self.team = [node[self.place if self.is_even else 0] for node in nodes] if self.is_even or self.place == 0 else []
        others = [node for node in nodes if node is not self.node]
        self.firsts, self.elsewhere = [node[0] for node in others], [other for node in others for other in node]
        self.deputies = [node[self.place % len(node)] for node in nodes]
        self.rounds = _rounds(self.node, others)


def _rounds(mine: Sequence[int], others: Sequence[Sequence[int]]) -> list[tuple[int | None, ...]]:
    carried: list[list[int]] = [[] for _ in mine]
    for node in [mine, *others]:
        for place, rank in enumerate(node):
            carried[place % len(mine)].append(rank)
    return list(zip_longest(*carried))
