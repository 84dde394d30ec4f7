"""What losses share: a loss is (sum, count); layers may add auxiliary losses. For cross-entropies also which targets are ignored, the
dtypes of sums, how many rows of logits exist at a time, and the one that computes gradients chunk by chunk.
"""

import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankloom.base.errors import LossError, ShapeMismatch
from rankloom.base.tensors import at_least_fp32

Kernel = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]   # logits [n, V], targets [n] -> their summed loss, its gradient [n, V]
IGNORE = -100                              # a target that is not counted, as in torch
CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 28}   # logits in memory at a time: what a CPU's cache holds; 1 GB in fp32


def sum_and_count(returned: Any, where: str) -> tuple[Tensor, Tensor]:
    """What a loss function returned, checked: the sum; the count, detached, in fp64 on the sum's device. Both without dims.

    raises: LossError, beginning with `where`, for anything else
    """
    if not (isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[0], Tensor) and returned[0].dim() == 0):
        raise LossError(
            f"{where}: the loss function returned {_describe(returned)}, expected (sum, count): the loss *summed* over items, a tensor of "
            "no dims, and how many items that were. A mean cannot be combined rightly over ranks; "
            "return for example `F.cross_entropy(logits, targets, reduction='sum'), targets.numel()`")
    total, count = returned
    if total.is_complex():
        raise LossError(f"{where}: the loss is of {total.dtype}, which has no least value; return a real number, such as its abs()")
    if not (isinstance(count, Real) or (isinstance(count, Tensor) and count.numel() == 1)):
        raise LossError(f"{where}: the loss function counted {_describe(count)}, expected one number: how many items it has summed over")
    if isinstance(count, Real):   # filled in on the device: to copy a number there would wait for all that is queued
        return total, torch.full((), float(count), dtype=torch.float64, device=total.device)
    # From the host it goes without waiting, too. To the host that would be wrong: it would be read before it has come.
    return total, count.detach().to(total.device, torch.float64, non_blocking=count.is_cpu).reshape(())


def exact_sum(numbers: Iterable[float]) -> float:
    """Their sum, rounded once, so that their order does not matter. Where there is none: what addition gives, NaN or an infinity."""
    held = list(numbers)
    try:
        return math.fsum(held)
    except (ValueError, OverflowError):   # infinities of both signs; too large
        return sum(held)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"one tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {', '.join(map(_describe, value)) or 'nothing'}"
    return f"a {type(value).__name__}"


def waiting_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a weight's gradient waits for backward: its own, but fp32 for fp16.

    Only backward multiplies by the loss scale. Until then fp16 could not hold a gradient that fits it only with the scale.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def add_sum_over_rows(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left.T @ right, for total [V, W] in at least fp32, left [n, V], right [n, W].

    On CUDA one kernel multiplies 16-bit factors and adds to the fp32 total; in two, the product would be rounded, written and read again.
    On the CPU, and under torch.compile, fp16 factors are cast to fp32 first: the sum of their products over rows may be infinite in fp16.
    """
    if left.dtype == right.dtype == total.dtype:
        total.addmm_(left.T, right)
    elif left.is_cuda and left.dtype == right.dtype and total.dtype == torch.float32 and not torch.compiler.is_compiling():
        torch.addmm(total, left.T, right, out_dtype=torch.float32, out=total)
    elif left.dtype == right.dtype == torch.float16:
        total += left.float().T @ right.float()
    else:
        total += left.T @ right


def as_rows(hidden: Tensor, targets: Tensor, where: str = "loss") -> tuple[Tensor, Tensor]:
    """hidden [..., W] -> [N, W], and targets [...] -> [N].

    raises: ShapeMismatch, beginning with `where`, unless there is one target for each: in chunks, nobody would miss the others
    """
    rows, wanted = hidden.flatten(0, -2), targets.flatten()
    if len(rows) != len(wanted):
        raise ShapeMismatch(f"{where}: targets of shape {tuple(targets.shape)} for hidden states of shape {tuple(hidden.shape)}, expected "
                            f"one for each of {len(rows)} tokens")
    return rows, wanted


def chunk_rows(vocab_size: int, device: str) -> int:
    """How many rows of logits fit the device's budget: a power of two, at least 16."""
    elements = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"])
    return max(16, 1 << (max(1, elements // vocab_size).bit_length() - 1))


class ChunkedCrossEntropy(torch.autograd.Function):
    """Forward computes the gradients too, of what is not frozen. Backward scales them in place, so it can run only once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, kernel: Kernel) -> Tensor:
        """hidden [N, W], weight [V, W], targets [N] -> the summed loss."""
        total = torch.zeros((), dtype=at_least_fp32(hidden.dtype), device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=at_least_fp32(weight.dtype)) if ctx.needs_input_grad[1] else None
        for start in range(0, hidden.shape[0], rows):
            part = hidden[start:start + rows]
            loss, grad_logits = kernel(F.linear(part, weight), targets[start:start + rows])
            total = total + loss   # not in place: torch 2.11 compiles wrong gradients for an output that was changed
            if grad_hidden is not None:
                grad_hidden[start:start + rows] = grad_logits @ weight
            if grad_weight is not None:
                add_sum_over_rows(grad_weight, grad_logits, part)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(waiting_dtype(weight.dtype)))
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients. grad: a scalar"""
        grad_hidden, grad_weight = ctx.saved_tensors
        return (None if grad_hidden is None else grad_hidden.mul_(grad),
                None if grad_weight is None else grad_weight.mul_(grad).to(ctx.dtype), None, None, None)


def take_auxiliary_loss(module: nn.Module) -> Tensor | None:
    """The sum of the auxiliary losses of the last training forward of each layer, such as routers' (models/moe.py); None if there are none.

    Calls `take_auxiliary` of every layer that has it, which also clears the layer's loss. Under an engine (`adds_up`)
    a layer's loss is the sum over all training forwards since the last call, not only the last.
    """
    layers: list[Any] = [layer for layer in module.modules() if hasattr(type(layer), "take_auxiliary")]
    taken = [layer.take_auxiliary() for layer in layers]
    extras = [extra for extra in taken if extra is not None]
    return torch.stack(extras).sum() if extras else None
