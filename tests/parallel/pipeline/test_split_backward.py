"""The backward in two parts: the same gradients, the weights' at the end, nothing computed twice."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradients import gradients
from rankloom.base.errors import ConfigError
from rankloom.base.hooks import hook_gradient
from rankloom.parallel.pipeline.split_backward import deferring, finish_products


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 7, bias=False), nn.Linear(7, 3)).double()


@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5), (1, 1, 2, 5)])
def test_both_parts_make_the_gradients_of_one(shape):
    plain, mine, products = make(), make(), []
    x, y = (torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    plain(x).square().sum().backward()
    with deferring(products):
        loss = mine(y).square().sum()
    loss.backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-13, atol=0)
    matrices = {name for name, p in mine.named_parameters() if p.dim() == 2}
    assert {name for name, grad in gradients(mine).items() if grad is None} == matrices, "all but the matrices is there"
    finish_products(products)
    assert products == []
    for name, grad in gradients(plain).items():
        torch.testing.assert_close(gradients(mine)[name], grad, rtol=1e-12, atol=1e-14)


def test_gradients_are_added_to_what_is_there_and_our_hooks_run_with_the_second_part():
    class Notes:
        seen: list[float] = []

        def note(self, param):
            self.seen.append(param.grad.sum().item())

    layer, products, notes = nn.Linear(2, 2, bias=False), [], Notes()
    hook_gradient(layer.weight, notes.note)
    for _ in range(2):
        with deferring(products):
            out = layer(torch.ones(1, 2, requires_grad=True))
        out.sum().backward()
        before = len(notes.seen)
        finish_products(products)
        assert len(notes.seen) == before + 1
    assert notes.seen == [4.0, 8.0]


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_the_user_s_see_the_sum_over_all_uses_of_a_matrix_once(kind):
    """Here one use is a look-up in a table, of which no product is made."""
    plain, products, seen = nn.Linear(3, 3, bias=False).double(), [], []
    mine = copy.deepcopy(plain)
    for layer in (plain, mine):
        getattr(layer.weight, kind)(lambda it: seen.append((it if kind == "register_hook" else it.grad).tolist()))
    out = lambda layer: layer(layer(F.embedding(torch.tensor([0, 2]), layer.weight).tanh())).square().sum()
    out(plain).backward()
    with deferring(products):
        loss = out(mine)
    loss.backward()
    finish_products(products)
    assert len(seen) == 2 and seen[0] == seen[1]


def test_no_product_is_made_twice():
    """Counted: one for the forward, one towards the input, one towards the weight."""
    from torch.utils.flop_counter import FlopCounterMode

    model, products, x = make(), [], torch.ones(4, 5, dtype=torch.float64, requires_grad=True)
    with FlopCounterMode(display=False) as plain:
        model(x).sum().backward()
    with FlopCounterMode(display=False) as first:
        with deferring(products):
            loss = model(x).sum()
        loss.backward()
    with FlopCounterMode(display=False) as second:
        finish_products(products)
    assert first.get_total_flops() + second.get_total_flops() == plain.get_total_flops()
    assert second.get_total_flops() == plain.get_total_flops() / 3


def test_a_matrix_used_twice_gets_both_gradients():
    layer, products = nn.Linear(3, 3, bias=False).double(), []
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(layer(layer(x)).sum(), layer.weight)[0]
    with deferring(products):
        out = layer(layer(x))
    out.sum().backward()
    finish_products(products)
    torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-13, atol=0)


def test_gradients_of_complex_matrices_are_those_of_one_backward():
    plain, products = nn.Sequential(*(nn.Linear(*shape, dtype=torch.complex128) for shape in ((3, 4), (4, 2)))), []
    mine, x = copy.deepcopy(plain), torch.randn(5, 3, dtype=torch.complex128, requires_grad=True)
    plain(x).abs().sum().backward()
    with deferring(products):
        loss = mine(x).abs().sum()
    loss.backward()
    finish_products(products)
    for grad, expected in zip(gradients(mine).values(), gradients(plain).values()):
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("what", ["frozen", "computed", "vector", "row", "no_grad", "input"])
def test_what_cannot_be_deferred_goes_the_plain_way(what):
    weight, products = nn.Parameter(torch.ones(3) if what == "row" else torch.ones(3, 3)), []
    x = torch.ones(3) if what == "vector" else torch.ones(2, 3)
    x.requires_grad_(what != "input")
    weight.requires_grad_(what != "frozen")
    with deferring(products), torch.set_grad_enabled(what != "no_grad"):
        out = F.linear(x, weight * 2 if what == "computed" else weight)
    if what != "no_grad":
        out.sum().backward()
        assert (x.grad is not None) == (what != "input") and (weight.grad is not None) == (what != "frozen")
    assert products == []


@pytest.mark.parametrize("what", ["torch.func", "a bias of one row", "a bias of several rows"])
def test_what_autograd_knows_and_a_deferred_layer_does_not_goes_the_plain_way(what):
    weight, bias = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(1 if what == "a bias of one row" else 2, 3))
    x, products = torch.randn(2, 3, requires_grad=True), []

    def run():
        if what == "torch.func":
            return torch.func.grad(lambda y: F.linear(y, weight).tanh().sum())(x)
        return F.linear(x, weight, bias)

    expected = torch.autograd.grad(run().square().sum(), [x, weight])
    with deferring(products):
        out = run()
    out.square().sum().backward()
    assert products == [] and torch.equal(x.grad, expected[0]) and torch.equal(weight.grad, expected[1])


def test_whoever_asks_for_the_gradient_of_a_deferred_weight_is_told_how_to_get_it():
    layer, x, products = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True), []
    for inputs in (layer.weight, [x, layer.weight]):
        with deferring(products), pytest.raises(ConfigError, match=r"gradient of a weight of shape \(3, 3\), .*weight.register_hook"):
            torch.autograd.grad(layer(x).tanh().sum(), inputs, allow_unused=True)
    with deferring(products):   # not through that layer
        layer(x)
        assert torch.equal(torch.autograd.grad(layer.weight.square().sum(), layer.weight)[0], 2 * layer.weight)
    layer.weight.register_hook(lambda grad: grad)
    with deferring(products):
        asked = torch.autograd.grad(layer(x).sum(), layer.weight)[0]
    assert torch.equal(asked, torch.full((3, 3), 2.0)) and products == [] and layer.weight.grad is None


def test_under_autocast_the_plain_way_is_taken():
    layer, products = nn.Linear(3, 3), []
    with torch.autocast("cpu", torch.bfloat16), deferring(products):
        out = layer(torch.ones(2, 3, requires_grad=True))
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and products == [] and layer.weight.grad is not None
