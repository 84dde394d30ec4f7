"""Why a step failed: where a NaN or an infinity came from, and what rankloom changed in the model that may explain an error of torch's.

To look at every gradient in every step would cost a pass over the gradients. So a step only looks at the global norm. If that is not
finite, there is no update, and each rank runs the same micro-batches again, alone, and looks at each gradient.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rankloom.base.compression import EXACT
from rankloom.base.errors import NonFinite, RankloomError
from rankloom.parallel.tensor.holding import holdings
from rankloom.train.precision import Precision
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


@contextmanager
def with_notes(model: nn.Module, precision: Precision, context_ranks: int) -> Iterator[None]:
    """A context: an error that torch raises inside gets a note on parameters of which each tensor rank has a part, if the model has any;
    one about dtypes, on buffers that are not in the compute dtype; with several context ranks, on which tokens the model returns.

    Buffers are not cast: running statistics and tables of angles need their precision. But what is computed from one is wide too.
    """
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        parts = [name for name, held in holdings(model).items() if held.dim is not None]
        if parts and not isinstance(error, RankloomError):
            error.add_note(f"the tensor plan cuts {', '.join(parts[:3])} ({len(parts)} in all): what reads one of them itself, such as "
                           "`F.linear(x, self.embedding.weight)`, has a part on each rank. Let a layer of the plan compute it: for a "
                           "tied head an nn.Linear with the same parameter, colwise_rep")
        wide = [name for name, buffer in model.named_buffers() if buffer.is_floating_point() and buffer.dtype != precision.compute]
        if precision.master is not None and wide and isinstance(error, RuntimeError) and "type" in str(error):
            error.add_note(f"precision {precision.name!r} casts parameters and inputs to {precision.compute}, and leaves buffers as they "
                           f"are: {', '.join(wide[:3])} ({len(wide)} in all). A result with a wider buffer in it is wide too, and "
                           "layers in 16 bits refuse it: cast the buffer where it is used, for example `x + self.table.to(x)`. Where torch "
                           "itself uses it, let the module compute in full, `Precision(..., full=(names,))`: after spectral_norm of "
                           "`parametrizations` \"*parametrizations*\", after the old `torch.nn.utils.spectral_norm` the name of the layer")
        if context_ranks > 1 and not isinstance(error, RankloomError | IndexError):
            error.add_note(f"with {context_ranks} context ranks the model cuts what it is called with, and returns values for this rank's "
                           "tokens only. Give it the targets too, `model(tokens, targets=targets)`, or cut them alike: "
                           "`own_tokens(targets, world.group('context'))` in rankloom.parallel.context")
        raise
