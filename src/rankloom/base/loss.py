"""What every cross-entropy agrees on: which targets count, what it is added up in, and how many rows of logits live at a time."""

import torch

IGNORE = -100                              # a target that is not counted; the number torch itself uses
CHUNK_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 28}   # logits alive at a time: the CPU's cache; 1 GB in fp32


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a loss is added up in: never less than fp32."""
    return torch.promote_types(dtype, torch.float32)


def chunk_rows(vocab_size: int, device: str) -> int:
    """Rows whose logits fit the budget of the device, a power of two, at least 16."""
    elements = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"])
    return max(16, 1 << (max(1, elements // vocab_size).bit_length() - 1))
