"""Numbers by place: each by itself, and together as if drawn by chance."""

import math

import pytest
import torch

from rankloom.base.counter_rng import coins, line_keys

ROWS, LINES, COLUMNS = 32, 64, 256


def table(seed: int = 3) -> torch.Tensor:
    """float64 [rows, lines, columns], uniform in -0.5 to 0.5"""
    return coins(line_keys(seed, range(ROWS), torch.arange(LINES)), COLUMNS).double() / 2**32


def expect_chance(mean: torch.Tensor, of: int, deviation: float) -> None:
    """That a mean of so many independent numbers around 0 is one."""
    assert abs(mean.item()) < 5 * deviation / math.sqrt(of)


def test_a_number_is_the_same_whatever_is_drawn_with_it():
    whole = coins(line_keys(3, range(2, 9), torch.arange(50)), 40)
    some = coins(line_keys(3, range(4, 6), torch.tensor([[7], [31]])), 9)
    assert torch.equal(some, whole[2:4, [7, 31], :9].unsqueeze(-2))


def test_known_numbers_stay_what_they_are():
    """Written down on the first day: other numbers would change every run that goes on with a newer version."""
    assert coins(line_keys(1, range(5, 6), torch.tensor([2])), 3).tolist() == [[[1739244454, 1321712959, -1662021950]]]


@pytest.mark.parametrize("moment", [1, 2, 3, 4])
def test_moments_are_those_of_the_uniform_distribution(moment):
    expected = 0.5 ** moment / (moment + 1) if moment % 2 == 0 else 0.0
    deviation = math.sqrt(0.5 ** (2 * moment) / (2 * moment + 1) - expected**2)
    expect_chance((table() ** moment).mean() - expected, ROWS * LINES * COLUMNS, deviation)


@pytest.mark.parametrize("bit", range(32))
def test_every_bit_is_a_fair_coin(bit):
    ones = (coins(line_keys(3, range(ROWS), torch.arange(LINES)), COLUMNS) >> bit) & 1
    expect_chance(ones.double().mean() - 0.5, ones.numel(), 0.5)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("lag", [1, 2, 3, 8, 16])
def test_neighbours_are_independent(dim, lag):
    x = table()
    near, far = x.narrow(dim, 0, x.shape[dim] - lag), x.narrow(dim, lag, x.shape[dim] - lag)
    expect_chance((near * far).mean(), near.numel(), 1 / 12)


def test_sums_over_rows_lines_and_columns_are_those_of_independent_numbers():
    """Chi-square of the sums along each dim, whose mean is their number."""
    x = table() * math.sqrt(12)
    for dim in range(3):
        sums = x.sum(dim) / math.sqrt(x.shape[dim])
        expect_chance((sums**2).mean() - 1, sums.numel(), math.sqrt(2))


def test_another_seed_gives_other_numbers():
    expect_chance((table(3) * table(4)).mean(), ROWS * LINES * COLUMNS, 1 / 12)
    assert not torch.isin(table(3)[0, :4], table(4)[0, :4]).any()
