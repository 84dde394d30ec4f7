"""A CUDA device that the processes of several ranks share, as rounds.py and parcels.py need it.

Work of a group runs in a stream of its own, after what the caller had submitted to the current stream when it called.
When the caller waits, its stream waits for that work. The host waits for no stream.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rankloom.base.errors import DeviceError
from rankloom.world.transport.cuda_driver import Block, give_back, on_device, open_block, take_block, wait_value, write_value
from rankloom.world.transport.device import RELEASED

KEPT_VIEWS = 4096   # views of memory that are kept for the next call with the same tensors: making one asks the driver about the address
RESCUE = -3   # the priority of streams in which nothing ever waits: the highest that torch has


class CudaDevice:
    """One GPU, and the stream of one group on it."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)
        # Streams of one priority may share a hardware queue, and streams of priority -1 wait, too: FSDP2 gathers in them.
        self._rescue = torch.cuda.Stream(device, priority=RESCUE)
        self._blocks: dict[str, Block] = {}   # by handle
        self._views: dict[tuple[int, int], Tensor] = {}   # by address and length

    def memory(self, address: int, nbytes: int) -> Tensor:
        """The bytes at an address, as a tensor that does not own them."""
        span = address, nbytes
        view = self._views.get(span)   # other threads may clear this, too
        if view is None:
            if len(self._views) >= KEPT_VIEWS:
                self._views.clear()
            view = self._views[span] = self._view(_Span(*span))
        return view

    def export(self, nbytes: int) -> tuple[Tensor, str]:
        """Allocate zeros. Returns them, and the handle with which others open them. raises: MemoryError"""
        try:
            block, is_used = take_block(self.device.index, nbytes)
        except MemoryError:
            torch.cuda.empty_cache()   # torch may cache the free memory
            block, is_used = take_block(self.device.index, nbytes)
        if is_used:   # work that was submitted earlier may still read it, or write to it
            self.drain()
        self._blocks[block.handle] = block
        mine = self.memory(block.address, nbytes).zero_()
        self.drain()
        return mine, block.handle

    def give_back(self, handle: str) -> None:
        """Take back exported memory that no rank reads or writes any more."""
        give_back(self._blocks.pop(handle))

    def lend(self, part: Tensor, on_end: Callable[[], object]) -> Tensor:
        """The same bytes as a new tensor; `on_end` is called when nothing refers to it any more."""
        span = _Span(part.data_ptr(), part.nbytes)
        weakref.finalize(span, on_end).atexit = False
        return self._view(span)

    def open(self, handle: str, nbytes: int) -> Tensor:
        """Open memory that another process has exported. raises: DeviceError"""
        return self.memory(open_block(self.device.index, handle), nbytes)

    def caller(self) -> "StreamEnding":
        """The place after what the caller has submitted to the current stream.

        raises: DeviceError in a CUDA graph capture: each call has its own marks, and a graph would repeat those of one call
        """
        if torch.cuda.is_current_stream_capturing():
            raise DeviceError("ranks that share a GPU cannot communicate in a CUDA graph, for they meet on the host at every call; "
                              "leave the call out of what is captured")
        return StreamEnding(self.device, torch.cuda.current_stream(self.device.index))   # from a device, torch finds the index slowly

    @contextlib.contextmanager
    def behind(self, place: "StreamEnding") -> Iterator[None]:
        """What is run inside runs after this place."""
        self._stream.wait_event(place.event)
        with on_device(self.device.index), torch.cuda.stream(self._stream):
            yield

    def run(self, work: Callable[[], object]) -> None:
        """Submit work; the current stream is that of the group."""
        work()

    def mark(self, flag: Tensor, value: int) -> None:
        """Write a number to a flag, in the order of the stream."""
        write_value(self._stream.cuda_stream, flag.data_ptr(), value)

    def follow(self, flag: Tensor, value: int) -> None:
        """Make the stream wait until a flag has this number, or a greater one."""
        wait_value(self._stream.cuda_stream, flag.data_ptr(), value)

    def end(self) -> "StreamEnding":
        """The place after all that was run so far."""
        return StreamEnding(self.device, self._stream)

    def future(self) -> torch.futures.Future:
        """A future of tensors on this device."""
        return torch.futures.Future(devices=[self.device])

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Tell torch not to reuse their memory before the stream has come to this place."""
        for x in tensors:
            x.record_stream(self._stream)

    def release(self, flag: Tensor) -> None:
        """Write RELEASED to a flag now."""
        with on_device(self.device.index):
            write_value(self._rescue.cuda_stream, flag.data_ptr(), RELEASED)

    def finish(self) -> None:
        """Block until the stream is empty."""
        self._stream.synchronize()

    def drain(self) -> None:
        """Block until this process has no work left on the device."""
        torch.cuda.synchronize(self.device)

    def _view(self, span: "_Span") -> Tensor:
        with torch.inference_mode(False):   # it is kept, and one of an evaluation in inference mode could never be written to outside
            return torch.as_tensor(span, device=self.device) if span.nbytes else torch.empty(0, dtype=torch.uint8, device=self.device)


class StreamEnding:
    """A place in a stream."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream):
        self._device, self._stream, self.event = device, stream, stream.record_event()

    def wait(self) -> None:
        """What the caller submits from here on runs after this place."""
        torch.cuda.current_stream(self._device.index).wait_event(self.event)

    def is_done(self) -> bool:
        """Whether the stream has reached it."""
        return self.event.query()

    def settle(self, future: torch.futures.Future, result: list[Tensor]) -> None:
        """Set a future of this device: torch assumes that the current stream has made the result."""
        with torch.cuda.stream(self._stream):
            future.set_result(result)


class _Span:
    """Device memory in the form in which torch takes it from other libraries without a copy. The tensor refers to this object."""

    def __init__(self, address: int, nbytes: int):
        self.nbytes = nbytes
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}
