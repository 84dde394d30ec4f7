"""Measured times and memory are those of the pieces, and a recorded step is one that ran."""

import copy
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.base.errors import LossError
from rankloom.models.config import GPTConfig, MoEConfig
from rankloom.models.gpt import GPT
from rankloom.models.moe import MoE
from rankloom.models.pieces import gpt_answer, gpt_pieces
from rankloom.parallel.pipeline import measure
from rankloom.parallel.pipeline.actions import COMPUTES, Schedule, parse_action
from rankloom.parallel.pipeline.cut import balance, find_tied, make_stages, pieces_of
from rankloom.parallel.pipeline.draw import as_svg
from rankloom.parallel.pipeline.measure import (
    MeasuredMessage,
    MeasuredPiece,
    measure_message,
    measure_pieces,
    record_step,
    recorded_costs,
    stage_costs,
)
from rankloom.parallel.pipeline.passes import send_gradients_first
from rankloom.parallel.pipeline.runtime import Pipeline
from rankloom.parallel.pipeline.schedules import SCHEDULES, make_schedule
from rankloom.parallel.pipeline.simulate import Costs, Timeline, TimeSlot, simulate_schedule


class Asleep(torch.autograd.Function):
    """Takes its time, forth and back."""

    @staticmethod
    def forward(ctx, x, seconds):
        time.sleep(seconds)
        ctx.seconds = seconds
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * ctx.seconds)
        return grad, None


def sleepy(seconds):
    layer = nn.Linear(4, 4)
    return {"layer": layer}, lambda x: Asleep.apply(layer(x), seconds)


BATCH = (torch.ones(8, 4), None)


def test_pieces_take_the_time_they_take_and_all_ranks_agree():
    def body(world):
        pieces = [sleepy(0.002), sleepy(0.05), sleepy(0.002)]
        before = [part.weight for parts, _ in pieces for part in parts.values()]
        for weight in before:
            weight.grad = torch.full_like(weight, 7.0)
        measured = measure_pieces(pieces, BATCH, lambda y, _: (y.sum(), 1), world)
        assert all((weight.grad == 7).all() for weight in before), "gradients are as they were"
        return measured

    first, second = rl.simulate(2, body)
    assert first == second
    for piece, seconds in zip(first, (0.002, 0.05, 0.002)):
        assert piece.forward >= seconds and piece.input >= 2 * seconds
    assert first[1].forward > first[0].forward and first[1].seconds > first[2].seconds
    assert balance([piece.seconds for piece in first], 2) in ([1, 2], [2, 1])


class Counting(nn.Module):
    """Works in place on what it is given, and makes its buffer anew."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return x.mul_(2)


def test_modules_that_were_measured_have_counted_nothing():
    norm, counting, layer = nn.BatchNorm1d(4), Counting(), MoE(MoEConfig(experts=2, ffn=3), 4)
    before = copy.deepcopy(norm.state_dict())
    pieces = [({"norm": norm}, norm), ({"counting": counting}, counting), ({"layer": layer}, lambda x: layer(x[None]))]
    rl.simulate(1, lambda world: measure_pieces(pieces, BATCH, lambda y, _: (y.sum(), 1), world))
    assert layer.routed is None and layer.auxiliary is None and counting.calls == 0
    torch.testing.assert_close(norm.state_dict(), before, rtol=0, atol=0)


def test_a_loss_that_is_a_mean_is_refused_where_pieces_are_measured():
    """As where a pipeline runs: the example comes first."""
    def body(world):
        with pytest.raises(LossError, match=r"rank \d: example .* returned one tensor of shape \(\), expected \(sum, count\)"):
            measure_pieces(pieces_of(nn.Sequential(nn.Linear(2, 2)), "0"), (torch.ones(3, 2), None), lambda y, _: y.mean(), world)

    rl.simulate(2, body)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_a_message_takes_the_time_it_takes_and_all_ranks_agree(p):
    def body(world):
        send = world.send
        world.send = lambda *args, **named: (time.sleep(0.01), send(*args, **named))[1]
        return measure_message(torch.ones(8, 4, requires_grad=True), world)

    told = set(rl.simulate(p, body))
    assert len(told) == 1
    send, arrive = told.pop()
    assert 0.01 <= send <= send + arrive < 1 if p > 1 else (send, arrive) == (0, 0)


class Clocked:
    """Rank 0 of two: its clock moves by 1 as it sends and by 7 as it waits for what comes, and by 100 the first time. Rank 1 sends in 3."""

    rank, size, device = 0, 2, torch.device("cpu")

    def __init__(self):
        self.now, self.calls = 0.0, 0

    def takes(self, seconds):
        self.calls += 1
        self.now += 100 if self.calls <= 2 else seconds

    def send(self, x, to, **named):
        self.takes(1)
        return SimpleNamespace(wait=lambda: None)

    def recv(self, x, frm, **named):
        return SimpleNamespace(wait=lambda: self.takes(7))

    def all_gather_object(self, value, label):
        send, there = value
        return [value, [send + 2, there]]


def test_a_message_is_the_senders_time_and_the_rest_of_one_way_of_both_ranks(monkeypatch):
    group = Clocked()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: group.now))
    assert measure_message(torch.ones(2), group) == MeasuredMessage(send=2.0, arrive=2.0)   # one way: (1 + 7) / 2


def test_bytes_are_counted_once_and_without_parameters():
    pieces = [({"a": nn.Linear(4, 16)}, None), ({"b": nn.Linear(16, 4)}, None)]
    pieces = [(parts, next(iter(parts.values()))) for parts, _ in pieces]
    first, second = rl.simulate(1, lambda world: measure_pieces(pieces, BATCH, lambda y, _: (y.sum(), 1), world))[0]
    assert (first.parameters, second.parameters) == ((4 * 16 + 16) * 4, (16 * 4 + 4) * 4)
    assert (first.activations, second.activations) == (8 * 4 * 4, 8 * 16 * 4), "a linear layer keeps its input"


def test_costs_of_stages_are_sums_of_those_of_their_pieces():
    measured = [MeasuredPiece(1, 2, 3, 0, 0), MeasuredPiece(10, 20, 30, 0, 0), MeasuredPiece(100, 200, 300, 0, 0)]
    assert stage_costs(measured, [2, 1], MeasuredMessage(send=0.25, arrive=0.5)) == Costs((11, 100), (22, 200), (33, 300), 0.5, send=0.25)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
@pytest.mark.parametrize("passes", [lambda schedule: schedule, send_gradients_first], ids=["plain", "gradients first"])
def test_costs_of_recorded_steps_simulate_those_steps(name, passes):
    schedule = passes(make_schedule(name, 2 * SCHEDULES[name].fewest, 4))
    stages = schedule.stages
    costs = Costs(tuple(range(1, stages + 1)), tuple(range(3, stages + 3)), tuple(range(2, stages + 2)), message=0.25, send=0.125)
    step = simulate_schedule(schedule, costs)
    again = simulate_schedule(schedule, recorded_costs([step], MeasuredMessage(send=0.125, arrive=0.25)))
    assert again.slots == step.slots


def test_costs_of_recorded_steps_are_medians_over_micro_batches_and_steps():
    schedule = Schedule.of([parse_action(word) for word in ("F0", "F1", "B0", "B1")])

    def step(*ends):
        begins = (0, *ends)
        return Timeline(schedule, tuple(TimeSlot(0, action, a, b) for action, a, b in zip(schedule.ranks[0], begins, ends)))

    assert recorded_costs([step(1, 3, 10, 18), step(9, 13, 22, 122)]) == Costs((3.0,), (8.5,), (0.0,))


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_recorded_step_is_the_plan_with_the_time_that_it_took(name):
    chunks = 1 + (name == "zb-v")
    schedule = make_schedule(name, 2 * chunks, 4)

    def body(world):
        stages = make_stages([sleepy(0.004) for _ in range(schedule.stages)], [1] * schedule.stages)
        held = {stage: stages[stage] for stage in schedule.held_by(world.rank)}
        pipeline = Pipeline(held, world, schedule, lambda y, _: (y.sum(), 1))
        plain = dict(pipeline.do)
        timeline = record_step(pipeline, [BATCH] * 4)
        assert pipeline.do == plain
        return timeline

    first, second = rl.simulate(2, body)
    assert first.slots == second.slots, "every rank knows all"
    simulated = simulate_schedule(schedule, Costs.even(schedule.stages, forward=0.004, input=0.008, weight=0.0))
    assert min(slot.start for slot in first.slots) == 0
    for rank, actions in enumerate(schedule.ranks):
        assert [slot.action for slot in first.by_rank[rank]] == [action for action in actions if action.kind in COMPUTES]
        assert all(earlier.end <= later.start for earlier, later in zip(first.by_rank[rank], first.by_rank[rank][1:]))
    at = {slot.action: slot for slot in first.slots}
    assert all(at[slot.action].start >= at[slot.action._replace(stage=slot.action.stage - 1)].end
               for slot in first.slots if slot.action.kind == "F" and slot.action.stage)
    assert first.makespan >= simulated.makespan and "</svg>" in as_svg(first, "recorded")


def test_a_gpt_is_measured_cut_and_run():
    model_of = lambda: GPT(GPTConfig(vocab_size=19, seq_len=8, width=8, layers=4, heads=2, kv_heads=1, ffn=12))
    batch = (torch.arange(16).view(2, 8), torch.arange(16).view(2, 8))

    def body(world):
        model = model_of()
        pieces = gpt_pieces(model)
        measured = measure_pieces(pieces, batch, gpt_answer(model), world)
        sizes = balance([piece.seconds for piece in measured], 2)
        stages = make_stages(pieces, sizes)
        schedule = make_schedule("zb-h1", 2, 4)
        pipeline = Pipeline({world.rank: stages[world.rank]}, world, schedule, gpt_answer(model), tied=find_tied(stages))
        timeline = record_step(pipeline, [batch] * 4)
        return sizes, simulate_schedule(schedule, stage_costs(measured, sizes)).bubble, timeline.bubble

    (sizes, simulated, recorded), other = rl.simulate(2, body)
    assert (sizes, simulated, recorded) == other and sum(sizes) == 6
    assert 0 < simulated < 1 and 0 < recorded < 1
