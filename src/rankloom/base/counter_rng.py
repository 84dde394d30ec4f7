"""Random numbers by place: each is a hash of its key, its row, its line in that row and its column.

A generator gives its numbers in turn: to get one, all before it must be drawn. Here each is computed by itself, equal on every device. So
a rank draws for its own rows and tokens only, and gets the numbers of one process. On a CPU that is faster, too.

source: Salmon et al. 2011 (counters in place of a state); Steele, Lea & Flood 2014 (SplitMix64, hashes lines); Wellons 2018 (lowbias32,
        hashes columns)
"""

import torch
from torch import Tensor


def _signed(number: int, bits: int) -> int:
    return number - (number >> (bits - 1) << bits)


GOLDEN = _signed(0x9E3779B97F4A7C15, 64)   # its multiples visit all numbers, and consecutive ones lie far apart
GOLDEN_32 = _signed(0x9E3779B1, 32)


def line_keys(seed: int, rows: range, lines: Tensor) -> Tensor:
    """A key for each line of each row.

    lines:   int64, numbers of lines in a row
    returns: int64 [len(rows), *lines.shape]
    """
    numbers = torch.arange(rows.start, rows.stop, device=lines.device)
    keys = _mixed(numbers * GOLDEN + seed)
    return _mixed(keys.view(-1, *(1,) * lines.dim()) + (lines + 1) * GOLDEN)


def coins(keys: Tensor, columns: int) -> Tensor:
    """A number for each column of each line, uniform over all of int32.

    keys:    int64 [...], of the lines
    returns: int32 [..., columns]
    price:   eight passes over the result, and temporary memory of its size
    """
    low, high = keys.to(torch.int32).unsqueeze(-1), (keys >> 32).to(torch.int32).unsqueeze(-1)
    x = low + torch.arange(columns, dtype=torch.int32, device=keys.device) * GOLDEN_32
    x ^= x >> 16
    x *= _signed(0x7FEB352D, 32)
    x ^= high   # from the low half alone, two lines would get the same numbers in another order
    x ^= x >> 15
    x *= _signed(0x846CA68B, 32)
    return x


def _mixed(x: Tensor) -> Tensor:
    """A hash: inputs that differ in one bit give outputs that differ in about half of them. x: int64"""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB, 64)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: zeros come in, not the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
