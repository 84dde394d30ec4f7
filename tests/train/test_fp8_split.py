"""FP8 where the layers are split over tensor ranks or stand in stages: cast to the bits of one process, and multiplied to the same sums."""

import ast
import copy
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import rankloom as rl
from closeness import expect_close
from rankloom.models.config import GPTConfig
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss
from rankloom.parallel.tensor.layers import ColumnLinear
from rankloom.train.fp8 import Float8Column, Float8Row, InFloat8, Recipe, cast_weights, linear_layers, to_float8
from rankloom.train.precision import PRECISIONS, Precision
from split_model import joined

RECIPES = {"current": Recipe(), "row": Recipe(scaling="row"), "delayed": Recipe(timing="delayed", history=2)}
PLAN = {"body.up": "colwise", "body.down": "rowwise"}
RANKS = [1, 2, 4]


class Pair(nn.Module):
    """Whole numbers, so that sums in fp32 are exact in any order; the later features are so small that a scale for all loses them."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)})
        draw = torch.Generator().manual_seed(0)
        for param in self.parameters():
            param.data = torch.randint(-3, 4, param.shape, generator=draw).float()
        self.body.up.weight.data[40:] *= 2.0**-19
        self.body.up.bias.data[40:] *= 2.0**-19
        self.body.down.weight.data[:, :20] *= 2.0**-19

    def forward(self, x):
        return self.body.down(self.body.up(x).relu())


def inputs(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, and what to multiply the output by, whose gradient that is."""
    draw = torch.Generator().manual_seed(step)
    x, g = (torch.randint(-3, 4, (24, 32), generator=draw).float() for _ in range(2))
    return x * 2.0**(step % 2), g


def run(model: nn.Module, recipe: str, group: rl.Group) -> list[dict[str, torch.Tensor]]:
    """Output and gradients of three steps."""
    layers, found = to_float8(model, RECIPES[recipe], group), []
    for step in range(3):
        model.zero_grad()
        x, g = inputs(step)
        x.requires_grad_()
        y = model(x)
        (y * g).sum().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        found.append({"y": y.detach(), "x": x.grad, **joined(grads, model, group)})
        layers.end_step(group.alone())
    return found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_split_layers_give_the_bits_of_whole_ones_where_scales_agree(recipe, ranks):
    truth = rl.simulate(1, lambda world: run(Pair(), recipe, world))[0]
    assert all(len(step["body.up.weight"].unique()) > 10 for step in truth)

    def body(world):
        model = rl.tensor_parallel(Pair(), PLAN, world)
        return run(model, recipe, world)

    for mine in rl.simulate(ranks, body):
        for ours, theirs in zip(mine, truth, strict=True):
            # scaled by rows, small features are not lost beside large ones: 64 terms are rounded to fp32
            expect_close(ours, theirs, 64 * 2**-24 * 64 if recipe == "row" else 0.0)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_a_part_of_a_matrix_is_cast_to_that_part_of_the_cast_matrix(scaling, ranks):
    """Any values, spread over 2**40."""
    draw = torch.Generator().manual_seed(3)
    whole = torch.randn(64, 64, generator=draw) * torch.logspace(-20, 20, 64, base=2.0)[:, None]
    unsplit = nn.ModuleDict({"body": nn.ModuleDict({"layer": nn.Linear(64, 64)})})
    unsplit.body.layer.weight.data[-1, -1] = 100.0   # one rank has the largest
    plain = copy.deepcopy(unsplit)
    to_float8(plain, Recipe(scaling=scaling))
    truth = plain.body.layer

    def body(world):
        mine = slice(64 // ranks * world.rank, 64 // ranks * (world.rank + 1))
        for word, kind, cut in (("colwise", Float8Column, 0), ("rowwise", Float8Row, 1)):
            model = copy.deepcopy(unsplit)
            rl.tensor_parallel(model, {"body.layer": word}, world)
            to_float8(model, Recipe(scaling=scaling))
            layer = model.body.layer
            assert type(layer) is kind
            with torch.no_grad():   # as at the beginning of a step
                check(cast_weights([layer])[0], truth.cast_weight(truth.weight), cut, mine)
            for x in (whole, whole.T.contiguous()):
                part = x.narrow(cut, mine.start, 64 // ranks)
                check(layer.cast_weight(part), truth.cast_weight(x), cut, mine)
                check(layer.cast_input(x if cut == 0 else x[:, mine]), truth.cast_input(x), None if cut == 0 else 1, mine)
                check(layer.cast_gradient(x if cut == 1 else x[:, mine]), truth.cast_gradient(x), None if cut == 1 else 1, mine)

    def check(mine, theirs, cut, span):
        for ours, other in zip(mine, theirs, strict=True):
            data = other.data if cut is None else other.data.narrow(cut, span.start, span.stop - span.start)
            scale = other.scale
            if cut is not None and scale.shape[cut] > 1:
                scale = scale.narrow(cut, span.start, span.stop - span.start)
            assert torch.equal(ours.data.float(), data.float()) and torch.equal(ours.scale, scale)

    rl.simulate(ranks, body)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_not_finite_on_one_rank_is_missed_by_none(bad, rank):
    def body(world):
        model = rl.tensor_parallel(Pair(), PLAN, world)
        to_float8(model)
        if world.rank == rank:
            model.body.up.weight.data[3, 3] = bad
        x = inputs(0)[0]
        return model(x)[:, 5].isfinite().any().item(), model.body.up(x).isfinite().any().item()

    assert rl.simulate(2, body) == [(False, False)] * 2, "in one process the scale of the whole matrix is lost"


def test_layers_are_chosen_as_in_one_process_and_a_part_that_does_not_fit_is_an_error():
    config = GPTConfig(vocab_size=64, width=64, layers=1, heads=4, kv_heads=2, ffn=48, seq_len=16, tie=False)
    names = list(to_float8(GPT(config)).layers)

    def body(world, ranks):
        model = GPT(config)
        rl.tensor_parallel(model, model.tp_plan, world)
        recipe = Recipe(keep=("*.mlp.*",) if ranks == 2 else ())
        assert list(to_float8(model, recipe).layers) == [n for n in names if "mlp" not in n or ranks == 1]
        for elsewhere in (None, world):
            model = GPT(config)
            rl.tensor_parallel(model, model.tp_plan, world)
            with pytest.raises(rl.ConfigError, match=r"blocks.0.mlp.gate: a rank's part of the weight is 64 x 24, .* by 16. Use") as caught:
                to_float8(model, elsewhere=elsewhere)
            kept = re.search(r"keep=(\(.*?\))", str(caught.value)).group(1)
            to_float8(model, Recipe(keep=ast.literal_eval(kept)))   # what it says to do can be done
        model = GPT(config)
        rl.tensor_parallel(model, model.tp_plan, world)
        with pytest.raises(rl.ConfigError, match="a rank's part of the weight is 64 x 24"):   # of another stage, as it may be
            to_float8(model, Recipe(keep=("*.mlp.*",) if world.rank == 0 else ()), elsewhere=world)

    assert "head" not in names
    rl.simulate(2, lambda world: body(world, 2))


def test_a_part_that_lies_by_input_features_stays_as_the_whole_layer_would():
    """`Conv1D` of transformers is no nn.Linear."""
    def body(world):
        made = lambda by_inputs: ColumnLinear(nn.Parameter(torch.zeros(16, 16)), None, world, None, transposed=by_inputs, gathers=0,
                                              label="")
        return [*linear_layers(nn.ModuleDict({"by_inputs": made(True), "by_outputs": made(False)}))]

    assert rl.simulate(1, body) == [["by_outputs"]]


# ---------------------------------------------------------------- in an engine


def squares(model, batch):
    x, g = batch
    return (model(x) * g).float().sum(), len(x)


def exactly(world: rl.World, recipe: str, stage: int) -> tuple[float, float]:
    """Loss and gradient norm of one step."""
    fp8 = Precision("fp8 in fp32", torch.float32, float8=RECIPES[recipe])
    plan = {"tensor_plan": PLAN} if world.mesh.tensor > 1 else {}
    engine = rl.prepare(Pair(), loss=squares, optimizer=lambda p: torch.optim.SGD(p, lr=0.0), world=world, precision=fp8, stage=stage,
                        **plan)
    report = engine.step([t.tensor_split(engine.group.size)[engine.group.rank] for t in inputs(0)])
    return report.loss, report.grad_norm


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_that_travel_in_eight_bits_have_the_scale_of_the_whole(recipe, stage):
    """Sums are exact, but for that of the norm, in fp32 on one process; scaled by rows, weights do not travel so."""
    ((loss, norm),) = rl.simulate(1, lambda world: exactly(world, recipe, stage))
    for mine in rl.simulate(rl.Mesh(tensor=4), lambda world: exactly(world, recipe, stage)):
        assert mine == (loss, pytest.approx(norm, rel=2**-20))
    assert loss != 0


CONFIG = GPTConfig(vocab_size=64, width=64, layers=2, heads=4, kv_heads=2, ffn=128, seq_len=16, tie=False)


def train(world: rl.World, precision: str | Precision, *, config: GPTConfig = CONFIG, accumulate: int = 2, **options):
    """Losses of three steps, and the weights."""
    pipe = {"pipe": "1f1b"} if world.mesh.pipe > 1 else {}
    engine = rl.prepare(GPT(config), loss=language_model_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.5), world=world,
                        precision=precision, accumulate=accumulate, **pipe, **options)
    found = sum(isinstance(module, InFloat8) for module in engine.model.modules())
    assert found == 0 if precision == "bf16" else found > 0
    draw, losses = torch.Generator().manual_seed(2), []
    for _ in range(3):
        tokens = torch.randint(0, 64, (8, 17), generator=draw).tensor_split(engine.group.size)[engine.group.rank]
        losses.append(engine.step((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())).loss)
    return losses, engine.full_state_dict()["model"]


def fp8(recipe: str) -> Precision:
    return replace(PRECISIONS["fp8"], float8=RECIPES[recipe])


MESHES = [(rl.Mesh(tensor=2), 0, "current"), (rl.Mesh(tensor=2), 3, "row"), (rl.Mesh(tensor=4), 1, "delayed"),
          (rl.Mesh(shard=2, tensor=2), 3, "delayed"), (rl.Mesh(pipe=2, tensor=2), 2, "current"), (rl.Mesh(pipe=2, tensor=2), 1, "delayed"),
          (rl.Mesh(context=2, tensor=2), 1, "row")]


@pytest.mark.parametrize(("mesh", "stage", "recipe"), MESHES, ids=str)
def test_a_split_model_trains_as_in_one_process(mesh, stage, recipe):
    """Owed sums are rounded to bf16 on each rank, so values differ by some 2**-8, and so do losses, but by a mean of many of these."""
    ((losses, _),) = rl.simulate(1, lambda world: train(world, fp8(recipe)))
    for mine, _ in rl.simulate(mesh, lambda world: train(world, fp8(recipe), stage=stage)):
        assert mine == pytest.approx(losses, rel=2**-8)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_pipeline_in_fp8_has_the_bits_of_one_process(recipe):
    """Every stage does the products of one process, on the same micro-batches; delayed scales are those of all stages' steps."""
    ((losses, weights),) = rl.simulate(1, lambda world: train(world, fp8(recipe)))
    assert losses != rl.simulate(1, lambda world: train(world, "bf16"))[0][0]
    for stage in (0, 1, 3):
        for mine, state in rl.simulate(rl.Mesh(pipe=2), lambda world, stage=stage: train(world, fp8(recipe), stage=stage)):
            assert mine == losses
            assert all(torch.equal(state[name], value) for name, value in weights.items())


def test_split_tokens_and_recompute_go_with_fp8():
    ((losses, _),) = rl.simulate(1, lambda world: train(world, "fp8"))
    for options in ({"recompute": "full"}, {"recompute": "selective"}, {"tensor_plan": GPT(CONFIG).tp_sequence_plan}):
        for mine, _ in rl.simulate(rl.Mesh(tensor=2), lambda world, options=options: train(world, "fp8", **options)):
            assert mine == pytest.approx(losses, rel=2**-8)


def test_a_step_that_is_not_finite_on_one_tensor_rank_is_skipped_by_all_and_leaves_no_trace():
    def body(world):
        engine = rl.prepare(Pair(), loss=squares, optimizer=lambda p: torch.optim.SGD(p, lr=1e-9), world=world, tensor_plan=PLAN,
                            precision=Precision("fp8 in fp32", torch.float32, float8=RECIPES["delayed"]))
        x, g = inputs(0)
        first = engine.step((x, g)).grad_norm
        with pytest.raises(rl.NonFinite):
            engine.step((x / 0, g))
        return first, engine.step((x, g)).grad_norm

    assert all(0 < later < 2 * first for first, later in rl.simulate(rl.Mesh(tensor=2), body))
