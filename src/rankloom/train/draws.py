"""Generators in attributes of a block's modules. torch sets back its own global ones when it recomputes; these are set back here.

Python's `random` and numpy's global generator are not: other threads may draw from them meanwhile (a loader of data), and would
get numbers twice.
"""

import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}   # names of attributes

Place = tuple[nn.Module, str]
"""A module, and the name of the attribute in which it has a generator."""


class Source(NamedTuple):
    """How to read the state of a generator, and how to set it."""

    read: Callable[[], Any]
    set: Callable[[Any], object]


class Draws:
    """The states that the generators at some places have now."""

    def __init__(self, places: Iterable[Place]):
        sources = [source for module, name in places if (source := _source(getattr(module, name, None)))]
        self._then = [(source, source.read()) for source in sources]

    def set_back(self, undo: ExitStack) -> None:
        """Set the generators back; `undo` restores their present states."""
        for source, state in self._then:
            undo.callback(source.set, source.read())
            source.set(state)


def generators_of(block: nn.Module) -> Iterator[Place]:
    """Where the block's modules have generators of torch, Python and numpy: attributes only, no lists of them."""
    for module in block.modules():
        for name, value in vars(module).items():
            if name not in OF_EVERY_MODULE and _source(value):
                yield module, name


def _source(value: Any) -> Source | None:
    if isinstance(value, torch.Generator):
        return Source(value.get_state, value.set_state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return Source(value.getstate, value.setstate)
    if isinstance(value, np.random.Generator):
        return _pickled(partial(getattr, value.bit_generator, "state"), partial(setattr, value.bit_generator, "state"))
    if isinstance(value, np.random.RandomState):
        return _pickled(value.get_state, value.set_state)
    return None


def _pickled(read: Callable[[], Any], put: Callable[[Any], object]) -> Source:
    """For states that are no copies."""
    return Source(lambda: pickle.dumps(read()), lambda state: put(pickle.loads(state)))
