"""Models and engines that nobody needs any more are freed, so that a notebook can make them anew as often as it likes."""

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.models.config import GPTConfig, MoEConfig
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss

SHAPE = GPTConfig(vocab_size=37, width=16, layers=2, heads=2, kv_heads=2, ffn=24, seq_len=12)
EXPERTS = GPTConfig(vocab_size=37, width=16, layers=2, heads=2, kv_heads=2, ffn=24, seq_len=12, moe=MoEConfig(experts=2, top_k=1, ffn=12))
OPTIONS = [{}, {"deterministic": 4}, {"precision": "fp16"}, {"precision": "fp8"}, {"recompute": "full"}, {"accumulate": 2}]
OFFLOADS = [{"offload": True}, {"offload": True, "offload_activations": True}]


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def batch():
    tokens = torch.arange(48).view(4, 12) % 37
    return tokens, tokens


def train(world, shape=SHAPE, **how):
    """Weak references to the engine and to what it trains, after two steps and all that may follow."""
    model = GPT(shape)
    engine = rl.prepare(model, loss=language_model_loss, optimizer=adamw, world=world, clip=0.5, **how)
    for _ in range(2):
        engine.step(batch())
    engine.evaluate([batch()])
    engine.load_full_state_dict(engine.full_state_dict())
    return [weakref.ref(x) for x in (engine, model, *model.parameters())]


def expect_freed(ranks, body):
    seen = [ref for refs in rl.simulate(ranks, body) for ref in refs]
    gc.collect()
    assert seen and not [ref() for ref in seen if ref() is not None]


@pytest.mark.parametrize(("stage", "options"), [*itertools.product(range(4), OPTIONS), *itertools.product((1, 3), OFFLOADS)], ids=str)
def test_an_engine_is_freed_with_its_model(stage, options):
    expect_freed(rl.Mesh(shard=2), lambda world: train(world, stage=stage, **options))


@pytest.mark.parametrize(("mesh", "shape", "stage"), [
    (rl.Mesh(replicate=2, shard=2), SHAPE, 3), (rl.Mesh(tensor=2), SHAPE, 0), (rl.Mesh(tensor=2, shard=2), SHAPE, 3),
    (rl.Mesh(context=2), SHAPE, 1), (rl.Mesh(pipe=2), SHAPE, 0), (rl.Mesh(pipe=2, shard=2), SHAPE, 3), (rl.Mesh(expert=2), EXPERTS, 0),
    (rl.Mesh(expert=2, shard=2), EXPERTS, 3), (rl.Mesh(pipe=2, expert=2), EXPERTS, 2),
], ids=str)
def test_an_engine_is_freed_on_every_axis(mesh, shape, stage):
    pipe = {"accumulate": 2} if mesh.pipe > 1 else {}
    expect_freed(mesh, lambda world: train(world, shape, stage=stage, **pipe))


@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard], ids=["data_parallel", "fully_shard"])
@pytest.mark.parametrize("by_itself", [False, True])
def test_a_model_that_was_wrapped_for_a_loop_of_ones_own_is_freed(wrap, by_itself):
    def body(world):
        model = GPT(SHAPE)
        wrapped = wrap(model, world)
        seen = [weakref.ref(x) for x in (wrapped, model, *model.parameters())]
        for _ in range(2):
            total, count = language_model_loss(model if by_itself else wrapped, batch())
            (total / count).backward()
        return seen

    expect_freed(2, body)


def test_a_model_averages_its_gradients_also_where_nobody_keeps_what_wraps_it():
    def body(world):
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        rl.data_parallel(model, world)
        gc.collect()
        model(torch.full((1, 2), float(world.rank))).sum().backward()
        return model.weight.grad

    for gradient in rl.simulate(2, body):
        torch.testing.assert_close(gradient, torch.full((1, 2), 0.5), rtol=0, atol=0)
