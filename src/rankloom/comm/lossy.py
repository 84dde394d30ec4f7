"""What all compressed all-reduces share: error feedback, and the checks of their input.

Compression makes an *error*: values minus what was sent. Each rank keeps its error and adds it to the values of the next step, so over
many steps nothing is lost, only late. So there is one object for each buffer, and it is called with that buffer only. The
values of all steps must have the same unit: means, where batches differ in size. A NaN or infinity in the input must make the result
non-finite, but must not stay in the error.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from rankloom.base.cost import Bill
from rankloom.base.errors import ConfigError, ShapeMismatch
from rankloom.comm.operands import summand
from rankloom.world.group import Group

LABEL = "compressed all-reduce"


class Compressed(ABC):
    """A compressed all-reduce of one buffer, with the buffer's error."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None   # values, ranks

    def __call__(self, x: Tensor, group: Group) -> Tensor:
        """Sum `x` over the group, in place, up to the error. Every rank ends with the same bits.

        x:      any shape, floating and contiguous; computed in fp32
        raises: NotContiguous; ConfigError where x is not floating; ShapeMismatch when length or group size differ from the first call's
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
        values = flat.float()   # no copy where it is fp32
        self._sum(values, group)
        if values is not flat:
            flat.copy_(values)
        return x

    @abstractmethod
    def held(self) -> int:
        """Bytes kept between steps."""

    @abstractmethod
    def rescale(self, factor: float) -> None:
        """Multiply what is remembered, after the unit of the values has changed (a new loss scale). 0 forgets everything."""

    @abstractmethod
    def bill(self, n: int, group: Group) -> Bill:
        """What this rank of `group` sends for n values."""

    @abstractmethod
    def _sum(self, values: Tensor, group: Group) -> None:
        """Sum [n] fp32 values over a group of 2 ranks or more, in place."""
