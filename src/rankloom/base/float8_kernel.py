"""Cast to eight bits on a GPU, by rows and by columns in one pass over memory: a Triton kernel."""

import torch
from torch import Tensor

from rankloom.base.triton import language

tl, jit = language()
TILE, WARPS = 128, 8   # a program's square of the matrix, which it turns in a multiprocessor's shared memory


@jit
def _eight(values, inverse, limit: tl.constexpr, dtype: tl.constexpr):   # type: ignore[no-untyped-def, name-defined]
    return tl.clamp(values.to(tl.float32) * inverse, -limit, limit, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@jit
def _cast_twice_kernel(x, inverse, written, shape, limit: tl.constexpr, tile: tl.constexpr):   # type: ignore[no-untyped-def, name-defined]
    rows, columns = written
    m, n, down, right = shape
    i = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    j = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    inside = (i < m)[:, None] & (j < n)[None, :]
    values, factor = tl.load(x + i[:, None] * down + j[None, :] * right, mask=inside, other=0.0), tl.load(inverse)
    tl.store(rows + i[:, None] * n + j[None, :], _eight(values, factor, limit, rows.dtype.element_ty), mask=inside)
    # Turned first, then cast anew: one cast value that goes into two stores ptxas 12.8 (in Triton 3.7) reads before it is made.
    turned = _eight(tl.trans(values), factor, limit, rows.dtype.element_ty)
    tl.store(columns + j[:, None] * m + i[None, :], turned, mask=tl.trans(inside))


def by_rows_and_columns(x: Tensor, dtype: torch.dtype, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """x [m, n] x inverse [1, 1], rounded to `dtype`; values out of range become its largest. As [m, n] and as [n, m], both contiguous."""
    m, n = x.shape
    written = x.new_empty(m, n, dtype=dtype), x.new_empty(n, m, dtype=dtype)
    with torch.cuda.device_of(x):   # Triton launches on the current device of the thread
        run = _cast_twice_kernel[(-(-m // TILE), -(-n // TILE))]
        run(x, inverse, written, (m, n, *x.stride()), limit=torch.finfo(dtype).max, tile=TILE, num_warps=WARPS)
    return written
