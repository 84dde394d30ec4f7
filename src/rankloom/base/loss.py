"""What every loss agrees on: it is a sum and a count. And every cross-entropy: which targets count, what it is added up in, and how many
rows of logits live at a time.

And what layers add to a loss besides.
"""

from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import LossError

IGNORE = -100                              # a target that is not counted; the number torch itself uses
CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 28}   # logits alive at a time: the CPU's cache; 1 GB in fp32


def sum_and_count(returned: Any, where: str) -> tuple[Tensor, Tensor]:
    """What a loss function returned: the sum, and the count, detached, fp64 on the sum's device; both of no dims.

    raises: LossError, which begins with `where`, when it is anything else
    """
    if not (isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[0], Tensor) and returned[0].dim() == 0):
        raise LossError(
            f"{where}: the loss function returned {_describe(returned)}, expected (sum, count): the loss *summed* over items, a tensor of "
            "no dims, and how many items that were. A mean cannot be combined rightly over ranks; "
            "return for example `F.cross_entropy(logits, targets, reduction='sum'), targets.numel()`")
    total, count = returned
    if not (isinstance(count, Real) or (isinstance(count, Tensor) and count.numel() == 1)):
        raise LossError(f"{where}: the loss function counted {_describe(count)}, expected one number: how many items it has summed over")
    if isinstance(count, Real):   # filled in on the device: a number that is brought there waits for all that the device has to do
        return total, torch.full((), float(count), dtype=torch.float64, device=total.device)
    return total, count.detach().to(total.device, torch.float64).reshape(())


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"one tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {', '.join(map(_describe, value)) or 'nothing'}"
    return f"a {type(value).__name__}"


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a loss is added up in: never less than fp32."""
    return torch.promote_types(dtype, torch.float32)


def chunk_rows(vocab_size: int, device: str) -> int:
    """Rows whose logits fit the budget of the device, a power of two, at least 16."""
    elements = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"])
    return max(16, 1 << (max(1, elements // vocab_size).bit_length() - 1))


def take_auxiliary_loss(module: nn.Module) -> Tensor | None:
    """The loss sums that layers have left in the last training forward, such as routers (models/moe.py), added up; None: there are none.

    Every layer that has a method `take_auxiliary` is asked; afterwards it has none.
    """
    layers: list[Any] = [layer for layer in module.modules() if hasattr(type(layer), "take_auxiliary")]
    taken = [layer.take_auxiliary() for layer in layers]
    extras = [extra for extra in taken if extra is not None]
    return torch.stack(extras).sum() if extras else None
