"""A part of a group is a group: its ranks are renumbered, its bytes are charged to the whole."""

import pytest
import torch

import rankloom as rl
from rankloom.base.cost import all_gather_bill, all_reduce_bill, scatter_bill
from rankloom.comm.algorithms import ALGORITHMS
from rankloom.comm.subgroup import Subgroup

PARTS = [(4, 1, 2), (0, 3)]   # of five ranks, in no order


def part_of(world: rl.Group) -> Subgroup:
    return Subgroup(world, next(members for members in PARTS if world.rank in members))


def test_a_part_knows_its_own_numbers_and_those_of_the_world():
    def body(world):
        part = part_of(world)
        return part.rank, part.size, part.ranks, part.ledger is world.ledger, part.one_host, part.where("x"), part.topology.nodes

    told = rl.simulate(5, body)
    assert told[4] == (0, 3, (4, 1, 2), True, True, "rank 4: x in group 'world, ranks (4, 1, 2)'", ((0, 1, 2),))
    assert told[2][:3] == (2, 3, (4, 1, 2)) and told[3][:3] == (1, 2, (0, 3))


def test_a_part_of_a_part_counts_its_members_in_the_part():
    def body(world):
        if world.rank == 3:
            return None
        part = Subgroup(world, (4, 2, 1, 0))
        inner = Subgroup(part, (3, 1) if world.rank in (0, 2) else (0, 2))
        return inner.ranks, inner.all_gather(torch.tensor([world.rank])).tolist()

    assert rl.simulate(5, body) == [((0, 2), [0, 2]), ((4, 1), [4, 1]), ((0, 2), [0, 2]), None, ((4, 1), [4, 1])]


@pytest.mark.parametrize("name", ALGORITHMS["all_reduce"])
def test_every_all_reduce_runs_on_two_parts_side_by_side_and_charges_the_whole(name):
    way = ALGORITHMS["all_reduce"][name]

    def body(world):
        part = part_of(world)
        x = way.run(torch.arange(7) + 100 * world.rank, part)
        return x, rl.Bill(sent=world.ledger.bytes, messages=world.ledger.messages), way.bill(7, part.size, 8, part.rank)

    for rank, (x, paid, told) in enumerate(rl.simulate(5, body)):
        members = next(members for members in PARTS if rank in members)
        assert torch.equal(x, torch.arange(7) * len(members) + 100 * sum(members)) and paid == told


@pytest.mark.parametrize("async_op", [False, True])
def test_the_collectives_of_a_part_are_those_of_a_group(async_op):
    def body(world):
        part = part_of(world)
        ask = lambda collective, x, *rest, **named: (
            collective(x, *rest, async_op=True, **named).wait() if async_op else collective(x, *rest, **named))
        p, rank = part.size, part.rank
        base = torch.arange(2 * p) + 10 * rank   # [2p] on each
        out = torch.empty(2, dtype=torch.int64)
        got = {
            "sum": ask(part.all_reduce, base.clone()),
            "mean": ask(part.all_reduce, base.double(), "mean"),
            "broadcast": ask(part.broadcast, base.clone(), 1),
            "gather": ask(part.all_gather, base[:2].clone()),
            "gather numbers": ask(part.all_gather, torch.tensor(rank)),
            "scatter": ask(part.reduce_scatter, base),
            "scatter a mean": ask(part.reduce_scatter, base.double(), "mean"),
            "scatter into": ask(part.reduce_scatter, base, out=out),
            "deal": ask(part.all_to_all, base),
            "deal unevenly": ask(part.all_to_all, torch.full((p,), rank), send_rows=[p, *[0] * (p - 1)],
                                 recv_rows=[p if rank == 0 else 0] * p),
        }
        part.barrier()
        part.agree(None)
        return part.members, got, got["scatter into"] is out

    for rank, (members, got, is_out) in enumerate(rl.simulate(5, body)):
        p, me = len(members), members.index(rank)
        bases = [torch.arange(2 * p) + 10 * r for r in range(p)]
        total = sum(bases)
        expected = {
            "sum": total, "mean": total.double() / p, "broadcast": bases[1], "gather": torch.cat([base[:2] for base in bases]),
            "gather numbers": torch.arange(p), "scatter": total.chunk(p)[me], "scatter into": total.chunk(p)[me],
            "scatter a mean": total.chunk(p)[me].double() / p,
            "deal": torch.cat([base.chunk(p)[me] for base in bases]),
            "deal unevenly": torch.arange(p).repeat_interleave(p) if me == 0 else torch.zeros(0, dtype=torch.int64),
        }
        assert is_out and all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mean_of_a_narrow_dtype_over_a_part_is_rounded_once(dtype):
    equal = torch.cat([torch.tensor([57344.0]), torch.arange(1, 2, 1 / 128)]).to(dtype)   # of the first, float16 holds no sum

    def body(world):
        part, into = part_of(world), torch.empty_like(equal)
        rows = equal.repeat(part.size)
        assert part.reduce_scatter(rows, "mean", out=into) is into
        return part.all_reduce(equal.clone(), "mean"), part.reduce_scatter(rows, "mean"), into

    assert all(torch.equal(mean, equal) for means in rl.simulate(5, body) for mean in means)


def test_the_collectives_of_a_part_cost_what_the_backends_would():
    def body(world):
        part, costs = part_of(world), []
        for call in (part.all_reduce, part.all_gather, part.reduce_scatter, part.all_to_all):
            before = (world.ledger.bytes, world.ledger.messages)
            call(torch.zeros(6))
            costs.append(rl.Bill(sent=world.ledger.bytes - before[0], messages=world.ledger.messages - before[1]))
        return part.size, costs

    for p, costs in rl.simulate(5, body):
        assert costs == [all_reduce_bill(24, p), all_gather_bill(24, p), scatter_bill(24, p), scatter_bill(24, p)]


def test_messages_reach_members_only_and_keep_their_tags():
    def body(world):
        part = part_of(world)
        if part.rank == 0:
            handles = [part.send(torch.tensor([tag]), 1, tag=tag, async_op=True) for tag in (5, 6)]
            return [handle.wait().item() for handle in handles]
        if part.rank == 1:
            return [part.recv(torch.zeros(1, dtype=torch.int64), 0, tag=tag).item() for tag in (6, 5)]
        return None

    assert rl.simulate(5, body) == [[5, 6], [6, 5], None, [6, 5], [5, 6]]


@pytest.mark.parametrize("members", [(0, 0, 1), (1, 2), (0, 3), (-1, 0)])
def test_what_is_no_part_with_this_rank_in_it_is_refused(members):
    with pytest.raises(rl.ConfigError, match=r"rank 0: part in group 'world': .* is no part of ranks 0..2 with rank 0 in it"):
        rl.simulate(3, lambda world: Subgroup(world, members) if world.rank == 0 else None)


def test_a_part_refuses_what_it_cannot_do_by_name():
    def body(world):
        part = Subgroup(world, (0, 1))
        with pytest.raises(rl.ConfigError, match="op 'max' is not one of sum, mean"):
            part.all_reduce(torch.zeros(1), "max")
        with pytest.raises(rl.ConfigError, match="op 'max' is not one of sum, mean"):
            part.reduce_scatter(torch.zeros(2), "max")
        with pytest.raises(rl.ConfigError, match="the mean of torch.int64"):
            part.all_reduce(torch.zeros(1, dtype=torch.int64), "mean")
        with pytest.raises(rl.ConfigError, match="there is no rank 2 in a group of 2"):
            part.send(torch.zeros(1), 2)
        with pytest.raises(rl.ShapeMismatch, match="cannot be cut in 2 equal slices"):
            part.reduce_scatter(torch.zeros(3))
        with pytest.raises(rl.ShapeMismatch, match=r"2 rows cannot be dealt as send_rows=\[1, 2\]"):
            part.all_to_all(torch.zeros(2), send_rows=[1, 2], recv_rows=[1, 1])
        with pytest.raises(rl.ShapeMismatch, match=r"out is \(3,\) of torch.float32, expected \(2,\)"):
            part.all_to_all(torch.zeros(2), out=torch.zeros(3))
        return world.ledger.messages

    assert rl.simulate(2, body) == [0, 0]


def test_a_part_of_one_rank_needs_nobody():
    def body(world):
        part = Subgroup(world, (world.rank,))
        return part.all_reduce(torch.ones(2)).tolist(), part.all_gather(torch.ones(2)).tolist(), part.all_gather_object("a"), \
            part.reduce_scatter(torch.ones(2)).tolist(), part.all_to_all(torch.ones(2)).tolist(), world.ledger.messages

    assert rl.simulate(2, body) == [([1, 1], [1, 1], ["a"], [1, 1], [1, 1], 0)] * 2
