"""Offload: slices, their gradients and the optimizer's state lie in the host's memory; only what is computed with is on the device.

    fetch   a slice goes to the device when its unit is gathered, one unit ahead of its use
    store   a summed gradient goes to the host while backward goes on
    wait    before the optimizer, which then runs on the CPU

On a GPU, copies go through pinned memory on a stream of their own, so that kernels and copies overlap. Where the device is the CPU the
same calls are plain copies: nothing is saved, and everything else is as it would be.

price: the device holds no optimizer state, no masters and no gradients beyond the units in flight; n/p elements go each way over the
       bus in a step (twice there at stage 3, for backward)
source: Rajbhandari et al. 2021 (ZeRO-Infinity), Ren et al. 2021 (ZeRO-Offload)
"""

import torch
from torch import Tensor


class Host:
    """The host's memory beside one device."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def empty(self, n: int, dtype: torch.dtype) -> Tensor:
        """Zeros in host memory, pinned where there is a GPU to copy to."""
        return torch.zeros(n, dtype=dtype, pin_memory=self._stream is not None)

    def fetch(self, mine: Tensor) -> Tensor:
        """A copy of host memory on the device; work that is queued after this call sees it."""
        if self._stream is None:
            return mine.clone()
        with torch.cuda.stream(self._stream):   # it need not wait for the device: what it reads is the host's
            there = mine.to(self.device, non_blocking=True)
        now = torch.cuda.current_stream(self.device)
        now.wait_stream(self._stream)
        there.record_stream(now)
        return there

    def store(self, into: Tensor, result: Tensor) -> None:
        """Copy what the device computes into host memory; it is there after `wait`."""
        if self._stream is None:
            into.copy_(result)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            into.copy_(result, non_blocking=True)
        result.record_stream(self._stream)

    def wait(self) -> None:
        """All that was stored is there."""
        if self._stream is not None:
            self._stream.synchronize()
