"""A layout that cuts no tensor, for optimizers that look at whole matrices (Muon, Adafactor). Pure arithmetic.

Each tensor is whole on one rank, dealt so that ranks hold and update about equally much. Read shard/layout.py before this file.
"""

from collections.abc import Mapping

import torch

from rankloom.shard.flat import ALIGN, Slot
from rankloom.shard.layout import FlatLayout


def lay_out_matrices(shapes: Mapping[str, torch.Size], itemsize: int, ranks: int) -> FlatLayout:
    """Each tensor whole on one rank, aligned: the longest first, to the rank that has the least so far.

    A rank's tensors lie in the order given, and ties go to the lower rank, so every rank computes the same layout.

    memory: all spans are as long as the longest: at most (ranks - 1) x the longest tensor of padding in all
    source: Graham 1969: the longest span is at most 4/3 of the optimum

    >>> layout = lay_out_matrices({"a": torch.Size([16]), "b": torch.Size([4, 8]), "c": torch.Size([9])}, itemsize=4, ranks=2)
    >>> [(slot.name, slot.start) for slot in layout.slots], layout.span(1)
    ([('b', 0), ('a', 32), ('c', 48)], (32, 64))
    """
    step = max(1, ALIGN // itemsize)
    sizes = {name: -(-shape.numel() // step) * step for name, shape in shapes.items()}
    loads, home = [0] * ranks, dict[str, int]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):   # a stable sort: equal lengths keep their order
        home[name] = loads.index(min(loads))
        loads[home[name]] += sizes[name]
    each = max(loads)
    slots = []
    for rank in range(ranks):
        at = rank * each
        for name in (name for name in shapes if home[name] == rank):
            slots.append(Slot(name, shapes[name], at))
            at += sizes[name]
    return FlatLayout(tuple(slots), ranks * each, ranks, whole_tensors=True)
