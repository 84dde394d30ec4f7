"""Activation offload: the tensors that a block saves for backward are moved to CPU memory, and back before they are needed.

    forward    saved tensors are copied to the CPU on a side stream while the next blocks compute; when the second block after this one
               begins, the main stream waits for the copies, and the device memory is freed
    backward   when the backward of a block begins, copies of the block before it start back to the device

So the last two blocks are never moved, and at most two blocks have copies in flight. Storages are moved, not tensors: many saved
tensors may be views of one storage. Parameters, buffers and their views stay on the device, and so do tables given to all blocks and
small storages. A CPU has no streams and one memory: there the same code copies between buffers at once, which is correct, and useless.

The wrapper goes around that of recompute.py: with `full` the inputs of blocks are moved; with `selective` too, and the kept outputs
stay. Read wrap.py before this file.

source: Rhu et al. 2016 (vDNN)
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from rankloom.base.errors import ConfigError
from rankloom.train.blocks.wrap import Wrapped, blocks_of
from rankloom.train.recompute import UNDECIDED, RecomputedForward

SMALL = 1 << 20        # bytes; copying a smaller storage costs more than it frees
UNDER_WAY = 2          # blocks whose copies may be in flight


def offload_activations(model: nn.Module, *, blocks: tuple[type[nn.Module], ...] = (), small: int = SMALL) -> "Offload":
    """Move what the repeated blocks of `model` save for backward to CPU memory, pinned for a GPU.

    blocks:  classes of the blocks; left out, modules that are in a list with others of their class
    small:   storages of fewer bytes stay on the device
    sent:    each saved storage to the CPU and back; those of the last two blocks only to the CPU
    raises:  ConfigError, also when recompute has a budget in bytes, which counts what is moved here
    """
    found = blocks_of(model, blocks)
    for name, block in found.items():
        if isinstance(block.forward, RecomputedForward) and block.forward.choice == UNDECIDED:
            raise ConfigError(f"{name}: recompute was given a number of bytes, and offload_activations moves away what it counts; "
                              "give recompute = 'none', 'selective' or 'full' with it")
    return Offload(model, found, small)


class Offload:
    """The offload of one model. `bytes_out` and `bytes_back` count the bytes copied to the CPU and back."""

    def __init__(self, model: nn.Module, blocks: dict[str, nn.Module], small: int):
        self.bytes_out = self.bytes_back = 0
        self.small = small
        self._model = model
        self._lanes: dict[torch.device, Lane] = {}
        self._recent: list[ref[Visit]] = []   # visits whose copies may be in flight
        for block in blocks.values():
            OffloadedForward(block, self)

    def visit(self, given: Any) -> "Visit":
        """A forward of a block begins. Frees the device memory of the visit before the last. given: the arguments"""
        with torch._C.DisableTorchFunctionSubclass():   # for tensors in flight too: this need not wait
            stay = {t.untyped_storage()._cdata for t in (*self._model.parameters(), *self._model.buffers()) if t.layout is torch.strided}
        stay |= {t.untyped_storage()._cdata for t in tree_leaves(given) if _plain(t) and not t.requires_grad}
        visit = Visit(self, stay, self._recent[-1] if self._recent else None)
        self._recent.append(ref(visit))
        while len(self._recent) > UNDER_WAY:
            done = self._recent.pop(0)()
            if done:
                done.leave()
        return visit

    def lane(self, device: torch.device) -> "Lane":
        """The stream for copies of a device."""
        if device not in self._lanes:
            self._lanes[device] = Lane(device)
        return self._lanes[device]


class OffloadedForward(Wrapped):
    """The forward of a block whose saved tensors are moved."""

    layer = 2

    def __init__(self, block: nn.Module, offload: Offload):
        super().__init__(block)
        self._offload = offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the block's own forward."""
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        visit = self._offload.visit((args, kwargs))
        with saved_tensors_hooks(visit.pack, visit.unpack):
            return self.inner(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Staying:
    """What autograd holds for a saved tensor that stays on the device."""

    tensor: Tensor           # detached: its graph would hold a cycle
    version: int


@dataclass(frozen=True, slots=True)
class Travelling:
    """What autograd holds for a saved tensor that is moved."""

    parcel: "Parcel"
    number: int              # index in `parcel.holds`
    dtype: torch.dtype
    where: tuple[Any, ...]   # offset, size, stride


class Visit:
    """One forward of one block, and its backward. Only autograd holds a reference to it."""

    def __init__(self, offload: Offload, stay: set[int], before: "ref[Visit] | None"):
        self._offload, self._stay, self._before = offload, stay, before
        # By storage and version: a storage must not change while it is saved. If it changed earlier, also by the part: parts may have
        # their own versions, as the gates of an LSTM, and the next part may still change.
        self._parcels: WeakValueDictionary[tuple[int, int, Any], Parcel] = WeakValueDictionary()
        self._returning = False

    def pack(self, t: Tensor) -> Staying | Travelling:
        """For autograd: the object to hold in place of `t`."""
        if not _plain(t) or t.untyped_storage().nbytes() < self._offload.small or t.untyped_storage()._cdata in self._stay:
            return Staying(t.detach(), t._version)
        where = (t.storage_offset(), t.size(), t.stride())
        key = (t.untyped_storage()._cdata, t._version, where if t._version else None)
        parcel = self._parcels.get(key)
        if parcel is None or parcel.here is None:   # its address may be reused
            parcel = self._parcels[key] = Parcel(t.untyped_storage(), t.device, self._offload)
        parcel.holds.append(Staying(t.detach(), t._version))
        return Travelling(parcel, len(parcel.holds) - 1, t.dtype, where)

    def unpack(self, held: Staying | Travelling) -> Tensor:
        """For autograd: the tensor again. The first unpack of a block starts the copies of the block before it."""
        if isinstance(held, Staying):
            return _unchanged(held)
        if held.parcel.holds:
            _unchanged(held.parcel.holds[held.number])
        if not self._returning:
            self._returning = True
            before = self._before() if self._before else None
            for visit in (self, before):
                if visit:
                    visit.come_back()
        return torch.empty(0, dtype=held.dtype, device=held.parcel.device).set_(held.parcel.storage(), *held.where)   # type: ignore[call-overload,no-any-return]

    def leave(self) -> None:
        """Free the device memory of the copied storages."""
        for parcel in list(self._parcels.values()):
            parcel.leave()

    def come_back(self) -> None:
        """Start the copies back to the device."""
        for parcel in list(self._parcels.values()):
            parcel.come_back()


class Parcel:
    """One storage: on the device (`here`), in CPU memory, or both. holds: its saved tensors, until device memory is freed"""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device, offload: Offload):
        self.device = device
        self.here: torch.UntypedStorage | None = storage
        self.holds: list[Staying] = []
        self._offload, self._lane = offload, offload.lane(device)
        self._under_way: torch.cuda.Event | None = None
        self._away = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        self._under_way = self._lane.copy(self._away, _bytes_of(storage, device))
        offload.bytes_out += storage.nbytes()

    def leave(self) -> None:
        """Free the device memory after the copy. A storage that was changed meanwhile stays, and raises when it is unpacked."""
        if all(held.tensor._version == held.version for held in self.holds):
            self._lane.wait(self._under_way)
            self.here = None
            self.holds.clear()

    def come_back(self) -> None:
        """Start the copy to the device, unless it is there."""
        if self.here is None:
            back = torch.empty_like(self._away, device=self.device, pin_memory=False)
            self._under_way = self._lane.copy(back, self._away)
            self.here = back.untyped_storage()
            self._offload.bytes_back += len(back)

    def storage(self) -> torch.UntypedStorage:
        """The storage on the device; work queued from now on may read it."""
        self.come_back()
        self._lane.wait(self._under_way)
        assert self.here is not None, "a parcel that has come back is here"
        return self.here

    def __del__(self) -> None:
        self._lane.wait(self._under_way)   # a copy must not outlive the memory it uses


class Lane:
    """Copies beside the computation: on a side stream on a GPU; at once on a CPU."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, to: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Copy when all work queued so far is done. Returns the event to wait for."""
        if self._stream is None:
            to.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, under_way: torch.cuda.Event | None) -> None:
        """Work queued from now on runs after that copy."""
        if self._stream is not None and under_way is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(under_way)


def _unchanged(held: Staying) -> Tensor:
    """Raise when a saved tensor was changed. autograd checks this itself only without hooks."""
    if held.tensor._version != held.version:
        raise RuntimeError(f"a tensor of shape {tuple(held.tensor.shape)} that backward needs was changed in place after forward: it is at "
                           f"version {held.tensor._version}, expected {held.version}; change a copy, or step after backward")
    return held.tensor


def _plain(t: Any) -> bool:
    """Whether a tensor is just a strided view of bytes: no subclass, and no lazy conjugation or negation."""
    return type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and not (t.is_conj() or t.is_neg())


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)   # type: ignore[call-overload,no-any-return]
