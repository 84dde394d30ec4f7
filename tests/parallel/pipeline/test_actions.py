"""Actions and schedules: what is printed can be parsed, and the dependency rule says who waits for whom."""

import pytest

from rankloom.base.errors import ConfigError
from rankloom.parallel.pipeline.actions import MEANING, WHOLE_STAGE, Action, Schedule, finishes, needs, parse_action, parse_schedule
from rankloom.parallel.pipeline.schedules import make_schedule

TWO = parse_schedule("F0@0 B0@0\nF0@1 I0@1 W0@1")
FOLDED = parse_schedule("F0@0 F0@3 B0@3 B0@0\nF0@1 F0@2 B0@2 B0@1")


@pytest.mark.parametrize("kind", MEANING)
def test_every_kind_is_parsed_as_it_is_printed(kind):
    action = Action(kind, 7) if kind in WHOLE_STAGE else Action(kind, 7, 12)
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(("text", "message"), [
    ("F3@", "expected a kind, a micro-batch and a stage, such as F3@1, or F3 where the rank has one stage"),
    ("F@1", "expected a kind, a micro-batch"), ("GATHER3@1", "have no micro-batch"),
    ("SENF_F3@1", "Did you mean 'SEND_F'?"), ("X1@2", "there is no kind 'X'"), ("", "expected a kind"), ("F3@1 ", "expected a kind"),
    (f"F{'1' * 5000}@1", "expected a kind"), (f"F1@{'1' * 5000}", "expected a kind"),
])
def test_a_word_that_is_no_action_is_refused_with_what_was_expected(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_action(text)


def test_a_plan_is_parsed_as_it_is_printed_and_comments_are_not_read():
    schedule = make_schedule("zb-v", 6, 4)
    assert parse_schedule(f"# by hand\n\n{schedule}  # the last rank\n") == schedule
    with pytest.raises(ConfigError, match="the schedule is empty"):
        parse_schedule("# nothing\n\n")


def test_actions_that_name_no_stage_are_of_the_rank_s_own():
    assert (parse_action("F3"), str(Action("F", microbatch=3))) == (Action("F", microbatch=3), "F3")
    assert parse_schedule("F0 F1 B0 B1\nF0 B0 F1 B1") == make_schedule("1f1b", 2, 2)


def test_a_plan_knows_its_stages_and_who_holds_them():
    assert (FOLDED.stages, FOLDED.microbatches, FOLDED.owner) == (4, 1, {0: 0, 1: 1, 2: 1, 3: 0})
    assert FOLDED.held_by(0) == (0, 3) and FOLDED.held_by(1) == (1, 2)


def test_a_whole_backward_finishes_both_of_its_parts():
    assert finishes(Action("B", 1, 2)) == (Action("I", 1, 2), Action("W", 1, 2))
    assert all(finishes(Action(kind, 1, 2)) == (Action(kind, 1, 2),) for kind in MEANING if kind != "B")


@pytest.mark.parametrize(("word", "schedule", "expected"), [
    ("F0@0", TWO, ""), ("F0@1", TWO, "RECV_F0@1"), ("RECV_F0@1", TWO, "SEND_F0@0"), ("SEND_F0@0", TWO, "F0@0"),
    ("B0@0", TWO, "F0@0 RECV_B0@0"), ("I0@1", TWO, "F0@1"), ("W0@1", TWO, "I0@1"), ("RECV_B0@0", TWO, "SEND_B0@1"),
    ("SEND_B0@1", TWO, "I0@1"), ("GATHER@0", TWO, ""), ("REDUCE@0", TWO, "W0@0"),
    ("F0@2", FOLDED, "F0@1"), ("F0@3", FOLDED, "RECV_F0@3"), ("B0@1", FOLDED, "F0@1 I0@2"), ("B0@2", FOLDED, "F0@2 RECV_B0@2"),
])
def test_an_action_needs(word, schedule, expected):
    assert needs(parse_action(word), schedule) == [parse_action(each) for each in expected.split()]


def test_gradients_are_reduced_when_all_micro_batches_are_through():
    assert needs(Action("REDUCE", 1), make_schedule("1f1b", 2, 3)) == [Action("W", 1, m) for m in range(3)]


def test_an_empty_list_of_actions_is_a_rank_that_does_nothing():
    assert str(Schedule.of([])) == "" and Schedule.of([]).stages == Schedule.of([]).microbatches == 0
