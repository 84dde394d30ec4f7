"""Along which axes of the mesh a model was cut, so that other ranks hold other parts of it: noted on the model itself."""

from torch import nn

from rankloom.base.errors import ConfigError
from rankloom.world.group import Group

_AXES = "rankloom_axes"   # attribute of modules


def note_axis(model: nn.Module, axis: str, group: Group) -> None:
    """Note on each module that the model was cut over the ranks of a group. Each, as a pipeline takes some of them."""
    for module in model.modules():
        vars(module)[_AXES] = {**vars(module).get(_AXES, {}), axis: group}


def axes_of(model: nn.Module) -> dict[str, Group]:
    """Axis -> the ranks over which the model was cut, "tensor" and "expert"."""
    found: dict[str, Group] = {}
    for module in model.modules():
        found |= vars(module).get(_AXES, {})
    return found


def expect_same_part(model: nn.Module, group: Group) -> None:
    """Raise ConfigError when ranks of the group hold other parts of the model: their values and gradients have nothing in common."""
    for axis, peers in axes_of(model).items():
        if others := sorted({*peers.ranks} & {*group.ranks} - {group.world_rank}):
            raise ConfigError(f"{group.where(type(model).__name__)}: rank {others[0]} holds another part of the model, which was cut along "
                              f"the axis {axis!r}: give the ranks that hold the same part, such as world.group('replicate', 'shard') of a "
                              f"mesh with the axis {axis}")
