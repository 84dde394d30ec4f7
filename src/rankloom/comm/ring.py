"""Ring all-reduce from send and receive.

The buffer is cut in p chunks. Each chunk travels once around the ring while every rank adds its own part
(reduce-scatter), then once more, finished, so that all can copy it (all-gather). Every rank sends and
receives in every hop, so no link is idle and no rank is a bottleneck.
"""

import torch
from torch import Tensor

from rankloom.base.cost import Bill
from rankloom.base.errors import NotContiguous
from rankloom.world.group import Group


def ring_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum `x` over the group, in place. Every rank ends with the same bits.

    x:      any shape of n elements, contiguous, the same on each of p ranks; p need not divide n
    sent:   2(p-1) messages, 2n(p-1)/p elements per rank: nearly independent of p
    raises: NotContiguous
    source: Patarasuk & Yuan 2009; Baidu 2017
    """
    rank, p = group.rank, group.size
    if not x.is_contiguous():
        raise NotContiguous(f"rank {rank}: ring_all_reduce of a tensor with strides {x.stride()}; pass x.contiguous()")
    if p == 1:
        return x
    chunks = x.view(-1).tensor_split(p)
    inbox = torch.empty_like(chunks[0])   # the first chunks are the longest

    for hop in range(p - 1):   # reduce-scatter: rank r ends with the full sum of chunk r+1
        mine = chunks[(rank - hop - 1) % p]
        mine.add_(_shift(chunks[(rank - hop) % p], inbox[: mine.numel()], group))
    for hop in range(p - 1):   # all-gather: the finished chunks go once around
        _shift(chunks[(rank - hop + 1) % p], chunks[(rank - hop) % p], group)
    return x


def _shift(out: Tensor, into: Tensor, group: Group) -> Tensor:
    """Send `out` to the right neighbour while receiving `into` from the left one."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return group.exchange(out, right, into, left, label="ring_all_reduce")


def ring_all_reduce_bill(n: int, p: int, itemsize: int, rank: int = 0) -> Bill:
    """What `rank` sends in `ring_all_reduce`. Where p does not divide n, the first n % p chunks are one longer."""
    sizes = [n // p + (chunk < n % p) for chunk in range(p)]
    sent = [sizes[(rank - hop) % p] for hop in range(p - 1)] + [sizes[(rank - hop + 1) % p] for hop in range(p - 1)]
    return Bill(sent=sum(sent) * itemsize, messages=2 * (p - 1))
