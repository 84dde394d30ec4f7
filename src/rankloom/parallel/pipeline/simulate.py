"""Simulate a schedule, with a time for every action: when does each rank compute, and when does it wait?

A message leaves as soon as its contents are finished, keeps the sender busy for `send` seconds, and arrives `message` seconds after that.
"""

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from rankloom.base.errors import ConfigError
from rankloom.parallel.pipeline.actions import COMPUTES, Action, Schedule, finishes, needs
from rankloom.parallel.pipeline.check import peak_live, walk
from rankloom.parallel.pipeline.passes import with_messages


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, or any other unit, of each part of each stage, for one micro-batch.

    >>> Costs.even(stages=2, weight=0.5).of(Action("B", 1, 0))
    1.5
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]      # backward towards the input
    weight: tuple[float, ...]     # backward towards the weights
    message: float = 0.0          # from one rank to another, after the sender is done with it
    send: float = 0.0             # that a message keeps its sender busy

    def __post_init__(self) -> None:
        costs_of = {"forward": self.forward, "input": self.input, "weight": self.weight, "message": (self.message,), "send": (self.send,)}
        if len({len(self.forward), len(self.input), len(self.weight)}) > 1:
            raise ConfigError(f"costs of {len(self.forward)} stages forward, {len(self.input)} for the input and {len(self.weight)} for "
                              "the weights: expected one cost of each kind for each stage")
        for kind, costs in costs_of.items():
            for cost in costs:
                if not 0 <= cost < inf:
                    raise ConfigError(f"a cost of kind {kind} is {cost:g}: expected each a number, and none below 0")
        if self.forward and not sum((*self.forward, *self.input, *self.weight)):
            raise ConfigError("costs of 0 for everything leave nothing to draw; give some time to F, I or W")

    @classmethod
    def even(cls, stages: int, *, forward: float = 1.0, input: float = 1.0, weight: float = 1.0, message: float = 0.0) -> "Costs":
        """Costs that are the same for each stage."""
        return cls((forward,) * stages, (input,) * stages, (weight,) * stages, message)

    def of(self, action: Action) -> float:
        """How long an action keeps its rank busy."""
        if action.kind.startswith("SEND"):
            return self.send
        table = {"F": self.forward, "I": self.input, "W": self.weight}
        return sum(table[part.kind][action.stage] for part in finishes(action) if part.kind in table)


class TimeSlot(NamedTuple):
    """An action, and when its rank does it."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank did what."""

    schedule: Schedule
    slots: tuple[TimeSlot, ...]       # of actions that take time, rank by rank, in order

    @cached_property
    def by_rank(self) -> tuple[tuple[TimeSlot, ...], ...]:
        """The slots of each rank."""
        return tuple(tuple(slot for slot in self.slots if slot.rank == rank) for rank in range(len(self.schedule.ranks)))

    @cached_property
    def makespan(self) -> float:
        """When the last rank has ended."""
        return max(slot.end for slot in self.slots)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(sum(slot.end - slot.start for slot in slots) for slots in self.by_rank)

    @property
    def bubble(self) -> float:
        """The share of time that ranks wait, if all begin and end a step together."""
        return 1 - sum(self.busy) / (self.makespan * len(self.busy))

    @property
    def own_bubble(self) -> float:
        """The share of time that ranks wait if each starts its next step at once: the rank with the longest slot then sets the pace."""
        longest = max(slots[-1].end - slots[0].start for slots in self.by_rank)
        return 1 - sum(self.busy) / len(self.busy) / longest

    @property
    def peaks(self) -> tuple[int, ...]:
        """The most activations that each rank holds, in units of one stage and micro-batch."""
        return tuple(peak_live(actions) for actions in self.schedule.ranks)


def simulate_schedule(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of a schedule. raises: ConfigError for a deadlock, or costs of another number of stages"""
    if len(costs.forward) != schedule.stages:
        raise ConfigError(f"the costs are of {len(costs.forward)} stages, the schedule has {schedule.stages}")
    schedule = with_messages(schedule)
    ended: dict[Action, float] = {}
    clock = [0.0] * len(schedule.ranks)
    slots = []
    for rank, action in walk(schedule):
        start = max([clock[rank], *(ended[need] for need in needs(action, schedule))])
        end = start + costs.of(action)
        on_its_way = costs.message if action.kind.startswith("SEND") else 0.0
        ended.update(dict.fromkeys(finishes(action), end + on_its_way))
        clock[rank] = end
        if action.kind in COMPUTES:
            slots.append(TimeSlot(rank, action, start, end))
    return Timeline(schedule, tuple(sorted(slots, key=lambda slot: (slot.rank, slot.start))))
