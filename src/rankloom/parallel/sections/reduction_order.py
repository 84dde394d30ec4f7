"""The order in which a model's sections are reduced: the same on every rank, in whatever order gradients arrive on each.

At first it is the reverse of the model's own order; after the first backward, the order in which rank 0's sections were settled.
"""

from collections.abc import Sequence
from enum import Enum

import torch

from rankloom.parallel.sections.section import Section
from rankloom.world.group import Group


class Reducing(Enum):
    """Which sections a backward reduces."""

    ALL = "all: it is the last of a step"
    EACH_TIME = "those that are reduced in every backward"
    NOTHING = "none: gradients stay whole, of this rank alone"


class ReductionQueue:
    """Starts the reductions of settled sections; each waits until all before it are settled."""

    def __init__(self, sections: Sequence[Section], group: Group, replicas: Group):
        self.numbers, self.groups = {section: number for number, section in enumerate(sections)}, (group, replicas)
        self.order = list(reversed(sections))
        self._settled: list[Section] = []   # in this backward
        self._started = 0                   # of `order`, in this backward
        self._learned = False

    def begin(self) -> None:
        """A backward has begun."""
        self._settled, self._started = [], 0

    def settle(self, section: Section, *, reducing: Reducing) -> list[Section]:
        """All gradients of `section` have landed: start the reductions that may start now; returns their sections."""
        self._settled.append(section)
        started = []
        while self._started < len(self.order) and self.order[self._started].settled:
            following = self.order[self._started]
            self._started += 1
            if reducing is Reducing.ALL or (reducing is Reducing.EACH_TIME and following.reduced_each_time):
                started.append(following)
                for gradient in following.gradients:
                    gradient.start()
        return started

    def learn(self) -> None:
        """At the end of the first backward: take rank 0's order for all that follow. A collective, once."""
        if self._learned:
            return
        order = torch.tensor([self.numbers[section] for section in self._settled], device="cpu")
        for group in self.groups:
            order = group.broadcast(order, label="order of sections")
        sections = list(self.numbers)
        self.order = [sections[number] for number in order.tolist()]
        self._learned = True
