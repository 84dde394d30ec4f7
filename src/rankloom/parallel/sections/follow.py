"""Forward-only passes in which some ranks have run out of batches, while the forward is a collective.

Where a forward gathers parameters (stage 3), or sends rows to experts on other ranks, an idle rank still has to take part. Before each
such call, the ranks that run announce it, in one small all-reduce. Idle ranks join that to learn what comes next, take part in it, and
repeat. Nothing is announced while all ranks have a batch.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankloom.base.names import is_inside
from rankloom.base.scoped import temporarily
from rankloom.parallel.sections.section import Section
from rankloom.world.group import Group

ASKING, ENDED, SECTION, LAYER = range(4)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Announcement(NamedTuple):
    """What the ranks that run a forward do next."""

    what: int         # ASKING (an idle rank), ENDED, SECTION or LAYER
    number: int = 0   # of the section that is gathered, or of the layer whose experts get rows
    width: int = 0    # elements of one of these rows
    dtype: int = 0    # their place in DTYPES


class Guide:
    """Announces the collectives of a forward to idle ranks.

    group:  all ranks that a forward of one of them needs
    leads:  whether this rank announces: some rank is idle
    layers: for each layer of spread experts, what an idle rank calls, with an empty tensor of rows
    """

    def __init__(self, group: Group):
        self.group, self.leads = group, False
        self.layers: list[Callable[[Tensor], object]] = []

    def who_has(self, batch: bool) -> tuple[bool, bool]:
        """Whether a rank of the group has a batch to run, and whether all have. A collective. batch: whether this rank has one"""
        have = torch.tensor([float(batch)], dtype=torch.float32, device=self.group.device)
        if self.group.size > 1:
            self.group.all_reduce(have, label="another batch?")
        return bool(have.item()), have.item() == self.group.size

    def tell_end(self) -> None:
        """Announce that the forward has ended. A collective."""
        self._say(Announcement(ENDED))

    def tell_section(self, number: int) -> None:
        """Announce that section `number` will be gathered. A collective while some rank is idle."""
        if self.leads:
            self._say(Announcement(SECTION, number))

    def tell_layer(self, number: int, rows: Tensor) -> None:
        """Announce that rows [n, W] will go to the experts of layer `number`. A collective while some rank is idle."""
        if self.leads:
            self._say(Announcement(LAYER, number, rows.shape[1], DTYPES.index(rows.dtype)))

    def follow(self, sections: Sequence[Section]) -> None:
        """On an idle rank: take part in all that the ranks that run announce, until their forward has ended."""
        held: list[Section] = []
        while (announced := self._say(Announcement(ASKING))).what != ENDED:
            if announced.what == LAYER:
                self._serve(announced)
                continue
            section = sections[announced.number]
            for other in [other for other in held if not is_inside(section.name, other.name)]:
                other.release()
                held.remove(other)
            section.make_ready()
            held.append(section)

    def _serve(self, announced: Announcement) -> None:
        """Take part in a layer of experts, without rows of its own. Inside, this rank announces along with the others."""
        with temporarily(self, leads=True):
            self.layers[announced.number](torch.empty(0, announced.width, dtype=DTYPES[announced.dtype], device=self.group.device))

    def _say(self, mine: Announcement) -> Announcement:
        """What the ranks that run announce: idle ranks say ASKING, which is less than anything else."""
        message = torch.tensor(mine, device=self.group.device)
        return Announcement(*self.group.all_reduce(message, "max", label="what comes next").tolist())
