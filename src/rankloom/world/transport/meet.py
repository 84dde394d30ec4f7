"""How ranks meet: find those of this start, not of an earlier one; find which share a host; create one piece of memory on each host.

The memory is a memfd: it has no name, so no other program can find it by accident, and nothing is left when the last process ends,
however it ends. The others open it through /proc/<pid>/fd, which the kernel allows to the same user only. Once all have
mapped it, the descriptor is closed; the mapping keeps one of its own. /dev/shm is not used: it is often tiny.
"""

import contextlib
import ctypes
import datetime
import errno
import fcntl
import hashlib
import json
import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch.distributed as dist

from rankloom.base.errors import ConfigError, RankLost
from rankloom.world.transport.ask import ask
from rankloom.world.transport.free_memory import available_memory

NAP = 0.01   # seconds between two checks of which ranks have come
PAGE = mmap.PAGESIZE
ALL_CAME = "all came"   # rank 0 says so, or what is wrong
CLOSED = "the rank that serves it, usually 0, has ended, or two ranks were started with the same number"
T = TypeVar("T")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL   # if one rank truncated it, all that touch it would be killed


@cache
def this_host() -> str:
    """What processes must have in common to share memory: the running kernel, its PID and network namespaces, and the user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return " ".join([boot, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net"), f"user {os.getuid()}"])


@dataclass(frozen=True)
class Neighbours:
    """The host of every rank of a group, in rank order."""

    hosts: tuple[str, ...]
    rank: int

    def on_host_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that share memory with `rank`, ascending."""
        return tuple(other for other, host in enumerate(self.hosts) if host == self.hosts[rank])

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host; hosts in the order of their first ranks."""
        nodes: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            nodes.setdefault(host, []).append(rank)
        return tuple(map(tuple, nodes.values()))


def name_of(ranks: Sequence[int]) -> str:
    """A name for a group of these ranks, which stands before each of its keys: short, as stores refuse keys above 8 KiB."""
    return hashlib.sha256("-".join(map(str, ranks)).encode()).hexdigest()[:16]


def find_neighbours(store: dist.Store, rank: int, size: int, timeout: float, *, host: str | None = None) -> Neighbours:
    """Tell the others where this rank is, and read where they are.

    raises: RankLost naming the ranks that did not come within `timeout` seconds
    """
    return Neighbours(tuple(hear_all(store, "host", rank, size, timeout, host or this_host())), rank)


def hear_all(store: dist.Store, what: str, rank: int, size: int, timeout: float, mine: str) -> list[str]:
    """Tell the others `mine`. Returns what each of them tells, in rank order.

    Rank 0 collects it, and the others read that: if each waited for each, the store would hold p^2 waits.
    price:  p texts to and from the store for each rank
    raises: RankLost naming the ranks that did not come within `timeout` seconds
    """
    keys, everything = {f"{what}/{other}": other for other in range(size)}, f"{what}, of all"
    ask_store(lambda: store.set(f"{what}/{rank}", mine), rank, timeout)
    if rank:
        wait_for(store, keys, rank, timeout, until=everything)
        return json.loads(ask_store(lambda: store.get(everything), rank, timeout))   # type: ignore[no-any-return]
    wait_for(store, keys, rank, timeout)
    told = [text.decode() for text in ask_store(lambda: store.multi_get([*keys]), rank, timeout)]
    ask_store(lambda: store.set(everything, json.dumps(told)), rank, timeout)
    return told


def start_afresh(store: dist.Store, rank: int, size: int, timeout: float) -> dist.Store:
    """A part of `store` for the ranks of this start only. The store may hold what others wrote, before a restart or for another group.

    Ranks cannot compare how often they were started: torchrun counts for each node alone. So each writes a new random word, and
    rank 0 answers every word that it finds with the name of the part, until all ranks have come there.
    raises: RankLost naming the ranks that did not come within `timeout` seconds; ConfigError if one counts other ranks than rank 0
    """
    if rank == 0:
        return ask_store(lambda: _lead(store, size, timeout), rank, timeout)
    word = secrets.token_hex(8)
    ask_store(lambda: store.set(f"word/{rank}", word), rank, timeout)
    wait_for(store, {f"part/{word}": 0}, rank, timeout)
    part = dist.PrefixStore(ask_store(lambda: store.get(f"part/{word}"), rank, timeout).decode(), store)
    ask_store(lambda: part.set(f"came/{rank}", str(size)), rank, timeout)
    wait_for(part, {f"came/{other}": other for other in range(1, size)}, rank, timeout, until=ALL_CAME)
    if problem := ask_store(lambda: part.get(ALL_CAME), rank, timeout).decode():
        raise ConfigError(problem)
    return part


def _lead(store: dist.Store, size: int, timeout: float) -> dist.Store:
    name, deadline = secrets.token_hex(8), time.monotonic() + timeout
    part, answered, missing, problem = dist.PrefixStore(name, store), set[str](), list(range(1, size)), ""
    while missing and not problem:
        if time.monotonic() > deadline:
            raise _absent(0, missing, timeout)
        words = [f"word/{rank}" for rank in missing]
        for word in {word for key in {*words} - {*unset_keys(store, words)} if (word := read_key(store, key))} - answered:
            store.set(f"part/{word}", name)
            answered.add(word)
        missing, problem = _who_misses(part, missing, size)
        time.sleep(NAP)
    part.set(ALL_CAME, problem)
    if problem:
        raise ConfigError(problem)
    return part


def _who_misses(part: dist.Store, missing: Sequence[int], size: int) -> tuple[list[int], str]:
    """Those that have not come yet, and what is wrong if one that has come counts other ranks than `size`."""
    keys = {f"came/{rank}": rank for rank in missing}
    unset = unset_keys(part, [*keys])
    for key in {*keys} - {*unset}:
        counts = read_key(part, key)
        if counts not in (None, str(size)):
            return [], (f"rank {keys[key]} was started as one of {counts} ranks, rank 0 as one of {size}: give all the same WORLD_SIZE "
                        "(torchrun: the same --nnodes and --nproc-per-node)")
    return [keys[key] for key in unset], ""


def wait_for(store: dist.Store, keys: dict[str, int], rank: int, timeout: float, *, until: str | None = None) -> None:
    """Wait until every key is set; `keys` tells which rank sets each.

    until: the key that one rank sets when it has seen them all, to wait for in their place; they tell who is missing
    """
    begin = time.monotonic()
    try:
        ask(lambda: store.wait([*keys] if until is None else [until], datetime.timedelta(seconds=timeout)), timeout)
    except TimeoutError as error:
        raise RankLost(f"rank {rank}: {error}") from None
    except RuntimeError as error:
        waited, silent = time.monotonic() - begin, _silent(store, keys)
        if waited < timeout / 2 or rank in silent:   # no time-out; what this rank has told has gone with the store
            raise RankLost(f"rank {rank}: the store in which ranks meet closed after {waited:.1f} s: {CLOSED}") from error
        raise _absent(rank, silent, timeout) from error


def ask_store(question: Callable[[], T], rank: int, timeout: float) -> T:
    """`ask` something that does not wait in the store for another rank. raises: RankLost"""
    try:
        return ask(question, timeout)
    except RankLost:   # a RuntimeError, too
        raise
    except TimeoutError as error:
        raise RankLost(f"rank {rank}: {error}") from None
    except RuntimeError as error:
        raise RankLost(f"rank {rank}: the store in which ranks meet closed: {CLOSED}") from error


def _silent(store: dist.Store, keys: dict[str, int]) -> list[int]:
    """The ranks whose keys are not set; none if the store does not answer."""
    try:
        return sorted({keys[key] for key in ask(lambda: unset_keys(store, [*keys]), 0)})
    except TimeoutError:
        return []


def _absent(rank: int, missing: Sequence[int], timeout: float) -> RankLost:
    return RankLost(f"rank {rank}: rank(s) {', '.join(map(str, missing)) or 'unknown'} did not join the group within {timeout:g} s; "
                    "are all ranks running, and are they given the same store?")


def read_key(store: dist.Store, key: str) -> str | None:
    """The value of a key, or None if it is not set, or the store has ended."""
    try:
        return store.get(key).decode() if store.check([key]) else None
    except RuntimeError:   # the store has ended, with its host
        return None


def unset_keys(store: dist.Store, keys: Sequence[str]) -> list[str]:
    """Those of the keys that are not set, in order; all if the store has ended. Asks about halves: few questions if few are missing."""
    try:
        if not keys or store.check([*keys]):
            return []
    except RuntimeError:   # the store has ended, with its host
        return [*keys]
    half = len(keys) // 2
    return unset_keys(store, keys[:half]) + unset_keys(store, keys[half:]) if half else [*keys]


def expect_memory(nbytes: int) -> None:
    """raises: MemoryError when that much is not free: touching it later would kill the process"""
    free = available_memory()
    if nbytes > free:
        raise MemoryError(f"{nbytes:,} bytes of shared memory were asked for, {free:,} are free on this host")


def create_memory(nbytes: int) -> int:
    """A descriptor of new memory, which is zero, and allocated when it is touched. The caller makes sure that so much is free.

    raises: MemoryError when files of that size are not allowed, as which the kernel sees it
    """
    descriptor = os.memfd_create("rankloom", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            raise MemoryError(f"{nbytes:,} bytes of shared memory are more than this process may write to a file: raise the limit "
                              "(ulimit -f), or use the backend gloo") from error
        raise
    return descriptor


def open_memory(pid: int, descriptor: int, nbytes: int) -> int:
    """Open the memory that another process of this user has created."""
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RankLost(f"the memory of process {pid} cannot be opened ({error.strerror}); it has ended, belongs to another user, "
                       "or forbids it (prctl PR_SET_DUMPABLE)") from error
    if (there := os.fstat(opened).st_size) < nbytes:
        os.close(opened)
        raise ConfigError(f"the memory of process {pid} has {there} bytes, expected {nbytes}; do all ranks run "
                          "the same version of rankloom?")
    return opened


class Mapping(mmap.mmap):
    """Shared memory that is mapped in this process. Unmapped when nothing refers to it any more."""

    @property
    def address(self) -> int:
        """The address of its first byte in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


def map_together(store: dist.Store, rank: int, size: int, kernels: dict[str, Any], timeout: float) -> tuple[Mapping, str, int]:
    """Map the same new memory in all ranks. Rank 0 creates it, and chooses the kernel that all use: its first.

    kernels: the kernels of this process, by name
    returns: the memory, the kernel, and how many different cores the ranks may use; each rank may be pinned to some
    raises:  ConfigError if this process lacks that kernel, MemoryError if memory is short; if either happens, RankLost on all others
    """
    with contextlib.ExitStack() as files:   # needed until all have mapped them
        try:
            mapping, kernel = _join(store, rank, size, kernels, timeout, files) if rank else _create(store, size, kernels, timeout, files)
        except Exception as error:
            _tell_why(str(error), store, rank, timeout)
            raise
        cores = _understood(hear_all(store, "mapped", rank, size, timeout, json.dumps(sorted(os.sched_getaffinity(0)))), rank)
    return mapping, kernel, len(set().union(*cores))


def _tell_why(problem: str, store: dist.Store, rank: int, timeout: float) -> None:
    """Tell the ranks that wait for this one. If the store is gone, they notice that themselves."""
    with contextlib.suppress(RankLost):
        for key in (f"memory/{rank}", f"mapped/{rank}"):
            ask_store(partial(store.set, key, json.dumps(problem)), rank, timeout)


def _create(store: dist.Store, size: int, kernels: dict[str, Any], timeout: float, files: contextlib.ExitStack) -> tuple[Mapping, str]:
    kernel = next(iter(kernels))
    nbytes = kernels[kernel].segment_size(size)
    expect_memory(nbytes)
    descriptor = create_memory(nbytes)
    files.callback(os.close, descriptor)
    mapping = map_memory(descriptor, nbytes)
    ask_store(lambda: store.set("memory/0", json.dumps([os.getpid(), descriptor, kernel])), 0, timeout)
    return mapping, kernel


def _join(store: dist.Store, rank: int, size: int, kernels: dict[str, Any], timeout: float,
          files: contextlib.ExitStack) -> tuple[Mapping, str]:
    wait_for(store, {"memory/0": 0}, rank, timeout)
    pid, number, kernel = _understood([ask_store(lambda: store.get("memory/0"), rank, timeout)], rank)[0]
    if kernel not in kernels:
        raise ConfigError(f"rank {rank}: rank 0 uses the part of rankloom written in {kernel}, which this installation lacks; "
                          "install both alike (a C compiler must be there)")
    nbytes = kernels[kernel].segment_size(size)
    descriptor = open_memory(pid, number, nbytes)
    files.callback(os.close, descriptor)
    return map_memory(descriptor, nbytes), kernel


def map_memory(descriptor: int, nbytes: int) -> Mapping:
    """Map the memory; the mapping has a descriptor of its own. raises: MemoryError when the system does not allow it"""
    try:
        return Mapping(descriptor, nbytes)
    except OSError as error:
        raise MemoryError(f"{nbytes:,} bytes of shared memory cannot be mapped: {error.strerror}") from error


def _understood(told: Sequence[str | bytes], rank: int) -> list[Any]:
    """What ranks 0, 1, ... have told, from JSON. raises: RankLost if one told why it cannot go on"""
    values = [*map(json.loads, told)]
    for other, problem in enumerate(values):
        if isinstance(problem, str):
            raise RankLost(f"rank {rank}: rank {other} could not share memory: {problem}")
    return values
