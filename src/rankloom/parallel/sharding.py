"""Sharding over a step: sections are gathered when they are called, and their gradients leave while backward goes on.

Communication plan of stage 3, for sections 0 (the root), 1, 2 ... in the order of their calls:

    forward     gather 0;  before i: wait until i is gathered, start to gather i+1;    after i: let i go (0 stays)
    backward               before i: let go what was called after it, wait until i is gathered, start to gather what was called before it;
                           start to reduce-scatter the gradients of what that was, for they have landed
    end         reduce what no gradient came for, let 0 go, agree which parameters were used anywhere

At stages 1 and 2 nothing is let go, and after the update each section is gathered once. The order of calls is that of the last pass;
the order of reductions is agreed on, for ranks may have branches of their own, and collectives must match.

An accumulating backward (`sync(False)`) only lands gradients, and those of whole sections stay in memory.
Read parallel/sections.py before this file; parallel/zero.py has the table of stages, parallel/fully_shard.py a front door of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import UnitError
from rankloom.base.hooks import hook_gradient
from rankloom.base.modes import run_together
from rankloom.base.scoped import temporarily
from rankloom.parallel.agree import max_of_flags_and_sum
from rankloom.parallel.call_order import Calls
from rankloom.parallel.follow import ENDED, LAYER, Guide
from rankloom.parallel.reduction_order import Queue
from rankloom.parallel.sections import Section, inside_of_transform, is_inside, is_over, make_gradients
from rankloom.parallel.wrapping import tensors_in
from rankloom.shard.frames import Frames
from rankloom.shard.gradient import Gradient
from rankloom.shard.unit import Unit
from rankloom.world.group import Group


class Moment(Enum):
    """Where in a step the model is."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    AFTER_BACKWARD = "after backward"


@dataclass(frozen=True, slots=True)
class Gathering:
    """When sections are in memory.

    let_go: a section leaves memory between its forward and its backward
    near:   ranks among which it stays cut meanwhile, if not among all
    ahead:  how many sections may be on their way while one is in use
    hooked: sections gather and reduce as their modules run; else whoever runs a step calls `make_ready` and `collect`
    root:   the root, too, leaves memory after a forward without gradients
    """

    let_go: bool = True
    near: Group | None = None
    ahead: int = 1
    hooked: bool = True
    root: bool = True


@dataclass(frozen=True, slots=True)
class ExpertReplicas:
    """Parameters of experts, whose gradients are summed over replicas of their own, beside the shard axis.

    together: the ranks of the shard axis, and those to which a forward sends rows
    """

    names: frozenset[str]
    replicas: Group
    together: Group

    def replicas_of(self, others: Group) -> Callable[[Unit], Group]:
        """Which group a unit's slices are summed over."""
        return lambda unit: self.replicas if self.names & unit.params.keys() else others


class Sharding:
    """The sections of one model on one rank, moved through forward and backward by hooks.

    sections:       the root first
    group:          the shard axis             replicas: ranks with the same slice
    keep_gradients: they stay whole until a step's last backward (stage 1)
    frames:         memory of what is whole for a while only
    scale:          what summed gradients are multiplied by
    experts:        parameters that are summed over other replicas
    """

    def __init__(self, sections: Sequence[Section], group: Group, replicas: Group, *, keep_gradients: bool,
                 gathering: Gathering, frames: Frames, scale: float = 1.0, experts: ExpertReplicas | None = None):
        self.sections, self.group, self.replicas, self.gathering = list(sections), group, replicas, gathering
        self.pool = make_gradients(sections, experts.replicas_of(replicas) if experts else lambda unit: replicas, keep=keep_gradients,
                                      frames=frames, scale=scale)
        self.syncing: bool | None = True   # see `sync`; None: a backward reduces nothing
        self._calls = Calls()
        self._queue = Queue(self.sections, group, replicas)
        self._moment = Moment.IDLE
        self.guide = Guide(experts.together if experts else group)   # of those who follow a forward
        self.at_end: Callable[[], None] | None = None   # called when a backward has ended
        for section in self.sections if gathering.hooked else ():
            self._watch(section)
        if self.gathers_in_forward:
            run_together(self.sections[0].module)
        self._gather_kept()

    # ------------------------------------------------------------------ for whoever runs the steps

    def sync(self, on: bool) -> AbstractContextManager[None]:
        """Whether this is a step's last backward, after which all gradients are reduced."""
        return temporarily(self, syncing=on)

    def without_reduction(self) -> AbstractContextManager[None]:
        """Backward passes inside reduce nothing: they leave this rank's own gradients, whole, whatever memory that takes."""
        return temporarily(self, syncing=None)

    def gradients(self) -> list[Gradient]:
        """Those of all units, in the order of the sections."""
        return [gradient for section in self.sections for gradient in section.gradients]

    def forget_landed(self) -> None:
        """Forget what backward passes have accumulated and nobody has reduced yet."""
        for gradient in self.gradients():
            gradient.landed.clear()

    def abandon(self) -> None:
        """Forget all gradients, and whatever a backward that died has left behind."""
        self._moment = Moment.IDLE
        for gradient in self.gradients():
            gradient.abandon()
        for section in self.sections:
            section.forget_pass()
        self._calls.order_hash = 0
        self.release()

    def agree(self, totals: Tensor | None = None) -> Tensor | None:
        """After the last backward of a step: parameters that no rank used get no gradient, the others' is where it stays. A collective.

        totals: fp64 numbers to sum over all ranks on the way; returned
        raises: UnitError, on all ranks, when some have gathered other sections than others
        """
        names = [name for gradient in self.gradients() for name in gradient.unit.params]
        used = {name for gradient in self.gradients() for name in gradient.used}
        flags = [float(name in used) for name in names]
        order_hash = float(self._calls.order_hash)
        (most, least, *flags), totals = max_of_flags_and_sum([order_hash, -order_hash, *flags], totals, self.group)
        (differ, *flags), totals = max_of_flags_and_sum([float(most != -least), *flags], totals, self.replicas)
        self._calls.end_step(self.group.world_rank, alike=not differ)
        anywhere = {name for name, flag in zip(names, flags) if flag}
        for gradient in self.gradients():
            gradient.keep_used(anywhere)
        for host in {unit.host for section in self.sections for unit in section.units if unit.host}:
            host.wait()
        return totals

    def wait_for_readers(self) -> None:
        """Before an update: where ranks share memory, wait until none of them reads the old values any more. There it is a collective."""
        if any(unit.common for section in self.sections for unit in section.units):
            self.group.barrier(label="before the update")

    def owners(self) -> dict[str, nn.Parameter]:
        """The slices that an optimizer updates, under the plain names."""
        return {name: owner for gradient in self.gradients() for name, owner in gradient.unit.owners.items()}

    def publish(self) -> None:
        """After an update of the slices: the parameters follow. Those that are kept set out at once."""
        for section in self.sections:
            for unit in section.units:
                unit.publish()
        self._gather_kept()

    def _gather_kept(self) -> None:
        for section in self.sections:
            if all(unit.stays for unit in section.units):
                section.start_gather()

    @property
    def lets_go(self) -> bool:
        """Whether parameters leave memory between a forward and its backward."""
        return self.gathering.let_go and any(not unit.stays for section in self.sections for unit in section.units)

    @property
    def gathers_in_forward(self) -> bool:
        """Whether they come from other ranks then, which makes a forward a collective."""
        return self.group.size > 1 and self.lets_go

    @contextmanager
    def followed(self, on: bool) -> Iterator[None]:
        """Forwards inside tell ranks that `follow` what they gather and send; a collective, if on. The root stays: a loss may read it."""
        with self.guide.leading(on), temporarily(self, gathering=replace(self.gathering, root=False)):
            yield
        if on:
            self._forget_order()
        elif self.gathering.let_go:
            self.release()

    def follow(self) -> None:
        """This rank's part of a forward without gradients that other ranks run: gather and let go as they say, run experts for them."""
        held: list[Section] = []
        while (told := self.guide.ask()).what != ENDED:
            if told.what == LAYER:
                self.guide.go_along(told)
                continue
            section = self.sections[told.number]
            for other in [other for other in held if other is section or not is_inside(section, other)]:
                other.release()
                held.remove(other)
            section.make_ready()
            held.append(section)
        self._forget_order()

    def _forget_order(self) -> None:
        """Ranks have seen different passes: none of them may tell what to gather ahead."""
        if self.gathering.let_go:
            self.release()
        self._calls = Calls()

    def begin_pass(self) -> None:
        """The root is called, or will be: after a backward, or a forward without one, calls are noted anew."""
        if self._moment is Moment.BACKWARD:
            if torch._C._current_graph_task_id() != -1:   # recomputed, as a whole
                return
            self.abandon()   # the last one died on its way
        for gradient in self.gradients():
            gradient.give_back()
        if self._moment is Moment.AFTER_BACKWARD or not any(section.calls for section in self.sections):
            for section in self.sections:
                section.forget_pass()
            self._calls.begin_pass()
        self._moment = Moment.FORWARD

    @property
    def is_over(self) -> bool:
        """Whether a backward has ended since the pass began."""
        return self._moment is Moment.AFTER_BACKWARD

    def make_ready(self) -> None:
        """Gather everything, for code that looks at the whole model. A collective."""
        for section in self.sections:
            section.make_ready()

    def release(self) -> None:
        """Let everything go that is not kept."""
        for section in self.sections:
            section.release()

    # ------------------------------------------------------------------ forward

    def _watch(self, section: Section) -> None:
        before, after = map(torch.compiler.disable, (self._before_forward, self._after_forward))   # who has called `module.compile()`?
        section.module.register_forward_pre_hook(partial(before, section), prepend=True)   # others may read parameters
        section.module.register_forward_hook(partial(after, section))
        for number, gradient in enumerate(section.gradients):
            for name, param in gradient.unit.params.items():
                hook_gradient(param, self._landed, self.sections.index(section), number, name)
        section.watch_parts()

    def _before_forward(self, section: Section, module: nn.Module, args: Any) -> None:
        """Gather the section that is about to run, and start to gather those that were called after it in the last pass."""
        if section is self.sections[0] or self.is_over:   # a block may be called without the root
            self.begin_pass()
        section.expect_own_parameters()
        if (self.lets_go or section.is_away) and inside_of_transform():
            raise UnitError(f"rank {self.group.world_rank}: the model is called inside of torch.func (vjp, jvp, vmap ...), whose graph "
                            "reads parameters which are let go; keep them: a stage below 3")
        if self._moment is Moment.BACKWARD:
            self._settle_before(section)
        self._gather(section)
        section.is_ahead = False
        if self._moment is Moment.BACKWARD:   # recomputed
            return
        section.depth += 1
        self._calls.note(section)
        following = [] if self.guide.leads else self._calls.following(self.gathering.ahead)
        for other in self.sections:
            if other.is_ahead and other not in following:   # the calls come in another order than last time
                other.release()
                other.is_ahead = False
        for other in following:
            self._calls.note_gather(other)
            other.gather_ahead()

    def _gather(self, section: Section) -> None:
        """Wait until the section is here; who follows this forward is told, for a gather is a collective."""
        if section.is_away:
            self.guide.tell_section(self.sections.index(section))
            self._calls.note_gather(section)
        section.make_ready()

    def _after_forward(self, section: Section, module: nn.Module, args: Any, output: Any) -> None:
        """Let the section go; a hook on what it returned tells when its backward begins."""
        if self._moment is Moment.BACKWARD:
            return
        section.depth = max(0, section.depth - 1)
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad] if torch.is_grad_enabled() else []
        if tensors:
            section.calls += 1
            # A view that is changed in place later gets another history, from its base on, and its own hook is never called.
            tensors += [tensor._base for tensor in tensors if tensor._base is not None and tensor._base.requires_grad]
            torch.autograd.graph.register_multi_grad_hook(tensors, partial(self._before_backward, section), mode="any")
        if section.depth:
            return
        if self.gathering.let_go and section is not self.sections[0]:
            section.expect_none_of(tensors_in(output))
            section.release(self.gathering.near if tensors else None)
        elif self.gathering.let_go and self.gathering.root and not tensors:
            section.expect_none_of(tensors_in(output))
            self.release()

    # ------------------------------------------------------------------ backward

    def _before_backward(self, section: Section, gradient: Tensor) -> None:
        """Settle the sections whose backward is over, gather this one again, and start to gather those that were called before it."""
        if self.lets_go and torch.is_grad_enabled():
            raise UnitError(f"rank {self.group.world_rank}: a backward with create_graph=True leaves a graph that reads parameters which "
                            "are let go; keep them: reshard_after_forward=False, or a stage below 3")
        self._enter_backward()
        section.calls = max(0, section.calls - 1)
        for other in self._settle_before(section):
            if self.gathering.let_go:
                other.release()
        self._gather(section)
        for previous in self._calls.before(section, self.gathering.ahead):
            if not (previous.settled and previous.may_go_early) and not self.guide.leads:
                self._calls.note_gather(previous)
                previous.start_gather()

    def _settle_before(self, section: Section) -> list[Section]:
        """The sections whose backward is over when that of this one begins; those that await no gradient any more are reduced.

        Here, where all ranks come by alike, and not where the last gradient lands: that depends on which parameters a rank has used, and
        what is gathered and reduced must be so in one order.
        """
        over = [other for other in self.sections if not other.calls and is_over(other, section)]
        for other in over:
            if not other.settled and not other.awaits_more():
                self._settle(other)
        return over

    def _landed(self, at: int, number: int, name: str, param: nn.Parameter) -> None:
        """Backward has left a gradient in `param.grad`, one of `sections[at].gradients[number]`."""
        self._enter_backward()
        section = self.sections[at]
        if section.settled:
            raise UnitError(f"rank {self.group.world_rank}: a gradient of {name} came after section {section.name or 'root'} was reduced")
        section.gradients[number].land(name, param)
        section.waiting_for.discard(name)

    def _enter_backward(self) -> None:
        """Once for each backward, at the first of its hooks."""
        if self._moment is Moment.BACKWARD:
            return
        if torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        self._moment = Moment.BACKWARD
        for section in self.sections:
            section.enter_backward()
        self._queue.begin()

    def _settle(self, section: Section) -> None:
        """All gradients of the section that this backward makes have landed."""
        section.settled = True
        for started in self._queue.settle(section, reduce_all=self.syncing):
            self._calls.note_reduction(started)

    def collect(self) -> None:
        """Without hooks, after the last backward of a step: land what is in `.grad`, and reduce."""
        for gradient in self.gradients():
            for name, param in gradient.unit.params.items():
                if param.grad is not None:
                    gradient.land(name, param)
        self._moment = Moment.FORWARD
        self.end_backward()

    def end_backward(self) -> None:
        """Reduce what has not been yet, and let everything go. Runs by itself when a backward ends; again, it changes nothing."""
        if self._moment is Moment.AFTER_BACKWARD:
            return
        self._enter_backward()
        for section in reversed(self.sections):
            section.depth = 0   # a forward that died has not ended
            if not section.settled:
                self._settle(section)
        if self.syncing is not None:
            self._queue.learn()
        self.pool.finish_all()
        if self.gathering.let_go:
            self.release()
        self._moment = Moment.AFTER_BACKWARD
        if self.at_end:
            self.at_end()
