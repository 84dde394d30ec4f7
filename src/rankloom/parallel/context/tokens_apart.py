"""Does a model look at other tokens through its attention only? That is what context parallel takes for granted.

On ranks that share a sequence all but `part.attend` and `part.gather` sees the tokens that are here. A position counted from 0, a
convolution, a shift, a mean over the row would see a shorter row on each rank, and train a little worse without a word. So before the
first forward a few tokens go through the model with an attention that leaves each to itself: first all, then those with even positions,
then the others. What becomes of a token must be the same, whichever are beside it. That must hold whatever the parameters are, so those
that begin at nothing, such as gates, or as small as the matrices of many models, do not hide what they let in later: they are other numbers
meanwhile.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rankloom.base.modes import evaluating
from rankloom.base.rng import usual_values
from rankloom.world.group import Group

AT_MOST = 48             # tokens; half of them can be cut over 2, 3, 4, 6, 8 tensor ranks
ALL, EVEN, ODD = slice(None), slice(0, None, 2), slice(1, None, 2)
TOKEN_IF_WITHIN = 0.05   # of the length of the vector that becomes of a token: what 16 bits in another kernel may change, many times over
NOTHING = 1e-2           # parameters whose elements are all smaller may hide what they are multiplied with
SUM_IF_WITHIN = {torch.bfloat16: 2e-2, torch.float16: 2e-2}   # of a sum over all tokens, by its dtype
SUM_IF_WITHIN_ELSE = 1e-3                                     # where parts of the model may compute in 16 bits


class TokensApart:
    """A `SequencePart` whose attention leaves each token to itself. It remembers what it was asked."""

    def __init__(self, positions: Tensor):
        self.positions = positions
        self.asked: list[tuple[str, Tensor]] = []
        self.shows_rows = False   # was it asked for more than a token has, as routers of experts ask?

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `SequencePart.attend`."""
        self.asked += [("query", query), ("key", key), ("value", value)]
        return value.repeat_interleave(query.shape[2] // value.shape[2], dim=2)

    def gather(self, x: Tensor) -> Tensor:
        """`x` as it is, since no other rank has more of these tokens. Notes that it was asked."""
        self.shows_rows = True
        return x

    def own(self, x: Tensor) -> Tensor:
        """`x` as it is: all of these tokens are this rank's."""
        return x

    def cut(self, value: Any, length: int) -> Any:
        """Its tokens of whole rows [B, length, ...]; anything else unchanged."""
        return value[:, self.positions] if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length else value


class SomeTokens:
    """Which tokens of whole rows a model is limited to, each left to itself. which: of the first few, an even number"""

    def __init__(self, which: slice):
        self.which = which
        self.parts: list[TokensApart] = []   # all that models were given

    def part(self, length: int, device: torch.device) -> TokensApart:
        """The `part` of these tokens, for rows of this length."""
        self.parts.append(TokensApart(torch.arange(min(length, AT_MOST) // 2 * 2, device=device)[self.which]))
        return self.parts[-1]

    @property
    def shows_rows(self) -> bool:
        """Whether a model was asked, with these parts, for more than a token has."""
        return any(part.shows_rows for part in self.parts)


@torch.compiler.disable
def expect_tokens_apart(model: nn.Module, group: Group, tokens: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before the first forward of whole rows. A collective; the model is called four times, on a few tokens of one row.

    tokens:       the rows [B, T], and
    args, kwargs: what the model will be called with
    raises:       ConfigError, on all ranks, when what becomes of a token depends on which others are here. A model that draws random
                  numbers in evaluation, or calls `part.gather`, is not judged; nor is one that torch.compile would compile for so few
    """
    if any(module._compiled_call_impl for module in model.modules()):
        return
    length = tokens.shape[1]
    parts = [SomeTokens(which).part(length, tokens.device) for which in (ALL, ALL, EVEN, ODD)]
    with torch.no_grad(), evaluating(model), _without_small_parameters(model):
        runs = [_run(model, args, kwargs, length, part) for part in parts]
    problem = None if any(part.shows_rows for part in parts) else _first_difference(runs, len(parts[0].positions))
    group.agree(problem and f"{group.where('context parallel')}: {type(model).__name__} is not the same function of a token when others "
                f"are left out: {problem}. A rank has its own tokens only: take positions from `part.positions`, let tokens see each other "
                "in `part.attend` only, and ask `part.gather` for what needs whole rows", label="tokens apart")


@contextmanager
def _without_small_parameters(model: nn.Module) -> Iterator[None]:
    """Inside, trained parameters that are small are others, of a usual size, while the module that holds them runs.

    Not longer and not in place: sharded parameters have values only then, and ranks may share their memory.
    """
    replaced: dict[nn.Module, dict[str, nn.Parameter]] = {}

    def replace(module: nn.Module, _args: Any) -> None:
        small = {name: param for name, param in module._parameters.items()
                 if param is not None and param.requires_grad and param.is_floating_point() and _is_small(param)}
        replaced.setdefault(module, {}).update(small)
        module._parameters.update({name: nn.Parameter(usual_values(name, param)) for name, param in small.items()})

    def put_back(module: nn.Module, *_call: Any) -> None:
        module._parameters.update(replaced.pop(module, {}))

    hooks = [hook for module in model.modules() if module._parameters
             for hook in (module.register_forward_pre_hook(replace), module.register_forward_hook(put_back, prepend=True))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in list(replaced):   # whose forward has failed
            put_back(module)


def _is_small(param: Tensor) -> bool:
    """Whether it hides what it is multiplied with: all of it is next to nothing, or it is a matrix of less than half the usual size."""
    is_matrix = param.dim() == 2 and param.numel() > 0
    return not (param.abs() >= NOTHING).any() or (is_matrix and float(param.norm()) < 0.5 * len(param) ** 0.5)


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], length: int,
         part: TokensApart) -> list[tuple[str, Tensor]]:
    """What attention is asked, and what the model gives, for some tokens of the first row."""
    def some(value: Any) -> Any:
        return part.cut(value[:1], length) if isinstance(value, Tensor) and value.dim() else value

    given = model(*map(some, args), **{name: some(value) for name, value in kwargs.items()}, part=part)
    named = [(f"the {what} of attention {number // 3 + 1}", x) for number, (what, x) in enumerate(part.asked)]
    return named + [("what it returns", x) for x in tree_leaves(given) if isinstance(x, Tensor)]


def _first_difference(runs: list[list[tuple[str, Tensor]]], tokens: int) -> str | None:
    if len({tuple(x.dim() for _, x in run) for run in runs}) > 1:
        return None
    for (what, whole), (_, again), (_, even), (_, odd) in zip(*runs):
        if torch.equal(whole, again) and _depends_on_others(whole, even, odd, tokens):
            return f"{what}, of shape {tuple(whole.shape)} for {tokens} tokens, is another"
    return None


def _depends_on_others(whole: Tensor, even: Tensor, odd: Tensor, tokens: int) -> bool:
    """Whether `whole` is neither, token by token, what the halves of the tokens have, nor the sum of theirs, nor, of numbers, the mean."""
    dim = next((d for d in (1, 0) if whole.dim() > d and (whole.shape[d], odd.shape[d]) == (tokens, tokens // 2)), None)
    if dim is None:
        wholes = (even + odd, (even + odd) / 2) if whole.dim() < 2 else (even + odd,)
        return whole.shape == even.shape and not any(_is_near(whole, each) for each in wholes)
    one, other = whole.movedim(dim, 0)[1::2].flatten(1).double(), odd.movedim(dim, 0).flatten(1).double()   # none of which was first
    lengths = torch.maximum(one.norm(dim=1), other.norm(dim=1)).clamp_min(torch.finfo(torch.double).tiny)
    return bool(((one - other).norm(dim=1) / lengths).median() > TOKEN_IF_WITHIN)   # a router may send one of many elsewhere


def _is_near(one: Tensor, other: Tensor) -> bool:
    bound = SUM_IF_WITHIN.get(one.dtype, SUM_IF_WITHIN_ELSE)
    return bool((one - other).double().norm() <= bound * one.double().norm())
