"""`rl.Pipe(sizes=, example=, memory=)`: stages of given sizes, or of sizes for which they take equally long."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rankloom as rl
from rankloom.models.loss import language_model_loss
from rankloom.parallel.pipeline.measure import measure_pieces
from rankloom.train.pipeline.measured_cut import cut_by_measure
from rankloom.train.precision import precision_named

WIDTH = 16


class Layer(nn.Module):
    """A small one, or one that takes hundreds of times as long. A buffer and a list count its calls; some layers draw random numbers."""

    def __init__(self, turns: int = 1, noise: float = 0.0):
        super().__init__()
        self.turns, self.noise, self.linear = turns, noise, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.noted: list[int] = []

    def forward(self, x):
        self.calls += 1
        self.noted.append(len(self.noted))
        with torch.no_grad():   # so that all layers leave equally much for backward
            for _ in range(self.turns - 1):
                torch.tanh(self.linear(x))
        x = torch.tanh(self.linear(x))
        return x + self.noise * torch.randn_like(x) if self.noise else x


def of_layers(*turns: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*map(Layer, turns)).double()


LAST_IS_SLOW = of_layers(1, 1, 1, 1, 600)


def made() -> nn.Module:
    return copy.deepcopy(LAST_IS_SLOW)


def layers(model):
    return [({str(at): layer}, layer) for at, layer in enumerate(model)]


def batch(rank: int = 0):
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(8, WIDTH, generator=draw, dtype=torch.float64), torch.randn(8, WIDTH, generator=draw, dtype=torch.float64)


def loss(model, given):
    return F.mse_loss(model(given[0]), given[1], reduction="sum"), len(given[1])


def prepared(world, model, pipe):
    more = {"accumulate": 2, "pipe": pipe} if world.mesh.pipe > 1 else {}
    return rl.prepare(model, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), world=world, **more)


def held(engine) -> list[str]:
    return sorted({name.partition(".")[0] for name, _ in engine.model.named_parameters()})


@pytest.mark.parametrize(("given", "first"), [({}, "01"), ({"sizes": [1, 4]}, "0"), ({"sizes": (4, 1)}, "0123"),
                                              ({"example": batch()}, "0123")], ids=["equally many", "[1, 4]", "(4, 1)", "measured"])
def test_stages_get_as_many_pieces_as_was_said_or_measured_and_train_as_one_process(given, first):
    def body(world):
        engine = prepared(world, made(), rl.Pipe(pieces=layers, **given))
        losses = [engine.step(batch()).loss for _ in range(3)]
        return losses, engine.full_state_dict()["model"], held(engine)

    (plain, state, _), = rl.simulate(1, body)
    results = rl.simulate(rl.Mesh(pipe=2), body)
    assert ["".join(names) for *_, names in results] == [first, "01234".removeprefix(first)]
    for losses, values, _ in results:
        assert losses == pytest.approx(plain, rel=1e-12)
        for name in state:
            if not name.endswith("calls"):
                torch.testing.assert_close(values[name], state[name], rtol=1e-12, atol=1e-12)


class Gives(nn.Linear):
    def __init__(self, what):
        super().__init__(WIDTH, WIDTH)
        self.what = what

    def forward(self, x):
        return self.what(super().forward(x))


class Takes(nn.Linear):
    def forward(self, given):
        return super().forward(given[0])


@pytest.mark.parametrize("what", [lambda y: (y, None), lambda y: (y, y.dtype, torch.arange(3)), lambda y: {0: y}])
def test_pieces_may_give_each_other_anything_inside_a_stage_while_they_are_measured(what):
    torch.manual_seed(0)
    model = nn.Sequential(Gives(what), Takes(WIDTH, WIDTH), Layer(600)).double()
    (plain,) = rl.simulate(1, lambda world: prepared(world, copy.deepcopy(model), None).step(batch()).loss)
    measured = lambda world: prepared(world, copy.deepcopy(model), rl.Pipe(example=batch())).step(batch()).loss
    assert rl.simulate(rl.Mesh(pipe=2), measured) == pytest.approx([plain] * 2, rel=1e-12)


def test_all_ranks_cut_alike_though_each_measures_for_itself():
    model = of_layers(5, 4, 6, 5, 7, 5)

    def body(world):
        engine = prepared(world, copy.deepcopy(model), rl.Pipe(pieces=layers, example=batch(world.rank)))
        return world.group("pipe").rank, held(engine)

    results = rl.simulate(rl.Mesh(pipe=2, replicate=2), body)
    assert len({(stage, tuple(names)) for stage, names in results}) == 2
    assert sorted(name for _, names in results for name in names) == sorted("012345" * 2)


def test_a_stage_holds_no_more_than_the_memory_that_it_was_given():
    model = of_layers(1, 1, 1, 1, 1, 600)
    measured, = rl.simulate(1, lambda world: measure_pieces(layers(model), batch(), lambda y, _: (y.sum(), 1), world))
    piece = measured[1].parameters + measured[1].activations
    assert measured[1].parameters == 8 * WIDTH * (WIDTH + 1) and piece == measured[2].parameters + measured[2].activations

    def sizes(memory):
        pipe = rl.Pipe(pieces=layers, example=batch(), memory=memory)
        return [len(names) for names in rl.simulate(rl.Mesh(pipe=2), lambda world: held(prepared(world, copy.deepcopy(model), pipe)))]

    assert [sizes(memory) for memory in (1e9, 4.5 * piece)] == [[5, 1], [4, 2]]
    with pytest.raises(rl.ConfigError, match="no cut into 2 stages keeps each within"):
        sizes(2.5 * piece)


def test_measuring_leaves_no_trace():
    """On one rank, as ranks that are threads draw from one generator of torch's."""
    def body(world):
        model = made()
        model[1].noise = 0.5
        before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        chosen = rl.Pipe.of(rl.Pipe(pieces=layers, example=batch()), model, loss, precision_named(None))
        pipe = cut_by_measure(chosen, model, world)
        assert pipe.sizes == (5,) and torch.equal(torch.get_rng_state(), drawn)
        assert all(module.training for module in model.modules()) and all(param.grad is None for param in model.parameters())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not any(layer.noted for layer in model.modules() if isinstance(layer, Layer)), "what modules keep in lists was not put back"

    rl.simulate(1, body)


@pytest.mark.parametrize("mesh", [rl.Mesh(pipe=2), rl.Mesh(pipe=2, context=2), rl.Mesh(pipe=2, tensor=2)], ids=str)
def test_our_gpt_is_measured_whole_and_trains_alike_also_where_other_ranks_share_its_layers(mesh):
    config = rl.GPTConfig(vocab_size=64, width=16, layers=3, heads=4, kv_heads=2, ffn=32, seq_len=8)
    tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    rows = tokens, tokens.roll(-1, 1)

    def body(world):
        torch.manual_seed(0)
        more = {"accumulate": 2, "pipe": rl.Pipe(example=rows)} if world.mesh.pipe > 1 else {}
        engine = rl.prepare(rl.GPT(config, dtype=torch.float64), loss=language_model_loss, world=world,
                            optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **more)
        return [engine.step(rows).loss for _ in range(3)]

    plain, = rl.simulate(1, body)
    for losses in rl.simulate(mesh, body):
        assert losses == pytest.approx(plain, rel=1e-12)


@pytest.mark.parametrize(("given", "message"), [
    ({"sizes": [5]}, r"sizes=\[5\]\): expected 2 numbers of 1 or more, whose sum is 5"),
    ({"sizes": [3, 3]}, r"sizes=\[3, 3\]\): expected 2 numbers"), ({"sizes": [5, 0]}, r"sizes=\[5, 0\]\): expected 2 numbers"),
    ({"example": torch.zeros(2, WIDTH)}, "a micro-batch has two parts"), ({"memory": 1e9}, "no meaning without an example"),
    ({"example": batch(), "sizes": [4, 1]}, "sizes and example both say where to cut")], ids=str)
def test_a_cut_that_makes_no_sense_is_refused(given, message):
    with pytest.raises(rl.ConfigError, match=message):
        rl.simulate(rl.Mesh(pipe=2), lambda world: prepared(world, made(), rl.Pipe(pieces=layers, **given)))


@pytest.mark.parametrize(("pipes", "message"), [
    ((rl.Pipe(pieces=layers, example=batch()), rl.Pipe(pieces=layers)), r"pipe is \('1f1b', None, None, None, False\), on rank 0 .*True"),
    ((rl.Pipe(pieces=layers, sizes=[2, 3]), rl.Pipe(pieces=layers, sizes=[3, 2])), r"pipe is \('1f1b', None, \[3, 2\], None, False\)"),
    (tuple(rl.Pipe(pieces=layers, example=batch(), memory=memory) for memory in (1e9, 2e9)),
     r"pipe is \('1f1b', None, None, 2000000000.0, True\)"),
    (("1f1b", "gpipe"), "pipe is 'gpipe', on rank 0 '1f1b'")], ids=["example", "sizes", "memory", "schedule"])
def test_ranks_that_would_cut_differently_all_say_so_and_none_waits(pipes, message):
    with pytest.raises(rl.ConfigError, match=f"rank 1 was given another way to train than rank 0: {message}"):
        rl.simulate(rl.Mesh(pipe=2), lambda world: prepared(world, made(), pipes[world.rank]))


def test_a_model_on_the_meta_device_cannot_be_measured_but_takes_sizes():
    def body(world):
        with torch.device("meta"):
            model, other = (nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5))).double() for _ in range(2))
        with pytest.raises(rl.ConfigError, match="no values to measure with; give `sizes`"):
            prepared(world, other, rl.Pipe(pieces=layers, example=batch()))
        return held(prepared(world, model, rl.Pipe(pieces=layers, sizes=[2, 3])))

    assert rl.simulate(rl.Mesh(pipe=2), body) == [["0", "1"], ["2", "3", "4"]]


@pytest.mark.parametrize("sizes", ["33", 6, [1.5, 4.5], [3, "3"], {3: 3}])
def test_sizes_that_are_no_list_of_whole_numbers_are_refused_where_they_are_given(sizes):
    with pytest.raises(rl.ConfigError, match=r"rl.Pipe\(sizes=.*: expected how many pieces each stage gets, as a list"):
        rl.Pipe(sizes=sizes)
