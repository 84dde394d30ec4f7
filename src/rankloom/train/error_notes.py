"""Notes added to errors that torch raises inside a loss function: what rankloom changed in the model that may explain them."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from rankloom.base.errors import RankloomError
from rankloom.parallel.tensor.holding import holdings
from rankloom.train.precision import Precision


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
