"""The words of a pipeline schedule: actions, and what each action waits for.

A model is cut into stages 0..s-1; a rank holds one or several. The action `F3@1` is the forward of micro-batch 3 through stage 1; `F3` will
do where the rank holds one stage. A schedule is a list of actions for each rank, written one rank a line. Read schedules.py after this.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rankloom.base.errors import ConfigError, did_you_mean

MEANING = {
    "F": "forward", "B": "backward, both parts", "I": "backward towards the input", "W": "backward towards the weights",
    "SEND_F": "send the output on", "RECV_F": "wait for the input", "SEND_B": "send the gradient of the input back",
    "RECV_B": "wait for the gradient of the output", "GATHER": "make the stage's parameters whole",
    "REDUCE": "the stage's gradients are finished: sum them over replicas",
}
COMPUTES = ("F", "B", "I", "W")
WHOLE_STAGE = ("GATHER", "REDUCE")   # actions without a micro-batch
OWN = -1                             # stands for the rank's only stage; `Schedule.of` fills in its number


class Action(NamedTuple):
    """One thing that one rank does.

    >>> Action("F", stage=1, microbatch=3), Action("REDUCE", stage=1), Action("F", microbatch=3)
    (F3@1, REDUCE@1, F3)
    """

    kind: str
    stage: int = OWN
    microbatch: int | None = None

    def __repr__(self) -> str:
        return f"{self.kind}{'' if self.microbatch is None else self.microbatch}{'' if self.stage == OWN else f'@{self.stage}'}"


def parse_action(text: str) -> Action:
    """The reverse of `repr`. raises: ConfigError

    >>> parse_action("SEND_F12@3")
    SEND_F12@3
    """
    match = re.fullmatch(r"([A-Z_]+)(\d{0,9})(?:@(\d{1,9}))?", text)
    if not match or (match[1] in WHOLE_STAGE) == bool(match[2]):
        raise ConfigError(f"action {text!r}: expected a kind, a micro-batch and a stage, such as F3@1, or F3 where the rank has one stage; "
                          "GATHER@1 and REDUCE@1 have no micro-batch")
    if match[1] not in MEANING:
        raise ConfigError(f"action {text!r}: there is no kind {match[1]!r}. {did_you_mean(match[1], MEANING)}")
    return Action(match[1], int(match[3]) if match[3] else OWN, int(match[2]) if match[2] else None)


@dataclass(frozen=True)
class Schedule:
    """What every rank does, in its order.

    >>> schedule = Schedule.of([parse_action("F0"), parse_action("B0")], [parse_action("F0@1"), parse_action("B0@1")])
    >>> print(schedule)
    F0@0 B0@0
    F0@1 B0@1
    >>> schedule.stages, schedule.microbatches, schedule.owner
    (2, 1, {0: 0, 1: 1})
    """

    ranks: tuple[tuple[Action, ...], ...]

    @classmethod
    def of(cls, *ranks: Iterable[Action]) -> "Schedule":
        """From a list of actions for each rank; actions without a stage get stage `rank`."""
        return cls(tuple(tuple(action._replace(stage=rank) if action.stage == OWN else action for action in actions)
                         for rank, actions in enumerate(ranks)))

    @cached_property
    def owner(self) -> Mapping[int, int]:
        """Stage -> the rank that holds it; the last one, if a faulty schedule names several."""
        held = {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}
        return dict(sorted(held.items()))

    @cached_property
    def stages(self) -> int:
        """The number of stages."""
        return max(self.owner, default=-1) + 1

    @cached_property
    def microbatches(self) -> int:
        """How many micro-batches a step has."""
        return max((a.microbatch for actions in self.ranks for a in actions if a.microbatch is not None), default=-1) + 1

    @cached_property
    def split(self) -> frozenset[int]:
        """The stages whose backward is in two parts for at least one micro-batch."""
        return frozenset(action.stage for actions in self.ranks for action in actions if action.kind == "W")

    def held_by(self, rank: int) -> tuple[int, ...]:
        """The stages of one rank, first to last."""
        return tuple(stage for stage, owner in self.owner.items() if owner == rank)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(repr, actions)) for actions in self.ranks)


def parse_schedule(text: str) -> Schedule:
    """The reverse of `str(schedule)`: a line for each rank; # begins a comment. raises: ConfigError, with the line"""
    lines = [_parse_line(number, line.partition("#")[0].split()) for number, line in enumerate(text.splitlines(), 1)]
    schedule = Schedule.of(*filter(None, lines))
    if not schedule.ranks:
        raise ConfigError("the schedule is empty; give a line of actions for each rank, such as F0@0 F1@0 B0@0 B1@0")
    return schedule


def _parse_line(number: int, words: list[str]) -> list[Action]:
    try:
        return [parse_action(word) for word in words]
    except ConfigError as error:
        raise ConfigError(f"line {number}: {error}") from None


def finishes(action: Action) -> tuple[Action, ...]:
    """The actions that are finished when `action` is: a whole backward counts as both of its parts.

    >>> finishes(Action("B", 0, 3))
    (I3@0, W3@0)
    """
    return (action._replace(kind="I"), action._replace(kind="W")) if action.kind == "B" else (action,)


def needs(action: Action, schedule: Schedule) -> list[Action]:
    """The actions, on any rank, that must be finished before `action` may start. The only dependency rule.

    Stages on different ranks exchange messages; stages on the same rank pass tensors directly.
    """
    kind, stage, m = action
    if kind == "F":
        return [_handed_over("F", stage, stage - 1, m, schedule)] if stage else []
    if kind in ("B", "I"):
        above = [_handed_over("B", stage, stage + 1, m, schedule)] if stage < schedule.stages - 1 else []
        return [Action("F", stage, m), *above]
    if kind == "REDUCE":
        return [Action("W", stage, each) for each in range(schedule.microbatches)]
    rules = {"W": ("I", stage), "SEND_F": ("F", stage), "SEND_B": ("I", stage),
             "RECV_F": ("SEND_F", stage - 1), "RECV_B": ("SEND_B", stage + 1)}
    return [Action(*rules[kind], m)] if kind in rules else []


def _handed_over(way: str, stage: int, neighbour: int, m: int | None, schedule: Schedule) -> Action:
    if schedule.owner.get(stage) == schedule.owner.get(neighbour):
        return Action("F" if way == "F" else "I", neighbour, m)
    return Action(f"RECV_{way}", stage, m)
