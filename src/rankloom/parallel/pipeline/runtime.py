"""Run a schedule: a small interpreter that knows what each action does, but not which schedule it runs.

A stage's forward keeps its inputs and outputs until its backward. Between stages on this rank, tensors are passed directly; between ranks,
the schedule's own actions send and receive them (messages.py). At the end of a step, gradients of tied parameters are summed over their
ranks, and the loss over all. Read actions.py, messages.py and split_backward.py before this file.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankloom.base.errors import BatchError, ConfigError, LossError
from rankloom.base.expect import expect_type
from rankloom.base.loss import sum_and_count, take_auxiliary_loss
from rankloom.parallel.model_split import ModelSplit
from rankloom.parallel.pipeline.actions import Action, Schedule
from rankloom.parallel.pipeline.check import check
from rankloom.parallel.pipeline.messages import Messages, Values
from rankloom.parallel.pipeline.passes import with_messages
from rankloom.parallel.pipeline.split_backward import Product, backward_to_inputs, deferring, finish_products
from rankloom.parallel.pipeline.tied import sum_tied
from rankloom.shard.norm import clip_to_norm
from rankloom.world.group import Group

Loss = Callable[[Any, Any], tuple[Tensor, Any]]
MICROBATCHES = "a list of micro-batches, each (input of stage 0, targets)"
MicroBatch = tuple[Any, Any]              # (one or several tensors that stage 0 takes, the targets of the loss)
Tied = tuple[tuple[int, str], ...]        # (stage, name) of each place of one parameter


class _Live(NamedTuple):
    """What a forward keeps for its backward."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    losses: list[Tensor]       # computed in this stage
    products: list[Product]


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions that a pipeline calls, all optional."""

    before: Callable[[int], None] | None = None     # takes a micro-batch's number, before each forward and backward
    scale: Callable[[], float] | None = None        # returns the factor of losses in backward (fp16)
    gather: Callable[[int], None] | None = None     # runs GATHER; takes the stage's number
    reduce: Callable[[int], None] | None = None     # runs REDUCE; takes the stage's number


HOOKS = Hooks()


class Pipeline:
    """The stages of one rank; runs a step of them, together with those of the other ranks.

    stages: this rank's modules by stage, those of `schedule.held_by(group.rank)`; each takes what the one before returns, one tensor or
            several
    loss:   loss(output of the last stage, the micro-batch's second part) -> (sum, count)
    tied:   parameters that are in several stages (`cut.find_tied`); their gradients are summed over ranks
    hooks:  see `Hooks`
    raises: ConfigError for a faulty schedule, or one for other ranks or stages
    """

    def __init__(self, stages: Mapping[int, nn.Module], group: Group, schedule: Schedule, loss: Loss, *, tied: Sequence[Tied] = (),
                 hooks: Hooks = HOOKS):
        self.schedule = with_messages(schedule)
        self.stages, self.group, self.loss, self.hooks = dict(stages), group, loss, hooks
        self._expect_fit()
        # Kind of action -> method. `record_step` wraps these with a clock.
        self.do = {"F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights,
                   "SEND_F": self._send, "SEND_B": self._send, "RECV_F": self._receive, "RECV_B": self._receive,
                   "GATHER": self._call_hook, "REDUCE": self._call_hook}
        self._tied = [each for each in tied if len({self.schedule.owner[stage] for stage, _ in each}) > 1]
        self._messages = Messages(group, self.schedule, self._expects)
        self._step: Sequence[MicroBatch] = ()
        self._totals = torch.zeros(2, dtype=torch.float64, device=group.device)
        self._live: dict[tuple[int, int | None], _Live] = {}
        self._border: dict[tuple[str, int, int | None], Values] = {}   # by direction, the stage that takes them, micro-batch

    def step(self, microbatches: Sequence[MicroBatch]) -> Tensor:
        """Forward and backward of all micro-batches, the same on every rank. Gradients of the loss *sum* are added to `.grad`.

        returns: fp64 [sum of the loss, count], on every rank
        raises:  BatchError when the schedule is for another number of micro-batches; LossError
        """
        expect_type("microbatches", microbatches, Sequence, MICROBATCHES)
        if not torch.is_grad_enabled():
            raise LossError(f"{self.group.where('step')}: gradients are switched off, as in torch.no_grad(), and a step computes them; "
                            "`evaluate` computes the loss alone")
        if len(microbatches) != self.schedule.microbatches:
            raise BatchError(f"{self.group.where('step')}: {len(microbatches)} micro-batches for a schedule of "
                             f"{self.schedule.microbatches}; make one for the number there is")
        tied = [(param, ranks) for param, ranks in self._tied_here() if param.requires_grad]
        before = [param.grad for param, _ in tied]   # already summed over ranks
        for param, _ in tied:
            param.grad = None
        totals = self._run(self.schedule.ranks[self.group.rank], microbatches)
        for (param, ranks), grad in zip(tied, before):
            param.grad = _added(grad, sum_tied(param.grad, param, self.group, ranks))
        return totals

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[MicroBatch]) -> Tensor:
        """Forward only, any number of micro-batches. returns: fp64 [sum of the loss, count], on every rank"""
        expect_type("microbatches", microbatches, Sequence, MICROBATCHES)
        forward = [action for action in self.schedule.ranks[self.group.rank] if action.kind in ("F", "SEND_F", "RECV_F", "GATHER")]
        totals = torch.zeros(2, dtype=torch.float64, device=self.group.device)
        for first in range(0, len(microbatches), self.schedule.microbatches):
            some = microbatches[first:first + self.schedule.microbatches]
            totals += self._run([a for a in forward if a.microbatch is None or a.microbatch < len(some)], some)
        return totals

    def clip_grad_norm_(self, max_norm: float, norm_type: float | str = 2.0) -> Tensor:
        """Scale the gradients of all stages so that their norm is at most `max_norm`; returns the norm before. A collective.

        torch's own function of this name would see the stages of this rank only. A tied parameter counts once, and so do elements that
        several ranks hold, where `tensor_parallel` or `expert_parallel` has cut the stages. Gradients must be finished: summed over data
        ranks, and those of all but the experts over expert ranks.
        norm_type: 2, another power above 0, or infinity ("inf" too): the largest magnitude
        """
        tied = {param: len(ranks) for param, ranks in self._tied_here()}
        whole = nn.ModuleList(self.stages.values())
        split = ModelSplit.found_in(whole, self.group.alone())
        sizes = self.group.all_gather_object([split.tensor.size, split.expert.size], label="how stages are cut")
        if any(theirs != sizes[0] for theirs in sizes):   # a rank whose stages are whole knows no tensor ranks to ask
            raise ConfigError(f"{self.group.where('clip_grad_norm_')}: the stages of some ranks were cut over tensor or expert ranks, and "
                              "those of others were not: cut the whole model before it is made a pipeline")
        grads = [(grad, copies * tied.get(param, 1)) for name, param in whole.named_parameters() if param.grad is not None
                 for grad, copies in split.counted(name, param.grad)]
        return clip_to_norm(grads, [self.group, *split.parts], max_norm, norm_type)

    # ------------------------------------------------------------------ a step

    def _run(self, actions: Sequence[Action], microbatches: Sequence[MicroBatch]) -> Tensor:
        for number, microbatch in enumerate(microbatches):
            if not (isinstance(microbatch, tuple | list) and len(microbatch) == 2):
                raise BatchError(f"{self.group.where('step')}: micro-batch {number} is a {type(microbatch).__name__}, expected two parts: "
                                 "what the first stage is called with, and what the loss compares with")
        self._step = microbatches
        self._totals = torch.zeros_like(self._totals)
        self._live.clear()     # of a step that failed
        self._border.clear()
        self._messages.begin(actions, [_shapes(inputs) for inputs, _ in microbatches])
        for action in actions:
            self.do[action.kind](action)
        self._messages.finish()
        return self.group.all_reduce(self._totals, label="loss of the step")

    def _forward(self, action: Action) -> None:
        stage, m = action.stage, action.microbatch or 0
        inputs = _as_list(self._border.pop(("F", stage, m)) if stage else self._step[m][0], "a micro-batch")
        products: list[Product] = []
        with deferring(products) if stage in self.schedule.split else nullcontext():
            outputs, losses = self._compute(stage, m, [received(x) for x in inputs] if stage else inputs)
        if torch.is_grad_enabled():
            self._live[stage, m] = _Live(inputs, outputs, losses, products)
        if stage < self.schedule.stages - 1:
            self._border["F", stage + 1, m] = [_leaf(y) for y in _apart_from_buffers(outputs, self.stages[stage])]

    def _compute(self, stage: int, m: int, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The stage's outputs for the next one, and the losses computed in it."""
        if self.hooks.before:
            self.hooks.before(m)
        output = self.stages[stage](*inputs)
        extra = take_auxiliary_loss(self.stages[stage])
        losses = [] if extra is None else [extra]
        if stage == self.schedule.stages - 1:
            losses.append(self._loss(output, m))
        self._totals[0] += sum(loss.detach().double() for loss in losses)
        return ([] if stage == self.schedule.stages - 1 else _as_list(output, f"stage {stage}")), losses

    def _loss(self, output: Any, m: int) -> Tensor:
        returned = self.loss(output, self._step[m][1])
        where = self.group.where(f"F{m}@{self.schedule.stages - 1}")
        loss, count = sum_and_count(returned, where)
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise LossError(f"{where}: the sum that the loss function returned has no gradient; was it detached? Where there is nothing "
                            "to sum, return for example `logits.sum() * 0, 0`")
        self._totals[1] += count
        return loss

    def _backward(self, action: Action) -> None:
        """Backward towards the inputs; for `B`, also the weight gradients."""
        stage, m = action.stage, action.microbatch or 0
        if self.hooks.before:
            self.hooks.before(m)
        live = self._live[stage, m]
        scale = self.hooks.scale() if self.hooks.scale else 1.0
        grads = self._border.pop(("B", stage, m)) if stage < self.schedule.stages - 1 else []
        ends = [(y, grad) for y, grad in zip(live.outputs, grads) if grad is not None]
        ends += [(loss, torch.full_like(loss, scale)) for loss in live.losses]
        ends = [(y, grad) for y, grad in ends if y.requires_grad]
        if ends:
            backward = partial(backward_to_inputs, live.products) if stage in self.schedule.split else torch.autograd.backward
            backward([y for y, _ in ends], [grad for _, grad in ends])
        if stage:
            self._border["B", stage - 1, m] = [x.grad for x in live.inputs] if _trained(live.inputs) else []
        self._live[stage, m] = live._replace(inputs=[], outputs=[], losses=[])
        if action.kind == "B":
            self._weights(action)

    def _weights(self, action: Action) -> None:
        finish_products(self._live.pop((action.stage, action.microbatch)).products)

    def _call_hook(self, action: Action) -> None:
        hook = self.hooks.gather if action.kind == "GATHER" else self.hooks.reduce
        assert hook, f"{action}: no hook, in spite of `_expect_fit`"
        hook(action.stage)

    def _send(self, action: Action) -> None:
        way, taker = action.kind[-1], action.stage + (1 if action.kind == "SEND_F" else -1)
        if values := self._border.pop((way, taker, action.microbatch)):   # gradients that no stage needs are not sent
            self._messages.send(action, values)

    def _receive(self, action: Action) -> None:
        here = action.kind[-1], action.stage, action.microbatch
        if self._expects(action):
            self._border[here] = self._messages.receive(action)
        else:
            self._messages.skip(action)
            self._border[here] = []

    def _expects(self, receive: Action) -> bool:
        """Whether a message comes: gradients that no stage needs are not sent."""
        return receive.kind == "RECV_F" or self._messages.is_answered(receive)

    def _tied_here(self) -> list[tuple[nn.Parameter, list[int]]]:
        """This rank's parameters that other ranks have too, each with all of its ranks, in the same order on every rank."""
        found = []
        for places in self._tied:
            held = {self.schedule.owner[stage]: (stage, name) for stage, name in reversed(places)}
            if self.group.rank in held:
                stage, name = held[self.group.rank]
                found.append((self.stages[stage].get_parameter(name), sorted(held)))
        return found

    # ------------------------------------------------------------------ before

    def _expect_fit(self) -> None:
        check(self.schedule)
        if len(self.schedule.ranks) != self.group.size:
            raise ConfigError(f"{self.group.where('pipeline')}: a schedule for {len(self.schedule.ranks)} ranks in a group "
                              f"of {self.group.size}")
        held = self.schedule.held_by(self.group.rank)
        if set(held) != self.stages.keys():
            raise ConfigError(f"{self.group.where('pipeline')}: given stages {sorted(self.stages)}, but the schedule has "
                              f"{list(held)} on this rank")
        used = {action.kind for actions in self.schedule.ranks for action in actions}
        for kind, hook in (("GATHER", self.hooks.gather), ("REDUCE", self.hooks.reduce)):
            if kind in used and not hook:
                raise ConfigError(f"{self.group.where('pipeline')}: the schedule has {kind} actions; say what they do "
                                  f"with Hooks({kind.lower()}=)")


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def received(x: Tensor) -> Tensor:
    """A non-leaf alias of a received leaf: in-place layers may change it, and `deferring` does not take it for a weight."""
    out: Tensor = _Received.apply(x)   # type: ignore[no-untyped-call]
    return out


def _added(before: Tensor | None, now: Tensor | None) -> Tensor | None:
    """The sum of two gradients, in the memory of the first; None for one that is not there."""
    if before is None or now is None:
        return now if before is None else before
    return before.add_(now)


def _as_list(value: Any, what: str) -> list[Tensor]:
    values = list(value) if isinstance(value, tuple | list) else [value]
    if not values or not all(isinstance(each, Tensor) for each in values):
        raise ConfigError(f"{what} gives {', '.join(type(each).__name__ for each in values) or 'nothing'}; "
                          "stages take and return tensors, one or several")
    return values


def _apart_from_buffers(outputs: Sequence[Tensor], stage: nn.Module) -> list[Tensor]:
    """The outputs, with copies of those that lie in buffers: a later forward may change these before the next stage has read them."""
    if all(y.grad_fn for y in outputs):
        return list(outputs)
    buffers = {buffer.untyped_storage()._cdata for buffer in stage.buffers() if buffer.layout is torch.strided}
    return [y.clone() if y.layout is torch.strided and y.untyped_storage()._cdata in buffers else y for y in outputs]


def _leaf(y: Tensor) -> Tensor:
    """The same memory as a leaf, at which the next stage's backward ends."""
    return y.detach().requires_grad_(y.requires_grad)


def _trained(values: Sequence[Tensor]) -> bool:
    return any(value.requires_grad for value in values)


def _shapes(inputs: Any) -> tuple[Any, ...]:
    """A key of a micro-batch that determines the shapes of all messages."""
    return (torch.is_grad_enabled(), *((x.dtype, tuple(x.shape)) for x in _as_list(inputs, "a micro-batch")))
