"""What `rankloom bench` does apart from printing: start or join ranks, make tables of the results, write them to files.

Read comm/bench.py (how algorithms are timed), comm/fit.py (the model) and comm/bench_results.py (the fastest, and why) first.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import torch
from rich.table import Table
from rich.text import Text

from rankloom.base.errors import ConfigError, WrongResult
from rankloom.base.events import Notice, Timed, ignore
from rankloom.base.files import expect_file, make_folder
from rankloom.base.quantities import show_bytes, show_seconds
from rankloom.base.text import not_drawn
from rankloom.base.topology import FASTEST, Link, Topology, parse_topology
from rankloom.comm.bench import DTYPES, Study, run_study
from rankloom.comm.bench_results import Findings, bandwidth, bus_bandwidth, find
from rankloom.comm.operands import widening
from rankloom.train.run.folder import write_json
from rankloom.train.run.scaling_runs import parse_ranks
from rankloom.watch.progress import BenchProgress, Screen
from rankloom.world.agent import launch_ranks
from rankloom.world.cluster import read_cluster, write_links
from rankloom.world.connect import expect_room_here
from rankloom.world.join import init
from rankloom.world.launch import RANKLOOM, cores

MEANINGS = {
    "inside": "inside: on the longest path, in a node", "between": "between: on the longest path, between nodes",
    "host": "host: all ranks of a node together", "adding": "adding received bytes",
    "backend": "backend: a step of its own", "backend_between": "backend_between: a step of its own, between nodes",
}

FREE = "free: 0 by the fit, since the other costs explain these times without it"


@dataclass(frozen=True, slots=True)
class Measured:
    """The times on one number of ranks, with their topology and backend."""

    topology: Topology
    backend: str
    times: list[Timed]


def ranks_to_start(text: str, topology: Path | None, backend: str) -> list[int]:
    """The numbers of ranks in `text`. Checks them against the backend and the cluster file. raises: ConfigError"""
    numbers = parse_ranks(text)
    expect_room_here(max(numbers), backend)
    if numbers[0] < 2:
        raise ConfigError(f"--ranks {text}: one rank has nobody to talk to; give 2 or more")
    for ranks in numbers if topology else ():
        read_cluster(str(topology), ranks, Topology.even(1, ranks))
    return numbers


def expect_places(study: Study, folder: Path, save: Path | None) -> None:
    """Before timing: make the folder for the results, and check that links can be saved. raises: ConfigError"""
    if save and "all_reduce" not in study.collectives:
        raise ConfigError(f"--save {save}: the cost of links is fitted to all_reduce, "
                          f"which is not in --collective {','.join(study.collectives)}")
    expect_file("--save", save, ".json")
    make_folder(folder, "--out")


def describe_machine(load: float) -> str:
    """The number of cores, and whether other programs use them. load: the mean number of busy programs in the last minute"""
    busy = f", and a load of {load:.1f} before this began: expect noise" if load >= 0.5 else ""
    return f"{cores()} core{'s' * (cores() > 1)}{busy}"


def launch(ranks: int, words: Sequence[str], folder: Path) -> tuple[int, Measured | None]:
    """Run `rankloom bench WORDS` on ranks of this machine. Returns the exit code, and the results if it is 0."""
    file = folder / f"ranks-{ranks}.json"
    argv = [*RANKLOOM, "bench", *words, f"--times={file}"]
    code = launch_ranks(ranks, argv, log_dir=folder / "logs" / f"ranks-{ranks}")
    if code:
        return code, None
    said = json.loads(file.read_text(encoding="utf-8"))
    topology = parse_topology(said["topology"], ranks, Topology.even(1, ranks))
    return 0, Measured(topology, said["backend"], [Timed(**timed) for timed in said["times"]])


def join_launched(study: Study, topology: Path | None, backend: str) -> Measured:
    """Run as one of the ranks that a launcher has started. Rank 0 draws the progress."""
    world = init(topology=topology, backend=backend)
    with BenchProgress(Screen(), world.size) as progress:
        sink = progress if world.rank == 0 else ignore
        carrier = "nccl or gloo" if world.device.type == "cuda" else world.backend
        sink(Notice(world.rank, f"{world.topology}, {world.device.type} tensors, backend {carrier}"))
        times = run_study(study, world, sink)
    world.barrier(label="bench: done")   # a rank that leaves early would disconnect a slower one
    world.close()
    return Measured(world.topology, carrier, times)


def write_measured(measured: Measured, file: Path) -> None:
    """Write a file for `launch` to read."""
    times = [asdict(timed) for timed in measured.times]
    write_json(file, {"topology": measured.topology.as_table(), "backend": measured.backend, "times": times})


def report(study: Study, measured: Sequence[Measured], folder: Path, save: Path | None) -> Iterator[str | Table]:
    """Tables with their titles: times, the fastest and why, the cost of links. Then writes the files, with a line for each.

    save:   a file for the links, as fitted to all_reduce on the most ranks
    raises: WrongResult, at the end, when an algorithm gave a wrong result
    """
    found = [one for group in measured for one in find(group.times, group.topology, wide=widening(DTYPES[study.dtype]))]
    backend = measured[0].backend
    how = f"{study.dtype}, backend {backend}"
    for one in found:
        yield from ("", f"{one.collective} on {one.topology.size} ranks, {how}: the time of one call", times_table(one))
        yield from ("", "the fastest, its GB/s, and the larger part of its time by the fit", winners_table(one))
        yield from ("", "what links cost by the fit", links_table(one))
        yield from (*_about_fit(one), "")
    yield f"saved {write_findings(study, backend, found, folder)}"
    if save:
        write_links(save, [one.fitted.links for one in found if one.collective == "all_reduce"][-1])
        yield f"saved {save}, with the links as fitted to all_reduce on {measured[-1].topology.size} ranks; use it as [comm] topology"
    for collective in study.collectives:
        path = folder / f"bench-{collective}.png"
        yield draw_findings([one for one in found if one.collective == collective], path, f"{collective}, {how}")
    expect_right(found)


def expect_right(found: Sequence[Findings]) -> None:
    """Raise WrongResult when an algorithm gave a wrong result."""
    wrong = [f"{timed.algorithm} {timed.collective} of {timed.bytes} bytes on {timed.ranks} ranks: {timed.wrong} elements are wrong"
             for one in found for timed in one.times if timed.wrong]
    if wrong:
        raise WrongResult("\n".join(wrong))


def write_findings(study: Study, backend: str, found: Sequence[Findings], folder: Path) -> Path:
    """Write `bench.json`; returns its path. raises: ConfigError where it cannot be written"""
    environment = {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"), "command": sys.argv, "cores": cores(),
        "torch": torch.__version__, "backend": backend, "dtype": study.dtype, "turns": study.turns,
    }
    by_collective = {name: [one.as_table() for one in found if one.collective == name] for name in study.collectives}
    write_json(folder / "bench.json", environment | by_collective)
    return folder / "bench.json"


def draw_findings(found: Sequence[Findings], path: Path, title: str) -> str:
    """Draw the plot of one collective; returns a line with its path, or why there is none."""
    try:
        from rankloom.watch.plots import plot_bench
    except ImportError:
        return not_drawn(path.name)
    times = [timed for one in found for timed in one.times if not timed.wrong]
    if not times:
        return f"{path.name} was not drawn: there is no right result"
    curves = {(one.topology.size, name): one.curve(name) for one in found if one.sizes for name, _ in one.fitted.errors}
    return f"saved {plot_bench(times, curves, path, title)}"


# ------------------------------------------------------------------ tables


def times_table(found: Findings) -> Table:
    """A row for each size, a column for each algorithm; the fastest is marked."""
    times = {(timed.bytes, timed.algorithm): timed for timed in found.times}
    names = list(dict.fromkeys(name for _, name in times))
    fastest = {at.bytes: at.winner.algorithm for at in found.sizes}
    table = _table(["size", *names], left=())
    for size in sorted({size for size, _ in times}):
        table.add_row(show_bytes(size), *(_time(times[size, name], name == fastest.get(size)) for name in names))
    return table


def winners_table(found: Findings) -> Table:
    """A row for each size: the fastest algorithm, its bandwidths (GB/s) and why, the next one, and the fastest by the fit."""
    chosen = "auto takes" if found.collective == "all_reduce" else "by the fit"
    right, left = ["size", "algbw", "busbw"], ["fastest", "because", "next", chosen]
    table = _table([right[0], left[0], *right[1:], *left[1:]], left)
    for at in found.sizes:
        rates = [f"{rate:.3g}" for rate in (bandwidth(at.winner), bus_bandwidth(at.winner))]
        following = [f"{other.algorithm} x{other.seconds / at.winner.seconds:.1f}" for other in at.times[1:2]]
        table.add_row(show_bytes(at.bytes), at.winner.algorithm, *rates, at.reason, "".join(following), at.expected)
    return table


def links_table(found: Findings) -> Table:
    """A row for each kind of link: the cost of a message, and its bandwidth, by the fit."""
    table = _table(["link", "message", "bytes"], left=("link",))
    for cost in _costs(found):
        table.add_row(MEANINGS[cost.kind], cost.message, cost.bandwidth)
    return table


class LinkCost(NamedTuple):
    """What one kind of link costs by the fit, in words."""

    kind: str
    message: str
    bandwidth: str


def _costs(found: Findings) -> list[LinkCost]:
    """The costs of the kinds of links that were fitted."""
    links, costs = found.fitted.links, []
    for kind in found.fitted.measured:
        link = links.named(kind) if kind != "adding" else Link(0.0, links.adding_gbps)
        rate = "free" if link.bandwidth_gbps == FASTEST else f"{link.bandwidth_gbps:.3g} Gbit/s"
        costs.append(LinkCost(kind, show_seconds(link.alpha) if link.alpha else "free", rate))
    return costs


def _about_fit(found: Findings) -> Iterator[str]:
    """What "free" means, where it is said, and the error of the fit for each algorithm."""
    if any("free" in (cost.message, cost.bandwidth) for cost in _costs(found)):
        yield FREE
    yield "the fit is off by " + ", ".join(f"{name} {error:.0%}" for name, error in found.fitted.errors) + " (median over sizes)"
    if worst := found.worst():
        said = [f"{name} {_say_ratio(ratio)} at {show_bytes(size)}" for name, (size, ratio) in worst.items()]
        yield f"the fit at its worst: {', '.join(said)}"


def _say_ratio(measured_over_predicted: float) -> str:
    factor = max(measured_over_predicted, 1 / measured_over_predicted)
    much = f"{factor:.1f}x" if factor >= 1.5 else f"{factor - 1:.0%}"
    return f"{much} too {'low' if measured_over_predicted >= 1 else 'high'}"


def _table(headings: Sequence[str], left: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    return table


def _time(timed: Timed, is_fastest: bool) -> Text:
    if timed.wrong:
        return Text("WRONG", style="bold red")
    return Text(show_seconds(timed.seconds) + ("*" if is_fastest else " "), style="bold green" if is_fastest else "")
