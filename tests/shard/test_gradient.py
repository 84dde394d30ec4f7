"""The gradient of a unit by itself: which memory it lets go."""

import gc
import weakref

import torch
from torch import nn

import rankloom as rl
from awkward import drawn


def test_the_memory_of_a_sum_goes_when_it_has_been_added_to_the_slice():
    def body(world):
        model, sums = rl.fully_shard(drawn(nn.Linear(8, 8)).to(world.device), world), []
        gradient, = model._sharding.gradients()
        start = gradient.sums.start_scatter

        def noted(whole, out, *more):
            sums.append(weakref.ref(out))
            return start(whole, out, *more)

        gradient.sums.start_scatter = noted
        for _ in range(2):
            model(torch.ones(2, 8, dtype=torch.float64, device=world.device)).sum().backward()
        gc.collect()
        return [is_there() is not None for is_there in sums]

    assert rl.simulate(2, body) == [[True, False]] * 2   # the first is the slice


def with_unsummed_gradient(world):
    """A sharded layer after a backward that summed nothing, and the gradient of its only unit."""
    model = rl.fully_shard(drawn(nn.Linear(8, 8)).to(world.device), world)
    gradient, = model._sharding.gradients()
    with model.no_sync():
        model(torch.ones(2, 8, dtype=torch.float64, device=world.device)).sum().backward()
    return model, gradient


def test_gradients_that_are_dropped_before_they_are_summed_give_back_their_buffer():
    def body(world):
        model, gradient = with_unsummed_gradient(world)
        whole = gradient.held()
        model._sharding.forward_backward.abandon()
        return whole, gradient.held(), model._sharding.pool.held()

    assert rl.simulate(2, body, backend="gloo") == [(80 * 8, 0, 0)] * 2   # two tensors, each aligned


def test_gradients_that_are_dropped_while_they_are_summed_count_as_used_no_more():
    def body(world):
        model, gradient = with_unsummed_gradient(world)
        gradient.start()
        model._sharding.forward_backward.abandon()
        return gradient.used, [param.grad for param in model.parameters()]

    assert rl.simulate(2, body) == [(set(), [None, None])] * 2
