"""The checker finds what a hand can spoil, and says who waits for whom."""

import random

import pytest

from rankloom.base.errors import ConfigError
from rankloom.parallel.pipeline.actions import Schedule, parse_schedule
from rankloom.parallel.pipeline.check import check, walk
from rankloom.parallel.pipeline.passes import add_gathers, add_reductions, apply_pass, with_messages
from rankloom.parallel.pipeline.schedules import make_schedule


def edited(schedule: Schedule, old: str, new: str) -> Schedule:
    text = str(schedule)
    assert text.count(old) == 1
    return parse_schedule(text.replace(old, new))


def test_a_plan_edited_into_a_deadlock_is_refused_with_the_cycle():
    schedule = edited(make_schedule("1f1b", 2, 2), "F0@0 F1@0 B0@0 B1@0", "F0@0 B1@0 F1@0 B0@0")
    with pytest.raises(ConfigError) as caught:
        check(schedule)
    assert str(caught.value) == (
        "deadlock: rank 0 is at RECV_B1@0 and waits for SEND_B1@1, which rank 1 does after RECV_F1@1; "
        "rank 1 is at RECV_F1@1 and waits for SEND_F1@0, which rank 0 does after RECV_B1@0")


def test_a_rank_that_waits_for_itself_is_a_cycle_of_one():
    with pytest.raises(ConfigError) as caught:
        check(parse_schedule("F0@0 B1@0 F1@0 B0@0"))
    assert str(caught.value) == "deadlock: rank 0 is at B1@0 and waits for F1@0, which rank 0 does after B1@0"


def test_a_cycle_over_ranks_names_all_of_them_and_nobody_else():
    schedule = make_schedule("gpipe", 3, 2)
    schedule = edited(schedule, "F0@1 F1@1 B0@1 B1@1", "F1@1 F0@1 B0@1 B1@1")                # harmless: messages are told apart
    check(schedule)
    schedule = edited(schedule, "F0@0 F1@0 B0@0 B1@0", "F0@0 B0@0 F1@0 B1@0")
    with pytest.raises(ConfigError, match="deadlock") as caught:
        check(schedule)
    told = str(caught.value)
    assert "rank 0 is at RECV_B0@0 and waits for SEND_B0@1, which rank 1 does after RECV_F1@1" in told
    assert "rank 1 is at RECV_F1@1 and waits for SEND_F1@0, which rank 0 does after RECV_B0@0" in told
    assert "rank 2" not in told, "it waits for the cycle, but is no part of it"


@pytest.mark.parametrize(("old", "new", "message"), [
    ("F1@0", "", "F1@0 is missing"), ("B0@1", "", "I0@1, W0@1 are missing"), ("B0@1", "I0@1", "W0@1 is missing"),
    ("F1@0", "F1@0 F1@0", "F1@0 is done more than once"),
    ("B0@1", "B0@1 W0@1", "W0@1 is done more than once; note that B is I and W in one"),
    ("B0@1", "W0@1 I0@1", "rank 1 is at W0@1 and waits for I0@1, which rank 1 does after W0@1"),
    ("F1@0", "F1@0 F1@1", "rank 0 does F1@1, but stage 1 is on rank 1"),
])
def test_what_is_missing_doubled_or_in_the_wrong_place_is_named(old, new, message):
    with pytest.raises(ConfigError, match=message):
        check(edited(make_schedule("1f1b", 2, 3), old, new))


@pytest.mark.parametrize("word", ["F99999999@1", "F1@99999999"])
def test_a_number_that_was_mistyped_is_refused_before_all_that_it_lacks_is_listed(word):
    with pytest.raises(ConfigError, match="5 actions cannot be those of .*100000000.* as the largest numbers say"):
        check(parse_schedule(f"F0@0 B0@0\nF0@1 B0@1 {word}\n"))


def test_many_missing_actions_are_counted():
    with pytest.raises(ConfigError, match="F0@2, F1@2, I0@1, I0@2 and 6 more are missing"):
        check(parse_schedule("F0@0 B0@0 F1@0 B1@0\nF0@1 F1@1\nB0@3 F0@3 B1@3 F1@3"))


@pytest.mark.parametrize(("word", "message"), [
    ("SEND_F1@0", "rank 1 waits in RECV_F1@1 for SEND_F1@0, which no rank does"), ("RECV_F1@1", "rank 0: no other rank receives SEND_F1@0"),
    ("RECV_B0@0", "rank 1: no other rank receives SEND_B0@1"), ("SEND_B1@1", "rank 0 waits in RECV_B1@0 for SEND_B1@1, which no rank does"),
])
def test_a_message_without_its_other_end_is_named(word, message):
    with pytest.raises(ConfigError, match=message):
        check(edited(with_messages(make_schedule("1f1b", 2, 2)), word, ""))


def test_a_message_from_a_rank_to_itself_is_refused():
    with pytest.raises(ConfigError, match="rank 0: no other rank receives SEND_F0@0; stages of one rank pass tensors without messages"):
        check(parse_schedule("F0@0 SEND_F0@0 RECV_F0@1 F0@1 B0@1 B0@0"))


def test_messages_gathers_and_reductions_leave_a_plan_right():
    for name in ("1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"):
        schedule = make_schedule(name, 8, 6)
        for change in (add_gathers, add_reductions):
            schedule = apply_pass(schedule, change)
        check(schedule)
        check(with_messages(schedule))
        assert with_messages(with_messages(schedule)) == with_messages(schedule)


def test_computing_on_a_stage_that_is_not_whole_is_refused():
    schedule = apply_pass(make_schedule("breadth-first", 4, 2), add_gathers)
    with pytest.raises(ConfigError, match="rank 0 does F0@2 while its stage is not whole: put GATHER@2 before it"):
        check(edited(schedule, "GATHER@2 F0@2", "F0@2"))


def test_reducing_before_the_last_backward_is_a_deadlock():
    with pytest.raises(ConfigError, match="rank 0 is at REDUCE@0 and waits for W1@0, which rank 0 does after REDUCE@0"):
        check(parse_schedule("F0@0 F1@0 B0@0 REDUCE@0 B1@0"))


def test_a_walk_follows_every_rank_s_order_and_never_runs_ahead_of_a_need():
    schedule = with_messages(make_schedule("zb-v", 8, 7))
    steps = list(walk(schedule))
    for rank, actions in enumerate(schedule.ranks):
        assert tuple(action for who, action in steps if who == rank) == actions


def test_random_swaps_never_hang_the_checker():
    draw = random.Random(5)
    verdicts = set()
    for _ in range(200):
        ranks = [list(actions) for actions in make_schedule("1f1b", 3, 4).ranks]
        actions = draw.choice(ranks)
        i, j = draw.sample(range(len(actions)), 2)
        actions[i], actions[j] = actions[j], actions[i]
        try:
            check(Schedule.of(*ranks))
            verdicts.add("right")
        except ConfigError as error:
            verdicts.add(str(error).partition(":")[0])
    assert verdicts == {"right", "deadlock"}
