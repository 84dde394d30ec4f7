"""Where the tensors of a unit lie in its flat buffer, and which elements of that buffer each rank owns. Pure arithmetic.

A buffer of `total` elements is cut into equal spans, one a rank. A span may end inside a tensor. A rank's *slice* of a tensor is
elements [start, stop) of it, flattened, maybe none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from rankloom.shard.flat import ALIGN, Slot, gap_spans, lay_out


@dataclass(frozen=True)
class FlatLayout:
    """Tensors end to end in `total` elements, cut in spans for `ranks` ranks.

    >>> layout = lay_out_evenly({"a": torch.Size([3]), "b": torch.Size([5, 8])}, itemsize=4, ranks=2)
    >>> layout.total, layout.span(1), layout.slice_of("b", 0), layout.slice_of("b", 1)
    (64, (32, 64), (0, 16), (16, 40))
    """

    slots: tuple[Slot, ...]
    total: int
    ranks: int
    whole_tensors: bool = False   # no tensor is cut: each lies in one rank's span

    def span(self, rank: int) -> tuple[int, int]:
        """The elements of the flat buffer that `rank` owns."""
        each = self.total // self.ranks
        return rank * each, (rank + 1) * each

    @cached_property
    def _by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.slots}

    def slot(self, name: str) -> Slot:
        """Where the tensor `name` lies."""
        return self._by_name[name]

    def gaps(self) -> list[tuple[int, int]]:
        """The elements of the flat buffer that belong to no tensor."""
        return gap_spans(self.slots, self.total)

    def slice_of(self, name: str, rank: int) -> tuple[int, int]:
        """The elements of the tensor `name`, flattened, that `rank` owns; (0, 0) where it has none."""
        slot, (start, stop) = self.slot(name), self.span(rank)
        first, last = max(start, slot.start), min(stop, slot.end)
        return (first - slot.start, last - slot.start) if first < last else (0, 0)


def lay_out_evenly(shapes: Mapping[str, torch.Size], itemsize: int, ranks: int) -> FlatLayout:
    """Tensors in the order given, each aligned; spans end at multiples of 64 bytes.

    Alignment is for equal bits, not only for speed. A vector kernel treats a tensor's last few elements apart; a slice that ends with a
    full vector is updated to the same bits as the whole.
    memory: less than 64 bytes of padding for each tensor and each rank
    """
    slots, end = lay_out(shapes, itemsize)
    step = ranks * max(1, ALIGN // itemsize)
    return FlatLayout(tuple(slots), -(-end // step) * step, ranks)
