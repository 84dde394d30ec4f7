"""Set attributes for the length of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(thing: object, **values: Any) -> Iterator[None]:
    """Set attributes of `thing` inside the block; restore them afterwards, also after an error.

    >>> from types import SimpleNamespace
    >>> lamp = SimpleNamespace(lit=False)
    >>> with temporarily(lamp, lit=True):
    ...     lamp.lit
    True
    >>> lamp.lit
    False
    """
    before = {name: getattr(thing, name) for name in values}
    vars(thing).update(values)
    try:
        yield
    finally:
        vars(thing).update(before)
