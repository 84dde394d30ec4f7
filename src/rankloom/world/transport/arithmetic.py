"""Sums and other combinations of tensors in one memory: the same bits as from the kernels for shared memory.

Pieces are combined in their order. 16-bit floats are added and multiplied in fp32, with one rounding at the end.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from importlib import import_module

import torch
from torch import Tensor

from rankloom.base.triton import BUILDS
from rankloom.world.transport.codes import AVG, BAND, BOR, BXOR, MAX, MIN, PRODUCT, SUM

JOIN: dict[int, Callable[..., Tensor]] = {
    SUM: torch.add, AVG: torch.add, PRODUCT: torch.mul, MIN: torch.minimum, MAX: torch.maximum,
    BAND: torch.bitwise_and, BOR: torch.bitwise_or, BXOR: torch.bitwise_xor}
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}   # torch has no arithmetic for unsigned types
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, torch.float64, *HALVES)


def combine(targets: Sequence[Tensor], pieces: Sequence[Tensor], dtype: torch.dtype, op: int) -> None:
    """Write pieces[0] op pieces[1] op ... to every target.

    targets, pieces: byte tensors of one length, which hold numbers of `dtype`; a target may be one of the pieces
    """
    numbers, homes = [x.view(dtype) for x in pieces], [x.view(dtype) for x in targets]
    sums = dtype in FLOATS and op in (SUM, AVG)
    if sums and op == SUM and len(numbers) == 2:
        total = torch.add(*numbers, out=homes[0])   # torch adds 16-bit floats in fp32 internally
    elif sums and numbers[0].is_cuda and BUILDS:
        # One pass over memory; torch would need one for each piece.
        import_module("rankloom.world.transport.cuda_sum").add_up(homes, numbers, op == AVG)
        return
    else:
        total = _fold(numbers, op)
    for home in homes:
        if home is not total:
            home.copy_(total)


def _fold(numbers: Sequence[Tensor], op: int) -> Tensor:
    dtype = numbers[0].dtype
    if dtype in SIGNED:
        return _fold_unsigned([x.view(SIGNED[dtype]) for x in numbers], op).view(dtype)
    wide = torch.float32 if dtype in HALVES and op in (SUM, AVG, PRODUCT) else dtype
    total = reduce(lambda so_far, x: JOIN[op](so_far, x, out=so_far), numbers[1:], numbers[0].to(wide, copy=True))
    return total.div_(len(numbers)) if op == AVG and total.is_floating_point() else total   # whole numbers: see operands.countable


def _fold_unsigned(numbers: Sequence[Tensor], op: int) -> Tensor:
    """The same on the bits of unsigned numbers. Only their order differs: with the first bit flipped, it is that of signed numbers."""
    if op not in (MIN, MAX):
        return _fold(numbers, op)
    first_bit = torch.iinfo(numbers[0].dtype).min
    return _fold([x ^ first_bit for x in numbers], op) ^ first_bit
