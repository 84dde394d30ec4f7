"""Random numbers by place: each is a hash of its key, its row, its line in that row and its column.

A generator gives its numbers in turn, so whoever wants some must draw all that come before them. Here any of them is computed by itself:
a rank draws for its own rows and tokens only, gets what one process would get, and gets it on any device; on a processor sooner, too.

source: Salmon et al. 2011 (counters in place of a state); Steele, Lea & Flood 2014 (the mixing of lines, SplitMix64); Wellons 2018
        (that of columns, lowbias32)
"""

import torch
from torch import Tensor


def _signed(number: int, bits: int) -> int:
    return number - (number >> (bits - 1) << bits)


GOLDEN = _signed(0x9E3779B97F4A7C15, 64)   # steps of this size visit all numbers, and neighbours lie far apart
GOLDEN_32 = _signed(0x9E3779B1, 32)


def line_keys(seed: int, rows: range, lines: Tensor) -> Tensor:
    """What tells each line of each row from all others.

    lines: int64, the numbers of the lines in a row
    returns: int64 [len(rows), *lines.shape]
    """
    numbers = torch.arange(rows.start, rows.stop, device=lines.device)
    keys = _mixed(numbers * GOLDEN + seed)
    return _mixed(keys.view(-1, *(1,) * lines.dim()) + (lines + 1) * GOLDEN)


def coins(keys: Tensor, columns: int) -> Tensor:
    """A number for each column of each line, all of the 2**32 equally likely.

    keys: int64 [...], of the lines
    returns: int32 [..., columns]
    price: eight passes over the result, and a second one like it in memory meanwhile
    """
    low, high = keys.to(torch.int32).unsqueeze(-1), (keys >> 32).to(torch.int32).unsqueeze(-1)
    x = low + torch.arange(columns, dtype=torch.int32, device=keys.device) * GOLDEN_32
    x ^= x >> 16
    x *= _signed(0x7FEB352D, 32)
    x ^= high   # with the low half alone, two lines would hold the same numbers in another order
    x ^= x >> 15
    x *= _signed(0x846CA68B, 32)
    return x


def _mixed(x: Tensor) -> Tensor:
    """Numbers that differ in one bit become numbers that differ in half of them. x: int64"""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB, 64)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
