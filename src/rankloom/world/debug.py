"""Debug mode: before any byte moves, all ranks of a group compare the calls that they are about to make.

Without it, two same-shape collectives issued in swapped order silently add the wrong tensors, a wrong dtype
does so too, and a skipped call only times out. With it (`RANKLOOM_DEBUG=1`), every rank writes each of its calls
to the group's key-value store under the number of the call. The rank that comes last reads and compares them all, and writes what it
has found, which the others wait for: if each read each, p ranks would ask the store for p^2 keys. A difference raises
`CollectiveMismatch` on all ranks with both call sites; a silent rank is named with the last call that it made.

An asynchronous call is compared, and then started, in a thread of its group, so that its caller can go on: groups, threads and
messages do not wait for each other, as without debug mode. If the comparison fails, its `wait` raises the error.

A rank that ends or leaves is noticed within about 0.2 s, except by processes with gloo or NCCL, which cannot tell: there the others
notice it at the time-out. When the process that keeps the store ends (rank 0, or torchrun's agent), all others get an error at once.

Messages from one rank to another are compared by their two ends (debug_messages.py).

Cost: three writes and two reads of the store per call and rank, one or two milliseconds. Off by default.
"""

import atexit
import json
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter

import torch.distributed as dist
from torch import Tensor

from rankloom.base.errors import CollectiveMismatch, CollectiveTimeout, RankLost
from rankloom.world.debug_messages import Announced, Messages
from rankloom.world.debug_queue import Queue, Start
from rankloom.world.debug_store import Board

PATIENCE = 1.0   # seconds to wait, when a group is closed, for a call that is being started


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
    """Compares the calls of one rank, in order, with those of its group's other ranks. Arguments: as of `Board` (debug_store.py)."""

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: float, gone: Callable[[], Sequence[int]] = tuple):
        self.board, self.calls = Board(store, rank, ranks, timeout, gone), 0
        self._queue, self._messages = Queue(), Messages(self.board)
        self._lost: CollectiveTimeout | RankLost | None = None   # why no call can be compared any more
        _inspectors.add(self)

    def checked(self, mine: Fingerprint, start: Start, async_op: bool) -> Start:
        """`start`, after all ranks were found to make this call. For an asynchronous call, a function that compares in the background.

        raises: CollectiveMismatch, CollectiveTimeout, RankLost; for an asynchronous call, its `wait` raises them
        """
        compare = partial(self.check, mine)
        if async_op:
            return self._queue.behind(compare, start)
        self.drain()
        compare()
        return start

    def drain(self) -> None:
        """Wait until all asynchronous calls before have been compared and begun."""
        self._queue.drain()

    def announce(self, op: str, x: Tensor, peer: int, tag: int) -> list[Announced]:
        """Compare a message at both of its ends (debug_messages.py). Returns what a receiver has to wait for, too."""
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
        what = f"collective number {self.calls}"
        if problem := self.board.ask(partial(self._problem, mine, what), what):
            raise CollectiveMismatch(f"{self.board.me}: {what} of this group {problem}")

    def _problem(self, mine: Fingerprint, what: str) -> str:
        """What is wrong with this call of all ranks, or nothing."""
        board, call = self.board, self.calls
        store, keys = board.store, {rank: self._key(rank, call) for rank in range(len(board.ranks))}
        store.set(keys[board.rank], json.dumps(asdict(mine)))
        board.tell_last(f"call {call}, {mine}")
        past = [self._key(board.rank, call - 1)] if call > 1 else []   # all have moved past it
        if store.add("came", 1) == call * len(board.ranks):
            texts = store.multi_get([*keys.values()])
            found = difference([Fingerprint(**json.loads(text)) for text in texts], board.ranks)
            store.set(f"found/{call}", found)
            past.append(f"found/{call - 1}")
        else:
            board.wait_for(keys, what, until=f"found/{call}")
            found = store.get(f"found/{call}").decode()
        for key in past:
            store.delete_key(key)
        return found

    def close(self) -> None:
        """Stop comparing: calls in the queue fail."""
        self.board.close()
        self._queue.drain(PATIENCE)

    def _key(self, rank: int, call: int) -> str:
        return f"call/{call}/{rank}"


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
