"""Memory that processes of one host share: created by one rank, opened and mapped by the others.

It is a memfd: it has no name, so no other program can find it by accident, and nothing is left when the last process ends,
however it ends. The others open it through /proc/<pid>/fd, which the kernel allows to the same user only. Once all have
mapped it, the descriptor is closed; the mapping keeps one of its own. /dev/shm is not used: it is often tiny.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from rankloom.base.errors import ConfigError, RankLost
from rankloom.world.transport.free_memory import available_memory
from rankloom.world.transport.meet import ask_store, hear_all, wait_for

PAGE = mmap.PAGESIZE
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL   # if one rank truncated it, all that touch it would be killed


def expect_memory(nbytes: int) -> None:
    """raises: MemoryError when that much is not free: touching it later would kill the process"""
    free = available_memory()
    if nbytes > free:
        raise MemoryError(f"{nbytes:,} bytes of shared memory were asked for, {free:,} are free on this host")


def create_memory(nbytes: int) -> int:
    """A descriptor of new memory, which is zero, and allocated when it is touched. The caller makes sure that so much is free.

    raises: MemoryError when the kernel, for which it is a file, allows no more files, or none of that size
    """
    with contextlib.ExitStack() as made:
        try:
            descriptor = os.memfd_create("rankloom", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            made.callback(os.close, descriptor)
            os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            why = "are more than this process may write to a file: raise the limit (ulimit -f), or use the backend gloo" \
                if error.errno == errno.EFBIG else f"cannot be created: {error.strerror}"
            raise MemoryError(f"{nbytes:,} bytes of shared memory {why}") from error
        made.pop_all()
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


class SharedSegment(NamedTuple):
    """The memory of a group, the name of the kernel that all its ranks use, and how many different cores they may use."""

    memory: Mapping
    kernel: str
    cores: int


def map_together(store: dist.Store, rank: int, size: int, kernels: dict[str, Any], timeout: float, *,
                 ranks: Sequence[int] | None = None) -> SharedSegment:
    """Map the same new memory in all ranks. Rank 0 creates it, and chooses the kernel: its first. Each rank may be pinned to some cores.

    kernels: the kernels of this process, by name
    ranks:   the numbers of the group's ranks in the world, for error messages
    raises:  ConfigError if this process lacks that kernel, MemoryError if memory is short; if either happens, RankLost on all others
    """
    names = ranks or range(size)
    me = names[rank]
    with contextlib.ExitStack() as files:   # needed until all have mapped them
        try:
            mapping, kernel = _join(store, me, names, kernels, timeout, files) if rank else _create(store, names, kernels, timeout, files)
        except Exception as error:
            _tell_why(str(error), store, rank)
            raise
        mine = json.dumps(sorted(os.sched_getaffinity(0)))
        cores = _understood(hear_all(store, "mapped", rank, size, timeout, mine, ranks=ranks), me, names)
    return SharedSegment(mapping, kernel, len(set().union(*cores)))


def _tell_why(problem: str, store: dist.Store, rank: int) -> None:
    """Tell the ranks that wait for this one. If the store is gone or stopped, they notice that themselves: it is not waited for again."""
    with contextlib.suppress(RankLost, ConfigError):   # or this host starts no more threads, and it cannot be asked
        for key in (f"memory/{rank}", f"mapped/{rank}"):
            ask_store(partial(store.set, key, json.dumps(problem)), rank, 0)


def _create(store: dist.Store, names: Sequence[int], kernels: dict[str, Any], timeout: float,
            files: contextlib.ExitStack) -> tuple[Mapping, str]:
    kernel = next(iter(kernels))
    nbytes = kernels[kernel].segment_size(len(names))
    expect_memory(nbytes)
    descriptor = create_memory(nbytes)
    files.callback(os.close, descriptor)
    mapping = map_memory(descriptor, nbytes)
    ask_store(lambda: store.set("memory/0", json.dumps([os.getpid(), descriptor, kernel])), names[0], timeout)
    return mapping, kernel


def _join(store: dist.Store, me: int, names: Sequence[int], kernels: dict[str, Any], timeout: float,
          files: contextlib.ExitStack) -> tuple[Mapping, str]:
    wait_for(store, {"memory/0": names[0]}, me, timeout)
    pid, number, kernel = _understood([ask_store(lambda: store.get("memory/0"), me, timeout)], me, names)[0]
    if kernel not in kernels:
        raise ConfigError(f"rank {me}: rank {names[0]} uses the part of rankloom written in {kernel}, which this installation lacks; "
                          "install both alike (a C compiler must be there)")
    nbytes = kernels[kernel].segment_size(len(names))
    descriptor = open_memory(pid, number, nbytes)
    files.callback(os.close, descriptor)
    return map_memory(descriptor, nbytes), kernel


def map_memory(descriptor: int, nbytes: int) -> Mapping:
    """Map the memory; the mapping has a descriptor of its own. raises: MemoryError when the system does not allow it"""
    try:
        return Mapping(descriptor, nbytes)
    except OSError as error:
        raise MemoryError(f"{nbytes:,} bytes of shared memory cannot be mapped: {error.strerror}") from error


def _understood(texts: Sequence[str | bytes], me: int, names: Sequence[int]) -> list[Any]:
    """What the first ranks of a group have told, from JSON. raises: RankLost if one told why it cannot go on"""
    values = [*map(json.loads, texts)]
    for other, problem in zip(names, values):
        if isinstance(problem, str):
            raise RankLost(f"rank {me}: rank {other} could not share memory: {problem}")
    return values
