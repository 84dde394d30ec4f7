"""A thread beside backward, for all-reduces that are written in Python: nobody runs these but the interpreter."""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

Job = Callable[[], Any]


class Worker:
    """Runs jobs in one thread, in the order in which they are given to it.

    A daemon, unlike an executor's thread: one that waits for a lost rank must not hold up the end of the program.
    """

    def __init__(self, name: str):
        self._jobs: SimpleQueue[tuple[Job, Future] | None] = SimpleQueue()
        Thread(target=_run, args=(self._jobs,), name=name, daemon=True).start()   # given no `self`, which could never end then
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Job) -> Callable[[], Any]:
        """Start `job` when all that were submitted before have ended. Returns a function that waits for its result."""
        future: Future = Future()
        self._jobs.put((job, future))
        return future.result


def _run(jobs: SimpleQueue) -> None:
    while submitted := jobs.get():
        job, future = submitted
        try:
            future.set_result(job())
        except BaseException as error:   # raised where the result is waited for
            future.set_exception(error)
        del submitted, job, future   # they hold tensors, and the next may be long in coming
