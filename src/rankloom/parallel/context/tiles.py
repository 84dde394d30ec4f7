"""One tile of attention: some queries against some keys. It returns the log-sum-exp of its scores too, by which tiles are merged.

The softmax over all keys is a mean of softmaxes over parts of them, weighted by exp(log-sum-exp of the part). So tiles can be computed
in any order, on any rank, and merged as they come. Given the log-sum-exp over *all* keys, the backward of a tile needs no other tile.
Every tile is one kernel: torch's flash attention, which returns the log-sum-exp and never holds a matrix of scores. Where that does not
apply (fp32 and fp64 on a GPU, odd head widths), plain formulas compute some rows at a time.

source: Milakov & Gimelshein 2018; Dao et al. 2022
Shapes: B rows, H query heads, K key-value heads, Q queries, T keys, D width of a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rankloom.base.errors import ShapeMismatch
from rankloom.base.tensors import at_least_fp32

SCORES = 1 << 22        # scores alive at a time in the plain formulas
GPU_HEAD_WIDTH = 256    # the widest that flash attention takes, in steps of 8

aten = torch.ops.aten


class SavedTile(NamedTuple):
    """What the backward of a tile needs: its inputs, and the results for its queries over *all* keys."""

    query: Tensor   # [B, H, Q, D]
    key: Tensor     # [B, K, T, D]
    value: Tensor   # [B, K, T, D]
    out: Tensor     # [B, H, Q, D]
    lse: Tensor     # [B, H, Q]   log-sum-exp


class TileGradients(NamedTuple):
    """A tile's share of the gradients towards query, key and value."""

    query: Tensor
    key: Tensor
    value: Tensor


def can_attend(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether query [B, T, H, D] and key and value [B, T, K, D] fit: kernels read what lies there, and do not look at shapes."""
    if query.dim() != 4 or key.dim() != 4 or key.shape != value.shape or len({query.dtype, key.dtype, value.dtype}) > 1:
        return False
    rows, tokens, heads, width = query.shape
    kv_heads = key.shape[2]
    return (query.is_floating_point() and heads > 0 and width > 0 and kv_heads > 0 and heads % kv_heads == 0
            and key.shape == (rows, tokens, kv_heads, width))


def tile_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of one tile: query [B, H, Q, D], key and value [B, K, T, D] -> out [B, H, Q, D], log-sum-exp [B, H, Q].

    causal: queries and keys are the same tokens, and none sees a later one
    raises: ShapeMismatch when K does not divide H
    """
    key, value = _for_each_query_head(key, query), _for_each_query_head(value, query)
    kind = _kernel(query)
    if kind == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
    if kind == "gpu":
        out, lse = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)[:2]
        return out, lse
    return _plain_forward(query, key, value, causal)


def tile_backward(grad: Tensor, saved: SavedTile, causal: bool) -> TileGradients:
    """This tile's share of the gradients. grad: [B, H, Q, D], of the attention over all keys"""
    query, key, value, out, lse = saved
    heads = key.shape[1]
    key, value = _for_each_query_head(key, query), _for_each_query_head(value, query)
    kind = _kernel(query)
    if kind == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, query, key, value, out, lse, 0.0, causal)
    elif kind == "gpu":
        unused = torch.zeros((), dtype=torch.int64, device=query.device)   # the seeds of dropout, which is off
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, lse.contiguous(), None, None, query.shape[2], key.shape[2], 0.0, causal, unused, unused)
    else:
        grads = _plain_backward(grad, SavedTile(query, key, value, out, lse), causal)
    of_query, of_key, of_value = grads
    return TileGradients(of_query, _for_each_key_head(of_key, heads), _for_each_key_head(of_value, heads))


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge one more tile into `out` [B, H, Q, D] and `lse` [B, H, Q], in place; they begin as 0 and -infinity."""
    total = torch.logaddexp(lse, part_lse.to(lse.dtype))
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (part_lse.to(lse.dtype) - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _kernel(query: Tensor) -> str:
    if query.device.type == "cpu" and query.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        return "cpu"
    width, narrow = query.shape[-1], query.dtype in (torch.bfloat16, torch.float16)
    return "gpu" if query.device.type == "cuda" and narrow and width % 8 == 0 and width <= GPU_HEAD_WIDTH else "plain"


def _for_each_query_head(x: Tensor, query: Tensor) -> Tensor:
    """[B, K, T, D] -> [B, H, T, D]: each key-value head once for each of its H / K consecutive query heads."""
    heads, times = x.shape[1], query.shape[1] // max(x.shape[1], 1)
    if heads * times != query.shape[1]:
        raise ShapeMismatch(f"{heads} key-value heads do not divide {query.shape[1]} query heads")
    return x.repeat_interleave(times, dim=1) if times > 1 else x


def _for_each_key_head(x: Tensor, heads: int) -> Tensor:
    """The gradient of that: [B, H, T, D] -> [B, K, T, D]."""
    return x.unflatten(1, (heads, -1)).sum(2) if x.shape[1] != heads else x


def _scores(query: Tensor, key: Tensor, first: int, causal: bool) -> Tensor:
    """The scores [B, H, Q, T] of queries `first`, `first` + 1 ...; -infinity where a key is later."""
    wide = at_least_fp32(query.dtype)
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * query.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(first + 1)
        scores.masked_fill_(later, -torch.inf)
    return scores


def _row_blocks(query: Tensor, key: Tensor) -> list[slice]:
    """The queries in blocks of so few rows that their scores stay below SCORES."""
    rows = max(1, SCORES // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
    return [slice(start, start + rows) for start in range(0, query.shape[2], rows)]


def _plain_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for rows in _row_blocks(query, key):
        scores = _scores(query[:, :, rows], key, rows.start, causal)
        lse = scores.logsumexp(-1)
        outs.append(scores.sub_(lse.unsqueeze(-1)).exp_() @ value.to(scores.dtype))
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _plain_backward(grad: Tensor, saved: SavedTile, causal: bool) -> TileGradients:
    query, key, value, out, lse = saved
    wide, scale = at_least_fp32(query.dtype), query.shape[-1] ** -0.5
    key, value, of_query = key.to(wide), value.to(wide), []
    of_key, of_value = torch.zeros_like(key), torch.zeros_like(value)
    for rows in _row_blocks(query, key):
        above, asking = grad[:, :, rows].to(wide), query[:, :, rows].to(wide)
        weights = (_scores(asking, key, rows.start, causal) - lse[:, :, rows].unsqueeze(-1)).exp_()
        of_value += weights.transpose(-1, -2) @ above
        delta = (above * out[:, :, rows].to(wide)).sum(-1, keepdim=True)   # rowsum(dO * O), as in FlashAttention-2
        of_scores = weights.mul_(above @ value.transpose(-1, -2) - delta).mul_(scale)
        of_query.append(of_scores @ key)
        of_key += of_scores.transpose(-1, -2) @ asking
    return TileGradients(torch.cat(of_query, dim=2), of_key, of_value)
