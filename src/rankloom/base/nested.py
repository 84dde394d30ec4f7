"""Values nested in tuples, lists, dicts and dataclasses: change or cast each tensor, or change each value that has one entry per row, where
it stands."""

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten


def map_tensors(change: Callable[[Any], Any], batch: Any, kind: type = Tensor) -> Any:
    """The same nesting, with `change(tensor)` in place of each tensor. kind: or of each value of that class"""
    return change(batch) if isinstance(batch, kind) else _map_parts(partial(map_tensors, change, kind=kind), batch)


def all_of(kind: type, batch: Any) -> list[Any]:
    """The tensors, or numpy arrays, of a batch."""
    found: list[Any] = []
    map_tensors(found.append, batch, kind)
    return found


def map_rows(change: Callable[[Any], Any], batch: Any, rows: int) -> Any:
    """The same nesting, with `change(value)` in place of everything that has one entry per row, tensor or not."""
    inside = partial(_map_rows_inside, change, rows=rows)
    if isinstance(batch, Tensor | np.ndarray):
        return inside(batch)
    return _map_parts(inside, batch)   # a batch of as many columns as rows, by chance, is no column itself


def _map_rows_inside(change: Callable[[Any], Any], value: Any, rows: int) -> Any:
    if isinstance(value, Tensor) or _goes_by_rows(value, rows):
        return change(value)
    return _map_parts(partial(_map_rows_inside, change, rows=rows), value)


def _map_parts(change: Callable[[Any], Any], batch: Any) -> Any:
    """The same container with `change(value)` for each of its values. Anything that is not a container is returned unchanged."""
    if isinstance(batch, dict | UserDict):   # tokenizers return a UserDict
        changed = copy.copy(batch)   # with the attributes of a dict's subclass
        for key in sorted(batch, key=str):   # in the same order on all ranks: `change` may communicate
            changed[key] = change(batch[key])   # not `update`, which the outputs of `transformers` refuse
        return changed
    if isinstance(batch, list | tuple):
        return _with_values(batch, [change(value) for value in batch])
    if is_dataclass(batch) and not isinstance(batch, type):
        twin = copy.copy(batch)
        for name in (field.name for field in fields(batch) if hasattr(batch, field.name)):   # a field without a default may be unset
            object.__setattr__(twin, name, change(getattr(batch, name)))   # frozen dataclasses too
        return twin
    return batch


def _with_values(given: list[Any] | tuple[Any, ...], values: list[Any]) -> Any:
    """A list or tuple of the class of `given` with these values, and its attributes, whatever arguments its constructor takes."""
    if isinstance(given, list):
        twin = copy.copy(given)
        twin[:] = values
        return twin
    if hasattr(given, "_make"):
        return given._make(values)
    try:
        made = tuple.__new__(type(given), values)
    except TypeError:   # torch's own (a shape, the result of `max`) allow only their constructor
        return type(given)(values)
    if hasattr(given, "__dict__"):
        vars(made).update(vars(given))
    return made


def _goes_by_rows(value: Any, rows: int) -> bool:
    """Whether a value that is not a tensor has one entry per row."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and len(value) == rows
    if not isinstance(value, list | tuple) or len(value) != rows or hasattr(value, "_fields") or isinstance(value, torch.Size):
        return False
    columns = all(isinstance(entry, np.ndarray) and _goes_by_rows(entry, rows) for entry in value)   # as many as rows, by chance
    return not (columns or all_of(Tensor, value))


def cast_floats_in(value: Any, dtype: torch.dtype | None) -> Any:
    """The same nesting (torch's pytree, dicts, lists, tuples, dataclasses) with floats cast; None: none is. A value with nothing to cast
    stays itself."""
    if dtype is None:
        return value
    found, nesting = tree_flatten(value)
    changed = [_cast_leaf(leaf, dtype) for leaf in found]
    return tree_unflatten(changed, nesting) if any(new is not old for new, old in zip(changed, found)) else value


def _cast_leaf(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, list | tuple):   # of a class of the user's: others are no leaves
        parts = [cast_floats_in(part, dtype) for part in value]
        return _with_values(value, parts) if any(new is not old for new, old in zip(parts, value)) else value
    if isinstance(value, dict | UserDict):
        held, put = dict(value), type(value).__setitem__
    elif is_dataclass(value) and not isinstance(value, type | nn.Module):
        held = {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}   # one may be unset
        put = object.__setattr__   # frozen dataclasses too
    else:
        return value
    cast = {key: cast_floats_in(part, dtype) for key, part in held.items()}
    if all(cast[key] is part for key, part in held.items()):
        return value
    changed = copy.copy(value)   # with its other attributes
    for key, part in cast.items():
        put(changed, key, part)
    return changed
