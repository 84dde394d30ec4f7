"""Add up tensors on a GPU in one pass over memory: a Triton kernel, for three pieces or more."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rankloom.base.triton import language

tl, jit = language()
BLOCK = 2048   # elements for each program of 8 warps: a few wide loads of every piece are in flight at a time
WARPS = 8


@jit
def _add_up_kernel(targets, pieces, n, mean: tl.constexpr, wide: tl.constexpr, block: tl.constexpr):   # type: ignore[no-untyped-def, name-defined]
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < n
    total = tl.load(pieces[0] + at, mask=inside).to(wide)
    for rank in tl.static_range(1, len(pieces)):
        total += tl.load(pieces[rank] + at, mask=inside).to(wide)
    if mean:
        total = tl.div_rn(total, tl.full([block], len(pieces), tl.float32)) if wide == tl.float32 else total / len(pieces)
    for rank in tl.static_range(len(targets)):
        tl.store(targets[rank] + at, total.to(targets[rank].dtype.element_ty), mask=inside)


def add_up(targets: Sequence[Tensor], pieces: Sequence[Tensor], mean: bool) -> None:
    """Write the sum (or the mean) of all pieces, in their order, to every target; 16-bit floats in fp32 with one rounding.

    targets, pieces: [n], of one float dtype; a target may be one of the pieces
    """
    n, wide = pieces[0].numel(), tl.float64 if pieces[0].dtype == torch.float64 else tl.float32
    _add_up_kernel[(-(-n // BLOCK),)](tuple(targets), tuple(pieces), n, mean=mean, wide=wide, block=BLOCK, num_warps=WARPS)
