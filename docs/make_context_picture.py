"""The picture of docs/context.md: who computes which scores, and when. Drawn from the tiles that the ranks compute, not sketched.

    python docs/make_context_picture.py            # writes docs/context.svg
"""

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle

from rankloom.parallel.sequences import Spans, cut_sequence, tiles

COLOURS, HATCHES = ("#0072B2", "#B87700", "#00805C", "#B04C86"), ("", "////", "----", "\\\\\\\\")   # told apart without colours too
LENGTH, RANKS, INK = 32, 4, "#22303C"
DOCUMENTS = (0, 5, 18, 26, LENGTH)


def draw(axes: Axes, spans: tuple[Spans, ...], documents: tuple[int, ...], title: str) -> None:
    """Queries downwards, keys to the right; a tile has the look of the rank that computes it, and the number of its hop."""
    at = [[position for span in mine for position in span] for mine in spans]
    work = [0.0] * RANKS
    for rank in range(RANKS):
        for owner in range(RANKS):
            for _, query, key, causal in tiles(spans[rank], spans[owner], causal=True, documents=(documents,)):
                top, left, height, width = at[rank][query.start], at[owner][key.start], query.stop - query.start, key.stop - key.start
                look = {"facecolor": COLOURS[rank], "hatch": HATCHES[rank], "edgecolor": "white", "linewidth": 0.6}
                corners = [(left, top), (left, top + height), (left + width, top + height)]
                axes.add_patch(Polygon(corners, **look) if causal else Rectangle((left, top), width, height, **look))
                work[rank] += height * width / (2 if causal else 1)
                if min(height, width) > 2:
                    third = (1 / 3, 2 / 3) if causal else (1 / 2, 1 / 2)
                    axes.text(left + width * third[0], top + height * third[1], str((rank - owner) % RANKS), color="white", fontsize=7,
                              ha="center", va="center", bbox={"facecolor": COLOURS[rank], "edgecolor": "none", "pad": 0.8})
    axes.set(xlim=(0, LENGTH), ylim=(LENGTH, 0), xticks=[], yticks=[], aspect="equal")
    shares = ", ".join(f"{each / sum(work):.0%}" for each in work)
    axes.set_title(f"{title}\nwork of ranks 0 to 3: {shares}", fontsize=9, color=INK)


def main() -> None:
    """Three cuts of the same 32 tokens."""
    matplotlib.rcParams |= {"svg.hashsalt": "rankloom", "hatch.linewidth": 0.5}
    figure = Figure(figsize=(10, 3.9))
    straight, zigzag = (cut_sequence(LENGTH, RANKS, zigzag=folded) for folded in (False, True))
    for axes, spans, documents, title in zip(
            figure.subplots(1, 3), (straight, zigzag, zigzag), ((0, LENGTH), (0, LENGTH), DOCUMENTS),
            ("4 chunks, in their order", "8 chunks, dealt in a zig-zag", "the same, four documents packed"), strict=True):
        draw(axes, spans, documents, title)
    ranks = [Patch(facecolor=COLOURS[rank], hatch=HATCHES[rank], edgecolor="white", label=f"rank {rank}") for rank in range(RANKS)]
    figure.legend(handles=ranks, loc="lower center", ncols=RANKS, frameon=False, fontsize=8, labelcolor=INK)
    figure.tight_layout()
    figure.savefig(Path(__file__).parent / "context.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
