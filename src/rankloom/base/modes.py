"""A model's modes: evaluation for a while, and whether its forward is a collective."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; then every module returns to the mode it had, so a frozen BatchNorm stays frozen."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def run_together(model: nn.Module) -> None:
    """Mark `model`: from now on its forward is a collective, in which ranks wait for each other."""
    vars(model)["_runs_together"] = True


def runs_together(model: nn.Module) -> bool:
    """Whether a forward of `model` is a collective."""
    return getattr(model, "_runs_together", False)
