"""A forward that is a collective, run by some ranks only: the others go along.

Ranks may bring different numbers of batches to a forward-only pass. Where a forward gathers parameters (stage 3), or sends rows to
experts on other ranks, a rank without a batch still has its part to do. Those that run say what comes next; those that
have nothing to run ask, do their part of it, and ask again. Nothing is said while all ranks run.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rankloom.base.scoped import temporarily
from rankloom.world.group import Group

ASKING, ENDED, SECTION, LAYER = range(4)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Next(NamedTuple):
    """What comes next in a forward: section `number` is gathered, or rows of `width` elements go to layer `number` of experts."""

    what: int
    number: int = 0
    width: int = 0
    dtype: int = 0


class Guide:
    """How the ranks of a group say what comes next.

    group:  all ranks that a forward of one of them needs
    leads:  whether this rank says what comes next, because somebody follows
    layers: what a rank that follows does for each layer of spread experts, given rows for them, of which it has none
    """

    def __init__(self, group: Group):
        self.group, self.leads = group, False
        self.layers: list[Callable[[Tensor], object]] = []

    def who_has(self, one: bool) -> tuple[bool, bool]:
        """Whether a rank of the group has something to run, and whether all have. A collective."""
        have = torch.tensor([float(one)], device=self.group.device)
        if self.group.size > 1:
            self.group.all_reduce(have, label="another batch?")
        return bool(have.item()), have.item() == self.group.size

    @contextlib.contextmanager
    def leading(self, on: bool) -> Iterator[None]:
        """What runs inside tells the ranks that follow, if on."""
        with temporarily(self, leads=on):
            yield
        if on:
            self._say(Next(ENDED))

    def tell_section(self, number: int) -> None:
        """Before section `number` is gathered. A collective while somebody follows."""
        if self.leads:
            self._say(Next(SECTION, number))

    def tell_layer(self, number: int, rows: Tensor) -> None:
        """Before rows [n, W] go to the experts of layer `number`. A collective while somebody follows."""
        if self.leads:
            self._say(Next(LAYER, number, rows.shape[1], DTYPES.index(rows.dtype)))

    def ask(self) -> Next:
        """What the ranks that run do next."""
        return self._say(Next(ASKING))

    def go_along(self, told: Next) -> None:
        """The part of a rank without rows in a layer of experts. It says with the others what comes inside."""
        with temporarily(self, leads=True):
            self.layers[told.number](torch.empty(0, told.width, dtype=DTYPES[told.dtype], device=self.group.device))

    def _say(self, following: Next) -> Next:
        message = torch.tensor(following, device=self.group.device)
        return Next(*self.group.all_reduce(message, "max", label="what comes next").tolist())
