"""A GPT as a list of pieces that run one after the other, to be cut into stages. Names are those of the whole model.

Whatever replaces modules of the model (tensor parallel) must be applied before.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from rankloom.base.errors import ConfigError
from rankloom.models.gpt import GPT, Rotary
from rankloom.models.sequence_part import WHOLE, SequencePart


def whole_sequences() -> SequencePart:
    """The part of sequences that is all of them."""
    return WHOLE


class BeforeOutput(NamedTuple):
    """The output of a GPT's last piece: hidden states and output matrix. The loss computes the logits from them, in chunks."""

    hidden: Tensor   # [B, T, W]
    weight: Tensor   # [V, W], the output matrix


def gpt_pieces(model: GPT, part: Callable[[], SequencePart] = whole_sequences,
               inputs: Callable[[], Tensor] | None = None) -> list[tuple[dict[str, nn.Module], Callable[..., Any]]]:
    """The embedding, each block, and the norm with the output matrix: tokens [B, T] -> hidden [B, T, W] ... -> `BeforeOutput`.

    part:   called before each block: says which part of whole sequences the tokens are
    inputs: called before each block: the micro-batch's tokens, where hidden states are cut by tokens (sequence parallel)
    raises: ConfigError for a model that cuts its own tokens, if `part` is left out
    """
    if part is whole_sequences and any(getattr(hook, "cuts_tokens", False) for hook in model._forward_pre_hooks.values()):
        raise ConfigError("the model is context parallel, which cuts the tokens of its forward, and a pipeline calls its pieces: cut them "
                          "yourself and say by `part` which they are, or let rl.prepare do it on a mesh with pipe and context ranks")
    # Each function refers to its own modules only, so that a rank that keeps one stage can free the rest. It is a `partial` of them, not a
    # closure, which `copy.deepcopy` would not copy: a copied stage would run, and train, the modules of the first one.
    embedding, dropout, rotary, norm = model.embedding, model.embedding_dropout, model.rotary, model.norm
    head = model.head or embedding
    first = {"embedding": embedding, "embedding_dropout": dropout}, partial(_embed, embedding, dropout)
    blocks = [({f"blocks.{i}": block, "rotary": rotary}, partial(_run_block, block, rotary, part, inputs))
              for i, block in enumerate(model.blocks)]
    last = {"norm": norm, "embedding" if model.head is None else "head": head}, partial(_before_output, norm, head)
    return [first, *blocks, last]


def _embed(embedding: nn.Module, dropout: nn.Module, tokens: Tensor) -> Tensor:
    return dropout(embedding(tokens))   # type: ignore[no-any-return]


def _before_output(norm: nn.Module, head: nn.Linear | nn.Embedding, x: Tensor) -> BeforeOutput:
    return BeforeOutput(norm(x), head.weight)


def _run_block(block: nn.Module, rotary: Rotary, current_part: Callable[[], SequencePart], inputs: Callable[[], Tensor] | None,
               x: Tensor) -> Tensor:
    part = current_part()
    tokens = x if inputs is None else inputs()
    rotary.expect_room(getattr(part, "length", tokens.shape[1]))   # a part of whole sequences knows how long these are
    cos, sin = rotary(0, tokens.shape[1]) if part.positions is None else rotary.at(part.positions)
    return block(x, cos, sin, part=part)   # type: ignore[no-any-return]


def gpt_answer(model: GPT) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """answer(BeforeOutput, targets=None): what the model returns: logits [B, T, V]; with targets [B, T] (sum of the loss, count).

    So it is the loss of a pipeline. The sum does not include the auxiliary losses of routers: each stage takes those of its own layers.
    """
    output, kernel = model.output, model.loss_kernel

    def answer(given: BeforeOutput, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return output(*given, targets, kernel)   # type: ignore[no-any-return]

    return answer
