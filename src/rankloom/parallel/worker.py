"""A thread beside backward, for all-reduces that are written in Python: nobody runs these but the interpreter.

Backward may have collectives of its own meanwhile: of a loss over the rows of all ranks, of a SyncBatchNorm. Which thread comes
first is chance, and not the same on all ranks; so the thread has a connection of its own.
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

from rankloom.world.group import Group

Job = Callable[[], Any]


class Worker:
    """Runs jobs in one thread, in the order in which they are given to it: all-reduces over `group`, which nobody else uses.

    A daemon, unlike an executor's thread: one that waits for a lost rank must not hold up the end of the program.
    """

    def __init__(self, group: Group):
        self.group = group
        self._jobs: SimpleQueue[tuple[Job, Future] | None] = SimpleQueue()
        Thread(target=_run, args=(self._jobs,), name="all-reduce", daemon=True).start()   # given no `self`, which could never end then
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Job) -> Callable[[], Any]:
        """Start `job` when all that were submitted before have ended. Returns a function that waits for its result."""
        future: Future = Future()
        self._jobs.put((job, future))
        return future.result


_WORKERS: weakref.WeakKeyDictionary[Group, weakref.ref[Worker]] = weakref.WeakKeyDictionary()


def worker_beside(group: Group) -> Worker:
    """The one worker beside the backward passes over `group`; it lives as long as somebody holds it. Every rank must ask for it.

    A process group made elsewhere has no second connection: the worker uses that one, and backward must not.
    """
    worker = found() if (found := _WORKERS.get(group)) else None
    if worker is None:
        worker = Worker(group.twin() if group.twin else group)
        _WORKERS[group] = weakref.ref(worker)
    return worker


def _run(jobs: SimpleQueue) -> None:
    while submitted := jobs.get():
        job, future = submitted
        try:
            future.set_result(job())
        except BaseException as error:   # raised where the result is waited for
            future.set_exception(error)
        del submitted, job, future   # they hold tensors, and the next may be long in coming
