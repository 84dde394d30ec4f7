"""Forward and backward of a sharded model: sections are gathered when they are called, and their gradients reduced while backward goes on.

Communication plan of stage 3, for sections 0 (the root), 1, 2 ... in the order of their calls:

    forward     gather 0
                before i: wait until i is gathered, prefetch i+1
                after i: release it (0 stays)
    backward    before i: start to reduce-scatter the sections whose backward is over, release them,
                          wait until i is gathered, prefetch the one called before it
    end         reduce the sections that are left, release 0

Prefetching follows the order of calls in the last pass. Reductions follow an order that ranks have agreed on: ranks may take different
branches, but collectives must match. At stages 1 and 2 nothing is released, and each section is gathered once, after the update.

With `Reducing.EACH_TIME` gradients are accumulated unreduced, at full size, in sections that are reduced once a step.
Read section.py before this file, and sharding.py after it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import UnitError
from rankloom.base.hooks import hook_before_others, hook_gradient
from rankloom.parallel.sections.call_order import Calls
from rankloom.parallel.sections.follow import Guide
from rankloom.parallel.sections.reduction_order import Reducing, ReductionQueue
from rankloom.parallel.sections.section import Section, SectionHook, gradients_of, inside_of_transform
from rankloom.parallel.sections.wrapping import tensors_in
from rankloom.shard.gradient import BufferPool
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

    reshards: a section is released between its forward and its backward, unless all its memory stays
    near:     the neighbours over whom it is cut meanwhile; None: all ranks of the shard axis
    ahead:    how many sections are prefetched while one is in use
    hooked:   hooks on modules gather and reduce; else the caller does, by `make_ready` and `collect`
    """

    reshards: bool
    near: Group | None
    ahead: int
    hooked: bool


class ForwardBackward:
    """Moves the sections of one model on one rank through forward and backward, by hooks on modules and gradients.

    sections:      the root first
    rank:          of the world, for messages
    queue:         starts reductions in the order that ranks have agreed on
    guide:         directs ranks that follow a forward (follow.py)
    pool:          buffers of whole gradients
    reducing:      which sections a backward reduces
    releases_root: after a forward without gradients
    calls:         in which order sections are called
    on_moment:     called when a backward begins, and when it has ended
    """

    def __init__(self, sections: Sequence[Section], rank: int, gathering: Gathering, *, queue: ReductionQueue, guide: Guide,
                 pool: BufferPool):
        self.sections, self.rank, self.gathering, self.guide = sections, rank, gathering, guide
        self.reducing, self.releases_root = Reducing.ALL, True
        self.calls = Calls()
        self.on_moment: Callable[[Moment], None] | None = None
        self._queue, self._pool, self._moment = queue, pool, Moment.IDLE
        if gathering.reshards:
            sections[0].gather_for_part = self._gather_root
        for section in sections if gathering.hooked else ():
            self._watch(section)

    def begin(self) -> None:
        """The root is called, or will be. After a backward, or a forward without one, a new pass begins."""
        if self._moment is Moment.BACKWARD:
            if torch._C._current_graph_task_id() != -1:   # backward recomputes the whole model
                return
            self.abandon()   # the last backward raised
        for gradient in gradients_of(self.sections):
            gradient.give_back()
        if self._moment is Moment.AFTER_BACKWARD or not any(section.pending for section in self.sections):
            for section in self.sections:
                section.forget_pass()
            self.calls.begin_pass()
        self._moment = Moment.FORWARD

    @property
    def is_over(self) -> bool:
        """Whether a backward has ended since the pass began."""
        return self._moment is Moment.AFTER_BACKWARD

    def abandon(self) -> None:
        """Drop all gradients, and clean up after a backward that raised."""
        self._moment = Moment.IDLE
        for gradient in gradients_of(self.sections):
            gradient.abandon()
        for section in self.sections:
            section.forget_pass()
            section.depth = 0   # a forward that raised has left it above 0, maybe not on every rank
        self.calls.order_hash = 0
        self.release()

    def release(self) -> None:
        """Release all sections."""
        for section in self.sections:
            section.release()

    def forget_order(self) -> None:
        """Ranks have seen different passes: prefetch by none of them."""
        if self.gathering.reshards:
            self.release()
        self.calls = Calls()

    # ------------------------------------------------------------------ forward

    def _watch(self, section: Section) -> None:
        before, after = map(torch.compiler.disable, (self._before_forward, self._after_forward))   # users may compile modules
        section.module.register_forward_pre_hook(SectionHook(before, section), prepend=True)   # other hooks may read parameters
        section.module.register_forward_hook(SectionHook(after, section))
        for number, gradient in enumerate(section.gradients):
            for name, param in gradient.unit.params.items():
                hook_gradient(param, self._landed, self._queue.numbers[section], number, name)
        section.watch_parts()

    def _before_forward(self, section: Section, module: nn.Module, args: Any) -> None:
        """Gather the section that is about to run, and prefetch those that were called after it in the last pass."""
        if section is self.sections[0] or self.is_over:   # a block may be called without the root
            self.begin()
        section.expect_own_parameters()
        if (self.gathering.reshards or section.is_away) and inside_of_transform():
            raise UnitError(f"rank {self.rank}: the model is called inside of torch.func (vjp, jvp, vmap ...), whose graph "
                            "reads parameters that are released; keep them: a stage below 3")
        if self._moment is Moment.BACKWARD:
            self._settle_before(section)
        self._gather(section)
        self.calls.ahead.pop(section, None)
        if self._moment is Moment.BACKWARD:   # activation checkpointing recomputes it
            return
        section.depth += 1
        self.calls.note(section)
        following = [] if self.guide.leads else self.calls.following(self.gathering.ahead)
        for other in self.calls.take_gathered_in_vain(following):
            other.release()
        for other in following:
            self.calls.note_gather_ahead(other)
            other.start_gather()

    def _gather(self, section: Section) -> None:
        """Wait until the section is gathered. A gather is a collective, so announce it to ranks that follow this forward."""
        if section.is_away:
            self.guide.tell_section(self._queue.numbers[section])
            self.calls.note_gather(section)
        section.make_ready()

    def _gather_root(self) -> bool:
        """For a part of the model that is called by itself. Returns whether the root is released after that."""
        self._gather(self.sections[0])
        return self.releases_root

    def _after_forward(self, section: Section, module: nn.Module, args: Any, output: Any) -> None:
        """Release the section. Hooks on what it returned will say when its backward begins."""
        if self._moment is Moment.BACKWARD:
            return
        section.depth = max(0, section.depth - 1)
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad] if torch.is_grad_enabled() else []
        if tensors:
            section.pending += 1
            hook_before_others(tensors, partial(self._before_backward, section))
        if section.depth:
            return
        if self.gathering.reshards and section is not self.sections[0]:
            section.expect_none_of(tensors_in(output))
            section.release(self.gathering.near if tensors else None)
        elif self.gathering.reshards and self.releases_root and not tensors:
            section.expect_none_of(tensors_in(output))
            self.release()

    # ------------------------------------------------------------------ backward

    def run_backward(self, loss: Tensor) -> None:
        """The backward of a loss. Hooks may take gradients inside of it, even before it has come to the model (`torch.autograd.grad`)."""
        with self.calls.noting_backward_of(loss) as told:
            told.backward()
        if self._moment is Moment.BACKWARD:   # it began inside of another, so autograd does not tell its end
            self.end_backward()

    def _before_backward(self, section: Section, gradient: Tensor) -> None:
        """Settle and release the sections whose backward is over, gather this one again, and prefetch those called before it."""
        if inside_of_transform():   # of torch.func, which sets no `.grad`; there parameters stay (`_before_forward`)
            section.pending = max(0, section.pending - 1)
            return
        if self.gathering.reshards and torch.is_grad_enabled():
            raise UnitError(f"rank {self.rank}: a backward with create_graph=True leaves a graph that reads parameters that "
                            "are released; keep them: reshard_after_forward=False, or a stage below 3")
        self._enter_backward()
        section.pending = max(0, section.pending - 1)
        over = self._settle_before(section)
        for other in over if self.gathering.reshards else ():
            other.release()
        self.calls.finish(section, over)
        self._gather(section)
        for previous in self.calls.before(section, self.gathering.ahead):
            if not (previous.settled and previous.may_go_early) and not self.guide.leads:
                self.calls.note_gather(previous)
                previous.start_gather()

    def _settle_before(self, section: Section) -> list[Section]:
        """Settle the sections whose backward is over when this one's begins, and that await no more gradients. Returns all that are over:
        none, inside of another backward.

        Gathers and reductions must have one order on all ranks, and all ranks come here alike. So a section is not settled when its last
        gradient lands: when that is depends on which parameters a rank has used.
        """
        over = [] if self.calls.inside_backward else self.calls.over(section)
        for other in over:
            if not other.settled and not other.awaits_more():
                self._settle(other)
        return over

    def _landed(self, at: int, number: int, name: str, param: nn.Parameter) -> None:
        """Backward has left a gradient in `param.grad`, one of `sections[at].gradients[number]`."""
        self._enter_backward()
        section = self.sections[at]
        if section.settled:
            raise UnitError(f"rank {self.rank}: a gradient of {name} came after section {section.name or 'root'} was reduced; "
                            "a reentrant checkpoint around several sections does that: give it use_reentrant=False")
        section.gradients[number].land(name, param)
        section.waiting_for.discard(name)

    def _enter_backward(self) -> None:
        """Called by every hook in a backward; the first call begins it."""
        if self._moment is Moment.BACKWARD:
            return
        for section in self.sections:
            section.enter_backward()
        if self.calls.begin_backward(self.sections):
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        self._moment = Moment.BACKWARD
        if self.on_moment:
            self.on_moment(Moment.BACKWARD)
        self._queue.begin()

    def _settle(self, section: Section) -> None:
        """The section's backward is over: start the reductions that may start now."""
        section.settled = True
        for started in self._queue.settle(section, reducing=self.reducing):
            self.calls.note_reduction(started)

    def collect(self) -> None:
        """Where nothing is hooked, after the last backward of a step: land what is in `.grad`, and reduce."""
        for gradient in gradients_of(self.sections):
            for name, param in gradient.unit.params.items():
                if param.grad is not None:
                    gradient.land(name, param)
        self._moment = Moment.FORWARD
        self.end_backward()

    def end_backward(self) -> None:
        """Reduce the sections that are left, and release all. Autograd calls this when a backward ends; a second call does nothing."""
        if self._moment is Moment.AFTER_BACKWARD:
            return
        self._enter_backward()
        for section in reversed(self.sections):
            section.depth = 0   # as in `abandon`
            if not section.settled:
                self._settle(section)
        if self.reducing is not Reducing.NOTHING:
            self._queue.learn()
        self._pool.finish_all()
        if self.gathering.reshards:
            self.release()
        self._moment = Moment.AFTER_BACKWARD
        if self.on_moment:
            self.on_moment(Moment.AFTER_BACKWARD)
