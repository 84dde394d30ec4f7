"""Cut any model that has its layers in one list, such as the decoders of `transformers`.

A piece is a call of the whole model in which only the piece's own modules compute. Its first layer takes the output of the piece before;
layers of other pieces return their input; embeddings return zeros without memory. So positions, masks and all else that layers get come
from the model's own code. The call is left behind the piece's last layer: what the model computes there, such as a loss of its own, would
not fit. Consecutive pieces of a stage run in one call. Which modules come before the layers and which after is observed
in a trial call, with a few tokens or an example, not guessed from names. If the pieces in a row do not give the model's output there, it
is refused.

Read parallel/pipeline/cut.py before this file.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError, RankloomError
from rankloom.base.first_argument import first_argument, first_parameter, with_first
from rankloom.base.modes import evaluating
from rankloom.base.names import full_name, is_inside
from rankloom.parallel.pipeline.cut import Piece
from rankloom.parallel.sections.wrapping import has_parameters, tensors_in
from rankloom.train.blocks.buffers import on_copies
from rankloom.train.pipeline.trial import ADVICE, ADVICE_FOR_PIECES, ADVICE_WITH_EXAMPLE, Followed, expect_same_between_layers, try_call
from rankloom.train.put_back import state_put_back

Inputs = Callable[[], Any]


def layer_pieces(model: nn.Module, inputs: Inputs | None = None, example: Any = None) -> list[Piece]:
    """The modules before the layers, each layer, the modules after them: tokens [B, T] -> hidden [B, T, W] ... -> the model's output.

    inputs:  called by each piece: returns what the model is called with for the current micro-batch, a tensor or a tuple (tokens, mask),
             known to every rank. Left out, pieces after the first call the model with zeros [B, T]: right where layers depend on the
             number of tokens only
    example: what the model can be called with, a tensor or a tuple. Left out, a few tokens
    raises:  ConfigError for a model that cannot be cut so, with the reason
    """
    layer_list = _list_of_layers(model)
    trial, advice = (_trial_tokens(model), ADVICE_WITH_EXAMPLE) if example is None else (example, ADVICE)
    device = next(tensors_in(trial)).device
    zeros = {name: torch.zeros_like(x, device=device) for name, x in model.named_buffers(remove_duplicate=False) if x.is_meta}
    with torch.no_grad(), evaluating(model), on_copies(model, zeros):   # parameters on the meta device have stand-ins (initial_values.py)
        with state_put_back(model):   # after each round of calls, so that each begins with the same buffers
            roles, output = _find_roles(model, layer_list, trial, advice)
        runs = [_PieceRange(model, roles, run, inputs and (lambda: trial)) for run in _ranges(roles)]
        _expect_all_in(runs, model)
        value = trial
        with state_put_back(model):
            for run in runs:
                value = _try_apart(run, value, model)
        _expect_same(value, output, model)
        with state_put_back(model):
            expect_same_between_layers(model, roles.layers, lambda: try_call(model, trial, model, advice, **_options(model)))
    for run in runs:
        run.inputs = inputs
    return [(run.modules, run) for run in runs]


def _ranges(roles: "_Roles") -> list[range]:
    """The piece numbers of each piece. If nothing runs before the first layer (or after the last), that end is merged with its neighbour,
    so that no piece is empty.
    """
    layers = len(roles.layers)
    starts = [0, *range(1 if roles.front else 2, layers + 1), *([layers + 1] if roles.back else [])]
    return [range(start, stop) for start, stop in pairwise([*starts, layers + 2])]


def _try_apart(run: "_PieceRange", value: Any, model: nn.Module) -> Any:
    """Run some pieces. raises: ConfigError if their output follows from what a stand-in returned, whose values mean nothing

    Such an output may look right: a gate that begins at zero hides what it lets in later.
    """
    followed = run.follow = Followed()
    try:
        with followed:
            output = try_call(run, value, model, ADVICE_FOR_PIECES)
    except ConfigError:   # of an operation that cannot be followed, such as a compiled one, or of the model itself
        return try_call(run, value, model, ADVICE_FOR_PIECES)
    finally:
        run.follow = None
    if any(id(x) in followed.tensors for x in tensors_in(output)):
        raise ConfigError(f"{type(model).__name__} gives another output when it is cut into its layers: {run.entry}, or what comes behind "
                          "it, gets more than the output of the layer before, something computed before the layers. Only one tensor "
                          f"may pass from layer to layer; {ADVICE}")
    return output


# ------------------------------------------------------------------ which modules come before the layers, which after


@dataclass(frozen=True, slots=True)
class _Roles:
    """Names of modules: the layers; those used before (front) and after them (back); and those without effect on activations, which
    every piece keeps.

    firsts: of each module, the name of the first parameter of its forward: what goes through the model, if all are passed by name
    extras: how many values a layer returns in a tuple after its output; None: it returns no tuple
    """

    layers: tuple[str, ...]
    front: tuple[str, ...]
    back: tuple[str, ...]
    kept: tuple[str, ...]
    firsts: Mapping[str, str]
    extras: int | None


class _Call(NamedTuple):
    """A call of a module in the trial: its first argument, and its output."""

    name: str
    taken: Any
    given: Any


def _list_of_layers(model: nn.Module) -> str:
    """The name of the one `nn.ModuleList`, or else of the one `nn.Sequential`, that is in no other."""
    lists = _outermost(model, nn.ModuleList)
    outermost = lists or _outermost(model, nn.Sequential)
    if len(outermost) == 1:
        return outermost[0]
    found = f"{len(outermost)} lists of layers, {' and '.join(outermost)}" if outermost else "no list of layers"
    raise ConfigError(f"a mesh with pipe ranks must know where to cut: {type(model).__name__} has {found}, and one nn.ModuleList is "
                      f"expected; {ADVICE}")


def _outermost(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    found = [name for name, module in model.named_modules() if isinstance(module, kind) and len(module._modules)]
    return [name for name in found if not any(is_inside(name, other) for other in found)]


def _trial_tokens(model: nn.Module) -> Tensor:
    """Tokens [1, T], T twice the number of heads: where a plan cuts tokens, any ranks that divide the heads divide them too."""
    tables = [len(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)]
    if not tables:
        raise ConfigError(f"{type(model).__name__} has no nn.Embedding, so it is not called with tokens: "
                          f"{ADVICE_WITH_EXAMPLE}")
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None) or 8
    return torch.arange(2 * heads, device=next(model.parameters()).device)[None] % min(tables)


def _find_roles(model: nn.Module, layer_list: str, trial: Any, advice: str) -> tuple[_Roles, Any]:
    """Call the model, and note the order in which it uses its modules. Returns their roles, and its output."""
    watched = {name: child for place in _path(layer_list) for name, child in _children(model, place).items()
               if name not in _path(layer_list)}
    firsts = {name: first_parameter(child) for name, child in watched.items()}
    calls: list[_Call] = []

    def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, *, name: str) -> None:
        calls.append(_Call(name, first_argument(args, kwargs, firsts[name]), output))

    versions = {name: param._version for name, param in model.named_parameters()}
    with ExitStack() as hooks:
        for name, child in watched.items():
            hooks.enter_context(child.register_forward_hook(partial(note, name=name), with_kwargs=True))
        output = try_call(model, trial, model, advice, **_options(model))
    changed = next((name for name, param in model.named_parameters() if param._version != versions[name]), None)
    if changed:
        raise ConfigError(f"{type(model).__name__} changes {changed} when it is called, and no stage can change what another has; {ADVICE}")
    layers = tuple(_children(model, layer_list))
    outputs = [call.given for call in calls if call.name in layers]
    changes = {*layers, *(name for name, child in watched.items() if has_parameters(child))}
    changes |= {call.name for call in calls if _shape(call.taken) and _shape(call.taken) == _shape(call.given)}
    order = [call.name for call in calls if call.name in changes]
    front, back = _around(order, layers, type(model).__name__)
    if not isinstance(outputs[0], Tensor | tuple | list):
        raise ConfigError(f"the layers of {type(model).__name__} return a {type(outputs[0]).__name__}, expected a tensor, or a tuple that "
                          f"begins with one; {ADVICE}")
    roles = _Roles(layers, front, back, tuple(name for name in watched if name not in changes), firsts,
                   len(outputs[0]) - 1 if isinstance(outputs[0], tuple | list) else None)
    lost = changes - {*roles.front, *layers, *roles.back}
    if lost:
        raise ConfigError(f"{type(model).__name__} does not use {min(lost)}, so it fits no stage; {ADVICE}")
    return roles, output


def _around(order: Sequence[str], layers: Sequence[str], kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The modules used before the layers, and those used after."""
    if tuple(name for name in order if name in layers) != tuple(layers):
        raise ConfigError(f"{kind} does not call its layers {layers[0]} to {layers[-1]} once each, in their order; {ADVICE}")
    start, stop = order.index(layers[0]), order.index(layers[-1])
    front, back = tuple(dict.fromkeys(order[:start])), tuple(dict.fromkeys(order[stop + 1:]))
    twice = {*front, *order[start:stop + 1]} & {*back} | {*order[start:stop + 1]} - {*layers}
    if twice:
        raise ConfigError(f"{kind} uses {min(twice)} in more places than before its layers or behind them; {ADVICE}")
    return front, back


def _path(name: str) -> list[str]:
    """A module's parents, from the model on, and itself.

    >>> _path("model.layers")
    ['', 'model', 'model.layers']
    """
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) + 1)]


def _children(model: nn.Module, name: str) -> dict[str, nn.Module]:
    return {full_name(name, key): child for key, child in model.get_submodule(name)._modules.items() if child is not None}


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None


def positional(model: nn.Module) -> list[str]:
    """What `model(a, b)` calls `a` and `b`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in inspect.signature(model.forward).parameters.items() if parameter.kind in kinds]


def _options(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments of a call: decoders of `transformers` must not cache keys and values for a next token."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def _expect_all_in(runs: Sequence["_PieceRange"], model: nn.Module) -> None:
    held = {f"{name}.{key}" for run in runs for name, module in run.modules.items() for key in module.state_dict()}
    left = [name for name in model.state_dict() if name not in held]
    if left:
        raise ConfigError(f"{left[0]} of {type(model).__name__} stands in no module that a stage could have; {ADVICE}")


def _expect_same(of_pieces: Any, of_model: Any, model: nn.Module) -> None:
    """Raise ConfigError if the two outputs differ. The same kernels got the same numbers, so half of the digits must be equal."""
    tensors, expected = list(tensors_in(of_pieces)), list(tensors_in(of_model))
    pairs = list(zip(tensors, expected))
    if not (type(of_pieces) is type(of_model) and len(tensors) == len(expected) and all(_close(x, truth) for x, truth in pairs)):
        of_a_stand_in = any(not truth.is_meta and x.isnan().any() and not truth.isnan().any() for x, truth in pairs)
        reason = ("it reads parameters of a module that is on another stage. If they are used in two places, give them to two modules "
                  "(`head.weight = table.weight`), or" if of_a_stand_in else
                  "only one tensor may pass from layer to layer, and the model may not return those between its layers;")
        raise ConfigError(f"{type(model).__name__} gives another output when it is cut into its layers: {reason} {ADVICE}")


def _close(x: Tensor, truth: Tensor) -> bool:
    """Whether half of the digits are equal; NaN (of parameters without values) equals NaN."""
    if x.shape != truth.shape or truth.is_meta:
        return x.shape == truth.shape
    bound = torch.finfo(truth.dtype).eps ** 0.5 * float(truth.abs().max().nan_to_num()) if truth.is_floating_point() else 0.0
    return torch.allclose(x, truth, rtol=0.0, atol=bound, equal_nan=True)


# ------------------------------------------------------------------ a call of the model in which some pieces compute


class _StandIn(nn.Module):
    """Takes the place of a module, and calls a function instead.

    Some models read more of a module than its output, such as the dtype of its weight. So a stand-in has the module's plain settings,
    and parameters that look like its own but are a single NaN, expanded.
    """

    def __init__(self, run: Callable[..., Any], place: nn.Module):
        super().__init__()
        vars(self).update({name: value for name, value in vars(place).items() if isinstance(value, int | float | str | Tensor)})
        for name, param in place.named_parameters(recurse=False):
            vars(self)[name] = param.detach().new_full((), torch.nan if param.is_floating_point() else 0).expand(param.shape)
        self._run, self._stands_for = run, getattr(place, "_stands_for", type(place).__name__)   # in a shell, `place` is a stand-in

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(f"it reads `{name}` of a {self._stands_for}, which is on another stage") from None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)


class _EndOfCall(BaseException):
    """Ends a call of the model behind the last piece. The model's own `except Exception` does not stop it."""


class _PieceRange:
    """Consecutive pieces, run in one call of the model. Piece 0 is the front, then come the layers, then the back.

    entry, exit:       the layers where activations come in and go out
    arriving, leaving: these activations, during a call
    follow:            during a trial, what finds out where the values of stand-ins go
    with_grad:         whether a call runs with gradients
    """

    def __init__(self, model: nn.Module, roles: _Roles, pieces: range, inputs: Inputs | None,
                 modules: Mapping[str, nn.Module] | None = None):
        self.roles, self.pieces, self.inputs, self.options = roles, pieces, inputs, _options(model)
        every = [roles.front, *((layer,) for layer in roles.layers), roles.back]
        names = [*(name for piece in pieces for name in every[piece]), *roles.kept]
        self.modules = {name: modules[name] if modules else model.get_submodule(name) for name in names}
        self.arriving: Tensor | None = None
        self.leaving: Tensor | None = None
        self.follow: Followed | None = None
        self.with_grad = False
        last = len(roles.layers) - 1
        self.entry, self.exit = (roles.layers[min(max(piece - 1, 0), last)] for piece in (pieces[0], pieces[-1]))
        of_others = dict.fromkeys(roles.front, self._zeros) | dict.fromkeys(roles.layers, self._pass_through)
        of_others |= dict.fromkeys(roles.back, self._stream)
        functions = {name: partial(function, name) for name, function in of_others.items() if name not in self.modules}
        functions |= {name: partial(self._border_layer, name) for name in (self.entry, self.exit)}
        stand_ins = {name: _StandIn(function, model.get_submodule(name)) for name, function in functions.items()}
        self.shells: list[nn.Module] = []   # that of the model first
        self._shell(model, "", self.modules | stand_ins)

    def then(self, other: Any) -> "_PieceRange | None":
        """These pieces and `other`, in one call; None unless they follow in the same model."""
        if not (isinstance(other, _PieceRange) and other.roles is self.roles and other.pieces.start == self.pieces.stop):
            return None
        both = range(self.pieces.start, other.pieces.stop)
        return _PieceRange(self.shells[0], self.roles, both, self.inputs, {**self.modules, **other.modules})   # a shell is built like it

    def __call__(self, *values: Any) -> Any:
        """Output of the piece before, or the model's arguments -> activations after these pieces, or the model's output."""
        self.with_grad = torch.is_grad_enabled()
        if self.pieces[0] > 0:
            (self.arriving,) = values
            values = self._called_with(values[0])
        for shell in self.shells:   # some models read `training` of themselves, not of their modules
            shell.training = any(module.training for module in self.modules.values())
        try:
            with suppress(_EndOfCall):
                result = self.shells[0].forward(*values, **self.options)
            if self.arriving is not None or (self.leaving is None and not self._ends):
                raise ConfigError(f"{type(self.shells[0]).__name__} has not called {self.exit if self.arriving is None else self.entry}, a "
                                  "layer at the border of a stage, as it did when it was tried: no layer may be left out in training "
                                  "(layerdrop, stochastic depth); set that to 0")
            return result if self._ends else self.leaving
        except Exception as error:
            if len(values) > 1 and not isinstance(error, RankloomError):   # such as a mask that was taken for a cache
                shell = self.shells[0]
                error.add_note(f"(a stage calls {type(shell).__name__} with the first part of the micro-batch by position, here with "
                               f"({', '.join(positional(shell)[:len(values)])}). If some of it is meant for other parameters, wrap the "
                               "model in a module whose forward takes just these, in this order)")
            raise
        finally:
            self.arriving = self.leaving = None

    @property
    def _ends(self) -> bool:
        """Whether the last piece is the back, which returns what the model does."""
        return self.pieces[-1] > len(self.roles.layers)

    def _called_with(self, hidden: Tensor) -> tuple[Any, ...]:
        """The arguments for a call of the model: its own inputs, or zeros for tokens."""
        asked = self.inputs() if self.inputs else hidden.new_zeros(hidden.shape[:2], dtype=torch.int64)
        return tuple(asked) if isinstance(asked, tuple | list) else (asked,)

    def _shell(self, model: nn.Module, name: str, places: Mapping[str, nn.Module]) -> nn.Module:
        """A copy of a module with its code and settings, but children from `places`; parents of the list of layers become shells, too."""
        shell = copy.copy(model.get_submodule(name))
        self.shells.append(shell)
        vars(shell)["_modules"] = {child.rpartition(".")[2]: places[child] if child in places else self._shell(model, child, places)
                                   for child in _children(model, name)}
        return shell

    def _border_layer(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The layer where activations come in or go out. raises: ConfigError when a checkpoint calls it, which sees other activations"""
        given = self.modules[name].parameters() if name in self.modules else [
            self._stream(name, *args, **kwargs) if self.arriving is None else self.arriving]
        trains = any(value.requires_grad for value in given)   # frozen layers may well be called without gradients
        if (self.with_grad and not torch.is_grad_enabled() and trains) or torch._C._current_graph_task_id() != -1:
            raise ConfigError(f"{type(self.shells[0]).__name__} checkpoints {name}, a layer at the border of a stage: switch its own "
                              "checkpointing off, and give `prepare` recompute='full'")
        if name == self.entry and self.arriving is not None:
            arrived, self.arriving = self.arriving, None
            args, kwargs = with_first(args, kwargs, lambda _: arrived, self.roles.firsts[name])
        output = self.modules[name](*args, **kwargs) if name in self.modules else self._pass_through(name, *args, **kwargs)
        if name == self.exit:
            self.leaving = output[0] if isinstance(output, tuple | list) else output
            if not self._ends:
                raise _EndOfCall
        return output

    def _stream(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The activations that a module is called with."""
        return first_argument(args, kwargs, self.roles.firsts[name])

    def _pass_through(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """In place of a layer: what came in, in a tuple if layers return one."""
        x = self._stream(name, *args, **kwargs)
        return x if self.roles.extras is None else (x, *[None] * self.roles.extras)

    def _zeros(self, name: str, *args: Any, **kwargs: Any) -> Tensor:
        """In place of a module before the layers: zeros without memory, of the shape that activations have."""
        assert self.arriving is not None, "the front is computed, not stood in for"
        x = next(tensors_in((self._stream(name, *args, **kwargs), *args, *kwargs.values())))   # some models pass tokens by name
        rows = x.shape[:2] if self.arriving.dim() == 3 else self.arriving.shape[:-1]   # the stream may be cut by tokens
        zeros = self.arriving.new_zeros(()).expand(*rows, self.arriving.shape[-1])
        if self.follow is not None:
            self.follow.add(zeros)
        return zeros
