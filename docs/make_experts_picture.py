"""The picture of docs/experts.md: how tokens reach experts on other ranks. Asked of a spread layer, not sketched.

    python docs/make_experts_picture.py            # writes docs/experts.svg
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from draw_to_file import draw_to_file
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path as Curve

import rankloom as rl
from rankloom.models.config import MoEConfig
from rankloom.models.moe import MoE
from rankloom.parallel.expert import expert_parallel

INK, PALE = "#22303C", "#6B7885"
COLOURS, HATCHES = ("#0072B2", "#B87700", "#00805C", "#B04C86"), ("", "////", "----", "\\\\\\\\")   # told apart without colours too
RANKS, EXPERTS, TOKENS, WIDTH = len(COLOURS), 8, 6, 16
EACH = EXPERTS // RANKS
LEFTS, LIFT = (4.4, 9.4, 22.0, 27.4, 31.6), 9.0   # of the columns, and from one rank's band to the next
TITLES = ("tokens", "sorted\nby expert", "received, from\nrank after rank", "sorted again\nby expert", "experts")


class Row(NamedTuple):
    """A token on its way: where it comes from, and to which expert it goes."""

    source: int
    token: int
    expert: int


class Seen(NamedTuple):
    """What one rank has: its tokens in their order, and the rows that its experts get, in the order in which they get them."""

    tokens: list[Row]
    at_experts: list[Row]


def watch(world: rl.World) -> Seen:
    """One forward of a layer whose experts are spread. The first two numbers of a token say whose it is; the router does not read them."""
    layer, draws = MoE(MoEConfig(experts=EXPERTS, top_k=1, ffn=4), WIDTH), torch.Generator().manual_seed(0)   # the ranks are threads
    for param in layer.parameters():
        torch.nn.init.normal_(param, generator=draws)
    with torch.no_grad():
        layer.router.weight[:, :2] = 0
    expert_parallel(layer, world)
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(31 + world.rank))
    x[..., 0], x[0, :, 1] = world.rank, torch.arange(TOKENS)
    got: list[Row] = []

    def look(module: torch.nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> None:
        rows, counts = given
        experts = torch.arange(EACH).add(world.rank * EACH).repeat_interleave(counts).tolist()
        got.extend(Row(int(row[0]), int(row[1]), expert) for row, expert in zip(rows.tolist(), experts, strict=True))

    layer.experts.register_forward_pre_hook(look)
    layer.eval()(x)
    chosen = layer.router(x).experts.flatten().tolist()
    return Seen([Row(world.rank, token, expert) for token, expert in enumerate(chosen)], got)


def columns(seen: Sequence[Seen]) -> list[list[list[Row]]]:
    """For each of the first four columns and each rank: its rows, from the top."""
    tokens, at_experts = [each.tokens for each in seen], [each.at_experts for each in seen]
    leaving = [sorted(mine, key=lambda row: row.expert) for mine in tokens]
    received = [[row for mine in leaving for row in mine if row.expert // EACH == rank] for rank in range(RANKS)]
    assert [sorted(rows, key=lambda row: row.expert) for rows in received] == at_experts, "the experts got other rows"
    return [tokens, leaving, received, at_experts]


def top_of(rank: int) -> float:
    """The upper end of a rank's band."""
    return (RANKS - rank) * LIFT


def draw_row(axes: Axes, left: float, top: float, row: Row) -> None:
    """A token: it has the look of the rank that it goes to, and the number of its expert."""
    to = row.expert // EACH
    axes.add_patch(Rectangle((left, top - 0.92), 1.6, 0.92, facecolor=COLOURS[to], hatch=HATCHES[to], edgecolor="white", linewidth=0.4))
    axes.text(left + 0.8, top - 0.48, str(row.expert), color="white", fontsize=8, ha="center", va="center_baseline",
              bbox={"facecolor": COLOURS[to], "edgecolor": "none", "pad": 0.6})


def draw_way(axes: Axes, start: tuple[float, float], stop: tuple[float, float], row: Row) -> None:
    """From rank to rank."""
    middle = (start[0] + stop[0]) / 2
    curve = Curve([start, (middle, start[1]), (middle, stop[1]), stop], [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
    stays = row.expert // EACH == row.source
    axes.add_patch(PathPatch(curve, facecolor="none", edgecolor=COLOURS[row.expert // EACH], linewidth=1.1, alpha=0.85,
                             linestyle=(0, (2, 2)) if stays else "-"))


def draw_experts(axes: Axes, rank: int, rows: Sequence[Row]) -> None:
    """The experts of a rank, each beside the run of its rows; below them those without rows."""
    at = top_of(rank)
    counts = {expert: sum(row.expert == expert for row in rows) for expert in range(rank * EACH, (rank + 1) * EACH)}
    for expert, count in sorted(counts.items(), key=lambda item: not item[1]):
        height, words = max(count, 1), f"expert {expert}" if count else f"expert {expert}: none"
        axes.add_patch(Rectangle((LEFTS[4], at - height + 0.06), 5.6, height - 0.12, facecolor="white", edgecolor=COLOURS[rank],
                                 linewidth=1.2, linestyle="-" if count else (0, (2, 2))))
        axes.text(LEFTS[4] + 2.8, at - height / 2 - 0.03, words, color=INK, fontsize=8, ha="center", va="center_baseline")
        at -= height


def draw(seen: Sequence[Seen]) -> Figure:
    """The whole picture, from left to right."""
    figure = Figure(figsize=(9.6, 7.0), facecolor="white")
    axes = figure.subplots()
    rows_of = columns(seen)
    for left, title in zip(LEFTS, TITLES, strict=True):
        axes.text(left, top_of(0) + 0.9, title, color=INK, fontsize=9.5, fontweight="bold", va="bottom")
    for rank in range(RANKS):
        axes.text(0, top_of(rank) - 0.5, f"rank {rank}", color=COLOURS[rank], fontsize=11, fontweight="bold", va="center")
        for column, left in enumerate(LEFTS[:4]):
            for place, row in enumerate(rows_of[column][rank]):
                draw_row(axes, left, top_of(rank) - place, row)
        draw_experts(axes, rank, rows_of[3][rank])
        for place, row in enumerate(rows_of[1][rank]):
            to = row.expert // EACH
            there = rows_of[2][to].index(row)
            draw_way(axes, (LEFTS[1] + 1.8, top_of(rank) - place - 0.46), (LEFTS[2] - 0.2, top_of(to) - there - 0.46), row)
    axes.text(0, 1.4, "a number is that of an expert; colour and lines are those of the rank that has it; dotted: stays on its rank.\n"
              "What the experts return goes the same ways back, and is weighted and added to its tokens.", color=PALE, fontsize=9, va="top")
    axes.set(xlim=(-0.4, 37.6), ylim=(-1.2, top_of(0) + 3.0))
    axes.set_axis_off()
    figure.tight_layout(pad=0.3)
    return figure


if __name__ == "__main__":
    draw_to_file(lambda: draw(rl.simulate(RANKS, watch)), __doc__, "experts.svg", hatch_width=0.5)
