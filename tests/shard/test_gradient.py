"""The gradient of a unit by itself: which memory it lets go."""

import gc
import weakref

import torch
from torch import nn

import rankloom as rl
from awkward import drawn


def test_the_memory_of_a_sum_goes_when_it_has_been_added_to_the_slice():
    def body(world):
        model, sums = rl.fully_shard(drawn(nn.Linear(8, 8)), world), []
        gradient, = model._sharding.gradients()
        start = gradient.sums.start_scatter

        def noted(whole, out, *more):
            sums.append(weakref.ref(out))
            return start(whole, out, *more)

        gradient.sums.start_scatter = noted
        for _ in range(2):
            model(torch.ones(2, 8).double()).sum().backward()
        gc.collect()
        return [is_there() is not None for is_there in sums]

    assert rl.simulate(2, body) == [[True, False]] * 2   # the first is the slice
