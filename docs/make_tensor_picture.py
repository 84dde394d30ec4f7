"""The picture of docs/tensor.md: which rank holds which part of a model's matrices. Asked of a split model, not sketched.

    python docs/make_tensor_picture.py            # writes docs/tensor.svg
"""


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
SHOWN = {   # name -> title, column and row of the picture
    "embedding.weight": ("embedding", 0, 0), "blocks.0.attention_norm.weight": ("norm", 1, 0),
    "blocks.0.attention.query.weight": ("query", 2, 0),
    "blocks.0.attention.key.weight": ("key", 3, 0), "blocks.0.attention.value.weight": ("value", 4, 0),
    "blocks.0.attention.output.weight": ("output", 5, 0), "blocks.0.mlp_norm.weight": ("norm", 1, 1),
    "blocks.0.mlp.gate.weight": ("gate", 2, 1),
    "blocks.0.mlp.up.weight": ("up", 3, 1), "blocks.0.mlp.down.weight": ("down", 5, 1), "head.weight": ("head", 6, 1)}
NOTES = {"embedding.weight": "by rows of the vocabulary;\n30 do not divide by 4", "blocks.0.attention.query.weight": "column: 2 heads each",
         "blocks.0.attention.key.weight": "2 heads, 4 ranks:\nneighbours share one", "blocks.0.attention.output.weight": "row",
         "blocks.0.mlp.gate.weight": "column", "blocks.0.mlp.up.weight": "column", "blocks.0.mlp.down.weight": "row",
         "head.weight": "as the embedding", "blocks.0.mlp_norm.weight": "whole", "blocks.0.attention_norm.weight": "whole"}
CELL = 0.22


def held_by() -> dict[str, Holding]:
    """How a GPT of this shape lies on the ranks."""
    return rl.simulate(RANKS, lambda world: holdings(rl.tensor_parallel(rl.GPT(SHAPE), None, world)))[0]


def look(rank: int) -> dict[str, str]:
    """How what a rank holds is filled."""
    return {"facecolor": COLOURS[rank], "hatch": HATCHES[rank], "edgecolor": "white"}


def draw_matrix(axes: Axes, left: float, top: float, name: str, holding: Holding) -> None:
    """One matrix, [out, in] with `out` downwards, each span with the look of its rank, halved where two ranks hold it."""
    title = SHOWN[name][0]
    rows, columns = holding.shape if len(holding.shape) == 2 else (holding.shape[0], 1)
    axes.text(left, top + 0.25, title, color=INK, fontsize=11, fontweight="bold", va="bottom")
    axes.text(left, top - rows * CELL - 0.3, NOTES.get(name, ""), color=PALE, fontsize=9, va="top")
    if holding.dim is None:
        axes.add_patch(Rectangle((left, top - rows * CELL), columns * CELL, rows * CELL, facecolor=WHOLE))
    for rank, spans in enumerate(holding.spans):
        sharers = holding.sharers(rank, RANKS)
        share = 1 / len(sharers)
        for start, stop in spans:
            across = (left + sharers.index(rank) * share * columns * CELL, columns * CELL * share) if holding.dim == 0 else (
                left + start * CELL, (stop - start) * CELL)
            down = (start * CELL, stop * CELL) if holding.dim == 0 else (0.0, rows * CELL)
            axes.add_patch(Rectangle((across[0], top - down[1]), across[1], down[1] - down[0], **look(rank)))


def draw() -> Figure:
    """The whole picture."""
    figure = Figure(figsize=(13.2, 7.2), facecolor="white")
    axes = figure.subplots()
    found = held_by()
    lefts = (0.0, 5.0, 6.6, 11.4, 15.8, 20.2, 25.0)
    for name, (_, column, row) in SHOWN.items():
        draw_matrix(axes, lefts[column], 16.0 - row * 8.2, name, found[name])
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
