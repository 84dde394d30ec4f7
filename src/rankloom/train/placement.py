"""Where parameters, gradients and optimizer state of a model in training lie: whole on every rank, or cut.

The engine runs a step over either, and does not know which:

    stage 0      ReplicatedPlacement   masters and buckets; parallel/gradients.py, or parallel/same_bits.py where every bit must be the same
    stages 1-3   ShardedPlacement      units and slices; train/sharded.py

`owners` are what the optimizer updates: parameters, their fp32 masters, or slices of these.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rankloom.base.errors import ModelMismatch
from rankloom.checkpoint.manifest import Part
from rankloom.parallel.data import embeddings
from rankloom.parallel.gradients import GradientReducer
from rankloom.parallel.guards import watch_optimizers
from rankloom.parallel.same_bits import CanonicalReducer
from rankloom.parallel.state_dict import difference, shapes_in
from rankloom.shard.optimizer import Optimizer, OwnedRun
from rankloom.shard.optimizer_state import gather_optimizer_state
from rankloom.train.checkpoint_parts import MODEL, parts_of_piece, unique_tensors, whole_part
from rankloom.train.optimizer_step import global_norm
from rankloom.train.precision import MasterWeights, Precision
from rankloom.world.group import Group


class Placement(Protocol):
    """What the engine asks of it, in the order of a step."""

    @property
    def model(self) -> nn.Module:
        """What this rank holds of the model: all of it, or some stages."""

    @property
    def owners(self) -> Mapping[str, nn.Parameter]:
        """What the optimizer updates, by the plain names."""

    @property
    def group(self) -> Group:
        """The ranks whose pieces together make the whole."""

    @property
    def waited(self) -> float:
        """Seconds spent in waiting for communication, so far."""

    def together(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches of a forward-only pass; ranks may bring different numbers of them."""

    def abandon(self) -> None:
        """Forget all gradients, and whatever a failed step left behind; raises UnitError when what computes is not what is trained."""

    def sync(self, on: bool) -> AbstractContextManager[None]:
        """Whether the backward inside is the step's last."""

    def without_reduction(self) -> AbstractContextManager[None]:
        """The backward inside makes gradients of this rank alone."""

    def begin_shards(self, shards: int) -> None:
        """Deterministic: the batch makes so many logical shards."""

    def add_shard(self, index: int, totals: Tensor) -> None:
        """Deterministic: fold in the gradients and totals of one logical shard."""

    def begin_last_backward(self, items: Tensor, scale: float) -> None:
        """The step's last forward has ended, its gradients will soon be summed.

        items: how many this rank's losses of the step have summed over, fp64
        scale: by what the losses are multiplied
        """

    def finish(self, totals: Tensor | None) -> Tensor:
        """All gradients are summed over all ranks; so are the totals, which are returned."""

    @property
    def factor(self) -> float:
        """By what the gradients were multiplied before they were summed; the loss scale is no part of it."""

    @property
    def compress(self) -> str:
        """How they travelled: a name of comm/compress.py."""

    def norm(self) -> Tensor:
        """The 2-norm of the summed gradients, each element once, fp64."""

    def repeated_norms(self) -> dict[str, float]:
        """The 2-norms of the summed gradients of parameters that every tensor rank has whole, by name. A collective."""

    def flat_gradients(self) -> list[Tensor]:
        """All that this rank's part of the optimizer reads, in few tensors."""

    def local_gradients(self) -> dict[str, Tensor]:
        """After a backward without communication: what it has made."""

    def publish(self) -> None:
        """The optimizer has stepped: the model's parameters follow."""

    def values(self, rank: int | None) -> dict[str, Tensor]:
        """The whole model, as `Engine.full_state_dict` gives it: to one rank of the world, or to all. A collective."""

    def state(self, optimizer: Optimizer, rank: int | None) -> dict[str, Any]:
        """The optimizer's whole state, to one rank of the world, or to all. A collective."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `values`; raises ModelMismatch."""

    def parts(self) -> list[Part]:
        """What this rank has of each tensor of the model's state dict, in the master format; extra state apart."""

    def parts_like(self, name: str, piece: OwnedRun, values: Tensor) -> list[Part]:
        """The same of a tensor `name` that lies like a parameter of which this rank has `piece`, one of `pieces`."""

    def rewritten(self) -> AbstractContextManager[None]:
        """The memory of `parts` may be written inside; afterwards what computes is what was written. A collective."""

    def pieces(self) -> Mapping[str, OwnedRun]:
        """For each owner, which elements it holds of its parameter, as that lies on this rank."""

    def part(self, name: str, value: Any) -> Any:
        """This rank's part of a value that the optimizer remembers of parameter `name`."""

    def held(self) -> tuple[int, int, int]:
        """Bytes in memory on this rank now: parameters and masters, gathered parameters beyond these, gradients."""


class ReplicatedPlacement:
    """Stage 0: every rank holds everything."""

    def __init__(self, model: nn.Module, group: Group, precision: Precision, *, logical_shards: int, all_reduce: str, compress: str,
                 compress_after: int):
        self.model, self._world, self._logical_shards, self.waited = model, group, logical_shards, 0.0
        self._masters = MasterWeights(model, precision)
        self.owners: Mapping[str, nn.Parameter] = self._masters.owners
        self.group = group.alone()
        params, owners = self._masters.params, self.owners
        self._reducer = CanonicalReducer(params, group, logical_shards, owners=owners) if logical_shards else GradientReducer(
            params, group, owners=owners, all_reduce=all_reduce, compress=compress, compress_after=compress_after,
            by_rows=embeddings(model))
        self._reducer.syncing = False   # a backward outside of a step is none of its gradients
        watch_optimizers()

    def together(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Each rank its own, as many as it has: a forward sends nothing."""
        yield from batches

    def abandon(self) -> None:
        """Forget all gradients."""
        self._masters.expect_own_values()
        self._reducer.abandon()

    def sync(self, on: bool) -> AbstractContextManager[None]:
        """Buckets leave during the last backward only."""
        return self._reducer.sync(on)

    def without_reduction(self) -> AbstractContextManager[None]:
        """No bucket leaves."""
        return self._reducer.sync(False)

    def begin_shards(self, shards: int) -> None:
        """See parallel/same_bits.py."""
        assert isinstance(self._reducer, CanonicalReducer), "logical shards need the canonical reducer"
        self._reducer.begin_shards(shards)

    def add_shard(self, index: int, totals: Tensor) -> None:
        """See parallel/same_bits.py."""
        assert isinstance(self._reducer, CanonicalReducer), "logical shards need the canonical reducer"
        self._reducer.add_shard(index, totals)

    def begin_last_backward(self, items: Tensor, scale: float) -> None:
        """Compressed, a gradient is made a mean over all items of the step before it is summed, and the loss scale taken out of it.

        What compression loses of this step is added to the next one, which may have other items and another scale: so it is kept of
        means. Of sums, a small batch after a large one would take what is owed times their ratio; and fp16 has no room for sums.
        sent:   all-reduce of one fp64, which the last backward waits for; nothing in exact steps
        """
        summing = self._reducer.summing
        summing.factor = 1.0
        if self._world.size > 1 and not summing.is_exact_now:
            with self._waiting():
                divisor = scale * self._world.all_reduce(items.clone(), label="items of the step").item()
            summing.factor = 1.0 / divisor if divisor > 0 else 1.0   # the engine refuses a step that has counted nothing

    def finish(self, totals: Tensor | None) -> Tensor:
        """Wait for the buckets."""
        with self._waiting():
            summed = self._reducer.finish(totals)
        assert summed is not None, "the reducer lost the totals"
        return summed

    @property
    def factor(self) -> float:
        """See `begin_last_backward`."""
        return self._reducer.summing.factor

    @property
    def compress(self) -> str:
        """The name that the run was given."""
        return self._reducer.summing.compress

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.waited += time.perf_counter() - begin if self._world.size > 1 else 0.0

    def norm(self) -> Tensor:
        """Of the buckets, in shares where there is much; deterministic, tensor by tensor, for buckets differ between stages."""
        if self._logical_shards:
            return global_norm([owner.grad for owner in self.owners.values() if owner.grad is not None])
        return global_norm(self._reducer.flat_gradients(), self._world)

    def repeated_norms(self) -> dict[str, float]:
        """There are no tensor ranks."""
        return {}

    def flat_gradients(self) -> list[Tensor]:
        """The buckets, and what is summed in none."""
        return self._reducer.flat_gradients()

    def local_gradients(self) -> dict[str, Tensor]:
        """As they lie in the buckets, by the owners' names."""
        return {name: owner.grad for name, owner in self.owners.items() if owner.grad is not None}

    def publish(self) -> None:
        """Round masters into the model."""
        self._masters.publish()

    def values(self, rank: int | None) -> dict[str, Tensor]:
        """Nothing to gather."""
        return self._masters.full_values(self.model.state_dict(keep_vars=True)) if rank in (None, self._world.rank) else {}

    def state(self, optimizer: Optimizer, rank: int | None) -> dict[str, Any]:
        """Nothing to gather."""
        mine = rank in (None, self._world.rank)
        return (gather_optimizer_state(optimizer, self.owners, self.pieces(), self.group) or {}) if mine else {}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Into the masters, then the model."""
        shapes = shapes_in(self.model.state_dict(keep_vars=True))
        self._world.agree(difference(shapes, state, f"rank {self._world.rank}"), error=ModelMismatch, label="load a state dict")
        self.model.load_state_dict(state)
        for name, owner in self.owners.items():
            owner.copy_(state[name])
        self._reducer.summing.begin_anew()
        self.publish()

    def parts(self) -> list[Part]:
        """Everything: masters in place of what is rounded."""
        masters = {id(param): self.owners[name] for name, param in self._masters.params.items()}
        return [whole_part(MODEL + name, masters.get(id(value), value)) for name, value in unique_tensors(self.model).items()]

    def parts_like(self, name: str, piece: OwnedRun, values: Tensor) -> list[Part]:
        """One part, the whole: `piece` has all elements."""
        return parts_of_piece(name, piece, values, shape=piece.shape)

    @contextmanager
    def rewritten(self) -> Iterator[None]:
        """Masters go into the model; what compression remembers was of other values."""
        yield
        self._reducer.summing.begin_anew()
        self.publish()

    def pieces(self) -> dict[str, OwnedRun]:
        """Everything, in its own shape."""
        return {name: OwnedRun(name, owner.shape, 0, owner.numel()) for name, owner in self.owners.items()}

    def part(self, name: str, value: Any) -> Any:
        """The value itself: this rank has all of each parameter."""
        return value

    def held(self) -> tuple[int, int, int]:
        """All parameters, all gradients."""
        tensors = {id(t): t for t in (*self.model.parameters(), *self.owners.values())}
        return sum(t.nbytes for t in tensors.values()), 0, sum(flat.nbytes for flat in self._reducer.flat_gradients())
