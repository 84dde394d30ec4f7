"""A GPT as a list of pieces that run one after the other, for whoever cuts it into stages. Names are those of the whole model.

Whatever replaces modules of the model (tensor parallel) comes before.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from rankloom.models.gpt import GPT, Rotary
from rankloom.models.sequence_part import WHOLE, SequencePart


class BeforeOutput(NamedTuple):
    """What the last piece of a GPT gives. Its loss computes the logits, in chunks, so these are no output of the model yet."""

    hidden: Tensor   # [B, T, W]
    weight: Tensor   # [V, W], the output matrix


def gpt_pieces(model: GPT, part: Callable[[], SequencePart] = lambda: WHOLE,
               inputs: Callable[[], Tensor] | None = None) -> list[tuple[dict[str, nn.Module], Callable[..., Any]]]:
    """The embedding, each block, and the norm with the output matrix: tokens [B, T] -> hidden [B, T, W] ... -> what `gpt_loss` takes.

    part:   asked before each block: of the sequences the tokens are, for whoever has cut them
    inputs: asked there too: the tokens of the micro-batch, where what goes from block to block is cut by tokens (sequence parallel)
    """
    # The functions hold their own modules only: a rank that keeps one stage must be able to let go of the rest.
    embedding, dropout, rotary, norm = model.embedding, model.embedding_dropout, model.rotary, model.norm
    head = model.head or embedding
    return [({"embedding": embedding, "embedding_dropout": dropout}, lambda tokens: dropout(embedding(tokens))),
            *(({f"blocks.{i}": block, "rotary": rotary}, partial(_run_block, block, rotary, part, inputs))
              for i, block in enumerate(model.blocks)),
            ({"norm": norm, "embedding" if model.head is None else "head": head}, lambda x: BeforeOutput(norm(x), head.weight))]


def _run_block(block: nn.Module, rotary: Rotary, part: Callable[[], SequencePart], inputs: Callable[[], Tensor] | None,
               x: Tensor) -> Tensor:
    now = part()
    tokens = x if inputs is None else inputs()
    cos, sin = rotary(0, tokens.shape[1]) if now.positions is None else rotary.at(now.positions)
    return block(x, cos, sin, part=now)   # type: ignore[no-any-return]


def gpt_loss(model: GPT) -> Callable[[BeforeOutput, Tensor], tuple[Tensor, Tensor]]:
    """loss(what the last piece gives, targets [B, T]) -> (sum, count).

    The auxiliary losses of routers are not in it: they stand in the stages, whose layers are asked for them.
    """
    output, kernel = model.output, model.loss_kernel

    def loss(given: BeforeOutput, targets: Tensor) -> tuple[Tensor, Tensor]:
        total, count = output(*given, targets, kernel)
        return total, count

    return loss
