"""All-to-all from send and receive: every rank has some rows for each other rank.

Pairwise: p-1 rounds. In each, every rank sends to one rank and receives from another. Nothing is sent twice. Two nodes of s
ranks exchange s*s messages each way; `comm/hierarchical.py` sends only one.
"""

from collections.abc import Sequence

from torch import Tensor

from rankloom.base.cost import Bill, Path
from rankloom.base.errors import ShapeMismatch
from rankloom.comm.messages import TAG
from rankloom.comm.operands import require_contiguous, require_rows
from rankloom.world.group import Group
from rankloom.world.transport.operands import dealt_rows, untouched


def pairwise_all_to_all(x: Tensor, group: Group, *, send_rows: Sequence[int] | None = None,
                        recv_rows: Sequence[int] | None = None, out: Tensor | None = None) -> Tensor:
    """Send the first send_rows[0] rows of `x` to rank 0, the next send_rows[1] to rank 1, and so on.

    x:      [sum(send_rows), ...] on each of p ranks -> [sum(recv_rows), ...]: the rows sent to this rank, in rank order
    rows:   recv_rows[r] must equal rank r's send_rows for this rank; if both are left out, shares are equal
    out:    where to put them; left out, a new tensor. If it shares memory with `x`, a copy of `x` is sent
    sent:   p-1 messages, all rows but this rank's own
    steps:  p-1
    raises: NotContiguous; ShapeMismatch when send_rows or recv_rows do not fit
    source: Thakur, Rabenseifner & Gropp 2005
    """
    rank, p, label = group.rank, group.size, "pairwise_all_to_all"
    given = require_rows(x, group, label)
    if send_rows is None and recv_rows is None and x.shape[0] % p == 0:
        send_rows = recv_rows = [x.shape[0] // p] * p
    send_rows, recv_rows = dealt_rows(x, send_rows, recv_rows, rank, p, group.where(label))
    shape = (sum(recv_rows), *x.shape[1:])
    out = x.new_empty(shape) if out is None else out
    into = require_contiguous(out, group, label)
    if out.shape != shape or out.dtype != x.dtype:
        raise ShapeMismatch(f"{group.where(label)}: out is {tuple(out.shape)} of {out.dtype}, expected {shape} of {x.dtype}")
    dealt, got = untouched(given, into).split(list(send_rows)), into.split(list(recv_rows))
    got[rank].copy_(dealt[rank])
    for hop in range(1, p):
        to, frm = (rank + hop) % p, (rank - hop) % p
        group.exchange(dealt[to], to, got[frm], frm, tag=TAG, label=label)
    return out


def pairwise_all_to_all_bill(n: int, p: int, itemsize: int, rank: int = 0, *, wide: int = 1) -> Bill:
    """What `rank` sends in `pairwise_all_to_all` of n rows, of `itemsize` bytes each, in equal shares."""
    return Bill(sent=n // p * (p - 1) * itemsize, messages=p - 1)


def pairwise_all_to_all_path(nbytes: int, p: int, *, wide: int = 1) -> Path:
    """What all wait for in `pairwise_all_to_all` of `nbytes` on each rank."""
    return Path(steps=p - 1, bytes=(p - 1) * -(-nbytes // p))
