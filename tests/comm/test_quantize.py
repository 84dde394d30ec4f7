"""Blocks of 8, 4 and 1 bits: exact accounts, bounds, the same bits in C and in torch, nothing non-finite is lost."""

import math

import pytest
import torch

from rankloom.comm import quantize as q
from rankloom.comm.quantize import INT4, INT8, ONE_BIT, Blocks

STEPS = pytest.mark.parametrize("form", [INT8, INT4], ids=["8 bits", "4 bits"])
FORMATS = pytest.mark.parametrize("form", [INT8, INT4, ONE_BIT], ids=lambda form: f"{form.bits} bits")
LENGTHS = [0, 1, 31, 127, 128, 129, 255, 256, 257, 1000, 4096]
NAN, INF = math.nan, math.inf


@pytest.fixture(params=["C", "torch"])
def path(request, monkeypatch):
    """Both ways to compute."""
    if request.param == "C" and not q.NATIVE:
        pytest.skip("the part in C was not built")
    monkeypatch.setattr(q, "NATIVE", request.param == "C")
    return request.param


def values(n: int, seed: int = 0, spread: bool = True) -> torch.Tensor:
    """Numbers of very different size from block to block."""
    draw = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-6, 6, (n // 100 + 1,), generator=draw).repeat_interleave(100)[:n] if spread else 1.0
    return torch.randn(n, generator=draw) * size


def records(form: Blocks, n: int) -> torch.Tensor:
    return torch.full(((-(-n // form.block)), form.record), 77, dtype=torch.uint8)   # whatever stood there before


def there_and_back(x: torch.Tensor, form: Blocks, error: torch.Tensor | None = None) -> torch.Tensor:
    wire, back = records(form, x.numel()), torch.full_like(x, 5.0)
    form.quantise(x, torch.zeros_like(x) if error is None else error, wire)
    form.dequantise(wire, back)
    return back


def by_block(x: torch.Tensor, form: Blocks) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % form.block)).view(-1, form.block)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, signs of zeros included; any NaN equals any other."""
    nans = a.isnan() & b.isnan()
    return torch.equal(a.masked_fill(nans, 0).view(torch.int32), b.masked_fill(nans, 0).view(torch.int32))


@STEPS
@pytest.mark.parametrize("n", LENGTHS)
def test_a_value_is_off_by_half_a_step_at_most(path, form, n):
    x = values(n)
    levels = 2 ** (form.bits - 1) - 1
    # A step is at most top/levels rounded up to the next of 2**7 bf16 fractions; the code is found with two roundings in fp32.
    step = by_block(x, form).abs().amax(1) / levels * (1 + 2**-7)
    bound = (step / 2 * (1 + levels * 2**-22))[:, None]
    assert (by_block((there_and_back(x, form) - x).abs(), form) <= bound).all()


@STEPS
def test_the_largest_magnitude_of_a_block_does_not_overflow_its_code(path, form):
    """The step is rounded up, never down, whatever the largest is."""
    tops = torch.randn(4000, generator=torch.Generator().manual_seed(3)).exp()
    x = torch.zeros(len(tops), form.block)
    x[:, 5], x[:, 6] = tops, -tops
    back = there_and_back(x.view(-1), form).view_as(x)
    assert ((back[:, 5] - tops).abs() <= tops * 2**-7).all() and torch.equal(back[:, 5], -back[:, 6])


@pytest.mark.parametrize("n", LENGTHS)
def test_one_bit_says_the_sign_and_the_mean_magnitude(path, n):
    x = values(n, spread=False)
    means = torch.cat([part.abs().mean().expand(len(part)) for part in x.split(256)])   # of a short block, over what there is
    back = there_and_back(x, ONE_BIT)
    assert torch.equal(back.signbit(), x.signbit())
    torch.testing.assert_close(back.abs(), means, rtol=2**-8, atol=0)   # bf16 keeps 8 bits of the mean


@FORMATS
@pytest.mark.parametrize("n", LENGTHS)
def test_what_is_sent_and_what_is_remembered_are_the_value_exactly_or_with_1_bit_but_for_one_rounding(path, form, n):
    x, error = values(n), values(n, seed=1) * 1e-3
    value = (x + error).double()
    back = there_and_back(x, form, error).double()
    if form.bits > 1:
        assert torch.equal(back + error.double(), value)
    assert torch.equal(error, (value - back).float())   # with 1 bit, a value far from the mean: more bits than fp32 has


@FORMATS
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("remember", [True, False])
def test_c_and_torch_compute_the_same_bits(monkeypatch, form, n, remember):
    if not q.NATIVE:
        pytest.skip("the part in C was not built")
    x = values(n)
    x[n // 2 :] *= -1
    x[n // 3 :: 7] = -0.0
    if n > 300:
        x[300] = NAN
        x[-1] = -INF
    x[600:900] = 1e-37
    x[3000:3300] = 3e38
    results = []
    for native in (True, False):
        monkeypatch.setattr(q, "NATIVE", native)
        error = values(n, seed=1) if remember else torch.zeros(n)
        wire, back = records(form, n), torch.full_like(x, 5.0)
        form.quantise(x, error, wire)
        form.dequantise(wire, back)
        inbox, summed = torch.stack([wire, wire.flip(0), wire]), records(form, n)
        padded = -(-n // form.block) * form.block
        total_error = values(padded, seed=2) if remember else torch.zeros(padded)
        form.fold(inbox, total_error, summed)
        results.append((wire, back, summed, error, total_error))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) if a.dtype == torch.uint8 else same_bits(a, b)


@FORMATS
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize(("blocks", "short"), [(0, 0), (1, 0), (3, 0), (1, 5), (3, 100)])
def test_folding_sums_in_rank_order_and_writes_the_sum_once_more_in_blocks(path, form, ranks, blocks, short):
    n = blocks * form.block - short
    inbox = torch.stack([records(form, n) for _ in range(ranks)])
    expected = torch.zeros(n)
    for rank, wire in enumerate(inbox):
        form.quantise(values(n, seed=rank), torch.zeros(n), wire)
        part = torch.empty(n)
        form.dequantise(wire, part)
        expected += part
    error, summed, wanted = torch.full((n,), 0.25), records(form, n), records(form, n)
    form.fold(inbox, error, summed)
    left = torch.full((n,), 0.25)
    form.quantise(expected, left, wanted)
    assert torch.equal(summed, wanted) and torch.equal(error, left)


@FORMATS
@pytest.mark.parametrize("poison", [NAN, INF, -INF, q.HUGE, -3.4e38])
def test_a_block_with_a_non_finite_value_comes_out_as_nan_and_leaves_what_was_remembered(path, form, poison):
    n = 3 * form.block + 5
    x, error = values(n, spread=False), torch.full((n,), 0.125)
    x[form.block + 9] = poison
    x[n - 1] = poison
    back = there_and_back(x, form, error)
    sick = torch.zeros(4, dtype=torch.bool)
    sick[1] = sick[3] = True
    assert torch.equal(by_block(back, form).isnan().any(1), sick) and by_block(back, form)[1].isnan().all()
    assert (error.view(-1)[form.block : 2 * form.block] == 0.125).all() and (error[3 * form.block :] == 0.125).all()
    assert error.isfinite().all() and not (error[: form.block] == 0.125).any()


@FORMATS
def test_a_poisoned_sum_leaves_what_was_remembered_and_ends_non_finite(path, form):
    inbox, summed = torch.stack([records(form, 2 * form.block) for _ in range(2)]), records(form, 2 * form.block)
    good, bad = values(2 * form.block, spread=False), values(2 * form.block, seed=1, spread=False)
    bad[0] = NAN
    for x, wire in zip((good, bad), inbox):
        form.quantise(x, torch.zeros_like(x), wire)
    error, back = torch.full((2 * form.block,), 0.125), torch.empty(2 * form.block)
    form.fold(inbox, error, summed)
    form.dequantise(summed, back)
    assert back[: form.block].isnan().all() and back[form.block :].isfinite().all()
    assert (error[: form.block] == 0.125).all() and not (error[form.block :] == 0.125).all()


@FORMATS
def test_just_below_what_counts_as_infinite_all_stays_finite_however_often_it_is_sent(path, form):
    x, error = torch.ones(form.block), torch.zeros(form.block)
    x[5] = q.HUGE * (1 - 2**-24)
    for _ in range(50):
        assert there_and_back(x, form, error).isfinite().all() and error.isfinite().all()
        x = torch.ones(form.block)


@FORMATS
def test_blocks_of_zeros_and_of_the_smallest_numbers_stay_finite(path, form):
    x = torch.zeros(3 * form.block)
    x[form.block : 2 * form.block] = 1e-45
    x[2 * form.block :] = -1e-38
    error = torch.zeros_like(x)
    back = there_and_back(x, form, error)
    assert back.isfinite().all() and (back[: form.block] == 0).all()
    assert torch.equal(back.double() + error.double(), x.double()), "small values are remembered, not lost"


@pytest.mark.parametrize(("form", "ratio"), [(INT8, 3.96), (INT4, 7.75), (ONE_BIT, 30.1)], ids=["8 bits", "4 bits", "1 bit"])
def test_a_record_is_as_small_as_the_docstring_says(form, ratio):
    assert form.block * 4 / form.record > ratio


@pytest.mark.skipif(not q.NATIVE, reason="the part in C was not built")
def test_c_refuses_buffers_of_the_wrong_size():
    x = torch.zeros(256).numpy()
    out = lambda n: torch.zeros(n, dtype=torch.uint8).numpy()
    for call, text in (
        (lambda: q._quantize.quantise(8, x, x, out(257)), "out has 257 bytes, expected 258"),
        (lambda: q._quantize.quantise(8, x, x[:1], out(258)), "error has 4 bytes, expected 1024"),
        (lambda: q._quantize.quantise(3, x, x, out(258)), "no format of 3 bits"),
        (lambda: q._quantize.fold(8, out(258), 2, x, out(258)), "inbox has 258 bytes, expected 516"),
        (lambda: q._quantize.fold(8, out(0), 1 << 63 - 2, x, out(4 * 258)), f"there is no inbox of {1 << 61} ranks"),
        (lambda: q._quantize.fold(8, out(0), -1, x, out(0)), "there is no inbox of -1 ranks"),
        (lambda: q._quantize.fold(8, out(516), 2, torch.zeros(257).numpy(), out(258)), "error has 1028 bytes, expected 1024"),
        (lambda: q._quantize.fold(8, out(514), 2, x, out(257)), "out has 257 bytes, expected 0"),
        (lambda: q._quantize.dequantise(4, out(66), x), "wire has 66 bytes, expected 132"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
