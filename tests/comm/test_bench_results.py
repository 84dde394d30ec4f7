"""Who is fastest at each size and why, and the same as JSON."""

import json
from dataclasses import replace

import pytest

from rankloom.base.events import Timed
from rankloom.base.topology import Link, Links, Topology
from rankloom.comm.bench_results import bandwidth, bus_bandwidth, find
from rankloom.comm.price import price, route

TWO = Topology.even(1, 2)
LINKS = Links(inside=Link(100.0, 8.0), host=Link(0.0, 1e6), backend=Link(10.0, 1.0), adding_gbps=1e6)
SIZES = [1 << 12, 1 << 16, 1 << 20]


def measured(collective="all_reduce", names=("ring", "backend"), wrong=()):
    found = []
    for size in SIZES:
        for name in names:
            seconds = price(route(collective, name, size, TWO), LINKS).seconds
            found.append(Timed(0, collective, name, 2, size, seconds, seconds, seconds, int((name, size) in wrong)))
    return found


def test_the_fastest_at_each_size_is_named_with_the_term_that_decides():
    (found,) = find(measured(), TWO)
    assert [(at.bytes, at.winner.algorithm, at.reason.split()[0], at.expected) for at in found.sizes] == [
        (1 << 12, "backend", "bandwidth", "backend"), (1 << 16, "ring", "latency", "ring"), (1 << 20, "ring", "bandwidth", "ring")]
    assert all(at.times[0].seconds < at.times[1].seconds for at in found.sizes)
    assert found.fitted.error < 1e-3


def test_the_fit_may_disagree_with_what_was_measured_and_says_so():
    odd = lambda timed: (timed.algorithm, timed.bytes) == ("ring", 1 << 16)
    times = [replace(timed, seconds=timed.seconds * (3 if odd(timed) else 1)) for timed in measured()]
    at = find(times, TWO)[0].sizes[1]
    assert at.winner.algorithm == "backend" and at.expected == "ring"


@pytest.mark.parametrize("factor", [12, 1 / 12])
def test_the_size_at_which_the_fit_is_farthest_off_is_found_whether_too_low_or_too_high(factor):
    (found,) = find(measured(), TWO)
    slower = lambda timed: replace(timed, seconds=timed.seconds * (factor if timed.algorithm == "ring" else 1))
    at = replace(found.sizes[1], times=tuple(map(slower, found.sizes[1].times)))
    found = replace(found, sizes=(found.sizes[0], at, found.sizes[2]))   # the fit is that of the times before
    size, ratio = found.worst()["ring"]
    assert size == SIZES[1] and ratio == pytest.approx(factor, rel=1e-2)
    assert found.as_table()["fit"]["worst"]["ring"] == {"bytes": size, "measured_over_predicted": ratio}
    assert found.worst()["backend"][1] == pytest.approx(1.0, rel=1e-2)


def test_a_wrong_result_is_kept_but_neither_wins_nor_is_fitted():
    (found,) = find(measured(wrong=[("backend", 1 << 12)]), TWO)
    assert [timed.algorithm for timed in found.sizes[0].times] == ["ring"]
    assert len(found.times) == 6
    (none_right,) = find(measured(names=("ring",), wrong=[("ring", size) for size in SIZES]), TWO)
    assert none_right.sizes == () and none_right.worst() == {}


def test_each_collective_is_found_by_itself():
    found = find(measured() + measured("broadcast", ("chain",)), TWO)
    assert [one.collective for one in found] == ["all_reduce", "broadcast"]
    assert [name for name, _ in found[1].fitted.errors] == ["chain"]


def test_the_curve_of_the_fit_goes_from_the_smallest_size_to_the_largest():
    (found,) = find(measured(), TWO)
    curve = found.curve("ring")
    assert (curve[0][0], curve[-1][0]) == (SIZES[0], SIZES[-1])
    assert [size for size, _ in curve] == sorted({size for size, _ in curve}) and len(curve) == 17
    assert curve[0][1] == pytest.approx(found.times[0].seconds, rel=1e-3)
    (one_size,) = find(measured()[:2], TWO)
    assert len(one_size.curve("ring")) == 1


def test_bandwidths_are_those_of_nccl_tests():
    timed = Timed(0, "all_reduce", "ring", 4, 1_000_000_000, 0.5, 0.5, 0.5, 0)
    assert (bandwidth(timed), bus_bandwidth(timed)) == (2.0, 3.0)


def test_all_of_it_is_json():
    (found,) = find(measured(wrong=[("backend", 1 << 12)]), TWO)
    table = json.loads(json.dumps(found.as_table()))
    assert (table["ranks"], table["nodes"]) == (2, [[0, 1]])
    assert [at["algorithm"] for at in table["fastest"]] == ["ring", "ring", "ring"]
    assert table["fastest"][2]["predicted_seconds"] == pytest.approx(table["fastest"][2]["seconds"], rel=1e-3)
    assert {"bytes", "seconds", "algbw_GBps", "busbw_GBps", "wrong"} <= table["times"][0].keys()
    assert table["fit"]["links"].keys() == {"inside", "host", "backend"} and table["fit"]["errors"].keys() == {"ring", "backend"}
