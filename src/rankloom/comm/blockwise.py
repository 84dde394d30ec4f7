"""All-reduce of quantised blocks in two rounds: it rounds a value exactly twice, on any number of ranks.

    1. cut the buffer in p chunks, quantise them, send chunk r to rank r          all-to-all
    2. add the p versions of this rank's chunk in fp32, quantise the sum          all-gather, then dequantise

All ranks dequantise the same records, the owner of a chunk too, so all end with the same bits. The buffer goes in pieces: while
some travel, the next is quantised and an earlier one dequantised. The errors of both rounds are kept for the next step.

Read comm/quantize.py and comm/lossy.py first.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rankloom.base.cost import Bill
from rankloom.comm.lossy import LABEL, Compressed
from rankloom.comm.messages import start_all_gather, start_all_to_all
from rankloom.comm.quantize import Format
from rankloom.world.group import Group

PIECE_BYTES = 1 << 19   # of records: on a link of 1 Gbit/s, smaller ones wait for wake-ups, larger ones overlap less
ENDED = object()


class Blockwise(Compressed):
    """The all-reduce of this file, in one format.

    piece:  values sent together; left out, as many as make PIECE_BYTES of records
    sent:   2(p-1) messages for each piece; 2(p-1) records for every p blocks, the last ones rounded up
    memory: n + n/p fp32 errors; during the all-reduce, five pieces in the format
    source: Seide et al. 2014 (error feedback); Tang et al. 2021, 1-bit Adam (in both rounds); Wang et al. 2023, ZeRO++ (all-to-all)
    """

    def __init__(self, form: Format, piece: int | None = None):
        super().__init__()
        self.form, self._piece = form, piece or PIECE_BYTES // form.record * form.block
        self._own = self._sums = torch.empty(0, device="cpu")   # the errors: see `remember`

    def _sum(self, values: Tensor, group: Group) -> None:
        self.remember(len(values), group)
        step = self.values_in_piece(group.size)
        staggered([self.stages(at, values[at : at + step], group) for at in range(0, len(values), step)])

    def remember(self, n: int, group: Group) -> None:
        """On the first call, allocate the errors of this rank's n values, and those of the sums of its chunks, piece by piece."""
        if not len(self._own):
            chunk = group.size * self.form.block
            self._own = torch.zeros(n, dtype=torch.float32, device=group.device)
            self._sums = torch.zeros(-(-n // chunk) * self.form.block, dtype=torch.float32, device=group.device)

    def stages(self, at: int, x: Tensor, group: Group) -> Iterator[None]:
        """Sum the piece that begins at value `at`, in three stages. Each of the first two starts messages that the next waits for."""
        p, form = group.size, self.form
        blocks = -(-len(x) // form.block)
        each = -(-blocks // p)   # blocks of one rank
        mine = min(max(len(x) - group.rank * each * form.block, 0), each * form.block)   # values that this rank adds
        own, sums = self._own[at : at + len(x)], self._sums[at // p :][:mine]
        records = x.new_empty(p * each, form.record, dtype=torch.uint8)
        records[blocks:] = 0   # padding: no rank reads it, but uninitialised memory must not be sent
        form.quantise(x, own, records[:blocks])
        dealt = start_all_to_all(records.view(p, each, form.record), group, label=LABEL)
        yield
        summed = torch.empty_like(records[:each])
        summed[-(-mine // form.block) :] = 0   # likewise
        form.fold(dealt(), sums, summed)
        gathered = start_all_gather(summed, group, label=LABEL)
        yield
        form.dequantise(gathered().view(p * each, form.record)[:blocks], x)

    def values_in_piece(self, p: int) -> int:
        """A number that cuts every piece but the last in chunks of whole blocks."""
        return max(1, self._piece // (p * self.form.block)) * p * self.form.block

    def held(self) -> int:
        """Bytes kept between steps."""
        return self._own.nbytes + self._sums.nbytes

    def rescale(self, factor: float) -> None:
        """Multiply the errors."""
        self._own.mul_(factor)
        self._sums.mul_(factor)

    def bill(self, n: int, group: Group) -> Bill:
        """What this rank of `group` sends for n values."""
        return self.bill_for(n, group.size)

    def bill_for(self, n: int, p: int) -> Bill:
        """What one of p ranks sends for n values."""
        records = -(-n // (p * self.form.block))   # of one rank
        return Bill(sent=2 * (p - 1) * records * self.form.record, messages=2 * (p - 1) * -(-n // self.values_in_piece(p)))


def staggered(pieces: Sequence[Iterator[None]]) -> None:
    """Run all pieces to their ends, each two turns behind the one before. So all ranks start their messages in one order."""
    waiting, running = list(pieces), list[Iterator[None]]()
    while waiting or running:
        if waiting:
            running.insert(0, _every_other_turn(waiting.pop(0)))
        running = [piece for piece in running if next(piece, ENDED) is not ENDED]


def _every_other_turn(stages: Iterator[None]) -> Iterator[None]:
    """Leave a turn between two stages, in which the messages of the first can arrive."""
    for _ in stages:
        yield
        yield
