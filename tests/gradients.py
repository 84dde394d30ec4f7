"""The gradients of a model as values, and whether two lots of tensors are the same."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """A copy of each parameter's, by name; None where there is none."""
    return {name: None if param.grad is None else param.grad.clone() for name, param in model.named_parameters()}


def expect_equal(mine: Mapping[str, Tensor | None], truth: Mapping[str, Tensor | None], *, tolerance: float = 0.0) -> None:
    """The same names, nothing where there is nothing, and equal values: to the bit, or to `tolerance`, relative and absolute."""
    assert mine.keys() == truth.keys()
    for name, expected in truth.items():
        assert (mine[name] is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(mine[name], expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
