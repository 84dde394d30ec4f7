"""One rank's end of a group in shared memory: calls, background calls, buffers, and the text of errors.

A call has a kind, a number type, an operation, a root, two addresses and lengths: one number of bytes, or a table of
four rows (offset and length in the input, offset and length in the output, for each rank).
The kernel that runs it is _shared.c, or fallback.py if there was no compiler; all ranks of a group use the same.
"""

import contextlib
import json
import weakref
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.util import Finalize
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from rankloom.base.errors import CollectiveMismatch, CollectiveTimeout, ConfigError, DeviceError, RankloomError, RankLost
from rankloom.world.transport import fallback
from rankloom.world.transport.call import OWN_LENGTHS, REDUCING, ROOTED
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
    NO_MEMORY,
    SUM,
    TIMED_OUT,
    WRONG_LENGTH,
    status_of,
)
from rankloom.world.transport.memory import map_together
from rankloom.world.transport.operands import BYTES, NUMBERS, OPS

T = TypeVar("T")
DTYPE_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in NUMBERS.items()}
OP_NAMES = {code: op.name.lower() for op, code in OPS.items()}
KERNELS: dict[str, Any] = {}   # the best first
with contextlib.suppress(ImportError):   # no compiler when this was installed
    KERNELS["C"] = import_module("rankloom.world.transport._shared")
KERNELS["Python"] = fallback

STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "X": "its process has ended", "?": "it does not answer"}
GONE = {"X": STATES["X"], "L": "it has left the group"}

ROOM = 256                # ranks of a host: MAX_RANKS in _shared.c
SPIN_US = 100             # microseconds to spin before sleeping, if every rank has a core of its own
YIELDS = 100              # how often a rank yields its core before sleeping, if ranks share cores
WINDOW = 256 << 10        # bytes staged at a time: half of the second-level cache
SHARED_WINDOW = 512 << 10   # if ranks share cores, a meeting costs a context switch: use fewer, longer windows


def expect_room(ranks: int, who: str = "") -> None:
    """Raise ConfigError where the shared memory of a host has no room for so many ranks. who: the rank that raises, for the message"""
    if ranks > ROOM:
        raise ConfigError(f"{who}{ranks} ranks share a host, expected {ROOM} at most in shared memory: use the backend \"gloo\", or start "
                          "fewer ranks on each host")


class Channel:
    """This rank's end of a group whose ranks share a host.

    ranks:  the numbers of the group's ranks in the world, for error messages
    raises: ConfigError if there are too many
    """

    def __init__(self, store: dist.Store, rank: int, size: int, *, timeout: float, name: str, ranks: Sequence[int] | None = None):
        self.rank, self.size, self.timeout, self.name = rank, size, timeout, name
        self.ranks = tuple(ranks or range(size))
        self.closed = False
        expect_room(size, f"rank {self.ranks[rank]}: ")
        segment = map_together(store, rank, size, KERNELS, timeout, ranks=ranks)
        self._memory, crowded = segment.memory, size > segment.cores
        self.link = KERNELS[segment.kernel].Link(self._memory.address, rank, size, 0 if crowded else SPIN_US, YIELDS if crowded else 0,
                                                 SHARED_WINDOW if crowded else WINDOW)
        at_its_end(self, self.link.leave)   # before the memory is unmapped, which `leave` uses
        self.call(BARRIER)   # from here on the process numbers of the others are known

    def set_timeout(self, seconds: float) -> None:
        """Set how long a call waits for the other ranks, from now on."""
        self.timeout = seconds

    def call(self, kind: int, source: int = 0, target: int = 0, lengths: int = 0) -> None:
        """Run one collective that only moves bytes, now. raises: RankLost, CollectiveTimeout, CollectiveMismatch"""
        why = self.link.run(kind, BYTES, SUM, 0, source, target, lengths, self.timeout)
        if why:
            raise self.explain(why, KINDS[kind])

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order."""
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self._gather(torch.tensor([len(mine)], device="cpu")).flatten().tolist()
        all_texts = self._gather(torch.nn.functional.pad(mine, (0, max(lengths) - len(mine))))
        return [json.loads(bytes(text[:length].tolist())) for text, length in zip(all_texts, lengths)]

    def do_together(self, step: Callable[[], T]) -> T:
        """A step of making a buffer. A collective. Returns what it returns on this rank, once it has returned on all.

        raises: on all ranks, what it raises on one: MemoryError, ConfigError, DeviceError, RankLost
        """
        kinds = {kind.__name__: kind for kind in (MemoryError, ConfigError, DeviceError, RankLost)}
        problem, made = None, None
        try:
            made = step()
        except (*kinds.values(),) as error:
            problem = [next(name for name, kind in kinds.items() if isinstance(error, kind)), str(error)[:400]]
        for rank, theirs in zip(self.ranks, self.gather_json(problem)):
            if theirs:
                kind_name, text = theirs
                raise kinds[kind_name](f"{self.where('buffer')}, said rank {rank}: {text}")
        return cast(T, made)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n] on each rank -> [ranks, n]"""
        out = x.new_empty(self.size, len(x))
        self.call(ALL_GATHER, x.data_ptr(), out.data_ptr(), x.nbytes)
        return out

    def abort(self) -> None:
        """End every wait of every rank with RankLost, at once. The group cannot be used afterwards; build another."""
        self.link.break_off(self.rank, ABORTED)

    def give_up_on(self, peer: int) -> None:
        """Break the group with a time-out that blames `peer`; for -1 (a receive from any rank) it blames all others."""
        self.link.break_off(self._number_of(peer), TIMED_OUT)

    def gone(self) -> list[int]:
        """The ranks that have ended, or left the group."""
        return [rank for rank, state in enumerate(status_of(self.link).states) if state in GONE]

    def close(self) -> None:
        """Make no more calls on this rank; a rank that waits for it gets RankLost."""
        self.closed = True
        self.link.leave()

    # ------------------------------------------------------------------ error messages

    def where(self, label: str) -> str:
        """The beginning of error messages: this rank, a label and the group."""
        return f"rank {self.ranks[self.rank]}: {label} in group {self.name!r}"

    def explain(self, why: int, label: str, timeout: float | None = None, peers: Sequence[int] = ()) -> RankloomError:
        """The error for a call that failed. peers: the other ends of one or two messages, -1 for any rank"""
        _, blamed, arrived, states = status_of(self.link)
        if why == TIMED_OUT:
            # Another rank may have timed out first, and may have broken the group because of a message of its own.
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
            NO_MEMORY: f"lost {who}: it has no memory left to put aside a message while it waits for a later one; "
                       "receive large messages in the order in which they are sent",
        }
        if why in reasons:
            return RankLost(f"{self.where(label)} {reasons[why]}")
        if why == WRONG_LENGTH:
            return CollectiveMismatch(f"{self.where(label)}: {who} sends another number of bytes, or another dtype, than its "
                                      "receiver expects; compare sizes and dtypes on both sides")
        assert why == FORKED, f"the kernel gave an unknown reason {why}"
        return ConfigError(f"{self.where(label)}: this process was forked from one that owns the group; build groups after the fork")

    def _who_is_missing(self, behind: set[int], states: list[str]) -> str:
        """The other ranks that cannot come; if there are none, those of `behind`, which have not reached the call or sent their message."""
        missing = self._who_cannot_come(states) or sorted(behind - {self.rank, -1})
        if missing:
            return f"{self._with_states(missing, states)} did not come"
        return "this rank is the one that was waited for" if self.rank in behind else "a rank did not come"

    def _who_cannot_come(self, states: list[str]) -> list[int]:
        """The other ranks that are stopped, dead or silent. A rank that has left does not count: it may have had nothing more to do."""
        return [rank for rank in range(self.size) if rank != self.rank and states[rank] in STATES]

    def _number_of(self, peer: int) -> int:
        """Whom to blame for a message: its peer; for a receive from any rank, size + this rank, which stands for all other ranks."""
        return peer if peer >= 0 else self.size + self.rank

    def _who_was_silent(self, number: int, states: list[str]) -> str:
        """For a number of `_number_of` above the ranks: all ranks except one, which got no message from them."""
        lonely = number - self.size
        others = [rank for rank in self._who_cannot_come(states) if rank != lonely] or [r for r in range(self.size) if r != lonely]
        return f"rank {self.ranks[lonely]} waited for a message of anyone, and none came from {self._with_states(others, states)}"

    def _with_states(self, ranks: Sequence[int], states: list[str]) -> str:
        words = STATES | GONE
        return ", ".join(f"rank {self.ranks[rank]} ({words.get(states[rank], 'slow, or it skipped this call')})" for rank in ranks)


def at_its_end(owner: object, leave: Callable[[], object]) -> None:
    """Call `leave` when `owner` is collected or the process ends, be it a child of multiprocessing, which runs nothing of `atexit`."""
    weakref.finalize(owner, Finalize(None, leave, exitpriority=0))   # which runs once, and leaves the list of multiprocessing then


def table_of_calls(ranks: Sequence[int], calls: Sequence[Sequence[int] | None]) -> str:
    """The call of each rank, one line each. ranks: numbers in the world; calls: kind, number, op, root, bytes, or None if not made"""
    described = ["has not come to this call" if call is None else _describe(ranks, *call) for call in calls]
    return "\n".join(f"  rank {rank}: {text}" for rank, text in zip(ranks, described))


def _describe(ranks: Sequence[int], kind: int, number: int, op: int, root: int, nbytes: int) -> str:
    """A call in words: only what calls of its kind have, and the root by its number in the world."""
    if kind == BARRIER:
        return KINDS[kind]
    chosen = [OP_NAMES[op]] * (kind in REDUCING) + [f"root rank {ranks[root]}"] * (kind in ROOTED)
    size = "lengths of its own" if kind in OWN_LENGTHS and not nbytes else f"{nbytes} bytes"
    with_what = f"({', '.join(chosen)})" if chosen else ""
    return f"{KINDS[kind]}{with_what}, {size} of {DTYPE_NAMES[number]}"
