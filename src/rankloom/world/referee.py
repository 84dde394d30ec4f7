"""Ranks as threads over gloo: each call is compared with those of the other ranks, as far as they have come, before it starts.

gloo ends the process when ranks disagree about a length, and takes one dtype for another. Where ranks are threads, that process is the
whole program, such as a test runner. They also have memory in common, so comparing costs microseconds, and nobody waits: whoever comes
second finds a difference before its bytes move, or that a rank has returned from its body and makes no such call. Debug mode (debug.py)
compares labels too, and tells all ranks.
"""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor

from rankloom.base.errors import CollectiveMismatch
from rankloom.world.debug import Fingerprint, call_site
from rankloom.world.debug_messages import ADVICE, UNLIKE, End, Way
from rankloom.world.debug_queue import Start, works_in

RETURNED = "has returned from its body"


class Referee:
    """The calls of one group that not all of its ranks have made, and the messages of which one end has come. Shared by its ranks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()   # guards the rest
        self.counts: Counter[int] = Counter()   # collectives that each rank has begun
        self.calls: defaultdict[int, dict[int, Part]] = defaultdict(dict)   # by number and rank
        self.messages: defaultdict[Way, deque[Part]] = defaultdict(deque)   # the same end of all on a way
        self.left: set[int] = set()   # the ranks whose body has returned
        self.closed: set[int] = set()


class Seat:
    """The place of rank number `rank` of a group at its referee, used as an Inspector is. names: the ranks' numbers in the world"""

    def __init__(self, referee: Referee, rank: int, names: Sequence[int]):
        self._referee, self._rank, self._names = referee, rank, names

    def checked(self, mine: Fingerprint, start: Start, async_op: bool) -> Start:
        """`start`, and for an asynchronous call what to wait for before. raises: CollectiveMismatch when a rank makes another call"""
        at = self._referee
        with at.lock:
            at.counts[self._rank] += 1
            number = at.counts[self._rank]
            came = at.calls[number]
            missing = next(iter(came.values())).missing if came else {*range(len(self._names))}
            missing.remove(self._rank)
            part = came[self._rank] = Part(self, self._rank, mine, missing, number, awaited=not async_op)
            others: dict[int, object] = dict.fromkeys(missing & at.left, RETURNED)
            others |= {rank: theirs.call for rank, theirs in came.items() if not self._fit(mine, rank, theirs.call)}
            if not missing:
                del at.calls[number]
        if others:
            raise self._unlike(number, others | {self._rank: mine})
        return part.before(start) if async_op else start

    def announce(self, op: str, x: Tensor, peer: int, tag: int) -> Sequence["Part"]:
        """Compare one end of a message, `send` or `recv`, with the other if that has come. Returns what to wait for beside the message."""
        at, way = self._referee, (self._rank, peer, tag) if op == "send" else (peer, self._rank, tag)
        mine = Part(self, self._rank, End.of(op, x, call_site()), {peer})
        with at.lock:
            waiting = at.messages[way]
            theirs = waiting.popleft() if waiting and waiting[0].call.op != op else None
            if theirs:
                theirs.missing.clear()
                mine.missing.clear()
                if not waiting:   # a tag may be that of a step, and never come again
                    del at.messages[way]
            else:
                waiting.append(mine)
        if theirs and not mine.call.fits(theirs.call):
            raise self._mismatch(f"a message {UNLIKE}", {peer: theirs.call, self._rank: mine.call}, ADVICE)
        return (mine,)

    def begin_to_wait(self, part: "Part") -> None:
        """This rank begins to wait for a call that it has begun. raises: CollectiveMismatch when another cannot come to it any more"""
        at = self._referee
        with at.lock:
            part.awaited = True
            never = dict.fromkeys(part.missing & at.left, RETURNED)
        if never:
            raise self._unlike(part.number, never | {self._rank: part.call})

    def leave(self) -> None:
        """This rank makes no more calls. raises: CollectiveMismatch when others wait for one

        What another has begun and does not wait for counts not: it may never wait, or fail, and that error is to be told.
        """
        at = self._referee
        with at.lock:
            at.left.add(self._rank)
            over = at.left | at.closed
            begun = chain(*(came.values() for came in at.calls.values()), *at.messages.values())
            parts = [part for part in begun if self._rank in part.missing and part.awaited and part.rank not in over]
        if parts:
            number = parts[0].number
            raise self._unlike(number, {part.rank: part.call for part in parts if part.number == number} | {self._rank: RETURNED})

    def close(self) -> None:
        """This rank waits for nobody any more. Those that wait for it notice that themselves: its connection is closed."""
        with self._referee.lock:
            self._referee.closed.add(self._rank)

    def _fit(self, mine: Fingerprint, rank: int, theirs: Fingerprint) -> bool:
        """Whether this rank's call and that of another are the same; of an all-to-all, whether they deal each other what they expect."""
        if (mine.op, mine.shape, mine.dtype) != (theirs.op, theirs.shape, theirs.dtype):
            return False
        if mine.rows is None or theirs.rows is None:
            return True
        (sends, expects), (their_sends, they_expect) = mine.rows, theirs.rows
        return sends[rank] == they_expect[self._rank] and their_sends[self._rank] == expects[rank]

    def _unlike(self, number: int, calls: Mapping[int, object]) -> CollectiveMismatch:
        """number: which collective of the group it is, 0 for messages"""
        if not number:
            return self._mismatch("a rank waits for a message that has one end only", calls,
                                  "Every `recv` needs a `send` of the other rank, and every `send` a `recv`.")
        return self._mismatch(f"collective number {number} of this group is not the same on all ranks", calls,
                              "Every rank must make the same calls in the same order, and expect what the others send.")

    def _mismatch(self, what: str, calls: Mapping[int, object], advice: str) -> CollectiveMismatch:
        table = "\n".join(f"  rank {self._names[rank]}: {call}" for rank, call in sorted(calls.items()))
        return CollectiveMismatch(f"rank {self._names[self._rank]}: {what}:\n{table}\n{advice}")


class Part:
    """One rank's part of a call: of a collective, or one end of a message. The rank waits for it as for the call itself, so that others
    know that: they may return before a call for which nobody waits, such as a `recv` of a word to stop that never comes.

    missing: the ranks that have not come to the call; one set for all parts of a collective
    """

    def __init__(self, seat: Seat, rank: int, call: Any, missing: set[int], number: int = 0, awaited: bool = False):
        self._seat, self.rank, self.call, self.missing, self.number, self.awaited = seat, rank, call, missing, number, awaited

    def before(self, start: Start) -> Start:
        """A start whose works begin with this part."""
        def begin(pg: Any) -> list[Any]:
            return [self, *works_in(start(pg))]
        return begin

    def wait(self) -> None:
        """raises: CollectiveMismatch"""
        self._seat.begin_to_wait(self)

    def is_completed(self) -> bool:
        """Always: whether the call itself has ended, the backend tells."""
        return True
