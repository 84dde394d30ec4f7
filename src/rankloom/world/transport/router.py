"""One torch process group for CPU and CUDA tensors: for each call, it chooses by the device of the tensors what carries them.

    on the CPU                                    shared memory (and TCP between hosts)
    on CUDA, each rank has a GPU of its own       NCCL
    on CUDA, all ranks share the GPU of one host  its memory (device_group.py)
    on CUDA, else                                 through the host, as CPU tensors

For CUDA the choice is made at the first such call: every rank tells the others, in the store, which GPU of which host it uses. The last
of them collects that, and the others read it: if each waited for each, the store would hold p^2 waits.
For a message between two ranks, only these two count.
"""

import datetime
import json
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankloom.base.errors import ShapeMismatch
from rankloom.world.transport.cuda import CudaDevice
from rankloom.world.transport.device_group import DeviceGroup, listed_tensors
from rankloom.world.transport.forms import SECOND, first_form, in_either_form
from rankloom.world.transport.meet import ask_store, this_host, wait_for
from rankloom.world.transport.nccl import CUDA, Nccl
from rankloom.world.transport.process_group import SharedMemoryGroup
from rankloom.world.transport.through_host import ThroughHost
from rankloom.world.transport.work import AsBackend, Work

ONE_GPU, NCCL, HOST = "one GPU for all", "a GPU for each", "through the host"
ALL_PLACES = "places"   # the key of what all ranks told
COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "reduce", "broadcast", "gather", "scatter", "alltoall", "alltoall_base", "all_to_all_single",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced", "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single_coalesced")
OF_THE_CPU = ("getBackendName", "name", "_get_backend_name", "setGroupName", "getGroupName", "setGroupDesc", "getGroupDesc",
              "_set_group_name", "_set_group_desc", "get_group_store")   # methods for which the CPU group answers


@dataclass(frozen=True)
class GpuPlace:
    """The host, GPU and process of a rank."""

    host: str
    gpu: str
    pid: int


def choose_carrier(places: Sequence[GpuPlace]) -> str:
    """What carries CUDA tensors between ranks at these places.

    Only processes can map each other's memory, so ranks that are threads of one process go through the host.
    """
    gpus, processes = {(place.host, place.gpu) for place in places}, {(place.host, place.pid) for place in places}
    if len(gpus) == 1 and len(processes) == len(places):
        return ONE_GPU
    return NCCL if len(gpus) == len(places) and dist.is_nccl_available() else HOST


class DeviceRouter(AsBackend, dist.ProcessGroup):
    """A process group for all tensors of its ranks. `cpu` is the group for CPU tensors."""

    def __init__(self, cpu: SharedMemoryGroup, timeout: float):
        super().__init__(cpu.rank(), cpu.size())
        self.cpu = cpu
        self._store, self._timeout = dist.PrefixStore("cuda", cpu.get_group_store()), timeout
        self._lock = threading.Lock()
        self._device: torch.device | None = None
        self._places: dict[int, GpuPlace] = {}
        self._carriers: dict[str, Any] = {}
        self._known: dict[tuple[torch.device, tuple[int, ...]], Any] = {}   # what was chosen before, for all later calls

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), CUDA]

    @property
    def group_name(self) -> str:   # type: ignore[override]
        """The name that torch gave the group."""
        return self.cpu.getGroupName()

    @property
    def group_desc(self) -> str:   # type: ignore[override]
        """The description that torch gave the group."""
        return self.cpu.getGroupDesc()

    def buffer(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        """A tensor of zeros that all ranks map, if there is such memory. Every rank must ask for the same."""
        shape, device = (shape,) if isinstance(shape, int) else shape, torch.device(device)
        if device.type == "cpu":
            return self.cpu.buffer(shape, dtype)
        carrier = self.carrier(device)
        return carrier.buffer(shape, dtype) if isinstance(carrier, DeviceGroup) else torch.zeros(shape, dtype=dtype, device=device)

    # ------------------------------------------------------------------ what carries CUDA tensors

    def carrier(self, device: torch.device, ranks: tuple[int, ...] = ()) -> Any:
        """The group for CUDA tensors of some ranks, by default all. The first time, each of these ranks must call this.

        raises: RankLost with the ranks that do not come, ShapeMismatch if this rank has used another device so far
        """
        return self._known.get((device, ranks)) or self._choose(device, ranks)

    def _choose(self, device: torch.device, ranks: tuple[int, ...]) -> Any:
        with self._lock:
            device = self._own(device)
            kind = choose_carrier(self._find(ranks or range(self.size())))
            if kind not in self._carriers:
                self._carriers[kind] = self._make(kind, device)
            self._known[device, ranks] = self._carriers[kind]
            return self._carriers[kind]

    def _own(self, device: torch.device) -> torch.device:
        """This rank's one device, with its number. Tells the others which GPU it is, the first time."""
        device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        if self._device not in (None, device):
            raise ShapeMismatch(f"{self.cpu.channel.where('a call')}: a tensor on {device}, but this rank has used {self._device} so "
                                "far; one rank of a group uses one device")
        if self._device is None:
            self._device = device
            place = GpuPlace(this_host(), str(torch.cuda.get_device_properties(device).uuid), os.getpid())
            ask_store(lambda: self._tell(place), self.rank(), self._timeout)
        return device

    def in_order(self, device: torch.device, ranks: Sequence[int]) -> bool:
        """Whether NCCL, which has no tags, carries CUDA tensors between any two of these ranks. Each of them must call this."""
        with self._lock:
            self._own(device)
            places = self._find(ranks)
        return any(choose_carrier(pair) == NCCL for pair in combinations(places, 2))

    def over_nccl(self, device: torch.device, peer: int) -> bool:
        """Whether NCCL carries messages of CUDA tensors between this rank and `peer`. Both must call this, and nobody else."""
        return self.carrier(device, (self.rank(), peer)) is self._carriers.get(NCCL)

    def _tell(self, place: GpuPlace) -> None:
        """The rank that comes last collects what all tell, not rank 0: that may exchange messages long before its first collective."""
        self._store.set(f"place/{self.rank()}", json.dumps(asdict(place)))
        if self._store.add("came", 1) == self.size():
            texts = self._store.multi_get([f"place/{rank}" for rank in range(self.size())])
            self._store.set(ALL_PLACES, json.dumps([json.loads(text) for text in texts]))

    def _find(self, ranks: Sequence[int]) -> list[GpuPlace]:
        missing = {f"place/{rank}": rank for rank in ranks if rank not in self._places}
        if missing and len({*ranks}) == self.size():
            wait_for(self._store, missing, self.rank(), self._timeout, until=ALL_PLACES)
            places = json.loads(ask_store(lambda: self._store.get(ALL_PLACES), self.rank(), self._timeout))
            self._places = {rank: GpuPlace(**place) for rank, place in enumerate(places)}
        elif missing:
            wait_for(self._store, missing, self.rank(), self._timeout)
            texts = ask_store(lambda: self._store.multi_get([*missing]), self.rank(), self._timeout)
            self._places |= {rank: GpuPlace(**json.loads(text)) for rank, text in zip(missing.values(), texts)}
        return [self._places[rank] for rank in ranks]

    def _make(self, kind: str, device: torch.device) -> Any:
        if kind == ONE_GPU:
            return DeviceGroup(self.cpu, CudaDevice(device))
        return Nccl(self._store, self.rank(), self.size(), self._timeout, device) if kind == NCCL else ThroughHost(self.cpu)

    # ------------------------------------------------------------------ calls

    @in_either_form
    def barrier(self, opts: Any = None) -> Work:
        """Return when every rank has called this and, if torch asks for a CUDA barrier, what they had submitted is done."""
        device = getattr(opts, "device", None)
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return self._noted(self.cpu.barrier(opts))

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work:
        """Send to one rank of this group."""
        return self._noted(self._for(tensors, (self.rank(), to)).send(tensors, to, tag))

    def recv(self, tensors: list[Tensor], frm: int, tag: int = 0) -> Work:
        """Receive from one rank of this group."""
        return self._noted(self._for(tensors, (self.rank(), frm)).recv(tensors, frm, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Receive from any rank, whichever sends first. NCCL cannot."""
        return self._noted(self._for(tensors).recv_anysource(tensors, tag))

    def _collective(self, name: str, args: Any, kwargs: Any) -> Work:
        if name in SECOND:
            args, kwargs = first_form(name, args, kwargs), {}
        return self._noted(getattr(self._for([args, [*kwargs.values()]]), name)(*args, **kwargs))

    def _for(self, tensors: Any, ranks: tuple[int, ...] = ()) -> Any:
        device = next((x.device for x in listed_tensors(tensors)), None)
        return self.cpu if device is None or device.type != "cuda" else self.carrier(device, ranks)

    # ------------------------------------------------------------------ life

    def split_group(self, *args: Any, **kwargs: Any) -> "DeviceRouter | None":
        """A group of some of this group's ranks; None on the others. Every rank of this group calls it."""
        part = self.cpu.split_group(*args, **kwargs)
        return DeviceRouter(part, part.channel.timeout) if part else None

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set how long a call waits for the other ranks, from now on."""
        self._timeout = timeout.total_seconds()
        for group in (self.cpu, *self._carriers.values()):
            group.set_timeout(timeout) if not isinstance(group, ThroughHost) else None

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """End every wait of every rank, at once."""
        for group in (*self._carriers.values(), self.cpu):
            group.abort() if not isinstance(group, ThroughHost) else None

    def shutdown(self) -> None:
        """Leave, after the device has done what this rank has submitted. A rank that waits for this one gets RankLost."""
        if isinstance(shared := self._carriers.get(ONE_GPU), DeviceGroup):
            shared.finish()
        if nccl := self._carriers.get(NCCL):
            nccl.shutdown()
        self.cpu.shutdown()


def _route(name: str) -> Callable[..., Work]:
    def method(self: DeviceRouter, *args: Any, **kwargs: Any) -> Work:
        return self._collective(name, args, kwargs)

    method.__name__, method.__doc__ = name, f"`{name}` of the group that its tensors belong to."
    return method


def _ask_cpu(name: str) -> Callable[..., Any]:
    def method(self: DeviceRouter, *args: Any) -> Any:
        return getattr(self.cpu, name)(*args)

    method.__name__, method.__doc__ = name, f"`{name}` of the group of the CPU."
    return method


# torch's C++ code looks these methods up in the class.
for _name in COLLECTIVES:
    setattr(DeviceRouter, _name, _route(_name))
for _name in OF_THE_CPU:
    setattr(DeviceRouter, _name, _ask_cpu(_name))


def gone(group: dist.ProcessGroup | None) -> Sequence[int]:
    """The ranks of which a group knows that they have ended or left it. One of gloo or NCCL knows of none."""
    shared = group.cpu if isinstance(group, DeviceRouter) else group
    return shared.channel.gone() if isinstance(shared, SharedMemoryGroup) else ()


def with_router(group: SharedMemoryGroup, timeout: float) -> dist.ProcessGroup:
    """`group`, or if there is CUDA, a router in front of it."""
    return DeviceRouter(group, timeout) if torch.cuda.is_available() else group
