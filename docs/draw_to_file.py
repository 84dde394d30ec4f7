"""What the scripts that draw the pictures of these pages share."""

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure


def draw_to_file(draw: Callable[[], Figure], about: str | None, name: str, *, hatch_width: float = 0.7) -> None:
    """The command line of a script: draw, and write to the file `name` of this folder, or to another; the same bytes each time.

    about: its docstring
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / name)
    args = parser.parse_args()
    matplotlib.rcParams |= {"svg.hashsalt": "rankloom", "font.family": "DejaVu Sans", "hatch.linewidth": hatch_width}
    draw().savefig(args.out, dpi=110, metadata={"Date": None} if args.out.suffix == ".svg" else None)
