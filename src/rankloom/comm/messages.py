"""All-to-all and all-gather from messages that start at once; the caller waits for them later.

On a slow link such messages reach the full rate in both directions; gloo's own all-to-all and all-gather reach 70 to 85 % of it.
On a GPU this calls the backend's own collectives, since messages are no faster. world/pairwise.py does the same below `Group`, for
gloo's gathers and reduce-scatters; here each message has a label and is counted in the ledger.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rankloom.world.group import Group

TAG = 1 << 30   # of all messages of this folder (and the next, of the second of two trees): a `recv` of the user's would get one of tag 0

Arrival = Callable[[], Tensor]
"""Waits, and returns what has arrived: a sum, or of the functions here [p, ...], in rank order."""


def start_all_to_all(x: Tensor, group: Group, *, label: str) -> Arrival:
    """Start sending x[r] to each rank r. x: [p, ...]   sent: p-1 messages, (p-1)/p of x"""
    if group.device.type != "cpu":
        return group.all_to_all(x, label=label, async_op=True).wait
    inbox = torch.empty_like(x)
    inbox[group.rank] = x[group.rank]
    arrived = post(x.unbind(), inbox.unbind(), group, label=label)
    return lambda: arrived() or inbox


def start_all_gather(x: Tensor, group: Group, *, label: str) -> Arrival:
    """Start sending x to every rank. x: [...]   sent: p-1 messages, (p-1) times x"""
    if group.device.type != "cpu":
        gathered = group.all_gather(x, label=label, async_op=True)
        return lambda: gathered.wait().view(group.size, *x.shape)
    inbox = x.new_empty(group.size, *x.shape)
    inbox[group.rank] = x
    arrived = post([x] * group.size, inbox.unbind(), group, label=label)
    return lambda: arrived() or inbox


def post(out: Sequence[Tensor], into: Sequence[Tensor], group: Group, *, label: str) -> Callable[[], None]:
    """Start sending out[r] to each other rank r, and receiving into[r] from it. Empty tensors are not sent. Call the result to wait.

    Any two ranks must make their calls in the same order. Not over NCCL.
    """
    others = [(group.rank + hop) % group.size for hop in range(1, group.size)]
    under_way = [group.recv(into[rank], rank, tag=TAG, label=label, async_op=True) for rank in others if into[rank].numel()]
    under_way += [group.send(out[rank], rank, tag=TAG, label=label, async_op=True) for rank in others if out[rank].numel()]

    def arrived() -> None:
        for handle in under_way:
            handle.wait()

    return arrived
