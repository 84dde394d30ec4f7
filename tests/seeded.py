"""Draws from torch's default generator in ranks that are threads: they share it, and would take numbers from each other."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import nn

P, T = ParamSpec("P"), TypeVar("T")
_drawing = threading.RLock()


def seeded(seed: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """For what builds a model: it draws the same whenever it is called, and one thread at a time."""
    def wrap(build: Callable[P, T]) -> Callable[P, T]:
        @wraps(build)
        def built(*args: P.args, **kwargs: P.kwargs) -> T:
            with _drawing:
                torch.manual_seed(seed)
                return build(*args, **kwargs)
        return built

    return wrap


def shaken(model: nn.Module) -> nn.Module:
    """Biases of zero and norms of one would hide what goes wrong with them."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn(param.shape, dtype=param.dtype))
    return model
