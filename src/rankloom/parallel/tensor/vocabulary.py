"""The two ends of a language model, cut over the vocabulary: the embedding, and the output with its cross-entropy.

Rank r holds rows r*c .. (r+1)*c - 1 of the matrix, c = ceil(V / p). Rows beyond V are padding: zeros that no token reads and the loss
ignores. One rank has a token's row, the others contribute zeros, and an all-reduce adds them up.

The loss never gathers logits. For a chunk of tokens, a rank computes the logits of its own part of the vocabulary. Three numbers a token
(largest logit, sum of exponentials, the target's logit) are all that other ranks need:

    log-sum-exp = m + log sum_r s_r exp(m_r - m),   m = max_r m_r        loss = log-sum-exp - target's logit

So each rank gathers 3 numbers a token in place of V logits. Read models/loss.py for the same in one process.

source: Shoeybi et al. 2019
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankloom.base.errors import ConfigError, DataError
from rankloom.base.layout import Layout
from rankloom.base.loss import IGNORE, ChunkedCrossEntropy, as_rows, chunk_rows
from rankloom.base.tensors import at_least_fp32
from rankloom.parallel.tensor.compare import expect_alike
from rankloom.parallel.tensor.holding import cut_padded
from rankloom.parallel.tensor.layers import change_first_before, entered
from rankloom.parallel.tensor.moves import BY_WIDTH, PARTIAL, WHOLE, Entrance, redistribute
from rankloom.world.group import Group

TOKENS = Layout.parse("[..., tokens]")


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The rows of the vocabulary matrix on this rank: start .. start + count - 1 of `vocabulary`, then padding."""

    vocabulary: int
    start: int
    count: int

    @classmethod
    def of(cls, vocabulary: int, group: Group) -> "VocabularyShard":
        """The rows of this rank of `group`."""
        (span,) = cut_padded(vocabulary, group.size)[1][group.rank]
        return cls(vocabulary, span.start, span.stop - span.start)

    def local_index(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """For each token its index into this rank's rows, 0 where another rank has it; and whether it is here."""
        index = tokens - self.start
        here = (index >= 0) & (index < self.count)
        return torch.where(here, index, 0), here

    def local_index_of(self, token: int | None) -> int | None:
        """The index of one token into this rank's rows; None where another rank has it."""
        return token - self.start if token is not None and 0 <= token - self.start < self.count else None

    @torch.compiler.disable
    def expect(self, tokens: Tensor, where: str) -> None:
        """Raise DataError unless all tokens are in the vocabulary. On the CPU only: on a GPU it would synchronise."""
        if tokens.device.type == "cpu" and tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocabulary:
            raise DataError(f"{where}: tokens from {int(tokens.min())} to {int(tokens.max())}, but the vocabulary is "
                            f"0 to {self.vocabulary - 1}")


def look_up_own_rows(embedding: nn.Module, shard: VocabularyShard, group: Group, out: Layout, label: str) -> None:
    """Let `embedding`, whose weight is this rank's rows, take any tokens. Its output is as `out` says: whole, or split by tokens.

    The module itself is kept, so that a subclass that scales its output still does.
    sent: an all-reduce, or reduce-scatter, of its output [..., W]
    """
    found: list[Tensor] = []   # of the running call: which tokens are here

    @torch.compiler.disable
    def own(tokens: Tensor) -> Tensor:
        shard.expect(tokens, group.where(label))
        expect_alike(tokens, TOKENS, group, f"{label}: tokens")
        index, here = shard.local_index(tokens)
        found[:] = [here]
        return index

    def after(_module: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return redistribute(output.masked_fill(~found.pop()[..., None], 0.0), PARTIAL, out, group, label=label, overwrite=True)

    change_first_before(embedding, own)
    embedding.register_forward_hook(after)


class VocabularyOutput(nn.Module):
    """From hidden states and this rank's rows of the output matrix: whole logits, or with targets the loss, without gathering logits.

    enter: the entrance of the hidden states; None with sequence parallel (see `ColumnLinear`)
    """

    def __init__(self, shard: VocabularyShard, group: Group, enter: Entrance | None, *, label: str):
        super().__init__()
        self.shard, self.group, self.enter, self.label = shard, group, enter, label

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
            return redistribute(columns, BY_WIDTH, WHOLE, self.group, label=self.label)[..., :self.shard.vocabulary]
        total = split_cross_entropy(hidden, weight, targets, self.shard, self.group, label=self.label)
        return total, (targets != IGNORE).sum()


@torch.compiler.disable   # communication cannot be compiled
def split_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabularyShard, group: Group, *,
                        chunk: int | None = None, label: str = "loss") -> Tensor:
    """Sum of the cross-entropy of `hidden @ W.T` against `targets`, W cut by rows over the ranks; the same on every rank.

    hidden:  [..., W], whole, `-tensor`: its gradient is this rank's term of a sum
    weight:  [c, W], this rank's rows
    targets: [...], -100 where not counted
    chunk:   tokens at a time; chosen by device and vocabulary when left out
    sent:    3 numbers a token to each other rank, one message for each chunk; nothing backward
    memory:  from forward to backward, the gradients of hidden and weight, of what is not frozen: that of an fp16 weight in fp32
    raises:  DataError for a target outside the vocabulary, ShapeMismatch unless there is one for each row of `hidden`
    """
    hidden, targets = as_rows(hidden, targets, group.where(label))
    shard.expect(targets[targets != IGNORE] if targets.device.type == "cpu" else targets, group.where(label))
    expect_alike(targets, TOKENS, group, f"{label}: targets")
    if chunk is None:
        chunk = chunk_rows(weight.shape[0], hidden.device.type)
    if not torch.is_grad_enabled():   # which a Function does not see: it would compute gradients
        hidden, weight = hidden.detach(), weight.detach()
    return ChunkedCrossEntropy.apply(hidden, weight, targets, chunk, _Loss(shard, group, label).of)   # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Loss:
    shard: VocabularyShard
    group: Group
    label: str

    def of(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The summed loss of a chunk, and its gradient towards this rank's logits [n, c]: softmax minus one-hot, 0 where not counted."""
        wide = logits.to(at_least_fp32(logits.dtype))
        wide[:, self.shard.count:] = torch.finfo(wide.dtype).min   # the padding; not -inf: -inf - -inf is NaN
        index, here = self.shard.local_index(targets)
        top = wide.amax(1)
        target = torch.where(here, wide.gather(1, index[:, None])[:, 0], 0.0)
        exps = wide.sub_(top[:, None]).exp_()
        gathered = self.group.all_gather(torch.stack((top, exps.sum(1), target))[None].contiguous(), label=self.label)
        tops, sums, logit = gathered.unbind(1)
        highest = tops.amax(0)
        total = (sums * (tops - highest).exp()).sum(0)
        counted = targets != IGNORE
        loss = ((total.log() + highest - logit.sum(0)) * counted).sum()
        gradient = exps.mul_(((top - highest).exp() / total * counted)[:, None])
        gradient[torch.arange(len(index), device=index.device), index] -= here.to(gradient.dtype)   # IGNORE is in no rank's rows
        return loss, gradient.to(logits.dtype)
