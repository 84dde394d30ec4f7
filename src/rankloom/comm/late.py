"""What compression sends of parameters in steps that do not use them.

Then there are no gradients, but what compression remembers of earlier ones is sent (comm/lossy.py): the sum is what is still owed to the
parameter. An optimizer must not see it, for it skips parameters without a gradient. So it waits for the next step that uses them.
"""

import torch
from torch import Tensor


class LateSums:
    """Sums that wait for their parameters' next gradients, of one buffer; those of all ranks that hold it are equal."""

    def __init__(self) -> None:
        self._waiting: dict[str, Tensor] = {}

    def settle(self, name: str, total: Tensor, *, used: bool) -> None:
        """Add to `total`, a compressed sum, what waits for it; if no rank has `used` the parameter, let both wait, and set it to zero."""
        waiting = self._waiting.pop(name, None)
        if used:
            if waiting is not None:
                total.add_(waiting)
            return
        late = torch.where(total.isfinite(), total, 0.0)   # of a block that is not finite, what is owed is still remembered
        if waiting is not None:
            late += waiting
        if late.any():
            self._waiting[name] = late
        total.zero_()

    def held(self) -> int:
        """Bytes kept between steps."""
        return sum(waiting.nbytes for waiting in self._waiting.values())

    def forget(self) -> None:
        """Another run continues on the buffer."""
        self._waiting.clear()
