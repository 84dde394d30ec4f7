"""Write a file so that a reader sees the old one or the whole new one, never a part."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, *, keep_old: bool = False) -> Iterator[Path]:
    """A path to write to, beside `path`; it takes the place of `path` when the block ends without an error, else it goes.

    keep_old: if there is a file by then, it stays: of several writers the first wins
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        yield temporary
        if keep_old and _link(temporary, path):
            temporary.unlink()
        else:
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _link(file: Path, name: Path) -> bool:
    """Give a file another name unless that is taken; False where the file system has no links."""
    try:
        os.link(file, name)
    except FileExistsError:
        return True
    except OSError:
        return False
    return True
