"""Keyed dropout: masks that depend on what is trained and never on where."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import rankloom as rl
from awkward import adamw, loss_sum, make_batches, make_model
from rankloom.train.dropout import DropoutKey, KeyedDropout, key_dropout, keyed_mask


def mask(seed=0, step=0, microbatch=0, name="drop", p=0.5, n=1000, calls=1) -> torch.Tensor:
    key = DropoutKey(seed)
    key.move_to(step, microbatch)
    module = KeyedDropout(p, name, key)
    return [module(torch.ones(n)) for _ in range(calls)][-1]


def test_equal_keys_give_equal_masks_whatever_the_global_generator_does():
    first = mask()
    torch.manual_seed(99)
    assert torch.equal(first, mask())


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}, {"microbatch": 1}, {"name": "other"}, {"calls": 2}])
def test_every_part_of_the_key_changes_the_mask(other):
    agree = (mask() == mask(**other)).float().mean().item()
    assert 0.4 < agree < 0.6, "independent fair coins agree half of the time"


def test_the_next_micro_batch_starts_counting_calls_anew():
    key = DropoutKey(0)
    module = KeyedDropout(0.5, "drop", key)
    key.move_to(0, 0)
    first = [module(torch.ones(50)) for _ in range(2)]
    key.move_to(0, 1)
    module(torch.ones(50))
    key.move_to(0, 0)
    again = [module(torch.ones(50)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(first, again)) and not torch.equal(*first)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_what_is_kept_is_scaled_so_that_the_mean_stays(p):
    got = mask(p=p, n=100_000)
    assert got.unique().tolist() == [0.0, pytest.approx(1 / (1 - p))]
    assert got.mean().item() == pytest.approx(1.0, abs=5 * (p / (1 - p) / 100_000) ** 0.5)   # five standard deviations


def test_the_gradient_passes_where_the_value_did():
    key, x = DropoutKey(0), torch.ones(100, requires_grad=True)
    out = KeyedDropout(0.25, "drop", key)(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False), (0.0, False)])
def test_without_dropout_or_in_evaluation_it_is_the_identity(p, training):
    x = torch.randn(5)
    assert KeyedDropout(p, "drop", DropoutKey(0)).train(training)(x) is x


def test_dropping_everything_gives_zeros():
    assert not mask(p=1.0).any()


def test_every_dropout_of_a_model_is_replaced_at_every_place_it_hangs():
    shared = nn.Dropout(0.2)
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), shared), "b": nn.Sequential(shared, nn.Dropout(0.3))}).eval()
    assert key_dropout(model, DropoutKey(0)) == 3
    keyed = {name: (module.p, module.name, module.training) for name, module in model.named_modules() if isinstance(module, KeyedDropout)}
    assert keyed == {"a.1": (0.2, "a.1", False), "b.0": (0.2, "b.0", False), "b.1": (0.3, "b.1", False)}
    assert not any(type(module) is nn.Dropout for module in model.modules())
    assert "p=0.2, keyed" in repr(model)


@pytest.mark.parametrize(("p", "accumulate"), [(1, 4), (2, 2), (4, 1)])
def test_training_with_dropout_is_the_same_however_micro_batches_lie_on_ranks(p, accumulate):
    """24 rows in four micro-batches of six; fp64, so only the order of addition differs."""
    def body(world, p=p, accumulate=accumulate):
        engine = rl.prepare(make_model(dropout=0.5), loss=loss_sum, optimizer=adamw, world=world, accumulate=accumulate, seed=3)
        losses = [engine.step([t.tensor_split(world.size)[world.rank] for t in batch]).loss for batch in make_batches(3, rows=24)]
        return losses, engine.full_state_dict()["model"]

    losses, params = rl.simulate(p, body)[-1]
    truth, reference = rl.simulate(1, lambda w: body(w, 1, 4))[0]
    assert losses == pytest.approx(truth, rel=1e-12)
    for name, expected in reference.items():
        torch.testing.assert_close(params[name], expected, rtol=1e-12, atol=1e-12)


def test_every_step_and_every_micro_batch_of_every_rank_draws_masks_of_its_own():
    """The learning rate is zero and the rows are all alike, so only masks can tell two losses apart."""
    def body(world):
        still = lambda params: torch.optim.SGD(params, lr=0.0)
        seen = []
        loss = lambda m, batch: (seen.append(loss_sum(m, batch)) or seen[-1])
        engine = rl.prepare(make_model(dropout=0.5), loss=loss, optimizer=still, world=world, accumulate=3)
        for _ in range(3):
            engine.step([t[:1].repeat(3, 1) for t in make_batches()[0]])
        return [total.item() for total, _ in seen[3:]]   # before the first step the loss is called three times to see if it is a sum

    drawn = [value for values in rl.simulate(2, body) for value in values]
    assert len(drawn) == len(set(drawn)) == 18


def test_another_seed_and_no_dropout_train_otherwise():
    def body(world, dropout, seed):
        engine = rl.prepare(make_model(dropout=dropout), loss=loss_sum, optimizer=adamw, world=world, seed=seed)
        return [engine.step(make_batches()[0]).loss for _ in range(2)][-1]

    losses = {rl.simulate(1, lambda w, d=d, s=s: body(w, d, s))[0] for d, s in ((0.0, 0), (0.5, 0), (0.5, 1))}
    assert len(losses) == 3


def test_a_compiled_module_draws_the_same_masks_call_by_call_and_is_compiled_once():
    """Ten modules, two calls each: names, counters and keys are no part of the graph."""
    torch._dynamo.reset()
    counter, key = CompileCounterWithBackend("aot_eager"), DropoutKey(4)
    modules = [KeyedDropout(0.5, f"drop.{i}", key) for i in range(10)]
    compiled = torch.compile(lambda module, x: module(module(x)), backend=counter, fullgraph=True)
    for step in range(2):
        key.move_to(step, 1)
        expected = [module(module(torch.ones(40))) for module in modules]
        key.move_to(step, 1)
        assert all(torch.equal(compiled(module, torch.ones(40)), wanted) for module, wanted in zip(modules, expected))
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_a_copy_of_a_module_draws_with_its_own_key():
    key = DropoutKey(4)
    module = KeyedDropout(0.5, "drop", key)
    twin = copy.deepcopy(module)
    key.move_to(5, 5)
    assert torch.equal(keyed_mask(torch.ones(40), twin._place), mask(4, name="drop", n=40))
    assert twin.key.calls == {"drop": 0} and key.calls == {}
