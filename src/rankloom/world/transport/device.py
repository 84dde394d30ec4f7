"""What a group needs of a device that its ranks share: memory that all map, a queue of work for each rank, marks between queues.

A mark is a number that a queue writes to a flag when all work before it is done; queues of other ranks can wait for it.
cuda.py is the real device; the tests have one in host memory, whose queues are threads.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from rankloom.base.errors import ShapeMismatch
from rankloom.world.transport.channel import Channel
from rankloom.world.transport.codes import status_of

RELEASED = 1 << 62   # a mark that satisfies every queue; comparisons are signed
NOWHERE = (0, 0)     # regions count from 1


class Ending(Protocol):
    """A place in a queue."""

    def wait(self) -> None:
        """What the caller submits from here on runs after this place; a device in host memory blocks until it is reached."""

    def is_done(self) -> bool:
        """Whether the queue has reached it."""

    def settle(self, future: torch.futures.Future, result: list[Tensor]) -> None:
        """Set a future of this device; what uses its value runs after this place."""


class Device(Protocol):
    """Device memory that several processes map, and a queue of work on it, which runs in order and does not block the host."""

    device: torch.device

    def memory(self, address: int, nbytes: int) -> Tensor:
        """The bytes at an address, as a tensor that does not own them."""

    def export(self, nbytes: int) -> tuple[Tensor, str]:
        """Allocate zeros. Returns them, and the handle with which others open them; they are not freed.

        raises: MemoryError, DeviceError
        """

    def give_back(self, handle: str) -> None:
        """Take back exported memory that no rank reads or writes any more."""

    def lend(self, part: Tensor, on_end: Callable[[], object]) -> Tensor:
        """The same bytes as a new tensor; `on_end` is called when nothing refers to it any more."""

    def open(self, handle: str, nbytes: int) -> Tensor:
        """Open memory that another rank has exported. raises: DeviceError"""

    def caller(self) -> Ending:
        """The place after all that the caller has submitted so far, in the caller's own queue."""

    def behind(self, place: Any) -> AbstractContextManager[None]:
        """What is run inside runs after this place, which `caller` gave."""

    def run(self, work: Callable[[], object]) -> None:
        """Run this in the order of the queue; inside `behind` only, as the next two."""

    def mark(self, flag: Tensor, value: int) -> None:
        """Write a number to a flag, in the order of the queue."""

    def follow(self, flag: Tensor, value: int) -> None:
        """Make the queue wait until a flag has this number, or a greater one."""

    def end(self) -> Ending:
        """The place after all that was run so far."""

    def future(self) -> torch.futures.Future:
        """A future of tensors on this device."""

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Do not reuse the memory of these tensors before the queue has come to this place."""

    def release(self, flag: Tensor) -> None:
        """Write RELEASED to a flag now: queues that wait for it go on."""

    def finish(self) -> None:
        """Block until the queue is empty."""

    def drain(self) -> None:
        """Block until this process has no work left on the device."""


# ------------------------------------------------------------------ memory of all ranks


def share_memory(channel: Channel, device: Device, nbytes: int) -> tuple[list[Tensor], str]:
    """Allocate `nbytes` zeros on each rank. Returns the memory of all ranks, in rank order, and the handle of this rank's.

    The memory may have been used before, even by a group that was broken. So all ranks first finish their work on the device.
    raises: MemoryError, ShapeMismatch, DeviceError on all ranks or none
    """
    device.drain()
    asked = channel.gather_json(nbytes)   # all ranks have drained
    if len({*asked}) > 1:
        raise ShapeMismatch(f"{channel.where('buffer')}: ranks ask for different sizes, in bytes: {asked}")
    handle = ""

    def export() -> Tensor:
        nonlocal handle
        mine, handle = device.export(nbytes)
        return mine

    try:
        mine = channel.do_together(export)
        handles = channel.gather_json(handle)
        of_all = channel.do_together(lambda: [mine if rank == channel.rank else device.open(theirs, nbytes)
                                              for rank, theirs in enumerate(handles)])
        return of_all, handle
    except BaseException:
        if handle:   # nobody has submitted work on it yet
            device.give_back(handle)
        raise


class Flags:
    """Which rank writes which flag. When a rank is lost, queues that wait for its marks must be released."""

    def __init__(self, channel: Channel, device: Device):
        self._channel, self._device = channel, device
        self._of_rank: list[dict[int, Tensor]] = [{} for _ in range(channel.size)]   # by address

    def add(self, rank: int, flag: Tensor) -> Tensor:
        """Add a flag that `rank` writes."""
        self._of_rank[rank][flag.data_ptr()] = flag
        return flag

    def release(self) -> None:
        """Release every queue that waits for a mark of this group. The results of its later work are worthless."""
        for flag in [flag for flags in self._of_rank for flag in flags.values()]:
            self._device.release(flag)

    def release_lost(self) -> bool:
        """Release queues that wait for a rank whose process has ended. Returns whether there is one, or the group is closed."""
        if self._channel.closed:
            return True
        lost = [rank for rank, state in enumerate(status_of(self._channel.link).states) if state == "X"]
        for flag in [flag for rank in lost for flag in self._of_rank[rank].values()]:
            self._device.release(flag)
        return bool(lost)


class Regions:
    """Buffers that all ranks map, by number: the address of this rank's, and the bytes of all."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[int, list[Tensor]]] = {}
        self._added = 0

    def add(self, parts: list[Tensor], rank: int) -> int:
        """Add a region. Returns its number; every rank adds the same ones in the same order."""
        self._added += 1
        self._parts[self._added] = parts[rank].data_ptr(), parts
        return self._added

    def drop(self, number: int) -> None:
        """Remove a region."""
        self._parts.pop(number, None)

    def parts(self, number: int) -> list[Tensor]:
        """The bytes of all ranks in a region."""
        return self._parts[number][1]

    def find(self, x: Tensor) -> tuple[int, int]:
        """The region in which some bytes of this rank lie, and their offset in it; NOWHERE if there is none."""
        for number, (begin, parts) in list(self._parts.items()):
            if begin <= x.data_ptr() < begin + len(parts[0]):
                return number, x.data_ptr() - begin
        return NOWHERE
