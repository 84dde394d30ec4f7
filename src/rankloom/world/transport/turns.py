"""Run the calls of one group one after the other: in the caller's thread if no other call is first, else in a background thread."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from rankloom.world.transport.codes import FINE, INTERRUPTED, LEFT, TIMED_OUT

T = TypeVar("T")   # a call


class Turns(Generic[T]):
    """A queue of calls. `perform` runs one, and returns why it failed, or FINE."""

    def __init__(self, perform: Callable[[T], int]):
        self.finished = 0                         # the last ticket whose call has ended
        self._perform = perform
        self._changed = threading.Condition()     # guards everything below
        self._queue: deque[T] = deque()
        self._running = self._closing = False
        self._issued = 0
        self._failed: tuple[int, int] | None = None   # the first ticket that failed, and why
        self._worker: threading.Thread | None = None

    def run(self, call: T) -> int:
        """Run a call when those before it have ended. Returns why it failed, or FINE."""
        at_once = False
        try:   # from here on: an interrupt may come as soon as the turn is taken
            with self._changed:
                if at_once := not (self._queue or self._running or self._closing):
                    self._running = True
            if at_once:
                return self._perform(call)
        finally:
            if at_once:
                self._end_turn()
        return self.wait(self.submit(call), threading.TIMEOUT_MAX)

    def submit(self, call: T) -> int:
        """Queue a call to run in the background. Returns its ticket. raises: RuntimeError if no thread can be started for it"""
        with self._changed:
            if self._worker is None:
                worker = threading.Thread(target=self._work, name="rankloom-calls", daemon=True)
                worker.start()   # before anything is queued, which would never run
                self._worker = worker
            self._issued += 1
            self._queue.append(call)
            self._changed.notify_all()
            return self._issued

    def wait(self, ticket: int, seconds: float) -> int:
        """Wait until a ticket's call has ended. Returns why it failed, FINE, or TIMED_OUT: then it may still end."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self.finished < ticket and not self._closing:
                if (left := deadline - time.monotonic()) <= 0:
                    return TIMED_OUT
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            if self._failed and ticket >= self._failed[0]:
                return self._failed[1]
            return FINE if self.finished >= ticket else LEFT

    def close(self) -> None:
        """Accept no more calls, and drop those in the queue. A running call must end by itself."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._worker and self._worker is not threading.current_thread():
            self._worker.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or (self._queue and not self._running))
                if self._closing:
                    return
                self._running, call = True, self._queue[0]
            self._make(call)

    def _make(self, call: T) -> None:
        why = INTERRUPTED   # unless it returns
        try:
            why = self._perform(call)
        finally:
            with self._changed:
                self._queue.popleft()
                self.finished += 1
                if why and not self._failed:
                    self._failed = self.finished, why
                self._closing |= why == INTERRUPTED
            self._end_turn()

    def _end_turn(self) -> None:
        with self._changed:
            self._running = False
            self._changed.notify_all()
