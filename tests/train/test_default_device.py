"""What the package makes for the host lies there, also where torch's default device is a GPU. In its place stands a device for which this
torch has no code: making any tensor there raises. So a tensor whose device was not named is found, whatever is done with it then.
"""

import inspect

import pytest
import torch
import torch.utils.checkpoint

import rankloom as rl
from rankloom.models.config import MoEConfig
from rankloom.models.loss import language_model_loss
from train.test_default_dtype import ROWS, RUNS, STEPS, WIDTH, Tower, squares

GPU = "hpu:0"
TORCHS_OWN = "torch.empty((0,)" in inspect.getsource(torch.utils.checkpoint)   # in 2.11 torch's checkpoint makes a tensor there itself


def fused(params) -> torch.optim.Optimizer:
    """Not fused, torch itself would put the number of the step on the default device."""
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def train(device: str, folder, options: dict, backend: str = "rankloom", ranks: int = 2) -> list[tuple[dict, list[float]]]:
    """What each rank has after a few steps, with a checkpoint before the last, and its losses. device: torch's default one meanwhile"""
    models, draw = [Tower() for _ in range(ranks)], torch.Generator().manual_seed(0)
    batches = [torch.randn(ROWS, WIDTH, generator=draw).tensor_split(ranks) for _ in range(STEPS)]

    def body(world):
        with torch.device(device):
            engine = rl.prepare(models[world.rank], loss=squares, world=world, optimizer=fused, **options)
            losses = [engine.step(batch[world.rank]).loss for batch in batches[:-1]]
            engine.save(folder / device[:3])
            engine.load(folder / device[:3])
            losses.append(engine.step(batches[-1][world.rank]).loss)
            losses.append(engine.evaluate([batches[0][0]] if world.rank == 0 else []).loss)
            return engine.full_state_dict()["model"], losses

    return rl.simulate(ranks, body, backend=backend)


def expect_same(found: list, expected: list) -> None:
    for (values, losses), (others, told) in zip(found, expected, strict=True):
        assert losses == told
        assert all(torch.equal(values[name], value) for name, value in others.items())


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 1}, *RUNS], ids=str)
def test_a_run_has_the_same_bits_whatever_torchs_default_device_is(options, tmp_path):
    options = {key: value for key, value in options.items() if not (key == "recompute" and TORCHS_OWN)}
    expect_same(train(GPU, tmp_path, options), train("cpu", tmp_path, options))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_so_has_one_over_gloo(stage, tmp_path):
    options = {"stage": stage, "clip": 1.0}
    expect_same(train(GPU, tmp_path, options, "gloo", 3), train("cpu", tmp_path, options, "gloo", 3))


@pytest.mark.parametrize("mesh", [rl.Mesh(pipe=2), rl.Mesh(tensor=2), rl.Mesh(context=2), rl.Mesh(expert=2)], ids=str)
def test_so_has_our_gpt_of_experts_on_every_axis(mesh, tmp_path):
    shape = rl.GPTConfig(vocab_size=32, width=16, layers=2, heads=2, kv_heads=2, ffn=16, seq_len=8,
                         moe=MoEConfig(experts=4, top_k=2, ffn=16, bias_rate=0.01))
    tokens = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(0))

    def body(world, device):
        pipe = {"pipe": "1f1b", "accumulate": 2} if mesh.pipe > 1 else {}
        model = rl.GPT(shape, seed=0)
        with torch.device(device):
            engine = rl.prepare(model, loss=language_model_loss, world=world, optimizer=fused, **pipe)
            rows = tokens.tensor_split(engine.group.size)[engine.group.rank]
            batch = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
            losses = [engine.step(batch).loss for _ in range(STEPS)]
            engine.save(tmp_path / device[:3])
            engine.load(tmp_path / device[:3])
            return engine.full_state_dict()["model"], losses

    found, expected = (rl.simulate(mesh, lambda world, device=device: body(world, device)) for device in (GPU, "cpu"))
    expect_same(found, expected)


@pytest.mark.parametrize("wrap", [lambda model, world: rl.data_parallel(model, world),
                                  lambda model, world: rl.fully_shard(model, world, units=torch.nn.Sequential)],
                         ids=["data_parallel", "fully_shard"])
def test_a_loop_of_ones_own_works_whatever_torchs_default_device_is(wrap):
    models, x = {device: [Tower().eval() for _ in range(2)] for device in (GPU, "cpu")}, torch.ones(ROWS, WIDTH)

    def body(world, device):
        with torch.device(device):
            model, losses = wrap(models[device][world.rank], world), []
            for _ in range(2):   # the second backward sums in the order learned from the first
                losses.append(model(x * (world.rank + 1)).square().sum())
                losses[-1].backward()
        return [loss.item() for loss in losses]

    found, expected = (rl.simulate(2, lambda world, device=device: body(world, device)) for device in (GPU, "cpu"))
    assert found == expected


def test_a_group_lends_memory_of_the_host_whatever_torchs_default_device_is():
    def body(world):
        with torch.device(GPU):
            lent = world.buffer(4), world.buffer((0, 2)), world.common_buffer(4)[0], world.common_buffer(0)[0]
            world.barrier()
            return [x.device.type for x in lent], world.all_gather_object(world.rank)

    assert rl.simulate(2, body) == [(["cpu"] * 4, [0, 1])] * 2


class Drawn(torch.nn.Module):
    """Its first values are made by its own method, on whatever device is the default."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.weight.data = torch.randn(3)


def test_our_gpt_can_be_made_whatever_torchs_default_device_is():
    shape = rl.GPTConfig(vocab_size=32, width=16, layers=1, heads=2, kv_heads=2, ffn=16, seq_len=8)
    with torch.device(GPU):
        model = rl.GPT(shape, seed=0)
    expected = rl.GPT(shape, seed=0)
    assert torch.equal(model.rotary.cos, expected.rotary.cos)
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), expected.parameters(), strict=True))


def test_first_values_are_drawn_on_the_host_whatever_torchs_default_device_is():
    with torch.device("meta"):
        model = torch.nn.Sequential(Drawn())

    def body(world):
        with torch.device(GPU):
            engine = rl.prepare(model, loss=lambda model, x: ((model[0].weight * x).sum(), 1), world=world, optimizer=fused)
        return engine.full_state_dict()["model"]["0.weight"]

    first, = rl.simulate(1, body)
    assert first.device.type == "cpu" and first.abs().min() > 0
