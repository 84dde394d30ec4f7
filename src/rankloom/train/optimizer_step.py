"""From summed gradients to the update: divide, clip and step, in as few passes over memory as possible.

Dividing by the count and clipping are one factor. A fused optimizer applies it in its own pass over the gradients; for others the flat
buffers are multiplied once. Of large gradients each rank computes the norm of a part: all ranks hold the same sums.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rankloom.shard.norm import CLIP_EPSILON, norms_of
from rankloom.shard.optimizer import Optimizer, optimizers_of, takes_factor
from rankloom.world.group import Group

SHARE_NORM_ABOVE = 64 << 20   # bytes; below, an extra message costs more than the pass over memory that it saves


class Outcome(NamedTuple):
    """What a step came to, over all ranks."""

    loss_sum: float
    items: float       # over which the loss was summed
    grad_norm: float   # of the mean gradient, before clipping
    finite: bool       # all of it; else nothing was updated

    @property
    def loss(self) -> float:
        """The mean over the items."""
        return self.loss_sum / self.items


@torch.no_grad()
def global_norm(flats: list[Tensor], group: Group | None = None) -> Tensor:
    """The 2-norm of all elements of `flats`, fp64.

    group: ranks with equal flats, which share the work above SHARE_NORM_ABOVE; None: this rank does all
    sent:  an all-reduce of one number, if shared
    """
    if group is not None and group.size > 1 and sum(flat.nbytes for flat in flats) > SHARE_NORM_ABOVE:
        share = global_norm([flat.tensor_split(group.size)[group.rank] for flat in flats])
        return group.all_reduce(share.square(), label="gradient norm").sqrt()
    if not flats:   # a rank whose slices are all empty
        return torch.zeros((), dtype=torch.float64, device="cpu")
    return torch.linalg.vector_norm(norms_of(flats))


@torch.no_grad()
def apply_gradients(optimizer: Optimizer, flats: list[Tensor], sum_norm: Tensor, totals: Tensor, *, scale: float,
                    clip: float | None) -> Outcome:
    """Step the optimizer on the mean, clipped gradient; skip the step when the loss or a gradient is not finite.

    flats:    all gradients that the optimizer reads, summed over all ranks and multiplied by `scale`
    sum_norm: the 2-norm of these sums over the whole model, fp64
    totals:   fp64 [loss sum, count] over all ranks
    """
    if flats:   # a rank whose part of the model is frozen has none
        totals = totals.to(flats[0].device)   # where the optimizer runs
    total, count = totals
    norm = sum_norm.to(totals.device) / (count * scale)
    factor = 1.0 / (count * scale)
    if clip is not None:
        factor = factor * (clip / (norm + CLIP_EPSILON)).clamp(max=1.0)
    bad = ~(torch.isfinite(norm) & torch.isfinite(total) & torch.isfinite(count) & (count > 0))
    known = [len(part.state) for part in optimizers_of(optimizer)]
    if all(map(takes_factor, optimizers_of(optimizer))) and all(flat.dtype == torch.float32 for flat in flats):
        # Setting these two is the interface that torch's own gradient scaler uses.
        optimizer.grad_scale, optimizer.found_inf = (1.0 / factor).to(torch.float32), bad.to(torch.float32)   # type: ignore[union-attr]
        optimizer.step()
    elif not bad.item():
        exact = factor.item()   # fp64: in the gradients' dtype it may round to 0
        for flat in flats:
            flat.mul_(exact)
        if getattr(optimizer, "grad_scale", None) is not None:   # set in a step before it got a hook
            optimizer.grad_scale = optimizer.found_inf = None   # type: ignore[union-attr]
        optimizer.step()
    loss_sum, items, grad_norm, is_bad = torch.stack((total, count, norm, bad.to(torch.float64))).tolist()   # the step's one wait
    if is_bad:
        _forget_new_state(optimizer, known)
    return Outcome(loss_sum, items, grad_norm, finite=not is_bad)


def _forget_new_state(optimizer: Optimizer, known: list[int]) -> None:
    """Undo the allocations of a skipped step: torch's fused SGD leaves a new momentum buffer uninitialized when it skips.

    known: for each optimizer, how many parameters had state before the step; dicts keep their order
    """
    for part, number in zip(optimizers_of(optimizer), known, strict=True):
        for param in list(part.state)[number:]:
            del part.state[param]
