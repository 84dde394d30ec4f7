"""Cut a model that nobody here knows: one called with tokens, whose layers stand in one list, such as the decoders of `transformers`.

A piece is a call of the model itself in which only the piece's own modules compute: a layer takes what the piece before gave, the
other layers hand on what they get, embeddings give zeros without memory. So positions, masks and all else that layers are told come
from the model's own code. The pieces of a stage are one call together. What stands before the layers and what behind is seen in a call
with a few tokens, not guessed from names. With the same tokens the pieces in a row must give what the model gives, else it is refused.

Read parallel/pipeline/cut.py before this file.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError
from rankloom.base.modes import evaluating
from rankloom.parallel.pipeline.cut import Piece
from rankloom.parallel.wrapping import tensors_in

Inputs = Callable[[], Any]
ADVICE = "say where to cut with pipe=rl.Pipe(pieces=..., loss=...), functions of the model"


def layer_pieces(model: nn.Module, inputs: Inputs | None = None) -> list[Piece]:
    """What stands before the layers, each layer, what stands behind: tokens [B, T] -> hidden [B, T, W] ... -> what the model returns.

    inputs: asked at each call: what the model is called with for the micro-batch that is running, a tensor or several (tokens, mask),
            which every rank knows. Left out, zeros in the shape of `hidden` stand for the tokens behind the front: right where layers
            are told only how many there are
    raises: ConfigError for a model that cannot be cut so, with the reason
    """
    layer_list, tokens = _list_of_layers(model), _few_tokens(model)
    with torch.no_grad(), evaluating(model), _some_buffers(model, tokens.device):
        sight, output = _look(model, layer_list, tokens)
        runs = [_Run(model, sight, range(at, at + 1), inputs and (lambda: tokens)) for at in range(len(sight.layers) + 2)]
        _expect_all_in(runs, model)
        value = tokens
        for run in runs:
            value = _try(run, value, model)
        _expect_same(value, output, model)
    for run in runs:
        run.inputs = inputs
    return [(run.modules, run) for run in runs]


@contextmanager
def _some_buffers(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Parameters of a model from the meta device stand on `device` by now, without values; its buffers get zeros inside."""
    missing = [(module._buffers, key, buffer) for module in model.modules() for key, buffer in module._buffers.items()
               if buffer is not None and buffer.is_meta]
    for buffers, key, buffer in missing:
        buffers[key] = torch.zeros_like(buffer, device=device)
    try:
        yield
    finally:
        for buffers, key, buffer in missing:
            buffers[key] = buffer


def _try(call: Callable[..., Any], value: Tensor, model: nn.Module, **options: Any) -> Any:
    try:
        return call(value, **options)
    except Exception as error:
        raise ConfigError(f"{type(model).__name__} was tried with a few tokens, to cut it into its layers, and failed with "
                          f"{type(error).__name__}: {error}; {ADVICE}") from error


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
    versions = {name: param._version for name, param in model.named_parameters()}
    try:
        output = _try(model, tokens, model, **_options(model))
    finally:
        for hook in hooks:
            hook.remove()
    changed = next((name for name, param in model.named_parameters() if param._version != versions[name]), None)
    if changed:
        raise ConfigError(f"{type(model).__name__} changes {changed} when it is called, and no stage can change what another has; {ADVICE}")
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
    """How to call it: decoders of `transformers` must not keep keys and values for a next token."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def _expect_all_in(runs: Sequence["_Run"], model: nn.Module) -> None:
    held = {f"{name}.{key}" for run in runs for name, module in run.modules.items() for key in module.state_dict()}
    left = [name for name in model.state_dict() if name not in held]
    if left:
        raise ConfigError(f"{left[0]} of {type(model).__name__} stands in no module beside its layers, so nobody knows which stage should "
                          f"have it; {ADVICE}")


def _expect_same(mine: Any, theirs: Any, model: nn.Module) -> None:
    """Raise ConfigError where they differ. The same kernels saw the same numbers, so half of the digits must be equal."""
    pairs = list(zip(tensors_in(mine), tensors_in(theirs)))
    if not (type(mine) is type(theirs) and len(pairs) == len(list(tensors_in(theirs))) == len(list(tensors_in(mine))) and
            all(_close(ours, truth) for ours, truth in pairs)):
        raise ConfigError(f"{type(model).__name__}, cut into its layers, does not give what it gives as a whole: a layer may take and give "
                          f"one tensor only, and the model may not return what lies between them; {ADVICE}")


def _close(mine: Tensor, truth: Tensor) -> bool:
    """Whether half of the digits are equal; NaN, of parameters without values, equals itself."""
    if mine.shape != truth.shape or truth.is_meta:
        return mine.shape == truth.shape
    bound = torch.finfo(truth.dtype).eps ** 0.5 * float(truth.abs().max().nan_to_num()) if truth.is_floating_point() else 0.0
    return torch.allclose(mine, truth, rtol=0.0, atol=bound, equal_nan=True)


# ------------------------------------------------------------------ a call of the model in which some pieces compute


class _Instead(nn.Module):
    """In the place of a module: a function of what that would be called with.

    Some models ask a module for more than its output, such as the dtype of its weight: of its parameters there is all but the values,
    which are NaN and take no memory, and its plain settings are there too.
    """

    def __init__(self, run: Callable[..., Any], place: nn.Module):
        super().__init__()
        vars(self).update({name: value for name, value in vars(place).items() if isinstance(value, int | float | str | Tensor)})
        for name, param in place.named_parameters(recurse=False):
            vars(self)[name] = param.detach().new_full((), torch.nan if param.is_floating_point() else 0).expand(param.shape)
        self._run, self._stands_for = run, getattr(place, "_stands_for", type(place).__name__)   # a shell's places are such as this

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(f"it looks for `{name}` in a {self._stands_for}, which only the stage that has this can give") from None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


class _Run:
    """Some pieces in a row, of which 0 is the front, then come the layers, then the back.

    given, gave: what flows into them and out of them, while they run
    """

    def __init__(self, model: nn.Module, sight: _Sight, pieces: range, inputs: Inputs | None,
                 modules: Mapping[str, nn.Module] | None = None):
        self.sight, self.pieces, self.inputs, self.options = sight, pieces, inputs, _options(model)
        every = [sight.front, *((layer,) for layer in sight.layers), sight.back]
        names = [*(name for piece in pieces for name in every[piece]), *sight.kept]
        self.modules = {name: modules[name] if modules else model.get_submodule(name) for name in names}
        self.given: Tensor | None = None
        self.gave: Tensor | None = None
        last = len(sight.layers) - 1
        self.enters, self.leaves = (sight.layers[min(max(piece - 1, 0), last)] for piece in (pieces[0], pieces[-1]))
        roles = dict.fromkeys(sight.front, self._zeros) | dict.fromkeys(sight.layers, self._hand_on) | dict.fromkeys(sight.back, _same)
        roles = {name: run for name, run in roles.items() if name not in self.modules}
        roles |= {name: partial(self._gate, name) for name in (self.enters, self.leaves)}
        instead = {name: _Instead(run, model.get_submodule(name)) for name, run in roles.items()}
        self.shells: list[nn.Module] = []
        self._shell(model, "", self.modules | instead)

    def then(self, other: Any) -> "_Run | None":
        """These pieces and the next in one call of the model, where both are of one model."""
        if not (isinstance(other, _Run) and other.sight is self.sight and other.pieces.start == self.pieces.stop):
            return None
        both = range(self.pieces.start, other.pieces.stop)
        return _Run(self.shells[0], self.sight, both, self.inputs, {**self.modules, **other.modules})   # a shell has the model's places

    def __call__(self, *values: Any) -> Any:
        """The piece before's output, or what the model is called with -> the stream behind this piece, or what the model returns."""
        if self.pieces[0] > 0:
            (self.given,) = values
            values = self._called_with(values[0])
        for shell in self.shells:   # some models ask themselves, not their modules
            shell.training = any(module.training for module in self.modules.values())
        try:
            result = self.shells[0].forward(*values, **self.options)
            ends = self.pieces[-1] > len(self.sight.layers)
            if self.given is not None or (self.gave is None and not ends):
                raise ConfigError(f"{type(self.shells[0]).__name__} has not called {self.leaves if self.given is None else self.enters}, a "
                                  "layer at the border of a stage, as it did when it was tried: no layer may be left out in training "
                                  "(layerdrop, stochastic depth); set that to 0")
            return result if ends else self.gave
        finally:
            self.given = self.gave = None

    def _called_with(self, hidden: Tensor) -> tuple[Any, ...]:
        asked = self.inputs() if self.inputs else hidden.new_zeros(hidden.shape[:2], dtype=torch.int64)
        return asked if isinstance(asked, tuple) else (asked,)

    def _shell(self, model: nn.Module, name: str, places: Mapping[str, nn.Module]) -> nn.Module:
        """A module's own code and settings around what stands in its `places`; only where the list of layers lies, it is a shell again."""
        shell = copy.copy(model.get_submodule(name))
        self.shells.append(shell)
        vars(shell)["_modules"] = {child.rpartition(".")[2]: places[child] if child in places else self._shell(model, child, places)
                                   for child in _children(model, name)}
        return shell

    def _gate(self, name: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """A layer where the stream comes in or goes out."""
        if name == self.enters and self.given is not None:
            x, self.given = self.given, None
        output = self.modules[name](x, *args, **kwargs) if name in self.modules else self._hand_on(x)
        if name == self.leaves:
            self.gave = output[0] if isinstance(output, tuple) else output
        return output

    def _hand_on(self, x: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        return x if self.sight.beside is None else (x, *[None] * self.sight.beside)

    def _zeros(self, *args: Any, **kwargs: Any) -> Tensor:
        assert self.given is not None, "the front is computed, not stood in for"
        x = next(tensors_in((*args, *kwargs.values())))   # tokens, which some models give by name
        return self.given.new_zeros(()).expand(*x.shape[:2], self.given.shape[-1])


def _same(x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return x
