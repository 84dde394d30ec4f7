"""A backward in two parts: input gradients at once, the matrix products of weight gradients later.

Nearly all the cost of weight gradients is one matrix product for each linear layer. While a stage runs forward under `deferring`, each
`F.linear` on a trained weight is replaced by one whose backward computes the input gradient, and only notes the two factors of the weight
gradient. `finish_products` multiplies them. Nothing is computed twice, and all else that autograd kept is freed by the first part.
Gradients of norms, biases and embeddings are cheap, and not deferred. The first part runs under `deferring` too, for blocks that recompute
their forward in backward, or ask `torch.autograd.grad` there, as implicit layers do.

source: Qi et al. 2023
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rankloom.base.errors import ConfigError
from rankloom.base.hooks import is_hooked, is_hooked_by_others


class Product(NamedTuple):
    """The two factors of a gradient of `weight` [O, I] that is not computed yet: grad [..., O] and x [..., I]."""

    weight: Tensor
    grad: Tensor
    x: Tensor


class deferring(TorchFunctionMode):
    """A context: linear layers that run inside will append to `products` in their backward."""

    def __init__(self, products: list[Product]):
        super().__init__()
        self.products = products
        self.hidden = set[int]()   # ids of the weights of these layers

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        if func is torch.autograd.grad:
            return self._grad(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _grad(self, outputs: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """`torch.autograd.grad`, which adds nothing to the gradients of weights: the products of its backward are dropped."""
        for x in inputs if isinstance(inputs, tuple | list) else [inputs]:
            if id(x) in self.hidden and _is_deferred(x, outputs):
                raise ConfigError(f"a stage asks torch.autograd.grad for the gradient of a weight of shape {tuple(x.shape)}, which its "
                                  "backward computes later than all others. Give the weight a hook, such as "
                                  "`weight.register_hook(lambda grad: grad)`: then it does not")
        made = len(self.products)
        try:
            return torch.autograd.grad(outputs, inputs, *args, **options)
        finally:
            del self.products[made:]

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # Not under autocast, which casts for the plain function only; not for a weight computed from others, which needs its graph; not
        # where the input needs no gradient, so that there is no first part; not for a single vector, which is no product of matrices; not
        # for a weight with hooks of the user's, which must see the sum over all its uses, and once; nor inside torch.func, or with a bias
        # of several rows, which autograd knows and `_Linear` does not.
        trained = weight.is_leaf and weight.requires_grad and input.requires_grad and torch.is_grad_enabled()
        known = min(input.dim(), weight.dim()) > 1 and (bias is None or bias.dim() < 2) and not is_hooked_by_others(weight)
        if not (trained and known) or torch.is_autocast_enabled(input.device.type) or torch._C._are_functorch_transforms_active():
            return F.linear(input, weight, bias)
        self.hidden.add(id(weight))
        out: Tensor = _Linear.apply(input, bias, [weight], self.products)   # type: ignore[no-untyped-call]
        return out


class _Linear(torch.autograd.Function):
    """The weight is not an input of the graph: its hooks would run in the first part, before it has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, hidden_weight: list[Tensor], products: list[Product]) -> Tensor:
        (weight,) = hidden_weight   # in a list, where autograd does not see it
        ctx.save_for_backward(x)
        ctx.weight, ctx.products = weight, products
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.products.append(Product(ctx.weight, grad, *ctx.saved_tensors))
        return grad @ ctx.weight.conj(), grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None, None, None


def _is_deferred(weight: Tensor, outputs: Tensor | Sequence[Tensor]) -> bool:
    """Whether the outputs were computed by a deferred layer of this weight."""
    nodes: list[Any] = [getattr(y, "grad_fn", None) for y in ([outputs] if isinstance(outputs, Tensor) else outputs)]
    seen = set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, _Linear._backward_cls) and node.weight is weight:   # type: ignore[attr-defined]
            return True
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
    return False


def backward_to_inputs(products: list[Product], ends: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """The first part, of what ran forward under `deferring(products)`."""
    with deferring(products):
        # torch.autograd.backward is itself dispatched as a torch function, which would disable this mode during backward
        torch.autograd.Variable._execution_engine.run_backward(
            tuple(ends), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)


@torch.no_grad()
def finish_products(products: list[Product]) -> None:
    """Add the products to the weights' gradients, as a backward would: our hooks run, once for each. Without hooks, add in place."""
    for weight, grad, x in products:
        rows, columns = grad.flatten(0, -2).T, x.flatten(0, -2).conj()   # conj is the identity for real numbers
        if weight.grad is None or is_hooked(weight):
            torch.autograd.backward([weight], [rows @ columns])
        else:
            torch.addmm(weight.grad, rows, columns, out=weight.grad)
    products.clear()
