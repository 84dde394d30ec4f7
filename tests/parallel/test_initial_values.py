"""Models on the meta device: the same values on any number of ranks at any stage, and never more than a unit of them at once."""

import math

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.base.errors import ConfigError
from rankloom.models.config import GPTConfig
from rankloom.models.gpt import GPT, initial_values
from rankloom.shard.unit import Unit

pytestmark = pytest.mark.gloo

WIDTH = 6
MESHES = [1, 2, 3, rl.Mesh(replicate=2, shard=2)]


class Plain(nn.Module):
    """torch's own modules: tied weights, running statistics, a module without a bias, blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 9, bias=False), nn.BatchNorm1d(9), nn.Linear(9, WIDTH))
                                      for _ in range(3)))
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.norm(self.blocks(self.first(x))))


class Bare(nn.Module):
    """A parameter of its own, and nothing to reset it by."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.line(x) * self.gain


def on_meta(build) -> nn.Module:
    """No memory."""
    with torch.device("meta"):
        return build()


def squares(model, x):
    """A sum over elements, and their number."""
    y = model(x)
    return y.square().sum(), y.numel()


def engine_of(model: nn.Module, world: rl.World, stage: int, **options) -> rl.Engine:
    """With SGD, which remembers nothing."""
    return rl.prepare(model, loss=squares, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), world=world, stage=stage, **options)


def values(engine: rl.Engine) -> dict[str, torch.Tensor]:
    """The model."""
    return engine.full_state_dict()["model"]


SHAPE = GPTConfig(vocab_size=32, seq_len=8, width=16, layers=2, heads=2, kv_heads=1, ffn=24, tie=True)


def test_values_are_the_same_on_any_number_of_ranks_at_any_stage():
    def body(world, stage, seed=5):
        return values(engine_of(on_meta(Plain), world, stage, seed=seed))

    expected = rl.simulate(1, lambda world: body(world, 0))[0]
    assert all(torch.isfinite(value).all() for value in expected.values())
    for stage in (0, 1, 2, 3):
        for mesh in MESHES:
            for state in rl.simulate(mesh, lambda world, stage=stage: body(world, stage)):
                assert state.keys() == expected.keys()
                assert all(torch.equal(state[name], value) for name, value in expected.items())
    other = rl.simulate(1, lambda world: body(world, 3, seed=6))[0]
    assert any(not torch.equal(other[name], value) for name, value in expected.items())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_gpt_is_filled_to_the_bits_that_it_has_when_it_is_built_whole(stage):
    tokens = torch.arange(16).view(2, 8)

    def loss(model, tokens):
        return model(tokens).float().square().sum(), tokens.numel()

    def body(world):
        model = GPT(SHAPE, device="meta")
        engine = rl.prepare(model, loss=loss, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), world=world, stage=stage,
                            initialize=initial_values(model, seed=7))
        return values(engine), engine.evaluate([tokens]).loss

    whole = GPT(SHAPE, seed=7)
    expected = loss(whole, tokens)[0].item() / tokens.numel()
    for size in (1, 3):
        for state, found in rl.simulate(size, body):
            assert all(torch.equal(state[name], value) for name, value in whole.state_dict().items())
            assert found == pytest.approx(expected, rel=1e-6)


def test_tied_weights_stay_tied_and_train_as_on_one_process():
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1))

    def body(world, stage):
        engine = engine_of(on_meta(Plain).eval(), world, stage)
        for part in engine.model.modules():
            part.train = lambda mode=True, part=part: part   # statistics of the whole batch are not those of its parts
        engine.step(x.tensor_split(world.size)[world.rank])
        state = values(engine)
        assert torch.equal(state["first.weight"], state["last.weight"])
        return state

    expected = rl.simulate(1, lambda world: body(world, 0))[0]
    for stage in (1, 3):
        for state in rl.simulate(3, lambda world, stage=stage: body(world, stage)):
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)   # fp32, in another order


def test_a_buffer_that_two_modules_share_stays_one():
    def body(world):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            table = torch.zeros(3)
        for layer in model:
            layer.register_buffer("table", table)
        rl.prepare(model, loss=lambda m, x: (m(x).sum(), 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), world=world,
                   initialize=lambda name, tensor: tensor.fill_(2.0))
        return model[0].table is model[1].table, model[1].table.tolist()

    assert rl.simulate(1, body) == [(True, [2.0] * 3)]


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("mesh", [3, rl.Mesh(replicate=2, shard=2)], ids=str)
def test_what_a_function_draws_on_rank_0_counts_for_all(stage, mesh):
    def body(world):
        draw = torch.Generator().manual_seed(world.rank)

        def initialize(name, tensor):
            tensor.copy_(torch.rand(tensor.shape, generator=draw))

        engine = engine_of(on_meta(Plain), world, stage, initialize=initialize)
        return {**values(engine), **{f"here {name}": b.clone() for name, b in engine.model.named_buffers()}}

    states = rl.simulate(mesh, body)
    for state in states[1:]:
        assert all(torch.equal(state[name], value) for name, value in states[0].items())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_is_not_on_the_meta_device_keeps_its_values(stage):
    def body(world):
        model = Plain()
        with torch.no_grad():
            for number, param in enumerate(model.parameters()):
                param.fill_(number)
        before = {name: value.clone() for name, value in model.state_dict().items() if not name.startswith("blocks.1.")}
        model.blocks[1] = on_meta(lambda: nn.Linear(WIDTH, WIDTH))
        return before, values(engine_of(model, world, stage))

    for before, state in rl.simulate(2, body):
        assert all(torch.equal(state[name], value) for name, value in before.items())
        assert 0 < state["blocks.1.weight"].std() < 1


def test_no_more_than_one_unit_is_whole_while_a_model_is_built(monkeypatch):
    most, sizes, units, plain = [], {}, [], Unit._take_over
    monkeypatch.setattr(Unit, "_take_over", lambda unit, fill: (units.append(unit), plain(unit, fill)))

    def body(world):
        def initialize(name, tensor):
            mine = [unit for unit in units if unit.group is world]
            most.append(sum(unit.whole.untyped_storage().nbytes() for unit in mine))
            sizes.update({u.name: u.layout.total * 4 for u in mine})
            tensor.fill_(1.0)

        return engine_of(on_meta(Plain), world, 3, initialize=initialize).held()

    for held in rl.simulate(2, body):
        assert held.gathered == 0
    assert max(most) <= max(sizes.values()) < sum(sizes.values()) / 2


class Chosen(nn.Module):
    """Frozen parameters that are integers and truth values, and a complex one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.zeros(WIDTH, dtype=torch.int64), requires_grad=False)
        self.kept = nn.Parameter(torch.zeros(WIDTH, dtype=torch.bool), requires_grad=False)
        self.turn = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.order.copy_(torch.arange(WIDTH).flip(0))
            self.kept.fill_(True)
            self.turn.fill_(0.5 + 0.5j)

    def forward(self, x):
        return (x[:, self.order] * self.kept * self.turn).abs()


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_may_be_integers_truth_values_and_complex(stage, given):
    whole = Chosen()
    whole.reset_parameters()

    def fill(name, tensor):
        tensor.copy_(whole.get_parameter(name).detach())

    def body(world):
        return values(engine_of(on_meta(Chosen), world, stage, initialize=fill if given else None))

    for state in rl.simulate(2, body):
        assert all(torch.equal(state[name], param) and state[name].dtype == param.dtype for name, param in whole.named_parameters())


def test_a_complex_parameter_that_the_function_does_not_write_is_named():
    def body(world):
        engine_of(on_meta(Chosen), world, 3, initialize=lambda name, tensor: tensor.fill_(1) if name != "turn" else None)

    with pytest.raises(ConfigError, match="gave 1 tensors no values, or not all: turn"):
        rl.simulate(2, body)


class Bounded(nn.Linear):
    """With a buffer of bounds, at first infinite: their sum is NaN."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("bounds", torch.tensor([-math.inf, math.inf]))


@pytest.mark.parametrize("stage", [0, 3])
def test_infinities_of_both_signs_are_values(stage):
    def fill(name, tensor):
        tensor.copy_(torch.tensor([-math.inf, math.inf])) if name == "bounds" else tensor.fill_(1.0)

    found = rl.simulate(2, lambda world: values(engine_of(on_meta(Bounded), world, stage, initialize=fill)))
    assert [state["bounds"].tolist() for state in found] == [[-math.inf, math.inf]] * 2


def test_a_module_that_cannot_fill_itself_is_named():
    with pytest.raises(ConfigError, match=r"gain is on the meta device, and its module Bare has no reset_parameters\(\)"):
        rl.simulate(2, lambda world: engine_of(on_meta(Bare), world, 3))
    given = rl.simulate(2, lambda world: values(engine_of(on_meta(Bare), world, 3, initialize=lambda name, tensor: tensor.fill_(2.0))))
    assert all((value == 2.0).all() for value in given[1].values())


def test_a_model_with_values_takes_no_function():
    with pytest.raises(ConfigError, match="the model has its values already"):
        rl.simulate(1, lambda world: engine_of(Plain(), world, 3, initialize=lambda name, tensor: None))


def test_modules_that_fill_themselves_leave_the_random_numbers_of_gpus_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("torch.manual_seed seeds GPUs as well"))
    before = torch.get_rng_state()
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    rl.simulate(1, lambda world: rl.prepare(model, loss=lambda m, x: (m(x).sum(), 1), world=world,
                                            optimizer=lambda p: torch.optim.SGD(p, lr=0.1)))
    assert torch.equal(torch.get_rng_state(), before)
