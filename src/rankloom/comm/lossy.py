"""What all compressed all-reduces share: one object for each buffer, called with that buffer only, because it remembers.

What compression loses of a buffer (its *error*) is kept on this rank and added to the next one, so over many steps nothing is
lost, only late. Both must be in one unit: means, where batches differ in size. A buffer that holds a NaN or an infinity must come out
non-finite, and leave nothing non-finite behind.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from rankloom.base.cost import Bill
from rankloom.base.errors import ConfigError, ShapeMismatch
from rankloom.comm.operands import summand
from rankloom.world.group import Group

LABEL = "compressed all-reduce"


class Compressed(ABC):
    """A compressed all-reduce of one buffer, and what it remembers of it."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None   # values, ranks

    def __call__(self, x: Tensor, group: Group) -> Tensor:
        """Sum `x` over the group, in place, but for what is remembered; every rank ends with the same bits.

        x:      any shape, floating and contiguous; computed in fp32
        raises: NotContiguous; ConfigError where x is not floating; ShapeMismatch for another length or group than the last time's
        """
        flat = summand(x, group, LABEL)
        if not x.is_floating_point():
            raise ConfigError(f"{group.where(LABEL)}: {x.dtype} cannot be compressed, only floating numbers can")
        if group.size == 1 or not x.numel():
            return x
        self._seen = self._seen or (x.numel(), group.size)
        if self._seen != (x.numel(), group.size):
            raise ShapeMismatch(f"{group.where(LABEL)}: {x.numel()} values on {group.size} ranks, but it remembers the errors of "
                                f"{self._seen[0]} values on {self._seen[1]}; make one for each buffer")
        values = flat.float()   # itself where it is fp32
        self._sum(values, group)
        if values is not flat:
            flat.copy_(values)
        return x

    @abstractmethod
    def rescale(self, factor: float) -> None:
        """Multiply what is remembered, when the unit of the values has changed: a loss scale, for instance."""

    @abstractmethod
    def bill(self, n: int, group: Group) -> Bill:
        """What this rank of `group` sends for n values."""

    @abstractmethod
    def _sum(self, values: Tensor, group: Group) -> None:
        """Sum [n] fp32 values over a group of 2 ranks or more, in place."""
