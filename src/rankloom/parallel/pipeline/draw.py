"""Draw a timeline: coloured rows for a terminal, an SVG for a page, a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

A row is a rank, and time goes to the right. A cell shows its action, or its micro-batch where it is narrow. Where a rank
holds several stages, later ones are darker.
"""

from collections.abc import Iterator
from html import escape
from math import floor, log10
from typing import Any

from rich.text import Text

from rankloom.parallel.pipeline.actions import MEANING, Action, finishes, needs
from rankloom.parallel.pipeline.simulate import Timeline, TimeSlot

# (colour of a rank's first stage, of its later ones), distinct for colour-blind readers too
COLOURS = {"F": ("#9ad0f5", "#0072b2"), "B": ("#fdc980", "#b35900"), "I": ("#86d9bb", "#00694d"), "W": ("#e8bcd9", "#8a3f6e")}
INKS = ("#000000", "#ffffff")
LATER = "darker: later stages"
WIDEST = 4                   # columns of the shortest action in a terminal
ROW, LEFT, TOP = 26, 64, 34   # of the SVG, in its units
STEP_WIDTH = 900             # in the same units
LETTER = 9                   # width of its letters and digits, on average
TICKS = 12                   # of its time axis, at most
TRACE_UNIT = 1000            # microseconds in a trace for one unit of cost


def colour_of(timeline: Timeline, slot: TimeSlot) -> tuple[str, str]:
    """The colours of a cell and of its text."""
    later = slot.action.stage != timeline.schedule.held_by(slot.rank)[0]
    return COLOURS[slot.action.kind][later], INKS[later]


def grid(timeline: Timeline, columns: int = 100, coloured: bool = True) -> Text:
    """A row for each rank, at most `columns` wide; dots where a rank waits.

    coloured: whether the terminal shows colours. Then a cell of one column shows its micro-batch, else its kind
    """
    label, scale = _label_width(timeline), _scale(timeline, columns)
    rows = []
    for rank, slots in enumerate(timeline.by_rank):
        row = Text(f"rank {rank}  ".rjust(label))
        at = 0
        for slot in slots:
            start, end = round(slot.start * scale), round(slot.end * scale)
            fill, ink = colour_of(timeline, slot)
            row.append("." * (start - at), style="dim")
            row.append(_cell_text(slot.action, end - start, coloured), style=f"{ink} on {fill}")
            at = end
        rows.append(row.append("." * (round(timeline.makespan * scale) - at), style="dim"))
    return Text("\n").join(rows)


def say_squeezed(timeline: Timeline, columns: int, coloured: bool = True) -> str:
    """What a column of `grid` stands for, where cells have one column, or less than their names need; empty elsewhere."""
    scale, digits = _scale(timeline, columns), len(str(timeline.schedule.microbatches - 1))
    narrow = round(scale * shortest(timeline), 6) < max(2, digits if coloured else 1 + digits)
    if not narrow:
        return ""
    return f"one column = {1 / scale:.3g} time units, too narrow to name every action; a wider terminal, or --svg FILE, shows more"


def _scale(timeline: Timeline, columns: int) -> float:
    """Columns for a unit of time."""
    unit = shortest(timeline)
    scale = min(max(1, columns - _label_width(timeline)) / timeline.makespan, WIDEST / unit)
    return int(scale * unit) / unit if scale * unit >= 1 else scale   # whole columns: equal actions look equal


def shortest(timeline: Timeline) -> float:
    """How long the shortest action takes that takes any time."""
    return min(slot.end - slot.start for slot in timeline.slots if slot.end > slot.start)


def _label_width(timeline: Timeline) -> int:
    return len(f"rank {len(timeline.schedule.ranks) - 1}  ")


def _cell_text(action: Action, width: int, coloured: bool) -> str:
    """The longest name of the action that a cell of so many columns has room for, filled up with blanks."""
    names = [f"{action.kind}{action.microbatch}", str(action.microbatch) if coloured else action.kind, ""]
    return next(name for name in names if len(name) <= width).ljust(width)


def legend(timeline: Timeline, coloured: bool = True) -> Text:
    """What the letters and, if they are shown, the colours mean."""
    kinds = {slot.action.kind for slot in timeline.slots}
    parts = [Text(f" {kind} ", style=f"{INKS[0]} on {COLOURS[kind][0]}").append(f" {MEANING[kind]}", style="default on default")
             for kind in COLOURS if kind in kinds]
    if coloured and _has_later_stages(timeline):
        parts.append(Text("   ", style=f"{INKS[1]} on {COLOURS['F'][1]}").append(f" {LATER}", style="default on default"))
    return Text("   ").join(parts)


def _has_later_stages(timeline: Timeline) -> bool:
    return any(len(timeline.schedule.held_by(rank)) > 1 for rank in range(len(timeline.schedule.ranks)))


def as_svg(timeline: Timeline, title: str) -> str:
    """The timeline as an SVG picture: a row for each rank."""
    ranks, scale = len(timeline.schedule.ranks), STEP_WIDTH / timeline.makespan
    width, height = LEFT + STEP_WIDTH + 20, TOP + ROW * ranks + 64
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
             'font-family="sans-serif" font-size="12">', f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
             f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>']
    for rank, slots in enumerate(timeline.by_rank):
        top = TOP + ROW * rank
        parts.append(f'<text x="{LEFT - 8}" y="{top + 17}" text-anchor="end">rank {rank}</text>')
        parts.append(f'<rect x="{LEFT}" y="{top}" width="{STEP_WIDTH}" height="{ROW - 2}" fill="#eeeeee"/>')
        parts += [_svg_cell(timeline, slot, top, scale) for slot in slots]
    parts += _svg_time(timeline, TOP + ROW * ranks, scale)
    parts += _svg_legend(timeline, TOP + ROW * ranks + 38)
    return "\n".join([*parts, "</svg>", ""])


def _svg_cell(timeline: Timeline, slot: TimeSlot, top: float, scale: float) -> str:
    left, width = LEFT + slot.start * scale, (slot.end - slot.start) * scale
    fill, ink = colour_of(timeline, slot)
    name = _cell_text(slot.action, int(width / LETTER), coloured=True).rstrip()
    text = f'<text x="{left + width / 2:.2f}" y="{top + 16}" text-anchor="middle" fill="{ink}">{name}</text>'
    return (f'<g><title>{slot.action}: {slot.start:g} to {slot.end:g}</title><rect x="{left:.2f}" y="{top}" width="{width:.2f}" '
            f'height="{ROW - 2}" fill="{fill}" stroke="#ffffff" stroke-width="0.8"/>{text if name else ""}</g>')


def _svg_time(timeline: Timeline, top: float, scale: float) -> Iterator[str]:
    """The time axis, in the unit of the costs."""
    yield f'<text x="{LEFT - 16}" y="{top + 18}" text-anchor="end" fill="#555555">time</text>'
    least = timeline.makespan / TICKS
    decade = 10.0 ** floor(log10(least))
    step = next(decade * times for times in (1, 2, 5, 10) if decade * times >= least)
    for number in range(int(timeline.makespan / step * (1 + 1e-9)) + 1):
        x = LEFT + number * step * scale
        yield f'<line x1="{x:.2f}" y1="{top}" x2="{x:.2f}" y2="{top + 5}" stroke="#555555"/>'
        yield f'<text x="{x:.2f}" y="{top + 18}" text-anchor="middle" fill="#555555">{number * step:g}</text>'


def _svg_legend(timeline: Timeline, top: float) -> Iterator[str]:
    left = float(LEFT)
    kinds = {slot.action.kind for slot in timeline.slots}
    for kind in [kind for kind in COLOURS if kind in kinds]:
        yield f'<rect x="{left}" y="{top}" width="14" height="14" fill="{COLOURS[kind][0]}"/>'
        yield f'<text x="{left + 7}" y="{top + 12}" text-anchor="middle">{kind}</text>'
        yield f'<text x="{left + 20}" y="{top + 12}">{MEANING[kind]}</text>'
        left += 44 + 7 * len(MEANING[kind])
    if _has_later_stages(timeline):
        yield f'<rect x="{left}" y="{top}" width="14" height="14" fill="{COLOURS["F"][1]}"/>'
        yield f'<text x="{left + 20}" y="{top + 12}">{LATER}</text>'


def as_trace(timeline: Timeline) -> dict[str, Any]:
    """Chrome's trace format, as a value to write as JSON: a thread for each rank, an arrow for each message."""
    names: list[dict[str, Any]] = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
                                   for rank in range(len(timeline.schedule.ranks))]
    events = [{"ph": "X", "name": str(slot.action), "cat": MEANING[slot.action.kind], "pid": 0, "tid": slot.rank,
               "ts": slot.start * TRACE_UNIT, "dur": (slot.end - slot.start) * TRACE_UNIT, "args": slot.action._asdict()}
              for slot in timeline.slots]
    return {"traceEvents": [*names, *events, *_arrows(timeline)], "displayTimeUnit": "ms"}


def _arrows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    makers = {part: slot for slot in timeline.slots for part in finishes(slot.action)}
    for number, slot in enumerate(timeline.slots):
        received = [need for need in needs(slot.action, timeline.schedule) if need.kind.startswith("RECV")]
        for receive in received:
            sent = needs(receive, timeline.schedule)[0]
            maker = makers[needs(sent, timeline.schedule)[0]]
            message = {"cat": "message", "name": str(sent), "pid": 0, "id": number}
            leaves = maker.end - 0.01 * (maker.end - maker.start)   # inside the slice, or the arrow would begin at the next one
            yield message | {"ph": "s", "tid": maker.rank, "ts": leaves * TRACE_UNIT}
            yield message | {"ph": "f", "bp": "e", "tid": slot.rank, "ts": slot.start * TRACE_UNIT}
