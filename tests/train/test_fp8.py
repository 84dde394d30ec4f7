"""FP8 training: which layers, what they compute, what they keep, and that a model learns with it."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import rankloom as rl
from rankloom.base.errors import ConfigError, NonFinite
from rankloom.base.float8 import E4M3, E5M2, BothWays, cast, magnitude, scaled_product
from rankloom.data.text import documents
from rankloom.models.config import preset
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss
from rankloom.train import fp8
from rankloom.train.fp8 import Float8Linear, Recipe, plan_float8, to_float8
from rankloom.train.precision import PRECISIONS
from rankloom.train.recompute import recompute

RECIPES = [Recipe(), Recipe(scaling="row"), Recipe(timing="delayed"), Recipe(backward=E4M3)]
NAMES = ["current", "row", "delayed", "e4m3"]
SMALL = preset("1M", vocab_size=256, seq_len=32, width=64, layers=2, ffn=160, tie=False)


def drawn(model: nn.Module) -> nn.Module:
    """The same weights for all ranks, which are threads: torch's own generator would be a race."""
    draw = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.data.normal_(0.0, 0.15, generator=draw)
    return model


def net(bias: bool = True) -> nn.Sequential:
    return drawn(nn.Sequential(nn.Linear(32, 48, bias=bias), nn.SiLU(), nn.Linear(48, 64, bias=bias), nn.Linear(64, 3)))


def rows(n: int, width: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def grads_of(model: nn.Module, loss, *given) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss(model, *given).backward()
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def same(a, b) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b))


# ---------------------------------------------------------------------- which layers


def test_every_linear_layer_of_a_gpt_is_converted_except_the_one_that_makes_the_output():
    model = GPT(SMALL)
    expected = [f"blocks.{i}.{name}" for i in range(2) for name in (
        "attention.query", "attention.key", "attention.value", "attention.output", "mlp.gate", "mlp.up", "mlp.down")]
    assert list(to_float8(model).layers) == expected
    assert [name for name, module in model.named_modules() if isinstance(module, Float8Linear)] == expected
    assert type(model.head) is nn.Linear


def test_a_converted_model_has_the_same_parameters_under_the_same_names_and_no_more_state():
    model = GPT(SMALL)
    before, state = dict(model.named_parameters()), {name: value.clone() for name, value in model.state_dict().items()}
    to_float8(model, Recipe(timing="delayed"))
    assert all(value is before[name] for name, value in model.named_parameters()) and not list(model.buffers())
    assert list(model.state_dict()) == list(state)
    GPT(SMALL, seed=1).load_state_dict(model.state_dict())


def test_the_plan_says_why_a_layer_stays():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(32, 16)
            self.body = nn.ModuleDict({"tied": nn.Linear(16, 32), "odd": nn.Linear(16, 24), "named": nn.Linear(16, 16),
                                       "plain": nn.Linear(16, 16)})
            self.body["tied"].weight = self.table.weight
            self.out = nn.Linear(16, 16)

    assert plan_float8(Odd(), keep=["*.na?ed"]) == {
        "body.tied": "its weight is another module's too", "body.odd": "16 x 24 does not divide by 16", "body.named": "keep names it",
        "body.plain": "", "out": "it makes the output"}
    assert to_float8(Odd(), Recipe(keep=("*.na?ed",))).layers.keys() == {"body.plain"}


def test_layers_with_one_weight_are_all_converted_or_none_is():
    class Mirror(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.between, self.again, self.decode = (nn.Linear(16, 16) for _ in range(4))
            self.decode.weight, self.again.weight = self.encode.weight, self.between.weight

    tied = "its weight is another module's too"
    assert plan_float8(Mirror()) == {"encode": tied, "between": "", "again": "", "decode": "it makes the output"}
    assert plan_float8(Mirror(), keep=["between"]) == {"encode": tied, "between": "keep names it", "again": tied,
                                                       "decode": "it makes the output"}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_without_elements_stays():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 0), nn.Linear(0, 16), nn.Linear(16, 16))
    assert plan_float8(model) == {"0": "", "1": "16 x 0 has no elements", "2": "0 x 16 has no elements", "3": "it makes the output"}
    layers = to_float8(model)
    layers.begin_step(whole=True)   # casts the weights
    assert model(torch.ones(4, 16)).isfinite().all()


def test_a_pattern_that_fits_nothing_and_a_model_that_keeps_all_are_errors():
    with pytest.raises(ConfigError, match="'bloks.0.mlp.up' fits no linear layer. Did you mean 'blocks.0.mlp.up'?"):
        to_float8(GPT(SMALL), Recipe(keep=("bloks.0.mlp.up",)))
    with pytest.raises(ConfigError, match="no layer of this model can be in fp8: 0: 2 x 3 does not divide by 16"):
        to_float8(nn.Sequential(nn.Linear(2, 3)))
    with pytest.raises(ConfigError, match="no layer of this model can be in fp8: the model: it makes the output"):
        to_float8(nn.Linear(16, 16))   # it was a KeyError: the model itself has no name
    with pytest.raises(ConfigError, match="1: 2 x 2 does not divide by 16; 2: 2 x 2 does not divide by 16; and 7 more. Train it in bf16"):
        to_float8(nn.Sequential(*(nn.Linear(2, 2) for _ in range(10))))
    with pytest.raises(ConfigError, match="there is no nn.Linear in it"):
        to_float8(nn.Sequential(nn.Conv2d(1, 1, 1)))


@pytest.mark.parametrize("wrong, says", [
    (dict(scaling="rows"), "scaling='rows' is unknown. Did you mean 'row'?"), (dict(timing="delay"), "Did you mean 'delayed'?"),
    (dict(timing="delayed", scaling="row"), "needs scaling='tensor'"), (dict(history=0), "expected 1 step or more"),
    (dict(margin=7), "a margin of 0 to 6"), (dict(forward=E5M2), "expected E4M3 forward")])
def test_a_recipe_that_cannot_be_is_refused(wrong, says):
    with pytest.raises(ConfigError) as caught:
        Recipe(**wrong)
    assert says in str(caught.value)


# ---------------------------------------------------------------------- what they compute


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_forward_and_backward_are_the_three_products_of_cast_matrices(recipe, dtype):
    model = net().to(dtype)
    to_float8(model, recipe)
    x, seed = rows(40).to(dtype).view(2, 20, 32).requires_grad_(), rows(40, 48, seed=1).to(dtype) * 1e-3
    layer, y = model[0], model[0](x)
    y.backward(seed.view_as(y))

    def eight(t, dim, kind):
        return cast(t, kind, magnitude(t, dim if recipe.scaling == "row" else None))

    flat, weight = x.detach().flatten(0, 1), layer.weight.detach()
    assert torch.equal(y.flatten(0, 1), scaled_product(eight(flat, 1, E4M3), eight(weight, 1, E4M3).transposed(), dtype) + layer.bias)
    assert torch.equal(x.grad.flatten(0, 1), scaled_product(eight(seed, 1, recipe.backward), eight(weight, 0, E4M3), dtype))
    assert torch.equal(layer.weight.grad, scaled_product(eight(seed, 0, recipe.backward).transposed(), eight(flat, 0, E4M3), dtype))
    assert torch.equal(layer.bias.grad, seed.sum(0))
    assert y.dtype == x.grad.dtype == layer.weight.grad.dtype == dtype


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=NAMES[:2])
def test_they_are_near_the_products_of_the_matrices_themselves(recipe):
    """Each factor is off by 1/16 (E4M3) or 1/8 (E5M2) at most, at random: of a sum of many, a few per cent."""
    plain, model = net(), net()
    to_float8(model, recipe)
    loss = lambda m: m[:3](rows(256)).square().sum()
    for found, expected in zip(grads_of(model, loss), grads_of(plain, loss)):
        assert 1e-4 < (found - expected).norm() / expected.norm() < 0.08


def test_rows_of_unlike_size_need_scales_of_their_own():
    x = rows(64) * torch.logspace(-8, 0, 64)[:, None]
    errors = {}
    for scaling in ("tensor", "row"):
        model = net(bias=False)
        exact = model[0](x).detach()
        to_float8(model, Recipe(scaling=scaling))
        errors[scaling] = ((model[0](x) - exact).norm(dim=1) / exact.norm(dim=1))[0].item()
    assert errors["row"] < 0.1 and errors["tensor"] > 0.5


def test_only_the_forward_product_may_be_added_up_roughly(monkeypatch):
    model, calls = net(), []
    to_float8(model)
    monkeypatch.setattr(fp8, "scaled_product", lambda *given, fast_accum=False: calls.append(fast_accum) or scaled_product(*given))
    model[0](rows(8).requires_grad_()).sum().backward()
    assert calls == [True, False, False]


@pytest.mark.parametrize("whole", [False, True])
def test_a_loss_with_a_gradient_in_it_is_refused_for_eight_bits_have_no_second_derivative(whole):
    model, x = net(), rows(8).requires_grad_()
    to_float8(model).begin_step(whole=whole)
    slope, = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.square().sum().backward()


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_a_vector_is_multiplied_as_a_row(recipe):
    def outputs_and_gradients(x):
        model = net()
        to_float8(model, recipe)
        out = model[0](x)
        out.square().sum().backward()
        return out.flatten(), model[0].weight.grad, model[0].bias.grad

    assert same(outputs_and_gradients(rows(1)[0]), outputs_and_gradients(rows(1)))


def test_an_empty_batch_and_frozen_parts_are_no_trouble():
    model = net()
    to_float8(model)
    assert model(torch.zeros(0, 32)).shape == (0, 3)
    model[0].weight.requires_grad_(False)
    x = rows(8).requires_grad_()
    model(x).sum().backward()
    assert model[0].weight.grad is None and model[0].bias.grad is not None and x.grad.abs().sum() > 0
    for param in model.parameters():
        param.requires_grad_(False)
    assert not model(rows(8)).requires_grad


@pytest.mark.parametrize("recipe", RECIPES[:3], ids=NAMES[:3])
def test_a_nan_or_an_infinity_ends_the_step_on_all_ranks(recipe):
    def body(world):
        model = net()
        layers = to_float8(model, recipe)
        engine = rl.prepare(model, loss=lambda m, x: (m(x).square().sum(), len(x)), optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
                            world=world, precision="bf16")
        x = rows(4)
        engine.step(x)
        layers.end_step(world.group("replicate"))
        if world.rank == 1:
            x[2, 2] = torch.inf
        with pytest.raises(NonFinite, match="rank 1: the loss of its own batch"):
            engine.step(x)

    rl.simulate(2, body)


# ---------------------------------------------------------------------- what they keep


@pytest.mark.parametrize("recipe", RECIPES[:3], ids=NAMES[:3])
def test_weights_cast_once_a_step_give_the_same_bits_and_are_dropped_before_they_change(recipe):
    def body(world):
        held, fresh = net(), net()
        layers, others = to_float8(held, recipe), to_float8(fresh, recipe)
        loss = lambda m: m(rows(32)).square().sum()
        for _ in range(3):
            layers.begin_step(whole=True)
            assert same(grads_of(held, loss) + grads_of(held, loss), grads_of(fresh, loss) * 2)
            for each in (layers, others):
                each.end_step(world.group("replicate"))
            for param in [*held.parameters(), *fresh.parameters()]:
                param.data -= 0.1 * param.grad
        assert all(layer.held is None for layer in layers.layers.values())

    rl.simulate(1, body)


def test_an_evaluation_that_fails_leaves_no_cast():
    layers = to_float8(net())
    with pytest.raises(KeyError), layers.weights_cast(whole=True):
        assert all(layer.held for layer in layers.layers.values())
        raise KeyError
    assert not any(layer.held for layer in layers.layers.values())


def saved_by(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        layer(x)
    return found


@pytest.mark.parametrize("recipe", RECIPES[:2], ids=NAMES[:2])
def test_what_is_kept_for_backward_is_eight_bits_of_the_input_and_no_copy_of_the_weight(recipe):
    model = net(bias=False)
    layers = to_float8(model, recipe)
    x = rows(128)
    kept = saved_by(model[0], x)
    weight = [t for t in kept if t.data_ptr() == model[0].weight.data_ptr()]
    assert len(weight) == 1
    rest = sum(t.nbytes for t in kept) - weight[0].nbytes
    assert x.numel() <= rest <= x.numel() + 4 * 32
    layers.begin_step(whole=True)
    assert all(t.dtype in (E4M3, torch.float32) and t.nbytes <= max(x.numel(), 48 * 32) for t in saved_by(model[0], x))


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("recipe", RECIPES[:3], ids=NAMES[:3])
def test_recompute_gives_the_same_bits(recipe, policy):
    def body(world):
        plain, again = drawn(Blocks()), drawn(Blocks())
        layers = [to_float8(plain, recipe), to_float8(again, recipe)]
        recompute(again, policy)
        for step in range(3):
            x = rows(16, seed=step)
            for each in layers:
                each.begin_step(whole=step != 1)
            assert same(grads_of(plain, lambda m, x: m(x).square().sum(), x), grads_of(again, lambda m, x: m(x).square().sum(), x))
            for each in layers:
                each.end_step(world.group("replicate"))
        if recipe.timing == "delayed":
            assert torch.equal(layers[0].history.rows, layers[1].history.rows) and plain.blocks[0].up.meters[0].ready

    rl.simulate(1, body)


def test_a_gathered_weight_in_eight_bits_is_all_that_a_layer_reads():
    """Forward and backward, while the parameter itself has no memory: what a unit at stage 3 does."""
    plain, model = net(bias=False), net(bias=False)
    to_float8(plain)
    to_float8(model)
    expected = grads_of(plain, lambda m: m[0](rows(16)).square().sum())
    eight = cast(model[0].weight.detach(), E4M3, magnitude(model[0].weight.detach()))
    model[0].weight.data = torch.empty_like(model[0].weight)
    model[0].weight.untyped_storage().resize_(0)
    model[0].held = BothWays(eight, eight)
    assert same(grads_of(model, lambda m: m[0](rows(16)).square().sum()), expected)


# ---------------------------------------------------------------------- delayed scaling


def test_delayed_scaling_begins_with_current_and_then_knows_only_the_past():
    def body(world):
        delayed, current = net(), net()
        layers = to_float8(delayed, Recipe(timing="delayed", history=2))
        to_float8(current)
        small, large = rows(16), rows(16, seed=1) * 1000.0
        loss = lambda x: lambda m: m[0](x).sum()
        assert same(grads_of(delayed, loss(small)), grads_of(current, loss(small)))
        grads_of(delayed, lambda m: m(small).sum())      # every layer is seen once
        layers.end_step(world.group("replicate"))
        assert delayed[0].meters[0].ready and delayed[0].meters[0].known == small.abs().max()
        with torch.no_grad():
            cut = delayed[0](large) - delayed[0].bias
        scale = cast(small, E4M3, magnitude(small)).scale.item()
        inside = large.clamp(-448 * scale, 448 * scale)
        expected = scaled_product(cast(inside, E4M3, magnitude(inside)),
                                  cast(delayed[0].weight, E4M3, magnitude(delayed[0].weight)).transposed(), torch.float32)
        torch.testing.assert_close(cut, expected, rtol=1e-5, atol=1e-4)     # adding and taking off the bias rounds
        layers.end_step(world.group("replicate"))
        with torch.no_grad():
            torch.testing.assert_close(delayed[0](large), current[0](large), rtol=0, atol=0)

    rl.simulate(1, body)


def test_a_margin_leaves_room_above_what_is_remembered():
    def body(world):
        model, x = net(), rows(16)
        layers = to_float8(model, Recipe(timing="delayed", margin=2))
        grads_of(model, lambda m: m(x).sum())
        layers.end_step(world.group("replicate"))
        with torch.no_grad():
            larger = model[0](x * 4.0) - model[0].bias
        expected = scaled_product(cast(x * 4.0, E4M3, magnitude(x * 4.0)),
                                  cast(model[0].weight.detach(), E4M3, magnitude(model[0].weight.detach())).transposed(), torch.float32)
        torch.testing.assert_close(larger, expected, rtol=1e-5, atol=1e-5)     # nothing was cut off; taking off the bias rounds

    rl.simulate(1, body)


def test_a_step_that_failed_leaves_no_trace_in_the_history():
    model = net()
    layers = to_float8(model, Recipe(timing="delayed"))
    model(rows(8) * 100.0)
    layers.begin_step(whole=True)
    assert not any(meter.seen for meter in layers.history.meters.values())


def test_evaluation_leaves_no_trace_in_the_history():
    model = net()
    history = to_float8(model, Recipe(timing="delayed")).history
    model.eval()
    model(rows(8) * 100.0)
    assert not any(meter.seen for meter in history.meters.values())
    model.train()
    model(rows(8))
    assert all(bool(meter.seen) == name.endswith("input") for name, meter in history.meters.items())     # no backward yet


@pytest.mark.parametrize("p", [2, 3, 4])
def test_the_next_scales_do_not_depend_on_who_had_which_rows(p):
    def known(world):
        model = net()
        layers = to_float8(model, Recipe(timing="delayed", history=3))
        for step in range(3):
            x = (rows(12, seed=step) * torch.logspace(0, 2, 12)[:, None]).tensor_split(world.size)[world.rank]
            grads_of(model, lambda m, x: m(x).sum(), x)
            layers.end_step(world.group("replicate"))
        return layers.history.state_dict()

    alone = rl.simulate(1, known)[0]
    for state in rl.simulate(p, known):
        for name, row in state.items():     # magnitudes of inputs behind a product in eight bits may differ by its rounding
            torch.testing.assert_close(row, alone[name], rtol=0 if name == "0.input" else 0.07, atol=0)


# ---------------------------------------------------------------------- compiled, and learning


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        return x + self.down(self.up(x).sigmoid())


class Blocks(nn.Module):
    """Three of the same kind: compiled one by one, they share code."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("recipe", RECIPES[1:3], ids=NAMES[1:3])
def test_compiled_blocks_are_one_graph_and_give_the_same(recipe):
    def body(world):
        torch._dynamo.reset()      # what other tests have compiled of the same code counts against a limit
        eager, compiled, counter = drawn(Blocks()), drawn(Blocks()), CompileCounterWithBackend("aot_eager")
        layers = [to_float8(eager, recipe), to_float8(compiled, recipe)]
        for block in compiled.blocks:
            block.compile(backend=counter, fullgraph=True)
        for step in range(2):
            x = rows(16, seed=step).requires_grad_()      # as every block's input does but the first one's
            for each in layers:
                each.begin_step(whole=True)
            for a, b in zip(grads_of(eager, lambda m, x: m(x).square().sum(), x), grads_of(compiled, lambda m, x: m(x).square().sum(), x)):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
            for each in layers:
                each.end_step(world.group("replicate"))
        assert counter.frame_count == (2 if recipe.timing == "delayed" else 1), "blocks of the same kind did not share their code"
        if recipe.timing == "delayed":
            assert layers[0].history.rows[:2].all() and not layers[0].history.rows[2:].any()
            torch.testing.assert_close(layers[0].history.rows, layers[1].history.rows, rtol=1e-5, atol=0)

    rl.simulate(1, body)


@cache
def losses_of(recipe: Recipe | None) -> list[float]:
    """Of 60 steps on real text."""
    def body(world):
        precision = replace(PRECISIONS["fp8"], float8=recipe) if recipe else "bf16"
        engine = rl.prepare(GPT(SMALL), loss=language_model_loss, world=world, precision=precision,
                            optimizer=lambda p: torch.optim.AdamW(p, 3e-3))
        text = torch.frombuffer(bytearray(next(documents("stdlib")).text.encode()), dtype=torch.uint8).long()
        draw, losses = torch.Generator().manual_seed(0), []
        for _ in range(60):
            piece = torch.stack([text[at : at + 33] for at in torch.randint(0, len(text) - 33, (8,), generator=draw)])
            losses.append(engine.step((piece[:, :-1], piece[:, 1:])).loss)
        return losses

    return rl.simulate(1, body)[0]


@pytest.mark.parametrize("recipe", RECIPES[:3], ids=NAMES[:3])
def test_a_gpt_learns_as_it_does_in_bf16(recipe):
    """Early, where the loss falls fast, a few per cent are a step or two; the real comparison is benchmarks/gpu_fp8.py."""
    bf16, fp8 = losses_of(None), losses_of(recipe)
    assert bf16[-1] < 0.7 * bf16[0]
    assert sum(fp8[-10:]) == pytest.approx(sum(bf16[-10:]), rel=0.03) and fp8 != bf16
