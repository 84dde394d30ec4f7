"""Agree on small facts at the end of a step, in one message."""

import torch
from torch import Tensor

from rankloom.world.group import Group


def max_of_flags_and_sum(facts: list[float], totals: Tensor | None, group: Group) -> tuple[list[float], Tensor | None]:
    """The largest of each fact over the ranks, and the sum of the totals (fp64), if there are any.

    By all-gather, not all-reduce: for a message this small only hops count, and it takes half as many.
    """
    message = torch.tensor(facts, dtype=torch.float64)
    on_cpu = totals is not None and totals.device.type == "cpu"
    if totals is not None and on_cpu:
        message = torch.cat((message, totals))
    gathered = group.all_gather(message, label="used parameters, totals").view(group.size, -1)
    largest = gathered[:, : len(facts)].amax(0).tolist()
    if totals is None or on_cpu:
        return largest, None if totals is None else gathered[:, len(facts):].sum(0)
    # Copying totals from a GPU would synchronise, so they are summed there, in a message of their own.
    return largest, group.all_reduce(totals, label="totals")
