"""Collectives on two levels: in shared memory inside a host, over TCP between hosts.

If all hosts have equally many ranks, those with the same place on their hosts form a team, and each team carries its
share between the hosts: all links are used at once. All-reduce: each rank gets its host's sum of one share (reduce-scatter
inside), its team adds these up in the order of the hosts, and all ranks of a host get all shares (all-gather inside). If
hosts differ in size, their first ranks are the only team, and its share is the whole. Long tensors go in windows: while
one window is between the hosts, the next is inside.

The order of additions depends neither on sizes nor on timing, and all ranks end with the same bits. 16-bit floats are
added in fp32, and rounded once, at the end. Data that is not reduced travels between two hosts once, directly to its destination.
hosts.py uses this file; position.py says who carries what; wire.py carries what goes between hosts.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch

from rankloom.base.topology import node_with
from rankloom.world.transport.arithmetic import HALVES
from rankloom.world.transport.call import DTYPES, EMPTY, OWN_LENGTHS, Call, Scratch, address_of, as_lanes, cut_in_units
from rankloom.world.transport.codes import (
    ABORTED,
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    AVG,
    BARRIER,
    BROADCAST,
    FINE,
    GATHER,
    MISMATCHED,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SUM,
    WRONG_LENGTH,
    status_of,
)
from rankloom.world.transport.lines import Message
from rankloom.world.transport.operands import BYTES, lengths_table
from rankloom.world.transport.position import Position
from rankloom.world.transport.wire import PART, Wire

WINDOW = 2 << 20   # bytes of one share
SMALL = 32 << 10   # bytes up to which a tensor is sent whole, in one step; as parts in two steps it would be fewer bytes
GRACE = 1.0        # seconds to wait for the reason of a break inside the host, from the ranks that know it
JOIN = (np.add, np.add, np.multiply, np.minimum, np.maximum, np.bitwise_and, np.bitwise_or, np.bitwise_xor)   # by operation
NUMPY = {dtype: torch.empty(0, dtype=dtype, device="cpu").numpy().dtype for dtype in DTYPES if dtype not in HALVES}


END = object()     # what `next` gives when a work has no more parts


class Broken(Exception):
    """The group broke during a call."""

    def __init__(self, why: int):
        super().__init__(why)
        self.why = why


class Levels:
    """The collectives of one rank.

    nodes: the ranks of each host
    link:  to the ranks of this host, in the order of its node; None if there is no other
    """

    def __init__(self, nodes: Sequence[Sequence[int]], rank: int, wire: Wire, link: Any):
        self.my, self._wire, self._link = Position(nodes, rank), wire, link
        self._scratch = Scratch()
        self._deadline = 0.0
        self._under_way: list[Message] = []

    def perform(self, call: Call) -> int:
        """Run one call. Returns why it failed, or FINE."""
        self._deadline = time.monotonic() + call.timeout
        with self._wire.breaking_when_interrupted(), np.errstate(all="ignore"):
            try:
                begun = self._begin(call)
                MAKE[call.kind](self, call)
                self._end(call, begun)
            except Broken as broken:
                return broken.why
            finally:
                self._wire.drop(self._under_way)
                self._under_way = []
        return FINE

    def _begin(self, call: Call) -> np.ndarray:
        """Compare this call with those of the other ranks of this host; the first rank tells the other hosts. Returns a row for each."""
        self._check(self._wire.begin_call(call.descriptor))
        lengths = call.lengths(self._wire.size) if call.kind in OWN_LENGTHS else []   # of others, the descriptor has the length
        mine = np.array([*call.descriptor, *lengths])
        rows = np.empty((len(self.my.node), mine.size), np.int64)
        # Rows have other lengths only if kinds differ.
        self._inside(ALL_GATHER, [mine.view(np.uint8)], list(rows.view(np.uint8)), wrong_length=MISMATCHED)
        if differs := [other for other, row in zip(self.my.node, rows) if tuple(row[:len(call.descriptor)]) != call.descriptor]:
            self._check(self._wire.break_group(differs[0], MISMATCHED))
        if self.my.place == 0:
            self._wire.tell_of_call(self.my.firsts, rows.ravel().tolist())
        return rows

    def _end(self, call: Call, begun: np.ndarray) -> None:
        """Check that all hosts have made the same call, and that each rank had what the others expected; if not, raise Broken on all."""
        self._settle()
        if self.my.place == 0:
            why, of_other_hosts = self._wire.hear_of_call(self.my.firsts, self._deadline)
            self._check(why)
            if call.kind in OWN_LENGTHS:
                self._compare_lengths([begun, *of_other_hosts])
        self._inside(BARRIER, [EMPTY], [EMPTY])

    def _compare_lengths(self, rows_of_hosts: Sequence[Any]) -> None:
        """All first ranks of hosts check all lengths, so all find the same fault, or none. rows_of_hosts: of this host first"""
        p = self._wire.size
        others = [node for node in self.my.nodes if node is not self.my.node]
        lengths = np.empty((p, 2, p), np.int64)
        for node, rows in zip([self.my.node, *others], rows_of_hosts):
            lengths[list(node)] = np.reshape(rows, (len(node), -1))[:, -2 * p:].reshape(-1, 2, p)
        has, expects = lengths[:, 0].T, lengths[:, 1]   # [to, from]
        if (wrong := (expects >= 0) & (expects != has)).any():
            self._check(self._wire.break_group(int(wrong.any(axis=0).argmax()), WRONG_LENGTH))

    # ------------------------------------------------------------------ sums

    def all_reduce(self, call: Call) -> None:
        """All ranks get the sum."""
        x, out = call.inputs[0], call.outputs[0]
        step = WINDOW * (len(self.my.node) if self.my.is_even else 1)
        _in_turns(self._all_reduce(call, x[at:at + step], out[at:at + step]) for at in range(0, max(x.size, 1), step))

    def _all_reduce(self, call: Call, x: np.ndarray, out: np.ndarray) -> Iterator[None]:
        """One window, in three parts: see `_in_turns`."""
        sums = self._sum_inside(call, self._shares(x, call.dtype.itemsize))
        shares = self._shares(out, call.dtype.itemsize)
        if self.my.team:
            yield from self._sum_of_team(call, sums, shares[self.my.place], is_small=x.size <= SMALL)
        else:
            yield from (None, None)
        self._inside(ALL_GATHER, [shares[self.my.place]], shares)

    def _sum_of_team(self, call: Call, sums: np.ndarray, out: np.ndarray, *, is_small: bool) -> Iterator[None]:
        """All ranks of the team get the sum of what they have, in three parts."""
        m = len(self.my.team)
        whole = is_small or (m == 2 and sums.itemsize == call.dtype.itemsize)   # two ranks send as many bytes either way
        parts = [sums] * m if whole else cut_in_units(sums, m)
        pieces, moving = self._receive_like(parts[self.my.here], self.my.team)
        moving += [self._send(other, part) for other, part in zip(self.my.team, parts)]
        yield
        if whole:   # nothing will travel back, so one more window may be in flight
            yield
        parts = [out] * m if whole else cut_in_units(out, m, call.dtype.itemsize)
        self._total(call, pieces, moving, parts[self.my.here])
        if not whole:
            moving = [self._receive(other, part) for other, part in zip(self.my.team, parts)]
            moving += [self._send(other, parts[self.my.here]) for other in self.my.team]
            yield
            self._settle(moving)

    def reduce(self, call: Call) -> None:
        """The root gets the sum."""
        there = node_with(self.my.nodes, call.root)
        sums = self._sum_inside(call, self._shares(call.inputs[0], call.dtype.itemsize))
        if there != self.my.here:
            if self.my.team:
                self._send(self.my.team[there], sums)
            return
        mine = self._scratch.take(sums.size * call.dtype.itemsize)
        if self.my.team:
            self._total(call, *self._receive_like(sums, self.my.team), mine)
        shares = self._shares(call.outputs[0], call.dtype.itemsize) if self.my.rank == call.root else []
        self._inside(GATHER, [mine], shares, root=self.my.node.index(call.root))

    def reduce_scatter(self, call: Call) -> None:
        """Each rank gets the sum of its lane. On each host, one rank has added up that lane, and sends it."""
        for ranks in self.my.rounds:
            sums = self._sum_inside(call, [EMPTY if to is None else call.inputs[to] for to in ranks])
            if (to := ranks[self.my.place]) == self.my.rank:
                lane = self._receive_like(sums, self.my.deputies)
            elif to is not None:
                self._send(to, sums)
        self._total(call, *lane, call.outputs[0])

    def _sum_inside(self, call: Call, lanes: Sequence[np.ndarray]) -> np.ndarray:
        """The sum over this host of the lane at this rank's place; as numbers, 16-bit floats as fp32."""
        mine = lanes[self.my.place]
        if self._link is None:
            return self._widen(call, mine)
        if call.dtype in HALVES:
            pieces = np.split(self._scratch.take(len(self.my.node) * mine.size), len(self.my.node))
            self._inside(ALL_TO_ALL, lanes, pieces)
            return _join(call.op, [self._widen(call, piece) for piece in pieces])
        total = self._scratch.take(mine.size)
        self._inside(REDUCE_SCATTER, lanes, [total], number=call.descriptor.number, op=SUM if call.op == AVG else call.op)
        return self._widen(call, total)

    def _total(self, call: Call, pieces: Sequence[np.ndarray], moving: Sequence[Message | None], out: np.ndarray) -> None:
        """Write the sum of the pieces of all hosts, once they have arrived, to `out`, in the call's number type."""
        self._settle(moving)
        home = None if call.dtype in HALVES else out.view(NUMPY[call.dtype])
        received = pieces[1 if self.my.here == 0 else 0]   # this rank's own may be the caller's input
        total = _join(call.op, pieces, home if len(pieces) == 2 else received)
        if call.op == AVG and total.dtype.kind == "f":   # whole numbers are divided where torch has them
            np.divide(total, self._wire.size, out=total)
        if home is None:
            torch.from_numpy(out.view(np.int16)).view(call.dtype).copy_(torch.from_numpy(total))
        elif home is not total:
            home[:] = total

    def _widen(self, call: Call, x: np.ndarray) -> np.ndarray:
        """As numbers that can be added: 16-bit floats in fp32."""
        if call.dtype not in HALVES:
            return x.view(NUMPY[call.dtype])
        wide = self._scratch.take(2 * x.size).view(np.float32)
        torch.from_numpy(wide).copy_(torch.from_numpy(x.view(np.int16)).view(call.dtype))
        return wide

    # ------------------------------------------------------------------ collectives that only copy

    def broadcast(self, call: Call) -> None:
        """The root's host gets it first. Each share then travels in parts, one to each other host, which exchange their parts."""
        x = call.inputs[0] if call.inputs else call.outputs[0]
        there = node_with(self.my.nodes, call.root)
        if there == self.my.here:
            self._inside(BROADCAST, [x], [x], root=self.my.node.index(call.root))
        shares = self._shares(x)
        others = [at for at in range(len(self.my.nodes)) if at != there]
        whole = x.size <= SMALL
        parts = [shares[self.my.place]] * len(others) if whole else cut_in_units(shares[self.my.place], len(others))
        if self.my.team and there == self.my.here:
            for at, part in zip(others, parts):
                self._send(self.my.team[at], part)
        elif self.my.team:
            mine = parts[others.index(self.my.here)]
            coming = [self._receive(self.my.team[there], mine)]
            trade = [] if whole else [(self.my.team[at], part) for at, part in zip(others, parts)]
            coming += [self._receive(other, part) for other, part in trade]
            self._settle(coming[:1])
            for other, _ in trade:
                self._send(other, mine)
            self._settle(coming)
        if there != self.my.here:
            self._inside(ALL_GATHER, [shares[self.my.place]], shares)

    def all_gather(self, call: Call) -> None:
        """Each lane travels to one rank of each other host, and from there to the other ranks of that host."""
        x, lanes = call.inputs[0], call.outputs
        for deputy in self.my.deputies:
            self._send(deputy, x)
        coming = [self._receive(frm, lanes[frm]) for ranks in self.my.rounds[1:] if (frm := ranks[self.my.place]) is not None]
        for at, ranks in enumerate(self.my.rounds):
            if at == 1:   # the first round is for lanes of this host only
                self._settle(coming)
            frm = ranks[self.my.place]
            mine = x if at == 0 else EMPTY if frm is None else lanes[frm]
            self._inside(ALL_GATHER, [mine], [EMPTY if frm is None else lanes[frm] for frm in ranks])

    def gather(self, call: Call) -> None:
        """Every lane goes directly to the root."""
        if call.root not in self.my.node:
            self._send(call.root, call.inputs[0])
            return
        if self.my.rank == call.root:
            for frm in self.my.elsewhere:
                self._receive(frm, call.outputs[frm])
        lanes = [call.outputs[frm] for frm in self.my.node] if self.my.rank == call.root else []
        self._inside(GATHER, call.inputs, lanes, root=self.my.node.index(call.root))

    def scatter(self, call: Call) -> None:
        """Every lane comes directly from the root."""
        if call.root not in self.my.node:
            self._receive(call.root, call.outputs[0])
            return
        if self.my.rank == call.root:
            for to in self.my.elsewhere:
                self._send(to, call.inputs[to])
        lanes = [call.inputs[to] for to in self.my.node] if self.my.rank == call.root else []
        self._inside(SCATTER, lanes, call.outputs, root=self.my.node.index(call.root))

    def all_to_all(self, call: Call) -> None:
        """Every lane goes directly to its rank."""
        for other in self.my.elsewhere:
            self._receive(other, call.outputs[other])
            self._send(other, call.inputs[other])
        self._inside(ALL_TO_ALL, [call.inputs[to] for to in self.my.node], [call.outputs[frm] for frm in self.my.node])

    def barrier(self, call: Call) -> None:
        """Nothing to do: `perform` makes sure that a call has begun on all ranks before it ends on any."""

    # ------------------------------------------------------------------ between hosts, and inside

    def _shares(self, x: np.ndarray, unit: int = 1) -> list[np.ndarray]:
        """The shares of `x` that the teams carry between the hosts, by place."""
        return cut_in_units(x, len(self.my.node), unit) if self.my.is_even else [x] + [EMPTY] * (len(self.my.node) - 1)

    def _send(self, to: int, x: np.ndarray) -> Message | None:
        """Start to send, as part of this call. None if `to` is this rank."""
        return self._note(self._wire.send(PART, to, self._wire.call_number, x.view(np.uint8).data)) if to != self.my.rank else None

    def _receive(self, frm: int, into: np.ndarray) -> Message | None:
        return self._note(self._wire.receive(PART, frm, self._wire.call_number, into.view(np.uint8).data)) if frm != self.my.rank else None

    def _receive_like(self, mine: np.ndarray, ranks: Sequence[int]) -> tuple[list[np.ndarray], list[Message | None]]:
        """Start to receive an array like `mine` from each of `ranks`. Returns the arrays, with `mine` in its place, and the messages."""
        pieces = [mine if frm == self.my.rank else self._scratch.take(mine.nbytes).view(mine.dtype) for frm in ranks]
        return pieces, [self._receive(frm, piece) for frm, piece in zip(ranks, pieces)]

    def _note(self, m: Message) -> Message:
        self._under_way.append(m)
        return m

    def _settle(self, moving: Sequence[Message | None] | None = None) -> None:
        """Wait until these messages are done, by default all."""
        self._check(self._wire.wait([m for m in (self._under_way if moving is None else moving) if m], self._deadline))
        self._under_way = [m for m in self._under_way if not m.done]

    def _check(self, why: int) -> None:
        if why:
            raise Broken(why)

    def _inside(self, kind: int, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], *, number: int = BYTES,
                op: int = SUM, root: int = 0, wrong_length: int = WRONG_LENGTH) -> None:
        """A collective of the ranks of this host. wrong_length: the reason to report if their lengths do not fit"""
        if self._link is None:
            if inputs[0] is not outputs[0]:
                outputs[0][:] = inputs[0]
            return
        if kind in (BROADCAST, BARRIER):
            where: tuple[int, int, int | bytes] = address_of(inputs[0]), address_of(outputs[0]), inputs[0].nbytes
        else:
            source, *given = as_lanes(inputs, len(self.my.node))
            target, *taken = as_lanes(outputs, len(self.my.node))
            where = source, target, lengths_table(*given, *taken)
        if why := self._link.run(kind, number, op, root, *where, max(self._deadline - time.monotonic(), 1e-3)):
            raise Broken(self._why_inside(wrong_length if why == WRONG_LENGTH else why))

    def _why_inside(self, why: int) -> int:
        """Tell the other hosts why the ranks of this host cannot go on, unless they know already."""
        blamed = status_of(self._link).blamed
        if why == ABORTED:   # most likely by a rank of this host that has heard it from another host
            self._wire.await_break(GRACE)
        return self._wire.break_group(self.my.node[blamed] if 0 <= blamed < len(self.my.node) else self.my.rank, why)


MAKE: dict[int, Callable[[Levels, Call], None]] = {
    ALL_REDUCE: Levels.all_reduce, REDUCE: Levels.reduce, BROADCAST: Levels.broadcast, ALL_GATHER: Levels.all_gather,
    GATHER: Levels.gather, REDUCE_SCATTER: Levels.reduce_scatter, SCATTER: Levels.scatter, ALL_TO_ALL: Levels.all_to_all,
    BARRIER: Levels.barrier}


def _join(op: int, pieces: Sequence[np.ndarray], into: np.ndarray | None = None) -> np.ndarray:
    """pieces[0] op pieces[1] op ..., in this order.

    into: the output, by default pieces[0]; it may be pieces[1], but no later one, which would be overwritten before it is read
    """
    into = pieces[0] if into is None else into
    return reduce(lambda a, b: JOIN[op](a, b, out=into), pieces)


def _in_turns(works: Iterable[Iterator[None]]) -> None:
    """Run works that each have three parts: part k of a window runs beside part k + 1 of the one before. Bytes travel in between."""
    waiting, under_way = iter(works), []
    while True:
        if work := next(waiting, None):
            under_way.append(work)
        elif not under_way:
            return
        under_way = [work for work in under_way if next(work, END) is not END]
