"""Rules for the tensors of all algorithms in this folder: contiguous, cut as `tensor_split` does, summed in at least 32 bits.

Floats narrower than fp32 are summed in fp32: partial sums are sent as fp32, and only the finished sum is rounded, once. So a
16-bit sum is as exact as its format allows, on any number of ranks, and its partial sums take `widening` times the bytes.
"""

from itertools import accumulate

import torch
from torch import Tensor

from rankloom.base.errors import ConfigError, ShapeMismatch
from rankloom.base.shares import chunk_sizes
from rankloom.world.group import Group
from rankloom.world.transport.operands import expect_operand, is_narrow


def require_contiguous(x: Tensor, group: Group, label: str) -> Tensor:
    """`x` detached, in the same memory, so that a parameter can be written to. Raises before any rank has sent anything.

    raises: NotContiguous; ConfigError for no tensor, and for one with a graph, since collectives have no backward
    """
    expect_operand(x, group.device, group.where(label))
    return x.detach()


def require_rows(x: Tensor, group: Group, label: str) -> Tensor:
    """As `require_contiguous`, for a tensor that is cut along its first dim. raises: also ShapeMismatch for one without dims"""
    rows = require_contiguous(x, group, label)
    if x.dim() == 0:
        raise ShapeMismatch(f"{group.where(label)}: a tensor without dims has no rows, expected [rows, ...]; pass x.view(1)")
    return rows


def summand(x: Tensor, group: Group, label: str) -> Tensor:
    """`x` detached and flattened, in the same memory: [...] -> [n]. raises: as `require_contiguous`; ConfigError for bool"""
    flat = require_contiguous(x, group, label).view(-1)
    if x.dtype == torch.bool:
        raise ConfigError(f"{group.where(label)}: the sum of torch.bool is not of that dtype; sum x.int()")
    return flat


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which elements of `dtype` are summed.

    >>> summing_dtype(torch.bfloat16), summing_dtype(torch.float64), summing_dtype(torch.int8)
    (torch.float32, torch.float64, torch.int8)
    """
    return torch.float32 if is_narrow(dtype) else dtype


def widening(dtype: torch.dtype) -> int:
    """Bytes of a partial sum over bytes of an element: the `wide` of bills and paths.

    >>> widening(torch.float8_e4m3fn), widening(torch.float16), widening(torch.float32), widening(torch.int8)
    (4, 2, 1, 1)
    """
    return summing_dtype(dtype).itemsize // dtype.itemsize


def chunk_bounds(n: int, p: int) -> list[int]:
    """Where each of the p chunks of n begins, then where the last one ends.

    >>> chunk_bounds(8, 3)
    [0, 3, 6, 8]
    """
    return [0, *accumulate(chunk_sizes(n, p))]
