"""`rankloom bench` around the timing: tables, files, and what it refuses; whole runs are in tests/test_cli.py."""

import io
import json
import re

import pytest
from rich.console import Console

from rankloom.base.errors import ConfigError, WrongResult
from rankloom.base.events import Timed
from rankloom.base.topology import Topology
from rankloom.bench import FREE, Measured, describe_machine, expect_places, ranks_to_start, report, write_measured
from rankloom.comm.bench import plan_bench
from rankloom.comm.fit import fit_links
from rankloom.world.cluster import read_cluster

STUDY = plan_bench(["all_reduce", "broadcast"], [], [1 << 12, 1 << 20], "fp32", 3)
FAST = {"ring": 1.0, "tree": 0.8, "backend": 2.0, "chain": 1.0}


def measured(ranks=2, wrong=0):
    """Times as a run might have them; wrong: elements of the ring's largest result."""
    times = []
    for collective, names in (("all_reduce", ("tree", "ring", "backend")), ("broadcast", ("chain", "backend"))):
        for size in STUDY.sizes:
            for name in names:
                seconds = (2e-4 * ranks + size * 1e-9 * (1 if name == "ring" else 2)) * FAST[name]
                bad = wrong if (name, size) == ("ring", 1 << 20) else 0
                times.append(Timed(0, collective, name, ranks, size, seconds, 0.9 * seconds, 1.1 * seconds, bad))
    return Measured(Topology.even(1, ranks), "gloo", times)


def shown(parts, width=80):
    out = io.StringIO()
    console = Console(file=out, width=width)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return out.getvalue()


def test_the_tables_say_who_is_fastest_and_why_and_fit_in_80_columns(tmp_path):
    text = shown(report(STUDY, [measured(2), measured(4)], tmp_path, None))
    lines = [line.split() for line in text.splitlines()]
    assert "all_reduce on 2 ranks, fp32, backend gloo: the time of one call" in text and "broadcast on 4 ranks" in text
    assert ["4", "KiB", "327", "us*", "404", "us", "816", "us"] in lines, "times, the fastest marked"
    assert any(line[:5] == ["1", "MiB", "ring", "0.724", "0.724"] and line[5] == "bandwidth" for line in lines)
    assert any(line[:5] == ["1", "MiB", "ring", "0.567", "0.851"] for line in lines), "busbw = algbw 2(p-1)/p on 4 ranks"
    assert "tree x1.4" in text and "the fit is off by tree " in text
    tables = [line for line in text.splitlines() if not line.startswith(("saved", "the fit"))]
    assert max(map(len, tables)) <= 80 and not any("…" in line for line in tables)


def test_an_error_of_the_fit_that_a_median_hides_is_told_with_its_size(tmp_path):
    """The ring at 64 KiB takes ten times what its other four sizes say; at those, the fit is good."""
    study = plan_bench(["all_reduce"], ["ring"], [1 << n for n in (12, 14, 16, 18, 20)], "fp32", 1)
    times = [Timed(0, "all_reduce", "ring", 2, size, seconds := (1e-4 + size * 1e-9) * (10 if size == 1 << 16 else 1), seconds, seconds, 0)
             for size in study.sizes]
    text = shown(report(study, [Measured(Topology.even(1, 2), "gloo", times)], tmp_path, None))
    factor, size = re.search(r"the fit at its worst: ring ([\d.]+)x too low at (\d+ KiB)\n", text).groups()
    assert float(factor) > 5 and size == "64 KiB"


def test_a_cost_that_is_free_is_explained_and_only_then(tmp_path):
    for collective, is_free in (("all_reduce", False), ("broadcast", True)):   # one chain does not tell inside from host
        times = [timed for timed in measured().times if timed.collective == collective]
        study, found = plan_bench([collective], [], STUDY.sizes, "fp32", 3), Measured(Topology.even(1, 2), "gloo", times)
        text = shown(report(study, [found], tmp_path, None))
        assert (FREE in text) == (" free" in text) == is_free


def test_all_is_written_down_and_every_file_is_named(tmp_path):
    text = shown(report(STUDY, [measured(2), measured(4)], tmp_path, tmp_path / "links.json"))
    assert [line.split()[1].rstrip(",").rpartition("/")[2] for line in text.splitlines() if line.startswith("saved")] == [
        "bench.json", "links.json", "bench-all_reduce.png", "bench-broadcast.png"]
    table = json.loads((tmp_path / "bench.json").read_text())
    assert [one["ranks"] for one in table["all_reduce"]] == [2, 4] and len(table["broadcast"][0]["times"]) == 4
    assert {"command", "cores", "torch", "dtype", "started"} <= table.keys()
    assert (tmp_path / "bench-broadcast.png").read_bytes().startswith(b"\x89PNG")


def test_the_links_that_are_saved_are_those_of_all_reduce_on_the_most_ranks(tmp_path):
    list(report(STUDY, [measured(2), measured(4)], tmp_path, tmp_path / "links.json"))
    four = Topology.even(1, 4)
    expected = fit_links([timed for timed in measured(4).times if timed.collective == "all_reduce"], four)
    assert read_cluster(tmp_path / "links.json", 4, four).links == expected.links


def test_a_wrong_result_is_shown_everything_is_written_and_then_it_is_an_error(tmp_path):
    parts = []
    with pytest.raises(WrongResult, match="ring all_reduce of 1048576 bytes on 2 ranks: 3 elements are wrong"):
        for part in report(STUDY, [measured(wrong=3)], tmp_path, None):
            parts.append(part)
    assert "WRONG" in shown(parts) and (tmp_path / "bench.json").exists()


def test_results_that_are_all_wrong_are_not_drawn(tmp_path):
    study = plan_bench(["all_reduce"], ["ring"], [1 << 20], "fp32", 1)
    times = [timed for timed in measured(wrong=1).times if (timed.algorithm, timed.bytes) == ("ring", 1 << 20)]
    parts = []
    with pytest.raises(WrongResult):
        for part in report(study, [Measured(Topology.even(1, 2), "gloo", times)], tmp_path, None):
            parts.append(part)
    assert "bench-all_reduce.png was not drawn: there is no right result" in shown(parts)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/bench.json: cannot be written"):
        list(report(STUDY, [measured()], tmp_path / "file", None))
    with pytest.raises(ConfigError, match="file/x.json: cannot be written"):
        list(report(STUDY, [measured()], tmp_path, tmp_path / "file" / "x.json"))


def test_times_of_a_rank_are_written_for_the_one_that_started_it(tmp_path):
    write_measured(measured(), tmp_path / "ranks-2.json")
    said = json.loads((tmp_path / "ranks-2.json").read_text())
    assert (said["topology"], said["backend"]) == (Topology.even(1, 2).as_table(), "gloo")
    assert [Timed(**row) for row in said["times"]] == measured().times


def test_ranks_are_started_in_order_and_one_alone_is_refused():
    assert ranks_to_start("4,2", None, "auto") == [2, 4]
    with pytest.raises(ConfigError, match="--ranks 1,2: one rank has nobody to talk to"):
        ranks_to_start("1,2", None, "auto")
    with pytest.raises(ConfigError, match="--ranks two: expected numbers"):
        ranks_to_start("two", None, "auto")
    with pytest.raises(ConfigError, match="no backend 'golo'. Did you mean 'gloo'"):
        ranks_to_start("2", None, "golo")


def test_more_ranks_than_shared_memory_has_room_for_are_refused_before_any_is_started():
    with pytest.raises(ConfigError, match='257 ranks share a host, expected 256 at most in shared memory: use the backend "gloo"'):
        ranks_to_start("2,257", None, "auto")
    assert ranks_to_start("2,257", None, "gloo") == [2, 257]


@pytest.mark.parametrize("name", ["links.toml", "links", "links.json.txt", ""])
def test_links_are_saved_under_a_name_that_their_reader_takes_for_json(name, tmp_path):
    with pytest.raises(ConfigError, match=r"--save .*: expected a name that ends in \.json"):
        expect_places(STUDY, tmp_path / "out", tmp_path / name)
    assert not (tmp_path / "out").exists()
    expect_places(STUDY, tmp_path / "out", tmp_path / "links.json")


def test_a_machine_that_is_busy_is_told():
    assert describe_machine(0.4).split()[1:] in (["cores"], ["core"])
    assert describe_machine(2.6).endswith(", and a load of 2.6 before this began: expect noise")


def test_a_cluster_file_must_fit_every_number_of_ranks_before_any_is_started(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text("nodes = 2\nranks_per_node = 2")
    assert ranks_to_start("4", file, "gloo") == [4]
    with pytest.raises(ConfigError, match="cluster.toml: nodes: has 4 ranks, but the job has 2"):
        ranks_to_start("2,4", file, "gloo")
