"""The layers of layers.py with collectives overlapped by matrix products. Tests hold them to the plain path.

    row, forward       in pieces of tokens: while one is summed over the ranks, the next is multiplied
    row, backward      with sequence parallel: pieces of the gradient are all-gathered, and multiplied as they arrive
    column, backward   the input gradient is computed first; weight gradients are computed while it is all-reduced

The last spans several layers: queries, keys and values each have a backward of their own. Here a layer's backward computes the input
gradient only, and leaves the factors of its weight gradient at their common entrance. The entrance's backward runs after all of theirs: it
starts the all-reduce, multiplies the factors, and returns the weight gradients, because the weights are inputs of it too.

The bytes are those of the plain path, in `pieces` times the messages. Read layers.py and moves.py before this file.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from rankloom.parallel.tensor.compare import expect_alike
from rankloom.parallel.tensor.layers import ColumnLinear, RowLinear, product
from rankloom.parallel.tensor.moves import BY_TOKENS, WHOLE, Entrance, expect_even, is_watched
from rankloom.world.group import Group


class Product(NamedTuple):
    """The two factors of a weight gradient that is not computed yet: grad [..., out] and x [..., in] of a layer."""

    at: int        # the layer's place at the entrance
    grad: Tensor
    x: Tensor


class OverlappedEntrance(Entrance):
    """An entrance that computes its layers' weight gradients while the input gradient is all-reduced."""

    def __init__(self, group: Group, label: str):
        super().__init__(group, label)
        self.layers: list[OverlappedColumnLinear] = []
        self.products: list[Product] = []   # left by the layers' backward

    def enter(self, x: Tensor) -> Tensor:
        """`x` as the layers read it; their weights pass through the same node. Each forward has products of its own."""
        if self.group.size == 1:
            return x
        self.products = []
        expect_alike(x, WHOLE, self.group, f"{self.label}: forward")
        entered: Tensor = _Enter.apply(x, self, self.products, *(layer.weight for layer in self.layers))   # type: ignore[no-untyped-call]
        return entered


class OverlappedColumnLinear(ColumnLinear):
    """A `ColumnLinear` that leaves its weight gradient to the entrance."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.at: int | None = None   # its place at the entrance
        if isinstance(self.enter, OverlappedEntrance):
            self.at = len(self.enter.layers)
            self.enter.layers.append(self)

    @torch.compiler.disable
    def multiply(self, x: Tensor) -> Tensor:
        """x: [..., in], whole -> [..., out / p]."""
        if self.at is None or self.group.size == 1:
            return super().multiply(x)
        assert isinstance(self.enter, OverlappedEntrance), "a layer with a place has an entrance"
        entered = self.enter(x)
        x, weight = _cast(entered, self.weight.detach())
        y: Tensor = _Column.apply(x, weight, self.at, self.enter.products, self.transposed)   # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, entrance: OverlappedEntrance, products: list[Product], *weights: Tensor) -> Tensor:
        ctx.group, ctx.label, ctx.products = entrance.group, entrance.label, products
        ctx.transposed = [layer.transposed for layer in entrance.layers]
        ctx.dtypes = [weight.dtype for weight in weights]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        handle = None
        if ctx.needs_input_grad[0]:
            total = gradient.clone(memory_format=torch.contiguous_format)
            handle = ctx.group.all_reduce(total, label=f"{ctx.label}: backward", async_op=True)
        found: list[Tensor | None] = [None] * len(ctx.transposed)
        while ctx.products:
            at, grad, x = ctx.products.pop()
            if ctx.needs_input_grad[3 + at]:
                part = _weight_gradient(grad, x, ctx.transposed[at]).to(ctx.dtypes[at])
                found[at] = part if (before := found[at]) is None else before + part
        return handle and handle.wait(), None, None, *found


class _Column(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, at: int, products: list[Product], transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.at, ctx.products, ctx.transposed = at, products, transposed
        return product(x, weight, None, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.products.append(Product(ctx.at, grad, x))
        return _input_gradient(grad, weight, ctx.transposed), None, None, None, None


class OverlappedRowLinear(RowLinear):
    """A `RowLinear` that sums its output in `pieces`, each while the next is multiplied."""

    def __init__(self, *args: Any, pieces: int, **options: Any):
        super().__init__(*args, **options)
        self.pieces = pieces

    @torch.compiler.disable
    def multiply(self, x: Tensor) -> Tensor:
        """x: [..., tokens, in / p] -> [..., tokens, out], summed; or this rank's tokens of it."""
        if self.group.size == 1:
            return super().multiply(x)
        y: Tensor = _Row.apply(*_cast(x, self.weight), self)   # type: ignore[no-untyped-call]
        return y

    def views(self, x: Tensor, ranks: int) -> list[Tensor]:
        """Pieces of the tokens of x [..., ranks x tokens, n], each with its share of the tokens of every rank: [ranks, ..., share, n]."""
        return list(x.unflatten(-2, (ranks, -1)).movedim(-3, 0).tensor_split(self.pieces, dim=-2))


class _Row(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: OverlappedRowLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.way = layer, None   # `claim` in moves.py looks no further back than to a node with a `way`
        group, multiply = layer.group, lambda part: product(part, weight, None, layer.transposed)
        if layer.out != BY_TOKENS:   # each piece is all-reduced while the next is multiplied
            tokens = _rows(x)
            terms = (multiply(part) for part in tokens.tensor_split(min(layer.pieces, max(len(tokens), 1))))
            handles = [group.all_reduce(term.clone() if is_watched() else term, label=f"{layer.label}: forward", async_op=True)
                       for term in terms]
            rows = torch.cat([handle.wait() for handle in handles])
            return torch.ops.aten._unsafe_view(rows, [*x.shape[:-1], rows.shape[-1]])   # not a view: models may add to it in place
        expect_even(x.shape[-2], "tokens", x, group, f"{layer.label}: forward")
        handles = [group.reduce_scatter(multiply(part).contiguous(), label=f"{layer.label}: forward", async_op=True)
                   for part in layer.views(x, group.size)]
        return torch.cat([handle.wait()[0] for handle in handles], dim=-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: OverlappedRowLinear = ctx.layer
        if layer.out != BY_TOKENS:
            return _input_gradient(grad, weight, layer.transposed), _weight_gradient(grad, x, layer.transposed), None
        parts = [part.contiguous() for part in layer.views(grad, 1)]
        handles = [layer.group.all_gather(part, label=f"{layer.label}: backward", async_op=True) for part in parts]
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        for handle, x_part, grad_part in zip(handles, layer.views(x, layer.group.size), layer.views(grad_x, layer.group.size)):
            came = handle.wait()
            grad_part.copy_(_input_gradient(came, weight, layer.transposed))
            grad_weight += _weight_gradient(came, x_part, layer.transposed)
        return grad_x, grad_weight, None


def _input_gradient(grad: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    return grad @ (weight.T if transposed else weight).conj()   # the identity for real numbers


def _weight_gradient(grad: Tensor, x: Tensor, transposed: bool) -> Tensor:
    grad, x = _rows(grad), _rows(x).conj()
    return x.T @ grad if transposed else grad.T @ x


def _rows(x: Tensor) -> Tensor:
    """[..., n] -> [rows, n]."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def _cast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The dtypes that autocast would give a product."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return x.to(dtype), weight.to(dtype)
    return x, weight
