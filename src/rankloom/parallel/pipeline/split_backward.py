"""A backward in two parts: towards the input at once, products for the gradients of weight matrices later.

Nearly all of what a backward towards the weights costs is one matrix product for each linear layer. While a stage runs forward
under `deferring`, each `F.linear` on a weight that is trained is replaced by one whose backward gives the gradient of its input,
and only notes what the gradient of its weight is the product of. `finish` multiplies. Nothing is computed twice, and what
autograd kept for anything else is freed with the first part. Gradients of norms, biases and embeddings are cheap, and not deferred.
A block that computes its forward again in backward must come to the same layers then, so the first part runs under `deferring` too.

source: Qi et al. 2023
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Product(NamedTuple):
    """The gradient of `weight` still to come: grad [..., O] by x [..., I]."""

    weight: Tensor
    grad: Tensor
    x: Tensor


class deferring(TorchFunctionMode):
    """A context: linear layers inside leave their weights' products in `products` when their backward comes."""

    def __init__(self, products: list[Product]):
        super().__init__()
        self.products = products

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # Autocast converts around the plain function only; a weight computed from others needs its graph; and where the input needs
        # no gradient there is nothing to do at once.
        trained = weight.is_leaf and weight.requires_grad and input.requires_grad and torch.is_grad_enabled()
        if not trained or input.dim() < 2 or torch.is_autocast_enabled(input.device.type):
            return F.linear(input, weight, bias)
        out: Tensor = _Linear.apply(input, bias, [weight], self.products)   # type: ignore[no-untyped-call]
        return out


class _Linear(torch.autograd.Function):
    """The weight is no input of the graph: its hooks would run with the first part, before it has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: list[Tensor], products: list[Product]) -> Tensor:
        ctx.save_for_backward(x)
        (ctx.weight,), ctx.products = weight, products
        return F.linear(x, ctx.weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.products.append(Product(ctx.weight, grad, *ctx.saved_tensors))
        return grad @ ctx.weight.conj(), grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None, None, None


def backward_to_inputs(products: list[Product], ends: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """The first part, of what ran forward under `deferring(products)`."""
    with deferring(products):
        # torch.autograd.backward would be taken for one more function of torch, inside of which no mode is on
        torch.autograd.Variable._execution_engine.run_backward(
            tuple(ends), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)


@torch.no_grad()
def finish_products(products: list[Product]) -> None:
    """Add what was noted to the weights' gradients, as a backward would: hooks run. Where there are none, no product is stored first."""
    for weight, grad, x in products:
        rows, columns = grad.flatten(0, -2).T, x.flatten(0, -2).conj()   # of real numbers, themselves
        if weight.grad is None or _has_hooks(weight):
            torch.autograd.backward([weight], [rows @ columns])
        else:
            torch.addmm(weight.grad, rows, columns, out=weight.grad)
    products.clear()


def _has_hooks(weight: Tensor) -> bool:
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)  # type: ignore[attr-defined]
