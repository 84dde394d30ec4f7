"""Check a schedule before it runs: every action is done once, and there is no deadlock.

`walk` runs a schedule without computing: each rank goes as far as it can. The simulator does the same with a clock.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import accumulate, islice

from rankloom.base.errors import ConfigError
from rankloom.parallel.pipeline.actions import COMPUTES, Action, Schedule, finishes, needs
from rankloom.parallel.pipeline.passes import with_messages


def check(schedule: Schedule) -> None:
    """Raise ConfigError unless every stage does every forward and backward once, on one rank, and the schedule ends.

    To a schedule without messages, `with_messages` adds them first.
    """
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if schedule.owner[action.stage] != rank:
                raise ConfigError(f"rank {rank} does {action}, but stage {action.stage} is on rank {schedule.owner[action.stage]}: "
                                  "a stage is on one rank")
        _expect_gathered(rank, actions)
    _expect_each_once(schedule)
    schedule = with_messages(schedule)
    _expect_wanted_messages(schedule)
    for _ in walk(schedule):
        pass


def _expect_each_once(schedule: Schedule) -> None:
    """Raise unless each micro-batch goes forward and backward once through each stage."""
    actions_in_all = sum(map(len, schedule.ranks))
    stages, microbatches = schedule.stages, schedule.microbatches
    if stages * microbatches > actions_in_all:   # too many are missing to list
        raise ConfigError(f"{actions_in_all} actions cannot be those of {stages} stages and {microbatches} micro-batches, as the "
                          "largest numbers say: both are counted from 0, and each micro-batch goes forward and backward through each stage")
    done = Counter(part for actions in schedule.ranks for action in actions for part in finishes(action))
    wanted = {Action(kind, stage, m) for kind in ("F", "I", "W") for stage in range(stages) for m in range(microbatches)}
    missing = sorted(wanted - done.keys(), key=str)
    if missing:
        raise ConfigError(f"{_listed(missing)} missing: every micro-batch goes forward and backward (B, or I and W) through every stage")
    twice = sorted((action for action, times in done.items() if times > 1 and action.kind != "GATHER"), key=str)
    if twice:
        raise ConfigError(f"{_listed(twice)} done more than once; note that B is I and W in one")


def _expect_wanted_messages(schedule: Schedule) -> None:
    """Raise for a send that no other rank receives."""
    receives = [action for actions in schedule.ranks for action in actions if action.kind.startswith("RECV")]
    received = {sent for action in receives for sent in needs(action, schedule)
                if schedule.owner.get(sent.stage) != schedule.owner[action.stage]}
    for rank, actions in enumerate(schedule.ranks):
        unwanted = [action for action in actions if action.kind.startswith("SEND") and action not in received]
        if unwanted:
            raise ConfigError(f"rank {rank}: no other rank receives {unwanted[0]}; stages of one rank pass tensors without messages")


def walk(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """(rank, action) in an order in which no action waits: each rank in turn, as far as it can.

    raises: ConfigError for a deadlock, with the cycle
    """
    done: set[Action] = set()
    at = [0] * len(schedule.ranks)
    ready = deque(range(len(schedule.ranks)))
    waiting: defaultdict[Action, list[int]] = defaultdict(list)   # action -> ranks that wait for it
    while ready:
        rank = ready.popleft()
        for action in islice(schedule.ranks[rank], at[rank], None):
            missing = [need for need in needs(action, schedule) if need not in done]
            if missing:
                waiting[missing[0]].append(rank)
                break
            yield rank, action
            at[rank] += 1
            for part in finishes(action):
                done.add(part)
                ready.extend(waiting.pop(part, ()))
    blocked = {rank: actions[at[rank]:] for rank, actions in enumerate(schedule.ranks) if at[rank] < len(actions)}
    if blocked:
        raise ConfigError(_explain_deadlock(schedule, blocked, done))


def _explain_deadlock(schedule: Schedule, blocked: dict[int, tuple[Action, ...]], done: set[Action]) -> str:
    """Follow from each rank to the one it waits for, until a rank comes again: that is the cycle."""
    rank = next(iter(blocked))
    links: dict[int, tuple[int, str]] = {}
    while rank not in links:
        head = blocked[rank][0]
        missing = next(need for need in needs(head, schedule) if need not in done)
        other = next((r for r, left in blocked.items() if any(missing in finishes(a) for a in left)), None)
        if other is None:
            return f"rank {rank} waits in {head} for {missing}, which no rank does"
        links[rank] = (other, f"rank {rank} is at {head} and waits for {missing}, which rank {other} does after {blocked[other][0]}")
        rank = other
    cycle: list[str] = []
    start = rank
    while not cycle or rank != start:
        rank, link = links[rank]
        cycle.append(link)
    return "deadlock: " + "; ".join(cycle)


def _expect_gathered(rank: int, actions: Iterable[Action]) -> None:
    """Raise when a stage computes that is not the one gathered last, in a schedule that gathers."""
    actions = tuple(actions)
    if not any(action.kind == "GATHER" for action in actions):
        return
    whole = None
    for action in actions:
        if action.kind == "GATHER":
            whole = action.stage
        if action.kind in COMPUTES and action.stage != whole:
            raise ConfigError(f"rank {rank} does {action} while its stage is not whole: put GATHER@{action.stage} before it")


def peak_live(actions: Iterable[Action]) -> int:
    """The most activations that a rank holds at a time, in units of one stage and micro-batch. The backward towards the weights frees them.

    >>> peak_live([Action("F", 0, 0), Action("F", 0, 1), Action("I", 0, 0), Action("F", 0, 2)])
    3
    """
    change = {"F": 1, "B": -1, "W": -1}
    return max(accumulate((change.get(action.kind, 0) for action in actions), initial=0))


def _listed(actions: list[Action]) -> str:
    """The first few of them, and the verb: `F0@1 is`, `F0@1, F0@2 are`."""
    shown = ", ".join(map(str, actions[:4])) + (f" and {len(actions) - 4} more" if len(actions) > 4 else "")
    return f"{shown} {'is' if len(actions) == 1 else 'are'}"
