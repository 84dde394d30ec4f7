"""What a checkpoint consists of, and which rank writes what. Pure: nothing here touches a disk or another rank.

    folder/
      manifest.json                   written last, by one rename: a checkpoint without it does not exist
      <token>-00003.safetensors       what rank 3 wrote

The manifest says which file has which boxes of every tensor (under the key that `key_of` gives), and the SHA-256 of every file. A tensor
that was saved in boxes of one shape is loaded in boxes of any other, by intersection.

source: DCP (torch.distributed.checkpoint) for loading on another mesh; here the manifest is a plain list of spans, without pickle
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankloom.base.errors import DataError, ModelMismatch
from rankloom.base.layout import Span
from rankloom.base.spans import Box, is_partition

FORMAT = 1   # of the manifest


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a whole tensor, in memory on this rank.

    shape:   of the whole
    values:  of the shape of `box`; loading writes into it
    is_copy: other ranks hold these elements too, sharded in another way, and save them
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor, in a file. file: its number in `Manifest.files`"""

    file: int
    box: Box


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A saved tensor. Its pieces do not overlap, and together they are the whole tensor."""

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
    """A complete checkpoint. facts: everything except tensors, as JSON"""

    tensors: dict[str, SavedTensor]
    files: list[SavedFile]
    facts: dict[str, Any]


class AnnouncedPart(NamedTuple):
    """A part without its values, as ranks announce it to rank 0 in JSON."""

    name: str
    dtype: str
    shape: list[int]        # of the whole
    box: list[list[int]]    # [start, stop] of each dim

    @property
    def kind(self) -> str:
        """What all parts of a tensor must have in common, in words."""
        return f"{self.dtype} {tuple(self.shape)}"

    @property
    def numel(self) -> int:
        """The elements of the box."""
        return prod(stop - start for start, stop in self.box)


def announce(parts: Iterable[Part]) -> list[AnnouncedPart]:
    """A rank's parts without values, for rank 0."""
    return [AnnouncedPart(part.name, str(part.values.dtype).removeprefix("torch."), list(part.shape), [list(span) for span in part.box])
            for part in parts if not part.is_copy]


def assign_writers(announced: Sequence[Sequence[AnnouncedPart]]) -> list[list[int]]:
    """Which of its parts each rank writes: each box once, by the holder that has the fewest bytes to write so far.

    announced: the parts of each rank, in rank order
    raises:    ModelMismatch when ranks disagree on the shape or dtype of a tensor, or do not hold all of it between them
    """
    _expect_agreement(announced)
    holders: dict[tuple[str, str], list[tuple[int, int]]] = {}   # of each box: (rank, number of its part)
    for rank, parts in enumerate(announced):
        for number, part in enumerate(parts):
            holders.setdefault((part.name, str(part.box)), []).append((rank, number))
    shares: list[list[int]] = [[] for _ in announced]
    nbytes = [0] * len(announced)   # that each rank writes
    for found in holders.values():
        rank, number = min(found, key=lambda holder: nbytes[holder[0]])
        part = announced[rank][number]
        shares[rank].append(number)
        nbytes[rank] += part.numel * getattr(torch, part.dtype).itemsize
    _expect_whole_tensors([announced[rank][number] for rank, share in enumerate(shares) for number in share])
    return shares


def _expect_agreement(announced: Sequence[Sequence[AnnouncedPart]]) -> None:
    """Raise ModelMismatch when ranks disagree on the shape or dtype of a tensor."""
    firsts: dict[str, tuple[int, AnnouncedPart]] = {}
    for rank, parts in enumerate(announced):
        for part in parts:
            first_rank, first = firsts.setdefault(part.name, (rank, part))
            if part.kind != first.kind:
                raise ModelMismatch(f"{part.name} is {first.kind} on rank {first_rank} and {part.kind} on rank {rank}: "
                                    "it cannot be one tensor")


def _expect_whole_tensors(written: Iterable[AnnouncedPart]) -> None:
    """Raise ModelMismatch unless these parts have as many elements of each tensor as it has."""
    found: Counter[str] = Counter()
    wanted: dict[str, int] = {}
    for part in written:
        found[part.name] += part.numel
        wanted[part.name] = prod(part.shape)
    for name, numel in wanted.items():
        if found[name] != numel:
            raise ModelMismatch(f"ranks hold {found[name]} elements of {name} between them, expected {numel}; "
                                "has a step failed on one of them?")


def assemble(announced: Sequence[Sequence[AnnouncedPart]], shares: Sequence[Sequence[int]], files: Sequence[SavedFile | None],
             facts: Mapping[str, Any]) -> Manifest:
    """The manifest of a checkpoint.

    files: one per rank, or None if the rank had nothing to write
    """
    tensors: dict[str, SavedTensor] = {}
    writers = [rank for rank, file in enumerate(files) if file is not None]
    file_of = {rank: number for number, rank in enumerate(writers)}
    for rank, share in enumerate(shares):
        for part in (announced[rank][number] for number in share):
            saved = tensors.setdefault(part.name, SavedTensor(getattr(torch, part.dtype), tuple(part.shape)))
            saved.pieces.append(StoredBox(file_of[rank], tuple(Span(*span) for span in part.box)))
    return Manifest(tensors, [file for file in files if file is not None], dict(facts))


def key_of(name: str, box: Box) -> str:
    """The key of a box in its file."""
    return f"{name}@{','.join(f'{start}:{stop}' for start, stop in box)}"


def to_json(manifest: Manifest) -> str:
    """The manifest's file: a line for each tensor and file, for human readers, and the SHA-256 of all these in the last line."""
    files = ",\n".join(json.dumps([file.name, file.nbytes, file.sha256]) for file in manifest.files)
    tensors = ",\n".join(f"{json.dumps(name)}: {json.dumps(_tensor_fields(saved))}" for name, saved in manifest.tensors.items())
    body = (f'"format": {FORMAT},\n"facts": {json.dumps(manifest.facts)},\n'
            f'"files": [\n{files}\n],\n"tensors": {{\n{tensors}\n}}')
    return f'{{{body}{_HASH}{_sha256(body)}"}}\n'


_HASH = ',\n"sha256": "'


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _tensor_fields(saved: SavedTensor) -> dict[str, Any]:
    dtype = str(saved.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": saved.shape, "pieces": [[piece.file, piece.box] for piece in saved.pieces]}


def from_json(text: str, where: str) -> Manifest:
    """The inverse of `to_json`.

    where:  the file, for error messages
    raises: DataError when the text is not a manifest, has another format, is damaged, or has elements of a tensor not at all or twice
    """
    try:
        read = json.loads(text)
        if read["format"] != FORMAT:
            raise DataError(f"{where}: is of format {read['format']}, this rankloom reads {FORMAT}")
        body = text.rpartition(_HASH)[0].removeprefix("{")
        if _sha256(body) != read["sha256"]:
            raise DataError(f"{where}: is not what was written: its SHA-256 is another; the manifest is damaged")
        files = [SavedFile(*fields) for fields in read["files"]]
        tensors = {name: _tensor_of(fields) for name, fields in read["tensors"].items()}
        manifest = Manifest(tensors, files, read["facts"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{where}: is no manifest of a checkpoint ({type(error).__name__}: {error})") from None
    _expect_sound(manifest, where)
    return manifest


def _expect_sound(manifest: Manifest, where: str) -> None:
    """Raise DataError unless all pieces are in files that there are, and make up their tensors."""
    for name, saved in manifest.tensors.items():
        if unknown := [piece.file for piece in saved.pieces if not 0 <= piece.file < len(manifest.files)]:
            raise DataError(f"{where}: has a piece of {name} in file {unknown[0]} of {len(manifest.files)}; the manifest is damaged")
        if not is_partition([piece.box for piece in saved.pieces], saved.shape):
            raise DataError(f"{where}: the pieces of {name} are not each element of {saved.shape} once; the manifest is damaged")


def _tensor_of(fields: Mapping[str, Any]) -> SavedTensor:
    pieces = [StoredBox(file, tuple(Span(*span) for span in box)) for file, box in fields["pieces"]]
    return SavedTensor(getattr(torch, fields["dtype"]), tuple(fields["shape"]), pieces)
