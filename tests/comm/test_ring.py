"""The ring: a proof by histories that every chunk travels as it should. What all algorithms promise is in test_algorithms.py."""

from collections import Counter

import pytest
import torch

import rankloom as rl
from provenance import trace
from rankloom.base.cost import all_reduce_bill
from rankloom.comm.ring import ring_all_gather, ring_all_reduce_bill, ring_reduce_scatter


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_every_rank_ends_with_every_ranks_part_of_every_chunk_exactly_once(p):
    for rank, story in enumerate(trace(p, 19, rl.ring_all_reduce)):
        assert story.held == [Counter({(source, e): 1 for source in range(p)}) for e in range(19)]
        assert {to for to, _ in story.sent} == {(rank + 1) % p}, "only neighbours talk"
        # Reduce-scatter sends partial sums of 1, 2, ... parts; all-gather sends finished chunks only.
        assert [{len(history) for history in elements} for _, elements in story.sent] == [{k} for k in [*range(1, p), *[p] * (p - 1)]]


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_the_halves_of_the_ring_talk_to_neighbours_only_and_send_what_they_should(p):
    for rank, story in enumerate(trace(p, 19, ring_reduce_scatter)):
        assert {to for to, _ in story.sent} == {(rank + 1) % p}
        assert [{len(history) for history in elements} for _, elements in story.sent] == [{k} for k in range(1, p)]
    for rank, story in enumerate(trace(p, 2, ring_all_gather)):
        assert [(to, elements) for to, elements in story.sent] == [
            ((rank + 1) % p, [Counter({((rank - hop) % p, e): 1}) for e in range(2)]) for hop in range(p - 1)]


@pytest.mark.parametrize("p", [2, 3, 4])
def test_the_order_of_addition_is_the_way_around_the_ring(p):
    """These are the bits that training had before, and has."""
    wholes = [torch.randn(4 * p, generator=torch.Generator().manual_seed(rank)) for rank in range(p)]
    expected = []
    for chunk in range(p):
        total = wholes[chunk].chunk(p)[chunk]
        for hop in range(1, p):
            total = total + wholes[(chunk + hop) % p].chunk(p)[chunk]
        expected.append(total)
    for result in rl.simulate(p, lambda world: rl.ring_all_reduce(wholes[world.rank].clone(), world)):
        assert torch.equal(result, torch.cat(expected))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("n", [7, 60])
def test_the_bills_of_all_ranks_together_are_what_the_docstring_says(p, n):
    bills = [ring_all_reduce_bill(n, p, itemsize=4, rank=rank) for rank in range(p)]
    assert sum(bill.sent for bill in bills) == 2 * n * (p - 1) * 4
    assert {bill.messages for bill in bills} == {2 * (p - 1)}
    if n % p == 0:
        assert set(bills) == {all_reduce_bill(4 * n, p)}


def test_a_gather_into_a_buffer_that_does_not_fit_names_what_would():
    def body(world):
        with pytest.raises(rl.ShapeMismatch, match=rf"rank {world.rank}: ring_all_gather .*x is \(2, 3\) torch.float32, "
                                                   r"expected \([32], 3\) torch.float64: this rank's piece of out \(5, 3\)"):
            ring_all_gather(torch.zeros(2, 3), world, out=torch.zeros(5, 3, dtype=torch.float64))

    rl.simulate(2, body)


def test_a_gather_into_the_buffer_that_holds_the_piece_needs_no_other():
    def body(world):
        out = torch.full((5,), -1.0)
        mine = out.tensor_split(2)[world.rank].fill_(world.rank)
        return ring_all_gather(mine, world, out=out).tolist()

    assert rl.simulate(2, body) == [[0, 0, 0, 1, 1]] * 2
