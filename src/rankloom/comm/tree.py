"""All-reduce along trees: sums go up to a root, the result comes down again.

The binomial tree waits for 2 log2 p messages of the whole buffer: best where a message costs more than its bytes. Half of its
ranks are leaves, which send once, receive once, and idle otherwise. The double tree uses two trees; the leaves of one are
inner ranks of the other. Each tree sums one half of the buffer, in blocks, at the same time as the other. So all links are busy:
it sends nearly the bytes of a ring, in a logarithmic number of steps.
Read `comm/broadcast.py` first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rankloom.base.cost import Bill, Path
from rankloom.base.errors import ConfigError
from rankloom.base.shares import chunk_sizes
from rankloom.comm.broadcast import (
    BLOCK,
    Tree,
    binomial_broadcast,
    binomial_broadcast_bill,
    binomial_broadcast_path,
    binomial_tree,
    block_count,
)
from rankloom.comm.messages import TAG
from rankloom.comm.operands import summand, summing_dtype
from rankloom.world.group import Group, Handle


def tree_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum `x` over the group, in place, along a binomial tree. Every rank ends with the same bits.

    x:      any shape of n elements, contiguous, the same on each of p ranks
    sent:   n elements up from each rank but the root, and n down for each child; up in fp32 where x is narrower
    steps:  2 log2 p, rounded up
    raises: NotContiguous; ConfigError for bool
    source: Thakur, Rabenseifner & Gropp 2005
    """
    flat = summand(x, group, "tree_all_reduce")
    sums = flat.to(summing_dtype(x.dtype))
    tree_reduce(sums, group)
    if group.rank == 0:
        flat.copy_(sums)
    binomial_broadcast(flat, group)
    return x


def tree_reduce(sums: Tensor, group: Group) -> Tensor:
    """Sum `sums` over the group into rank 0's. Other ranks end with a partial sum.

    sums:   any shape of n elements, contiguous, in the dtype of sums
    sent:   1 message, n elements; the root sends nothing
    steps:  log2 p, rounded up
    """
    tree = binomial_tree(group.rank, group.size)
    inbox = torch.empty_like(sums) if tree.children else sums
    for child in tree.children:   # the smallest subtree is ready first
        sums.add_(group.recv(inbox, child, tag=TAG, label="tree_reduce"))
    if tree.parent is not None:
        group.send(sums, tree.parent, tag=TAG, label="tree_reduce")
    return sums


def double_tree_all_reduce(x: Tensor, group: Group, *, block: int = BLOCK) -> Tensor:
    """Sum `x` over the group, in place, each half along its own tree. Every rank ends with the same bits.

    x:      any shape of n elements, contiguous, the same on each of p ranks
    block:  bytes of a block; the same on each rank
    sent:   n elements up and at most n down, in blocks; up in fp32 where x is narrower
    steps:  about 4(log2 p + b) with b blocks in each half, log2 p rounded down
    raises: NotContiguous; ConfigError for bool, a block below 1, and on a group whose messages ignore tags, as over NCCL
    source: Sanders, Speck & Traeff 2009
    """
    if group.in_order:
        raise ConfigError(f"{group.where('double_tree_all_reduce')}: its trees send in orders of their own, and messages over NCCL have "
                          "but one; take the backend's own all-reduce, or tree, ring or halving")
    halves = summand(x, group, "double_tree_all_reduce").tensor_split(2)
    blocks = block_count(halves[0].numel(), x.itemsize, block)   # the first half is the longer one
    halves_in_trees = [_TreeSum(half.tensor_split(blocks), tree, tag, group)
             for tag, (half, tree) in enumerate(zip(halves, double_tree(group.rank, group.size)), TAG)]
    leaf, inner = sorted(halves_in_trees, key=lambda each: len(each.tree.children))
    # This rank is a leaf of one tree, and may be an inner rank of the other. On the way up it handles the leaf's blocks earlier, on the way
    # down later, by as many blocks as the trees have levels. So the leaf's messages delay none of the inner rank's.
    ahead = group.size.bit_length() - 1
    if group.size > 1:
        for at in range(blocks + ahead):
            leaf.climb(at)
            inner.climb(at - ahead)
        for at in range(blocks + ahead):
            inner.descend(at)
            leaf.descend(at - ahead)
        for handle in leaf.sent + inner.sent:
            handle.wait()
    return x


class _TreeSum:
    """The sum of half of a buffer, in blocks, on its way up one tree and down again."""

    def __init__(self, blocks: Sequence[Tensor], tree: Tree, tag: int, group: Group):
        self.blocks, self.tree, self.tag, self.group = blocks, tree, tag, group
        self.sums = [piece.to(summing_dtype(piece.dtype)) for piece in blocks]
        self.arriving: list[Handle] = []
        self.sent: list[Handle] = []

    def climb(self, at: int) -> None:
        """Add the children's sums to block `at`, and send it to the parent; at the root it is finished. Ignores `at` out of range."""
        if not 0 <= at < len(self.blocks):
            return
        arrived = self.arriving or self._expect(at)
        self.arriving = self._expect(at + 1) if at + 1 < len(self.blocks) else []   # the next block travels while this one is added
        for handle in arrived:
            self.sums[at].add_(handle.wait())
        if self.tree.parent is None:
            self.blocks[at].copy_(self.sums[at])
        else:
            self._send(self.sums[at], self.tree.parent)

    def descend(self, at: int) -> None:
        """Receive the finished block `at` from the parent, and send it to the children. Ignores `at` out of range."""
        if not 0 <= at < len(self.blocks):
            return
        if self.tree.parent is not None:
            self.group.recv(self.blocks[at], self.tree.parent, tag=self.tag, label="double_tree_all_reduce: down")
        for child in self.tree.children:
            self._send(self.blocks[at], child)

    def _expect(self, at: int) -> list[Handle]:
        return [self.group.recv(torch.empty_like(self.sums[at]), child, tag=self.tag, label="double_tree_all_reduce: up", async_op=True)
                for child in self.tree.children]

    def _send(self, piece: Tensor, to: int) -> None:
        self.sent.append(self.group.send(piece, to, tag=self.tag, label="double_tree_all_reduce", async_op=True))


def double_tree(rank: int, p: int) -> tuple[Tree, Tree]:
    """The parent and children of `rank` in two binary trees. It has children in at most one of them.

    In an in-order tree every even place is a leaf. The second tree is the first one with odd and even places swapped: mirrored where
    p is even, shifted by one where p is odd.

    >>> double_tree(0, 4), double_tree(3, 4)
    ((Tree(parent=1, children=()), Tree(parent=None, children=(2,))), (Tree(parent=None, children=(1,)), Tree(parent=2, children=())))
    """
    place = {r: (p - 1 - r if p % 2 == 0 else (r - 1) % p) for r in range(p)}
    rank_at = {at: r for r, at in place.items()}
    second = _in_order_tree(place[rank], p)
    return _in_order_tree(rank, p), Tree(None if second.parent is None else rank_at[second.parent],
                                         tuple(rank_at[child] for child in second.children))


def _in_order_tree(place: int, p: int) -> Tree:
    """The binary tree whose places, read from left to right, are 0..p-1. Even places are leaves."""
    return Tree(_in_order_parent(place, p), tuple(child for child in range(p) if _in_order_parent(child, p) == place))


def _in_order_parent(place: int, p: int) -> int | None:
    """Counted from 1, a place whose bits end in k zeros is k levels above the leaves."""
    number = place + 1
    low = number & -number
    above = (number ^ low) | low << 1
    if above > p:   # there is no such place: this subtree is the right child of the place to its left
        above = number - low
    return above - 1 if above else None


def tree_all_reduce_bill(n: int, p: int, itemsize: int, rank: int = 0, *, wide: int = 1) -> Bill:
    """What `rank` sends in `tree_all_reduce`."""
    return tree_reduce_bill(n, p, itemsize, rank, wide=wide) + binomial_broadcast_bill(n, p, itemsize, rank)


def tree_reduce_bill(n: int, p: int, itemsize: int, rank: int = 0, *, wide: int = 1) -> Bill:
    """What `rank` sends in `tree_reduce`."""
    return Bill(sent=n * itemsize * wide, messages=1) if rank else Bill()


def double_tree_all_reduce_bill(n: int, p: int, itemsize: int, rank: int = 0, *, block: int = BLOCK, wide: int = 1) -> Bill:
    """What `rank` sends in `double_tree_all_reduce`."""
    total, halves = Bill(), chunk_sizes(n, 2)
    blocks = block_count(halves[0], itemsize, block)
    for half, tree in zip(halves, double_tree(rank, p)):
        up, down = int(tree.parent is not None), len(tree.children)
        total += Bill(sent=half * itemsize * (up * wide + down), messages=blocks * (up + down))
    return total


def tree_all_reduce_path(nbytes: int, p: int, *, wide: int = 1) -> Path:
    """What all wait for in `tree_all_reduce` of `nbytes`."""
    return tree_reduce_path(nbytes, p, wide=wide) + binomial_broadcast_path(nbytes, p)


def tree_reduce_path(nbytes: int, p: int, *, wide: int = 1) -> Path:
    """What all wait for in `tree_reduce` of `nbytes`."""
    rounds = (p - 1).bit_length()
    return Path(steps=rounds, bytes=rounds * nbytes * wide, added=rounds * nbytes * wide)


def double_tree_all_reduce_path(nbytes: int, p: int, *, block: int = BLOCK, wide: int = 1) -> Path:
    """An upper bound of what all wait for in `double_tree_all_reduce` of `nbytes`: a turn for each level and for each block. In a turn
    an inner rank receives two messages on the way up, or sends two on the way down."""
    half = -(-nbytes // 2)
    blocks = block_count(half, 1, block)
    turns = min(p - 1, 2) * (p.bit_length() - 1 + blocks)
    travelled = turns * -(-half // blocks)
    return Path(steps=2 * turns, bytes=travelled * (wide + 1), added=travelled * wide)
