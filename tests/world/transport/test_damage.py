"""Whatever a damaged peer writes into shared memory, this rank touches nothing outside of it: ranks are forked processes here."""

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rankloom.base.errors import ConfigError, RankLost
from rankloom.world.transport import channel, memory
from rankloom.world.transport.codes import ALL_REDUCE, BROADCAST, DAMAGED, NO_MEMORY

compiled = channel.KERNELS.get("C")
pytestmark = pytest.mark.skipif(compiled is None, reason="the C kernel is not built")

U8 = 5
RING, LINE, SLOT = 1 << 20, 64, 1 << 20   # bytes
N = 1 << 16


class Descriptor(ctypes.Structure):
    """What a rank says of its call, as _shared.c has it."""

    _fields_ = [*((name, ctypes.c_uint32) for name in ("kind", "dtype", "op", "root", "region", "pad")),
                *((name, ctypes.c_uint64) for name in ("offset", "known", "nbytes", "longest"))]


class Ring(ctypes.Structure):
    """A ring of bytes from one rank to another."""

    _fields_ = [("written", ctypes.c_uint64), ("_", ctypes.c_char * (LINE - 8)), ("read", ctypes.c_uint64),
                ("__", ctypes.c_char * (LINE - 8)), ("tag", ctypes.c_int64), ("nbytes", ctypes.c_uint64),
                ("bytes", ctypes.c_char * (RING - 16))]


class Segment:
    """The memory of two ranks: rank 0 is damaged, and written by hand; rank 1 is a process."""

    def __init__(self):
        self.memory = mmap.mmap(-1, compiled.segment_size(2))
        self.region = mmap.mmap(-1, 2 * N)
        self.address, self.region_at = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (self.memory, self.region))

    def ring(self, frm: int, to: int) -> Ring:
        end = compiled.segment_size(2)
        return Ring.from_buffer(self.memory, end - (4 - 2 * frm - to) * ctypes.sizeof(Ring))

    def said(self) -> Descriptor:
        """Of rank 0, for the first meeting, to which it has come."""
        ctypes.c_uint32.from_buffer(self.memory, 2 * LINE).value = 1   # arrivals
        ctypes.c_uint32.from_buffer(self.memory, 4 * LINE).value = 1   # how often rank 0 arrived
        return Descriptor.from_buffer(self.memory, 8 * LINE + ctypes.sizeof(Descriptor))

    def reason_of_the_other(self, body: Callable[[Any], int]) -> int:
        """body(link) as rank 1; a signal that ended it is a negative number"""
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                link = compiled.Link(self.address, 1, 2, 0, 20, 4096)
                link.add_region(1, self.region_at, N)
                code = abs(body(link))
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def message(link: Any, sending: int, nbytes: int, tag: int = 0) -> int:
    data = ctypes.create_string_buffer(max(nbytes, 1))
    return link.message(sending, ctypes.addressof(data), nbytes, 0, tag, 5.0)


@pytest.mark.parametrize("written", [RING + 1, 1 << 40, (1 << 64) - 1])
def test_a_ring_cannot_hold_more_than_its_size(written):
    segment = Segment()
    ring = segment.ring(0, 1)
    ring.written, ring.nbytes = written, 1 << 22
    assert segment.reason_of_the_other(lambda link: message(link, 0, 1 << 22)) == DAMAGED


@pytest.mark.parametrize("read", [1, 1 << 63])
def test_nothing_can_be_read_off_a_ring_before_it_is_there(read):
    segment = Segment()
    segment.ring(1, 0).read = read
    assert segment.reason_of_the_other(lambda link: message(link, 1, 1 << 22)) == DAMAGED


@pytest.mark.parametrize("nbytes", [(1 << 64) - 8, (1 << 64) - 40, 1 << 63, (1 << 56) - 8, 12 << 56])
def test_no_message_is_larger_than_memory(nbytes):
    segment = Segment()
    ring = segment.ring(0, 1)
    ring.tag, ring.nbytes, ring.written = 7, nbytes, 100_000
    assert segment.reason_of_the_other(lambda link: message(link, 0, 8, tag=1)) == DAMAGED


@pytest.mark.parametrize(("region", "offset"), [(1, N), (1, 1 << 40), (1, (1 << 64) - 8), (65, 0)])
@pytest.mark.parametrize("kind", [ALL_REDUCE, BROADCAST])
def test_an_input_lies_in_its_rank_s_part_of_a_region(kind, region, offset):
    segment = Segment()
    said = segment.said()
    said.kind, said.dtype, said.nbytes, said.longest = kind, U8, N, N
    said.region, said.offset, said.known = region, offset, (1 << 64) - 1

    def call(link: Any) -> int:
        mine = segment.region_at + N
        return link.run(kind, U8, 0, 0, mine, mine, N, 5.0)

    assert segment.reason_of_the_other(call) == DAMAGED


@pytest.mark.parametrize("arguments", [(9, U8, 0, 0), (-1, U8, 0, 0), (ALL_REDUCE, 12, 0, 0), (ALL_REDUCE, U8, 8, 0),
                                       (ALL_REDUCE, U8, -1, 0), (BROADCAST, U8, 0, 2), (BROADCAST, U8, 0, -1)])
def test_a_call_that_there_is_not_is_refused(arguments):
    segment = Segment()
    link = compiled.Link(segment.address, 1, 2, 0, 20, 4096)
    for call in (link.run, link.submit):
        with pytest.raises(ValueError, match="expected 0 to"):
            call(*arguments, 0, 0, 0, 1.0)
    for peer in (-2, 2, 1 << 20):
        with pytest.raises(ValueError, match="the other end of a message is"):
            link.message(0, 0, 0, peer, 0, 1.0)
        with pytest.raises(ValueError, match="the other end of a message is"):
            link.post(1, 0, 0, peer, 0)
    link.leave()


@pytest.mark.parametrize("arguments", [(2, 2, 0, 0, 4096), (-1, 2, 0, 0, 4096), (0, 0, 0, 0, 4096), (0, 257, 0, 0, SLOT), (0, 2, 0, 0, 127),
                                       (0, 2, 0, 0, SLOT + 1)])
def test_a_link_that_would_not_fit_into_its_memory_is_refused(arguments):
    segment = Segment()
    with pytest.raises(ValueError, match="expected"):
        compiled.Link(segment.address, *arguments)


@pytest.mark.parametrize(("why", "said"), [(DAMAGED, "what it wrote into the shared memory cannot be"),
                                           (NO_MEMORY, "it has no memory left to put aside a message while it waits for a later one")])
def test_the_error_names_the_rank_and_what_is_wrong_with_it(why, said):
    torn = channel.Channel.__new__(channel.Channel)
    torn.rank, torn.size, torn.ranks, torn.timeout, torn.name = 0, 2, (4, 6), 1.0, "world"
    torn.link = type("Link", (), {"status": lambda self: (why, 1, [1, 1], ["R", "R"]), "leave": lambda self: None})()
    error = torn.explain(why, "all_reduce")
    assert isinstance(error, RankLost)
    assert f"lost rank 6: {said}" in str(error)


def test_memory_that_ranks_share_cannot_be_cut_short():
    descriptor = memory.create_memory(2 * memory.PAGE)
    try:
        mine = memory.open_memory(os.getpid(), descriptor, 2 * memory.PAGE)
        for nbytes in (0, memory.PAGE, 4 * memory.PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(mine, nbytes)
        os.close(mine)
    finally:
        os.close(descriptor)


def test_memory_that_is_too_small_is_refused_with_both_sizes():
    descriptor = memory.create_memory(memory.PAGE)
    try:
        with pytest.raises(ConfigError, match=rf"has {memory.PAGE} bytes, expected {2 * memory.PAGE}; do all ranks run the same version"):
            memory.open_memory(os.getpid(), descriptor, 2 * memory.PAGE)
    finally:
        os.close(descriptor)


NO_THREADS = """
import ctypes, mmap, resource, threading, time
from rankloom.world.transport import _shared
memory = mmap.mmap(-1, _shared.segment_size(2))
link = _shared.Link(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, 2, 0, 20, 4096)
first = threading.Thread(target=lambda: link.run(8, 5, 0, 0, 0, 0, 0, 1.0))
first.start()
while not link.status()[2][0]:
    time.sleep(0.001)
used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), -1))
try:
    print("the call gave", {call})
except RuntimeError as error:
    print(error)
first.join()
link.leave()   # before the memory goes
"""


def test_memory_that_the_kernel_does_not_give_is_a_memory_error(monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(MemoryError, match="4,096 bytes of shared memory cannot be created: Too many open files in system"):
        memory.create_memory(4096)


@pytest.mark.parametrize(("call", "text"), [
    ("link.run(8, 5, 0, 0, 0, 0, 0, 1.0)", "for collectives in the background"),   # it must wait for the first
    ("link.post(0, ctypes.addressof(ctypes.c_int(0)), 4, 1, 0)", "to carry messages: Resource temporarily unavailable"),
])
def test_a_call_that_needs_a_thread_but_gets_none_is_an_error_not_a_success(call, text):
    done = subprocess.run([sys.executable, "-c", NO_THREADS.format(call=call)], capture_output=True, text=True, check=False)
    assert done.stdout == f"no thread could be started {text}\n" and done.returncode == 0, done.stderr


HALF_SENT = """
import ctypes, mmap, resource
from rankloom.world.transport import _shared
from rankloom.world.transport.codes import ABORTED
memory = mmap.mmap(-1, _shared.segment_size(2))
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
first, other = (_shared.Link(address, rank, 2, 0, 20, 4096) for rank in (0, 1))
long, into = (ctypes.create_string_buffer(2 << 20) for _ in range(2))
used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), -1))
try:
    first.post(1, ctypes.addressof(long), len(long), 1, 0)
except RuntimeError as error:
    print(error)
print(other.message(0, ctypes.addressof(into), len(into), 0, 0, 1.0) == -ABORTED, first.status()[:2] == (ABORTED, 0))
other.leave()
first.leave()
"""


def test_a_message_that_cannot_be_sent_to_its_end_breaks_the_group():
    """What is sent next would be received as its rest."""
    done = subprocess.run([sys.executable, "-c", HALF_SENT], capture_output=True, text=True, check=False)
    assert done.stdout == "no thread could be started to carry messages: Resource temporarily unavailable\nTrue True\n", done.stderr


TOO_LARGE_TO_PUT_ASIDE = """
import ctypes, mmap, resource
import numpy
from rankloom.world.transport import {kernel}
from rankloom.world.transport.codes import NO_MEMORY
memory = mmap.mmap(-1, {kernel}.segment_size(2))
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
first, other = ({kernel}.Link(address, rank, 2, 0, 20, 4096) for rank in (0, 1))
long, short = (ctypes.create_string_buffer(nbytes) for nbytes in (64 << 20, 8))
sent = first.post(1, ctypes.addressof(long), len(long), 1, 0)
used = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), -1))
print(other.message(0, ctypes.addressof(short), len(short), 0, 1, 60.0) == -NO_MEMORY)
print(first.settle(sent, 60.0) == -NO_MEMORY, first.status()[:2] == (NO_MEMORY, 1))
other.leave()
first.leave()
"""


@pytest.mark.parametrize("kernel", ["_shared", "fallback"])
def test_a_message_that_there_is_no_memory_to_put_aside_breaks_the_group_at_once(kernel):
    """It would keep what comes after it, for which its receiver waits, from being read: until the time-out, which blames the sender."""
    done = subprocess.run([sys.executable, "-c", TOO_LARGE_TO_PUT_ASIDE.format(kernel=kernel)], capture_output=True, text=True, check=False)
    assert done.stdout == "True\nTrue True\n", done.stderr
