"""Norms of tensors, accurate for any number of elements, at the speed of memory.

On the CPU torch sums a tensor in few running sums of its own dtype: the norm of 4e8 fp32 elements comes out 4 % too small, and 16-bit
tensors are converted at a fifth of the speed. So large tensors are summed in rows that fit the cache, and the rows' norms in fp64.

Squares in fp32 are infinite above 1.8e19, and 0 below 2.6e-23. On the CPU a norm that has met these ends is taken again in fp64. On a GPU
that would wait for the device: a 2-norm there comes out infinite, or 0, and is accurate from 1e-18 to 1e19.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rankloom.base.errors import ConfigError
from rankloom.world.group import Group

CLIP_EPSILON = 1e-6   # added to the norm that gradients are divided by, as in torch.nn.utils.clip_grad_norm_
ROW, TOGETHER = 1 << 12, 1 << 5   # elements of a running sum; rows converted together


def norm_of(x: Tensor, order: float = 2.0) -> Tensor:
    """The norm of all elements, in fp64; of complex numbers, that of their magnitudes."""
    if x.is_complex():
        x = torch.view_as_real(x) if order == 2.0 else x.abs()
    flat, wide = x.reshape(-1), torch.float64 if x.dtype == torch.float64 else torch.float32
    norm = _norm_in(wide, flat, order)
    least = 2.0 ** (-120 / order) if order < math.inf else 0.0   # its power is 2**-120: in fp32, powers of less lose digits
    is_sure = x.device.type != "cpu" or least < norm < math.inf or (norm == 0 and not flat.any())   # of experts without tokens, say
    return norm if is_sure else _norm_in(torch.float64, flat, order)


def _norm_in(wide: torch.dtype, flat: Tensor, order: float) -> Tensor:
    """The norm, with powers and sums in the dtype `wide`."""
    if flat.device.type != "cpu" or flat.numel() <= ROW:
        return torch.linalg.vector_norm(flat, order, dtype=wide).double()
    whole = flat.numel() // ROW * ROW
    rows, rest = flat[:whole].view(-1, ROW), flat[whole:].view(1, -1)
    parts = [*rows.split(len(rows) if flat.dtype == wide else TOGETHER), *([rest] if rest.numel() else [])]
    norms = [torch.linalg.vector_norm(part.to(wide), order, dim=1).double() for part in parts]
    return torch.linalg.vector_norm(torch.cat(norms), order)


@torch.no_grad()
def clip_to_norm(grads: Sequence[tuple[Tensor, int]], groups: Sequence[Group], max_norm: float, norm_type: float | str) -> Tensor:
    """Scale gradients, in place, so that their norm over all ranks is at most `max_norm`; returns the norm before. A collective.

    grads:     this rank's, each with how many ranks of these groups hold the same elements
    groups:    one for each axis over which ranks hold other elements, one or more
    norm_type: 2, another power above 0, or infinity ("inf" too): the largest magnitude
    raises:    ConfigError for numbers that are no norm
    """
    power = float(norm_type)
    if not power > 0:
        raise ConfigError(f"clip_grad_norm_(norm_type={norm_type!r}): expected a number above 0, or infinity")
    if not max_norm >= 0:
        raise ConfigError(f"clip_grad_norm_({max_norm!r}): expected a norm of 0 or more")
    norms = [norm_of(grad, power) / copies ** (1 / power) for grad, copies in grads]
    norm = torch.stack(norms or [torch.zeros((), dtype=torch.float64, device=groups[0].device)])
    for group in groups:
        # Not an all-reduce: gloo's maximum may miss a NaN.
        norm = group.all_gather(torch.linalg.vector_norm(norm, power).view(1), label="gradient norm")
    norm = torch.linalg.vector_norm(norm, power)
    factor = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
    for grad, _ in grads:
        grad.mul_(factor.to(grad.dtype))
    return norm


def norms_of(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of each tensor, one or more on one device, in fp64."""
    if _goes_together(tensors):
        return torch.stack(torch._foreach_norm(tensors, 2.0, dtype=torch.float32)).double()
    return torch.stack([norm_of(x) for x in tensors])


def _goes_together(tensors: list[Tensor]) -> bool:
    """Whether to take all norms in a few kernels: on a GPU, launching kernels for each small tensor takes longer than running them."""
    return all(x.device.type != "cpu" and x.dtype in (torch.float32, torch.bfloat16, torch.float16) for x in tensors)
