"""The decision which block computes what again: the best there is, and never more bytes than allowed."""

import itertools
import random

import pytest

import rankloom as rl
from rankloom.train.blocks import budget as module
from rankloom.train.blocks.budget import CHOICES, FULL, NONE, SELECTIVE, BlockCost, fit, peak


def cost(name, kept, repeated, work=100, calls=1):
    return BlockCost(name, dict(zip(CHOICES, kept)), dict(zip(CHOICES, repeated)), work, calls)


def some(draw, n):
    def one(i):
        none = draw.randint(50, 100)
        selective = draw.randint(20, none + 5)   # now and then it keeps more than `none`
        return cost(f"b{i}", (none, selective, draw.randint(0, 20)), (0, draw.randint(1, 40), 100))
    return [one(i) for i in range(n)]


def best_by_trying(costs, budget):
    plans = [plan for plan in itertools.product(CHOICES, repeat=len(costs)) if peak(costs, plan) <= budget]
    return min((sum(c.repeated[choice] for c, choice in zip(costs, plan)) for plan in plans), default=None)


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_that_fits_repeats_less(seed):
    draw = random.Random(seed)
    costs = some(draw, draw.randint(1, 6))
    budget = draw.randint(60, 100 * len(costs))
    wanted = best_by_trying(costs, budget)
    if wanted is None:
        with pytest.raises(rl.ConfigError):
            fit(costs, budget)
        return
    plan = fit(costs, budget)
    choices = [d.choice for d in plan.decisions]
    assert sum(c.repeated[choice] for c, choice in zip(costs, choices)) == wanted
    assert plan.peak == peak(costs, choices) <= budget
    assert plan.repeated == wanted / sum(c.work for c in costs)


def test_the_peak_counts_a_block_that_runs_again_on_top_of_what_the_blocks_before_it_keep():
    costs = [cost("a", (100, 60, 10), (0, 20, 100)), cost("b", (50, 30, 5), (0, 20, 100))]
    assert peak(costs, [NONE, NONE]) == 150
    assert peak(costs, [FULL, NONE]) == max(100, 10 + 50)          # a again, when b is gone
    assert peak(costs, [NONE, FULL]) == 100 + 50
    assert peak(costs, [SELECTIVE, FULL]) == max(100, 60 + 50)


def test_with_room_for_all_nothing_is_repeated_and_one_byte_less_repeats_something():
    costs = [cost("a", (100, 60, 10), (0, 20, 100))] * 3
    assert [d.choice for d in fit(costs, 300).decisions] == [NONE] * 3
    assert fit(costs, 299).repeated == 20 / 300


def test_the_last_blocks_keep_everything_because_they_go_first():
    costs = [cost("a", (100, 100, 10), (0, 100, 100))] * 4
    assert [d.choice for d in fit(costs, 220).decisions] == [FULL, FULL, NONE, NONE]


def test_selective_that_keeps_more_than_everything_is_never_chosen():
    costs = [cost("a", (100, 120, 10), (0, 20, 100))] * 3
    assert SELECTIVE not in [d.choice for budget in range(120, 300, 10) for d in fit(costs, budget).decisions]


def test_forwards_that_wait_at_the_same_time_are_all_counted():
    """Two micro-batches in flight: backward of the first begins while everything of the second is still there."""
    once = [cost("a", (100, 60, 10), (0, 20, 100))] * 2
    twice = [cost("a", (100, 60, 10), (0, 20, 100), calls=2)] * 2
    assert [d.choice for d in fit(once, 300).decisions] == [NONE, NONE]
    assert [d.choice for d in fit(twice, 400).decisions] == [NONE, NONE], "nothing runs again, so nothing is set aside"
    plan = fit(twice, 300)
    assert plan.peak == sum(d.kept for d in plan.decisions) + 90 <= 300
    assert sorted(d.choice for d in plan.decisions) == [FULL, SELECTIVE]
    assert sum(d.kept for d in plan.decisions) == 2 * 10 + 2 * 60 and plan.repeated == (100 + 20) / (100 + 100)
    with pytest.raises(rl.ConfigError, match="need 130 bytes"):
        fit(twice, 129)


def test_too_few_bytes_is_an_error_with_the_bytes_that_are_enough():
    costs = [cost("a", (100, 60, 10), (0, 20, 100))] * 3
    with pytest.raises(rl.ConfigError, match="recompute = 119 bytes: .* 3 blocks need 120 bytes .* 300 B when nothing"):
        fit(costs, 119)
    assert fit(costs, 120).peak == 120


def test_a_plan_is_a_table_that_says_what_was_decided_and_why():
    text = str(fit([cost("blocks.0", (4096, 2048, 1024), (0, 20, 100)), cost("blocks.1", (4096, 2048, 1024), (0, 20, 100))], 7000))
    assert text.splitlines() == [
        "block     choice     kept   repeated  why",
        "blocks.0  selective  2 KiB  20%       saves 2 KiB",
        "blocks.1  none       4 KiB  0%        there is room",
        "at most 6 KiB of 6.84 KiB, 10% of the forward of these blocks twice"]


def test_no_blocks_need_nothing():
    assert fit([], 1).decisions == ()


def test_more_different_blocks_than_plans_that_may_compete_still_fit(monkeypatch):
    costs = some(random.Random(1), 60)
    exact = fit(costs, 2700)
    monkeypatch.setattr(module, "COMPETING", 300)
    thinned = fit(costs, 2700)
    assert thinned.peak <= 2700
    assert exact.repeated < thinned.repeated < 1.05 * exact.repeated   # 3 % here: what thinning costs, and nothing worse
