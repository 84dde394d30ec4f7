"""Mixtures of experts in training: evaluation where ranks have different numbers of batches, counts of tokens, auxiliary losses."""

import dataclasses

import pytest
import torch

import rankloom as rl
from rankloom.models.config import GPTConfig, MoEConfig
from rankloom.models.gpt import GPT, Block
from rankloom.models.loss import language_model_loss
from rankloom.models.moe import Experts, MoE

RTOL = 1e-12   # fp64: the same terms in another order
MOE = MoEConfig(experts=4, top_k=2, ffn=12, shared=1, balance_loss=0.3, router_z_loss=0.2, bias_rate=0.05)
SHAPE = GPTConfig(vocab_size=37, width=16, layers=2, heads=2, kv_heads=2, ffn=24, seq_len=12, moe=MOE)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def make_engine(world, stage, *, sink=None, moe=MOE, **options):
    if world.mesh.pipe > 1:
        options = {"accumulate": 2} | options
    model = GPT(dataclasses.replace(SHAPE, moe=moe), dtype=torch.float64)
    return rl.prepare(model, loss=language_model_loss, optimizer=adamw, world=world, stage=stage, clip=0.5, sink=sink, **options)


def rows(number, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 37, (number, 12), generator=draw) for _ in range(2))


def share(batch, group):
    return tuple(t.tensor_split(group.size)[group.rank] for t in batch)


LAYOUTS = [
    (rl.Mesh(expert=2), 0, {}), (rl.Mesh(expert=4), 1, {}), (rl.Mesh(replicate=2, expert=2), 0, {}), (rl.Mesh(shard=2, expert=2), 3, {}),
    (rl.Mesh(shard=2, expert=2), 2, {}), (rl.Mesh(shard=2, expert=2), 3, {"units": MoE}),
    (rl.Mesh(shard=2, expert=2), 3, {"units": (Block, Experts)}),
    (rl.Mesh(tensor=2, expert=2), 0, {}), (rl.Mesh(context=2, expert=2), 3, {}), (rl.Mesh(pipe=2, expert=2), 0, {}),
    (rl.Mesh(pipe=2, shard=2, expert=2), 3, {}),
    (rl.Mesh(pipe=2, shard=2), 3, {}), (rl.Mesh(shard=2), 3, {}), (rl.Mesh(shard=2), 3, {"keep_gathered": True}),
    (rl.Mesh(shard=2), 3, {"deterministic": 8}),
]


@pytest.mark.parametrize(("mesh", "stage", "options"), LAYOUTS, ids=str)
@pytest.mark.parametrize("uneven", [(1,), (0, 2, 1, 3)], ids=["one batch for all", "different numbers"])
def test_an_evaluation_is_exact_however_few_batches_a_rank_has(mesh, stage, options, uneven):
    def body(world):
        engine = make_engine(world, stage, **options)
        engine.step(share(rows(8), engine.group))
        held = dict(enumerate(uneven)).get(engine.group.rank, 0)
        mine = [rows(3, seed=10 * engine.group.rank + n + 1) for n in range(held)]
        found = engine.evaluate(mine)
        engine.step(share(rows(8), engine.group))   # and training goes on
        return found.loss, found.count, engine.evaluate(iter(mine)).loss

    def alone(world):
        engine = make_engine(world, 0)
        engine.step(rows(8))
        groups = mesh.replicate * mesh.shard * mesh.expert
        everything = [rows(3, seed=10 * rank + n + 1) for rank, held in enumerate(uneven[:groups]) for n in range(held)]
        found = engine.evaluate(everything)
        engine.step(rows(8))
        return found.loss, found.count, engine.evaluate(everything).loss

    expected = rl.simulate(1, alone)[0]
    for found in rl.simulate(mesh, body, timeout=20):
        assert found == pytest.approx(expected, rel=RTOL)
