"""Draw a mesh: a box for each rank, grouped by host, coloured by pipeline stage, with marks for what the rank holds.

    strip   the blocks of the model, from the embedding down to the head; in colour: this rank's
    slab    the matrices of these blocks: a row for each tensor rank, a column for each shard rank; dark: what this rank's optimizer updates
    bars    this rank's experts, its rows of the batch, and its tokens of a row

Only marks that differ between ranks are drawn. Above 16 ranks boxes are small, with fewer words.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rankloom.base.mesh import Mesh
from rankloom.base.quantities import show_bytes
from rankloom.base.ranks import RankPart, experts_of, modules_of, say_modules
from rankloom.watch.canvas import Box, Mark, Sheet, Word

# Told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#C8500A", "#007F5F", "#A8508A", "#B07A00", "#3B8FC4", "#7A4E25", "#5F6B76")
INK, PALE, GHOST, PANEL, EDGE = "#22303C", "#66727E", "#E3E8EC", "#F4F6F8", "#CBD3DA"
FEW = 16            # ranks up to which boxes are large
EDGE_GAP, TOP, GAP = 20.0, 62.0, 12.0
SHORT = {"parameters": "param", "gathered": "whole", "gradients": "grad", "optimizer": "optim"}


@dataclass(frozen=True, slots=True)
class Size:
    """Lengths in a box, and its font sizes."""

    width: float
    header: float
    slab: float
    strip: float
    bar: float
    words: float
    gap: float


LARGE = Size(width=236, header=27, slab=86, strip=18, bar=16, words=10, gap=12)
SMALL = Size(width=142, header=20, slab=52, strip=10, bar=11, words=7.5, gap=8)


@dataclass(frozen=True, slots=True)
class Scene:
    """All ranks, and what a box shows besides its own rank.

    hosts: the ranks of each host; None: not known
    kept:  parameters stay whole between steps (stages 0 to 2)
    """

    mesh: Mesh
    ranks: Sequence[RankPart]
    hosts: Sequence[Sequence[int]] | None
    kept: bool
    title: str
    note: str

    @property
    def size(self) -> Size:
        """The size of every box."""
        return LARGE if len(self.ranks) <= FEW else SMALL

    @property
    def bars(self) -> list[str]:
        """The bars to draw."""
        rows = len({part.rows for part in self.ranks}) > 1
        there = {"experts": self.mesh.expert > 1, "rows": rows, "tokens": self.mesh.context > 1}
        return [name for name, drawn in there.items() if drawn]

    @property
    def height(self) -> float:
        """The height of a box."""
        size = self.size
        return size.header + size.slab + 2 * size.gap + size.bar * (len(self.bars) + (size is LARGE))

    @property
    def label(self) -> float:
        """The height of a panel's label."""
        return 20.0 if self.hosts else 0.0

    @property
    def abbreviates(self) -> bool:
        """Whether axes are named by their first letters, for lack of room."""
        return self.size is SMALL or len(self.mesh.in_use()) > 3

    @property
    def columns(self) -> int:
        """The number of boxes side by side."""
        most = max(map(len, self.panels))
        return min(most, 4 if self.size is LARGE else 8)

    @property
    def panels(self) -> Sequence[Sequence[int]]:
        """The ranks of each panel."""
        return self.hosts or [range(len(self.ranks))]


def draw_sheet(scene: Scene) -> Sheet:
    """The whole sheet."""
    marks: list[Mark] = [Word(EDGE_GAP, 28, scene.title, 17, INK, bold=True), Word(EDGE_GAP, 47, scene.note, 11, PALE)]
    top = TOP
    width = 2 * EDGE_GAP + scene.columns * (scene.size.width + GAP) + GAP
    for number, ranks in enumerate(scene.panels):
        rows = -(-len(ranks) // scene.columns)
        height = scene.label + rows * (scene.height + GAP) + GAP
        marks.append(Box(EDGE_GAP, top, width - 2 * EDGE_GAP, height, PANEL, EDGE, 8))
        marks += draw_panel(scene, number, top)
        top += height + GAP
    legend = list(draw_legend(scene, top + 10))
    marks += legend
    words = [mark for mark in marks if isinstance(mark, Word) and mark.at == "start"]
    rightmost = max(word.x + 0.6 * word.size * len(word.text) for word in words)   # by the mean width of a letter
    lowest = max(mark.y if isinstance(mark, Word) else mark.top + mark.height for mark in legend)
    return Sheet(max(width, rightmost + EDGE_GAP), lowest + 18, tuple(marks), f"{scene.title}: which rank holds what")


def draw_panel(scene: Scene, number: int, top: float) -> Iterator[Mark]:
    """The boxes of one panel, and the name of its host where that is known."""
    if scene.hosts:
        yield Word(EDGE_GAP + GAP, top + 19, f"host {number}", 11, PALE, bold=True)
    for place, rank in enumerate(scene.panels[number]):
        row, column = divmod(place, scene.columns)
        left = EDGE_GAP + GAP + column * (scene.size.width + GAP)
        yield from draw_rank(scene, scene.ranks[rank], left, top + scene.label + GAP + row * (scene.height + GAP))


def colour_of(part: RankPart) -> str:
    """The colour of the rank's pipeline stage."""
    return COLOURS[part.coords["pipe"] % len(COLOURS)]


def tint(colour: str, white: float) -> str:
    """The colour mixed with a share `white` of white.

    >>> tint("#000080", 0.5)
    '#8080c0'
    """
    parts = (int(colour[at:at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def draw_rank(scene: Scene, part: RankPart, left: float, top: float) -> Iterator[Mark]:
    """One box."""
    size, colour = scene.size, colour_of(part)
    yield Box(left, top, size.width, scene.height, "#ffffff", EDGE, 6)
    yield Box(left, top, size.width, size.header, colour, "", 6)
    yield Box(left, top + size.header - 6, size.width, 6, colour)
    large = size is LARGE
    base = top + size.header * 0.68
    yield Word(left + size.gap, base, f"rank {part.rank}" if large else str(part.rank), 14 if large else 11, "#ffffff", bold=True)
    axes = scene.mesh.in_use()
    if scene.abbreviates:
        coords = " ".join(f"{axis[0]}{part.coords[axis]}" for axis in axes)
    else:
        coords = ", ".join(f"{axis} {part.coords[axis]}" for axis in axes)
    yield Word(left + size.width - size.gap, base, coords, size.words, "#ffffff", "end")
    at = top + size.header + size.gap
    yield from draw_strip(scene, part, left + size.gap, at)
    slab = left + 2 * size.gap + size.strip
    yield from draw_slab(scene, part, slab, at)
    yield from draw_memory(scene, part, slab + size.slab + size.gap, at)
    at += size.slab + size.gap * 0.6
    if large:
        yield Word(left + size.gap, at + 8, say_modules(modules_of(part)), size.words, INK)
        at += size.bar
    for number, bar in enumerate(scene.bars):
        yield from draw_bar(scene, part, bar, left + size.gap, at + number * size.bar)


def draw_strip(scene: Scene, part: RankPart, left: float, top: float) -> Iterator[Mark]:
    """The blocks of the model, one below the other."""
    every = list(dict.fromkeys(piece for rank in scene.ranks for piece in modules_of(rank)))
    here = set(modules_of(part))
    height = scene.size.slab / len(every)
    gap = 1.0 if height > 3 else 0.0
    for number, piece in enumerate(every):
        fill = colour_of(part) if piece in here else GHOST
        yield Box(left, top + number * height, scene.size.strip, height - gap, fill)


def draw_slab(scene: Scene, part: RankPart, left: float, top: float) -> Iterator[Mark]:
    """The matrices, cut over tensor ranks (rows) and shard ranks (columns)."""
    rows, columns = scene.mesh.tensor, scene.mesh.shard
    height, width = scene.size.slab / rows, scene.size.slab / columns
    gap = 1.0 if min(height, width) > 4 else 0.0
    for row in range(rows):
        for column in range(columns):
            fill = GHOST
            if row == part.coords["tensor"]:
                fill = colour_of(part) if column == part.coords["shard"] else beside(colour_of(part), scene)
            yield Box(left + column * width, top + row * height, width - gap, height - gap, fill)


def beside(colour: str, scene: Scene) -> str:
    """The colour of what other shard ranks update: paler where the rank holds it only while it is used."""
    return tint(colour, 0.5 if scene.kept else 0.82)


def draw_memory(scene: Scene, part: RankPart, left: float, top: float) -> Iterator[Mark]:
    """The rank's bytes; by kind where there is room."""
    total = show_bytes(part.total)
    if scene.size is SMALL:
        number, unit = total.split()
        yield Word(left, top + 10, number, 11, INK, bold=True)
        yield Word(left, top + 20, unit, 8, PALE)
        return
    yield Word(left, top + 12, total, 13, INK, bold=True)
    for line, (kind, nbytes) in enumerate((kind, nbytes) for kind, nbytes in part.held.items() if nbytes):
        yield Word(left, top + 31 + 14 * line, show_bytes(nbytes), 9, INK)
        yield Word(left + 50, top + 31 + 14 * line, SHORT[kind], 8, PALE)


def draw_bar(scene: Scene, part: RankPart, kind: str, left: float, top: float) -> Iterator[Mark]:
    """One of `bars`: a line for the whole, with this rank's part in colour."""
    size = scene.size
    label = size.words * 4.6
    width, height = size.width - 2 * size.gap - label, size.bar * 0.55
    yield Word(left, top + height, kind, size.words, PALE)
    yield Box(left + label, top, width, height, GHOST)
    spans, whole = _spans(scene, part, kind)
    for span in spans:
        yield Box(left + label + width * span.start / whole, top, width * len(span) / whole, height, colour_of(part))


def _spans(scene: Scene, part: RankPart, kind: str) -> tuple[Sequence[range], int]:
    """Which of the experts, rows or tokens are this rank's, and how many there are in all."""
    if kind == "experts":
        found = experts_of(part)
        return ([found[0]], found[1]) if found else ([], 1)
    if kind == "rows":
        return [part.rows], max(other.rows.stop for other in scene.ranks)
    return part.tokens, max(span.stop for other in scene.ranks for span in other.tokens)


def draw_legend(scene: Scene, top: float) -> Iterator[Mark]:
    """The legend: one line for each mark."""
    lines = list(legend_lines(scene))
    for number, (colours, text) in enumerate(lines):
        y = top + 18 * number
        for at, colour in enumerate(colours):
            yield Box(EDGE_GAP + 14 * at, y, 11, 11, colour)
        yield Word(EDGE_GAP + 14 * len(colours) + (6 if colours else 0), y + 9.5, text, 10.5, INK)
    yield Word(EDGE_GAP, top + 18 * len(lines) + 10, "bytes: between two steps, without activations", 10.5, PALE)


def legend_lines(scene: Scene) -> Iterator[tuple[tuple[str, ...], str]]:
    """The colours and the text of each line."""
    mesh, colour = scene.mesh, COLOURS[0]
    yield (colour,), "strip: the blocks of the model, from the embedding down to the head; in colour those that are here"
    cuts = [f"a row for each of {mesh.tensor} tensor ranks"] if mesh.tensor > 1 else []
    cuts += [f"a column for each of {mesh.shard} shard ranks"] if mesh.shard > 1 else []
    cut = f"{' and '.join(cuts)}; dark: what this rank's optimizer updates" if cuts else "none is cut"
    yield (colour,), f"square: their matrices, {cut}"
    if mesh.shard > 1:
        how_long = "kept whole" if scene.kept else "gathered while it is used, then let go"
        yield (beside(colour, scene),), f"beside that, {how_long}"
    yield (GHOST,), "on other ranks only"
    if scene.abbreviates:
        yield (), "letters: " + ", ".join(f"{axis[0]} {axis}" for axis in mesh.in_use())
    if mesh.pipe > 1:
        stages = tuple(COLOURS[at % len(COLOURS)] for at in range(mesh.pipe))
        yield stages, f"stages of the pipeline: pipe 0 to {mesh.pipe - 1}"
