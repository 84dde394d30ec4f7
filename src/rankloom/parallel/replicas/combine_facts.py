"""Combine small facts of all ranks at the end of a step: in one message, or in two where many flags would make that large."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankloom.world.group import Group

APART = 64 << 10   # bytes that a rank receives for flags in the one message; more take longer on a slow link than a second message


class CombinedFacts(NamedTuple):
    """The facts of all ranks, combined."""

    largest: list[float]     # of each fact
    flags: list[bool]        # set on any rank
    totals: Tensor | None    # summed


def combine_facts(facts: Sequence[float], flags: list[bool], totals: Tensor | None, group: Group) -> CombinedFacts:
    """The largest of each fact over the ranks, which flags are set on any rank, and the sum of the totals (fp64), if there are any.

    By all-gather, not all-reduce: for a message this small only hops count, and it takes half as many. It grows with the ranks, so
    many flags are all-reduced as bytes, in a message of their own.
    sent: 8 (p-1) bytes for each fact, flag and total; but where flags are more than APART, 2 (p-1) / p bytes for each flag
    """
    apart = 8 * len(flags) * group.size > APART   # the same on all ranks
    message = torch.tensor(facts if apart else [*facts, *flags], dtype=torch.float64, device="cpu")
    count = len(message)
    on_cpu = totals is not None and totals.device.type == "cpu"
    if totals is not None and on_cpu:
        message = torch.cat((message, totals))
    gathered = group.all_gather(message, label="used parameters, totals").view(group.size, -1)
    largest = gathered[:, :count].amax(0).tolist()
    found = largest[len(facts):]
    if apart:
        found = group.all_reduce(torch.tensor(flags, dtype=torch.uint8, device="cpu"), "max", label="used parameters").tolist()
    if on_cpu:
        totals = gathered[:, count:].sum(0)
    elif totals is not None:   # copying totals from a GPU would synchronise, so they are summed there, in a message of their own
        totals = group.all_reduce(totals, label="totals")
    return CombinedFacts(largest[:len(facts)], [bool(flag) for flag in found], totals)
