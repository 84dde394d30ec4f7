"""Where parameters, gradients and optimizer state of a model in training lie: whole on every rank, or cut.

The engine runs a step over either, and does not know which:

    stage 0      Whole      masters and buckets; parallel/gradients.py, or parallel/same_bits.py where every bit must be the same
    stages 1-3   Cut        units and slices; parallel/sharding.py

`owners` are what the optimizer updates: parameters, their fp32 masters, or slices of these.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rankloom.comm.canonical import Fold, Node, canonical_all_reduce
from rankloom.parallel.data import embeddings
from rankloom.parallel.gradients import GradientReducer
from rankloom.parallel.parts import Parts
from rankloom.parallel.same_bits import CanonicalReducer
from rankloom.parallel.sharding import Sharding
from rankloom.parallel.values import full_values, load_values, pieces_of
from rankloom.shard.optimizer import Optimizers, Piece
from rankloom.train.apply import global_norm
from rankloom.train.precision import MasterWeights, Precision
from rankloom.world.group import Group

Optimizer = torch.optim.Optimizer | Optimizers


class Placement(Protocol):
    """What the engine asks of it, in the order of a step."""

    @property
    def owners(self) -> Mapping[str, nn.Parameter]:
        """What the optimizer updates, by the plain names."""

    @property
    def group(self) -> Group:
        """Over which pieces make the whole."""

    @property
    def waited(self) -> float:
        """Seconds spent in waiting for communication, so far."""

    def together(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of a forward-only pass; ranks may bring different numbers of them."""

    def abandon(self) -> None:
        """Forget all gradients, and whatever a failed step left behind."""

    def sync(self, on: bool) -> AbstractContextManager[None]:
        """Whether the backward inside is the step's last."""

    def alone(self) -> AbstractContextManager[None]:
        """The backward inside makes gradients of this rank alone."""

    def begin_leaves(self, leaves: int) -> None:
        """Deterministic: the batch makes so many logical shards."""

    def take_leaf(self, index: int, totals: Tensor) -> None:
        """Deterministic: fold in the gradients and totals of one logical shard."""

    def finish(self, totals: Tensor | None) -> Tensor:
        """All gradients are summed over all ranks; so are the totals, which are returned."""

    def norm(self) -> Tensor:
        """The 2-norm of the summed gradients, each element once, fp64."""

    def flat_gradients(self) -> list[Tensor]:
        """All that this rank's part of the optimizer reads, in few tensors."""

    def local_gradients(self) -> dict[str, Tensor]:
        """After a backward without communication: what it has made."""

    def rescale(self, factor: float) -> None:
        """The loss scale has changed."""

    def publish(self) -> None:
        """The optimizer has stepped: the model's parameters follow."""

    def values(self, rank: int | None) -> dict[str, Tensor]:
        """The whole model, as `Engine.full_state_dict` gives it. A collective."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `values`; raises ModelMismatch."""

    def pieces(self) -> Mapping[str, Piece]:
        """What this rank's owners are of its part of the model."""

    def join(self, name: str, value: Any) -> Any:
        """A value of the optimizer's state of a parameter, for the parameter before the model was split. A collective."""

    def part(self, name: str, value: Any) -> Any:
        """The inverse of `join`."""

    def held(self) -> tuple[int, int, int]:
        """Bytes in memory on this rank now: parameters and masters, gathered parameters beyond these, gradients."""


class Whole:
    """Stage 0: every rank holds everything."""

    def __init__(self, model: nn.Module, group: Group, precision: Precision, *, leaves: int, all_reduce: str, compress: str):
        self.model, self._world, self._leaves, self.waited = model, group, leaves, 0.0
        self._masters = MasterWeights(model, precision)
        self.owners: Mapping[str, nn.Parameter] = self._masters.owners
        self.group = group.alone()
        self._reducer = CanonicalReducer(self._masters.params, group, leaves, owners=self.owners) if leaves else GradientReducer(
            self._masters.params, group, owners=self.owners, all_reduce=all_reduce, compress=compress, by_rows=embeddings(model))

    def together(self, batches: Iterable[Any]) -> Iterator[Any]:
        """A forward needs nobody else."""
        yield from batches

    def abandon(self) -> None:
        """Forget all gradients."""
        self._reducer.abandon()

    def sync(self, on: bool) -> AbstractContextManager[None]:
        """Buckets leave during the last backward only."""
        return self._reducer.sync(on)

    def alone(self) -> AbstractContextManager[None]:
        """No bucket leaves."""
        return self._reducer.sync(False)

    def begin_leaves(self, leaves: int) -> None:
        """See parallel/same_bits.py."""
        assert isinstance(self._reducer, CanonicalReducer), "logical shards need the canonical reducer"
        self._reducer.begin(leaves)

    def take_leaf(self, index: int, totals: Tensor) -> None:
        """See parallel/same_bits.py."""
        assert isinstance(self._reducer, CanonicalReducer), "logical shards need the canonical reducer"
        self._reducer.take_leaf(index, totals)

    def finish(self, totals: Tensor | None) -> Tensor:
        """Wait for the buckets."""
        begin = time.perf_counter()
        summed = self._reducer.finish(totals)
        assert summed is not None, "the reducer lost the totals"
        self.waited += time.perf_counter() - begin if self._world.size > 1 else 0.0
        return summed

    def norm(self) -> Tensor:
        """Of the buckets, in shares where there is much; deterministic, tensor by tensor, for buckets differ between stages."""
        if self._leaves:
            return global_norm([owner.grad for owner in self.owners.values() if owner.grad is not None])
        return global_norm(self._reducer.flat_gradients(), self._world)

    def flat_gradients(self) -> list[Tensor]:
        """The buckets."""
        return self._reducer.flat_gradients()

    def local_gradients(self) -> dict[str, Tensor]:
        """Those of the owners."""
        return {name: owner.grad for name, owner in self.owners.items() if owner.grad is not None}

    def rescale(self, factor: float) -> None:
        """What compression remembers is in the old scale."""
        self._reducer.summing.rescale(factor)

    def publish(self) -> None:
        """Round masters into the model."""
        self._masters.publish()

    def values(self, rank: int | None) -> dict[str, Tensor]:
        """Nothing to gather."""
        state = self._masters.full_values(self.model.state_dict(keep_vars=True))
        return state if rank in (None, self._world.rank) else {}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Into the masters, then the model."""
        self.model.load_state_dict(state)
        for name, owner in self.owners.items():
            owner.copy_(state[name])
        self.publish()

    def pieces(self) -> dict[str, Piece]:
        """Everything, in its own shape."""
        return {name: Piece(name, owner.shape, 0, owner.numel()) for name, owner in self.owners.items()}

    def join(self, name: str, value: Any) -> Any:
        """Nothing is split."""
        return value

    def part(self, name: str, value: Any) -> Any:
        """Nothing is split."""
        return value

    def held(self) -> tuple[int, int, int]:
        """All parameters, all gradients."""
        tensors = {id(t): t for t in (*self.model.parameters(), *self.owners.values())}
        return sum(t.nbytes for t in tensors.values()), 0, sum(flat.nbytes for flat in self._reducer.flat_gradients())


class Cut:
    """Stages 1 to 3: see parallel/zero.py."""

    def __init__(self, model: nn.Module, sharding: Sharding, everyone: Group):
        self.model, self.sharding, self._everyone = model, sharding, everyone
        self.owners: Mapping[str, nn.Parameter] = sharding.owners()
        self.group = sharding.group

    @property
    def waited(self) -> float:
        """As the groups have counted."""
        return sum(ledger.waited for ledger in {id(g.ledger): g.ledger for g in (self.group, self.sharding.replicas)}.values())

    def together(self, batches: Iterable[Any]) -> Iterator[Any]:
        """A forward is a collective where parameters are gathered for it: a rank without a batch goes along without computing."""
        pending, gathers = iter(batches), self.sharding.gathers_in_forward
        while True:
            batch = next(pending, None)
            have = torch.tensor([float(batch is not None)], device=self.group.device)
            if gathers:
                self.group.all_reduce(have, label="another batch?")
            if not have.item():
                return
            if batch is None:
                self.sharding.follow()
                continue
            with self.sharding.followed(gathers and have.item() < self.group.size):
                yield batch

    def abandon(self) -> None:
        """Forget all gradients."""
        self.sharding.abandon()

    def sync(self, on: bool) -> AbstractContextManager[None]:
        """Sections are reduced during the last backward; those that must not stay whole, in each."""
        return self.sharding.sync(on)

    def alone(self) -> AbstractContextManager[None]:
        """Whole gradients stay."""
        return self.sharding.without_reduction()

    def begin_leaves(self, leaves: int) -> None:
        """Only `CutCanonical` has logical shards."""
        raise AssertionError("logical shards need canonical gradients")

    def take_leaf(self, index: int, totals: Tensor) -> None:
        """See `begin_leaves`."""
        raise AssertionError("logical shards need canonical gradients")

    def finish(self, totals: Tensor | None) -> Tensor:
        """All reductions have ended with the backward; agree who was used."""
        self.sharding.end_backward()
        summed = self.sharding.agree(totals)
        assert summed is not None, "no totals"
        return summed

    def norm(self) -> Tensor:
        """Of all slices together."""
        square = global_norm(self.flat_gradients()).square().to(self.group.device)
        return self.group.all_reduce(square, label="gradient norm").sqrt()

    def flat_gradients(self) -> list[Tensor]:
        """The slices."""
        return [gradient.slice for gradient in self.sharding.gradients() if gradient.slice is not None]

    def local_gradients(self) -> dict[str, Tensor]:
        """Views of whole gradients, before any reduction."""
        return {name: view for gradient in self.sharding.gradients() for name, view in gradient.local().items()}

    def rescale(self, factor: float) -> None:
        """Nothing remembers an old scale."""

    def publish(self) -> None:
        """Slices go into the wholes that are kept."""
        self.sharding.publish()

    def values(self, rank: int | None) -> dict[str, Tensor]:
        """Joined tensor by tensor."""
        return full_values(self.model, self.sharding, rank=rank)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Each rank takes its pieces."""
        load_values(self.model, self.sharding, state)

    def pieces(self) -> dict[str, Piece]:
        """One for each parameter, maybe empty."""
        return pieces_of(self.sharding)

    def join(self, name: str, value: Any) -> Any:
        """Only `CutParts` are split."""
        return value

    def part(self, name: str, value: Any) -> Any:
        """Only `CutParts` are split."""
        return value

    def held(self) -> tuple[int, int, int]:
        """Slices, the wholes beyond them, and gradients, whole or not."""
        units = [unit.held() for section in self.sharding.sections for unit in section.units]
        cut = {id(param) for section in self.sharding.sections for unit in section.units for param in unit.params.values()}
        rest = sum(param.nbytes for param in self.model.parameters() if id(param) not in cut)
        gradients = sum(gradient.held() for gradient in self.sharding.gradients()) + self.sharding.lenders.held()
        return rest + sum(own for own, _ in units), sum(whole for _, whole in units), gradients


class CutCanonical(Cut):
    """Slices of sums whose bits do not depend on the ranks (comm/canonical.py).

    Whole gradients are folded leaf by leaf, then over all ranks, and only then cut. Ranks may run different numbers of leaves, so
    parameters are gathered once, for the whole step.
    memory: whole parameters in a step, and whole gradients at every stage, up to log2(leaves) + 1 copies
    """

    def __init__(self, model: nn.Module, sharding: Sharding, everyone: Group):
        super().__init__(model, sharding, everyone)
        self.leaves, self._folds, self._totals = 0, dict[str, Fold](), Fold(1)

    def begin_leaves(self, leaves: int) -> None:
        """A step begins."""
        self.sharding.make_ready()
        self.leaves, self._totals = leaves, Fold(leaves)
        self._folds = {gradient.unit.name: Fold(leaves) for gradient in self.sharding.gradients()}

    def take_leaf(self, index: int, totals: Tensor) -> None:
        """Fold what has landed, and forget it."""
        for gradient in self.sharding.gradients():
            self._folds[gradient.unit.name].push(Node(index, 0), gradient.take_local())
        self._totals.push(Node(index, 0), totals)

    def finish(self, totals: Tensor | None) -> Tensor:
        """Fold over the ranks, then cut."""
        for gradient in self.sharding.gradients():
            values = self._folds[gradient.unit.name].values()
            gradient.set_sum(canonical_all_reduce(values, self._everyone, self.leaves, label=f"gradients of {gradient.unit.name}"))
        self.sharding.agree()
        return canonical_all_reduce(self._totals.values(), self._everyone, self.leaves, label="totals")

    def norm(self) -> Tensor:
        """Tensor by tensor, of the whole gradients that every rank has: the same bits as at stage 0."""
        views = {name: view for gradient in self.sharding.gradients() for name, view in gradient.summed().items()}
        return global_norm([views[name] for name, _ in self.model.named_parameters() if name in views])


class CutParts(Cut):
    """Slices of the parts of a model that is split over tensor and expert ranks (parallel/parts.py).

    everyone: all ranks that hold different elements: along shard, tensor and expert
    """

    def __init__(self, model: nn.Module, sharding: Sharding, everyone: Group, parts: Parts):
        super().__init__(model, sharding, everyone)
        self.parts = parts

    def norm(self) -> Tensor:
        """Each element once: what lies on several ranks counts for a part on each."""
        terms = [torch.linalg.vector_norm(owner.grad, dtype=torch.float64).square() / self.parts.copies(name)
                 for name, owner in self.owners.items() if owner.grad is not None]
        square = torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64)
        return self._everyone.all_reduce(square.to(self.group.device), label="gradient norm").sqrt()

    def values(self, rank: int | None) -> dict[str, Tensor]:
        """Joined over the shard axis, then over the others; every rank gets it, whoever asked."""
        return {name: self.parts.join(name, value.to(self.group.device)).cpu() for name, value in super().values(None).items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Each rank takes its pieces of its parts."""
        super().load({name: self.parts.cut(name, value) for name, value in state.items()})

    def join(self, name: str, value: Any) -> Any:
        """Tensors that lie like the parameter."""
        like = isinstance(value, Tensor) and value.shape == self._shapes[name] and value.dim() > 0
        return self.parts.join(name, value.to(self.group.device)).cpu() if like else value

    def part(self, name: str, value: Any) -> Any:
        """Tensors that lie like the parameter."""
        whole = self.parts.whole_shape(name, self._shapes[name])
        return self.parts.cut(name, value) if isinstance(value, Tensor) and value.shape == whole and value.dim() > 0 else value

    @property
    def _shapes(self) -> dict[str, torch.Size]:
        return {name: piece.shape for name, piece in self.pieces().items()}


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
