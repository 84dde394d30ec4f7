"""A tensor's bytes, to hash, compare and send them; and how often it was written."""

import torch
from torch import Tensor


def version_of(x: Tensor) -> int:
    """How often `x` was written in place; 0 in inference mode, where torch does not count."""
    return 0 if x.is_inference() else x._version


def as_bytes(x: Tensor) -> Tensor:
    """The memory of `x` as bytes [..., itemsize]: backends refuse some dtypes, gloo for example 16-bit integers. x: contiguous, [...]"""
    return x.detach().unsqueeze(-1).view(torch.uint8)


def bytes_of(x: Tensor) -> Tensor:
    """The elements as bytes [n]: backends refuse some dtypes, and NaN != NaN. New memory, unless `x` is contiguous.

    A tensor that torch conjugates or negates only when it is read has the bytes that a reader sees.
    """
    return as_bytes(x.detach().resolve_conj().resolve_neg().contiguous()).view(-1)
