"""A thread that runs collectives written in Python while backward goes on in the main thread.

The main thread's backward may call collectives as well (SyncBatchNorm, a contrastive loss). Which thread calls first differs between
ranks; on one connection the calls would be mixed up. So the worker has its own (`Group.twin`).
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from rankloom.world.group import Group

Job = Callable[[], Any]


class Worker:
    """Runs jobs in one thread, in the order of `submit`: collectives over `group`, which is used for nothing else.

    A daemon thread, unlike that of an executor: if it waits for a lost rank, it must not keep the program from ending.
    """

    def __init__(self, group: Group):
        self.group = group
        self._jobs: SimpleQueue[tuple[Job, Future] | None] = SimpleQueue()
        Thread(target=_run, args=(self._jobs,), name="all-reduce", daemon=True).start()   # not given `self`: that would keep it alive
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Job) -> Callable[[], Any]:
        """Queue `job` behind those submitted before. Returns a function that waits for its result."""
        future: Future = Future()
        self._jobs.put((job, future))
        return future.result


_WORKERS: weakref.WeakKeyDictionary[Group, weakref.ref[Worker]] = weakref.WeakKeyDictionary()


def worker_beside(group: Group) -> Worker | None:
    """The worker of `group`, the same for all callers; it lives as long as a caller holds it. None on a GPU, or alone. A collective.

    A process group that the user made has no second connection: the worker uses the first, and backward must not use it.
    """
    if group.device.type != "cpu" or group.size == 1:
        return None
    worker = found() if (found := _WORKERS.get(group)) else None
    if worker is None:
        worker = Worker(group.twin() if group.twin else group)
        _WORKERS[group] = weakref.ref(worker)
    return worker


def start_beside(worker: Worker | None, job: Callable[[Group], Any], group: Group) -> Callable[[], Any]:
    """Start a collective that is written in Python, over the ranks of `group`. Returns a function that waits for its result.

    Without a worker it runs at once: on a GPU its kernels are queued, and the stream keeps their order.
    """
    if worker is not None:
        return worker.submit(partial(job, worker.group))
    result = job(group)
    return lambda: result


def _run(jobs: SimpleQueue) -> None:
    while submitted := jobs.get():
        job, future = submitted
        try:
            future.set_result(job())
        except BaseException as error:   # raised in the thread that waits for the result
            future.set_exception(error)
        del submitted, job, future   # they hold tensors, and the next job may come much later
