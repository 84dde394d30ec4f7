"""All-reduce through a root: the simplest algorithm, the baseline for the others.

Every rank sends its whole buffer to rank 0, which adds them in rank order and sends the sum back. All bytes pass the root's
link, so the time grows with the number of ranks. For two or three ranks and few bytes it is the fastest.
"""

import torch
from torch import Tensor

from rankloom.base.cost import Bill, Path
from rankloom.comm.messages import TAG
from rankloom.comm.operands import summand, summing_dtype
from rankloom.world.group import Group


def naive_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum `x` over the group, in place, in rank order. Every rank ends with the same bits.

    x:      any shape of n elements, contiguous, the same on each of p ranks
    sent:   the root p-1 messages, n(p-1) elements; every other rank 1 message, n elements
    steps:  2(p-1)
    raises: NotContiguous; ConfigError for bool
    """
    flat = summand(x, group, "naive_all_reduce")
    if group.rank > 0:
        group.send(flat, 0, tag=TAG, label="naive_all_reduce: gather")
        group.recv(flat, 0, tag=TAG, label="naive_all_reduce: broadcast")
        return x
    sums, inbox = flat.to(summing_dtype(x.dtype)), torch.empty_like(flat)
    others = range(1, group.size)
    for other in others:
        sums.add_(group.recv(inbox, other, tag=TAG, label="naive_all_reduce: gather").to(sums.dtype))
    flat.copy_(sums)
    for handle in [group.send(flat, other, tag=TAG, label="naive_all_reduce: broadcast", async_op=True) for other in others]:
        handle.wait()
    return x


def naive_all_reduce_bill(n: int, p: int, itemsize: int, rank: int = 0, *, wide: int = 1) -> Bill:
    """What `rank` sends in `naive_all_reduce`. No partial sum travels, so `wide` costs nothing."""
    messages = p - 1 if rank == 0 else 1
    return Bill(sent=messages * n * itemsize, messages=messages)


def naive_all_reduce_path(nbytes: int, p: int, *, wide: int = 1) -> Path:
    """What all wait for in `naive_all_reduce` of `nbytes`: the root's link, in and out."""
    return Path(steps=2 * (p - 1), bytes=2 * (p - 1) * nbytes, added=(p - 1) * nbytes * wide)
