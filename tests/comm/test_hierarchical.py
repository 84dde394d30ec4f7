"""Two levels: little travels between nodes, and what travels there may be summed by any algorithm."""

from collections import Counter

import pytest
import torch

import rankloom as rl
from provenance import trace
from rankloom.comm.halving import halving_all_reduce, halving_all_reduce_bill
from rankloom.comm.hierarchical import (
    hierarchical_all_reduce,
    hierarchical_all_reduce_bill,
    hierarchical_all_reduce_paths,
    hierarchical_all_to_all,
    hierarchical_all_to_all_bill,
    hierarchical_all_to_all_paths,
)
from rankloom.comm.ring import ring_all_reduce_bill

EVEN, UNEVEN, MIXED = ((0, 1), (2, 3)), ((0, 1, 2), (3,), (4, 5)), ((5, 0, 2), (1, 3, 4))
LAYOUTS = [EVEN, UNEVEN, MIXED, ((0, 1, 2, 3),), ((0,), (1,), (2,)), ((3, 1), (0, 2), (7, 4), (6, 5))]


def ranks(nodes) -> int:
    return sum(map(len, nodes))


def node_of(nodes, rank: int) -> int:
    return next(at for at, node in enumerate(nodes) if rank in node)


def sent_between(nodes, run, n: int) -> list[tuple[int, int, int]]:
    """(from node, to node, elements) of every message that leaves a node."""
    return [(node_of(nodes, rank), node_of(nodes, to), len(elements)) for rank, story in enumerate(trace(ranks(nodes), n, run))
            for to, elements in story.sent if node_of(nodes, to) != node_of(nodes, rank)]


@pytest.mark.parametrize("nodes", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bfloat16])
def test_any_nodes_sum_right_and_pay_their_bill(nodes, dtype):
    wide = 2 if dtype == torch.bfloat16 else 1

    def body(world):
        x = (torch.arange(13) % 5 + world.rank).to(dtype)
        return hierarchical_all_reduce(x, world, nodes), rl.Bill(sent=world.ledger.bytes, messages=world.ledger.messages)

    p = ranks(nodes)
    for rank, (x, paid) in enumerate(rl.simulate(p, body)):
        assert torch.equal(x, (torch.arange(13) % 5 * p + sum(range(p))).to(dtype))
        assert paid == hierarchical_all_reduce_bill(13, nodes, dtype.itemsize, rank, wide=wide)


def test_between_two_even_nodes_each_rank_passes_its_own_slice_only():
    flows = Counter(sent_between(EVEN, lambda x, group: hierarchical_all_reduce(x, group, EVEN), 16))
    # A ring of two over slices of 8: each of both ranks sends 4 elements twice.
    assert flows == Counter({(0, 1, 4): 4, (1, 0, 4): 4})


def test_of_uneven_nodes_only_the_first_rank_talks_to_other_nodes():
    stories = trace(6, 12, lambda x, group: hierarchical_all_reduce(x, group, UNEVEN))
    talkers = {rank for rank, story in enumerate(stories) for to, _ in story.sent if node_of(UNEVEN, to) != node_of(UNEVEN, rank)}
    assert talkers == {0, 3, 4}


@pytest.mark.parametrize("nodes", [EVEN, UNEVEN, MIXED])
def test_the_algorithm_between_nodes_can_be_any_and_sees_the_sums_of_nodes_in_fp32(nodes):
    seen = {}

    def between(x, group):
        seen[group.ranks[group.rank]] = (x.dtype, group.ranks, x.clone())
        return halving_all_reduce(x, group)

    def body(world):
        return hierarchical_all_reduce(torch.full((6,), 2.0**world.rank).bfloat16(), world, nodes, between=between)

    results = rl.simulate(ranks(nodes), body)
    assert all((x == 2.0 ** ranks(nodes) - 1).all() for x in results)
    for rank, (dtype, members, x) in seen.items():
        assert dtype == torch.float32 and (x == sum(2.0**r for r in nodes[node_of(nodes, rank)])).all()
        assert [node_of(nodes, member) for member in members] == list(range(len(nodes)))
    assert len(seen) == (len(nodes) if nodes == UNEVEN else ranks(nodes))


@pytest.mark.parametrize("nodes", [EVEN, UNEVEN])
def test_the_result_of_the_algorithm_between_nodes_is_what_is_gathered(nodes):
    """One that returns a new tensor works too."""
    def body(world):
        return hierarchical_all_reduce(torch.zeros(5), world, nodes, between=lambda x, group: x + 3).tolist()

    assert rl.simulate(ranks(nodes), body) == [[3.0] * 5] * ranks(nodes)


def test_one_node_alone_asks_nothing_between():
    def body(world):
        return hierarchical_all_reduce(torch.ones(3), world, ((0, 1, 2),), between=lambda x, group: 1 / 0).tolist()

    assert rl.simulate(3, body) == [[3.0] * 3] * 3


def test_halving_between_nodes_is_charged_as_such():
    def body(world):
        hierarchical_all_reduce(torch.zeros(21), world, MIXED, between=halving_all_reduce)
        return rl.Bill(sent=world.ledger.bytes, messages=world.ledger.messages)

    assert rl.simulate(6, body) == [hierarchical_all_reduce_bill(21, MIXED, 4, rank, between=halving_all_reduce_bill) for rank in range(6)]


def test_much_less_leaves_a_node_than_with_a_flat_ring():
    """Four nodes of four: a flat ring's last rank of each node sends 2n 15/16 to the next node, here a rank sends 2n/4 3/4."""
    nodes = tuple(tuple(range(4 * node, 4 * node + 4)) for node in range(4))
    inside, between = hierarchical_all_reduce_paths(1 << 20, nodes)
    assert between.bytes * 5 == ring_all_reduce_bill(1 << 18, 16, 4).sent
    assert (inside.steps, between.steps) == (6, 6)


@pytest.mark.parametrize("nodes", LAYOUTS)
def test_any_nodes_deal_right_and_pay_their_bill(nodes):
    p = ranks(nodes)

    def body(world):
        x = (torch.arange(3 * p) + 100 * world.rank).unsqueeze(1).repeat(1, 2)
        return hierarchical_all_to_all(x, world, nodes), rl.Bill(sent=world.ledger.bytes, messages=world.ledger.messages)

    for rank, (x, paid) in enumerate(rl.simulate(p, body)):
        expected = torch.cat([torch.arange(3 * rank, 3 * rank + 3) + 100 * source for source in range(p)])
        assert torch.equal(x, expected.unsqueeze(1).repeat(1, 2))
        assert paid == hierarchical_all_to_all_bill(3 * p, nodes, 16, rank)


@pytest.mark.gloo
@pytest.mark.parametrize("nodes", LAYOUTS)
def test_rows_are_dealt_where_two_ranks_must_send_each_other_in_one_call(nodes, one_queue):
    """Both received first, on the one connection that two ranks have over NCCL, and waited for each other."""
    p = ranks(nodes)
    dealt = rl.simulate(p, lambda world: hierarchical_all_to_all(torch.arange(2 * p) + 100 * world.rank, world, nodes).tolist())
    assert dealt == [[100 * source + row for source in range(p) for row in (2 * rank, 2 * rank + 1)] for rank in range(p)]


@pytest.mark.parametrize("nodes", LAYOUTS)
def test_an_all_to_all_sends_one_message_for_each_pair_of_nodes_with_just_what_goes_there(nodes):
    flows = sent_between(nodes, lambda x, group: hierarchical_all_to_all(x, group, nodes), 2 * ranks(nodes))
    assert sorted(flows) == [(here, there, 2 * len(nodes[here]) * len(nodes[there]))
                             for here in range(len(nodes)) for there in range(len(nodes)) if here != there]


def test_the_messages_between_nodes_are_spread_over_the_ranks_of_a_node():
    nodes = tuple((2 * node, 2 * node + 1) for node in range(4))
    stories = trace(8, 8, lambda x, group: hierarchical_all_to_all(x, group, nodes))
    leaving = [sum(node_of(nodes, to) != node_of(nodes, rank) for to, _ in story.sent) for rank, story in enumerate(stories)]
    assert max(leaving) == 2 and sum(leaving) == 12
    assert hierarchical_all_to_all_paths(64, nodes)[1].steps == 3


@pytest.mark.parametrize("nodes", [((0, 1),), ((0, 1), (1, 2)), ((0, 1, 2), (3,)), ((0, 1, 2), ())])
@pytest.mark.parametrize("run", [hierarchical_all_reduce, hierarchical_all_to_all])
def test_nodes_that_do_not_name_each_rank_once_are_refused(run, nodes):
    def body(world):
        with pytest.raises(rl.ConfigError, match=rf"rank {world.rank}: nodes .* must name each of ranks 0..2 exactly once"):
            run(torch.zeros(3), world, nodes)
        return world.ledger.messages

    assert rl.simulate(3, body) == [0, 0, 0]


def test_unequal_shares_are_refused():
    def body(world):
        with pytest.raises(rl.ShapeMismatch, match=rf"rank {world.rank}: hierarchical_all_to_all .*\(5,\) cannot be cut in 4 equal slices"):
            hierarchical_all_to_all(torch.zeros(5), world, EVEN)

    rl.simulate(4, body)
