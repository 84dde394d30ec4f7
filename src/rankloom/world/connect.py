"""Connect ranks with gloo and NCCL: without a default group or environment variables, so one process may have many worlds (world.py).

Also what is decided before: which backend connects the ranks, and which GPU a rank takes.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from rankloom.base.errors import CollectiveTimeout, ConfigError, DeviceError, RankLost, did_you_mean
from rankloom.base.quantities import seconds
from rankloom.world.group import Group
from rankloom.world.transport.address import LOOPBACK, own_address
from rankloom.world.transport.channel import expect_room
from rankloom.world.transport.meet import find_neighbours

AUTO, GLOO, SHARED = BACKENDS = ("auto", "gloo", "rankloom")
NO_PRIORITY = os.sched_param(0)   # only policies of real time have priorities
NCCL_LINES = 4   # of its own text in an error: what failed, and its last words


def resolve_backend(asked: str, device: torch.device, own_gpu: bool = False, one_host: bool = True) -> str:
    """The backend that connects the ranks: shared memory (TCP between hosts; router.py for GPUs), or gloo.

    own_gpu:  no other rank uses this rank's GPU: then gloo and NCCL are enough
    one_host: all ranks are on one host. On several, "auto" is gloo: shared memory with TCP was never measured on a fast network. Except
              where ranks share a GPU: gloo cannot do most operations on tensors of a GPU
    raises: ConfigError for an unknown name
    """
    if asked not in BACKENDS:
        raise ConfigError(f"there is no backend {asked!r}. {did_you_mean(asked, BACKENDS)}")
    is_enough = own_gpu or (device.type == "cpu" and not one_host)
    return GLOO if asked == GLOO or (asked == AUTO and is_enough) else SHARED


def expect_room_here(ranks: int, backend: str) -> None:
    """Before ranks are started on one host: raise ConfigError where `backend` has no room for so many there, or does not exist."""
    if resolve_backend(backend, torch.device("cpu")) == SHARED:
        expect_room(ranks)


def device_for(kind: str, local_rank: int) -> torch.device:
    """The device of a rank. The ranks of a host take its GPUs in turns; the GPU becomes the current device of this process.

    raises: ConfigError when there is no GPU
    """
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device = {kind!r}, expected 'cpu' or 'cuda'")
    if kind != "cuda":
        return torch.device(kind)
    if not (gpus := torch.cuda.device_count()):
        raise ConfigError(f"device = {kind!r}: torch finds no GPU on this host; use 'cpu'")
    device = torch.device(kind, local_rank % gpus)
    torch.cuda.set_device(device)
    return device


def has_own_gpu(store: dist.Store, rank: int, size: int, device: torch.device, timeout: float) -> bool:
    """Whether no two ranks use the same GPU; the answer is the same on all. Compares UUIDs, as Slurm may show each rank only its own GPU.

    raises: RankLost when the others do not come within `timeout` seconds
    """
    gpu = f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"
    return len({*find_neighbours(dist.PrefixStore("gpu", store), rank, size, timeout, host=gpu).hosts}) == size


def connect(store: dist.Store, rank: int, size: int, device: torch.device, *, timeout: float, loopback: bool,
            own_gpu: bool) -> dist.ProcessGroup:
    """A process group of `size` ranks that meet in `store`: gloo for CPU tensors, NCCL for CUDA tensors.

    loopback: all ranks are on this host, so connections need neither a host name nor an open interface
    own_gpu:  no other rank uses this rank's GPU; if one does, CUDA tensors use gloo (through the host), as NCCL refuses to share a GPU
    raises:   RankLost when the others do not come within `timeout` seconds
    """
    group = dist.ProcessGroup(store, rank, size)
    options = dist.ProcessGroupGloo._Options()   # type: ignore[attr-defined]
    options._timeout = seconds(timeout)
    options._devices = [_gloo_device(os.getpid(), LOOPBACK if loopback else own_address(store))]
    try:
        gloo = dist.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise RankLost(f"rank {rank}: could not connect to all {size} ranks within {timeout:g} s: "
                       f"{str(error).splitlines()[0]}") from error
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    cuda = torch.device("cuda")
    if device.type == "cuda" and own_gpu:
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = seconds(timeout)
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), rank, size, nccl_options)
        group._register_backend(cuda, dist.ProcessGroup.BackendType.NCCL, nccl)
    elif device.type == "cuda":
        group._register_backend(cuda, dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


def call_first(group: dist.ProcessGroup, rank: int, size: int, device: torch.device, timeout: float) -> None:
    """Add up a one of each rank over NCCL, and wait for the sum: the first call of a group, made by all of its ranks.

    NCCL connects a whole group in its first collective, or its first exchange, and blocks each rank in it until all ranks have come. An
    exchange of some ranks only, as halving begins with where they are no power of two, would never return. Also, GPUs that cannot reach
    each other are found here, and not in the middle of a step.
    sent:   one all-reduce of one number
    raises: RankLost, CollectiveTimeout, or DeviceError where the sum is wrong
    """
    one = torch.ones(1, device=device)
    where = f"rank {rank}: NCCL, in the first call of {size} ranks,"
    remedy = "NCCL_DEBUG=INFO says what NCCL tried; NCCL_SOCKET_IFNAME chooses the network"
    try:
        group.allreduce([one], dist.AllreduceOptions()).wait(seconds(timeout))   # with a time, the host waits, too
        total = one.item()
    except RuntimeError as error:
        text = "; ".join(str(error).splitlines()[:NCCL_LINES])
        if "imeout" in text or "imed out" in text:
            raise CollectiveTimeout(f"{where} did not reach all GPUs within {timeout:g} s: a rank is missing, or a link lets nothing pass. "
                                    f"{remedy} ({text})") from error
        raise RankLost(f"{where} could not connect all GPUs: a rank has failed, or two of them cannot reach each other. {remedy} "
                       f"({text})") from error
    if total != size:
        raise DeviceError(f"{where} added up {size} ones to {total:g}: a GPU or a link between two of them damages data. {remedy}")


@cache
def _gloo_device(process: int, address: str) -> Any:
    """The device that moves the bytes of all gloo groups of a process, in one thread. With a thread for each group, threads would compete
    for the cores, and closing a group would wait for its thread. A forked child has no threads of its parent, so it makes its own device.
    """
    with starting_threads_that_wait_for_their_turn():
        return dist.ProcessGroupGloo.create_device(hostname=address)


@contextmanager
def starting_threads_that_wait_for_their_turn() -> Iterator[None]:
    """A context: threads that this one starts inside do not interrupt others when they are woken (SCHED_BATCH), where the system permits.

    gloo's thread is woken by what a rank sends while that rank still holds the lock of its connection. On the same core it would interrupt
    the rank, find a reply on that connection, and ask for the lock, without sleep, until its time is over: milliseconds. That was 7 % of a
    step of an 11M GPT on 2 ranks, each with a core of its own.
    """
    changed = False
    with suppress(OSError):   # a sandbox may refuse: then gloo is as slow as it was
        if os.sched_getscheduler(0) == os.SCHED_OTHER:   # of this thread, and those it starts inherit it; another is the user's choice
            os.sched_setscheduler(0, os.SCHED_BATCH, NO_PRIORITY)
            changed = True
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, NO_PRIORITY)


def expect_cpu_backend(group: Group) -> None:
    """Raise ConfigError, on all ranks, where a process group made elsewhere carries tensors of a GPU only, as one of "nccl" does.

    What ranks tell each other about a step stays on the CPU: a copy from a GPU would wait for it.
    """
    if group._process_group is None or group.size == 1:
        return
    kinds = {device.type for device in group._process_group._device_types}
    if kinds and "cpu" not in kinds:   # none: a process group that is written in Python, and takes what it is given
        raise ConfigError(f"{group.where('a backend for the CPU')}: its process group carries tensors on {', '.join(sorted(kinds))} only, "
                          "and what ranks tell each other about a step lies on the CPU. Make it with a backend for each, as "
                          'dist.init_process_group("cpu:gloo,cuda:nccl") does, or dist.new_group(backend="cpu:gloo,cuda:nccl")')


def has_default_group() -> bool:
    """Whether the program has created torch's default process group; rankloom never does."""
    return dist.is_initialized()
