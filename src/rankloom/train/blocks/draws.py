"""Generators in attributes of a block's modules. torch sets back its own global ones when it recomputes; these are set back here.

Python's `random` and numpy's global generator are not: other threads may draw from them meanwhile (a loader of data), and would
get numbers twice.
"""

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}   # names of attributes

ABSENT = object()


class Source(NamedTuple):
    """How to read the state of a generator, and how to set it."""

    read: Callable[[], Any]
    set: Callable[[Any], object]


class Attribute(NamedTuple):
    """An attribute of a module, and a value of it; ABSENT: the module does not have it."""

    module: nn.Module
    name: str
    value: Any

    @classmethod
    def now(cls, module: nn.Module, name: str) -> "Attribute":
        """With the value that it has now."""
        return cls(module, name, vars(module).get(name, ABSENT))

    def put(self) -> None:
        """Give the module the value again, or take away what it has in its place."""
        if self.value is not ABSENT:
            setattr(self.module, self.name, self.value)
        elif self.name in vars(self.module):
            delattr(self.module, self.name)


class Draws:
    """The states that the generators of a block have now. Many are made when they are first needed: `note_made` looks for those."""

    def __init__(self, block: nn.Module):
        self._block = block
        self._before = {module: dict(vars(module)) for module in block.modules()}
        self._states = [(attribute, source, source.read()) for attribute, source in _sources(block)]
        self._made: list[Attribute] = []   # as they were before

    def note_made(self) -> None:
        """After the forward: note which generators it has made. Call it once."""
        known = {(attribute.module, attribute.name) for attribute, *_ in self._states}
        self._made = [Attribute(module, name, self._before.get(module, {}).get(name, ABSENT))
                      for (module, name, _), _ in _sources(self._block) if (module, name) not in known]
        self._before.clear()   # it may hold memory

    def set_back(self, undo: ExitStack) -> None:
        """Set the generators back, and take away what was made since; `undo` restores what is there now."""
        for attribute, source, state in self._states:
            undo.callback(source.set, source.read())
            source.set(state)
            undo.callback(Attribute.now(attribute.module, attribute.name).put)
            attribute.put()   # it may have been replaced
        for attribute in self._made:
            undo.callback(Attribute.now(attribute.module, attribute.name).put)
            attribute.put()


@contextmanager
def generators_put_back(block: nn.Module) -> Iterator[None]:
    """A context for a forward that belongs to no step: afterwards the generators are as before."""
    draws = Draws(block)
    try:
        yield
    finally:
        draws.note_made()
        draws.set_back(ExitStack())


def _sources(block: nn.Module) -> Iterator[tuple[Attribute, Source]]:
    """The generators of torch, Python and numpy that the block's modules have as attributes (not in lists)."""
    for module in block.modules():
        for name, value in vars(module).items():
            if name not in OF_EVERY_MODULE and (source := _source(value)):
                yield Attribute(module, name, value), source


def _source(value: Any) -> Source | None:
    kind: Any = type(value)
    source_of = _source_of_kind(kind)
    return source_of and source_of(value)


@cache   # most attributes are of few kinds, and every forward looks at them
def _source_of_kind(kind: type) -> Callable[[Any], Source] | None:
    if issubclass(kind, torch.Generator):
        return lambda value: Source(value.get_state, value.set_state)
    if issubclass(kind, random.Random) and not issubclass(kind, random.SystemRandom):
        return lambda value: Source(value.getstate, value.setstate)
    if issubclass(kind, np.random.Generator):
        return lambda value: _pickled(partial(getattr, value.bit_generator, "state"), partial(setattr, value.bit_generator, "state"))
    if issubclass(kind, np.random.RandomState):
        return lambda value: _pickled(value.get_state, value.set_state)
    return None


def _pickled(read: Callable[[], Any], put: Callable[[Any], object]) -> Source:
    """A source whose `read` gives the generator's own state, not a copy."""
    return Source(lambda: pickle.dumps(read()), lambda state: put(pickle.loads(state)))
