"""Checkpoints of a run: where they are, how many are kept, and how a new run resumes from one.

    runs/<name>/checkpoints/step-00000200/     train/checkpoint.py says what is in it

A resumed run has its own folder and may have another mesh. Only the step and the state come from the checkpoint. Learning rate, weight
decay, betas and momentum are those of its own config.
"""

import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import Any

from rankloom.base.compression import EXACT
from rankloom.base.errors import ConfigError, DataError, ModelMismatch, StorageError
from rankloom.base.events import Saved
from rankloom.base.files import expanded, json_object
from rankloom.checkpoint.files import MANIFEST, read_manifest, removing
from rankloom.train.checkpoint import save_checkpoint
from rankloom.train.engine import Engine
from rankloom.train.run.facts import changes_of_run, facts_of_run, misfit_of_run, run_of
from rankloom.train.run.job import Job
from rankloom.train.run.optim import schedule
from rankloom.train.run.schema import Config
from rankloom.train.run.weights import save_tokenizer
from rankloom.train.state import NEW_RUN

FOLDER = "checkpoints"
ORDERING = {"run.seed", "train.seq_len", "train.global_batch_size"}   # which samples a step takes
CONFIGURED = ("weight_decay", "betas", "momentum")   # of a parameter group; the learning rate comes from the schedule


def newest_checkpoint(path: Path) -> Path:
    """The newest complete checkpoint in a run folder, or in its folder of checkpoints; or `path` itself, if it is one.

    raises: DataError
    """
    path = expanded(path)
    try:
        if (path / MANIFEST).exists():
            return path
        exists, found = path.exists(), whole_checkpoints(path / FOLDER) or whole_checkpoints(path)
    except (OSError, ValueError) as error:   # no permission; a null character
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}), to resume from") from None
    if not exists:
        raise DataError(f"{path}: no such run folder or checkpoint, to resume from")
    if not found:
        raise DataError(f"{path}: holds no checkpoint to resume from; a run writes them with --checkpoint.interval")
    return found[-1]


@contextmanager
def _naming_the_one_before(path: Path) -> Iterator[None]:
    """When the checkpoint cannot be read, tell which older one there is."""
    try:
        yield
    except DataError as error:
        there = whole_checkpoints(path.parent)
        if path not in there[1:]:
            raise
        raise DataError(f"{error}; the one before it: --checkpoint.resume {quote(str(there[there.index(path) - 1]))}") from None


def whole_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first: those with a manifest, without those that the user renamed."""
    found = {path.parent.name.removeprefix("step-"): path.parent for path in folder.glob(f"step-*/{MANIFEST}")}
    return [found[step] for step in sorted(filter(str.isdecimal, found), key=int)]


def save_in_run(job: Job, engine: Engine) -> None:
    """Write a checkpoint of this step, then remove the oldest ones beyond `keep_latest`. A collective.

    The tokenizer is written too: a resumed run could otherwise learn another one.
    raises: StorageError, on all ranks, when it cannot be written
    """
    path = job.run / FOLDER / f"step-{engine.steps_done:08}"
    problem = None
    try:
        if job.world.rank == 0:
            job.run.mkdir(parents=True, exist_ok=True)
            save_tokenizer(job.run, job.corpus.tokenizer)
    except (OSError, DataError) as error:
        problem = f"{job.run}: the tokenizer cannot be written ({error})"
    job.world.agree(problem, error=StorageError, label="write the tokenizer")
    try:
        save_checkpoint(engine.training(), path, facts_of_run(job))
    except StorageError:
        with suppress(OSError):   # unless there are earlier ones
            path.parent.rmdir()
        raise
    if job.world.rank == 0:
        job.sink(Saved(0, str(path)))
        beyond = whole_checkpoints(path.parent)[:-job.config.checkpoint.keep_latest]
        for old in (found for found in beyond if not found.is_symlink()):   # a user has moved what a link leads to
            _remove(old)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, unless another run is resuming from it: the next save tries again."""
    with removing(checkpoint) as unread:
        if unread:
            with suppress(OSError):   # failing to remove it must not end the run
                (checkpoint / MANIFEST).unlink()   # first: without it, a half-removed checkpoint is invalid
            shutil.rmtree(checkpoint, ignore_errors=True)


def resume(job: Job, engine: Engine) -> None:
    """Resume from the checkpoint that the config names, if any. A collective.

    raises: ConfigError, DataError, ModelMismatch, on all ranks
    """
    if job.config.checkpoint.resume is None:
        return
    path, saved = _find(job, Path(job.config.checkpoint.resume))
    job.world.agree(misfit_of_run(path, saved, job), error=ModelMismatch, label="compare with the run of a checkpoint")
    groups = engine.optimizer.param_groups
    ours = [{key: group[key] for key in CONFIGURED if key in group} for group in groups]
    with _naming_the_one_before(path):
        engine.load(path)
    for group, configured in zip(groups, ours):
        group.update(configured)
    job.world.agree(_nothing_left(path, engine.steps_done, job.config), label="steps that are left")
    if engine.steps_done == job.config.train.steps:
        job.say(f"finishes the run of {path}, which was stopped after its last step, {engine.steps_done}")
        return
    job.say(f"goes on from {path}, after step {engine.steps_done}")
    if not job.config.checkpoint.interval:
        job.say("this run writes no checkpoints itself; --checkpoint.interval N writes one every N steps")
    _say_changes(job, engine, saved)


def expect_steps_left(config: Config) -> None:
    """Before a run has a folder: check that what it resumes from is there, and leaves it something to do. raises: ConfigError, DataError"""
    if config.checkpoint.resume is not None:
        path = newest_checkpoint(Path(config.checkpoint.resume))
        with _naming_the_one_before(path):
            manifest = read_manifest(path)[1]
        if problem := _nothing_left(path, (NEW_RUN | manifest.facts.get("run", {}))["step"], config):
            raise ConfigError(problem)


def _nothing_left(path: Path, done: int, config: Config) -> str | None:
    """Why a run has nothing to do, or None. One that was killed after its last step has still to evaluate, and to write its weights."""
    steps = config.train.steps
    has_ended = json_object(run_of(path) / "summary.json").get("stopped_by") == 0   # a run writes it last
    if done < steps or (done == steps and not has_ended):
        return None
    return f"{path}: is of step {done}, and [train] steps = {steps}: nothing is left to train; give more --train.steps"


def say_how_to_resume(run: Path, steps_left: int) -> list[str]:
    """For a run that was stopped: a line with the command that resumes it, or that none can. No line if no steps are left."""
    if steps_left <= 0:
        return []
    if not whole_checkpoints(run / FOLDER):
        return ["there is no checkpoint to resume from; --checkpoint.interval N writes one every N steps, and at a stop"]
    return [f"resume with: rankloom train {quote(str(run / 'config.toml'))} --checkpoint.resume {quote(str(run))}"]


def _find(job: Job, place: Path) -> tuple[Path, Mapping[str, Any]]:
    """The checkpoint to resume from, and its facts about its run. A collective. raises: DataError, on all ranks"""
    path, problem = place, None
    saved: Mapping[str, Any] = {}
    try:
        path = newest_checkpoint(place)
        with _naming_the_one_before(path):
            saved = read_manifest(path)[1].facts.get("about_run", {})
    except DataError as error:
        problem = str(error)
    job.world.agree(problem, error=DataError, label="find a checkpoint")
    # All take what rank 0 has found: another run may be writing a newer one.
    first_path, first_saved = job.world.all_gather_object([str(path), saved], label="which checkpoint")[0]
    return Path(first_path), first_saved


def _say_changes(job: Job, engine: Engine, saved: Mapping[str, Any]) -> None:
    """Report what differs from the run that wrote the checkpoint."""
    if changes := changes_of_run(saved, job.config):
        job.say("unlike the run of that checkpoint: " + ", ".join(f"{key} {change}" for key, change in changes.items()))
    if ORDERING & changes.keys():
        job.say(f"step {engine.steps_done + 1} takes the samples that it would take if all steps before had had these settings: in this "
                "epoch, some that were trained on may come again, and others be left out")
    rate, last = schedule(job.config), float(engine.optimizer.param_groups[0]["lr"])
    if not math.isclose(rate(engine.steps_done - 1), last, rel_tol=1e-6):
        job.say(f"the learning rate was {last:.3g} in step {engine.steps_done} and is {rate(engine.steps_done):.3g} in the next one, by "
                "this run's own schedule")
    if saved.get("split", job.corpus.split) != job.corpus.split:
        job.say("the text, or what of it is kept for validation, is not that of the checkpoint's run: the validation loss may be of text "
                "that was trained on")
    if job.config.comm.compress != EXACT and engine.steps_done + job.config.comm.compress_after >= job.config.train.steps:
        job.say(f"[comm] compress_after = {job.config.comm.compress_after} counts from here: no step of this run is compressed")
    if EXACT not in (job.config.comm.compress, saved.get("settings", {}).get("comm.compress")):
        exact = job.config.comm.compress_after
        job.say("what compression had not sent yet is lost, so bits differ from those of a run that did not stop"
                + (f"; [comm] compress_after = {exact} counts from here" if exact else ""))
