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

    parameters: int   # those that this rank owns, whole or slices, with masters
    gathered: int     # whole parameters in addition to these
    gradients: int    # whole ones, slices, buffers that are reduced, and the errors that compression keeps of them
    optimizer: int    # its state


def held_by(placement: Placement, optimizer: Optimizer) -> Held:
    """Measured: the sizes of the tensors that exist now."""
    kept = [held for held in optimizer.state.values() if isinstance(held, dict)]   # an optimizer may keep other things for no parameter
    state = sum(value.nbytes for held in kept for value in held.values() if isinstance(value, Tensor) and value.dim())
    return Held(*placement.held(), state)


def peak_memory(device: torch.device) -> int:
    """The peak bytes of this rank's GPU memory, or of its process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def explain_out_of_memory(rank: int, device: torch.device, held: Callable[[], Held]) -> Iterator[None]:
    """Add a note to an out-of-memory error inside the block: what this rank held, and how to need less."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):   # torch's words, on a CPU
            kinds = ", ".join(f"{kind} {show_bytes(nbytes)}" for kind, nbytes in asdict(held()).items())
            error.add_note(f"rank {rank} ran out of memory. For training it held {kinds}; the rest is activations, and memory outside of "
                           f"this engine. Its peak was {show_bytes(peak_memory(device))}. To need less: more micro-batches (accumulate), "
                           "recompute, a higher stage, or offload")
        raise
