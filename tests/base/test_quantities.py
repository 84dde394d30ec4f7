"""Bytes and seconds in text, and nccl-tests' bandwidths."""

import pytest

from rankloom.base.errors import ConfigError
from rankloom.base.quantities import algorithm_bandwidth, bus_factor, parse_size, parse_sizes, seconds, show_bytes, show_seconds


@pytest.mark.parametrize(("collective", "factor"), [
    ("all_reduce", 2 * 7 / 8), ("reduce_scatter", 7 / 8), ("all_gather", 7 / 8), ("all_to_all", 7 / 8), ("broadcast", 1.0),
])
def test_the_bus_bandwidth_is_that_of_nccl_tests(collective, factor):
    assert bus_factor(collective, 8) == factor
    assert bus_factor("all_reduce", 2) == 1.0
    assert algorithm_bandwidth(64 << 20, 1e-3) == pytest.approx(67.108864, rel=1e-12)


@pytest.mark.parametrize(("text", "nbytes"), [
    ("1", 1), ("4096", 4096), ("4k", 4096), ("4 KiB", 4096), ("1.5MiB", 1572864), ("2G", 2 << 30), ("7B", 7),
])
def test_sizes_are_read_with_their_units(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "0.4", "-4", "4 Kb", "x", "4KiB2", "1e3", "nan", "9" * 309])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="expected a number of bytes above 0"):
        parse_size(text)


def test_several_sizes_are_listed_or_a_range():
    assert parse_sizes("4KiB-64MiB") == [4096 * 4**k for k in range(8)]
    assert parse_sizes("3-50") == [3, 12, 48], "fourfold steps, as far as they fit"
    assert parse_sizes("2M,4,4") == [4, 2 << 20]
    with pytest.raises(ConfigError, match="the last is smaller than the first"):
        parse_sizes("2M-1M")
    with pytest.raises(ConfigError, match="size ''"):
        parse_sizes("1M,")


@pytest.mark.parametrize(("nbytes", "text"), [
    (1, "1 B"), (1023, "1023 B"), (1024, "1 KiB"), (65536, "64 KiB"), (1 << 30, "1 GiB"), (123456, "121 KiB"),
    (1000 << 10, "1000 KiB"), (1023 << 10, "1023 KiB"), ((1 << 20) - 4, "1 MiB"),
])
def test_bytes_are_shown_in_powers_of_1024(nbytes, text):
    assert show_bytes(nbytes) == text


@pytest.mark.parametrize(("seconds", "text"), [
    (0.0, "0.00 us"), (1.5e-7, "0.15 us"), (9.994e-6, "9.99 us"), (9.996e-6, "10.0 us"), (99.96e-6, "100 us"), (999.4e-6, "999 us"),
    (999.6e-6, "1.00 ms"), (0.25, "250 ms"), (59.99, "60.0 s"),
])
def test_seconds_are_shown_with_three_digits(seconds, text):
    assert show_seconds(seconds) == text


@pytest.mark.parametrize("timeout", ["5", None])
def test_a_time_out_that_is_no_number_is_refused(timeout):
    with pytest.raises(ConfigError, match=f"timeout={timeout!r} is of type .*, expected seconds, as a number"):
        seconds(timeout)
