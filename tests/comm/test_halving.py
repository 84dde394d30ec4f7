"""Recursive halving and doubling: who sits where, and that a power of two of ranks pays what a ring pays in fewer steps."""

import pytest

import rankloom as rl
from provenance import trace
from rankloom.base.cost import all_gather_bill, all_reduce_bill, scatter_bill
from rankloom.comm.halving import (
    Seats,
    doubling_all_gather_bill,
    halving_all_reduce,
    halving_all_reduce_bill,
    halving_all_reduce_path,
    halving_reduce_scatter_bill,
)
from rankloom.comm.operands import chunk_bounds
from rankloom.comm.ring import ring_all_reduce_path


@pytest.mark.parametrize("p", [*range(1, 20), 31, 32, 33])
def test_every_rank_sits_or_is_the_guest_of_its_right_neighbour(p):
    seats = Seats(p)
    assert seats.count & (seats.count - 1) == 0 and seats.count <= p < 2 * seats.count
    assert [seats.rank(seat) for seat in range(seats.count)] == [rank for rank in range(p) if seats.seat(rank) is not None]
    assert [seats.seat(seats.rank(seat)) for seat in range(seats.count)] == list(range(seats.count))
    assert {seats.guest_of(rank) for rank in range(p)} - {None} == {rank for rank in range(p) if seats.seat(rank) is None}
    assert all(seats.guest_of(rank) in (None, rank - 1) for rank in range(p))


@pytest.mark.parametrize("rows", [0, 1, 6, 13, 64])
@pytest.mark.parametrize("p", range(1, 10))
def test_a_seat_holds_its_ranks_rows_and_those_of_its_guest(p, rows):
    seats, by_rank = Seats(p), chunk_bounds(rows, p)
    starts = seats.row_bounds(rows)
    for seat in range(seats.count):
        rank, guest = seats.rank(seat), seats.guest_of(seats.rank(seat))
        assert starts[seat] == by_rank[rank if guest is None else guest] and starts[seat + 1] == by_rank[rank + 1]


@pytest.mark.parametrize("p", [1, 2, 4, 8, 16])
def test_a_power_of_two_of_ranks_pays_the_bytes_of_a_ring_in_log_p_messages(p):
    rounds = p.bit_length() - 1
    for rank in range(p):
        bills = [halving_all_reduce_bill(16 * p, p, 4, rank), halving_reduce_scatter_bill(16 * p, p, 4, rank),
                 doubling_all_gather_bill(16 * p, p, 4, rank)]
        best = [all_reduce_bill(64 * p, p), scatter_bill(64 * p, p), all_gather_bill(64, p)]
        assert [bill.sent for bill in bills] == [bill.sent for bill in best]
        assert [bill.messages for bill in bills] == [2 * rounds, rounds, rounds]
    mine, ring = halving_all_reduce_path(64 * p, p), ring_all_reduce_path(64 * p, p)
    assert (mine.bytes, mine.added) == (ring.bytes, ring.added) and mine.steps == 2 * rounds


def test_eight_ranks_first_talk_across_four_then_two_then_one_and_back():
    for rank, story in enumerate(trace(8, 16, halving_all_reduce)):
        assert [to ^ rank for to, _ in story.sent] == [4, 2, 1, 1, 2, 4]
        assert [len(elements) for _, elements in story.sent] == [8, 4, 2, 2, 4, 8]
        assert [{len(history) for history in elements} for _, elements in story.sent] == [{1}, {2}, {4}, {8}, {8}, {8}]


def test_of_five_ranks_the_first_is_a_guest_that_sends_all_once_and_gets_all_back():
    stories = trace(5, 8, halving_all_reduce)
    assert [(to, len(elements)) for to, elements in stories[0].sent] == [(1, 8)]
    assert (stories[1].sent[-1][0], {len(history) for history in stories[1].sent[-1][1]}) == (0, {5})
    assert all(to != 0 for story in stories[2:] for to, _ in story.sent)


def test_one_rank_alone_sends_nothing():
    assert halving_all_reduce_bill(7, 1, 4) == halving_reduce_scatter_bill(7, 1, 4) == doubling_all_gather_bill(7, 1, 4) == rl.Bill()
