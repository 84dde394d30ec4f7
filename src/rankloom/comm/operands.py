"""What the algorithms of this folder ask of their tensors: no gaps, cut as `tensor_split` cuts, summed in at least 32 bits.

Formats narrower than fp32 are added in fp32 all the way: partial sums travel as fp32, and only the finished sum is rounded,
once. So a 16-bit sum is as exact as its format allows, for any number of ranks, and its partial sums cost `widening` times
the bytes of its elements.
"""

from itertools import accumulate

import torch
from torch import Tensor

from rankloom.base.errors import ConfigError, ShapeMismatch
from rankloom.world.group import Group
from rankloom.world.transport.operands import expect_operand


def require_contiguous(x: Tensor, group: Group, label: str) -> Tensor:
    """`x` detached: the same memory, so a parameter may be written to. Raises before any rank has sent anything.

    raises: NotContiguous; ConfigError for a tensor with a graph, since no gradient goes back through a collective
    """
    expect_operand(x, group.device, group.where(label))
    return x.detach()


def require_rows(x: Tensor, group: Group, label: str) -> Tensor:
    """`x` detached, contiguous and with a first dim to cut. raises: as `require_contiguous`; ShapeMismatch"""
    if x.dim() == 0:
        raise ShapeMismatch(f"{group.where(label)}: a tensor without dims has no rows, expected [rows, ...]; pass x.view(1)")
    return require_contiguous(x, group, label)


def summand(x: Tensor, group: Group, label: str) -> Tensor:
    """`x` detached and laid flat. [...] -> [n], the same memory   raises: as `require_contiguous`; ConfigError for bool"""
    if x.dtype == torch.bool:
        raise ConfigError(f"{group.where(label)}: the sum of torch.bool is not of that dtype; sum x.int()")
    return require_contiguous(x, group, label).view(-1)


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a dtype is added in.

    >>> summing_dtype(torch.bfloat16), summing_dtype(torch.float64), summing_dtype(torch.int8)
    (torch.float32, torch.float64, torch.int8)
    """
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def widening(dtype: torch.dtype) -> int:
    """How many times the bytes of an element its partial sums have: the `wide` of bills and paths.

    >>> widening(torch.float8_e4m3fn), widening(torch.float16), widening(torch.float32), widening(torch.int8)
    (4, 2, 1, 1)
    """
    return summing_dtype(dtype).itemsize // dtype.itemsize


def chunk_sizes(n: int, p: int) -> list[int]:
    """How `tensor_split` cuts n in p: the first n % p chunks are one longer.

    >>> chunk_sizes(8, 3)
    [3, 3, 2]
    """
    return [n // p + (chunk < n % p) for chunk in range(p)]


def cuts(n: int, p: int) -> list[int]:
    """Where the p chunks of n begin, and where the last one ends.

    >>> cuts(8, 3)
    [0, 3, 6, 8]
    """
    return [0, *accumulate(chunk_sizes(n, p))]
