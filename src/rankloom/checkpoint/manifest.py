"""What a checkpoint consists of, and who writes what of it. Pure: nothing here touches a disk or another rank.

    folder/
      manifest.json                   written last, by one rename: a checkpoint without it does not exist
      <token>-00003.safetensors       what rank 3 wrote

The manifest says of every tensor which box of it lies in which file, under the key `name@number`, and the SHA-256 of every file. So a
tensor that was saved in pieces of one shape is loaded in pieces of any other, by intersection.

source: the manifest as a plain list of spans, and no pickle: DCP (torch.distributed.checkpoint) has the idea of loading on another mesh
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from rankloom.base.errors import DataError, ModelMismatch
from rankloom.base.layout import Span
from rankloom.base.spans import Box, numel

FORMAT = 1   # of the manifest


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of a whole tensor that are in memory here.

    shape:   of the whole
    values:  of the shape of `box`; memory that loading writes to
    is_copy: other ranks hold these elements too, cut in another way, and it is theirs that are written
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor, in a file."""

    file: int
    box: Box


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that was saved; its pieces do not overlap, and make it whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[StoredBox] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file of the checkpoint, beside the manifest."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole checkpoint. facts: what is no tensor, as JSON."""

    tensors: dict[str, SavedTensor]
    files: list[SavedFile]
    facts: dict[str, Any]


Announced = list[list[Any]]   # of one rank: [name, dtype, shape, box] of each of its parts


def tell(parts: Iterable[Part]) -> Announced:
    """What a rank tells the others of its parts: no values."""
    return [[part.name, str(part.values.dtype).removeprefix("torch."), list(part.shape), [list(span) for span in part.box]]
            for part in parts if not part.is_copy]


def assign_writers(told: Sequence[Announced]) -> list[list[int]]:
    """Which of its parts each rank writes: each box once, by the one of its holders that has the fewest bytes to write so far.

    told:   by every rank, in rank order. All ranks decide alike, and nothing more need be said
    raises: ModelMismatch when ranks have other shapes or dtypes of a tensor, or do not have all of it between them
    """
    holders: dict[tuple[str, str], list[tuple[int, int]]] = {}
    about: dict[str, tuple[int, list[Any]]] = {}
    for rank, parts in enumerate(told):
        for number, (name, *kind, box) in enumerate(parts):
            first, known = about.setdefault(name, (rank, kind))
            if known != kind:
                raise ModelMismatch(f"{name} is {_shown(known)} on rank {first} and {_shown(kind)} on rank {rank}: it cannot be one tensor")
            holders.setdefault((name, str(box)), []).append((rank, number))
    shares: list[list[int]] = [[] for _ in told]
    load, saved = [0] * len(told), dict.fromkeys(about, 0)
    for (name, _), found in holders.items():
        rank, number = min(found, key=lambda at: load[at[0]])
        count = prod(stop - start for start, stop in told[rank][number][-1])
        shares[rank].append(number)
        load[rank] += count * getattr(torch, about[name][1][0]).itemsize
        saved[name] += count
    for name, count in saved.items():
        if count != (wanted := prod(about[name][1][1])):
            raise ModelMismatch(f"ranks hold {count} elements of {name} between them, expected {wanted}; has a step failed on one of them?")
    return shares


def _shown(kind: Sequence[Any]) -> str:
    dtype, shape = kind
    return f"{dtype} {tuple(shape)}"


def assemble(told: Sequence[Announced], shares: Sequence[Sequence[int]], files: Sequence[SavedFile | None],
             facts: Mapping[str, Any]) -> Manifest:
    """The manifest of what ranks have written.

    files: of each rank, None where it had nothing to write
    """
    tensors: dict[str, SavedTensor] = {}
    number_of = {rank: number for number, rank in enumerate(rank for rank, file in enumerate(files) if file is not None)}
    for rank, share in enumerate(shares):
        for name, dtype, shape, box in (told[rank][number] for number in share):
            saved = tensors.setdefault(name, SavedTensor(getattr(torch, dtype), tuple(shape)))
            saved.pieces.append(StoredBox(number_of[rank], tuple(Span(*span) for span in box)))
    return Manifest(tensors, [file for file in files if file is not None], dict(facts))


def key_of(name: str, box: Box) -> str:
    """What a piece is called in its file."""
    return f"{name}@{','.join(f'{start}:{stop}' for start, stop in box)}"


def to_json(manifest: Manifest) -> str:
    """As it lies on disk: a line for each tensor and file, so that people can read it, and the SHA-256 of all that in the last one."""
    tensors = [f"{json.dumps(name)}: {json.dumps(_tensor_fields(saved))}" for name, saved in manifest.tensors.items()]
    files = [json.dumps([file.name, file.nbytes, file.sha256]) for file in manifest.files]
    parts = (f'"format": {FORMAT}', f'"facts": {json.dumps(manifest.facts)}', '"files": [\n' + ",\n".join(files) + "\n]",
             '"tensors": {\n' + ",\n".join(tensors) + "\n}")
    body = ",\n".join(parts)
    return f'{{{body}{_HASH}{_sha256(body)}"}}\n'


_HASH = ',\n"sha256": "'


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _tensor_fields(saved: SavedTensor) -> dict[str, Any]:
    dtype = str(saved.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": saved.shape, "pieces": [[piece.file, piece.box] for piece in saved.pieces]}


def from_json(text: str, where: str) -> Manifest:
    """The inverse of `to_json`.

    where:  for messages
    raises: DataError when it is no manifest, of another format, or does not make its tensors whole
    """
    try:
        read = json.loads(text)
        if read["format"] != FORMAT:
            raise DataError(f"{where}: is of format {read['format']}, this rankloom reads {FORMAT}")
        body = text.rpartition(_HASH)[0].removeprefix("{")
        if _sha256(body) != read["sha256"]:
            raise DataError(f"{where}: is not what was written: its SHA-256 is another; the manifest is damaged")
        files = [SavedFile(*fields) for fields in read["files"]]
        manifest = Manifest({name: _tensor_of(fields) for name, fields in read["tensors"].items()}, files, read["facts"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{where}: is no manifest of a checkpoint ({type(error).__name__}: {error})") from None
    for name, saved in manifest.tensors.items():
        if (count := sum(numel(piece.box) for piece in saved.pieces if piece.file < len(files))) != prod(saved.shape):
            raise DataError(f"{where}: has {count} elements of {name}, expected {prod(saved.shape)}; the manifest is damaged")
    return manifest


def _tensor_of(fields: Mapping[str, Any]) -> SavedTensor:
    pieces = [StoredBox(file, tuple(Span(*span) for span in box)) for file, box in fields["pieces"]]
    return SavedTensor(getattr(torch, fields["dtype"]), tuple(fields["shape"]), pieces)
