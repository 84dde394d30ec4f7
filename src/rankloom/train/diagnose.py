"""Find where a NaN or an infinity came from, once a step has met one.

Looking for it in every step would cost a pass over the gradients; so the normal path only sees it in the global norm, does not
step, and then runs this: the same micro-batches again on each rank alone, gradient by gradient.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rankloom.base.errors import NonFinite
from rankloom.world.group import Group


def explain_non_finite(group: Group, run_alone: Callable[[], Tensor], owners: Mapping[str, Tensor], seen: str) -> NonFinite:
    """The error to raise, the same on every rank: which rank, which tensor first. A collective: every rank calls it.

    run_alone: forward and backward of this rank's batch without communication; returns [loss sum, count]
    owners:    name -> tensor whose `.grad` that leaves behind
    seen:      what the step found
    """
    found = group.all_gather_object(_first_bad(run_alone(), owners), label="non-finite")
    named = [f"rank {rank}: {what}" for rank, what in enumerate(found) if what]
    where = "; ".join(named) or "repeated on each rank alone the step was finite: the cause is not in the model's own arithmetic"
    return NonFinite(f"{seen}. {where}. The parameters are those of the step before; lower the learning rate, clip, "
                     "or look at that rank's batch.")


def _first_bad(totals: Tensor, owners: Mapping[str, Tensor]) -> str | None:
    """What is not finite on this rank alone; gradients in the order in which backward makes them."""
    if not torch.isfinite(totals[0]):
        return f"the loss of its own batch is {totals[0].item():g}"
    for name, owner in reversed(list(owners.items())):
        if owner.grad is not None and not torch.isfinite(owner.grad).all():
            bad = int((~torch.isfinite(owner.grad)).sum())
            return f"the gradient of {name} has {bad} elements of {owner.grad.numel()} that are not finite"
    return None
