"""What stands beside an error of torch's that a loss function raised: what rankloom changed about the model, which may explain it."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from rankloom.base.errors import RankloomError
from rankloom.train.precision import Precision


@contextmanager
def buffers_named(model: nn.Module, precision: Precision) -> Iterator[None]:
    """A context: an error inside about dtypes gets a note that names buffers of another dtype than the compute dtype.

    Buffers are not cast, because statistics and tables of angles need their digits. But a result with a wide buffer in it is wide.
    """
    try:
        yield
    except RuntimeError as error:
        wide = [name for name, buffer in model.named_buffers() if buffer.is_floating_point() and buffer.dtype != precision.compute]
        if precision.master is not None and wide and "type" in str(error):
            error.add_note(f"precision {precision.name!r} casts parameters and inputs to {precision.compute}, and leaves buffers as they "
                           f"are: {', '.join(wide[:3])} ({len(wide)} in all). A result with a wider buffer in it is wide too, and "
                           "layers in 16 bits refuse it: cast the buffer where it is used, for example `x + self.table.to(x)`. Where torch "
                           "itself uses it, let the module compute in full, `Precision(..., full=(names,))`: after spectral_norm of "
                           "`parametrizations` \"*parametrizations*\", after the old `torch.nn.utils.spectral_norm` the name of the layer")
        raise


@contextmanager
def tokens_named(ranks: int) -> Iterator[None]:
    """A context: with several context ranks, an error of torch's inside gets a note that says which tokens a model returns."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if ranks > 1 and not isinstance(error, RankloomError):
            error.add_note(f"with {ranks} context ranks the model cuts what it is called with, and returns values for this rank's tokens "
                           "only. Give it the targets too, `model(tokens, targets=targets)`, or cut them alike: "
                           "`own_tokens(targets, world.group('context'))` in rankloom.parallel.context")
        raise
