"""Attributes that have another value for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(thing: object, **values: Any) -> Iterator[None]:
    """Inside, the attributes of `thing` have these values; afterwards, also after an error, those of before.

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
