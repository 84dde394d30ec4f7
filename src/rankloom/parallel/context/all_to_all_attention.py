"""All-to-all attention (Ulysses): ranks trade their tokens of all heads for all tokens of some heads, attend alone, and trade back.

source: Jacobs et al. 2023
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rankloom.base.cost import Bill
from rankloom.base.errors import ConfigError
from rankloom.parallel.all_to_all import deal_rows
from rankloom.parallel.context.ring_attention import ring_attention
from rankloom.parallel.context.rows import CutRows
from rankloom.parallel.context.sequences import cut_sequence


def all_to_all_attention(query: Tensor, key: Tensor, value: Tensor, context: CutRows) -> Tensor:
    """Attention in which each rank computes all tokens of some heads.

    query: [B, H, T/p, D], key and value: [B, K, T/p, D] -> [B, H, T/p, D]; p need not divide H, and may be more than K
    sent:  4(p-1) messages, see `all_to_all_attention_bill`; the same backward
    raises: ConfigError when there are more ranks than query heads
    source: Jacobs et al. 2023
    """
    group, heads, shared = context.group, query.shape[1], query.shape[1] // key.shape[1]
    if group.size > heads:
        raise ConfigError(f"{group.where('all_to_all attention')}: {heads} query heads cannot be dealt to {group.size} ranks; "
                          "use kind='ring', or fewer context ranks")
    askers, asked = deal_heads(heads, key.shape[1], group.size)
    query, key, value = (_tokens_for_heads(x, wanted, context) for x, wanted in ((query, askers), (key, asked), (value, asked)))
    mine = [head // shared - asked[group.rank].start for head in askers[group.rank]]
    if len(mine) % key.shape[1] or mine != [i * key.shape[1] // len(mine) for i in range(len(mine))]:
        # Kernels want equally many query heads for each key-value head. The cut has left this rank an unequal number, so it gives every
        # query head a copy of its own.
        key, value = (torch.stack([heads[head] for head in mine], dim=1) for heads in (key.unbind(1), value.unbind(1)))
    return _heads_for_tokens(ring_attention(query, key, value, context.alone), askers, context)   # p = 1: plain attention over the tiles


def deal_heads(heads: int, kv_heads: int, ranks: int) -> tuple[tuple[range, ...], tuple[range, ...]]:
    """The query heads of each rank, and the key-value heads that they read; ranks may share some of these.

    >>> deal_heads(heads=6, kv_heads=2, ranks=4)[1]
    (range(0, 1), range(0, 2), range(1, 2), range(1, 2))
    """
    askers = tuple(span for (span,) in cut_sequence(heads, ranks, zigzag=False))
    shared = heads // kv_heads
    return askers, tuple(range(own.start // shared, (own.stop - 1) // shared + 1) for own in askers)


def all_to_all_attention_bill(tokens: Sequence[int], heads: int, kv_heads: int, head_bytes: int, rank: int) -> Bill:
    """What `rank` sends forward: queries, keys and values of its tokens, then its heads' results for the tokens of others.

    tokens: of each rank; head_bytes: of one head of one token, in all rows
    """
    askers, asked = deal_heads(heads, kv_heads, len(tokens))
    others = [other for other in range(len(tokens)) if other != rank]
    there = sum(len(askers[other]) + 2 * len(asked[other]) for other in others) * tokens[rank]
    back = sum(tokens[other] for other in others) * len(askers[rank])
    return Bill((there + back) * head_bytes, 4 * len(others))


def _tokens_for_heads(x: Tensor, wanted: Sequence[range], context: CutRows) -> Tensor:
    """[B, all heads, own tokens, D] -> [B, own heads, all tokens, D]; rank r wants the heads wanted[r]."""
    rank, tokens = context.group.rank, context.tokens
    heads = x.permute(1, 2, 0, 3).unbind()   # not by an index list: copying it to the device would synchronise
    rows = torch.stack([heads[head] for span in wanted for head in span]).flatten(0, 1)
    received = [len(wanted[rank]) * there for there in tokens]
    dealt = deal_rows(rows, context.group, [len(span) * tokens[rank] for span in wanted], received, "tokens for heads")
    blocks = [block.unflatten(0, (len(wanted[rank]), -1)) for block in dealt.split(received)]
    return torch.cat(blocks, dim=1).permute(2, 0, 1, 3)


def _heads_for_tokens(x: Tensor, owned: Sequence[range], context: CutRows) -> Tensor:
    """[B, own heads, all tokens, D] -> [B, all heads, own tokens, D]; rank r sends the heads owned[r]."""
    rank, tokens = context.group.rank, context.tokens
    rows = torch.cat([block.flatten(0, 1) for block in x.permute(1, 2, 0, 3).split(tokens, dim=1)])
    received = [len(heads) * tokens[rank] for heads in owned]
    dealt = deal_rows(rows, context.group, [len(owned[rank]) * there for there in tokens], received, "heads for tokens")
    return torch.cat([block.unflatten(0, (-1, tokens[rank])) for block in dealt.split(received)]).permute(2, 0, 1, 3)
