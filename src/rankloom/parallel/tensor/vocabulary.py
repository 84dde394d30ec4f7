"""The two ends of a language model, cut over the vocabulary: the embedding, and the output with its cross-entropy.

Rank r holds rows r*c .. (r+1)*c - 1 of the matrix, c = ceil(V / p); what lies beyond V is padding: zeros that no token
reads and that the loss does not see. A token's row is found on one rank, the others give zeros, and an all-reduce adds them up.

The loss never gathers logits. Of a chunk of rows a rank makes its own columns; three numbers a row (largest logit, sum of
exponentials, the target's logit) say all that the others must know:

    log-sum-exp = m + log sum_r s_r exp(m_r - m),   m = max_r m_r        loss = log-sum-exp - target's logit

so one all-gather of 3 numbers a row and rank replaces one of V. Read models/loss.py for the same in one process.

source: Shoeybi et al. 2019
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from rankloom.base.errors import ConfigError, DataError
from rankloom.base.layout import Layout
from rankloom.base.loss import IGNORE, chunk_rows, loss_dtype
from rankloom.parallel.tensor.compare import expect_alike
from rankloom.parallel.tensor.holding import padded
from rankloom.parallel.tensor.layers import change_first_before, entered
from rankloom.parallel.tensor.moves import BY_WIDTH, PARTIAL, WHOLE, Entrance, redistribute
from rankloom.world.group import Group

TOKENS = Layout.parse("[..., tokens]")


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Which rows of the vocabulary matrix this rank holds: start .. start + count - 1 of `vocabulary`, then padding."""

    vocabulary: int
    start: int
    count: int

    @classmethod
    def of(cls, vocabulary: int, group: Group) -> "VocabularyShard":
        """Those of this rank of `group`."""
        (span,) = padded(vocabulary, group.size)[1][group.rank]
        return cls(vocabulary, span.start, span.stop - span.start)

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Row of each token in this rank's part, 0 where it lies elsewhere; and whether it lies here."""
        row = tokens - self.start
        here = (row >= 0) & (row < self.count)
        return torch.where(here, row, 0), here

    def place(self, token: int | None) -> int | None:
        """The row of one token in this rank's part; None where it lies elsewhere."""
        return token - self.start if token is not None and 0 <= token - self.start < self.count else None

    @torch.compiler.disable
    def expect(self, tokens: Tensor, where: str) -> None:
        """Raise unless all tokens are in the vocabulary. On the CPU only: a GPU would have to be waited for."""
        if tokens.device.type == "cpu" and tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocabulary:
            raise DataError(f"{where}: tokens from {int(tokens.min())} to {int(tokens.max())}, but the vocabulary is "
                            f"0 to {self.vocabulary - 1}")


def look_up_own_rows(embedding: nn.Module, rows: VocabularyShard, group: Group, out: Layout, label: str) -> None:
    """`embedding`, which has this rank's rows as its weight, is given any tokens, and ends as `out` says: whole, or split by tokens.

    It stays the module that it is, so that one which scales its rows still does.
    sent: an all-reduce, or reduce-scatter, of its output [..., W]
    """
    found: list[Tensor] = []   # which tokens of this call lie here

    @torch.compiler.disable
    def own(tokens: Tensor) -> Tensor:
        rows.expect(tokens, group.where(label))
        expect_alike(tokens, TOKENS, group, f"{label}: tokens")
        row, here = rows.local(tokens)
        found[:] = [here]
        return row

    def after(_module: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return redistribute(output.masked_fill(~found.pop()[..., None], 0.0), PARTIAL, out, group, label=label, overwrite=True)

    change_first_before(embedding, own)
    embedding.register_forward_hook(after)


class VocabularyOutput(nn.Module):
    """From hidden states and this rank's rows of the output matrix to logits, gathered, or to the loss, where they are not.

    enter: the entrance of the hidden states; None where a gather of tokens before it sums their gradient
    """

    def __init__(self, rows: VocabularyShard, group: Group, enter: Entrance | None, *, label: str):
        super().__init__()
        self.rows, self.group, self.enter, self.label = rows, group, enter, label

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor | None = None, kernel: object = None) -> Any:
        """hidden [..., W], weight [c, W] -> logits [..., V]; with targets [...] -> (sum of the loss, number of targets counted).

        sent: without targets, an all-gather of [..., c]; with them, see `split_cross_entropy`
        """
        if kernel is not None:
            raise ConfigError(f"{self.group.where(self.label)}: loss_kernel computes the loss of whole logits, which no rank holds here; "
                              "set it to None")
        hidden = entered(hidden, self.enter, self.group, self.label)
        if targets is None:
            columns = F.linear(hidden, weight)   # [..., c], of which the last may be padding
            return redistribute(columns, BY_WIDTH, WHOLE, self.group, label=self.label)[..., :self.rows.vocabulary]
        total = split_cross_entropy(hidden, weight, targets, self.rows, self.group, label=self.label)
        return total, (targets != IGNORE).sum()


@torch.compiler.disable   # nothing of what ranks say to each other can be in a graph
def split_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, rows: VocabularyShard, group: Group, *,
                        chunk: int | None = None, label: str = "loss") -> Tensor:
    """Sum of the cross-entropy of `hidden @ W.T` against `targets`, W cut by rows over the ranks; the same on every rank.

    hidden:  [..., W], whole, `-tensor`: its gradient is this rank's term
    weight:  [c, W], this rank's rows
    targets: [...], -100 where not counted
    chunk:   rows of hidden at a time; chosen by device and vocabulary when left out
    sent:    3 numbers a row to each other rank, one message for each chunk; nothing backward
    raises:  DataError for a target outside the vocabulary
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    rows.expect(targets[targets != IGNORE] if targets.device.type == "cpu" else targets, group.where(label))
    expect_alike(targets, TOKENS, group, f"{label}: targets")
    if chunk is None:
        chunk = chunk_rows(weight.shape[0], hidden.device.type)
    total: Tensor = _SplitCrossEntropy.apply(hidden, weight, targets, _Loss(rows, group, chunk, label, torch.is_grad_enabled()))   # type: ignore[no-untyped-call]
    return total


@dataclass(frozen=True, slots=True)
class _Loss:
    rows: VocabularyShard
    group: Group
    chunk: int
    label: str
    learns: bool   # inside of a Function nobody can tell: gradients are off, and its inputs are said to need one, either way

    def of(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss of a chunk, and its gradient towards this rank's logits [n, c]: softmax minus one-hot, 0 where not counted."""
        wide = logits.to(loss_dtype(logits.dtype))
        wide[:, self.rows.count:] = torch.finfo(wide.dtype).min   # the padding; not -inf, which has no difference from itself
        row, here = self.rows.local(targets)
        top = wide.amax(1)
        target = torch.where(here, wide.gather(1, row[:, None])[:, 0], 0.0)
        exps = wide.sub_(top[:, None]).exp_()
        known = self.group.all_gather(torch.stack((top, exps.sum(1), target))[None].contiguous(), label=self.label)
        tops, sums, logit = known.unbind(1)
        highest = tops.amax(0)
        total = (sums * (tops - highest).exp()).sum(0)
        counted = targets != IGNORE
        loss = ((total.log() + highest - logit.sum(0)) * counted).sum()
        gradient = exps.mul_(((top - highest).exp() / total * counted)[:, None])
        gradient[torch.arange(len(row), device=row.device), row] -= here.to(gradient.dtype)   # a target that is not counted is nowhere
        return loss, gradient.to(logits.dtype)


class _SplitCrossEntropy(Function):
    """Forward computes the gradients too, as models/loss.py does; backward scales them, in place, so it can run once only."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, loss: _Loss) -> Tensor:
        total = torch.zeros((), dtype=loss_dtype(hidden.dtype), device=hidden.device)
        learns = loss.learns and any(ctx.needs_input_grad)
        grad_hidden = torch.empty_like(hidden) if learns else None
        grad_weight = torch.zeros_like(weight, dtype=loss_dtype(weight.dtype)) if learns else None
        for start in range(0, hidden.shape[0], loss.chunk):
            part = hidden[start:start + loss.chunk]
            value, grad_logits = loss.of(F.linear(part, weight), targets[start:start + loss.chunk])
            total += value
            if grad_hidden is not None and grad_weight is not None:
                grad_hidden[start:start + loss.chunk] = grad_logits @ weight
                grad_weight += grad_logits.T @ part
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden.mul_(gradient), grad_weight.mul_(gradient), None, None
