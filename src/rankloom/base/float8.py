"""Floats of eight bits: cast with a scale, and multiplied. One code for every device; only the product itself has a second form.

A matrix is kept as `Float8(data, scale)`, and its values are data x scale. Scales are powers of two, so casting only shifts exponents:
a value is rounded to the same neighbour whatever the largest value beside it was, unless it falls off the small end. How a batch
or a weight is cut over ranks then hardly shows, what has been cast once is cast again to the same bits, and every
device computes the same scale, because a scale is made of integers. The price is at most half of the format's range.

A NaN or an infinity must not vanish: where the largest magnitude is not finite, the scale is NaN, and so is every product with it.

    E4M3  3 bits of fraction, largest 448     weights and what goes forward
    E5M2  2 bits of fraction, largest 57344   gradients, which are spread wider
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rankloom.base.errors import ShapeMismatch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STEP = 16            # what matrix units count in: both dims of a weight, and every sum, in multiples of it
TINY = 2.0**-100     # an amax below counts as this: then no scale and no scale's inverse leaves fp32
FRACTION = 23        # bits of the fraction of an fp32
BIAS = 127           # of its exponent


class Float8(NamedTuple):
    """A matrix in eight bits: data [m, n]; scale fp32 [1, 1], [m, 1] or [1, n]."""

    data: Tensor
    scale: Tensor

    def transposed(self) -> "Float8":
        """The same memory, seen as [n, m]."""
        return Float8(self.data.t(), self.scale.t())

    def values(self) -> Tensor:
        """What it stands for, in fp32: exact."""
        return self.data.float() * self.scale


def magnitude(x: Tensor, dim: int | None = None) -> Tensor:
    """The largest |value| of x [m, n], fp32 [1, 1]; of each column (dim 0) [1, n]; of each row (dim 1) [m, 1]. NaN where there is one."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return largest.float().view(1, 1) if dim is None else largest.float()


def cast(x: Tensor, dtype: torch.dtype, largest: Tensor, *, reference: Tensor | None = None, margin: int = 0) -> Float8:
    """x [m, n] in eight bits, rounded to nearest even; what does not fit becomes the largest value of the format.

    largest:   `magnitude(x)`: of the whole, of columns or of rows
    reference: what to scale by in its place, where that is known before x is (delayed scaling)
    margin:    powers of two left free above it
    """
    limit = torch.finfo(dtype).max
    power = _power(largest if reference is None else reference, dtype) + margin
    wide = x.float() if x.dtype == torch.float16 else x      # the inverse of a scale may not fit fp16
    # torch casts what is too large to NaN (E4M3) or to infinity (E5M2), so it is cut first; a NaN stays one.
    data = (wide * _two_to(-power).to(wide.dtype)).clamp(-limit, limit).to(dtype)
    return Float8(data, torch.where(largest.isfinite(), _two_to(power), torch.nan))


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale that `cast` gives what has this largest magnitude."""
    return torch.where(largest.isfinite(), _two_to(_power(largest, dtype)), torch.nan)


def scaled_product(a: Float8, b: Float8, out_dtype: torch.dtype, *, fast_accum: bool = False) -> Tensor:
    """a [m, k] @ b [k, n], added up in fp32.

    a.scale:    [1, 1] or [m, 1]    b.scale: [1, 1] or [1, n]
    fast_accum: let the device add in fewer bits than fp32's; nothing where it cannot
    raises:     ShapeMismatch when n does not divide by 16
    The device's own product needs `a` by rows, `b` by columns, and k a multiple of 16; elsewhere the same bytes, laid out
    the same way, are multiplied in fp32, where the product of two such numbers is exact.
    """
    m, n = a.data.shape[0], b.data.shape[1]
    if n % STEP:
        raise ShapeMismatch(f"a float8 product [{m}, {a.data.shape[1]}] @ [{a.data.shape[1]}, {n}]: the last dim must divide by {STEP}; "
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
    one = torch.ones(1, 1, device=left.device)   # kernels that scale rows write bf16 only, on some devices
    product = torch._scaled_mm(left, right, one, one, out_dtype=torch.float32, use_fast_accum=fast_accum)
    return _in_dtype(product * a.scale * b.scale, out_dtype)


def multiplies_float8(device: torch.device) -> bool:
    """Whether the device has a product of its own for these formats: CUDA from compute capability 8.9."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    has = torch.cuda.get_device_properties(device)
    return (has.major, has.minor) >= (8, 9)


def _in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, but never that call where it returns `x` itself: torch 2.11 compiles gradients of zero for an autograd function
    whose output came so."""
    return x if x.dtype == dtype else x.to(dtype)


def _by_rows(data: Tensor) -> Tensor:
    """Contiguous, and filled up with zeros to a multiple of 16 columns."""
    short = -data.shape[1] % STEP
    if short:
        return F.pad(data.contiguous().view(torch.uint8), (0, short)).view(data.dtype)
    return data.contiguous()


def _bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


LIMIT_BITS = {dtype: _bits(torch.finfo(dtype).max) for dtype in (E4M3, E5M2)}
ALMOST = (1 << FRACTION) - 1   # added before a shift, it rounds up


def _power(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest int32 e with `largest <= limit x 2**e`: positive floats are ordered as their bits are."""
    return (largest.clamp_min(TINY).view(torch.int32) - LIMIT_BITS[dtype] + ALMOST) >> FRACTION


def _two_to(power: Tensor) -> Tensor:
    """2**power in fp32, for int32 powers from -126 to 127."""
    return ((power + BIAS) << FRACTION).view(torch.float32)
