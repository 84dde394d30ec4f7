"""The comparison of debug mode: do ranks hold what the layout of a tensor says? debug.py decides when to ask."""

import torch
from torch import Tensor

from rankloom.base.errors import CollectiveMismatch
from rankloom.base.layout import Layout
from rankloom.world.group import Group


@torch.no_grad()
def expect_alike(x: Tensor, layout: Layout, group: Group, label: str) -> None:
    """In debug mode: raise CollectiveMismatch, on all ranks, when `x` differs between ranks although `layout` is whole.

    All bits are compared, NaN too; of a cut or partial tensor, only the shape. Batches or dropout that differ between tensor ranks show
    here, at the first layer that they reach.   sent: one number to each other rank
    """
    if not group.debug or group.size == 1:
        return
    alike = not layout.partial and not any(layout.cut)
    mine = torch.tensor([x.dim(), *x.shape], device=x.device)
    if alike:
        mine = torch.cat((mine, bits(x)))
    everyone = group.all_gather(fingerprint(mine)[None], label=f"{label}: compare")
    if differs := [rank for rank, theirs in zip(group.ranks, everyone) if theirs != everyone[0]]:
        raise CollectiveMismatch(f"{group.where(label)}: a tensor of shape {tuple(x.shape)} is laid out as {layout}, "
                                 + ("alike on all ranks, " if alike else "of one shape on all ranks, ") +
                                 f"but ranks {differs} hold another than rank {group.ranks[0]}. Do all get the same batch, and draw the "
                                 "same dropout?")


def bits(x: Tensor) -> Tensor:
    """The bits of each element as an integer [n]."""
    flat = x.resolve_conj().resolve_neg().contiguous().flatten()
    return flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}.get(x.element_size(), torch.uint8)).long()


def fingerprint(numbers: Tensor) -> Tensor:
    """One number for many integers [n] in their order: the sum of a hash of each and its position. source: Steele et al. 2014"""
    stirred = numbers + torch.arange(1, len(numbers) + 1, device=numbers.device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        stirred = (stirred ^ (stirred >> shift)) * factor
    return (stirred ^ (stirred >> 31)).sum()
