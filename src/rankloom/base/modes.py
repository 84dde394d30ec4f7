"""Training and evaluation mode, without losing what the user has set on parts of a model."""

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
