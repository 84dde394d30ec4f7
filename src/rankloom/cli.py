"""The command line: `rankloom train`, `scale`, `bench`, `schedule`, `layout`, `generate`, `presets`. The only file that prints.

This module and `rankloom --help` import neither torch nor pydantic: each command imports what it needs when it runs. The floors
below do the work; this file has arguments, launching, tables and exit codes.

Exit codes: 0 done, 1 a rank failed, 2 a mistake in the input (one message, no traceback), 130 after Ctrl-C,
143 after SIGTERM, 129 when the terminal was closed, 141 when the reader of output has ended (of a training's sometimes 129).
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from rankloom import __version__
from rankloom.base.errors import ConfigError, RankFailed, RankloomError
from rankloom.base.events import ignore
from rankloom.base.files import expanded, make_folder, parse_path
from rankloom.base.garbage import lasting
from rankloom.base.text import not_drawn, printable, show_any_text, whole_number
from rankloom.watch.progress import Progress, Screen, is_closed
from rankloom.world.launch import RANKLOOM, cores, debug_mode, find_place, forget_useless_settings, record_failure
from rankloom.world.leave import handling_stop_signals, leave_at_once, leaving_on_signals, say_stopped

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from rankloom.bench import Measured
    from rankloom.comm.bench import Study
    from rankloom.train.run.finish import Summary
    from rankloom.train.run.schema import Config
    from rankloom.watch.scaling import Row

ConfigFile = Annotated[Path, Parameter(allow_leading_hyphen=True)]   # a key in its place is told so
Overrides = Annotated[str, Parameter(allow_leading_hyphen=True)]
Prompt = Annotated[str, Parameter(allow_leading_hyphen=True)]   # a text may begin so
Place = Annotated[Path, Parameter(converter=parse_path)]
Whole = Annotated[int, Parameter(converter=whole_number)]   # cyclopts itself rounds 8.5

forget_useless_settings()
app = App(
    name="rankloom", version=__version__, help_format="plaintext",
    help="Train models on many ranks, and see what every rank does.", console=Screen(),
)


def main() -> None:
    """Run one command. A user's mistake gives one message and exit code 2, never a traceback."""
    show_any_text()
    try:
        try:
            app()
        finally:
            _finish_output()
    except RankloomError as error:
        if not _told_the_launcher(error):
            _report(error)
        raise SystemExit(2 if isinstance(error, ValueError) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:   # a bug, ours or in user code: show the traceback
        if _told_the_launcher(error):
            raise SystemExit(1) from None
        if not isinstance(error, BrokenPipeError):
            raise
        raise SystemExit(128 + signal.SIGPIPE) from None


def _finish_output() -> None:
    """raises: BrokenPipeError when its reader has ended, or the terminal was closed; ConfigError when its disk is full"""
    try:
        print(end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())   # Python prints what is left when it ends
        if is_closed(error):
            raise BrokenPipeError from None
        raise ConfigError(f"the output cannot be written: {error.strerror}") from None


def _told_the_launcher(error: Exception) -> bool:
    """Whether this is a rank whose launcher shows the error, with those of the other ranks."""
    return record_failure(error)


def _report(error: RankloomError) -> None:
    """Print the message; with RANKLOOM_DEBUG=1 the traceback first."""
    if debug_mode():
        sys.excepthook(type(error), error, error.__traceback__)
    print(f"error: {error}", file=sys.stderr)


@app.command
def train(file: ConfigFile, /, *overrides: Overrides) -> None:
    """Train a model as described in FILE.

    Run directly, it starts the ranks of [mesh] on this machine.
    Under torchrun or srun, each process is one rank.
    Ctrl-C and SIGTERM end all ranks within a step or two, and save the weights.
    --checkpoint.interval N saves the whole state every N steps. --checkpoint.resume runs/NAME continues from it, on any mesh.

    Parameters
    ----------
    file
        A TOML file such as train.toml.
    overrides
        Any key of the file, as --section.key value: --mesh.replicate 4 --train.steps=200. docs/reference.md lists all
    """
    alone = find_place().launcher == "alone"
    with leaving_on_signals(as_killed=not alone):
        with lasting():
            from rankloom.data.text import expect_source
            from rankloom.data.tokenizer import expect_tokenizer
            from rankloom.train.run.config import load_config, with_ranks
        config = load_config(file, overrides)
        if alone:   # before the run has a folder
            config = with_ranks(config, config.mesh.as_mesh().size, file)
            expect_source(config.data.source)
            expect_tokenizer(config.data.tokenizer)
        if config.checkpoint.resume is not None:
            from rankloom.train.run.resume import expect_steps_left

            expect_steps_left(config)
        if alone and config.mesh.as_mesh().size > 1:
            _launch_ranks(config)
        else:
            _be_a_rank(config, file)


def _launch_ranks(config: "Config") -> None:
    """Start the ranks of a run on this machine, and wait for them. They read the config in the run folder: its file may be a pipe, or be
    edited for the next run while they start."""
    with lasting():
        from rankloom.train.run.folder import began, claim_run_folder, flag_of_folder, hold, holds_run, no_empty_folder, write_run_config
        from rankloom.world.agent import launch_ranks
        from rankloom.world.connect import expect_room_here
    expect_room_here(config.mesh.as_mesh().size, config.comm.backend)
    hold(run := claim_run_folder(config, datetime.now()))
    with no_empty_folder(run):
        argv = [*RANKLOOM, "train", str(write_run_config(config, run))]
    argv, summary = [*argv, flag_of_folder(run.parent), f"--run.name={run.name}"], run / "summary.json"
    concluded = False
    try:
        code = launch_ranks(config.mesh.as_mesh().size, argv, log_dir=run / "logs", deterministic=bool(config.train.deterministic))
        concluded = summary.exists()
        if not code and not concluded:
            raise RankFailed(f"rank 0 ended with exit code 0 before it wrote {summary}", rank=0)
    finally:
        if not concluded:   # rank 0, which prints this at its end, did not get that far; if only samples failed, there is a summary
            app.console.show_cursor()   # a rank that was killed while drawing leaves it hidden
            if holds_run(run) or not began(run):   # else rank 0 has said it a moment ago
                _show([f"run folder: {run}"])
    if not concluded:
        say_stopped(code - 128)
    raise SystemExit(code)


def _be_a_rank(config: "Config", file: Path) -> None:
    """Train as one rank: join the others, if there are any. Rank 0 draws the progress."""
    with lasting():
        from rankloom.train.run.config import with_ranks
        from rankloom.train.run.loop import train as train_loop
        from rankloom.world.join import init
    config = with_ranks(config, find_place().size, file)
    world = init(config.mesh.as_mesh(), timeout=config.comm.timeout, topology=config.comm.topology, backend=config.comm.backend)
    try:
        with Progress(Screen(), config.train.steps) as progress:
            summary = train_loop(config, world, progress if world.rank == 0 else ignore)
    except (KeyboardInterrupt, SystemExit) as stop:
        # A collective may be in flight that other ranks will never join. Closing the connection would wait for it.
        leave_at_once(128 + signal.SIGINT if isinstance(stop, KeyboardInterrupt) else int(stop.code or 0))
    world.close()
    if world.rank == 0:
        _conclude(summary, config.train.steps)
    if summary.stopped_by:
        raise SystemExit(128 + summary.stopped_by)


def _conclude(summary: "Summary", steps: int) -> None:
    """Draw the loss; print how the run ended, and its folder. steps: those asked for"""
    from rankloom.train.run.finish import describe_end

    run = Path(summary.folder)
    drawn = [_draw_loss(run)] if summary.steps > summary.steps_before else []
    _show([*drawn, *describe_end(summary, steps), f"run folder: {run}"])


def _draw_loss(run: Path) -> str:
    try:
        from rankloom.watch.plots import plot_loss
    except ImportError:
        return not_drawn("loss.png")
    return f"saved {plot_loss(run)}"


@app.command
def scale(
    file: ConfigFile, /, *overrides: Overrides, ranks: str = "1,2,4", steps: Whole = 20, weak: bool = False,
    out: Place | None = None,
) -> None:
    """Measure how training scales with ranks: speed-up, efficiency, share of time in communication.

    Trains FILE for a few steps on each number of ranks. Prints a table, and writes scale.json, scale.png and the config of each run.

    Parameters
    ----------
    file
        A TOML file such as train.toml.
    overrides
        Any key of the file, as --section.key value.
    ranks
        Numbers of ranks, separated by commas.
    steps
        Steps of each run; the first 3 do not count.
    weak
        Weak scaling: the batch of each rank stays the same. Without it, the global batch does.
    out
        The folder for the results; by default runs/scale-<time>.
    """
    from rankloom.train.run.config import config_of, parse_overrides, read_table, write_config
    from rankloom.train.run.scaling_runs import parse_ranks, plan_study
    from rankloom.watch.scaling import WARM_UP_STEPS, measure, scaling_rows, title_of

    if (launcher := find_place().launcher) != "alone":
        raise ConfigError(f"rankloom scale starts the ranks of each of its runs itself: give the command without {launcher}")
    if steps <= WARM_UP_STEPS:
        raise ConfigError(f"--steps {steps}: the first {WARM_UP_STEPS} steps of a run warm up and are not counted; give more")
    table = read_table(file)
    config = config_of(table, str(file), parse_overrides(overrides))
    folder = out or expanded(config.run.folder) / f"scale-{datetime.now():%Y-%m-%d-%H%M%S}"
    numbers = parse_ranks(ranks)
    threads = max(1, cores() // numbers[-1])
    plans = plan_study(table, str(file), overrides, numbers, steps=steps, weak=weak, threads=threads, folder=folder)
    make_folder(folder, "--out")
    with handling_stop_signals(lambda number, frame: sys.exit(128 + number)):   # which ends the run, too
        for n, of_run in plans.items():
            print(f"--- {n} {'rank' if n == 1 else 'ranks'}", flush=True)   # before what the run prints
            write_config(of_run, of_n := folder / f"ranks-{n}.toml")
            _run_child([*RANKLOOM, "train", str(of_n)])
    rows = scaling_rows([measure(folder / f"ranks-{n}", n) for n in plans])
    _show_scaling(rows, folder, title_of(config.model.preset, rows, weak=weak))


def _run_child(argv: Sequence[str]) -> None:
    """Run a command to its end. An exception here, such as Ctrl-C, ends it first. If it fails, it has printed why: exit with its code."""
    with subprocess.Popen(argv) as child:
        try:
            code = child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise
    if code < 0:
        raise RankFailed(f"a run of the study was killed by signal {-code}: {' '.join(argv)}", rank=0)
    if code:
        raise SystemExit(code)


def _show_scaling(rows: list["Row"], folder: Path, title: str) -> None:
    from rankloom.train.run.folder import write_json
    from rankloom.watch.tables import folding_table

    table = folding_table("ranks", "tokens/s", "speed-up", "efficiency", "communication", title=title)
    for row in rows:
        numbers = (f"{row.tokens_per_second:,.0f}", f"{row.speed_up:.2f}", f"{row.efficiency:.0%}")
        table.add_row(str(row.ranks), *numbers, f"{row.communication:.0%}")
    _show([table])
    if rows[-1].ranks > cores():
        print(f"more ranks than this machine's {cores()} cores share them: their speed-up cannot grow")
    write_json(folder / "scale.json", [asdict(row) for row in rows])
    print(f"saved {folder / 'scale.json'}")
    try:
        from rankloom.watch.plots import plot_scaling
    except ImportError:
        print(not_drawn("scale.png"))
        return
    print(f"saved {plot_scaling(rows, folder / 'scale.png', title)}")


@app.command
def bench(
    *, ranks: str | None = None, collective: str = "all_reduce", algorithm: str | None = None, sizes: str = "4KiB-64MiB",
    dtype: str = "fp32", turns: Whole = 9, backend: str = "auto", topology: Place | None = None, save: Place | None = None,
    out: Place | None = None, times: Annotated[Path | None, Parameter(show=False)] = None,
) -> None:
    """Time our collectives and the backend's own at many sizes: which is the fastest at each size, and why.

    Checks every result. Bandwidths are algbw and busbw, as in nccl-tests.
    Fits a model of the cost of a message and a byte (alpha, beta, gamma).
    Writes all results to bench.json, and plots the times and the model.
    Run directly, it starts ranks on this machine.
    Under torchrun or srun, each process is one rank.

    Parameters
    ----------
    ranks
        Numbers of ranks, separated by commas; by default 2,4.
    collective
        One or more of all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, separated by commas.
    algorithm
        Names of algorithms, separated by commas, such as ring,tree,backend; by default all.
    sizes
        Sizes, separated by commas; or FIRST-LAST: from FIRST to LAST, each four times the one before.
    dtype
        fp32, fp64, bf16 or fp16.
    turns
        How often to time each algorithm at each size; slow ones get fewer turns.
    backend
        The backend for CPU tensors: rankloom (shared memory), gloo, or auto.
    topology
        A cluster file that says which ranks share a node; by default, as the launcher says.
    save
        Also write the cost of links to this file (.json), for [comm] topology in a train.toml.
    out
        The folder for the results; by default runs/bench-<time>.
    """
    with lasting():
        from rankloom import bench as command
        from rankloom.base.quantities import parse_sizes
        from rankloom.comm.bench import plan_bench
    study = plan_bench(_words(collective), _words(algorithm or ""), parse_sizes(sizes), dtype, turns)
    place, folder = find_place(), out or Path("runs") / f"bench-{datetime.now():%Y-%m-%d-%H%M%S}"
    alone = place.launcher == "alone"
    numbers = command.ranks_to_start("2,4" if ranks is None else ranks, topology, backend) if alone else [place.size]
    if not alone and ranks not in (None, str(place.size)):
        raise ConfigError(f"--ranks {ranks}: {place.launcher} has started {place.size}; leave --ranks out")
    if place.rank == 0 and times is None:   # makes the folder, so after all other checks
        command.expect_places(study, folder, save)
    if alone:
        print(command.describe_machine(os.getloadavg()[0]))
        options = {"collective": collective, "algorithm": algorithm, "sizes": sizes, "dtype": dtype, "turns": turns,
                   "backend": backend, "topology": topology}
        words = [f"--{key}={value}" for key, value in options.items() if value is not None]
        measured = [_bench_ranks(n, words, folder) for n in numbers]
    else:
        measured = [_bench_as_rank(study, topology, backend)]
    if place.rank == 0 and times is not None:
        command.write_measured(measured[0], times)
    elif place.rank == 0:
        _show(command.report(study, measured, folder, save))


def _show(parts: "Iterable[str | Text | Table]") -> None:
    for part in parts:
        print(part, flush=True) if isinstance(part, str) else app.console.print(part)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _bench_ranks(ranks: int, words: list[str], folder: Path) -> "Measured":
    from rankloom.bench import launch

    print(f"--- {ranks} ranks", flush=True)
    code, measured = launch(ranks, words, folder)
    if measured is None:
        raise SystemExit(code)
    return measured


def _bench_as_rank(study: "Study", topology: Path | None, backend: str) -> "Measured":
    from rankloom.bench import join_launched

    try:
        return join_launched(study, topology, backend)
    except KeyboardInterrupt:
        leave_at_once(128 + signal.SIGINT)   # as in training: others may never join a collective in flight


schedule = App(name="schedule", help="Pipeline schedules: what each rank computes, and when it waits. See `rankloom schedule show --help`.")
app.command(schedule)


@schedule.command(name="list")
def list_schedules() -> None:
    """List the known schedules."""
    from rankloom.schedule import known

    _show([known()])


@schedule.command
def show(
    name: str, /, *, stages: Whole | None = None, microbatches: Whole | None = None, chunks: Whole | None = None, costs: str | None = None,
    svg: Place | None = None, trace: Place | None = None, save: Place | None = None,
) -> None:
    """Draw a schedule, check that it cannot deadlock, and show its bubble and memory.

    Parameters
    ----------
    name
        A name from `rankloom schedule list`; or a .txt file with one line of actions for each rank, as --save writes it.
    stages
        The number of stages of the model; by default 4.
    microbatches
        The number of micro-batches in a step; by default 8.
    chunks
        The number of stages on each rank; by default as few as the schedule allows.
    costs
        The times of a stage's forward, backward for the input and backward for the weights, and of a message: 18.5,18.1,9.3,0.6.
        Or a .json file with a list of each. By default 1,1,1,0.
    svg
        Also write the picture to this file (.svg).
    trace
        Also write a trace for ui.perfetto.dev to this file (.json).
    save
        Also write the schedule with its messages to this file (.txt). It can be edited, and shown again.
    """
    from rankloom.schedule import show_schedule

    console = app.console
    _show(show_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks, costs=costs, columns=console.width,
                        coloured=bool(console.color_system) and not console.no_color, svg=svg, trace=trace, save=save))


@app.command
def layout(*settings: Overrides, ranks: Whole | None = None, ranks_per_host: Whole | None = None, out: Place | None = None) -> None:
    """Show what each rank of a mesh holds: its part of the model and of a batch, its peers, its bytes.

    Starts no ranks: it runs the code of a real run on ranks without memory.
    Without a file, the model is preset 8B in bf16, at stage 3 if the mesh has a shard axis.

    Parameters
    ----------
    settings
        A TOML file such as train.toml, or none; then any of its keys, as --section.key value: --mesh.pipe 2 --mesh.tensor 2
    ranks
        The number of ranks. What the other axes leave goes to replicate, or at stages 1 to 3 to shard.
    ranks_per_host
        The number of ranks on each host.
    out
        Also draw a picture to this file (.svg or .png): a box for each rank.
    """
    from rankloom.layouts import show_layout

    _show(show_layout(settings, ranks=ranks, ranks_per_host=ranks_per_host, out=out))


@app.command
def generate(
    run: Path, /, *, prompt: Prompt = "", max_tokens: Whole = 200, temperature: float = 0.8, top_k: Whole = 50, seed: Whole = 0
) -> None:
    """Continue a text with a trained model.

    Parameters
    ----------
    run
        The run folder of the training, such as runs/first.
    prompt
        The beginning of the text; by default empty.
    max_tokens
        The most tokens to write.
    temperature
        0 always takes the likeliest token; above 1 is wilder than the training text.
    top_k
        Draw among this many likeliest tokens only; 0 for all.
    seed
        Of the random draws: another seed gives another text.
    """
    with lasting():
        from rankloom.train.run.samples import continue_texts
        from rankloom.train.run.weights import load_model
    if max_tokens < 1:
        raise ConfigError(f"--max-tokens {max_tokens}: must be 1 or more")
    model, tokenizer = load_model(run)
    if tokenizer is None:
        raise ConfigError(f"{run}: holds no tokenizer.json, to read a prompt with and to write text: it was trained on an array of tokens, "
                          "or the file is lost; then copy that of a run with the same tokenizer")
    prompts = [tokenizer.encode(prompt)]
    texts = continue_texts(model, tokenizer, prompts, max_tokens=max_tokens, temperature=temperature, top_k=top_k or None, seed=seed)
    print(printable(texts[0]))


@app.command
def presets() -> None:
    """List the model sizes for [model] preset."""
    from rankloom.models.config import PRESETS, parameter_count

    for name, shape in PRESETS.items():
        print(f"{name:>5}  {parameter_count(shape):>14,} parameters: width {shape.width}, {shape.layers} layers, "
              f"{shape.heads} heads, {shape.kv_heads} key-value heads, ffn {shape.ffn}, vocabulary {shape.vocab_size}")
