"""What a model must know when its sequences go on elsewhere: the positions of its tokens, and how they see the others.

A plain model is handed `WHOLE`, for which there is no elsewhere. Shapes as in gpt.py.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rankloom.base.documents import document_cuts


class SequencePart(Protocol):
    """The tokens that are here, of sequences that may go on elsewhere. Whoever cuts sequences hands in one that knows the rest."""

    @property
    def positions(self) -> Tensor | None:
        """Of the tokens that are here, [T]; None: one after the other."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention over whole sequences. query [B, T, H, D], key and value [B, T, K, D] of what is here -> [B, T, H, D]."""

    def gather(self, x: Tensor) -> Tensor:
        """What all tokens of the sequences have: [B, T, ...] of what is here -> [B, all, ...], without a gradient."""

    def own(self, x: Tensor) -> Tensor:
        """The way back: what the tokens that are here have of [B, all, ...]."""


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
    """query [B, H, Q, D], key and value [B, K, T, D] -> [B, H, Q, D]; H / K query heads in a row read the same key-value head."""
    shared = query.shape[1] != key.shape[1]
    if shared and writes_scores(query.device.type, query.dtype, mask):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        shared = False
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=shared)


def writes_scores(device: str, dtype: torch.dtype, mask: Tensor | None) -> bool:
    """Whether torch might write all scores [B, H, Q, T] to memory because heads are shared: of the kernels of a GPU flash attention reads
    shared heads, and it takes 16 bits and no mask. cuDNN's reads them, too, with a mask, but comes after the formulas before Hopper."""
    return device == "cuda" and (mask is not None or dtype not in (torch.bfloat16, torch.float16))


class WholeSequence:
    """Sequences that are all here."""

    positions = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `SequencePart.attend`; keys and values may be more than the queries, which are then the last ones."""
        new, known = query.shape[1], key.shape[1]
        # one new token sees all; with no past the plain triangle does; else the triangle starts after the past
        mask = None
        if new not in (1, known):
            mask = torch.ones(new, known, dtype=torch.bool, device=query.device).tril(known - new)
        mixed = attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask, causal=new == known and new > 1)
        return mixed.transpose(1, 2)

    def gather(self, x: Tensor) -> Tensor:
        """All there is, is here."""
        return x

    def own(self, x: Tensor) -> Tensor:
        """All there is, is here."""
        return x


WHOLE = WholeSequence()


class Packed(WholeSequence):
    """Sequences that are all here, each of several documents end to end: attention stays inside a document.

    documents: see `document_cuts`
    memory:    a mask [B, T, T]; ranks that share sequences make none (parallel/context.py)
    """

    def __init__(self, documents: Tensor | Sequence[Sequence[int]], tokens: Tensor):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        cuts = document_cuts(documents, tokens.shape[1])
        numbers = torch.stack([torch.bucketize(places, places.new_tensor(row), right=True) for row in cuts])
        self.mask = (numbers[:, None, :, None] == numbers[:, None, None, :]) & (places[:, None] >= places)   # [B or 1, 1, T, T]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `SequencePart.attend`."""
        mixed = attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), self.mask)
        return mixed.transpose(1, 2)
