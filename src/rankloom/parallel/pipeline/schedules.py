"""The known schedules, each a function from a rank to its list of actions, without communication: passes.py adds it.

p ranks, m micro-batches, v stages on each rank (`chunks`, for functions that are made for any v). With one stage a rank, actions need not
name it. Looped: rank r holds stages r, r + p, r + 2p ... Folded into a V: r and 2p - 1 - r, so that a micro-batch ends on the rank
where it began.

A schedule that needs more micro-batches than there are, or a multiple of p, is written for that number; then the actions of those that do
not exist are removed. This never causes a deadlock: each action that is left waits for fewer others.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral

from rankloom.base.errors import ConfigError, did_you_mean
from rankloom.parallel.pipeline.actions import OWN, Action, Schedule


def gpipe(stage: int, stages: int, microbatches: int) -> list[Action]:
    """All forwards, then all backwards.

    bubble: (p-1) forwards and backwards   keeps: m activations
    source: Huang et al. 2019

    >>> gpipe(stage=0, stages=2, microbatches=2)
    [F0, F1, B0, B1]
    """
    return [*_sweep("F", [OWN], microbatches), *_sweep("B", [OWN], microbatches)]


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Action]:
    """Warm up, alternate, drain.

    bubble: (p-1) forwards and backwards   keeps: at most `stages - stage` activations
    source: Harlap et al. 2018; Narayanan et al. 2021

    >>> one_f_one_b(stage=1, stages=3, microbatches=4)
    [F0, F1, B0, F2, B1, F3, B2, B3]
    """
    forwards, backwards = _sweep("F", [OWN], microbatches), _sweep("B", [OWN], microbatches)
    return _alternate(forwards, backwards, warmup=stages - stage - 1)


def breadth_first(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> list[Action]:
    """GPipe over v stages on each rank, one stage after the other.

    bubble: (p-1)/v forwards and backwards of a rank   keeps: m activations of each stage
    source: Lamy-Poirier 2023

    >>> breadth_first(rank=0, ranks=2, microbatches=2)
    [F0@0, F1@0, F0@2, F1@2, B0@2, B1@2, B0@0, B1@0]
    """
    stages = _looped(rank, ranks, chunks)
    return [*_sweep("F", stages, microbatches), *_sweep("B", stages[::-1], microbatches)]


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> list[Action]:
    """1F1B over v stages on each rank, p micro-batches at a time: a bubble v times smaller, for v times the messages.

    keeps:  at most (v-1)p + 2(p-rank) - 1 activations of one stage
    source: Narayanan et al. 2021
    """
    stages, groups = _looped(rank, ranks, chunks), range(0, microbatches, ranks)
    forwards = [a for first in groups for a in _sweep("F", stages, ranks, first)]
    backwards = [a for first in groups for a in _sweep("B", stages[::-1], ranks, first)]
    return _existing(_alternate(forwards, backwards, warmup=(chunks - 1) * ranks + 2 * (ranks - rank - 1)), microbatches)


def zero_bubble_h1(stage: int, stages: int, microbatches: int) -> list[Action]:
    """1F1B with the backward in two parts: towards the input at once, because others wait for it; towards the weights later, in a bubble.

    bubble: (p-1)(F + I - W)   keeps: p activations, of which r wait for their weight gradients only
    source: Qi et al. 2023, ZB-H1

    >>> zero_bubble_h1(stage=1, stages=2, microbatches=3)
    [F0, I0, F1, I1, W0, F2, I2, W1, W2]
    """
    return _split_backward(microbatches, warmup=stages - stage - 1, lag=stage)


def zero_bubble_h2(stage: int, stages: int, microbatches: int) -> list[Action]:
    """ZB-H1 with twice the warm-up and twice the lag of the weights: no bubble if F = I = W and a rank starts its next step at once.

    bubble: (p-1)(F + I - 2W)   keeps: 2p - 1 activations
    source: Qi et al. 2023, ZB-H2
    """
    return _split_backward(microbatches, warmup=2 * (stages - stage - 1), lag=2 * stage)


def zero_bubble_v(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Two stages on each rank, folded: as little memory as 1F1B, and no bubble if F = I = W and m >= 2p - 1.

    keeps:  2p activations of half stages   sent: twice the messages of 1F1B
    source: Qi et al. 2023, ZB-V
    """
    p, write = ranks, _Writer(rank, ranks)
    write.repeat(2 * (p - rank) - 1, "F near")          # until the first micro-batch is back from the fold
    write.repeat(rank, "F far", "F near")               # until its gradient is here
    write.repeat(p - rank, "F far", "I far", "W far")   # until its gradient is back from the fold; memory is full
    steady = max(microbatches, 2 * p - 1) - p           # far forwards that are left
    new = steady - (p - 1 - rank)                       # near forwards that are left: they are p - 1 - rank ahead
    write.repeat(new, "F near", "I near", "W near", "F far", "I far", "W far")
    write.repeat(steady - new, "I near", "W near", "F far", "I far", "W far")
    write.repeat(rank, "I near", "I far")               # no forwards are left: what others wait for goes first
    write.repeat(p - rank, "I near", "W near")
    write.repeat(rank, "W far")
    write.repeat(rank, "W near")
    return _existing(write.actions, microbatches)


def dual_pipe_v(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Two stages on each rank, folded. In the middle each backward is paired with a forward, so that their messages may overlap.

    bubble: (p-1)(F + I - W) of a half stage if F = I >= W, the two of a pair run one after the other, and m >= 2p - 1
    keeps:  2p + 1 activations of half stages
    source: DeepSeek-AI 2024 (DualPipe); cut in half by Qi et al.
    """
    p, write = ranks, _Writer(rank, ranks)
    write.repeat(2 * (p - rank - 1), "F near")              # until the first micro-batch is back from the fold
    write.repeat(rank + 1, "F near", "F far")               # until its gradient is here
    write.repeat(p - rank - 1, "I far", "W far", "F far")   # until its gradient is back from the fold
    write.repeat(max(microbatches, 2 * p - 1) - 2 * p + rank + 1, "F near", "B far", "F far", "B near")
    write.repeat(p - rank - 1, "B far", "F far", "B near")
    whole, parts = ["B far", "B near"] * (rank + 1), ["I far", "I near"] * (rank + 1)
    late = parts[rank + 1:]     # their weight gradients fill later bubbles
    write.repeat(1, *whole[:rank + 1], *late)
    waiting = [word.replace("I", "W") for word in late] + ["W near"] * (p - rank - 1)
    for weight in waiting[:p - rank - 1]:
        write.repeat(1, weight, "I near")
    write.repeat(1, *waiting[p - rank - 1:])
    return _existing(write.actions, microbatches)


class _Writer:
    """Writes the actions of a rank that holds two stages, `near` and `far`, and numbers the micro-batches."""

    def __init__(self, rank: int, ranks: int):
        self.actions: list[Action] = []
        self.stages = {"near": rank, "far": 2 * ranks - 1 - rank}
        self.next: Counter[tuple[str, int]] = Counter()

    def repeat(self, times: int, *words: str) -> None:
        """Append the words (`F near`, `I far` ...) so many times."""
        for word in words * times:
            kind, _, place = word.partition(" ")
            parts = ("I", "W") if kind == "B" else (kind,)   # a whole backward counts as both of its parts
            stage = self.stages[place]
            self.actions.append(Action(kind, stage, self.next[parts[0], stage]))
            self.next.update((part, stage) for part in parts)


def _looped(rank: int, ranks: int, chunks: int) -> list[int]:
    """The stages of a rank."""
    return [rank + chunk * ranks for chunk in range(chunks)]


def _sweep(kind: str, stages: Sequence[int], microbatches: int, first: int = 0) -> list[Action]:
    """Micro-batches first, first + 1 ... through one stage after the other."""
    return [Action(kind, stage, first + m) for stage in stages for m in range(microbatches)]


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """Some forwards to warm up, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    steady = chain.from_iterable(zip(forwards[warmup:], backwards))
    return forwards[:warmup] + list(steady) + backwards[len(backwards) - warmup:]


def _split_backward(microbatches: int, warmup: int, lag: int) -> list[Action]:
    """As `_alternate`, with a micro-batch's weight gradients `lag` backwards behind its input gradient."""
    def steps() -> Iterator[Action]:
        for m in range(-warmup, microbatches + lag):
            yield from (Action(kind, OWN, number) for kind, number in (("F", m + warmup), ("I", m), ("W", m - lag)) if number >= 0)
    return _existing(list(steps()), microbatches)


def _existing(actions: list[Action], microbatches: int) -> list[Action]:
    """Without the actions of micro-batches that do not exist."""
    return [action for action in actions if action.microbatch is not None and action.microbatch < microbatches]


@dataclass(frozen=True, slots=True)
class KnownSchedule:
    """One of the functions above, and how many stages a rank holds under it."""

    rank_actions: Callable[..., list[Action]]   # of rank, ranks, microbatches; and of the stages on a rank, if it is made for any number
    says: str
    fewest: int = 1     # stages on a rank
    most: int | None = 1


SCHEDULES = {
    "gpipe": KnownSchedule(gpipe, "all forwards, then all backwards"),
    "1f1b": KnownSchedule(one_f_one_b, "a forward, a backward; the least memory"),
    "interleaved": KnownSchedule(interleaved, "1F1B over several stages on each rank: smaller bubble, more messages", 2, None),
    "breadth-first": KnownSchedule(breadth_first, "GPipe over several stages on each rank: one after the other", 2, None),
    "zb-h1": KnownSchedule(zero_bubble_h1, "1F1B with the weights' gradients in the bubbles; its memory, a third of its bubble"),
    "zb-h2": KnownSchedule(zero_bubble_h2, "nearly no bubble, for twice the memory"),
    "zb-v": KnownSchedule(zero_bubble_v, "two stages on each rank, folded: nearly no bubble in 1F1B's memory", 2, 2),
    "dualpipe-v": KnownSchedule(dual_pipe_v, "two stages on each rank, folded: a forward beside each backward", 2, 2),
}


def expect_whole_numbers(**numbers: object) -> None:
    """Raise ConfigError unless all are whole numbers."""
    for what, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise ConfigError(f"a schedule for {what}={number!r}: expected a whole number")


def make_schedule(name: str, stages: int, microbatches: int, chunks: int | None = None, *, others: Iterable[str] = ()) -> Schedule:
    """A known schedule for this number of stages, without communication.

    stages: of the model; chunks: of them on each rank, left out: as few as the schedule allows
    others: further names for an error's suggestions
    raises: ConfigError

    >>> print(make_schedule("gpipe", stages=2, microbatches=2))
    F0@0 F1@0 B0@0 B1@0
    F0@1 F1@1 B0@1 B1@1
    """
    if name not in SCHEDULES:
        raise ConfigError(f"there is no schedule {name!r}. {did_you_mean(name, [*SCHEDULES, *others])}")
    known = SCHEDULES[name]
    chunks = known.fewest if chunks is None else chunks
    expect_whole_numbers(stages=stages, microbatches=microbatches, chunks=chunks)
    if stages < 1 or microbatches < 1:
        raise ConfigError(f"{stages} stages and {microbatches} micro-batches: expected 1 or more of each")
    if chunks < known.fewest or (known.most and chunks > known.most):
        raise ConfigError(f"schedule {name!r} with {chunks} stages on each rank: it is made for "
                          f"{known.fewest}{'' if known.most else ' or more'}")
    if stages % chunks:
        raise ConfigError(f"schedule {name!r}: {stages} stages cannot be dealt out {chunks} to a rank; give a multiple of {chunks}")
    ranks = stages // chunks
    more = [chunks] if known.most is None else []   # a schedule for any number of stages on a rank takes that number
    return Schedule.of(*(known.rank_actions(rank, ranks, microbatches, *more) for rank in range(ranks)))
