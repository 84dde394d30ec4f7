"""What a rank holds of a model that is split over the axes `tensor` and `expert`, before the data axes cut or repeat it.

    split over tensor    parallel/tensor/holding.py: spans of one dim; a few parameters are whole, or shared by some ranks
    split over expert    a run of the experts of each layer, along dim 0 (parallel/expert.py); everything else is whole

Three facts about each parameter follow: over which ranks its gradient is summed, how many ranks hold the same elements (a norm counts
them once), and how its whole is joined and cut again. In a loop of your own, `full_state_dict` and `load_full_state_dict` do the latter.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import ModelMismatch, ShapeMismatch
from rankloom.base.expect import expect_type
from rankloom.base.layout import Span
from rankloom.base.spans import Box, within
from rankloom.parallel.axes import axes_of
from rankloom.parallel.expert import spread_parameters
from rankloom.parallel.tensor.holding import Holding, holdings
from rankloom.shard.optimizer import ParameterSlice
from rankloom.world.group import Group


@dataclass(frozen=True, slots=True)
class PartCoords:
    """Where a rank stands along the axes whose ranks hold different elements of a model (`PART_AXES`)."""

    shard: int
    tensor: int
    expert: int
    pipe: int = 0


@dataclass(frozen=True)
class ModelSplit:
    """How a model is split, and which part of it is this rank's.

    tensor, expert, context: the groups of these axes; of one rank where the mesh has none
    held:    how each parameter lies over the tensor axis
    experts: names of parameters that are cut over the expert axis
    """

    tensor: Group
    expert: Group
    context: Group
    held: Mapping[str, Holding]
    experts: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, tensor: Group, expert: Group, context: Group) -> "ModelSplit":
        """The split that `tensor_parallel` and `expert_parallel` have made of a model."""
        return cls(tensor, expert, context, holdings(model), spread_parameters(model) if expert.size > 1 else frozenset())

    @classmethod
    def found_in(cls, model: nn.Module, alone: Group) -> "ModelSplit":
        """The split of a model that has the groups noted on it (axes.py). alone: a group of this rank only"""
        axes = axes_of(model)
        return cls.of(model, axes.get("tensor", alone), axes.get("expert", alone), alone)

    @property
    def parts(self) -> list[Group]:
        """The groups whose ranks hold different parts."""
        return [group for group in (self.tensor, self.expert) if group.size > 1]

    def counted(self, name: str, values: Tensor, owned: ParameterSlice | None = None) -> list[tuple[Tensor, int]]:
        """Values of this rank's part of a parameter in views, each with how many ranks hold the same elements, this one included.

        owned: which elements of the part they are; left out, all. Ranks are those of the tensor and expert axes
        """
        copies, experts = self._tensor_copies(name), 1 if name in self.experts else self.expert.size
        if len(set(copies)) == 1:
            return [(values, copies[0] * experts)]
        held = self.held[name]   # fused queries, keys and values, with shared key-value heads
        owned = owned or ParameterSlice(name, values.shape, 0, values.numel())
        views = []
        for box, in_box in owned.boxes(values):
            for here, there in held.boxes(box, self.tensor.rank):
                views.append((in_box[within(here, box)], held.holders(there) * experts))
        return views

    def is_repeated(self, name: str) -> bool:
        """Whether other ranks of the tensor axis hold some of the same elements: each computes their whole gradient, or they add it up."""
        return max(self._tensor_copies(name)) > 1

    def _tensor_copies(self, name: str) -> list[int]:
        """How many tensor ranks hold each span of this rank's part."""
        if self.tensor.size == 1:
            return [1]
        held = self.held[name]
        spans = held.spans[self.tensor.rank] if held.dim is not None else (None,)
        return [len(held.sharers(self.tensor.rank, self.tensor.size, at)) for at in range(len(spans))]

    @torch.no_grad()
    def join(self, name: str, part: Tensor, goal: PartCoords | None = None) -> Tensor | None:
        """The whole of a tensor that is cut like parameter `name`, on the rank of `goal` (None on the others), or on every rank.

        A collective of all ranks for which `is_asked`.
        sent:   each part once to that rank, through the tensor rank of `goal` that has the same experts; or n(p-1) to all
        raises: ShapeMismatch
        """
        if self._is_cut_by_tensor(name):
            if tuple(part.shape) != self.held[name].local_shape:
                raise ShapeMismatch(f"{self.tensor.where(name)} has shape {tuple(part.shape)}, the plan expects "
                                    f"{self.held[name].local_shape}, a part of {self.held[name].shape} over {self.tensor.size} ranks")
            rows = _gather(part, self.tensor, None if goal is None else goal.tensor, f"whole {name}")
            part = self.held[name].join(rows) if rows else part
        if goal is not None and self.tensor.rank != goal.tensor:
            return None
        if name in self.experts:
            rows = _gather(part, self.expert, None if goal is None else goal.expert, f"whole {name}")
            part = torch.cat(rows) if rows else part
        return part if goal is None or self.expert.rank == goal.expert else None

    def is_asked(self, name: str, goal: PartCoords | None) -> bool:
        """Whether this rank takes part in joining `name` for the rank of `goal`: not if that has the same elements."""
        return goal is None or ((name in self.experts or self.expert.rank == goal.expert)
                                and (self._is_cut_by_tensor(name) or self.tensor.rank == goal.tensor))

    def is_cut(self, name: str) -> bool:
        """Whether other ranks of the tensor or the expert axis hold other elements of the parameter."""
        return self._is_cut_by_tensor(name) or name in self.experts

    def _is_cut_by_tensor(self, name: str) -> bool:
        return self.tensor.size > 1 and name in self.held and self.held[name].dim is not None

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor that is cut like parameter `name`. raises: ShapeMismatch"""
        whole, holding = self._own_experts(name, whole), self.held.get(name)
        if holding is None or self.tensor.size == 1:
            return whole
        if whole.shape != holding.shape:
            raise ShapeMismatch(f"{self.tensor.where(name)} has shape {tuple(whole.shape)}, the model's has {holding.shape}")
        return holding.cut(whole, self.tensor.rank)

    def cut_into(self, part: Tensor, name: str, whole: Tensor) -> None:
        """Write this rank's part of a whole tensor into `part`."""
        whole, holding = self._own_experts(name, whole), self.held.get(name)
        if holding is not None and self.tensor.size > 1:
            holding.cut_into(part, whole, self.tensor.rank)
        else:
            part.copy_(whole)

    def _own_experts(self, name: str, whole: Tensor) -> Tensor:
        if name not in self.experts:
            return whole
        each, left = divmod(whole.shape[0], self.expert.size)
        if left:
            raise ShapeMismatch(f"{self.expert.where(name)}: {whole.shape[0]} experts do not divide by {self.expert.size} ranks")
        return whole.narrow(0, self.expert.rank * each, each)

    def boxes(self, name: str, part: torch.Size, box: Box) -> Iterator[tuple[Box, Box]]:
        """A box of this rank's part of parameter `name` -> boxes of it, and where each of them lies in the whole.

        part: the shape of this rank's part
        """
        holding = self.held.get(name)
        first = self.expert.rank * part[0] if name in self.experts else 0   # how many experts are on lower ranks
        for here, there in holding.boxes(box, self.tensor.rank) if holding is not None and self.tensor.size > 1 else [(box, box)]:
            if first:
                experts, *rest = there
                there = (Span(experts.start + first, experts.stop + first), *rest)
            yield here, there

    def whole_shape(self, name: str, part: torch.Size) -> torch.Size:
        """The shape that `join` gives to a part of this shape."""
        holding = self.held.get(name)
        shape = torch.Size(holding.shape) if holding is not None else part
        return torch.Size((part[0] * self.expert.size, *part[1:])) if name in self.experts else shape


def _gather(part: Tensor, group: Group, root: int | None, label: str) -> list[Tensor]:
    """The parts of all ranks, in rank order, on the root, or on all without one; elsewhere []."""
    part = part.contiguous()
    if root is None:
        return list(group.all_gather(part.unsqueeze(0), label=label).unbind(0))
    if group.rank != root:
        group.send(part, root, label=label)
        return []
    return [part if at == root else group.recv(torch.empty_like(part), at, label=label) for at in range(group.size)]


# ------------------------------------------------------------------ in a loop of your own


@torch.no_grad()
def full_state_dict(model: nn.Module, group: Group) -> dict[str, Any]:
    """The state of a split model under the names and in the shapes of the plain one, on every rank. All ranks must call it.

    model: what `tensor_parallel` or `expert_parallel` returned, or what `data_parallel` or `fully_shard` made of it
    group: ranks over which it was cut
    sent:  n(p-1) elements for each tensor that is cut, n the elements of a part
    """
    split = ModelSplit.found_in(_named_alike(model), group.alone())
    return {name: split.join(name, value.detach().clone()) if isinstance(value, Tensor) else deepcopy(value)   # extra state
            for name, value in model.state_dict().items()}


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], group: Group) -> None:
    """Fill a split model from whole tensors. Each rank takes its part; no values are sent.

    model, group: as for `full_state_dict`; for a sharded model this is a collective
    raises: ModelMismatch when names are missing or unknown; ShapeMismatch
    """
    expect_type("state", state, Mapping, "names and whole tensors, as full_state_dict gives them")
    plain = _named_alike(model)   # a sharded model would gather its state to say its names
    split, known = ModelSplit.found_in(plain, group.alone()), plain.state_dict(keep_vars=True).keys()
    if wrong := sorted(known ^ state.keys()):
        what = "is missing" if wrong[0] in known else "is not in the model"
        raise ModelMismatch(f"{group.where('load')}: {len(wrong)} names of the state differ from the model's; {wrong[0]} {what}")
    model.load_state_dict({name: split.cut(name, whole) for name, whole in state.items()})


def _named_alike(model: nn.Module) -> nn.Module:
    """The module whose names the state dict of `model` has: the inner one of a wrapper that shows those."""
    return model.module if getattr(model, "has_names_of_module", False) else model   # type: ignore[return-value]
