"""From times to what links cost: known constants are found again, none is below zero, and the error is told."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from rankloom.base.errors import ConfigError
from rankloom.base.events import Timed
from rankloom.base.topology import FASTEST, Link, Links, Topology
from rankloom.comm.choose import decide
from rankloom.comm.fit import Fitted, fit_links, nonnegative_least_squares
from rankloom.comm.price import BACKEND, algorithms_on, price, route
from rankloom.world.cluster import read_cluster, write_links

LINKS = Links(inside=Link(70.0, 30.0), host=Link(9.0, 90.0), between=Link(400.0, 1.0), backend=Link(20.0, 40.0),
              backend_between=Link(333.0, 2.0), adding_gbps=55.0)
SIZES = [4096 * 4**k for k in range(8)]


def synthetic(topology, links=LINKS, *, collective="all_reduce", wide=1, noise=lambda: 1.0):
    """The times that `links` make."""
    times = []
    for name, size in itertools.product([*algorithms_on(collective, topology), BACKEND], SIZES):
        seconds = price(route(collective, name, size, topology, wide=wide), links).seconds * noise()
        times.append(Timed(0, collective, name, topology.size, size, seconds, seconds, seconds, 0))
    return times


def constants(links, kinds):
    return [number for kind in kinds for number in (links.named(kind).latency_us, links.named(kind).bandwidth_gbps)]


def test_the_constants_that_made_the_times_are_found_again():
    topology = Topology.even(1, 4)
    fitted = fit_links(synthetic(topology, wide=2), topology, wide=2)
    kinds = ("inside", "host", "backend")
    assert constants(fitted.links, kinds) == pytest.approx(constants(LINKS, kinds), rel=1e-6)
    assert fitted.links.adding_gbps == pytest.approx(LINKS.adding_gbps, rel=1e-6)
    assert fitted.error < 1e-9
    assert set(fitted.measured) == {"inside", "host", "backend", "adding"}


def test_where_half_of_all_bytes_are_added_their_cost_is_found_in_the_bandwidth():
    topology = Topology.even(1, 4)
    fitted = fit_links(synthetic(topology), topology)
    assert fitted.error < 1e-4 and fitted.links.adding_gbps == FASTEST and "adding" not in fitted.measured
    assert fitted.links.inside.beta == pytest.approx(LINKS.inside.beta + LINKS.gamma / 2, rel=1e-6)


def test_links_between_nodes_are_found_on_several_nodes_and_those_that_nothing_took_stay():
    topology = Topology(Topology.even(2, 4).nodes, Links(backend=Link(77.0, 7.0)))
    fitted = fit_links(synthetic(topology, wide=2), topology, wide=2)
    kinds = ("inside", "host", "between", "backend_between")
    assert constants(fitted.links, kinds) == pytest.approx(constants(LINKS, kinds), rel=1e-5)
    assert fitted.links.backend == Link(77.0, 7.0)


def test_times_without_sums_leave_the_cost_of_adding_as_it_was():
    topology = Topology.even(1, 4, Links(adding_gbps=12.0))
    fitted = fit_links(synthetic(topology, collective="all_gather"), topology)
    assert fitted.error < 1e-4 and fitted.links.adding_gbps == 12.0 and "adding" not in fitted.measured


def test_a_constant_that_explains_nothing_is_free_and_never_below_zero():
    links = Links(inside=Link(50.0, FASTEST), host=Link(0.0, 10.0), backend=Link(0.0, FASTEST), adding_gbps=FASTEST)
    topology = Topology.even(1, 4)
    times = [timed for timed in synthetic(topology, links) if timed.algorithm != BACKEND]
    found = fit_links(times, topology).links
    assert found.inside.latency_us == pytest.approx(50.0, rel=1e-3) and found.host.bandwidth_gbps == pytest.approx(10.0, rel=1e-3)
    assert 0 <= found.host.latency_us < 1e-3 and found.inside.bandwidth_gbps > 1e4 and found.adding_gbps > 1e4


def test_noise_of_a_tenth_leaves_the_predictions_within_a_tenth_and_is_told_as_the_error():
    draw = np.random.default_rng(7)
    topology = Topology.even(1, 8)
    fitted = fit_links(synthetic(topology, noise=lambda: draw.uniform(0.9, 1.1)), topology)
    for timed in synthetic(topology):
        found = price(route("all_reduce", timed.algorithm, timed.bytes, topology), fitted.links).seconds
        assert found == pytest.approx(timed.seconds, rel=0.1)
    assert 0.02 < fitted.error < 0.1
    assert [name for name, _ in fitted.errors] == [*algorithms_on("all_reduce", topology), BACKEND]


def test_every_size_counts_alike_whatever_its_time():
    """Absolute errors would fit the largest size only: one that is off by half there would ruin the smallest."""
    topology = Topology.even(1, 2)
    times = [timed for timed in synthetic(topology) if timed.algorithm == "ring"]
    off = [replace(timed, seconds=timed.seconds * (1.5 if timed.bytes == SIZES[-1] else 1.0)) for timed in times]
    fitted = fit_links(off, topology)
    assert price(route("all_reduce", "ring", SIZES[0], topology), fitted.links).seconds == pytest.approx(times[0].seconds, rel=0.05)
    assert fitted.error < 0.1, "the median over sizes, most of which are met"


def test_the_error_of_an_algorithm_is_the_median_of_its_relative_errors():
    assert Fitted(Links(), (), (("a", 0.1), ("b", 0.5), ("c", 0.2))).error == 0.2


def test_nothing_to_fit_is_refused():
    with pytest.raises(ConfigError, match="no times to fit"):
        fit_links([], Topology.even(1, 2))
    with pytest.raises(ConfigError, match="no times to fit"):
        fit_links(synthetic(Topology.even(1, 1)), Topology.even(1, 1))


def test_a_fit_goes_to_a_file_and_decides_the_same_when_it_comes_back(tmp_path):
    topology = Topology.even(2, 2)
    fitted = fit_links(synthetic(topology), topology)
    write_links(tmp_path / "links.json", fitted.links)
    again = read_cluster(tmp_path / "links.json", 4, topology)
    assert again == Topology(topology.nodes, fitted.links)
    assert [decide(size, again) for size in SIZES] == [decide(size, Topology(topology.nodes, fitted.links)) for size in SIZES]
    assert json.loads((tmp_path / "links.json").read_text())["links"]["between"]["latency_us"] == pytest.approx(400.0, rel=1e-5)


def gradient(a, b, x):
    return a.T @ (a @ x - b)


@pytest.mark.parametrize("seed", range(20))
def test_least_squares_above_zero_meet_the_conditions_of_an_optimum(seed):
    """Karush-Kuhn-Tucker: no slope where x > 0, and no slope downwards where x = 0."""
    draw = np.random.default_rng(seed)
    a, b = draw.normal(size=(12, 5)), draw.normal(size=12)
    x = nonnegative_least_squares(a, b)
    slope = gradient(a, b, x)
    assert (x >= 0).all()
    assert np.abs(slope[x > 0]).max(initial=0) < 1e-9
    assert slope[x == 0].min(initial=0) > -1e-9


def test_columns_of_very_different_size_are_no_problem():
    a = np.array([[2.0, 1e9], [6.0, 2e9], [4.0, 7e9]])
    assert nonnegative_least_squares(a, a @ np.array([1e-4, 3e-13])) == pytest.approx(np.array([1e-4, 3e-13]), rel=1e-9)
