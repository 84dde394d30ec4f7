"""How training scales with the number of ranks: speed-up, efficiency, and the share of a step that waits for communication."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rankloom.base.errors import DataError
from rankloom.watch.history import read_history

WARM_UP_STEPS = 3   # not measured: they learn the bucket order and fill the allocator


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One run: its ranks, the median seconds and tokens of a step, and the median seconds spent waiting."""

    ranks: int
    seconds: float
    tokens: float
    exposed: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `efficiency` is 1 for perfect scaling."""

    ranks: int
    tokens_per_second: float
    speed_up: float
    efficiency: float
    communication: float


def measure(run: Path, ranks: int) -> MeasuredRun:
    """Measure the run in a folder, without its first steps. raises: DataError when it has too few"""
    steps = read_history(run).steps[WARM_UP_STEPS:]
    if not steps:
        raise DataError(f"{run}: has no step after its first {WARM_UP_STEPS}, which warm up; give more --steps")
    seconds, tokens, exposed = (median(step[key] for step in steps) for key in ("seconds", "count", "exposed"))
    return MeasuredRun(ranks, seconds, tokens, exposed)


def title_of(preset: str, rows: list[Row], *, weak: bool) -> str:
    """The title of the table and of the picture."""
    fewest = rows[0].ranks
    beside = "" if fewest == 1 else f", beside {fewest} ranks (efficiency 100% by definition)"
    return f"{preset}, {'weak' if weak else 'strong'} scaling{beside}"


def scaling_rows(measured: list[MeasuredRun]) -> list[Row]:
    """Compare every run with the one on the fewest ranks, p. That one's efficiency is 1 by definition.

    speed-up:   p x tokens per second / tokens per second on p ranks; on 1 rank it is 1
    efficiency: speed-up / ranks. With the same global batch this is T1 / (N x TN); with the same batch per rank, T1 / TN

    >>> scaling_rows([MeasuredRun(1, 1.0, 100, 0.0), MeasuredRun(4, 0.5, 100, 0.1)])[1]
    Row(ranks=4, tokens_per_second=200.0, speed_up=2.0, efficiency=0.5, communication=0.2)
    """
    measured = sorted(measured, key=lambda one: one.ranks)
    base = measured[0].tokens / measured[0].seconds / measured[0].ranks
    rates = [(one, one.tokens / one.seconds) for one in measured]
    return [
        Row(one.ranks, rate, rate / base, rate / base / one.ranks, one.exposed / one.seconds) for one, rate in rates
    ]
