"""Gather weights in eight bits: half the bytes of bf16. Matrix products use the gathered bytes as they are.

Every rank casts its own slice, with the scale of the whole weight. So once after each update the ranks agree on the largest magnitudes,
in one message of one number a weight. The gathered bytes are then bit for bit those of casting the gathered weights. Scales by row
would not do: backward needs scales by column too.

    after an update:  amaxes = own_amaxes(own, ...); group.all_reduce(amaxes, "max"); encode_slice(own, ..., amaxes, out)
    each gather:      group.all_gather(out, out=whole)              bytes, 1 for each element
                      weights = decode(whole, layout, amaxes)          views: they show what is gathered later

Read base/float8.py and shard/layout.py first. All of it is arithmetic on one rank; the unit sends the messages.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rankloom.base.float8 import E4M3, Float8, apart, magnitudes, rounded, scales_of
from rankloom.shard.layout import FlatLayout


@torch.no_grad()
def own_amaxes(own: Tensor, layout: FlatLayout, rank: int) -> Tensor:
    """The largest magnitude of this rank's elements of each weight, 0 where it owns none.

    own: [slice], in the dtype in which an unsharded model holds its weights   returns: fp32 [weights], in the order of the layout
    """
    slices = dict(_own_slices(own, layout, rank))
    found = dict(zip(slices, magnitudes(list(slices.values())))) if slices else {}
    none = torch.zeros((), dtype=torch.float32, device=own.device)
    return torch.stack([found.get(at, none) for at in range(len(layout.slots))])


@torch.no_grad()
def encode_slice(own: Tensor, layout: FlatLayout, rank: int, amaxes: Tensor, out: Tensor) -> None:
    """Write this rank's slice to `out` in E4M3, each weight scaled by its amax over all ranks.

    own: [slice], as in `own_amaxes`   amaxes: fp32 [weights], of the whole weights   out: uint8 [slice]; gaps become zeros
    """
    out.zero_()
    into, inverse = out.view(E4M3), scales_of(amaxes, E4M3).inverse
    for (at, values), (_, room) in zip(_own_slices(own, layout, rank), _own_slices(into, layout, rank), strict=True):
        room.copy_(rounded(values, E4M3, inverse[at]))


def decode(whole: Tensor, layout: FlatLayout, amaxes: Tensor) -> dict[str, Float8]:
    """The gathered weights by name, as views of `whole`, with scales of their own.

    whole: uint8 [total]   amaxes: fp32 [weights]
    """
    values, scales = whole.view(E4M3), apart(scales_of(amaxes, E4M3).scale)
    return {slot.name: Float8(values[slot.start : slot.end].view(slot.shape), scale) for slot, scale in zip(layout.slots, scales)}


def _own_slices(own: Tensor, layout: FlatLayout, rank: int) -> Iterator[tuple[int, Tensor]]:
    """The weights that lie in a rank's slice: (number of the weight, its part of `own`)."""
    begin, _ = layout.span(rank)
    for at, slot in enumerate(layout.slots):
        first, last = layout.slice_of(slot.name, rank)
        if first < last:
            yield at, own[slot.start + first - begin : slot.start + last - begin]
