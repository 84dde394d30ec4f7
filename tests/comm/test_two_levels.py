"""Compressed between nodes, exact inside: right sums on any nodes, one set of bits, the price on the bill, memory that converges."""

import random
import time
from functools import partial

import pytest
import torch

import rankloom as rl
from rankloom.comm import two_levels
from rankloom.comm.blockwise import Blockwise
from rankloom.comm.choose import all_reduce_named
from rankloom.comm.compress import Summing
from rankloom.comm.hierarchical import hierarchical_all_reduce_bill
from rankloom.comm.messages import post, start_all_gather, start_all_to_all
from rankloom.comm.quantize import INT8, ONE_BIT, Floats
from rankloom.comm.two_levels import TwoLevels, all_reduce_in_pieces, cut_in_pieces

EXACT = Floats(torch.float32)   # as a format: nothing is lost
NODES = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2), (3, 4, 5)), ((0, 1), (2, 3), (4, 5)),
         ((0,), (1,), (2,)), ((0, 1), (2,)), ((0, 1, 2),)]
LENGTHS = [0, 1, 5, 1000, 4001]


def whole(n: int, *key: int) -> torch.Tensor:
    """Whole numbers, whose sums are exact in every order."""
    return torch.randint(-100, 100, (n,), generator=torch.Generator().manual_seed(hash(key) % 2**31)).float()


def ranks_of(nodes) -> int:
    return sum(map(len, nodes))


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_sums_are_exact_where_the_format_is_and_every_rank_pays_its_bill(nodes, n):
    def body(world):
        world.topology = rl.Topology(nodes)
        reduce = TwoLevels(Blockwise(EXACT, piece=700))
        x = reduce(whole(n, world.rank), world)
        return x, rl.Bill(sent=world.ledger.bytes, messages=world.ledger.messages), reduce.bill(n, world)

    exact = sum(whole(n, rank) for rank in range(ranks_of(nodes)))
    for x, paid, bill in rl.simulate(ranks_of(nodes), body):
        assert torch.equal(x, exact) and paid == bill


def sum_in_pieces(nodes, n, world):
    world.topology = rl.Topology(nodes)
    x = all_reduce_in_pieces(whole(n, world.rank), world)
    return x, rl.Bill(sent=world.ledger.bytes, messages=world.ledger.messages)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_an_exact_sum_in_pieces_is_right_for_any_length(nodes, n, monkeypatch):
    monkeypatch.setattr(two_levels, "PIECE", 100)
    exact = sum(whole(n, rank) for rank in range(ranks_of(nodes)))
    for x, _ in rl.simulate(ranks_of(nodes), partial(sum_in_pieces, nodes, n)):
        assert torch.equal(x, exact)


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_an_exact_sum_in_pieces_sends_as_many_bytes_as_a_whole_one_and_as_many_messages_for_each_piece(nodes, monkeypatch):
    monkeypatch.setattr(two_levels, "PIECE", 120)
    n, slices = 7200, len(nodes[0])
    goes_in_pieces = len(nodes) > 1 and len({*map(len, nodes)}) == 1
    for rank, (_, paid) in enumerate(rl.simulate(ranks_of(nodes), partial(sum_in_pieces, nodes, n))):
        bill = hierarchical_all_reduce_bill(n, nodes, 4, rank)
        pieces = n // (slices * 120) if goes_in_pieces else 1
        assert (paid.sent, paid.messages) == (bill.sent, pieces * bill.messages)


def test_what_training_knows_as_hierarchical_goes_in_pieces(monkeypatch):
    monkeypatch.setattr(two_levels, "PIECE", 120)
    def body(world):
        all_reduce_named("hierarchical")(torch.ones(7200), world)
        return world.ledger.messages

    assert rl.simulate(4, body, topology=rl.Topology.even(2, 2)) == [30 * 4] * 4


@pytest.mark.parametrize(("name", "in_pieces"), [("int8", True), ("bf16", True), ("topk", False)])
def test_what_training_compresses_between_nodes_goes_in_pieces_too_where_its_format_is_one_of_blocks(name, in_pieces):
    assert isinstance(Summing("hierarchical", name).new_all_reduce((), torch.float32), TwoLevels) == in_pieces


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.float64])
def test_an_exact_sum_in_pieces_is_one_of_every_dtype(dtype):
    def body(world):
        world.topology = rl.Topology(((0, 1), (2, 3)))
        return all_reduce_in_pieces((whole(1001, world.rank) % 8).to(dtype).view(7, 143), world)

    exact = sum(whole(1001, rank) % 8 for rank in range(4)).to(dtype).view(7, 143)
    for x in rl.simulate(4, body):
        assert torch.equal(x, exact) and x.dtype == dtype


@pytest.mark.parametrize("form", [INT8, ONE_BIT], ids=["int8", "1bit"])
@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_all_ranks_end_with_the_same_bits_and_what_is_delivered_converges(nodes, form):
    def body(world):
        world.topology = rl.Topology(nodes)
        reduce, total, seen = TwoLevels(Blockwise(form, piece=700)), torch.zeros(2001), []
        for _ in range(60):
            seen.append(reduce(whole(2001, world.rank), world).clone())
            total += seen[-1]
        return torch.stack(seen), total / 60, rl.Bill(sent=world.ledger.bytes) == rl.Bill(sent=60 * reduce.bill(2001, world).sent)

    exact = sum(whole(2001, rank) for rank in range(ranks_of(nodes)))
    first, *others = rl.simulate(ranks_of(nodes), body)
    assert all(torch.equal(first[0], other[0]) for other in others) and all(fine for _, _, fine in (first, *others))
    assert (first[1] - exact).norm() < (0.001 if form is INT8 else 0.15) * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exact_format_gives_exact_sums_in_every_dtype(dtype):
    def body(world):
        world.topology = rl.Topology(((0, 1), (2, 3)))
        return TwoLevels(Blockwise(EXACT))(whole(1001, world.rank).to(dtype), world)

    exact = sum(whole(1001, rank) for rank in range(4)).to(dtype)
    assert all(torch.equal(x, exact) and x.dtype == dtype for x in rl.simulate(4, body))


def test_inside_a_node_nothing_is_lost():
    """Ranks of a node cancel but for a few small values, which int8 of either rank alone would round away."""
    def body(world):
        world.topology = rl.Topology(((0, 1), (2, 3)))
        x = whole(512, 1) * 1e4 * (-1) ** world.rank
        x += torch.ones(512) * (world.rank % 2)
        return TwoLevels(Blockwise(INT8))(x, world)

    assert ((rl.simulate(4, body)[0] - 2.0).abs() <= 2 * 2.0 / 127).all()   # two half steps of each node's 1.0


def test_slow_ranks_change_nothing():
    def body(world, delays):
        world.topology = rl.Topology(((0, 1), (2, 3)))
        reduce, pick = TwoLevels(Blockwise(INT8, piece=700)), random.Random(world.rank)
        for method in ("send", "recv") if delays else ():
            plain = getattr(world, method)
            setattr(world, method, lambda *a, plain=plain, **more: time.sleep(pick.random() / 300) or plain(*a, **more))
        return torch.stack([reduce(whole(4001, world.rank, step), world).clone() for step in range(2)])

    calm, delayed = (rl.simulate(4, lambda world, delays=delays: body(world, delays)) for delays in (False, True))
    assert all(torch.equal(calm[0], other) for other in delayed)


@pytest.mark.parametrize("n", [0, 1, 7, 12, 13, 100])
@pytest.mark.parametrize(("step", "s"), [(1, 1), (2, 3), (4, 2), (100, 4)])
def test_slices_lie_one_after_the_other_and_are_as_long_as_they_may_be(n, step, s):
    pieces = cut_in_pieces(n, step, s)
    spans = [span for piece in pieces for span in piece]
    assert [at for start, end in spans for at in range(start, end)] == list(range(n))
    assert all(len(piece) == s and max(end - start for start, end in piece) <= step for piece in pieces)
    assert all(end - start == step for piece in pieces[:-1] for start, end in piece)


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_dealing_and_gathering_do_what_the_collectives_do(p):
    def body(world):
        x = whole(p * 6, world.rank).view(p, 2, 3)
        before = world.ledger.bytes
        dealt, gathered = start_all_to_all(x, world, label="deal"), start_all_gather(x[0], world, label="gather")
        mine = dealt(), gathered(), world.ledger.bytes - before
        assert torch.equal(dealt(), mine[0]), "waiting again changes nothing"
        return mine, (world.all_to_all(x), world.all_gather(x[0]).view(p, 2, 3), (p - 1) * 2 * 24)

    for mine, expected in rl.simulate(p, body):
        assert torch.equal(mine[0], expected[0]) and torch.equal(mine[1], expected[1]) and mine[2] == expected[2]


def test_what_is_empty_is_not_sent():
    def body(world):
        out = [torch.ones(rank) for rank in range(3)]
        into = [torch.zeros(world.rank) for _ in range(3)]
        post(out, into, world, label="uneven")()
        return [part.tolist() for part in into], world.ledger.messages

    for rank, (into, messages) in enumerate(rl.simulate(3, body)):
        assert messages == 2 - (rank > 0) and all(part == [float(other != rank)] * rank for other, part in enumerate(into))
