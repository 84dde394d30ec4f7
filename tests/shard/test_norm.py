import math

import pytest
import torch

from rankloom.shard import norm
from rankloom.shard.norm import ROW, TOGETHER, norm_of, norms_of

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


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("largest", [1e-38, 1e-24, 1e-20, 1e-15, 1e15, 1e20, 3e38])
def test_a_norm_is_that_in_fp64_also_where_powers_and_sums_leave_fp32(largest, dtype, order):
    for count in (3, ROW + 7):
        x = (torch.linspace(-1, 1, count) * largest).to(dtype)
        assert norm_of(x, order).item() == pytest.approx(torch.linalg.vector_norm(x.double(), order).item(), rel=CLOSE, abs=0)


def test_the_norm_of_what_is_not_finite_is_not():
    for bad in (math.nan, math.inf):
        assert not norm_of(torch.tensor([1.0, bad])).isfinite() and not norm_of(torch.tensor([bad, *ROW * [1.0]])).isfinite()


def test_the_norm_of_nothing_is_zero_and_that_of_one_its_magnitude():
    assert norm_of(torch.empty(0)).item() == 0.0 and norm_of(torch.tensor(-3.0)).item() == 3.0


@pytest.mark.parametrize("together", [True, False])
def test_the_norms_of_many_are_those_of_each(together, monkeypatch):
    """On a CPU the kernels for many tensors are loops over them; that a GPU's are taken is for tests there."""
    monkeypatch.setattr(norm, "_goes_together", lambda tensors: together)
    draw = torch.Generator().manual_seed(0)
    many = [torch.randn(size, generator=draw).to(dtype) for size in ((3, 5), (), (7,), (0,)) for dtype in (torch.float32, torch.bfloat16)]
    many.append(torch.randn(5, 3, generator=draw).t())
    found = norms_of(many)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.stack([x.double().norm() for x in many]), rtol=CLOSE, atol=0)


def test_many_go_together_on_a_device_only_and_in_formats_that_fp32_holds():
    on = lambda device, dtype=torch.float32: torch.empty(2, device=device, dtype=dtype)
    assert norm._goes_together([on("meta"), on("meta", torch.bfloat16)])
    assert not norm._goes_together([on("meta"), on("cpu")])
    assert not any(norm._goes_together([on("meta", dtype)]) for dtype in (torch.float64, torch.complex64))
