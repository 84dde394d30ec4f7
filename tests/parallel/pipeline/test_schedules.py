"""Schedules: each is proven for many sizes, and holds what its docstring says."""

import pytest

from rankloom.base.errors import ConfigError
from rankloom.parallel.pipeline.actions import COMPUTES, Schedule
from rankloom.parallel.pipeline.check import check, peak_live
from rankloom.parallel.pipeline.passes import add_gathers, apply_pass
from rankloom.parallel.pipeline.schedules import SCHEDULES, breadth_first, gpipe, make_schedule, one_f_one_b, zero_bubble_h1

CASES = [(name, chunks) for name, schedule in SCHEDULES.items()
         for chunks in range(schedule.fewest, (schedule.most or 4) + 1)]


@pytest.mark.parametrize(("name", "chunks"), CASES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_everything_is_done_once_and_nobody_waits_for_ever(name, chunks, ranks):
    for microbatches in [*range(1, 10), 16, 19]:
        schedule = make_schedule(name, ranks * chunks, microbatches, chunks)
        check(schedule)
        assert (len(schedule.ranks), schedule.stages, schedule.microbatches) == (ranks, ranks * chunks, microbatches)
        assert all(len(schedule.held_by(rank)) == chunks for rank in range(ranks))
        assert {a.kind for actions in schedule.ranks for a in actions} <= set(COMPUTES), "messages are added by a pass"


@pytest.mark.parametrize(("name", "chunks"), CASES)
def test_micro_batches_go_through_a_stage_in_order(name, chunks):
    """So that sums over micro-batches do not depend on the schedule."""
    for actions in make_schedule(name, 4 * chunks, 9, chunks).ranks:
        for kinds in ("F", "BI", "BW"):
            for stage in {action.stage for action in actions}:
                numbers = [a.microbatch for a in actions if a.kind in kinds and a.stage == stage]
                assert numbers == sorted(numbers) and len(numbers) == 9


def test_a_rank_with_one_stage_need_not_name_it():
    assert repr(one_f_one_b(stage=1, stages=3, microbatches=4)) == "[F0, F1, B0, F2, B1, F3, B2, B3]"
    assert str(gpipe(0, 2, 2)) == "[F0, F1, B0, B1]" and " ".join(map(str, zero_bubble_h1(0, 1, 1))) == "F0 I0 W0"
    assert str(breadth_first(rank=1, ranks=2, microbatches=1)) == "[F0@1, F0@3, B0@3, B0@1]"
    check(Schedule.of(*(one_f_one_b(stage, 3, 4) for stage in range(3))))


@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_gpipe_keeps_everything_and_1f1b_at_most_stages_minus_stage(microbatches):
    assert [peak_live(gpipe(stage, 4, microbatches)) for stage in range(4)] == [microbatches] * 4
    assert [peak_live(one_f_one_b(stage, 4, microbatches)) for stage in range(4)] == [min(4 - stage, microbatches) for stage in range(4)]


@pytest.mark.parametrize(("name", "chunks", "peaks"), [
    ("interleaved", 2, [11, 9, 7, 5]), ("interleaved", 3, [15, 13, 11, 9]), ("breadth-first", 2, [32] * 4),
    ("zb-h1", 1, [4] * 4), ("zb-h2", 1, [7] * 4), ("zb-v", 2, [8] * 4), ("dualpipe-v", 2, [9] * 4),
])
def test_the_others_keep_what_they_say(name, chunks, peaks):
    schedule = make_schedule(name, 4 * chunks, 16, chunks)
    assert [peak_live(actions) for actions in schedule.ranks] == peaks


def test_folded_stages_meet_on_the_last_rank_and_end_on_the_first():
    assert make_schedule("zb-v", 6, 4).owner == make_schedule("dualpipe-v", 6, 4).owner == {0: 0, 1: 1, 2: 2, 3: 2, 4: 1, 5: 0}
    assert make_schedule("interleaved", 6, 4).owner == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}


def test_the_middle_of_dual_pipe_has_a_forward_beside_each_backward():
    kinds = "".join(a.kind for a in make_schedule("dualpipe-v", 8, 20).ranks[3] if a.kind in "FB")
    assert "FBFB" * 16 in kinds


def test_breadth_first_gathers_twice_a_stage_where_interleaved_gathers_often():
    def gathers(name):
        schedule = apply_pass(make_schedule(name, 8, 16), add_gathers)
        check(schedule)
        return [sum(a.kind == "GATHER" for a in actions) for actions in schedule.ranks]

    assert gathers("breadth-first") == [3] * 4, "the last stage of a rank stays whole between its sweeps"
    assert min(gathers("interleaved")) > 2 * 3


@pytest.mark.parametrize(("words", "message"), [
    (("1f1v", 4, 8), "there is no schedule '1f1v'. Did you mean '1f1b'?"),
    (("1f1b", 0, 8), "0 stages and 8 micro-batches"), (("1f1b", 4, 0), "4 stages and 0 micro-batches"),
    (("1f1b", 4, 8, 2), "'1f1b' with 2 stages on each rank: it is made for 1$"),
    (("interleaved", 4, 8, 1), "'interleaved' with 1 stages on each rank: it is made for 2 or more"),
    (("zb-v", 12, 8, 3), "it is made for 2$"), (("zb-v", 7, 8), "7 stages cannot be dealt out 2 to a rank; give a multiple of 2"),
])
def test_what_cannot_be_is_refused_with_the_reason(words, message):
    with pytest.raises(ConfigError, match=message):
        make_schedule(*words)
