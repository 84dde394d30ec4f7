"""A torch process group of ranks that share one device, for tensors in its memory.

Arguments are read and checked as on the CPU (process_group.py); only the last step differs: collectives
go to rounds.py, messages to parcels.py. Both submit work to the device and return. `wait()` makes the caller's queue wait for it.
"""

import functools
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankloom.base.errors import ShapeMismatch
from rankloom.world.transport import operands
from rankloom.world.transport.codes import BARRIER
from rankloom.world.transport.device import Device, Ending, Flags, Regions, share_memory
from rankloom.world.transport.herald import tell_later
from rankloom.world.transport.operands import Finish
from rankloom.world.transport.parcels import NOTE, Parcels
from rankloom.world.transport.process_group import SharedMemoryGroup
from rankloom.world.transport.rounds import GRAIN, Rounds
from rankloom.world.transport.work import PendingMessage, Work

WATCH = 0.3   # seconds between two checks whether all ranks still live


class DeviceGroup(SharedMemoryGroup):
    """The ranks of a group in shared memory, for tensors on the one device that they share."""

    def __init__(self, host: SharedMemoryGroup, device: Device):
        super().__init__(host.get_group_store(), host.rank(), host.size(), host.channel, host._buffers)
        self._device, self._regions, self._flags = device, Regions(), Flags(host.channel, device)
        self._turn = threading.Lock()   # one collective at a time
        self._rounds: Rounds | None = None   # made by all ranks together, at their first collective
        self._parcels = Parcels(host.channel, device, self._flags)
        weakref.finalize(self, device.finish)   # also when Python ends: others wait for what this rank has submitted
        threading.Thread(target=_watch, args=(weakref.ref(self._flags),), name="rankloom-watch", daemon=True).start()

    def buffer(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of zeros that all ranks map: an all-reduce sums it in place. Every rank must ask for the same.

        raises: MemoryError, ShapeMismatch, DeviceError on all ranks or none
        """
        shape = (shape,) if isinstance(shape, int) else shape
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device=self._device.device)
        parts, handle = share_memory(self.channel, self._device, -(-nbytes // GRAIN) * GRAIN)
        number = self._regions.add(parts, self.rank())
        mine = self._device.lend(parts[self.rank()], functools.partial(_end_region, self._regions, number, self._device, handle))
        return mine[:nbytes].view(dtype).view(shape)

    def abort(self) -> None:
        """End every wait of every rank with RankLost, and let the queues on the device go on."""
        super().abort()
        self._flags.release()

    def finish(self) -> None:
        """Block until the device has done all work that this rank has submitted."""
        self._device.finish()

    def _make(self, call: Sequence[Any], is_async: bool, result: Sequence[Tensor], keep: Sequence[object], backs: list[Finish]) -> Work:
        device = self._device
        if call[0] == BARRIER:   # the only call for which the host waits
            with device.behind(device.caller()):
                device.finish()
            return super()._make(call, is_async, result, keep, backs)
        with self._turn:
            self._rounds = self._rounds or Rounds(self.channel, device, self._regions, self._flags)
            with device.behind(device.caller()):
                self._rounds.run(call)
                for back in backs:
                    device.run(back)
                ending = device.end()
        return self._work(ending, result, [*listed_tensors([result, keep])], waits=not is_async)

    def _message(self, sending: int, flat: Tensor, x: Tensor, peer: int, tag: int, back: Finish | None) -> Work:
        inside = self._device.memory(flat.data_ptr(), flat.nbytes)
        if sending:
            return self._work(self._parcels.send(inside, flat.nbytes | operands.SIZE_TYPE[x.dtype], peer, tag), [x], [flat], waits=False)
        work = Receiving(self, x, flat, inside, back)
        work.peers = (peer,)
        work.handle = self.channel.link.post(0, work.note.ctypes.data, NOTE, peer, tag)
        return self._remember(work, work.handle)

    def _work(self, ending: Ending, result: Sequence[Tensor], tensors: Sequence[Tensor], waits: bool) -> "DeviceWork":
        if waits:
            ending.wait()
        else:   # the caller may never wait
            self._device.keep(tensors)
        return DeviceWork(self._device, ending, result, is_awaited=waits)

    def _expect_here(self, tensors: Sequence[object], label: int | str) -> None:
        for x in listed_tensors(tensors):
            if x.device != self._device.device:
                raise ShapeMismatch(f"{self._where(label)}: a tensor on {x.device} in a call on {self._device.device}; one rank of a "
                                    "group uses one device")


class DeviceWork(Work):
    """Work that has been submitted to the device. is_awaited: the call was blocking, and the caller's queue already waits for it"""

    def __init__(self, device: Device, ending: Ending, result: Sequence[Tensor], is_awaited: bool):
        super().__init__(result)
        self._device, self._ending, self._is_awaited = device, ending, is_awaited

    def wait(self, timeout: Any = None) -> bool:
        """What the caller submits from here on runs after this work. The host does not wait."""
        if not self._is_awaited:
            self._ending.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the device has finished it."""
        return self._ending.is_done()

    def get_future(self) -> torch.futures.Future:
        """A future that is already set: what uses its value runs after the work."""
        future = self._device.future()
        self._ending.settle(future, self._result)
        return future


class Receiving(PendingMessage):
    """A message to receive. It is submitted to the device when it is waited for."""

    def __init__(self, group: DeviceGroup, x: Tensor, flat: Tensor, inside: Tensor, back: Finish | None):
        super().__init__(group.channel, group._herald, "recv", [x], [flat], [self._take])
        self.note = np.zeros(NOTE, np.uint8)
        self._parcels, self._device, self._inside, self._back = group._parcels, group._device, inside, back
        self._size = flat.nbytes | operands.SIZE_TYPE[x.dtype]
        self._place = group._device.caller()   # the thread that waits for the message may use another stream than the caller
        self._ending: Ending | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Block until the message was submitted; what the caller submits from here on runs after its arrival."""
        super().wait(timeout)
        if self._ending:
            self._ending.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the device has finished it."""
        return super().is_completed() and (self._ending is None or self._ending.is_done())

    def get_future(self) -> torch.futures.Future:
        """A future that a thread sets when the message was submitted."""
        future = self._device.future()
        tell_later(self, future)
        return future

    def _take(self) -> None:
        self._ending = self._parcels.take(self.note, self._inside, self._size, self._source, place=self._place, finish=self._back)
        self._device.keep([*listed_tensors([self._result, self._keep])])   # the caller may never wait


def _end_region(regions: Regions, number: int, device: Device, handle: str) -> None:
    regions.drop(number)
    device.give_back(handle)


def listed_tensors(value: object) -> Iterator[Tensor]:
    """All tensors in nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from listed_tensors(item)


def _watch(flags: "weakref.ref[Flags]") -> None:
    """Release the device when a rank is lost: this rank's host may be blocked in a place that does not check the others."""
    while (watched := flags()) is not None and not watched.release_lost():
        del watched
        time.sleep(WATCH)
