"""`init`: join the ranks that torchrun, Slurm, Open MPI or `rankloom train` started, or run as the only rank."""

import atexit
import os
import socket
import sys
import time
import weakref
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rankloom.base.errors import ConfigError, MeshError, RankLost
from rankloom.base.mesh import Mesh
from rankloom.base.quantities import seconds
from rankloom.base.topology import GPU_LINKS, Links
from rankloom.world.cluster import find_topology
from rankloom.world.connect import AUTO, device_for
from rankloom.world.launch import Place, agent_keeps_store, debug_mode, find_place, has_agent, job_name, meeting_point, report_uncaught
from rankloom.world.leash import die_with
from rankloom.world.malloc_tuning import keep_freed_memory
from rankloom.world.program import expect_same_program
from rankloom.world.transport.ask import ask, no_more_threads
from rankloom.world.transport.meet import start_afresh
from rankloom.world.world import World

SECONDS_TO_END = 10.0   # for what a program has in flight when it ends

# Stores stay open until the process ends. If rank 0's store closed with its world, a peer that quickly builds the next world could
# still connect to the old server, which is about to stop. Within one process, torch lets all stores of a port share one server.
_kept_open: list[dist.Store] = []
_worlds: weakref.WeakSet[World] = weakref.WeakSet()   # worlds of CPU ranks that `init` has built
os.register_at_fork(after_in_child=_worlds.clear)


def init(mesh: Mesh | None = None, *, timeout: float = 300.0, device: str | None = None,
         topology: str | Path | None = None, backend: str = AUTO) -> World:
    """Join the ranks that torchrun, Slurm or Open MPI (with MASTER_ADDR and MASTER_PORT) started, or run as the only rank.

    mesh:     names the axes; by default all ranks are data parallel, sharded from stage 1 on
    timeout:  seconds after which a silent rank ends the job
    device:   "cpu" or "cuda"; by default CUDA if there is a GPU
    topology: a cluster file (base/topology.py); by default the launcher says which ranks share a node
    backend:  for CPU tensors: "gloo", "rankloom" (shared memory, and TCP between hosts), or "auto":
              shared memory if all ranks share a host. It has room for 256 ranks of a host
    The environment stays as it is: a launcher's variables are read, none is set.
    A world of CPU ranks that is open when the program ends is closed then, before functions registered earlier with `atexit`.
    A call of several ranks keeps one file open until the program ends, the connection to the store, also after its world was closed.
    raises:   MeshError if the mesh needs another number of ranks; RankLost if the others do not come; ConfigError, on all ranks,
              if one runs another program or got other arguments
    """
    place = find_place()
    keep_freed_memory()
    if mesh is not None:
        if not isinstance(mesh, Mesh):
            raise MeshError(f"init was given {mesh!r} for a mesh; expected one, such as rl.Mesh(shard=2), or nothing")
        mesh.expect_ranks(place.size)
    if place.launcher != "alone":
        report_uncaught()
    if has_agent():
        die_with(os.getppid())   # torchrun's ranks would otherwise outlive it
    store = _meet(place, timeout) if place.size > 1 else dist.HashStore()
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = device_for(kind, place.local_rank)
    if place.size > 1:
        expect_same_program(store, place.rank, place.size, timeout, mesh=mesh, device=where.type, backend=backend,
                            topology="left out" if topology is None else "a file", RANKLOOM_DEBUG=debug_mode())
    world = World(store, place.rank, mesh or place.size, where, timeout=timeout, local_rank=place.local_rank,
                  local_size=place.local_size, one_host=place.local_size == place.size, debug=debug_mode(),
                  topology=find_topology(place, store, timeout, topology, links=GPU_LINKS if where.type == "cuda" else Links()),
                  backend=backend)
    if where.type == "cpu":
        _worlds.add(world)
    return world


@atexit.register
def _close_what_has_ended() -> None:
    """Close worlds, for programs that do not. torch's gloo frees the tensors of its last call in a thread of its own: if Python had
    ended before, that thread would abort the process (one exit in ten).

    What is still in flight, as a gather ahead is after the last step, is waited for, but not for ever: other ranks may never join a
    call that this rank has begun, and closing would wait for them. Then, and after an exception, worlds stay open. Worlds of CUDA ranks
    always do, because closing NCCL would always wait.
    """
    for world in list(_worlds):
        if not hasattr(sys, "last_value") and world.end_within(SECONDS_TO_END):
            world.close()


def _meet(place: Place, timeout: float) -> dist.Store:
    """The store in which all ranks of this job meet: a new part of it for each world that they build together."""
    (host, port), patience, begin = meeting_point(place), seconds(timeout), time.monotonic()
    try:
        _wait_for_meeting_point(place, host, port, timeout)
        store = _rendezvous(place, host, port, patience)
    except ConfigError as error:
        raise ConfigError(f"rank {place.rank} of {place.size}: {error}") from error
    except (ValueError, RuntimeError, OSError) as error:
        if "EADDRINUSE" in str(error):
            raise ConfigError(f"rank {place.rank} of {place.size}: port {port} is in use on this host, so ranks cannot meet there: set "
                              "MASTER_PORT to another") from error
        if "Resource temporarily unavailable" in str(error):   # torch starts threads, too
            raise ConfigError(f"rank {place.rank} of {place.size}: {no_more_threads(error)}") from error
        raise RankLost(f"rank {place.rank} of {place.size} could not reach the meeting point MASTER_ADDR:MASTER_PORT = {host}:{port} "
                       f"in {time.monotonic() - begin:.1f} s: {str(error).splitlines()[0]}") from error
    store.set_timeout(patience)
    part = start_afresh(dist.PrefixStore(f"rankloom {job_name(place)}", store), place.rank, place.size, timeout)
    _kept_open.append(store)
    return part


def _rendezvous(place: Place, host: str, port: int, patience: timedelta) -> dist.Store:
    """The store at the meeting point: the one that torchrun's agent keeps, or rank 0's own, which does not wait for the others:
    `start_afresh` waits for them, and says who is missing.
    """
    serves = place.rank == 0 and not agent_keeps_store()
    try:
        return ask(lambda: dist.TCPStore(host, port, place.size, serves, patience, wait_for_workers=False, multi_tenant=True),
                   patience.total_seconds())
    except (TimeoutError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "Ping failed" not in str(error):   # so torch calls an answer that is none of a store
            raise
        raise TimeoutError("what answers there is not the store of a job") from None


def _wait_for_meeting_point(place: Place, host: str, port: int, timeout: float) -> None:
    """Wait until `host` resolves, as names of newly started hosts may take a while, and until rank 0 listens there.

    torch would wait for both too, but for up to twice the time-out, and fill the screen.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            if place.rank == 0:   # it serves the store itself, if its launcher does not
                socket.getaddrinfo(host, port)
            else:
                socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except socket.gaierror as error:
            if error.errno not in (socket.EAI_NONAME, socket.EAI_AGAIN) or time.monotonic() > deadline:
                raise
        except OSError as error:
            if time.monotonic() > deadline:
                address = socket.getaddrinfo(host, port)[0][4][0]
                raise TimeoutError(f"nothing listens at {address}, port {port} ({error.strerror or error}). Is rank 0 there? A host's "
                                   "own name may mean its loopback: give an address that all hosts reach") from error
        time.sleep(min(0.1, timeout / 4))
