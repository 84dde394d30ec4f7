"""Work that some ranks do while the others wait for it, however long it takes.

With a plain barrier, an hour of tokenising would end the job by time-out. Here ranks exchange signs of life several times a second, so
only a lost rank ends the job.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rankloom.base import errors
from rankloom.base.errors import RankLost
from rankloom.world.world import World

SECONDS_BETWEEN_SIGNS = 0.05
T = TypeVar("T")


class _Worker(threading.Thread):
    """Runs `work` and keeps what it returned or raised."""

    def __init__(self, work: Callable[[], object]):
        super().__init__(daemon=True, name="rankloom-work")
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:   # raised in the thread that waits
            self.error = error


def while_others_wait(world: World, work: Callable[[], T] | None, *, label: str) -> T | None:
    """Run `work` in a thread; None on a rank without work. Returns on every rank when all work is done: what its own returned, or None.
    A collective.

    raises: on a rank whose `work` raised: that error. On the others: a copy of it if it is a user's mistake (a ValueError of
            base/errors.py), else RankLost, which names the rank
    """
    worker = _Worker(work) if work else None
    if worker:
        worker.start()
    is_going_on = True
    while is_going_on:
        if worker:   # the others wait in the collective
            worker.join(SECONDS_BETWEEN_SIGNS)
        is_going_on = _any_alive(world, worker, label)
    error = worker.error if worker else None
    told = world.all_gather_object([type(error).__name__, str(error) or repr(error)] if error else None, label=label)
    if error is not None:
        raise error
    for rank, said in enumerate(told):
        if said:
            name, text = said
            raise _retold(name, text, f"rank {world.rank}: {label}: rank {rank}, which did it, failed")
    return worker.result if worker else None


def _retold(name: str, text: str, where: str) -> Exception:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, ValueError):
        return kind(text)
    return RankLost(f"{where}: {name}: {text}")


def _any_alive(world: World, worker: threading.Thread | None, label: str) -> bool:
    alive = torch.tensor([float(worker is not None and worker.is_alive())], dtype=torch.float32, device=world.device)
    return bool(world.all_reduce(alive, op="max", label=label).item())
