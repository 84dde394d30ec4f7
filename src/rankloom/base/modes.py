"""What a model is in: training or evaluation, without losing what the user has set on parts of it; and whether it runs with others."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module is in the mode it had: a frozen BatchNorm stays frozen."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def run_together(model: nn.Module) -> None:
    """From now on a forward of `model` is a collective: other ranks wait for this one in it."""
    vars(model)["_runs_together"] = True


def runs_together(model: nn.Module) -> bool:
    """Whether a forward of `model` is a collective."""
    return getattr(model, "_runs_together", False)
