"""Ranks as threads of one process, each with a hand-built process group. The one place that knows which backend is tested."""

import contextlib
import datetime
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from conformance.cases import Arena
from rankloom.world.connect import connect
from rankloom.world.transport import channel
from rankloom.world.transport.process_group import build

T = TypeVar("T")
TIMEOUT = 20.0     # seconds: what hangs is a failure
MEETING = 60.0     # seconds for ranks to find each other, which a short time-out must not begin with
ARENA = 16 << 20   # bytes of shared memory for each rank of each group


def make_group(store: dist.Store, rank: int, size: int, timeout: float = TIMEOUT, host: str | None = None) -> Any:
    """A process group of `size` ranks that meet in `store`, without the default group: many may live in one process.

    host: where this rank pretends to be
    """
    return build(store, rank, size, timeout, name="world", host=host)


def make_gloo_group(store: dist.Store, rank: int, size: int, timeout: float, host: str | None) -> Any:
    """The same on gloo, for what it can do too."""
    return connect(store, rank, size, torch.device("cpu"), timeout=timeout, loopback=True, own_gpu=False)


def only_kernel(name: str | None) -> Any:
    """A context in which groups are made with this kernel."""
    return mock.patch.object(channel, "KERNELS", {name: channel.KERNELS[name]}) if name else contextlib.nullcontext()


class Ranks:
    """`size` ranks as threads. `groups[rank]` is the group of all, `halves[rank]` that of the ranks of this one's parity.

    kernel: the part of the backend that is tested, "C" or "Python"; None is gloo
    hosts:  a name for each rank, of the host on which it pretends to be
    """

    def __init__(self, size: int, timeout: float = TIMEOUT, kernel: str | None = "C", hosts: Sequence[str] = ()):
        self.size, self.timeout, self.kernel, self.hosts = size, timeout, kernel, list(hosts) or [None] * size
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
        return Arena(group.buffer((ARENA,), torch.uint8) if self.kernel else torch.empty(0, dtype=torch.uint8))

    def group(self, members: Sequence[int]) -> list[Any]:
        """A group of some of the ranks: one process group for each member, in the order given."""
        store = dist.PrefixStore(f"group {next(self._names)}", self._store)
        make = make_group if self.kernel else make_gloo_group
        with only_kernel(self.kernel):
            made = self.run(lambda at: make(store, at, len(members), MEETING, self.hosts[members[at]]), len(members))
        for each in made:
            each.set_timeout(seconds(self.timeout))
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


BACKENDS = ("C", "Python", "hosts")


def make_ranks(backend: str, size: int, timeout: float = TIMEOUT) -> Ranks:
    """`size` ranks on one host, on a kernel; or on several, of 2, 2 and 1 ranks and not in order."""
    if backend == "hosts":
        return Ranks(size, timeout, hosts=[f"host {rank % 5 // 2}" for rank in range(size)])
    return Ranks(size, timeout, kernel=backend)


def seconds(n: float) -> datetime.timedelta:
    """As torch wants it."""
    return datetime.timedelta(seconds=n)
