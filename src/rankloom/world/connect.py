"""Build process groups directly: without a default group or environment variables, so one process may have many worlds.

Every group has its own prefix in a store that is new for each start of the job (meet.py): a rebuilt group never reads an old address.
"""

import os
import socket
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from rankloom.base.errors import CollectiveTimeout, ConfigError, DeviceError, MeshError, RankLost, did_you_mean
from rankloom.base.mesh import Mesh
from rankloom.base.quantities import seconds
from rankloom.base.topology import Topology
from rankloom.world.debug import Inspector
from rankloom.world.group import Group
from rankloom.world.ledger import Ledger
from rankloom.world.open_files import make_room
from rankloom.world.pairwise import is_nccl
from rankloom.world.transport.address import LOOPBACK, own_address
from rankloom.world.transport.meet import find_neighbours, name_of
from rankloom.world.transport.process_group import build
from rankloom.world.transport.router import DeviceRouter

TWIN = "twin"   # the purpose of a twin. On NCCL it carries messages only, and each pair connects at its first one: it needs no first call
AUTO, GLOO, SHARED = BACKENDS = ("auto", "gloo", "rankloom")
MEMORY = 2   # open files of a rank in shared memory, while it is being mapped; with gloo, or over TCP, a rank has one for each other
TOLD = 4     # lines of NCCL's own text in an error: what failed, and its last words
SPARE = 16   # open files besides a group's connections: for the store, and for the program itself


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
        text = "; ".join(str(error).splitlines()[:TOLD])
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
    return dist.ProcessGroupGloo.create_device(hostname=address)


def as_mesh(ranks: int | Mesh) -> Mesh:
    """`ranks` itself, or for a number a mesh of that many replicas."""
    if isinstance(ranks, Mesh):
        return ranks
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise MeshError(f"the number of ranks is {ranks!r}, expected a Mesh or a whole number, 1 or more")
    return Mesh(replicate=ranks)


Meeting = Callable[[tuple[str, int, int, int]], AbstractContextManager[Any]]
"""Called with the name of a group, the number of its ranks, this rank, and the number of files that it will open."""


class World(Group):
    """All ranks of the job as one group, and the mesh that names their axes.

    `group("replicate")` is the group of the ranks that differ from this one along that axis only; several axes make
    one flattened group; no axes, the world itself. Asking again returns the same group.
    `axes_named` is False if only a number of ranks was given: a technique may then use them along the axis that it needs.

    meet: ranks connect in its context, as gloo cannot be interrupted when it waits for one that will not
    """

    def __init__(self, store: dist.Store, rank: int, ranks: int | Mesh, device: torch.device, *, timeout: float,
                 local_rank: int = 0, local_size: int = 1, loopback: bool = True, debug: bool = False,
                 topology: Topology | None = None, backend: str = AUTO, meet: Meeting = nullcontext):
        self._meet = meet
        self.mesh, self.axes_named = as_mesh(ranks), isinstance(ranks, Mesh)
        mesh = self.mesh
        self.local_rank, self.local_size = local_rank, local_size
        self._store, self._debug, self.one_host = store, debug, loopback
        self._own_gpu = device.type == "cuda" and has_own_gpu(store, rank, mesh.size, device, timeout)
        self.backend = resolve_backend(backend, device, self._own_gpu, loopback)
        self._groups: dict[tuple[int, ...], Group] = {}
        self._twins: dict[tuple[int, ...], Group] = {}
        everyone = tuple(range(mesh.size))
        pg, inspector = self._join(everyone, rank, device, timeout, "world")
        super().__init__(pg, rank, everyone, device=device, timeout=timeout, one_host=loopback, inspector=inspector,
                         topology=topology, twin=partial(_twin, weakref.ref(self), everyone))

    def group(self, *axes: str) -> Group:
        """The group of this rank's peers along `axes`. All of them must ask for their groups in the same order.

        raises: RankLost when the world is closed
        """
        ranks = self.mesh.peers(self.rank, *axes) if axes else self.ranks
        if ranks == self.ranks:
            return self
        self._connected(f"group({', '.join(axes)})")
        if ranks not in self._groups:
            self._groups[ranks] = self._connect(ranks, "+".join(axes))
        return self._groups[ranks]

    @property
    def is_idle(self) -> bool:
        """Whether all collectives have ended that this rank has begun in any of its groups, and whose handle still exists."""
        handles = [handle for group in (self, *self._parts()) for handle in group.in_flight.handles()]
        return all(work.is_completed() for handle in handles for work in handle.works or ())

    def close(self) -> None:
        """Drop every connection of this rank; peers that wait for it get RankLost."""
        for group in self._parts():
            group.close()
        super().close()

    def _parts(self) -> tuple[Group, ...]:
        return *self._groups.values(), *self._twins.values()

    def _connect(self, ranks: tuple[int, ...], name: str, purpose: str = "group", ledger: Ledger | None = None) -> Group:
        pg, inspector = self._join(ranks, self.rank, self.device, self.timeout, name, purpose)
        return Group(pg, ranks.index(self.rank), ranks, name=name, device=self.device, timeout=self.timeout, one_host=self.one_host,
                     inspector=inspector, topology=self.topology.among(ranks), twin=partial(_twin, weakref.ref(self), ranks), ledger=ledger)

    def _join(self, ranks: tuple[int, ...], me: int, device: torch.device, timeout: float, name: str,
              purpose: str = "group") -> tuple[dist.ProcessGroup | None, Inspector | None]:
        if len(ranks) == 1:
            return None, None
        n, meeting = len(ranks), f"{purpose}/{name_of(ranks)}"
        files = MEMORY if self.backend == SHARED and self.one_host else n
        make_room(files + SPARE, f"a group of {n} ranks")
        store = dist.PrefixStore(meeting, self._store)
        gone: Callable[[], Sequence[int]] = tuple   # gloo cannot tell which ranks are gone
        with self._meet((meeting, n, me, files)):
            if self.backend == SHARED:
                shared = build(store, ranks.index(me), len(ranks), timeout, ranks=ranks, name=name)
                pg: dist.ProcessGroup = DeviceRouter(shared, timeout) if device.type == "cuda" else shared
                gone = shared.channel.gone
            else:
                pg = connect(store, ranks.index(me), len(ranks), device, timeout=timeout, loopback=self.one_host, own_gpu=self._own_gpu)
                if purpose != TWIN and is_nccl(pg, device):
                    call_first(pg, ranks.index(me), len(ranks), device, timeout)
        watch = dist.PrefixStore("debug", store)
        return pg, Inspector(watch, ranks.index(me), ranks, timeout, gone) if self._debug else None


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


def _twin(world: "weakref.ref[World]", ranks: tuple[int, ...]) -> Group:
    """The second connection of these ranks; the first call is a collective. A weak reference: groups must not keep the world alive."""
    home = world()
    if home is None:
        raise RankLost(f"ranks {ranks}: their world has gone; keep it as long as its groups are used")
    group = home if ranks == home.ranks else home._groups[ranks]
    if home.backend == SHARED and home.device.type == "cuda":   # the router itself keeps the directions of messages apart (nccl.py)
        return group
    if ranks not in home._twins:
        home._twins[ranks] = home._connect(ranks, group.name, TWIN, Ledger(whole=group.ledger))
    return home._twins[ranks]
