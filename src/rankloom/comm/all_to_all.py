"""All-to-all from send and receive: every rank has other rows for every other.

Pairwise: p-1 rounds, in each of which every rank sends to one and receives from one. Nothing travels twice; but between two
nodes of s ranks each go s*s messages, which `comm/hierarchical.py` makes one.
"""

from collections.abc import Sequence

from torch import Tensor

from rankloom.base.cost import Bill, Path
from rankloom.base.errors import ShapeMismatch
from rankloom.comm.operands import require_contiguous, require_rows
from rankloom.world.group import Group


def pairwise_all_to_all(x: Tensor, group: Group, *, send_rows: Sequence[int] | None = None,
                        recv_rows: Sequence[int] | None = None, out: Tensor | None = None) -> Tensor:
    """Deal rows of `x` out: the first send_rows[0] to rank 0, the next send_rows[1] to rank 1, and so on.

    x:      [sum(send_rows), ...] on each of p ranks -> [sum(recv_rows), ...]: what all dealt to this rank, in rank order
    rows:   recv_rows[r] here is send_rows of this rank on rank r; both left out, shares are equal
    out:    where to put it; left out, a new tensor
    sent:   p-1 messages, all rows but this rank's own
    steps:  p-1
    raises: NotContiguous; ShapeMismatch when the rows cannot be dealt so
    source: Thakur, Rabenseifner & Gropp 2005
    """
    rank, p = group.rank, group.size
    require_rows(x, group, "pairwise_all_to_all")
    if send_rows is None and recv_rows is None and x.shape[0] % p == 0:
        send_rows = recv_rows = [x.shape[0] // p] * p
    if send_rows is None or recv_rows is None or not len(send_rows) == len(recv_rows) == p or sum(send_rows) != x.shape[0]:
        raise ShapeMismatch(f"{group.where('pairwise_all_to_all')}: {x.shape[0]} rows cannot be dealt as send_rows={send_rows}, "
                            f"recv_rows={recv_rows}; give both, one number for each of {p} ranks")
    shape = (sum(recv_rows), *x.shape[1:])
    out = require_contiguous(x.new_empty(shape) if out is None else out, group, "pairwise_all_to_all")
    if out.shape != shape or out.dtype != x.dtype:
        raise ShapeMismatch(f"{group.where('pairwise_all_to_all')}: out is {tuple(out.shape)} of {out.dtype}, "
                            f"expected {shape} of {x.dtype}")
    dealt, got = x.split(list(send_rows)), out.split(list(recv_rows))
    got[rank].copy_(dealt[rank])
    for hop in range(1, p):
        to, frm = (rank + hop) % p, (rank - hop) % p
        group.exchange(dealt[to], to, got[frm], frm, label="pairwise_all_to_all")
    return out


def pairwise_all_to_all_bill(n: int, p: int, itemsize: int, rank: int = 0, *, wide: int = 1) -> Bill:
    """What `rank` sends in `pairwise_all_to_all` of n rows, of `itemsize` bytes each, in equal shares."""
    return Bill(sent=n // p * (p - 1) * itemsize, messages=p - 1)


def pairwise_all_to_all_path(nbytes: int, p: int, *, wide: int = 1) -> Path:
    """What all wait for in `pairwise_all_to_all` of `nbytes` on each rank."""
    return Path(steps=p - 1, bytes=(p - 1) * -(-nbytes // p))
