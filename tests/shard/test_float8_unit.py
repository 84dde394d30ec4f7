"""A unit in eight bits: what layers are given and when, and that a sharded step is the step of one process."""

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.base.float8 import E4M3, cast, magnitude
from rankloom.parallel.zero import ShardingStrategy, shard, step_bill
from rankloom.shard.float8_unit import Float8Unit
from rankloom.shard.unit import Formats
from rankloom.train.fp8 import Recipe, to_float8

pytestmark = pytest.mark.gloo

SHAPES = {"a": (48, 32), "b": (32, 64)}
BF16 = Formats(torch.bfloat16, torch.float32, torch.float32)


class Reader:
    held = None
    peers = None


def weights() -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=draw)) for name, shape in SHAPES.items()}


def in_eight(weight: torch.Tensor):
    rounded = weight.detach().to(torch.bfloat16)
    return cast(rounded, E4M3, magnitude(rounded))


def is_same(held, weight: torch.Tensor) -> bool:
    expected = in_eight(weight)
    return all(torch.equal(each.data.view(torch.uint8), expected.data.view(torch.uint8)) and torch.equal(each.scale, expected.scale)
               for each in held)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("keep", [False, True])
def test_layers_hold_the_cast_weights_while_they_are_gathered_and_new_ones_after_an_update(p, keep):
    def body(world):
        params, readers = weights(), {name: [Reader(), Reader()] for name in SHAPES}
        unit = Float8Unit("u", params, world.group("shard"), BF16, readers, keep=keep)
        for turn in range(3):
            unit.make_ready()
            for name, weight in weights().items():
                assert all(is_same(layer.held, weight * (1.0 + turn)) for layer in readers[name])
                assert params[name].shape == weight.shape and params[name].dtype == torch.bfloat16 and params[name].isnan().all()
                assert params[name].untyped_storage().nbytes() <= 4
            unit.release()
            assert keep or p == 1 or all(layer.held is None for layers in readers.values() for layer in layers)
            assert keep or p == 1 or unit.held()[1] == 0
            for owner in unit.owners.values():
                owner.data *= (2.0 + turn) / (1.0 + turn)
            unit.publish()

    rl.simulate(rl.Mesh(shard=p), body)


def test_a_unit_that_lets_go_leaves_the_layers_of_others_alone():
    def body(world):
        params, readers = weights(), {name: [Reader()] for name in SHAPES}
        units = [Float8Unit(name, {name: params[name]}, world.group("shard"), BF16, readers) for name in SHAPES]
        for unit in units:
            unit.make_ready()
        units[0].release()
        return readers["a"][0].held is None and is_same(readers["b"][0].held, weights()["b"])

    assert all(rl.simulate(rl.Mesh(shard=2), body))


class Net(nn.Module):
    """Two blocks of which some weights stay as they are, and an output."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32, bias=False)) for _ in range(2))
        self.head = nn.Linear(32, 8)
        draw = torch.Generator().manual_seed(0)
        for param in self.parameters():
            param.data.normal_(0.0, 0.2, generator=draw)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def sharded_steps(world, stage: int, *, in_float8: bool):
    """Three steps on the same rows on every rank: losses, bytes sent in the last and the bill for them, kinds of units."""
    group, model = world.group("shard"), Net()
    layers = to_float8(model)
    strategy = ShardingStrategy(stage, lambda param: BF16, scale=1.0 / group.size, float8=layers.readers(model) if in_float8 else {})
    sharding = shard(model, group, group.alone(), strategy)
    optimizer = torch.optim.SGD(sharding.owners().values(), lr=0.05)
    x, losses = torch.randn(24, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16), []
    for _ in range(3):
        before = group.ledger.bytes
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        sharding.forward_backward.abandon()
        sharding.publish()
        losses.append(loss.item())
        sent = group.ledger.bytes - before
    units = [unit for section in sharding.sections for unit in section.units]
    return losses, sent, step_bill(sharding).sent, [type(unit) for unit in units]


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_sharded_step_is_that_of_one_process(p, stage, backend):
    """Equal rows on 2 or 4 ranks: their mean is exact, so every bit must be the same, gathered in eight bits or not."""
    alone = rl.simulate(1, lambda world: sharded_steps(world, 1, in_float8=False))[0][0]
    for eight in (False, True):
        found = rl.simulate(rl.Mesh(shard=p), lambda world, eight=eight: sharded_steps(world, stage, in_float8=eight), backend=backend)
        for losses, sent, bill, kinds in found:
            assert losses == alone and losses[2] < losses[0]
            assert kinds.count(Float8Unit) == (2 if eight else 0)
            assert sent == bill or backend == "rankloom"      # where pages are common, a barrier sends a number that no bill counts


def test_processes_equal_one_process():
    alone = rl.simulate(1, lambda world: sharded_steps(world, 1, in_float8=False))[0][0]
    assert all(losses == alone for losses in rl.spawn(rl.Mesh(shard=2), losses_at_3))


def losses_at_3(world) -> list[float]:
    """At the top of the module, so that a process can be told to run it."""
    return sharded_steps(world, 3, in_float8=True)[0]


def test_a_weight_scaled_by_rows_does_not_travel_so():
    model = Net()
    assert to_float8(model, Recipe(scaling="row")).readers(model) == {}


def test_a_weight_that_two_layers_use_goes_to_both():
    model = Net()
    model.blocks[1][0].weight = model.blocks[0][0].weight
    readers = to_float8(model).readers(model)
    assert readers["blocks.0.0.weight"] == [model.blocks[0][0], model.blocks[1][0]] and "blocks.1.0.weight" not in readers
