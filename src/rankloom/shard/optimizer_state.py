"""The state of an optimizer over slices: gathered whole under the plain model's names, and cut to slices again.

The whole is {"state": {name: {key: value}}, "param_groups": [{"params": [names], "lr": ...}]}, the same from any number of ranks.

    gather   ranks exchange inventories, without tensors, so that all make the same calls; then, value by value:
                 a tensor of the slice's shape     each rank's goes to its place in the whole
                 any other tensor, say "step"      comes from the first rank that has a slice
                 no tensor                         was in the inventory
    load     each rank cuts its slices out of the whole; nothing is sent

A rank that owns nothing of a parameter has no state of it. Read shard/optimizer.py before this file.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from rankloom.base.errors import ConfigError, ModelMismatch, did_you_mean
from rankloom.base.tensors import bytes_of
from rankloom.shard.optimizer import Optimizer, ParameterSlice, counter_keys, cut_state, fits, keeps_shapes, needed_state, optimizers_of
from rankloom.world.group import Group

Read = Callable[[str, str, Tensor], Tensor]
KEPT_AS_BUILT = ("params", "fused", "foreach", "capturable", "differentiable")   # settings of a param group that loading leaves alone
SEPARATOR = "\n"   # in the name of an entry, between parameter and key
PLAIN_VALUES = (int, float, str, type(None))   # and bool, which is an int


class Described(NamedTuple):
    """One value of one parameter's state on one rank."""

    kind: str | None           # the dtype of a tensor; None: a plain value; else the class of what cannot be gathered
    shape: list[int] | None    # of a tensor
    fits: bool                 # a tensor of the slice's shape, so each rank has its elements of the whole
    value: Any                 # if plain


class StateInventory(NamedTuple):
    """What a rank has of one parameter's state: for elements [start, stop), by key."""

    start: int
    stop: int
    values: dict[str, Described]


Inventories = list[dict[str, StateInventory]]   # of each rank, by parameter


@torch.no_grad()
def gather_optimizer_state(optimizer: Optimizer, owners: Mapping[str, nn.Parameter],
                           slices: Mapping[str, ParameterSlice], group: Group, *, rank: int | None = None) -> dict[str, Any] | None:
    """The whole state in CPU memory, in the plain names and shapes. All ranks of `group` call it; its slices make the whole.

    rank:    the rank of `group` that gets it, the others get None; left out: all
    sent:    each slice once to that rank, or by broadcast to all; a device holds one whole tensor at a time
    raises:  ConfigError, ModelMismatch, on all ranks
    """
    entries = state_entries(optimizer, owners, slices, group, rank=rank)
    values = {entry.name: entry.get() for entry in entries}
    return whole_state(optimizer, owners, values) if rank in (None, group.rank) else None


@dataclass(frozen=True, slots=True)
class Entry:
    """A value to be gathered whole, of which ranks have slices.

    get: a collective of these ranks. Returns the whole in CPU memory on the rank that asked, None on others; a plain value on all
    """

    name: str
    dtype: torch.dtype | None    # None: no tensor
    shape: torch.Size
    get: Callable[[], Any]

    @property
    def parameter(self) -> str:
        """The parameter or buffer that this is, or belongs to."""
        return self.name.partition(SEPARATOR)[0]


def state_entries(optimizer: Optimizer, owners: Mapping[str, nn.Parameter], slices: Mapping[str, ParameterSlice],
                  group: Group, *, rank: int | None) -> list[Entry]:
    """The values of `gather_optimizer_state`, to be gathered one by one; named by parameter and key. A collective.

    raises:  ConfigError, ModelMismatch, on all ranks
    """
    names, state = {id(owner): name for name, owner in owners.items()}, optimizer.state
    inventories = _exchange_inventories(optimizer, owners, slices, group)
    _expect_one_whole(inventories, slices, group)
    entries: list[Entry] = []
    for name in (names[id(owner)] for param_group in optimizer.param_groups for owner in param_group["params"]):
        if holders := _holders(inventories, name):
            mine = state[owners[name]] if group.rank in holders else {}
            entries += _entries_of(slices[name], holders, mine, group, rank)
    return entries


def _entries_of(owned: ParameterSlice, holders: dict[int, StateInventory], mine: Mapping[str, Any], group: Group,
                rank: int | None) -> Iterator[Entry]:
    """The values of one parameter. holders: as `_holders` returns them   mine: this rank's state of it"""
    spans = {at: (inventory.start, inventory.stop) for at, inventory in holders.items()}
    first_rank = min(holders)
    for key, first in holders[first_rank].values.items():
        entry = f"{owned.name}{SEPARATOR}{key}"
        if first.kind is None:
            yield Entry(entry, None, torch.Size(), partial(copy, first.value))
            continue
        is_cut = all(inventory.values[key].fits for inventory in holders.values())
        dtype, shape = getattr(torch, first.kind), owned.shape if is_cut else torch.Size(first.shape or ())
        sent = spans if is_cut else {first_rank: (0, shape.numel())}
        label = f"optimizer state {key} of {owned.name}"
        yield Entry(entry, dtype, shape, partial(join_slices, mine.get(key), sent, dtype, shape, group, rank=rank, label=label))


def whole_state(optimizer: Optimizer, owners: Mapping[str, nn.Parameter],
                values: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an optimizer in the plain names. values: those of its entries, by their names"""
    names, state = {id(owner): name for name, owner in owners.items()}, dict[str, dict[str, Any]]()
    for joint, value in values.items():
        name, _, key = joint.partition(SEPARATOR)
        state.setdefault(name, {})[key] = value
    groups = [{key: [names[id(owner)] for owner in value] if key == "params" else _copied(value) for key, value in param_group.items()}
              for param_group in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def _exchange_inventories(optimizer: Optimizer, owners: Mapping[str, nn.Parameter], slices: Mapping[str, ParameterSlice],
                          group: Group) -> Inventories:
    """What each rank has, of the parameters of which it has a slice and a state. A collective."""
    state = optimizer.state
    described = {name: {str(key): _describe(key, value, owner) for key, value in state[owner].items()}
                 for name, owner in owners.items() if owner in state and not slices[name].is_empty}
    mine = {name: StateInventory(slices[name].start, slices[name].stop, values) for name, values in described.items()}
    received = group.all_gather_object(mine, label="optimizer state")   # as JSON, so named tuples arrive as lists
    return [{name: StateInventory(start, stop, {key: Described(*fields) for key, fields in values.items()})
             for name, (start, stop, values) in each.items()} for each in received]


def _describe(key: Any, value: Any, owner: nn.Parameter) -> Described:
    if not isinstance(key, str):   # in JSON it would become one, by which nobody finds the value
        return Described(f"{type(value).__name__} under a key of class {type(key).__name__}", None, False, None)
    if isinstance(value, Tensor):
        return Described(str(value.dtype).removeprefix("torch."), list(value.shape), value.shape == owner.shape, None)
    is_plain = isinstance(value, PLAIN_VALUES)
    return Described(None if is_plain else type(value).__name__, None, False, value if is_plain else None)


def _holders(inventories: Inventories, name: str) -> dict[int, StateInventory]:
    """The ranks that have state of a parameter, in order, and what they have."""
    return {at: inventory[name] for at, inventory in enumerate(inventories) if name in inventory}


def _expect_one_whole(inventories: Inventories, slices: Mapping[str, ParameterSlice], group: Group) -> None:
    """Raise unless ranks have the same kinds of values, and their slices make wholes. All ranks judge alike, so all raise or none."""
    for name in dict.fromkeys(name for inventory in inventories for name in inventory):
        holders = _holders(inventories, name)
        expected = holders[min(holders)].values
        for key, described in expected.items():
            if described.kind is not None and described.shape is None:
                raise ConfigError(f"optimizer state {key} of {name} is a {described.kind}, which cannot be gathered; "
                                  "keep tensors, numbers, strings or None, under keys that are strings")
        for at, inventory in holders.items():
            if _kinds(inventory.values) != _kinds(expected):
                raise ModelMismatch(f"rank {group.ranks[at]}: the optimizer state of {name} is {_listed(inventory.values)}, but on rank "
                                    f"{group.ranks[min(holders)]} it is {_listed(expected)}; has a step failed on one of them?")
        covered, n = sum(inventory.stop - inventory.start for inventory in holders.values()), slices[name].shape.numel()
        if covered != n:
            raise ModelMismatch(f"ranks {', '.join(str(group.ranks[at]) for at in holders)} have optimizer state for {covered} elements of "
                                f"{name}, expected all {n}; has a step failed on another rank, or is it cut over another group?")


def _kinds(values: Mapping[str, Described]) -> dict[str, str | None]:
    return {key: described.kind for key, described in values.items()}


def _listed(values: Mapping[str, Described]) -> str:
    return ", ".join(f"{key} ({kind})" for key, kind in _kinds(values).items()) or "empty"


def join_slices(mine: Tensor | None, spans: Mapping[int, tuple[int, int]], dtype: torch.dtype, shape: torch.Size, group: Group, *,
                rank: int | None, label: str) -> Tensor | None:
    """The slices of all ranks as one tensor in CPU memory, on `rank` or on all. A collective. Sent as bytes: backends refuse some dtypes.

    mine:  this rank's slice, of the dtype of the whole; not looked at on a rank without a span
    spans: rank -> [start, stop) of the elements it has, flattened; together they cover the whole
    """
    takes, size = rank in (None, group.rank), dtype.itemsize
    data = bytes_of(mine.to(group.device)) if mine is not None and group.rank in spans else None
    whole = torch.empty(shape.numel() * size if takes else 0, dtype=torch.uint8, device=group.device)
    for at, (start, stop) in spans.items():
        part = whole[start * size : stop * size]
        if takes and data is not None and at == group.rank:
            part.copy_(data)
        if rank is None:
            group.broadcast(part, at, label=label)
        elif data is not None and at == group.rank != rank:
            group.send(data, rank, label=label)
        elif at != rank and takes:
            group.recv(part, at, label=label)
    return whole.cpu().view(dtype).view(shape) if takes else None


@torch.no_grad()
def load_optimizer_state(optimizer: Optimizer, owners: Mapping[str, nn.Parameter], slices: Mapping[str, ParameterSlice],
                         full_state: Mapping[str, Any], *, rank: int, read: Read | None = None) -> None:
    """Replace the optimizer's state by this rank's slices of a whole one. Nothing is sent; `full_state` is copied.

    Learning rates and the like are loaded; how the optimizer computes (fused, foreach) stays as it was built.

    rank:   for messages
    read:   gives a slice its values, by parameter and key, where tensors of `full_state` are on the meta device
    raises: ModelMismatch, on all ranks if all are given the same, with the optimizer unchanged
    """
    if problem := misfit(optimizer, owners, slices, full_state):
        raise ModelMismatch(f"rank {rank}: {problem}")
    for ours, saved in zip(optimizer.param_groups, full_state["param_groups"]):
        ours.update({key: _like(ours.get(key), _copied(value)) for key, value in saved.items() if key not in KEPT_AS_BUILT})
    counters = counter_keys(full_state["state"], slices)
    for one in optimizers_of(optimizer):
        one.state.clear()
        if isinstance(one, torch.optim.Optimizer):   # as torch's own loading does: AdamW sets right what Adam's settings say of its decay
            one.__setstate__({"state": one.state, "param_groups": one.param_groups})
        _fill_state(one, owners, slices, full_state["state"], counters, read)


def _fill_state(optimizer: torch.optim.Optimizer, owners: Mapping[str, nn.Parameter], slices: Mapping[str, ParameterSlice],
                whole: Mapping[str, Mapping[str, Any]], counters: set[str], read: Read | None) -> None:
    """Give an optimizer this rank's slices of the state. whole: by parameter and key   read: see `load_optimizer_state`"""
    names = {id(owner): name for name, owner in owners.items()}
    for settings, owner in [(param_group, owner) for param_group in optimizer.param_groups for owner in param_group["params"]]:
        name = names[id(owner)]
        if name not in whole or slices[name].is_empty:
            continue
        own = {key: cut_state(value, slices[name], owner, is_counter=key in counters) for key, value in whole[name].items()}
        if read is not None:
            own |= {key: read(name, key, value) for key, value in own.items() if isinstance(value, Tensor)}
        optimizer.state[owner] = {key: _place(value, owner, settings, optimizer, is_counter=key in counters) for key, value in own.items()}


def _place(value: Any, owner: nn.Parameter, settings: Mapping[str, Any], optimizer: torch.optim.Optimizer, *, is_counter: bool) -> Any:
    """The value with the device and dtype that the optimizer would have given it. settings: of its param group"""
    if not isinstance(value, Tensor):
        return value
    if is_counter and value.dim() == 0:   # on the parameter's device only where a kernel reads it
        on_device = settings.get("fused") or settings.get("capturable")
        return value.to(owner.device, torch.float32) if on_device else value.to("cpu")
    is_of_torch = type(optimizer).__module__.startswith("torch.optim")   # keeps all its state in the parameter's dtype
    dtype = owner.dtype if is_of_torch else value.dtype
    if value.shape != owner.shape:
        return value.to(owner.device, dtype)
    return torch.empty_like(owner, dtype=dtype).copy_(value)   # with the parameter's strides, which fused kernels rely on


def misfit(optimizer: Optimizer, owners: Mapping[str, nn.Parameter], slices: Mapping[str, ParameterSlice],
           full_state: Mapping[str, Any]) -> str | None:
    """Why `full_state` cannot be loaded, in words, or None. The same on all ranks, whatever their slices."""
    if not {"state", "param_groups"} <= full_state.keys():
        return (f"the saved optimizer has the keys {sorted(full_state)}, expected 'state' and 'param_groups'; "
                "was it gathered on one rank and is loaded on another?")
    if problem := _numbered(full_state["param_groups"], owners):
        return problem
    names = {id(owner): name for name, owner in owners.items()}
    ours = [{**param_group, "params": [names[id(owner)] for owner in param_group["params"]]} for param_group in optimizer.param_groups]
    problems = [*_misfits_of_groups(ours, full_state["param_groups"])]
    if unknown := sorted(full_state["state"].keys() - owners.keys()):
        problems.append(f"there is saved optimizer state of {unknown[0]!r}, which this model does not have: is it of another model? "
                        f"{did_you_mean(unknown[0], owners)}")
    for one in optimizers_of(optimizer):
        own = [slices[names[id(owner)]] for param_group in one.param_groups for owner in param_group["params"]]
        problems += _misfits_of_kinds(needed_state(one), own, full_state["state"])
        if keeps_shapes(one):
            problems += _misfits_of_shapes(own, full_state["state"])
    return problems[0] if problems else None


def _numbered(groups: list[dict[str, Any]], owners: Mapping[str, nn.Parameter]) -> str | None:
    """What is wrong with a state whose parameters have numbers, as in torch's own `state_dict()`, in words, or None."""
    numbers = [param for group in groups for param in group["params"] if not isinstance(param, str)]
    return (f"the saved optimizer has numbers ({numbers[0]!r} first) in place of names, as the `state_dict()` of a plain torch optimizer "
            f"has: which of the {len(owners)} parameters is which depends on the order in which it got them. Put the names there, for "
            "example `names = [name for name, p in model.named_parameters() if p.requires_grad]`, then names[i] for each i, as key in "
            "'state' and in 'params' of each group") if numbers else None


def _misfits_of_groups(ours: list[dict[str, Any]], saved: list[dict[str, Any]]) -> Iterator[str]:
    if len(ours) != len(saved):
        yield f"the saved optimizer has {len(saved)} parameter groups, expected {len(ours)}; build it alike"
    for index, (our, their) in enumerate(zip(ours, saved)):
        here, there = set(our["params"]), set(their["params"])
        if only_saved := sorted(there - here):
            yield (f"parameter group {index} of the saved optimizer has {only_saved[0]!r}, the one here does not: "
                   f"is it of another model? {did_you_mean(only_saved[0], here)}")
        if only_here := sorted(here - there):
            yield (f"parameter group {index} has {only_here[0]!r}, the saved one's does not: "
                   f"is it of another model? {did_you_mean(only_here[0], there)}")
        more, fewer = sorted(their.keys() - our.keys()), sorted(our.keys() - their.keys())
        if more and fewer:   # only more, or only fewer, may come from another version of torch or from a scheduler
            yield (f"parameter group {index} of the saved optimizer has {', '.join(more)} where this one has {', '.join(fewer)}: "
                   "it is the state of another kind of optimizer")


def _misfits_of_kinds(needed: set[str], slices: list[ParameterSlice], state: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for owned in slices:
        held = state.get(owned.name, {}).keys()
        if held and (missing := sorted(needed - held)):
            yield (f"the saved optimizer state of {owned.name} has {', '.join(sorted(held))}, and {', '.join(missing)} is needed: it is "
                   "the state of another kind of optimizer")


def _misfits_of_shapes(slices: list[ParameterSlice], state: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for owned in slices:
        for key, value in state.get(owned.name, {}).items():
            if not fits(value, owned.shape):
                yield (f"optimizer state {key} of {owned.name} has shape {tuple(value.shape)}, expected {tuple(owned.shape)}: "
                       "is it of another model?")


def _like(ours: Any, saved: Any) -> Any:
    """A setting of a parameter group, which may come from JSON, in the type that the optimizer uses."""
    if isinstance(ours, Tensor) and isinstance(saved, Tensor | int | float | list):
        return torch.as_tensor(saved, dtype=ours.dtype, device=ours.device)
    return tuple(saved) if isinstance(ours, tuple) and isinstance(saved, list) else saved


def _copied(value: Any) -> Any:
    """A setting of a parameter group, with lists, dicts and tensors of its own: an optimizer may write to those that it has."""
    return tree_map(lambda part: part.detach().cpu().clone() if isinstance(part, Tensor) else part, value)
