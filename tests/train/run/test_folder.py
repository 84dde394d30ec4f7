"""The run folder: who gets which folder, and what is written into it."""

import json
import os
import re
import resource
import subprocess
import sys
import threading
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest

from rankloom.base.errors import ConfigError, StorageError
from rankloom.base.events import Evaluated, Notice, StepDone
from rankloom.train.run.config import make_config
from rankloom.train.run.folder import Journal, claim_run_folder, describe_environment, write_json
from rankloom.train.run.job import open_run
from rankloom.world.launch import agent_mark
from rankloom.world.simulate import simulate

NOW = datetime(2030, 1, 2, 3, 4, 5)
STEP = StepDone(0, 1, 3.0, 8.0, float("inf"), 1e-3, 0.5, 0.1, 100, False)


def config(folder, name=None):
    run = {"folder": str(folder)} | ({"name": name} if name else {})
    return make_config({"train": {"local_batch_size": 1}, "run": run}, "here")


def test_a_run_without_a_name_is_named_after_time_and_preset(tmp_path):
    path = claim_run_folder(config(tmp_path / "a" / "runs"), NOW)
    assert path == tmp_path / "a" / "runs" / "2030-01-02-030405-3M"
    assert sorted(p.name for p in path.iterdir()) == ["events", "logs"]


def test_runs_that_start_in_the_same_second_get_folders_of_their_own(tmp_path):
    names = [claim_run_folder(config(tmp_path), NOW).name for _ in range(3)]
    assert names == ["2030-01-02-030405-3M", "2030-01-02-030405-3M-2", "2030-01-02-030405-3M-3"]


@pytest.mark.parametrize("kept", ["metrics.jsonl", "model.safetensors"])
def test_a_named_folder_that_holds_a_run_is_never_used_again(tmp_path, kept):
    path = claim_run_folder(config(tmp_path, "mine"), NOW)
    (path / kept).write_text("something")
    with pytest.raises(ConfigError, match=r"mine: holds a run already; give another --run.name"):
        claim_run_folder(config(tmp_path, "mine"), NOW)
    assert (path / kept).read_text() == "something"


def test_a_job_that_its_launcher_starts_again_gets_a_folder_beside_that_of_the_first_time(tmp_path, monkeypatch):
    first = claim_run_folder(config(tmp_path, "mine"), NOW)
    (first / "metrics.jsonl").write_text("something")
    monkeypatch.setattr("rankloom.train.run.job.restarts", lambda: int(threading.current_thread().name == "rank-1"))   # of another node
    assert simulate(2, partial(open_run, config(tmp_path, "mine"))) == [tmp_path / "mine-2"] * 2


def test_a_job_that_goes_on_with_another_node_gets_a_folder_of_its_own_and_a_later_job_none(tmp_path, monkeypatch):
    """torchrun does not count as a restart that a node joins."""
    def start(*agents):
        marks = [mark(agent) for agent in agents]
        monkeypatch.setattr("rankloom.train.run.job.agent_mark", lambda: marks[int(threading.current_thread().name.removeprefix("rank-"))])
        return {path.name for path in simulate(len(agents), partial(open_run, config(tmp_path, "mine")))}

    def mark(agent):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"{tmp_path}/{agent}/attempt_0/0/error.json")
        return agent_mark()

    assert start("none_a") == {"mine"}
    (tmp_path / "mine" / "metrics.jsonl").write_text("something")
    assert start("none_b", "none_a") == {"mine-2"}
    with pytest.raises(ConfigError, match="mine: holds a run already"):
        start("none_c", "none_b")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"{tmp_path}/mine.json")   # a user's own
    assert agent_mark() is None


def test_a_named_folder_of_a_run_that_never_took_a_step_is_used_again(tmp_path):
    path = claim_run_folder(config(tmp_path, "mine"), NOW)
    (path / "metrics.jsonl").write_text("")
    (path / "config.toml").write_text("old")
    assert claim_run_folder(config(tmp_path, "mine"), NOW) == path


HOLDING = """
import sys, time
from pathlib import Path
from rankloom.train.run.folder import hold
try:
    hold(Path(sys.argv[1]))
except Exception as error:
    print(type(error).__name__, error, flush=True)
else:
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_in_which_another_process_begins_a_run_is_refused_until_that_ends(tmp_path):
    ask = lambda: subprocess.Popen([sys.executable, "-c", HOLDING, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with ask() as first:
        assert first.stdout.readline() == "held\n"
        with ask() as second:
            assert f"ConfigError {tmp_path}: another run is beginning in this folder; give another --run.name" in second.stdout.readline()
        first.stdin.close()
    with ask() as later:
        assert later.stdout.readline() == "held\n"
        later.stdin.close()


@pytest.mark.parametrize("name", ["../x", "a/b", "<script>", "a b", "", ".hidden", "a\n", "x" * 101, "\u00e4\u00f6", "-rf", "a\x1b[2J"])
def test_a_hostile_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="must be ASCII letters, digits"):
        make_config({"train": {"local_batch_size": 1}, "run": {"name": name}}, "here")


def test_a_folder_that_cannot_be_made_is_named_with_the_cure(tmp_path):
    (tmp_path / "runs").write_text("a file in the way")
    with pytest.raises(ConfigError, match=r"runs/mine: the run folder cannot be made .*; give another .* --run.folder"):
        claim_run_folder(config(tmp_path / "runs", "mine"), NOW)


def test_json_that_cannot_be_written_names_its_path(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere/a.json: cannot be written"):
        write_json(tmp_path / "nowhere" / "a.json", {})


def test_numbers_that_json_does_not_know_are_null(tmp_path):
    write_json(tmp_path / "a.json", {"loss": float("nan"), "rows": [{"rate": float("inf")}, (1.5, -float("inf"))], "name": "NaN"})
    found = json.loads((tmp_path / "a.json").read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert found == {"loss": None, "rows": [{"rate": None}, [1.5, None]], "name": "NaN"}


def test_every_rank_keeps_its_events_and_rank_0_the_metrics(tmp_path):
    for rank in (0, 1):
        with Journal(tmp_path, rank) as journal:
            for event in (STEP, Notice(rank, "hello"), Evaluated(rank, 1, 2.0, 4.0)):
                journal(event)
            assert journal.problem is None
    kinds = {p.relative_to(tmp_path).as_posix(): [json.loads(line)["event"] for line in p.read_text().splitlines()]
             for p in tmp_path.rglob("*.jsonl")}
    assert kinds == {
        "metrics.jsonl": ["StepDone", "Evaluated"],
        "events/rank-0.jsonl": ["StepDone", "Notice", "Evaluated"],
        "events/rank-1.jsonl": ["StepDone", "Notice", "Evaluated"],
    }


def test_a_journal_is_json_even_where_a_number_is_not(tmp_path):
    with Journal(tmp_path, 0) as journal:
        journal(STEP)
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["grad_norm"] is None
    assert line["loss"] == 3.0


def test_a_line_is_on_disk_before_the_journal_is_closed(tmp_path):
    with Journal(tmp_path, 0) as journal:
        journal(STEP)
        assert (tmp_path / "metrics.jsonl").read_text().endswith("\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a disk that is always full is a Linux device")
def test_a_full_disk_is_kept_as_a_problem_and_not_raised_in_the_middle_of_a_step(tmp_path):
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "rank-1.jsonl").symlink_to("/dev/full")
    with Journal(tmp_path, 1) as journal:
        journal(STEP)
        journal(STEP)
    assert re.search(r"rank-1.jsonl: cannot be written \(No space left", journal.problem)


def test_a_disk_that_is_full_in_the_middle_of_a_line_leaves_whole_lines(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(tmp_path, 1) as journal:
        journal(STEP)
        whole = (tmp_path / "events" / "rank-1.jsonl").read_text()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) * 3 // 2, before[1]))
        try:
            journal(STEP)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        journal(STEP)
    assert "rank-1.jsonl: cannot be written in full; is the disk full?" in journal.problem
    assert (tmp_path / "events" / "rank-1.jsonl").read_text() == whole


def test_a_journal_that_cannot_be_opened_says_so(tmp_path):
    (tmp_path / "events").write_text("a file in the way")
    with Journal(tmp_path, 1) as journal:
        journal(STEP)
    assert re.search(r"rank-1.jsonl: cannot be opened", journal.problem)


def test_the_environment_tells_versions_host_and_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def body(world):
        return describe_environment(world, ["rankloom", "train"])

    told = simulate(2, body)[0]
    assert told["command"] == ["rankloom", "train"]
    assert told["ranks"] == 2
    assert told["git_commit"] is None, "an empty folder is no repository"
    assert told["packages"]["torch"]
    assert Path(told["folder"]) == tmp_path
    json.dumps(told)


def test_a_run_that_starts_on_a_full_disk_names_the_file_and_leaves_no_folder(tmp_path, monkeypatch):
    def full(self, text, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StorageError, match=r"runs/mine/config.toml: cannot be written \(No space left on device\)"):
        simulate(2, partial(open_run, config(tmp_path / "runs", "mine")))
    assert not (tmp_path / "runs" / "mine").exists()


def test_a_named_folder_with_something_in_it_stays_when_its_run_cannot_start(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    monkeypatch.setattr("rankloom.train.run.job.write_json", lambda path, value: (_ for _ in ()).throw(StorageError(f"{path}: full")))
    with pytest.raises(StorageError, match="env.json: full"):
        simulate(1, partial(open_run, config(tmp_path, "mine")))
    assert (tmp_path / "mine" / "notes.txt").exists() and not (tmp_path / "mine" / "logs").exists()
