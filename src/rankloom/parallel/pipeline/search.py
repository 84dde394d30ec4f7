"""Zero-bubble schedules for measured costs: simulate the ranks, and let each choose its next action whenever it is free.

The hand-made schedules assume that forward and both parts of the backward take equally long. Where they do not, or messages take time, a
schedule found for the real costs waits less. Source: Qi et al. 2023, ZB-1p and ZB-2p; the rules here are simpler than theirs.
"""

from collections import Counter
from heapq import heappop, heappush

from rankloom.base.errors import ConfigError
from rankloom.parallel.pipeline.actions import Action, Schedule
from rankloom.parallel.pipeline.schedules import SCHEDULES, expect_whole_numbers, make_schedule
from rankloom.parallel.pipeline.simulate import Costs, simulate_schedule

SEARCHED = {"zb-1p": 1.0, "zb-2p": 2.0}   # names, and memory as a multiple of that of 1F1B
PATIENCE = (0.0, 0.5, 1.0)


def search_zero_bubble(costs: Costs, microbatches: int, memory: float = 2.0) -> Schedule:
    """The schedule with the least `own_bubble` of a few with one stage on each rank, hand-made ones among them; of several, the shortest.

    memory: rank r keeps at most memory * (p - r) whole activations, where 1F1B keeps p - r. Those that wait for their weight gradients only
            are not counted
    bubble: with memory = 2 nearly none, if there are enough micro-batches and a rank starts its next step at once
    raises: ConfigError
    """
    if memory < 1 or microbatches < 1 or not costs.forward:
        raise ConfigError(f"memory {memory:g}, {microbatches} micro-batches, {len(costs.forward)} stages: expected 1 or more of each; "
                          "memory 1 is what 1F1B needs")
    schedules = [_Search(costs, microbatches, memory, patience).run() for patience in PATIENCE]
    schedules += [make_schedule(name, len(costs.forward), microbatches) for name in ("zb-h1", "zb-h2")[:int(memory)]]

    def waiting(schedule: Schedule) -> tuple[float, float]:
        timeline = simulate_schedule(schedule, costs)
        return round(timeline.own_bubble, 12), timeline.makespan

    return min(schedules, key=waiting)


def stages_a_rank(name: str, chunks: int | None) -> int:
    """How many stages each rank holds under a schedule: `chunks`; left out, as few as it allows. raises: ConfigError"""
    expect_whole_numbers(chunks=chunks or 0)
    return chunks or (SCHEDULES[name].fewest if name in SCHEDULES else 1)


def named_schedule(name: str, stages: int, microbatches: int, chunks: int | None = None, costs: Costs | None = None) -> Schedule:
    """Any schedule that `rankloom schedule list` knows, without communication.

    costs:  of the stages, for searched schedules; left out, all take equally long
    raises: ConfigError
    """
    expect_whole_numbers(stages=stages, microbatches=microbatches)
    if name not in SEARCHED:
        return make_schedule(name, stages, microbatches, chunks, others=SEARCHED)
    if chunks not in (None, 1):
        raise ConfigError(f"schedule {name!r} with {chunks} stages on each rank: it is made for 1")
    return search_zero_bubble(costs or Costs.even(stages), microbatches, SEARCHED[name])


class _Search:
    """One simulated run.

    A free rank goes backward if a gradient is there, else forward if it may keep another activation, else it computes weight gradients.
    But it waits if a gradient arrives before a share (`patience`) of that action would be over.
    """

    def __init__(self, costs: Costs, microbatches: int, memory: float, patience: float):
        self.costs, self.microbatches, self.patience = costs, microbatches, patience
        self.last = len(costs.forward) - 1
        self.limits = [int(memory * (self.last + 1 - rank)) for rank in range(self.last + 1)]
        self.actions: list[list[Action]] = [[] for _ in self.limits]
        self.done = [Counter[str]() for _ in self.limits]
        self.free = [0.0] * len(self.limits)
        self.ends: dict[Action, float] = {}
        self.wake = [(0.0, rank) for rank in range(len(self.limits))]

    def run(self) -> Schedule:
        """The whole step: wake ranks that may have something to do, in the order of time."""
        while self.wake:
            now, rank = heappop(self.wake)
            if self.free[rank] <= now and (kind := self._choose(rank, now)):
                self._begin(Action(kind, rank, self.done[rank][kind]), now)
        return Schedule.of(*self.actions)

    def _begin(self, action: Action, now: float) -> None:
        rank, end = action.stage, now + self._takes(action.kind, action.stage)
        self.done[rank][action.kind] += 1
        self.actions[rank].append(action)
        self.free[rank] = self.ends[action] = end
        heappush(self.wake, (end, rank))
        other = rank + {"F": 1, "I": -1, "W": 0}[action.kind]
        if 0 <= other <= self.last:
            heappush(self.wake, (end + self.costs.message, other))

    def _takes(self, kind: str, rank: int) -> float:
        """How long an action and the message that it leads to keep the rank busy."""
        sends = (kind == "F" and rank < self.last) or (kind == "I" and rank > 0)
        return self.costs.of(Action(kind, rank, 0)) + (self.costs.send if sends else 0.0)

    def _choose(self, rank: int, now: float) -> str | None:
        done, gradient = self.done[rank], self._arrival(rank, "I")
        if gradient <= now:
            return "I"
        choices = []
        if done["F"] - done["I"] < self.limits[rank] and self._arrival(rank, "F") <= now:
            choices.append("F")
        if done["W"] < done["I"]:
            choices.append("W")
        return next((kind for kind in choices if gradient >= now + self.patience * self._takes(kind, rank)), None)

    def _arrival(self, rank: int, kind: str) -> float:
        """When the next forward or backward could begin; infinity where that is not known yet."""
        number = self.done[rank][kind]
        if number == self.microbatches or (kind == "I" and number == self.done[rank]["F"]):
            return float("inf")
        if (kind, rank) == ("F", 0):
            return 0.0
        own = Action("F", rank, number)
        if (kind, rank) == ("I", self.last):
            return self.ends[own]
        before = Action(kind, rank - 1 if kind == "F" else rank + 1, number)
        return self.ends.get(before, float("inf")) + self.costs.message
