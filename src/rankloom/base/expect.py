"""Check an argument where it is given, so that a wrong one is an error there and not deep inside."""

from typing import Any

from rankloom.base.errors import ConfigError

SHORT = (bool, int, float, str, type(None))   # shown as they are


def expect_type(what: str, value: Any, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Raise ConfigError unless the argument called `what` is one of `kinds`.

    >>> expect_type("world", 3, str, "what rl.init gives")
    Traceback (most recent call last):
        ...
    rankloom.base.errors.ConfigError: world=3 is of type int, expected what rl.init gives
    """
    if not isinstance(value, kinds):
        shown = f"{what}={value!r}" if isinstance(value, SHORT) else what
        raise ConfigError(f"{shown} is of type {type(value).__name__}, expected {wanted}")


def is_whole_number(value: object, least: int) -> bool:
    """Whether it is an int of `least` or more, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def expect_callable(what: str, value: Any, wanted: str) -> None:
    """Raise ConfigError unless the argument called `what` can be called."""
    if not callable(value):
        raise ConfigError(f"{what}={value!r:.100} cannot be called, expected {wanted}")
