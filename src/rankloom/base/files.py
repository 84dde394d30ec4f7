"""Write a file so that a reader sees the old one or the whole new one, never a part; read one that may be missing."""

import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rankloom.base.errors import ConfigError, DataError, StorageError

_unfinished = set[Path]()   # temporary files of this process


def expanded(path: str | Path) -> Path:
    """The path, with `~` at its beginning as a home folder. raises: DataError where that is not known"""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:   # no such user, no $HOME
        raise DataError(f"{path}: there is no such home folder") from error


def parse_path(kind: type, words: Sequence[Any]) -> Path:
    """Parse a path from the command line, for cyclopts. Of `--out=~/x` a shell leaves the `~` as it is. words: one token"""
    return expanded(words[0].value)


@contextmanager
def replacing(path: Path, *, keep_old: bool = False) -> Iterator[Path]:
    """Give a temporary path to write to, beside `path`. It replaces `path` when the block ends; after an error it is deleted.

    keep_old: a file that is at `path` by then stays: of several writers the first wins
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    _unfinished.add(temporary)
    try:
        yield temporary
        if keep_old and _link(temporary, path):
            temporary.unlink()
        else:
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        _unfinished.discard(temporary)


def delete_unfinished() -> None:
    """For a process that ends at once: delete the temporary files of every `replacing`, whose blocks will not end."""
    for temporary in list(_unfinished):
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def saving(path: Path) -> Iterator[Path]:
    """`replacing`, for files that the user is told of. raises: StorageError that names the path"""
    try:
        with replacing(path) as temporary:
            yield temporary
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror})") from None


def make_folder(folder: Path, flag: str) -> None:
    """Make a folder for results, and check that it can be written. flag: the option that names it. raises: StorageError"""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _try_to_write(folder)
    except OSError as error:
        raise StorageError(f"{flag} {folder}: cannot be made or written ({error.strerror}); give another folder") from None


def expect_file(flag: str, path: Path | None, *endings: str) -> None:
    """Check a file that an option names, before the work whose result goes there: how its name ends, and its folder. None: not asked for.

    raises: ConfigError; StorageError when the folder cannot be written
    """
    if path is None:
        return
    if path.suffix not in endings:
        raise ConfigError(f"{flag} {path}: expected a name that ends in {' or '.join(endings)}")
    try:
        if not path.parent.is_dir():
            raise ConfigError(f"{flag} {path}: there is no folder {path.parent}")
        _try_to_write(path.parent)
    except OSError as error:
        raise StorageError(f"{flag} {path}: {path.parent} cannot be written ({error.strerror}); give another folder") from None


def _try_to_write(folder: Path) -> None:
    tempfile.TemporaryFile(dir=folder).close()


def _link(file: Path, name: Path) -> bool:
    """Hard-link `file` as `name`, unless that exists. False where the file system has no links."""
    try:
        os.link(file, name)
    except FileExistsError:
        return True
    except OSError:
        return False
    return True


def json_object(path: Path) -> dict[str, Any]:
    """What a JSON file holds; empty where there is none, or it is no whole object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
