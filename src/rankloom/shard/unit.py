"""A unit: parameters that are gathered, used and let go together. The one abstraction behind ZeRO and FSDP.

    own     this rank's slice, 1/p of the unit: what the optimizer updates, in the master format
    whole   all elements, in the compute format; the model's parameters are views of it

    SHARDED     `whole` is out of date, or not in memory at all; maybe a larger slice of it is, near by
    GATHERING   the slices of all ranks are on their way into it
    GATHERED    every parameter may be used

Three kinds of memory, told apart here and nowhere else:
- let go (stage 3): `whole` is a window (shard/frames.py), open while it is gathered, so that units use the same memory in turn. Views
  of it, those that autograd keeps for backward included, mean the same elements whenever it is open.
- kept (stages 1, 2): `whole` stays, and is gathered once after each update.
- common: ranks that share a host map one and the same `whole`. A rank writes its slice, and a gather is a barrier.

Read shard/layout.py before this file; parallel/sharding.py says when a unit is gathered, shard/gradient.py is its other half.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from rankloom.base.cost import Bill
from rankloom.base.errors import UnitError
from rankloom.shard.away import come_back, leave, mark, set_out, watch, writes
from rankloom.shard.frames import Frames, Standing, Window
from rankloom.shard.layout import FlatLayout, lay_out_evenly
from rankloom.shard.offload import Host
from rankloom.world.group import Group, Handle

LayOut = Callable[[Mapping[str, torch.Size], int, int], FlatLayout]
Fill = Callable[[str, Tensor], None]


class State(Enum):
    """What may be done with the parameters of a unit."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


@dataclass(frozen=True, slots=True)
class Formats:
    """In which dtypes a unit computes (and travels), keeps its slice, and sums gradients."""

    compute: torch.dtype
    master: torch.dtype
    reduce: torch.dtype


class Memory(Enum):
    """What becomes of the whole when it is released."""

    LET_GO = "let go"
    KEPT = "kept"
    COMMON = "common"


@dataclass(slots=True)
class Counts:
    """told:    how often the slice had been written when the whole was last made of it
    updates: how often the whole has been made of it anew; each counts as a write of the parameters, for who went forward with the old"""

    told: int = 0
    updates: int = 0


class Unit:
    """Parameters of one dtype, laid end to end and cut over the ranks of `group`.

    params: full names -> parameters of the model; a collective: every rank gives the same
    keep:   the whole stays in memory (stages 1 and 2)
    host:   where the slice lies, if it is not on the group's device (shard/offload.py)
    fill:   gives a parameter's name and memory their values, where `params` are stand-ins without any; on all ranks the same
    frames: the memory that it has in turn with other units, while gathered; left out, its own
    memory: n/p master elements, and n compute elements while gathered (always, if kept; once for all ranks, if common)
    """

    def __init__(self, name: str, params: Mapping[str, nn.Parameter], group: Group, formats: Formats, *, keep: bool = False,
                 lay_out: LayOut = lay_out_evenly, host: Host | None = None, fill: Fill | None = None,
                 frames: Frames | None = None):
        self.name, self.params, self.group, self.formats, self.host = name, dict(params), group, formats, host
        itemsize = min(formats.compute.itemsize, formats.master.itemsize)
        self.layout = lay_out({name: param.shape for name, param in params.items()}, itemsize, group.size)
        whole, common = group.common_buffer(self.layout.total, formats.compute)
        is_own = group.size == 1 and host is None and formats.compute == formats.master   # then there is nothing to let go
        self.memory = Memory.COMMON if common else Memory.KEPT if keep or is_own else Memory.LET_GO
        frames = frames or Frames(group.device)
        stays = Standing(whole) if self.stays else None
        del whole   # before other memory comes in its place
        self.window: Window = stays or frames.window(self.layout.total, formats.compute)
        self.window.open()
        self.state = State.GATHERED
        self._pending: Callable[[], object] | None = None   # waits for what is on its way
        self._counts = Counts()
        self._near: tuple[Group, Tensor] | None = None   # a slice of the whole that few ranks close by share
        mark(self.params, formats.compute, group.world_rank, name)
        if fill is not None:
            self.release()   # nothing is in it yet
        in_place = self.stays and formats.master == formats.compute and host is None
        size = self.layout.total // group.size
        self.own = self._span() if in_place else host.empty(size, formats.master) if host else torch.zeros(
            size, dtype=formats.master, device=group.device)
        self._take_over(fill)
        if self.stays and (self.common or not in_place):   # else what all ranks write to the whole is in their slices, too
            for param in self.params.values():
                watch(param)
        self.publish()

    @property
    def whole(self) -> Tensor:
        """All elements, while they are in memory."""
        return self.window.tensor

    @property
    def stays(self) -> bool:
        """Whether the whole is in memory even when it is released."""
        return self.memory is not Memory.LET_GO

    @property
    def common(self) -> bool:
        """Whether the whole exists once for all ranks of the group."""
        return self.memory is Memory.COMMON

    @torch.no_grad()
    def _take_over(self, fill: Fill | None) -> None:
        """Move the parameters' values into the slices, and the parameters onto `whole`."""
        trained = next(iter(self.params.values())).requires_grad
        self.owners = {name: nn.Parameter(self.slice_view(self.own, name)) for name in self.params if trained}
        for name, owner in self.owners.items():
            vars(owner).update(vars(self.params[name]))   # attributes of the user's, by which optimizers may tell parameters apart
        for name, param in self.params.items():
            param.grad = None   # from before; no optimizer of the slices would ever forget it
            if fill is None:
                values = param.detach()
            else:
                values = torch.empty(self.layout.slot(name).shape, dtype=self.formats.master, device=self.group.device)
                fill(name, values)
            self.slice_view(self.own, name).view(-1).copy_(self.piece(name, values))
            self._place(name, values)

    # ------------------------------------------------------------------ transitions

    def start_gather(self) -> None:
        """SHARDED -> GATHERING: every rank's slice sets out to all. A collective.

        sent: n(p-1)/p compute elements; nothing where the pages are common
        """
        self._expect(State.SHARDED)
        self.state, self._counts.told = State.GATHERING, self.own._version
        if self.common:
            self.group.barrier(label=f"parameters of {self.name}")
        else:
            self.window.open()
            self._pending = self.host.beside(self._send) if self.host else self._send().wait
            for param in self.params.values() if self.stays else ():
                set_out(param, self.wait)

    def _send(self) -> Handle:
        if not self.stays and self._near is None:
            self._write_slice(self._own_here(), self._span())
        group, mine = self._near or (self.group, self._span())
        sent: Handle = group.all_gather(mine, out=self.whole, label=f"parameters of {self.name}", async_op=True)
        return sent

    def wait(self) -> None:
        """GATHERING -> GATHERED: every rank sees every parameter."""
        self._expect(State.GATHERING)
        if self._pending is not None:
            self._pending()
            self._pending = None
        self._near = None
        if self.stays:
            for param in self.params.values():
                come_back(param)
        else:
            self._show()
            _move_versions(self._read_in_backward(), -1)
        self.state = State.GATHERED

    def release(self, near: Group | None = None) -> None:
        """GATHERED -> SHARDED: the whole leaves memory, unless it is kept: then nothing happens.

        near: ranks among which it will be gathered again before the next update: each keeps 1/near of the whole
        """
        self._expect(State.GATHERED)
        if self.stays:
            return
        if near is not None:
            self._near = near, self.whole.view(near.size, -1)[near.rank].clone()
        self._hide()
        _move_versions(self._read_in_backward(), 1)
        self.window.close()
        self.state = State.SHARDED

    @torch.no_grad()
    def publish(self) -> None:
        """-> SHARDED: `own` has changed. Where the whole is kept, this rank's span of it follows."""
        if self.state is State.GATHERING:
            self.wait()
        self._near, self._counts.told = None, self.own._version
        if self.stays:
            if self.own.data_ptr() != self._span().data_ptr():
                self._write_slice(self._own_here(), self._span())
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

    def piece(self, name: str, values: Tensor) -> Tensor:
        """This rank's piece of a tensor that has the shape of parameter `name`, flattened."""
        start, stop = self.layout.piece(name, self.group.rank)
        return values.reshape(-1)[start:stop]

    def slice_view(self, flat: Tensor, name: str) -> Tensor:
        """The piece of parameter `name` in a flat slice like `own`; in the parameter's own shape where layouts cut no tensor."""
        start, stop = self.layout.piece(name, self.group.rank)
        slot = self.layout.slot(name)
        first = slot.start + start - self.layout.span(self.group.rank)[0] if stop > start else 0
        view = flat[first : first + stop - start]
        return view.view(slot.shape) if self.layout.whole_tensors and stop > start else view

    def version(self, name: str) -> int:
        """How often a parameter has been written by others, as autograd counts; that it goes and comes is none of it."""
        away = not self.stays and self.state is not State.GATHERED
        return writes(self.params[name]) - away - self._counts.updates

    @property
    def trainable(self) -> bool:
        """Whether its parameters get gradients: all do, or none. Decided when the unit is made."""
        return bool(self.owners)

    def expect_gathered(self) -> None:
        """Raise UnitError when the parameters may not be used now."""
        self._expect(State.GATHERED)

    def expect_told(self) -> None:
        """Raise UnitError when slices have been changed and the whole, which is here or on its way, is of the old ones; or replaced."""
        moved = [name for name, owner in self.owners.items()
                 if owner.numel() and owner.data_ptr() != self.slice_view(self.own, name).data_ptr()]
        if moved:
            raise UnitError(f"rank {self.group.world_rank}: the slice of {moved[0]} was replaced (`param.data = ...`): no rank computes "
                            "with the new tensor: write into it, `param.copy_(...)` under torch.no_grad()")
        is_old = self.state is not State.SHARDED and self._counts.told != self.own._version
        if is_old and (self.group.size > 1 or self.own.data_ptr() != self._span().data_ptr()):
            raise UnitError(f"rank {self.group.world_rank}: slices of unit {self.name} were changed, and by no torch optimizer, so ranks "
                            "would compute with old values beside new ones: call `after_update()` of the sharded model after the change")

    def publish_bill(self) -> Bill:
        """What this rank sends after each update, beyond the gather."""
        return Bill()

    def held(self) -> tuple[int, int]:
        """Bytes in memory now: of this rank's slice, and of the whole beyond it; of common pages, this rank's share."""
        whole = self.window.held // (self.group.size if self.common else 1)
        apart = self.own.untyped_storage()._cdata != self.whole.untyped_storage()._cdata   # which tells them on the meta device too
        near = self._near[1].nbytes if self._near else 0
        return self.own.nbytes, near + (whole if apart else whole - self.own.nbytes)

    def _view(self, name: str) -> Tensor:
        slot = self.layout.slot(name)
        return self.whole[slot.start : slot.end].view(slot.shape)

    # ------------------------------------------------------------------ how the whole is written and read

    def _own_here(self) -> Tensor:
        """The slice on the device of the group."""
        return self.own if self.host is None else self.host.fetch(self.own)

    def _write_slice(self, own: Tensor, out: Tensor) -> None:
        """This rank's slice, as it travels."""
        out.copy_(own)

    def _place(self, name: str, values: Tensor) -> None:
        """A parameter's first values are in `whole`, where that is in memory."""
        if self.state is State.GATHERED:
            if not self.common:
                self._view(name).copy_(values)
            self.params[name].data = self._view(name)

    def _show(self) -> None:
        """Whoever reads the parameters finds them in `whole`."""
        for name, param in self.params.items():
            come_back(param)
            param.data = self._view(name)

    def _hide(self) -> None:
        """Nobody does any more: a kernel that met freed memory would end the process."""
        nothing = torch.empty(0, dtype=self.formats.compute, device=self.group.device)
        for param in self.params.values():
            param.data = nothing
            leave(param)

    def _read_in_backward(self) -> Iterable[Tensor]:
        """Tensors whose version counters are those of all that autograd keeps of `whole`."""
        return self.params.values()

    def _span(self) -> Tensor:
        return self.whole[slice(*self.layout.span(self.group.rank))]

    def _expect(self, state: State) -> None:
        if self.state is not state:
            shown = ", ".join(list(self.params)[:3])
            raise UnitError(f"rank {self.group.world_rank}: unit {self.name} ({shown} ...) is {self.state.value}, expected "
                            f"{state.value}. Parameters may be used inside the forward and backward of the module that holds them; "
                            "call that module, not a part of it")


def _move_versions(tensors: Iterable[Tensor], by: int) -> None:
    """While memory is away, what autograd keeps of it counts as changed: a backward that reads it all the same is an error, where it
    would find what others have left there. After an update, too: it would find new values."""
    seen = tuple(tensors)
    with torch._C.DisableTorchFunctionSubclass():   # looking is allowed; this saves asking
        torch._C._autograd._unsafe_set_version_counter(seen, tuple(tensor._version + by for tensor in seen))
