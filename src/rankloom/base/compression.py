"""The names of gradient compressions, and what each goes with. No torch, so a config is checked in milliseconds; see comm/compress.py."""

import re

from rankloom.base.errors import ConfigError, did_you_mean
from rankloom.base.expect import is_whole_number

EXACT, TOPK, POWERSGD = "none", "topk", "powersgd"
BACKEND, HIERARCHICAL = "backend", "hierarchical"   # the values of `all_reduce` that go with compression
NAMES = (EXACT, "bf16", "fp16", "int8", "int4", "1bit", TOPK, POWERSGD)


def split_compression(text: str) -> tuple[str, int | None]:
    """The name, and the rank that powersgd may have after a colon, else None.

    raises: ConfigError for an unknown name or an invalid rank

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


def expect_compression(name: str, all_reduce: str) -> None:
    """Raise ConfigError for an unknown name, or one that does not go with this all-reduce."""
    kind, _ = split_compression(name)
    if kind == EXACT:
        return
    if all_reduce not in (BACKEND, HIERARCHICAL):
        raise ConfigError(f"compress={name!r} sums in its own way, without all_reduce={all_reduce!r}; leave that out, or choose "
                          f"{HIERARCHICAL!r}, which compresses messages between nodes and is exact inside them")
    if kind == POWERSGD and all_reduce == HIERARCHICAL:
        raise ConfigError(f"compress={name!r} needs whole matrices, but all_reduce='hierarchical' sends slices between nodes; "
                          "leave all_reduce out, or choose another compression")


def why_not_for_slices(name: str, replicas: bool) -> str | None:
    """Why a compression cannot sum gradients of which each rank keeps a slice, or None. replicas: whether slices have replicas"""
    kind, _ = split_compression(name)
    if kind == POWERSGD:
        return "needs whole matrices, but ranks along the axis shard keep slices of gradients: use stage 0, or int8 or int4"
    if kind == TOPK and not replicas:
        return "has no reduce-scatter, which sums the slices of the axis shard: use stage 0, int8 or int4, or an axis replicate"
    return None


def expect_exact_steps(after: int, compress: str) -> None:
    """Raise ConfigError unless the first `after` steps can be exact and the later ones compressed."""
    if not is_whole_number(after, 0):
        raise ConfigError(f"compress_after={after!r}, expected a whole number of steps, 0 or more")
    if after and compress == EXACT:
        raise ConfigError(f"compress_after={after} has no meaning with compress={compress!r}: every step is exact")
