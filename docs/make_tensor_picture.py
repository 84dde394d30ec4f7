"""The picture of docs/tensor.md: which rank holds which part of a model's matrices. Asked of a split model, not sketched.

    python docs/make_tensor_picture.py            # writes docs/tensor.svg
"""

from typing import NamedTuple

from draw_to_file import draw_to_file
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import rankloom as rl
from rankloom.parallel.tensor.holding import Holding, holdings

INK, PALE, WHOLE = "#22303C", "#6B7885", "#D5DBE1"
COLOURS, HATCHES = ("#0072B2", "#B87700", "#00805C", "#B04C86"), ("", "///", "---", "\\\\\\")   # told apart without colours too
RANKS = len(COLOURS)
SHAPE = rl.GPTConfig(vocab_size=30, seq_len=8, width=16, layers=1, heads=8, kv_heads=2, ffn=20)
CELL = 0.22


class Shown(NamedTuple):
    """A matrix in the picture: where it is, and the words above and below it."""

    column: int
    row: int
    title: str
    note: str = ""


SHOWN = {
    "embedding.weight": Shown(0, 0, "embedding", "by rows of the vocabulary;\n30 do not divide by 4"),
    "blocks.0.attention_norm.weight": Shown(1, 0, "norm", "whole"),
    "blocks.0.attention.query.weight": Shown(2, 0, "query", "column: 2 heads each"),
    "blocks.0.attention.key.weight": Shown(3, 0, "key", "2 heads, 4 ranks:\nneighbours share one"),
    "blocks.0.attention.value.weight": Shown(4, 0, "value"),
    "blocks.0.attention.output.weight": Shown(5, 0, "output", "row"),
    "blocks.0.mlp_norm.weight": Shown(1, 1, "norm", "whole"),
    "blocks.0.mlp.gate.weight": Shown(2, 1, "gate", "column"),
    "blocks.0.mlp.up.weight": Shown(3, 1, "up", "column"),
    "blocks.0.mlp.down.weight": Shown(5, 1, "down", "row"),
    "head.weight": Shown(6, 1, "head", "as the embedding")}


def held_by() -> dict[str, Holding]:
    """How a GPT of this shape lies on the ranks."""
    return rl.simulate(RANKS, lambda world: holdings(rl.tensor_parallel(rl.GPT(SHAPE), None, world)))[0]


def look(rank: int) -> dict[str, str]:
    """How what a rank holds is filled."""
    return {"facecolor": COLOURS[rank], "hatch": HATCHES[rank], "edgecolor": "white"}


def draw_matrix(axes: Axes, left: float, top: float, shown: Shown, holding: Holding) -> None:
    """One matrix, [out, in] with `out` downwards, each span with the look of its rank, halved where two ranks hold it."""
    rows, columns = holding.shape if len(holding.shape) == 2 else (holding.shape[0], 1)
    axes.text(left, top + 0.25, shown.title, color=INK, fontsize=11, fontweight="bold", va="bottom")
    axes.text(left, top - rows * CELL - 0.3, shown.note, color=PALE, fontsize=9, va="top")
    if holding.dim is None:
        axes.add_patch(Rectangle((left, top - rows * CELL), columns * CELL, rows * CELL, facecolor=WHOLE))
    for rank, spans in enumerate(holding.spans):
        sharers = holding.sharers(rank, RANKS)
        share = 1 / len(sharers)
        for start, stop in spans:
            if holding.dim == 0:
                x, width = left + sharers.index(rank) * share * columns * CELL, columns * CELL * share
                axes.add_patch(Rectangle((x, top - stop * CELL), width, stop * CELL - start * CELL, **look(rank)))
            else:
                corner = (left + start * CELL, top - rows * CELL)
                axes.add_patch(Rectangle(corner, (stop - start) * CELL, rows * CELL, **look(rank)))


def draw() -> Figure:
    """The whole picture."""
    figure = Figure(figsize=(13.2, 7.2), facecolor="white")
    axes = figure.subplots()
    found = held_by()
    lefts = (0.0, 5.0, 6.6, 11.4, 15.8, 20.2, 25.0)
    for name, shown in SHOWN.items():
        draw_matrix(axes, lefts[shown.column], 16.0 - shown.row * 8.2, shown, found[name])
    for rank in range(RANKS):
        axes.add_patch(Rectangle((rank * 3.4, -0.6), 0.7, 0.7, **look(rank)))
        axes.text(rank * 3.4 + 1.0, -0.25, f"rank {rank}", color=INK, fontsize=10.5, va="center")
    axes.add_patch(Rectangle((RANKS * 3.4, -0.6), 0.7, 0.7, facecolor=WHOLE))
    axes.text(RANKS * 3.4 + 1.0, -0.25, "every rank", color=INK, fontsize=10.5, va="center")
    axes.set(xlim=(-0.3, 29.2), ylim=(-1.2, 17.4), aspect="equal")
    axes.set_axis_off()
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    draw_to_file(draw, __doc__, "tensor.svg")
