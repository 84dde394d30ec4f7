"""The picture of docs/context.md: who computes which scores, and when. Drawn from the tiles that the ranks compute, not sketched.

    python docs/make_context_picture.py            # writes docs/context.svg
"""

from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle

from rankloom.parallel.context.sequences import Spans, cut_sequence, tiles

COLOURS, HATCHES = ("#0072B2", "#B87700", "#00805C", "#B04C86"), ("", "////", "----", "\\\\\\\\")   # told apart without colours too
LENGTH, RANKS, INK = 32, 4, "#22303C"
DOCUMENTS = (0, 5, 18, 26, LENGTH)


class Tile(NamedTuple):
    """A rectangle of scores, or, if it is causal, the triangle below its diagonal."""

    left: int
    top: int
    width: int
    height: int
    causal: bool


def draw(axes: Axes, spans: tuple[Spans, ...], documents: tuple[int, ...], title: str) -> None:
    """Queries downwards, keys to the right; a tile has the look of the rank that computes it, and the number of its hop."""
    at = [[position for span in mine for position in span] for mine in spans]
    work = [0.0] * RANKS
    for rank in range(RANKS):
        for owner in range(RANKS):
            for _, query, key, causal in tiles(spans[rank], spans[owner], causal=True, documents=(documents,)):
                tile = Tile(at[owner][key.start], at[rank][query.start], key.stop - key.start, query.stop - query.start, causal)
                draw_tile(axes, tile, rank)
                write_hop(axes, tile, rank, (rank - owner) % RANKS)
                work[rank] += tile.height * tile.width / (2 if causal else 1)
    axes.set(xlim=(0, LENGTH), ylim=(LENGTH, 0), xticks=[], yticks=[], aspect="equal")
    axes.set_xlabel("keys →", fontsize=9, color=INK)
    axes.set_ylabel("← queries", fontsize=9, color=INK)   # it is read upwards, so this points down
    shares = ", ".join(f"{each / sum(work):.0%}" for each in work)
    axes.set_title(f"{title}\nwork of ranks 0 to 3: {shares}", fontsize=9, color=INK)


def draw_tile(axes: Axes, tile: Tile, rank: int) -> None:
    """It has the look of the rank that computes it."""
    left, top, width, height, causal = tile
    look = {"facecolor": COLOURS[rank], "hatch": HATCHES[rank], "edgecolor": "white", "linewidth": 0.6}
    corners = [(left, top), (left, top + height), (left + width, top + height)]
    axes.add_patch(Polygon(corners, **look) if causal else Rectangle((left, top), width, height, **look))


def write_hop(axes: Axes, tile: Tile, rank: int, hop: int) -> None:
    """The number of the hop: in the tile, or, of a small triangle, beside its diagonal."""
    left, top, width, height, causal = tile
    if causal and width <= 2:
        axes.text(left + width / 2 + 0.35, top + height / 2 - 0.1, str(hop), color=COLOURS[rank], fontsize=6.5, fontweight="bold",
                  va="center")
        return
    across, down = (1 / 3, 2 / 3) if causal else (1 / 2, 1 / 2)   # to the middle of a triangle, or of a rectangle
    small = height == 1
    axes.text(left + width * across, top + height * down, str(hop), color="white", fontsize=5.5 if small else 7, ha="center",
              va="center_baseline" if small else "center",
              bbox={"facecolor": COLOURS[rank], "edgecolor": "none", "pad": 0.2 if small else 0.8})


def main() -> None:
    """Three cuts of the same 32 tokens."""
    matplotlib.rcParams |= {"svg.hashsalt": "rankloom", "hatch.linewidth": 0.5}
    figure = Figure(figsize=(11, 4.5))
    straight, zigzag = (cut_sequence(LENGTH, RANKS, zigzag=folded) for folded in (False, True))
    for axes, spans, documents, title in zip(
            figure.subplots(1, 3), (straight, zigzag, zigzag), ((0, LENGTH), (0, LENGTH), DOCUMENTS),
            ("4 chunks, in their order", "8 chunks, dealt in a zig-zag", "the same, four documents packed"), strict=True):
        draw(axes, spans, documents, title)
    ranks = [Patch(facecolor=COLOURS[rank], hatch=HATCHES[rank], edgecolor="white", label=f"rank {rank}") for rank in range(RANKS)]
    figure.legend(handles=ranks, loc="lower center", ncols=RANKS, frameon=False, fontsize=8, labelcolor=INK, title_fontsize=8,
                  title="numbers: in which hop of the ring; white: not computed")
    figure.tight_layout(rect=(0, 0.09, 1, 0.98))
    figure.savefig(Path(__file__).parent / "context.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
