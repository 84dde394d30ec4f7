"""Sets the futures of works, in threads: C++ code waits for a future without calling this package.

These threads end before Python does. One that is in torch's C++ code when Python has ended cannot return to it, and aborts the process.
"""

import os
import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any, Protocol

import torch

PATIENCE = 5.0   # seconds at the end of Python for what is called back: it may wait for what never comes


class Awaited(Protocol):
    """Work, as a thread sees it that waits for its end."""

    def wait(self) -> bool:
        """Block until it has ended. raises: why it failed"""

    def result(self) -> Any:
        """What its future gets."""


class Herald:
    """Sets futures of collectives, which end in the order of the calls.

    The callbacks of a future may wait for other futures of this group (torch's PowerSGD does). So at any time, one thread runs none:
    it waits for the next work, or for a new entry in the queue. A thread keeps its herald only while it sets a future: they end when the
    herald is dropped, with its group and the works that have it.
    """

    def __init__(self) -> None:
        self._news: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        self._lock = threading.Lock()   # guards the rest
        self._threads: list[threading.Thread] = []
        self._free = 0   # threads that do not run callbacks of a future
        self._closed = False
        weakref.finalize(self, self._news.put, None).atexit = False
        _heralds.add(self)

    def announce(self, work: Awaited, future: torch.futures.Future) -> None:
        """Set `future` once `work` has ended. raises: RuntimeError if no thread can be started for it"""
        with self._lock:
            if is_open := not self._closed:
                self._attend()
                self._news.put((self, work, future))
        if not is_open:   # then nothing is in flight any more
            tell(work, future)

    def close(self, seconds: float | None = None) -> None:
        """End the threads, after they have handled the queue; wait for each, but at most so many seconds."""
        with self._lock:
            self._closed, threads = True, [*self._threads]
        self._news.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(seconds)

    def _attend(self) -> None:
        if not self._free:
            thread = threading.Thread(target=_run, args=(self._news,), name="rankloom-herald", daemon=True)
            thread.start()
            self._threads.append(thread)
            self._free += 1

    def tell_first(self, work: Awaited, future: torch.futures.Future) -> None:
        """For a thread that reads the queue: `tell` what came first in it."""
        tell(work, future, before=self._hand_over)
        with self._lock:
            self._free += 1

    def _hand_over(self) -> None:
        """Make sure that another thread reads the queue while this one runs the callbacks of a future."""
        with self._lock:
            self._free -= 1
            if not self._news.empty():
                with suppress(RuntimeError):   # this host starts no more threads: what is in the queue waits until this one is back
                    self._attend()


News = tuple[Herald, Awaited, torch.futures.Future]


def _run(news: "queue.SimpleQueue[News | None]") -> None:
    while (first := news.get()) is not None:
        herald, work, future = first
        herald.tell_first(work, future)
        del first, work, future, herald   # they refer to tensors, and the next may take long to come
    news.put(None)   # for the next thread


def tell(work: Awaited, future: torch.futures.Future, before: Callable[[], object] = bool) -> None:
    """Set `future` once `work` has ended; call `before` between the two."""
    try:
        work.wait()
    except Exception as error:   # not hidden: the future raises it
        before()
        future.set_exception(error)
    else:
        before()
        future.set_result(work.result())


def failing_in_cpp(future: torch.futures.Future) -> torch.futures.Future:
    """`future`, but C++ sees its error, too. For C++, `set_exception` sets a value, and DDP would read gradients from it."""
    return future.then(lambda ended: ended.value())


def tell_later(work: Awaited, future: torch.futures.Future) -> None:
    """`tell` in a thread of its own."""
    thread = threading.Thread(target=tell, args=(work, future), name="rankloom-message", daemon=True)
    _alone.add(thread)
    thread.start()


_heralds: "weakref.WeakSet[Herald]" = weakref.WeakSet()
_alone: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()   # those of `tell_later`


def _end_with_python() -> None:
    """When Python ends, wait for all threads. Groups are left before (priority 0, channel.py), so no work is under way any more."""
    _heralds.clear()   # in a forked child: those of its parent
    _alone.clear()
    Finalize(None, _end_all, exitpriority=-1)


def _end_all() -> None:
    for herald in list(_heralds):
        herald.close(PATIENCE)
    for thread in list(_alone):
        thread.join(PATIENCE)


_end_with_python()
os.register_at_fork(after_in_child=_end_with_python)
