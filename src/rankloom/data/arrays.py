"""Token arrays on disk: raw .bin (with a .json beside it that names the dtype) or .npy, memory-mapped on reading."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankloom.base.errors import DataError
from rankloom.data.text import disk

Tokens = NDArray[Any]
Progress = Callable[[str, float], None]     # (what is being done, fraction done: 0 .. 1)

TOKEN_DTYPES = (np.dtype(np.uint16), np.dtype(np.uint32))

_BLOCK = 1 << 22


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint16 and uint32 that holds every token."""
    return TOKEN_DTYPES[vocab_size > 1 << 16]


def open_tokens(path: str | Path, vocab_size: int | None = None, *, progress: Progress | None = None) -> Tokens:
    """Map a token array [n] into memory: .npy, or .bin. The dtype of a .bin is in `<path>.json`; without that it is uint16.

    vocab_size: every token must be below it; they are checked a block at a time
    raises: DataError for a file that is missing, empty, damaged, not whole numbers, or has tokens outside the vocabulary
    """
    path = Path(path)
    with disk(path, "open the token array"):
        tokens = _map_npy(path) if path.suffix == ".npy" else _map_bin(path)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or len(tokens) == 0:
        raise DataError(f"{path}: expected one row of whole numbers, got shape {tokens.shape} of {tokens.dtype}")
    if vocab_size is not None:
        _check_range(tokens, vocab_size, path, progress)
    return tokens


def _map_npy(path: Path) -> Tokens:
    try:
        return np.lib.format.open_memmap(path, mode="r")   # np.load reads other formats too
    except ValueError as error:
        raise DataError(f"{path}: not an array in .npy format: {error}") from error


def _map_bin(path: Path) -> Tokens:
    beside, size = Path(f"{path}.json"), path.stat().st_size
    name = "uint16"
    if beside.exists():
        name = read_json(beside).get("dtype", name)
    if name not in ("uint8", "uint16", "uint32", "int32", "int64"):
        raise DataError(f"{beside}: dtype {name!r}; it must be uint8, uint16, uint32, int32 or int64")
    if size == 0 or size % np.dtype(name).itemsize:
        raise DataError(f"{path}: {size} bytes are not a whole number of {name} tokens, 1 or more; "
                        f"name another dtype in {beside.name}, for example {{\"dtype\": \"uint32\"}}")
    return np.memmap(path, dtype=name, mode="r")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a small JSON file."""
    try:
        entry = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(entry).__name__}")
    return entry


def _check_range(tokens: Tokens, vocab_size: int, path: Path, progress: Progress | None) -> None:
    for start in range(0, len(tokens), _BLOCK):
        block = tokens[start:start + _BLOCK]
        low, high = int(block.min()), int(block.max())
        if low < 0 or high >= vocab_size:
            worst = start + int(block.argmin() if low < 0 else block.argmax())
            cure = ("no tokenizer makes such a token: it may mark what is no text, as -100 often does; leave these out" if low < 0 else
                    "raise data.vocab_size, or use the tokenizer that made this array")
            raise DataError(f"{path}: token {int(tokens[worst])} at position {worst} is outside the vocabulary "
                            f"0 to {vocab_size - 1}; {cure}")
        if progress:
            progress("check tokens", min(1.0, (start + len(block)) / len(tokens)))
