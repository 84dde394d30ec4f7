"""Who shares a node: from what each rank's launcher says, and from a cluster file that must be the same for all."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

import rankloom as rl
from patience import AT_ONCE
from rankloom.base.topology import Link, Links, Topology
from rankloom.world.cluster import find_topology, read_cluster, write_links
from rankloom.world.launch import Place

FOUR = Topology.even(1, 4)


def found_by_all(places, files=None):
    """What every rank finds, or the error it raises."""
    store = dist.HashStore()

    def one(place):
        try:
            return find_topology(place, store, AT_ONCE, files and files[place.rank])
        except rl.ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(one, places))


def places(*nodes):
    """The place of each rank, given the node of each."""
    return [Place("torchrun", rank, len(nodes), nodes[:rank].count(node), nodes.count(node), node) for rank, node in enumerate(nodes)]


@pytest.mark.parametrize(("nodes", "expected"), [
    ((0, 0, 0), ((0, 1, 2),)), ((0, 0, 1, 1), ((0, 1), (2, 3))),
    ((0, 0, 1, 1, 1, 1), ((0, 1), (2, 3, 4, 5))), ((0, 1, 0, 1), ((0, 2), (1, 3))),
])
def test_all_ranks_learn_the_same_nodes_though_each_knows_its_own_only(nodes, expected):
    assert found_by_all(places(*nodes)) == [Topology(expected)] * len(nodes)


def test_a_file_takes_the_place_of_the_launcher(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text("nodes = 2\nranks_per_node = 2\n[links.between]\nlatency_us = 7\n")
    expected = Topology.even(2, 2, Links(between=Link(7, Links().between.bandwidth_gbps)))
    assert found_by_all(places(0, 0, 0, 0), [file] * 4) == [expected] * 4


def test_a_tilde_before_a_file_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "links.toml").write_text("nodes = [[0], [1]]")
    assert read_cluster("~/links.toml", 2, Topology.even(1, 2)).nodes == ((0,), (1,))


def test_a_mistake_in_the_file_is_raised_by_all_ranks(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text("nods = 2")
    assert found_by_all(places(0, 0), [file] * 2) == [f"{file}: unknown key 'nods'. Did you mean 'nodes'?"] * 2


def test_files_that_differ_between_nodes_are_refused_by_all_ranks(tmp_path):
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text("nodes = [[0], [1]]")
    for text in ("nodes = [[0, 1]]", "nodes = "):
        other.write_text(text)
        errors = found_by_all(places(0, 1), [one, other])
        assert all("not the same on all nodes. Rank 0: 2 node(s), Links(" in error for error in errors), errors


def test_a_rank_that_says_nothing_is_named():
    with pytest.raises(rl.RankLost, match=r"rank 0: rank\(s\) 1, 2 did not join the group within 0.1 s"):
        find_topology(places(0, 1, 1)[0], dist.HashStore(), 0.1)


def test_a_store_that_ends_with_its_rank_is_a_rank_that_is_lost():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    with ThreadPoolExecutor(1) as rank_1:
        waiting = rank_1.submit(find_topology, places(0, 1, 1)[1], client, AT_ONCE)
        time.sleep(0.2)
        del server
        with pytest.raises(rl.RankLost, match=r"rank 1: the store in which ranks meet closed after \d.\d s"):
            waiting.result()


@pytest.mark.parametrize(("name", "text", "message"), [
    ("c.toml", "nodes = ", "c.toml: not valid TOML"), ("c.json", "{", "c.json: not valid JSON"),
    ("c.json", '{"nodes": 2,}' + " " * 200 + "!", r'column 13 \(char 12\): \{"nodes": 2,\} {87} \.\.\.$'),
    ("c.json", "[]", "c.json: must be a section"),
    ("c.json", "[" * 100_000, "c.json: not valid JSON: maximum recursion"), ("c.toml", "a = " + "[" * 100_000, "c.toml: not valid TOML"),
    ("c.json", '{"nodes": %s}' % ("9" * 5000), "c.json: not valid JSON: Exceeds the limit"),
    ("c.toml", f"nodes = 0x{'f' * 5000}", "c.toml: Exceeds the limit"),
    ("c.toml", "nodes = 100000000\nranks_per_node = 100", "c.toml: nodes: has 10000000000 ranks, but the job has 4"),
    ("c.toml", None, "c.toml: no such file"), ("c.toml", b"\xe9", "c.toml: not UTF-8 text"),
])
def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path, name, text, message):
    file = tmp_path / name
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(rl.ConfigError, match=message):
        read_cluster(file, 4, FOUR)
    with pytest.raises(rl.ConfigError, match="cannot be read"):
        read_cluster(tmp_path, 4, FOUR)


def test_measured_links_come_back_from_json_as_they_were(tmp_path):
    links = Links(Link(1 / 3, 2 / 3), Link(1e-9, 1e6), Link(0.0, 12.5), Link(1.5, 1 / 7), adding_gbps=0.1)
    write_links(tmp_path / "links.json", links)
    assert read_cluster(tmp_path / "links.json", 4, FOUR) == Topology(FOUR.nodes, links)


def test_a_group_knows_its_own_part_of_the_topology():
    def body(world):
        return world.topology.nodes, world.group("replicate").topology.nodes, world.group("shard").topology.nodes

    for rank, (whole, replicate, shard) in enumerate(rl.simulate(rl.Mesh(replicate=2, shard=2), body, topology=Topology.even(2, 2))):
        assert whole == ((0, 1), (2, 3)), rank
        assert (replicate, shard) == (((0,), (1,)), ((0, 1),)), "replicate goes between nodes, shard stays inside"


def test_a_topology_of_other_ranks_is_refused():
    with pytest.raises(rl.ConfigError, match="the topology has 4 ranks, but group 'world' has 2"):
        rl.simulate(2, lambda world: None, topology=Topology.even(2, 2))


def test_without_more_knowledge_all_ranks_share_one_node():
    assert rl.simulate(2, lambda world: world.topology) == [Topology.even(1, 2)] * 2
