"""How gradients may be compressed, by name. No torch, so that a config is checked in milliseconds; comm/compress.py does it."""

import re

from rankloom.base.errors import ConfigError, did_you_mean

EXACT, POWERSGD = "none", "powersgd"
NAMES = (EXACT, "bf16", "fp16", "int8", "int4", "1bit", "topk", POWERSGD)


def split_compression(text: str) -> tuple[str, int | None]:
    """The name, and the rank that powersgd may have behind a colon; None where none is given.

    raises: ConfigError for an unknown name, or a rank that cannot be

    >>> split_compression("powersgd:16"), split_compression("int8")
    (('powersgd', 16), ('int8', None))
    """
    name, colon, rank = str(text).partition(":")
    if name not in NAMES:
        raise ConfigError(f"there is no compression {text!r}. {did_you_mean(name, NAMES)}")
    if not colon:
        return name, None
    if name != POWERSGD:
        raise ConfigError(f"there is no compression {text!r}: {name} has no rank; only powersgd has one, as in 'powersgd:16'")
    if not re.fullmatch("[1-9][0-9]{0,5}", rank):
        raise ConfigError(f"there is no compression {text!r}: the rank must be a whole number, 1 or more, as in 'powersgd:16'")
    return name, int(rank)
