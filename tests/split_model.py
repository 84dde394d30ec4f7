"""How the tests of tensor parallel compare a split model with the plain one: logits, loss, every gradient, every parameter."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

import rankloom as rl
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


def error(mine: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest difference, in units of the largest element."""
    assert mine.shape == truth.shape, f"{mine.shape} is not {truth.shape}"
    return ((mine - truth).abs().max() / truth.abs().max().clamp(min=1e-300)).item() if truth.numel() else 0.0


def expect_equal(ranks: int, make: Callable[[], nn.Module], run: Callable, *, plan=None, rtol: float = RTOL,
                 before: Callable = lambda world: None, **options) -> None:
    """Split `make()` over ranks; `run(model) -> (logits, loss)`, logits or None, must give what the plain model does.

    before: called with each rank's world first
    """
    plain = make()
    logits, loss = run(plain)
    loss.backward()

    def body(world):
        before(world)
        model = rl.tensor_parallel(make(), plan, world, **options)
        seen, value = run(model)
        value.backward()
        return seen, value.detach(), whole_gradients(model, world), full_state_dict(model, world)

    for seen, value, grads, state in rl.simulate(ranks, body):
        assert error(value, loss.detach()) <= rtol
        assert logits is None or error(seen, logits) <= rtol
        assert list(grads) == [name for name, _ in plain.named_parameters()]
        for name, param in plain.named_parameters():
            truth = torch.zeros_like(param) if param.grad is None else param.grad
            assert error(grads[name], truth) <= rtol, f"gradient of {name}"
        assert list(state) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=0)
