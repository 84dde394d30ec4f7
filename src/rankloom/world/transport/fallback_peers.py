"""The memory that ranks share when the kernel is in Python, and how a rank waits for the others. Read fallback.py first.

Every word has one writer, because Python has no atomic addition: in C all ranks add to one count of arrivals, here each
counts its own, and a rank that waits reads all of them. And on x86, other processors see the stores of one processor in
the order in which they were made, so a rank that sees a count also sees the bytes that were written before it. Other
processors do not guarantee that, and Python cannot request it: they need the C kernel.

A wait is a loop of look and sleep: no sleep at all at first, later up to LONGEST_NAP. Now and then it checks whether
the ranks it waits for still live. Once the group is broken (a rank died, left, timed out, aborted or made another call),
every wait in every rank ends with the same reason. Python handles signals during sleeps; an exception breaks the group too.
"""

import ctypes
import errno
import itertools
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from rankloom.base.errors import ConfigError
from rankloom.world.transport.codes import FINE, INTERRUPTED, LEFT, LOST, TIMED_OUT, Break, Gone

SLOT = 1 << 20        # bytes of one staging slot
RINGS = 1 << 20       # bytes of all rings of one sender
PAGE = 4096
LONGEST_NAP = 1e-3    # seconds
CHECKUP = 0.05        # seconds between two checks whether the others live

Part = tuple[Any, tuple[int, ...]]
"""Number type and shape."""


def parts(p: int) -> dict[str, Part]:
    """The contents of the segment of p ranks, each part on pages of its own. `turn` is the number of a meeting modulo 2."""
    return {
        "process": (np.int64, (p, 2)),            # process number of each rank, and start time of that process
        "arrived": (np.int64, (p,)),              # how many meetings the rank has come to
        "left": (np.int64, (p,)),                 # whether it has left the group
        "broken": (np.int64, (p, 2)),             # when it broke the group, and 16 * rank to blame + why
        "said": (np.int64, (2, p, 6)),            # [turn, rank] its call: kind, dtype, op, root, bytes; and its longest lane
        "sends": (np.int64, (2, p, p)),           # [turn, from, to] bytes that `from` has for `to`
        "wants": (np.int64, (2, p, p)),           # [turn, to, from] bytes that `to` expects from `from`; -1: takes nothing
        "slots": (np.uint8, (2, p, SLOT)),        # [turn, rank] staged input
        "written": (np.int64, (p, p)),            # [from, to] bytes put on the ring so far
        "read": (np.int64, (p, p)),               # [from, to] bytes taken off it so far
        "rings": (np.uint8, (p, p, RINGS // p)),  # [from, to]
    }


def segment_size(ranks: int) -> int:
    """Bytes of shared memory that a group of this many ranks needs.

    raises: ConfigError on a processor whose stores may be seen in another order than they were made in
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise ConfigError(f"the transport in Python needs an x86-64 processor, this one is {platform.machine()}; install a C compiler, "
                          "then rankloom again, and the compiled transport takes its place")
    return sum(_whole_pages(_nbytes(part)) for part in parts(ranks).values())


def memory_at(address: int, nbytes: int) -> np.ndarray:
    """Bytes at an address, as an array that does not own them."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)) if nbytes else np.empty(0, np.uint8)


def _nbytes(part: Part) -> int:
    return math.prod(part[1]) * np.dtype(part[0]).itemsize


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


class Segment:
    """The parts of a segment as arrays, named as in `parts`."""

    process: np.ndarray
    arrived: np.ndarray
    left: np.ndarray
    broken: np.ndarray
    said: np.ndarray
    sends: np.ndarray
    wants: np.ndarray
    slots: np.ndarray
    written: np.ndarray
    read: np.ndarray
    rings: np.ndarray

    def __init__(self, address: int, ranks: int):
        for name, part in parts(ranks).items():
            setattr(self, name, memory_at(address, _nbytes(part)).view(part[0]).reshape(part[1]))
            address += _whole_pages(_nbytes(part))


class Peers:
    """The state of this rank and the others: which have come, which are gone, why the group broke."""

    def __init__(self, address: int, rank: int, ranks: int, spins: int):
        self.memory = Segment(address, ranks)
        self.rank, self.ranks, self.spins = rank, ranks, spins
        self.meetings = 0
        self.closing = False
        self._pid = os.getpid()
        self.memory.process[rank, 1] = look_up(self._pid)[1]
        self.memory.process[rank, 0] = self._pid   # written last: a rank without a process number has not come yet

    def is_forked(self) -> bool:
        """Whether this process was forked from the rank's: it has the rank's memory but not its threads, and is not a rank."""
        return os.getpid() != self._pid

    def meet(self, deadline: float) -> int:
        """Wait until all ranks have called this. Returns why they did not, or FINE."""
        self.meetings += 1
        meeting, arrived = self.meetings, self.memory.arrived
        arrived[self.rank] = meeting
        # First those that have not come. A rank that has come, and is gone before all have come, died in the middle of the call.
        return self.wait_until(lambda: arrived.min() >= meeting, lambda: np.argsort(arrived, kind="stable").tolist(), deadline)

    def wait_until(self, done: Callable[[], bool], needed: Callable[[], list[int]], deadline: float, *, breaks: bool = True) -> int:
        """Sleep and check until `done()`. Returns why that will never be, or FINE.

        needed: the ranks that it waits for, the most suspect first
        breaks: whether the group breaks if it is not done at the deadline
        """
        checkup = time.monotonic() + CHECKUP
        for nap in naps(self.spins):
            if done():
                return FINE
            if why := self.why():
                return why
            now = time.monotonic()
            if now > min(checkup, deadline):
                gone, checkup = self.find_gone(needed()), now + CHECKUP
                if gone and not done():   # what a rank did before it was gone counts
                    return self.break_group(gone.rank, gone.why)
            if now > deadline:
                return self.break_group((needed() or [self.rank])[0], TIMED_OUT) if breaks else TIMED_OUT
            time.sleep(nap)
        raise AssertionError("naps never end")

    def find_gone(self, ranks: Sequence[int]) -> Gone | None:
        """The first of them that is gone; None if there is none."""
        for rank in ranks:
            if self.memory.left[rank]:
                return Gone(rank, LEFT)
            if self.state(rank) == "X":
                return Gone(rank, LOST)
        return None

    def state(self, rank: int) -> str:
        """The state letter of a rank's process; "X" when it has ended, "?" before it came."""
        pid, started = self.memory.process[rank].tolist()
        letter, since = look_up(pid) if pid else ("?", started)
        return "X" if letter == "Z" or (since and started and since != started) else letter

    def letter(self, rank: int) -> str:
        """The same for status reports; "L" when the rank has left the group."""
        return "L" if self.memory.left[rank] else self.state(rank)

    def broken(self) -> Break:
        """Why the group is broken. The rank that broke it first decides."""
        breaks = [(when, what) for when, what in self.memory.broken.tolist() if when]
        blamed, why = divmod(min(breaks)[1], 16) if breaks else (-1, FINE)
        return Break(why, blamed)

    def why(self) -> int:
        """Why no call can succeed any more, or FINE."""
        return self.broken().why or (LEFT if self.closing else FINE)

    def break_group(self, blamed: int, why: int) -> int:
        """End every wait of every rank. Returns the reason that counts: the first."""
        if not self.broken().why:
            self.memory.broken[self.rank, 1] = 16 * blamed + why
            self.memory.broken[self.rank, 0] = time.monotonic_ns()   # written last: it makes the other word valid
        return self.broken().why

    @contextmanager
    def breaking_when_interrupted(self) -> Iterator[None]:
        """If a call ends in an exception, such as Ctrl-C, the others would wait for the rest of it: end their waits."""
        try:
            yield
        except BaseException:
            self.break_group(self.rank, INTERRUPTED)
            raise


def naps(spins: int) -> Iterator[float]:
    """Seconds to sleep between two checks: at first 0, which only lets other threads run. Endless."""
    yield from itertools.repeat(0.0, spins)
    nap = 20e-6
    while True:
        yield nap
        nap = min(1.3 * nap, LONGEST_NAP)


def look_up(pid: int) -> tuple[str, int]:
    """The state letter of a process and its start time, in ticks; ("X", 0) if there is none.

    ("-", 0) if this process may open no more files: then all that is known is that the process exists.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()   # the process name before it may contain anything
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    except OSError:
        return ("-" if _exists(pid) else "X"), 0
    return fields[0].decode(), int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True
