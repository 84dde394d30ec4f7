"""Quantise fp32 to 8, 4 or 1 bits in blocks, and back, with error feedback.

A block of values becomes a record: a step in bf16, then a code for each value.

    int8    2 + 256 bytes for 256 values    a code is a whole number of steps, -127 to 127
    int4    2 + 64 bytes for 128 values     -7 to 7, two in a byte: value i and value i + 64
    1bit    2 + 32 bytes for 256 values     a sign; the step is the mean magnitude. Byte j holds values j, j + 32, j + 64 ...

The step is the upper half of an fp32, so step x code is exact in fp32. With 8 and 4 bits so is the error, value - step x code, which is
about half a step at most: what is sent and the error add up to the value exactly. With 1 bit a value may be far from the step, and the
error is rounded to fp32, once. All processors get the same bits.
A block with a NaN or an infinity comes out as all NaN, and its error stays as it was. The same holds for a block with a value of
2**118 or more: near the top of fp32 a step times a code, or a sum of magnitudes, is infinite, and the error would be, too.

Each pass reads memory once and writes it once. On the CPU the passes are in C (_quantize.c); where that was not built, and on a
GPU, torch computes the same bits here.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rankloom.base.tensors import memory_of

try:
    from rankloom.comm import _quantize  # type: ignore[attr-defined]
except ImportError:   # there was no compiler when this was installed
    _quantize = None

NATIVE = _quantize is not None
HEAD = 2             # bytes of the step
TINY = 2.0**-118     # a block whose largest magnitude is below is sent as zeros: 1 / step would overflow
HUGE = 2.0**118
LANES = 16           # partial sums of the mean magnitude; the order of the sum is part of the format
MAGNITUDE = 0x7FFFFFFF   # the bits of an fp32 without the sign


class Format(Protocol):
    """How fp32 values are sent: in records of `record` bytes, each for `block` values. Zeros pad the last block."""

    @property
    def block(self) -> int:
        """Values in a record."""

    @property
    def record(self) -> int:
        """Bytes of a record."""

    def quantise(self, x: Tensor, error: Tensor, out: Tensor) -> None:
        """Write the records of `x + error` to `out`; `error` becomes the new error, x + error - the dequantised records.

        x, error: [n] fp32   out: uint8 [records, record]
        """

    def fold(self, inbox: Tensor, error: Tensor, out: Tensor) -> None:
        """Sum the records of all ranks, in rank order and in fp32, and write the records of the sum + error to `out`.

        inbox: uint8 [p, records, record]   error: [n] fp32, as in `quantise`; what the records hold after n values is padding
        out:   uint8 [records, record]; those without a value are not written
        """

    def dequantise(self, wire: Tensor, x: Tensor) -> None:
        """Overwrite `x` with the values of the records. wire: uint8 [records, record]   x: [n] fp32"""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Few bits for each value, and a step for each block."""

    bits: int
    block: int

    @property
    def record(self) -> int:
        """Bytes of a block."""
        return HEAD + self.block * self.bits // 8

    def quantise(self, x: Tensor, error: Tensor, out: Tensor) -> None:
        """See Format."""
        if NATIVE and x.device.type == "cpu":
            _quantize.quantise(self.bits, memory_of(x), memory_of(error), memory_of(out))
            return
        left = _encode(_padded(x + error, self.block), x.numel(), self.bits, out)
        error.copy_(torch.where(_finite(out), left, _padded(error, self.block)).view(-1)[: error.numel()])

    def fold(self, inbox: Tensor, error: Tensor, out: Tensor) -> None:
        """See Format."""
        if NATIVE and inbox.device.type == "cpu":
            _quantize.fold(self.bits, memory_of(inbox), inbox.shape[0], memory_of(error), memory_of(out))
            return
        total = torch.zeros(out.shape[0], self.block, dtype=torch.float32, device=out.device)
        for records in inbox:
            total += _decode(records, self.bits)
        self.quantise(total.view(-1)[: error.numel()], error, out[: -(-error.numel() // self.block)])

    def dequantise(self, wire: Tensor, x: Tensor) -> None:
        """See Format."""
        if NATIVE and x.device.type == "cpu":
            _quantize.dequantise(self.bits, memory_of(wire), memory_of(x))
            return
        x.copy_((_decode(wire, self.bits) + 0.0).view(-1)[: x.numel()])   # -0.0 becomes 0.0, as in C


INT8, INT4, ONE_BIT = Blocks(8, 256), Blocks(4, 128), Blocks(1, 256)


@dataclass(frozen=True, slots=True)
class Floats:
    """Every value in a narrower float format, summed in fp32."""

    dtype: torch.dtype
    block: int = 128

    @property
    def record(self) -> int:
        """Bytes of a block."""
        return self.block * self.dtype.itemsize

    def quantise(self, x: Tensor, error: Tensor, out: Tensor) -> None:
        """See Format. A value that is not finite, or too large for the format, leaves its error as it is."""
        out[-1:].zero_()
        sent = out.view(self.dtype).view(-1)[: x.numel()]
        wanted = x + error
        left = wanted.sub_(sent.copy_(wanted).float())
        if x.device.type != "cpu" or not left.sum().isfinite():   # on a CPU, the choice by value takes ten times as long as all the rest
            left = torch.where(left.isfinite(), left, error)
        error.copy_(left)

    def fold(self, inbox: Tensor, error: Tensor, out: Tensor) -> None:
        """See Format."""
        floats = inbox.view(self.dtype)
        total = floats[0].float()
        for addend in floats[1:]:
            total += addend
        self.quantise(total.view(-1)[: error.numel()], error, out[: -(-error.numel() // self.block)])

    def dequantise(self, wire: Tensor, x: Tensor) -> None:
        """See Format."""
        x.copy_(wire.view(self.dtype).view(-1)[: x.numel()])


# ---------------------------------------------------------------------- the same in torch


def _padded(x: Tensor, block: int) -> Tensor:
    """[n] -> [blocks, block], zeros at the end."""
    return torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)


def _encode(v: Tensor, count: int, bits: int, out: Tensor) -> Tensor:
    """Write the records of v [blocks, block], whose values after the first `count` are padding; returns the error."""
    if not len(v):
        return v
    step = (_mean_magnitude(v, count) if bits == 1 else _step(v, 2.0 ** (bits - 1) - 1))[:, None]
    out[:, :HEAD] = (step.view(torch.int32) >> 16).to(torch.int16).view(torch.uint8)
    if bits == 1:
        negative = v.signbit() & step.isfinite()
        out[:, HEAD:] = sum(eighth.to(torch.uint8) << bit for bit, eighth in enumerate(negative.chunk(8, dim=1)))
        return v - torch.where(negative, -step, step)
    per_step = torch.where(step > 0, step.reciprocal(), 0.0)
    codes = torch.where(step.isfinite(), (v * per_step).round() + 0.0, 0.0)   # -0.0 becomes 0.0, as in C
    if bits == 8:
        out[:, HEAD:] = codes.to(torch.int8).view(torch.uint8)
    else:
        low, high = (codes + 8.0).to(torch.uint8).chunk(2, dim=1)
        out[:, HEAD:] = low | high << 4
    return v - codes * step


def _decode(records: Tensor, bits: int) -> Tensor:
    """[blocks, record] -> [blocks, block] fp32."""
    step, codes = records[:, :HEAD].contiguous().view(torch.bfloat16).float(), records[:, HEAD:].contiguous()
    if bits == 8:
        return codes.view(torch.int8).float() * step
    if bits == 4:
        return (torch.cat((codes & 15, codes >> 4), 1).float() - 8.0) * step
    negative = torch.cat([codes >> bit & 1 for bit in range(8)], 1).bool()
    return torch.where(negative, -step, step)


def _step(v: Tensor, levels: float) -> Tensor:
    """The smallest bf16 step with step x levels >= the block's largest magnitude; NaN where a value is HUGE or not finite."""
    top = _largest(v)
    step = ((top / levels).view(torch.int32) + 0xFFFF & ~0xFFFF).view(torch.float32)
    return torch.where(top < TINY, 0.0, torch.where(top < HUGE, step, torch.nan))


def _largest(v: Tensor) -> Tensor:
    """The largest magnitude of each block. Compared as integers, as in C, so NaN is the largest."""
    return (v.view(torch.int32) & MAGNITUDE).amax(1).view(torch.float32)


def _mean_magnitude(v: Tensor, count: int) -> Tensor:
    """Of each block without padding, rounded to bf16: LANES partial sums, added by halves. NaN where a value is HUGE or not finite."""
    lanes = v.new_zeros(len(v), LANES)
    for piece in v.abs().split(LANES, dim=1):
        lanes += piece
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    counts = v.new_full((len(v),), v.shape[1])
    counts[-1] -= v.numel() - count
    mean = (lanes[:, 0] / counts).view(torch.int32) + 0x8000 & ~0xFFFF
    return torch.where(_largest(v) < HUGE, mean.view(torch.float32), torch.nan)


def _finite(records: Tensor) -> Tensor:
    return records[:, :HEAD].contiguous().view(torch.bfloat16).isfinite()
