"""How the tests of tensor parallel compare a split model with the plain one: logits, loss, every gradient, every parameter."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

import rankloom as rl
from closeness import error, expect_close
from rankloom.parallel.model_split import ModelSplit, full_state_dict

RTOL = 1e-12   # of the largest element: the same terms added in another order, some of which cancel


def joined(tensors: Mapping[str, torch.Tensor], model: nn.Module, group) -> dict[str, torch.Tensor]:
    """Whole tensors, from parts cut like the parameters of the same names: gradients, moments."""
    split = ModelSplit.found_in(model, group.alone())
    return {name: split.join(name, tensor) for name, tensor in tensors.items()}


def whole_gradients(model: nn.Module, group) -> dict[str, torch.Tensor]:
    """The gradients of a split model under the names and in the shapes of the plain one; zeros where there is none."""
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return joined(grads, model, group)


def expect_equals_plain(ranks: int, make: Callable[[], nn.Module], run: Callable, *, plan=None, rtol: float = RTOL,
                 before: Callable = lambda world: None, **options) -> None:
    """Split `make()` over ranks; `run(model) -> (logits, loss)`, logits or None, must give what the plain model does.

    before: called with each rank's world first
    """
    plain = make()
    logits, loss = run(plain)
    loss.backward()
    truth = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in plain.named_parameters()}

    def body(world):
        before(world)
        model = rl.tensor_parallel(make(), plan, world, **options)
        seen, value = run(model)
        value.backward()
        return seen, value.detach(), whole_gradients(model, world), full_state_dict(model, world)

    for seen, value, grads, state in rl.simulate(ranks, body):
        assert error(value, loss) <= rtol
        assert logits is None or error(seen, logits) <= rtol
        assert list(grads) == list(truth)
        expect_close(grads, truth, rtol)
        assert list(state) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=0)


class Conv1D(nn.Module):
    """A linear layer that keeps its weight transposed, as GPT-2 does."""

    def __init__(self, nf: int, nx: int):
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])
