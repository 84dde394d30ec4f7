"""A model's modes: evaluation for a while, and whether its forward is a collective. Torch's modes: whether tensors get memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn

P = ParamSpec("P")
R = TypeVar("R")


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


def with_memory(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator for functions that need tensors with values: where torch's default device is meta, they run with the CPU as default.

    Tensors made with `device=` are not affected.
    """
    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext():
            return function(*args, **kwargs)

    return run
