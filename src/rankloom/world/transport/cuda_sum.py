"""Add up tensors on a GPU in one pass over memory: a Triton kernel, for three pieces or more.

This file can be imported without Triton, which only CUDA builds of torch include; the kernel cannot be run then.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None
tl: Any = import_module("triton.language") if HAS_TRITON else None
constexpr: Any = tl.constexpr if HAS_TRITON else object
jit: Callable[[Callable], Any] = import_module("triton").jit if HAS_TRITON else lambda kernel: kernel

BLOCK = 2048   # elements for each program of 8 warps: a few wide loads of every piece are in flight at a time
WARPS = 8


@jit
def _kernel(targets, pieces, n, mean: constexpr, wide: constexpr, block: constexpr):   # type: ignore[no-untyped-def]
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
    _kernel[(-(-n // BLOCK),)](tuple(targets), tuple(pieces), n, mean=mean, wide=wide, block=BLOCK, num_warps=WARPS)
