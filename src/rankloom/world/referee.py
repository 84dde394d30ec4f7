"""Ranks as threads over gloo: each call is compared with those of the other ranks, as far as they have come, before it starts.

gloo ends the process when ranks disagree about a length, and takes one dtype for another. Where ranks are threads, that process is the
whole program, such as a test runner. They also have memory in common, so comparing costs microseconds, and nobody waits: whoever comes
second finds a difference before its bytes move, or that a rank has returned from its body and makes no such call. Debug mode (debug.py)
compares labels too, and tells all ranks.
"""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

from torch import Tensor

from rankloom.base.errors import CollectiveMismatch
from rankloom.world.debug import Fingerprint, call_site
from rankloom.world.debug_messages import ADVICE, UNLIKE, End, Way
from rankloom.world.debug_queue import Start

RETURNED = "has returned from its body"


class Referee:
    """The calls of one group that not all of its ranks have made, and the messages of which one end has come. Shared by its ranks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()   # guards the rest
        self.counts: Counter[int] = Counter()                        # collectives that each rank has begun
        self.waits: dict[int, int] = {}   # the last of them that it waits for in the call itself
        self.calls: defaultdict[int, dict[int, Fingerprint]] = defaultdict(dict)   # by number and rank
        self.messages: defaultdict[Way, deque[Unmet]] = defaultdict(deque)   # the same end of all on a way
        self.left: set[int] = set()   # the ranks whose body has returned
        self.closed: set[int] = set()


class Seat:
    """The place of rank number `rank` of a group at its referee, used as an Inspector is. names: the ranks' numbers in the world"""

    def __init__(self, referee: Referee, rank: int, names: Sequence[int]):
        self._referee, self._rank, self._names = referee, rank, names

    def checked(self, mine: Fingerprint, start: Start, async_op: bool) -> Start:
        """`start` itself. raises: CollectiveMismatch when a rank that has come makes another call"""
        at = self._referee
        with at.lock:
            at.counts[self._rank] += 1
            number = at.counts[self._rank]
            came = at.calls[number]
            others: dict[int, object] = {rank: RETURNED for rank in at.left if at.counts[rank] < number}
            others |= {rank: theirs for rank, theirs in came.items() if not self._fit(mine, rank, theirs)}
            came[self._rank] = mine
            if not async_op:
                at.waits[self._rank] = number
            if len(came) == len(self._names):
                del at.calls[number]
        if others:
            raise self._other_calls(number, others | {self._rank: mine})
        return start

    def announce(self, op: str, x: Tensor, peer: int, tag: int) -> Sequence["Unmet"]:
        """The same for one end of a message, `send` or `recv`. Returns what to wait for besides the message, which takes no time."""
        at, way = self._referee, (self._rank, peer, tag) if op == "send" else (peer, self._rank, tag)
        mine = Unmet(self, self._rank, peer, End.of(op, x, call_site()))
        with at.lock:
            waiting = at.messages[way]
            theirs = waiting.popleft() if waiting and waiting[0].end.op != op else None
            if theirs:
                theirs.met = mine.met = True
            else:
                waiting.append(mine)
        if theirs and not mine.end.fits(theirs.end):
            raise self._mismatch(f"a message {UNLIKE}", {peer: theirs.end, self._rank: mine.end}, ADVICE)
        return (mine,)

    def begin_to_wait(self, mine: "Unmet") -> None:
        """This rank begins to wait for a message. raises: CollectiveMismatch when the other end cannot come any more"""
        at = self._referee
        with at.lock:
            mine.awaited = True
            never = not mine.met and mine.peer in at.left
        if never:
            raise self._one_end({mine.peer: RETURNED, self._rank: mine.end})

    def leave(self) -> None:
        """This rank makes no more calls. raises: CollectiveMismatch when others wait for one

        An asynchronous collective counts not: who has begun it may never wait for it, but fail, and that error is to be told.
        """
        at = self._referee
        with at.lock:
            at.left.add(self._rank)
            number = at.counts[self._rank] + 1
            over = at.left | at.closed
            calls = {rank: call for rank, call in at.calls.get(number, {}).items() if rank not in over and at.waits.get(rank) == number}
            unmet = {mine.rank: mine.end for way, ends in at.messages.items() if self._rank in way[:2] for mine in ends
                     if mine.peer == self._rank and mine.rank not in over and mine.awaited}   # others may never be missed
        if calls:
            raise self._other_calls(number, calls | {self._rank: RETURNED})
        if unmet:
            raise self._one_end(unmet | {self._rank: RETURNED})

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

    def _other_calls(self, number: int, calls: Mapping[int, object]) -> CollectiveMismatch:
        return self._mismatch(f"collective number {number} of this group is not the same on all ranks", calls,
                              "Every rank must make the same calls in the same order, and expect what the others send.")

    def _one_end(self, calls: Mapping[int, object]) -> CollectiveMismatch:
        return self._mismatch("a rank waits for a message that has one end only", calls,
                              "Every `recv` needs a `send` of the other rank, and every `send` a `recv`.")

    def _mismatch(self, what: str, calls: Mapping[int, object], advice: str) -> CollectiveMismatch:
        table = "\n".join(f"  rank {self._names[rank]}: {call}" for rank, call in sorted(calls.items()))
        return CollectiveMismatch(f"rank {self._names[self._rank]}: {what}:\n{table}\n{advice}")


class Unmet:
    """One end of a message whose other end may not have come. A rank waits for it as for the message itself, so that others know that.

    A rank may return before one for which nobody waits, such as a `recv` of a word to stop that never comes.
    """

    def __init__(self, seat: Seat, rank: int, peer: int, end: End):
        self._seat, self.rank, self.peer, self.end = seat, rank, peer, end
        self.met = self.awaited = False

    def wait(self) -> None:
        """raises: CollectiveMismatch"""
        self._seat.begin_to_wait(self)

    def is_completed(self) -> bool:
        """That the message has ended, the backend tells."""
        return True
