"""The folder of a run, and the journals that are written to it while the run goes on.

    runs/<name>/
      config.toml         every key with its value; `rankloom train` on it repeats the run
      env.json            where and with what it ran
      metrics.jsonl       one line per step and evaluation, from rank 0
      events/rank-N.jsonl everything that happened on each rank
      logs/               what the ranks printed, when `rankloom train` launched them
      checkpoints/        whole states to go on from, if [checkpoint] asks for some
      model.safetensors, model.json, tokenizer.json
      samples.txt, summary.json, loss.png

A run is never overwritten: a folder that the user named must not hold a run yet (a step or weights). Without a name, the name is the
time and the preset, with a number if it is taken. A given name gets a number too when torchrun restarts the job, since the folder
of the first start is there.
"""

import fcntl
import json
import math
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from importlib import metadata
from io import FileIO
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from rankloom.base.errors import ConfigError, StorageError
from rankloom.base.events import Evaluated, Event, StepDone
from rankloom.base.files import expanded, saving
from rankloom.train.run.config import write_config
from rankloom.train.run.schema import Config
from rankloom.world.world import World

PACKAGES = ("rankloom", "torch", "numpy", "safetensors", "tokenizers", "pydantic")


def claim_run_folder(config: Config, now: datetime, *, again: bool = False, agents: Collection[str] = ()) -> Path:
    """Make the folder of a run, and its sub-folders, and return its path.

    again:  a launcher has restarted the job: use a new folder beside that of the first start
    agents: the launchers of this job. If one of them began the run in the folder, this is a restart too: torchrun does not count it as
            one when a node joins
    raises: StorageError when the folder cannot be made; ConfigError when it holds a run already;
            DataError for a `~` without a home
    """
    parent = expanded(config.run.folder)
    path = parent / (config.run.name or f"{now:%Y-%m-%d-%H%M%S}-{config.model.preset}")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if config.run.name is None or again or _began_with(path, agents):
            path = _next_free(path)
        for folder in (path, path / "events", path / "logs"):
            folder.mkdir(exist_ok=True)
    except OSError as error:
        leave_if_empty(path)
        raise StorageError(f"{path}: the run folder cannot be made ({error.strerror}); give another place with --run.folder") from None
    if holds_run(path):
        raise ConfigError(f"{path}: holds a run already; give another --run.name, or remove that folder")
    return path


def flag_of_folder(parent: Path) -> str:
    """What tells a run where to make its folder. The / at its end tells a folder `none` from the word that removes a key."""
    return f"--run.folder={os.path.join(parent, '')}"


def _began_with(path: Path, agents: Collection[str]) -> bool:
    try:
        return not set(agents).isdisjoint(json.loads((path / "env.json").read_text(encoding="utf-8"))["agents"])
    except (OSError, ValueError, KeyError, TypeError):   # no run, or one of an older rankloom
        return False


def hold(path: Path) -> None:
    """Keep other runs out of a run folder until this process ends; call it once for a folder. raises: ConfigError"""
    descriptor = os.open(path, os.O_RDONLY)   # stays open: closing it would give up the lock
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"{path}: another run is beginning in this folder; give another --run.name") from None
    except OSError:   # a file system without locks
        os.close(descriptor)


def write_run_config(config: Config, run: Path) -> Path:
    """Write `config.toml` of a run folder, without the name, so that it can be run again and gets a new folder; returns its path."""
    unnamed = config.model_copy(update={"run": config.run.model_copy(update={"name": None})})
    write_config(unnamed, run / "config.toml")
    return run / "config.toml"


@contextmanager
def no_empty_folder(run: Path) -> Iterator[None]:
    """A context that writes to a new run folder: a StorageError removes the folder if nothing has been written."""
    try:
        yield
    except StorageError:
        leave_if_empty(run)
        raise


def holds_run(path: Path) -> bool:
    """Whether a folder holds a finished step, a checkpoint or weights."""
    metrics = path / "metrics.jsonl"
    return (path / "model.safetensors").exists() or (path / "checkpoints").exists() or (metrics.exists() and metrics.stat().st_size > 0)


def began(path: Path) -> bool:
    """Whether rank 0 has opened its journal in a run folder: it says then where that is."""
    return (path / "metrics.jsonl").exists()


def leave_if_empty(run: Path) -> None:
    """Remove a run folder in which nothing has been written; leave any other."""
    for folder in (run / "events", run / "logs", run):
        with suppress(OSError):
            folder.rmdir()


def _next_free(path: Path) -> Path:
    """Make `path`, or path-2, path-3 ...: the first that does not exist. Safe when two runs start at once."""
    found, numbers = path, count(2)
    while True:
        try:
            found.mkdir()
            return found
        except FileExistsError:
            found = path.with_name(f"{path.name}-{next(numbers)}")


def write_json(path: Path, value: object) -> None:
    """Write `value` as readable JSON, whole or not at all. Numbers that JSON does not know (nan, inf) become null.

    raises: StorageError that names the path
    """
    with saving(path) as temporary:
        temporary.write_text(json.dumps(_as_json(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")


class Journal:
    """A sink that appends each event of this rank as a JSON line; rank 0 keeps `metrics.jsonl` too.

    A line that cannot be written does not raise here, in the middle of a step, while other ranks wait. It sets `problem`, and the
    loop makes all ranks raise together.
    """

    def __init__(self, run: Path, rank: int):
        self.problem: str | None = None
        self._all = self._open(run / "events" / f"rank-{rank}.jsonl")
        self._metrics = self._open(run / "metrics.jsonl") if rank == 0 else None

    def __call__(self, event: Event) -> None:
        """Append one event. Numbers that JSON does not know (nan, inf) become null."""
        line = json.dumps({"event": type(event).__name__, **_as_json(asdict(event))}, allow_nan=False).encode() + b"\n"
        self._write(self._all, line)
        if isinstance(event, StepDone | Evaluated):
            self._write(self._metrics, line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in (self._all, self._metrics):
            if file is not None:
                file.close()

    def _open(self, path: Path) -> FileIO | None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)   # this host may share no disk with rank 0
            return open(path, "ab", buffering=0)
        except OSError as error:
            self.problem = f"{path}: cannot be opened ({error.strerror})"
            return None

    def _write(self, file: FileIO | None, line: bytes) -> None:
        if file is None or self.problem:
            return
        try:
            written = file.write(line)
        except OSError as error:
            self.problem = f"{file.name}: cannot be written ({error.strerror})"
            return
        if written != len(line):
            file.truncate(file.tell() - written)   # whole lines only: other programs read this file too
            self.problem = f"{file.name}: cannot be written in full; is the disk full?"


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_json(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe_environment(world: World, command: Sequence[str]) -> dict[str, Any]:
    """Where and with what a run ran, for `env.json`."""
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": list(command),
        "folder": os.getcwd(),
        "git_commit": _git_commit(),
        "ranks": world.size,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "gpu": gpu,
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the current folder, or None where there is no git or no repository."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
