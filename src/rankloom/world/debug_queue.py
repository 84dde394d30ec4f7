"""The asynchronous calls of a group in debug mode: compared, then started, one after the other, in the background."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

Start = Callable[[Any], Any]
"""Starts a collective on a process group, and returns its work or works."""


class Compared:
    """The work of a call that is compared, then started, in the background."""

    def __init__(self, works: "Future[Any]"):
        self._works = works

    def wait(self) -> None:
        """Block until it is done. raises: what went wrong"""
        for work in works_in(self._works.result()):
            work.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, with or without an error."""
        if not self._works.done():
            return False
        return self._works.exception() is not None or all(work.is_completed() for work in works_in(self._works.result()))


class Queue:
    """The calls of one group. A thread makes them, and ends when there are no more."""

    def __init__(self) -> None:
        self._changed = threading.Condition()   # guards the rest
        self._calls: deque[Callable[[], None]] = deque()
        self._busy = False

    def behind(self, compare: Callable[[], None], start: Start) -> Start:
        """`start`, but in this queue, and after `compare`, which may raise."""
        begin = _with_settings_of_caller(start)

        def queue(pg: Any) -> Compared:
            works: Future[Any] = Future()
            self._add(partial(_make, works, compare, begin, pg))
            return Compared(works)

        return queue

    def drain(self, seconds: float | None = None) -> None:
        """Wait until all calls have been started, but at most so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, seconds)

    def _add(self, call: Callable[[], None]) -> None:
        with self._changed:
            if not self._busy:
                threading.Thread(target=self._work, name="rankloom-debug", daemon=True).start()   # first: it may fail
                self._busy = True
            self._calls.append(call)

    def _work(self) -> None:
        while call := self._next():
            call()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            if self._calls:
                return self._calls.popleft()
            self._busy = False
            self._changed.notify_all()
            return None


def _make(works: "Future[Any]", compare: Callable[[], None], begin: Start, pg: Any) -> None:
    try:
        compare()
        works.set_result(begin(pg))
    except BaseException as error:   # raised by the `wait` of this call
        works.set_exception(error.with_traceback(None))   # its frames refer to the connection


def _with_settings_of_caller(start: Start) -> Start:
    """`start` with the settings that this thread has now (stream, inference mode), for another thread."""
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    inference = torch.is_inference_mode_enabled()

    def begin(pg: Any) -> Any:
        with torch.cuda.stream(stream), torch.inference_mode(inference), torch.no_grad():
            return start(pg)

    return begin


def works_in(works: Any) -> list[Any]:
    """What a `Start` has returned, as a list."""
    return works if isinstance(works, list) else [works]
