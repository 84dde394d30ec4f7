"""The engine: one optimizer step over all ranks, the same numbers as one process with the whole batch.

One step:

    cut the batch in micro-batches
    each: key the dropout, forward, loss -> (sum, count), backward of the *sum*; after the last, buckets leave
    sum gradients, losses and counts over the ranks             parallel/gradients.py, or parallel/same_bits.py
    divide once, by the global count; clip by the global norm   both in one factor, applied in the optimizer's own pass
    step; round masters into the model; report

Nothing is averaged before everything has been summed, so unequal micro-batches, padding and accumulation cannot
bend the gradient.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError, LossError
from rankloom.base.events import Sink, StepDone
from rankloom.comm.canonical import owned_leaves
from rankloom.comm.choose import BACKEND
from rankloom.comm.compress import EXACT
from rankloom.parallel.data import embeddings
from rankloom.parallel.gradients import GradientReducer
from rankloom.parallel.replicas import BufferKeeper, make_replicas_equal
from rankloom.parallel.same_bits import CanonicalReducer
from rankloom.train.apply import apply_gradients, peak_memory
from rankloom.train.batch import LOGICAL_SHARDS
from rankloom.train.batches import cut, deal_rows, map_tensors, rows_of
from rankloom.train.diagnose import expect_sum, explain_non_finite
from rankloom.train.dropout import DropoutKey, key_dropout
from rankloom.train.modes import evaluating
from rankloom.train.precision import UNMEASURED, LossScale, MasterWeights, Precision, precision_named
from rankloom.world.connect import World
from rankloom.world.group import Group
from rankloom.world.launch import fix_cublas_workspace

Loss = Callable[[nn.Module, Any], tuple[Tensor, Any]]


@dataclass(frozen=True, slots=True)
class Report:
    """What one step (or one evaluation) found, over all ranks."""

    step: int            # steps finished so far, this one included
    loss: float          # sum / count
    count: float         # what the loss was summed over
    grad_norm: float     # of the mean gradient, before clipping
    lr: float            # of the first parameter group
    skipped: bool        # fp16 overflow: the parameters did not change
    seconds: float       # wall time of the step on this rank
    exposed: float       # seconds of it that waited for communication


@dataclass(frozen=True, slots=True)
class Settings:
    """What `prepare` was asked for, checked."""

    loss: Loss
    accumulate: int
    clip: float | None
    precision: Precision
    leaves: int                                # logical shards; 0: the order of addition is free
    schedule: Callable[[int], float] | None


class Engine:
    """A model in training. Made by `prepare`."""

    def __init__(self, model: nn.Module, group: Group, settings: Settings, optimizer: Callable[[list[nn.Parameter]], Any], *,
                 seed: int, all_reduce: str, compress: str, sink: Sink | None):
        self.model, self.group, self.settings, self.sink = model, group, settings, sink
        self.steps_done = 0
        self.scale = UNMEASURED
        self._dropout = DropoutKey(seed)
        key_dropout(model, self._dropout)
        self._masters = MasterWeights(model, settings.precision)
        owners, by_rows = self._masters.owners, embeddings(model)
        self._reducer = CanonicalReducer(self._masters.params, group, settings.leaves, owners=owners) if settings.leaves else (
            GradientReducer(self._masters.params, group, owners=owners, all_reduce=all_reduce, compress=compress, by_rows=by_rows))
        self._running = BufferKeeper(model, group)
        self.optimizer = _make_optimizer(optimizer, list(owners.values()))
        self._base_lrs = [float(part["lr"]) for part in self.optimizer.param_groups]

    def step(self, batch: Any) -> Report:
        """One optimizer step on this rank's share of the global batch.

        batch:  tensors with one row per sample, nested as you like (train/batches.py)
        raises: BatchError, LossError; NonFinite, on all ranks, with the parameters as they were before
        """
        begin = time.perf_counter()
        if not self.model.training:   # else parts that the user has put in eval mode stay there
            self.model.train()
        lr = self._set_learning_rate()
        self._reducer.abandon()   # whatever a failed step left behind
        batch = map_tensors(lambda t: t.to(self.group.device, non_blocking=True), batch)
        if self.steps_done == 0:
            self._expect_sum(batch)
        run = self._run_in_canonical_order if self.settings.leaves else self._run_in_free_order
        totals, exposed = run(batch)
        loss, count, norm, finite = self._apply(totals, batch)
        self.steps_done += 1
        self._running.average_changed()
        report = Report(self.steps_done, loss, count, norm, lr, not finite, time.perf_counter() - begin, exposed)
        if self.sink:
            self.sink(StepDone(self.group.rank, report.step, loss, count, norm, lr, report.seconds, exposed,
                               peak_memory(self.group.device), report.skipped))
        return report

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> Report:
        """The exact loss over all ranks' batches: sums and counts are added, no batch weighs more than its items.

        Ranks may bring different numbers of batches, also none.
        """
        begin = time.perf_counter()
        with evaluating(self.model):
            losses = [self._call_loss(map_tensors(lambda t: t.to(self.group.device), batch))[1] for batch in batches]
        total, count = self._total(losses)
        if count <= 0:
            raise LossError(f"rank {self.group.rank}: evaluation counted {count:g} items over all ranks; is the validation set empty?")
        return Report(self.steps_done, total / count, count, 0.0, self.optimizer.param_groups[0]["lr"], False,
                      time.perf_counter() - begin, 0.0)

    def _total(self, losses: list[Tensor]) -> tuple[float, float]:
        """Sum and count over all batches of all ranks; deterministic, rounded once, so that no order shows."""
        if not self.settings.leaves:
            own = torch.stack(losses).sum(0) if losses else torch.zeros(2, dtype=torch.float64, device=self.group.device)
            total, count = self.group.all_reduce(own, label="evaluation").tolist()
            return total, count
        everyone = self.group.all_gather_object([loss.tolist() for loss in losses], label="evaluation")
        return math.fsum(total for rank in everyone for total, _ in rank), math.fsum(count for rank in everyone for _, count in rank)

    def full_state_dict(self) -> dict[str, dict[str, Any]]:
        """The whole training state under the plain model's names: {"model": ..., "optimizer": {"state", "param_groups"}}."""
        names = {id(owner): name for name, owner in self._masters.owners.items()}
        state = {names[id(p)]: {key: _copied(value) for key, value in held.items()} for p, held in self.optimizer.state.items()}
        groups = [{key: [names[id(p)] for p in value] if key == "params" else value for key, value in part.items()}
                  for part in self.optimizer.param_groups]
        model = self._masters.full_values(self.model.state_dict(keep_vars=True))
        return {"model": model, "optimizer": {"state": state, "param_groups": groups}}

    # ------------------------------------------------------------------ forward and backward

    def _run_in_free_order(self, batch: Any) -> tuple[Tensor, float]:
        totals = torch.zeros(2, dtype=torch.float64, device=self.group.device)
        pieces = cut(batch, self.settings.accumulate, self.group.rank)
        for at, piece in enumerate(pieces):
            with self._reducer.sync(at == len(pieces) - 1):
                totals += self._forward_backward(piece, self.group.rank * len(pieces) + at)
        return self._finish(totals)

    def _run_in_canonical_order(self, batch: Any) -> tuple[Tensor, float]:
        assert isinstance(self._reducer, CanonicalReducer), "logical shards need the canonical reducer"
        mine, leaves = deal_rows(batch, self.group, self.settings.leaves)
        run = owned_leaves(self.group.rank, self.group.size, leaves)
        self._reducer.begin(leaves)
        for leaf, piece in zip(run, cut(mine, len(run), self.group.rank), strict=True):
            self._reducer.take_leaf(leaf, self._forward_backward(piece, leaf))
        return self._finish(None)

    def _finish(self, totals: Tensor | None) -> tuple[Tensor, float]:
        begin = time.perf_counter()
        summed = self._reducer.finish(totals)
        assert summed is not None, "the reducer lost the totals"
        return summed, time.perf_counter() - begin if self.group.size > 1 else 0.0

    def _expect_sum(self, batch: Any) -> None:
        """Before the first step, on about a micro-batch: a loss that returns a mean is an error."""
        rows = max(2, rows_of(batch, self.group.rank) // (self.settings.leaves or self.settings.accumulate))
        expect_sum(lambda part: self._call_loss(part)[1], self.model, map_tensors(lambda t: t[:rows], batch), self.group.rank)

    def _forward_backward(self, piece: Any, index: int) -> Tensor:
        """Gradients of the loss *sum* of one micro-batch, times the loss scale. Returns fp64 [sum, count]."""
        self._dropout.move_to(self.steps_done, index)
        loss, totals = self._call_loss(piece)
        if self.settings.precision.scaled and self.scale is UNMEASURED:
            leaves = self.settings.leaves   # where bits must not depend on the ranks, the scale may not: leaf 0 decides
            measured = totals.clone() if not leaves or index == 0 else torch.zeros_like(totals)
            items = self.group.all_reduce(measured, label="first count")[1].item()
            self.scale = LossScale.first(items * (leaves or self.settings.accumulate))
        (loss * self.scale.value if self.scale.value != 1.0 else loss).backward()
        return totals

    def _call_loss(self, piece: Any) -> tuple[Tensor, Tensor]:
        """The loss sum, and fp64 [sum, count], detached.

        raises: LossError when the function did not return (sum, count)
        """
        returned = self.settings.loss(self.model, piece)
        if not (isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[0], Tensor) and returned[0].dim() == 0):
            raise LossError(
                f"rank {self.group.rank}: the loss function returned {_describe(returned)}, expected (sum, count): the loss *summed* over "
                "items, a tensor of no dims, and how many items that were. A mean cannot be combined rightly over ranks; "
                "return for example `F.cross_entropy(logits, targets, reduction='sum'), targets.numel()`")
        loss, count = returned
        count = torch.as_tensor(count, dtype=torch.float64, device=loss.device).detach()
        return loss, torch.stack((loss.detach().to(torch.float64), count.reshape(())))

    # ------------------------------------------------------------------ the update

    def _apply(self, totals: Tensor, batch: Any) -> tuple[float, float, float, bool]:
        """Returns loss, count, gradient norm, and whether the parameters were updated."""
        flats = self._reducer.flat_gradients()
        share = None if self.settings.leaves else self.group   # an order that depends on the ranks is no order
        total, count, norm, finite = apply_gradients(self.optimizer, flats, totals, group=share, scale=self.scale.value,
                                                     clip=self.settings.clip)
        if count <= 0:
            raise LossError(f"rank {self.group.rank}: the loss counted {count:g} items over all ranks; "
                            "the second value that a loss function returns is how many items it summed over")
        if self.settings.precision.scaled:
            before, self.scale = self.scale, self.scale.after(overflow=not finite)
            self._reducer.summing.rescale(self.scale.value / before.value)
        elif not finite:
            seen = f"step {self.steps_done + 1}: loss {total / count:g}, gradient norm {norm:g}"
            raise explain_non_finite(self.group, lambda: self._run_alone(batch), self._masters.owners, seen)
        if finite:
            self._masters.publish()
        return total / count, count, norm, finite

    def _run_alone(self, batch: Any) -> Tensor:
        self._reducer.abandon()
        with self._reducer.sync(False):
            return self._forward_backward(batch, self.group.rank)

    def _set_learning_rate(self) -> float:
        if self.settings.schedule:
            lr = self.settings.schedule(self.steps_done)
            for part, base in zip(self.optimizer.param_groups, self._base_lrs):
                part["lr"] = lr * (base / self._base_lrs[0] if self._base_lrs[0] else 1.0)
        return float(self.optimizer.param_groups[0]["lr"])


def prepare(model: nn.Module, *, loss: Loss, optimizer: Callable[[list[nn.Parameter]], Any], world: World, stage: int = 0,
            accumulate: int = 1, clip: float | None = None, precision: str | None = None, deterministic: bool | int = False,
            seed: int = 0, schedule: Callable[[int], float] | None = None, all_reduce: str = BACKEND,
            compress: str = EXACT, sink: Sink | None = None) -> Engine:
    """Make a plain model train over all ranks of `world`. Every rank calls it with an equal model.

    loss:          loss(model, micro-batch) -> (sum, count)
    optimizer:     parameters -> torch optimizer, e.g. `lambda p: torch.optim.AdamW(p, lr=3e-4)`
    stage:         0: every rank holds everything (DDP)
    accumulate:    micro-batches a step; gradients are reduced once
    clip:          the largest global gradient norm
    precision:     fp32, fp64, bf16, fp16; left out, the dtypes the model has
    deterministic: the same bits on any number of ranks: True for 8 logical shards, or their number
    seed:          of dropout
    schedule:      step (from 0) -> learning rate of the first parameter group; the others keep their ratio to it
    all_reduce:    "backend", "ring", or a registered name
    compress:      "none", or how gradients travel: "bf16", "int8", "int4", "1bit", "topk", "powersgd" ... (comm/compress.py)
    sink:          gets a StepDone after each step of this rank
    raises:        ConfigError; ModelMismatch, on all ranks, when their models differ
    """
    settings = Settings(loss, accumulate, clip, precision_named(precision), _leaves(deterministic, world, accumulate), schedule)
    _check(model, world, stage, settings, compress)
    group = world.group("replicate", "shard")
    model.to(world.device)
    make_replicas_equal(model, group)
    if settings.leaves:
        torch.set_num_threads(1)   # how a kernel splits its sums depends on its threads
        if world.device.type == "cuda":
            fix_cublas_workspace()
            torch.use_deterministic_algorithms(True)
    return Engine(model, group, settings, optimizer, seed=seed, all_reduce=all_reduce, compress=compress, sink=sink)


def _leaves(deterministic: bool | int, world: World, accumulate: int) -> int:
    leaves = LOGICAL_SHARDS if deterministic is True else int(deterministic)
    if leaves and not world.size <= leaves:
        raise ConfigError(f"deterministic={leaves} logical shards cannot feed {world.size} ranks; give at least one shard for each rank")
    if leaves and accumulate != 1:
        raise ConfigError(f"accumulate={accumulate} has no meaning with deterministic={leaves}: each logical shard is one micro-batch")
    return leaves


def _check(model: nn.Module, world: World, stage: int, settings: Settings, compress: str) -> None:
    sizes = world.mesh.sizes()
    unknown = [f"{axis}={n}" for axis, n in sizes.items() if n > 1 and axis not in ("replicate", "shard")]
    if unknown:
        raise ConfigError(f"mesh axes {', '.join(unknown)} are not available yet; use replicate")
    if settings.leaves and compress != EXACT:
        raise ConfigError(f"compress={compress!r} has no meaning with deterministic: what is lost depends on the number of ranks")
    if stage != 0:
        raise ConfigError(f"stage={stage!r} is not available yet; stage 0 keeps everything on every rank")
    if isinstance(settings.accumulate, bool) or not isinstance(settings.accumulate, int) or settings.accumulate < 1:
        raise ConfigError(f"accumulate={settings.accumulate!r}, expected a whole number of micro-batches, 1 or more")
    if settings.clip is not None and not settings.clip > 0:
        raise ConfigError(f"clip={settings.clip!r}, expected a norm above 0, or None")
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError("the model has no parameter that requires a gradient; there is nothing to train")
    if getattr(model, "_prepared_by_rankloom", False):
        raise ConfigError("this model has been prepared before; prepare a fresh copy")
    if settings.leaves and any(getattr(module, "track_running_stats", False) for module in model.modules()):
        raise ConfigError("deterministic training cannot hold running batch statistics equal on any number of ranks; "
                          "use GroupNorm or LayerNorm in place of BatchNorm")
    vars(model)["_prepared_by_rankloom"] = True


def _make_optimizer(build: Callable[[list[nn.Parameter]], Any], owners: list[nn.Parameter]) -> torch.optim.Optimizer:
    if isinstance(build, torch.optim.Optimizer) or not callable(build):
        raise ConfigError("optimizer must be a function of the parameters, for example `lambda p: torch.optim.AdamW(p, lr=3e-4)`: "
                          "rankloom decides which tensors it updates")
    made = build(owners)
    known = {id(owner) for owner in owners}
    if not all(id(p) in known for part in made.param_groups for p in part["params"]):
        raise ConfigError("the optimizer updates tensors that it was not given; build it from the parameters it is called with")
    return made


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"one tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {', '.join(map(_describe, value)) or 'nothing'}"
    return f"a {type(value).__name__}"
