"""The bytes that a rank holds for a model in training, by kind."""

from dataclasses import dataclass

from torch import Tensor

from rankloom.train.placement import Optimizer, Placement


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
