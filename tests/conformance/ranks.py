"""Ranks as threads of one process, each with a hand-built process group. The one place that knows which backend is tested."""

import datetime
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from conformance.cases import Arena
from rankloom.world.connect import connect
from rankloom.world.transport.process_group import build

T = TypeVar("T")
TIMEOUT = 20.0     # seconds: what hangs is a failure
ARENA = 16 << 20   # bytes of shared memory for each rank of each group


def make_group(store: dist.Store, rank: int, size: int, timeout: float = TIMEOUT, backend: str = "rankloom") -> Any:
    """A process group of `size` ranks that meet in `store`, without the default group: many may live in one process."""
    if backend == "rankloom":
        return build(store, rank, size, timeout)
    return connect(store, rank, size, torch.device("cpu"), timeout=timeout, loopback=True, own_gpu=False)


class Ranks:
    """`size` ranks as threads. `groups[rank]` is the group of all, `halves[rank]` that of the ranks of this one's parity."""

    def __init__(self, size: int, timeout: float = TIMEOUT, backend: str = "rankloom"):
        self.size, self.timeout, self.backend = size, timeout, backend
        self._store, self._names = dist.HashStore(), itertools.count()
        self._threads = ThreadPoolExecutor(size)
        self._made: list[Any] = []
        self.closed = False
        self.groups = self.group(range(size))
        self.halves: list[Any] = [None] * size
        for parity in range(min(2, size)):
            self.halves[parity::2] = self.group(range(parity, size, 2))
        self.arenas = [self.run(lambda rank, groups=groups: self._arena(groups[rank]))   # [whether of the halves][rank]
                       for groups in (self.groups, self.halves)]

    def _arena(self, group: Any) -> Arena:
        return Arena(group.buffer((ARENA,), torch.uint8) if self.backend == "rankloom" else torch.empty(0, dtype=torch.uint8))

    def group(self, members: Sequence[int]) -> list[Any]:
        """A group of some of the ranks: one process group for each member, in the order given."""
        store = dist.PrefixStore(f"group {next(self._names)}", self._store)
        made = self.run(lambda at: make_group(store, at, len(members), self.timeout, self.backend), len(members))
        self._made += made
        return made

    def run(self, body: Callable[[int], T], size: int | None = None) -> list[T]:
        """`body(rank)` in a thread for each rank; when one fails, all are set free and the first failure is raised."""
        futures = [self._threads.submit(body, rank) for rank in range(self.size if size is None else size)]
        wait(futures, return_when=FIRST_EXCEPTION)
        if failed := [f for f in futures if f.done() and f.exception()]:
            self.close()
            raise failed[0].exception()   # type: ignore[misc]
        return [future.result() for future in futures]

    def errors(self, body: Callable[[int], Any]) -> list[BaseException | None]:
        """What each rank raises in `body(rank)`, or None."""
        futures = [self._threads.submit(body, rank) for rank in range(self.size)]
        return [future.exception() for future in futures]

    def close(self) -> None:
        """Set free whoever still waits, and give everything back."""
        self.closed = True
        for group in self._made:
            group.abort()
        self._made.clear()
        self._threads.shutdown()


def seconds(n: float) -> datetime.timedelta:
    """As torch wants it."""
    return datetime.timedelta(seconds=n)
