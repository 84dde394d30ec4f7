"""The state dict of a sharded model, whole, under the names of the plain one: gathered from the slices, and loaded into them."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import ModelMismatch, UnitError
from rankloom.parallel.model_split import ModelSplit
from rankloom.parallel.sections.sharding import Sharding
from rankloom.shard.optimizer import ParameterSlice
from rankloom.shard.optimizer_state import Entry, join_slices
from rankloom.shard.unit import Unit
from rankloom.world.group import Group

DIFFERENCES_SHOWN = 3
EXTRA = "_extra_state"   # torch's key for what a module's `get_extra_state` returns: anything, of any shape


def is_extra(name: str) -> bool:
    """Whether an entry of a state dict is a module's extra state."""
    return name.rpartition(".")[2] == EXTRA


def set_extra(model: nn.Module, name: str, value: Any) -> None:
    """Give a module its extra state. name: that of the entry in a state dict"""
    model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


@torch.no_grad()
def full_values(model: nn.Module, sharding: Sharding) -> dict[str, Tensor]:
    """A whole state dict in CPU memory, in the master dtype, on all ranks. A collective.

    sent: each slice by broadcast to all; a device holds one whole tensor at a time
    """
    return {entry.name: entry.get() for entry in value_entries(model, sharding, rank=None)}


def expect_own_parameters(sharding: Sharding) -> None:
    """Before slices are saved: raise UnitError, on all ranks, when a parameter of one was changed or replaced, as its slices were not.

    A collective. Otherwise a forward looks, on its own rank.
    """
    sharding.group.agree(changed_parameter(sharding), error=UnitError, label="parameters are as they were left")


def changed_parameter(sharding: Sharding) -> str | None:
    """What is wrong on this rank, in words, if a parameter was changed or replaced and its slice was not (which may be the same memory)."""
    try:
        for section in sharding.sections:
            if not all(unit.is_its_slice for unit in section.units):
                section.expect_own_parameters()
    except UnitError as error:
        return str(error)
    return None


def value_entries(model: nn.Module, sharding: Sharding, *, rank: int | None) -> list[Entry]:
    """The values of `full_values`, to be gathered one by one, by all ranks in this order. rank: of the group, gets them; None: all do"""
    units, entries = units_of(sharding), []
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in units:
            unit, own_name = units[id(value)]
            entries.append(Entry(name, unit.own.dtype, unit.layout.slot(own_name).shape, partial(_join_parameter, unit, own_name, rank)))
        elif not isinstance(value, Tensor):
            entries.append(Entry(name, None, torch.Size(), partial(deepcopy, value)))
        else:
            wanted = value.detach() if rank in (None, sharding.group.rank) else None
            entries.append(Entry(name, value.dtype, value.shape, partial(_copy_of, wanted)))
    return entries


def units_of(sharding: Sharding) -> dict[int, tuple[Unit, str]]:
    """The id of a parameter -> its unit, and its name there; a tied one may have several in a state dict."""
    return {id(param): (unit, name) for unit in sharding.units for name, param in unit.params.items()}


def _copy_of(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.cpu().clone()


@torch.no_grad()
def _join_parameter(unit: Unit, name: str, rank: int | None) -> Tensor | None:
    slices = {at: unit.layout.slice_of(name, at) for at in range(unit.group.size)}
    spans = {at: (start, stop) for at, (start, stop) in slices.items() if stop > start}
    return join_slices(unit.slice_view(unit.own, name), spans, unit.own.dtype, unit.layout.slot(name).shape, unit.group,
                       rank=rank, label=f"whole {name}")


@torch.no_grad()
def load_values(model: nn.Module, sharding: Sharding, state: Mapping[str, Tensor], groups: Iterable[Group],
                split: ModelSplit | None = None, *, strict: bool = True) -> tuple[list[str], list[str]]:
    """Load this rank's slices of a whole state dict, and publish them; returns the names that it lacks, and those unknown. A collective.

    groups: of every mesh axis: if the state does not fit on one rank, all raise
    split:  how `model` was cut out of the whole, if it was
    strict: False passes over names that the state dict lacks, which must be the same on all ranks, and unknown ones
    raises: ModelMismatch, on all ranks, with nothing changed, when names or shapes are not those of this model
    """
    units, mine = units_of(sharding), model.state_dict(keep_vars=True)
    shapes = _whole_shapes(mine, units, split)
    where = f"rank {sharding.group.world_rank}"
    problem = without_values(state, where, mine)
    lacking, unknown = _names_apart(mine, {} if problem else state)
    if not strict and not problem:
        state = {name: value for name, value in state.items() if name in mine}
        shapes = {name: shape for name, shape in shapes.items() if name in state}
    _agree_to_load(problem or difference(shapes, state, where), lacking, groups)
    sharding.wait_for_readers()
    for name, value in mine.items():
        if name not in state:
            continue
        new = split.cut(name, state[name]) if split else state[name]
        if id(value) in units:
            unit, own_name = units[id(value)]
            unit.slice_view(unit.own, own_name).view(-1).copy_(unit.slice_of(own_name, new))
        elif is_extra(name):
            set_extra(model, name, new)
        else:
            value.copy_(new)   # not into `detach()`, which for a sparse tensor is another one
    sharding.publish()
    return lacking, unknown


def _whole_shapes(mine: Mapping[str, Any], units: Mapping[int, tuple[Unit, str]], split: ModelSplit | None) -> dict[str, torch.Size]:
    """The shapes that a whole state dict has. mine: this rank's own, in which a released parameter has no shape"""
    shapes = shapes_in(mine)
    for name, value in mine.items():
        if id(value) in units:
            unit, own_name = units[id(value)]
            shapes[name] = unit.layout.slot(own_name).shape
    return {name: split.whole_shape(name, shape) for name, shape in shapes.items()} if split else shapes


def _names_apart(mine: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The names that a state dict lacks, and those that only it has."""
    return [name for name in mine if name not in state], [name for name in state if name not in mine]


def _agree_to_load(problem: str | None, lacking: list[str], groups: Iterable[Group]) -> None:
    """Raise ModelMismatch, on all ranks, if one has a problem, or if what is lacking differs between them."""
    for group in groups:
        said = group.all_gather_object((problem, lacking), label="load a state dict")
        problem = "\n".join(dict.fromkeys(each for each, _ in said if each)) or None
        other = next((rank for rank, (_, theirs) in zip(group.ranks, said, strict=True) if theirs != said[0][1]), None)
        if problem is None and other is not None:
            problem = f"rank {group.ranks[0]} and rank {other} would load other names of a state dict: give all ranks the same"
    if problem:
        raise ModelMismatch(problem)


def shapes_in(state: Mapping[str, Any]) -> dict[str, torch.Size]:
    """By name. Extra state may be anything, so it counts as a scalar."""
    return {name: torch.Size() if is_extra(name) else value.shape for name, value in state.items()}


def without_values(state: Any, where: str, own: Mapping[str, Any]) -> str | None:
    """What of a state dict that a user gave is no tensor with values, in words, or None.

    where: begins the text
    own:   the model's own tensors that may be sparse: they are loaded from sparse ones
    """
    if not isinstance(state, Mapping):
        return f"{where}: a {type(state).__name__} was given as state dict, expected the names of tensors with their values"
    for name, value in state.items():
        layout = getattr(own.get(name), "layout", torch.strided)
        if not is_extra(name) and (not isinstance(value, Tensor) or value.is_meta or value.layout is not layout):
            found = f"a {type(value).__name__}" if not isinstance(value, Tensor) else f"on {value.device}, of layout {value.layout}"
            wanted = "a dense tensor with values" if layout is torch.strided else f"a tensor with values, of layout {layout}"
            return f"{where}: {name} in the state dict is {found}, expected {wanted}"
    return None


def difference(shapes: Mapping[str, torch.Size], state: Mapping[str, Any], where: str) -> str | None:
    """How a whole state dict differs from these shapes, in words, or None. where: begins the text"""
    theirs = shapes_in(state)
    differ = [f"{name}: {_shown(theirs.get(name))} in the state dict, {_shown(shapes.get(name))} in the model"
              for name in dict.fromkeys((*shapes, *theirs)) if theirs.get(name) != shapes.get(name)]
    if not differ:
        return None
    return f"{where}: this is the state dict of another model, {len(differ)} tensors differ: {'; '.join(differ[:DIFFERENCES_SHOWN])}"


def _shown(shape: torch.Size | None) -> str:
    return "missing" if shape is None else str(tuple(shape))


def owned_slices(sharding: Sharding, rank: int) -> dict[str, ParameterSlice]:
    """What a rank of the shard axis owns of each trainable parameter."""
    return {slot.name: ParameterSlice(slot.name, slot.shape, *unit.layout.slice_of(slot.name, rank))
            for unit in sharding.units if unit.trainable for slot in unit.layout.slots}
