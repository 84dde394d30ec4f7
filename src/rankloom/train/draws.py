"""Random numbers that a block draws from elsewhere than torch's own generators, which torch sets back itself when it recomputes.

These are Python's `random`, numpy's, and generators in attributes of the block's modules. One that the block reaches otherwise, such as a
global variable, is not seen.
"""

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}   # names of attributes


class Source(NamedTuple):
    """A generator: how to read its state, and how to set it. States can be compared."""

    read: Callable[[], Any]
    set: Callable[[Any], object]


class Draws:
    """The states that a block's sources have now.

    price: some 50 microseconds, 100 more where the program has loaded `numpy.random`, before a forward and after it; where the block
           draws, 25 KB until backward
    """

    def __init__(self, block: nn.Module):
        self._then = [(source, source.read()) for source in _sources(block)]

    def forget_unchanged(self) -> None:
        """After the forward: only what it has drawn from is to be set back."""
        self._then = [(source, state) for source, state in self._then if source.read() != state]

    def set_back(self, undo: ExitStack) -> None:
        """Set the sources back; `undo` restores their present states."""
        for source, state in self._then:
            undo.callback(source.set, source.read())
            source.set(state)


def _sources(block: nn.Module) -> Iterator[Source]:
    yield Source(random.getstate, random.setstate)
    if numpy := sys.modules.get("numpy.random"):   # else nobody draws from it
        yield _by_bytes(partial(numpy.get_state, legacy=False), numpy.set_state)
    for module in block.modules():
        for name, value in vars(module).items():
            if name in OF_EVERY_MODULE:
                continue
            if isinstance(value, torch.Generator):
                yield _by_bytes(value.get_state, value.set_state)
            elif isinstance(value, random.Random):
                yield Source(value.getstate, value.setstate)
            elif numpy and isinstance(value, numpy.Generator):
                yield _by_bytes(partial(getattr, value.bit_generator, "state"), partial(setattr, value.bit_generator, "state"))


def _by_bytes(read: Callable[[], Any], put: Callable[[Any], object]) -> Source:
    """For states that hold arrays or tensors, which have no plain comparison."""
    return Source(lambda: pickle.dumps(read()), lambda state: put(pickle.loads(state)))
