"""Cut a model that nobody here knows: one called with tokens, whose layers stand in one list, such as the decoders of `transformers`.

A piece is a call of the model itself in which only the piece's own modules compute: a layer takes what the piece before gave, the
other layers hand on what they get, embeddings give zeros without memory. So positions, masks and all else that layers are told come
from the model's own code, in each piece anew. What stands before the layers and what behind is seen in a call with a few tokens, not
guessed from names. With the same tokens the pieces in a row must give what the model gives; a model of which they do not is refused.

Read parallel/pipeline/cut.py before this file.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError
from rankloom.parallel.pipeline.cut import Piece, Stage
from rankloom.parallel.wrapping import tensors_in
from rankloom.train.modes import evaluating

Inputs = Callable[[], Any]
ADVICE = "say where to cut with pipe=rl.Pipe(pieces=..., loss=...), functions of the model"


def layer_pieces(model: nn.Module, inputs: Inputs | None = None) -> list[Piece]:
    """What stands before the layers, each layer, what stands behind: tokens [B, T] -> hidden [B, T, W] ... -> what the model returns.

    inputs: asked before each layer: what the model is called with for the micro-batch that is running, a tensor or several (tokens, mask),
            which every rank knows. Left out, layers are told zeros in the shape of `hidden` for tokens: right where it matters to them
            only how many there are
    raises: ConfigError for a model that cannot be cut so, with the reason
    """
    layer_list, tokens = _list_of_layers(model), _few_tokens(model)
    with torch.no_grad(), evaluating(model):
        sight, output = _look(model, layer_list, tokens)
        runs = [_Run(model, sight, at, inputs and (lambda: tokens)) for at in range(len(sight.layers) + 2)]
        _expect_all_in(runs, model)
        _expect_same(_try(Stage([(run.modules, run) for run in runs]), tokens, model), output, model)
    for run in runs:
        run.inputs = inputs
    return [(run.modules, run) for run in runs]


def _try(call: nn.Module, tokens: Tensor, model: nn.Module) -> Any:
    try:
        return call(tokens, **_options(call))
    except Exception as error:
        error.add_note(f"while {type(model).__name__} was tried with a few tokens, to cut it into its layers; {ADVICE}")
        raise


# ------------------------------------------------------------------ what a call of the model shows


@dataclass(frozen=True, slots=True)
class _Sight:
    """Modules by name: the layers; what is used before and behind them; and what all pieces keep, for it changes nothing that flows.

    beside: how many values a layer returns beside its output; None: the output alone, no tuple
    """

    layers: tuple[str, ...]
    front: tuple[str, ...]
    back: tuple[str, ...]
    kept: tuple[str, ...]
    beside: int | None


def _list_of_layers(model: nn.Module) -> str:
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if len(outermost) == 1:
        return outermost[0]
    found = f"{len(outermost)} lists of layers, {' and '.join(outermost)}" if outermost else "no list of layers"
    raise ConfigError(f"a mesh with pipe ranks must know where to cut: {type(model).__name__} has {found}, and one nn.ModuleList is "
                      f"expected; {ADVICE}")


def _few_tokens(model: nn.Module) -> Tensor:
    """[1, T], T twice the number of heads: any ranks that divide the heads divide the tokens too, where a plan cuts these."""
    tables = [len(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)]
    if not tables:
        raise ConfigError(f"{type(model).__name__} has no nn.Embedding, so it is not called with tokens; {ADVICE}")
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None) or 8
    return torch.arange(2 * heads, device=next(model.parameters()).device)[None] % min(tables)


def _look(model: nn.Module, layer_list: str, tokens: Tensor) -> tuple[_Sight, Any]:
    """Call the model, and see when it uses which module; also what it returns."""
    watched = {name: child for place in _path(layer_list) for name, child in _children(model, place).items()
               if name not in _path(layer_list)}
    calls: list[tuple[str, Any, Any]] = []   # module, its first argument, its output

    def note(_module: nn.Module, args: tuple[Any, ...], output: Any, *, name: str) -> None:
        calls.append((name, args[0] if args else None, output))

    hooks = [child.register_forward_hook(partial(note, name=name)) for name, child in watched.items()]
    try:
        output = _try(model, tokens, model)
    finally:
        for hook in hooks:
            hook.remove()
    layers = tuple(_children(model, layer_list))
    outputs = [given for name, _, given in calls if name in layers]
    changes = {name for name, child in watched.items() if next(child.parameters(), None) is not None}
    changes |= {name for name, taken, given in calls if _shape(taken) and _shape(taken) == _shape(given)}
    order = [name for name, _, _ in calls if name in changes]
    sight = _Sight(layers, *_around(order, layers, type(model).__name__), tuple(name for name in watched if name not in changes),
                   len(outputs[0]) - 1 if isinstance(outputs[0], tuple) else None)
    lost = changes - {*sight.front, *layers, *sight.back}
    if lost:
        raise ConfigError(f"{type(model).__name__} does not use {min(lost)}, so nobody knows which stage should have it; {ADVICE}")
    return sight, output


def _around(order: Sequence[str], layers: Sequence[str], kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is used before the layers, and what behind them."""
    if tuple(name for name in order if name in layers) != tuple(layers):
        raise ConfigError(f"{kind} does not call its layers {layers[0]} to {layers[-1]} once each, in their order; {ADVICE}")
    start, stop = order.index(layers[0]), order.index(layers[-1])
    front, back = tuple(dict.fromkeys(order[:start])), tuple(dict.fromkeys(order[stop + 1:]))
    twice = {*front, *order[start:stop + 1]} & {*back} | {*order[start:stop + 1]} - {*layers}
    if twice:
        raise ConfigError(f"{kind} uses {min(twice)} in more places than before its layers or behind them; {ADVICE}")
    return front, back


def _path(name: str) -> list[str]:
    """The modules around a module, from the model on, and itself.

    >>> _path("model.layers")
    ['', 'model', 'model.layers']
    """
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) + 1)]


def _children(model: nn.Module, name: str) -> dict[str, nn.Module]:
    return {f"{name}.{key}".lstrip("."): child for key, child in model.get_submodule(name)._modules.items() if child is not None}


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None


def _options(model: nn.Module) -> dict[str, Any]:
    """A decoder of `transformers` would keep keys and values for the next token."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def _expect_all_in(runs: Sequence["_Run"], model: nn.Module) -> None:
    held = {f"{name}.{key}" for run in runs for name, module in run.modules.items() for key in module.state_dict()}
    left = [name for name in model.state_dict() if name not in held]
    if left:
        raise ConfigError(f"{left[0]} of {type(model).__name__} stands in no module beside its layers, so nobody knows which stage should "
                          f"have it; {ADVICE}")


def _expect_same(mine: Any, theirs: Any, model: nn.Module) -> None:
    """The same kernels saw the same numbers: a mistake is larger than half of the digits."""
    pairs = list(zip(tensors_in(mine), tensors_in(theirs)))
    if not (type(mine) is type(theirs) and len(pairs) == len(list(tensors_in(theirs))) == len(list(tensors_in(mine))) and
            all(_close(ours, truth) for ours, truth in pairs)):
        raise ConfigError(f"{type(model).__name__}, cut into its layers, does not give what it gives as a whole: a layer may take and give "
                          f"one tensor only, and the model may not return what lies between them; {ADVICE}")


def _close(mine: Tensor, truth: Tensor) -> bool:
    if mine.shape != truth.shape or mine.is_meta:
        return mine.shape == truth.shape
    bound = torch.finfo(truth.dtype).eps ** 0.5 * float(truth.abs().max()) if truth.is_floating_point() else 0.0
    return torch.allclose(mine, truth, rtol=0.0, atol=bound, equal_nan=True)


# ------------------------------------------------------------------ a call of the model in which one piece computes


class _Instead(nn.Module):
    """In the place of a module: a function of what that would be called with."""

    def __init__(self, run: Callable[..., Any]):
        super().__init__()
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class _Run:
    """Piece number `at`: 0 is the front, then come the layers, then the back.

    given, gave: what flows into the piece and out of it, while it runs
    """

    def __init__(self, model: nn.Module, sight: _Sight, at: int, inputs: Inputs | None):
        self.inputs, self.beside, self.options = inputs, sight.beside, _options(model)
        self.is_front, self.is_back = at == 0, at > len(sight.layers)
        own = sight.front if self.is_front else sight.back if self.is_back else sight.layers[at - 1:at]
        self.modules = {name: model.get_submodule(name) for name in (*own, *sight.kept)}
        self.layer = None if self.is_front or self.is_back else self.modules[own[0]]
        self.given: Tensor | None = None
        self.gave: Tensor | None = None
        gate = sight.layers[min(max(at - 1, 0), len(sight.layers) - 1)]
        roles = dict.fromkeys(sight.front, self._zeros) | dict.fromkeys(sight.layers, self._hand_on) | dict.fromkeys(sight.back, _same)
        roles = {name: run for name, run in roles.items() if name in sight.layers or name not in own} | {gate: self._gate}
        self.shells: list[nn.Module] = []
        self._shell(model, "", {name: _Instead(run) for name, run in roles.items()}, around=gate)

    def __call__(self, *values: Any) -> Any:
        """The piece before's output, or what the model is called with -> the stream behind this piece, or what the model returns."""
        if not self.is_front:
            (self.given,) = values
            values = self._called_with(values[0])
        for shell in self.shells:   # some models ask themselves, not their modules
            shell.training = any(module.training for module in self.modules.values())
        try:
            result = self.shells[0].forward(*values, **self.options)
            return result if self.is_back else self.gave
        finally:
            self.given = self.gave = None

    def _called_with(self, hidden: Tensor) -> tuple[Any, ...]:
        asked = self.inputs() if self.inputs else hidden.new_zeros(hidden.shape[:2], dtype=torch.int64)
        return asked if isinstance(asked, tuple) else (asked,)

    def _shell(self, model: nn.Module, name: str, stand_ins: Mapping[str, nn.Module], *, around: str) -> nn.Module:
        """A module's own code and settings, with others in place of what is not this piece's."""
        shell = copy.copy(model.get_submodule(name))
        self.shells.append(shell)
        vars(shell)["_modules"] = {
            child.rpartition(".")[2]: stand_ins[child] if child in stand_ins
            else self._shell(model, child, stand_ins, around=around) if around.startswith(f"{child}.") else module
            for child, module in _children(model, name).items()}
        return shell

    def _gate(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Where the stream comes in and goes out."""
        x = x if self.given is None else self.given
        output = self._hand_on(x) if self.layer is None else self.layer(x, *args, **kwargs)
        self.gave = output[0] if isinstance(output, tuple) else output
        return output

    def _hand_on(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        return x if self.beside is None else (x, *[None] * self.beside)

    def _zeros(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        assert self.given is not None, "the front is computed, not stood in for"
        return self.given.new_zeros(()).expand(*x.shape[:2], self.given.shape[-1])


def _same(x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return x
