"""The compressed reduce-scatter: every term is rounded once, what is lost comes in a later step, and it sends what its bill says."""

import math

import pytest
import torch

import rankloom as rl
from rankloom.comm.compress import _FORMATS
from rankloom.comm.quantize import Format
from rankloom.comm.scatter import CompressedScatter

EACH = [0, 1, 127, 600]   # values of a slice


def values(rank: int, p: int, each: int) -> torch.Tensor:
    return torch.randn(p * each, generator=torch.Generator().manual_seed(rank)) * (1 + rank)


def sent(form: Format, x: torch.Tensor) -> torch.Tensor:
    """What arrives of `x`, without an error of earlier steps."""
    records, back = torch.zeros(-(-len(x) // form.block), form.record, dtype=torch.uint8), torch.empty_like(x)
    form.quantise(x, torch.zeros_like(x), records)
    form.dequantise(records, back)
    return back


@pytest.mark.parametrize("name", _FORMATS)
@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("each", EACH)
def test_the_first_sum_is_that_of_the_own_slice_and_the_rounded_ones_to_the_bit(name, p, each):
    form = _FORMATS[name]

    def body(world):
        return CompressedScatter(form)(values(world.rank, p, each), torch.full((each,), math.nan), world)

    for rank, found in enumerate(rl.simulate(p, body)):
        mine = slice(rank * each, (rank + 1) * each)
        expected = values(rank, p, each)[mine]
        for other in range(p):
            expected = expected + sent(form, values(other, p, each)[mine]) if other != rank else expected
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", _FORMATS)
@pytest.mark.parametrize("piece", [None, 256])
def test_what_is_sent_and_what_is_remembered_add_up_to_the_values(name, piece):
    """Of a sum over steps, only the last step's errors are missing."""
    p, each, steps = 3, 600, 20

    def body(world):
        scatter, total = CompressedScatter(_FORMATS[name], piece), torch.zeros(each)
        for step in range(steps):
            total += scatter(values(world.rank + 10 * step, p, each), torch.empty(each), world)
        return total, scatter._errors

    found = rl.simulate(p, body)
    for rank, (total, _) in enumerate(found):
        mine = slice(rank * each, (rank + 1) * each)
        exact = torch.stack([values(other + 10 * step, p, each)[mine] for step in range(steps) for other in range(p)]).double().sum(0)
        owed = torch.stack([errors[rank - (rank > other)] for other, (_, errors) in enumerate(found) if other != rank]).double().sum(0)
        assert owed.any()
        # Every addition in fp32 rounds by half a unit of a number below 2**12: 60 terms of 60 at most, and errors below them.
        torch.testing.assert_close(total.double() + owed, exact, rtol=0, atol=3 * steps * 2**12 * 2**-24)


@pytest.mark.parametrize("name", _FORMATS)
@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("piece", [None, 256])
@pytest.mark.parametrize("each", EACH)
def test_it_sends_what_its_bill_says(name, p, piece, each):
    def body(world):
        scatter, before = CompressedScatter(_FORMATS[name], piece), (world.ledger.messages, world.ledger.bytes)
        scatter(values(world.rank, p, each), torch.empty(each), world)
        return (world.ledger.messages - before[0], world.ledger.bytes - before[1]), scatter.bill(p * each, p)

    for paid, bill in rl.simulate(p, body):
        assert paid == bill


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_sum_may_be_written_over_the_own_slice_and_the_rest_stays(dtype):
    def body(world):
        x = values(world.rank, 2, 300).to(dtype)
        apart, mine = CompressedScatter(_FORMATS["int8"])(x.clone(), torch.empty(300, dtype=dtype), world), x[300 * world.rank:][:300]
        before, other = x.clone(), slice(300 * (1 - world.rank), 300 * (2 - world.rank))
        found = CompressedScatter(_FORMATS["int8"])(x, mine, world)
        return found is mine, torch.equal(mine, apart), torch.equal(x[other], before[other])

    assert rl.simulate(2, body) == [(True, True, True)] * 2


@pytest.mark.parametrize("name", _FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_arrives_and_is_not_remembered(name, bad):
    def body(world):
        scatter, x = CompressedScatter(_FORMATS[name]), values(world.rank, 2, 600)
        if world.rank == 0:
            x[700] = bad   # in the slice of rank 1
        first = scatter(x, torch.empty(600), world)
        return first.isfinite().all().item(), scatter(values(world.rank, 2, 600), torch.empty(600), world).isfinite().all().item()

    assert rl.simulate(2, body) == [(True, True), (False, True)]


def test_another_size_is_refused():
    def body(world):
        scatter = CompressedScatter(_FORMATS["int8"])
        with pytest.raises(rl.ShapeMismatch, match="9 values cannot be dealt to 2 ranks as 4 each"):
            scatter(torch.zeros(9), torch.zeros(4), world)
        scatter(torch.zeros(8), torch.zeros(4), world)
        with pytest.raises(rl.ShapeMismatch, match=f"rank {world.rank}: .*remembers errors of 4 values for each of 1 others"):
            scatter(torch.zeros(12), torch.zeros(6), world)

    rl.simulate(2, body)
