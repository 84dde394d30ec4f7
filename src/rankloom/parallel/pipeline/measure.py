"""Measure the time and memory of each piece of a model, and record a step.

Measured pieces say where to cut (`balance`) and how long a schedule should take (`stage_costs`, then `simulate_schedule`). A recorded step
is a `Timeline` like a simulated one, so that numbers and drawings of the two can be compared.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rankloom.base.errors import ConfigError
from rankloom.base.loss import sum_and_count
from rankloom.parallel.pipeline.actions import COMPUTES, Action
from rankloom.parallel.pipeline.cut import Piece, Stage, in_runs
from rankloom.parallel.pipeline.runtime import Loss, MicroBatch, Pipeline, received
from rankloom.parallel.pipeline.simulate import Costs, Timeline, TimeSlot
from rankloom.parallel.pipeline.split_backward import Product, backward_to_inputs, deferring, finish_products
from rankloom.parallel.sections.wrapping import tensors_in
from rankloom.world.group import Group

TURNS = 5
MESSAGES = 20   # there and back


class MeasuredPiece(NamedTuple):
    """One piece with one micro-batch."""

    forward: float       # seconds
    input: float         # seconds of the backward towards the input
    weight: float        # seconds of the backward towards the weights
    parameters: int      # bytes
    activations: int     # bytes that its forward leaves for its backward, parameters not counted

    @property
    def seconds(self) -> float:
        """The time of forward and both parts of the backward."""
        return self.forward + self.input + self.weight


def expect_example(example: Any, memory: float | None, where: str = "") -> None:
    """Check a micro-batch to measure pieces with, and the memory that has no meaning without one. where: what messages begin with

    raises: ConfigError
    """
    if example is None and memory is not None:
        raise ConfigError(f"{where}memory={memory!r} has no meaning without an example to measure the pieces with")
    if example is not None and not (isinstance(example, tuple | list) and len(example) == 2):
        raise ConfigError(f"{where}example: a micro-batch has two parts, what the first piece is called with and what the loss compares "
                          f"with; this is a {type(example).__name__}")


def measure_pieces(pieces: Sequence[Piece], microbatch: MicroBatch, loss: Loss, group: Group) -> list[MeasuredPiece]:
    """Time the pieces one after the other: medians over turns and ranks, the same on every rank, so that all cut alike. A collective.

    microbatch: one as in training; the loss counts as part of the last piece. Modules are left as they were.
    raises:     LossError; ConfigError for a model without values
    """
    stages = [Stage([piece]) for piece in pieces]
    whole = nn.ModuleList(stages)
    if any(param.is_meta for param in whole.parameters()):
        raise ConfigError("example: pieces on the meta device have no values to measure them with; leave the example out")
    with _on_trial(whole):
        _one_turn(stages, microbatch, loss, group)   # warms up
        turns = [_one_turn(stages, microbatch, loss, group) for _ in range(TURNS)]
    everyone = group.all_gather_object(_medians(turns), label="measured pieces")
    return _medians(everyone)


class MeasuredMessage(NamedTuple):
    """One message between two ranks."""

    send: float = 0.0      # seconds that it keeps its sender busy (on CUDA: its host)
    arrive: float = 0.0    # seconds after that until it is there


NO_MESSAGE = MeasuredMessage()


def measure_message(x: Tensor, group: Group) -> MeasuredMessage:
    """The time of a tensor like `x` between ranks 0 and 1, the same on every rank; none where there is one rank.

    Means over both ways and all messages: where a backend's thread now gets a core and now waits for one, medians jump.
    sent: 2 (1 + MESSAGES) messages of x
    """
    turns, buffer = [], torch.empty_like(x, requires_grad=False)
    for turn in range(1 + MESSAGES if group.rank < 2 <= group.size else 0):
        start = _now(group.device)
        busy = 0.0
        for sender in (0, 1):
            call = group.send if group.rank == sender else group.recv
            begin = _now(group.device)
            handle = call(buffer, 1 - group.rank, tag=turn, label="measured message", async_op=True)
            busy += (time.perf_counter() - begin) * (group.rank == sender)
            handle.wait()
        turns.append((busy, (_now(group.device) - start) / 2))
    own = [fmean(seconds) for seconds in zip(*turns[1:] or [(0.0, 0.0)])]   # the first one warms up
    told = group.all_gather_object(own, label="measured message")[:2]
    send, there = (fmean(seconds) for seconds in zip(*told))
    return MeasuredMessage(send, max(there - send, 0.0))


def stage_costs(measured: Sequence[MeasuredPiece], sizes: Sequence[int], message: MeasuredMessage = NO_MESSAGE) -> Costs:
    """The expected costs of stages of `sizes` pieces, for `simulate_schedule`. message: between ranks, see `measure_message`"""
    stages = in_runs(measured, sizes)
    return Costs(forward=tuple(sum(piece.forward for piece in stage) for stage in stages),
                 input=tuple(sum(piece.input for piece in stage) for stage in stages),
                 weight=tuple(sum(piece.weight for piece in stage) for stage in stages),
                 message=message.arrive, send=message.send)


def recorded_costs(steps: Sequence[Timeline], message: MeasuredMessage = NO_MESSAGE) -> Costs:
    """The costs of stages as recorded steps of one schedule show them: medians over micro-batches and steps.

    Nearer to the truth than `stage_costs`: caches hold what other micro-batches left there, and all ranks compute at once. A stage whose
    backward is never in two parts has it all as `input`. message: as in `stage_costs`
    """
    schedule = steps[0].schedule
    seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)   # by kind and stage
    for slot in chain.from_iterable(step.slots for step in steps):
        kind, stage, _ = slot.action
        seconds["I" if kind == "B" and stage not in schedule.split else kind, stage].append(slot.end - slot.start)

    def medians(kind: str) -> tuple[float, ...]:
        return tuple(median(seconds[kind, stage] or [0.0]) for stage in range(schedule.stages))

    return Costs(medians("F"), medians("I"), medians("W"), message.arrive, send=message.send)


def record_step(pipeline: Pipeline, microbatches: Sequence[MicroBatch]) -> Timeline:
    """Run one step with a clock around every action: the timeline of all ranks from a common start, the same on every rank.

    A GPU is synchronised after each action. The clocks of several hosts agree as well as a barrier makes them.
    """
    group, plain = pipeline.group, dict(pipeline.do)
    mine: list[TimeSlot] = []
    group.barrier(label="begin of a recorded step")
    zero = 0.0 if group.one_host else _now(group.device)   # ranks of one host read the same clock

    def timed(action: Action) -> None:
        start = _now(group.device) - zero
        plain[action.kind](action)
        mine.append(TimeSlot(group.rank, action, start, _now(group.device) - zero))

    try:
        pipeline.do.update(dict.fromkeys(COMPUTES, timed))
        pipeline.step(microbatches)
    finally:
        pipeline.do.update(plain)
    everyone = list(chain.from_iterable(group.all_gather_object(mine, label="recorded step")))
    zero = min(start for _, _, start, _ in everyone)
    return Timeline(pipeline.schedule, tuple(
        TimeSlot(rank, Action(*action), start - zero, end - zero) for rank, action, start, end in everyone))


def _medians(runs: Sequence[Sequence[MeasuredPiece]]) -> list[MeasuredPiece]:
    """The median over turns or ranks, of each number of each piece."""
    found = []
    for measured in zip(*runs):   # of one piece
        forward, input, weight, parameters, activations = (median(numbers) for numbers in zip(*measured))
        found.append(MeasuredPiece(forward, input, weight, int(parameters), int(activations)))
    return found


@contextmanager
def _on_trial(whole: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers and attributes of modules afterwards: a router, for example, counts tokens in one."""
    grads = [(param, param.grad) for param in whole.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in whole.buffers()]
    noted = [(values, dict(values)) for module in whole.modules() for values in (vars(module), module._buffers)]
    for param, _ in grads:
        param.grad = None   # not to be added to
    try:
        yield
    finally:
        for param, grad in grads:
            param.grad = grad
        for buffer, before in buffers:
            buffer.copy_(before)
        for attributes, earlier in noted:
            attributes.update(earlier)


def _one_turn(stages: Sequence[Stage], microbatch: MicroBatch, loss: Loss, group: Group) -> list[MeasuredPiece]:
    """Run the pieces once, one after the other, and time each."""
    values, targets = microbatch
    measured = []
    for number, stage in enumerate(stages):
        last = (lambda output: sum_and_count(loss(output, targets), group.where("example"))[0]) if number == len(stages) - 1 else None
        values, piece = _time_piece(stage, values, last, group.device)
        measured.append(piece)
    return measured


def _time_piece(stage: Stage, values: Any, loss: Callable[[Any], Tensor] | None, device: torch.device) -> tuple[Any, MeasuredPiece]:
    """The output of the piece, and its measures."""
    arrive = lambda x: received(x.detach().requires_grad_(x.is_floating_point()))
    inputs = tree_map_only(Tensor, arrive, list(values) if isinstance(values, tuple | list) else [values])   # a stage may pass on anything
    products: list[Product] = []
    saved = _Saved(stage)
    clock = [_now(device)]
    with torch.autograd.graph.saved_tensors_hooks(saved.count, lambda x: x), deferring(products):
        output = stage(*inputs)
        output = loss(output) if loss else output
    clock.append(_now(device))
    ends = [y for y in tensors_in(output) if y.requires_grad and not y.is_leaf]
    for part in (partial(backward_to_inputs, products, ends, [torch.ones_like(y) for y in ends]), partial(finish_products, products)):
        if ends:
            part()
        clock.append(_now(device))
    forward, input, weight = (later - earlier for earlier, later in pairwise(clock))
    parameters = sum(param.nbytes for param in stage.parameters())
    return output, MeasuredPiece(forward, input, weight, parameters, saved.bytes)


class _Saved:
    """Counts the bytes that autograd saves, each storage once, without parameters."""

    def __init__(self, stage: nn.Module):
        self.bytes = 0
        self.seen = {param.untyped_storage().data_ptr() for param in stage.parameters()}

    def count(self, x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        if memory.data_ptr() not in self.seen:
            self.seen.add(memory.data_ptr())
            self.bytes += memory.nbytes()
        return x


def _now(device: torch.device) -> float:
    """The time in seconds, once the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
