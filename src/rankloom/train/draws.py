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


class Source(NamedTuple):
    """A generator: how to read its state, and how to set it."""

    read: Callable[[], Any]
    set: Callable[[Any], object]


class Draws:
    """The states that a block's generators have now."""

    def __init__(self, sources: Iterable[Source]):
        self._then = [(source, source.read()) for source in sources]

    def set_back(self, undo: ExitStack) -> None:
        """Set the generators back; `undo` restores their present states."""
        for source, state in self._then:
            undo.callback(source.set, source.read())
            source.set(state)


def sources_of(block: nn.Module) -> Iterator[Source]:
    """The generators of torch, Python and numpy that are attributes of the block's modules; not those in lists, or reached otherwise."""
    for module in block.modules():
        for name, value in vars(module).items():
            if name in OF_EVERY_MODULE:
                continue
            if isinstance(value, torch.Generator):
                yield Source(value.get_state, value.set_state)
            elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
                yield Source(value.getstate, value.setstate)
            elif isinstance(value, np.random.Generator):
                yield _pickled(partial(getattr, value.bit_generator, "state"), partial(setattr, value.bit_generator, "state"))
            elif isinstance(value, np.random.RandomState):
                yield _pickled(value.get_state, value.set_state)


def _pickled(read: Callable[[], Any], put: Callable[[Any], object]) -> Source:
    """For states that are no copies."""
    return Source(lambda: pickle.dumps(read()), lambda state: put(pickle.loads(state)))
