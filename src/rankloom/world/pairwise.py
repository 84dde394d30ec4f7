"""All-gather and reduce-scatter as messages between every two ranks, for gloo, whose own do more work than needed.

gloo's all-gather receives in new memory and then copies the result; its reduce-scatter is an all-reduce of which a slice is kept.
Here everything arrives in its final place, or next to what it is added to. Measured with 2 to 8 ranks on one host: all-gathers take
0.2 to 0.75 of gloo's time at every size, reduce-scatters half of it.

sent: n(p-1)/p elements by each rank, in p-1 messages, where n is the whole size: the least possible
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankloom.base.errors import ConfigError, ShapeMismatch
from rankloom.world.transport.operands import completed, expect_tag, is_narrow, untouched
from rankloom.world.transport.router import DeviceRouter

COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
SIZES = 1 << 28
TAG = (1 << 31) - SIZES   # and above: of the messages here. Those of one tag arrive in the order of sending, so a size needs one tag only


def start_gather(pg: dist.ProcessGroup, rank: int, mine: Tensor, slices: Sequence[Tensor]) -> list[Any]:
    """Start to send each rank's `mine` into its slice on every other rank. Returns the works to wait for."""
    if slices[rank].data_ptr() != mine.data_ptr():
        slices[rank].copy_(untouched(mine, slices[rank]))
    return _exchange(pg, rank, [slices[rank]] * len(slices), slices)   # `mine` may overlap a slice that arrives


def start_dealing(pg: dist.ProcessGroup, rank: int, slices: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[Any]:
    """Start to send each slice to its rank; those for this rank arrive in `theirs`, one from each other rank, in rank order."""
    return _exchange(pg, rank, slices, [*theirs[:rank], slices[rank], *theirs[rank:]])


@torch.no_grad()   # `total` may be a parameter
def combine_in_order(op: str, mine: Tensor, theirs: Sequence[Tensor], rank: int, total: Tensor) -> Tensor:
    """Write the sum, or as `op` says, made in rank order, to `total`, maybe `mine`. Same bits on every machine. Overwrites `theirs`."""
    if op == "mean" and is_narrow(mine.dtype):
        mine, *theirs = (piece.float() for piece in (mine, *theirs))
        return total.copy_(combine_in_order(op, mine, theirs, rank, torch.empty_like(mine)))
    combine, mine = COMBINE[op], untouched(mine, total, 0)
    for piece in theirs[1:rank]:
        combine(theirs[0], piece, out=theirs[0])
    combine(theirs[0], mine, out=total)
    for piece in theirs[max(rank, 1):]:
        combine(total, piece, out=total)
    return completed(total, op, len(theirs) + 1)


def is_nccl(pg: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether its tensors on this device go over NCCL. torch raises if asked for the backend of a device that it does not serve."""
    return device.type in {served.type for served in pg._device_types} and pg._get_backend(device).name() == "nccl"


def ignores_tags(pg: dist.ProcessGroup, device: torch.device, peer: int) -> bool:
    """Whether messages between this rank and `peer` go over NCCL: then they arrive in the order of sending, whatever their tags. Both must
    call this, and no other rank."""
    return device.type == "cuda" and (pg.over_nccl(device, peer) if isinstance(pg, DeviceRouter) else is_nccl(pg, device))


def in_order(pg: dist.ProcessGroup | None, device: torch.device, ranks: Sequence[int]) -> bool:
    """Whether that is so of messages between any two of these ranks. Each of them must call this, and no other rank."""
    if pg is None or device.type != "cuda":
        return False
    return pg.in_order(device, ranks) if isinstance(pg, DeviceRouter) else is_nccl(pg, device)


def start_both(pg: dist.ProcessGroup, out: Tensor, into: Tensor, to: int, frm: int, tag: int = 0) -> list[Any]:
    """Start a send and a receive. NCCL gets them as one call: it makes calls in the order of its stream, so opposite sends would wait for
    each other."""
    if not is_nccl(pg, into.device):
        return [pg.recv([into], frm, tag), pg.send([out], to, tag)]
    pg._start_coalescing(out.device)
    pg.recv([into], frm, 0)
    pg.send([out], to, 0)
    work = pg._end_coalescing(out.device)
    return [work] if work is not None else []


def keep(out: Tensor, into: Tensor, where: str) -> None:
    """What a rank sends to itself, which gloo cannot carry. raises: ShapeMismatch"""
    if (out.shape, out.dtype) != (into.shape, into.dtype):
        raise ShapeMismatch(f"{where}: a tensor of shape {tuple(out.shape)} of {out.dtype} is sent to this rank itself, "
                            f"which receives it as {tuple(into.shape)} of {into.dtype}; expected the same")
    into.detach().copy_(out)


def expect_message(peer: int, rank: int, tag: int, where: str, *, any_tag: bool) -> None:
    """any_tag: our own backend carries it. raises: ConfigError for a message that gloo cannot carry, or whose tag this file uses"""
    if any_tag:
        expect_tag(tag, where)
        return
    if not (isinstance(tag, int) and 0 <= tag < TAG):
        raise ConfigError(f"{where}: the tag is {tag!r}; expected a whole number from 0 to {TAG - 1}, where messages go over gloo or NCCL")
    if peer == rank:
        raise ConfigError(f"{where}: a message to this rank itself, which gloo cannot carry; copy the tensor")


def _exchange(pg: dist.ProcessGroup, rank: int, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[Any]:
    """Start all sends and receives, the next rank first, so that not all ranks send to the same one at once."""
    size = len(outgoing)
    after, before = ([(rank + sign * hop) % size for hop in range(1, size)] for sign in (1, -1))
    return ([pg.recv([incoming[peer]], peer, _tag(incoming[peer])) for peer in before]
            + [pg.send([outgoing[peer]], peer, _tag(outgoing[peer])) for peer in after])


def _tag(x: Tensor) -> int:
    """By size: gloo ends the process when a message is longer than what it is received in. So ranks that differ in size wait instead."""
    return TAG + x.nbytes % SIZES
