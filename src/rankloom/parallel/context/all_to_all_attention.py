"""All-to-all attention (Ulysses): ranks trade their tokens of all heads for all tokens of some heads, attend alone, and trade back.

source: Jacobs et al. 2023
"""

from collections.abc import Sequence
from typing import NamedTuple

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
    group, heads, kv_heads = context.group, query.shape[1], key.shape[1]
    if group.size > heads:
        raise ConfigError(f"{group.where('all_to_all attention')}: {heads} query heads cannot be dealt to {group.size} ranks; "
                          "use kind='ring', or fewer context ranks")
    dealt = deal_heads(heads, kv_heads, group.size)
    query = _tokens_for_heads(query, dealt.query, context)
    key = _tokens_for_heads(key, dealt.key_value, context)
    value = _tokens_for_heads(value, dealt.key_value, context)
    first = dealt.key_value[group.rank].start
    reads = [head // (heads // kv_heads) - first for head in dealt.query[group.rank]]   # which key-value head here each query head reads
    if len(reads) % key.shape[1] or reads != [i * key.shape[1] // len(reads) for i in range(len(reads))]:
        # Kernels want equally many query heads for each key-value head. The cut has left this rank an unequal number, so it gives every
        # query head a copy of its own.
        key, value = _chosen_heads(key, reads), _chosen_heads(value, reads)
    out = ring_attention(query, key, value, context.alone)   # p = 1: plain attention over the tiles
    return _heads_for_tokens(out, dealt.query, context)


class DealtHeads(NamedTuple):
    """The heads of each rank: those of queries, and those of keys and values that they read. Ranks may share some of the latter."""

    query: tuple[range, ...]
    key_value: tuple[range, ...]


def deal_heads(heads: int, kv_heads: int, ranks: int) -> DealtHeads:
    """Query heads in runs, as equally many for each rank as they divide, and the key-value heads that each run reads.

    >>> deal_heads(heads=6, kv_heads=2, ranks=4).key_value
    (range(0, 1), range(0, 2), range(1, 2), range(1, 2))
    """
    query = tuple(span for (span,) in cut_sequence(heads, ranks, zigzag=False))
    readers = heads // kv_heads   # of each key-value head
    return DealtHeads(query, tuple(range(own.start // readers, (own.stop - 1) // readers + 1) for own in query))


def all_to_all_attention_bill(tokens: Sequence[int], heads: int, kv_heads: int, head_bytes: int, rank: int) -> Bill:
    """What `rank` sends forward: queries, keys and values of its tokens, then its heads' results for the tokens of others.

    tokens: of each rank; head_bytes: of one head of one token, in all rows
    """
    dealt = deal_heads(heads, kv_heads, len(tokens))
    others = [other for other in range(len(tokens)) if other != rank]
    there = sum(len(dealt.query[other]) + 2 * len(dealt.key_value[other]) for other in others) * tokens[rank]
    back = sum(tokens[other] for other in others) * len(dealt.query[rank])
    return Bill((there + back) * head_bytes, 4 * len(others))


def _chosen_heads(x: Tensor, heads: Sequence[int]) -> Tensor:
    """[B, K, T, D] -> [B, len(heads), T, D]"""
    by_head = x.unbind(1)   # not by an index list: copying it to the device would synchronise
    return torch.stack([by_head[head] for head in heads], dim=1)


def _tokens_for_heads(x: Tensor, wanted: Sequence[range], context: CutRows) -> Tensor:
    """[B, all heads, own tokens, D] -> [B, own heads, all tokens, D]; rank r wants the heads wanted[r]."""
    rank, tokens = context.group.rank, context.tokens
    heads = x.permute(1, 2, 0, 3).unbind()   # as in `_chosen_heads`
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
