"""What torch makes by default, numbers of some dtype on some device, has no part in a run: models and options say what they are in."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.base.compression import NAMES
from rankloom.comm import bench, power, quantize
from rankloom.models.config import MoEConfig
from rankloom.models.loss import language_model_loss
from rankloom.train.fp8 import Recipe
from rankloom.train.precision import PRECISIONS

WIDTH, ROWS, STEPS = 32, 12, 3
OTHERS = [torch.float64, torch.bfloat16]
RUNS = [*({"compress": name} for name in ("bf16", "fp16", "int8", "int4", "1bit", "topk", "powersgd:4")),
        *({"precision": name, "stage": stage} for name in ("bf16", "fp16", "fp8") for stage in (0, 1, 2, 3)),
        *({"deterministic": 4, "stage": stage} for stage in (0, 1, 2, 3)),
        *({"offload": True, "stage": stage} for stage in (1, 2, 3)),
        {"stage": 2, "accumulate": 2, "clip": 0.5}, {"stage": 3, "recompute": "full", "offload_activations": True}]


@pytest.fixture
def by_default():
    """Sets torch's default dtype; what it was comes back after the test."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


class Tower(nn.Module):
    """Blocks with a norm and dropout. Its parameters are fp32, whatever the default is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH, dtype=torch.float32), nn.Linear(WIDTH, WIDTH, dtype=torch.float32),
                                                  nn.Dropout(0.1), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 16, dtype=torch.float32)
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=draw, dtype=torch.float32) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def squares(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(x).square().sum(), len(x)


def train(options: dict, folder=None) -> list[tuple[dict, list[float]]]:
    """What each rank has after a few steps, and its losses. folder: of a checkpoint to save and load before the last step"""
    def body(world):
        engine = rl.prepare(Tower(), loss=squares, world=world, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), **options)
        losses = []
        for step in range(STEPS):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float32)
            if folder and step == STEPS - 1:
                engine.save(folder)
                engine.load(folder)
            losses.append(engine.step(x.tensor_split(world.size)[world.rank]).loss)
        losses.append(engine.evaluate([x] if world.rank == 0 else []).loss)   # some rank has nothing to evaluate
        return engine.full_state_dict()["model"], losses

    return rl.simulate(2, body)


def test_each_compression_is_trained_with_here():
    assert {name.split(":")[0] for run in RUNS if (name := run.get("compress"))} == set(NAMES) - {"none"}


def expect_same(dtype: torch.dtype, found: list, expected: list) -> None:
    for (values, losses), (others, told) in zip(found, expected, strict=True):
        assert losses == told, dtype
        assert all(torch.equal(values[name], value) and values[name].dtype == value.dtype for name, value in others.items()), dtype


@pytest.mark.parametrize("options", RUNS, ids=str)
def test_a_run_has_the_same_bits_whatever_torchs_default_dtype_is(by_default, options):
    expected = train(options)
    for dtype in OTHERS:
        by_default(dtype)
        expect_same(dtype, train(options), expected)


@pytest.mark.parametrize("options", [{"compress": "int8"}, {"compress": "1bit"}, {"compress": "powersgd:4"}], ids=str)
def test_so_has_a_compressed_one_without_the_parts_in_c(by_default, monkeypatch, options):
    monkeypatch.setattr(quantize, "NATIVE", False)
    monkeypatch.setattr(power, "NATIVE", False)
    expected = train(options)
    for dtype in OTHERS:
        by_default(dtype)
        expect_same(dtype, train(options), expected)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_so_has_one_with_delayed_scaling_that_goes_on_from_a_checkpoint(by_default, tmp_path, scaling):
    eight = replace(PRECISIONS["fp8"], float8=Recipe(scaling=scaling, timing="delayed" if scaling == "tensor" else "current"))
    expected = train({"precision": eight}, tmp_path / "fp32")
    for dtype in OTHERS:
        by_default(dtype)
        expect_same(dtype, train({"precision": eight}, tmp_path / str(dtype)), expected)


@pytest.mark.parametrize("mesh", [rl.Mesh(pipe=2), rl.Mesh(tensor=2), rl.Mesh(context=2), rl.Mesh(expert=2)], ids=str)
def test_so_has_our_gpt_of_experts_which_says_its_dtype_on_every_axis(by_default, mesh):
    shape = rl.GPTConfig(vocab_size=32, width=16, layers=2, heads=2, kv_heads=2, ffn=16, seq_len=8,
                         moe=MoEConfig(experts=4, top_k=2, ffn=16, bias_rate=0.01))
    tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(0))

    def body(world):
        pipe = {"pipe": "1f1b", "accumulate": 2} if mesh.pipe > 1 else {}
        engine = rl.prepare(rl.GPT(shape, seed=0, dtype=torch.float32), loss=language_model_loss, world=world, **pipe,
                            optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
        rows = tokens.tensor_split(engine.group.size)[engine.group.rank]
        batch = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        losses = [engine.step(batch).loss for _ in range(STEPS)]
        return engine.full_state_dict()["model"], losses

    expected = rl.simulate(mesh, body)
    for dtype in OTHERS:
        by_default(dtype)
        expect_same(dtype, rl.simulate(mesh, body), expected)


def test_the_collectives_are_timed_whatever_torchs_default_dtype_is(by_default):
    study = bench.Study(("all_reduce",), ("ring",), (16,), "fp32", 1)
    for dtype in OTHERS:
        by_default(dtype)
        timed, = rl.simulate(2, lambda world: bench.time_size("all_reduce", 16, study, world, lambda part: None))[0]
        assert timed.wrong == 0


# ---------------------------------------------------------------- the default device


@pytest.fixture
def as_default_device():
    """Sets torch's default device; afterwards there is none."""
    yield torch.set_default_device
    torch.set_default_device(None)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("everywhere", [False, True], ids=["with", "set_default_device"])
def test_prepare_may_be_called_where_tensors_are_made_on_the_meta_device(as_default_device, stage, everywhere):
    """As the model is, for it to take no memory before it is cut. The values are those of a call outside."""
    def start(world, model):
        return rl.prepare(model, loss=squares, world=world, stage=stage, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), deterministic=4)

    def body(world, inside):
        if inside and everywhere:
            as_default_device("meta")   # of this thread
            engine = start(world, Straight())
            as_default_device(None)
        else:
            with torch.device("meta"):
                model = Straight()
                engine = start(world, model) if inside else None
            engine = engine or start(world, model)
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(world.rank))
        loss = engine.step(x).loss
        return engine.full_state_dict()["model"], [loss]

    inside, outside = (rl.simulate(2, lambda world, inside=inside: body(world, inside)) for inside in (True, False))
    assert all(values["head.weight"].any() for values, _ in outside)
    expect_same(torch.float32, inside, outside)


class Straight(nn.Module):
    """Its layers fill themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))
