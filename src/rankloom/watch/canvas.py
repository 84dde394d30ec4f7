"""Boxes and words on a sheet, as values: written as SVG without a library, as PNG with matplotlib (an optional extra).

Lengths are in pixels of the SVG; y grows downwards. The font is DejaVu Sans where it is installed; for a PNG it always is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

FONT = "DejaVu Sans"
DPI = 160            # of a PNG
INCH = 96.0          # pixels of an inch, as browsers have it


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, with corners rounded by `radius`. line: the colour of its border; empty: no border"""

    left: float
    top: float
    width: float
    height: float
    fill: str
    line: str = ""
    radius: float = 0.0


@dataclass(frozen=True, slots=True)
class Word:
    """A line of text. at: which of its start, middle or end is at (x, y), on the base line"""

    x: float
    y: float
    text: str
    size: float = 11.0
    ink: str = "#22303C"
    at: str = "start"
    bold: bool = False


Mark = Box | Word


@dataclass(frozen=True, slots=True)
class Sheet:
    """All marks, in drawing order: later ones cover earlier ones."""

    width: float
    height: float
    marks: tuple[Mark, ...]
    title: str      # for screen readers


def as_svg(sheet: Sheet) -> str:
    """A complete SVG file, on white.

    >>> print(as_svg(Sheet(20, 10, (Box(0, 0, 5, 5, "#ff0000"),), "a & b")).splitlines()[-2])
    <rect x="0" y="0" width="5" height="5" fill="#ff0000"/>
    """
    size = f'width="{sheet.width:g}" height="{sheet.height:g}" viewBox="0 0 {sheet.width:g} {sheet.height:g}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}, Verdana, sans-serif">',
                      f"<title>{escape(sheet.title)}</title>",
                      *_svg_marks((Box(0, 0, sheet.width, sheet.height, "#ffffff"), *sheet.marks)), "</svg>", ""])


def _svg_marks(marks: Iterable[Mark]) -> Iterable[str]:
    for mark in marks:
        if isinstance(mark, Box):
            line = f' stroke="{mark.line}"' if mark.line else ""
            corner = f' rx="{mark.radius:g}"' if mark.radius else ""
            place = f'x="{_short(mark.left)}" y="{_short(mark.top)}" width="{_short(mark.width)}" height="{_short(mark.height)}"'
            yield f'<rect {place}{corner} fill="{mark.fill}"{line}/>'
        else:
            bold = ' font-weight="bold"' if mark.bold else ""
            at = "" if mark.at == "start" else f' text-anchor="{mark.at}"'
            place = f'x="{_short(mark.x)}" y="{_short(mark.y)}" font-size="{mark.size:g}"'
            yield f'<text {place} fill="{mark.ink}"{at}{bold}>{escape(mark.text)}</text>'


def _short(length: float) -> str:
    return f"{round(length, 2):g}"


def write_png(sheet: Sheet, path: Path) -> None:
    """The same picture as a PNG. raises: ImportError without matplotlib; OSError"""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch, Patch, Rectangle

    figure = Figure(figsize=(sheet.width / INCH, sheet.height / INCH), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, sheet.width), ylim=(sheet.height, 0))
    axes.set_axis_off()
    for number, mark in enumerate(sheet.marks):
        if isinstance(mark, Word):
            align = {"start": "left", "middle": "center", "end": "right"}[mark.at]
            axes.text(mark.x, mark.y, mark.text, fontsize=mark.size * 72 / INCH, color=mark.ink, ha=align, va="baseline", family=FONT,
                      weight="bold" if mark.bold else "normal", zorder=number, parse_math=False)
            continue
        place = (mark.left, mark.top), mark.width, mark.height
        shape: Patch = Rectangle(*place)
        if mark.radius:
            shape = FancyBboxPatch(*place, boxstyle=f"round,pad=0,rounding_size={mark.radius}")
        shape.set(facecolor=mark.fill, edgecolor=mark.line or "none", linewidth=0.75, zorder=number)
        axes.add_patch(shape)
    figure.savefig(path, dpi=DPI, format="png")   # whatever the name ends in
