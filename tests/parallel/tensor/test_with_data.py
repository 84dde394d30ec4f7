"""Tensor ranks inside data ranks, in a loop of one's own: the plain model on the whole batch."""

import copy
import math

import pytest
import torch
from torch import nn

import rankloom as rl
from closeness import expect_close
from gradients import gradients
from rankloom.parallel.clip import clip_grad_norm_
from rankloom.parallel.model_split import full_state_dict
from split_model import RTOL, joined

from .test_gpt import make, tokens


def loss_of(model, rows: torch.Tensor) -> torch.Tensor:
    total, count = model(rows, targets=rows.roll(-1, 1))
    return total / count


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("plan", ["tp_plan", "tp_sequence_plan"])
@pytest.mark.parametrize(("replicate", "tensor"), [(2, 1), (1, 2), (2, 2), (3, 2), (2, 3)])
def test_two_data_ranks_of_split_models_are_one_model_with_the_whole_batch(replicate, tensor, plan, overlap):
    batch = tokens(40, rows=2 * replicate)
    plain = make(kv_heads=1, layers=1)
    loss_of(plain, batch).backward()

    def body(world):
        split = world.group("tensor")
        model = rl.tensor_parallel(make(kv_heads=1, layers=1), getattr(plain, plan), split, overlap=overlap)
        wrapped = rl.data_parallel(model, world.group("replicate"))
        for _ in range(2):   # the second goes through the buckets that the first has laid out
            model.zero_grad(set_to_none=True)
            loss_of(wrapped, batch.chunk(replicate)[world.mesh.coords(world.rank)["replicate"]]).backward()
        return joined({name: p.grad for name, p in model.named_parameters()}, model, split)

    for grads in rl.simulate(rl.Mesh(replicate=replicate, tensor=tensor), body):
        expect_close(grads, gradients(plain), RTOL)


def wrapped_as(kind: str, model: nn.Module, ranks) -> nn.Module:
    return model if kind == "alone" else rl.data_parallel(model, ranks) if kind == "data" else rl.fully_shard(model, ranks)


@pytest.mark.parametrize("order", [2.0, 1, math.inf, "inf"])
@pytest.mark.parametrize("plan", ["tp_plan", "tp_sequence_plan"])
@pytest.mark.parametrize(("kind", "mesh"), [("alone", rl.Mesh(tensor=2)), ("alone", rl.Mesh(tensor=4)),
                                            ("data", rl.Mesh(replicate=2, tensor=2)), ("sharded", rl.Mesh(shard=2, tensor=2)),
                                            ("sharded", rl.Mesh(shard=1, tensor=4))])
def test_clipping_over_tensor_ranks_is_that_of_the_plain_model(kind, mesh, plan, order):
    """KV heads that two ranks share, and norms that all hold, count once."""
    rows, limit = mesh.replicate * mesh.shard, 0.01
    batch = tokens(40, rows=2 * rows)
    plain = make(kv_heads=2, layers=1)
    expected = copy.deepcopy(plain)
    loss_of(expected, batch).backward()
    norm = nn.utils.clip_grad_norm_(expected.parameters(), limit, float(order))
    torch.optim.SGD(expected.parameters(), lr=1.0).step()

    def body(world):
        model = rl.tensor_parallel(make(kv_heads=2, layers=1), getattr(plain, plan), world.group("tensor"))
        trained = wrapped_as(kind, model, world.group("replicate", "shard"))
        coords = world.mesh.coords(world.rank)
        loss_of(trained, batch.chunk(rows)[coords["replicate"] + coords["shard"]]).backward()
        found = trained.clip_grad_norm_(limit, order) if kind == "sharded" else clip_grad_norm_(trained, limit, order)
        torch.optim.SGD(trained.parameters(), lr=1.0).step()
        return found, full_state_dict(trained, world.group("tensor"))

    for found, state in rl.simulate(mesh, body):
        assert abs(found / norm - 1) < RTOL
        expect_close(state, expected.state_dict(), RTOL)


def test_clipping_a_model_that_is_not_cut_says_which_function_does():
    with pytest.raises(rl.ConfigError, match=r"GPT was not cut by tensor_parallel.*torch\.nn\.utils\.clip_grad_norm_"):
        clip_grad_norm_(make(), 1.0)


@pytest.mark.parametrize("finish_gradients", [True, False])
@pytest.mark.parametrize("kind", ["alone", "data", "sharded"])
def test_an_optimizer_that_looks_at_whole_tensors_is_refused_with_parts_of_them(kind, finish_gradients):
    def body(world):
        model = rl.tensor_parallel(make(), None, world, finish_gradients=finish_gradients)
        model = model if kind == "sharded" else copy.deepcopy(model)   # a copy has parts, too
        trained = wrapped_as(kind, model, world.alone())
        before = full_state_dict(model, world) if kind != "sharded" else None
        loss_of(trained, tokens(40)).backward()
        with pytest.raises(rl.UnitError, match=r"Adafactor may look at whole tensors, but \S+ was cut over the tensor ranks"):
            torch.optim.Adafactor(trained.parameters()).step()
        if before is not None:
            assert all(torch.equal(value, before[name]) for name, value in full_state_dict(model, world).items())
        torch.optim.AdamW(trained.parameters()).step()

    rl.simulate(2, body)
