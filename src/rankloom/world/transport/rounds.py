"""Collectives of ranks that share a device: each submits work to a queue of its own, and queues wait for each other's marks.

Every rank has two slots of device memory that all ranks map. A collective is a sequence of windows. In each, every rank submits a copy
of a piece of its input to its slot, and a mark after it; all ranks meet; each makes its queue wait for the marks of the others, and then
copy what is for it from their slots, adding in rank order where values are reduced. The slots are used in turns: a rank that
writes a slot again has waited for marks that come after all reads of it, so one meeting for each window is enough.
A mark is the number of meetings so far, written to a flag in the rank's own memory.

    all-reduce, large, more than two ranks   every rank adds up a share, then all copy the shares of all
    all-reduce of a shared buffer            one rank, another in each call, adds up all in place, in all buffers

Ranks meet on the host, in shared memory (channel.py), which costs about a microsecond when they run in step; no rank waits for
work on the device. Queues could wait for marks without a meeting. But at the meeting each rank learns which call the others make and
how long their parts are, so that all find the same fault or none; a lost rank is noticed there, by name; and a queue that
only waits for work which was already submitted can never deadlock, however few queues the hardware has.

A GPU serves the processes in a round, one at a time. So in a shared buffer one rank adds up all, and the others only wait for it. It
should be the last one in the round: all inputs are there by then. So after rank k, rank k - 1 adds. One round for each call is enough;
with shares it would take two.

device.py defines what is needed of a device; cuda.py implements it.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rankloom.base.errors import CollectiveMismatch
from rankloom.world.transport.arithmetic import combine
from rankloom.world.transport.call import DEALT, REDUCING, Call
from rankloom.world.transport.channel import Channel, table_of_calls
from rankloom.world.transport.codes import ALL_GATHER, ALL_REDUCE, BARRIER, KINDS, REDUCE_SCATTER, SUM
from rankloom.world.transport.device import NOWHERE, Device, Flags, Regions, share_memory
from rankloom.world.transport.operands import BYTES

HEADER = 256             # bytes before the slots, for the flag
SLOT = 32 << 20          # bytes of one slot, of which each rank has two: fewer windows mean fewer switches between processes
GRAIN = 256              # bytes: lanes and shares begin at multiples of it, so that copies are wide
IN_SHARES = 1 << 20      # bytes from which adding up everything on every rank costs more than a second meeting
HOME, LENGTHS = 5, 7                            # indices in the row that a rank sends at the first meeting of a call
KEPT = 1024              # calls that are kept for when they come again, and for each what is made of it: a window takes two or four
Steps = Sequence[Callable[[], object]]
"""What a queue is to run, in order."""


# ------------------------------------------------------------------ plans


def shares(nbytes: int, ranks: int) -> list[tuple[int, int]]:
    """The begin and end of each rank's share; the last may be short, or empty.

    >>> shares(1000, 3)
    [(0, 512), (512, 1000), (1000, 1000)]
    """
    step = -(-nbytes // ranks // GRAIN) * GRAIN
    return list(pairwise(min(rank * step, nbytes) for rank in range(ranks + 1)))


@dataclass(frozen=True, eq=False)
class DeviceCall(Call[Tensor]):
    """A call in a device's memory, cut in windows.

    kept: what was made of it by `once`. Calls come again, with the same arguments, and views of memory cost more to make than to use
    """

    kept: dict[Any, Any] = field(default_factory=dict)

    def once(self, make: Callable[..., Any], *args: Any) -> Any:
        """`make(*args)`, or what it has given before."""
        key = make, args
        if key not in self.kept:
            if len(self.kept) >= KEPT:
                self.kept.clear()
            self.kept[key] = make(*args)
        return self.kept[key]

    @cached_property
    def longest(self) -> int:
        """The bytes of its longest lane on this rank."""
        return max(map(len, (*self.inputs, *self.outputs)), default=0)

    def width(self, ranks: int) -> int:
        """The number of bytes of each lane in a window."""
        return SLOT // (ranks if self.kind in DEALT else 1) // GRAIN * GRAIN

    def in_shares(self, rank: int, ranks: int) -> tuple["DeviceCall", "DeviceCall"]:
        """An all-reduce as a reduce-scatter and an all-gather of shares."""
        x = self.inputs[0]
        parts = [x[begin:end] for begin, end in shares(len(x), ranks)]
        scatter, gather = (self.descriptor._replace(kind=kind) for kind in (REDUCE_SCATTER, ALL_GATHER))
        return (DeviceCall(scatter, parts, parts[rank:rank + 1], self.timeout),
                DeviceCall(gather, parts[rank:rank + 1], parts, self.timeout))

    def row(self, home: tuple[int, int], ranks: int) -> "ctypes.Array[ctypes.c_int64]":
        """What all must agree on; the region of the input; the bytes that this rank has for each rank, and expects from each."""
        row = [*self.descriptor, *home, *self.lengths(ranks)]
        return (ctypes.c_int64 * len(row))(*row)


@dataclass(frozen=True, eq=False)
class Slots:
    """The slots of all ranks, by turn, and the copies from and to them."""

    rank: int
    ranks: int
    memory: Sequence[Sequence[Tensor]]

    def fill(self, call: DeviceCall, begin: int, turn: int) -> Steps:
        """Copies of a window of what the others need to this rank's slot."""
        slot, width = self.memory[turn][self.rank], call.width(self.ranks)
        pieces = [x[begin:begin + width] for x in call.inputs]
        return [partial(slot[lane * width:][:len(piece)].copy_, piece) for lane, piece in enumerate(pieces) if len(piece)]

    def empty(self, call: DeviceCall, begin: int, turn: int) -> Steps:
        """Copies of a window of what is for this rank from the slots, or its sum."""
        width, slots = call.width(self.ranks), self.memory[turn]
        at = self.rank * width if call.kind in DEALT else 0
        targets = [out[begin:begin + width] for out in call.outputs]
        reduces = call.kind in REDUCING
        sources = call.sources(self.ranks)
        pieces = [slots[source][at:][:len(target)] for source, target in zip(sources, targets * len(sources) if reduces else targets)]
        if reduces:
            return combining(targets, pieces, call)
        is_home = lambda source, target: (source == self.rank and call.kind == ALL_GATHER
                                          and target.data_ptr() == call.inputs[0].data_ptr() + begin)
        return [partial(target.copy_, piece) for source, target, piece in zip(sources, targets, pieces)
                if len(target) and not is_home(source, target)]


def in_place(call: DeviceCall, regions: Regions, region: int, offset: int) -> Steps:
    """The sum of a part of a region, in the memory of all ranks."""
    pieces = [part[offset:offset + call.longest] for part in regions.parts(region)]
    return combining(pieces, pieces, call)


def combining(targets: Sequence[Tensor], pieces: Sequence[Tensor], call: DeviceCall) -> Steps:
    """What writes the sum of the pieces, or another combination, to each target."""
    is_empty = not (targets and len(targets[0]))
    return () if is_empty else [partial(combine, targets, pieces, call.dtype, call.op)]


def find_fault(table: np.ndarray, ranks: Sequence[int]) -> str | None:
    """What is wrong with the calls that ranks announced, or None: every rank finds the same.

    table: the rows of all ranks     ranks: their numbers in the world
    """
    descriptors, sends, wants = table[:, :HOME], table[:, LENGTHS:LENGTHS + len(ranks)], table[:, LENGTHS + len(ranks):]
    if (descriptors != descriptors[0]).any():
        return f"ranks made different calls.\n{table_of_calls(ranks, descriptors.tolist())}"
    for to, source in np.argwhere((wants >= 0) & (wants != sends.T))[:1]:
        return (f"rank {ranks[source]} sends {sends[source, to]} bytes to rank {ranks[to]}, which expects {wants[to, source]}; "
                "compare sizes and dtypes on both sides")
    return None


class AllRows(NamedTuple):
    """What the rows of all ranks say: what is wrong with them, or None; the longest lane; the regions of the inputs."""

    fault: str | None
    longest: int
    homes: set[tuple[int, int]]


def read_rows(rows: bytes, ranks: Sequence[int]) -> AllRows:
    """Read the rows of all ranks, each as `DeviceCall.row` makes it."""
    table = np.frombuffer(rows, np.int64).reshape(len(ranks), -1)
    homes = {(region, offset) for region, offset in table[:, HOME:LENGTHS].tolist()}
    return AllRows(find_fault(table, ranks), int(table[:, LENGTHS:LENGTHS + len(ranks)].max()), homes)


# ------------------------------------------------------------------ collectives


class RowExchange(NamedTuple):
    """The address of this rank's row, that of a table for the rows of all, and the bytes of a row."""

    row: int
    table: int
    nbytes: int


NO_ROWS = RowExchange(0, 0, 0)


class Rounds:
    """The collectives of one group, on one rank."""

    def __init__(self, channel: Channel, device: Device, regions: Regions, flags: Flags):
        self._channel, self._device, self._regions, self._lost = channel, device, regions, flags
        blocks, _ = share_memory(channel, device, HEADER + 2 * SLOT)   # never given back: no rank knows when the last one has read them
        self._flags = [flags.add(rank, block[:8].view(torch.int64)) for rank, block in enumerate(blocks)]
        slots = [[block[begin:begin + SLOT] for block in blocks] for begin in (HEADER, HEADER + SLOT)]
        self._slots = Slots(channel.rank, channel.size, slots)
        self._met = 0      # meetings so far
        self._summed = 0   # sums in place so far
        self._table = (ctypes.c_int64 * (channel.size * (LENGTHS + 2 * channel.size)))()   # the rows of all ranks
        self._read = lru_cache(KEPT)(lambda arguments: DeviceCall.read(channel.rank, channel.size, device.memory, arguments))

    def run(self, arguments: Sequence[Any]) -> None:
        """Submit a collective, given as to a kernel. raises: RankLost, CollectiveTimeout, CollectiveMismatch on all ranks"""
        size, call = self._channel.size, self._read(arguments)
        is_large = call.kind == ALL_REDUCE and call.longest >= IN_SHARES
        home = self._regions.find(call.inputs[0]) if is_large else NOWHERE
        is_staged = home == NOWHERE and not (is_large and size > 2)
        if is_staged:
            self._submit(self._slots.fill, call, 0, (self._met + 1) % 2)
        rows = self._announce(call, home)
        if home != NOWHERE and rows.homes == {home}:
            self._reduce_in_place(call, *home)
        elif is_large and size > 2:
            for half in call.once(call.in_shares, self._channel.rank, size):
                self._pass(half, half.longest, is_staged=False)
        else:
            self._pass(call, rows.longest, is_staged=rows.homes == {NOWHERE})

    def _submit(self, steps: Callable[..., Steps], call: DeviceCall, *args: Any) -> None:
        for step in call.once(steps, call, *args):
            self._device.run(step)

    def _announce(self, call: DeviceCall, home: tuple[int, int]) -> AllRows:
        """The first meeting. raises: CollectiveMismatch on all ranks"""
        row = call.once(call.row, home, self._channel.size)
        self._meet(call, RowExchange(ctypes.addressof(row), ctypes.addressof(self._table), ctypes.sizeof(row)))
        rows: AllRows = call.once(read_rows, bytes(self._table), self._channel.ranks)
        if rows.fault:
            raise CollectiveMismatch(f"{self._channel.where(KINDS[call.kind])}: {rows.fault}")
        return rows

    def _pass(self, call: DeviceCall, longest: int, is_staged: bool) -> None:
        """Run all windows; the first may have been staged, and its meeting held, already."""
        for begin in range(0, max(longest, 1), call.width(self._channel.size)):
            if begin or not is_staged:
                self._submit(self._slots.fill, call, begin, (self._met + 1) % 2)
                self._meet(call)
            self._submit(self._slots.empty, call, begin, self._met % 2)

    def _meet(self, call: DeviceCall, rows: RowExchange = NO_ROWS, behind: Sequence[int] | None = None) -> None:
        """Meet: all ranks have submitted what came before; what is submitted from here on runs after that of all ranks, or of `behind`.

        rows: to exchange at the meeting
        """
        rank, behind = self._channel.rank, range(self._channel.size) if behind is None else behind
        self._met += 1
        if rank in behind:
            self._device.mark(self._flags[rank], self._met)
        why = self._channel.link.run(ALL_GATHER if rows.nbytes else BARRIER, BYTES, SUM, 0, *rows, call.timeout)
        if why:
            self._lost.release_lost()
            raise self._channel.explain(why, KINDS[call.kind], call.timeout)
        for other in behind:
            if other != rank:
                self._device.follow(self._flags[other], self._met)

    def _reduce_in_place(self, call: DeviceCall, region: int, offset: int) -> None:
        self._summed += 1
        adder = -self._summed % self._channel.size
        if adder == self._channel.rank:
            try:
                self._submit(in_place, call, self._regions, region, offset)
            except BaseException:   # of memory on the device, say
                self._channel.abort()   # the others are on their way to a meeting to which this rank will not come
                raise
        self._meet(call, behind=[adder])
