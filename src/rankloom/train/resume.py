"""Checkpoints of a run: where they lie, how many are kept, and the one that another run goes on from.

    runs/<name>/checkpoints/step-00000200/     train/checkpoint.py says what is in it

A run that goes on has a folder of its own, and may have another mesh; only the step and the state come from the one before.
"""

import shutil
from contextlib import suppress
from pathlib import Path

from rankloom.base.errors import ConfigError, DataError
from rankloom.base.events import Saved
from rankloom.checkpoint.files import MANIFEST
from rankloom.train.engine import Engine
from rankloom.train.job import Job

FOLDER = "checkpoints"


def newest_checkpoint(path: Path) -> Path:
    """The newest whole checkpoint of a run folder; or `path` itself, if it is one.

    raises: DataError
    """
    if (path / MANIFEST).exists():
        return path
    if not path.exists():
        raise DataError(f"{path}: no such run folder or checkpoint, to resume from")
    if not (found := whole_checkpoints(path)):
        raise DataError(f"{path}: holds no checkpoint to resume from; a run writes them with --checkpoint.interval")
    return found[-1]


def whole_checkpoints(run: Path) -> list[Path]:
    """Those of a run folder, oldest first; what has no manifest is none, and what the user has renamed is the user's."""
    found = {path.parent.name.removeprefix("step-"): path.parent for path in (run / FOLDER).glob(f"step-*/{MANIFEST}")}
    return [found[step] for step in sorted(filter(str.isdecimal, found), key=int)]


def save_in_run(job: Job, engine: Engine) -> None:
    """Write a checkpoint of this step, and remove the oldest beyond those to keep. A collective.

    raises: ConfigError, on all ranks, when it cannot be written
    """
    path = job.run / FOLDER / f"step-{engine.steps_done:08}"
    engine.save(path)
    if job.world.rank == 0:
        job.sink(Saved(0, str(path)))
        for old in whole_checkpoints(job.run)[:-job.config.checkpoint.keep_latest]:
            with suppress(OSError):   # what cannot be removed is no reason to end a run
                (old / MANIFEST).unlink()   # first: half of a checkpoint is none
            shutil.rmtree(old, ignore_errors=True)


def resume(job: Job, engine: Engine) -> None:
    """Go on from the checkpoint that the config names, if it does. A collective.

    raises: ConfigError, DataError, ModelMismatch, on all ranks
    """
    if job.config.checkpoint.resume is None:
        return
    problem, path = None, ""
    try:
        path = str(newest_checkpoint(Path(job.config.checkpoint.resume)))
    except DataError as error:
        problem = str(error)
    job.world.agree(problem, error=DataError, label="find a checkpoint")
    path = job.world.all_gather_object(path, label="which checkpoint")[0]   # a run that goes on may write a newer one meanwhile
    engine.load(path)
    if engine.steps_done >= job.config.train.steps:
        raise ConfigError(f"{path}: is of step {engine.steps_done}, and [train] steps = {job.config.train.steps}: nothing is left to "
                          "train; give more --train.steps")
    job.say(f"goes on from {path}, after step {engine.steps_done}")
