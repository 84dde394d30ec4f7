"""A block that draws from generators of its own, and is recomputed: the same draws again, and the generators go on undisturbed."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from gradients import expect_equal, gradients
from rankloom.train.recompute import recompute

DRAWS = {
    "random.Random": lambda block: block.python.gauss(0, 1),   # keeps a second number for later
    "numpy's generator": lambda block: block.numpy.random(), "numpy's RandomState": lambda block: block.older.randn(),
    "torch.Generator": lambda block: torch.rand((), generator=block.torch).item(),
}


class Drawing(nn.Module):
    """Its strength is drawn anew in every call."""

    def __init__(self, source: str):
        super().__init__()
        self.linear, self.source = nn.Linear(6, 6), source
        self.inner = nn.Module()
        self.inner.python, self.inner.torch = random.Random(2), torch.Generator().manual_seed(2)
        self.inner.numpy, self.inner.older = np.random.default_rng(2), np.random.RandomState(2)
        self.inner.secret = random.SystemRandom()   # has no state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x) * DRAWS[self.source](self.inner))


def trained(policy: str, source: str) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Losses, gradients, and what every generator gives afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Drawing(source) for _ in range(3)))
    recompute(model, policy, blocks=(Drawing,))
    losses = []
    for _ in range(3):
        loss = model(torch.linspace(-1, 1, 24).view(4, 6)).square().sum()
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model), [draw(block.inner) for block in model for draw in DRAWS.values()]


@pytest.mark.parametrize("source", DRAWS)
@pytest.mark.parametrize("policy", ["full", "selective", "1 KiB"])
def test_gradients_are_the_same_bits_whatever_a_block_draws_from_and_generators_go_on_where_they_would(policy, source):
    (losses, grads, after), (wanted, reference, then) = trained(policy, source), trained("none", source)
    assert losses == wanted and after == then
    expect_equal(grads, reference)


@pytest.mark.parametrize("source", ["random.Random", "numpy's generator"])
def test_a_copy_of_a_model_sets_back_its_own_generators(source):
    torch.manual_seed(0)
    model = nn.Sequential(*(Drawing(source) for _ in range(2)))
    for block in model:
        del block.inner.torch, block.inner.secret   # they cannot be copied
    recompute(model, "full", blocks=(Drawing,))
    x = torch.linspace(-1, 1, 24).view(4, 6)
    model(x).sum().backward()   # now its generators are known
    model.zero_grad()
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each(x).sum().backward()
    expect_equal(gradients(twin), gradients(model))


def draw_from_the_global_one(*_) -> None:
    random.random()


def test_generators_that_other_threads_may_use_are_left_alone():
    """Set back, they would give a thread that loads data some numbers twice."""
    model = nn.Sequential(*(Drawing("torch.Generator") for _ in range(2)))
    for block in model:
        block.linear.register_forward_pre_hook(draw_from_the_global_one)
    recompute(model, "full", blocks=(Drawing,))
    loss = model(torch.ones(4, 6)).sum()
    random.seed(9)
    loss.backward()   # draws once in each block
    undisturbed = random.Random(9)
    assert [random.random()] == [undisturbed.random() for _ in range(3)][2:]


@pytest.mark.parametrize("kind", ["backward", "backward_pre"])
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_model_with_hooks_of_its_backward_and_attributes_called_hooks_may_be_recomputed(policy, kind):
    def run(policy):
        torch.manual_seed(0)
        model, seen = nn.Sequential(*(Drawing("torch.Generator") for _ in range(2))), []
        for block in model:
            block.use_hooks = True
            getattr(block.linear, f"register_full_{kind}_hook")(lambda module, *grads: seen.append(grads[-1][0].clone()))
        recompute(model, policy, blocks=(Drawing,))
        model(torch.linspace(-1, 1, 24).view(4, 6)).sum().backward()
        return gradients(model), seen

    (grads, seen), (wanted, expected) = run(policy), run("none")
    expect_equal(grads, wanted)
    assert len(seen) == 2 and all(map(torch.equal, seen, expected))
