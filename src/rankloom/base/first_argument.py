"""The first argument of a module's call, which is what blocks pass on: by position, or by name."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]   # arguments by position and by name


def first_parameter(module: nn.Module) -> str:
    """The name of the first parameter of the module's forward; "" if it has none."""
    return next(iter(inspect.signature(module.forward).parameters), "")


def with_first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor], name: str) -> Call:
    """The arguments of a call, the first of them changed. name: see `first_argument`"""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = _first_by_name(kwargs, name)
    return args, kwargs | {name: change(kwargs[name])}


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """The first argument of a call; None if there is none. name: the one meant where all are passed by name, else the first tensor"""
    return args[0] if args else kwargs.get(_first_by_name(kwargs, name))


def _first_by_name(kwargs: dict[str, Any], name: str) -> str:
    return name if isinstance(kwargs.get(name), Tensor) else next((key for key, value in kwargs.items() if isinstance(value, Tensor)), "")
