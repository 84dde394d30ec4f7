import math

import pytest
import torch

from rankloom.shard.norm import ROW, TOGETHER, norm_of

CLOSE = 4096 / 16 * 2**-24   # a row of 4096 is added up in 16 running sums or more, each addition off by half an eps of 2^-23 at most


def test_the_norm_of_much_in_fp32_is_as_exact_as_that_of_little():
    x = torch.rand(40_000_003, generator=torch.Generator().manual_seed(0))
    exact = sum(piece.double().square().sum() for piece in x.split(ROW)).sqrt()
    assert (norm_of(x) / exact - 1).abs() < CLOSE
    assert (torch.linalg.vector_norm(x) / exact - 1).abs() > 10 * CLOSE   # while this holds, the file is needed


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_every_norm_of_every_format_is_that_of_the_numbers_in_fp64(dtype, order):
    x = torch.randn(3, ROW * TOGETHER + 1, generator=torch.Generator().manual_seed(0)).to(dtype)[:, :-1]   # in pieces, not contiguous
    exact = torch.linalg.vector_norm(x.abs().double() if x.is_complex() else x.double(), order)
    assert norm_of(x, order).dtype == torch.float64
    assert norm_of(x, order).item() == pytest.approx(exact.item(), rel=1e-12 if dtype in (torch.float64, torch.complex128) else CLOSE)


def test_the_norm_of_nothing_is_zero_and_that_of_one_its_magnitude():
    assert norm_of(torch.empty(0)).item() == 0.0 and norm_of(torch.tensor(-3.0)).item() == 3.0
