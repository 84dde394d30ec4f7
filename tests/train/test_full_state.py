"""`full_state_dict(rank)` on meshes that split the model: one rank gets the whole, the others hold no more than a tensor meanwhile."""

import pytest
import torch

import rankloom as rl
from rankloom import GPT, GPTConfig
from rankloom.models.config import MoEConfig
from rankloom.models.loss import language_model_loss
from storages import Storages

MESHES = [(rl.Mesh(replicate=3), 0), (rl.Mesh(replicate=2, shard=2), 3), (rl.Mesh(tensor=2), 0), (rl.Mesh(pipe=3), 1),
          (rl.Mesh(shard=2, expert=2), 3), (rl.Mesh(pipe=2, context=2), 2), (rl.Mesh(replicate=2, tensor=2), 2),
          (rl.Mesh(shard=2, tensor=2, expert=2), 1), (rl.Mesh(pipe=2, shard=2, tensor=2), 3)]


def engine_of(world: rl.World, stage: int, layers: int = 2) -> rl.Engine:
    """After a step of AdamW, on rows that are the same everywhere."""
    experts = MoEConfig(experts=4, top_k=2, ffn=12, shared=1, bias_rate=0.01) if world.mesh.expert > 1 else None
    config = GPTConfig(vocab_size=37, width=16, layers=layers, heads=4, kv_heads=1, ffn=24, seq_len=12, tie=stage < 2, moe=experts)
    pipe = {"pipe": "1f1b", "accumulate": 2} if world.mesh.pipe > 1 else {}
    engine = rl.prepare(GPT(config, dtype=torch.float64), loss=language_model_loss, world=world, stage=stage,
                        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), **pipe)
    tokens = torch.randint(0, 37, (4, 13), generator=torch.Generator().manual_seed(1))
    engine.step((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return engine


@pytest.mark.parametrize("mesh, stage", MESHES, ids=str)
def test_one_rank_gets_what_all_would_get_and_the_others_nothing(mesh, stage):
    def body(world):
        engine = engine_of(world, stage)
        return engine.full_state_dict(), [engine.full_state_dict(rank) for rank in range(world.size)]

    for rank, (everywhere, asked) in enumerate(rl.simulate(mesh, body)):
        for root, state in enumerate(asked):
            if root != rank:
                assert state == {"model": {}, "optimizer": {}}
                continue
            assert state["model"].keys() == everywhere["model"].keys() and state["model"]
            assert all(torch.equal(state["model"][name], value) for name, value in everywhere["model"].items())
            assert state["optimizer"]["param_groups"] == everywhere["optimizer"]["param_groups"]
            ours, theirs = state["optimizer"]["state"], everywhere["optimizer"]["state"]
            assert ours.keys() == theirs.keys() and ours
            for name, held in theirs.items():
                assert ours[name].keys() == held.keys() and all(torch.equal(ours[name][key], value) for key, value in held.items())


LARGEST = 256 * 64 * 8   # the embedding


def large_engine(world: rl.World, stage: int) -> rl.Engine:
    """The state is 50 times its largest tensor."""
    config = GPTConfig(vocab_size=256, width=64, layers=8, heads=4, kv_heads=4, ffn=96, seq_len=12, tie=True)
    pipe = {"pipe": "1f1b", "accumulate": 2} if world.mesh.pipe > 1 else {}
    engine = rl.prepare(GPT(config, dtype=torch.float64), loss=language_model_loss, world=world, stage=stage,
                        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), **pipe)
    tokens = torch.zeros(4, 12, dtype=torch.long)
    engine.step((tokens, tokens))
    return engine


@pytest.mark.parametrize("mesh, stage", [(rl.Mesh(tensor=2), 0), (rl.Mesh(pipe=2), 1), (rl.Mesh(replicate=2, shard=2), 3),
                                         (rl.Mesh(pipe=2, shard=2), 3), (rl.Mesh(context=2), 2)], ids=str)
def test_the_others_hold_a_tensor_at_a_time(mesh, stage):
    def body(world):
        engine = large_engine(world, stage)
        with Storages(fresh=True) as storages:
            state = engine.full_state_dict(rank=world.size - 1)
        return storages.peak, sum(value.nbytes for value in state["model"].values())

    *others, (most, whole) = rl.simulate(mesh, body)
    assert most > 3 * whole > 50 * LARGEST
    for peak, kept in others:
        assert kept == 0 and peak < 4 * LARGEST   # a part, its copy to send, and what a gloo thread has not let go yet
