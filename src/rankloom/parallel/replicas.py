"""Replicas stay equal from step to step: their parameters are the ones that were prepared, and their buffers are averaged.

They begin equal by parallel/equal_start.py.
"""

from torch import nn

from rankloom.parallel.buffers import BufferKeeper
from rankloom.parallel.known_parameters import KnownParameters
from rankloom.world.group import Group


class ReplicaGuard:
    """What watches over one model on the ranks of one group."""

    def __init__(self, model: nn.Module, group: Group):
        self.parameters, self.buffers = KnownParameters(model), BufferKeeper(model, group)
