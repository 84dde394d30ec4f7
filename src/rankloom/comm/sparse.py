"""All-reduce of the largest values only: every rank sends the top hundredth of its buffer, and keeps the rest as its error.

Communication plan: each rank adds its error and picks the k values of largest magnitude. All ranks gather these values with their
places, and add them in rank order, so all end with the same bits. The ranks pick different places, so a sum is up to p times as
dense as one rank's values. What a rank sends grows with p, so this is for few ranks on slow links.

Finding the k largest of a large buffer is slow. So a sample first gives a lower bound that most likely holds for all of them. Only
values above it are searched; if too few are, the whole buffer. The pass that finds them is in C (_sparse.c), or in torch.

Read comm/lossy.py first.
"""

import torch
from torch import Tensor

from rankloom.base.cost import Bill, all_gather_bill
from rankloom.base.errors import ConfigError
from rankloom.base.tensors import memory_of
from rankloom.comm.lossy import LABEL, Compressed
from rankloom.world.group import Group

try:
    from rankloom.comm import _sparse  # type: ignore[attr-defined]
except ImportError:   # there was no compiler when this was installed
    _sparse = None

NATIVE = _sparse is not None
ONE_IN = 100         # one in so many values is sent, rounded up
SAMPLED = 1 << 16    # least values in a sample
MARGIN = 1.25
MOST = 1 << 31       # values in a buffer: places are sent in 32 bits


class TopK(Compressed):
    """The all-reduce of this file.

    sent:   p-1 messages of 8k bytes, with k = n/100, rounded up
    raises: ConfigError for more than 2^31 values
    memory: n fp32 errors
    source: Aji & Heafield 2017; Stich et al. 2018 (error feedback)
    """

    def __init__(self) -> None:
        super().__init__()
        self._error: Tensor | None = None

    def _sum(self, values: Tensor, group: Group) -> None:
        if len(values) > MOST:
            raise ConfigError(f"{group.where(LABEL)}: topk sends places in 32 bits, and a buffer of {len(values)} values has more than "
                              f"{MOST}; compress in another way")
        if self._error is None:
            self._error = torch.zeros_like(values)
        if values.is_meta:   # on paper: only what is kept counts
            return
        places = absorb(values, self._error, _count(len(values)))
        message = torch.stack((places.to(torch.int32), values[places].view(torch.int32)))
        gathered = group.all_gather(message, label=LABEL).view(group.size, 2, -1)
        if not gathered[:, 1].view(torch.float32).isfinite().all():   # of all ranks, so all agree
            values.fill_(torch.nan)   # nothing is delivered, and no error changes
            return
        self._error.copy_(values)[places] = 0.0
        values.zero_()
        for where, what in gathered:
            values.index_add_(0, where, what.view(torch.float32))

    def held(self) -> int:
        """Bytes kept between steps."""
        return 0 if self._error is None else self._error.nbytes

    def rescale(self, factor: float) -> None:
        """Multiply the error."""
        if self._error is not None:
            self._error.mul_(factor)

    def bill(self, n: int, group: Group) -> Bill:
        """What this rank of `group` sends for n values."""
        return all_gather_bill(8 * _count(n), group.size) if n else Bill()


def _count(n: int) -> int:
    return -(-n // ONE_IN)


def absorb(x: Tensor, error: Tensor, k: int) -> Tensor:
    """x += error. Returns the places of the k values of largest magnitude, in any order. Values that are not finite are the largest.

    x, error: [n] fp32 -> [k]
    """
    step = max(1, len(x) // SAMPLED)
    sample = _magnitude(x[::step] + error[::step])
    bound = sample.topk(min(len(sample), int(MARGIN * k / step) + 1), sorted=False).values.min().item()
    if NATIVE and x.device.type == "cpu":
        found = torch.empty(len(x) + 1, dtype=torch.int32, device="cpu")
        likely = found[: _sparse.absorb(memory_of(x), memory_of(error), bound, memory_of(found))]
    else:
        likely = (_magnitude(x.add_(error)) >= bound).nonzero().view(-1)
    if len(likely) < k:
        return _magnitude(x).topk(k, sorted=False).indices
    return likely[_magnitude(x[likely]).topk(k, sorted=False).indices]


def _magnitude(x: Tensor) -> Tensor:
    return x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
