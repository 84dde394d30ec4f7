"""A unit: parameters that are gathered, used and released together. The one abstraction behind ZeRO and FSDP.

    own     this rank's slice, 1/p of the unit: what the optimizer updates, in the master dtype
    whole   all elements, in the compute dtype; the model's parameters are views of it

    SHARDED     `whole` is stale, or not in memory
    GATHERING   the slices of all ranks are on their way into it
    GATHERED    every parameter may be used

Where the whole resides differs, and only this file knows:
- freed (stage 3): `whole` is a window (shard/frames.py), open while gathered, so that units take turns with the same memory. Views of
  it, those that autograd keeps for backward included, stay valid whenever it is open.
- kept (stages 1, 2): `whole` stays in memory, and is gathered once after each update.
- common: ranks that share memory map one and the same `whole`. Each writes its slice, and a gather is a barrier.

Read layout.py first. parallel/sections/forward_backward.py says when a unit is gathered; shard/gradient.py has its gradient.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rankloom.base.cost import Bill
from rankloom.base.errors import UnitError
from rankloom.base.hooks import copy_user_attributes
from rankloom.base.tensors import keep_until_read
from rankloom.shard.away import note_unit, set_gathered, set_gathering, set_released, watch, writes
from rankloom.shard.frames import AlwaysOpen, Frames, Window
from rankloom.shard.layout import FlatLayout, lay_out_evenly
from rankloom.shard.offload import Host
from rankloom.world.group import Group, Handle
from rankloom.world.handle import waits_here_too

LayOut = Callable[[Mapping[str, torch.Size], int, int], FlatLayout]
Fill = Callable[[str, Tensor], None]


class State(Enum):
    """What may be done with the parameters of a unit."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


@dataclass(frozen=True, slots=True)
class Formats:
    """The dtypes in which a unit computes (and is gathered), keeps its slice, and sums gradients."""

    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype


class Residence(Enum):
    """What happens to the memory of the whole when the unit is released."""

    FREED = "freed"
    KEPT = "kept"
    COMMON = "common"


@dataclass(slots=True)
class Counts:
    """What a unit counts, to tell writes of its own from those of others.

    published_version: version of the slice from which the whole was last made
    updates: how often the whole was made anew; each bumps the parameters' version, so that a backward over the old values raises
    """

    published_version: int = 0
    updates: int = 0


class NearSlice(NamedTuple):
    """What a rank keeps of a released whole, for neighbours that gather it again from each other: their group, and its larger slice."""

    group: Group
    slice: Tensor


class Unit:
    """Parameters of one dtype, laid end to end and cut over the ranks of `group`. Making one is a collective.

    params: full names -> parameters of the model, the same on every rank
    keep:   the whole stays in memory (stages 1 and 2)
    host:   holds the slice, if that is not on the group's device (shard/offload.py)
    fill:   fill(name, tensor) gives a parameter its values, where `params` are stand-ins without memory; the same on all ranks
    frames: memory shared in turn with other units; left out, its own
    memory: n/p master elements, and n compute elements while gathered (always, if kept; once for all ranks, if common)
    """

    def __init__(self, name: str, params: Mapping[str, nn.Parameter], group: Group, formats: Formats, *, keep: bool = False,
                 lay_out: LayOut = lay_out_evenly, host: Host | None = None, fill: Fill | None = None,
                 frames: Frames | None = None):
        self.name, self.params, self.group, self.formats, self.host = name, dict(params), group, formats, host
        itemsize = min(formats.compute.itemsize, formats.master.itemsize)
        self.layout = lay_out({name: param.shape for name, param in params.items()}, itemsize, group.size)
        self._pending: Callable[[], object] | None = None   # waits for the gather in flight
        self._counts = Counts()
        self._near: NearSlice | None = None
        self._open_whole(keep, frames or Frames(group.device))
        note_unit(self.params, formats.compute, group.world_rank, name)
        if fill is not None:
            self.release()   # it has no values yet
        self.own = self._own_in_whole() if self._slice_is_inside else self._new_slice()
        self._take_over(fill)
        self._watch_copies()
        self.publish()

    def _open_whole(self, keep: bool, frames: Frames) -> None:
        """-> GATHERED, with arbitrary values: choose where the whole resides. A collective: ranks that share memory map one whole."""
        lent, is_common = self.group.common_buffer(self.layout.total, self.formats.compute)
        is_its_slice = self._may_hold_slice and self.group.size == 1   # then there is nothing to free
        kept = Residence.KEPT if keep or is_its_slice else Residence.FREED
        self.residence = Residence.COMMON if is_common else kept
        stays = AlwaysOpen(lent) if self.stays else None
        del lent   # free it before other memory is allocated
        self.window: Window = stays or frames.window(self.layout.total, self.formats.compute)
        self.window.open()
        self.state = State.GATHERED

    @property
    def _may_hold_slice(self) -> bool:
        """Whether the slice could lie inside of the whole: on the same device, in the same dtype."""
        return self.host is None and self.formats.compute == self.formats.master

    @property
    def _slice_is_inside(self) -> bool:
        """Whether the slice is a view of this rank's span of the whole."""
        return self.stays and self._may_hold_slice

    def _watch_copies(self) -> None:
        """Where a write to a parameter does not reach this rank's slice, or reaches those of others, count it."""
        if self.stays and (self.common or not self._slice_is_inside):
            for param in self.params.values():
                watch(param)

    def _new_slice(self) -> Tensor:
        """Zeros for this rank's slice, in memory of its own."""
        size, dtype = self.layout.total // self.group.size, self.formats.master
        return self.host.empty(size, dtype) if self.host else torch.zeros(size, dtype=dtype, device=self.group.device)

    @property
    def whole(self) -> Tensor:
        """All elements, while they are in memory."""
        return self.window.tensor

    @property
    def stays(self) -> bool:
        """Whether the whole is in memory even when it is released."""
        return self.residence is not Residence.FREED

    @property
    def is_its_slice(self) -> bool:
        """Whether the slice is the whole, in the same memory: what is written to a parameter is in it."""
        return self.stays and self.group.size == 1 and self.own.data_ptr() == self._own_in_whole().data_ptr()

    @property
    def _slice_version(self) -> int:
        """How often the slice was written, by autograd's counts: owners that were stand-ins have counts of their own."""
        return self.own._version + sum(owner._version for owner in self.owners.values())

    @property
    def common(self) -> bool:
        """Whether the whole exists once for all ranks of the group."""
        return self.residence is Residence.COMMON

    @torch.no_grad()
    def _take_over(self, fill: Fill | None) -> None:
        """Move the parameters' values into the slices, and the parameters onto `whole`."""
        trained = next(iter(self.params.values())).requires_grad
        self.owners = {name: nn.Parameter(self.slice_view(self.own, name)) for name in self.params if trained}
        for name, owner in self.owners.items():
            copy_user_attributes(owner, self.params[name])
        for name, param in self.params.items():
            param.grad = None   # an old one: the optimizer sees slices only, so its zero_grad would never reach it
            if fill is None:
                values = param.detach()
                keep_until_read(values)
            else:
                values = torch.empty(self.layout.slot(name).shape, dtype=self.formats.master, device=self.group.device)
                fill(name, values)
            self.slice_view(self.own, name).view(-1).copy_(self.slice_of(name, values))
            self._place(name, values)

    # ------------------------------------------------------------------ transitions

    def start_gather(self) -> None:
        """SHARDED -> GATHERING: start to all-gather the slices. A collective.

        sent: n(p-1)/p compute elements; nothing where the whole is common
        """
        self._expect(State.SHARDED)
        self.state, self._counts.published_version = State.GATHERING, self._slice_version
        if self.common:
            self.group.barrier(label=f"parameters of {self.name}")
        else:
            self.window.open()
            arrive = self.host.beside(self._send) if self.host else self._send().wait
            self._pending = waits_here_too(arrive, self.group.device)   # it is waited for once, by whichever stream reads first
            for param in self.params.values() if self.stays else ():
                set_gathering(param, self.wait)

    def _send(self) -> Handle:
        """Start to all-gather this rank's slice, or the larger one that it keeps for neighbours."""
        if not self.stays and self._near is None:
            self._write_slice(self._own_here(), self._own_in_whole())
        group, own = self._near or (self.group, self._own_in_whole())
        sent: Handle = group.all_gather(own, out=self.whole, label=f"parameters of {self.name}", async_op=True)
        return sent

    def wait(self) -> None:
        """GATHERING -> GATHERED: every parameter may be used, in this stream and in that which started the gather."""
        self._expect(State.GATHERING)
        if self._pending is not None:
            self._pending()
            self._pending = None
        self._near = None
        if self.stays:
            for param in self.params.values():
                set_gathered(param)
        else:
            self._show()
            _move_versions(self._read_in_backward(), -1)
        self.state = State.GATHERED

    def release(self, near: Group | None = None) -> None:
        """GATHERED -> SHARDED: free the whole. Where it stays in memory, nothing happens.

        near: the ranks that gather it again before the next update: each keeps a slice of 1/near.size of the whole
        """
        self._expect(State.GATHERED)
        if self.stays:
            return
        if near is not None:
            self._near = NearSlice(near, self.whole.view(near.size, -1)[near.rank].clone())
        self._hide()
        _move_versions(self._read_in_backward(), 1)
        # A cast that autocast keeps belongs to the graph of the released values. (It does not know the meta device, of a plan on paper.)
        if self.group.device.type != "meta" and torch.is_autocast_enabled(self.group.device.type):
            torch.clear_autocast_cache()
        self.window.close()
        self.state = State.SHARDED

    @torch.no_grad()
    def publish(self) -> None:
        """-> SHARDED (GATHERED where one rank keeps the whole): `own` has changed. Write it to this rank's span, where the whole stays."""
        if self.state is State.GATHERING:
            self.wait()
        self._near, self._counts.published_version = None, self._slice_version
        if self.stays:
            if self.own.data_ptr() != self._own_in_whole().data_ptr():
                self._write_slice(self._own_here(), self._own_in_whole())
            self.state = State.SHARDED if self.group.size > 1 else State.GATHERED
        elif self.state is State.GATHERED:
            self.release()
        self._counts.updates += 1
        _move_versions(self._read_in_backward(), 1)

    def make_ready(self) -> None:
        """From any state to GATHERED."""
        if self.state is State.SHARDED:
            self.start_gather()
        if self.state is State.GATHERING:
            self.wait()

    # ------------------------------------------------------------------ what is where

    def slice_of(self, name: str, values: Tensor) -> Tensor:
        """This rank's slice of a tensor that has the shape of parameter `name`, flattened."""
        start, stop = self.layout.slice_of(name, self.group.rank)
        return values.reshape(-1)[start:stop]

    def slice_view(self, flat: Tensor, name: str) -> Tensor:
        """The slice of parameter `name` in `flat`, a slice of the unit like `own`; in its own shape where layouts cut no tensor."""
        start, stop = self.layout.slice_of(name, self.group.rank)
        first = self._place_in_slice(name)
        view = flat[first : first + stop - start]
        return view.view(self.layout.slot(name).shape) if self.layout.whole_tensors and stop > start else view

    def _place_in_slice(self, name: str) -> int:
        """Where the slice of a parameter begins; 0 for an empty one."""
        start, stop = self.layout.slice_of(name, self.group.rank)
        return self.layout.slot(name).start + start - self.layout.span(self.group.rank)[0] if stop > start else 0

    def version(self, name: str) -> int:
        """How often a parameter was written, by autograd's count; gathers, releases and updates are not counted."""
        away = not self.stays and self.state is not State.GATHERED
        return writes(self.params[name]) - away - self._counts.updates

    @property
    def trainable(self) -> bool:
        """Whether its parameters get gradients: all do, or none. Decided when the unit is made."""
        return bool(self.owners)

    def hand_over(self, owners: Mapping[str, nn.Parameter]) -> None:
        """Replace our owners by the optimizer's parameters of the same names, which view the same memory."""
        unpublished = self._slice_version - self._counts.published_version
        self.owners = {name: owners[name] for name in self.owners}
        self._counts.published_version = self._slice_version - unpublished

    def expect_gathered(self) -> None:
        """Raise UnitError when the parameters may not be used now."""
        self._expect(State.GATHERED)

    def expect_published(self, how: str, remedy: str) -> None:
        """Raise UnitError when the slices were replaced, or changed without `publish` while the whole is gathered or on its way.

        how: who changed them, for the message ("by no torch optimizer")   remedy: what the user should do
        """
        begin, size = self.own.data_ptr(), self.own.itemsize
        moved = [name for name, owner in self.owners.items()
                 if owner.numel() and owner.data_ptr() != begin + size * self._place_in_slice(name)]
        if moved:
            raise UnitError(f"rank {self.group.world_rank}: the slice of {moved[0]} was replaced (`param.data = ...`): no rank computes "
                            "with the new tensor: write into it, `param.copy_(...)` under torch.no_grad()")
        is_old = self.state is not State.SHARDED and self._counts.published_version != self._slice_version
        if is_old and not self.is_its_slice:
            raise UnitError(f"rank {self.group.world_rank}: slices of unit {self.name} were changed, and {how}, so ranks would "
                            f"compute with old values beside new ones: {remedy}")

    def publish_bill(self) -> Bill:
        """What this rank sends after each update, beyond the gather."""
        return Bill()

    def held(self) -> tuple[int, int]:
        """Bytes in memory now: of this rank's slice, and of the whole beyond it; of a common whole, this rank's share."""
        whole = self.window.held // (self.group.size if self.common else 1)
        apart = self.own.untyped_storage()._cdata != self.whole.untyped_storage()._cdata   # addresses would not do on the meta device
        near = self._near.slice.nbytes if self._near else 0
        return self.own.nbytes, near + (whole if apart else whole - self.own.nbytes)

    def _view(self, name: str) -> Tensor:
        """The parameter in `whole`."""
        slot = self.layout.slot(name)
        return self.whole[slot.start : slot.end].view(slot.shape)

    # ------------------------------------------------------------------ how the whole is written and read

    def _own_here(self) -> Tensor:
        """The slice on the device of the group."""
        return self.own if self.host is None else self.host.fetch(self.own)

    def _write_slice(self, own: Tensor, out: Tensor) -> None:
        """Write this rank's slice in the format that is gathered."""
        out.copy_(own)

    def _place(self, name: str, values: Tensor) -> None:
        """Put a parameter's first values into `whole`, where that is in memory, and point the parameter there."""
        if self.state is State.GATHERED:
            if not self.common:
                self._view(name).copy_(values)
            self.params[name].data = self._view(name)

    def _show(self) -> None:
        """Point the parameters into `whole`."""
        for name, param in self.params.items():
            set_gathered(param)
            param.data = self._view(name)

    def _hide(self) -> None:
        """Point the parameters at an empty tensor: a kernel that read freed memory would crash the process."""
        with torch.inference_mode(False):   # it makes the parameter what it is itself, and one of that mode has no place in a graph
            nothing = torch.empty(0, dtype=self.formats.compute, device=self.group.device)
        for param in self.params.values():
            param.data = nothing
            set_released(param)

    def _read_in_backward(self) -> Iterable[Tensor]:
        """Tensors that share their version counters with all that autograd keeps of `whole`."""
        return self.params.values()

    def _own_in_whole(self) -> Tensor:
        """The elements of `whole` that this rank owns."""
        return self.whole[slice(*self.layout.span(self.group.rank))]

    def _expect(self, state: State) -> None:
        if self.state is not state:
            shown = ", ".join(list(self.params)[:3])
            raise UnitError(f"rank {self.group.world_rank}: unit {self.name} ({shown} ...) is {self.state.value}, expected "
                            f"{state.value}. Parameters may be used inside the forward and backward of the module that holds them; "
                            "call that module, not a part of it")


def _move_versions(tensors: Iterable[Tensor], by: int) -> None:
    """Make what autograd keeps of released memory count as changed, so that a backward that reads it raises. It would find the values of
    other units there; after an update, new values."""
    seen = tuple(tensors)
    with torch._C.DisableTorchFunctionSubclass():   # reading metadata never raises; skip the per-call check for speed
        torch._C._autograd._unsafe_set_version_counter(seen, tuple(tensor._version + by for tensor in seen))
