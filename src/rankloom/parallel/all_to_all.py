"""A differentiable all-to-all: the rows of a tensor go to the ranks of a group, in uneven shares."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rankloom.base.cost import Bill
from rankloom.world.group import Group


def deal_rows(x: Tensor, group: Group, send_rows: Sequence[int], recv_rows: Sequence[int], label: str) -> Tensor:
    """The first send_rows[0] rows of `x` go to rank 0, the next send_rows[1] to rank 1, and so on; gradients go back the same way.

    x:      [sum(send_rows), ...] -> [sum(recv_rows), ...], the rows for this rank, in rank order of their senders
    rows:   recv_rows[r] here must equal send_rows[this rank] on rank r
    sent:   p-1 messages, all rows but this rank's own; backward, all received rows but its own
    raises: ShapeMismatch when the numbers do not fit
    """
    dealt: Tensor = _DealRows.apply(x, group, list(send_rows), list(recv_rows), label)   # type: ignore[no-untyped-call]
    return dealt


def deal_rows_bill(send_rows: Sequence[int], row_bytes: int, rank: int) -> Bill:
    """What `rank` sends in `deal_rows`, one way."""
    return Bill((sum(send_rows) - send_rows[rank]) * row_bytes, len(send_rows) - 1)


class _DealRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, send_rows: list[int], recv_rows: list[int], label: str) -> Tensor:
        ctx.plan = group, send_rows, recv_rows, label
        dealt: Tensor = group.all_to_all(x.contiguous(), send_rows=send_rows, recv_rows=recv_rows, label=label)
        return dealt

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, send_rows, recv_rows, label = ctx.plan
        back = group.all_to_all(grad.contiguous(), send_rows=recv_rows, recv_rows=send_rows, label=f"{label}: gradient")
        return back, None, None, None, None
