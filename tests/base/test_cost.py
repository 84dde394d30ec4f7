"""Bills add, and the backend's bills are those of the textbook."""

from functools import partial

import pytest

import rankloom as rl
from rankloom.base.cost import KEPT, Path, all_gather_bill, all_reduce_bill, broadcast_bill, scatter_bill


def test_bills_add_field_by_field_and_multiply():
    total = rl.Bill(1, 2) + rl.Bill(10, 20)
    assert (total.sent, total.messages) == (11, 22)
    assert rl.Bill() + total == total
    assert total * 3 == total + total + total and total * 0 == rl.Bill()


def test_a_bill_is_equal_to_what_a_ledger_counts():
    counted, bill = (2, 8), rl.Bill(sent=8, messages=2)
    assert counted == bill == counted and hash(counted) == hash(bill)
    assert bill != (8, 2) and bill != (2, 8, 0, 0) and bill != 8
    for more in (rl.Bill(9, 2), rl.Bill(8, 3)):
        assert counted != more != bill


def test_paths_add_field_by_field():
    assert Path(1, 2, 3) + Path(10, 20, 30) == Path(steps=11, bytes=22, added=33)
    assert Path() + Path(1, 2, 3) == Path(1, 2, 3)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
def test_an_all_reduce_costs_a_reduce_scatter_and_an_all_gather(p):
    n = 24 * p
    parts = scatter_bill(n, p) + all_gather_bill(n // p, p)
    assert all_reduce_bill(n, p) == parts


def test_one_rank_pays_nothing():
    assert all_reduce_bill(80, 1) == scatter_bill(80, 1) == all_gather_bill(80, 1) == broadcast_bill(80, 1, is_root=True) == rl.Bill()


@pytest.mark.parametrize("bill", [all_reduce_bill, scatter_bill, all_gather_bill, partial(broadcast_bill, is_root=True)])
def test_a_run_with_a_new_size_in_every_step_does_not_pile_up_bills(bill):
    kept = getattr(bill, "func", bill)
    for nbytes in range(2 * KEPT):
        bill(nbytes, 2)
    assert kept.cache_info().currsize <= KEPT


def test_only_the_root_of_a_broadcast_pays():
    assert broadcast_bill(8, 4, is_root=True) == rl.Bill(sent=24, messages=3)
    assert broadcast_bill(8, 4, is_root=False) == rl.Bill()


def test_an_all_reduce_is_nearly_independent_of_the_number_of_ranks():
    assert all_reduce_bill(1000, 1000).sent < 2 * 1000
    assert all_reduce_bill(1000, 2).sent == 1000
