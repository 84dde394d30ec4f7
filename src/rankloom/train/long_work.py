"""Work that some ranks do while the others wait for it, however long it takes.

With a plain barrier, an hour of tokenising would end the job by time-out. Here ranks exchange signs of life several times a second, so
only a lost rank ends the job.
"""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any, TypeVar

import torch

from rankloom.base import errors
from rankloom.base.errors import RankLost
from rankloom.world.world import World

SECONDS_BETWEEN_SIGNS = 0.05
T = TypeVar("T")


def while_others_wait(world: World, work: Callable[[], T] | None, *, label: str) -> T | None:
    """Run `work` in a thread; None on a rank without work. Returns on every rank when all work is done: what its own returned, or None.
    A collective.

    raises: on a rank whose `work` raised: that error. On the others: a copy of it if it is a user's mistake (a ValueError of
            base/errors.py), else RankLost, which names the rank
    """
    mine: Future[T | None] = Future()
    if work is None:
        mine.set_result(None)
    else:   # a daemon thread, unlike that of an executor: where a rank is lost, it must not keep the program from ending
        Thread(target=_run, args=(work, mine), daemon=True, name="rankloom-work").start()
    is_going_on = True
    while is_going_on:
        wait([mine], SECONDS_BETWEEN_SIGNS)   # a rank without work waits in the collective
        alive = torch.tensor([float(not mine.done())], dtype=torch.float32, device=world.device)
        is_going_on = bool(world.all_reduce(alive, op="max", label=label).item())
    error = mine.exception()
    told = world.all_gather_object([type(error).__name__, str(error) or repr(error)] if error else None, label=label)
    if error is not None:
        raise error
    for rank, said in enumerate(told):
        if said:
            name, text = said
            raise _retold(name, text, f"rank {world.rank}: {label}: rank {rank}, which did it, failed")
    return mine.result()


def _run(work: Callable[[], Any], mine: Future[Any]) -> None:
    try:
        mine.set_result(work())
    except BaseException as error:   # raised in the thread that waits
        mine.set_exception(error)


def _retold(name: str, text: str, where: str) -> Exception:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, ValueError):
        return kind(text)
    return RankLost(f"{where}: {name}: {text}")
