"""The micro-batch that a pipeline stage is computing now: what its blocks may ask of it, beside the activations that they are given.

A step takes all its micro-batches before the schedule runs, and the schedule selects one of them before each forward and backward.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from rankloom.base.documents import document_cuts
from rankloom.base.nested import cast_floats_in
from rankloom.base.scoped import temporarily
from rankloom.models.sequence_part import WHOLE, Packed, SequencePart
from rankloom.parallel.context.part import Context
from rankloom.parallel.context.tokens_apart import SomeTokens
from rankloom.train.dropout import DropoutKey
from rankloom.world.group import Group


class RunningMicrobatch:
    """The micro-batch that is running on this rank, and which of its tokens this rank has.

    context: the ranks that share the tokens of a row   kind: of context parallelism
    scale:   factor of losses in backward
    packs:   whether the pieces take a `part`, which may carry the documents that are packed into rows
    """

    def __init__(self, dropout: DropoutKey, context: Group, kind: str):
        self.dropout, self.context, self.kind = dropout, context, kind
        self.scale, self.packs = 1.0, False
        self._taken: list[tuple[SequencePart, Any]] = []
        self._now: SequencePart = WHOLE
        self._called_with: Any = None
        self._limit: SomeTokens | None = None

    def begin(self, step: int, rows: Sequence[range], scale: float = 1.0) -> None:
        """Before the micro-batches of a step. rows: of the global batch, for each micro-batch"""
        self.dropout.set_microbatches(step, rows)
        self.scale = scale
        self._taken.clear()

    def take(self, given: Any, targets: Any, compute: torch.dtype | None = None) -> tuple[Any, tuple[Any, Any]]:
        """The next micro-batch of the step -> what the first piece is called with, and this rank's tokens of (given, targets).

        given:   tokens, or for pieces that take a part (tokens, documents)
        compute: the dtype to which floats for the first piece are cast; None: they stay as they are
        """
        part, own = self._own(given, targets)
        called = cast_floats_in(self._unpacked(own[0])[0], compute)   # the whole model is not called, so none of its hooks casts
        self._taken.append((part, called))
        return called, own

    def _own(self, given: Any, targets: Any) -> tuple[SequencePart, tuple[Any, Any]]:
        tokens, documents = self._unpacked(given)
        if self._limit is not None:
            apart = self._limit.part(tokens.shape[1], tokens.device)
            cut = partial(apart.cut, length=tokens.shape[1])
            return apart, (cut(tokens) if documents is None else (cut(tokens), cut(documents)), cut(targets))
        if self.context.size == 1:
            return WHOLE if documents is None else Packed(documents, tokens), (given, targets)
        cuts = document_cuts(documents, tokens.shape[1], len(tokens))
        part = Context(self.context, tokens.shape[1], self.kind, documents=cuts, device=tokens.device)
        return part, (part.own(tokens) if documents is None else (part.own(tokens), part.own(documents)), part.own(targets))

    def _unpacked(self, given: Any) -> tuple[Any, Any]:
        """The tokens, and the documents that are packed into their rows, or None."""
        return tuple(given) if self.packs and isinstance(given, tuple | list) else (given, None)   # type: ignore[return-value]

    def limited_to(self, some: SomeTokens) -> AbstractContextManager[None]:
        """A context in which micro-batches are some of their tokens, each left to itself: `limited_to` in parallel/context/apply.py."""
        return temporarily(self, _limit=some)

    def select_microbatch(self, microbatch: int) -> None:
        """Before each forward and backward."""
        self.dropout.select_microbatch(microbatch)
        self._now, self._called_with = self._taken[microbatch]
        if isinstance(self._now, Context):
            self.dropout.set_token_positions(self._now.spans[self.context.rank], self._now.length)

    def part(self) -> SequencePart:
        """The `part` of the running micro-batch, for the blocks."""
        return self._now

    def inputs(self) -> Any:
        """The inputs of the whole model for the running micro-batch."""
        return self._called_with
