"""What a group asks of a device that its ranks share: memory that all map, a queue of work for each rank, and marks between queues.

A mark is a number that a queue writes to a flag when it has done all before, and that the queues of other ranks follow.
cuda.py is the real one; the tests have another in host memory, whose queues are threads.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from rankloom.base.errors import DeviceError, ShapeMismatch
from rankloom.world.transport.channel import Channel
from rankloom.world.transport.codes import BARRIER

RELEASED = 1 << 62   # a mark that satisfies every queue; comparisons are signed
NOWHERE = (0, 0)     # regions count from 1


class Ending(Protocol):
    """A place in a queue."""

    def wait(self) -> None:
        """What the caller submits from here on comes behind it; on the host, block until it is reached."""

    def is_done(self) -> bool:
        """Whether it is reached."""

    def settle(self, future: torch.futures.Future, result: list[Tensor]) -> None:
        """Set a future of this device; whoever takes its value comes behind this place."""


class Device(Protocol):
    """Device memory that several processes map, and a queue of work on it, which runs in order and later than the host."""

    device: torch.device

    def memory(self, address: int, nbytes: int) -> Tensor:
        """Bytes at an address, which somebody else keeps."""

    def export(self, nbytes: int) -> tuple[Tensor, str]:
        """New memory of zeros, and the handle with which others open it; it stays. raises: MemoryError"""

    def give_back(self, handle: str) -> None:
        """Exported memory that no rank reads or writes any more."""

    def lend(self, part: Tensor, on_end: Callable[[], object]) -> Tensor:
        """The same bytes as a tensor of its own; `on_end` is called when nobody holds that any more."""

    def open(self, handle: str, nbytes: int) -> Tensor:
        """Memory that another rank has exported. raises: DeviceError"""

    def caller(self) -> Ending:
        """The place behind all that the caller has submitted so far, in a queue of its own."""

    def behind(self, place: Any) -> AbstractContextManager[None]:
        """What is run inside comes behind this place, which `caller` gave."""

    def run(self, work: Callable[[], object]) -> None:
        """Do this in the order of the queue."""

    def mark(self, flag: Tensor, value: int) -> None:
        """Write a number to a flag, in the order of the queue."""

    def follow(self, flag: Tensor, value: int) -> None:
        """Go on only when a flag has this number, or a greater one."""

    def end(self) -> Ending:
        """The place behind all that was run so far."""

    def future(self) -> torch.futures.Future:
        """A future of tensors on this device."""

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Their memory must not be dealt out again before the queue has come here."""

    def release(self, flag: Tensor) -> None:
        """Write RELEASED to a flag, now: what follows it goes on."""

    def finish(self) -> None:
        """Block until the queue is empty."""

    def drain(self) -> None:
        """Block until this process has nothing on its way on the device."""


# ------------------------------------------------------------------ memory of all ranks


def share_memory(channel: Channel, device: Device, nbytes: int) -> tuple[list[Tensor], str]:
    """So many bytes of zeros from each rank, mapped by all, in rank order; and the handle of this rank's.

    Memory may have been in use before, also by a group that was broken: so first all come to an end with what they do.
    raises: MemoryError, ShapeMismatch, DeviceError on all ranks or none
    """
    where, mine, handle, problem = channel.where("buffer"), torch.empty(0), "", ""
    device.drain()
    channel.call(BARRIER)
    try:
        mine, handle = device.export(nbytes)
    except MemoryError as error:
        problem = str(error)
    asked = channel.gather_json([nbytes, handle])
    if len({size for size, _ in asked}) > 1:
        raise ShapeMismatch(f"{where}: ranks ask for different sizes, in bytes: {[size for size, _ in asked]}")
    _raise_together(channel, MemoryError, problem)
    parts = []
    try:
        parts = [mine if rank == channel.rank else device.open(theirs, nbytes) for rank, (_, theirs) in enumerate(asked)]
    except DeviceError as error:
        problem = str(error)
    _raise_together(channel, DeviceError, problem)
    return parts, handle


def _raise_together(channel: Channel, kind: type[Exception], problem: str) -> None:
    said = channel.gather_json(problem[:200])
    for rank, text in enumerate(said):
        if text:
            raise kind(f"{channel.where('buffer')}, said rank {channel.ranks[rank]}: {text}")


class Flags:
    """Who writes which flag. When a rank is lost, whatever follows its marks must be set free."""

    def __init__(self, channel: Channel, device: Device):
        self._channel, self._device = channel, device
        self._of_rank: list[dict[int, Tensor]] = [{} for _ in range(channel.size)]   # by address

    def add(self, rank: int, flag: Tensor) -> Tensor:
        """A flag that `rank` writes."""
        self._of_rank[rank][flag.data_ptr()] = flag
        return flag

    def release(self) -> None:
        """Set free every queue that follows a mark of this group. What it does then is worth nothing."""
        for flag in [flag for flags in self._of_rank for flag in flags.values()]:
            self._device.release(flag)

    def release_lost(self) -> bool:
        """Set free what follows a rank whose process has ended; whether there is one, or nothing is left to look after."""
        if self._channel.closed:
            return True
        lost = [rank for rank, state in enumerate(self._channel.link.status()[3]) if state == "X"]
        for flag in [flag for rank in lost for flag in self._of_rank[rank].values()]:
            self._device.release(flag)
        return bool(lost)


class Regions:
    """Buffers that all ranks map, by number: where this rank's lies, and the bytes of all."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[int, list[Tensor]]] = {}
        self._added = 0

    def add(self, parts: list[Tensor], rank: int) -> int:
        """The number of a new one; every rank adds the same in the same order."""
        self._added += 1
        self._parts[self._added] = parts[rank].data_ptr(), parts
        return self._added

    def drop(self, number: int) -> None:
        """It is not used any more."""
        self._parts.pop(number, None)

    def parts(self, number: int) -> list[Tensor]:
        """The bytes of all ranks."""
        return self._parts[number][1]

    def find(self, x: Tensor) -> tuple[int, int]:
        """In which region some bytes of this rank lie, and how far from its beginning; NOWHERE if in none."""
        for number, (begin, parts) in list(self._parts.items()):
            if begin <= x.data_ptr() < begin + len(parts[0]):
                return number, x.data_ptr() - begin
        return NOWHERE
