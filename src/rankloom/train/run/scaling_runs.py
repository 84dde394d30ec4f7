"""The runs of a scaling study: the same config on 1, 2, 4 ... ranks, with few steps and nothing after them."""

from collections.abc import Sequence
from pathlib import Path

from rankloom.base.errors import ConfigError, StorageError
from rankloom.base.topology import Topology
from rankloom.data.text import expect_source
from rankloom.data.tokenizer import expect_tokenizer
from rankloom.train.run.config import Table, config_of, parse_overrides
from rankloom.train.run.folder import flag_of_folder, holds_run
from rankloom.train.run.schema import Config
from rankloom.world.cluster import read_cluster
from rankloom.world.connect import expect_room_here

DECIDED = {("run", "name"): "which names its runs after their ranks: --out is their folder",
           ("train", "steps"): "whose runs are as long as --steps says"}
# What a study sets aside in the file; on the command line it may only be turned off.
SET_ASIDE = {("mesh", "replicate"): "which gives --ranks to replicate and shard: --mesh.shard may be given",
             ("train", "evaluate"): "which only trains", ("train", "eval_every"): "which only trains",
             ("train", "samples"): "which only trains", ("data", "baseline"): "which only trains",
             ("checkpoint", "interval"): "which writes no checkpoints", ("checkpoint", "resume"): "whose runs begin anew"}


def parse_ranks(text: str) -> list[int]:
    """`1,2,4` as numbers, each once, in order; raises ConfigError.

    >>> parse_ranks("4,1,2")
    [1, 2, 4]
    """
    try:
        ranks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        ranks = []
    if not ranks or ranks[0] < 1:
        raise ConfigError(f"--ranks {text}: expected numbers of ranks with commas between them, such as 1,2,4")
    return ranks


def study_overrides(config: Config, ranks: int, *, steps: int, weak: bool, threads: int, folder: Path,
                    shard: int | None = None) -> list[str]:
    """The overrides, added after the user's own, that turn `config` into the run on `ranks` ranks.

    shard: that of all runs; None: as many as --ranks gives

    Strong scaling keeps the global batch, so each rank has less work on more ranks. Weak scaling keeps the rows per rank, so the batch
    grows. Axes other than replicate and shard stay the same. Every rank has the same number of threads in all runs: otherwise one
    rank with the whole machine would be compared with two that share it.
    """
    batch = config.batch()
    if weak:
        sizes = {"local_batch_size": batch.local, "accumulate": batch.accumulate, "global_batch_size": None}
    else:
        sizes = {"local_batch_size": None, "accumulate": config.train.accumulate, "global_batch_size": batch.global_}
    if config.train.deterministic:
        sizes["accumulate"] = None
    train = {**sizes, "steps": steps, "evaluate": "false", "eval_every": 0, "samples": 0}
    train["threads"] = None if config.train.deterministic else config.train.threads or threads
    words = [f"--train.{key}={'none' if value is None else value}" for key, value in train.items()]
    axes = config.mesh.model_copy(update={"replicate": None, "shard": shard}).filled(ranks, config.train.stage)   # other axes stay
    warm_up = min(config.schedule.warmup_steps, steps)
    return [
        *words, *(f"--mesh.{axis}={n}" for axis, n in axes.items()), "--data.baseline=false", f"--schedule.warmup_steps={warm_up}",
        *(["--comm.compress_after=0"] if config.comm.compress_after else []),   # time the compressed steps, not the exact first ones
        "--checkpoint.interval=0", "--checkpoint.resume=none", flag_of_folder(folder), f"--run.name=ranks-{ranks}",
    ]


def plan_study(table: Table, where: str, overrides: Sequence[str], ranks: Sequence[int], *, steps: int, weak: bool, threads: int,
               folder: Path) -> dict[int, Config]:
    """Number of ranks -> the config of its run. Every run is checked before the first one starts.

    table:  the user's; where: its source, for errors
    raises: DataError when there is no text; ConfigError for an impossible number of ranks, such as one that the other axes do not
            divide, that has no room on a host or that a cluster file has not, for an override that would have no effect, and for a folder
            that holds such runs
    """
    flags = {(flag.section, flag.key): flag for flag in parse_overrides(overrides)}
    config = config_of(table, where, [*flags.values()])
    for (section, key), flag in flags.items():
        reason, aside = DECIDED.get((section, key)), SET_ASIDE.get((section, key))
        if reason or (aside and getattr(getattr(config, section), key)):
            raise ConfigError(f"{flag.flag} {flag.text}: has no effect on a study, {reason or aside}")
    shard = config.mesh.shard if ("mesh", "shard") in flags else None
    expect_source(config.data.source)
    expect_tokenizer(config.data.tokenizer)
    try:
        used = [run.name for run in (folder / f"ranks-{n}" for n in ranks) if holds_run(run)]
    except OSError as error:   # no permission; a name that is too long
        raise StorageError(f"--out {folder}: cannot be read ({error.strerror}); give another folder") from None
    if used:
        raise ConfigError(f"--out {folder}: holds {', '.join(used)} of an earlier study; give another folder")
    plans = {}
    for n in ranks:
        try:
            more = study_overrides(config, n, steps=steps, weak=weak, threads=threads, folder=folder, shard=shard)
            plans[n] = config_of(table, where, parse_overrides([*overrides, *more]))
            expect_room_here(n, config.comm.backend)
            if config.comm.topology is not None:
                read_cluster(config.comm.topology, n, Topology.even(1, n))
        except ConfigError as error:
            raise ConfigError(f"on {n} ranks: {error}") from None
    return plans
