"""Where parameters, gradients and optimizer state are: replicated on every rank, or sharded.

The engine runs the same step over both:

    stage 0      ReplicatedPlacement   master weights and buckets; parallel/gradients/reducer.py
    stages 1-3   ShardedPlacement      units and their slices; train/sharded.py

Each has a twin, Canonical..., for deterministic training (parallel/gradients/same_bits.py). `owners` are the tensors that the optimizer
updates: parameters, their fp32 masters, or slices of either.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rankloom.base.errors import ModelMismatch
from rankloom.checkpoint.manifest import Part
from rankloom.comm.compress import Summing
from rankloom.parallel.gradients.reducer import GradientReducer
from rankloom.parallel.gradients.same_bits import CanonicalReducer
from rankloom.parallel.replicas.guards import watch_optimizers
from rankloom.parallel.sections.state_dict import difference, shapes_in
from rankloom.shard.optimizer import Optimizer, ParameterSlice
from rankloom.shard.optimizer_state import gather_optimizer_state
from rankloom.train.checkpoint_parts import MODEL, parts_of_slice, unique_tensors, whole_part
from rankloom.train.optimizer_step import global_norm
from rankloom.train.precision import MasterWeights, Precision
from rankloom.world.group import Group


class PlacedBytes(NamedTuple):
    """The bytes of a model in the memory of one rank."""

    parameters: int   # those that this rank owns, whole or slices, with masters
    gathered: int     # whole parameters in addition to these
    gradients: int    # with buffers that are reduced, and the errors that compression keeps


class Placement(Protocol):
    """What the engine calls, in the order of a step.

    model:   the modules that this rank holds: the whole model, or some pipeline stages
    owners:  plain name of a parameter -> the tensor that the optimizer updates
    summing: how gradients are summed over the ranks
    """

    model: nn.Module
    owners: Mapping[str, nn.Parameter]
    summing: Summing

    @property
    def waited(self) -> float:
        """Seconds spent waiting for communication so far."""

    def together(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of a forward-only pass; ranks may bring different numbers of them."""

    def abandon(self) -> None:
        """Clear all gradients, and what a failed step left behind. Raises UnitError when the model's values differ from its masters."""

    def sync(self, on: bool) -> AbstractContextManager[None]:
        """A context around forward and backward. on: this is the last micro-batch of the step."""

    def without_reduction(self) -> AbstractContextManager[None]:
        """A context: a backward inside makes gradients of this rank alone."""

    def begin_shards(self, shards: int) -> None:
        """Deterministic: begin a step with this many logical shards."""
        raise AssertionError("logical shards need canonical gradients")

    def add_shard(self, index: int, totals: Tensor) -> None:
        """Deterministic: fold in the gradients and totals of one logical shard."""
        raise AssertionError("logical shards need canonical gradients")

    def begin_last_backward(self, items: Tensor, scale: float) -> None:
        """Called between the last forward of a step and its backward.

        items: how many items the losses of this rank have counted in this step, fp64
        scale: the factor that the losses are multiplied by
        """

    def run_backward(self, loss: Tensor) -> None:
        """Inside `sync` or `without_reduction`, after the forward."""

    def finish(self, totals: Tensor | None, mark: int) -> tuple[Tensor, bool]:
        """Finish the sums of all gradients over the ranks. Returns the summed totals, and whether all ranks have the same mark."""

    def norm(self, totals: Tensor) -> Tensor:
        """The 2-norm of the summed gradients, each element once, fp64. NaN on all ranks if the [loss sum, count] of one is not finite."""

    def repeated_norms(self) -> dict[str, float]:
        """Name -> 2-norm of the summed gradient, for parameters that every tensor rank holds whole. A collective."""
        return {}   # where no layer is split

    def flat_gradients(self) -> list[Tensor]:
        """The gradients that this rank's optimizer reads, in few tensors."""

    def local_gradients(self) -> dict[str, Tensor]:
        """Name -> gradient of this rank alone, after a backward without reduction."""

    def publish(self) -> None:
        """After the optimizer's step: update the parameters that the model computes with."""

    def expect_own_values(self) -> None:
        """Before values are saved or scored. A collective. raises: UnitError when the model's differ from those that are trained"""

    def values(self, rank: int | None) -> dict[str, Tensor]:
        """The whole model, as `Engine.full_state_dict` gives it: to one rank of the world, or to all. A collective."""

    def state(self, optimizer: Optimizer, rank: int | None) -> dict[str, Any]:
        """The optimizer's whole state, to one rank of the world, or to all. A collective."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `values`; raises ModelMismatch."""

    def parts(self) -> list[Part]:
        """This rank's parts of each tensor of the model's state dict, in the master dtype, without extra state."""

    def parts_like(self, name: str, owned: ParameterSlice, values: Tensor) -> list[Part]:
        """The same for a tensor `name` that is sharded like a parameter. owned: this rank's slice of that parameter"""
        return parts_of_slice(name, owned, values, shape=owned.shape)

    def rewritten(self) -> AbstractContextManager[None]:
        """A context in which the memory of `parts` may be written; afterwards the model computes with it. A collective."""

    def slices(self) -> dict[str, ParameterSlice]:
        """Name -> which elements of the parameter, as it is on this rank, its owner holds."""

    def part(self, name: str, value: Any) -> Any:
        """This rank's part of a value of optimizer state of parameter `name`. Slices are cut later, by `slices`."""
        return value

    def held(self) -> PlacedBytes:
        """What is in memory on this rank now."""


class ReplicatedPlacement(Placement):
    """Stage 0: every rank holds everything. make_reducer: (params, group, owners=) -> what sums gradients"""

    def __init__(self, model: nn.Module, group: Group, precision: Precision, make_reducer: Callable[..., GradientReducer]):
        self.model, self._world, self._waited = model, group, 0.0
        self._masters = MasterWeights(model, precision)
        self.owners: Mapping[str, nn.Parameter] = self._masters.owners
        self.group = group.alone()
        self._reducer = make_reducer(self._masters.params, group, owners=self.owners)
        self._reducer.syncing = False   # a backward outside a step sends nothing
        self.summing = self._reducer.summing
        watch_optimizers()

    @property
    def waited(self) -> float:
        """For the buckets, and for what `Summing.weigh` asks of other ranks."""
        return self._waited

    def together(self, batches: Iterable[Any]) -> Iterator[Any]:
        """This rank's batches: a forward needs no other rank."""
        yield from batches

    def expect_own_values(self) -> None:
        """Only rounded copies of masters can differ from what is trained. Nothing is sent: when this rank saves, another may already
        have ended.
        """
        self._masters.expect_own_values()

    def abandon(self) -> None:
        """Forget all gradients."""
        self.expect_own_values()
        self._reducer.abandon()

    def sync(self, on: bool) -> AbstractContextManager[None]:
        """Buckets are sent during the last backward only."""
        return self._reducer.sync(on)

    def without_reduction(self) -> AbstractContextManager[None]:
        """No bucket is sent."""
        return self._reducer.sync(False)

    def begin_last_backward(self, items: Tensor, scale: float) -> None:
        """See `Summing.weigh`."""
        with self._waiting():
            self.summing.weigh(items, scale, [self._world])

    def run_backward(self, loss: Tensor) -> None:
        """Hooks of the parameters do the rest."""
        loss.backward()

    def finish(self, totals: Tensor | None, mark: int) -> tuple[Tensor, bool]:
        """Wait for the buckets."""
        with self._waiting():
            summed, alike = self._reducer.finish(totals, mark)
        assert summed is not None, "the reducer lost the totals"
        for owner in self.owners.values():
            if not owner.numel():   # as in a slice: no state is kept of nothing, and fused kernels want it of all gradients or of none
                owner.grad = None
        return summed, alike

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begin if self._world.size > 1 else 0.0

    def norm(self, totals: Tensor) -> Tensor:
        """Over the buckets; each rank sums a share if they are large."""
        return global_norm(self._reducer.flat_gradients(), self._world)

    def flat_gradients(self) -> list[Tensor]:
        """The buckets, and gradients outside buckets."""
        return self._reducer.flat_gradients()

    def local_gradients(self) -> dict[str, Tensor]:
        """The gradients of the owners, in the buckets."""
        return {name: owner.grad for name, owner in self.owners.items() if owner.grad is not None}

    def publish(self) -> None:
        """Round the masters into the model."""
        self._masters.publish()

    def values(self, rank: int | None) -> dict[str, Tensor]:
        """Every rank has the whole model: nothing is gathered."""
        return self._masters.full_values(self.model.state_dict(keep_vars=True)) if rank in (None, self._world.rank) else {}

    def state(self, optimizer: Optimizer, rank: int | None) -> dict[str, Any]:
        """Every rank has the whole state: nothing is gathered."""
        mine = rank in (None, self._world.rank)
        return (gather_optimizer_state(optimizer, self.owners, self.slices(), self.group) or {}) if mine else {}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load into the masters and the model."""
        shapes = shapes_in(self.model.state_dict(keep_vars=True))
        self._world.agree(difference(shapes, state, f"rank {self._world.rank}"), error=ModelMismatch, label="load a state dict")
        self.model.load_state_dict(state)
        names = {id(value): name for name, value in self.model.state_dict(keep_vars=True).items()}   # hooks may have renamed them
        for name, owner in self.owners.items():
            owner.copy_(state[names.get(id(self._masters.params[name]), name)])
        self.summing.begin_anew()
        self.publish()

    def parts(self) -> list[Part]:
        """All tensors, with masters in place of rounded parameters."""
        masters = {id(param): self.owners[name] for name, param in self._masters.params.items()}
        return [whole_part(MODEL + name, masters.get(id(value), value)) for name, value in unique_tensors(self.model).items()]

    @contextmanager
    def rewritten(self) -> Iterator[None]:
        """Afterwards, round the masters into the model, and drop the error that compression has kept."""
        yield
        self.summing.begin_anew()
        self.publish()

    def slices(self) -> dict[str, ParameterSlice]:
        """Each parameter whole, in its own shape."""
        return {name: ParameterSlice(name, owner.shape, 0, owner.numel()) for name, owner in self.owners.items()}

    def held(self) -> PlacedBytes:
        """All parameters, all gradients."""
        tensors = {id(t): t for t in (*self.model.parameters(), *self.owners.values())}
        gradients = sum(flat.nbytes for flat in self._reducer.flat_gradients()) + self.summing.held()
        return PlacedBytes(sum(t.nbytes for t in tensors.values()), gathered=0, gradients=gradients)


class CanonicalReplicatedPlacement(ReplicatedPlacement):
    """Stage 0, where bits do not depend on the number of ranks (parallel/gradients/same_bits.py)."""

    _reducer: CanonicalReducer

    def begin_shards(self, shards: int) -> None:
        """Begin to fold."""
        self._reducer.begin_shards(shards)

    def add_shard(self, index: int, totals: Tensor) -> None:
        """Add the gradients of this logical shard to the folds, and clear them."""
        self._reducer.add_shard(index, totals)

    def norm(self, totals: Tensor) -> Tensor:
        """Tensor by tensor: the same bits as at other stages, which have no buckets."""
        return global_norm([owner.grad for owner in self.owners.values() if owner.grad is not None])
