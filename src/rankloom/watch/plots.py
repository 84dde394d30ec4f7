"""The pictures of a run folder: `loss.png`, `scale.png`. Needs matplotlib, which is an optional extra.

Figures are made without pyplot: no window, no backend to choose, nothing global.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from rankloom.base.errors import DataError
from rankloom.watch.history import History, read_history, smooth
from rankloom.watch.scaling import Row

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"   # told apart by colour-blind readers too


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
    axes.set_title(f"Training of {run.name}", parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    return _save(figure, run / "loss.png")


def _draw_losses(axes: Axes, history: History) -> None:
    points = [(step["step"], step["loss"]) for step in history.steps if step["loss"] is not None]
    steps, losses = [x for x, _ in points], [y for _, y in points]
    axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=1, label="training, each step")
    axes.plot(steps, smooth(losses), color=BLUE, linewidth=2, label="training, smoothed")
    if history.evaluations:
        at = [event["step"] for event in history.evaluations]
        axes.plot(at, [event["loss"] for event in history.evaluations], "o-", color=ORANGE, label="validation")
    trigram = history.summary.get("trigram_loss")
    if trigram is not None:
        axes.axhline(trigram, color=GREEN, linestyle="--", label=f"trigram model, validation: {trigram:.3f}")


def plot_scaling(rows: list[Row], path: Path, title: str) -> Path:
    """Draw speed-up and the share of communication over ranks; returns `path`."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    ranks = [row.ranks for row in rows]
    left.plot(ranks, ranks, "--", color=GREY, label="ideal")
    left.plot(ranks, [row.speed_up for row in rows], "o-", color=BLUE, label="measured")
    left.set(xlabel="ranks", ylabel="speed-up over one rank")
    left.legend()
    right.bar([str(n) for n in ranks], [100 * row.communication for row in rows], color=ORANGE)
    right.set(xlabel="ranks", ylabel="step time waiting for communication (%)", ylim=(0, None))
    _number_of_ranks(left, ranks)
    figure.suptitle(title)
    return _save(figure, path)


def _number_of_ranks(axes: Axes, ranks: list[int]) -> None:
    """Double-logarithmic axes whose ticks are the measured numbers of ranks, written plainly."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(ranks)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


def _save(figure: Figure, path: Path) -> Path:
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from None
    return path
