"""Linear layers cut over ranks, and the layers of sequence parallelism between them.

    column     y = x W, W cut by output features: x is whole, y is cut by features, nothing is sent forward
    row        y = x W, W cut by input features:  x is cut by features, y is a partial sum: one all-reduce

So a pair, column then row, with anything elementwise (or whole attention heads) between, costs one all-reduce forward (after the row) and
one backward (before the column): Shoeybi et al. 2019. With sequence parallelism, activations between pairs are cut by tokens: a
reduce-scatter ends the pair, and the norm before it all-gathers the tokens. The same bytes, but each rank computes and keeps norms, dropout
and residuals of its own tokens only: Korthikanti et al. 2022.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from rankloom.base.errors import ShapeMismatch
from rankloom.base.first_argument import first_parameter, with_first
from rankloom.base.layout import Layout
from rankloom.parallel.tensor.moves import BY_TOKENS, BY_WIDTH, GRAD_PARTIAL, PARTIAL, WHOLE, Entrance, claim, redistribute
from rankloom.world.group import Group


def product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """x [..., in] times weight [out, in], or [in, out] when `transposed`, plus bias [out] -> [..., out]."""
    return F.linear(x, weight.T if transposed else weight, bias)


def entered(x: Tensor, enter: Entrance | None, group: Group, label: str) -> Tensor:
    """`x`, whole, as a split layer reads it.

    With sequence parallel (`enter` None) the all-gather before it reduce-scatters the gradient instead.
    raises: ConfigError when x comes from no such all-gather
    """
    if enter is not None:
        return enter(x)
    claim(x, group, label)
    return x


class CutLinear(nn.Module):
    """What a rank has of a linear layer: part of its weight, [out, in] or [in, out] when `transposed`, and its bias or part of it."""

    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group, *, transposed: bool, label: str):
        super().__init__()
        self.weight, self.group, self.transposed, self.label = weight, group, transposed, label
        self.register_parameter("bias", bias)
        self.in_features, self.out_features = weight.shape if transposed else weight.shape[::-1]   # of this rank

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [..., in_features] -> [..., out_features], nothing sent."""
        return product(x, self.weight, bias, self.transposed)


class ColumnLinear(CutLinear):
    """A linear layer of which each rank holds some output features.

    enter:   the entrance shared with its siblings. With sequence parallel None: the all-gather before it sums the input's gradient
    gathers: the number of output features (without padding) to all-gather; 0: they stay cut
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group, enter: Entrance | None, *,
                 transposed: bool, gathers: int, label: str):
        super().__init__(weight, bias, group, transposed=transposed, label=label)
        self.enter, self.gathers = enter, gathers

    def extra_repr(self) -> str:
        """For printing the model."""
        return f"{tuple(self.weight.shape)} of rank {self.group.rank} of {self.group.size}" + (", gathers" if self.gathers else "")

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in], whole -> [..., out / p].   sent: backward, an all-reduce of x; an all-gather of the output if it gathers"""
        cut = self.multiply(x)
        return redistribute(cut, BY_WIDTH, WHOLE, self.group, label=self.label)[..., :self.gathers] if self.gathers else cut

    def multiply(self, x: Tensor) -> Tensor:
        """x: [..., in], whole -> [..., out / p]."""
        return self.product(entered(x, self.enter, self.group, self.label), self.bias)


class RowLinear(CutLinear):
    """A linear layer of which each rank holds some input features. Its output is as `out` says: whole, or split by tokens.

    slices: the input is whole, and each rank slices its features out of it
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group, out: Layout, *,
                 transposed: bool, slices: bool, label: str):
        super().__init__(weight, bias, group, transposed=transposed, label=label)
        self.out, self.slices = out, slices

    def extra_repr(self) -> str:
        """For printing the model."""
        return f"{tuple(self.weight.shape)} of rank {self.group.rank} of {self.group.size}, ends as {self.out}"

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in / p] -> [..., out], or this rank's tokens of it.   sent: an all-reduce, or reduce-scatter, of the output"""
        if self.slices:
            x = redistribute(x, WHOLE, BY_WIDTH, self.group, label=self.label)
        self._expect_part(x)
        y = self.multiply(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)   # once, after the sum; under autocast in 16 bits, as one process

    def _expect_part(self, x: Tensor) -> None:
        whole = self.group.size * self.in_features
        if self.group.size > 1 and x.shape[-1] == whole:
            raise ShapeMismatch(f"{self.group.where(self.label)}: a rowwise layer reads a rank's own features, {self.in_features} of "
                                f"{whole}, and got all, a tensor of shape {tuple(x.shape)}; say rowwise_rep, which takes this rank's "
                                "features of a whole input, or colwise for the layers before it")

    def multiply(self, x: Tensor) -> Tensor:
        """x: [..., in / p] -> [..., out], summed; or this rank's tokens of it."""
        y = self.product(x, None)
        return redistribute(y, PARTIAL, self.out, self.group, label=self.label, overwrite=True)


def move_after(module: nn.Module, src: Layout, dst: Layout, group: Group, label: str, *, unread: bool = False) -> None:
    """Turn every output of `module` from layout `src` into `dst`.   unread, sent: see `redistribute`"""
    module.register_forward_hook(lambda _module, _args, output: redistribute(output, src, dst, group, label=label, unread=unread))


class TokenDropout(nn.Dropout):
    """Dropout of this rank's tokens, with its part of the mask of all tokens: ranks with equal seeds drop what one process would."""

    def __init__(self, p: float, group: Group):
        super().__init__(p)
        self.part = (group.rank, group.size)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., tokens / p, W]"""
        rank, ranks = self.part
        whole = x.new_ones((*x.shape[:-2], ranks * x.shape[-2], x.shape[-1])) if self.training and self.p else x
        return x if whole is x else x * super().forward(whole).chunk(ranks, dim=-2)[rank]


def split_tokens_before(module: nn.Module, group: Group, label: str) -> None:
    """Cut the first argument of `module`, whole activations, to this rank's tokens.

    sent: backward, an all-gather of the gradient
    """
    change_first_before(module, lambda x: redistribute(x, WHOLE, BY_TOKENS, group, label=label))


def change_first_before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Apply `change` to the first argument of every call of `module`, by position or by name."""
    name = first_parameter(module)
    module.register_forward_pre_hook(lambda _module, args, kwargs: with_first(args, kwargs, change, name), with_kwargs=True)


def sum_over_experts(module: nn.Module, group: Group, label: str) -> None:
    """All-reduce the output of `module`, which has a part of each expert's matrices: its inputs are whole, its output is a partial sum.

    sent: an all-reduce of its output; backward, one of each input (hidden states, and the weights of the experts)
    """
    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def apart(x: Any) -> Any:
            real = isinstance(x, Tensor) and x.is_floating_point()
            return redistribute(x, WHOLE, GRAD_PARTIAL, group, label=label) if real else x

        return tuple(map(apart, args)), {name: apart(value) for name, value in kwargs.items()}

    module.register_forward_pre_hook(enter, with_kwargs=True)
    move_after(module, PARTIAL, WHOLE, group, label)
