"""Random streams keyed by what they are for, never by when or where they are drawn.

A stream is a `torch.Generator` seeded with a hash of (seed, key ...). Initial weights are keyed by parameter name, sample order by epoch.
So they are equal on every mesh, and there is no generator state to save.
"""

import hashlib

import torch
from torch import Tensor


def key_to_seed(seed: int, *key: str | int) -> int:
    """A 63-bit seed from a run's seed and a key; other keys give unrelated seeds.

    >>> key_to_seed(0, "dropout", 1) == key_to_seed(0, "dropout", 1) != key_to_seed(0, "dropout", 2)
    True
    """
    text = repr((seed, *key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def stream(seed: int, *key: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of one key, at its beginning."""
    return torch.Generator(device=device).manual_seed(key_to_seed(seed, *key))


def usual_values(name: str, like: Tensor) -> Tensor:
    """Stand-in weights for a trial forward, the same on every rank: of a size at which activations neither vanish nor grow.

    like: a tensor of the shape, dtype and device wanted
    """
    drawn = torch.randn(like.shape, generator=stream(0, name, device=like.device), device=like.device)
    usual = drawn * like.shape[-1] ** -0.5 if like.dim() > 1 else float(not name.endswith("bias")) + 0.1 * drawn
    return usual.to(like.dtype)
