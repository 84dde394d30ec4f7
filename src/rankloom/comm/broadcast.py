"""Broadcast from send and receive: along a binomial tree for short buffers, down a chain in blocks for long ones.

Tree: the number of ranks that have the buffer doubles in every round, so the last one waits for log2 p messages of the whole
buffer. Chain: every rank sends one block on while it receives the next. All links work at once, and a long buffer takes
little more than sending it once, on any number of ranks. But the first block must pass p-1 ranks.
"""

from dataclasses import dataclass

from torch import Tensor

from rankloom.base.cost import Bill, Path
from rankloom.base.errors import ConfigError
from rankloom.comm.messages import TAG
from rankloom.comm.operands import require_contiguous
from rankloom.world.group import Group
from rankloom.world.transport.operands import expect_rank

BLOCK = 1 << 18   # bytes: large beside the fixed cost of a message, small beside a buffer worth cutting


@dataclass(frozen=True, slots=True)
class Tree:
    """One rank's neighbours in a tree: sums go up to the parent, results come down to the children."""

    parent: int | None
    children: tuple[int, ...]


def binomial_tree(rank: int, p: int, root: int = 0) -> Tree:
    """Number the ranks from the root: a rank's parent is the rank without its lowest set bit. Children with small subtrees come first.

    >>> binomial_tree(0, 8), binomial_tree(6, 8)
    (Tree(parent=None, children=(1, 2, 4)), Tree(parent=4, children=(7,)))
    """
    place = (rank - root) % p
    low = place & -place or 1 << p.bit_length()
    children = [place + (1 << k) for k in range(low.bit_length() - 1) if place + (1 << k) < p]
    return Tree((place - low + root) % p if place else None, tuple((child + root) % p for child in children))


def binomial_broadcast(x: Tensor, group: Group, root: int = 0) -> Tensor:
    """Overwrite `x` on every rank with rank `root`'s.

    x:      any shape, contiguous, the same shape and dtype on each of p ranks
    sent:   the whole buffer to each child in the tree; log2 p messages from the root
    steps:  log2 p, rounded up
    raises: NotContiguous; ConfigError when there is no such root
    source: Johnsson & Ho 1989; Thakur, Rabenseifner & Gropp 2005
    """
    require_contiguous(x, group, "binomial_broadcast")
    expect_rank(root, group.size, group.where("root"))   # a rank of the world would else count as some rank of a smaller group
    tree = binomial_tree(group.rank, group.size, root)
    if tree.parent is not None:
        group.recv(x, tree.parent, tag=TAG, label="binomial_broadcast")
    for child in reversed(tree.children):   # the largest subtree has the longest way to go
        group.send(x, child, tag=TAG, label="binomial_broadcast")
    return x


def chain_broadcast(x: Tensor, group: Group, root: int = 0, *, block: int = BLOCK) -> Tensor:
    """Overwrite `x` on every rank with rank `root`'s. Each rank passes it on to the next, block by block.

    x:      any shape, contiguous, the same shape and dtype on each of p ranks
    block:  bytes of a block; the same on each rank
    sent:   b messages, one for each block, n elements in all; the last rank of the chain sends nothing
    steps:  p - 2 + b
    raises: NotContiguous; ConfigError when there is no such root, and for a block below 1
    source: Watts & van de Geijn 1995
    """
    flat = require_contiguous(x, group, "chain_broadcast").view(-1)
    expect_rank(root, group.size, group.where("root"))
    place = (group.rank - root) % group.size
    before, behind = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    sent = []
    for piece in flat.tensor_split(block_count(x.numel(), x.itemsize, block)):
        if place > 0:
            group.recv(piece, before, tag=TAG, label="chain_broadcast")
        if place < group.size - 1:
            sent.append(group.send(piece, behind, tag=TAG, label="chain_broadcast", async_op=True))
    for handle in sent:
        handle.wait()
    return x


def block_count(n: int, itemsize: int, block: int) -> int:
    """How many blocks of at most `block` bytes n elements make: at least 1, and a block has at least one element. raises: ConfigError"""
    if block < 1:
        raise ConfigError(f"block={block!r}, expected a number of bytes, 1 or more")
    return max(min(-(-n * itemsize // block), n), 1)


def binomial_broadcast_bill(n: int, p: int, itemsize: int, rank: int = 0, *, root: int = 0, wide: int = 1) -> Bill:
    """What `rank` sends in `binomial_broadcast`."""
    messages = len(binomial_tree(rank, p, root).children)
    return Bill(sent=messages * n * itemsize, messages=messages)


def chain_broadcast_bill(n: int, p: int, itemsize: int, rank: int = 0, *, root: int = 0, block: int = BLOCK, wide: int = 1) -> Bill:
    """What `rank` sends in `chain_broadcast`."""
    if (rank - root) % p == p - 1:
        return Bill()
    return Bill(sent=n * itemsize, messages=block_count(n, itemsize, block))


def binomial_broadcast_path(nbytes: int, p: int, *, wide: int = 1) -> Path:
    """What all wait for in `binomial_broadcast` of `nbytes`."""
    rounds = (p - 1).bit_length()
    return Path(steps=rounds, bytes=rounds * nbytes)


def chain_broadcast_path(nbytes: int, p: int, *, block: int = BLOCK, wide: int = 1) -> Path:
    """What all wait for in `chain_broadcast` of `nbytes`: the first block passes p-1 links, the others follow it."""
    if p == 1:
        return Path()
    blocks = block_count(nbytes, 1, block)
    steps = p - 2 + blocks
    return Path(steps=steps, bytes=steps * -(-nbytes // blocks))
