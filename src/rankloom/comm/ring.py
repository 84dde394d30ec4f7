"""Ring all-reduce, and its two halves, from send and receive.

The buffer is cut in p chunks. Each chunk travels around the ring once, and every rank adds its own part (reduce-scatter).
Then the finished chunk travels around once more, and every rank copies it (all-gather). Every rank sends and receives in
every hop, so no link is idle and no rank is a bottleneck.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rankloom.base.cost import Bill, Path
from rankloom.base.errors import ShapeMismatch
from rankloom.base.shares import chunk_sizes
from rankloom.comm.messages import TAG
from rankloom.comm.operands import require_contiguous, require_rows, summand, summing_dtype
from rankloom.world.group import Group
from rankloom.world.transport.operands import untouched


def ring_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum `x` over the group, in place. Every rank ends with the same bits.

    x:      any shape of n elements, contiguous, the same on each of p ranks; p need not divide n
    sent:   2(p-1) messages, 2n(p-1)/p elements per rank: nearly independent of p; the first half in fp32 where x is narrower
    steps:  2(p-1)
    raises: NotContiguous; ConfigError for bool
    source: Patarasuk & Yuan 2009; Baidu 2017
    """
    rank, p = group.rank, group.size
    chunks = summand(x, group, "ring_all_reduce").tensor_split(p)
    if p > 1:
        finished = (rank + 1) % p
        chunks[finished].copy_(_reduce_around(chunks, group, "ring_all_reduce"))
        _gather_around(chunks, finished, group, "ring_all_reduce")
    return x


def ring_reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks of this rank's rows of `x`, which is not changed.

    x:      [p*n, ...] on each of p ranks -> [n, ...]; where p does not divide the rows, rank r gets those of tensor_split
    sent:   p-1 messages, n(p-1) rows per rank; in fp32 where x is narrower
    steps:  p-1
    raises: NotContiguous; ShapeMismatch for a tensor without rows; ConfigError for bool
    source: Patarasuk & Yuan 2009
    """
    rank, p = group.rank, group.size
    rows = require_rows(x, group, "ring_reduce_scatter").tensor_split(p)
    flat = [summand(piece, group, "ring_reduce_scatter") for piece in rows]
    # The ring ends with chunk r+1 on rank r. Piece r must end there, so chunk r+1 is piece r.
    total = _reduce_around([flat[-1], *flat[:-1]], group, "ring_reduce_scatter") if p > 1 else flat[0].clone()
    return total.to(x.dtype).view(rows[rank].shape)


def ring_all_gather(x: Tensor, group: Group, *, out: Tensor | None = None) -> Tensor:
    """All ranks' `x` in rank order.

    x:      [n, ...] on each of p ranks -> [p*n, ...]
    out:    where to put them. Its rows may be uneven: then `x` has the rows that tensor_split gives this rank. `x` may be a view of it
    sent:   p-1 messages, n(p-1) rows per rank
    steps:  p-1
    raises: NotContiguous; ShapeMismatch when `x` is not this rank's piece of `out`
    source: Patarasuk & Yuan 2009
    """
    pieces, out = begin_all_gather(x, group, out, "ring_all_gather")
    _gather_around(pieces, group.rank, group, "ring_all_gather")
    return out


def begin_all_gather(x: Tensor, group: Group, out: Tensor | None, label: str) -> tuple[tuple[Tensor, ...], Tensor]:
    """Check and allocate: the pieces of an all-gather's result, this rank's filled in, and the result. raises: see `ring_all_gather`"""
    given = require_rows(x, group, label)
    if out is None:
        out = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    pieces = require_contiguous(out, group, label).tensor_split(group.size)
    mine = pieces[group.rank]
    if mine.shape != x.shape or mine.dtype != x.dtype:
        raise ShapeMismatch(f"{group.where(label)}: x is {tuple(x.shape)} {x.dtype}, expected {tuple(mine.shape)} {mine.dtype}: "
                            f"this rank's piece of out {tuple(out.shape)} as tensor_split cuts it")
    mine.copy_(untouched(given, mine, 0))
    return pieces, out


def _reduce_around(chunks: Sequence[Tensor], group: Group, label: str) -> Tensor:
    """The full sum of chunk rank+1, in the dtype of sums. Does not change the chunks."""
    rank, p, dtype = group.rank, group.size, summing_dtype(chunks[0].dtype)
    longest = max(chunk.numel() for chunk in chunks)
    inboxes = [torch.empty(longest, dtype=dtype, device=chunks[0].device) for _ in range(2)]   # one fills while the other is sent
    travelling = chunks[rank].to(dtype)
    for hop in range(p - 1):
        mine = chunks[(rank - hop - 1) % p]
        travelling = _shift(travelling, inboxes[hop % 2][: mine.numel()], group, label).add_(mine.to(dtype))
    return travelling


def _gather_around(chunks: Sequence[Tensor], first: int, group: Group, label: str) -> None:
    """Pass finished chunks on until every rank has all. This rank sends chunk `first` first, its left neighbour chunk `first - 1`."""
    for hop in range(group.size - 1):
        _shift(chunks[(first - hop) % group.size], chunks[(first - hop - 1) % group.size], group, label)


def _shift(out: Tensor, into: Tensor, group: Group, label: str) -> Tensor:
    """Send `out` to the right neighbour while receiving `into` from the left one."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return group.exchange(out, right, into, left, tag=TAG, label=label)


def _passed_on(n: int, p: int, first: int, hops: int) -> int:
    """Elements that a rank sends in `hops` hops that begin with chunk `first`."""
    sizes = chunk_sizes(n, p)
    return sum(sizes[(first - hop) % p] for hop in range(hops))


def ring_all_reduce_bill(n: int, p: int, itemsize: int, rank: int = 0, *, wide: int = 1) -> Bill:
    """What `rank` sends in `ring_all_reduce`. Where p does not divide n, the first n % p chunks are one longer."""
    sent = _passed_on(n, p, rank, p - 1) * wide + _passed_on(n, p, rank + 1, p - 1)
    return Bill(sent=sent * itemsize, messages=2 * (p - 1))


def ring_reduce_scatter_bill(n: int, p: int, itemsize: int, rank: int = 0, *, wide: int = 1) -> Bill:
    """What `rank` sends in `ring_reduce_scatter` of n rows in all, of `itemsize` bytes each."""
    return Bill(sent=_passed_on(n, p, rank - 1, p - 1) * itemsize * wide, messages=p - 1)


def ring_all_gather_bill(n: int, p: int, itemsize: int, rank: int = 0, *, wide: int = 1) -> Bill:
    """What `rank` sends in `ring_all_gather` of n rows in all, of `itemsize` bytes each."""
    return Bill(sent=_passed_on(n, p, rank, p - 1) * itemsize, messages=p - 1)


def ring_all_reduce_path(nbytes: int, p: int, *, wide: int = 1) -> Path:
    """What all wait for in `ring_all_reduce` of `nbytes`."""
    return ring_reduce_scatter_path(nbytes, p, wide=wide) + ring_all_gather_path(nbytes, p)


def ring_reduce_scatter_path(nbytes: int, p: int, *, wide: int = 1) -> Path:
    """What all wait for in `ring_reduce_scatter` of `nbytes` on each rank."""
    travelled = (p - 1) * -(-nbytes // p) * wide
    return Path(steps=p - 1, bytes=travelled, added=travelled)


def ring_all_gather_path(nbytes: int, p: int, *, wide: int = 1) -> Path:
    """What all wait for in `ring_all_gather` to `nbytes` in all."""
    return Path(steps=p - 1, bytes=(p - 1) * -(-nbytes // p))
