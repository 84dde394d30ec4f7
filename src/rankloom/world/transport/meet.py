"""Ranks of one host meet: they find out who shares it, and map one piece of memory.

The memory is a memfd: it has no name, so nobody can stumble over it and nothing is left when the last process ends,
however it ends. The others open it through /proc/<pid>/fd, which the kernel grants to the same user only. Once all have
mapped it, the descriptor is closed. /dev/shm is not used: it is often tiny.
"""

import ctypes
import datetime
import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist

from rankloom.base.errors import ConfigError, RankLost

PAGE = mmap.PAGESIZE


@cache
def this_host() -> str:
    """What processes must have in common to share memory: the running kernel, and how they see processes and addresses."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return " ".join([boot, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net"), f"user {os.getuid()}"])


@dataclass(frozen=True)
class Neighbours:
    """Who is where: the host of every rank of a group, in rank order."""

    hosts: tuple[str, ...]
    rank: int

    def on_host_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that share memory with `rank`, ascending."""
        return tuple(other for other, host in enumerate(self.hosts) if host == self.hosts[rank])

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host; hosts in the order of their first ranks."""
        return tuple(dict.fromkeys(self.on_host_of(rank) for rank in range(len(self.hosts))))


def find_neighbours(store: dist.Store, rank: int, size: int, timeout: float, *, host: str | None = None) -> Neighbours:
    """Tell the others where this rank is, and hear where they are.

    raises: RankLost naming the ranks that did not come within `timeout` seconds
    """
    keys = [f"host/{other}" for other in range(size)]
    store.set(keys[rank], host or this_host())
    wait_for(store, dict(zip(keys, range(size))), rank, timeout)
    return Neighbours(tuple(told.decode() for told in store.multi_get(keys)), rank)


def wait_for(store: dist.Store, keys: dict[str, int], rank: int, timeout: float) -> None:
    """Wait until every key is set; `keys` tells which rank sets it."""
    try:
        store.wait(list(keys), datetime.timedelta(seconds=timeout))
    except (RuntimeError, dist.DistError) as error:
        missing = sorted({other for key, other in keys.items() if not _is_set(store, key)})
        raise RankLost(f"rank {rank}: rank(s) {', '.join(map(str, missing)) or 'unknown'} did not join the group within "
                       f"{timeout:g} s; is each of the {len(keys)} ranks running, and are they given the same store?") from error


def _is_set(store: dist.Store, key: str) -> bool:
    try:
        return store.check([key])
    except (RuntimeError, dist.DistError):   # the store went with its host
        return False


def create_memory(nbytes: int) -> int:
    """A descriptor of new memory, filled with zeros as it is touched.

    raises: MemoryError when that much is not free: touching it later would kill the process
    """
    free = available_memory()
    if nbytes > free:
        raise MemoryError(f"{nbytes:,} bytes of shared memory were asked for, {free:,} are free on this host")
    descriptor = os.memfd_create("rankloom", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, nbytes)
    return descriptor


def available_memory() -> int:
    """Bytes that this host can still give out without swapping, as the kernel estimates it."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


def open_memory(pid: int, descriptor: int, nbytes: int) -> int:
    """Open the memory that another process of this user has created."""
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RankLost(f"the memory of process {pid} cannot be opened ({error.strerror}); it has ended, belongs to another user, "
                       "or forbids it (prctl PR_SET_DUMPABLE)") from error
    if os.fstat(opened).st_size < nbytes:
        os.close(opened)
        raise ConfigError(f"the memory of process {pid} has {os.fstat(opened).st_size} bytes, expected {nbytes}; do all ranks run "
                          "the same version of rankloom?")
    return opened


class Mapping(mmap.mmap):
    """Shared memory in this process; `address` is where. Unmapped when nothing refers to it any more."""

    @property
    def address(self) -> int:
        """Where its first byte lies in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))


def map_together(store: dist.Store, neighbours: Sequence[int], rank: int, kernels: dict[str, Any], timeout: float) -> tuple[Mapping, str]:
    """Map the same new memory in all ranks of `neighbours`; the first of them creates it, and says which kernel all use.

    kernels: those that this process has; the first of the leader's is taken
    raises:  ConfigError where this process lacks it; RankLost
    """
    leader = neighbours[0]
    if rank == leader:
        kernel = next(iter(kernels))
        nbytes = kernels[kernel].segment_size(len(neighbours))
        descriptor = create_memory(nbytes)
        store.set(f"memory/{leader}", json.dumps([os.getpid(), descriptor, kernel]))
    else:
        wait_for(store, {f"memory/{leader}": leader}, rank, timeout)
        pid, number, kernel = json.loads(store.get(f"memory/{leader}"))
        if kernel not in kernels:
            raise ConfigError(f"rank {rank}: rank {leader} uses the part of rankloom written in {kernel}, which this installation lacks; "
                              "install both alike (a C compiler must be there)")
        nbytes = kernels[kernel].segment_size(len(neighbours))
        descriptor = open_memory(pid, number, nbytes)
    mapping = Mapping(descriptor, nbytes)
    if rank != leader:
        os.close(descriptor)
    store.set(f"mapped/{rank}", json.dumps(sorted(os.sched_getaffinity(0))))
    wait_for(store, {f"mapped/{other}": other for other in neighbours}, rank, timeout)
    if rank == leader:
        os.close(descriptor)
    return mapping, kernel


def cores_of(store: dist.Store, neighbours: Sequence[int]) -> int:
    """How many cores the ranks may use between them, after `map_together`; each may be pinned to some."""
    return len({core for rank in neighbours for core in json.loads(store.get(f"mapped/{rank}"))})
