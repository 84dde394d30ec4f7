"""The bytes that a rank holds for a model in training, by kind."""

import resource
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from rankloom.shard.optimizer import Optimizer
from rankloom.train.placement import Placement


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that this rank holds for a model in training; of pages that ranks share, its part."""

    parameters: int   # what this rank owns: slices or wholes, masters included
    gathered: int     # whole parameters beyond these
    gradients: int    # whole ones, slices, and the buffers in which they are summed
    optimizer: int    # its state


def held_by(placement: Placement, optimizer: Optimizer) -> Held:
    """Measured from the tensors that there are now."""
    state = sum(value.nbytes for held in optimizer.state.values() for value in held.values() if isinstance(value, Tensor) and value.dim())
    return Held(*placement.held(), state)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this rank has held: of its GPU, or of its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
