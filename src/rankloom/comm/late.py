"""Compressed sums of parameters that a step does not use.

Such a parameter has no gradient, but error feedback (comm/lossy.py) still delivers parts of earlier ones, so its sum is not zero. The
optimizer must not see it, so it waits here and is added to the parameter's next gradient.
"""

import torch
from torch import Tensor


class LateSums:
    """The waiting sums of the parameters of one buffer, equal on all ranks that hold it."""

    def __init__(self) -> None:
        self._waiting: dict[str, Tensor] = {}

    def settle(self, name: str, total: Tensor, *, used: bool) -> None:
        """Add what waits to `total`, a compressed sum. If no rank has `used` the parameter, both wait instead, and `total` becomes zero."""
        waiting = self._waiting.pop(name, None)
        if used:
            if waiting is not None:
                total.add_(waiting)
            return
        late = torch.where(total.isfinite(), total, 0.0)   # compression still remembers what a block owes that is not finite
        if waiting is not None:
            late += waiting
        if late.any():
            self._waiting[name] = late
        total.zero_()

    def held(self) -> int:
        """Bytes kept between steps."""
        return sum(waiting.nbytes for waiting in self._waiting.values())

    def forget(self) -> None:
        """Drop all that waits."""
        self._waiting.clear()
