"""What every cross-entropy agrees on: which targets count, what it is added up in, and how many rows of logits live at a time.

And what layers add to a loss besides.
"""

from typing import Any

import torch
from torch import Tensor, nn

IGNORE = -100                              # a target that is not counted; the number torch itself uses
CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 28}   # logits alive at a time: the CPU's cache; 1 GB in fp32


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a loss is added up in: never less than fp32."""
    return torch.promote_types(dtype, torch.float32)


def chunk_rows(vocab_size: int, device: str) -> int:
    """Rows whose logits fit the budget of the device, a power of two, at least 16."""
    elements = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"])
    return max(16, 1 << (max(1, elements // vocab_size).bit_length() - 1))


def take_extra_loss(module: nn.Module) -> Tensor | None:
    """The loss sums that layers have left in the last training forward, such as routers (models/moe.py), added up; None: there are none.

    Every layer that has a method `take_extra` is asked; afterwards it has none.
    """
    layers: list[Any] = [layer for layer in module.modules() if hasattr(type(layer), "take_extra")]
    taken = [layer.take_extra() for layer in layers]
    extras = [extra for extra in taken if extra is not None]
    return torch.stack(extras).sum() if extras else None
