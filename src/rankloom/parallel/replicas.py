"""Replicas stay equal from step to step: their parameters are checked, and their buffers are averaged.

parallel/equal_start.py makes them equal at the start.
"""

from torch import nn

from rankloom.parallel.buffers import BufferKeeper
from rankloom.parallel.known_parameters import KnownParameters
from rankloom.world.group import Group


class ReplicaGuard:
    """The checks of one model on the ranks of one group."""

    def __init__(self, model: nn.Module, group: Group):
        self.parameters, self.buffers = KnownParameters(model), BufferKeeper(model, group)
