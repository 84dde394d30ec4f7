"""The batch equation: local x ranks x accumulate = global."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankloom.base.errors import BatchError
from rankloom.train.batch_size import Batch, solve_batch

small = st.integers(1, 50)


@given(ranks=small, local=small, accumulate=small, left_out=st.sampled_from(["local", "accumulate", "global_"]))
def test_each_of_the_three_is_solved_from_the_other_two(ranks, local, accumulate, left_out):
    whole = {"local": local, "accumulate": accumulate, "global_": local * ranks * accumulate}
    given_sizes = {name: size for name, size in whole.items() if name != left_out}
    assert solve_batch(ranks, **given_sizes) == Batch(**whole)


@given(ranks=small, global_=small)
def test_what_is_solved_satisfies_the_equation_or_is_refused(ranks, global_):
    try:
        batch = solve_batch(ranks, global_=global_)
    except BatchError:
        assert global_ % ranks, "refused though it divides"
    else:
        assert batch.local * ranks * batch.accumulate == batch.global_ == global_


@pytest.mark.parametrize(("rows", "pipe", "accumulate"), [(16, 2, 8), (24, 2, 8), (7, 2, 7), (11, 2, 1), (6, 4, 6), (64, 3, 8), (1, 2, 1)])
def test_with_pipe_ranks_it_is_the_most_that_divides_the_rows_up_to_four_for_each_stage(rows, pipe, accumulate):
    assert solve_batch(2, global_=2 * rows, pipe=pipe) == Batch(rows // accumulate, accumulate, 2 * rows)
    assert solve_batch(2, local=rows, pipe=pipe).accumulate == 1 == solve_batch(2, global_=2 * rows, accumulate=1, pipe=pipe).accumulate


def test_accumulate_is_one_when_only_the_local_or_the_global_size_is_given():
    assert solve_batch(3, local=5) == Batch(5, 1, 15)
    assert solve_batch(3, global_=15) == Batch(5, 1, 15)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"global_": 7}, r"local \? x ranks 4 x accumulate \? = global 7 .*7 does not divide by 4 x 1"),
        ({"global_": 3}, "global_batch_size 3 is smaller than the 4 ranks"),
        ({"local": 2, "global_": 12}, r"12 does not divide by 2 x 4"),
        ({"local": 9, "global_": 12}, r"12 does not divide by 9 x 4"),
        ({"local": 2, "accumulate": 3, "global_": 16}, r"does not hold: 2 x 4 x 3 = 24"),
        ({"accumulate": 3}, "give local_batch_size or global_batch_size"),
        ({"accumulate": 8, "global_": 16}, r"16 does not divide by 4 x 8"),
        ({}, "give local_batch_size or global_batch_size"),
    ],
)
def test_an_equation_that_cannot_hold_is_shown_with_its_numbers(sizes, message):
    with pytest.raises(BatchError, match=message):
        solve_batch(4, **sizes)


def test_the_equation_is_printed_with_every_number():
    assert solve_batch(2, local=4, global_=24).equation(2) == "local 4 x ranks 2 x accumulate 3 = global 24"


@pytest.mark.parametrize("asked", [{"local": -2}, {"local": -2, "global_": -8}, {"global_": 8, "accumulate": -1},
                                   {"local": 2, "accumulate": 0}, {"local": 0}, {"local": -1, "accumulate": -2, "global_": 8}], ids=str)
def test_numbers_below_one_solve_nothing(asked):
    with pytest.raises(BatchError, match="has no solution: each of these is 1 or more"):
        solve_batch(4, **asked)
