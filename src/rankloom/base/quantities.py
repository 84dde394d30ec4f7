"""Bytes and seconds as people write them, and the two bandwidths of a collective as nccl-tests defines them."""

import math
import re
from collections.abc import Sequence
from datetime import timedelta

from rankloom.base.errors import ConfigError
from rankloom.base.expect import expect_type

UNITS = {"": 1, "B": 1, "K": 1 << 10, "KIB": 1 << 10, "M": 1 << 20, "MIB": 1 << 20, "G": 1 << 30, "GIB": 1 << 30}
LONGEST_TIMEOUT = 2_000_000   # seconds, 23 days: sockets count milliseconds in 31 bits
HALF = ("reduce_scatter", "all_gather", "all_to_all")   # collectives in which a byte crosses once, not twice


def algorithm_bandwidth(nbytes: int, seconds: float) -> float:
    """nccl-tests' algbw in GB/s: size over time. The size is the longer side: p times what each rank gives or gets.

    >>> algorithm_bandwidth(1_000_000, 1e-3)
    1.0
    """
    return nbytes / seconds / 1e9


def bus_factor(collective: str, ranks: int) -> float:
    """nccl-tests' busbw / algbw: what makes it comparable with the hardware's bandwidth, whatever the number of ranks.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in HALF else 1.0


def show_bytes(nbytes: float) -> str:
    """A power of 1024, with up to three digits.

    >>> show_bytes(4096), show_bytes(1536 * 1024), show_bytes(100)
    ('4 KiB', '1.5 MiB', '100 B')
    """
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= 0.9995 * size:
            return f"{_digits(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def show_bytes_alike(sizes: Sequence[float]) -> tuple[str, list[str]]:
    """The unit that fits the largest, and all in it.

    >>> show_bytes_alike([1536 * 1024, 256 * 1024, 0])
    ('MiB', ['1.5', '0.25', '0'])
    """
    unit = show_bytes(max(sizes)).split()[1]
    return unit, [_digits(nbytes / UNITS[unit.upper()]) for nbytes in sizes]


def _digits(number: float) -> str:
    return f"{number:.{3 if number < 999.5 else 4}g}"


def show_seconds(seconds: float) -> str:
    """Three digits in the unit that fits.

    >>> show_seconds(0.0000123), show_seconds(0.0123), show_seconds(1.5)
    ('12.3 us', '12.3 ms', '1.50 s')
    """
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= 0.9995 * size or unit == "us":
            value = seconds / size
            return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"
    raise AssertionError("the last unit takes all")


def seconds(timeout: float) -> timedelta:
    """A time-out as torch.distributed wants it; raises ConfigError for one that cannot be counted."""
    expect_type("timeout", timeout, (int, float), "seconds, as a number")
    if not 0 < timeout <= LONGEST_TIMEOUT:
        raise ConfigError(f"timeout = {timeout:g}: expected seconds above 0 and up to {LONGEST_TIMEOUT:,}, which is 23 days")
    return timedelta(seconds=timeout)


def parse_size(text: str) -> int:
    """A size such as 64KiB, 4M or 512: K, M and G are powers of 1024. raises: ConfigError

    >>> parse_size("64KiB"), parse_size("1.5 M")
    (65536, 1572864)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    size = float(match[1]) * UNITS.get(match[2].upper(), 0) if match else 0.0
    if not 1 <= size < math.inf:
        raise ConfigError(f"size {text!r}: expected a number of bytes above 0, plain or with K, M or G, such as 4096, 64KiB or 16M")
    return int(size)


def parse_sizes(text: str) -> list[int]:
    """Sizes with commas between them, or FIRST-LAST for each fourfold from one to the other. raises: ConfigError

    >>> parse_sizes("4KiB-64KiB"), parse_sizes("1M,100")
    ([4096, 16384, 65536], [100, 1048576])
    """
    if "-" not in text:
        return sorted({parse_size(part) for part in text.split(",")})
    first, _, last = text.partition("-")
    low, high = parse_size(first), parse_size(last)
    if high < low:
        raise ConfigError(f"sizes {text!r}: the last is smaller than the first")
    sizes = [low]
    while sizes[-1] * 4 <= high:
        sizes.append(sizes[-1] * 4)
    return sizes
