"""The engine: one optimizer step over all ranks, the same numbers as one process with the whole batch.

One step:

    in the first steps, check what ranks were given             train/first_steps.py
    cut the batch into micro-batches                            train/batches.py
    for each: key the dropout, forward, loss -> (sum, count), backward of the *sum*; in the last, full buckets are sent
    sum gradients, losses and counts over the ranks             parallel/gradients/reducer.py, or parallel/gradients/same_bits.py
    divide once by the global count, clip by the global norm    one factor, in the optimizer's own pass: train/optimizer_step.py
                                                                (with compression, divided before the sum: comm/compress.py)
    optimizer step; round the master weights into the model; report

Nothing is averaged before everything is summed, so unequal micro-batches, padding and accumulation cannot bias the gradient.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError, LossError, UnitError
from rankloom.base.events import Load, Sink, StepDone
from rankloom.base.loss import exact_sum, sum_and_count
from rankloom.base.modes import evaluating
from rankloom.base.nested import map_tensors
from rankloom.base.shares import share
from rankloom.parallel.context.apply import limited_to
from rankloom.parallel.context.tokens_apart import SomeTokens
from rankloom.parallel.replicas.buffers import BufferKeeper
from rankloom.parallel.replicas.equal_start import expect_same_values
from rankloom.parallel.replicas.known_parameters import KnownParameters
from rankloom.shard.optimizer import AsBuilt, Optimizer, expect_no_scheduler
from rankloom.train.batches import cut_again, cut_batch, deal_shards, laid_out_anew, several_batches, step_with
from rankloom.train.checkpoint import load_checkpoint, save_checkpoint
from rankloom.train.diagnose import explain_non_finite, with_notes
from rankloom.train.dropout import DropoutKey
from rankloom.train.expert_books import ExpertBooks
from rankloom.train.fingerprints import SAME_NUMBERS, OptimizerMark, numbers_of
from rankloom.train.first_steps import FirstSteps
from rankloom.train.fp8 import Float8Layers
from rankloom.train.memory_report import Held, explain_out_of_memory, held_by, peak_memory
from rankloom.train.optimizer_step import Outcome, apply_gradients
from rankloom.train.placement import Placement, ReplicatedPlacement
from rankloom.train.precision import UNMEASURED, LossScale, Precision
from rankloom.train.recompute import Recompute
from rankloom.train.state import TrainingState, gather_state, load_state
from rankloom.world.group import Group
from rankloom.world.world import World

Loss = Callable[[nn.Module, Any], tuple[Tensor, Any]]
COUNT, AUXILIARY = 1, 2   # places in the totals of a step, fp64 [loss sum, count], and with experts their auxiliary losses behind


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one step, or of one evaluation, over all ranks."""

    step: int            # steps finished so far, this one included
    loss: float          # sum / count, without the routers' auxiliary losses
    count: float         # how many items the loss was summed over
    grad_norm: float     # of the mean gradient, before clipping
    lr: float            # of the first parameter group
    skipped: bool        # fp16 overflow: the parameters did not change
    seconds: float       # wall time of the step on this rank
    exposed: float       # seconds of the step spent waiting for communication
    auxiliary: float = 0.0                                         # the routers' auxiliary losses / count
    experts: Mapping[str, Load] = field(default_factory=dict)      # load of the experts, by layer

    @property
    def tokens(self) -> float:
        """`count`, under the name that language models use."""
        return self.count


@dataclass(frozen=True, slots=True)
class Settings:
    """The options given to `prepare`, checked."""

    loss: Loss
    accumulate: int
    clip: float | None
    precision: Precision
    logical_shards: int                    # 0: gradients may be added in any order
    schedule: Callable[[int], float] | None
    world: World                           # all ranks of the job
    sink: Sink | None                      # called with a `StepDone` after each step
    recompute: Recompute | None = None     # what each block recomputes; it can be printed
    float8: Float8Layers = field(default_factory=lambda: Float8Layers({}, None))   # layers that multiply in 8 bits


class Engine:
    """A model in training. Made by `prepare`.

    group:  the ranks over which rows are distributed; along the other mesh axes, ranks bring the same rows
    """

    def __init__(self, group: Group, settings: Settings, placement: Placement, optimizer: Optimizer, *,
                 tokens: Group, dropout: DropoutKey):
        self.group, self.settings = group, settings
        self.steps_done, self.scale = 0, UNMEASURED
        self.placement, self.optimizer = placement, optimizer
        self._dropout = dropout
        self._optimizer_mark = OptimizerMark()
        self._known_parameters = KnownParameters(placement.model)
        self._buffer_keeper = BufferKeeper(placement.model, tokens)
        self._first_steps = FirstSteps(settings.world, group, tokens, placement, accumulate=settings.accumulate,
                                       shards=settings.logical_shards)
        self._as_built = AsBuilt.of(optimizer, cut=not isinstance(placement, ReplicatedPlacement))
        if settings.schedule is not None and not (rates := self._as_built.rates)[0] and any(rates):
            raise ConfigError(f"the optimizer has a first group with lr=0 and others at {rates[1:]}: a schedule gives the rate "
                              "of the first, and the others keep their ratio to it. Put another group first, or freeze its parameters")

    def step(self, batch: Any) -> Report:
        """One optimizer step on this rank's share of the global batch.

        batch:  tensors with one row per sample, nested in any way (train/batches.py). Or micro-batches, already cut, which may differ
                in length: a list of `accumulate` tuples or dicts of tensors, or an iterator over that many batches
        raises: BatchError; LossError; NonFinite, on all ranks, with the parameters unchanged; ConfigError when a deterministic model
                draws random numbers that depend on the ranks, a frozen parameter is now trainable, or, on all ranks, with the parameters
                unchanged, when learning rates or other numbers of the optimizer differ between ranks; UnitError when a parameter was
                replaced or added
        """
        begin, waited = time.perf_counter(), self.placement.waited
        self._known_parameters.expect_unchanged()
        if not self.model.training:   # a model in training mode is left alone: the user may have put parts of it in eval mode
            self.model.train()
        lr = self._set_learning_rate()
        self.placement.abandon()   # clear what a failed step left behind
        self._experts.begin_step()
        self.settings.float8.begin_step(whole=isinstance(self.placement, ReplicatedPlacement))
        with (explain_out_of_memory(self.world_rank, self.group.device, self.held),
              step_with(batch, self.settings.accumulate, self.world_rank) as batch):
            batch = map_tensors(lambda t: t.to(self.group.device, non_blocking=True), batch)
            self._first_steps.before(self.steps_done, batch, self._try_loss, self._limited_to)
            totals = self._run_in_canonical_order(batch) if self.settings.logical_shards else self._run_in_free_order(batch)
            exposed = self.placement.waited - waited
            self._first_steps.after(self.steps_done, totals)
            outcome = self._apply(totals, batch)
        self.steps_done += 1
        self._buffer_keeper.average_changed()
        auxiliary = totals[AUXILIARY].item() / outcome.items if len(totals) > AUXILIARY else 0.0
        experts = self._experts.count_tokens(move=outcome.finite)
        if experts:
            self._buffer_keeper.forget_changes()   # the routers' biases: every rank changed them by the same amount
        report = Report(step=self.steps_done, loss=outcome.loss, count=outcome.items, grad_norm=outcome.grad_norm, lr=lr,
                        skipped=not outcome.finite, exposed=exposed, seconds=time.perf_counter() - begin, auxiliary=auxiliary,
                        experts=experts)
        if self.settings.sink is not None:
            self.settings.sink(self._event_of(report))
        return report

    def _event_of(self, report: Report) -> StepDone:
        return StepDone(rank=self.world_rank, step=report.step, loss=report.loss, count=report.count, grad_norm=report.grad_norm,
                        lr=report.lr, skipped=report.skipped, seconds=report.seconds, exposed=report.exposed,
                        memory=peak_memory(self.group.device), auxiliary=report.auxiliary,
                        experts={} if self.world_rank else report.experts)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> Report:
        """The exact loss over the batches of all ranks: sums and counts are added, so each batch weighs as much as its items.

        Ranks may bring different numbers of batches, or none.
        """
        begin = time.perf_counter()
        self.placement.expect_own_values()
        self._experts.forget_auxiliary()
        whole = isinstance(self.placement, ReplicatedPlacement)
        lay_out = laid_out_anew if self.settings.logical_shards else lambda t: t   # as in a step
        with evaluating(self.model), several_batches(batches, self.world_rank), self.settings.float8.weights_cast(whole=whole):
            losses = [self._call_loss(map_tensors(lambda t: lay_out(t.to(self.group.device)), batch))[1]
                      for batch in self.placement.together(batches)]
        total, count = self._total(losses)
        if not 0 < count < math.inf:   # nor NaN
            raise LossError(f"rank {self.world_rank}: evaluation counted {count:g} items over all ranks; is the validation set empty?")
        return Report(step=self.steps_done, loss=total / count, count=count, grad_norm=0.0, skipped=False, exposed=0.0,
                      lr=float(self.optimizer.param_groups[0]["lr"]), seconds=time.perf_counter() - begin)

    def _total(self, losses: list[Tensor]) -> tuple[float, float]:
        """Sum and count over all batches of all ranks. Deterministic: an exact sum, rounded once, so that order does not matter."""
        if not self.settings.logical_shards:
            own = torch.stack(losses).sum(0)[:2] if losses else torch.zeros(2, dtype=torch.float64, device=self.group.device)
            total, count = self.tokens.all_reduce(own, label="evaluation").tolist()
            return total, count
        everyone = self.group.all_gather_object([loss[:2].tolist() for loss in losses], label="evaluation")
        return exact_sum(total for rank in everyone for total, _ in rank), exact_sum(count for rank in everyone for _, count in rank)

    def __deepcopy__(self, memo: Any) -> "Engine":
        raise UnitError("an engine cannot be copied: the hooks that move its model's gradients are not copied with it. Prepare another "
                        "model, and give its engine what `engine.full_state_dict()` gives")

    def full_state_dict(self, rank: int | None = None) -> dict[str, dict[str, Any]]:
        """The whole training state under the plain model's names: {"model": ..., "optimizer": {"state", "param_groups", "run"}}.

        "run" is {"step", "loss_scale" (fp16; else None), "amax" (fp8 with delayed scaling, by name)}.
        Parameters come in the master dtype. Frozen ones have no master and come in the compute dtype: in 16 bits they are rounded.
        A collective: the state comes in CPU memory; where it is sharded, it is gathered tensor by tensor.
        rank:   the rank of the world that gets the state. The others get empty dicts, and hold at most one tensor at a time. Left out,
                all ranks get it
        raises: ConfigError, on all ranks, when there is no such rank, or ranks name different ones
        """
        return gather_state(self.training(), rank)

    def load_full_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Load what `full_state_dict` returned, on any number of ranks and at any stage. Training continues as it would have there.

        A collective: every rank passes the whole state. Without "run", step count and scales start as in a new run.
        raises: ModelMismatch, on all ranks, when the state belongs to another model
        """
        self._go_on(load_state(self.training(), state))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the whole training state into a folder that all ranks see. A collective: ranks write what they hold, each element once.

        A checkpoint that is already there stays complete until the new one is complete; then it is removed.
        raises: on all ranks StorageError when a file cannot be written, ConfigError for values that a checkpoint cannot hold; UnitError
                when the model was changed in place. The earlier checkpoint is then unchanged
        """
        save_checkpoint(self.training(), folder)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Load what `save` wrote, on any mesh and at any stage. Training continues as it would have there. A collective.

        Each rank reads only what it will hold. Files are checked against their hashes before anything is changed.
        raises: DataError, on all ranks, when there is no complete checkpoint; ModelMismatch when it belongs to another model
        """
        self._go_on(load_checkpoint(self.training(), folder))

    def training(self) -> TrainingState:
        """Everything that the next step depends on, except the batch."""
        scale = None if self.scale is UNMEASURED else asdict(self.scale)
        return TrainingState(self.settings.world, self.placement, self.optimizer, self.settings.float8, self.steps_done, scale)

    def _go_on(self, run: Mapping[str, Any]) -> None:
        """Continue from the step and the loss scale of a loaded state."""
        self.steps_done = run["step"]
        scaled = self.settings.precision.scaled and run["loss_scale"]
        self.scale = LossScale(**scaled) if scaled else UNMEASURED
        self._buffer_keeper.forget_changes()   # loading is not a change that a step made

    @property
    def model(self) -> nn.Module:
        """The modules that this rank holds: the whole model, or some pipeline stages. It cannot be replaced; `compile=True` compiles it."""
        return self.placement.model

    @property
    def tokens(self) -> Group:
        """The ranks over which losses and counts are summed, and running statistics averaged."""
        return self._buffer_keeper.group

    @cached_property
    def _experts(self) -> ExpertBooks:
        return ExpertBooks(self.model, self.tokens, self.settings.world.group("pipe"))

    @property
    def world_rank(self) -> int:
        """This rank in the whole job."""
        return self.settings.world.rank

    def held(self) -> Held:
        """The bytes that this rank holds now, by kind."""
        return held_by(self.placement, self.optimizer)

    # ------------------------------------------------------------------ forward and backward

    def _run_in_free_order(self, batch: Any) -> Tensor:
        totals = torch.zeros(3 if self._experts else 2, dtype=torch.float64, device=self.group.device)
        microbatches = cut_batch(batch, self.settings.accumulate, self.world_rank)
        numbered = zip(microbatches, self._dropout.number_rows(microbatches, self.group))
        for at, (microbatch, rows) in enumerate(numbered):
            is_last = at == len(microbatches) - 1
            with self.placement.sync(is_last):
                totals += self._forward_backward(microbatch, rows, before=totals if is_last else None)
        self._first_steps.note_draws(self.steps_done)
        return self._finish(totals)

    def _run_in_canonical_order(self, batch: Any) -> Tensor:
        mine = deal_shards(batch, self.group, self.settings.logical_shards)
        own_shards = share(self.group.rank, self.group.size, mine.shards)
        self.placement.begin_shards(mine.shards)
        microbatches = cut_batch(mine.batch, len(own_shards), self.world_rank)
        numbers = self._dropout.number_rows(microbatches, self.group, mine.first)
        for shard, microbatch, rows in zip(own_shards, microbatches, numbers, strict=True):
            with self.placement.sync(False):
                self.placement.add_shard(shard, self._forward_backward(map_tensors(laid_out_anew, microbatch), rows))
        return self._finish(None)

    def _finish(self, totals: Tensor | None) -> Tensor:
        """Finish all sums over the ranks. raises: ConfigError, on all ranks, when their optimizers have other numbers"""
        mark = self._optimizer_mark.of(self.optimizer) ^ self._buffer_keeper.mark()   # one number to compare: it differs where either does
        summed, alike = self.placement.finish(totals, mark)
        self._buffer_keeper.heed(alike)
        if not alike:
            expect_same_values(self.tokens, "optimizer in this step", numbers_of(self.optimizer), advice=SAME_NUMBERS)
        return summed

    def _limited_to(self, some: SomeTokens) -> AbstractContextManager[None]:
        """Only with context ranks: inside this context the model sees only some tokens, and each token attends only to itself. So their
        losses must add up.
        """
        return limited_to(some, self.model)

    def _forward_backward(self, microbatch: Any, rows: range, before: Tensor | None = None) -> Tensor:
        """Forward, and backward of the loss *sum* times the loss scale, of one micro-batch. Returns its totals: see `_call_loss`.

        before: for the last micro-batch of a step, the totals of the earlier ones
        """
        self._dropout.set_rows(self.steps_done, rows)
        with self._first_steps.forward(self.steps_done):
            loss, totals = self._call_loss(microbatch)
        if not loss.requires_grad:
            raise LossError(f"rank {self.world_rank}: the sum that the loss function returned has no gradient; was it detached, or made "
                            "under torch.no_grad()? Where there is nothing to sum, return for example `logits.sum() * 0, 0`")
        if self.settings.precision.scaled and self.scale is UNMEASURED:
            shards = self.settings.logical_shards   # deterministic: the scale must not depend on the ranks, so logical shard 0 decides
            self._measure_scale(totals.clone() if not shards or rows.start == 0 else torch.zeros_like(totals))
        if before is not None:
            self.placement.begin_last_backward(before[COUNT] + totals[COUNT], self.scale.value)
        self.placement.run_backward(loss * self.scale.value if self.scale.value != 1.0 else loss)
        return totals

    def _measure_scale(self, totals: Tensor) -> None:
        """Guess the loss scale of the first step: as if all its micro-batches had the totals of this one. Overwrites `totals`.

        After that step its true count is known, the same on every layout, and replaces the guess.
        """
        items = self.tokens.all_reduce(totals, label="first count")[COUNT].item()
        self.scale = LossScale.first(items * (self.settings.logical_shards or self.settings.accumulate))

    def _try_loss(self, microbatch: Any) -> Tensor:
        """[loss sum, count] of a trial, which no backward follows."""
        recompute = self.settings.recompute
        with recompute.unmeasured() if recompute else nullcontext():
            return self._call_loss(microbatch)[1][:2]

    def _call_loss(self, microbatch: Any) -> tuple[Tensor, Tensor]:
        """The loss sum, and its totals, detached: fp64 [sum, count]; with experts [sum without auxiliary losses, count, auxiliary].

        raises: LossError when the function did not return (sum, count)
        """
        with (self.placement.without_reduction(),   # it may compute gradients itself
              with_notes(self.model, self.settings.precision, self.settings.world.mesh.context)):
            returned = self.settings.loss(self.model, microbatch)
        loss, count = sum_and_count(returned, f"rank {self.world_rank}")
        loss = self._experts.with_auxiliary(loss)
        return loss, self._experts.split(torch.stack((loss.detach().to(torch.float64), count)))

    # ------------------------------------------------------------------ the update

    def _apply(self, totals: Tensor, batch: Any) -> Outcome:
        """Update the parameters. raises: LossError when nothing was counted; NonFinite"""
        norm_of_sums = self.placement.norm(totals)
        outcome = apply_gradients(self.optimizer, self.placement.flat_gradients(), norm_of_sums, totals[:2],
                                  scale=self.scale.value * self.placement.summing.factor, clip=self.settings.clip)
        self.settings.float8.end_step(self.tokens, finite=outcome.finite)
        if not 0 < outcome.items < math.inf:   # nor NaN
            raise LossError(f"rank {self.world_rank}: the loss counted {outcome.items:g} items over all ranks; "
                            "the second value that a loss function returns is how many items it summed over")
        if self.settings.precision.scaled:
            known = self.scale if self.steps_done else LossScale.first(outcome.items)   # replaces the guess
            self.scale = known.after(overflow=not outcome.finite)
        if not outcome.finite and (self.scale.is_hopeless or not self.settings.precision.scaled):
            seen = f"step {self.steps_done + 1}: loss {outcome.loss:g}, gradient norm {outcome.grad_norm:g}"
            seen += f", after {self.scale.overflows} overflows in a row" if self.scale.is_hopeless else ""
            found = explain_non_finite(self.settings.world, lambda: self._run_alone(batch), self.placement.local_gradients, seen,
                                       compress=self.placement.summing.compress)
            self._buffer_keeper.average_changed()
            self.placement.summing.forget()   # of huge gradients, what was rounded away is huge too
            raise found
        if outcome.finite:
            self.placement.publish()
        return outcome

    def _run_alone(self, batch: Any) -> Tensor:
        self.placement.abandon()
        with self.placement.without_reduction():
            shards = self.settings.logical_shards and len(share(self.group.rank, self.group.size, self.settings.logical_shards))
            microbatches = cut_again(batch, shards or self.settings.accumulate, self.world_rank)   # as many as in the step: they fit
            numbered = zip(microbatches, self._dropout.number_rows(microbatches, self.group))
            return torch.stack([self._forward_backward(microbatch, rows) for microbatch, rows in numbered]).sum(0)

    def _set_learning_rate(self) -> float:
        self._as_built.expect(self.optimizer, self.world_rank)
        if self.settings.schedule is not None:
            expect_no_scheduler(self.optimizer, self.world_rank)
            lr = self.settings.schedule(self.steps_done)
            if not (isinstance(lr, Real | Tensor) and 0 <= float(lr) < math.inf):   # nor NaN
                raise ConfigError(f"rank {self.world_rank}: schedule({self.steps_done}) gave {lr!r}, expected a learning rate: a finite "
                                  "number, 0 or more")
            rate = lr if isinstance(lr, Tensor) else float(lr)   # a number of numpy's is no JSON, and so in no checkpoint
            for part, base in zip(self.optimizer.param_groups, self._as_built.rates):
                part["lr"] = rate * (base / self._as_built.rates[0] if self._as_built.rates[0] else 1.0)
        return float(self.optimizer.param_groups[0]["lr"])
