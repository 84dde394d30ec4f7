"""NCCL, for ranks that each have a GPU of their own: its collectives unchanged, and one connection for each direction of messages.

NCCL makes a connection when both ends call, and blocks them until then: ranks in a ring, each of which first receives from the one
before, would all wait for each other. So a thread makes it, and messages posted meanwhile start when it is there. One connection
runs all messages in the order of the calls: with one for both directions, two ranks that both receive first would never send.
"""

import datetime
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankloom.base.errors import CollectiveTimeout, ConfigError
from rankloom.world.transport.meet import ask_store, wait_for
from rankloom.world.transport.work import Work

CUDA = torch.device("cuda")
SIDE = -2   # a priority of its own: torch hands out streams in turns, and one of priority 0 may be NCCL's, which waits for other ranks


class Nccl:
    """The methods of a process group of ranks with a GPU of their own."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float, device: torch.device):
        self._store, self._rank, self._size, self._timeout, self._device = store, rank, size, timeout, device
        self._lock = threading.Lock()   # guards the rest
        self._all: dist.ProcessGroup | None = None
        self._lanes: dict[tuple[int, int], Lane] = {}   # by sender and receiver

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        with self._lock:
            if self._all is None:
                self._all = nccl_group(dist.PrefixStore("nccl all", self._store), self._rank, self._size, self._timeout)
        return getattr(self._all, name)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        """Send to one rank."""
        return self._lane(self._rank, to).post(tensors)

    def recv(self, tensors: list[Tensor], frm: int, tag: int = 0) -> Any:
        """Receive from one rank."""
        return self._lane(frm, self._rank).post(tensors)

    def abort(self) -> None:
        """End every wait of this rank."""
        for group in self._groups():
            group.abort()

    def shutdown(self) -> None:
        """Leave, after all messages have started."""
        for lane in [*self._lanes.values()]:
            lane.join()
        for group in self._groups():
            group.shutdown()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set how long a call may take, from now on."""
        self._timeout = timeout.total_seconds()
        for group in self._groups():
            group._get_backend(CUDA)._set_default_timeout(timeout)

    def _groups(self) -> list[dist.ProcessGroup]:
        """All groups, in the same order on all ranks: NCCL closes a connection only when both ends do."""
        with self._lock:
            return [group for group in (self._all, *(self._lanes[ends].group for ends in sorted(self._lanes))) if group is not None]

    def _lane(self, frm: int, to: int) -> "Lane":
        if frm == to:
            raise ConfigError(f"rank {frm}: a message to itself, for which NCCL has no connection; copy the tensor")
        with self._lock:
            if (frm, to) not in self._lanes:   # a store of its own: a thread that waits in a store blocks it for all others
                store = dist.PrefixStore(f"nccl {frm} {to}", self._store.clone())   # type: ignore[attr-defined]
                self._lanes[frm, to] = Lane(store, self._rank, (frm, to), self._timeout, self._device)
            return self._lanes[frm, to]


class Lane:
    """The messages from one rank to another, at either end. ends: sender and receiver; `rank` is one of them, this one"""

    def __init__(self, store: dist.Store, rank: int, ends: tuple[int, int], timeout: float, device: torch.device):
        self._store, self._rank, self._ends, self._timeout, self._device = store, rank, ends, timeout, device
        self.group: dist.ProcessGroup | None = None
        self._problem: Exception | None = None       # why there is no connection
        self._lock = threading.Lock()
        self._waiting: list[Later] | None = []       # messages that wait for the connection; None: it exists, or has failed
        self._thread = threading.Thread(target=self._connect, name="rankloom-nccl", daemon=True)
        self._thread.start()

    def post(self, tensors: list[Tensor]) -> Any:
        """Send or receive, after what the caller has submitted."""
        with self._lock:
            if self._waiting is not None:
                self._waiting.append(Later(partial(self._pass, tensors), tensors, self._device, str(self)))
                return self._waiting[-1]
        return self._pass(tensors)

    def join(self) -> None:
        """Block until every posted message has started, or has failed to."""
        self._thread.join(self._timeout)

    def __str__(self) -> str:
        return f"rank {self._rank}: a message from rank {self._ends[0]} to rank {self._ends[1]}"

    def _pass(self, tensors: list[Tensor]) -> Any:
        if self._problem or self.group is None:
            raise self._problem or AssertionError("called before there is a connection")
        return self.group.send(tensors, 1, 0) if self._rank == self._ends[0] else self.group.recv(tensors, 0, 0)

    def _connect(self) -> None:
        with torch.cuda.stream(torch.cuda.Stream(self._device, priority=SIDE)):
            try:
                self._meet()
            except Exception as error:   # not hidden: every message raises it
                self._problem = error
            with self._lock:
                for later in self._waiting or ():
                    later.begin()
                self._waiting = None

    def _meet(self) -> None:
        """Connect, and pass one message, not after the caller's work: the first message blocks both ends until both are there."""
        here = self._ends.index(self._rank)
        ask_store(lambda: self._store.set(f"end {here}", ""), self._rank, self._timeout)
        wait_for(self._store, {f"end {1 - here}": self._ends[1 - here]}, self._rank, self._timeout)
        self.group = nccl_group(self._store, here, 2, self._timeout)
        self._pass([torch.empty(1, device=self._device)])


class Later(Work):
    """A message that starts when there is a connection."""

    def __init__(self, call: Callable[[], Any], tensors: list[Tensor], device: torch.device, where: str):
        super().__init__(tensors)
        self._call, self._device, self._where = call, device, where
        self._place = torch.cuda.current_stream(device).record_event()
        self._begun = threading.Event()
        self._work: Any = None
        self._problem: Exception | None = None

    def begin(self) -> None:
        """Start it in the current stream, after what its caller had submitted."""
        torch.cuda.current_stream(self._device).wait_event(self._place)
        try:
            self._work = self._call()
        except Exception as error:   # not hidden: `wait` raises it
            self._problem = error
        self._begun.set()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Block until it has started; what the caller submits from here on runs after its end. raises: RankLost, CollectiveTimeout"""
        limit = timeout if timeout is not None and timeout > datetime.timedelta() else None   # torch's C++ code passes zero for no timeout
        if not self._begun.wait(limit.total_seconds() if limit else None):
            raise CollectiveTimeout(f"{self._where} has no connection within {limit}: the other rank has not come")
        if self._problem:
            raise self._problem
        return bool(self._work.wait(limit) if limit else self._work.wait())

    def is_completed(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._begun.is_set() and (self._problem is not None or bool(self._work.is_completed()))

    def exception(self) -> Exception | None:
        """Why it failed, or None."""
        return self._problem

    def get_future(self) -> torch.futures.Future:
        """A future of its end; blocks until it has started."""
        self._begun.wait()
        if self._problem:
            raise self._problem
        return self._work.get_future()   # type: ignore[no-any-return]


def nccl_group(store: dist.Store, rank: int, size: int, timeout: float) -> dist.ProcessGroup:
    """A process group on NCCL alone. Ranks meet at its first call."""
    group, options = dist.ProcessGroup(store, rank, size), dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=timeout)
    kind = dist.ProcessGroup.BackendType.NCCL
    group._set_default_backend(kind)
    group._register_backend(CUDA, kind, dist.ProcessGroupNCCL(store, rank, size, options))
    return group
