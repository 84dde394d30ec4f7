"""Find where a NaN or an infinity came from: on which rank, and in which tensor.

To look at every gradient in every step would cost a pass over the gradients. So a step only looks at the global norm. If that is not
finite, there is no update, and each rank runs the same micro-batches again, alone, and looks at each gradient.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rankloom.base.compression import EXACT
from rankloom.base.errors import NonFinite
from rankloom.world.group import Group

SHOWN = 8   # ranks, in an error


def explain_non_finite(group: Group, run_alone: Callable[[], Tensor], gradients: Callable[[], Mapping[str, Tensor]],
                       seen: str, compress: str = EXACT) -> NonFinite:
    """The error to raise, the same on every rank: which rank, and its first bad tensor. A collective.

    run_alone: forward and backward of this rank's batch without communication; returns [loss sum, count]
    gradients: name -> gradient, after `run_alone`
    seen:      what the step found, in words
    compress:  the compression of gradients
    """
    found = group.all_gather_object(_first_bad(run_alone(), gradients()), label="non-finite")
    named = [f"rank {rank}: {what}" for rank, what in zip(group.ranks, found, strict=True) if what]
    named[SHOWN:] = [f"and {len(named) - SHOWN} more ranks"] if len(named) > SHOWN else []
    where = "; ".join(named) or "repeated on each rank alone the step was finite: the cause is not in the model's own arithmetic"
    if not named and compress == "fp16":
        where += (f". compress='fp16' carries numbers up to {torch.finfo(torch.float16).max:g} only, and a mean gradient, or what a rank "
                  "adds to it, may be larger: 'bf16' is as short, and has the range of fp32")
    return NonFinite(f"{seen}. {where}. The parameters are those of the step before; lower the learning rate, clip, "
                     "or look at that rank's batch.")


def _first_bad(totals: Tensor, gradients: Mapping[str, Tensor]) -> str | None:
    """What is not finite on this rank alone. Gradients are searched in the order in which backward makes them."""
    if not torch.isfinite(totals[0]):
        return f"the loss of its own batch is {totals[0].item():g}"
    for name, gradient in reversed(list(gradients.items())):
        if not torch.isfinite(gradient).all():
            bad = int((~torch.isfinite(gradient)).sum())
            return f"the gradient of {name} has {bad} elements of {gradient.numel()} that are not finite"
    return None
