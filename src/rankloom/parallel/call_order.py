"""The order in which a model's sections are called, gathered and reduced, and a check that it is the same on all ranks.

A gather is a collective, and messages carry no names. If one rank gathers block 3 while another gathers block 4, or reduces, both silently
compute with a mixture. So each rank hashes the order of its gathers and reductions, and ranks compare the hashes at the end of a step.
"""

from dataclasses import dataclass, field
from zlib import crc32

import torch

from rankloom.base.errors import UnitError
from rankloom.parallel.sections import CALL_ALIKE, Section


@dataclass
class Calls:
    """The calls of one rank.

    order:      of this pass             last: of the pass before
    order_hash: a hash of the gathers and reductions since the last step ended
    backward:   autograd's number of the running backward
    """

    order: list[Section] = field(default_factory=list)
    last: list[Section] = field(default_factory=list)
    order_hash: int = 0
    backward: int = -1

    def begin_pass(self) -> None:
        """A new pass begins."""
        self.last, self.order = self.order or self.last, []

    def begin_backward(self) -> bool:
        """A backward begins. Returns whether autograd runs it."""
        self.backward = torch._C._current_graph_task_id()
        return self.backward != -1

    @property
    def inside_backward(self) -> bool:
        """Whether another backward runs inside of the running one, as when a hook of the model's own calls `torch.autograd.grad`.

        It does not know which gradients the outer one has still to make.
        """
        return torch._C._current_graph_task_id() != self.backward

    def note(self, section: Section) -> None:
        """The section is called now."""
        section.first_call = len(self.order) if section.first_call is None else section.first_call
        self.order.append(section)

    def following(self, ahead: int) -> list[Section]:
        """The sections that were called next in the pass before."""
        return self.last[len(self.order) : len(self.order) + ahead]

    def before(self, section: Section, ahead: int) -> list[Section]:
        """The sections that backward reaches next. Of several calls of one section, it goes from the last to the first."""
        places = [at for at, called in enumerate(self.order) if called is section] or [0]
        at = places[min(section.calls, len(places) - 1)]
        return self.order[max(0, at - ahead) : at]

    def note_gather(self, section: Section) -> None:
        """The section is about to be gathered, unless it is."""
        if section.is_away:
            self.order_hash = crc32(section.name.encode(), self.order_hash)

    def note_reduction(self, section: Section) -> None:
        """Its reduction has started."""
        self.order_hash = crc32(f"gradients of {section.name}".encode(), self.order_hash)

    def end_step(self, rank: int, *, alike: bool) -> None:
        """Start a new hash. alike: whether all ranks had the same one. raises: UnitError otherwise"""
        self.order_hash = 0
        if not alike:
            names = [section.name or "root" for section in self.order]
            self.order, self.last = [], []   # do not gather ahead by them
            shown = ", ".join(names[:8]) + ", ..." * (len(names) > 8)
            raise UnitError(
                f"rank {rank}: not all ranks have called the same blocks in the same order; here, in the last pass, {shown}. A block that "
                f"is called is gathered from all ranks, so what was computed is wrong. {CALL_ALIKE}")
