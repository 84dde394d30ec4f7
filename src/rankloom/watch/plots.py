"""Plots for run folders: `loss.png`, `scale.png`, `bench-<collective>.png`. Needs matplotlib, an optional extra.

Figures are made without pyplot, so there is no window, no backend and no global state.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, log2, nan
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator, NullFormatter

from rankloom.base.errors import DataError
from rankloom.base.events import Timed
from rankloom.base.files import replacing
from rankloom.base.quantities import bus_factor, show_bytes, show_seconds
from rankloom.watch.history import History, read_history, smooth
from rankloom.watch.scaling import Row

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"   # distinct for colour-blind readers, too
COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#8B5A2B", GREY)
MARKERS = "osD^vPX*"
HIGHEST = 1e290   # a loss of more is drawn there: sums of it would not be finite, here and in matplotlib
TITLE_WIDTH = 40   # characters; the title of a run with a longer name gets a second line


def plot_loss(run: Path) -> Path:
    """Draw `loss.png` of a run folder from its metrics and summary; returns its path.

    raises: DataError when the run has no finished step
    """
    history = read_history(run)
    if not history.steps:
        raise DataError(f"{run}: no step was finished, so there is no loss to draw")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    _draw_losses(axes, history)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(fill(f"Training of {run.name}", TITLE_WIDTH), parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.legend()
    return _save(figure, run / "loss.png")


def _draw_losses(axes: Axes, history: History) -> None:
    finite = [step for step in history.steps if step["loss"] is not None]
    steps, losses = [step["step"] for step in finite], [_drawable(step["loss"]) for step in finite]
    lost = len(history.steps) - len(finite)
    each = "training, each step" + (f" ({lost} without a finite loss)" if lost else "")
    axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=1, label=each)
    axes.plot(steps, smooth(losses), "o" if len(steps) == 1 else "-", color=BLUE, linewidth=2, label="training, smoothed")
    if history.evaluations:
        at = [event["step"] for event in history.evaluations]
        axes.plot(at, [_drawable(event["loss"]) for event in history.evaluations], "o-", color=ORANGE, label="validation")
    trigram = history.summary.get("trigram_loss")
    if trigram is not None:
        axes.axhline(trigram, color=GREEN, linestyle="--", label=f"trigram model, validation: {trigram:.3f}")


def _drawable(loss: float | None) -> float:
    return nan if loss is None else min(max(loss, -HIGHEST), HIGHEST)


def plot_scaling(rows: list[Row], path: Path, title: str) -> Path:
    """Draw speed-up and the share of communication over ranks; returns `path`."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    ranks = [row.ranks for row in rows]
    left.plot(ranks, ranks, "--", color=GREY, label="ideal")
    left.plot(ranks, [row.speed_up for row in rows], "o-", color=BLUE, label="measured")
    what = "speed-up over one rank" if ranks[0] == 1 else f"speed-up; {ranks[0]} ranks count as {ranks[0]}"
    left.set(xlabel="ranks (log scale)", ylabel=f"{what} (log scale)")
    left.legend(loc="upper left")
    right.bar([str(n) for n in ranks], [100 * row.communication for row in rows], color=ORANGE)
    right.set(xlabel="ranks", ylabel="step time waiting for communication (%)", ylim=(0, None))
    _logarithmic(left, rows)
    figure.suptitle(title)
    return _save(figure, path)


Points = Sequence[tuple[int, float]]


def plot_bench(times: Sequence[Timed], curves: Mapping[tuple[int, str], Points], path: Path, title: str) -> Path:
    """Draw time and busbw over size, a column for each number of ranks, a colour for each algorithm; returns `path`.

    curves: (ranks, algorithm) -> points (bytes, seconds) of the fitted model, drawn as thin lines
    """
    columns = sorted({timed.ranks for timed in times})
    names = list(dict.fromkeys(timed.algorithm for timed in times))
    figure = Figure(figsize=(1.5 + 5 * len(columns), 8), layout="constrained")
    grid = figure.subplots(2, len(columns), squeeze=False, sharex=True, sharey="row")
    for ranks, above, below in zip(columns, grid[0], grid[1]):
        for number, name in enumerate(names):
            mine = [timed for timed in times if (timed.ranks, timed.algorithm) == (ranks, name)]
            look = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
            _draw_algorithm(above, below, sorted(mine, key=lambda timed: timed.bytes), curves.get((ranks, name), ()), look)
        _scale_axes(above, below, sorted({timed.bytes for timed in times}))
        above.set_title(f"{ranks} ranks")
        below.set_xlabel("size")
    grid[0][0].set_ylabel("time of one call")
    grid[1][0].set_ylabel("busbw (GB/s)")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4 * len(columns), frameon=False,
                  title="median of the turns, quartiles shaded; thin lines: the fitted model")
    figure.suptitle(title)
    return _save(figure, path)


def _draw_algorithm(above: Axes, below: Axes, times: Sequence[Timed], model: Points, look: Mapping[str, Any]) -> None:
    if not times:
        return
    rate = bus_factor(times[0].collective, times[0].ranks) / 1e9
    sizes, seconds = [timed.bytes for timed in times], [timed.seconds for timed in times]
    low, high = [timed.low for timed in times], [timed.high for timed in times]
    above.plot(sizes, seconds, label=times[0].algorithm, linewidth=1.8, **look)
    above.fill_between(sizes, low, high, color=look["color"], alpha=0.12, linewidth=0)
    below.plot(sizes, [n * rate / t for n, t in zip(sizes, seconds)], linewidth=1.8, **look)
    above.plot([n for n, _ in model], [t for _, t in model], "--", linewidth=0.8, color=look["color"])
    below.plot([n for n, _ in model], [n * rate / t for n, t in model], "--", linewidth=0.8, color=look["color"])


def _scale_axes(above: Axes, below: Axes, sizes: list[int]) -> None:
    """Make all axes logarithmic: ticks at the measured sizes, labels in bytes, seconds and GB/s."""
    for axes in (above, below):
        axes.set_xscale("log", base=4)
        axes.set_yscale("log")
        axes.set_xticks(sizes)
        axes.set_xticks([], minor=True)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_bytes(value)))
        axes.tick_params(axis="x", rotation=45)
        axes.grid(alpha=0.3)
    for axes, words in ((above, _short_seconds), (below, "{:g}".format)):
        axes.yaxis.set_major_formatter(_Words(words))
        axes.yaxis.set_minor_formatter(_Words(words))


def _short_seconds(value: float) -> str:
    return show_seconds(value).replace(".00", "").replace(".0", "")


class _Words(LogFormatter):
    """Labels the ticks that matplotlib would label on a logarithmic axis (also some between the powers of ten), with our text."""

    def __init__(self, words: Callable[[float], str]):
        super().__init__(minor_thresholds=(1, 0.4))
        self._words = words

    def __call__(self, value: float, pos: int | None = None) -> str:
        """The text at a tick, or none."""
        return self._words(value) if super().__call__(value, pos) else ""


def _logarithmic(axes: Axes, rows: list[Row]) -> None:
    """Make both axes logarithmic, with plain ticks: the measured numbers of ranks, and powers of 2 around every speed-up."""
    lowest = min(row.speed_up for row in rows)
    highest = max(max(row.ranks, row.speed_up) for row in rows)
    ticks = [2.0 ** power for power in range(floor(log2(lowest)), ceil(log2(highest)) + 1)]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks([row.ranks for row in rows])
    axes.set_yticks(ticks)
    top = ticks[-1] * 1.1
    axes.set_ylim(ticks[0] / (top / ticks[0]) ** 0.12, top)   # room for the number under the lowest point
    axes.margins(x=0.1)
    for row in rows:
        axes.annotate(f"{row.speed_up:.3g}", (row.ranks, row.speed_up), (0, -9), textcoords="offset points", color=BLUE,
                      ha="center", va="top", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


def _save(figure: Figure, path: Path) -> Path:
    try:
        with replacing(path) as temporary:   # a full disk leaves the picture that was there
            figure.savefig(temporary, dpi=120, format="png")
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from None
    return path
