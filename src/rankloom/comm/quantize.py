"""fp32 to 8, 4 or 1 bits in blocks, and back; what one message loses is remembered and added to the next.

A block of values becomes a record: a step in bf16, then a code for each value.

    int8    2 + 256 bytes for 256 values    a code is a whole number of steps, -127 to 127
    int4    2 + 64 bytes for 128 values     -7 to 7, two in a byte: value i and value i + 64
    1bit    2 + 32 bytes for 256 values     a sign; the step is the mean magnitude. Byte j holds values j, j + 32, j + 64 ...

The step is the upper half of an fp32, so step x code is exact, and so is what is left of a value afterwards: nothing is lost
between what is sent and what is remembered, and no processor rounds otherwise than another.
A block with a NaN or an infinity comes out as NaN, whole, and what was remembered of it stays as it was.

Each pass reads memory once and writes it once. On the CPU the passes are in C (_quantize.c); where that was not built, and on a
GPU, torch computes the same bits here.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    from rankloom.comm import _quantize  # type: ignore[attr-defined]
except ImportError:   # there was no compiler when this was installed
    _quantize = None

NATIVE = _quantize is not None
HEAD = 2             # bytes of the step
TINY = 2.0**-118     # below, one over the step would overflow: such a block is sent as zeros
LANES = 16           # partial sums of the mean magnitude: their order is part of the format
INFINITE, MAGNITUDE = 0x7F800000, 0x7FFFFFFF   # of the bits of an fp32


@dataclass(frozen=True, slots=True)
class Format:
    """How a block of fp32 values travels."""

    name: str
    bits: int
    block: int   # values

    @property
    def record(self) -> int:
        """Bytes of a block."""
        return HEAD + self.block * self.bits // 8

    def blocks(self, n: int) -> int:
        """How many blocks n values make; the last is filled up with zeros."""
        return -(-n // self.block)


INT8, INT4, ONE_BIT = Format("int8", 8, 256), Format("int4", 4, 128), Format("1bit", 1, 256)


def quantise(x: Tensor, error: Tensor | None, form: Format, out: Tensor) -> None:
    """Write `x + error` to `out` in blocks; `error` becomes what they do not say.

    x, error: [n] fp32; no error: nothing is remembered
    out:      uint8 [blocks, record]
    """
    if NATIVE and x.device.type == "cpu":
        _quantize.quantise(form.bits, _array(x), _array(error), _array(out))
        return
    wide = _padded(x if error is None else x + error, form)
    left = _encode(wide, form, out)
    if error is not None:
        kept = _padded(error, form)
        error.copy_(torch.where(_finite(out), left, kept).view(-1)[: error.numel()])


def fold(inbox: Tensor, error: Tensor | None, form: Format, out: Tensor) -> None:
    """Sum the blocks of all ranks, in rank order and in fp32, and write the sum + error to `out` in blocks.

    inbox: uint8 [p, blocks, record]   error: [blocks * block] fp32, as in `quantise`   out: uint8 [blocks, record]
    """
    if NATIVE and inbox.device.type == "cpu":
        _quantize.fold(form.bits, _array(inbox), inbox.shape[0], _array(error), _array(out))
        return
    total = torch.zeros(out.shape[0], form.block, device=out.device)
    for records in inbox:
        total += _decode(records, form)
    quantise(total.view(-1), error, form, out)


def dequantise(wire: Tensor, form: Format, x: Tensor) -> None:
    """Overwrite `x` with what the blocks say. wire: uint8 [blocks, record]   x: [n] fp32"""
    if NATIVE and x.device.type == "cpu":
        _quantize.dequantise(form.bits, _array(wire), _array(x))
        return
    x.copy_((_decode(wire, form) + 0.0).view(-1)[: x.numel()])   # no zero is negative, as in C


def _array(x: Tensor | None) -> Any:
    return None if x is None else x.detach().numpy()


# ---------------------------------------------------------------------- the same in torch


def _padded(x: Tensor, form: Format) -> Tensor:
    """[n] -> [blocks, block], zeros at the end."""
    return torch.nn.functional.pad(x, (0, form.blocks(x.numel()) * form.block - x.numel())).view(-1, form.block)


def _encode(v: Tensor, form: Format, out: Tensor) -> Tensor:
    """Write the records of v [blocks, block]; returns what they leave unsaid."""
    if not len(v):
        return v
    step = (_mean_magnitude(v) if form.bits == 1 else _step(v, 2.0 ** (form.bits - 1) - 1))[:, None]
    out[:, :HEAD] = (step.view(torch.int32) >> 16).to(torch.int16).view(torch.uint8)
    if form.bits == 1:
        negative = (v < 0) & step.isfinite()
        out[:, HEAD:] = sum(eighth.to(torch.uint8) << bit for bit, eighth in enumerate(negative.chunk(8, dim=1)))
        return v - torch.where(negative, -step, step)
    per_step = torch.where(step > 0, step.reciprocal(), 0.0)
    codes = torch.where(step.isfinite(), (v * per_step).round() + 0.0, 0.0)   # no zero is negative, as in C
    if form.bits == 8:
        out[:, HEAD:] = codes.to(torch.int8).view(torch.uint8)
    else:
        low, high = (codes + 8.0).to(torch.uint8).chunk(2, dim=1)
        out[:, HEAD:] = low | high << 4
    return v - codes * step


def _decode(records: Tensor, form: Format) -> Tensor:
    """[blocks, record] -> [blocks, block] fp32."""
    step, codes = records[:, :HEAD].contiguous().view(torch.bfloat16).float(), records[:, HEAD:].contiguous()
    if form.bits == 8:
        return codes.view(torch.int8).float() * step
    if form.bits == 4:
        return (torch.cat((codes & 15, codes >> 4), 1).float() - 8.0) * step
    negative = torch.cat([codes >> bit & 1 for bit in range(8)], 1).bool()
    return torch.where(negative, -step, step)


def _step(v: Tensor, levels: float) -> Tensor:
    """The smallest bf16 of which `levels` reach the block's largest magnitude; NaN where a value is not finite."""
    largest = (v.view(torch.int32) & MAGNITUDE).amax(1)
    top = largest.view(torch.float32)
    step = ((top / levels).view(torch.int32) + 0xFFFF & ~0xFFFF).view(torch.float32)
    return torch.where(largest >= INFINITE, torch.nan, torch.where(top < TINY, 0.0, step))


def _mean_magnitude(v: Tensor) -> Tensor:
    """Rounded to bf16; added up in LANES partial sums, then by halves. NaN where it is not finite."""
    lanes = v.new_zeros(len(v), LANES)
    for piece in v.abs().split(LANES, dim=1):
        lanes += piece
    while lanes.shape[1] > 1:
        lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
    mean = (lanes[:, 0] / v.shape[1]).view(torch.int32) + 0x8000 & ~0xFFFF
    return torch.where(lanes[:, 0].isfinite() & (mean < INFINITE), mean.view(torch.float32), torch.nan)


def _finite(records: Tensor) -> Tensor:
    return records[:, :HEAD].contiguous().view(torch.bfloat16).isfinite()
