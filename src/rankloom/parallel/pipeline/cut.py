"""Cut a model into stages: runs of pieces, chosen so that no stage is much slower than the others.

A piece is some modules under their names in the model, and a function that runs them. A stage keeps these names, so that checkpoints do not
depend on the cut. A function may have a method `then`, which takes the function of the next piece and returns one that runs both, or None;
a stage calls it. If stages are to be copied, write a function as a `partial` of its modules: what a closure refers to is not copied.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pkgutil import resolve_name
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from rankloom.base.errors import ConfigError
from rankloom.base.expect import expect_type
from rankloom.parallel.pipeline.runtime import Tied
from rankloom.parallel.sections.wrapping import has_parameters, tensors_in

T = TypeVar("T")
Piece = tuple[Mapping[str, nn.Module | nn.Parameter], Callable[..., Any]]


class Stage(nn.Module):
    """Some pieces, run one after the other."""

    def __init__(self, pieces: Sequence[Piece]):
        super().__init__()
        self._runs = _joined_runs(run for _, run in pieces)
        for parts, _ in pieces:
            for name, part in parts.items():
                _place(self, name, part)

    def forward(self, *values: Any) -> Any:
        """Run the pieces. A tuple or a list becomes the arguments of the next piece, as between two stages."""
        output: Any = None
        for run in self._runs:
            output = run(*values)
            values = output if isinstance(output, tuple) else tuple(output) if type(output) is list else (output,)
        return output


def _joined_runs(runs: Iterable[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """The functions of pieces, where `then` of one makes a single one of it and the next."""
    joined: list[Callable[..., Any]] = []
    for run in runs:
        then = getattr(joined[-1], "then", None) if joined else None
        both = None if then is None else then(run)
        if both is None:
            joined.append(run)
        else:
            joined[-1] = both
    return joined


def expect_pieces(pieces: Any) -> None:
    """Raise ConfigError unless it is a list of pieces."""
    expect_type("pieces", pieces, Sequence, "a list of ({name: module}, function), as gpt_pieces(model) of models/pieces.py makes it")
    for number, piece in enumerate(pieces):
        if not (isinstance(piece, tuple) and len(piece) == 2 and isinstance(piece[0], Mapping)):
            raise ConfigError(f"piece {number} is a {type(piece).__name__}, expected ({{name: module}}, function); of modules that run one "
                              "after the other, pieces_of(model, names) in parallel/pipeline/cut.py makes them")


def pieces_of(model: nn.Module, names: Iterable[str]) -> list[Piece]:
    """One piece for each of these modules, which must take what the one before returns.

    raises: AttributeError for a name that the model does not have
    """
    named = [(name, model.get_submodule(name)) for name in names]
    return [({name: module}, module) for name, module in named]


def sequential_pieces(model: nn.Sequential, inputs: Callable[[], Any] | None = None) -> list[Piece]:
    """Its children, one after the other, each as often as it stands there. Those without parameters, such as activation functions, stay
    with the one before. In a sequence a tuple or list is one argument, and arrives in the next piece as what it was.

    inputs: returns what the model is called with for the current micro-batch; left out, several tensors are a tuple
    """
    runs: list[dict[str, nn.Module]] = [{}]
    for name, child in model._modules.items():   # `named_children` would leave out the second use of a module
        assert child is not None, "a sequence calls all that it holds"
        if has_parameters(child) and any(map(has_parameters, runs[-1].values())):
            runs.append({})
        runs[-1][name] = child
    joins: list[Callable[..., Any]] = [partial(_as_called, inputs), *[_put_together] * (len(runs) - 1)]
    return [(run, partial(_run_in_turn, tuple(run.values()), join, run is runs[-1])) for run, join in zip(runs, joins)]


def _run_in_turn(modules: Sequence[nn.Module], join: Callable[..., Any], is_last: bool, *values: Any) -> Any:
    x = join(*values)
    for module in modules:
        x = module(x)
    return _taken_apart(x, type(module).__name__) if isinstance(x, tuple | list) and x and not is_last else x


def _as_called(inputs: Callable[[], Any] | None, *values: Any) -> Any:
    """The values that a micro-batch begins with, as one argument."""
    return values[0] if len(values) == 1 else values if inputs is None else _container(type(inputs()), values)


def _taken_apart(x: tuple[Any, ...] | list[Any], giver: str) -> tuple[Any, ...]:
    """What is in a container, and behind it the name of its class, as a tensor of bytes; empty, so that nothing is sent, for a plain tuple.

    raises: ConfigError when other ranks cannot find the class by its name
    """
    kind = type(x)
    name = "" if kind is tuple else f"{kind.__module__}:{kind.__qualname__}"
    if "<locals>" in name:
        raise ConfigError(f"a {giver} hands on a {kind.__qualname__} in an nn.Sequential, and the rank that has the next piece cannot find "
                          "a class that was made in a function: define it at the top of its module, or return a plain tuple")
    device = next((value.device for value in tensors_in(x)), torch.device("cpu"))
    return *x, torch.tensor(list(name.encode()), dtype=torch.uint8, device=device)


def _put_together(*values: Any) -> Any:
    """What `_taken_apart` took apart, or the one value that was in no container."""
    if len(values) == 1:
        return values[0]
    *parts, name = values
    kind = resolve_name(bytes(name.tolist()).decode()) if name.numel() else tuple
    assert isinstance(kind, type) and issubclass(kind, tuple | list), f"{kind} is no container, as `_taken_apart` names"
    return _container(kind, parts)


def _container(kind: Any, parts: Sequence[Any]) -> Any:
    return getattr(kind, "_make", kind)(parts)   # a namedtuple takes its parts one by one, other classes in one argument


def make_stages(pieces: Sequence[Piece], sizes: Sequence[int]) -> list[Stage]:
    """Stages of `sizes` pieces. raises: ConfigError"""
    if sum(sizes) != len(pieces) or min(sizes) < 1:
        raise ConfigError(f"stages of {list(sizes)} pieces: expected {len(pieces)} pieces in all, and one or more in each")
    return [Stage(run) for run in in_runs(pieces, sizes)]


def in_runs(items: Sequence[T], sizes: Sequence[int]) -> list[Sequence[T]]:
    """The items in their order, in runs of these lengths.

    >>> in_runs([5, 6, 7, 8, 9], [2, 3])
    [[5, 6], [7, 8, 9]]
    """
    return [items[end - size:end] for size, end in zip(sizes, accumulate(sizes))]


def find_tied(stages: Sequence[nn.Module]) -> list[Tied]:
    """Parameters that are in several stages, such as an embedding tied to the head. Call it before stages are moved or copied."""
    places: dict[int, list[tuple[int, str]]] = {}
    for stage, module in enumerate(stages):
        for name, param in module.named_parameters():
            places.setdefault(id(param), []).append((stage, name))
    return [tuple(found) for found in places.values() if len(found) > 1]


class _Cut(NamedTuple):
    """A cut into stages. The smaller of two is better: it has the faster slowest stage, or if they are equal the more even others."""

    slowest: float
    squares: float     # the sum of those of all times
    sizes: list[int]

    def with_stage(self, time: float, size: int) -> "_Cut":
        """This cut with one more stage at its end."""
        return _Cut(max(self.slowest, time), self.squares + time * time, [*self.sizes, size])


def balance(times: Sequence[float], stages: int, *, memory: Sequence[float] | None = None, limit: float = float("inf")) -> list[int]:
    """How many pieces each stage gets, so that the slowest stage is as fast as possible.

    times:  of each piece; memory: of each piece, at most `limit` a stage
    raises: ConfigError when there are fewer pieces than stages, or no cut keeps the limit

    >>> balance([1, 1, 1, 1, 4], stages=3)
    [2, 2, 1]
    """
    n = len(times)
    if not 1 <= stages <= n:
        raise ConfigError(f"{stages} stages for a model of {n} pieces: each stage takes one piece or more; use fewer stages, or cut finer")
    memory = memory or [0.0] * n
    until, held = [0.0, *accumulate(times)], [0.0, *accumulate(memory)]
    best = {0: _Cut(0.0, 0.0, [])}   # end -> the best cut of the first `end` pieces into so many stages as were counted
    for _ in range(stages):
        longer: dict[int, _Cut] = {}
        for end in range(1, n + 1):
            fitting = [start for start in best if start < end and held[end] - held[start] <= limit]
            if fitting:
                longer[end] = min(best[start].with_stage(until[end] - until[start], end - start) for start in fitting)
        best = longer
    if n not in best:
        raise ConfigError(f"no cut into {stages} stages keeps each within {limit:g} of memory; the pieces need {sum(memory):g} in all, "
                          f"the largest {max(memory):g}: use more stages")
    return best[n].sizes


def multiplied_parameters(pieces: Sequence[Piece], numels: Mapping[str, int], tables: Container[str]) -> list[float]:
    """What `balance` can take for the times of a language model's pieces: the number of parameters that a token is multiplied with.

    That is all but the tables in the first piece, where tokens are looked up. Of pieces that begin with no table, little follows from the
    number of parameters (convolutions use each many times): 1.0 each.
    numels: how many elements each parameter of the whole model has. Ranks that hold different parts of the model are given the same
    tables: the parameters of embeddings
    """
    if not pieces:
        return []
    held = [dict(Stage([piece]).named_parameters()) for piece in pieces]
    multiplied = [held[0].keys() - {name for name in held[0] if name in tables}, *held[1:]]
    if len(multiplied[0]) == len(held[0]):
        return [1.0] * len(pieces)
    return [float(sum(numels.get(name, params[name].numel()) for name in names)) for names, params in zip(multiplied, held, strict=True)]


def _place(root: nn.Module, name: str, part: nn.Module | nn.Parameter) -> None:
    """Register a module or a parameter under a dotted name."""
    *parents, last = name.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    if isinstance(part, nn.Parameter):
        root.register_parameter(last, part)
    else:
        root.add_module(last, part)
