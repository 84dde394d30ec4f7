"""The progress line of a run: redrawn in place on a terminal, printed now and then elsewhere.

`Progress` and `BenchProgress` are sinks. Give one to a single rank, so that a job has one line for any number of ranks. The text of
the line is a pure function of the last event and the pace so far. Colours follow the console, so NO_COLOR works.
"""

import errno
import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rankloom.base.events import Evaluated, Event, Notice, Progressed, Saved, StepDone
from rankloom.base.text import printable

LEAST_WEIGHT = 0.05        # of a step in the running means: they cover about 20 steps
SECONDS_BETWEEN_LINES = 5.0  # where lines cannot be redrawn
SECONDS_BETWEEN_DRAWS = 0.1
LEFT_OUT = ("memory", "comm", "auxiliary", "grad", "rate", "dropped", "experts", "left")   # where a line is too long, in this order


@dataclass(frozen=True, slots=True)
class Pace:
    """Running means over recent steps. The first step, which is slow, is dropped at the second."""

    steps: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    exposed: float = 0.0

    def after(self, done: StepDone) -> "Pace":
        """The pace with the step `done` included."""
        weight = max(LEAST_WEIGHT, 1 / max(1, self.steps))

        def mean(old: float, new: float) -> float:
            return old + weight * (new - old)

        return Pace(self.steps + 1, mean(self.seconds, done.seconds), mean(self.tokens, done.count), mean(self.exposed, done.exposed))


def format_line(done: StepDone, pace: Pace, steps: int, width: int | None = None) -> str:
    """The line after a step of a run of `steps` steps.

    grad: the global gradient norm before clipping; comm: the share of the step spent waiting for communication; then this
    rank's peak memory. For a mixture of experts also the busiest expert's tokens over the mean, the share of choices dropped, and the
    auxiliary losses; metrics.jsonl has every expert's tokens.

    width: columns of the terminal, None for no limit. A line that is too long leaves out parts (metrics.jsonl has them), memory first

    >>> done = StepDone(0, 20, 3.25, 1024, 0.5, 1e-3, 0.5, 0.1, 2**28, False)
    >>> format_line(done, Pace().after(done), 100)
    'step 20/100  loss 3.250  grad 0.50  2.0k tok/s  0:40 left  comm 20%  268 MB'
    >>> format_line(done, Pace().after(done), 100, width=60)
    'step 20/100  loss 3.250  grad 0.50  2.0k tok/s  0:40 left'
    """
    rate = pace.tokens / pace.seconds if pace.seconds > 0 else 0.0
    share = pace.exposed / pace.seconds if pace.seconds > 0 else 0.0
    parts = {
        "step": f"step {done.step}/{steps}",
        "loss": f"loss {decimal(done.loss, 3)}",
        "grad": f"grad {decimal(done.grad_norm, 2)}",
        "rate": f"{si(rate)} tok/s",
        "left": f"{as_clock(max(0, steps - done.step) * pace.seconds)} left",
        "comm": f"comm {share:.0%}",
        "memory": f"{si(done.memory, 0)}B",
    } | _expert_parts(done)
    if done.skipped:
        parts["skipped"] = "SKIPPED: overflow"
    for name in LEFT_OUT:
        if width is None or len("  ".join(parts.values())) <= width:
            break
        parts.pop(name, None)
    return "  ".join(parts.values())


def _expert_parts(done: StepDone) -> dict[str, str]:
    """The parts of a line that only a mixture of experts has."""
    loads = done.experts.values()
    if not loads:
        return {}
    parts = {"experts": f"experts {max(load.imbalance for load in loads):.1f}x"}
    dropped = sum(load.dropped for load in loads)
    if dropped:
        parts["dropped"] = f"dropped {dropped / max(1, sum(sum(load.routed) for load in loads)):.1%}"
    if done.auxiliary:
        parts["auxiliary"] = f"aux {done.auxiliary:.3f}"
    return parts


def decimal(value: float, places: int) -> str:
    """A number with `places` decimals; with an exponent where these would all be zero, or the number is long: 1000000 is `1.0e+06`."""
    return f"{value:.{places}f}" if value == 0 or 10**-places <= abs(value) < 100_000 else f"{value:.1e}"


def si(value: float, digits: int = 1) -> str:
    """A number with a metric prefix: 1234 is `1.2k`, 268000000 with no digits is `268 M`."""
    gap = "" if digits else " "
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            places = digits or (1 if size >= 1e9 else 0)
            return f"{value / size:.{places}f}{gap}{prefix}"
    return f"{value:.0f}{gap}"


def as_clock(seconds: float) -> str:
    """Seconds as on a clock: 3725 is `1:02:05`; a day or more in days and hours: 180000 is `2d 2h`."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class Screen(Console):
    """A console that leaves a broken pipe to `OneLine`; rich itself would end the process in the middle of a step."""

    def on_broken_pipe(self) -> None:
        """Raise the error that rich has caught."""
        raise BrokenPipeError


def is_closed(error: OSError) -> bool:
    """Whether output failed because its reader has ended, or the terminal was closed. Otherwise its disk is full, or broken."""
    return isinstance(error, BrokenPipeError) or error.errno == errno.EIO


class OneLine:
    """A line that is redrawn on a terminal, and printed now and then elsewhere.

    Use it as a context, which restores the terminal however a run ends. When output fails (the terminal was closed, `| head` has
    ended, a full disk) it stops drawing, and the process sends itself SIGHUP, as a closing terminal does.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic):
        self.console = console
        self.redraws = console.is_terminal and not console.is_dumb_terminal   # TERM=dumb has no codes, so nothing would be drawn
        self._clock = clock
        self._drawn = -math.inf
        self._live: Live | None = None
        self._lost = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._try(self._live.stop)
            self._live = None

    def say(self, text: str, style: str = "") -> None:
        """Print a separate line, above the progress line."""
        self._try(lambda: self.console.print(Text(printable(text), style=style), soft_wrap=True))

    def draw(self, text: Callable[[], str], *, last: bool = False) -> None:
        """Show `text()`, unless the line was drawn a moment ago. last: always show it"""
        now = self._clock()
        every = SECONDS_BETWEEN_DRAWS if self.redraws else SECONDS_BETWEEN_LINES
        if now - self._drawn < every and not last:
            return
        self._drawn = now
        self._try(lambda: self._show(text()))

    def _try(self, write: Callable[[], None]) -> None:
        if self._lost:
            return
        try:
            write()
        except OSError as error:
            self._lost = True
            with suppress(OSError):   # errors may go to the same full disk
                if not is_closed(error):
                    Screen(stderr=True).print(f"the output cannot be written, so this ends: {error.strerror}", soft_wrap=True,
                                               highlight=False)
            signal.raise_signal(signal.SIGHUP)

    def _show(self, text: str) -> None:
        line = Text(text, style="cyan", no_wrap=True, overflow="ellipsis")
        if not self.redraws:
            self.console.print(line, soft_wrap=True)
            return
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        self._live.update(line, refresh=True)


class Progress(OneLine):
    """The sink that draws the progress of a training run."""

    def __init__(self, console: Console, steps: int, *, clock: Callable[[], float] = time.monotonic):
        super().__init__(console, clock=clock)
        self.steps = steps
        self.pace = Pace()

    def __call__(self, event: Event) -> None:
        """Draw what an event changes."""
        match event:
            case StepDone():
                self.pace = self.pace.after(event)
                width = self.console.width if self.redraws else None
                self.draw(lambda: format_line(event, self.pace, self.steps, width), last=event.step >= self.steps)
            case Evaluated():
                text = f"step {event.step}/{self.steps}  validation loss {event.loss:.4f} over {event.count:.0f} tokens"
                self.say(text, "bold")
            case Saved():
                self.say(f"saved {event.path}", "green")
            case Notice():
                self.say(event.text)


class BenchProgress(OneLine):
    """The sink that draws the progress of a bench: what is being timed, the share done, and the time left."""

    def __init__(self, console: Console, ranks: int, *, clock: Callable[[], float] = time.monotonic):
        super().__init__(console, clock=clock)
        self.ranks, self._begin = ranks, clock()

    def __call__(self, event: Event) -> None:
        """Draw what an event changes."""
        match event:
            case Progressed():
                self.draw(lambda: self._line(event), last=event.done >= 1)
            case Notice():
                self.say(event.text)

    def _line(self, event: Progressed) -> str:
        left = (self._clock() - self._begin) * (1 / event.done - 1) if event.done else math.inf
        return f"{event.what} on {self.ranks} ranks  {event.done:.0%}  {as_clock(left)} left"
