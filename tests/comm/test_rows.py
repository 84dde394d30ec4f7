"""Sums by rows equal dense sums, whatever stands in the rows, and cost what their bill says."""

import math

import pytest
import torch

import rankloom as rl
from rankloom.comm.rows import BITS, rows_are_cheaper, sum_rows, sum_rows_bill, touched_rows

NAN, INF, TINY = math.nan, math.inf, 1e-45   # the smallest fp32 above zero: its square is zero
V, D = 40, 3


def gradient(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rank r touches r + 1 rows: row 0 with NaN on rank 1 only, some rows on every rank."""
    x = torch.zeros(V, D, dtype=dtype)
    for k in range(rank + 1):
        x[(7 * k + 3 * (k % 2) * rank) % V] = torch.arange(1.0, D + 1).to(dtype) * (rank + 1 + k)
    return x


def reduce_both_ways(world: rl.World, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, rl.Bill, int]:
    dense = world.all_reduce(x.clone())
    touched = touched_rows(x)
    rows = int(world.all_reduce(torch.tensor(len(touched)), "max"))
    before = (world.ledger.bytes, world.ledger.messages)
    by_rows = sum_rows(x, touched, rows, world)
    paid = rl.Bill(sent=world.ledger.bytes - before[0], messages=world.ledger.messages - before[1])
    assert by_rows is x
    return dense, by_rows, paid, rows


@pytest.mark.parametrize("row", [[NAN, 0, 0], [0, NAN, 0], [-INF, 0, 0], [0, 0, TINY], [-TINY, 0, 0], [0, -1, 0], [-2, -1, -3], [1, -1, 0]])
def test_a_row_that_holds_anything_is_touched(row):
    x = torch.zeros(5, 3)
    x[2] = torch.tensor(row)
    assert touched_rows(x).tolist() == [2]


def test_rows_of_zeros_of_either_sign_are_not_touched():
    x = torch.zeros(4, 3)
    x[1] = -0.0
    assert touched_rows(x).tolist() == []
    assert touched_rows(torch.ones(3, 2)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_the_sum_by_rows_is_the_dense_sum_and_is_charged(p, dtype):
    for dense, by_rows, paid, rows in rl.simulate(p, lambda world: reduce_both_ways(world, gradient(world.rank, dtype))):
        assert torch.equal(dense, by_rows)   # small whole numbers: exact in every format and order
        assert paid == sum_rows_bill(rows, D, p, dtype.itemsize)


def test_the_fillers_of_a_shorter_list_do_not_change_row_0():
    def body(world):
        x = torch.zeros(V, D)
        x[0] = 5.0 * (world.rank == 0)
        x[4:8] = 1.0 * (world.rank == 1)
        return reduce_both_ways(world, x)

    for dense, by_rows, _, rows in rl.simulate(3, body):
        assert rows == 4 and torch.equal(dense, by_rows) and by_rows[0].tolist() == [5.0] * D


def test_nan_infinity_and_the_smallest_number_travel_too():
    def body(world):
        x = torch.zeros(V, D)
        x[3 + world.rank] = torch.tensor([[NAN, 0, 1], [INF, 0, TINY]][world.rank])
        return reduce_both_ways(world, x)

    for dense, by_rows, _, _ in rl.simulate(2, body):
        torch.testing.assert_close(dense, by_rows, rtol=0, atol=0, equal_nan=True)
        assert by_rows[3].isnan().any() and by_rows[4].isinf().any() and by_rows[4, 2] == TINY


def test_a_scale_multiplies_the_sum_once():
    def body(world):
        x = gradient(world.rank)
        return sum_rows(x, touched_rows(x), 3, world, scale=0.5), gradient(world.rank)

    results = rl.simulate(3, body)
    assert torch.equal(results[0][0], 0.5 * sum(x for _, x in results))


def test_a_row_number_survives_in_the_bits_of_every_float():
    """Row 1 is a denormal as an fp32, the last of these is a NaN: a sum would lose them, a gather may not."""
    for dtype, bits in BITS.items():
        rows = torch.tensor([0, 1, 2, 2**23, 2**31 - 1]).to(bits)
        (got, _) = rl.simulate(2, lambda w, rows=rows, dtype=dtype, bits=bits: w.all_gather(rows.view(dtype)).view(bits))
        assert torch.equal(got, rows.repeat(2))


def test_an_embedding_that_no_rank_touched_stays_zero():
    for dense, by_rows, paid, rows in rl.simulate(2, lambda world: reduce_both_ways(world, torch.zeros(V, D))):
        assert rows == 0 and paid.sent == 0 and torch.equal(dense, by_rows)


def test_every_rank_gets_the_same_bits():
    def body(world):
        x = torch.zeros(V, D)
        x[5] = torch.randn(D, generator=torch.Generator().manual_seed(world.rank)) * 10.0 ** world.rank
        return reduce_both_ways(world, x)[1]

    first, *others = rl.simulate(4, body)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_rows_are_chosen_exactly_where_they_cost_less(ranks):
    x = torch.zeros(V, D)
    cheaper = [rows_are_cheaper(rows, x, ranks) for rows in range(V + 1)]
    assert cheaper[0] and not cheaper[V]
    turn = cheaper.index(False)
    assert not any(cheaper[turn:])
    dense = 2 * x.nbytes * (ranks - 1) // ranks
    assert sum_rows_bill(turn - 1, D, ranks, 4).sent < dense <= sum_rows_bill(turn, D, ranks, 4).sent
