"""The gradient of a unit. Until it is reduced, every rank has a whole one of its own; then each rank has its slice of the sum.

    land       move a parameter's gradient out of autograd's memory into the unit's flat buffer
    start      start the reduce-scatter over the shard axis
    advance    once that has arrived, start the all-reduce of the slices over the replicas
    finish     wait for the sum; add it to what earlier backward passes have left in the slice

Flat buffers come from `group.buffer` where ranks reduce them in shared memory, else they are windows (shard/frames.py). At stage 1 every
unit keeps its own; at stages 2 and 3, units of one size take turns with two. On a GPU, buffers and slices are freed when a step begins,
so that its activations can use the memory. Read shard/unit.py before this file.
"""

from collections import deque
from collections.abc import Iterable, Set
from enum import Enum

import torch
from torch import Tensor, nn

from rankloom.base.errors import UnitError
from rankloom.base.hooks import landed
from rankloom.base.tensors import copy_into
from rankloom.shard.frames import AlwaysOpen, Frames, Window, between_steps
from rankloom.shard.sums import UnitSums
from rankloom.shard.unit import Unit

IN_TURN = 2   # one buffer is being filled while the other is being reduced


class BufferPool:
    """Flat buffers that gradients of units of one size share, and the reductions in flight.

    Buffers that the group lends are all made at the start: asking it for memory is a collective.
    """

    def __init__(self, units: Iterable[Unit], frames: Frames):
        self.frames = frames
        self._free: dict[tuple[int, torch.dtype], list[Window]] = {}   # by elements and dtype
        self._flying: deque[Gradient] = deque()
        for unit in units:
            free = self._free.setdefault(elements_and_dtype(unit), [])
            if len(free) < IN_TURN:
                free.append(self._buffer_for(unit))

    def lend(self, unit: Unit) -> Window:
        """A buffer for the whole gradient of `unit`; waits for a reduction in flight when all are in use."""
        wanted = elements_and_dtype(unit)
        free = self._free[wanted]
        while not free and (flying := next((g for g in self._flying if elements_and_dtype(g.unit) == wanted), None)):
            flying.finish()
        buffer = free.pop() if free else self.frames.window(*wanted)
        buffer.open()
        return buffer

    def give_back(self, unit: Unit, buffer: Window) -> None:
        """The buffer may be lent again."""
        buffer.close()
        self._free[elements_and_dtype(unit)].append(buffer)

    def depart(self, gradient: "Gradient") -> None:
        """Its reduction has started; advance those that started before it."""
        for other in self._flying:
            other.advance()
        self._flying.append(gradient)
        while len(self._flying) > IN_TURN:   # each holds memory for what it receives
            self._flying[0].finish()

    def arrive(self, gradient: "Gradient") -> None:
        """Its reduction has ended."""
        self._flying.remove(gradient)

    def finish_all(self) -> None:
        """Wait for every reduction in flight."""
        while self._flying:
            self._flying[0].finish()

    def held(self) -> int:
        """Bytes of buffers that are not lent."""
        return sum(buffer.held for free in self._free.values() for buffer in free)

    def _buffer_for(self, unit: Unit) -> Window:
        wanted = elements_and_dtype(unit)
        return AlwaysOpen(unit.group.buffer(*wanted)) if unit.group.lends_memory else self.frames.window(*wanted)


def elements_and_dtype(unit: Unit) -> tuple[int, torch.dtype]:
    """Those of a unit's whole gradient."""
    return unit.layout.total, unit.formats.reduce


class Flight(Enum):
    """What a reduction waits for."""

    IDLE = "nothing: none is in flight"
    OVER_SHARD = "the sum over the shard axis"
    OVER_REPLICAS = "the sum over the replicas"


class Gradient:
    """The gradient of one unit on one rank. `owner.grad` of the unit's owners are views of its slice.

    sums:     its collectives
    pool:     lends the whole buffer, unless
    kept:     the unit has one of its own (stage 1)
    scale:    factor of the sum (1 / ranks for a mean)
    memory:   n elements from the first landing until the reduction ends (until the next step, if kept); n(p-1)/p more during the
              reduction, where ranks share no memory; n/p for the slice (if not kept)
    """

    def __init__(self, sums: UnitSums, pool: BufferPool, *, kept: Window | None = None, scale: float = 1.0):
        self.sums, self.pool, self.scale = sums, pool, scale
        self._kept, self._buffer = kept, kept
        self._arriving: Window | None = None   # receives other ranks' terms of this rank's slice
        self._slice_memory: Window | None = None   # memory of the slice, unless that is a view of the whole
        self.landed: set[str] = set()     # parameters whose gradient has landed since the last reduction
        self.used: set[str] = set()       # parameters with a gradient since the last zero_grad
        self._agreed = False              # whether `used` is that of all ranks, or only this rank's
        self._flight, self._wait = Flight.IDLE, _never

    @property
    def unit(self) -> Unit:
        """The unit whose gradient it is."""
        return self.sums.unit

    @property
    def whole(self) -> Tensor | None:
        """The whole buffer, while there is one."""
        return None if self._buffer is None else self._buffer.tensor

    @property
    def slice(self) -> Tensor | None:
        """This rank's slice of the sum: a view of the whole, if that is kept in the dtype of the slice."""
        if self._slice_is_in_whole:
            assert self._kept is not None
            start, stop = self.unit.layout.span(self.unit.group.rank)
            return self._kept.tensor[start:stop]
        return None if self._slice_memory is None else self._slice_memory.tensor

    @property
    def flying(self) -> bool:
        """Whether its reduction is in flight."""
        return self._flight is not Flight.IDLE

    @torch.no_grad()
    def land(self, name: str, param: nn.Parameter) -> None:
        """Move the gradient that backward has just left in `param.grad` into the buffer."""
        if self.flying:
            raise UnitError(f"rank {self.unit.group.world_rank}: a gradient of {name} came after unit {self.unit.name} was reduced; "
                            "does one backward go through a forward of this unit that was run before the last optimizer step?")
        view, gradient = self._view(name), landed(param, name, self.unit.group.world_rank)
        view.add_(gradient) if name in self.landed else copy_into(view, gradient)
        param.grad = None
        self.landed.add(name)

    @torch.no_grad()
    def set_landed(self, name: str, value: Tensor) -> None:
        """Replace what backward left by `value`, a sum over several ranks made elsewhere."""
        self._view(name).copy_(value)
        self.landed.add(name)

    @torch.no_grad()
    def start(self) -> None:
        """Start to reduce-scatter what has landed, with zeros for what has not. A collective.

        sent: n(p-1)/p elements over the shard axis
        """
        if self._agreed:   # since then some may have been set to None, which a rank with a slice of one can see
            self.used = {name for name in self.used if self.unit.owners[name].grad is not None}
            self._agreed = False
        self._complete()
        assert self.whole is not None, "a unit without parameters"
        if self._scales_first:
            self.whole.mul_(self.scale)
        out, room = self._memory_for_sum(), self._room_for_arrivals()
        self._wait = self.sums.start_scatter(self.whole, out, room.tensor if room else None, self._label)
        self._flight = Flight.OVER_SHARD
        self.pool.depart(self)

    @torch.no_grad()
    def advance(self) -> None:
        """Wait for the sum over the shard axis, then start the sum over the replicas. A collective."""
        if self._flight is Flight.OVER_SHARD:
            self._wait = self.sums.start_all_reduce(self._wait(), f"{self._label}, replicas")
            self._flight = Flight.OVER_REPLICAS

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the sum, and add it to the slice."""
        self.advance()
        received = self._wait()
        if self._arriving is not None:
            self._arriving.close()
        self.pool.arrive(self)
        if self.scale != 1.0 and not self._scales_first:
            received.mul_(self.scale)
        self._add_to_slice(received)
        self._return_buffer()
        self._flight, self._wait = Flight.IDLE, _never   # what has waited holds the memory of the sum

    def abandon(self) -> None:
        """Drop all gradients: after a backward that raised, or before a new step."""
        if self.flying:
            self.finish()
        self._return_buffer()
        for owner in self.unit.owners.values():
            owner.grad = None
        self.landed.clear()
        self.used.clear()
        self.give_back()

    def give_back(self) -> None:
        """Free the memory, if no gradient is in it any more: an optimizer's `zero_grad` drops them, too."""
        if self.flying or self.landed or any(owner.grad is not None for owner in self.unit.owners.values()):
            return
        for window in filter(None, (self._kept, self._slice_memory)):
            window.close()

    def keep_used(self, used: Set[str]) -> None:
        """Drop the gradients of parameters that no rank used: an optimizer skips these, as in one process."""
        self.used, self._agreed = set(self.unit.owners.keys() & used), True
        for name in self.unit.owners.keys() - self.used:
            if self._is_foreign(name) or self._was_added_to(name):
                self.used.add(name)
            else:
                self.unit.owners[name].grad = None
        if self.sums.is_compressed and self.slice is not None:
            self._clear_strays(self.slice)

    def _clear_strays(self, mine: Tensor) -> None:
        """Take away what compression wrote where there is no gradient: between tensors, and in unused parameters (comm/late.py)."""
        first, last = self.unit.layout.span(self.unit.group.rank)
        for start, end in ((max(first, start), min(last, end)) for start, end in self.unit.layout.gaps()):
            mine[start - first : max(start, end) - first].zero_()
        for name in self.unit.owners:
            if not self._is_foreign(name):
                self.sums.late.settle(name, self.unit.slice_view(mine, name), used=name in self.used)

    def local(self) -> dict[str, Tensor]:
        """What has landed on this rank, by name."""
        return {slot.name: self._view(slot.name) for slot in self.unit.layout.slots if slot.name in self.landed}

    @torch.no_grad()
    def take_local(self) -> Tensor:
        """A copy of this rank's whole gradient, with zeros for what has not landed. Afterwards nothing has."""
        self._complete()
        assert self.whole is not None, f"{self._label}: not kept"
        return self.whole.clone()

    @torch.no_grad()
    def set_sum(self, total: Tensor) -> None:
        """Take this rank's slice out of `total`, a sum over all ranks made elsewhere."""
        whole = self._open_whole().copy_(total)
        start, stop = self.unit.layout.span(self.unit.group.rank)
        mine = self._memory_for_sum().copy_(whole[start:stop])   # onto itself, where the slice is a view of the whole
        self._add_to_slice(mine)

    def summed(self) -> dict[str, Tensor]:
        """After `set_sum`: the whole sums by name, of parameters that some rank used."""
        return {slot.name: self._view(slot.name) for slot in self.unit.layout.slots if slot.name in self.used}

    def held(self) -> int:
        """Bytes in memory now."""
        return sum(window.held for window in (self._buffer, self._arriving, self._slice_memory) if window is not None)

    @property
    def _label(self) -> str:
        return f"gradients of {self.unit.name}"

    @property
    def _scales_first(self) -> bool:
        """Whether each rank scales its own gradient, and not the sum, which fp16 may not have: sums are made, or sent, in it."""
        return self.scale != 1.0 and (self.unit.formats.reduce == torch.float16 or self.sums.is_compressed)

    def _view(self, name: str) -> Tensor:
        slot = self.unit.layout.slot(name)
        return self._open_whole()[slot.start : slot.end].view(slot.shape)

    def _open_whole(self) -> Tensor:
        """The whole buffer, with zeros between tensors."""
        if self._buffer is None or not self._buffer.held:
            self._buffer = self._kept or self.pool.lend(self.unit)
            self._buffer.open()
            for start, end in self.unit.layout.gaps():   # another unit may have left values there, and norms read the whole slice
                self._buffer.tensor[start:end].zero_()
        return self._buffer.tensor

    def _complete(self) -> None:
        """Fill in zeros for what has not landed. Afterwards nothing has: the next backward lands anew."""
        for name in self.unit.params.keys() - self.landed:
            self._view(name).zero_()
        self.used |= self.landed
        self.landed.clear()

    def _room_for_arrivals(self) -> Window | None:
        """Memory for other ranks' terms of this rank's slice, where the reduce-scatter uses it."""
        group = self.unit.group
        if group.size == 1 or group.device.type != "cpu" or group.lends_memory or not self.sums.scatters_exactly:
            return None
        if self._arriving is None:
            self._arriving = self.pool.frames.window(self.unit.layout.total // group.size * (group.size - 1), self.unit.formats.reduce)
        self._arriving.open()
        return self._arriving

    def _return_buffer(self) -> None:
        if self._kept is None and self._buffer is not None:
            self.pool.give_back(self.unit, self._buffer)
            self._buffer = None

    @property
    def _slice_is_in_whole(self) -> bool:
        return self._kept is not None and self.unit.formats.reduce == self.unit.formats.master and self.unit.host is None

    def _memory_for_sum(self) -> Tensor:
        """Where the reduce-scatter writes: the slice itself, or other memory where the slice already holds gradients."""
        unit = self.unit
        holds = any(owner.grad is not None for owner in unit.owners.values())
        if holds and self._slice_is_in_whole:
            raise UnitError(f"rank {unit.group.world_rank}: gradients of unit {unit.name} came twice in one step: inside of the backward "
                            "ran another that leaves gradients. A hook takes them by torch.autograd.grad; checkpoint gets "
                            "use_reentrant=False")
        mine = self._open_slice()
        fits = not holds and mine.dtype == unit.formats.reduce and unit.host is None
        return mine if fits else torch.empty(mine.numel(), dtype=unit.formats.reduce, device=unit.group.device)

    def _open_slice(self) -> Tensor:
        """The slice, in memory."""
        if not self._slice_is_in_whole:
            own, host = self.unit.own, self.unit.host
            if self._slice_memory is None:
                on_host = host and AlwaysOpen(host.empty(own.numel(), own.dtype))
                self._slice_memory = on_host or between_steps(own.numel(), own.dtype, own.device)
            self._slice_memory.open()
        assert self.slice is not None, f"{self._label}: nowhere to put the sum"
        return self.slice

    def _add_to_slice(self, received: Tensor) -> None:
        """Add the reduced slice to what earlier backward passes have left; `owner.grad` become views of the sum."""
        mine = self._open_slice()
        fresh = all(owner.grad is None for owner in self.unit.owners.values())
        in_place = received.data_ptr() == mine.data_ptr()   # there was no gradient when the reduction started
        if self.unit.host is not None:
            received = self._bring_to_host(received, mine, fresh)
        elif fresh and not in_place:
            mine.copy_(received)
        for name, owner in self.unit.owners.items():
            view = self.unit.slice_view(mine, name)
            if not fresh:
                self._add_to_owner(name, view, None if in_place else self.unit.slice_view(received, name))
            owner.grad = view.data if view.numel() else None   # .data: with a version of its own

    def _add_to_owner(self, name: str, view: Tensor, new: Tensor | None) -> None:
        """Add the reduced `new` to `owner.grad`, in `view`, its place in the slice. new: None if it is in `view` already"""
        held = self.unit.owners[name].grad
        if held is not None and self._is_foreign(name):
            self.used.add(name)
            view.add_(held) if new is None else view.copy_(held)
        if new is not None:
            view.copy_(new) if held is None else view.add_(new)

    def _is_foreign(self, name: str) -> bool:
        """Whether `owner.grad` was set by the user, or by autograd for a loss computed from slices, and is no sum of ours."""
        grad, mine = self.unit.owners[name].grad, self.slice
        return grad is not None and (mine is None or grad.data_ptr() != self.unit.slice_view(mine, name).data_ptr())

    def _was_added_to(self, name: str) -> bool:
        """Whether autograd has added to `owner.grad` since our sum was put there, for a loss computed from slices."""
        grad = self.unit.owners[name].grad
        return grad is not None and grad._version > 0

    def _bring_to_host(self, received: Tensor, mine: Tensor, fresh: bool) -> Tensor:
        """Copy to the host: straight into `mine`, the slice, without waiting, if that is empty; else into scratch memory, to be added."""
        host = self.unit.host
        assert host is not None, f"{self._label}: not offloaded"
        there = mine if fresh else host.scratch(received.numel(), received.dtype)
        host.store(there, received)
        if not fresh:
            host.wait()
        return there


def _never() -> Tensor:
    raise AssertionError("no reduction is in flight")
