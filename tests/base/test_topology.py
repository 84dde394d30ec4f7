"""Who shares a node, what links cost, and what a cluster file may say."""

import math

import pytest

from rankloom.base.errors import ConfigError
from rankloom.base.topology import FASTEST, LATENCIES, RATES, Link, Links, Topology, parse_links, parse_topology
from rankloom.comm.choose import decide

UNEVEN = Topology(((0, 3), (1, 2, 4)))


def test_every_rank_is_on_one_node():
    assert [UNEVEN.node_of(rank) for rank in range(5)] == [0, 1, 1, 0, 1]
    assert UNEVEN.size == 5


@pytest.mark.parametrize("ask", [UNEVEN.node_of, lambda rank: UNEVEN.among([0, rank])])
@pytest.mark.parametrize("rank", [5, -1])
def test_a_rank_that_is_on_no_node_is_refused_by_its_number(ask, rank):
    with pytest.raises(ConfigError, match=f"there is no rank {rank} on 2 nodes of 2, 3 ranks: ranks are numbered from 0 to 4"):
        ask(rank)


def test_a_group_numbers_its_ranks_from_0():
    links = Links(adding_gbps=3.0)
    some = Topology(UNEVEN.nodes, links).among((1, 3, 4))
    assert some == Topology(((0, 2), (1,)), links)
    assert UNEVEN.among((3, 0)).nodes == ((0, 1),), "a node without ranks of the group is gone"
    assert UNEVEN.among(range(5)) is UNEVEN


@pytest.mark.parametrize(("nodes", "why"), [
    ([], "no rank in them"), ([[0], []], "a node has no ranks"), ([[0, 1], [1, 2]], "rank 1 is there twice"),
    ([[0], [2]], "rank 1 is missing; 2 ranks are numbered 0 to 1"), ([[1, 2]], "rank 0 is missing"), ([[-1, 0]], "rank -1 is no rank"),
])
def test_nodes_that_do_not_hold_every_rank_once_are_refused_with_the_reason(nodes, why):
    with pytest.raises(ConfigError, match=why):
        Topology(tuple(map(tuple, nodes)))
    if nodes and all(nodes):
        with pytest.raises(ConfigError, match=why):
            parse_topology({"nodes": nodes}, 2, Topology.even(1, 2))


def test_nodes_may_be_lists_and_decisions_are_made_on_them():
    topology = Topology([[0, 1], [2, 3]])
    assert topology == Topology(((0, 1), (2, 3))) and decide(100, topology) == decide(100, Topology.even(2, 2))


@pytest.mark.parametrize("nodes", [4, [0, 1], "01", [[0, 1.0]], [[0, True]], [{0: 1}], None, [["0"]]], ids=str)
def test_what_is_no_list_of_ranks_for_each_node_is_refused(nodes):
    with pytest.raises(ConfigError, match="^nodes = .*: must be a list of ranks for each node"):
        Topology(nodes)


def test_a_link_converts_between_its_units_and_seconds():
    link = Link(latency_us=50.0, bandwidth_gbps=8.0)
    assert (link.alpha, link.beta) == pytest.approx((50e-6, 1e-9), rel=1e-15)
    back = Link.of(link.alpha, link.beta)
    assert (back.latency_us, back.bandwidth_gbps) == pytest.approx((50.0, 8.0), rel=1e-15)
    assert Link.of(1e-6, 0.0).bandwidth_gbps == FASTEST


@pytest.mark.parametrize("values", [(-1.0, 1.0), (float("nan"), 1.0), (1.0, 0.0), (1.0, float("inf")), ("1", 1.0), (True, 1.0),
                                    (10**400, 1.0), (1.0, 10**400), (1e308, 1.0), (1.0, 1e-320)])
def test_a_link_of_impossible_numbers_is_refused(values):
    with pytest.raises(ConfigError, match="must be a number from"):
        Link(*values)


def test_the_slowest_link_that_can_be_written_down_has_a_finite_price_and_a_fit_finds_none_slower():
    slowest = Link(LATENCIES[1], RATES[0])
    links = Links(slowest, slowest, slowest, slowest, slowest, RATES[0])
    for one in decide(1 << 60, Topology.even(64, 64, links)).candidates:
        assert math.isfinite(one.price.seconds)
    assert Link.of(1e-6, 1e3).bandwidth_gbps == RATES[0]


def test_a_topology_is_told_in_a_line():
    told = [str(topology) for topology in (Topology.even(1, 1), Topology.even(1, 3), Topology.even(2, 4), UNEVEN)]
    assert told == ["1 node of 1 rank", "1 node of 3 ranks", "2 nodes of 4 ranks", "2 nodes of 2, 3 ranks"]
    assert not UNEVEN.is_even() and Topology.even(3, 2).is_even()


def test_the_backends_own_between_nodes_are_as_slow_as_the_wire_until_they_are_measured():
    assert Links(between=Link(7.0, 7.0)).named("backend_between") == Link(7.0, 7.0)
    assert Links(backend_between=Link(1.0, 1.0)).named("backend_between") == Link(1.0, 1.0)
    assert parse_links({"between": {"latency_us": 9}}).named("backend_between").latency_us == 9
    half = parse_links({"backend_between": {"latency_us": 9}}, Links(between=Link(7.0, 7.0)))
    assert half.backend_between == Link(9, 7.0), "what is left out is that of between"


@pytest.mark.parametrize("table", [
    {"nodes": [[0, 1], [2, 3]]}, {"nodes": 2, "ranks_per_node": 2}, {"nodes": [[3, 2], [1, 0]]},
])
def test_nodes_are_listed_or_counted(table):
    assert parse_topology(table, 4, Topology.even(1, 4)) == Topology(((0, 1), (2, 3)))


def test_what_a_file_leaves_out_is_as_it_was():
    before = Topology.even(2, 2, Links(adding_gbps=7.0))
    assert parse_topology({}, 4, before) == before
    found = parse_topology({"links": {"between": {"latency_us": 5}}}, 4, before)
    assert found.nodes == before.nodes
    assert found.links == Links(between=Link(5, before.links.between.bandwidth_gbps), adding_gbps=7.0)
    assert parse_topology({"nodes": 1, "ranks_per_node": 4}, 4, before).links == before.links


def test_all_links_are_read_back_as_they_are_written():
    links = Links(Link(0.1, 2.3), Link(4.5, 6.7), Link(8.9, 1.1), Link(1.2, 2.1), Link(3.4, 4.3), 3.3)
    assert parse_links(links.as_table()) == links
    assert "backend_between" not in Links().as_table() and parse_links(Links().as_table()) == Links()
    table = Topology(UNEVEN.nodes, links).as_table()
    assert parse_topology(table, 5, Topology.even(1, 5)) == Topology(UNEVEN.nodes, links)


@pytest.mark.parametrize(("table", "message"), [
    ({"node": 2}, "unknown key 'node'. Did you mean 'nodes'"),
    ({"links": {"insid": {}}}, r"\[links\] unknown key 'insid'. Did you mean 'inside'"),
    ({"links": {"inside": {"latency": 3}}}, r"\[links.inside\] unknown key 'latency'. Did you mean 'latency_us'"),
    ({"links": {"inside": {"latency_us": "3"}}}, r"\[links.inside\] latency_us = '3': must be a number from 0 to 1e.12"),
    ({"links": {"between": {"bandwidth_gbps": 0}}}, r"\[links.between\] bandwidth_gbps = 0: must be a number from 1e-09 to 1e.12"),
    ({"links": {"adding_gbps": -1}}, r"\[links\] adding_gbps = -1: must be a number from 1e-09 to 1e.12"),
    ({"links": 3}, r"\[links\] must be a section"),
    ({"nodes": 2}, "nodes = 2: needs ranks_per_node beside it"),
    ({"nodes": 2, "ranks_per_node": 0}, "needs ranks_per_node beside it, 1 or more"),
    ({"ranks_per_node": 2}, "ranks_per_node: has no meaning without nodes"),
    ({"nodes": [[0, 1], [2, 3]], "ranks_per_node": 2}, "ranks_per_node: has no meaning beside nodes that list"),
    ({"nodes": [0, 1, 2, 3]}, "must be a list of ranks for each node"),
    ({"nodes": [[0, 1.0], [2, 3]]}, "must be a list of ranks for each node"),
    ({"nodes": True}, "must be a list of ranks for each node"),
    ({"nodes": 3, "ranks_per_node": 2}, "nodes: has 6 ranks, but the job has 4"),
    ({"nodes": 10**9, "ranks_per_node": 10**9}, "nodes: has 1000000000000000000 ranks, but the job has 4"),   # and no list of them is made
    ({"nodes": 10**400}, r"nodes = 1000.*\.\.\. \(401 characters\): needs ranks_per_node"),
    ({"nodes": [[0, 1]]}, "nodes: has 2 ranks, but the job has 4"),
])
def test_a_mistake_in_a_cluster_file_names_the_key_and_what_to_do(table, message):
    with pytest.raises(ConfigError, match=message):
        parse_topology(table, 4, Topology.even(1, 4))
