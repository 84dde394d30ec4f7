"""The state of an optimizer over pieces: gathered whole under the plain model's names, and cut to pieces again.

Whole it is {"state": {name: {key: value}}, "param_groups": [{"params": [names], "lr": ...}]}, the same from any number of ranks.

    gather   ranks tell each other what they hold (no tensor yet), and so all make the same calls; then, value by value,
                 as many elements as the piece has   each rank's go to their place in the whole
                 any other tensor, say "step"        comes from the first rank that has a piece
                 no tensor                           has been told already
    load     each rank cuts its pieces out of the whole; nothing is sent

Where a rank has nothing of a parameter, it has no state of it. Read `shard/optimizer.py` before.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError, ModelMismatch, did_you_mean
from rankloom.shard.optimizer import Optimizer, Piece, counter_keys, cut_state, is_elementwise, parts_of
from rankloom.world.group import Group

Read = Callable[[str, str, Tensor], Tensor]
Told = dict[str, tuple[int, int, dict[str, list[Any]]]]   # name -> start, stop, key -> [dtype, shape, fits the piece, value]
HOW = ("params", "fused", "foreach", "capturable", "differentiable")   # of a group: how this run computes, not what it has learned
BETWEEN = "\n"   # in the name of an entry, between parameter and key
PLAIN_VALUES = (int, float, str, type(None))   # and bool, which is an int


@torch.no_grad()
def gather_optimizer_state(optimizer: Optimizer, owners: Mapping[str, nn.Parameter],
                           pieces: Mapping[str, Piece], group: Group, *, rank: int | None = None) -> dict[str, Any] | None:
    """The whole state in CPU memory, in the plain names and shapes. All ranks of `group` call it; its pieces make the whole.

    rank:    the rank of `group` that gets it, the others get None; left out, all get it
    sent:    each piece once to that rank, or by broadcast to all; a device holds one whole tensor at a time
    raises:  ConfigError, ModelMismatch, on all ranks
    """
    entries = state_entries(optimizer, owners, pieces, group, rank=rank)
    values = {entry.name: entry.get() for entry in entries}
    return whole_state(optimizer, owners, values) if rank in (None, group.rank) else None


@dataclass(frozen=True, slots=True)
class Entry:
    """Something whole, of which ranks have pieces.

    get: a collective of these ranks: the whole in CPU memory where it was asked for, else None; what is no tensor, everywhere
    """

    name: str
    dtype: torch.dtype | None    # None: no tensor
    shape: torch.Size
    get: Callable[[], Any]

    @property
    def parameter(self) -> str:
        """The name of the parameter, or buffer, that it is, or belongs to."""
        return self.name.partition(BETWEEN)[0]


def state_entries(optimizer: Optimizer, owners: Mapping[str, nn.Parameter], pieces: Mapping[str, Piece],
                  group: Group, *, rank: int | None) -> list[Entry]:
    """What `gather_optimizer_state` gathers, to be gathered one by one; named by parameter and key. A collective.

    raises:  ConfigError, ModelMismatch, on all ranks
    """
    names, held = {id(owner): name for name, owner in owners.items()}, optimizer.state
    told: list[Told] = group.all_gather_object(_tell(optimizer, owners, pieces), label="optimizer state")
    _expect_one_whole(told, pieces, group)
    entries = []
    for name in (names[id(owner)] for part in optimizer.param_groups for owner in part["params"]):
        there = {at: of[name] for at, of in enumerate(told) if name in of}
        mine = held[owners[name]] if group.rank in there else {}
        for key in there[min(there)][2] if there else ():
            about = {at: (start, stop, keys[key]) for at, (start, stop, keys) in there.items()}
            kind, own_shape, _, _ = about[min(about)][2]
            shape = pieces[name].shape if all(fits for _, _, (_, _, fits, _) in about.values()) else torch.Size(own_shape or ())
            get = partial(_gather_value, mine.get(key), about, shape, group, rank=rank, label=f"optimizer state {key} of {name}")
            entries.append(Entry(f"{name}{BETWEEN}{key}", None if kind is None else getattr(torch, kind), shape, get))
    return entries


def whole_state(optimizer: Optimizer, owners: Mapping[str, nn.Parameter],
                values: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an optimizer in the plain names, of the values of its entries by name."""
    names, state = {id(owner): name for name, owner in owners.items()}, dict[str, dict[str, Any]]()
    for joint, value in values.items():
        name, _, key = joint.partition(BETWEEN)
        state.setdefault(name, {})[key] = value
    groups = [{key: [names[id(owner)] for owner in value] if key == "params" else _copied(value) for key, value in part.items()}
              for part in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def _tell(optimizer: Optimizer, owners: Mapping[str, nn.Parameter], pieces: Mapping[str, Piece]) -> Told:
    """What this rank has, of the parameters of which it has a piece and a state."""
    state = optimizer.state
    return {name: (pieces[name].start, pieces[name].stop, {key: _describe(value, owner) for key, value in state[owner].items()})
            for name, owner in owners.items() if owner in state and not pieces[name].is_empty}


def _describe(value: Any, owner: nn.Parameter) -> list[Any]:
    if isinstance(value, Tensor):
        return [str(value.dtype).removeprefix("torch."), list(value.shape), value.shape == owner.shape, None]
    return [None, None, False, value] if isinstance(value, PLAIN_VALUES) else [type(value).__name__, None, False, None]


def _expect_one_whole(told: list[Told], pieces: Mapping[str, Piece], group: Group) -> None:
    """Every rank judges what all have told, so that all raise or none."""
    for name in dict.fromkeys(name for of in told for name in of):
        there = {at: of[name] for at, of in enumerate(told) if name in of}
        expected = there[min(there)][2]
        for key, (kind, shape, _, _) in expected.items():
            if kind is not None and shape is None:
                raise ConfigError(f"optimizer state {key} of {name} is a {kind}, which cannot be gathered; "
                                  "keep tensors, numbers, strings or None")
        for at, (_, _, keys) in there.items():
            if {key: told[0] for key, told in keys.items()} != {key: told[0] for key, told in expected.items()}:
                raise ModelMismatch(f"rank {group.ranks[at]}: the optimizer state of {name} is {_listed(keys)}, but on rank "
                                    f"{group.ranks[min(there)]} it is {_listed(expected)}; has a step failed on one of them?")
        covered, n = sum(stop - start for start, stop, _ in there.values()), pieces[name].shape.numel()
        if covered != n:
            raise ModelMismatch(f"ranks {', '.join(str(group.ranks[at]) for at in there)} have optimizer state for {covered} elements of "
                                f"{name}, expected all {n}; has a step failed on another rank, or is it cut over another group?")


def _listed(keys: dict[str, list[Any]]) -> str:
    return ", ".join(f"{key} ({told[0]})" for key, told in keys.items()) or "empty"


def _gather_value(mine: Any, there: dict[int, tuple[int, int, list[Any]]], shape: torch.Size, group: Group, *,
                  rank: int | None, label: str) -> Any:
    """One value of one parameter's state, whole, where it is wanted.

    there: what each rank that has a piece told of it: start, stop, [dtype, shape, fits the piece, value]
    shape: of the whole value
    """
    first = min(there)
    kind, _, _, value = there[first][2]
    if kind is None:
        return value
    dtype = getattr(torch, kind)
    spans = {at: (start * dtype.itemsize, stop * dtype.itemsize) for at, (start, stop, _) in there.items()}
    if not all(fits for _, _, (_, _, fits, _) in there.values()):
        spans = {first: (0, shape.numel() * dtype.itemsize)}
    data = mine.detach().to(group.device).contiguous().view(-1).view(torch.uint8) if group.rank in spans else None
    whole = join_bytes(data, spans, group, rank, label)
    return None if whole is None else whole.view(dtype).view(shape)


def join_bytes(mine: Tensor | None, spans: dict[int, tuple[int, int]], group: Group, rank: int | None, label: str) -> Tensor | None:
    """All ranks' bytes as one tensor in CPU memory, on `rank` or everywhere. Bytes, because backends refuse some dtypes.

    spans: rank -> [start, stop) of its bytes in the whole; together they make it
    """
    takes = rank in (None, group.rank)
    whole = torch.empty(sum(stop - start for start, stop in spans.values()) if takes else 0, dtype=torch.uint8, device=group.device)
    for at, (start, stop) in spans.items():
        part = whole[start:stop]
        if takes and mine is not None and at == group.rank:
            part.copy_(mine)
        if rank is None:
            group.broadcast(part, at, label=label)
        elif mine is not None and at == group.rank != rank:
            group.send(mine, rank, label=label)
        elif at != rank and takes:
            group.recv(part, at, label=label)
    return whole.cpu() if takes else None


@torch.no_grad()
def load_optimizer_state(optimizer: Optimizer, owners: Mapping[str, nn.Parameter],
                         pieces: Mapping[str, Piece], full_state: Mapping[str, Any], *, rank: int, read: Read | None = None) -> None:
    """Put this rank's pieces of a whole state in place of what `optimizer` has. Nothing is sent, nothing of `full_state` is kept.

    Learning rates and the like are taken over; how the optimizer computes (fused, foreach) stays as it was built.

    rank:   for messages
    read:   gives a piece its values, by parameter and key, where tensors of `full_state` are on the meta device
    raises: ModelMismatch, on all ranks if all are given the same, with the optimizer as it was before
    """
    if problem := misfit(optimizer, owners, pieces, full_state):
        raise ModelMismatch(f"rank {rank}: {problem}")
    state, names = full_state["state"], {id(owner): name for name, owner in owners.items()}
    for ours, saved in zip(optimizer.param_groups, full_state["param_groups"]):
        ours.update({key: _copied(value) for key, value in saved.items() if key not in HOW})
    counters = counter_keys(state, pieces)
    for part in parts_of(optimizer):
        part.state.clear()
        for name, owner, settings in [(names[id(owner)], owner, ours) for ours in part.param_groups for owner in ours["params"]]:
            if name in state and not pieces[name].is_empty:
                own = {key: cut_state(value, pieces[name], owner, is_counter=key in counters) for key, value in state[name].items()}
                own |= {key: read(name, key, value) for key, value in own.items() if read is not None and isinstance(value, Tensor)}
                part.state[owner] = {key: _place(value, owner, settings, part, is_counter=key in counters) for key, value in own.items()}


def _place(value: Any, owner: nn.Parameter, settings: Mapping[str, Any], part: torch.optim.Optimizer, *, is_counter: bool) -> Any:
    """The device and the dtype that the optimizer would have made it in."""
    if not isinstance(value, Tensor):
        return value
    if is_counter and value.dim() == 0:   # beside the parameter only where a kernel reads it
        on_device = settings.get("fused") or settings.get("capturable")
        return value.to(owner.device, torch.float32) if on_device else value.to("cpu")
    torchs = type(part).__module__.startswith("torch.optim")   # those keep all they remember in the parameter's dtype
    dtype = owner.dtype if torchs else value.dtype
    if value.shape != owner.shape:
        return value.to(owner.device, dtype)
    return torch.empty_like(owner, dtype=dtype).copy_(value)   # in the parameter's order of memory, by which fused kernels go


def misfit(optimizer: Optimizer, owners: Mapping[str, nn.Parameter], pieces: Mapping[str, Piece],
           full_state: Mapping[str, Any]) -> str | None:
    """What keeps `full_state` from being loaded, in words, or None. The same on all ranks, whatever their pieces."""
    if not {"state", "param_groups"} <= full_state.keys():
        return (f"the saved optimizer has the keys {sorted(full_state)}, expected 'state' and 'param_groups'; "
                "was it gathered on one rank and is loaded on another?")
    if problem := _numbered(full_state["param_groups"], owners):
        return problem
    names = {id(owner): name for name, owner in owners.items()}
    ours = [{**part, "params": [names[id(owner)] for owner in part["params"]]} for part in optimizer.param_groups]
    problems = [*_misfits_of_groups(ours, full_state["param_groups"])]
    if unknown := sorted(full_state["state"].keys() - owners.keys()):
        problems.append(f"there is saved optimizer state of {unknown[0]!r}, which this model has not: is it of another model? "
                        f"{did_you_mean(unknown[0], owners)}")
    for part in parts_of(optimizer):
        if is_elementwise(part) or isinstance(part, torch.optim.Muon):   # what the others remember may have any shape
            own = [pieces[names[id(owner)]] for settings in part.param_groups for owner in settings["params"]]
            problems += _misfits_of_shapes(own, full_state["state"])
    return problems[0] if problems else None


def _numbered(groups: list[dict[str, Any]], owners: Mapping[str, nn.Parameter]) -> str | None:
    """Of the state of an optimizer in a loop of one's own, what it says in place of names."""
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
            yield (f"parameter group {index} of the saved optimizer has {only_saved[0]!r}, the one here has not: "
                   f"is it of another model? {did_you_mean(only_saved[0], here)}")
        if only_here := sorted(here - there):
            yield (f"parameter group {index} has {only_here[0]!r}, the saved one's has not: "
                   f"is it of another model? {did_you_mean(only_here[0], there)}")
        more, fewer = sorted(their.keys() - our.keys()), sorted(our.keys() - their.keys())
        if more and fewer:   # one of them alone may be another version of torch, or a scheduler's note
            yield (f"parameter group {index} of the saved optimizer has {', '.join(more)} where this one has {', '.join(fewer)}: "
                   "it is the state of another kind of optimizer")


def _misfits_of_shapes(pieces: list[Piece], state: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for piece in pieces:
        for key, value in state.get(piece.name, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != piece.shape:
                yield (f"optimizer state {key} of {piece.name} has shape {tuple(value.shape)}, expected {tuple(piece.shape)}: "
                       "is it of another model?")


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
