"""The picture of docs/sharding.md: the life of a unit of parameters. Drawn from a schedule, so that its memory is counted, not sketched.

    python docs/make_pictures.py            # writes docs/unit.svg
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from draw_to_file import draw_to_file
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

INK, PALE, GHOST = "#22303C", "#6B7885", "#E9EDF1"


class Parameter(NamedTuple):
    """A matrix of the unit; not to scale."""

    name: str
    rows: int
    columns: int
    colour: str


class Segment(NamedTuple):
    """The elements of a parameter in the flat buffer."""

    start: int
    stop: int
    colour: str


PARAMETERS = (
    Parameter("norm", 1, 4, "#E69F00"), Parameter("query", 5, 5, "#0072B2"), Parameter("key", 5, 3, "#56B4E9"),
    Parameter("value", 5, 3, "#009E73"), Parameter("output", 5, 5, "#CC79A7"), Parameter("norm", 1, 4, "#E69F00"))
RANKS, TOTAL = 4, 96                   # elements of the unit, padding included
SLICE = TOTAL // RANKS
UNITS = 6
GATHER, FORWARD, BACKWARD, REDUCE, UPDATE = "gather", "forward", "backward", "reduce", "update"
LANE_COLOUR = {GATHER: "#56B4E9", FORWARD: "#0072B2", BACKWARD: "#003F66", REDUCE: "#D55E00", UPDATE: "#009E73"}


# ---------------------------------------------------------------------- the unit: a flat buffer, cut over ranks

def segments() -> list[Segment]:
    """That of each parameter; what is left is padding, without a colour."""
    at = 0
    found = []
    for param in PARAMETERS:
        stop = at + param.rows * param.columns
        found.append(Segment(at, stop, param.colour))
        at = stop
    return [*found, Segment(at, TOTAL, "none")]


def box(axes: Axes, corner: tuple[float, float], width: float, height: float, **look: object) -> None:
    """A rectangle."""
    axes.add_patch(Rectangle(corner, width, height, **{"linewidth": 0, "zorder": 2} | look))


def arrow(axes: Axes, start: tuple[float, float], stop: tuple[float, float], bend: float = 0.0, colour: str = PALE) -> None:
    """A thin arrow."""
    axes.add_patch(FancyArrowPatch(start, stop, arrowstyle="-|>", mutation_scale=11, linewidth=1.1, color=colour, zorder=3,
                                   connectionstyle=f"arc3,rad={bend}", shrinkA=0, shrinkB=0))


def bar(axes: Axes, left: float, bottom: float, width: float, height: float, *, shown: tuple[float, float] = (0, TOTAL),
        alpha: float = 1.0) -> None:
    """The flat buffer, of which only the elements `shown` are there; the rest is a ghost."""
    scale = width / TOTAL
    box(axes, (left, bottom), width, height, facecolor=GHOST)
    for start, stop, colour in segments():
        first, last = max(start, shown[0]), min(stop, shown[1])
        if first >= last:
            continue
        place = (left + first * scale, bottom)
        if colour == "none":
            box(axes, place, (last - first) * scale, height, facecolor="white", edgecolor=PALE, hatch="////", alpha=0.6)
        else:
            box(axes, place, (last - first) * scale, height, facecolor=colour, alpha=alpha, edgecolor="white", linewidth=0.8)


def draw_flat(axes: Axes) -> None:
    """Matrices above, the same numbers end to end below, and where the ranks' slices end."""
    axes.set(xlim=(0, 100), ylim=(0, 22.5))
    left, width = 8.0, 90.0
    scale = width / TOTAL
    for (name, rows, columns, colour), (start, stop, _) in zip(PARAMETERS, segments()):
        middle = left + (start + stop) / 2 * scale
        cell = 1.7
        x, y = middle - columns * cell / 2 * 0.62, 11.2
        for row in range(rows):
            box(axes, (x, y + row * cell), columns * cell * 0.62, cell, facecolor=colour, edgecolor="white", linewidth=0.8)
        axes.text(middle, y + rows * cell + 0.6, name, ha="center", va="bottom", color=INK, fontsize=9.5)
        arrow(axes, (middle, y - 0.5), (middle, 8.3))
    bar(axes, left, 4.4, width, 3.4)
    axes.text(left + 92 * scale, 8.5, "padding", ha="center", va="bottom", color=PALE, fontsize=8.5)
    axes.text(left - 0.9, 6.1, "one buffer", ha="right", va="center", color=INK, fontsize=9.5)
    for cut in range(RANKS + 1):
        x = left + cut * SLICE * scale
        axes.plot((x, x), (3.3, 8.3), color=INK, linewidth=1.3 if 0 < cut < RANKS else 0.8, linestyle=(0, (3, 2)), zorder=4)
    for rank in range(RANKS):
        axes.text(left + (rank + 0.5) * SLICE * scale, 3.3, f"slice of rank {rank}", ha="center", va="top", color=INK, fontsize=9.5)


# ---------------------------------------------------------------------- its states

def draw_states(axes: Axes) -> None:
    """What each of the ranks holds of the unit, from left to right in time."""
    axes.set(xlim=(0, 100), ylim=(0, 19))
    columns = (("SHARDED", "parameters between uses: 1/4 each"), ("GATHERED", "while the block computes: whole"),
               ("GRADIENTS", "each rank's own, of its own batch"), ("REDUCED", "their sum, each keeps its slice"))
    width, step = 17.6, 24.1
    for number, (title, line) in enumerate(columns):
        left = 8.0 + number * step
        axes.text(left, 17.6, title, ha="left", va="bottom", color=INK, fontsize=10, fontweight="bold")
        axes.text(left, 15.9, line, ha="left", va="bottom", color=PALE, fontsize=8.8)
        for rank in range(RANKS):
            own = (rank * SLICE, (rank + 1) * SLICE)
            bottom = 11.4 - rank * 3.6
            bar(axes, left, bottom, width, 2.5, shown=own if number in (0, 3) else (0, TOTAL), alpha=0.42 if number == 2 else 1.0)
            if number >= 2:
                mark_gradient(axes, left, bottom, width, own if number == 3 else (0, TOTAL), rank if number == 2 else None)
    for rank in range(RANKS):
        axes.text(7.1, 12.65 - rank * 3.6, f"rank {rank}", ha="right", va="center", color=INK, fontsize=9.5)
    for number, word in enumerate(("gather", "backward", "reduce")):
        x = 8.0 + number * step + width
        arrow(axes, (x + 0.6, 7.2), (x + step - width - 0.6, 7.2), colour=INK)
        axes.text(x + (step - width) / 2, 7.7, word, ha="center", va="bottom", color=INK, fontsize=8.8)


def mark_gradient(axes: Axes, left: float, bottom: float, width: float, shown: tuple[float, float], rank: int | None) -> None:
    """Lines over a buffer that holds gradients: leaning as the rank's own, or crossed where they are summed."""
    hatch = "xxxx" if rank is None else ("////", "\\\\\\\\", "||||", "----")[rank]
    scale = width / TOTAL
    box(axes, (left + shown[0] * scale, bottom), (min(shown[1], 88) - shown[0]) * scale, 2.5, facecolor="none", edgecolor="white",
        hatch=hatch, zorder=3)


# ---------------------------------------------------------------------- a step in time

@dataclass(frozen=True)
class Action:
    """What a lane does with a unit, from when to when."""

    what: str
    unit: int
    start: float
    stop: float


def schedule(units: int) -> list[Action]:
    """Gather one unit ahead, forward and backward; reduce the unit of before meanwhile; then update."""
    done: list[Action] = []
    clock = 0.0

    def run(what: str, unit: int, start: float, seconds: float) -> Action:
        done.append(Action(what, unit, start, start + seconds))
        return done[-1]

    gathered = run(GATHER, 0, clock, 0.8)
    for unit in range(units):
        compute = run(FORWARD, unit, max(clock, gathered.stop), 1.0)
        if unit + 1 < units:
            gathered = run(GATHER, unit + 1, compute.start, 0.8)
        clock = compute.stop
    for unit in reversed(range(units)):
        compute = run(BACKWARD, unit, max(clock, gathered.stop), 2.0)
        if unit:
            gathered = run(GATHER, unit - 1, compute.start, 0.8)
        clock = compute.stop
        reduced = run(REDUCE, unit, clock, 1.2)
    run(UPDATE, 0, reduced.stop, 1.6)
    return done


def held_over_time(actions: list[Action], units: int, ranks: int) -> tuple[list[float], dict[str, list[float]]]:
    """Times, and for each kind of memory the bytes per parameter of a unit that one rank holds at each of them (fp32, Adam)."""
    moments = sorted({moment for action in actions for moment in (action.start, action.stop)})
    alive: dict[str, Callable[[float], float]] = {
        "own slices: parameters and Adam's two moments": lambda t: 12 * units / ranks,
        "gradients, own slices": lambda t: 4 / ranks * count(actions, t, REDUCE, UPDATE),
        "gathered parameters": lambda t: 4 * len(alive_units(actions, t, GATHER, (FORWARD, BACKWARD))),
        "whole gradients on their way": lambda t: 4 * len(alive_units(actions, t, BACKWARD, (REDUCE,))),
    }
    times = [t for start, stop in pairwise(moments) for t in (start, stop)]
    middles = [(start + stop) / 2 for start, stop in pairwise(moments) for _ in (0, 1)]
    return times, {name: [size(t) for t in middles] for name, size in alive.items()}


def alive_units(actions: list[Action], t: float, born: str, dies: tuple[str, ...]) -> set[int]:
    """Units that `born` has begun to make before `t` and that none of `dies` has ended with since."""
    found = set()
    for made in (action for action in actions if action.what == born and action.start <= t):
        ends = [action.stop for action in actions if action.what in dies and action.unit == made.unit and action.stop > made.start]
        # the last unit of forward is the first of backward: it stays
        end = max(ends) if made.unit == UNITS - 1 else min(ends)
        if t < end:
            found.add(made.unit)
    return found


def count(actions: list[Action], t: float, begins: str, ends: str) -> int:
    """How many units have begun with one thing before `t`; none after the other has ended."""
    over = max(action.stop for action in actions if action.what == ends)
    return sum(action.what == begins and action.start <= t for action in actions) if t < over else 0


def draw_lanes(axes: Axes, actions: list[Action]) -> None:
    """Three rows: what is gathered, what computes, what is reduced."""
    lanes = {"gather": (GATHER,), "compute": (FORWARD, BACKWARD, UPDATE), "reduce": (REDUCE,)}
    letters = {GATHER: "g", FORWARD: "F", BACKWARD: "B", REDUCE: "r"}
    for row, (name, kinds) in enumerate(lanes.items()):
        y = 2 - row
        axes.text(-0.25, y + 0.4, name, ha="right", va="center", color=INK, fontsize=9.5)
        for action in (action for action in actions if action.what in kinds):
            box(axes, (action.start + 0.02, y), action.stop - action.start - 0.04, 0.8, facecolor=LANE_COLOUR[action.what])
            word = "update" if action.what == UPDATE else f"{letters[action.what]}{action.unit + 1}"
            axes.text((action.start + action.stop) / 2, y + 0.4, word, ha="center", va="center", color="white", fontsize=8.5)
    axes.set(ylim=(-0.1, 3))


def draw_memory(axes: Axes, actions: list[Action]) -> None:
    """The bytes of one rank over time, stacked; beside them those of data parallel."""
    times, held = held_over_time(actions, UNITS, RANKS)
    colours = ("#9DB4C4", "#F3B27A", "#56B4E9", "#D55E00")
    layers = axes.stackplot(times, *held.values(), colors=colours, linewidth=0, zorder=2)
    whole = 16 * UNITS
    axes.axhline(whole, color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
    axes.text(times[-1], whole - 2.5, "data parallel, any number of ranks: everything whole", ha="right", va="top", color=INK, fontsize=9)
    totals = [sum(kinds) for kinds in zip(*held.values())]
    peak = max(totals)
    at = times[totals.index(peak)]
    axes.annotate(f"peak {peak / whole:.0%}", (at, peak), (at - 2.2, peak + 24), color=INK, fontsize=9, va="center",
                  arrowprops={"arrowstyle": "-|>", "color": PALE, "shrinkB": 1})
    axes.legend(reversed(layers), list(held)[::-1], loc="upper left", bbox_to_anchor=(0.0, 0.93), frameon=False, fontsize=9,
                labelcolor=INK, handlelength=1.0, handleheight=1.0)
    axes.set(ylim=(-9, whole * 1.06))
    arrow(axes, (0, -5), (times[-1], -5))
    axes.text(times[-1] + 0.15, -5, "time", ha="left", va="center", color=PALE, fontsize=8.8)


def bare(panels: Iterable[Axes]) -> None:
    """No frame, no ticks."""
    for axes in panels:
        axes.set_axis_off()


def draw() -> Figure:
    """The whole picture."""
    figure = Figure(figsize=(12.5, 11.2), facecolor="white")
    heights = (2.5, 2.35, 1.05, 2.5)
    flat, states, lanes, memory = figure.subplots(4, 1, height_ratios=heights,
                                                  gridspec_kw={"left": 0.02, "right": 0.98, "top": 0.945, "bottom": 0.03, "hspace": 0.3})
    titles = ("1   A unit is the parameters of a block laid end to end in one buffer, cut in equal slices wherever that falls",
              "2   Its states: four ranks, one unit",
              "3   A step of six units on one rank: while one computes (F forward, B backward), the next is gathered and the last reduced",
              "4   What that rank holds meanwhile")
    actions = schedule(UNITS)
    draw_flat(flat)
    draw_states(states)
    draw_lanes(lanes, actions)
    draw_memory(memory, actions)
    bare((flat, states, lanes, memory))
    for axes, title in zip((flat, states, lanes, memory), titles):
        axes.set_title(title, loc="left", color=INK, fontsize=11.5, fontweight="bold", pad=8)
    end = max(action.stop for action in actions)
    turns = [next(action.start for action in actions if action.what == what) for what in (FORWARD, BACKWARD, UPDATE)]
    for axes in (lanes, memory):
        axes.set_xlim(-2.4, end + 0.9)
        for turn in turns:
            axes.axvline(turn, 0, 1 if axes is lanes else 0.6, color=GHOST, linewidth=1.2, zorder=0)
    return figure


if __name__ == "__main__":
    draw_to_file(draw, __doc__, "unit.svg")
