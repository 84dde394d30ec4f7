"""In which order the sections of a model are called, gathered and reduced: where parameters come from other ranks, the same on all of them.

A gather is a collective, and messages carry no names. A rank that calls one block while another rank calls the next would compute with
a mixture of both, and nothing would tell; so it is with a reduction on one rank where there is a gather on another. So a number stands
for the order of a rank's gathers and reductions, and ranks compare it where a step ends.
"""

from dataclasses import dataclass, field
from zlib import crc32

from rankloom.base.errors import UnitError
from rankloom.parallel.sections import Section


@dataclass
class Calls:
    """What a rank has called, and what it has gathered.

    order:    the calls of this pass    last: those of the pass before
    order_hash: stands for the gathers since the last step ended, and the reductions among them
    """

    order: list[Section] = field(default_factory=list)
    last: list[Section] = field(default_factory=list)
    order_hash: int = 0

    def begin_pass(self) -> None:
        """Calls are noted anew."""
        self.last, self.order = self.order or self.last, []

    def note(self, section: Section) -> None:
        """It is called now."""
        section.first_call = len(self.order) if section.first_call is None else section.first_call
        self.order.append(section)

    def following(self, ahead: int) -> list[Section]:
        """What was called next in the pass before."""
        return self.last[len(self.order) : len(self.order) + ahead]

    def before(self, section: Section, ahead: int) -> list[Section]:
        """What backward comes to after the section; it goes through the calls of one from the last to the first."""
        places = [at for at, called in enumerate(self.order) if called is section] or [0]
        at = places[min(section.calls, len(places) - 1)]
        return self.order[max(0, at - ahead) : at]

    def note_gather(self, section: Section) -> None:
        """It is about to be gathered, unless it is here."""
        if section.is_away:
            self.order_hash = crc32(section.name.encode(), self.order_hash)

    def note_reduction(self, section: Section) -> None:
        """Its gradients are on their way."""
        self.order_hash = crc32(f"gradients of {section.name}".encode(), self.order_hash)

    def end_step(self, rank: int, *, alike: bool) -> None:
        """Gathers are counted anew. raises: UnitError when ranks have not gathered alike"""
        self.order_hash = 0
        if not alike:
            names = [section.name or "root" for section in self.order]
            self.order, self.last = [], []   # by which ranks would gather ahead
            shown = ", ".join(names[:8]) + ", ..." * (len(names) > 8)
            raise UnitError(
                f"rank {rank}: not all ranks have called the same blocks in the same order; here, in the last pass, {shown}. A block that "
                "is called is gathered from all ranks, so what was computed is wrong. Call each block on every rank (its result times 0 "
                "where it is not wanted, layerdrop at 0), or give `units` that have inside whatever only some ranks call, or train at "
                "stage 2")
