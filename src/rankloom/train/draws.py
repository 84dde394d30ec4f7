"""Generators in attributes of a block's modules. torch sets back its own global ones when it recomputes; these are set back here.

Python's `random` and numpy's global generator are not: other threads may draw from them meanwhile (a loader of data), and would
get numbers twice.
"""

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}   # names of attributes

ABSENT = object()

Place = tuple[nn.Module, str]
"""A module, and the name of the attribute in which it has a generator."""


class Source(NamedTuple):
    """How to read the state of a generator, and how to set it."""

    read: Callable[[], Any]
    set: Callable[[Any], object]


class Draws:
    """The states that the generators at some places have now.

    attributes: of all modules of the block, now; None where all places are known
    made:       places where there was no generator yet, and what was there
    """

    def __init__(self, places: tuple[Place, ...], attributes: dict[nn.Module, dict[str, Any]] | None):
        found = [(module, name, vars(module).get(name)) for module, name in places]
        self._then = [(module, name, held, source.read()) for module, name, held in found if (source := _source(held))]
        self.places, self.attributes = places, attributes
        self.made: list[tuple[nn.Module, str, Any]] = []

    def set_back(self, undo: ExitStack) -> None:
        """Set the generators back, and take away what was made since; `undo` restores what is there now."""
        for module, name, held, state in self._then:
            source = _source(held)
            assert source is not None, "it was one then"
            undo.callback(source.set, source.read())
            source.set(state)
            undo.callback(_put, module, name, vars(module).get(name, ABSENT))
            _put(module, name, held)   # it may have been replaced
        for module, name, before in self.made:
            undo.callback(_put, module, name, vars(module).get(name, ABSENT))
            _put(module, name, before)


def _put(module: nn.Module, name: str, value: Any) -> None:
    """Give an attribute its value, or take it away."""
    if value is not ABSENT:
        setattr(module, name, value)
    elif name in vars(module):
        delattr(module, name)


class Generators:
    """The generators of a block, looked for until a forward in training has made none: many are made when they are first needed."""

    def __init__(self, block: nn.Module):
        self._block = block
        self._known: tuple[Place, ...] | None = None

    def now(self) -> Draws:
        """Their states before a forward."""
        if self._known is not None:
            return Draws(self._known, None)
        return Draws(tuple(generators_of(self._block)), {module: dict(vars(module)) for module in self._block.modules()})

    def note_made(self, draws: Draws) -> None:
        """After that forward: note in its `draws` which generators it has made."""
        if draws.attributes is None:
            return
        now = tuple(generators_of(self._block))
        draws.made = [(module, name, draws.attributes.get(module, {}).get(name, ABSENT)) for module, name in now
                      if (module, name) not in draws.places]
        draws.attributes = None   # they may hold memory
        if self._block.training and not draws.made:
            self._known = now

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """A context for a forward that belongs to no step: afterwards the generators are as before."""
        draws = self.now()
        try:
            yield
        finally:
            self.note_made(draws)
            draws.set_back(ExitStack())


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
