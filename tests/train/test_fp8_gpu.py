"""FP8 on a device that multiplies eight bits itself. Nothing but `DEVICE` knows which: on "cpu" the same lines test the emulation."""

import copy

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.base.float8 import E4M3, E5M2, cast, cast_twice, magnitude, magnitudes, multiplies_float8, scaled_product
from rankloom.models.config import preset
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss
from rankloom.train.fp8 import Recipe, to_float8

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.skipif(
    not (torch.cuda.is_available() and multiplies_float8(torch.device("cuda"))), reason="needs a CUDA device from compute capability 8.9")]
RECIPES = {"current": Recipe(), "row": Recipe(scaling="row"), "delayed": Recipe(timing="delayed")}
# What a matrix unit loses of a sum, of the sum of magnitudes: it adds up in some 14 bits between its additions in fp32, and in these
# only where `fast_accum` lets it.
LOST, LOST_FAST = 2.0**-12, 2.0**-9


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_a_device_casts_to_the_bits_of_the_cpu(dtype, dim, given):
    x = (normal(256, 512, seed=0) * torch.logspace(-6, 6, 512)).to(given)
    there = x.to(DEVICE)
    here, found = cast(x, dtype, magnitude(x, dim)), cast(there, dtype, magnitude(there, dim))
    assert torch.equal(found.data.cpu().view(torch.uint8), here.data.view(torch.uint8)) and torch.equal(found.scale.cpu(), here.scale)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(256, 512), (300, 16), (1, 272)])
@pytest.mark.parametrize("known", [None, 0.5])
def test_one_pass_writes_the_bits_of_the_cpu_by_rows_and_by_columns(dtype, given, shape, known):
    """Also those of values out of range, where the scale was known before, and of a NaN; and of a matrix that lies by columns."""
    x = (normal(*shape, seed=0) * torch.logspace(-6, 1, shape[1])).to(given)
    x[0, 3] = torch.nan if known else 0.0
    for there in (x.to(DEVICE), x.t().contiguous().to(DEVICE).t()):
        reference = known and torch.full((1, 1), known)
        here = cast(x, dtype, magnitude(x), reference=reference)
        by_rows, by_columns = cast_twice(there, dtype, magnitude(there), reference=None if reference is None else reference.to(DEVICE))
        assert by_rows.data.is_contiguous() and by_columns.data.t().is_contiguous(), "a product would have to copy it"
        for found in (by_rows, by_columns):
            torch.testing.assert_close(found.data.cpu().float(), here.data.float(), rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(found.scale.cpu(), here.scale, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_a_magnitude_is_found_without_writing_those_of_all_elements(dim):
    there = normal(1024, 512, seed=0).to(torch.bfloat16).to(DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    magnitude(there, dim)
    assert torch.cuda.max_memory_allocated() - before < there.nbytes / 2


def test_magnitudes_of_many_tensors_are_those_of_each_on_a_device():
    tensors = [normal(48, 16 * n, seed=n).to(torch.bfloat16).to(DEVICE) for n in range(1, 5)]
    tensors[2][1, 1], tensors[3][2, 2] = torch.nan, -torch.inf
    expected = torch.cat([magnitude(x).view(1) for x in tensors])
    torch.testing.assert_close(magnitudes(tensors), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dims", [(None, None), (1, 0)])
@pytest.mark.parametrize("shape", [(512, 4096, 256), (40, 24, 16), (1, 16, 48), (1000, 528, 272)])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fast", [False, True])
def test_a_device_multiplies_as_the_emulation_does(dims, shape, out, fast):
    m, k, n = shape
    a, b = normal(m, k, seed=1).to(DEVICE), normal(k, n, seed=2).to(DEVICE)
    left, right = cast(a, E5M2, magnitude(a, dims[0])), cast(b, E4M3, magnitude(b, dims[1]))
    exact, size = left.values().double() @ right.values().double(), left.values().double().abs() @ right.values().double().abs()
    found = scaled_product(left, right, out, fast_accum=fast)
    rounding = 2.0**-8 if out == torch.bfloat16 else 0.0
    assert found.dtype == out
    assert ((found.double() - exact).abs() <= (LOST_FAST if fast else LOST) * size + rounding * exact.abs()).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_device_shows_what_is_not_finite(bad):
    x = normal(64, 64, seed=0)
    x[3, 5] = bad
    there, other = x.to(DEVICE), normal(64, 64, seed=1).to(DEVICE)
    right = cast(other, E4M3, magnitude(other))
    assert not scaled_product(cast(there, E4M3, magnitude(there)), right, torch.bfloat16).isfinite().any()
    by_rows = scaled_product(cast(there, E4M3, magnitude(there, 1)), cast(other, E4M3, magnitude(other, 0)), torch.bfloat16)
    assert not by_rows[3].isfinite().any() and by_rows[:3].isfinite().all()


@pytest.mark.parametrize("name", RECIPES)
def test_compiled_blocks_train_as_bf16_does(name):
    """Each block is one graph; 30 steps on a few batches end near those of bf16."""
    bf16, fp8 = losses_of(None), losses_of(RECIPES[name])
    assert bf16[-1] < 0.8 * bf16[0]
    assert sum(fp8[-5:]) == pytest.approx(sum(bf16[-5:]), rel=0.03)


def losses_of(recipe: Recipe | None) -> list[float]:
    torch._dynamo.reset()
    model = GPT(preset("1M", vocab_size=256, seq_len=64), device=DEVICE)
    layers = to_float8(model, recipe) if recipe else None
    for block in model.blocks:
        block.compile(fullgraph=True)
    world, losses = rl.init(device=DEVICE), []
    engine = rl.prepare(model, loss=language_model_loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), world=world, precision="bf16")
    batches = torch.randint(0, 256, (3, 8, 65), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for step in range(30):
        tokens = batches[step % 3]
        if layers:
            layers.begin_step(whole=True)
        losses.append(engine.step((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())).loss)
        if layers:
            layers.end_step(world)
    world.close()
    return losses


def test_weights_that_are_gathered_in_eight_bits_train_as_those_that_are_cast_in_place():
    """The same bytes: at stage 3 a unit lends them to the layers."""
    def losses(stage):
        torch._dynamo.reset()
        world = rl.init(rl.Mesh(shard=1), device=DEVICE)
        model = GPT(preset("1M", vocab_size=256, seq_len=64), device=DEVICE)
        engine = rl.prepare(model, loss=language_model_loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), world=world, stage=stage,
                            precision="fp8", compile=True)
        tokens = torch.randint(0, 256, (8, 65), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        found = [engine.step((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())).loss for _ in range(5)]
        world.close()
        return found
    assert losses(3) == pytest.approx(losses(0), rel=2.0**-8)   # kernels that add in another order: one rounding to bf16


def test_the_gradients_of_layers_on_a_device_are_as_near_the_exact_ones_as_the_emulation_s():
    """Not near the emulation's: what a matrix unit loses of a sum flips the next cast of what lies between two numbers, a gradient's by an
    eighth. Either neighbour is as far from the truth: with noise of that size in its products, the emulation itself errs 4 % more."""
    torch.manual_seed(0)
    exact = nn.Sequential(nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 256), nn.Linear(256, 16))
    here, there = copy.deepcopy(exact), copy.deepcopy(exact).to(DEVICE)
    assert len(to_float8(here).layers) == len(to_float8(there).layers) == 2
    for model in (exact, here, there):
        x = normal(128, 256, seed=1).to(next(model.parameters()).device)
        model(x).square().sum().backward()
    for truth, a, b in zip(exact.parameters(), here.parameters(), there.parameters()):
        assert (b.grad.cpu() - truth.grad).norm() < 1.1 * (a.grad - truth.grad).norm() < 0.1 * truth.grad.norm()
