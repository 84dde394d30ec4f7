"""Training in several streams of a device. Those of a CPU do nothing; those of the pretended GPU (pretended_gpu/run.py) find every race."""

import copy

import pytest
import torch
from torch import nn

import rankloom as rl

PREPARED = [{"stage": 0}, {"stage": 0, "precision": "bf16"}, {"stage": 0, "deterministic": True}, {"stage": 2},
            {"stage": 2, "precision": "bf16"}, {"stage": 3}]


def beside(world):
    """Another stream of the device, which goes on where the current one is; to be entered."""
    device = torch.get_device_module(world.device)
    made = device.Stream(world.device)
    made.wait_stream(device.current_stream(world.device))
    return device.stream(made)


def end_all(world):
    """Let the host wait for all streams."""
    torch.get_device_module(world.device).synchronize(world.device)


@pytest.fixture
def model():
    """One, of which each rank takes a copy."""
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def prepared(model, world, **options):
    return rl.prepare(model, loss=lambda model, batch: (model(batch).square().sum(), batch.shape[0]), world=world,
                      optimizer=lambda params: torch.optim.SGD(params, lr=1e-2), **options)


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 2, "offload": True}], ids=str)
def test_parameters_that_another_stream_reads_first_after_a_step_are_complete_there_and_in_the_stream_of_the_step(options, model):
    def body(world):
        engine, alike = prepared(copy.deepcopy(model), world, **options), []
        for _ in range(3):
            engine.step(torch.ones(4, 16))
            with beside(world):
                there = [param.data.clone() for param in engine.model.parameters()]
            here = [param.detach().clone() for param in engine.model.parameters()]
            end_all(world)   # before the next step writes what is read
            alike += [torch.equal(one.cpu(), other.cpu()) for one, other in zip(here, there)]
        return all(alike)

    assert rl.simulate(2, body) == [True, True]


def test_a_call_may_be_waited_for_in_two_streams():
    def body(world):
        handle = world.all_reduce(torch.ones(64, device=world.device), async_op=True)
        with beside(world):
            there = handle.wait().clone()
        here = handle.wait() * 2
        end_all(world)
        return there.sum().item(), here.sum().item()

    assert rl.simulate(2, body) == [(128.0, 256.0)] * 2


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("options", PREPARED, ids=str)
def test_a_model_that_was_made_in_one_stream_may_be_prepared_in_another(options, p, model):
    """No memory that it leaves is given to others while it is still read."""
    def body(world):
        mine = copy.deepcopy(model).to(world.device)
        with beside(world):
            engine = prepared(mine, world, **options)
        end_all(world)
        report = engine.step(torch.ones(4, 16))
        end_all(world)   # before what one stream has allocated, and another used, is freed
        return report.loss

    assert len(set(rl.simulate(p, body))) == 1
