"""An all-reduce that gives the same bits on any number of ranks.

Floating-point sums depend on their order, and the order of an ordinary all-reduce depends on the number of ranks. Here each
summand belongs to one of L logical shards, not to a rank, and L is fixed for the run. The sum follows one binary tree over
the shards, its leaves. Which rank computed a leaf makes no difference:

    level 3               (0..7)
    level 2       (0..3)          (4..7)
    level 1    (0,1)   (2,3)   (4,5)   (6,7)
    level 0    0   1   2   3   4   5   6   7

1. Every rank owns a contiguous run of leaves (`base.shares.share`). It adds up the largest whole subtrees inside its run: its *nodes*.
2. The vector is cut in p chunks. Every rank sends chunk c of its nodes to rank c (all-to-all).
3. Rank c adds them along the rest of the tree. The finished chunks are gathered (all-gather).

Where p and L are powers of two (p <= L), each rank has one node, and sends as many bytes as in a ring.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankloom.base.cost import Bill
from rankloom.base.errors import ConfigError, ShapeMismatch
from rankloom.base.shares import share
from rankloom.comm.operands import summand
from rankloom.world.group import Group


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """The subtree over leaves [first, first + 2**level); those past the last leaf do not exist."""

    first: int
    level: int

    @property
    def end(self) -> int:
        """first + 2**level."""
        return self.first + (1 << self.level)

    def is_left(self) -> bool:
        """Whether it is the left child of its parent."""
        return self.first >> self.level & 1 == 0

    def parent(self) -> "Node":
        """The node one level up."""
        return Node(self.first & ~(1 << self.level), self.level + 1)


def owned_nodes(run: range, leaves: int) -> list[Node]:
    """The fewest subtrees that cover exactly the leaves of `run`, left to right.

    >>> owned_nodes(range(3, 6), leaves=8)
    [Node(first=3, level=0), Node(first=4, level=1)]
    """
    nodes, at = [], run.start
    end = run.stop if run.stop < leaves else 1 << leaves.bit_length()   # the last run also covers the missing leaves
    while at < run.stop:
        level = 0
        while at % (2 << level) == 0 and at + (2 << level) <= end and (1 << level) < leaves:
            level += 1
        nodes.append(Node(at, level))
        at += 1 << level
    return nodes


@dataclass(slots=True)
class Fold:
    """Adds the nodes of one tree, pushed from left to right. Keeps only nodes whose sibling is still missing.

    memory: at most log2(leaves) + 1 tensors
    """

    leaves: int
    kept: list[tuple[Node, Tensor]] = field(default_factory=list)

    def push(self, node: Node, value: Tensor) -> None:
        """Add a node. The fold takes over `value`, and may change it in place."""
        self.kept.append((node, value))
        self._climb()

    def _climb(self) -> None:
        while self.kept:
            node, value = self.kept[-1]
            if len(self.kept) > 1 and self.kept[-2][0] == Node(node.parent().first, node.level):
                self.kept.pop()
                left = self.kept.pop()[1]
                self.kept.append((node.parent(), left.add_(value)))
            elif node.is_left() and node.end >= self.leaves > 1 << node.level:
                self.kept[-1] = (node.parent(), value)   # its sibling has no leaves, so its parent has the same sum
            else:
                return

    def nodes(self) -> list[Node]:
        """The nodes kept, left to right."""
        return [node for node, _ in self.kept]

    def values(self) -> list[Tensor]:
        """The partial sums, in the order of `nodes()`."""
        return [value for _, value in self.kept]

    def total(self) -> Tensor:
        """The sum of all leaves. raises: ShapeMismatch before all have been pushed"""
        if len(self.kept) != 1:
            raise ShapeMismatch(f"the tree over {self.leaves} leaves is not whole: it holds {self.nodes()}")
        return self.kept[0][1]


def canonical_all_reduce(partials: list[Tensor], group: Group, leaves: int, *, label: str = "canonical_all_reduce") -> Tensor:
    """Sum over all leaves along the tree. Every rank gets the same bits, for any p.

    partials: of one shape, which the sum has too, with n elements; one for each of `owned_nodes(share(rank, p, leaves), leaves)`
              (`share`: base/shares.py), in that order; on one rank they are added up in place
    sent:     2(p-1) messages, (k+1) n(p-1)/p elements for a rank with k nodes, n rounded up to a multiple of p; a complex number
              counts as two elements
    raises:   NotContiguous; ConfigError for more ranks than leaves, ShapeMismatch for another number of partials
    """
    p, flat = group.size, [summand(partial, group, label) for partial in partials]
    held = [owned_nodes(share(rank, p, leaves), leaves) for rank in range(p)]
    if p > leaves:
        raise ConfigError(f"{leaves} logical shards cannot feed {p} ranks; use at most {leaves} ranks, or more logical shards")
    if len(partials) != len(held[group.rank]):
        raise ShapeMismatch(f"{group.where(label)}: {len(partials)} partial sums, expected {len(held[group.rank])}: {held[group.rank]}")
    return _sum_along_tree(flat, held, group, leaves, label).view(partials[0].shape)


def _sum_along_tree(partials: list[Tensor], held: list[list[Node]], group: Group, leaves: int, label: str) -> Tensor:
    """[n] each -> [n]. held: the nodes of each rank"""
    p, n = group.size, partials[0].numel()
    if p == 1:
        return _fold(held[0], partials, leaves)
    if partials[0].is_complex():   # gloo has no all-to-all of complex numbers; pairs of real ones add up to the same
        pairs = [torch.view_as_real(partial).flatten() for partial in partials]
        return torch.view_as_complex(_sum_along_tree(pairs, held, group, leaves, label).view(-1, 2))
    chunk = -(-n // p)
    dealt = group.all_to_all(_by_chunk(partials, p, chunk), label=label, send_rows=[len(partials)] * p,
                             recv_rows=[len(nodes) for nodes in held])
    mine = _fold([node for nodes in held for node in nodes], list(dealt), leaves)
    return group.all_gather(mine, label=label)[:n]


def _by_chunk(partials: list[Tensor], p: int, chunk: int) -> Tensor:
    """[p * k, chunk]: for each rank in turn, its chunk of each of the k partial sums. Zeros pad the last chunk."""
    out = partials[0].new_zeros(len(partials), p * chunk)
    for row, partial in zip(out, partials):
        row[: partial.numel()].copy_(partial)
    return out.view(len(partials), p, chunk).transpose(0, 1).reshape(p * len(partials), chunk)


def _fold(nodes: list[Node], values: list[Tensor], leaves: int) -> Tensor:
    fold = Fold(leaves)
    for node, value in zip(nodes, values, strict=True):
        fold.push(node, value)
    return fold.total()


def canonical_all_reduce_bill(n: int, p: int, leaves: int, itemsize: int, rank: int = 0) -> Bill:
    """What `rank` sends in `canonical_all_reduce`."""
    if p == 1:
        return Bill()
    nodes = len(owned_nodes(share(rank, p, leaves), leaves))
    return Bill(sent=(nodes + 1) * (p - 1) * -(-n // p) * itemsize, messages=2 * (p - 1))
