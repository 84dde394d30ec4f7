"""Values as JSON text for other ranks: these learn, too, that a value could not be written so."""

import json
from collections.abc import Iterable
from typing import Any

from rankloom.base.errors import ConfigError


def as_json(value: Any, where: str) -> tuple[bytes, int]:
    """`value` as text, and 1; or for what is no JSON value, a sentence as text, and -1.

    >>> as_json([1, None], "rank 0"), as_json({2}, "rank 0")[1]
    ((b'[1, null]', 1), -1)
    """
    try:
        return json.dumps(value).encode(), 1
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"{where}: {error}; give JSON values only: numbers, text, True, False, None, and lists and dicts of them"
        return json.dumps(problem).encode(), -1


def from_json(texts: Iterable[bytes], signs: Iterable[int]) -> list[Any]:
    """The values of `as_json`, with signs like those that it gave. raises: ConfigError with the sentences, if there are any"""
    read = [(json.loads(text), sign) for text, sign in zip(texts, signs)]
    if problems := [problem for problem, sign in read if sign < 0]:
        raise ConfigError("\n".join(problems))
    return [value for value, _ in read]
