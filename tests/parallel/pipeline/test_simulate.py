"""The simulator: bubbles as the formulas say, and as a published table says that was computed from measured times."""

import csv
from pathlib import Path

import pytest

from rankloom.base.errors import ConfigError
from rankloom.parallel.pipeline.passes import send_gradients_first
from rankloom.parallel.pipeline.schedules import make_schedule
from rankloom.parallel.pipeline.search import SEARCHED, search_zero_bubble
from rankloom.parallel.pipeline.simulate import Costs, simulate_schedule

TABLE = list(csv.DictReader((Path(__file__).parent / "zero_bubble.csv").read_text().splitlines()))


def bubble(name: str, ranks: int, microbatches: int, chunks: int = 1, **costs: float):
    """With costs of a rank's whole part of the model, whatever the number of pieces."""
    costs = {"forward": 1.0, "input": 1.0, "weight": 1.0} | costs
    each = {key: cost / (1 if key == "message" else chunks) for key, cost in costs.items()}
    return simulate_schedule(make_schedule(name, ranks * chunks, microbatches, chunks), Costs.even(ranks * chunks, **each))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (4, 4), (4, 8), (8, 3), (5, 17)])
def test_the_bubble_of_gpipe_and_1f1b_is_p_minus_1_of_m_plus_p_minus_1(name, p, m):
    assert bubble(name, p, m).bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    uneven = bubble(name, p, m, forward=2.0, input=1.5, weight=3.0)
    assert uneven.makespan == pytest.approx((m + p - 1) * 6.5), "whatever forward and backward cost, they cost it m + p - 1 times"


@pytest.mark.parametrize("name", ["interleaved", "breadth-first"])
@pytest.mark.parametrize(("p", "v", "rounds"), [(2, 2, 3), (4, 2, 2), (4, 3, 2), (3, 4, 1)])
def test_the_bubble_is_v_times_smaller_with_v_stages_on_a_rank(name, p, v, rounds):
    m = p * rounds
    assert bubble(name, p, m, v).makespan - 3 * m == pytest.approx(3 * (p - 1) / v)


@pytest.mark.parametrize(("name", "v"), [("gpipe", 1), ("1f1b", 1), ("breadth-first", 2)])
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (4, 8), (8, 24)])
def test_where_gradients_leave_first_nobody_waits_for_the_weights_products_of_others(name, v, p, m):
    schedule = send_gradients_first(make_schedule(name, p * v, m, v))
    timeline = simulate_schedule(schedule, Costs.even(p * v, forward=2.0 / v, input=1.5 / v, weight=3.0 / v))
    assert timeline.makespan - 6.5 * m == pytest.approx((p - 1) * 3.5 / v)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12), (8, 24)])
def test_zero_bubble_h1_waits_a_third_as_long_as_1f1b_where_the_three_parts_take_equally_long(p, m):
    assert bubble("1f1b", p, m).makespan - 3 * m == pytest.approx(3 * (p - 1))
    assert bubble("zb-h1", p, m).makespan - 3 * m == pytest.approx(p - 1)


@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
@pytest.mark.parametrize(("p", "m"), [(2, 3), (2, 8), (4, 7), (4, 12), (8, 24)])
def test_zero_bubble_has_none_where_the_three_parts_take_equally_long_and_no_rank_waits_for_the_next_step(name, p, m):
    timeline = bubble(name, p, m, chunks=1 + (name == "zb-v"))
    assert timeline.own_bubble == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("weight", [1.0, 0.5, 0.0])
@pytest.mark.parametrize(("p", "m"), [(2, 3), (2, 8), (4, 7), (4, 12), (8, 24)])
def test_dual_pipe_waits_half_as_long_as_zero_bubble_h1_where_forward_and_input_take_equally_long(p, m, weight):
    waits = bubble("dualpipe-v", p, m, 2, weight=weight).makespan - m * (2 + weight)
    assert waits == pytest.approx((p - 1) * (2 - weight) / 2)
    assert waits == pytest.approx((bubble("zb-h1", p, m, weight=weight).makespan - m * (2 + weight)) / 2)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row['model']}-{row['microbatches']}")
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-h2"])
def test_the_published_bubbles_come_out_to_the_fourth_digit_of_interleaved_within_half_a_point(row, name):
    """Qi et al. 2023, tables 5 and 9: computed by its authors from measured times of A100s."""
    chunks = int(row["chunks"]) if name == "interleaved" else 1
    costs = {key: float(row[key]) for key in ("forward", "input", "weight", "message")}
    mine = bubble(name, int(row["ranks"]), int(row["microbatches"]), chunks, **costs).own_bubble
    assert mine == pytest.approx(float(row[name]), abs=0.004 if name == "interleaved" else 5e-5)


@pytest.mark.parametrize("row", TABLE[:-2], ids=lambda row: f"{row['model']}-{row['microbatches']}")   # the last two take seconds
@pytest.mark.parametrize("name", SEARCHED)
def test_the_published_bubbles_of_searched_schedules_come_out_within_a_point(row, name):
    costs = Costs.even(int(row["ranks"]), **{key: float(row[key]) for key in ("forward", "input", "weight", "message")})
    schedule = search_zero_bubble(costs, int(row["microbatches"]), SEARCHED[name])
    assert simulate_schedule(schedule, costs).own_bubble == pytest.approx(float(row[name]), abs=0.006)


@pytest.mark.parametrize("row", TABLE[:-1], ids=lambda row: f"{row['model']}-{row['microbatches']}")
def test_zero_bubble_v_waits_less_than_a_third_as_much_as_1f1b_with_the_published_times(row):
    costs = {key: float(row[key]) for key in ("forward", "input", "weight", "message")}
    p, m = int(row["ranks"]), int(row["microbatches"])
    assert bubble("zb-v", p, m, 2, **costs).own_bubble < bubble("1f1b", p, m, **costs).own_bubble / 3


def test_a_message_takes_time_on_its_way_and_none_of_its_sender():
    slots = bubble("gpipe", 2, 2, message=0.25).slots
    assert [(str(s.action), s.start) for s in slots] == [
        ("F0@0", 0), ("F1@0", 1), ("B0@0", 5.5), ("B1@0", 7.5), ("F0@1", 1.25), ("F1@1", 2.25), ("B0@1", 3.25), ("B1@1", 5.25)]


def test_a_message_keeps_its_sender_busy_before_it_travels():
    slots = simulate_schedule(make_schedule("gpipe", 2, 2), Costs((1, 1), (1, 1), (1, 1), message=0.25, send=0.5)).slots
    assert [(str(s.action), s.start) for s in slots] == [
        ("F0@0", 0), ("F1@0", 1.5), ("B0@0", 7), ("B1@0", 9.5), ("F0@1", 1.75), ("F1@1", 3.25), ("B0@1", 4.25), ("B1@1", 6.75)]


def test_stages_of_one_rank_hand_over_without_a_message():
    assert bubble("zb-v", 1, 3, 2, message=100.0).bubble == 0


def test_a_slow_stage_sets_the_pace_of_all():
    costs = Costs(forward=(1, 1, 4), input=(1, 1, 4), weight=(0, 0, 0))
    timeline = simulate_schedule(make_schedule("1f1b", 3, 10), costs)
    assert timeline.makespan == 2 + 10 * 8 + 2 and timeline.busy == (20, 20, 80)


def test_costs_of_another_number_of_stages_or_below_0_are_refused():
    with pytest.raises(ConfigError, match="the costs are of 3 stages, the schedule has 4"):
        simulate_schedule(make_schedule("1f1b", 4, 2), Costs.even(3))
    with pytest.raises(ConfigError, match="none below 0"):
        Costs.even(3, weight=-1)
    with pytest.raises(ConfigError, match="one cost of each kind for each stage"):
        Costs((1.0,), (1.0, 1.0), (1.0,))


def test_activations_are_held_until_the_weights_have_their_gradient():
    assert simulate_schedule(make_schedule("zb-h1", 4, 8), Costs.even(4)).peaks == (4, 4, 4, 4)
