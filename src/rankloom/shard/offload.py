"""Offload: slices, their gradients and the optimizer's state lie in host memory. The device holds only the units in use.

    fetch   copy a slice to the device when its unit is gathered, one unit ahead of its use
    store   copy a reduced gradient to the host while backward goes on
    wait    until all copies have ended, before the optimizer, which runs on the CPU

On a GPU, copies overlap computation and go through pinned memory, on one stream for each direction: on a single stream, slices would
wait for gradients that are still to be computed. Where the device is the CPU, the same calls are plain copies, which save nothing.

price: the device holds no optimizer state, no masters and no gradients beyond the units in flight; n/p elements go each way over the
       bus in a step (twice there at stage 3, for backward)
source: Rajbhandari et al. 2021 (ZeRO-Infinity), Ren et al. 2021 (ZeRO-Offload)
"""

import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from rankloom.world.group import Handle

UNDER_WAY = 2       # copies to the host that may be in flight: each holds device memory
OWN_PAGES = 1 << 26   # bytes; malloc gives an allocation this large pages of its own


class Host:
    """The host's memory beside one device."""

    def __init__(self, device: torch.device):
        self.device = device
        self._inward, self._outward = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        self._leaving: deque[tuple[torch.cuda.Event, Tensor]] = deque()   # (event that ends a copy to the host, what it copies)
        self._scratch = torch.empty(0, device="cpu")

    def empty(self, n: int, dtype: torch.dtype) -> Tensor:
        """Zeros in host memory, pinned where there is a GPU to copy to."""
        return torch.zeros(n, dtype=dtype, device="cpu") if self._inward is None else _pinned(n, dtype)

    def scratch(self, n: int, dtype: torch.dtype) -> Tensor:
        """Scratch memory like `empty`'s, valid until the next call, which returns the same. Its contents are arbitrary."""
        if self._scratch.numel() < n or self._scratch.dtype != dtype:
            self._scratch = self.empty(n, dtype)
        return self._scratch[:n]

    def fetch(self, mine: Tensor) -> Tensor:
        """A copy of host memory on the device, made by the current stream."""
        return mine.clone() if self._inward is None else mine.to(self.device, non_blocking=True)

    def beside(self, start: Callable[[], Handle]) -> Callable[[], object]:
        """Run the copies and the collective that `start` queues beside the current stream. Returns a function that waits for them."""
        if self._inward is None:
            return start().wait
        self._inward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._inward):
            handle, done = start(), self._inward.record_event()

        def wait() -> None:
            handle.wait()
            torch.cuda.current_stream(self.device).wait_event(done)

        return wait

    def store(self, into: Tensor, result: Tensor) -> None:
        """Start to copy a result of the device into host memory; it has arrived after `wait`."""
        if self._outward is None:
            into.copy_(result)
            return
        self._outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._outward):
            into.copy_(result, non_blocking=True)
            self._leaving.append((self._outward.record_event(), result))
        while len(self._leaving) > UNDER_WAY:
            self._leaving[0][0].synchronize()
            self._leaving.popleft()

    def wait(self) -> None:
        """Wait until all copies have ended, both ways."""
        for stream in (self._inward, self._outward):
            if stream is not None:
                stream.synchronize()
        self._leaving.clear()


def _pinned(n: int, dtype: torch.dtype) -> Tensor:
    """Zeros in pinned memory. torch's pinned allocator rounds up to powers of two, a third more for a model of 7B, so a large tensor is
    allocated plainly and pinned in place."""
    if n * dtype.itemsize < OWN_PAGES:
        return torch.zeros(n, dtype=dtype, device="cpu", pin_memory=True)
    made = torch.empty(n, dtype=dtype, device="cpu").zero_()   # not torch.zeros: writing faults its pages in, on all threads
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(made.data_ptr(), made.nbytes, 0))
    weakref.finalize(made.untyped_storage(), _unpin, runtime, made.data_ptr()).atexit = False   # views outlive the tensor
    return made


def _unpin(runtime: object, address: int) -> None:
    torch.cuda.synchronize()   # a copy may still read it
    runtime.cudaHostUnregister(address)   # type: ignore[attr-defined]
