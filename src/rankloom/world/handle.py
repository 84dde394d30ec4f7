"""A collective in flight, and what becomes of one for which nobody waits."""

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from rankloom.base.errors import ConfigError, RankLost
from rankloom.world.ledger import Ledger

MOST_DROPPED = 64    # collectives of one group for which nobody waits
LEAST_WAIT = 1e-3    # seconds; torch takes 0 for as long as the group allows


class InFlight:
    """The collectives that one rank has begun in one group: those whose handle somebody holds, and those whose handle was dropped.

    gloo cancels a message whose work object is freed, and the peer then waits for ever. So when a Handle is collected before anybody
    waited, its works are kept here until they have ended.
    """

    def __init__(self) -> None:
        self._handles: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
        self._dropped: deque[Sequence[Any]] = deque()
        self._owner = os.getpid()

    def expect_owner(self, where: Callable[[str], str], label: str) -> None:
        """Raise in a process that was forked from the rank's: it has the rank's sockets, but not the threads that read them. A call there
        would wait for ever, and what it sends would be taken for the rank's."""
        if os.getpid() != self._owner:
            raise ConfigError(f"{where(label)}: this process was forked from one that owns the group; build groups after the fork")

    def handles(self) -> list["Handle"]:
        """The handles that somebody holds."""
        return [handle for reference in self._handles.valuerefs() if (handle := reference()) is not None]

    @property
    def has_ended(self) -> bool:
        """Whether all have ended. (Of messages for which nobody has waited, gloo does not say so.)"""
        return all(map(has_ended, self._works()))

    def end_within(self, seconds: float) -> bool:
        """Wait for all of them, held or dropped, at most so long. Returns whether they have ended well. The last thing that is asked of a
        group: gloo tells the end of a message only to one who waits for it, and only once.
        """
        deadline = time.monotonic() + seconds
        try:
            for work in self._works():
                if not has_ended(work):
                    work.wait(timedelta(seconds=max(LEAST_WAIT, deadline - time.monotonic())))
        except RuntimeError:   # too late, or a peer has gone
            return False
        return True

    def _works(self) -> Iterator[Any]:
        """The works of handles that somebody holds, then those of dropped ones. Any thread may ask, so it looks at a copy."""
        return chain(*(handle.works or () for handle in self.handles()), *[*self._dropped])

    def add(self, handle: "Handle") -> None:
        """Remember a new handle, and forget what has ended of those that were dropped.

        gloo reports a message as completed only to a caller of wait(). So beyond MOST_DROPPED works, block on the oldest.
        """
        self._handles[id(handle)] = handle
        while self._dropped:
            try:
                works = self._dropped.popleft()
            except IndexError:   # another thread has closed the group meanwhile
                return
            if len(self._dropped) < MOST_DROPPED and not all(map(has_ended, works)):
                self._dropped.appendleft(works)
                return
            for work in works:
                work.wait()

    def adopt(self, works: Sequence[Any]) -> None:
        """Hold works whose handle is gone. (A garbage collector may call this at any time, in any thread.)"""
        self._dropped.append(works)

    def let_go(self) -> None:
        """Hold no work any more: each keeps the connection open. (A traceback may refer to a handle.)"""
        self._dropped.clear()
        for handle in self.handles():
            handle.works = None


def has_ended(work: Any) -> bool:
    """Whether a work has ended, if one looks and does not wait: others may go on while it waits for a rank that has returned."""
    ended: bool = getattr(work, "has_ended", work.is_completed)()   # torch's have no such method
    return ended


class GroupOfHandle(Protocol):
    """What a handle must know of the group that has begun its collective."""

    device: torch.device
    ledger: Ledger
    in_flight: InFlight

    def where(self, label: str) -> str:
        """The beginning of error messages."""

    def translated_errors(self, label: str) -> AbstractContextManager[Any]:
        """A context that turns a backend's failure into an error of ours."""


class Handle:
    """A collective in flight. `wait()` returns its result; do not use the buffers before.

    A handle may be dropped: its call still completes. But keep the handles of many sends: over gloo, once more than MOST_DROPPED were
    dropped, the next call blocks until the oldest has ended.
    """

    def __init__(self, group: GroupOfHandle, label: str, works: Sequence[Any], finish: Callable[[], Tensor]):
        self.group, self.label, self._finish = group, label, finish
        self.works: Sequence[Any] | None = works   # None: dropped when the group was closed
        self._result: Tensor | None = None
        self._is_awaited = False
        self._ready = None if works else _place_in_stream(group.device)   # where the result is ready, once that is known

    def wait(self) -> Tensor:
        """Block until the result is ready (on CUDA: make the current stream wait for it). It may be called again, also from another CUDA
        stream, which then waits too; not from two threads at once.

        raises: RankLost, CollectiveTimeout
        """
        if self._ready is not None:
            torch.cuda.current_stream(self.group.device).wait_event(self._ready)
        if self._result is None:
            result = self.wait_once()
            self._ready, self._result = _place_in_stream(self.group.device), result
        return self._result

    def wait_once(self) -> Tensor:
        """`wait`, where nobody else has this handle: the place in the stream is not noted for others, which costs microseconds."""
        begin, works = time.perf_counter(), self.works   # another thread may close the group meanwhile
        if works is None:
            raise RankLost(f"{self.group.where(self.label)}: the group was closed before this ended")
        self._is_awaited = True
        with self.group.translated_errors(self.label):
            try:
                for at in range(len(works)):
                    works[at].wait()
            finally:
                del works   # a traceback that refers to them would keep the connection open
            self.group.ledger.waited += time.perf_counter() - begin
            result = self._finish()
        self.works = ()
        return result

    def __del__(self) -> None:
        if not self._is_awaited and self.works:
            self.group.in_flight.adopt(self.works)


def waits_here_too(wait: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`wait`, which may be called twice, for two streams: that in which it is called, and the current one. On a CPU it is `wait`."""
    if device.type != "cuda":
        return wait
    here = torch.cuda.current_stream(device)

    def both() -> None:
        if torch.cuda.current_stream(device) != here:
            # `here` first: so the result does not queue behind what the current stream was given, which then waits for the result only.
            with torch.cuda.stream(here):
                wait()
        wait()

    return both


def _place_in_stream(device: torch.device) -> torch.Event | None:
    """The place that the current stream has come to; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
