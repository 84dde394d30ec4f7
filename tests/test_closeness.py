"""The measure that the equivalence tests go by."""

import math

import pytest
import torch

from closeness import error, expect_close, numbered


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_error_is_in_units_of_the_largest_element_and_zeros_may_be_compared(dtype):
    truth = torch.tensor([-4.0, 1.0, 0.0], dtype=dtype)
    assert error(truth + torch.tensor([0.0, 0.0, 0.5], dtype=dtype), truth) == 0.125
    assert error(truth * 0, truth * 0) == error(truth[:0], truth[:0]) == 0.0


@pytest.mark.parametrize(("mine", "truth"), [(math.nan, 1.0), (1.0, math.nan), (math.nan, math.nan), (math.inf, 1.0)])
def test_a_nan_in_any_place_is_never_close(mine, truth):
    for at in range(3):
        ours, theirs = numbered("loss", [1.0] * 3), numbered("loss", [1.0] * 3)
        ours[f"loss {at}"].fill_(mine), theirs[f"loss {at}"].fill_(truth)
        with pytest.raises(AssertionError, match=f"loss {at} is off by"):
            expect_close(ours, theirs, 1e300)


def test_names_shapes_dtypes_and_what_is_absent_must_agree():
    for mine in ({}, {"a": torch.ones(2)}, {"a": torch.ones(1, dtype=torch.float64)}, {"a": None}, {"a": torch.ones(1), "b": None}):
        with pytest.raises(AssertionError):
            expect_close(mine, {"a": torch.ones(1)}, 1.0)
    assert expect_close({"a": torch.ones(1), "b": None}, {"a": torch.ones(1), "b": None}, 0.0) == 0.0
