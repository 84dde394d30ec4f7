"""Group: every collective against a local reference, what it refuses, what it charges, and how ranks are set free."""

import itertools
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rankloom as rl
from patience import AT_ONCE
from rankloom.base.cost import all_gather_bill, all_reduce_bill, broadcast_bill, scatter_bill
from rankloom.base.tensors import bytes_of
from rankloom.comm.subgroup import Subgroup
from rankloom.world.group import Handle

RANKS = [1, 2, 3, 4]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
WHOLE = [torch.int64, torch.int32, torch.uint8]
COLLECTIVES = {
    "all_reduce": lambda group, x, **more: group.all_reduce(x, **more),
    "broadcast": lambda group, x, **more: group.broadcast(x, **more),
    "all_gather": lambda group, x, **more: group.all_gather(x, **more),
    "reduce_scatter": lambda group, x, **more: group.reduce_scatter(x, **more),
    "all_to_all": lambda group, x, **more: group.all_to_all(x, **more),
}


def tensor_of(rank: int, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[rows, 2] of small whole numbers, different on every rank: sums of a few are exact in every dtype."""
    return (torch.arange(2 * rows).view(rows, 2) % 5 + rank).to(dtype)


def expected(name: str, p: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What each of p ranks gets when rank r brings tensor_of(r, 2p), computed in one place."""
    all_x = [tensor_of(rank, 2 * p, dtype) for rank in range(p)]
    total, dealt = torch.stack(all_x).sum(0).to(dtype), [x.view(p, 2, 2) for x in all_x]
    return {
        "all_reduce": [total] * p,
        "broadcast": [all_x[0]] * p,
        "all_gather": [torch.cat(all_x)] * p,
        "reduce_scatter": list(total.view(p, 2, 2)),
        "all_to_all": [torch.cat([x[rank] for x in dealt]) for rank in range(p)],
    }[name]


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("p", RANKS)
def test_every_collective_gives_what_one_process_computes_in_every_dtype(p, name):
    dtypes = FLOATS + WHOLE
    for rank, got in enumerate(rl.simulate(p, lambda w: [COLLECTIVES[name](w, tensor_of(w.rank, 2 * p, dtype)) for dtype in dtypes])):
        for dtype, mine in zip(dtypes, got):
            assert torch.equal(mine, expected(name, p, dtype)[rank]) and mine.dtype == dtype


@pytest.mark.parametrize("name", COLLECTIVES)
def test_asynchronous_collectives_give_the_same_and_may_be_waited_for_in_any_order_and_twice(name):
    def body(world):
        handles = [COLLECTIVES[name](world, tensor_of(world.rank, 6), async_op=True, label=f"number {n}") for n in range(3)]
        return [handle.wait().clone() for handle in (*reversed(handles), *handles)]

    for rank, results in enumerate(rl.simulate(3, body)):
        assert all(torch.equal(mine, expected(name, 3, torch.float32)[rank]) for mine in results)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize(("op", "reference"), [("max", torch.amax), ("min", torch.amin), ("product", torch.prod), ("mean", torch.mean)])
@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_all_reduce_and_reduce_scatter_know_other_operations(p, op, reference, backend):
    def body(world):
        x, out = tensor_of(world.rank, 3 * p, torch.float64), torch.empty(3, 2, dtype=torch.float64)
        scattered = [world.reduce_scatter(x, op), world.reduce_scatter(x, op, async_op=True).wait(), world.reduce_scatter(x, op, out=out)]
        assert torch.equal(x, tensor_of(world.rank, 3 * p, torch.float64))
        return world.all_reduce(x, op), scattered

    whole = reference(torch.stack([tensor_of(rank, 3 * p, torch.float64) for rank in range(p)]), 0)
    for rank, (mine, scattered) in enumerate(rl.simulate(p, body, backend=backend)):
        for got, expected_rows in ((mine, whole), *((rows, whole[3 * rank: 3 * rank + 3]) for rows in scattered)):
            torch.testing.assert_close(got, expected_rows, rtol=1e-15, atol=0)   # the mean is rounded once


def test_the_mean_of_one_rank_is_what_it_has_in_every_dtype_of_floating_numbers():
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.complex64):
        assert rl.simulate(1, lambda w, dtype=dtype: w.all_reduce(torch.ones(3).to(dtype), "mean").float().tolist()) == [[1.0] * 3]


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_the_mean_of_a_narrow_dtype_is_rounded_once_and_its_sum_may_be_larger_than_the_dtype_holds(dtype, async_op, backend):
    equal = torch.cat([torch.tensor([57344.0]), torch.arange(1, 2, 1 / 128)]).to(dtype)   # of the first, float16 holds no sum

    def body(world):
        call = lambda collective, x: collective(x, "mean", async_op=True).wait() if async_op else collective(x, "mean")
        other = torch.full((1,), 1.0 + world.rank)
        x = torch.nn.Parameter(torch.cat([equal.float(), other]).to(dtype))
        rows, before = x.detach().repeat(world.size), world.ledger.bytes
        assert call(world.all_reduce, x) is x
        return x.detach().float(), world.ledger.bytes - before, call(world.reduce_scatter, rows).float()

    expected = torch.cat([equal.float(), torch.full((1,), 2.0)])
    for mean, sent, scattered in rl.simulate(3, body, backend=backend):
        assert torch.equal(mean, expected) and torch.equal(scattered, expected)
        assert sent == all_reduce_bill(len(mean) * (4 if backend == "gloo" else dtype.itemsize), 3).sent   # gloo adds in fp32


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
def test_waiting_twice_for_a_mean_divides_once(name):
    def body(world):
        handle = COLLECTIVES[name](world, torch.full((3,), 3.0), op="mean", async_op=True)
        return [handle.wait().tolist(), handle.wait().tolist()]

    assert rl.simulate(3, body) == [[[3.0] * (3 if name == "all_reduce" else 1)] * 2] * 3


def test_all_reduce_and_broadcast_work_in_place_and_the_others_leave_their_argument_alone():
    def body(world):
        x = tensor_of(world.rank, 4)
        kept, summed, spread = x.clone(), x.clone(), x.clone()
        same = [world.all_reduce(summed) is summed, world.broadcast(spread) is spread]
        for name in ("all_gather", "reduce_scatter", "all_to_all"):
            COLLECTIVES[name](world, x)
        return same, torch.equal(x, kept)

    assert rl.simulate(2, body) == [([True, True], True)] * 2


@pytest.mark.parametrize("root", [0, 1, 2])
def test_broadcast_spreads_the_roots_values(root):
    assert rl.simulate(3, lambda w: w.broadcast(torch.tensor([w.rank]), root).item()) == [root] * 3


def test_a_group_of_one_rank_may_gather_into_memory_that_overlaps_what_is_given():
    def body(world):
        x = torch.arange(5.0)
        world.all_gather(x[:4], out=x[1:])
        return x.tolist()

    assert rl.simulate(1, body) == [[0.0, 0.0, 1.0, 2.0, 3.0]]


def test_tensors_without_dims_and_without_elements_travel_too():
    def body(world):
        return (world.all_gather(torch.tensor(float(world.rank))).tolist(), world.all_reduce(torch.tensor(2.0)).item(),
                world.all_gather(torch.zeros(0, 3)).shape, world.all_reduce(torch.zeros(0)).shape)

    assert rl.simulate(3, body) == [([0.0, 1.0, 2.0], 6.0, (0, 3), (0,))] * 3


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_tensors_that_require_gradients_travel_as_others_do(name, backend):
    """A gather of one passed for a lost rank, over gloo."""
    results = rl.simulate(2, lambda world: COLLECTIVES[name](world, tensor_of(world.rank, 4).requires_grad_()), backend=backend)
    assert all(torch.equal(*each) for each in zip(results, expected(name, 2, torch.float32)))

@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_tensor_that_gradients_come_back_to_is_refused_for_they_would_end_there(name, backend):
    """Silently: a contrastive loss over gathered rows, or a matrix that ranks have summed, was trained with a part of its gradient."""
    def body(world):
        computed = tensor_of(world.rank, 4).requires_grad_() * 1
        with pytest.raises(rl.ConfigError, match=rf"rank {world.rank}: {name}.* has a graph.*x\.detach\(\)"):
            COLLECTIVES[name](world, computed)
        with torch.no_grad():
            return COLLECTIVES[name](world, computed)

    assert all(torch.equal(*each) for each in zip(rl.simulate(2, body, backend=backend), expected(name, 2, torch.float32)))


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_a_loss_may_be_summed_with_its_graph_to_be_shown(backend):
    def body(world):
        weight = torch.ones(3, requires_grad=True)
        loss = (weight * (world.rank + 1)).sum()
        loss.backward()
        return world.all_reduce(loss).item(), weight.grad.tolist()

    assert rl.simulate(2, body, backend=backend) == [(9.0, [1.0] * 3), (9.0, [2.0] * 3)]


@pytest.mark.parametrize("p", RANKS)
def test_all_to_all_deals_uneven_shares(p):
    """Rank r deals (r + s) % 3 rows to rank s, each row labelled (from, to)."""
    def body(world):
        send, recv = [(world.rank + s) % 3 for s in range(p)], [(s + world.rank) % 3 for s in range(p)]
        rows = [[world.rank, to] for to in range(p) for _ in range(send[to])]
        return world.all_to_all(torch.tensor(rows, dtype=torch.int64).view(-1, 2), send_rows=send, recv_rows=recv).tolist()

    for rank, rows in enumerate(rl.simulate(p, body)):
        assert rows == [[frm, rank] for frm in range(p) for _ in range((frm + rank) % 3)]


def test_send_and_receive_carry_a_tensor_and_tags_keep_messages_apart():
    def body(world):
        if world.rank == 0:
            later = world.send(torch.tensor([1.0]), 1, tag=1, async_op=True)
            world.send(torch.tensor([2.0]), 1, tag=2)
            return later.wait() is not None
        second = world.recv(torch.zeros(1), 0, tag=2)
        return [world.recv(torch.zeros(1), 0, tag=1).item(), second.item()]

    assert rl.simulate(2, body) == [True, [1.0, 2.0]]


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("n", [1, 1 << 20])
def test_exchange_around_a_ring_and_pairwise_cannot_deadlock(p, n):
    """4 MiB is more than any socket holds: if all sent first, all would wait."""
    def body(world):
        out = torch.full((n,), float(world.rank))
        around = world.exchange(out, (world.rank + 1) % p, torch.empty(n), (world.rank - 1) % p)
        partner = world.rank ^ 1
        pair = world.exchange(out, partner, torch.empty(n), partner) if partner < p else None
        return around[-1].item(), None if pair is None else pair[-1].item()

    for rank, (around, pair) in enumerate(rl.simulate(p, body)):
        assert around == (rank - 1) % p and pair in (None, rank ^ 1)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("n", [1, 1 << 20])
def test_exchanges_may_be_on_their_way_together_and_arrive_where_they_were_asked_for(backend, n):
    def body(world):
        right, left = (world.rank + 1) % 3, (world.rank - 1) % 3
        handles = [world.exchange(torch.full((n,), 10.0 * tag + world.rank), right, torch.empty(n), left, tag=tag, async_op=True)
                   for tag in range(2)]
        assert (world.ledger.messages, world.ledger.bytes) == (2, 8 * n)
        return [handle.wait()[-1].item() for handle in reversed(handles)]

    assert rl.simulate(3, body, backend=backend) == [[10.0 + left, left] for left in (2, 0, 1)]


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("shift", [0, 1 << 17])
def test_what_arrives_may_lie_where_lies_what_leaves(backend, shift):
    """It left half overwritten."""
    n = 1 << 18

    def body(world):
        right, left = (world.rank + 1) % 3, (world.rank - 1) % 3
        room, ranks = torch.empty(3, 3 * n + shift), torch.arange(3.0).repeat_interleave(n)
        room[:, :n] = world.rank
        at_once = world.exchange(room[0, :n], right, room[0, shift:n + shift], left)
        later = world.exchange(room[1, :n], right, room[1, shift:n + shift], left, async_op=True).wait()
        dealt = world.all_to_all(room[2, :3 * n].copy_(ranks + 10 * world.rank), out=room[2, shift:])
        return at_once.eq(left).all().item(), later.eq(left).all().item(), torch.equal(dealt, 10 * ranks + world.rank)

    for _ in range(5):
        assert rl.simulate(3, body, backend=backend) == [(True, True, True)] * 3


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_an_exchange_that_is_refused_has_begun_nothing(backend):
    def body(world):
        peer = 1 - world.rank
        for elsewhere in (torch.ones(3, device="meta"), torch.ones(3, 2)[:, 0]):
            with pytest.raises((rl.ShapeMismatch, rl.NotContiguous)):
                world.exchange(elsewhere, peer, torch.zeros(3), peer)
        return world.exchange(torch.full((3,), 7.0), peer, torch.zeros(3), peer).tolist()

    assert rl.simulate(2, body, backend=backend) == [[7.0] * 3] * 2


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("call", [lambda world, x: world.all_reduce(x), lambda world, x: world.send(x, 1 - world.rank),
                                  lambda world, x: world.all_gather(torch.ones(3), out=torch.cat([x, x]))])
def test_a_tensor_that_lies_nowhere_is_refused(call, backend):
    """gloo took it, and did nothing."""
    with pytest.raises(rl.ShapeMismatch, match="on meta cannot be sent"):
        rl.simulate(2, lambda world: call(world, torch.ones(3, device="meta")), backend=backend)


@pytest.mark.parametrize(("p", "backend"), [(1, "gloo"), (2, "gloo"), (2, "rankloom")])
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_sparse_tensor_is_refused_by_every_collective_of_any_number_of_ranks(name, p, backend):
    with pytest.raises(rl.ShapeMismatch, match="a tensor of layout torch.sparse_coo"):
        rl.simulate(p, lambda world: getattr(world, name)(torch.eye(2).to_sparse()), backend=backend)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("lazy", [torch.ones(4, dtype=torch.complex64).conj(), torch._neg_view(torch.ones(4))])
def test_a_view_that_is_computed_when_it_is_read_is_refused_by_every_call(lazy, backend):
    """Other values lie in its memory: the short way sent these, and gloo summed a copy."""
    calls = [lambda w: w.all_reduce(lazy), lambda w: w.broadcast(lazy), lambda w: w.all_gather(lazy), lambda w: w.reduce_scatter(lazy),
             lambda w: w.all_to_all(lazy), lambda w: w.send(lazy, 1 - w.rank), lambda w: w.recv(lazy, 1 - w.rank),
             lambda w: w.exchange(lazy, 1 - w.rank, torch.zeros_like(lazy), 1 - w.rank),
             lambda w: w.exchange(torch.zeros(4), 1 - w.rank, lazy, 1 - w.rank)]

    def body(world):
        for call in calls:
            with pytest.raises(rl.NotContiguous, match="only when read"):
                call(world)

    rl.simulate(2, body, backend=backend)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_a_quantised_tensor_is_refused_by_every_call_as_its_scale_is_not_sent(backend):
    """Whole numbers of one rank times the scale of another were taken for its values; gloo's calls ended in torch's own words."""
    def body(world):
        other, x = 1 - world.rank, torch.quantize_per_tensor(torch.ones(4), 0.1 * (world.rank + 1), 0, torch.qint8)
        for call in (lambda: world.all_reduce(x), lambda: world.broadcast(x), lambda: world.all_gather(x), lambda: world.reduce_scatter(x),
                     lambda: world.all_to_all(x), lambda: world.send(x, other), lambda: world.recv(x, other),
                     lambda: world.exchange(x, other, torch.zeros(4), other), lambda: world.exchange(torch.zeros(4), other, x, other)):
            with pytest.raises(rl.ShapeMismatch, match=r"a quantised tensor cannot be sent: its scale would stay behind"):
                call()

    rl.simulate(2, body, backend=backend)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("peer", [None, "0", 0.5, torch.tensor(0.5)])
def test_a_peer_or_a_root_that_is_no_number_is_refused_in_words(peer, backend):
    def body(world):
        x = torch.zeros(3)
        for call in (lambda: world.send(x, peer), lambda: world.recv(x, peer), lambda: world.broadcast(x, peer),
                     lambda: world.exchange(x, peer, torch.zeros(3), 0), lambda: world.exchange(x, 1 - world.rank, torch.zeros(3), peer)):
            with pytest.raises(rl.ConfigError, match=rf"there is no rank {re.escape(repr(peer))} in a group of 2"):
                call()

    rl.simulate(2, body, backend=backend)


def test_an_exchange_on_its_way_ends_with_its_group():
    def body(world):
        handle = world.exchange(torch.zeros(1 << 20), 1 - world.rank, torch.empty(1 << 20), 1 - world.rank, tag=world.rank, async_op=True)
        world.barrier()
        world.close()   # their tags differ, so nothing can have arrived
        with pytest.raises(rl.RankLost, match="the group was closed before this ended"):
            handle.wait()

    rl.simulate(2, body)


@pytest.mark.parametrize("p", RANKS)
def test_all_gather_object_gathers_any_json_value_in_rank_order(p):
    values = [None, {"rank": 1, "text": "\u00e4\u20ac" * 50}, [1.5, True], "x" * 10_000]
    assert rl.simulate(p, lambda w: w.all_gather_object(values[w.rank])) == [values[:p]] * p


@pytest.mark.parametrize("value", [{1}, [torch.ones(1)], 10 ** 5000], ids=["set", "tensor", "long"])
@pytest.mark.parametrize("p", RANKS)
def test_a_value_that_is_no_json_is_an_error_on_all_ranks_that_names_its_own(p, value):
    """That rank raised alone: the others took its next call for this one."""
    def body(world):
        with pytest.raises(rl.ConfigError, match=rf"^rank {p - 1}: found in group 'world': .*; give JSON values only"):
            world.all_gather_object(value if world.rank == p - 1 else "x" * world.rank, label="found")
        return world.all_gather_object(world.rank)

    assert rl.simulate(p, body) == [[*range(p)]] * p


def test_a_barrier_may_be_entered_and_waited_for_later():
    def body(world):
        entered = world.barrier(async_op=True)
        world.all_reduce(torch.ones(1))
        return entered.wait() is entered.wait() and world.barrier() is None

    assert rl.simulate(3, body) == [True] * 3


def test_a_barrier_holds_everybody_until_the_last_one_comes():
    def body(world):
        time.sleep(0.15 * (world.rank == 1))
        came = time.monotonic()
        world.barrier()
        return came, time.monotonic()

    times = rl.simulate(3, body)
    assert min(left for _, left in times) >= max(came for came, _ in times)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_tensor_with_gaps_is_refused_by_name(name):
    def body(world):
        says = rf"rank {world.rank}: my label in group 'world': tensor of shape \(4, 2\) has strides \(1, 4\)"
        with pytest.raises(rl.NotContiguous, match=says):
            COLLECTIVES[name](world, torch.zeros(2, 4).t(), label="my label")
        return world.ledger.calls

    assert rl.simulate(2, body) == [0, 0]


@pytest.mark.parametrize("p, backend", [(1, "gloo"), (2, "gloo"), (2, "rankloom")])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_list_in_place_of_a_tensor_is_refused_by_name(name, p, backend):
    def body(world):
        for group in (world, Subgroup(world, range(p))):
            says = rf"rank {world.rank}: \S+ in group '.*': operand is of type list, expected a tensor"
            with pytest.raises(rl.ConfigError, match=says):
                COLLECTIVES[name](group, [1.0, 2.0])
            if name in ("all_gather", "reduce_scatter", "all_to_all"):
                with pytest.raises(rl.ConfigError, match=says):
                    COLLECTIVES[name](group, torch.ones(2 * p), out=[1.0, 2.0])
        return world.ledger.calls

    assert rl.simulate(p, body, backend=backend) == [0] * p


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_a_list_in_place_of_a_message_is_refused_by_name(backend):
    def body(world):
        x, other = [1.0, 2.0], 1 - world.rank
        calls = {"send": lambda: world.send(x, other), "recv": lambda: world.recv(x, other),
                 "exchange": lambda: world.exchange(x, other, torch.ones(2), other)}
        for name, call in [*calls.items(), ("exchange", lambda: world.exchange(torch.ones(2), other, x, other))]:
            with pytest.raises(rl.ConfigError, match=f"rank {world.rank}: {name} in group 'world': operand is of type list, expected a"):
                call()
        return world.ledger.calls

    assert rl.simulate(2, body, backend=backend) == [0, 0]


def test_send_and_receive_refuse_tensors_with_gaps_and_ranks_and_tags_that_cannot_be():
    def body(world):
        for call in (world.send, world.recv):
            with pytest.raises(rl.NotContiguous):
                call(torch.zeros(2, 4).t(), 1 - world.rank)
            with pytest.raises(rl.ConfigError, match="no rank 2 in a group of 2"):
                call(torch.zeros(2), 2)
            with pytest.raises(rl.ConfigError, match="the tag is -1"):   # gloo says something else, which passed for a lost rank
                call(torch.zeros(2), 1 - world.rank, tag=-1)
            with pytest.raises(rl.ShapeMismatch, match="a tensor of layout torch.sparse_coo"):
                call(torch.eye(2).to_sparse(), 1 - world.rank)
        with pytest.raises(rl.ConfigError, match="no rank -1"):
            world.broadcast(torch.zeros(2), root=-1)

    rl.simulate(2, body)


@pytest.mark.parametrize("tag", [2**31 - 2**28, 2**31 - 1, 2**31, 2**62])
def test_tags_that_gloo_has_not_or_that_gathers_use_are_refused(tag):
    """A message of the largest was taken for a slice of a gather that other ranks were in."""
    largest = 2**31 - 2**28 - 1

    def body(world):
        x, other = torch.zeros(2), 1 - world.rank
        for call in (world.send, world.recv, lambda x, to, tag: world.exchange(x, to, x, to, tag=tag)):
            with pytest.raises(rl.ConfigError, match=rf"the tag is {tag}; expected a whole number from 0 to {largest}, where .* gloo"):
                call(x, other, tag=tag)
        return world.exchange(torch.tensor([world.rank]), other, torch.tensor([9]), other, tag=largest).item()

    assert rl.simulate(2, body, backend="gloo") == [1, 0]


def test_a_message_to_oneself_is_refused_where_gloo_carries_it():
    def body(world):
        x, here = torch.zeros(2), world.rank
        for call in (lambda: world.send(x, here), lambda: world.recv(x, here), lambda: world.exchange(x, here, x.clone(), 1 - here)):
            with pytest.raises(rl.ConfigError, match=f"rank {here}: .* a message to this rank itself"):
                call()

    rl.simulate(2, body, backend="gloo")


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("p", [1, 2])
def test_a_rank_may_exchange_with_itself_as_in_a_ring_of_one(p, backend):
    def body(world):
        x, here = torch.arange(6.0), world.rank
        into, beside = torch.zeros(6), torch.zeros(6)
        assert world.exchange(x, here, into, here) is into
        assert world.exchange(x, here, beside, here, async_op=True).wait() is beside
        world.exchange(x[:4], here, x[2:], here)   # overlapping: as if the whole had left before anything arrives
        return into.tolist(), beside.tolist(), x.tolist()

    whole = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert rl.simulate(p, body, backend=backend) == [(whole, whole, [0.0, 1.0, 0.0, 1.0, 2.0, 3.0])] * p


def test_what_a_rank_sends_to_itself_must_fit():
    def body(world):
        for into in (torch.zeros(5), torch.zeros(6, dtype=torch.int32)):
            with pytest.raises(rl.ShapeMismatch, match=rf"rank 0: ring .*\(6,\) .* receives it as \({len(into)},\) of {into.dtype}"):
                world.exchange(torch.zeros(6), 0, into, 0, label="ring")

    rl.simulate(1, body)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
          torch.complex128, torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
          torch.uint64]


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_a_collective_that_only_moves_elements_takes_every_dtype(backend):
    """gloo's own have no 16-bit integers, float8 or complex numbers."""
    def body(world):
        other, here, wrong = 1 - world.rank, slice(2 * world.rank, 2 * world.rank + 2), []
        uneven = ([3, 1], [1, 3])[world.rank]
        for dtype in DTYPES:
            highest = 1 if dtype == torch.bool else 255
            first, second = of_each = [torch.arange(start, start + 4 * dtype.itemsize).bitwise_and(highest).to(torch.uint8).view(dtype)
                                       for start in (0, 41)]
            mine = of_each[world.rank]
            moved = {
                "broadcast": (world.broadcast(mine.clone(), 1), second),
                "scalar": (world.broadcast(mine[0].clone()), first[0]),
                "all_gather": (world.all_gather(mine), joined(first, second)),
                "all_to_all": (world.all_to_all(mine), joined(first[here], second[here])),
                "uneven": (world.all_to_all(mine, send_rows=uneven, recv_rows=uneven),
                           (joined(first[:3], second[:1]), joined(first[3:], second[1:]))[world.rank]),
                "exchange": (world.exchange(mine, other, torch.empty_like(mine), other), of_each[other])}
            wrong += [(dtype, name) for name, (got, expected) in moved.items()
                      if got.dtype != dtype or not torch.equal(bytes_of(got), bytes_of(expected))]
        return wrong

    assert rl.simulate(2, body, backend=backend) == [[], []]


def joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)   # torch cannot join all dtypes


@pytest.mark.parametrize("name", ["reduce_scatter", "all_to_all"])
def test_rows_that_ranks_do_not_divide_are_refused_with_the_arithmetic(name):
    def body(world):
        with pytest.raises(rl.ShapeMismatch, match=rf"rank {world.rank}: {name} .*\(5, 2\) cannot be cut in 3 equal slices"):
            COLLECTIVES[name](world, torch.zeros(5, 2))
        with pytest.raises(rl.ShapeMismatch):
            COLLECTIVES[name](world, torch.tensor(1.0))

    rl.simulate(3, body)


@pytest.mark.parametrize("shares", [
    {"send_rows": [1, 3], "recv_rows": None}, {"send_rows": None, "recv_rows": [2, 2]}, {"send_rows": [1, 2], "recv_rows": [2, 2]},
    {"send_rows": [4], "recv_rows": [2, 2]}, {"send_rows": [2, 2], "recv_rows": [4]}, {"send_rows": [5, -1], "recv_rows": [5, -1]},
    {"send_rows": [2, 2], "recv_rows": [1, 3]},   # what a rank keeps it also gets
])
def test_shares_that_do_not_add_up_are_refused(shares):
    def body(world):
        with pytest.raises(rl.ShapeMismatch, match="4 rows cannot be dealt"):
            world.all_to_all(torch.zeros(4, 1), **shares)
        with pytest.raises(rl.ShapeMismatch, match="0 rows cannot be dealt"):
            world.all_to_all(torch.tensor(1.0), **shares)

    rl.simulate(2, body)


@pytest.mark.parametrize("share", [2, [2.0, 2.0], "22"])
def test_numbers_of_rows_that_are_none_are_refused(share):
    def body(world):
        with pytest.raises(rl.ShapeMismatch, match=r"rank \d: all_to_all.* are no numbers of rows; expected a whole number for each of 2"):
            world.all_to_all(torch.ones(4), send_rows=share, recv_rows=share)

    rl.simulate(2, body)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("shape", [-1, (2, -1)])
def test_a_buffer_of_less_than_nothing_is_refused(shape, backend):
    def body(world):
        with pytest.raises(rl.ShapeMismatch, match=r"rank \d: buffer in group 'world': there is no tensor of shape \(.*-1"):
            world.buffer(shape)

    rl.simulate(2, body, backend=backend)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("async_op", [False, True])
def test_results_may_be_written_to_parameters(async_op, backend):
    def body(world):
        params = [nn.Parameter(torch.zeros(n)) for n in (8, 4, 4)]
        whole, mine, dealt = params
        scratch = nn.Parameter(torch.zeros(4))
        got = [world.all_gather(torch.arange(4.0) + world.rank, out=whole, async_op=async_op),
               world.reduce_scatter(torch.arange(8.0), "mean", out=mine, scratch=scratch, async_op=async_op),
               world.all_to_all(torch.arange(4.0), out=dealt, async_op=async_op)]
        got = [each.wait() for each in got] if async_op else got
        assert all(one is other and one.grad_fn is None and one.requires_grad for one, other in zip(got, params))
        return [param.tolist() for param in params]

    for rank, got in enumerate(rl.simulate(2, body, backend=backend)):
        assert got == [[0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0], [4.0 * rank + i for i in range(4)], [2.0 * rank, 2.0 * rank + 1] * 2]


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_a_sum_may_overlap_the_slice_it_is_made_of(shift, backend):
    def body(world):
        x = torch.arange(12.0)
        start = 4 * world.rank + 2 + shift
        return world.reduce_scatter(x[2:10], out=x[start:start + 4]).tolist()

    assert rl.simulate(2, body, backend=backend) == [[4.0, 6.0, 8.0, 10.0], [12.0, 14.0, 16.0, 18.0]]


def test_an_unknown_operation_and_a_mean_of_whole_numbers_are_refused():
    def body(world):
        for name in ("all_reduce", "reduce_scatter"):
            with pytest.raises(rl.ConfigError, match=rf"rank {world.rank}: {name} .*op 'avg' is not one of mean, sum"):
                COLLECTIVES[name](world, torch.zeros(2), op="avg")
            with pytest.raises(rl.ConfigError, match=rf"rank {world.rank}: {name} .*mean of torch.int64"):
                COLLECTIVES[name](world, torch.zeros(2, dtype=torch.int64), op="mean")

    for p in (1, 2):   # what is wrong on two ranks is wrong on one
        rl.simulate(p, body)


@pytest.mark.parametrize(("name", "dtype"), [("all_reduce", torch.int16), ("all_reduce", torch.float8_e4m3fn),
                                             ("reduce_scatter", torch.float8_e4m3fn)])
def test_a_dtype_that_the_backend_cannot_carry_is_a_shape_mismatch_that_says_so(name, dtype):
    with pytest.raises(rl.ShapeMismatch, match=rf"{name}.* the backend cannot add or compare this dtype .*convert it, as by x.float\(\)"):
        rl.simulate(2, lambda w: COLLECTIVES[name](w, torch.zeros(4).to(dtype)))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
def test_the_largest_of_complex_numbers_is_refused_on_one_rank_as_on_several(name, backend, ranks):
    with pytest.raises(rl.ConfigError, match=rf"{name}.*max of torch.complex64: complex numbers have no order"):
        rl.simulate(ranks, lambda w: COLLECTIVES[name](w, torch.zeros(4, dtype=torch.complex64), op="max"), backend=backend)


def test_what_a_backend_says_is_shown_without_its_control_characters():
    """gloo names the operation that it refuses by one."""
    def body(world):
        with world.translated_errors("gradients"):
            raise RuntimeError("all_reduce does not support\x04on complex tensors")

    with pytest.raises(rl.ShapeMismatch, match="complex") as caught:
        rl.simulate(1, body)
    assert str(caught.value).isprintable()


def test_an_error_that_is_no_other_ranks_stays_what_it_is_with_a_note_that_names_rank_and_label():
    """It passed for a lost rank, and the launcher looked elsewhere for the cause."""
    def body(world):
        with world.translated_errors("gradients"):
            raise torch.OutOfMemoryError("out of memory. Tried to allocate 2 GiB")

    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as caught:
        rl.simulate(1, body)
    assert caught.value.__notes__[0] == "(rank 0: gradients in group 'world')"


def test_a_scratch_that_does_not_fit_is_refused():
    """Of another dtype, its bytes were added as if they were of this one."""
    def body(world):
        for scratch in (torch.empty(4, dtype=torch.float64), torch.empty(5), torch.empty(2, 2)):
            with pytest.raises(rl.ShapeMismatch, match=r"scratch.* expected \(4,\) of torch.float32"):
                world.reduce_scatter(torch.ones(8), scratch=scratch)

    rl.simulate(2, body)


def test_a_dtype_that_only_one_rank_brings_sets_the_other_free():
    begin = time.monotonic()
    with pytest.raises(rl.CollectiveMismatch, match="(?s)rank 0: .*float8_e4m3fn.*rank 1: .*float32"):
        rl.simulate(2, lambda w: w.all_reduce(torch.zeros(4).to(torch.float32 if w.rank else torch.float8_e4m3fn)))
    assert time.monotonic() - begin < AT_ONCE


@pytest.mark.parametrize("bad", [{1}, {0, 2}, {0, 1, 2}])
def test_all_ranks_agree_on_a_problem_or_none_raises(bad):
    def body(world):
        world.agree(None)
        try:
            world.agree(f"rank {world.rank} is bad" if world.rank in bad else None, error=rl.DataError)
        except rl.DataError as error:
            return str(error).splitlines()

    assert rl.simulate(3, body) == [[f"rank {rank} is bad" for rank in sorted(bad)]] * 3


def test_the_same_problem_of_all_ranks_is_told_once():
    def body(world):
        with pytest.raises(rl.ConfigError) as caught:
            world.agree("no file")
        return str(caught.value)

    assert rl.simulate(3, body) == ["no file"] * 3


# ---------------------------------------------------------------- the ledger


@pytest.mark.parametrize("p", RANKS)
def test_the_ledger_charges_what_the_bills_say(p):
    nbytes = 2 * p * 2 * 4

    def body(world):
        paid = []
        for call in COLLECTIVES.values():
            before = (world.ledger.bytes, world.ledger.messages, world.ledger.calls)
            call(world, tensor_of(world.rank, 2 * p))
            paid.append(tuple(now - b for now, b in zip((world.ledger.bytes, world.ledger.messages, world.ledger.calls), before)))
        return paid

    for rank, paid in enumerate(rl.simulate(p, body)):
        bills = [all_reduce_bill(nbytes, p), broadcast_bill(nbytes, p, rank == 0), all_gather_bill(nbytes, p),
                 scatter_bill(nbytes, p), scatter_bill(nbytes, p)]
        assert paid == [(bill.sent, bill.messages, int(p > 1)) for bill in bills]


def test_the_ledger_charges_the_sender_and_uneven_shares_by_their_rows():
    def body(world):
        world.send(torch.zeros(5), 1) if world.rank == 0 else world.recv(torch.zeros(5), 0)
        first = world.ledger.bytes
        world.all_to_all(torch.zeros(3, 2), send_rows=[1, 2], recv_rows=[1, 1] if world.rank == 0 else [2, 2])
        return first, world.ledger.bytes - first

    assert rl.simulate(2, body) == [(20, 16), (0, 8)]


def test_the_ledger_counts_the_seconds_that_a_rank_waited():
    begins = threading.Event()

    def body(world):
        begins.set() if world.rank == 0 else (begins.wait(), time.sleep(1.0))
        begin = time.monotonic()
        world.barrier()
        return world.ledger.waited, time.monotonic() - begin

    (waited, took), (waited_less, took_less) = rl.simulate(2, body)
    assert 0.15 < waited <= took and waited_less <= took_less


# ---------------------------------------------------------------- sub-groups


def test_a_group_is_named_by_the_axes_along_which_its_ranks_differ():
    """And not by those that the first caller asked for: the next one asks for the same ranks along other axes."""
    names = rl.simulate(rl.Mesh(pipe=2, tensor=2), lambda w: (w.group("replicate", "context", "tensor").name, w.group("tensor").name))
    assert names == [("tensor", "tensor")] * 4
    assert rl.simulate(rl.Mesh(shard=2), lambda w: w.group("pipe").name) == ["pipe"] * 2


@pytest.mark.parametrize("mesh", [rl.Mesh(replicate=2, shard=2), rl.Mesh(replicate=2, tensor=2), rl.Mesh(pipe=3, shard=2)], ids=str)
def test_a_collective_along_some_axes_stays_among_those_ranks(mesh):
    axes = [axis for axis, n in mesh.sizes().items() if n > 1]
    combinations = [c for n in (1, 2) for c in itertools.combinations(axes, n)]
    bodies = lambda w: [w.group(*c).all_gather(torch.tensor(w.rank)).tolist() for c in combinations]
    for rank, gathered in enumerate(rl.simulate(mesh, bodies)):
        assert gathered == [list(mesh.peers(rank, *c)) for c in combinations]


def test_groups_are_made_once_and_know_their_ranks():
    def body(world):
        group = world.group("shard")
        assert world.group("shard") is group and world.group() is world and world.group("replicate", "shard") is world
        assert world.group("tensor").size == 1
        assert group.ranks[group.rank] == world.rank
        group.all_reduce(torch.zeros(2))
        return group.name, group.ranks, repr(group), world.ledger.calls

    results = rl.simulate(rl.Mesh(replicate=2, shard=2), body)
    assert [r[:2] for r in results] == [("shard", (0, 1)), ("shard", (0, 1)), ("shard", (2, 3)), ("shard", (2, 3))]
    assert results[3][2:] == ("Group('shard', rank 1 of 2)", 0)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("axis", ["shard", ""])
def test_a_twin_is_another_connection_of_the_same_ranks_which_is_closed_with_the_world(axis, backend):
    def body(world):
        group = world.group(axis) if axis else world
        twin, other = group.twin(), (group.rank + 1) % group.size
        assert twin is group.twin() and twin is not group and (twin.rank, twin.ranks) == (group.rank, group.ranks)
        assert twin.ledger.whole is group.ledger
        # Of one tag, and received the other way round.
        sent = [lane.send(torch.tensor([lane is twin]), other, async_op=True) for lane in (group, twin)]
        came = [lane.recv(torch.zeros(1, dtype=torch.bool), other).item() for lane in (twin, group)]
        for handle in sent:
            handle.wait()
        world.barrier()
        world.close()
        with pytest.raises(rl.RankLost, match="this group is closed"):
            twin.barrier()
        return came

    assert rl.simulate(rl.Mesh(shard=2), body, backend=backend) == [[True, False]] * 2


def test_errors_in_a_sub_group_name_the_rank_of_the_world():
    def body(world):
        with pytest.raises(rl.NotContiguous, match=f"rank {world.rank}: x in group 'shard'"):
            world.group("shard").all_reduce(torch.zeros(2, 3).t(), label="x")

    rl.simulate(rl.Mesh(replicate=2, shard=2), body)


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_a_result_may_be_written_to_a_parameter(backend, p):
    def body(world):
        mine, whole = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2 * p))
        scattered, gathered = world.reduce_scatter(torch.ones(2 * p), out=mine), world.all_gather(torch.ones(2), out=whole)
        return scattered is mine, gathered is whole, mine.tolist(), whole.tolist()

    assert rl.simulate(p, body, backend=backend) == [(True, True, [float(p)] * 2, [1.0] * 2 * p)] * p


def test_a_group_of_one_rank_is_the_identity_and_connects_to_nobody():
    def body(world):
        x = tensor_of(0, 4)
        assert all(torch.equal(call(world, x.clone()), x) for call in COLLECTIVES.values())
        assert torch.equal(world.all_reduce(x.clone(), "mean", async_op=True).wait(), x)
        assert world.all_gather_object({"a": 1}) == [{"a": 1}]
        world.barrier()
        with pytest.raises(rl.RankLost, match="closed, or has one rank only"):
            world.send(x, 0)
        return world.ledger.calls

    assert rl.simulate(1, body) == [0]


# ---------------------------------------------------------------- ends


def test_a_closed_group_says_so():
    def body(world):
        world.barrier()
        world.close()
        with pytest.raises(rl.RankLost, match=f"rank {world.rank}: after in group 'world': this group is closed"):
            world.all_reduce(torch.zeros(1), label="after")

    rl.simulate(2, body)


def test_a_group_takes_leave_of_its_backend():
    """One of NCCL that is merely dropped aborts what is on its way: what it was to write would be half written, silently."""
    class Backend(dist.ProcessGroup):
        left = 0

        def shutdown(self):
            self.left += 1

    pg = Backend(0, 2)
    group = rl.Group(pg)
    for _ in range(2):
        group.close()
        assert pg.left == 1


def test_a_closed_world_connects_no_groups_and_no_twins():
    def body(world):
        row = world.group("replicate")
        world.barrier()
        world.close()
        with pytest.raises(rl.RankLost, match=r"group\(shard\) in group 'world': this group is closed"):
            world.group("shard")
        for group in (world, row):
            with pytest.raises(rl.RankLost, match="twin in group 'world': this group is closed"):
                group.twin()

    rl.simulate(rl.Mesh(replicate=2, shard=2), body)


def test_an_error_of_objects_without_a_label_names_the_call():
    def body(world):
        world.barrier()
        world.close()
        with pytest.raises(rl.RankLost, match=f"^rank {world.rank}: all_gather_object: length in group 'world': this group is closed"):
            world.all_gather_object(3)

    rl.simulate(2, body)


def test_a_handle_of_a_group_that_was_closed_raises_instead_of_giving_a_half_made_result():
    def body(world):
        handle = world.all_reduce(torch.ones(3), async_op=True, label="left behind")
        done = world.all_reduce(torch.ones(3), async_op=True)
        done.wait()
        world.close()
        with pytest.raises(rl.RankLost, match="left behind .*closed before this ended"):
            handle.wait()
        return done.wait().tolist()

    assert rl.simulate(2, body) == [[2.0] * 3] * 2


def test_a_group_may_be_closed_by_another_thread_while_a_handle_is_waited_for():
    def body(world):
        class Work:
            def wait(self):
                world.close()

        world.barrier()   # who closes before its peer has connected cuts that off
        return world._keep(Handle(world, "on its way", [Work(), Work()], lambda: torch.ones(1))).wait().item()

    assert rl.simulate(2, body) == [1.0, 1.0]


def test_closing_the_world_closes_its_groups():
    def body(world):
        world.barrier()   # or one that is done would close while another connects
        group = world.group("shard")
        group.barrier()
        world.close()
        with pytest.raises(rl.RankLost):
            group.barrier()

    rl.simulate(rl.Mesh(replicate=2, shard=2), body)


def test_a_time_out_names_the_rank_and_the_label_and_the_way_to_know_more():
    def body(world):
        if world.rank == 1:
            time.sleep(8.0)
        else:
            world.all_reduce(torch.zeros(1), label="gradients of bucket 3")

    with pytest.raises(rl.CollectiveTimeout, match=r"rank 0: gradients of bucket 3 .* within its timeout of 5 s: .*RANKLOOM_DEBUG=1"):
        rl.simulate(2, body, timeout=5.0)


def test_a_group_of_any_process_group_knows_its_rank_and_size():
    def body(world):
        group = rl.Group(world._process_group)
        return group.rank, group.size, group.ranks, group.all_reduce(torch.ones(2)).tolist()

    assert rl.simulate(3, body) == [(rank, 3, (0, 1, 2), [3.0, 3.0]) for rank in range(3)]
    assert (rl.Group(None).rank, rl.Group(None).size) == (0, 1)


def test_errors_of_the_transport_name_the_group_of_their_ranks():
    def body(world):
        shard = world.group("shard")
        with pytest.raises(rl.CollectiveMismatch, match="in group 'shard'"):
            shard.all_reduce(torch.ones(3)) if shard.rank else shard.broadcast(torch.ones(3))

    rl.simulate(rl.Mesh(replicate=2, shard=2), body, backend="rankloom")


# ---------------------------------------------------------------- in functions that are compiled


def calls(world, x):
    """Every kind of call, between operations that a compiler may change."""
    x, other, got = x * 2, 1 - world.rank, torch.empty_like(x)
    world.exchange(world.all_reduce(x.clone(), "mean") + world.rank, other, got, other)
    handles = [world.all_gather(x, async_op=True), world.reduce_scatter(x, async_op=True)]
    ranks = sum(world.all_gather_object(world.rank))
    return got, *[handle.wait() + ranks for handle in handles]


def compile_calls(world):
    x = torch.arange(4.0) + world.rank
    own_part = torch.compile(lambda x: x.chunk(world.size)[world.rank], backend="eager", fullgraph=True)
    assert own_part(x).tolist() == x[2 * world.rank:][:2].tolist(), "who is there may be asked in a graph"
    return [[each.tolist() for each in function(world, x)] for function in (calls, torch.compile(calls, backend="eager"))]


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_a_compiled_function_may_communicate(backend):
    for plain, compiled in rl.spawn(2, compile_calls, backend=backend):
        assert plain == compiled
