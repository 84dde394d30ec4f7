"""The short way of small calls: the same results, the same account and the same refusals as the long way."""

import threading

import pytest
import torch

import rankloom as rl
from rankloom.base.errors import CollectiveMismatch, CollectiveTimeout, ConfigError, NotContiguous, RankLost, ShapeMismatch

P = 3
CALLS = {
    "all_reduce": lambda world, x: world.all_reduce(x.clone(), "max"),
    "mean": lambda world, x: world.all_reduce(x.clone(), "mean"),
    "all_gather": lambda world, x: world.all_gather(x),
    "all_gather into": lambda world, x: world.all_gather(x, out=x.new_zeros(P * x.shape[0], *x.shape[1:])),
    "reduce_scatter": lambda world, x: world.reduce_scatter(x),
    "reduce_scatter, largest": lambda world, x: world.reduce_scatter(x, "max"),
    "reduce_scatter, mean": lambda world, x: world.reduce_scatter(x, "mean"),
    "reduce_scatter into": lambda world, x: world.reduce_scatter(x, out=x.new_zeros(x.shape[0] // P, *x.shape[1:])),
    "all_to_all": lambda world, x: world.all_to_all(x),
    "all_to_all into": lambda world, x: world.all_to_all(x, out=torch.zeros_like(x)),
    "exchange": lambda world, x: world.exchange(x, (world.rank + 1) % P, torch.zeros_like(x), (world.rank - 1) % P),
    "send": lambda world, x: world.send(x, 0) if world.rank else [world.recv(torch.zeros_like(x), frm) for frm in range(1, P)][-1],
}

ONE_SIDE = {"send": lambda world, x: world.send(x, 0), "recv": lambda world, x: world.recv(x, 0)}


def account(world):
    ledger = world.ledger
    return ledger.calls, ledger.messages, ledger.bytes


@pytest.mark.parametrize("shape", [(6,), (6, 5), (3, 0), (0,)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_results_and_account_are_those_of_the_long_way(name, shape):
    def short(world):
        assert world._at_once
        return CALLS[name](world, numbers(world, shape)), account(world)

    def long(world):
        world._at_once = None
        return CALLS[name](world, numbers(world, shape)), account(world)

    for (mine, charged), (reference, expected) in zip(*(rl.simulate(P, body, backend="rankloom") for body in (short, long))):
        assert torch.equal(mine, reference) and mine.shape == reference.shape and charged == expected


@pytest.mark.parametrize("exchanged", [False, True])
def test_a_message_of_as_many_bytes_of_another_dtype_is_refused(exchanged):
    def body(world):
        other = 1 - world.rank
        x, into = torch.ones(6), torch.zeros(6, dtype=torch.int32)
        if exchanged:
            return world.exchange(x, other, into, other)
        return world.send(x, 1) if world.rank == 0 else world.recv(into, 0)

    with pytest.raises(CollectiveMismatch, match="or another dtype, than its receiver expects; compare sizes and dtypes on both sides"):
        rl.simulate(2, body, backend="rankloom")


@pytest.mark.parametrize("name", [*CALLS, "recv"])
def test_a_tensor_whose_storage_was_freed_is_refused_and_nobody_reads_at_address_0(name):
    def body(world):
        x = torch.ones(6)
        x.clone = lambda: x
        x.untyped_storage().resize_(0)
        with pytest.raises(ShapeMismatch, match=r"a Tensor of shape \(6,\) has no memory"):
            (CALLS | ONE_SIDE)[name](world, x)
        world.barrier()
        return True

    assert rl.simulate(P, body, backend="rankloom") == [True] * P


def numbers(world, shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * world.rank


def test_what_the_kernel_has_no_number_type_for_takes_the_long_way():
    def body(world):
        flags = torch.tensor([world.rank == at for at in range(P)])
        return world.all_gather(flags).view(P, P).int().tolist(), world.all_gather(torch.tensor(float(world.rank))).tolist()

    identity = torch.eye(P, dtype=torch.int32).tolist()
    assert rl.simulate(P, body, backend="rankloom") == [(identity, [0.0, 1.0, 2.0])] * P


@pytest.mark.parametrize(("error", "text", "call"), [
    (ShapeMismatch, "expected \\(18,\\)", lambda world, x: world.all_gather(x, out=torch.zeros(3, 6))),
    (ShapeMismatch, "expected \\(18,\\) of torch.float32", lambda world, x: world.all_gather(x, out=torch.zeros(18, dtype=torch.int32))),
    (ShapeMismatch, "3 equal slices", lambda world, x: world.reduce_scatter(x[:4])),
    (ShapeMismatch, "3 equal slices", lambda world, x: world.all_to_all(x[:4])),
    (ShapeMismatch, "on meta", lambda world, x: world.recv(x.to("meta"), 1)),
    (ShapeMismatch, "on meta", lambda world, x: world.exchange(x, 1, x.to("meta"), 1)),
    *[(ShapeMismatch, "a tensor of layout torch.sparse_coo", lambda world, x, name=name: getattr(world, name)(torch.eye(P).to_sparse()))
      for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")],
    (ShapeMismatch, "a tensor of layout torch.sparse_coo", lambda world, x: world.send(x.to_sparse(), 1)),
    (NotContiguous, "strides \\(2,\\)", lambda world, x: world.all_reduce(x[::2])),
    (NotContiguous, "strides \\(2,\\)", lambda world, x: world.all_gather(x[::2])),
    (NotContiguous, "strides \\(2,\\)", lambda world, x: world.all_gather(x, out=torch.zeros(36)[::2])),
    (NotContiguous, "strides \\(2,\\)", lambda world, x: world.send(x[::2], 1)),
    (NotContiguous, "strides \\(2,\\)", lambda world, x: world.recv(x[::2], 1)),
    (NotContiguous, "strides \\(2,\\)", lambda world, x: world.exchange(x, 1, torch.zeros(12)[::2], 1)),
    (ConfigError, "no rank 3", lambda world, x: world.send(x, 3)), (ConfigError, "no rank -1", lambda world, x: world.recv(x, -1)),
    (ConfigError, "tag is -1", lambda world, x: world.send(x, 1, tag=-1)),
    (ConfigError, "tag is -1", lambda world, x: world.recv(x, 1, tag=-1)),
    (ConfigError, "tag is 9", lambda world, x: world.send(x, 1, tag=1 << 63)),
    (ConfigError, "tag is 9", lambda world, x: world.recv(x, 1, tag=1 << 63)),
    (ConfigError, "tag is 1.5", lambda world, x: world.exchange(x, 1, torch.zeros(6), 1, tag=1.5)),
    (ConfigError, "tag is -1", lambda world, x: world.exchange(x, 1, torch.zeros(6), 1, tag=-1)),
    (ConfigError, "no rank 7", lambda world, x: world.exchange(x, 7, torch.zeros(6), 1)),
    (ConfigError, "no rank -2", lambda world, x: world.exchange(x, 1, torch.zeros(6), -2))])
def test_what_cannot_be_right_is_refused_as_on_the_long_way_and_costs_nothing(error, text, call):
    def body(world):
        with pytest.raises(error, match=text):
            call(world, torch.zeros(6))
        assert account(world) == (0, 0, 0)
        world.barrier()
        return True

    assert rl.simulate(P, body, backend="rankloom") == [True] * P


def test_nothing_goes_over_a_group_that_is_closed():
    def body(world):
        world.barrier()
        world.close()
        for call in (world.all_reduce, world.all_gather, lambda x: world.send(x, 0), lambda x: world.recv(x, 0)):
            with pytest.raises(RankLost, match="is closed"):
                call(torch.zeros(3))
        return True

    assert rl.simulate(2, body, backend="rankloom") == [True] * 2


def test_an_exchange_that_times_out_names_who_did_not_take_what_was_sent():
    """And not the sender, whose message had come."""
    over = threading.Barrier(P)

    def body(world):
        if world.rank == 2:
            world.send(torch.ones(4), 0)
        if world.rank == 0:
            with pytest.raises(CollectiveTimeout, match="rank 1 .*did not come"):
                world.exchange(torch.ones(1 << 20), 1, torch.zeros(4), 2)
        over.wait(20)   # a rank that has returned has left
        return True

    assert rl.simulate(P, body, backend="rankloom", timeout=5.0) == [True] * P


def test_plain_receives_in_a_ring_name_each_the_rank_that_they_waited_for():
    over = threading.Barrier(P)

    def body(world):
        with pytest.raises(CollectiveTimeout, match=rf"timeout of 5 s: rank {(world.rank + 1) % P} \(slow, .*\) did not come$"):
            world.recv(torch.zeros(3), (world.rank + 1) % P)
        over.wait(20)
        return True

    assert rl.simulate(P, body, backend="rankloom", timeout=5.0) == [True] * P
