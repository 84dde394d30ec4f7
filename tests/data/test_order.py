"""Order and shares: permutations without storage, disjoint and complete for any number of ranks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankloom.base.errors import BatchError, DataError
from rankloom.base.shares import share
from rankloom.data.order import permute, sample_at, samples_of_step

FEW = settings(max_examples=60)


@FEW
@given(n=st.integers(1, 3000), key=st.integers(0, 2**62))
def test_a_permutation_hits_each_number_once(n, key):
    assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 255, 256, 257, 65537])
def test_a_permutation_hits_each_number_once_at_the_edges_of_powers_of_two(n):
    assert np.array_equal(np.sort(permute(np.arange(n), n, 11)), np.arange(n))


def test_points_of_a_huge_permutation_need_no_storage():
    n = 10**15 + 3
    index = np.array([0, 1, 2, n - 1])
    out = permute(index, n, 5)
    assert out.max() < n and out.min() >= 0 and len(set(out.tolist())) == 4
    assert permute(index[2:3], n, 5)[0] == out[2]          # a point does not depend on the points beside it


def test_every_number_is_equally_likely_to_come_to_every_place():
    n, draws = 6, 6000
    counts = np.zeros((n, n))
    for key in range(draws):
        counts[np.arange(n), permute(np.arange(n), n, key)] += 1
    chi_square = ((counts - draws / n) ** 2 / (draws / n)).sum()
    freedom = (n - 1) ** 2
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def test_neighbours_do_not_stay_neighbours():
    out = permute(np.arange(10_000), 10_000, 3)
    correlation = np.corrcoef(np.arange(10_000), out)[0, 1]
    assert abs(correlation) < 0.05
    assert (np.abs(np.diff(out)) == 1).sum() < 15          # 2 are expected by chance


def test_each_epoch_has_an_order_of_its_own_and_each_seed_too():
    first, *others = sample_at(np.arange(600), 100, 0).reshape(6, 100)
    assert all(sorted(epoch) == list(range(100)) for epoch in (first, *others))
    assert len({tuple(epoch) for epoch in (first, *others)}) == 6     # no order comes again, not after several epochs either
    assert not np.array_equal(first, sample_at(np.arange(100), 100, 1))
    assert np.array_equal(first, sample_at(np.arange(100), 100, 0))


@FEW
@given(n=st.integers(1, 60), batch=st.integers(1, 150), seed=st.integers(0, 9), steps=st.integers(1, 12))
def test_the_steps_lay_epochs_end_to_end_with_nothing_lost_or_repeated(n, batch, seed, steps):
    run = np.concatenate([samples_of_step(step, batch, n, seed) for step in range(steps)])
    assert len(run) == steps * batch
    for epoch in range(len(run) // n):
        assert sorted(run[epoch * n:(epoch + 1) * n]) == list(range(n))
    rest = run[len(run) // n * n:]
    assert len(set(rest.tolist())) == len(rest)


def test_the_order_of_today_is_the_order_of_tomorrow():
    assert samples_of_step(3, 5, 1000, 42).tolist() == samples_of_step(0, 20, 1000, 42)[15:].tolist()
    assert samples_of_step(0, 6, 1000, 42).tolist() == FROZEN
    assert sample_at(np.arange(24), 8, 42).reshape(3, 8).tolist() == FROZEN_EPOCHS


# A change here changes the order of every run that is resumed.
FROZEN = [151, 794, 606, 796, 609, 804]
FROZEN_EPOCHS = [[4, 5, 7, 1, 2, 3, 6, 0], [5, 6, 3, 0, 2, 4, 1, 7], [6, 7, 4, 5, 2, 3, 1, 0]]   # as many samples as a power of two


@FEW
@given(ranks=st.integers(1, 40), n=st.integers(0, 500))
def test_shares_are_disjoint_complete_contiguous_and_even(ranks, n):
    parts = [share(rank, ranks, n) for rank in range(ranks)]
    assert [i for part in parts for i in part] == list(range(n))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@FEW
@given(ranks=st.integers(1, 9), other=st.integers(1, 9), batch=st.integers(9, 40), step=st.integers(0, 20))
def test_the_global_batch_is_the_same_on_any_number_of_ranks(ranks, other, batch, step):
    ids = samples_of_step(step, batch, 77, 0)
    for world in (ranks, other):
        rows = [ids[share(r, world, batch).start:share(r, world, batch).stop] for r in range(world)]
        assert np.array_equal(np.concatenate(rows), ids)


def test_shares_agree_with_torchs_own_split():
    cut = torch.arange(11).tensor_split(4)
    assert [list(share(r, 4, 11)) for r in range(4)] == [part.tolist() for part in cut]


@pytest.mark.parametrize("call", [lambda: samples_of_step(-1, 4, 10, 0), lambda: samples_of_step(0, 0, 10, 0),
                                  lambda: share(3, 3, 10), lambda: share(-1, 3, 10)])
def test_a_step_a_batch_or_a_rank_that_cannot_be_is_refused(call):
    with pytest.raises(BatchError):
        call()


def test_no_samples_is_an_error_that_says_why():
    with pytest.raises(DataError, match="no samples"):
        samples_of_step(0, 4, 0, 0)
