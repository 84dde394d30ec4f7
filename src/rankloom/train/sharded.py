"""Placements of stages 1 to 3: units and their slices (parallel/sections/sharding.py). Where a mesh splits layers too: slices of the parts.

Read train/placement.py before this file; parallel/zero.py has the table of stages.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import LossError
from rankloom.base.mesh import PART_AXES
from rankloom.checkpoint.manifest import Part
from rankloom.comm.compress import Summing
from rankloom.parallel.expert import guide_layers
from rankloom.parallel.gradients.same_bits import TOTALS, ShardFolds
from rankloom.parallel.model_split import ModelSplit, PartCoords
from rankloom.parallel.sections.reduction_order import Reducing
from rankloom.parallel.sections.sharding import Sharding
from rankloom.parallel.sections.state_dict import expect_own_parameters, load_values, owned_slices, units_of, value_entries
from rankloom.shard.norm import norm_of, norms_of
from rankloom.shard.optimizer import Optimizer, ParameterSlice
from rankloom.shard.optimizer_state import Entry, state_entries, whole_state
from rankloom.train.checkpoint_parts import MODEL, parts_of_slice, unique_tensors, whole_part
from rankloom.train.optimizer_step import global_norm
from rankloom.train.placement import PlacedBytes, Placement
from rankloom.train.split_model import is_split
from rankloom.world.group import Group
from rankloom.world.world import World


class ShardedPlacement(Placement):
    """Stages 1 to 3: see parallel/zero.py.

    split:   how layers are split over tensor and expert ranks (parallel/model_split.py); on a mesh without these: over one each
    summing: how its gradients are summed
    """

    def __init__(self, model: nn.Module, sharding: Sharding, world: World, split: ModelSplit, *, summing: Summing):
        self.model, self.sharding, self.split, self.summing = model, sharding, split, summing
        sharding.forward_backward.reducing = Reducing.NOTHING   # a backward outside a step sends nothing
        self.owners: Mapping[str, nn.Parameter] = sharding.owners()
        self.group, self._world = sharding.group, world
        self._part_ranks = sharding.group   # the ranks that hold different elements
        if is_split(world):
            self._part_ranks = world.group(*(axis for axis in PART_AXES if axis != "shard" or self.group.size > 1))
        guide_layers(model, sharding.guide)

    @property
    def waited(self) -> float:
        """Every collective records its waiting time in the ledger of its group."""
        return sum(ledger.waited for ledger in {id(group.ledger): group.ledger for group in self._groups()}.values())

    def _groups(self) -> tuple[Group, ...]:
        return self.group, self.sharding.replicas, self.split.tensor, self.split.expert, self.split.context

    def together(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Where a forward gathers parameters or sends rows to experts, ranks without a batch take part too: parallel/sections/follow.py."""
        pending, ended, sharding = iter(batches), object(), self.sharding   # a batch may be None, where a loss draws its own rows
        if not sharding.gathering.reshards:   # then parameters are gathered once for all forwards
            sharding.make_ready()
        alone = not (sharding.gathers_in_forward or sharding.guide.layers)
        while True:
            is_here = (batch := next(pending, ended)) is not ended
            someone, everyone = (is_here, True) if alone else sharding.guide.who_has(is_here)
            if not someone:
                return
            if not is_here:
                sharding.follow()
                continue
            with sharding.followed(not everyone):
                yield batch

    def hand_over(self, owners: Mapping[str, nn.Parameter]) -> None:
        """From now on the parameters that the optimizer was built from are the owners: they have been given the memory of the slices."""
        self.owners = {name: owners[name] for name in self.owners}
        for gradient in self.sharding.gradients():
            gradient.unit.hand_over(owners)

    def expect_own_values(self) -> None:
        """Slices are saved, but the model computes with values gathered from them, which could have been changed since."""
        expect_own_parameters(self.sharding)

    def abandon(self) -> None:
        """Forget all gradients."""
        self.sharding.expect_published("not by `engine.step`", "leave updates to the engine (`optimizer.step()` too), and give it values "
                                       "by `engine.load_full_state_dict`")
        self.sharding.forward_backward.abandon()

    @contextmanager
    def sync(self, on: bool) -> Iterator[None]:
        """Sections are reduced during the last backward; during each, if gradients may not stay unsharded. A rank without gradients takes
        part too.
        """
        sharding = self.sharding
        with sharding.sync(on):
            sharding.forward_backward.begin()
            yield
            if sharding.gathers_in_forward and not sharding.forward_backward.is_over:
                raise LossError(f"rank {self.group.world_rank}: the loss of a micro-batch depends on no parameter, and where a "
                                "backward gathers parameters all ranks take part; where there is nothing to sum, return for "
                                "example `logits.sum() * 0, 0`")
            sharding.forward_backward.end_backward()

    def without_reduction(self) -> AbstractContextManager[None]:
        """Gradients stay unsharded, and are not reduced."""
        return self.sharding.without_reduction()

    def begin_last_backward(self, items: Tensor, scale: float) -> None:
        """See `Summing.weigh`."""
        self.summing.weigh(items, scale, (self.sharding.group, self.sharding.replicas))

    def run_backward(self, loss: Tensor) -> None:
        """See `ForwardBackward.run_backward`."""
        self.sharding.forward_backward.run_backward(loss)

    def finish(self, totals: Tensor | None, mark: int) -> tuple[Tensor, bool]:
        """Reductions have ended with the backward. Agree which parameters were used on any rank, and sum the totals."""
        summed, alike = self.sharding.finish(totals, mark)
        assert summed is not None, "no totals"
        self.summing.end_step()
        return summed, alike

    def norm(self, totals: Tensor) -> Tensor:
        """The norm over the slices of all ranks."""
        square = global_norm(self.flat_gradients()).square().to(self.group.device)
        return self.group.all_reduce(square, label="gradient norm").sqrt()

    def flat_gradients(self) -> list[Tensor]:
        """This rank's slices, of the units that have a gradient."""
        return [gradient.slice for gradient in self.sharding.gradients() if gradient.slice is not None]

    def local_gradients(self) -> dict[str, Tensor]:
        """Views of unsharded gradients, before any reduction."""
        return {name: view for gradient in self.sharding.gradients() for name, view in gradient.local().items()}

    def publish(self) -> None:
        """Gather the updated slices of the units that stay gathered."""
        self.sharding.publish()

    def values(self, rank: int | None) -> dict[str, Tensor]:
        """Gathered over the shard axis, then over the other axes, tensor by tensor. Ranks that hold the same as others do nothing."""
        if rank is not None and rank not in self._part_ranks.ranks:
            return {}
        goal = self._coords_of(rank)
        return self._collect(value_entries(self.model, self.sharding, rank=None if goal is None else goal.shard), goal)

    def state(self, optimizer: Optimizer, rank: int | None) -> dict[str, Any]:
        """Gathered as `values` are: over the shard axis, then over the other axes."""
        if rank is not None and rank not in self._part_ranks.ranks:
            return {}
        goal = self._coords_of(rank)
        entries = state_entries(optimizer, self.owners, self.slices(), self.group, rank=None if goal is None else goal.shard)
        values = self._collect(entries, goal)
        return whole_state(optimizer, self.owners, values) if goal is None or self._coords() == goal else {}

    def _coords(self) -> PartCoords:
        """Those of this rank."""
        return PartCoords(self.group.rank, self.split.tensor.rank, self.split.expert.rank)

    def _coords_of(self, rank: int | None) -> PartCoords | None:
        """Those of a rank of the world. A collective."""
        if rank is None:
            return None
        coords = self._part_ranks.all_gather_object(list(astuple(self._coords())), label="who gets the whole")
        return PartCoords(*coords[self._part_ranks.ranks.index(rank)])

    def _collect(self, entries: list[Entry], goal: PartCoords | None) -> dict[str, Any]:
        """Name -> whole tensor, on the rank of `goal`, or on all ranks."""
        mine = goal in (None, self._coords())
        values = {entry.name: self._join(entry, goal) for entry in entries}
        return values if mine else {}

    def _join(self, entry: Entry, goal: PartCoords | None) -> Any:
        """The whole tensor of the unsplit model. A value that is not split as its parameter is returned as it is."""
        name = entry.parameter if self._is_split_as_parameter(entry) else ""
        if entry.dtype is not None and not self.split.is_asked(name, goal):
            return None
        value = entry.get()
        if value is None or entry.dtype is None or not self.split.is_cut(name):
            return value
        whole = self.split.join(name, value.to(self.group.device), goal)
        return None if whole is None else whole.cpu()

    def _whole_shape(self, entry: Entry) -> torch.Size:
        return self.split.whole_shape(entry.parameter, entry.shape) if self._is_split_as_parameter(entry) else entry.shape

    def _is_split_as_parameter(self, entry: Entry) -> bool:
        """Whether the value is a tensor that is split over ranks as its parameter is."""
        held = self.split.held.get(entry.parameter)
        return len(entry.shape) > 0 and held is not None and held.local_shape == entry.shape

    def parts_like(self, name: str, owned: ParameterSlice, values: Tensor) -> list[Part]:
        """Boxes of the unsplit model."""
        whole = self.split.whole_shape(owned.name, owned.shape)
        return parts_of_slice(name, owned, values, shape=whole, place=partial(self.split.boxes, owned.name, owned.shape))

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Each rank keeps its slices of its parts."""
        load_values(self.model, self.sharding, state, self._groups(), self.split)
        self.summing.begin_anew()

    def part(self, name: str, value: Any) -> Any:
        """Cut a tensor of the parameter's shape to this rank's part. A value of an unknown parameter is returned, and refused later."""
        whole = self.split.whole_shape(name, self._shapes[name]) if name in self._shapes else None
        return self.split.cut(name, value) if isinstance(value, Tensor) and value.shape == whole and value.dim() > 0 else value

    @cached_property
    def _shapes(self) -> dict[str, torch.Size]:
        return {name: owned.shape for name, owned in self.slices().items()}

    def parts(self) -> list[Part]:
        """Slices of units, and whole tensors that are in no unit."""
        units, found = units_of(self.sharding), list[Part]()
        for name, value in unique_tensors(self.model).items():
            if id(value) in units:
                unit, own = units[id(value)]
                owned = ParameterSlice(own, unit.layout.slot(own).shape, *unit.layout.slice_of(own, unit.group.rank))
                found += self.parts_like(MODEL + name, owned, unit.slice_view(unit.own, own))
            elif isinstance(value, nn.Parameter):   # frozen, in no unit; it may be split over tensor ranks
                found += self.parts_like(MODEL + name, ParameterSlice(name, value.shape, 0, value.numel()), value)
            else:
                found.append(whole_part(MODEL + name, value))
        return found

    @contextmanager
    def rewritten(self) -> Iterator[None]:
        """Wait until nothing reads the old slices; publish the new ones afterwards, and drop the error that compression has kept."""
        self.sharding.wait_for_readers()
        yield
        self.summing.begin_anew()
        self.sharding.publish()

    def slices(self) -> dict[str, ParameterSlice]:
        """One per parameter; it may be empty."""
        return owned_slices(self.sharding, self.group.rank)

    def held(self) -> PlacedBytes:
        """Slices; gathered parameters beyond them; gradients, sharded or not."""
        in_units, of_units = units_of(self.sharding), [unit.held() for unit in self.sharding.units]
        others = sum(param.nbytes for param in self.model.parameters() if id(param) not in in_units)
        gradients = sum(gradient.held() for gradient in self.sharding.gradients()) + self.sharding.pool.held() + self.summing.held()
        return PlacedBytes(others + sum(own for own, _ in of_units), sum(whole for _, whole in of_units), gradients)


class CanonicalShardedPlacement(ShardedPlacement):
    """Sharded training whose bits do not depend on the number of ranks (comm/canonical.py).

    Unsharded gradients are folded over the logical shards of this rank, then over all ranks, and only then sharded. Ranks may run
    different numbers of logical shards, so parameters are gathered once for the whole step.
    memory: all parameters during a step, and up to log2(logical shards) + 1 copies of all gradients, at every stage
    """

    _folds: ShardFolds   # of the step

    def begin_shards(self, shards: int) -> None:
        """Gather all parameters, and begin to fold."""
        self.sharding.make_ready()
        self._folds = ShardFolds(shards)

    def add_shard(self, index: int, totals: Tensor) -> None:
        """Add the gradients of this logical shard to the folds, and clear them."""
        for gradient in self.sharding.gradients():
            self._folds.add(gradient, index, gradient.take_local())
        self._folds.add(TOTALS, index, totals)

    def finish(self, totals: Tensor | None, mark: int) -> tuple[Tensor, bool]:
        """Fold over the ranks, then keep this rank's slices."""
        for gradient in self.sharding.gradients():
            gradient.set_sum(self._folds.sum(gradient, self._world, f"gradients of {gradient.unit.name}"))
        _, alike = self.sharding.finish(mark=mark)
        return self._folds.sum(TOTALS, self._world, "totals"), alike

    def norm(self, totals: Tensor) -> Tensor:
        """Over the unsharded gradients, which every rank has, tensor by tensor: the same bits as at stage 0, which has none of nothing."""
        views = {name: view for gradient in self.sharding.gradients() for name, view in gradient.summed().items() if view.numel()}
        return global_norm([views[name] for name, _ in self.model.named_parameters() if name in views])


class SplitPlacement(ShardedPlacement):
    """Slices of a model whose layers are split over tensor and expert ranks: a norm counts once what several of these hold."""

    def norm(self, totals: Tensor) -> Tensor:
        """Each element counts once: the square of one that n ranks hold is divided by n on each.

        Ranks that hold one model between them each have totals of their own, and must all skip a step if one does.
        """
        slices = self.slices()
        held: dict[int, list[Tensor]] = {}   # by how many ranks hold them
        for name, owner in self.owners.items():
            for grad, copies in self.counted(slices[name], owner.grad) if owner.grad is not None else ():
                held.setdefault(copies, []).append(grad)
        terms = [norms_of(grads).square().sum() / copies for copies, grads in held.items()]
        square = torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64, device="cpu")
        not_finite = 0.0 * totals[:2].sum()   # 0 or NaN
        return self._part_ranks.all_reduce(square.to(self.group.device) + not_finite, label="gradient norm").sqrt()

    def repeated_norms(self) -> dict[str, float]:
        """From the slices of all ranks of the shard axis."""
        names = [name for name, held in self.split.held.items() if held.dim is None] if self.split.tensor.size > 1 else []
        grads = [owner.grad if (owner := self.owners.get(name)) is not None else None for name in names]
        if not names:
            return {}
        none = torch.zeros((), dtype=torch.float64, device="cpu")
        squares = torch.stack([none if grad is None else norm_of(grad).square().cpu() for grad in grads])
        total = self.group.all_reduce(squares.to(self.group.device), label="norms of repeated gradients")
        return dict(zip(names, total.sqrt().tolist(), strict=True))

    def counted(self, owned: ParameterSlice, values: Tensor) -> list[tuple[Tensor, int]]:
        """The values of a slice in views, each with how many of these ranks hold the same elements."""
        return self.split.counted(owned.name, values, owned)
