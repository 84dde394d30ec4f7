"""Checkpoints: the state of a model in training on disk, written by all ranks and read on any mesh.

A box is a rectangular part of a tensor: a start and a stop for each dim.

    save    ranks tell rank 0 which boxes of which tensors they hold, and it tells each which of them to write: every box is written once
            each rank writes its boxes into one file; rank 0 writes the manifest last, and its rename makes the checkpoint valid
            what grows with the number of ranks goes to rank 0 only
    load    files are checked against their hashes, and shapes against the model, before anything is changed
            each rank reads the boxes that it will hold, from all saved boxes that overlap them

Ranks send each other no tensor values. Read checkpoint/manifest.py, train/checkpoint_parts.py and train/state.py before this file.
"""

import hashlib
import os
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError, ModelMismatch, RankloomError, StorageError
from rankloom.checkpoint.files import (
    Reader,
    commit,
    expect_free,
    expect_unchanged,
    expect_writable,
    file_name,
    read_manifest,
    reading,
    sizes_of,
    sole_writer,
    write_parts,
)
from rankloom.checkpoint.manifest import AnnouncedPart, Manifest, Part, SavedFile, announce, assemble, assign_writers
from rankloom.parallel.sections.state_dict import difference, is_extra, set_extra
from rankloom.shard.optimizer import ParameterSlice
from rankloom.shard.optimizer_state import load_optimizer_state, whole_state
from rankloom.train.checkpoint_parts import MODEL, OPTIMIZER, computed_entries, whole_part
from rankloom.train.long_work import while_others_wait
from rankloom.train.state import NEW_RUN, TrainingState, expect_fit, own_parts, stray_state
from rankloom.world.objects import gather_object, scatter_object
from rankloom.world.world import World

T = TypeVar("T")


def save_checkpoint(state: TrainingState, folder: str | os.PathLike[str], about_run: Mapping[str, Any] | None = None) -> None:
    """Write `state` into `folder`, replacing a checkpoint that is already there. A collective.

    about_run: a description of the run, as JSON, the same on all ranks: "about_run" in the manifest's facts
    memory:    one tensor at a time beyond the state
    raises:    ConfigError, on all ranks, StorageError if it cannot be written; UnitError when the model was changed in place. An earlier
               checkpoint is then unchanged
    """
    world = state.world
    folder = _together(world, partial(_path_of, folder, world.rank), label="folder of a checkpoint")
    state.placement.expect_own_values()
    parts, facts = [*state.placement.parts(), *_optimizer_parts(state)], _facts(state)
    if about_run is not None:
        facts["about_run"] = about_run
    is_new = not folder.is_dir()   # on every rank before any makes it
    _together(world, partial(_expect_savable, folder, parts, facts, state), label="begin a checkpoint")
    try:
        with ExitStack() as until:
            make = partial(_make_folder, folder, until if world.rank == 0 else None)
            _together(world, make, error=StorageError, label="make the folder of a checkpoint")
            _write(world, folder, parts, facts)
    except BaseException:
        if is_new:   # the last rank finds it empty
            with suppress(OSError):
                folder.rmdir()
        raise


def _write(world: World, folder: Path, parts: list[Part], facts: dict[str, Any]) -> None:
    """Write this rank's file, and as rank 0 the manifest. If that fails, no rank's file is left."""
    everyone = gather_object(world, announce(parts), label="what ranks hold")   # as JSON, so named tuples arrive as lists
    announced = [[AnnouncedPart(*fields) for fields in rank] for rank in everyone]   # empty but on rank 0
    assign = partial(assign_writers, announced) if world.rank == 0 else None
    shares = while_others_wait(world, assign, label="which rank writes what") or []   # empty but on rank 0
    new_token = uuid.uuid4().hex[:12]   # all take rank 0's
    token, share = scatter_object(world, [(new_token, share) for share in shares], label="what to write")
    announced_parts = [part for part in parts if not part.is_copy]
    to_write = [announced_parts[number] for number in share]
    path = folder / file_name(token, world.rank)
    try:
        file = while_others_wait(world, partial(write_parts, path, to_write) if to_write else None, label="write a checkpoint")
        written = gather_object(world, [file and [file.name, file.nbytes, file.sha256], facts], label="files of a checkpoint")
        make = partial(_manifest_of, announced, shares, written) if world.rank == 0 else None
        manifest = while_others_wait(world, make, label="make the manifest of a checkpoint")
    except BaseException:   # it may have failed on another rank
        path.unlink(missing_ok=True)
        raise
    try:   # not in a thread, which would go on to replace the manifest when this rank has given up
        finish = partial(commit, folder, manifest) if manifest else lambda: None   # rank 0 has it
        _together(world, finish, error=StorageError, label="commit a checkpoint")
    except StorageError:   # only this error: when a rank is lost now, the commit may already have happened
        path.unlink(missing_ok=True)
        raise


def _manifest_of(announced: list[list[AnnouncedPart]], shares: list[list[int]], written: list[Any]) -> Manifest:
    """The manifest of what ranks have written. written: of each rank its file, None where it has written none, and its facts"""
    files = [SavedFile(*file) if file else None for file, _ in written]
    return assemble(announced, shares, files, _facts_of_all([facts for _, facts in written]))


def _path_of(given: Any, rank: int) -> Path:
    """The path of a checkpoint. raises: ConfigError when this rank gives none"""
    if not (isinstance(given, str | os.PathLike) and isinstance(os.fspath(given), str) and os.fspath(given)) or "\0" in os.fspath(given):
        raise ConfigError(f"rank {rank}: the folder of a checkpoint is {given!r}, expected a path such as 'ckpt'")
    try:
        path = Path(given).expanduser()
        path.is_dir()   # where one may not look, nothing can be written or read
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"rank {rank}: {given} cannot be the folder of a checkpoint ({error}); give another") from None
    return path


def _expect_savable(folder: Path, parts: list[Part], facts: Mapping[str, Any], state: TrainingState) -> None:
    """Raise ConfigError for what cannot be written, before anything is."""
    expect_writable(parts)
    _expect_keepable(state)
    settings = [item for part in facts["param_groups"] for item in part.items()]
    for name, value in [*facts["extra"].items(), *facts["values"].items(), *((key, _listed(value)) for key, value in settings)]:
        if not _is_json(value):
            raise ConfigError(f"{name} cannot be in a checkpoint, which has no pickle: it is a {type(value).__name__}, or holds a value "
                              "that JSON cannot. Keep numbers, strings, None, and lists and dicts of these by name; tensors as buffers")
    if state.world.rank == 0:   # it writes the manifest; that of an earlier checkpoint may be large, and would be read by every rank
        expect_free(folder)


def _make_folder(folder: Path, until: ExitStack | None) -> None:
    """Make the folder, and keep other saves out of it, if `until` is given."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be made ({error.strerror}); give another folder") from None
    if until is not None:
        until.enter_context(sole_writer(folder))


def _expect_keepable(state: TrainingState) -> None:
    """Raise ConfigError for state that a checkpoint could not give back."""
    for name in computed_entries(state.placement.model):
        raise ConfigError(f"{name} is in the model's state dict, and neither a parameter nor a buffer, so it could not be given back: "
                          "keep it as a buffer, or in `get_extra_state`")
    if problem := stray_state(state):
        raise ConfigError(problem)
    for item in _optimizer_values(state):
        if not isinstance(item.key, str):
            raise ConfigError(f"the optimizer keeps a value of {item.owned.name} under {item.key!r}, and the file's names are strings: "
                              f"keep it under one, such as {str(item.key)!r}")


def _listed(value: Any) -> Any:
    """A setting of a parameter group, for JSON: a tuple as a list. `load_optimizer_state` has the inverse."""
    return list(value) if isinstance(value, tuple) else value


def _is_json(value: Any) -> bool:
    """Whether a value survives JSON unchanged."""
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(held) for key, held in value.items())
    return value is None or isinstance(value, str | int | float)


def _together(world: World, work: Callable[[], T], *, label: str, error: type[RankloomError] = ConfigError) -> T:
    """What `work` returns. A collective: if it raises a ConfigError on some ranks, all raise that, as an `error`."""
    problem = None
    try:
        made = work()
    except ConfigError as raised:
        problem = str(raised)
    world.agree(problem, error=error, label=label)
    return made


# ---------------------------------------------------------------------- what there is to save


class OptimizerValue(NamedTuple):
    """What an optimizer has under one key for one parameter. owned: what this rank has of the parameter"""

    key: Any   # a string, in what can be saved
    value: Any
    owned: ParameterSlice
    owner: nn.Parameter

    @property
    def saved_name(self) -> str:
        """KEY/NAME. Only the parameter's name may have a slash in it."""
        return f"{quote(str(self.key), safe='')}/{self.owned.name}"


def _optimizer_values(state: TrainingState) -> Iterator[OptimizerValue]:
    """The optimizer's state of the parameters that this rank has a slice of."""
    held, slices = state.optimizer.state, state.placement.slices()
    for name, owner in state.placement.owners.items():
        if owner in held and not slices[name].is_empty:
            for key, value in held[owner].items():
                yield OptimizerValue(key, value, slices[name], owner)


def _optimizer_parts(state: TrainingState) -> Iterator[Part]:
    """The parts of the tensors among the optimizer's values. A collective."""
    tensors = [item for item in _optimizer_values(state) if isinstance(item.value, Tensor)]
    single = {str(item.key) for item in tensors if item.value.numel() == 1 != item.owner.numel()}
    single_keys = set().union(*state.world.all_gather_object(sorted(single), label="numbers per tensor in optimizer state"))
    for item in tensors:
        yield from _parts_of(state, item, single_keys)


def _parts_of(state: TrainingState, item: OptimizerValue, single_keys: Container[str]) -> list[Part]:
    """The parts of one tensor: sharded as its parameter is, or whole, and equal on every rank that has it.

    single_keys: keys under which a parameter of several elements has a single number. Where this rank has one element of it, the shape
                 alone does not tell which of the two it is
    """
    saved, shape = OPTIMIZER + item.saved_name, item.value.shape
    is_sharded = shape == item.owner.shape and not (item.key in single_keys and shape.numel() == 1)
    return state.placement.parts_like(saved, item.owned, item.value) if is_sharded else [whole_part(saved, item.value)]


def _facts(state: TrainingState) -> dict[str, Any]:
    """Everything that is not a tensor. Extra state and optimizer values, by name, may differ by rank; the rest is equal on all ranks."""
    run = state.run()
    values = {item.saved_name: item.value for item in _optimizer_values(state) if not isinstance(item.value, Tensor)}
    extra = {name: value for name, value in state.placement.model.state_dict(keep_vars=True).items() if is_extra(name)}
    groups = whole_state(state.optimizer, state.placement.owners, {})["param_groups"]
    plain = [{key: value.tolist() if isinstance(value, Tensor) else value for key, value in part.items()} for part in groups]
    amax = {name: row.tolist() for name, row in run["amax"].items()}
    return {"run": run | {"amax": amax}, "extra": extra, "values": values, "param_groups": plain}


def _facts_of_all(facts: list[dict[str, Any]]) -> dict[str, Any]:
    first = facts[0]
    return first | {kind: {name: value for rank in reversed(facts) for name, value in rank[kind].items()} for kind in ("extra", "values")}


# ---------------------------------------------------------------------- and to load


def load_checkpoint(state: TrainingState, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Load the checkpoint in `folder`. A collective. Returns the state of the run: step, loss scale, amax.

    memory: one optimizer value of this rank at a time, beyond the loaded state
    raises: DataError, ModelMismatch, on all ranks, with nothing changed, unless a file disappears while it is read
    """
    folder = _together(state.world, partial(_path_of, folder, state.world.rank), label="folder of a checkpoint")
    with reading(folder):
        return _load(state, folder)


def _load(state: TrainingState, folder: Path) -> dict[str, Any]:
    world, parts = state.world, state.placement.parts()
    manifest = _manifest_of_all(world, folder)
    _expect_same_model(world, folder, parts, filter(is_extra, state.placement.model.state_dict(keep_vars=True)), manifest)
    facts = manifest.facts
    run = NEW_RUN | facts["run"]
    run["amax"] = {name: torch.tensor(row, dtype=torch.float32, device="cpu") for name, row in run["amax"].items()}
    saved = own_parts(state, _described(manifest))
    expect_fit(state, saved, run)
    state.float8.drop_casts()   # of a failed step
    slices = state.placement.slices()
    single_keys = {key for name, held in saved["state"].items() for key, value in held.items()
                   if isinstance(value, Tensor) and value.numel() == 1 != slices[name].shape.numel()}

    def read_here() -> None:
        with torch.no_grad(), Reader(folder, manifest) as reader:
            for part in parts:
                reader.fill(part)
            load_optimizer_state(state.optimizer, state.placement.owners, slices, saved, rank=world.rank,
                                 read=lambda name, key, value: _read_value(state, reader, key, value, slices[name], single_keys))

    with state.placement.rewritten():
        while_others_wait(world, read_here, label="read a checkpoint")
    for name in filter(is_extra, state.placement.model.state_dict(keep_vars=True)):
        set_extra(state.placement.model, name, facts["extra"][name])
    state.float8.load_state_dict(run["amax"])
    return run


def _manifest_of_all(world: World, folder: Path) -> Manifest:
    """The manifest, read by every rank and found equal; each rank has checked some of the files against their hashes."""
    before: list[str] | None = None
    while True:
        read = while_others_wait(world, partial(read_manifest, folder), label="read the manifest of a checkpoint")
        assert read is not None, "each rank reads it"
        text, manifest = read
        digests = world.all_gather_object(hashlib.sha256(text.encode()).hexdigest(), label="which checkpoint")
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is None:
            break
        if digests == before:   # else another job may have saved between the reads of two ranks: read again
            raise ModelMismatch(f"{folder}: holds another checkpoint on rank {other} than on rank 0; give a folder that all hosts share")
        before = digests
    mine = manifest.files[world.rank :: world.size]
    while_others_wait(world, lambda: expect_unchanged(folder, mine), label="compare files with their hashes")
    return manifest


def _expect_same_model(world: World, folder: Path, parts: list[Part], extra: Iterable[str], manifest: Manifest) -> None:
    """Raise ModelMismatch, on all ranks, unless the model's tensors, over all ranks, and its extra state are those that were saved."""
    own: dict[str, list[int]] = {part.name.removeprefix(MODEL): list(part.shape) for part in parts} | {name: [] for name in extra}
    everyone = world.all_gather_object(own, label="tensors of the model")
    shapes = {name: torch.Size(shape) for of_rank in everyone for name, shape in of_rank.items()}
    saved = {name: torch.empty(shape, device="meta") for name, shape in sizes_of(manifest, MODEL).items()}
    if problem := difference(shapes, saved | manifest.facts["extra"], f"{folder}, on rank {world.rank}"):
        raise ModelMismatch(problem)


def _described(manifest: Manifest) -> dict[str, Any]:
    """The saved optimizer state, with tensors on the meta device."""
    held: dict[str, dict[str, Any]] = {}
    tensors = [(name.removeprefix(OPTIMIZER), torch.empty(saved.shape, dtype=saved.dtype, device="meta"))
               for name, saved in manifest.tensors.items() if name.startswith(OPTIMIZER)]
    for value_name, value in [*tensors, *manifest.facts["values"].items()]:
        key, _, name = value_name.partition("/")
        held.setdefault(name, {})[unquote(key)] = value
    return {"state": held, "param_groups": manifest.facts["param_groups"]}


def _read_value(state: TrainingState, reader: Reader, key: str, like: Tensor, owned: ParameterSlice, single_keys: Container[str]) -> Tensor:
    """Read an optimizer value. like: of its shape on this rank, on the meta device"""
    made = torch.zeros(like.shape, dtype=like.dtype, device="cpu")   # zeros: the padding of a vocabulary is not saved
    for part in _parts_of(state, OptimizerValue(key, made, owned, state.placement.owners[owned.name]), single_keys):
        reader.fill(part)
    return made
