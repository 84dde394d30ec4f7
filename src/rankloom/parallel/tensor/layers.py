"""Linear layers cut over ranks, and what happens between split tokens.

    column     y = x W, W cut by output features: x is whole, y comes out cut by features, nothing is sent forward
    row        y = x W, W cut by input features:  x is cut by features, y is a partial sum: one all-reduce

So a pair of them, column then row, with anything elementwise (or whole attention heads) between, costs one all-reduce
forward (the row's exit) and one backward (the column's entrance): Shoeybi et al. 2019. With the stream between the pairs
cut by tokens, the exit is a reduce-scatter, and the norm before the pair gathers the tokens: the same bytes, and norms,
dropout and residuals are computed and kept once, not once a rank: Korthikanti et al. 2022.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from rankloom.base.layout import Layout
from rankloom.parallel.tensor.moves import BY_TOKENS, BY_WIDTH, GRAD_PARTIAL, PARTIAL, WHOLE, Entrance, claim, redistribute
from rankloom.world.group import Group


def product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """x [..., in] times weight [out, in], or [in, out] when `transposed`, plus bias [out] -> [..., out]."""
    return F.linear(x, weight.T if transposed else weight, bias)


def entered(x: Tensor, enter: Entrance | None, group: Group, label: str) -> Tensor:
    """A whole `x` as a split layer reads it. Without an entrance, the gather of tokens that x comes from will sum its gradient.

    raises: ConfigError when there is no such gather
    """
    if enter is not None:
        return enter(x)
    claim(x, group, label)
    return x


class ColumnLinear(nn.Module):
    """A linear layer of which each rank holds some output features.

    enter:   the entrance shared with its siblings; None where a gather of tokens before it sums the input's gradient
    gathers: the output's features come out whole, the first `gathers` of them (the rest is padding); 0: they stay cut
    """

    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group, enter: Entrance | None, *,
                 transposed: bool, gathers: int, label: str):
        super().__init__()
        self.weight, self.group, self.enter, self.transposed, self.gathers, self.label = weight, group, enter, transposed, gathers, label
        self.register_parameter("bias", bias)

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

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [..., in] -> [..., out / p], nothing sent."""
        return product(x, self.weight, bias, self.transposed)


class RowLinear(nn.Module):
    """A linear layer of which each rank holds some input features. It ends as `out` says: whole, or split by tokens.

    slices: the input is whole, and each rank takes its features of it
    """

    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group, out: Layout, *,
                 transposed: bool, slices: bool, label: str):
        super().__init__()
        self.weight, self.group, self.out, self.transposed, self.slices, self.label = weight, group, out, transposed, slices, label
        self.register_parameter("bias", bias)

    def extra_repr(self) -> str:
        """For printing the model."""
        return f"{tuple(self.weight.shape)} of rank {self.group.rank} of {self.group.size}, ends as {self.out}"

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in / p] -> [..., out], or this rank's tokens of it.   sent: an all-reduce, or reduce-scatter, of the output"""
        if self.slices:
            x = redistribute(x, WHOLE, BY_WIDTH, self.group, label=self.label)
        y = self.multiply(x)
        return y if self.bias is None else y + self.bias   # once, after the sum

    def multiply(self, x: Tensor) -> Tensor:
        """x: [..., in / p] -> [..., out], summed; or this rank's tokens of it."""
        y = self.product(x, None)
        return redistribute(y, PARTIAL, self.out, self.group, label=self.label, overwrite=True)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [..., in / p] -> this rank's term of [..., out], nothing sent."""
        return product(x, self.weight, bias, self.transposed)


def gather_features_after(module: nn.Module, group: Group, label: str) -> None:
    """`module` (an embedding) has some features of every row; what comes after it sees all.   sent: an all-gather of [..., W / p]"""
    def gather(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return redistribute(output, BY_WIDTH, WHOLE, group, label=label)

    module.register_forward_hook(gather)


class TokenDropout(nn.Dropout):
    """Dropout of this rank's tokens, by that part of the mask of all tokens: ranks that draw alike drop as one process would."""

    def __init__(self, p: float, group: Group):
        super().__init__(p)
        self.part = (group.rank, group.size)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., tokens / p, W]"""
        rank, ranks = self.part
        whole = x.new_ones((*x.shape[:-2], ranks * x.shape[-2], x.shape[-1])) if self.training and self.p else x
        return x if whole is x else x * super().forward(whole).chunk(ranks, dim=-2)[rank]


def gather_tokens_after(module: nn.Module, group: Group, out: Layout, label: str) -> None:
    """`module` (a norm) runs on this rank's tokens; what comes after it sees all of them.

    out:  GRAD_PARTIAL before split layers, WHOLE before what all ranks compute alike
    sent: an all-gather of its output; backward, a reduce-scatter of what the split layers behind it owe, or nothing
    """
    def gather(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return redistribute(output, BY_TOKENS, out, group, label=label)

    module.register_forward_hook(gather)


def split_tokens_before(module: nn.Module, group: Group, label: str) -> None:
    """`module` is given whole activations as its first argument, and takes this rank's tokens of them.

    sent: backward, an all-gather of the gradient
    """
    change_first_before(module, lambda x: redistribute(x, WHOLE, BY_TOKENS, group, label=label))


def change_first_before(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """`module` is given its first tensor changed, by place or by name."""
    def changed(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        name = next(key for key, value in kwargs.items() if isinstance(value, Tensor))
        return args, kwargs | {name: change(kwargs[name])}

    module.register_forward_pre_hook(changed, with_kwargs=True)


def sum_over_experts(module: nn.Module, group: Group, label: str) -> None:
    """`module` has a part of each expert's matrices: what it is given is whole on all ranks, what it gives is one term of a sum.

    sent: an all-reduce of its output; backward, one of each of its inputs (hidden states, and the weights of the experts)
    """
    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def apart(x: Any) -> Any:
            real = isinstance(x, Tensor) and x.is_floating_point()
            return redistribute(x, WHOLE, GRAD_PARTIAL, group, label=label) if real else x

        return tuple(map(apart, args)), {name: apart(value) for name, value in kwargs.items()}

    def add_up(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return redistribute(output, PARTIAL, WHOLE, group, label=label)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(add_up)


@dataclass(slots=True)
class Between:
    """Whether what runs is between the column-cut layers of a module and the row-cut ones: each rank has other features there, or heads.

    heads: query heads of this rank, if it is attention
    """

    rank: int
    heads: int
    is_cut: bool = False

    def leave(self, *_: Any) -> None:
        """From here on activations are whole."""
        self.is_cut = False

    def enter(self, *_: Any) -> None:
        """From here on they are cut."""
        self.is_cut = True


# No word of a plan says which dropouts stand between cut layers, and shapes do not tell. So the module that has these layers is watched
# as it runs. What draws masks by name and place (train/dropout.py) looks there; torch's own dropout does not.


def watch_dropout(model: nn.Module, columns: list[str], rows: list[str], heads: Mapping[str, int], group: Group) -> None:
    """Tell every `nn.Dropout` that stands in one module with column-cut layers and row-cut ones when it is between them.

    columns, rows: names of these layers
    heads:         attention module -> query heads of this rank
    """
    known: dict[str, Between] = {}
    for name, module in model.named_modules():
        owner = _owner(name, columns, rows) if type(module) is nn.Dropout and module.p > 0 and group.size > 1 else None
        if owner is None:
            continue
        if owner not in known:
            known[owner] = Between(group.rank, heads.get(owner, 0))
            model.get_submodule(owner).register_forward_pre_hook(known[owner].leave)
            for column in _inside(owner, columns):
                model.get_submodule(column).register_forward_hook(known[owner].enter)
            for row in _inside(owner, rows):
                model.get_submodule(row).register_forward_pre_hook(known[owner].leave)
        vars(module)["between"] = known[owner]


def _owner(name: str, columns: list[str], rows: list[str]) -> str | None:
    """The innermost module around `name` that has layers of both kinds."""
    while name:
        name = name.rpartition(".")[0]
        if _inside(name, columns) and _inside(name, rows):
            return name
    return None


def _inside(owner: str, names: list[str]) -> list[str]:
    return [name for name in names if not owner or name.startswith(f"{owner}.")]
