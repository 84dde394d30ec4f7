"""Ranks as processes that are killed, stopped or told to give up in the middle of collectives; and what the others must then say.

A pool of processes is kept. For each injection some of them build a group and call random collectives for ever; the parent
strikes one at a random moment, listens to the survivors, lets them build a new group, and looks for what was left behind.
"""

import contextlib
import gc
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from conformance.ranks import make_group, seconds
from patience import AT_ONCE, threads_of_this_process

KINDS = ("kill", "exit", "abort", "stop")
LARGEST = 5        # ranks
POOL = 7           # processes: those that replace the dead start while others are at work
PATIENT = 60.0     # seconds that a group waits, but for
STOPPED = 2.0      # when a rank is stopped: only the time-out can tell that from a slow one, and no other rank may be as slow


@dataclass(frozen=True)
class Injection:
    """Strike rank `victim` of `size`, `delay` seconds after all have begun."""

    kind: str
    size: int
    victim: int
    delay: float
    seed: int
    hosts: str = ""   # a letter for each rank, of the host on which it pretends to be

    @staticmethod
    def draw(seed: int, kind: str | None = None, hosts: str = "") -> "Injection":
        """A random one; on `hosts`, or on one."""
        rng = random.Random(seed)
        size = len(hosts) or rng.randint(2, LARGEST)
        return Injection(kind or rng.choice(KINDS), size, rng.randrange(size), rng.uniform(0, 0.03), seed, hosts)

    @property
    def timeout(self) -> float:
        """The group's, in seconds."""
        return STOPPED if self.kind == "stop" else PATIENT


@dataclass
class Outcome:
    """What came of it; all was well when there are no problems.

    latency: seconds from the strike (from the end of the time-out, when stopped) until the last survivor was told
    late: seconds that the last survivor was told after it could be: the rank had gone, or the time-out had ended
    waited: seconds from the beginning of a survivor's call until it was told, the most of any
    """

    injection: Injection
    latency: float = 0.0
    late: float = 0.0
    waited: float = 0.0
    errors: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Told(NamedTuple):
    """What ended a rank's calls: an error, when it came, and when the call that raised it began, by the monotonic clock."""

    kind: str
    text: str
    when: float
    began: float


class Held(NamedTuple):
    """How many of each a process has."""

    descriptors: int
    threads: int
    mappings: int


# ---------------------------------------------------------------- in the processes


def one_call(group: Any, rng: random.Random) -> None:
    """A random collective, the same on all ranks; in the background or not. A wrong value is a failure too."""
    rank, size = group.rank(), group.size()
    n = rng.choice((1, 1000, 20_000, 300_000))
    name = rng.choice(("all_reduce", "all_gather", "all_to_all", "barrier", "ring"))
    options = {"all_reduce": dist.AllreduceOptions, "barrier": dist.BarrierOptions}.get(name, dist.AllToAllOptions)()
    options.asyncOp = rng.random() < 0.5
    x, out = torch.full((n,), float(rank)), torch.empty(n * size)
    if name == "all_reduce":
        works, got, expected = [group.allreduce([x], options)], x, sum(range(size))
    elif name == "all_gather":
        works, got, expected = [group._allgather_base(out, x)], out, size - 1
    elif name == "all_to_all":
        works, got, expected = [group.alltoall_base(out, x.repeat(size), [], [], options)], out, size - 1
    elif name == "barrier":
        works, got, expected = [group.barrier(options)], x, rank
    else:
        works = [group.recv([out[:n]], (rank - 1) % size, 0), group.send([x], (rank + 1) % size, 0)]
        got, expected = out[:n], (rank - 1) % size
    for work in works:
        work.wait()
    assert got[-1].item() == expected, f"{name} gave {got[-1].item()}, expected {expected}"


def run_until_it_fails(pipe: Any, store: Any, held: dict, name: str, rank: int, injection: Injection) -> None:
    """Build a group and use it; report what ended it, and when that call began."""
    rng, began = random.Random(injection.seed), 0.0
    try:
        host = injection.hosts[rank] if injection.hosts else None
        held["group"] = make_group(dist.PrefixStore(name, store), rank, injection.size, PATIENT, host=host)
        held["group"].barrier().wait()
        held["group"].set_timeout(seconds(injection.timeout))
        pipe.send("ready")
        while True:
            began = time.monotonic()
            one_call(held["group"], rng)
    except Exception as error:   # not hidden: it is what the parent waits for
        told = Told(type(error).__name__, str(error), time.monotonic(), began)
    if group := held.pop("group", None):
        group.shutdown()
    del group
    pipe.send(told)


def use_once(store: Any, name: str, rank: int, size: int) -> Held:
    """Build a group, use it and leave it; what this process holds afterwards."""
    group = make_group(dist.PrefixStore(name, store), rank, size)
    rng = random.Random(0)
    for _ in range(10):
        one_call(group, rng)
    group.barrier().wait()
    mapped = Path("/proc/self/maps").read_text()
    assert "memfd:" in mapped and "/dev/shm" not in mapped, "memory with a name may outlive its processes"
    group.shutdown()
    del group
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    return Held(descriptors, threads_of_this_process(), Path("/proc/self/maps").read_text().count("memfd:"))


def serve(pipe: Any, port: int) -> None:
    """What a process of the pool does: the parent's commands, until it hangs up."""
    torch.set_num_threads(1)
    store, held = dist.TCPStore("127.0.0.1", port, is_master=False), {}
    thread = threading.Thread()
    pipe.send(use_once(store, f"alone {os.getpid()}", 0, 1))
    with contextlib.suppress(EOFError):
        while True:
            command, *arguments = pipe.recv()
            if command == "run":
                thread = threading.Thread(target=run_until_it_fails, args=(pipe, store, held, *arguments), daemon=True)
                thread.start()
            elif command == "abort":
                held["group"].abort()
            elif command == "exit":
                os._exit(0)
            else:
                thread.join()
                pipe.send(use_once(store, *arguments))


# ---------------------------------------------------------------- in the parent


class Process:
    """A process of the pool. holds: what it held when it was idle for the first time"""

    def __init__(self, port: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rankloom.world.preload", "conformance.faults"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, port), daemon=True)
        self.process.start()
        theirs.close()
        self.holds: Held | None = None

    def hear(self, seconds: float) -> Any:
        """The next thing that it says, or None."""
        return self.pipe.recv() if self.pipe.poll(seconds) else None

    def strike(self, kind: str) -> float:
        """Do it, and the time by the monotonic clock."""
        if kind in ("kill", "stop"):
            os.kill(self.process.pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        else:
            self.pipe.send((kind,))
        return time.monotonic()

    def end(self) -> None:
        """Whatever it is doing."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Pool:
    """Processes that wait for work, and the store where their groups meet."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.idle = [Process(self.store.port) for _ in range(POOL)]
        self.generation = 0

    def take(self, count: int) -> list[Process]:
        """Some that are ready."""
        taken, self.idle = self.idle[:count], self.idle[count:]
        for each in taken:
            each.holds = each.holds or each.hear(60)
        return taken

    def give_back(self, processes: list[Process]) -> None:
        """Those that still live; the others are replaced."""
        self.idle += processes
        self.idle += [Process(self.store.port) for _ in range(POOL - len(self.idle))]

    def end(self) -> None:
        """All of them."""
        for each in self.idle:
            each.end()


def inject(pool: Pool, injection: Injection) -> Outcome:
    """Run one injection from end to end."""
    outcome, ranks = Outcome(injection), pool.take(injection.size)
    pool.generation += 1
    for rank, each in enumerate(ranks):
        each.pipe.send(("run", f"group {pool.generation}", rank, injection))
    for each in ranks:
        if each.hear(60) != "ready":
            outcome.problems.append("a rank was not ready")
    time.sleep(injection.delay)
    victim = ranks[injection.victim]
    struck = gone = victim.strike(injection.kind)
    if injection.kind in ("kill", "exit"):
        victim.process.join(60)   # where others want the processor too, it takes its time to die
        gone = time.monotonic()
    elif injection.kind == "abort":
        gone = listen(outcome, injection.victim, victim, struck, struck)
    for rank in range(injection.size):
        if rank != injection.victim:
            listen(outcome, rank, ranks[rank], struck, gone)
    if injection.kind == "stop":
        if outcome.waited < injection.timeout - 0.05:
            outcome.problems.append(f"nobody waited longer than {outcome.waited:.2f} of {injection.timeout} s")
        os.kill(victim.process.pid, signal.SIGCONT)
        if victim.hear(AT_ONCE) is None:
            outcome.problems.append("the victim went on alone when it was continued")
    living = [each for each in ranks if injection.kind in ("stop", "abort") or each is not victim]
    look_around(pool, outcome, living)
    if victim not in living or outcome.problems:
        victim.end()
    broken = [each for each in living if outcome.problems]
    for each in broken:
        each.end()
    pool.give_back([each for each in living if each not in broken])
    return outcome


def listen(outcome: Outcome, rank: int, process: Process, struck: float, gone: float) -> float:
    """Is it the right error, does it name the victim, and does it come in time? Returns when it came.

    struck: when the victim was struck   gone: when it had gone, as far as can be seen
    """
    injection, problems = outcome.injection, outcome.problems
    due = injection.timeout if injection.kind == "stop" else 0.0
    told: Told | None = process.hear(due + AT_ONCE)
    if told is None:
        problems.append(f"rank {rank} was told nothing")
        return gone
    outcome.errors.append(f"{told.kind}: {told.text}")
    allowed = ("CollectiveTimeout", "RankLost") if injection.kind == "stop" else ("RankLost",)
    if told.kind not in allowed:
        problems.append(f"rank {rank} got {told.kind}: {told.text}")
    if not re.search(rf"\brank {injection.victim}\b", told.text.removeprefix(f"rank {rank}: ")):
        problems.append(f"rank {rank} was not told of rank {injection.victim}, but: {told.text}")
    outcome.latency = max(outcome.latency, told.when - struck - due)
    outcome.late = max(outcome.late, told.when - gone - due)
    outcome.waited = max(outcome.waited, told.when - told.began)   # the first whose time is up frees those that came later
    return told.when


def look_around(pool: Pool, outcome: Outcome, living: list[Process]) -> None:
    """The survivors build a new group and use it, and hold nothing of the old one."""
    for rank, each in enumerate(living):
        each.pipe.send(("again", f"group {pool.generation} again", rank, len(living)))
    for rank, each in enumerate(living):
        holds = each.hear(60)
        if holds != each.holds:
            outcome.problems.append(f"process {rank} of the new group has {holds}, before {each.holds}")
