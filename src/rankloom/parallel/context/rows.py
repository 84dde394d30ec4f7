"""Rows of tokens that are cut over the ranks of a group: which are here, and the whole rows again."""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from rankloom.base.documents import Documents, document_cuts
from rankloom.base.errors import ConfigError, DataError, ShapeMismatch, did_you_mean
from rankloom.parallel.context.sequences import Spans, Tile, cut_sequence, merged, tiles
from rankloom.world.group import Group

RING, ALL_TO_ALL = KINDS = ("ring", "all_to_all")


def expect_kind(kind: str) -> None:
    """Raise ConfigError unless it is a kind of context parallelism."""
    if kind not in KINDS:
        raise ConfigError(f"there is no context parallelism {kind!r}. {did_you_mean(kind, KINDS)}")


@dataclass(frozen=True)
class CutRows:
    """Rows of `length` tokens, cut over the ranks of a group: which tokens are here."""

    group: Group
    length: int
    kind: str = RING
    causal: bool = True
    documents: Documents | None = None   # one row stands for all; None: each row is one document
    device: torch.device | None = None   # of `positions`

    def __post_init__(self) -> None:
        expect_kind(self.kind)
        if self.length < self.group.size:
            raise DataError(f"{self.group.where('context parallel')}: a sequence of {self.length} tokens leaves some of {self.group.size} "
                            "ranks without any; use longer sequences, or fewer context ranks")

    @cached_property
    def spans(self) -> tuple[Spans, ...]:
        """The positions that each rank owns."""
        return cut_sequence(self.length, self.group.size, zigzag=self.kind == RING and self.causal)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """How many tokens each rank owns."""
        return tuple(sum(map(len, spans)) for spans in self.spans)

    @cached_property
    def tiles(self) -> tuple[list[Tile], ...]:
        """For each rank, the tiles of this rank's queries against that rank's keys."""
        mine, documents = self.spans[self.group.rank], document_cuts(None, self.length) if self.documents is None else self.documents
        return tuple(merged(tiles(mine, theirs, causal=self.causal, documents=documents)) for theirs in self.spans)

    @cached_property
    def alone(self) -> "CutRows":
        """The same rows on a group of this rank only."""
        return replace(self, group=self.group.alone())

    @cached_property
    def positions(self) -> Tensor:
        """The positions of this rank's tokens in their rows, [T/p]."""
        return torch.cat([torch.arange(span.start, span.stop, device=self.device) for span in self.spans[self.group.rank]])

    def own(self, x: Tensor) -> Tensor:
        """This rank's tokens of whole rows [B, T, ...], contiguous."""
        if x.dim() < 2 or x.shape[1] != self.length:
            raise ShapeMismatch(f"{self.group.where('own tokens')}: x has shape {tuple(x.shape)}, expected rows of {self.length} tokens")
        return torch.cat([x[:, span.start:span.stop] for span in self.spans[self.group.rank]], dim=1)

    @torch.compiler.disable   # communication cannot be compiled
    @torch.no_grad()
    def gather(self, x: Tensor) -> Tensor:
        """The whole rows [B, T, ...], from each rank's tokens `x`; no gradient. sent: p-1 messages, n(p-1)"""
        longest, mine = max(self.tokens), x.transpose(0, 1)
        padded = mine.new_zeros((longest, *mine.shape[1:]))
        padded[:len(mine)] = mine
        shares = self.group.all_gather(padded, label="rows of all context ranks").split(longest)
        whole = x.new_empty((x.shape[0], self.length, *x.shape[2:]))
        for spans, share in zip(self.spans, shares, strict=True):
            starts = accumulate(map(len, spans), initial=0)
            for span, start in zip(spans, starts):
                whole[:, span.start:span.stop] = share[start:start + len(span)].transpose(0, 1)
        return whole
