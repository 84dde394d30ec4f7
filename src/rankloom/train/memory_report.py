"""The bytes that a rank holds for a model in training, by kind."""

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from rankloom.base.quantities import show_bytes
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


@contextmanager
def memory_told(rank: int, device: torch.device, held: Callable[[], Held]) -> Iterator[None]:
    """An error inside that says that memory ran out says, too, who had it, and how to need less."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if _is_out_of_memory(error):
            kinds = ", ".join(f"{kind} {show_bytes(nbytes)}" for kind, nbytes in asdict(held()).items())
            error.add_note(f"rank {rank} ran out of memory. Of the model in training it held {kinds}; the rest is activations, and what "
                           f"is not of this engine. The most that it used is {show_bytes(peak_memory(device))}. It needs less with more "
                           "micro-batches (accumulate), recompute, a higher stage, or offload")
        raise


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)   # of torch, on a CPU
