"""Sum the gradient of a parameter that stages of several ranks have (a tied embedding and head)."""

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from rankloom.world.group import Group


def sum_tied(mine: Tensor | None, like: Tensor, group: Group, ranks: Sequence[int]) -> Tensor | None:
    """The sum over `ranks` of `group`, this one among them, added in rank order on all; None if none has a gradient.

    mine: this rank's gradient, or None    like: a tensor of its shape and dtype
    sent: n elements, and one flag, to each of the others; the flag between CPUs, so that nobody waits for a GPU to read it
    """
    here = torch.zeros_like(like, memory_format=torch.contiguous_format) if mine is None else mine.contiguous()
    parts = {group.rank: (here, torch.tensor([mine is not None], device="cpu"))}
    for low, high in combinations(ranks, 2):   # the same order on all ranks: no deadlock
        if group.rank in (low, high):
            other = low + high - group.rank
            values, used = (group.exchange(x, other, torch.empty_like(x), other, label="tied parameter") for x in parts[group.rank])
            parts[other] = values, used
    return torch.stack([parts[rank][0] for rank in ranks]).sum(0) if any(bool(used) for _, used in parts.values()) else None
