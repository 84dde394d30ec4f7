"""What happens during a run, as frozen values, and the sink they go to.

Floors below `watch/` report by passing an event to a sink, which may draw, write or ignore it.
Every number on a progress line or a plot is computed from events alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Load:
    """How one layer's router spread the tokens of a step over its experts, on all ranks."""

    routed: tuple[int, ...]   # how often each expert was chosen, dropped choices included
    dropped: int              # choices beyond an expert's capacity

    @property
    def imbalance(self) -> float:
        """The busiest expert's load over the mean: 1 is even.

        >>> Load((6, 2), 0).imbalance
        1.5
        """
        return max(self.routed) * len(self.routed) / max(1, sum(self.routed))


@dataclass(frozen=True, slots=True)
class StepDone:
    """One optimizer step has ended on one rank; loss, count and grad_norm are over all ranks."""

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
    auxiliary: float = 0.0   # routers' losses / count: trained on, but not part of `loss`
    experts: Mapping[str, Load] = field(default_factory=dict)   # by layer, over all ranks; on rank 0 only


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
    """A sentence for the user, shown once."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class Timed:
    """One algorithm has been timed at one size. Times are seconds of one call, on the slowest rank."""

    rank: int
    collective: str
    algorithm: str
    ranks: int
    bytes: int         # of input or output, whichever is larger, as in nccl-tests
    seconds: float     # the median of all calls
    low: float         # the lower quartile
    high: float        # the upper quartile
    wrong: int         # wrong elements of the result, over all ranks


@dataclass(frozen=True, slots=True)
class Progressed:
    """How far long work has come. what: its present part"""

    rank: int
    what: str
    done: float        # 0 to 1


Event = StepDone | Evaluated | Saved | Notice | Timed | Progressed
Sink = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The sink of ranks that show nothing."""
