"""What a collective should take: which links its path goes over, what they cost, and what is shared."""

import pytest

from rankloom.base.cost import Path
from rankloom.base.errors import ConfigError
from rankloom.base.topology import Link, Links, Topology
from rankloom.comm.algorithms import ALGORITHMS
from rankloom.comm.price import BACKEND, Price, Route, algorithms_on, least_path, price, route

N = 1 << 20
FREE = Link(0.0, 1e6)


def of(links: dict[str, Link], **others: float) -> Links:
    """Links that cost nothing, but those."""
    return Links(**{name: links.get(name, FREE) for name in ("inside", "between", "host", "backend", "backend_between")},
                 adding_gbps=others.get("adding_gbps", 1e6))


def test_a_price_is_steps_times_alpha_and_bytes_times_beta_and_added_times_gamma():
    path = ALGORITHMS["all_reduce"]["ring"].path(N, 4)
    way = route("all_reduce", "ring", N, Topology.even(1, 4))
    assert price(way, of({"inside": Link(10.0, 1e6)})).latency == pytest.approx(6 * 10e-6, rel=1e-12)
    assert price(way, of({"inside": Link(0.0, 8.0)})).bandwidth == pytest.approx(path.bytes * 1e-9, rel=0.01)
    assert price(way, of({}, adding_gbps=8.0)).bandwidth == pytest.approx(path.added * 1e-9, rel=0.02)


@pytest.mark.parametrize("name", ALGORITHMS["all_reduce"])
@pytest.mark.parametrize("p", [2, 3, 4, 7])
def test_the_host_is_charged_the_bills_of_all_its_ranks(name, p):
    parts = dict(route("all_reduce", name, N, Topology.even(1, p)).parts)
    bills = [ALGORITHMS["all_reduce"][name].bill(N, p, 1, rank) for rank in range(p)]
    assert parts["host"] == Path(sum(bill.messages for bill in bills), sum(bill.sent for bill in bills))
    assert parts["inside"] == ALGORITHMS["all_reduce"][name].path(N, p)


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_every_algorithm_of_every_collective_has_a_route_on_every_topology(collective):
    for topology in (Topology.even(1, 3), Topology.even(3, 1), Topology.even(2, 2), Topology(((0, 1, 2), (3, 4)))):
        for name in (*algorithms_on(collective, topology), BACKEND):
            for wide in (1, 2):
                assert price(route(collective, name, N, topology, wide=wide), Links()).seconds > 0, (name, topology)


def test_a_flat_algorithm_goes_between_nodes_and_hierarchical_takes_both_links():
    cluster = Topology.even(2, 4)
    ring, levels = (dict(route("all_reduce", name, N, cluster).parts) for name in ("ring", "hierarchical"))
    assert "inside" not in ring and ring["between"].steps == 14
    assert (levels["inside"].steps, levels["between"].steps) == (6, 2)
    assert levels["between"].bytes == N, "4 ranks share the node's link, each with 2(m-1)/m of its quarter"
    assert ring["host"].steps == 4 * 14, "the ranks of one node"


def test_in_halving_all_ranks_of_a_node_share_its_link():
    flat, nodes = (dict(route("all_reduce", "halving", N, Topology.even(2, size)).parts)["between"] for size in (1, 4))
    assert flat.bytes == ALGORITHMS["all_reduce"]["halving"].path(N, 2).bytes
    assert nodes.bytes == 4 * ALGORITHMS["all_reduce"]["halving"].path(N, 8).bytes


def test_the_backend_has_links_of_its_own_and_is_no_faster_than_between_where_it_was_not_measured():
    links = Links(backend=Link(1.0, 1e6), between=Link(500.0, 1.0))
    near, far = (price(route("all_reduce", BACKEND, N, Topology.even(*nodes)), links).seconds for nodes in ((1, 4), (4, 1)))
    assert near < 1e-4 and far > 4 * 500e-6
    measured = Links(backend_between=Link(2.0, 1e6))
    assert price(route("all_reduce", BACKEND, N, Topology.even(4, 1)), measured).latency == pytest.approx(8e-6, rel=1e-12)


@pytest.mark.parametrize("collective", ALGORITHMS)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 8])
def test_a_backend_is_charged_no_more_than_any_of_ours_needs(collective, p):
    least = least_path(collective, 5040, p)
    for algorithm in ALGORITHMS[collective].values():
        path = algorithm.path(5040, p)
        assert path.bytes >= least.bytes and (path.steps >= least.steps or p & (p - 1)), "halving rounds down, and then needs guests"


@pytest.mark.parametrize("name", ["ring", "hierarchical"])
def test_16_bit_sums_cost_more_bytes_on_every_link(name):
    """Partial sums travel in fp32: all that goes between nodes in two levels, elsewhere half of what travels."""
    narrow, wide = (dict(route("all_reduce", name, N, Topology.even(2, 4), wide=w).parts) for w in (1, 2))
    assert {link: wide[link].bytes / path.bytes for link, path in narrow.items()} == (
        {"between": 1.5, "host": 1.5} if name == "ring" else {"inside": 1.5, "between": 2.0, "host": pytest.approx(11 / 7)})


@pytest.mark.parametrize(("latency", "bandwidth", "reason"), [
    (3e-4, 1e-4, "latency 75 %"), (1e-4, 3e-4, "bandwidth 75 %"), (1e-4, 1e-4, "latency 50 %"), (0.0, 0.0, "nothing to do"),
])
def test_the_reason_is_the_larger_term(latency, bandwidth, reason):
    assert Price(latency, bandwidth).reason == reason
    assert Price(latency, bandwidth).seconds == latency + bandwidth


def test_one_rank_pays_nothing():
    for name in (*ALGORITHMS["all_reduce"], BACKEND):
        assert price(route("all_reduce", name, N, Topology.even(1, 1)), Links()) == Price(0.0, 0.0)


def test_two_levels_are_offered_where_there_are_two():
    offered = ["hierarchical" in algorithms_on("all_reduce", Topology.even(*shape)) for shape in ((1, 4), (4, 1), (2, 2))]
    assert offered == [False, False, True]
    assert "hierarchical" not in algorithms_on("broadcast", Topology.even(2, 2))


def test_a_collective_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="no collective 'allreduce'. Did you mean 'all_reduce'"):
        algorithms_on("allreduce", Topology.even(1, 2))


def test_an_empty_route_is_free():
    assert price(Route(()), Links()).seconds == 0
