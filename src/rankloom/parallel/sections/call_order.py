"""The order in which a model's sections are called, gathered and reduced, and a check that it is the same on all ranks.

A gather is a collective, and messages carry no names. If one rank gathers block 3 while another gathers block 4, or reduces, both silently
compute with a mixture. So each rank hashes the order of its gathers and reductions, and ranks compare the hashes at the end of a step.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from zlib import crc32

import torch
from torch import Tensor

from rankloom.base.errors import UnitError
from rankloom.base.names import is_inside
from rankloom.parallel.sections.section import CALL_ALIKE, Section


@dataclass
class Calls:
    """The calls of one rank. No call looks at all sections, or a step would take a time that grows with their square.

    order:      of this pass             last: of the pass before
    places:     where in `order` each section is; sections by their first call
    ahead:      sections that are gathered for a call that has not come yet
    unfinished: sections of this pass, by their first call, that backward has still to settle or to release
    order_hash: a hash of the gathers and reductions since the last step ended
    backward:   autograd's number of the running backward
    outermost:  the number of a loss's own backward, inside of which any other runs; -1 before it has begun
    """

    order: list[Section] = field(default_factory=list)
    last: list[Section] = field(default_factory=list)
    places: dict[Section, list[int]] = field(default_factory=dict)
    ahead: dict[Section, None] = field(default_factory=dict)
    unfinished: list[Section] = field(default_factory=list)
    order_hash: int = 0
    backward: int = -1
    outermost: int = -1

    def begin_pass(self) -> None:
        """A new pass begins."""
        self.last, self.order, self.places = self.order or self.last, [], {}

    @property
    def inside_backward(self) -> bool:
        """Whether another backward runs inside of the running one, as when a hook of the model's own calls `torch.autograd.grad`.

        Autograd can say which gradients are still due only for the inner one, so nothing may be settled meanwhile.
        """
        return torch._C._current_graph_task_id() != self.backward

    def note(self, section: Section) -> None:
        """The section is called now."""
        self.places.setdefault(section, []).append(len(self.order))
        self.order.append(section)

    def following(self, ahead: int) -> list[Section]:
        """The sections that were called next in the pass before."""
        return self.last[len(self.order) : len(self.order) + ahead]

    def before(self, section: Section, ahead: int) -> list[Section]:
        """The sections that backward reaches next. Of several calls of one section, it goes from the last to the first."""
        places = self.places.get(section, [0])
        at = places[min(section.pending, len(places) - 1)]
        return self.order[max(0, at - ahead) : at]

    @contextmanager
    def noting_backward_of(self, loss: Tensor) -> Iterator[Tensor]:
        """Gives a view of the loss to call `backward` on: its number is noted before a backward inside of it can come to a section."""
        told = loss.view_as(loss)   # the loss itself may have such a hook, which torch would call before ours
        told.register_hook(self._note_outermost)
        try:
            yield told
        finally:
            self.outermost = -1

    def _note_outermost(self, gradient: Tensor) -> None:
        self.outermost = torch._C._current_graph_task_id()

    def begin_backward(self, sections: Sequence[Section]) -> bool:
        """A backward begins: every section that was called is unfinished. Returns whether it is the one that autograd runs now.

        Usually it is, and autograd will tell when it ends. But a hook may call `torch.autograd.grad` inside `loss.backward()`, and reach
        our hooks first. Then the backward that begins is the loss's, and `run_backward` ends it.
        """
        self.unfinished = list(self.places)   # a dict keeps the order of first calls
        now = torch._C._current_graph_task_id()
        own = self.outermost in (-1, now) or any(section.awaits_more() for section in sections)
        self.backward = now if own else self.outermost
        return own and now != -1

    def over(self, section: Section) -> list[Section]:
        """The unfinished sections whose backward is over when that of this one begins."""
        later = self.unfinished[self._after(section):]
        return [other for other in later if not other.pending and not is_inside(other.name, section.name)]

    def finish(self, section: Section, released: Iterable[Section]) -> None:
        """The sections that were `over` are released. The settled ones among them are finished, unless one is gathered again."""
        after, done = self._after(section), {other for other in released if other.settled}
        self.unfinished[after:] = [other for other in self.unfinished[after:] if other not in done]

    def _after(self, section: Section) -> int:
        """Where those begin, in `unfinished`, that were called after this one."""
        return bisect_right(self.unfinished, self._first_call(section), key=self._first_call)

    def _first_call(self, section: Section) -> int:
        return self.places.get(section, [len(self.order)])[0]   # after all others, where it was not called

    def note_gather(self, section: Section) -> None:
        """The section is about to be gathered, unless it is there already."""
        if section.is_away:
            self.order_hash = crc32(section.name.encode(), self.order_hash)
            if section.settled:   # in this backward it has to be released once more
                insort(self.unfinished, section, key=self._first_call)

    def note_gather_ahead(self, section: Section) -> None:
        """The same, for a call that is expected."""
        self.note_gather(section)
        if section.is_away:
            self.ahead[section] = None

    def take_gathered_in_vain(self, following: Sequence[Section]) -> list[Section]:
        """The sections that were gathered ahead and will not be called next, since the order of calls has changed. Forgets them."""
        found = [section for section in self.ahead if section not in following]
        for section in found:
            del self.ahead[section]
        return found

    def note_reduction(self, section: Section) -> None:
        """Its reduction has started."""
        self.order_hash = crc32(f"gradients of {section.name}".encode(), self.order_hash)

    def end_step(self, rank: int, *, alike: bool) -> None:
        """Start a new hash. alike: whether all ranks had the same one. raises: UnitError otherwise"""
        self.order_hash = 0
        if not alike:
            names = [section.name or "root" for section in self.order]
            self.order, self.last, self.places = [], [], {}   # do not gather ahead by them
            shown = ", ".join(names[:8]) + ", ..." * (len(names) > 8)
            raise UnitError(
                f"rank {rank}: not all ranks have called the same blocks in the same order; here, in the last pass, {shown}. A block that "
                f"is called is gathered from all ranks, so what was computed is wrong. {CALL_ALIKE}")
