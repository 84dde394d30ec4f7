"""One rank's end of a group in shared memory: calls, background calls, buffers, and what went wrong in words.

A call names a kind, a number type, an operation, a root, two addresses and lengths: one number of bytes, or a table of
four rows (where and how long in the input, where and how long in the output, for each rank).
The kernel behind it is _shared.c, or fallback.py where there was no compiler; all ranks of a group use the same.
"""

import contextlib
import json
import weakref
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from rankloom.base.errors import CollectiveMismatch, CollectiveTimeout, ConfigError, RankloomError, RankLost
from rankloom.world.transport import fallback
from rankloom.world.transport.codes import (
    ABORTED,
    ALL_GATHER,
    BARRIER,
    DAMAGED,
    FORKED,
    INTERRUPTED,
    KINDS,
    LEFT,
    LOST,
    MISMATCHED,
    SUM,
    TIMED_OUT,
    WRONG_LENGTH,
)
from rankloom.world.transport.meet import cores_of, map_together
from rankloom.world.transport.operands import BYTES, NUMBERS, OPS

KERNELS: dict[str, Any] = {}   # the best first
with contextlib.suppress(ImportError):   # no compiler when this was installed
    KERNELS["C"] = import_module("rankloom.world.transport._shared")
KERNELS["Python"] = fallback

STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "X": "its process has ended", "?": "it does not answer"}
GONE = {"X": STATES["X"], "L": "it has left the group"}

SPIN_US = 100             # before sleeping, where every rank has a core of its own
YIELDS = 100              # times that a rank lets others run, before sleeping, where ranks share cores
WINDOW = 256 << 10        # bytes staged at a time: what the second-level cache holds twice
SHARED_WINDOW = 512 << 10   # where ranks share cores, a meeting costs a change of process: fewer, longer windows


class Channel:
    """This rank's end of a group whose ranks share a host.

    ranks: the numbers of the group's ranks in the world, for messages
    """

    def __init__(self, store: dist.Store, rank: int, size: int, *, neighbours: Sequence[int], timeout: float,
                 ranks: Sequence[int] | None = None, name: str = "world"):
        self.rank, self.size, self.timeout, self.name = rank, size, timeout, name
        self.ranks = tuple(ranks or range(size))
        self.closed = False
        self._memory, kernel = map_together(store, neighbours, neighbours[rank], KERNELS, timeout)
        crowded = size > cores_of(store, neighbours)
        self.link = KERNELS[kernel].Link(self._memory.address, rank, size, 0 if crowded else SPIN_US, YIELDS if crowded else 0,
                                SHARED_WINDOW if crowded else WINDOW)
        weakref.finalize(self, self.link.leave)   # also as the process ends: before the memory goes, whose last user it is
        self.call(BARRIER)   # the others' process numbers are there from here on

    def call(self, kind: int, source: int = 0, target: int = 0, lengths: int = 0) -> None:
        """One collective that moves bytes, now. raises: RankLost, CollectiveTimeout, CollectiveMismatch"""
        why = self.link.run(kind, BYTES, SUM, 0, source, target, lengths, self.timeout)
        if why:
            raise self.explain(why, KINDS[kind])

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order."""
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self._gather(torch.tensor([len(mine)])).flatten().tolist()
        all_texts = self._gather(torch.nn.functional.pad(mine, (0, max(lengths) - len(mine))))
        return [json.loads(bytes(text[:length].tolist())) for text, length in zip(all_texts, lengths)]

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n] on each rank -> [ranks, n]"""
        out = x.new_empty(self.size, len(x))
        self.call(ALL_GATHER, x.data_ptr(), out.data_ptr(), x.nbytes)
        return out

    def abort(self) -> None:
        """End every wait of every rank with RankLost, at once. The group is of no use afterwards; build another."""
        self.link.break_off(self.rank, ABORTED)

    def give_up_on(self, peer: int) -> None:
        """End every wait of every rank: `peer` did not come in time; where this rank waited for anyone, none of the others."""
        self.link.break_off(self._number_of(peer), TIMED_OUT)

    def gone(self) -> list[int]:
        """The ranks that have ended, or left the group."""
        return [rank for rank, state in enumerate(self.link.status()[3]) if state in GONE]

    def close(self) -> None:
        """This rank makes no call any more; a rank that waits for it gets RankLost."""
        self.closed = True
        self.link.leave()

    # ------------------------------------------------------------------ what went wrong, in words

    def where(self, label: str) -> str:
        """This rank, a label and the group, as messages begin."""
        return f"rank {self.ranks[self.rank]}: {label} in group {self.name!r}"

    def explain(self, why: int, label: str, timeout: float | None = None, peers: Sequence[int] = ()) -> RankloomError:
        """The error for a call that failed; `peers` are the other ends of a message or two, -1 for anyone."""
        _, blamed, arrived, states = self.link.status()
        if why == TIMED_OUT:
            # Another rank may have given up first, and have broken the group for the sake of a message of its own.
            awaited = [self._number_of(peer) for peer in peers]
            late = blamed if blamed in awaited or not awaited else awaited[0]
            behind = {late} if awaited else {rank for rank in range(self.size) if arrived[rank] < max(arrived)} or {blamed}
            missing = self._who_was_silent(late, states) if late >= self.size else self._who_is_missing(behind, states)
            return CollectiveTimeout(f"{self.where(label)} did not finish within its timeout of {timeout or self.timeout:g} s: {missing}")
        who = f"rank {self.ranks[self.rank if blamed < 0 else blamed]}"
        if why == MISMATCHED:
            return CollectiveMismatch(f"{self.where(label)}: ranks made different calls.\n{table_of_calls(self.ranks, self.link.calls())}")
        reasons = {
            LOST: f"lost {who}: its process has ended",
            LEFT: f"lost {who}: it has left the group",
            ABORTED: f"lost {who}: it aborted the group",
            INTERRUPTED: f"lost {who}: it was interrupted in the middle of a call",
            DAMAGED: f"lost {who}: what it wrote into the shared memory cannot be; something has damaged its process",
        }
        if why in reasons:
            return RankLost(f"{self.where(label)} {reasons[why]}")
        if why == WRONG_LENGTH:
            return CollectiveMismatch(f"{self.where(label)}: {who} sends another number of bytes than its receiver expects; "
                                      "compare sizes and dtypes on both sides")
        assert why == FORKED, f"the kernel gave an unknown reason {why}"
        return ConfigError(f"{self.where(label)}: this process was forked from one that owns the group; build groups after the fork")

    def _who_is_missing(self, behind: set[int], states: list[str]) -> str:
        """The other ranks that cannot come; if there is none, those of `behind`, which have not come to the meeting or sent a message."""
        missing = self._who_cannot_come(states) or sorted(behind - {self.rank, -1})
        if missing:
            return f"{self._with_states(missing, states)} did not come"
        return "this rank is the one that was waited for" if self.rank in behind else "a rank did not come"

    def _who_cannot_come(self, states: list[str]) -> list[int]:
        """The ranks, other than this one, that are stopped, dead or silent. One that has left may have had nothing more to do."""
        return [rank for rank in range(self.size) if rank != self.rank and states[rank] in STATES]

    def _number_of(self, peer: int) -> int:
        """Whom to blame for a message: a rank; or for one of anyone, all but this rank, which has a number above those of ranks."""
        return peer if peer >= 0 else self.size + self.rank

    def _who_was_silent(self, number: int, states: list[str]) -> str:
        """All but one, from whom that one got no message."""
        lonely = number - self.size
        others = [rank for rank in self._who_cannot_come(states) if rank != lonely] or [r for r in range(self.size) if r != lonely]
        return f"rank {self.ranks[lonely]} waited for a message of anyone, and none came from {self._with_states(others, states)}"

    def _with_states(self, ranks: Sequence[int], states: list[str]) -> str:
        words = STATES | GONE
        return ", ".join(f"rank {self.ranks[rank]} ({words.get(states[rank], 'slow, or it skipped this call')})" for rank in ranks)


def table_of_calls(ranks: Sequence[int], calls: Sequence[Sequence[int] | None]) -> str:
    """What each rank has called, a line each. ranks: their numbers in the world; calls: kind, number, op, root, bytes of each that came"""
    dtypes, ops = {code: dtype for dtype, code in NUMBERS.items()}, {code: op.name for op, code in OPS.items()}
    rows = []
    for rank, call in zip(ranks, calls):
        if call is None:
            rows.append(f"  rank {rank}: has not come to this call")
            continue
        kind, number, op, root, nbytes = call
        size, dtype = f"{nbytes} bytes" if nbytes else "lengths of its own", str(dtypes[number]).removeprefix("torch.")
        rows.append(f"  rank {rank}: {KINDS[kind]}({ops[op].lower()}, root {root}), {size} of {dtype}")
    return "\n".join(rows)
