"""Ring attention: keys and values travel once around the ranks, and each rank merges what its queries see of every block.

While a rank computes with one block, the next is on its way. Backward the blocks travel again, and their gradients behind them.
Read sequences.py (which rank owns what) and tiles.py (the arithmetic) before this file.

source: Liu, Zaharia & Abbeel 2023
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rankloom.base.cost import Bill
from rankloom.base.tensors import at_least_fp32
from rankloom.parallel.context.rows import CutRows
from rankloom.parallel.context.tiles import SavedTile, merge, tile_backward, tile_forward
from rankloom.world.group import Handle


def ring_attention(query: Tensor, key: Tensor, value: Tensor, context: CutRows) -> Tensor:
    """Attention with keys and values passed around a ring, and its own backward.

    query: [B, H, T/p, D], key and value: [B, K, T/p, D] -> [B, H, T/p, D]
    sent:  p-1 messages with the keys and values of p-1 ranks; backward the same again, and p-1 with gradients, in fp32 at least
    memory: two blocks of keys and values at a time, backward two of gradients too, and one tile
    source: Liu, Zaharia & Abbeel 2023
    """
    out: Tensor = _RingAttention.apply(query, key, value, context)   # type: ignore[no-untyped-call]
    return out


def ring_attention_bill(tokens: Sequence[int], token_bytes: int, rank: int) -> Bill:
    """What `rank` sends forward. tokens: of each rank; token_bytes: of the keys and values of one token, in all rows."""
    p = len(tokens)
    return Bill(sum(tokens[(rank - hop) % p] for hop in range(p - 1)) * token_bytes, p - 1)


def ring_attention_backward_bill(tokens: Sequence[int], token_bytes: int, rank: int, *, wide: int = 1) -> Bill:
    """What `rank` sends backward. wide: bytes of a gradient element over those of a key, 2 for 16-bit attention"""
    p = len(tokens)
    gradients = sum(tokens[(rank - hop) % p] for hop in range(1, p)) * token_bytes * wide
    return ring_attention_bill(tokens, token_bytes, rank) + Bill(gradients, p - 1)


def _shift(block: Tensor, context: CutRows, owner: int, label: str, tag: int) -> Handle:
    """Start to pass a block to the right, and to receive the one of rank `owner` from the left."""
    group = context.group
    into = block.new_empty((*block.shape[:3], context.tokens[owner], block.shape[4]))
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return group.exchange(block, right, into, left, tag=tag, label=label, async_op=True)   # type: ignore[no-any-return]


def _around(block: Tensor, context: CutRows, label: str) -> Iterator[tuple[int, Tensor]]:
    """This rank's block, then those of the ranks to its left, nearest first, each with its owner.

    While the caller computes with a block, it is passed on and the next one arrives.
    """
    rank, p = context.group.rank, context.group.size
    for hop in range(p):
        following = _shift(block, context, (rank - hop - 1) % p, label, tag=0) if hop < p - 1 else None
        yield (rank - hop) % p, block
        block = following.wait() if following else block


def _send_home(gradients: Tensor, context: CutRows, owner: int) -> Tensor:
    """Pass the gradients of a block on; returns those of the tokens of rank `owner`."""
    return _shift(gradients, context, owner, "gradients of keys and values", tag=1).wait()


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, context: CutRows) -> Tensor:
        out = torch.zeros_like(query, dtype=at_least_fp32(query.dtype))
        lse = torch.full(query.shape[:3], -torch.inf, dtype=out.dtype, device=query.device)
        for owner, block in _around(torch.stack((key, value)), context, "keys and values"):
            for tile in context.tiles[owner]:
                queries = (tile.rows, slice(None), tile.query)
                keys, values = block[:, tile.rows, :, tile.key]
                part = tile_forward(query[queries], keys, values, tile.causal)
                merge(out[queries], lse[queries], *part)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.context = context
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        context: CutRows = ctx.context
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()   # the gradient of a plain sum has stride 0, which GPU kernels refuse
        of_query = torch.zeros_like(query, dtype=lse.dtype)
        own, travelling = None, None
        for owner, block in _around(torch.stack((key, value)), context, "keys and values, again"):
            # A block's gradients start at the owner's right neighbour and come home last, so the owner's own share never travels.
            of_block = torch.zeros_like(block, dtype=lse.dtype) if travelling is None else _send_home(travelling, context, owner)
            for tile in context.tiles[owner]:
                queries = (tile.rows, slice(None), tile.query)
                keys, values = block[:, tile.rows, :, tile.key]
                saved = SavedTile(query[queries], keys, values, out[queries], lse[queries])
                share = tile_backward(grad[queries], saved, tile.causal)
                of_query[queries] += share.query
                of_block[:, tile.rows, :, tile.key] += torch.stack((share.key, share.value))
            own, travelling = (of_block, None) if own is None else (own, of_block)
        assert own is not None, "a ring has at least this rank"
        if travelling is not None:
            own += _send_home(travelling, context, context.group.rank)
        of_key, of_value = own.to(key.dtype)
        return of_query.to(query.dtype), of_key, of_value, None
