"""A sharded model, as a training loop sees it: backward passes that reduce or do not, agreement at the end of a step, the update.

forward_backward.py says when sections are gathered, released and reduced in between. Read it before this file. parallel/zero.py builds a
`Sharding`; parallel/fully_shard.py wraps one for your own loop.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from torch import Tensor, nn

from rankloom.base.modes import run_together
from rankloom.base.scoped import temporarily
from rankloom.parallel.expert import ExpertReplicas
from rankloom.parallel.replicas.combine_facts import combine_facts
from rankloom.parallel.sections.follow import Guide
from rankloom.parallel.sections.forward_backward import ForwardBackward, Gathering
from rankloom.parallel.sections.reduction_order import Reducing, ReductionQueue
from rankloom.parallel.sections.section import Section, gradients_of, make_gradients
from rankloom.shard.frames import Frames
from rankloom.shard.gradient import Gradient
from rankloom.shard.sums import UnitSums
from rankloom.shard.unit import Unit
from rankloom.world.group import Group


class Sharding:
    """The sections of one model on one rank.

    sections:       the root first
    group:          the shard axis             replicas: ranks with the same slice
    keep_gradients: gradients stay whole until a step's last backward (stage 1)
    frames:         memory that wholes share in turn
    scale:          factor of summed gradients
    sums_of:        the collectives for the gradient of a unit
    experts:        parameters that are summed over other replicas
    """

    def __init__(self, sections: Sequence[Section], group: Group, replicas: Group, *, keep_gradients: bool,
                 gathering: Gathering, frames: Frames, sums_of: Callable[[Unit], UnitSums], scale: float = 1.0,
                 experts: ExpertReplicas | None = None):
        self.sections, self.group, self.replicas = list(sections), group, replicas
        self.gathering = replace(gathering, reshards=gathering.reshards and any(not unit.stays for unit in self.units))
        self.pool = make_gradients(sections, sums_of, keep=keep_gradients, frames=frames, scale=scale)
        self.guide = Guide(experts.together if experts else group)   # directs ranks that `follow` a forward
        queue = ReductionQueue(self.sections, group, replicas)
        self.forward_backward = ForwardBackward(self.sections, group.world_rank, self.gathering,
                                                queue=queue, guide=self.guide, pool=self.pool)
        if self.gathers_in_forward:
            run_together(self.sections[0].module)
        self._gather_kept()

    @property
    def units(self) -> list[Unit]:
        """Those of all sections, in order."""
        return [unit for section in self.sections for unit in section.units]

    def gradients(self) -> list[Gradient]:
        """Those of all units, in the order of the sections."""
        return gradients_of(self.sections)

    def owners(self) -> dict[str, nn.Parameter]:
        """The slices that an optimizer updates, under the plain names."""
        return {name: owner for gradient in self.gradients() for name, owner in gradient.unit.owners.items()}

    # ------------------------------------------------------------------ backward passes, and the end of a step

    def sync(self, on: bool) -> AbstractContextManager[None]:
        """Whether backward passes inside are the last of a step, in which all gradients are reduced."""
        return temporarily(self.forward_backward, reducing=Reducing.ALL if on else Reducing.EACH_TIME)

    def without_reduction(self) -> AbstractContextManager[None]:
        """Backward passes inside reduce nothing: they leave this rank's own whole gradients, whatever memory that takes."""
        return temporarily(self.forward_backward, reducing=Reducing.NOTHING)

    def finish(self, totals: Tensor | None = None, mark: int = 0) -> tuple[Tensor | None, bool]:
        """After the last backward of a step: drop the gradients of parameters that no rank used. A collective.

        totals: fp64 numbers to sum over all ranks in the same message; returned, with whether all have the same `mark`, below 2**31
        raises: UnitError, on all ranks, when they have not gathered the same sections in the same order
        """
        names = [name for gradient in self.gradients() for name in gradient.unit.params]
        used = {name for gradient in self.gradients() for name in gradient.used}
        flags = [name in used for name in names]
        order_hash = self.forward_backward.calls.order_hash   # alike where the largest is the least: minus the largest of the negative
        (most, least, high, low), flags, totals = combine_facts([order_hash, -order_hash, mark, -mark], flags, totals, self.group)
        (differ, high, low), flags, totals = combine_facts([most != -least, high, low], flags, totals, self.replicas)
        self.forward_backward.calls.end_step(self.group.world_rank, alike=not differ)
        anywhere = {name for name, flag in zip(names, flags) if flag}
        for host in {unit.host for unit in self.units if unit.host}:
            host.wait()
        for gradient in self.gradients():
            gradient.keep_used(anywhere)
        return totals, high == -low

    # ------------------------------------------------------------------ the update

    def wait_for_readers(self) -> None:
        """Before an update: where ranks share memory, wait until none reads the old values any more. There it is a collective."""
        if any(unit.common for unit in self.units):
            self.group.barrier(label="before the update")

    def expect_published(self, how: str, remedy: str) -> None:
        """Raise UnitError when slices were changed, but not published. how, remedy: for the message, see `Unit`"""
        for unit in self.units:
            unit.expect_published(how, remedy)

    def publish(self) -> None:
        """After an update of the slices: renew the parameters. Start to gather those that stay in memory."""
        for unit in self.units:
            unit.publish()
        self._gather_kept()

    def _gather_kept(self) -> None:
        for section in self.sections:
            if all(unit.stays for unit in section.units):
                section.start_gather()

    # ------------------------------------------------------------------ forwards without gradients

    def make_ready(self) -> None:
        """Gather all sections, for code that reads the whole model. A collective."""
        for section in self.sections:
            section.make_ready()

    @property
    def gathers_in_forward(self) -> bool:
        """Whether a forward gathers parameters from other ranks, which makes it a collective."""
        return self.group.size > 1 and self.gathering.reshards

    @contextmanager
    def followed(self, on: bool) -> Iterator[None]:
        """Forwards inside direct the ranks that `follow`. A collective, if on. The root is not released: a loss may read it."""
        with temporarily(self.guide, leads=on), temporarily(self.forward_backward, releases_root=False):
            yield
        if on:
            self.guide.tell_end()
            self.forward_backward.forget_order()
        elif self.gathering.reshards:
            self.forward_backward.release()

    def follow(self) -> None:
        """Take part in a forward without gradients that other ranks run: gather and release as they announce, run experts for them."""
        self.guide.follow(self.sections)
        self.forward_backward.forget_order()
