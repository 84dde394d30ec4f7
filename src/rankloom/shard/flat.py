"""Named tensors laid end to end in one contiguous buffer, and lists of tensors cut into buckets.

A collective wants one contiguous range of memory; a model has hundreds of tensors. Tensors that are views of one buffer need no copy
before or after a collective. Pure arithmetic first, then the buffer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rankloom.base.tensors import keep_until_read

ALIGN = 64   # bytes. On views that do not start at a cache line, matrix kernels are slower and may round differently.


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lives inside a flat buffer: elements [start, end). strides: within them; None: those of a contiguous tensor"""

    name: str
    shape: torch.Size
    start: int
    strides: tuple[int, ...] | None = None

    @property
    def end(self) -> int:
        """One past its last element."""
        return self.start + self.shape.numel()

    @property
    def shape_in_memory(self) -> torch.Size:
        """The shape with its dims in the order in which they lie in memory, the one with the largest strides first."""
        outermost = sorted(zip(self.strides or (), self.shape), key=lambda dim: -dim[0])
        return self.shape if self.strides is None else torch.Size(size for _, size in outermost)

    def view(self, flat: Tensor) -> Tensor:
        """The tensor that lies here in `flat`."""
        here = flat[self.start : self.end]
        return here.view(self.shape) if self.strides is None else here.as_strided(self.shape, self.strides)


def lay_out(shapes: Mapping[str, torch.Size], itemsize: int) -> tuple[list[Slot], int]:
    """Slots for tensors laid end to end, each aligned, and the elements of the whole buffer.

    >>> slots, total = lay_out({"a": torch.Size([3]), "b": torch.Size([2, 16])}, itemsize=4)
    >>> [(s.start, s.end) for s in slots], total
    ([(0, 3), (16, 48)], 48)
    """
    step = max(1, ALIGN // itemsize)
    slots, end = [], 0
    for name, shape in shapes.items():
        slots.append(Slot(name, shape, -(-end // step) * step))
        end = slots[-1].end
    return slots, -(-end // step) * step


def cut_into_buckets(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut in runs of at most `limit` bytes; a larger tensor is a bucket of its own.

    >>> cut_into_buckets({"a": 3, "b": 3, "c": 9, "d": 1}, limit=6)
    [['a', 'b'], ['c'], ['d']]
    """
    buckets: list[list[str]] = []
    held = limit + 1
    for name, size in sizes.items():
        if held + size > limit:
            buckets.append([])
            held = 0
        buckets[-1].append(name)
        held += size
    return buckets


class FlatBuffer:
    """One contiguous tensor and a view of it for each name, with the strides of the tensor of that name. Gaps between views stay zero.

    Strides are kept because the optimizer's state has them, and fused kernels pair up elements by their place in memory.
    memory: the tensors' bytes, plus less than 64 each
    """

    def __init__(self, like: Mapping[str, Tensor]):
        first = next(iter(like.values()))
        slots, total = lay_out({name: t.shape for name, t in like.items()}, first.itemsize)
        self.slots = [replace(slot, strides=kept_strides(like[slot.name])) for slot in slots]
        self.flat = torch.zeros(total, dtype=first.dtype, device=first.device)
        self.views = views_of(self.flat, self.slots)


def views_of(flat: Tensor, slots: Sequence[Slot]) -> dict[str, Tensor]:
    """The tensors that lie in `flat`, by name."""
    return {slot.name: slot.view(flat) for slot in slots}


def kept_strides(tensor: Tensor) -> tuple[int, ...] | None:
    """The strides of a copy of the tensor: its own where it fills its memory, as one in channels_last does. None: it is contiguous."""
    return None if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def gap_spans(slots: Sequence[Slot], total: int) -> list[tuple[int, int]]:
    """Where the padding between the slots begins and ends, and that after the last, in a buffer of `total` elements."""
    starts = [slot.start for slot in slots[1:]] + [total]
    return [(slot.end, start) for slot, start in zip(slots, starts) if slot.end < start]


def gaps_of(flat: Tensor, slots: Sequence[Slot]) -> list[Tensor]:
    """The padding between the slots, and after the last."""
    return [flat[start:end] for start, end in gap_spans(slots, flat.numel())]


def move_into(buffer: FlatBuffer, tensors: Mapping[str, Tensor]) -> None:
    """Copy each tensor into its view, and make it that view. Its old memory is freed unless something else holds it."""
    for name, tensor in tensors.items():
        buffer.views[name].copy_(tensor.detach())
        keep_until_read(tensor)
        tensor.data = buffer.views[name]


def by_dtype(tensors: Mapping[str, Tensor], names: Sequence[str]) -> list[dict[str, Tensor]]:
    """The tensors in the order of `names`, grouped by (dtype, device): a flat buffer has one of each."""
    groups: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name in names:
        groups.setdefault((tensors[name].dtype, tensors[name].device), {})[name] = tensors[name]
    return list(groups.values())
