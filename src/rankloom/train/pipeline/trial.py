"""Trial calls that show how a model can be cut into its layers, without relying on the values computed.

train/pipeline/layer_pieces.py cuts it, and says what a piece is.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rankloom.base.errors import ConfigError, RankLost
from rankloom.base.first_argument import first_argument, first_parameter
from rankloom.base.names import is_inside
from rankloom.parallel.sections.wrapping import tensors_in

READS_NO_VALUES = re.compile(r"_like|^new_|^(empty|zeros|ones|full)")   # names of operations that look at shape and dtype only
OVERWRITES = {"zero_.default", "fill_.Scalar"}   # operations that leave nothing of what was in a tensor
ADVICE = "say where to cut with pipe=rl.Pipe(pieces=..., loss=...), functions of the model"
ADVICE_WITH_EXAMPLE = f"give a micro-batch to try it with, pipe=rl.Pipe(example=...), or {ADVICE}"
ADVICE_FOR_PIECES = f"only one tensor may pass from layer to layer, and no stage can look into modules of others; {ADVICE}"


def try_call(call: Callable[..., Any], value: Any, model: nn.Module, advice: str, **options: Any) -> Any:
    """What the call gives. value: its argument, or a tuple or list of them. raises: ConfigError with what the call raised, and advice"""
    try:
        return call(*value, **options) if isinstance(value, tuple | list) else call(value, **options)
    except (ConfigError, RankLost):   # such as a wrong plan for tensor ranks: they say themselves what to do
        raise
    except Exception as error:
        raise ConfigError(f"{type(model).__name__} was tried with a few tokens, or an example, by position, to cut it into its layers, "
                          f"and failed with {type(error).__name__}: {error}; {advice}") from error


class Followed(TorchDispatchMode):
    """A context that finds which tensors were computed from the followed ones, whatever the values."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}   # by id; held, so that no other gets the id of one

    def add(self, x: Tensor) -> None:
        """From now on follow `x`."""
        self.tensors[id(x)] = x

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.__name__ in OVERWRITES:
            self.tensors.pop(id(args[0]), None)
            return found
        given = tensors_in((*args, *(kwargs or {}).values()))
        if any(id(x) in self.tensors for x in given) and not READS_NO_VALUES.search(func.__name__):
            for x in tensors_in(found):
                self.add(x)
        return found


def expect_same_between_layers(model: nn.Module, layers: Sequence[str], call: Callable[[], Any]) -> None:
    """Raise ConfigError if the model changes, in training mode only, what one of its layers passes to the next.

    Pieces are compared with the model in evaluation, where it draws no random numbers, so they would not show that. What the modules
    around the layers do is looked at; the layers and all others stay in evaluation. Call it in `evaluating(model)`, which gives all
    modules their modes back.
    """
    around = [module for name, module in model.named_modules() if any(is_inside(layer, name) for layer in layers)]
    in_evaluation = _handed_on(model, layers, call)
    devices = [device] if (device := next(model.parameters()).device).type == "cuda" else []
    with torch.random.fork_rng(devices):
        for module in around:
            module.training = True
        in_training = _handed_on(model, layers, call)
    for layer, before, now in zip(layers, in_evaluation, in_training):
        if before and not now:
            raise ConfigError(f"{type(model).__name__} changes, in training, what {layer} gives to the layer behind it, where a stage may "
                              f"end; move that into the layer, or {ADVICE}")


def _handed_on(model: nn.Module, layers: Sequence[str], call: Callable[[], Any]) -> list[bool]:
    """For each layer called, except the last: whether the next one is given its output, the same tensor with unchanged values."""
    seen: list[Any] = []   # what the first came with, what it gave, what the second came with, ...

    def note(values: Any) -> None:
        x = next(tensors_in(values), None)
        seen.append(x is not None and (x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x._version))

    with ExitStack() as hooks:
        for layer in map(model.get_submodule, layers):
            first = partial(first_argument, name=first_parameter(layer))
            taking = layer.register_forward_pre_hook(lambda _, args, kwargs, first=first: note(first(args, kwargs)), with_kwargs=True)
            hooks.enter_context(taking)
            hooks.enter_context(layer.register_forward_hook(lambda _, _args, output: note(output)))
        call()
    return [given == taken for given, taken in zip(seen[1::2], seen[2::2])]
