"""Reduce-scatter of quantised blocks: the first half of comm/blockwise.py, which rounds a value once.

    1. quantise the slices of the other ranks, and send each to its rank     all-to-all
    2. add the others' versions of this rank's slice to its own, in fp32

This rank's own term is added as it is. The buffer goes in pieces: while one travels, the next is quantised. Each rank keeps the errors
of what it sent for the next step. Read comm/quantize.py and comm/lossy.py first.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rankloom.base.cost import Bill
from rankloom.base.errors import ShapeMismatch
from rankloom.comm.blockwise import PIECE_BYTES, staggered
from rankloom.comm.messages import start_all_to_all
from rankloom.comm.quantize import Format
from rankloom.world.group import Group

LABEL = "compressed reduce-scatter"


class CompressedScatter:
    """The reduce-scatter of one buffer, in one format, with the buffer's errors.

    piece:  values of a slice that are sent together; left out, as many as make PIECE_BYTES of records for all ranks
    sent:   p-1 messages for each piece; a record for each block of another rank's slice, the last ones of a piece rounded up
    memory: n(p-1)/p fp32 errors; during the call, two pieces in the format
    source: Wang et al. 2023, ZeRO++ (quantised gradients by all-to-all); Seide et al. 2014 (error feedback)
    """

    def __init__(self, form: Format, piece: int | None = None):
        self.form, self._piece = form, piece
        self._errors: Tensor | None = None   # [p - 1, n / p], of the other ranks' slices, in rank order

    def __call__(self, x: Tensor, out: Tensor, group: Group) -> Tensor:
        """Write this rank's slice of the sum of `x` over the group to `out`, up to the errors; returns `out`.

        x: floating, contiguous, [n]; unchanged, but `out` may be this rank's slice of it   out: [n / p]
        raises: ShapeMismatch when the sizes do not fit each other, or differ from those of the first call
        """
        p, each = group.size, out.numel()
        errors = self._errors
        if x.numel() != p * each or (errors is not None and errors.shape != (p - 1, each)):
            known = "" if errors is None else f"; it remembers errors of {errors.shape[1]} values for each of {errors.shape[0]} others"
            raise ShapeMismatch(f"{group.where(LABEL)}: {x.numel()} values cannot be dealt to {p} ranks as {each} each{known}")
        if errors is None:
            errors = self._errors = torch.zeros(p - 1, each, dtype=torch.float32, device=x.device)
        slices = x.float().view(p, each)   # no copy where it is fp32
        total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        step = self.values_in_piece(p)
        pieces = [slice(at, at + step) for at in range(0, each, step)]
        staggered([self._stages(slices[:, piece], errors[:, piece], total[piece], group) for piece in pieces])
        return out if total is out else out.copy_(total)

    def _stages(self, x: Tensor, errors: Tensor, total: Tensor, group: Group) -> Iterator[None]:
        """Sum one piece of every slice. x: [p, values]   errors: [p - 1, values]   total: [values]"""
        form = self.form
        others = [rank for rank in range(group.size) if rank != group.rank]
        records = x.new_zeros(group.size, -(-x.shape[1] // form.block), form.record, dtype=torch.uint8)
        for rank, error in zip(others, errors):
            form.quantise(x[rank], error, records[rank])
        dealt = start_all_to_all(records, group, label=LABEL)
        yield
        inbox, term = dealt(), torch.empty_like(total)
        total.copy_(x[group.rank])
        for rank in others:
            form.dequantise(inbox[rank], term)
            total.add_(term)

    def values_in_piece(self, p: int) -> int:
        """How many of each slice: whole blocks."""
        return self._piece or max(1, PIECE_BYTES // (p * self.form.record)) * self.form.block

    def held(self) -> int:
        """Bytes kept between steps."""
        return 0 if self._errors is None else self._errors.nbytes

    def rescale(self, factor: float) -> None:
        """Multiply the errors."""
        if self._errors is not None:
            self._errors.mul_(factor)

    def bill(self, n: int, p: int) -> Bill:
        """What one of p ranks sends for n values in all."""
        each, step = n // p, self.values_in_piece(p)
        records = sum(-(-min(step, each - at) // self.form.block) for at in range(0, each, step))
        return Bill(sent=(p - 1) * records * self.form.record, messages=(p - 1) * -(-each // step))
