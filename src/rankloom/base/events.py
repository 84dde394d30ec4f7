"""What happens during a run, as frozen values, and the sink they go to.

The floors below `watch/` say what happened by handing an event to a sink; who draws it, writes it
or ignores it is not their business. Every number on a progress line or a plot is a fold over these.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Load:
    """How the tokens of a step were spread over the experts of one layer, on all ranks."""

    routed: tuple[int, ...]   # choices that fell on each expert, dropped ones included
    dropped: int              # of them, by capacity

    @property
    def imbalance(self) -> float:
        """The busiest expert's choices over the mean: 1 is even.

        >>> Load((6, 2), 0).imbalance
        1.5
        """
        return max(self.routed) * len(self.routed) / max(1, sum(self.routed))


@dataclass(frozen=True, slots=True)
class StepDone:
    """One optimizer step has ended on one rank; loss, count and grad_norm are those of all ranks."""

    rank: int
    step: int          # steps finished so far, this one included
    loss: float        # sum over all ranks / count
    count: float       # what the loss was averaged over: tokens, for a language model
    grad_norm: float   # before clipping
    lr: float
    seconds: float     # wall time of this step on this rank
    exposed: float     # seconds of it spent waiting for communication
    memory: int        # peak bytes of this rank's process, or of its GPU
    skipped: bool      # the optimizer did not step: fp16 overflow
    auxiliary: float = 0.0   # losses of routers over the same count; they are trained on, and not in `loss`
    experts: Mapping[str, Load] = field(default_factory=dict)   # by layer; on rank 0 only, for they are those of all ranks


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The validation loss over the whole validation set, exact on any number of ranks."""

    rank: int
    step: int
    loss: float
    count: float


@dataclass(frozen=True, slots=True)
class Saved:
    """A file of the run folder is complete on disk."""

    rank: int
    path: str


@dataclass(frozen=True, slots=True)
class Notice:
    """A sentence that the person at the terminal should read once."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class Timed:
    """One algorithm has been timed at one size. Times are seconds of one call, those of the rank that took longest."""

    rank: int
    collective: str
    algorithm: str
    ranks: int
    bytes: int         # the longer side, as nccl-tests counts
    seconds: float     # the median of all turns
    low: float         # the lower and
    high: float        # the upper quartile of the turns
    wrong: int         # elements of the result, on all ranks, that are not what they should be


@dataclass(frozen=True, slots=True)
class Progressed:
    """Long work has come so far: what it is at, and which part of all of it is done."""

    rank: int
    what: str
    done: float        # 0 to 1


Event = StepDone | Evaluated | Saved | Notice | Timed | Progressed
Sink = Callable[[Event], None]
