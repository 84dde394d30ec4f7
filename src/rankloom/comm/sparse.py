"""All-reduce of the largest values only: every rank sends the top hundredth of its buffer, the rest waits for the next time.

Communication plan: each rank picks its k values of largest magnitude (error added), all gather all ranks' values and
their places, and add them up in rank order, so all end with the same bits. The ranks pick different places, so a sum is up
to p times as dense as what one rank sends. Unlike a sum, a gather grows with p: this is for few ranks on slow links.

Read comm/lossy.py first.
"""

import torch
from torch import Tensor

from rankloom.base.cost import Bill, all_gather_bill
from rankloom.comm.lossy import LABEL, Compressed
from rankloom.world.group import Group

FRACTION = 0.01      # of all values
SAMPLED = 1 << 16    # above so many values, a sample says below which magnitude none of the largest can lie, most likely
MARGIN = 1.25


class TopK(Compressed):
    """The all-reduce of this file.

    sent:   p-1 messages, 8 bytes for each of k = n/100, rounded up, values, to p-1 ranks
    memory: the errors: n fp32
    source: Aji & Heafield 2017; Stich et al. 2018 (error feedback)
    """

    def __init__(self, fraction: float = FRACTION):
        super().__init__()
        self.fraction = fraction
        self._error: Tensor | None = None

    def _sum(self, values: Tensor, group: Group) -> None:
        if self._error is None:
            self._error = torch.zeros_like(values)
        values.add_(self._error)
        places = largest(values, self._count(len(values)))
        message = torch.stack((places.to(torch.int32), values[places].view(torch.int32)))
        if values[places].isfinite().all():   # else some places hold what is not finite, and what was remembered stays
            self._error.copy_(values)[places] = 0.0
        values.zero_()
        for where, what in group.all_gather(message, label=LABEL).view(group.size, 2, -1):
            values.index_add_(0, where, what.view(torch.float32))

    def _count(self, n: int) -> int:
        return max(1, -int(-n * self.fraction // 1))

    def rescale(self, factor: float) -> None:
        """Multiply what is remembered."""
        if self._error is not None:
            self._error.mul_(factor)

    def bill(self, n: int, group: Group) -> Bill:
        """What this rank of `group` sends for n values."""
        return all_gather_bill(8 * self._count(n), group.size) if group.size > 1 and n else Bill()


def largest(x: Tensor, k: int) -> Tensor:
    """The places of the k values of largest magnitude, in any order; NaN and infinity are the largest. x: [n] fp32 -> [k]

    Sorting out a large buffer is slow, so a sample first says which values can be meant; where it was wrong, all are looked at.
    """
    magnitude = x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    if len(x) > SAMPLED:
        sample = magnitude[:: len(x) // SAMPLED]
        bound = sample.topk(min(len(sample), int(MARGIN * k * len(sample) / len(x)) + 1), sorted=False).values.min()
        likely = (magnitude >= bound).nonzero().view(-1)
        if len(likely) >= k:
            return likely[magnitude[likely].topk(k, sorted=False).indices]
    return magnitude.topk(k, sorted=False).indices
