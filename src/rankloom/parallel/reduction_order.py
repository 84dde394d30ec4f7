"""In which order the sections of a model are reduced: the same on every rank, whatever order gradients come in here.

At first that is the reverse of the model's own order; after the first backward, the order in which rank 0's sections were settled.
"""

from collections.abc import Sequence

import torch

from rankloom.parallel.sections import Section
from rankloom.world.group import Group


class Queue:
    """Starts the reductions of settled sections, the next one only when all before it are settled."""

    def __init__(self, sections: Sequence[Section], group: Group, replicas: Group):
        self.sections, self.groups = list(sections), (group, replicas)
        self.order = list(reversed(self.sections))
        self._settled: list[Section] = []   # in this backward
        self._started = 0                   # of `order`, in this backward
        self._learned = False

    def begin(self) -> None:
        """A backward has begun."""
        self._settled, self._started = [], 0

    def settle(self, section: Section, *, reduce_all: bool | None) -> list[Section]:
        """All gradients of `section` have landed: reduce what may be reduced now, and say what that was.

        reduce_all: this is the step's last backward; before that only sections that are reduced each time set out; None: nothing does
        """
        self._settled.append(section)
        started = []
        while self._started < len(self.order) and self.order[self._started].settled:
            following = self.order[self._started]
            self._started += 1
            if reduce_all or (following.reduced_each_time and reduce_all is not None):
                started.append(following)
                for gradient in following.gradients:
                    gradient.start()
        return started

    def learn(self) -> None:
        """At the end of the first backward: agree on rank 0's order for all that follow. A collective, once."""
        if self._learned:
            return
        order = torch.tensor([self.sections.index(section) for section in self._settled])
        for group in self.groups:
            order = group.broadcast(order, label="order of sections")
        self.order = [self.sections[index] for index in order.tolist()]
        self._learned = True
