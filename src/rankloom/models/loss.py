"""Cross-entropy of a language model in chunks, so that the logits of a batch never exist as a whole.

With a vocabulary of 128,256 the logits of 16,384 tokens take 8.4 GB in fp32, and their gradient as much again.
Here the forward pass takes a chunk of rows, makes its logits, its loss and at once its gradients, and throws the
logits away; the backward pass only scales what is there. Work is the same, the peak is one chunk.
The plain path lives beside it: it is the proof, and the faster one when everything is one chunk anyway.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankloom.base.loss import IGNORE, chunk_rows, loss_dtype

Kernel = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def language_model_loss(model: nn.Module, batch: tuple[Tensor | tuple[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy and the number of tokens it is a sum over, as the engine wants it.

    batch:   tokens [B, T] and targets [B, T], int64; targets of -100 are not counted. In place of tokens, (tokens, numbers [B, T] of
             the documents that rows are packed of)
    returns: (sum, count), scalars on the model's device; the sum in fp32, or fp64 for an fp64 model
    The model is called, never reached into, so that wrappers with hooks see the pass.
    """
    given, targets = batch
    tokens, packed = (given, {}) if isinstance(given, Tensor) else (given[0], {"documents": given[1]})
    total, count = model(tokens, targets=targets, **packed)
    return total, count


def plain_language_model_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The same numbers through whole logits and torch's own cross-entropy."""
    tokens, targets = batch
    return plain_cross_entropy(model(tokens), targets), count_targets(targets)


def count_targets(targets: Tensor) -> Tensor:
    """How many targets count: a scalar tensor, so that no device has to wait for it."""
    return (targets != IGNORE).sum()


def plain_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropy of logits [..., V] against targets [...], in fp32 or fp64."""
    wide = logits.to(loss_dtype(logits.dtype))
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")


class Output(nn.Module):
    """From hidden states to logits, or to a loss. It has no parameters: the matrix is the head's, or the embedding's when tied.

    A module, so that whoever cuts the matrix over ranks can put another in its place.
    """

    def __init__(self, vocab_size: int):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor | None = None,
                kernel: Kernel | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """hidden [..., W], weight [V, W] -> logits [..., V]; with targets [...] -> (sum of the loss, number of targets counted)."""
        if targets is None:
            return F.linear(hidden, weight)
        return chunked_cross_entropy(hidden, weight, targets, kernel=kernel), count_targets(targets)


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *,
                          rows: int | None = None, kernel: Kernel | None = None) -> Tensor:
    """Sum of the cross-entropy of `hidden @ weight.T` against `targets`.

    hidden:  [..., W], weight: [V, W], targets: [...], -100 where not counted
    rows:    of hidden per chunk; chosen by device and vocabulary when left out
    kernel:  `loss_and_gradient`, or a compiled version of it
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    if rows is None:
        rows = chunk_rows(weight.shape[0], hidden.device.type)
    if (hidden.shape[0] <= rows and kernel is None) or not torch.is_grad_enabled():
        cuts = range(0, max(1, len(hidden)), rows)
        parts = [plain_cross_entropy(F.linear(hidden[i:i + rows], weight), targets[i:i + rows]) for i in cuts]
        return torch.stack(parts).sum()
    total: Tensor = ChunkedCrossEntropy.apply(hidden, weight, targets, rows, kernel or loss_and_gradient)  # type: ignore[no-untyped-call]
    return total


def loss_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss of one chunk, and its gradient towards the logits: softmax minus one-hot, 0 where not counted.

    logits: [n, V] -> a scalar, and [n, V] in the dtype of the logits
    """
    counted = (targets != IGNORE).unsqueeze(1)
    index = torch.where(counted, targets.unsqueeze(1), 0)   # any other number below 0 is no token: `gather` says so
    log_softmax = torch.log_softmax(logits, dim=1, dtype=loss_dtype(logits.dtype))
    loss = -torch.where(counted, log_softmax.gather(1, index), 0.0).sum()
    if torch.compiler.is_compiling():   # a compiler makes this one pass, but what is scattered into lies in memory first, in fp32
        gradient = log_softmax.exp() - (torch.arange(logits.shape[1], device=logits.device) == index).to(log_softmax.dtype)
    else:
        gradient = log_softmax.exp_()
        gradient.scatter_add_(1, index, torch.full_like(index, -1, dtype=gradient.dtype))
    return loss, gradient.mul_(counted).to(logits.dtype)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Forward computes the gradients too; backward scales them, in place, so it can run once only."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, kernel: Kernel) -> Tensor:
        """hidden [N, W], weight [V, W], targets [N] -> the summed loss."""
        total = torch.zeros((), dtype=loss_dtype(hidden.dtype), device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=loss_dtype(weight.dtype))
        for start in range(0, hidden.shape[0], rows):
            part = hidden[start:start + rows]
            loss, grad_logits = kernel(F.linear(part, weight), targets[start:start + rows])
            total = total + loss   # not in place: torch 2.11 compiles wrong gradients for an output that was changed
            grad_hidden[start:start + rows] = grad_logits @ weight
            if grad_logits.dtype == part.dtype == grad_weight.dtype:
                grad_weight.addmm_(grad_logits.T, part)
            else:                                   # a 16-bit product, added up in fp32
                grad_weight += grad_logits.T @ part
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Scale by what comes from above: one number."""
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden.mul_(grad), grad_weight.mul_(grad), None, None, None
