"""Collectives on the CPUs of one host: rankloom, gloo and Open MPI in turn, from 4 KiB to 64 MiB, in fp32.

    python benchmarks/all_reduce.py                       # 2 ranks
    python benchmarks/all_reduce.py --ranks 2,4,8 --turns 9

Each library has rank processes of its own; while one is measured, the others sleep in a read. A turn measures every case on every
library, in rotating order, as loops of many calls without a barrier between; the slowest rank counts. Shown are the median
over turns of each turn's median, and the smallest of all; ratios are taken inside a turn. Every case is checked once, element by element.
With as many cores as ranks, each rank is pinned to one. All tensors lie in pages of the same size: of 4 KiB, as torch allocates them;
--huge-pages asks for huge ones for all. (numpy alone would ask for them, and Open MPI's cross-memory attach is 3x as fast on them.)

The peers get two settings each, and the better one counts, case by case. gloo moves bytes in threads of its own: pinned with its rank, and
free. Open MPI, from an environment of its own that is made on first use in build/openmpi: its defaults, and for all-reduce also the ring in
segments of 256 KiB, which is 3x as fast as its own choice at 64 MiB; both with cross-memory attach, and with ranks that yield where there
are more ranks than cores.

For rankloom "arena" are tensors from `group.buffer` through `Group`, "rankloom" any tensors through torch.distributed. "Group on gloo" is
gloo as rankloom starts it: no peer.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from common import RESULTS, Words, busy_cores, count, counts, keep, machine, names_of, show
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from pool import Pool

from rankloom.base.quantities import bus_factor, show_bytes

HERE = Path(__file__).parent
OPEN_MPI = HERE.parent / "build" / "openmpi"
SIZES = tuple(kib << 10 for kib in (4, 64, 1024, 4096, 16384, 65536))
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
RING = {"coll_tuned_priority": 95, "coll_tuned_use_dynamic_rules": 1, "coll_tuned_allreduce_algorithm": 5,
        "coll_tuned_allreduce_algorithm_segmentsize": 256 << 10}
WAYS = {   # what is shown -> whose processes, which of their ways
    "gloo": ("gloo", ""), "gloo, free": ("gloo, free", ""), "Group on gloo": ("gloo", "Group"),
    "Open MPI": ("Open MPI", ""), "Open MPI, ring": ("Open MPI, ring", ""),
    "rankloom": ("rankloom", ""), "rankloom, Group": ("rankloom", "Group"),
    "arena, torch": ("rankloom", "arena, torch"), "arena": ("rankloom", "arena"),
}
STYLE = {"gloo": ("#777777", "o-"), "gloo, free": ("#777777", "o:"), "Group on gloo": ("#CC79A7", "x-"),
         "Open MPI": ("#D55E00", "s-"), "Open MPI, ring": ("#D55E00", "s:"),
         "rankloom": ("#0072B2", "^-"), "arena": ("#009E73", "v-")}
LEGEND = {"gloo": "gloo, its threads pinned to the rank's core", "gloo, free": "gloo, its threads on any core",
          "Group on gloo": "rankloom's Group on gloo,\nwhose thread waits for its turn",
          "Open MPI": "Open MPI, its defaults", "Open MPI, ring": "Open MPI, ring in segments of 256 KiB",
          "rankloom": "rankloom, any tensor,\nthrough torch.distributed",
          "arena": "rankloom, a tensor of group.buffer\n(arena: memory that all ranks map)"}
Case = tuple[str, int]
Times = dict[str, list[list[float]]]   # way -> for each turn, seconds per call of each loop


def start(name: str, ranks: int, folder: Path, huge_pages: bool) -> Pool:
    """The rank processes of one library."""
    library = name.split(",")[0]
    few = ranks <= (os.cpu_count() or 1)   # with more ranks than cores, the scheduler knows best
    pin = "pinned" if few and name != "gloo, free" else "free"
    arguments = [str(HERE / "collective_rank.py"), library, str(ranks), str(max(SIZES)), pin]
    env = dict.fromkeys(("NUMPY_MADVISE_HUGEPAGE", "THP_MEM_ALLOC_ENABLE"), str(int(huge_pages)))
    if library != "Open MPI":
        return Pool(name, ranks, folder, [sys.executable, *arguments], env)
    settings = (RING if name == "Open MPI, ring" else {}) | {"mpi_yield_when_idle": int(not few)}
    mpiexec = [str(OPEN_MPI / "bin" / "mpiexec"), "-n", str(ranks), "--bind-to", "core" if few else "none"]
    mpiexec += [] if few else ["--oversubscribe"]
    mpiexec += [word for key, value in settings.items() for word in ("--mca", key, str(value))]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return Pool(name, ranks, folder, [str(OPEN_MPI / "bin" / "python"), *arguments], env | as_root, launcher=mpiexec)


def make_open_mpi() -> None:
    """An environment with Open MPI, beside ours: nothing of this project may come to need it."""
    if (OPEN_MPI / "bin" / "mpiexec").exists():
        return
    install = [str(OPEN_MPI / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "-r", str(HERE / "mpi-requirements.txt")]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(OPEN_MPI)], check=True)
        subprocess.run(install, check=True)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"Open MPI could not be installed ({error}); --libraries gloo,rankloom measures without it") from error


def cases(sizes: Iterable[int]) -> list[Case]:
    """Operation and bytes: of the whole tensor, which for all_gather is the result and for reduce_scatter what goes in."""
    return [(op, size) for op in (*OPS, "ping_pong") for size in sizes]


def measure(libraries: dict[str, Pool], turns: int, seconds: float, loops: int, sizes: list[int]) -> dict[Case, Times]:
    """Every case on every library, in turns."""
    found: dict[Case, Times] = {}
    for case in cases(sizes):
        found[case] = {way: [] for way, (library, _) in WAYS.items()
                       if library in libraries and (way != "Open MPI, ring" or case[0] == "all_reduce")}
    calls = {(case, way): check_and_size(libraries, case, way, seconds) for case in found for way in found[case]}
    for turn in range(turns):
        for case, times in found.items():
            names = list(times)
            for way in names[turn % len(names):] + names[:turn % len(names)]:
                times[way].append(loop(libraries, case, way, calls[case, way], loops))
        print(f"turn {turn + 1} of {turns}", file=sys.stderr, flush=True)
    return found


def check_and_size(libraries: dict[str, Pool], case: Case, way: str, seconds: float) -> int:
    """Check the results of a case, and find how many calls take about `seconds`."""
    library, kind = WAYS[way]
    libraries[library].ask(do="check", way=kind, op=case[0], bytes=case[1])
    once = min(loop(libraries, case, way, 3, 2))
    return max(3, min(5000, round(seconds / once)))


def loop(libraries: dict[str, Pool], case: Case, way: str, calls: int, loops: int) -> list[float]:
    """Seconds per call of each loop, of the rank that took longest; of a ping-pong, one way."""
    library, kind = WAYS[way]
    answers = libraries[library].ask(do="measure", way=kind, op=case[0], bytes=case[1], calls=calls, loops=loops)
    return [max(of_all) / (2 if case[0] == "ping_pong" else 1) for of_all in zip(*answers)]


# ---------------------------------------------------------------------- what came out

def median_of_turns(turns: list[list[float]]) -> float:
    """The median over turns of each turn's median."""
    return statistics.median(map(statistics.median, turns))


def times_faster(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """Their time over ours: the median of the ratios inside each turn."""
    return statistics.median(statistics.median(b) / statistics.median(a) for a, b in zip(ours, theirs))


def best(times: Times, peer: str) -> str | None:
    """The setting of a peer that is fastest in this case."""
    return min((way for way in times if way.split(",")[0] == peer), key=lambda way: median_of_turns(times[way]), default=None)


def bars(ranks: int, case: Case) -> dict[tuple[str, str], float]:
    """How many times faster which of our ways has to be than whom."""
    op, size = case
    if op == "ping_pong":
        return {("arena", "gloo"): 40, ("rankloom", "gloo"): 40} if size == 4 << 10 else {}
    if ranks > 2:
        return {("arena", "gloo"): 8, ("rankloom", "gloo"): 8}
    found = {("rankloom", "gloo"): 5, ("rankloom", "Open MPI"): 1.5}
    if size == 4 << 10:
        found["arena", "gloo"] = 50
    elif size >= 1 << 20:
        found["arena", "gloo"] = 20
    return found


def compare(ranks: int, case: Case, times: Times, way: str, peer: str) -> str:
    """`23.4x`, and whether that meets the bar."""
    theirs = best(times, peer)
    if theirs is None or way not in times:
        return "-"
    reached = times_faster(times[way], times[theirs])
    bar = bars(ranks, case).get((way, peer))
    if bar is None:
        return f"{reached:.1f}x"
    return f"{reached:.1f}x, {'met' if reached >= bar else 'MISSED'} {bar:g}"


def summary(ranks: int, found: dict[Case, Times]) -> list[dict]:
    """One row per case: milliseconds of every way, and the ratios with their bars."""
    ways = [way for way in WAYS if any(way in times for times in found.values())]
    return [{"operation": case[0], "ranks": ranks, "size": show_bytes(case[1])}
            | {f"{way} ms": f"{median_of_turns(times[way]) * 1e3:.3g}" if way in times else "-" for way in ways}
            | {f"{way} over {peer}": compare(ranks, case, times, way, peer)
               for way in ("arena", "rankloom") for peer in ("gloo", "Open MPI")}
            for case, times in found.items()]


def all_rows(ranks: int, found: dict[Case, Times]) -> list[dict]:
    """One row per case and way, for the JSON file; busbw as nccl-tests defines it."""
    return [{"operation": op, "ranks": ranks, "bytes": size, "way": way, "median ms": round(median_of_turns(turns) * 1e3, 5),
             "min ms": round(min(map(min, turns)) * 1e3, 5),
             "busbw GB/s": round(bus_factor(op, ranks) * size / median_of_turns(turns) / 1e9, 2),
             **{f"times {peer}": round(times_faster(turns, times[rival]), 2)
                for peer in ("gloo", "Open MPI") if (rival := best(times, peer)) is not None}}
            for (op, size), times in found.items() for way, turns in times.items()]


def draw(ranks: int, rows: list[dict], path: Path) -> None:
    """Time over size, doubly logarithmic, one panel an operation. rows: as `all_rows` made them, or read from the JSON file"""
    figure = Figure(figsize=(15, 8), layout="constrained")
    *panels, last = figure.subplots(2, 3).flat
    rows = [row for row in rows if row["ranks"] == ranks]
    few = any(row["way"] == "gloo, free" for row in rows)   # otherwise nothing is pinned
    for axes, op in zip(panels, (*OPS, "ping_pong")):
        for way, (colour, line) in STYLE.items():
            points = [(row["bytes"], row["median ms"]) for row in rows if (row["operation"], row["way"]) == (op, way)]
            if points:
                axes.plot(*zip(*points), line, color=colour, label=LEGEND[way] if few or way != "gloo" else "gloo")
        label(axes, op, sorted({row["bytes"] for row in rows}))
    last.axis("off")
    last.legend(*panels[0].get_legend_handles_labels(), loc="center", labelspacing=1.0)
    figure.suptitle(f"{ranks} ranks on {os.cpu_count()} cores, fp32: time of one call")
    figure.savefig(path, dpi=120)


def label(axes: Axes, op: str, sizes: list[int]) -> None:
    """Title, doubly logarithmic axes with the measured sizes as ticks."""
    axes.set(title=op, xlabel="size of the tensor (log scale)", ylabel="ms (log scale)", xscale="log", yscale="log")
    axes.set_xticks(sizes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_bytes(value)))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(alpha=0.3)


def draw_again(name: str) -> None:
    """Draw the pictures anew from the JSON file of an earlier run."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        draw(ranks, rows, RESULTS / f"{name}-{ranks}.png")


def run(ranks: int, args: argparse.Namespace) -> dict[Case, Times]:
    """Start all libraries on `ranks` ranks, measure, end them."""
    libraries: dict[str, Pool] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in dict.fromkeys(library for library, _ in WAYS.values()):
                if name.split(",")[0] in args.libraries and not (name == "gloo, free" and ranks > (os.cpu_count() or 1)):
                    libraries[name] = start(name, ranks, Path(folder), args.huge_pages)
            return measure(libraries, args.turns, args.seconds, args.loops, [size for size in SIZES if size <= args.largest << 20])
        finally:
            for library in libraries.values():
                library.end()


def main() -> None:
    """Measure, print the tables, keep them in benchmarks/results/ with a picture for each number of ranks."""
    parser = Words(__doc__)
    parser.add_argument("--ranks", type=counts, default="2")
    parser.add_argument("--turns", type=count, default=7)
    parser.add_argument("--loops", type=count, default=5, help="of one turn")
    parser.add_argument("--seconds", type=float, default=0.01, help="of one loop")
    parser.add_argument("--largest", type=count, default=64, help="size, in MiB")
    parser.add_argument("--huge-pages", action="store_true")
    parser.add_argument("--libraries", default="gloo,Open MPI,rankloom", type=names_of(["gloo", "Open MPI", "rankloom"]))
    parser.add_argument("--name", default="all_reduce", help="of the files in benchmarks/results/")
    parser.add_argument("--draw", action="store_true", help="measure nothing: draw the pictures of --name anew")
    args = parser.read()
    if args.draw:
        draw_again(args.name)
        return
    if "Open MPI" in args.libraries:
        make_open_mpi()
    warning, where = busy_cores(), machine()
    print(warning, file=sys.stderr)
    begin = time.perf_counter()
    rows, tables, pictures = [], [], []
    for ranks in args.ranks:
        found = run(ranks, args)
        rows += all_rows(ranks, found)
        tables.append(show(summary(ranks, found)))
        print(tables[-1], flush=True)
        if args.name:
            draw(ranks, rows, RESULTS / f"{args.name}-{ranks}.png")
            pictures.append(f"\n![{ranks} ranks]({args.name}-{ranks}.png)\n")
    print(f"{time.perf_counter() - begin:.0f} s")
    keep(args.name, f"{where}\n{warning}".strip(), rows, shown="\n\n".join(tables), note="".join(pictures))


if __name__ == "__main__":
    main()
