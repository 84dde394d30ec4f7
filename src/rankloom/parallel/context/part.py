"""What context parallel passes to a model as its `part`: which tokens are here, and how they attend to the rest."""

import torch
from torch import Tensor

from rankloom.base.errors import ShapeMismatch
from rankloom.parallel.context.all_to_all_attention import all_to_all_attention
from rankloom.parallel.context.ring_attention import ring_attention
from rankloom.parallel.context.rows import RING, CutRows
from rankloom.parallel.context.tiles import can_attend


class Context(CutRows):
    """The tokens of cut rows that are on this rank, and their attention to those on others; a `SequencePart`."""

    @torch.compiler.disable
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention over whole rows: query [B, T/p, H, D], key and value [B, T/p, K, D] of this rank's tokens -> [B, T/p, H, D].

        raises: ShapeMismatch; ConfigError where all_to_all has more ranks than heads
        """
        self._expect(query, key, value)
        attend = ring_attention if self.kind == RING else all_to_all_attention
        return attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), self).transpose(1, 2)

    def _expect(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        rows, tokens = 1 if self.documents is None else len(self.documents), self.tokens[self.group.rank]
        if not can_attend(query, key, value) or query.shape[1] != tokens or rows not in (1, query.shape[0]):
            given = (f"{name} {tuple(x.shape)} {x.dtype}" for name, x in (("query", query), ("key", key), ("value", value)))
            raise ShapeMismatch(
                f"{self.group.where('context parallel attention')}: {', '.join(given)}; expected {tokens} of {self.length} tokens here, "
                f"documents for 1 row or for all, not {rows}, a key and a value like the query, in a divisor of its heads, floats alike")
