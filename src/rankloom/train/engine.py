"""The engine: one optimizer step over all ranks, the same numbers as one process with the whole batch.

One step:

    cut the batch in micro-batches
    each: key the dropout, forward, loss -> (sum, count), backward of the *sum*; after the last, buckets leave
    sum gradients, losses and counts over the ranks             parallel/gradients.py, or parallel/same_bits.py
    divide once, by the global count; clip by the global norm   both in one factor, applied in the optimizer's own pass
                                                                (compressed, divided before the sum: train/placement.py)
    step; round masters into the model; report

Nothing is averaged before everything has been summed, so unequal micro-batches, padding and accumulation cannot
bend the gradient.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError, LossError
from rankloom.base.events import Load, Sink, StepDone
from rankloom.base.loss import sum_and_count
from rankloom.base.modes import evaluating
from rankloom.comm.canonical import owned_leaves
from rankloom.parallel.replicas import ReplicaGuard
from rankloom.shard.optimizer import AsBuilt, Optimizer
from rankloom.train.batches import MicroBatches, as_given, cut_again, cut_batch, deal_shards, laid_out_anew, map_tensors
from rankloom.train.checkpoint import load_checkpoint, save_checkpoint
from rankloom.train.diagnose import (
    alike_on_any_ranks,
    compare_rows,
    expect_one_model,
    expect_sum_of_step,
    explain_non_finite,
    generator_now,
    runs_compiled,
    warn_of_equal_draws,
)
from rankloom.train.dropout import DropoutKey
from rankloom.train.expert_books import ExpertBooks
from rankloom.train.fp8 import Float8Layers
from rankloom.train.memory_report import Held, explain_out_of_memory, held_by, peak_memory
from rankloom.train.optimizer_step import apply_gradients
from rankloom.train.placement import Placement, ReplicatedPlacement
from rankloom.train.precision import UNMEASURED, LossScale, Precision, buffers_named
from rankloom.train.recompute import Recompute
from rankloom.train.split_model import SHARING_AXES
from rankloom.train.state import TrainingState, gather_state, load_state
from rankloom.world.connect import World
from rankloom.world.group import Group

Loss = Callable[[nn.Module, Any], tuple[Tensor, Any]]


@dataclass(frozen=True, slots=True)
class Report:
    """What one step (or one evaluation) found, over all ranks."""

    step: int            # steps finished so far, this one included
    loss: float          # sum / count, auxiliary losses of routers apart
    count: float         # what the loss was summed over
    grad_norm: float     # of the mean gradient, before clipping
    lr: float            # of the first parameter group
    skipped: bool        # fp16 overflow: the parameters did not change
    seconds: float       # wall time of the step on this rank
    exposed: float       # seconds of it that waited for communication
    auxiliary: float = 0.0                                         # losses of routers / count
    experts: Mapping[str, Load] = field(default_factory=dict)      # who had how many tokens, by layer

    @property
    def tokens(self) -> float:
        """`count`, as a language model's loop calls it."""
        return self.count


@dataclass(frozen=True, slots=True)
class Settings:
    """What `prepare` was asked for, checked."""

    loss: Loss
    accumulate: int
    clip: float | None
    precision: Precision
    logical_shards: int                                # logical shards; 0: the order of addition is free
    schedule: Callable[[int], float] | None
    world: World                               # all ranks of the job
    recompute: Recompute | None = None         # what each block keeps; it can be printed
    float8: Float8Layers = field(default_factory=lambda: Float8Layers({}, None))   # layers that multiply in eight bits


class Engine:
    """A model in training. Made by `prepare`.

    group:  the ranks that rows are dealt over; along other axes ranks bring the same rows
    """

    def __init__(self, model: nn.Module, group: Group, settings: Settings, placement: Placement, optimizer: Optimizer, *,
                 tokens: Group, dropout: DropoutKey, sink: Sink | None):
        self.model, self.group, self.settings, self.sink = model, group, settings, sink
        self.steps_done = 0
        self._is_first = True   # step since `prepare`, also of a run that goes on
        self.scale = UNMEASURED
        self.placement, self.optimizer = placement, optimizer
        self._dropout = dropout
        self._replica_guard = ReplicaGuard(model, tokens)
        self._built = AsBuilt.of(optimizer, cut=not isinstance(placement, ReplicatedPlacement))
        if settings.schedule and not self._built.rates[0] and any(self._built.rates):
            raise ConfigError(f"the optimizer has a first group with lr=0 and others at {self._built.rates[1:]}: a schedule gives the rate "
                              "of the first, and the others keep their ratio to it. Put another group first, or freeze its parameters")

    def step(self, batch: Any) -> Report:
        """One optimizer step on this rank's share of the global batch.

        batch:  tensors with one row per sample, nested as you like (train/batches.py); or, cut already, so that they may be of unequal
                length: a list of `accumulate` tuples or dicts of tensors, or an iterator over as many batches
        raises: BatchError, LossError; NonFinite, on all ranks, with the parameters as they were before; ConfigError when a
                deterministic model draws random numbers that depend on the ranks, or a parameter is frozen no more; UnitError when one was
                replaced, or came
        """
        begin, waited = time.perf_counter(), self.placement.waited
        self._replica_guard.parameters.expect_unchanged()
        if not self.model.training:   # else parts that the user has put in eval mode stay there
            self.model.train()
        lr = self._set_learning_rate()
        self.placement.abandon()   # whatever a failed step left behind
        self._experts.begin_step()
        self.settings.float8.begin_step(whole=isinstance(self.placement, ReplicatedPlacement))
        with explain_out_of_memory(self.world_rank, self.group.device, self.held):
            batch = as_given(batch, self.settings.accumulate, self.world_rank)
            batch = map_tensors(lambda t: t.to(self.group.device, non_blocking=True), batch)
            if self._is_first:
                compare_rows(self.settings.world.group(*SHARING_AXES), self.group, batch)
            if self.steps_done == 0:
                self._expect_sum(*((batch[0], 1) if isinstance(batch, MicroBatches) else (batch, self.settings.accumulate)))
            totals = self._run_in_canonical_order(batch) if self.settings.logical_shards else self._run_in_free_order(batch)
            exposed = self.placement.waited - waited
            if self._is_first:
                expect_one_model(self.settings.world, totals, self.placement.repeated_norms())
                self._is_first = False
            loss, count, norm, finite = self._apply(totals, batch)
        self.steps_done += 1
        self._replica_guard.buffers.average_changed()
        auxiliary, experts = totals[2].item() / count if len(totals) > 2 else 0.0, self._experts.count_tokens(move=finite)
        if experts:
            self._replica_guard.buffers.forget_changes()   # biases of routers, which all ranks have moved alike
        report = Report(step=self.steps_done, loss=loss, count=count, grad_norm=norm, lr=lr, skipped=not finite, exposed=exposed,
                        seconds=time.perf_counter() - begin, auxiliary=auxiliary, experts=experts)
        if self.sink:
            self.sink(StepDone(rank=self.world_rank, step=report.step, loss=loss, count=count, grad_norm=norm, lr=lr, exposed=exposed,
                               seconds=report.seconds, memory=peak_memory(self.group.device), skipped=report.skipped,
                               auxiliary=auxiliary, experts={} if self.world_rank else experts))
        return report

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> Report:
        """The exact loss over all ranks' batches: sums and counts are added, no batch weighs more than its items.

        Ranks may bring different numbers of batches, also none.
        """
        begin = time.perf_counter()
        with evaluating(self.model):
            losses = [self._call_loss(map_tensors(lambda t: t.to(self.group.device), batch))[1]
                      for batch in self.placement.together(batches)]
        total, count = self._total(losses)
        if not count > 0:   # nor NaN
            raise LossError(f"rank {self.world_rank}: evaluation counted {count:g} items over all ranks; is the validation set empty?")
        return Report(step=self.steps_done, loss=total / count, count=count, grad_norm=0.0, skipped=False, exposed=0.0,
                      lr=float(self.optimizer.param_groups[0]["lr"]), seconds=time.perf_counter() - begin)

    def _total(self, losses: list[Tensor]) -> tuple[float, float]:
        """Sum and count over all batches of all ranks; deterministic, rounded once, so that no order shows."""
        if not self.settings.logical_shards:
            own = torch.stack(losses).sum(0)[:2] if losses else torch.zeros(2, dtype=torch.float64, device=self.group.device)
            total, count = self.tokens.all_reduce(own, label="evaluation").tolist()
            return total, count
        everyone = self.group.all_gather_object([loss[:2].tolist() for loss in losses], label="evaluation")
        return math.fsum(total for rank in everyone for total, _ in rank), math.fsum(count for rank in everyone for _, count in rank)

    def full_state_dict(self, rank: int | None = None) -> dict[str, dict[str, Any]]:
        """The whole training state under the plain model's names: {"model": ..., "optimizer": {"state", "param_groups", "run"}}.

        "run" is {"step", "loss_scale" (of fp16, or None), "amax" (of fp8 with delayed scaling, by name)}.
        Parameters come in the master format; frozen ones, which have no master, in what they compute in: in 16 bits they are rounded.
        A collective: where the state is cut, it is joined tensor by tensor in CPU memory.
        rank:   the one rank of the world that gets it, the others get empty dicts, and hold no more than one tensor meanwhile; left out,
                all get it
        raises: ConfigError, on all ranks, when there is no such rank, or ranks name several
        """
        return gather_state(self.training(), rank)

    def load_full_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Take over what `full_state_dict` gave, on any number of ranks and at any stage: steps go on as they would have there. A
        collective: every rank gives the whole. Without "run", steps are counted and tensors scaled as in a new run.

        raises: ModelMismatch, on all ranks, when it is the state of another model
        """
        self._go_on(load_state(self.training(), state))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the whole training state into a folder that all ranks see: each rank what it holds, each element once. A collective.

        What was there before is a whole checkpoint until this one is; afterwards it is gone.
        raises: ConfigError, on all ranks, when a file cannot be written; the checkpoint from before is as it was
        """
        save_checkpoint(self.training(), folder)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Take over what `save` has written, on any mesh and at any stage: steps go on as they would have there. A collective.

        Each rank reads what it will hold. Files are compared with their hashes before anything is changed.
        raises: DataError, on all ranks, when there is no whole checkpoint; ModelMismatch when it is of another model
        """
        self._go_on(load_checkpoint(self.training(), folder))

    def training(self) -> TrainingState:
        """All that the next step depends on, and the batch."""
        scale = None if self.scale is UNMEASURED else asdict(self.scale)
        return TrainingState(self.settings.world, self.placement, self.optimizer, self.settings.float8, self.steps_done, scale)

    def _go_on(self, run: Mapping[str, Any]) -> None:
        """With the step and the loss scale of a state that has been loaded."""
        self.steps_done, scaled = run["step"], self.settings.precision.scaled and run["loss_scale"]
        self.scale = LossScale(**scaled) if scaled else UNMEASURED
        self._replica_guard.buffers.forget_changes()   # what has been loaded is no change of this step

    @property
    def tokens(self) -> Group:
        """The ranks over which losses and counts add up, and running statistics are averaged."""
        return self._replica_guard.buffers.group

    @cached_property
    def _experts(self) -> ExpertBooks:
        return ExpertBooks(self.model, self.tokens)

    @property
    def world_rank(self) -> int:
        """This rank among all of the job."""
        return self.settings.world.rank

    def held(self) -> Held:
        """The bytes that this rank holds now, by kind."""
        return held_by(self.placement, self.optimizer)

    # ------------------------------------------------------------------ forward and backward

    def _run_in_free_order(self, batch: Any) -> Tensor:
        totals = torch.zeros(3 if self._experts else 2, dtype=torch.float64, device=self.group.device)
        pieces = cut_batch(batch, self.settings.accumulate, self.world_rank)
        before = None if self.steps_done else generator_now(self.group.device)
        for at, (piece, rows) in enumerate(zip(pieces, self._dropout.number_rows(pieces, self.group))):
            is_last = at == len(pieces) - 1
            with self.placement.sync(is_last):
                totals += self._forward_backward(piece, rows, before=totals if is_last else None)
        drew = before and generator_now(self.group.device) != before
        totals = self.placement.finish(totals)
        if before:   # after all that is under way
            warn_of_equal_draws(self.group, before if drew else None)
        return totals

    def _run_in_canonical_order(self, batch: Any) -> Tensor:
        mine, first, shards = deal_shards(batch, self.group, self.settings.logical_shards)
        run = owned_leaves(self.group.rank, self.group.size, shards)
        self.placement.begin_shards(shards)
        pieces = cut_batch(mine, len(run), self.world_rank)
        for shard, piece, rows in zip(run, pieces, self._dropout.number_rows(pieces, self.group, first), strict=True):
            with self.placement.sync(False):
                self.placement.add_shard(shard, self._forward_backward(map_tensors(laid_out_anew, piece), rows))
        return self.placement.finish(None)

    def _expect_sum(self, batch: Any, pieces: int) -> None:
        """Before the first step: see `expect_sum_of_step`."""
        expect_sum_of_step(lambda piece: self._call_loss(piece)[1][:2], self.model, batch, world=self.settings.world, group=self.group,
                           tokens=self.tokens, pieces=pieces, shards=self.settings.logical_shards)
        self.placement.abandon()   # no backward follows those forwards

    def _forward_backward(self, piece: Any, rows: range, before: Tensor | None = None) -> Tensor:
        """Gradients of the loss *sum* of one micro-batch, times the loss scale. Returns its totals: see `_call_loss`.

        before: of the last micro-batch of a step, the totals of those before it
        """
        self._dropout.set_rows(self.steps_done, rows)
        # the second step too: for the first weights, what a buffer holds may have settled when the model was made
        looked_at = self.settings.logical_shards and self.steps_done < 2 and not runs_compiled(self.model)
        with alike_on_any_ranks(self.model, self.world_rank) if looked_at else nullcontext():
            loss, totals = self._call_loss(piece)
        if not loss.requires_grad:
            raise LossError(f"rank {self.world_rank}: the sum that the loss function returned has no gradient; was it detached, or made "
                            "under torch.no_grad()? Where there is nothing to sum, return for example `logits.sum() * 0, 0`")
        if self.settings.precision.scaled and self.scale is UNMEASURED:
            shards = self.settings.logical_shards   # where bits must not depend on the ranks, the scale may not: leaf 0 decides
            self._measure_scale(totals.clone() if not shards or rows.start == 0 else torch.zeros_like(totals))
        if before is not None:
            self.placement.begin_last_backward(before[1] + totals[1], self.scale.value)
        (loss * self.scale.value if self.scale.value != 1.0 else loss).backward()
        return totals

    def _measure_scale(self, totals: Tensor) -> None:
        """The loss scale of the first step, as if all of it were like a micro-batch of `totals`; they are spent. The next step's is that
        of all its items, the same on every layout.
        """
        items = self.tokens.all_reduce(totals, label="first count")[1].item()
        self.scale = LossScale.first(items * (self.settings.logical_shards or self.settings.accumulate))

    def _call_loss(self, piece: Any) -> tuple[Tensor, Tensor]:
        """The loss sum, and its totals, detached: fp64 [sum, count], with experts [sum without auxiliary losses, count, these].

        raises: LossError when the function did not return (sum, count)
        """
        with self.placement.without_reduction(), buffers_named(self.model, self.settings.precision):   # it may take gradients of its own
            returned = self.settings.loss(self.model, piece)
        loss, count = sum_and_count(returned, f"rank {self.world_rank}")
        loss = self._experts.with_auxiliary(loss)
        return loss, self._experts.split(torch.stack((loss.detach().to(torch.float64), count)))

    # ------------------------------------------------------------------ the update

    def _apply(self, totals: Tensor, batch: Any) -> tuple[float, float, float, bool]:
        """Returns loss, count, gradient norm, and whether the parameters were updated."""
        norm_of_sums = self.placement.norm()
        total, count, norm, finite = apply_gradients(self.optimizer, self.placement.flat_gradients(), norm_of_sums, totals[:2],
                                                     scale=self.scale.value * self.placement.factor, clip=self.settings.clip)
        self.settings.float8.end_step(self.tokens, finite=finite)
        if not count > 0:   # nor NaN
            raise LossError(f"rank {self.world_rank}: the loss counted {count:g} items over all ranks; "
                            "the second value that a loss function returns is how many items it summed over")
        if self.settings.precision.scaled:
            known = self.scale if self.steps_done else LossScale.first(count)   # no longer what was guessed
            self.scale = known.after(overflow=not finite)
        if not finite and (self.scale.is_hopeless or not self.settings.precision.scaled):
            seen = f"step {self.steps_done + 1}: loss {total / count:g}, gradient norm {norm:g}"
            seen += f", after {self.scale.overflows} overflows in a row" if self.scale.is_hopeless else ""
            found = explain_non_finite(self.tokens, lambda: self._run_alone(batch), self.placement.local_gradients, seen,
                                       compress=self.placement.compress)
            self._replica_guard.buffers.average_changed()
            raise found
        if finite:
            self.placement.publish()
        return total / count, count, norm, finite

    def _run_alone(self, batch: Any) -> Tensor:
        self.placement.abandon()
        with self.placement.without_reduction():
            shards = self.settings.logical_shards and len(owned_leaves(self.group.rank, self.group.size, self.settings.logical_shards))
            pieces = cut_again(batch, shards or self.settings.accumulate, self.world_rank)   # as the step had, for memory
            numbered = zip(pieces, self._dropout.number_rows(pieces, self.group))
            return torch.stack([self._forward_backward(piece, rows) for piece, rows in numbered]).sum(0)

    def _set_learning_rate(self) -> float:
        self._built.expect(self.optimizer, self.world_rank)
        if self.settings.schedule:
            lr = self.settings.schedule(self.steps_done)
            if not (isinstance(lr, Real | Tensor) and lr >= 0):   # nor NaN
                raise ConfigError(f"rank {self.world_rank}: schedule({self.steps_done}) gave {lr!r}, expected a learning rate, 0 or more")
            for part, base in zip(self.optimizer.param_groups, self._built.rates):
                part["lr"] = lr * (base / self._built.rates[0] if self._built.rates[0] else 1.0)
        return float(self.optimizer.param_groups[0]["lr"])
