"""What a model must know when its sequences are cut over ranks: the positions of its tokens, and attention over whole sequences.

A plain model gets `WHOLE`: all tokens are on this rank. Shapes as in gpt.py.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rankloom.base.documents import document_cuts


class SequencePart(Protocol):
    """The part of each sequence that is on this rank. Context parallel (parallel/context) passes its own to the model."""

    @property
    def positions(self) -> Tensor | None:
        """[T] positions of this rank's tokens; None means 0, 1, 2 ..."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention over whole sequences. query [B, T, H, D], key and value [B, T, K, D] of this rank's tokens -> [B, T, H, D]."""

    def gather(self, x: Tensor) -> Tensor:
        """From this rank's tokens to those of whole sequences: [B, T, ...] -> [B, all, ...], without a gradient."""

    def own(self, x: Tensor) -> Tensor:
        """The reverse: this rank's tokens of whole sequences. [B, all, ...] -> [B, T, ...]"""


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
    """query [B, H, Q, D], key and value [B, K, T, D] -> [B, H, Q, D]; H / K consecutive query heads share a key-value head."""
    shared = query.shape[1] != key.shape[1]
    if shared and writes_scores(query.device.type, query.dtype, mask):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        shared = False
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=shared)


def writes_scores(device: str, dtype: torch.dtype, mask: Tensor | None) -> bool:
    """Whether torch might write all scores [B, H, Q, T] to memory because query heads share key-value heads.

    On a GPU, flash attention supports shared heads, but only in 16 bits and without a mask. cuDNN's kernel supports them with a mask,
    too, but before Hopper torch prefers the plain formulas to it.
    """
    return device == "cuda" and (mask is not None or dtype not in (torch.bfloat16, torch.float16))


class WholeSequence:
    """Whole sequences, on this rank."""

    positions = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `SequencePart.attend`. With more keys than queries (a cache), the queries are those of the last tokens."""
        new, known = query.shape[1], key.shape[1]
        # One new token sees all: no mask. Without a cache, `causal` is enough. Otherwise the triangle starts after the cached tokens.
        mask = None
        if new not in (1, known):
            mask = torch.ones(new, known, dtype=torch.bool, device=query.device).tril(known - new)
        causal = True if new == known and new > 1 else False  # noqa: SIM210   # the condition is no bool where any length is compiled
        mixed = attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask, causal=causal)
        return mixed.transpose(1, 2)

    def gather(self, x: Tensor) -> Tensor:
        """The same: this rank's tokens are those of whole sequences."""
        return x

    def own(self, x: Tensor) -> Tensor:
        """The same."""
        return x


WHOLE = WholeSequence()


class Packed(WholeSequence):
    """Whole sequences, each of several documents end to end. Attention stays inside a document.

    documents: see `document_cuts`
    memory:    a mask [B, T, T]; ranks that share sequences need none (parallel/context)
    """

    def __init__(self, documents: Tensor | Sequence[Sequence[int]], tokens: Tensor):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        cuts = document_cuts(documents, tokens.shape[1], len(tokens))
        document = torch.stack([torch.bucketize(positions, positions.new_tensor(row), right=True) for row in cuts])   # [B or 1, T]
        is_same = document[:, None, :, None] == document[:, None, None, :]
        self.mask = is_same & (positions[:, None] >= positions)   # [B or 1, 1, T, T]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `SequencePart.attend`."""
        mixed = attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), self.mask)
        return mixed.transpose(1, 2)
