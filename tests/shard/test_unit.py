"""A unit by itself: what an update means for a gather that is under way."""

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.shard.unit import Formats, Unit

FP32 = Formats(torch.float32, torch.float32, torch.float32)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_an_update_while_a_gather_is_under_way_is_in_the_next(backend):
    def body(world):
        unit = Unit("u", {"w": nn.Parameter(torch.zeros(64, device=world.device))}, world, FP32)
        unit.start_gather()
        unit.own.fill_(1.0)
        unit.publish()
        unit.make_ready()
        return unit.params["w"].tolist()

    assert rl.simulate(2, body, backend=backend) == [[1.0] * 64] * 2
