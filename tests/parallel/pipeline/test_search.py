"""Searched schedules are right, keep their memory, and are never worse than those made by hand."""

import random
from dataclasses import replace

import pytest

from rankloom.base.errors import ConfigError
from rankloom.parallel.pipeline.check import check
from rankloom.parallel.pipeline.schedules import make_schedule
from rankloom.parallel.pipeline.search import _Search, search_zero_bubble
from rankloom.parallel.pipeline.simulate import Costs, simulate_schedule


def uneven(stages: int, seed: int) -> Costs:
    draw = random.Random(seed)
    forward, back, weight = (tuple(draw.choice((0.0, 0.5, 1.0, 1.7)) for _ in range(stages)) for _ in range(3))
    return Costs(tuple(cost + 0.1 for cost in forward), back, weight, message=draw.choice((0.0, 0.2, 3.0)), send=draw.choice((0.0, 0.1)))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("memory", [1.0, 1.5, 2.0, 4.0])
def test_any_costs_make_a_right_plan_within_its_memory(seed, memory):
    stages, microbatches = 1 + seed % 5, (1, 3, 7, 12)[seed % 4]
    costs = uneven(stages, seed)
    schedule = search_zero_bubble(costs, microbatches, memory)
    check(schedule)
    assert (schedule.stages, schedule.microbatches) == (stages, microbatches)
    for rank, actions in enumerate(schedule.ranks):
        whole = most = 0
        for action in actions:
            whole += {"F": 1, "I": -1}.get(action.kind, 0)
            most = max(most, whole)
        assert most <= int(memory * (stages - rank))
        assert not any(action.kind.startswith(("SEND", "RECV")) for action in actions)   # they are put in afterwards
    for name in ("zb-h1", "zb-h2")[:int(memory)]:
        by_hand = simulate_schedule(make_schedule(name, stages, microbatches), costs)
        assert simulate_schedule(schedule, costs).own_bubble <= by_hand.own_bubble + 1e-12


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("patience", [0.0, 0.5, 1.0])
def test_a_search_expects_nothing_sooner_than_the_simulator_finds(seed, patience):
    costs = replace(uneven(2 + seed % 4, seed), send=0.3)
    search = _Search(costs, 7, 1.5, patience)
    for slot in simulate_schedule(search.run(), costs).slots:
        sends = (slot.action.kind, slot.action.stage) not in (("F", search.last), ("I", 0)) and slot.action.kind != "W"
        assert search.ends[slot.action] >= slot.end + 0.3 * sends - 1e-9


def test_of_schedules_that_wait_equally_long_the_shorter_one_is_taken():
    costs = Costs.even(3, forward=0.5, input=0.5, weight=1.0, message=0.1)
    both = search_zero_bubble(costs, 3, 1.0), make_schedule("zb-h1", 3, 3)
    searched, by_hand = (simulate_schedule(schedule, costs) for schedule in both)
    assert searched.own_bubble == pytest.approx(by_hand.own_bubble, abs=1e-12) and searched.makespan <= by_hand.makespan + 1e-12


def test_with_equal_costs_and_enough_memory_nobody_waits():
    timeline = simulate_schedule(search_zero_bubble(Costs.even(6), 24, memory=2.0), Costs.even(6))
    assert timeline.own_bubble == pytest.approx(0, abs=1e-12)


def test_costs_that_no_hand_foresaw_are_waited_for_less():
    costs = Costs.even(6, forward=29.7, input=29.4, weight=19.9, message=0.5)
    searched = simulate_schedule(search_zero_bubble(costs, 24), costs).own_bubble
    assert searched < simulate_schedule(make_schedule("zb-h2", 6, 24), costs).own_bubble / 3


@pytest.mark.parametrize(("microbatches", "memory"), [(0, 1.0), (4, 0.9)])
def test_less_memory_than_1f1b_or_no_micro_batch_is_refused(microbatches, memory):
    with pytest.raises(ConfigError, match="memory 1 is what 1F1B needs"):
        search_zero_bubble(Costs.even(3), microbatches, memory)
