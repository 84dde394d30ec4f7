"""`simulate(n, body)`: run ranks as threads of this process, over a real backend. For tests, and for reading code."""

import atexit
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rankloom.base.errors import RankLost
from rankloom.base.mesh import Mesh
from rankloom.base.quantities import seconds
from rankloom.base.topology import Topology
from rankloom.world.connect import GLOO
from rankloom.world.failure import bare_failure, raisable
from rankloom.world.launch import debug_mode
from rankloom.world.open_files import make_room
from rankloom.world.referee import Referee
from rankloom.world.world import SPARE, Meeting, SharedProcess, World, as_mesh

T = TypeVar("T")
RESOLVING = threading.Lock()
GRACE = 1.0   # seconds for the other ranks to end once a rank has failed
POLL = 0.05


def simulate(ranks: int | Mesh, body: Callable[[World], T], *, timeout: float = 60.0,
             topology: Topology | None = None, backend: str = GLOO) -> list[T]:
    """Run `body(world)` in threads of this process, one for each rank, over real gloo. Returns their results in rank order.

    When a rank raises, the others are woken at once, and the first exception is raised here with a note that names the rank. If
    gloo cannot wake a thread, it is left to its time-out after a second. For `sys.exit` in a rank this raises RankFailed; when ranks make
    different calls, or one returns while another waits for it, CollectiveMismatch (with "rankloom" RankLost).
    Starts in milliseconds. Ranks share the interpreter, so this is for tests and for reading, not for speed. They also share torch's
    default generator: what a body draws from it depends on which rank comes first, even after `torch.manual_seed`. Make models before,
    or draw from a generator of the body's own.
    topology: the nodes to simulate; by default one
    backend:  "gloo", or "rankloom" for shared memory
    """
    job = _Simulation(ranks, body, timeout, topology, backend)
    with RESOLVING:
        _resolve_operators()
    threads_before = torch.get_num_threads()
    try:
        return job.run()
    finally:
        torch.set_num_threads(threads_before)


class _Meetings:
    """Where ranks that make a group wait for each other before they connect: gloo cannot be set free when it waits for one that has failed.

    news:     guards the others
    over:     why no group can be made any more, or nothing
    gone:     the ranks whose world has been closed, or whose body has returned with no call in flight
    left:     the ranks whose body has returned
    came:     by group: how many of its ranks have come
    referees: by group: what compares the calls of its ranks
    opening:  by group: the files that ranks which are connecting now may still open
    """

    def __init__(self, timeout: float, gone: Callable[[], list[int]]):
        self.news, self.over, self.timeout, self.gone = threading.Condition(), "", timeout, gone
        self.left: set[int] = set()
        self.came: Counter[str] = Counter()
        self.referees: defaultdict[str, Referee] = defaultdict(Referee)
        self.opening: Counter[str] = Counter()

    @contextmanager
    def meet(self, meeting: Meeting) -> Iterator[SharedProcess]:
        """Wait until all ranks of a group are here; inside, they connect.

        raises: RankLost when one fails, or they do not come in time; ConfigError, on the last, if they may not open so many files
        """
        group, ranks, place, files = meeting
        deadline, size = time.monotonic() + self.timeout, len(ranks)
        with self.news:
            if self.came[group] + 1 == size:   # the others still wait: if there is no room, nobody connects
                make_room(self.opening.total() + size * files + SPARE, f"a group of {size} ranks in one process")
                self.opening[group] = size * files
            self.came[group] += 1
            referee = self.referees[group]
            self.news.notify_all()
            while self.came[group] < size:
                returned = [f"rank {rank} has returned from its body" for rank in ranks if rank in self.left]
                if self.over or returned or not self.news.wait(deadline - time.monotonic()):
                    self.came[group] -= 1
                    why = self.over or ", ".join(returned) or f"the others did not come within {self.timeout:g} s"
                    raise RankLost(f"rank {ranks[place]}: only {self.came[group] + 1} of {size} ranks came to make a group; {why}")
        try:
            yield SharedProcess(self.gone, referee)
        finally:
            with self.news:
                self.opening[group] -= files
                self.news.notify_all()

    def leave(self, rank: int) -> None:
        """A rank's body has returned: tell those that wait for it to make a group."""
        with self.news:
            self.left.add(rank)
            self.news.notify_all()

    def end(self, why: str) -> None:
        """Before a rank closes: set free those that wait, and let those that connect finish."""
        with self.news:
            self.over = self.over or why
            self.news.notify_all()
            self.news.wait_for(lambda: not self.opening.total(), GRACE)


class _Simulation:
    """One call of `simulate`: a world for each thread, and what failed."""

    def __init__(self, ranks: int | Mesh, body: Callable[[World], Any], timeout: float, topology: Topology | None, backend: str):
        size = as_mesh(ranks).size
        self.ranks, self.body, self.timeout, self.topology, self.backend = ranks, body, timeout, topology, backend
        self.store = dist.HashStore()
        self.store.set_timeout(seconds(timeout))
        self.failed: list[tuple[int, BaseException]] = []   # in the order in which the ranks told of it
        self.failed_at = 0.0   # by the monotonic clock; 0 while no rank has failed
        self.meetings = _Meetings(timeout, self._gone)
        self.interrupted = False   # set before the worlds are closed: one that comes after that closes itself
        self.results: list[Any] = [None] * size
        self.worlds: list[World | None] = [None] * size

    def run(self) -> list[Any]:
        threads = [threading.Thread(target=self._one, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(len(self.worlds))]
        try:
            for thread in threads:
                thread.start()
            ended = [self._join(thread) for thread in threads]
        except BaseException:   # Ctrl-C, perhaps before all have started
            self.failed_at, self.interrupted = self.failed_at or time.monotonic(), True
            self.meetings.end("the simulation was interrupted")
            for thread in [*threads, *_start_to_close(self.worlds)]:
                self._join(thread)
            raise
        # Close only now: a slower rank may still read from one that ended early.
        for thread in _start_to_close([world for world, has_ended in zip(self.worlds, ended) if has_ended]):
            thread.join()
        if self.failed:
            lost_another = lambda failed: bare_failure(failed[1]).lost_another
            rank, error = min(self.failed, key=lost_another)   # the earliest of several that are alike
            raise raisable(error, rank, len(self.worlds))
        return self.results

    def _gone(self) -> list[int]:
        joined = [(rank, world) for rank, world in enumerate(self.worlds) if world is not None]
        return [rank for rank, world in joined if world._process_group is None or (rank in self.meetings.left and world.has_ended)]

    def _join(self, thread: threading.Thread) -> bool:
        """Wait until a rank has ended; once another has failed, only for a moment. Returns whether it has ended.

        gloo does not always wake a call whose peer is gone; such a thread is left to its time-out.
        """
        while thread.is_alive() and not (self.failed_at and time.monotonic() > self.failed_at + GRACE):
            thread.join(POLL)
        if thread.is_alive():
            atexit.register(thread.join, self.timeout)   # Python must not exit while this thread may still return to it
        return not thread.is_alive()

    def _one(self, rank: int) -> None:
        torch.set_num_threads(1)   # the threads of the ranks already fill the cores
        try:
            world = World(self.store, rank, self.ranks, torch.device("cpu"), timeout=self.timeout,
                          local_rank=rank, local_size=len(self.worlds), debug=debug_mode(), topology=self.topology,
                          backend=self.backend, meet=self.meetings.meet)
            self.worlds[rank] = world
            if self.interrupted:
                world.close()
            self.results[rank] = self.body(world)
            self.meetings.leave(rank)
            world.leave()
        except BaseException as error:   # handed to the caller of simulate, never swallowed
            with self.meetings.news:
                self.failed_at = self.failed_at or time.monotonic()
                self.failed.append((rank, error))
            self.meetings.end(f"rank {rank} has failed")
            if joined := self.worlds[rank]:
                joined.close()


def _start_to_close(worlds: Sequence[World | None]) -> list[threading.Thread]:
    """Close worlds, each in a thread: gloo waits for the calls that a rank has begun, and these for other ranks, until those close too."""
    closing = [threading.Thread(target=world.close) for world in worlds if world is not None]
    for thread in closing:
        thread.start()
    return closing


@cache
def _resolve_operators() -> None:
    """Create torch's Python object of every operator now, once in a process.

    torch creates each object when a dispatch mode (recompute, the first deterministic step) first sees the operator. If two threads do
    so at once, each creates one, and one of the two is freed. torch may have kept the freed one: then the process crashes.
    """
    for name in torch._C._dispatch_get_all_op_names():   # those of torch.distributed (c10d) among them
        namespace, _, operator = name.partition("::")
        operator, _, overload = operator.partition(".")
        getattr(getattr(getattr(torch.ops, namespace), operator, None), overload or "default", None)
