"""Debug mode: before any byte moves, all ranks of a group compare the calls that they are about to make.

Without it, two same-shape collectives issued in swapped order silently add the wrong tensors, a wrong dtype
does so too, and a skipped call only times out. With it (`RANKLOOM_DEBUG=1`), every rank writes each of its calls
to the group's key-value store under the number of the call. The rank that comes last reads and compares them all, and writes what it
has found, which the others wait for: if each read each, p ranks would ask the store for p^2 keys. A difference raises
`CollectiveMismatch` on all ranks with both call sites; a silent rank is named with the last call that it made.

An asynchronous call is compared, and then started, in a thread of its group, so that its caller can go on: groups, threads and
messages do not wait for each other, as without debug mode. If the comparison fails, its `wait` raises the error.

A rank that ends or leaves is noticed within about 0.2 s, except with gloo and NCCL, which cannot tell: there the others notice it
at the time-out. When the process that keeps the store ends (rank 0, or torchrun's agent), all others get an error at once.

Messages from one rank to another are compared by their two ends (debug_messages.py).

Cost: three writes and two reads of the store per call and rank, one or two milliseconds. Off by default.
"""

import atexit
import json
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from rankloom.base.errors import CollectiveMismatch, CollectiveTimeout, RankLost
from rankloom.world.debug_messages import Announced, Messages
from rankloom.world.debug_queue import Queue, Start
from rankloom.world.transport.ask import ask
from rankloom.world.transport.meet import unset_keys

SHORTEST_NAP, LONGEST_NAP = 1e-4, 2e-2   # seconds between two reads of the store; other threads use it meanwhile
LOOK_AROUND = 0.2                        # seconds between two checks whether the others are still there
T = TypeVar("T")
PATIENCE = 1.0                           # seconds to wait, when a group is closed, for a call that is being started


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The call that a rank is about to make. Ranks of one group must agree on all of it except the call site and the rows."""

    op: str
    shape: str
    dtype: str
    label: str
    site: str      # file:line of the calling code
    rows: tuple[Sequence[int], Sequence[int]] | None = None   # of an all-to-all: how many go to each rank, and come from it

    def agrees_with(self, other: "Fingerprint") -> bool:
        """Whether both ranks make the same call; its call site may differ. See `unmet_rows` for the rows."""
        agreed = attrgetter("op", "shape", "dtype", "label")
        return bool(agreed(self) == agreed(other))

    def __str__(self) -> str:
        dealt = "" if self.rows is None else f", sends {[*self.rows[0]]} rows and expects {[*self.rows[1]]},"
        return f"{self.op} of {self.dtype}{self.shape}{dealt} labelled {self.label!r} at {self.site}"


def unmet_rows(calls: Sequence[Fingerprint], ranks: Sequence[int]) -> str | None:
    """What is wrong if a rank sends another than as many rows as that one expects; None if nothing is. `ranks`: their names"""
    dealt = [call.rows for call in calls if call.rows is not None]
    for here, (sends, _) in enumerate(dealt):
        for there, (_, expects) in enumerate(dealt):
            if sends[there] != expects[here]:
                return (f"Rank {ranks[here]} sends {sends[there]} rows to rank {ranks[there]}, which expects {expects[here]}; "
                        "recv_rows must say of each rank what it gives as send_rows for this one.")
    return None


def difference(calls: Sequence[Fingerprint], ranks: Sequence[int]) -> str:
    """What is wrong with a call that all ranks are about to make, with a line for each of them; "" if nothing is. `ranks`: their names"""
    agreed = all(calls[0].agrees_with(call) for call in calls)
    unmet = unmet_rows(calls, ranks) if agreed else None
    if agreed and not unmet:
        return ""
    table = "\n".join(f"  rank {rank}: {call}" for rank, call in zip(ranks, calls))
    return (f"{'deals rows that do not meet' if unmet else 'is not the same on all ranks'}:\n{table}\n"
            + (unmet or "Every rank must make the same calls in the same order; look at the call sites that differ."))


class Inspector:
    """Compares the calls of one rank, in order, with those of its group's other ranks.

    rank:  this rank's number in the group
    ranks: the numbers of the group's ranks in the world, for error messages
    gone:  returns the ranks of the group that have ended or left, as far as is known
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: float, gone: Callable[[], Sequence[int]] = tuple):
        self.store, self.rank, self.ranks, self.timeout = store, rank, ranks, timeout
        self.calls = 0
        self._gone, self._queue, self._closed = gone, Queue(), False
        self._lost: CollectiveTimeout | RankLost | None = None   # why no call can be compared any more
        self._messages = Messages(self)
        _inspectors.add(self)

    def checked(self, mine: Fingerprint, start: Start, async_op: bool) -> Start:
        """`start`, after all ranks were found to make this call. For an asynchronous call, a function that compares in the background.

        raises: CollectiveMismatch, CollectiveTimeout, RankLost; for an asynchronous call, its `wait` raises them
        """
        compare = partial(self.check, mine)
        if async_op:
            return self._queue.behind(compare, start)
        self._queue.drain()
        compare()
        return start

    def announce(self, op: str, x: Tensor, peer: int, tag: int) -> list[Announced]:
        """The same for a message, at both of its ends (debug_messages.py). Returns what a receiver has to wait for, too."""
        return self._messages.announce(op, x, peer, tag, call_site())

    def check(self, mine: Fingerprint) -> None:
        """Raise unless every rank's call number `calls` is the same call.

        Once a rank was late or lost, every later call fails at once with the same error: each in a queue would wait for the time-out.
        raises: CollectiveMismatch, CollectiveTimeout, RankLost
        """
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))
        try:
            self._compare(mine)
        except (CollectiveTimeout, RankLost) as error:
            self._lost = type(error)(str(error))   # without its frames, which refer to the connection
            raise

    def _compare(self, mine: Fingerprint) -> None:
        self.calls += 1
        if problem := self.ask(partial(self._problem, mine)):
            raise CollectiveMismatch(f"{self._where} {problem}")

    def _problem(self, mine: Fingerprint) -> str:
        """What is wrong with this call of all ranks, or nothing."""
        call, keys = self.calls, {rank: self._key(rank) for rank in range(len(self.ranks))}
        self.store.set(keys[self.rank], json.dumps(asdict(mine)))
        self.store.set(f"last/{self.rank}", json.dumps(asdict(mine) | {"call": call}))
        past = [self._key(self.rank, call - 1)] if call > 1 else []   # all have moved past it
        if self.store.add("came", 1) == call * len(self.ranks):
            texts = self.store.multi_get([*keys.values()])
            found = difference([Fingerprint(**json.loads(text)) for text in texts], self.ranks)
            self.store.set(f"found/{call}", found)
            past.append(f"found/{call - 1}")
        else:
            self.wait_for(keys, f"collective number {call}", until=f"found/{call}")
            found = self.store.get(f"found/{call}").decode()
        for key in past:
            self.store.delete_key(key)
        return found

    def where_is_everyone(self) -> str:
        """One line per rank: the last call it announced."""
        try:
            return self.ask(self._last_calls, 0.0)
        except (RankLost, CollectiveTimeout) as error:
            return f"  not known. {error}"

    def ask(self, question: Callable[[], T], seconds: float | None = None) -> T:
        """What a question to the store gives, or raises.

        seconds: after which it should have ended by itself; left out, the time-out
        raises:  RankLost when the store is gone; CollectiveTimeout when it does not answer
        """
        try:
            return ask(question, self.timeout if seconds is None else seconds)
        except TimeoutError as error:
            raise CollectiveTimeout(f"{self._where}: {error}") from None
        except dist.DistError as error:
            gone = ", ".join(f"rank {self.ranks[rank]}" for rank in self._gone())
            raise RankLost(f"{self._where}: lost the store of the job, in which ranks compare their calls: the process that keeps it "
                           f"has ended (rank 0, or torchrun's agent): {str(error).splitlines()[0]}"
                           + (f"; {gone} has ended, or has left the group" if gone else "")) from error

    def close(self) -> None:
        """Stop comparing: calls in the queue fail."""
        self._closed, self._gone = True, tuple   # a closed group must not keep the connection, which `_gone` refers to
        self._queue.drain(PATIENCE)

    def _last_calls(self) -> str:
        keys = {rank: f"last/{rank}" for rank in range(len(self.ranks))}
        silent = {*self._silent(keys)}
        came = [rank for rank in keys if rank not in silent]
        lines = dict.fromkeys(silent, "has made no call yet")
        for rank, text in zip(came, self.store.multi_get([keys[rank] for rank in came]) if came else ()):
            last = json.loads(text)
            lines[rank] = f"call {last.pop('call')}, {Fingerprint(**last)}"
        return "\n".join(f"  rank {name}: {lines[rank]}" for rank, name in enumerate(self.ranks))

    def wait_for(self, keys: Mapping[int, str], what: str, until: str | None = None) -> None:
        """Wait until these ranks have written their keys. Polls: while a thread waits inside the store, no other thread can use it.

        what:   which call, for error messages
        until:  the key that the last of them writes then, to wait for in their place; they tell who is missing
        raises: CollectiveTimeout, RankLost
        """
        begin = looked = time.monotonic()
        nap = SHORTEST_NAP
        awaited = [*keys.values()] if until is None else [until]
        while not self.store.check(awaited):
            now = time.monotonic()
            if self._closed:
                raise RankLost(f"{self._me}: {what} of this group was not made: this rank has closed the group")
            if now > looked + LOOK_AROUND:
                self._expect_alive(keys, what)
                looked = now
            if now > begin + self.timeout:
                raise self._too_late(self._silent(keys), what)
            time.sleep(nap)
            nap = min(1.5 * nap, LONGEST_NAP)

    def _expect_alive(self, keys: Mapping[int, str], what: str) -> None:
        if gone := [*self._gone()]:
            for rank in self._silent(keys):   # after `_gone`: a call that a rank announced before it went counts
                if rank in gone:
                    raise RankLost(f"{self._me}: {what} of this group: lost rank {self.ranks[rank]}: it has ended, or has left the group. "
                                   f"Who is where:\n{self.where_is_everyone()}")

    def _too_late(self, silent: Sequence[int], what: str) -> CollectiveTimeout:
        who = ", ".join(f"rank {self.ranks[rank]}" for rank in silent) or "the rank that came last, and has not told what it found,"
        return CollectiveTimeout(f"{self._me}: {who} did not come to {what} within {self.timeout:g} s. "
                                 f"Who is where:\n{self.where_is_everyone()}")

    def _silent(self, keys: Mapping[int, str]) -> list[int]:
        unset = {*unset_keys(self.store, [*keys.values()])}
        self.store.check([*keys.values()][:1])   # raises if the store has ended: then all seem to be unset
        return [rank for rank, key in keys.items() if key in unset]

    @property
    def _where(self) -> str:
        return f"{self._me}: collective number {self.calls} of this group"

    @property
    def _me(self) -> str:
        return f"rank {self.ranks[self.rank]}"

    def _key(self, rank: int, call: int | None = None) -> str:
        return f"call/{call or self.calls}/{rank}"


def call_site() -> str:
    """file:line of the nearest frame outside `world/`."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("rankloom.world"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_inspectors: weakref.WeakSet[Inspector] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close all inspectors: a thread that is inside torch's store when Python ends would abort the process."""
    for inspector in list(_inspectors):
        inspector.close()
