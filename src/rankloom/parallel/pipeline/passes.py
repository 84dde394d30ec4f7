"""Passes: each makes a longer list of actions from a list. They add communication, so that no schedule needs a flag for it."""

from collections.abc import Callable, Iterable, Mapping

from rankloom.parallel.pipeline.actions import COMPUTES, Action, Schedule, finishes

Pass = Callable[[list[Action]], list[Action]]


def apply_pass(schedule: Schedule, change: Pass) -> Schedule:
    """The schedule with every rank's list changed."""
    return Schedule.of(*(change(list(actions)) for actions in schedule.ranks))


def with_messages(schedule: Schedule) -> Schedule:
    """The schedule with sends and receives; unchanged if it has some."""
    if any(action.kind.startswith(("SEND", "RECV")) for actions in schedule.ranks for action in actions):
        return schedule
    return apply_pass(schedule, lambda actions: add_messages(actions, schedule.owner))


def send_gradients_first(schedule: Schedule) -> Schedule:
    """Compute weight gradients only after the input gradient has left for another rank: the other rank can start earlier.

    bubble: of 1F1B and GPipe (p-1)(F + I) in place of (p-1)(F + I + W)
    keeps:  the factors of one micro-batch's weight gradients, a moment longer

    >>> print(send_gradients_first(Schedule.of([Action("F", 0, 0), Action("B", 0, 0)], [Action("F", 1, 0), Action("B", 1, 0)])))
    F0@0 B0@0
    F0@1 I0@1 W0@1
    """
    def in_parts(action: Action) -> tuple[Action, ...]:
        here = schedule.owner[action.stage]
        leaves = action.kind == "B" and schedule.owner.get(action.stage - 1, here) != here
        return finishes(action) if leaves else (action,)

    return apply_pass(schedule, lambda actions: [part for action in actions for part in in_parts(action)])


def add_messages(actions: Iterable[Action], owner: Mapping[int, int]) -> list[Action]:
    """Add a receive right before the action that needs it, and a send right after the one that makes it; none between stages of one rank.

    >>> add_messages([Action("F", 1, 0), Action("B", 1, 0)], {0: 0, 1: 1, 2: 0})
    [RECV_F0@1, F0@1, SEND_F0@1, RECV_B0@1, B0@1, SEND_B0@1]
    """
    longer: list[Action] = []
    for action in actions:
        way = {"F": "F", "B": "B", "I": "B"}.get(action.kind)
        here, source, target = action.stage, action.stage - 1, action.stage + 1
        if way == "B":
            source, target = target, source
        if way and owner.get(source, owner[here]) != owner[here]:
            longer.append(action._replace(kind=f"RECV_{way}"))
        longer.append(action)
        if way and owner.get(target, owner[here]) != owner[here]:
            longer.append(action._replace(kind=f"SEND_{way}"))
    return longer


def add_gathers(actions: Iterable[Action]) -> list[Action]:
    """Gather a stage's parameters before a rank switches to it. Only the stage gathered last is whole.

    The fewer switches, the fewer gathers: breadth-first gathers twice a stage and step, 1F1B over several stages often.

    >>> add_gathers([Action("F", 0, 0), Action("F", 0, 1), Action("F", 2, 0)])
    [GATHER@0, F0@0, F1@0, GATHER@2, F0@2]
    """
    longer: list[Action] = []
    whole = None
    for action in actions:
        if action.kind in COMPUTES and action.stage != whole:
            whole = action.stage
            longer.append(Action("GATHER", whole))
        longer.append(action)
    return longer


def add_reductions(actions: Iterable[Action]) -> list[Action]:
    """After the last backward of a stage, sum its gradients over replicas, while other stages still compute.

    >>> add_reductions([Action("B", 2, 0), Action("B", 0, 0), Action("SEND_B", 0, 0)])
    [B0@2, REDUCE@2, B0@0, REDUCE@0, SEND_B0@0]
    """
    actions = list(actions)
    last = {action.stage: place for place, action in enumerate(actions) if action.kind in ("B", "W")}
    longer: list[Action] = []
    for place, action in enumerate(actions):
        longer.append(action)
        if last.get(action.stage) == place:
            longer.append(Action("REDUCE", action.stage))
    return longer
