"""Trees: their shapes, and that the double tree is two trees which share the work."""

from collections import Counter
from typing import Any

import pytest
import torch

import rankloom as rl
from provenance import trace
from rankloom.comm import subgroup
from rankloom.comm.broadcast import Tree, binomial_tree
from rankloom.comm.choose import in_two_levels
from rankloom.comm.subgroup import Subgroup
from rankloom.comm.tree import double_tree, double_tree_all_reduce, tree_all_reduce, tree_reduce, tree_reduce_bill

RANKS = [*range(1, 18), 31, 32, 33]


def depth(trees: list[Tree], rank: int) -> int:
    parent = trees[rank].parent
    return 0 if parent is None else 1 + depth(trees, parent)


def both(p: int) -> list[list[Tree]]:
    return [[double_tree(rank, p)[which] for rank in range(p)] for which in (0, 1)]


@pytest.mark.parametrize("p", RANKS)
def test_children_and_parents_agree_and_there_is_one_root(p):
    for trees in (*both(p), *([binomial_tree(rank, p, root) for rank in range(p)] for root in {0, p // 2, p - 1})):
        assert [rank for rank in range(p) if trees[rank].parent is None] == [next(r for r in range(p) if trees[r].parent is None)]
        for rank in range(p):
            assert all(trees[child].parent == rank for child in trees[rank].children)
            assert trees[rank].parent is None or rank in trees[trees[rank].parent].children
            depth(trees, rank)   # comes to an end: no circle


@pytest.mark.parametrize("p", RANKS)
def test_the_double_tree_is_two_binary_trees_and_no_rank_works_inside_both(p):
    one, other = both(p)
    for rank in range(p):
        assert len(one[rank].children) <= 2 and len(other[rank].children) <= 2
        assert not (one[rank].children and other[rank].children)
    assert max(depth(trees, rank) for trees in (one, other) for rank in range(p)) <= p.bit_length() - 1


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("root", [0, 1])
def test_the_binomial_tree_is_as_deep_as_rounds_allow_and_rooted_where_asked(p, root):
    trees = [binomial_tree(rank, p, root % p) for rank in range(p)]
    assert trees[root % p].parent is None
    assert max(depth(trees, rank) for rank in range(p)) <= (p - 1).bit_length()
    assert len(trees[root % p].children) == (p - 1).bit_length()


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8])
def test_a_reduce_ends_with_every_part_once_on_the_root_and_sends_each_rank_s_sum_once(p):
    stories = trace(p, 5, tree_reduce)
    assert stories[0].held == [Counter({(rank, e): 1 for rank in range(p)}) for e in range(5)]
    assert [len(story.sent) for story in stories] == [0] + [1] * (p - 1)


@pytest.mark.parametrize("p", [2, 3, 4, 7, 8])
def test_in_the_double_tree_each_half_climbs_its_own_tree(p):
    one, other = both(p)
    for rank, story in enumerate(trace(p, 12, lambda x, group: double_tree_all_reduce(x, group, block=16))):
        halves = {0: Counter(), 1: Counter()}   # to whom how many messages went, by half
        for to, elements in story.sent:
            (half,) = {e // 6 for history in elements for _, e in history}
            halves[half][to] += 1
        for half, trees in enumerate((one, other)):
            partners = [*trees[rank].children, *([] if trees[rank].parent is None else [trees[rank].parent])]
            assert halves[half] == Counter(dict.fromkeys(partners, 3))   # 6 elements in blocks of 2


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
def test_a_reduce_pays_its_bill(p):
    def body(world):
        tree_reduce(torch.zeros(9), world)
        return rl.Bill(sent=world.ledger.bytes, messages=world.ledger.messages)

    assert rl.simulate(p, body) == [tree_reduce_bill(9, p, 4, rank) for rank in range(p)]


@pytest.mark.parametrize("p", [3, 8])
def test_no_rank_of_the_double_tree_sends_much_more_than_another_while_half_the_binomial_tree_sends_once(p):
    def sent(run):
        def body(world):
            run(torch.zeros(800), world)
            return world.ledger.bytes

        return rl.simulate(p, body)

    assert max(sent(double_tree_all_reduce)) <= 2 * 3200 and min(sent(tree_all_reduce)) == 3200
    assert max(sent(tree_all_reduce)) >= (p - 1).bit_length() * 3200


class Ordered:
    """A group that notes when a block is expected, and when it is waited for."""

    def __init__(self, world: rl.World):
        self.world, self.seen = world, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def recv(self, into: torch.Tensor, frm: int, **options: Any) -> Any:
        handle = self.world.recv(into, frm, **options)
        if not options.get("async_op"):
            return handle
        number = len([what for what in self.seen if what[0] == "expect"])
        self.seen.append(("expect", number))
        return Awaited(lambda: self.seen.append(("wait", number)), handle)


class Awaited:
    """A handle that tells when it is waited for."""

    def __init__(self, told: Any, handle: Any):
        self.told, self.handle = told, handle

    def wait(self) -> torch.Tensor:
        self.told()
        return self.handle.wait()


def test_the_next_block_is_expected_before_this_one_is_waited_for():
    def body(world):
        group = Ordered(world)
        double_tree_all_reduce(torch.zeros(6), group, block=4)   # each half in three blocks
        return group.seen

    for seen in rl.simulate(2, body):   # of two ranks each is the root of one tree
        assert seen == [("expect", 0), ("expect", 1), ("wait", 0), ("expect", 2), ("wait", 1), ("wait", 2)]


@pytest.mark.gloo
def test_the_double_tree_is_refused_where_tags_mean_nothing(one_queue):
    """Over NCCL what its trees send would be mixed up, or wait in a circle."""
    def body(world):
        with pytest.raises(rl.ConfigError, match=f"rank {world.rank}: double_tree_all_reduce in group 'world': .* messages over NCCL"):
            double_tree_all_reduce(torch.ones(4), world)

    rl.simulate(2, body)


def test_the_double_tree_is_refused_on_a_subgroup_whose_messages_come_in_order(monkeypatch):
    monkeypatch.setattr(subgroup, "in_order", lambda pg, device, ranks: pg is not None and tuple(ranks) == (0, 1))

    def body(world):
        with pytest.raises(rl.ConfigError, match=r"double_tree_all_reduce in group 'world, ranks \(0, 1\)': .* messages over NCCL"):
            in_two_levels(double_tree_all_reduce)(torch.ones(4), world)   # between nodes
        part = Subgroup(world, (0, 1))
        for group in (part, Subgroup(part, (0, 1))):
            with pytest.raises(rl.ConfigError, match="messages over NCCL"):
                double_tree_all_reduce(torch.ones(4), group)

    rl.simulate(2, body, topology=rl.Topology.even(2, 1))
