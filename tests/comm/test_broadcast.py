"""Broadcasts from any root, and how long buffers are cut for the chain."""

from collections import Counter

import pytest
import torch

import rankloom as rl
from provenance import trace
from rankloom.comm.broadcast import (
    binomial_broadcast,
    binomial_broadcast_bill,
    block_count,
    chain_broadcast,
    chain_broadcast_bill,
    chain_broadcast_path,
)
from rankloom.comm.tree import double_tree_all_reduce

WAYS = [(binomial_broadcast, binomial_broadcast_bill), (chain_broadcast, chain_broadcast_bill)]


@pytest.mark.parametrize(("run", "bill"), WAYS)
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_any_root_reaches_all_and_each_rank_pays_its_bill(run, bill, p):
    def body(world, root):
        before = (world.ledger.bytes, world.ledger.messages)
        x = run(torch.arange(6).view(2, 3) + 10 * world.rank, world, root)
        return x, rl.Bill(sent=world.ledger.bytes - before[0], messages=world.ledger.messages - before[1])

    for rank, results in enumerate(rl.simulate(p, lambda world: [body(world, root) for root in range(p)])):
        for root, (x, paid) in enumerate(results):
            assert torch.equal(x, torch.arange(6).view(2, 3) + 10 * root)
            assert paid == bill(6, p, 8, rank, root=root)


@pytest.mark.parametrize(("run", "bill"), WAYS)
@pytest.mark.parametrize("root", [-1, 3, None])
def test_a_root_outside_the_group_is_refused_as_by_the_backend(run, bill, root):
    """It was taken modulo the number of ranks: a rank of the world counted as some rank of a smaller group."""
    def body(world):
        with pytest.raises(rl.ConfigError, match=rf"rank {world.rank}: root in group 'world': there is no rank {root} in a group of 3"):
            run(torch.ones(2), world, root)

    rl.simulate(3, body)


@pytest.mark.parametrize("root", [0, 2])
def test_every_rank_but_the_root_receives_every_element_exactly_once(root):
    for run in (binomial_broadcast, lambda x, group, root: chain_broadcast(x, group, root, block=24)):
        stories = trace(5, 7, lambda x, group, run=run: run(x, group, root))
        got = {rank: Counter() for rank in range(5)}
        for story in stories:
            for to, elements in story.sent:
                got[to] += sum(elements, Counter())
        assert got == {rank: Counter() if rank == root else Counter({(root, e): 1 for e in range(7)}) for rank in range(5)}


def test_the_chain_sends_block_after_block_to_the_next_rank_only():
    stories = trace(4, 10, lambda x, group: chain_broadcast(x, group, 1, block=32))
    assert [[(to, len(elements)) for to, elements in story.sent] for story in stories] == [
        [], [(2, 4), (2, 3), (2, 3)], [(3, 4), (3, 3), (3, 3)], [(0, 4), (0, 3), (0, 3)]]


@pytest.mark.parametrize(("n", "itemsize", "block", "blocks"), [
    (0, 4, 16, 1), (1, 8, 4, 1), (4, 4, 16, 1), (5, 4, 16, 2), (3, 8, 1, 3), (9, 1, 4, 3)])
def test_blocks_are_as_few_as_fit_and_never_smaller_than_an_element(n, itemsize, block, blocks):
    assert block_count(n, itemsize, block) == blocks


@pytest.mark.parametrize("in_blocks", [chain_broadcast, double_tree_all_reduce])
def test_blocks_without_bytes_are_refused(in_blocks):
    with pytest.raises(rl.ConfigError, match="block=0, expected a number of bytes, 1 or more"):
        rl.simulate(2, lambda world: in_blocks(torch.ones(4), world, block=0))


def test_for_a_long_buffer_the_chain_takes_hardly_longer_with_more_ranks():
    long = 64 << 20
    assert chain_broadcast_path(long, 2).bytes == long
    assert chain_broadcast_path(long, 64).bytes < 1.3 * long
