"""A block that draws from generators of its own, and is recomputed: the same draws again, and the generators go on undisturbed."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import rankloom as rl
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


def steps_of(model, after_forward=lambda: None) -> list:
    """Loss and gradients of each of three steps that start from the same weights."""
    found = []
    for _ in range(3):
        model.zero_grad()
        loss = model(torch.linspace(-1, 1, 24).view(4, 6)).square().sum()
        after_forward()
        loss.backward()
        found.append((loss.item(), gradients(model)))
    return found


def expect_same_steps(found, wanted) -> None:
    for (loss, grads), (expected, reference) in zip(found, wanted, strict=True):
        assert loss == expected
        expect_equal(grads, reference)


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


class DrawsLate(nn.Module):
    """Makes its generator when it first needs one. waits: so many forwards, see `wait_less`"""

    def __init__(self, waits=0):
        super().__init__()
        self.linear, self.torch, self.waits = nn.Linear(6, 6), None, waits

    def forward(self, x):
        if self.waits:
            return x + torch.tanh(self.linear(x))
        if self.torch is None:
            self.torch = torch.Generator().manual_seed(3)
        if self.training and not hasattr(self, "python"):
            self.python = random.Random(3)
        strength = torch.rand(6, generator=self.torch) + (self.python.random() if self.training else 0.0)
        return x + torch.tanh(self.linear(x) * strength)


def wait_less(model, *_) -> None:
    for block in model:
        block.waits = max(block.waits - 1, 0)


@pytest.mark.parametrize(("evaluated", "first"), [(False, 1), (True, 1), (False, 2), (False, 3)])
@pytest.mark.parametrize("policy", ["full", "selective", "1 KiB"])
def test_generators_that_a_forward_makes_are_taken_away_while_it_runs_again(policy, evaluated, first):
    """Also by one that is not the first: the look at them ended with the first forward that made none."""
    def run(policy):
        torch.manual_seed(0)
        model = nn.Sequential(*(DrawsLate(waits=first) for _ in range(3)))
        model.register_forward_pre_hook(wait_less)
        recompute(model, policy, blocks=(DrawsLate,))
        if evaluated:
            model.eval()(torch.ones(4, 6))
            model.train()
        found = steps_of(model)
        return found, [(block.torch.initial_seed(), torch.rand((), generator=block.torch), block.python.random()) for block in model]

    (found, after), (wanted, then) = run(policy), run("none")
    assert after == then
    expect_same_steps(found, wanted)


@pytest.mark.parametrize("mesh", [rl.Mesh(), rl.Mesh(shard=2)], ids=str)
def test_generators_that_the_look_at_a_loss_makes_are_no_part_of_training(mesh):
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)

    def body(world):
        torch.manual_seed(0)
        model = copy.deepcopy(start)
        engine = rl.prepare(model, loss=lambda model, x: (model(x).square().sum(), len(x)), world=world, recompute="full",
                            optimizer=lambda params: torch.optim.SGD(params, lr=0.01), stage=3 if mesh.shard > 1 else 0, units=DrawsLate)
        return [engine.step(x.tensor_split(world.size)[world.rank]).loss for _ in range(3)]

    start = nn.Sequential(*(DrawsLate() for _ in range(2))).double()
    plain, losses = copy.deepcopy(start), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss = plain(x).square().sum() / len(x)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    for found in rl.simulate(mesh, body):
        assert found == pytest.approx(losses, rel=1e-12)


class AddsInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, *, into):
        into += self.linear(x)
        return into


@pytest.mark.parametrize("policy", ["full", "selective", "1 KiB"])
def test_a_block_that_changes_its_argument_in_place_is_refused_by_name(policy):
    """It would add twice, or end in an error of torch's that names no block."""
    model = nn.ModuleList(AddsInPlace() for _ in range(2))
    recompute(model, policy, blocks=(AddsInPlace,))
    x = torch.ones(4, 6)
    with pytest.raises(rl.ConfigError, match=r"an? AddsInPlace changes its argument 1, a tensor of shape \[4, 6\], in place.*`x = x \+ y`"):
        for block in model:
            x = block(x, into=x.clone())


class DrawsFromAnother(nn.Module):
    """Leaves another generator than the one that it drew from; or leaves one that the caller takes away."""

    def __init__(self, kept):
        super().__init__()
        self.linear, self.kept = nn.Linear(6, 6), kept
        self.torch = torch.Generator().manual_seed(3)

    def forward(self, x):
        if not self.kept:
            self.short = torch.Generator().manual_seed(5)
        strength = torch.rand(6, generator=self.torch if self.kept else self.short)
        if self.kept:
            self.torch = torch.Generator().manual_seed(int(1000 * strength[0]))
        return x + torch.tanh(self.linear(x) * strength)


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("policy", ["full", "selective", "1 KiB"])
def test_generators_that_are_replaced_or_taken_away_are_those_of_the_forward_while_it_runs_again(policy, kept):
    def run(policy):
        def take_away():
            for block in model if not kept else ():
                del block.short

        torch.manual_seed(0)
        model = nn.Sequential(*(DrawsFromAnother(kept) for _ in range(2)))
        recompute(model, policy, blocks=(DrawsFromAnother,))
        found = steps_of(model, after_forward=take_away)
        return found, [block.torch.initial_seed() for block in model], [hasattr(block, "short") for block in model]

    (found, *after), (wanted, *then) = run(policy), run("none")
    assert after == then
    expect_same_steps(found, wanted)
