"""Eight-bit floats: cast with a scale, and multiply. Devices without a product of their own for them multiply the same bytes in fp32.

A matrix is `Float8(data, scale)`, with the values data x scale. Scales are powers of two, so casting only shifts exponents:

    - A value is rounded alike at any scale, unless it underflows. So results hardly depend on how a batch or weight is cut over ranks.
    - Casting the values of a cast matrix gives the same bits again.
    - A scale is computed in integers, so it is equal on every device.

The price is at most half of the format's range. A matrix with a NaN or an infinity gets the scale NaN, so every product with it is NaN.

    E4M3  3 bits of fraction, largest 448     weights and what goes forward
    E5M2  2 bits of fraction, largest 57344   gradients, whose range is wider
"""

import struct
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rankloom.base.errors import ShapeMismatch
from rankloom.base.triton import BUILDS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRAIN = 16           # matrix units need both dims of a weight, and the length of every sum, in multiples of this
TINY = 2.0**-100     # a smaller amax counts as this, so that a scale and its inverse fit fp32
FRACTION = 23        # bits of an fp32's fraction
BIAS = 127           # of its exponent
HALVES = (torch.bfloat16, torch.float16)   # what the kernel casts: of fp32, ptxas 12.8 builds one that writes wrong bytes


class Scales(NamedTuple):
    """Powers of two in fp32: `inverse` takes a matrix into a format's range, `scale` back; that is NaN where the matrix is not finite."""

    inverse: Tensor
    scale: Tensor


class Float8(NamedTuple):
    """A matrix in eight bits: data [m, n]; scale fp32 [1, 1], [m, 1] or [1, n]."""

    data: Tensor
    scale: Tensor

    def transposed(self) -> "Float8":
        """The same memory, seen as [n, m]."""
        return Float8(self.data.t(), self.scale.t())

    def values(self) -> Tensor:
        """data x scale in fp32: exact."""
        return self.data.float() * self.scale


class BothWays(NamedTuple):
    """A matrix [m, n] in eight bits, once for each dim that a product may sum over."""

    by_rows: Float8      # sums over n run along its rows
    by_columns: Float8   # sums over m run along its columns


def magnitude(x: Tensor, dim: int | None = None) -> Tensor:
    """The largest |value| of x [m, n], fp32 [1, 1]; of each column (dim 0) [1, n]; of each row (dim 1) [m, 1]. NaN if one is NaN."""
    if x.is_cuda and not torch.compiler.is_compiling():   # one pass over memory, which on a CPU takes ten times as long as those below
        return torch.linalg.vector_norm(x, torch.inf, dim, keepdim=True).float()
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)   # a compiler makes one pass of this
    return largest.float().view(1, 1) if dim is None else largest.float()


def magnitudes(tensors: list[Tensor]) -> Tensor:
    """`magnitude` of each of n tensors, [n]: on a GPU a few kernels for any number of them."""
    return torch.stack(torch._foreach_norm(tensors, torch.inf)).float()


def cast(x: Tensor, dtype: torch.dtype, largest: Tensor, *, reference: Tensor | None = None, margin: int = 0) -> Float8:
    """x [m, n] in eight bits, rounded to nearest even; values out of range become the largest of the format.

    largest:   `magnitude(x)`: of the whole, of columns or of rows
    reference: see `scales_of`, as for margin
    """
    scales = scales_of(largest, dtype, reference=reference, margin=margin)
    return Float8(rounded(x, dtype, scales.inverse), scales.scale)


def scales_of(largest: Tensor, dtype: torch.dtype, *, reference: Tensor | None = None, margin: int = 0) -> Scales:
    """The scales with which these largest magnitudes fit a format; any shape.

    reference: a magnitude to scale by instead, known before x (delayed scaling)
    margin:    powers of two left free above it
    """
    power = _power(largest if reference is None else reference, dtype) + margin
    return Scales(_two_to(-power), torch.where(largest.isfinite(), _two_to(power), torch.nan))


def apart(numbers: Tensor) -> tuple[Tensor, ...]:
    """Each of n fp32 numbers as [1, 1], at an address that divides by 16: a device's own product takes no other scale."""
    return numbers.view(-1, 1, 1).repeat(1, 1, 4)[..., :1].unbind()


def cast_twice(x: Tensor, dtype: torch.dtype, largest: Tensor, *, reference: Tensor | None = None, margin: int = 0) -> BothWays:
    """As `cast`, with one scale for the matrix, both ways.

    Both are the same values, in memory by rows and by columns, 1 byte each: a device's own product reads only along the sum. On a GPU one
    pass over 16-bit values writes both.
    """
    return _cast_twice(x, dtype, scales_of(largest, dtype, reference=reference, margin=margin))


def cast_each(tensors: Sequence[Tensor], dtype: torch.dtype, largest: Tensor) -> list[BothWays]:
    """`cast_twice` of each of n matrices. largest: of each, [n], as `magnitudes` gives them"""
    scales = scales_of(largest, dtype)
    of_each = zip(tensors, apart(scales.inverse), apart(scales.scale), strict=True)
    return [_cast_twice(x, dtype, Scales(inverse, scale)) for x, inverse, scale in of_each]


def _cast_twice(x: Tensor, dtype: torch.dtype, scales: Scales) -> BothWays:
    rows, columns = (_in_a_graph if torch.compiler.is_compiling() else _by_rows_and_columns)(x, dtype, scales.inverse)
    return BothWays(Float8(rows, scales.scale), Float8(columns.t(), scales.scale))


def rounded(x: Tensor, dtype: torch.dtype, inverse: Tensor) -> Tensor:
    """x, of any shape, times `Scales.inverse` in eight bits, as `cast` says."""
    limit = torch.finfo(dtype).max
    wide = x.float() if x.dtype == torch.float16 else x      # the inverse of a scale may not fit fp16
    # Clamp first: torch casts values out of range to NaN (E4M3) or infinity (E5M2). A NaN stays one.
    return (wide * inverse.to(wide.dtype)).clamp(-limit, limit).to(dtype)


def _by_rows_and_columns(x: Tensor, dtype: torch.dtype, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """`rounded(x [m, n])` as [m, n] and as [n, m], both contiguous."""
    if BUILDS and x.dtype in HALVES and multiplies_float8(x.device):
        return import_module("rankloom.base.float8_kernel").by_rows_and_columns(x, dtype, inverse)   # type: ignore[no-any-return]
    rows = rounded(x, dtype, inverse).contiguous()
    return rows, rows.t().clone(memory_format=torch.contiguous_format)


# One node of a compiled graph: layers that multiply the same input then share its cast, which calls of a kernel would not.
_in_a_graph = torch.library.custom_op("rankloom::by_rows_and_columns", _by_rows_and_columns, mutates_args=())


@_in_a_graph.register_fake
def _(x: Tensor, dtype: torch.dtype, inverse: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[::-1], dtype=dtype)


def scaled_product(a: Float8, b: Float8, out_dtype: torch.dtype, *, fast_accum: bool = False) -> Tensor:
    """a [m, k] @ b [k, n], accumulated in fp32.

    a.scale:    [1, 1] or [m, 1]    b.scale: [1, 1] or [1, n]
    fast_accum: allow accumulation in fewer bits, on devices that can
    raises:     ShapeMismatch unless n is a multiple of 16
    A device's own product needs `a` by rows, `b` by columns, and k padded to a multiple of 16. Other devices multiply the same bytes,
    laid out the same way, in fp32, where the product of two such numbers is exact.
    """
    m, n = a.data.shape[0], b.data.shape[1]
    if n % GRAIN:
        raise ShapeMismatch(f"a float8 product [{m}, {a.data.shape[1]}] @ [{a.data.shape[1]}, {n}]: the last dim must divide by {GRAIN}; "
                            "keep this layer in bf16")
    left, right = _by_rows(a.data), _by_rows(b.data.t()).t()
    if not multiplies_float8(left.device):
        return _in_dtype((left.float() @ right.float()) * a.scale * b.scale, out_dtype)
    if a.scale.numel() == b.scale.numel() == 1:
        wide = out_dtype if out_dtype == torch.bfloat16 else torch.float32
        return _in_dtype(torch._scaled_mm(left, right, a.scale, b.scale, out_dtype=wide, use_fast_accum=fast_accum), out_dtype)
    if out_dtype == torch.bfloat16:
        rows, columns = a.scale.expand(m, 1).contiguous(), b.scale.expand(1, n).contiguous()
        return torch._scaled_mm(left, right, rows, columns, out_dtype=out_dtype, use_fast_accum=fast_accum)
    one = torch.ones(1, 1, dtype=torch.float32, device=left.device)   # on some devices, kernels with scales by row return bf16 only
    product = torch._scaled_mm(left, right, one, one, out_dtype=torch.float32, use_fast_accum=fast_accum)
    return _in_dtype(product * a.scale * b.scale, out_dtype)


def multiplies_float8(device: torch.device) -> bool:
    """Whether the device has its own product for these formats: CUDA from compute capability 8.9."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    has = torch.cuda.get_device_properties(device)
    return (has.major, has.minor) >= (8, 9)


def _in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, without that call where it would return `x` itself: torch 2.11 compiles zero gradients for an autograd function
    that returns the result of such a call."""
    return x if x.dtype == dtype else x.to(dtype)


def _by_rows(data: Tensor) -> Tensor:
    """Contiguous, padded with zeros to a multiple of 16 columns."""
    short = -data.shape[1] % GRAIN
    if short:
        return F.pad(data.contiguous().view(torch.uint8), (0, short)).view(data.dtype)
    return data.contiguous()


def _bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


LIMIT_BITS = {dtype: _bits(torch.finfo(dtype).max) for dtype in (E4M3, E5M2)}
ALMOST = (1 << FRACTION) - 1   # added before a shift, it rounds up


def _power(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest int32 e with `largest <= limit x 2**e`, computed on bits, which are ordered as positive floats are."""
    return (largest.clamp_min(TINY).view(torch.int32) - LIMIT_BITS[dtype] + ALMOST) >> FRACTION


def _two_to(power: Tensor) -> Tensor:
    """2**power in fp32, for int32 powers from -126 to 127."""
    return ((power + BIAS) << FRACTION).view(torch.float32)
