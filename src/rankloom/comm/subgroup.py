"""A subgroup: some ranks of a group as a group of their own, renumbered, with the connection and ledger of the whole group.

So every algorithm of this folder also runs on the ranks of one node, or on one rank of each node, without another process
group. The collectives of a subgroup are made of messages: ring, tree and pairwise.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rankloom.base.errors import ConfigError
from rankloom.comm.all_to_all import pairwise_all_to_all
from rankloom.comm.broadcast import binomial_broadcast
from rankloom.comm.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from rankloom.world.group import Group, Handle
from rankloom.world.pairwise import in_order
from rankloom.world.transport.operands import completed, expect_operand, is_narrow, reduction_of


class Subgroup(Group):
    """The ranks `members` of `whole`, in this order. Each of them makes one; no other rank does.

    It has the collectives of `Group`, but they block: with `async_op=True` they return a finished handle.
    """

    whole: Group
    members: tuple[int, ...]

    def __init__(self, whole: Group, members: Sequence[int]):
        if len(set(members)) < len(members) or whole.rank not in members or not set(members) <= set(range(whole.size)):
            raise ConfigError(f"{whole.where('part')}: {tuple(members)} is no part of ranks 0..{whole.size - 1} "
                              f"with rank {whole.rank} in it; name each member once")
        super().__init__(None, members.index(whole.rank), [whole.ranks[member] for member in members],
                         name=f"{whole.name}, ranks {tuple(members)}", device=whole.device, timeout=whole.timeout, one_host=whole.one_host,
                         topology=whole.topology.among(members))
        self.ledger, self.whole, self.members = whole.ledger, whole, tuple(members)
        if isinstance(whole, Subgroup):
            self.whole, self.members = whole.whole, tuple(whole.members[member] for member in members)

    @property
    def in_order(self) -> bool:
        """As messages of the whole group between these ranks."""
        return in_order(self.whole._process_group, self.device, self.members)

    def send(self, x: Tensor, to: int, *, tag: int = 0, label: str = "", async_op: bool = False) -> Any:
        """Send `x` to rank `to` of this subgroup."""
        return self.whole.send(x, self.members[self._peer(to)], tag=tag, label=label, async_op=async_op)

    def recv(self, into: Tensor, frm: int, *, tag: int = 0, label: str = "", async_op: bool = False) -> Any:
        """Receive `into` from rank `frm` of this subgroup."""
        return self.whole.recv(into, self.members[self._peer(frm)], tag=tag, label=label, async_op=async_op)

    def exchange(self, out: Tensor, to: int, into: Tensor, frm: int, *, tag: int = 0, label: str = "", async_op: bool = False) -> Any:
        """Send `out` to one rank while receiving `into` from another (or the same)."""
        to, frm = self.members[self._peer(to)], self.members[self._peer(frm)]
        return self.whole.exchange(out, to, into, frm, tag=tag, label=label, async_op=async_op)

    def all_reduce(self, x: Tensor, op: str = "sum", *, label: str = "", async_op: bool = False) -> Any:
        """Sum or mean of `x` over the subgroup, in place, by the ring."""
        self._expect_sum(op, x, label or "all_reduce")
        if self._is_widened(x, op):
            x.detach().copy_(self.all_reduce(x.detach().float(), op, label=label))
            return self._done(x, label, async_op)
        return self._done(completed(ring_all_reduce(x, self), op, self.size), label, async_op)

    def broadcast(self, x: Tensor, root: int = 0, *, label: str = "", async_op: bool = False) -> Any:
        """Overwrite `x` on every rank with rank `root`'s, along a binomial tree."""
        return self._done(binomial_broadcast(x, self, self._peer(root)), label, async_op)

    def all_gather(self, x: Tensor, *, out: Tensor | None = None, label: str = "", async_op: bool = False) -> Any:
        """All ranks' `x` in rank order, by the ring. [n, ...] on each -> [p*n, ...]"""
        expect_operand(x, self.device, self.where(label or "all_gather"), alone=self.size == 1)
        rows = x.unsqueeze(0) if x.dim() == 0 else x
        whole = self._output(out, rows, (rows.shape[0] * self.size, *rows.shape[1:]), label or "all_gather")
        return self._done(ring_all_gather(rows, self, out=whole) if self.size > 1 else whole, label, async_op)

    def reduce_scatter(self, x: Tensor, op: str = "sum", *, out: Tensor | None = None, scratch: Tensor | None = None, label: str = "",
                       async_op: bool = False) -> Any:
        """Sum or mean of this rank's slice of `x`, by the ring; `scratch` is not used. [p*n, ...] on each -> [n, ...]"""
        self._expect_sum(op, x, label or "reduce_scatter")
        mine = self._output(out, x, (self._equal_rows(x, label or "reduce_scatter"), *x.shape[1:]), label or "reduce_scatter")
        if self._is_widened(x, op):
            mine.detach().copy_(self.reduce_scatter(x.detach().float(), op, label=label))
        elif self.size > 1:
            total = ring_reduce_scatter(x, self)
            mine = total if out is None else mine.copy_(total)
        return self._done(completed(mine, op, self.size), label, async_op)

    def all_to_all(self, x: Tensor, *, send_rows: Sequence[int] | None = None, recv_rows: Sequence[int] | None = None,
                   out: Tensor | None = None, label: str = "", async_op: bool = False) -> Any:
        """Send rows of `x` to every rank, pairwise; returns the rows sent to this rank."""
        dealt = pairwise_all_to_all(x, self, send_rows=send_rows, recv_rows=recv_rows, out=out)
        return self._done(dealt, label, async_op)

    def _is_widened(self, x: Tensor, op: str) -> bool:
        """Whether to reduce in fp32: the sum of a narrow dtype would be rounded, or infinite, before it is divided."""
        return op == "mean" and self.size > 1 and is_narrow(x.dtype)

    def _expect_sum(self, op: str, x: Tensor, label: str) -> None:
        if op not in ("sum", "mean"):
            raise ConfigError(f"{self.where(label)}: op {op!r} is not one of sum, mean; gather, then combine")
        reduction_of(op, x, self.device, self.where, label)

    def _done(self, result: Tensor, label: str, async_op: bool) -> Any:
        return Handle(self, label, (), lambda: result) if async_op else result
