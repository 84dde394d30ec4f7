"""From summed gradients to a finished update: divide, clip, step, in as few passes over memory as can be.

Dividing by the count and clipping are one factor. A fused optimizer takes it into its own pass over the gradients;
for the others the flat buffers are multiplied once. The norm of much is computed in parts: all ranks hold the same
sums, so each squares its own share of them.
"""

import torch
from torch import Tensor

from rankloom.shard.norm import CLIP_EPSILON, norms_of
from rankloom.shard.optimizer import Optimizer, parts_of, takes_factor
from rankloom.world.group import Group

SHARE_NORM_ABOVE = 64 << 20   # bytes; below, one more message costs more than the pass over memory that it saves


@torch.no_grad()
def global_norm(flats: list[Tensor], group: Group | None = None) -> Tensor:
    """The 2-norm of all elements of `flats`, fp64.

    group: ranks that hold equal flats, to share the work with where there is much of it; None: everybody does all
    """
    shared = group is not None and group.size > 1 and sum(flat.nbytes for flat in flats) > SHARE_NORM_ABOVE
    parts = [flat.tensor_split(group.size)[group.rank] for flat in flats] if group is not None and shared else flats
    if not parts:   # a rank whose pieces are all empty
        return torch.zeros((), dtype=torch.float64)
    norm = torch.linalg.vector_norm(norms_of(parts))
    return group.all_reduce(norm.square(), label="gradient norm").sqrt() if group is not None and shared else norm


@torch.no_grad()
def apply_gradients(optimizer: Optimizer, flats: list[Tensor], sum_norm: Tensor, totals: Tensor, *, scale: float,
                    clip: float | None) -> tuple[float, float, float, bool]:
    """Step the optimizer on the mean, clipped gradient; not at all when the loss or a gradient is not finite.

    flats:    all that the optimizer reads: gradients summed over all ranks and multiplied by `scale`
    sum_norm: the 2-norm of these sums over the whole model, fp64
    totals:   fp64 [loss sum, count] over all ranks
    returns:  (loss sum, count, gradient norm before clipping, whether all was finite)
    """
    if flats:   # a rank whose part of the model is frozen has none
        totals = totals.to(flats[0].device)   # where the optimizer runs
    total, count = totals
    norm = sum_norm.to(totals.device) / (count * scale)
    factor = 1.0 / (count * scale)
    if clip is not None:
        factor = factor * (clip / (norm + CLIP_EPSILON)).clamp(max=1.0)
    bad = ~(torch.isfinite(norm) & torch.isfinite(total) & (count > 0))
    known = [len(part.state) for part in parts_of(optimizer)]
    if all(map(takes_factor, parts_of(optimizer))) and all(flat.dtype == torch.float32 for flat in flats):
        # Setting these two is the interface that torch's own gradient scaler uses.
        optimizer.grad_scale, optimizer.found_inf = (1.0 / factor).to(torch.float32), bad.to(torch.float32)   # type: ignore[union-attr]
        optimizer.step()
    elif not bad.item():
        exact = factor.item()   # not in the gradients' own format, which may round it to nothing
        for flat in flats:
            flat.mul_(exact)
        if getattr(optimizer, "grad_scale", None) is not None:   # from before it had a hook
            optimizer.grad_scale = optimizer.found_inf = None   # type: ignore[union-attr]
        optimizer.step()
    values = torch.stack((total, count, norm, bad.to(torch.float64))).tolist()   # the step's one wait for the device
    if values[3]:
        _forget_new_state(optimizer, known)
    return values[0], values[1], values[2], not values[3]


def _forget_new_state(optimizer: Optimizer, known: list[int]) -> None:
    """After a step that was skipped: torch's fused SGD makes its momentum in memory as it comes, and leaves it unwritten when it skips.

    known: how many parameters each part had state of before the step; dicts keep their order
    """
    for part, number in zip(parts_of(optimizer), known, strict=True):
        for param in list(part.state)[number:]:
            del part.state[param]
