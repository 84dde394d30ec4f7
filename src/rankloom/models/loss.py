"""Cross-entropy of a language model in chunks, so that the logits of a batch are never in memory as a whole.

With a vocabulary of 128,256 the logits of 16,384 tokens take 8.4 GB in fp32, and their gradient as much again.
For each chunk of rows, the forward pass computes logits, loss and gradients, and frees the logits. The backward pass only
scales these gradients (`ChunkedCrossEntropy` of base/loss.py). The work is the same; the peak is the logits of one chunk.
The gradient of the weight is summed in fp32. It then waits for backward in the dtype of the weight; that of an fp16 weight in fp32, until
the loss scale has multiplied it: for 128,256 x 2,048 values, 1 GiB in place of 0.5. A frozen weight has none, and costs none.
The plain path is here too: tests compare with it, and it is faster where one chunk is enough.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankloom.base.loss import IGNORE, ChunkedCrossEntropy, Kernel, as_rows, chunk_rows
from rankloom.base.tensors import at_least_fp32


def language_model_loss(model: nn.Module, batch: tuple[Tensor | tuple[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy and the number of targets counted: the engine's (sum, count).

    batch:   tokens [B, T] and targets [B, T], int64; targets of -100 are not counted. For packed rows, (tokens, documents) in place of
             tokens: documents [B, T] has the number of each token's document
    returns: (sum, count), scalars on the model's device; the sum in fp32, or fp64 for an fp64 model
    It calls the model itself, never its submodules, so that hooks of wrappers run.
    """
    given, targets = batch
    tokens, packed = (given, {}) if isinstance(given, Tensor) else (given[0], {"documents": given[1]})
    total, count = model(tokens, targets=targets, **packed)
    return total, count


def plain_language_model_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The same numbers from whole logits and torch's own cross-entropy."""
    tokens, targets = batch
    return plain_cross_entropy(model(tokens), targets), count_targets(targets)


def count_targets(targets: Tensor) -> Tensor:
    """How many targets count, as a scalar tensor: the host need not wait for the device."""
    return (targets != IGNORE).sum()


def plain_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropy of logits [..., V] against targets [...], in fp32 or fp64."""
    wide = logits.to(at_least_fp32(logits.dtype))
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")


class Output(nn.Module):
    """Hidden states -> logits, or loss. It has no parameters: the matrix belongs to the head, or to the embedding when tied.

    It is a module so that tensor parallelism, which cuts the matrix over ranks, can replace it.
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
    rows:    of `hidden` in a chunk; left out, chosen by device and vocabulary
    kernel:  `loss_and_gradient`, or a compiled version of it
    raises:  ShapeMismatch unless there is one target for each row of `hidden`
    """
    hidden, targets = as_rows(hidden, targets)
    if rows is None:
        rows = chunk_rows(weight.shape[0], hidden.device.type)
    if (hidden.shape[0] <= rows and kernel is None) or not torch.is_grad_enabled():
        cuts = range(0, max(1, len(hidden)), rows)
        parts = [plain_cross_entropy(F.linear(hidden[i:i + rows], weight), targets[i:i + rows]) for i in cuts]
        return torch.stack(parts).sum()
    total: Tensor = ChunkedCrossEntropy.apply(hidden, weight, targets, rows, kernel or loss_and_gradient)  # type: ignore[no-untyped-call]
    return total


def loss_and_gradient(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss of one chunk, and its gradient with respect to the logits: softmax minus one-hot, 0 where not counted.

    logits: [n, V] -> a scalar, and [n, V] in the dtype of the logits
    """
    counted = (targets != IGNORE).unsqueeze(1)
    index = torch.where(counted, targets.unsqueeze(1), 0)   # `gather` raises for any other negative target
    log_softmax = torch.log_softmax(logits, dim=1, dtype=at_least_fp32(logits.dtype))
    loss = -torch.where(counted, log_softmax.gather(1, index), 0.0).sum()
    if torch.compiler.is_compiling():   # the compiler fuses this into one pass; a scatter would first write all of it to memory in fp32
        gradient = log_softmax.exp() - (torch.arange(logits.shape[1], device=logits.device) == index).to(log_softmax.dtype)
    else:
        gradient = log_softmax.exp_()
        gradient.scatter_add_(1, index, torch.full_like(index, -1, dtype=gradient.dtype))
    return loss, gradient.mul_(counted).to(logits.dtype)
