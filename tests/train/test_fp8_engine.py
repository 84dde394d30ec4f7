"""`rl.prepare(precision="fp8")`: the same bits at every stage and on any number of ranks, and what it is made of."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import rankloom as rl
from awkward import fingerprint
from rankloom.shard.float8_unit import Float8Unit
from rankloom.train.fp8 import Float8Linear, Recipe
from rankloom.train.placement import ReplicatedPlacement
from rankloom.train.precision import PRECISIONS

RECIPES = {"current": Recipe(), "row": Recipe(scaling="row"), "delayed": Recipe(timing="delayed", history=2)}


class Net(nn.Module):
    """Blocks with norms that stay as they are, a frozen layer, a layer used twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32, bias=False))
                                    for _ in range(2))
        self.twice, self.head = nn.Linear(32, 32), nn.Linear(32, 3)
        draw = torch.Generator().manual_seed(0)
        for param in self.parameters():
            param.data.normal_(0.0, 0.2, generator=draw)
        self.blocks[1][1].weight.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.twice(self.twice(x)))


def squares(model, x):
    return model(x).float().square().sum(), len(x)


def precision(recipe: str) -> object:
    return replace(PRECISIONS["fp8"], float8=RECIPES[recipe])


def engine_on(world, recipe: str, **options):
    return rl.prepare(Net(), loss=squares, world=world, precision=precision(recipe), clip=1.0,
                      **{"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2), **options})


def train(world, recipe: str, **options) -> tuple[str, list[float]]:
    engine = engine_on(world, recipe, **options)
    rows = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(1)) * torch.logspace(0, 1, 16)[:, None]
    losses = [engine.step(x.tensor_split(world.size)[world.rank]).loss for x in rows]
    return fingerprint(engine.full_state_dict(), losses), losses


def test_a_step_that_updates_nothing_leaves_the_history_of_delayed_scaling_as_it_was():
    def body(world):
        engine = engine_on(world, "delayed")
        good = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
        engine.step(good)
        before = engine.full_state_dict()["optimizer"]["run"]["amax"]
        with pytest.raises(rl.NonFinite):
            engine.step(good * torch.tensor([100.0, 1.0, 1.0, torch.nan])[:, None])
        return before, engine.full_state_dict()["optimizer"]["run"]["amax"]

    (before, after), = rl.simulate(1, body)
    assert before and {name: row.tolist() for name, row in after.items()} == {name: row.tolist() for name, row in before.items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_deterministic_training_has_one_hash_for_all_stages_and_meshes(recipe):
    threads = torch.get_num_threads()
    alone, losses = rl.simulate(1, lambda world: train(world, recipe, deterministic=4))[0]
    assert losses[2] < losses[0]
    for stage in (0, 1, 2, 3):
        for mesh in (2, 4, rl.Mesh(replicate=2, shard=2)):
            found = rl.simulate(mesh, lambda world, stage=stage: train(world, recipe, stage=stage, deterministic=4))
            assert {mine[0] for mine in found} == {alone}, (stage, mesh)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", [dict(stage=0), dict(stage=2), dict(stage=3), dict(stage=3, offload=True), dict(stage=3, accumulate=2)],
                         ids=str)
def test_any_stage_is_near_one_process(recipe, options):
    """Gradients are added in another order, and the scales of what flows are those of fewer rows: a per cent of the loss.

    With SGD: Adam turns the sign of a gradient that is almost zero into a whole step.
    """
    sgd = lambda params: torch.optim.SGD(params, lr=0.1)
    alone = rl.simulate(1, lambda world: train(world, recipe, optimizer=sgd))[0][1]
    for _, losses in rl.simulate(2, lambda world: train(world, recipe, optimizer=sgd, **options)):
        assert losses == pytest.approx(alone, rel=0.01) and losses[2] < 0.9 * losses[0]


def test_weights_are_cast_once_a_step_where_they_are_whole_and_travel_in_eight_bits_where_they_are_cut():
    def body(world):
        held = {}
        for stage in (0, 1, 3):
            engine = engine_on(world, "current", stage=stage)
            seen = held[stage] = []
            layer = engine.model.blocks[0][1]
            layer.register_forward_hook(lambda module, args, output, seen=seen: seen.append(module.held))
            engine.step(torch.ones(4, 32))
            if isinstance(engine.placement, ReplicatedPlacement):
                assert layer.held is None
            else:
                units = [unit for section in engine.placement.sharding.sections for unit in section.units]
                assert sum(isinstance(unit, Float8Unit) for unit in units) >= 3
        return {stage: all(weights is not None for weights in seen) and bool(seen) for stage, seen in held.items()}

    assert rl.simulate(2, body) == [{0: True, 1: True, 3: True}] * 2


def test_an_evaluation_casts_each_whole_weight_once_for_all_batches_and_keeps_none():
    def body(world):
        engine, seen = engine_on(world, "delayed"), []
        engine.step(torch.ones(4, 32))
        before = engine.full_state_dict()["optimizer"]["run"]["amax"]
        layer = engine.model.blocks[0][1]
        layer.register_forward_hook(lambda module, args, output: seen.append(module.held.by_rows.data.data_ptr()))
        engine.evaluate([torch.ones(4, 32)] * 3)
        assert layer.held is None
        after = engine.full_state_dict()["optimizer"]["run"]["amax"]
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        return len(seen), len({*seen})

    assert rl.simulate(2, body) == [(3, 1)] * 2


def test_what_computes_in_full_and_what_the_recipe_keeps_stays():
    chosen = Recipe(keep=("twice",))
    def body(world):
        kept = rl.prepare(Net(), loss=squares, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), world=world,
                          precision=replace(PRECISIONS["fp8"], float8=chosen, full=("blocks.0", "blocks.0.*")))
        kept.step(torch.ones(2, 32))
        return [name for name, module in kept.model.named_modules() if isinstance(module, Float8Linear)]

    assert rl.simulate(1, body) == [["blocks.1.1", "blocks.1.3"]]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("tied, kept", [("4", ()), ("3", ("3",))], ids=["with the output", "with one that is kept"])
def test_a_weight_that_a_layer_in_bf16_shares_trains_as_at_stage_0(stage, tied, kept):
    """Gathered in 8 bits it is NaN for whoever reads its values."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
    model.get_submodule(tied).weight = model[0].weight
    form = replace(PRECISIONS["fp8"], float8=Recipe(keep=kept))

    def losses(world, stage):
        engine = rl.prepare(copy.deepcopy(model), loss=squares, optimizer=lambda p: torch.optim.SGD(p, lr=1e-2), world=world, stage=stage,
                            precision=form)
        return [engine.step(torch.ones(4, 32)).loss for _ in range(2)]

    assert rl.simulate(2, lambda world: losses(world, stage)) == rl.simulate(2, lambda world: losses(world, 0))


def test_a_bad_step_changes_nothing_and_the_next_one_goes_on():
    def body(world, recipe):
        engine = engine_on(world, recipe)
        good = torch.ones(4, 32)
        engine.step(good)
        before = engine.full_state_dict()["model"]
        with pytest.raises(rl.NonFinite, match="rank 0: the loss of its own batch is"):
            engine.step(good / 0 if world.rank == 0 else good)
        assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict()["model"].items())
        return engine.step(good).loss

    for recipe in RECIPES:
        assert all(loss > 0 for loss in rl.simulate(2, lambda world, recipe=recipe: body(world, recipe)))


def test_weights_that_are_loaded_after_a_step_that_failed_are_those_that_multiply():
    def body(world):
        old, new = engine_on(world, "current"), engine_on(world, "current")
        state = new.full_state_dict()
        state["model"]["twice.weight"] *= -1
        with pytest.raises(RuntimeError, match="32"):
            old.step(torch.ones(4, 31))
        return [engine.load_full_state_dict(state) or engine.evaluate([torch.ones(4, 32)]).loss for engine in (old, new)]

    (old, new), = rl.simulate(1, body)
    assert old == new
