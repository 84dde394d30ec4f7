"""How far tensors are from the truth: the one measure of the tests that compare a layout with one process."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def error(mine: Tensor, truth: Tensor) -> float:
    """The largest difference, in units of the truth's largest element; NaN where one of them has a NaN. `mine` may be on any device."""
    assert (mine.dtype, mine.shape) == (truth.dtype, truth.shape), f"{mine.dtype} {mine.shape} is not {truth.dtype} {truth.shape}"
    ours, theirs = (x.detach().cpu().to(torch.complex128 if x.is_complex() else torch.float64) for x in (mine, truth))
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-300)).item() if truth.numel() else 0.0


def expect_close(mine: Mapping[str, Tensor | None], truth: Mapping[str, Tensor | None], bound: float) -> float:
    """The same names, None where the truth has None, and no `error` above `bound`. Returns the largest of them."""
    assert mine.keys() == truth.keys(), mine.keys() ^ truth.keys()
    largest = 0.0
    for name, expected in truth.items():
        assert (mine[name] is None) == (expected is None), name
        off = 0.0 if expected is None else error(mine[name], expected)
        assert off <= bound, f"{name} is off by {off:.1e} of its largest element"   # each by itself: Python's max drops a NaN
        largest = max(largest, off)
    return largest


def numbered(name: str, values: Sequence[float]) -> dict[str, Tensor]:
    """Each value under a name of its own, so that it is compared in units of itself."""
    return {f"{name} {at}": torch.tensor(value, dtype=torch.float64) for at, value in enumerate(values)}


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors of an engine's `full_state_dict()`, by name."""
    held = state["optimizer"]["state"]
    return state["model"] | {f"{name}.{key}": value for name, part in held.items() for key, value in part.items()}
