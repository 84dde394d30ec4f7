"""The largest values are exactly the largest, also where the sample that finds them fast is misled."""

import math

import pytest
import torch

import rankloom as rl
from rankloom.comm import sparse
from rankloom.comm.sparse import SAMPLED, TopK, absorb


@pytest.fixture(params=["C", "torch"])
def path(request, monkeypatch):
    """Both ways to compute."""
    if request.param == "C" and not sparse.NATIVE:
        pytest.skip("the part in C was not built")
    monkeypatch.setattr(sparse, "NATIVE", request.param == "C")


def noise(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(1))


def striped(n: int, step: int, offset: int) -> torch.Tensor:
    """Large at every `step`-th place: a sample with the same stride sees either nothing else or nothing of it."""
    x = noise(n) * 1e-3
    x[offset::step] += 5.0
    return x


@pytest.mark.parametrize("x", [
    noise(1000), noise(SAMPLED * 5), noise(SAMPLED * 5 + 3), striped(SAMPLED * 4, 4, 0), striped(SAMPLED * 4, 4, 1),
    torch.zeros(SAMPLED * 2), torch.ones(SAMPLED * 3), noise(SAMPLED * 2).pow(9),
], ids=["few", "many", "uneven", "sample sees only large", "sample sees only small", "zeros", "equal", "heavy tails"])
@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 1.0])
def test_the_largest_of_values_and_errors_are_those_of_a_full_search(path, x, share):
    k, error = max(1, int(len(x) * share)), noise(len(x)).roll(1) * x.abs().mean()
    total = x + error
    found = absorb(x := x.clone(), error, k).long()
    assert torch.equal(x, total) and len(found.unique()) == k
    assert torch.equal(x[found].abs().sort().values, x.abs().topk(k).values.sort().values)


@pytest.mark.parametrize("n", [1000, SAMPLED * 3])
def test_what_is_not_finite_is_the_largest(path, n):
    x = noise(n) * 1e30
    places = [7, n // 2, n - 1]
    x[places[0]], x[places[1]], x[places[2]] = math.nan, -math.inf, math.inf
    assert sorted(absorb(x, torch.zeros(n), 3).tolist()) == places


def test_a_hundredth_is_sent_rounded_up():
    def body(world):
        return [TopK().bill(n, world).sent // 8 for n in (0, 1, 100, 101, 700)]   # 700 * 0.01 is more than 7

    assert rl.simulate(2, body) == [[0, 1, 1, 2, 7]] * 2


@pytest.mark.parametrize("p", [2, 3])
def test_the_sum_holds_what_each_rank_sent_and_the_rest_waits(path, p):
    n = 300   # k is 3
    def body(world):
        reduce, x = TopK(), torch.zeros(n)
        x[:5] = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0]) * (world.rank + 1)
        first = reduce(x, world).clone()
        return first[:5].tolist(), reduce(torch.zeros(n), world)[:5].tolist()

    total = p * (p + 1) / 2
    for first, second in rl.simulate(p, body):
        assert first == [5 * total, 4 * total, 3 * total, 0, 0] and second == [0, 0, 0, 2 * total, total]


def test_ranks_may_send_different_places_and_more_non_finite_values_than_fit_leave_nothing_behind():
    def body(world):
        reduce, x = TopK(), torch.zeros(100)   # k is 1
        x[world.rank] = 1.0
        apart = reduce(x, world)[:3].tolist()
        sick = reduce(torch.full((100,), math.nan if world.rank else 1.0), world)
        return apart, sick.isnan().sum().item(), reduce._error.isfinite().all().item()

    assert rl.simulate(2, body) == [([1.0, 1.0, 0.0], 100, True)] * 2


def test_a_buffer_whose_places_do_not_fit_32_bits_is_refused_in_words():
    def body(world):
        with pytest.raises(rl.ConfigError, match="2147483649 values has more than 2147483648; compress in another way"):
            TopK()._sum(torch.empty(sparse.MOST + 1, device="meta"), world)

    rl.simulate(2, body)


@pytest.mark.skipif(not sparse.NATIVE, reason="the part in C was not built")
def test_c_refuses_buffers_of_the_wrong_size():
    x, places = torch.zeros(8).numpy(), torch.zeros(8, dtype=torch.int32).numpy()
    with pytest.raises(ValueError, match="have 32, 32 and 32 bytes"):
        sparse._sparse.absorb(x, x, 1.0, places)
