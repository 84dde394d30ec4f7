"""Which of many failures is the cause, what a failing rank leaves behind, and the box that tells of it."""

import errno
import json
import signal
import tracemalloc
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import rankloom as rl
from rankloom.world.failure import Failure, bare_failure, describe, read_failure, user_frame, write_failure
from rankloom.world.verdict import Ending, explain, pick_cause, rank_list, render


def failure(kind, time=0.0, message="it broke", **more):
    return Failure(kind, message, "loss.py:7 in loss", "return 1 / 0", "node-3", time, "", **more)


def raised(rank, kind, time, message="it broke", **more):
    return Ending(rank, 1, time, failure=failure(kind, time, message), **more)


def caught(error):
    try:
        raise error
    except type(error) as back:
        return back


@pytest.mark.parametrize(("endings", "cause", "why"), [
    ([raised(0, "ValueError", 2.0), raised(1, "KeyError", 1.0)], 1, "the first of two errors"),
    ([raised(0, "RankLost", 1.0), raised(1, "KeyError", 2.0)], 1, "an error, although its clock says later"),
    ([raised(0, "CollectiveTimeout", 1.0), raised(1, "RankLost", 2.0)], 0, "only collateral: the first"),
    ([raised(0, "RankLost", 1.0), raised(1, "CollectiveTimeout", 1.1)], 1, "only collateral: the time-out closed the connection"),
    ([raised(0, "RankLost", 1.0), Ending(1, -9, 0.9)], 1, "a killed rank before the one that lost it"),
    ([raised(0, "RuntimeError", 1.0, "Connection closed by peer [::1]"), Ending(1, -9, 2.0)], 1, "raw gloo is collateral too"),
    ([raised(0, "RuntimeError", 1.0), Ending(1, -9, 2.0)], 0, "any other RuntimeError is not"),
    ([raised(0, "RankLost", 1.0), Ending(1, 0, 0.5)], 1, "a rank that left as if all were done"),
    ([raised(0, "RankLost", 1.0), Ending(1, 3, 5.0)], 1, "a rank that ended without a word"),
    ([raised(0, "RankLost", 1.0), Ending(1, -15, 2.0, asked=True)], 0, "one that the launcher ended is not"),
    ([raised(0, "KeyError", 9.0, asked=True), raised(1, "RankLost", 2.0)], 1, "an error on the way out is not"),
    ([raised(0, "CollectiveTimeout", 1.0), Ending(1, -9, 2.0, asked=True, hung="x"), Ending(2, 0, 0.1)], 1, "waited for: the silent one"),
    ([raised(0, "RankLost", 1.0), Ending(1, -9, 2.0, asked=True, hung="x"), Ending(2, 0, 0.1)], 2, "lost: the one that left"),
    ([raised(0, "KeyError", 1.0, hung="x"), raised(1, "RankLost", 2.0)], 0, "an error counts, although it hung afterwards"),
    ([raised(1, "KeyError", 1.0), raised(0, "KeyError", 1.0)], 0, "at the same time: the lower rank"),
])
def test_the_cause_among_many_failures(endings, cause, why):
    assert pick_cause(endings).rank == cause, why
    assert pick_cause(endings[::-1]).rank == cause, why


class Odd(Exception):
    def __str__(self):
        return 3


def test_an_error_without_a_text_is_nobodys_consequence():
    assert not bare_failure(Odd()).is_collateral and bare_failure(rl.RankLost("rank 0 is gone")).is_collateral


def test_a_failure_travels_in_the_file_that_torchrun_reads(tmp_path):
    file = tmp_path / "error.json"
    error = caught(ValueError("too bad"))
    error.add_note("and a note")
    assert write_failure(error, file)
    left = read_failure(file)
    assert (left.type, left.message, left.source) == ("ValueError", "too bad\nand a note", "raise error")
    assert left.place.endswith("in caught") and "test_failure.py:" in left.place
    assert "ValueError: too bad" in left.traceback and "and a note" in left.traceback
    torchs = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    assert torchs.message["message"].startswith("ValueError: too bad") and torchs.timestamp > 0


def test_a_failure_whose_text_fails_is_told_all_the_same(tmp_path):
    error = caught(Odd())
    error.add_note("and a note")
    assert write_failure(error, tmp_path / "error.json")
    left = read_failure(tmp_path / "error.json")
    assert (left.type, left.message, left.source) == ("Odd", "<exception str() failed>\nand a note", "raise error")
    assert "Odd: <exception str() failed>" in left.traceback


def test_torchrun_takes_a_killed_rank_for_the_cause_and_not_the_one_that_lost_it(tmp_path):
    file = tmp_path / "error.json"
    assert write_failure(rl.RankLost("rank 0: gradients lost rank 1"), file)
    lost = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    killed = ProcessFailure(local_rank=1, pid=2, exitcode=-9, error_file="none")   # torchrun sees it a moment later
    assert ChildFailedError("job", {0: lost, 1: killed}).get_first_failure()[0] == 1


def test_the_first_failure_that_a_rank_tells_stays(tmp_path):
    file = tmp_path / "error.json"
    assert write_failure(KeyError(1), file) and write_failure(ValueError(2), file)
    assert read_failure(file).type == "KeyError"
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"rankloom": {"type": "x"}}', '{"rankloom": 3}'])
def test_a_file_that_is_not_a_failure_is_none(tmp_path, text):
    (tmp_path / "error.json").write_text(text)
    assert read_failure(tmp_path / "error.json") is None
    assert read_failure(tmp_path / "missing.json") is None


def test_a_file_that_cannot_be_written_is_no_second_error(tmp_path):
    assert not write_failure(ValueError("x"), tmp_path / "no" / "folder" / "error.json")


def test_a_file_that_cannot_be_written_whole_leaves_nothing_behind(tmp_path, monkeypatch):
    def fill_the_disk(path, text):
        path.write_bytes(text.encode()[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", fill_the_disk)
    assert not write_failure(ValueError("x"), tmp_path / "error.json")
    assert [*tmp_path.iterdir()] == []


def trace_through(*files):
    """A traceback whose frames are functions of these files, outermost first."""
    call = None
    for file in reversed(files):
        body = "raise ValueError" if call is None else "call()"
        scope = {"call": call}
        exec(compile(f"def f():\n    {body}", str(file), "exec"), scope)
        call = scope["f"]
    try:
        call()
    except ValueError as error:
        return error.__traceback__.tb_next


OURS = Path(rl.__file__).parent / "parallel" / "data.py"
LIBRARY = "/env/lib/python3.12/site-packages/torch/autograd.py"


@pytest.mark.parametrize(("files", "place"), [
    (["/home/me/train.py", OURS, "/home/me/loss.py", LIBRARY], "/home/me/loss.py:2 in f"),
    (["/home/me/train.py", OURS, LIBRARY, "<frozen importlib>"], "/home/me/train.py:2 in f"),
    ([json.__file__, OURS, LIBRARY], f"{OURS}:2 in f"),
    ([LIBRARY], f"{LIBRARY}:2 in f"),
])
def test_the_place_of_an_error_is_the_last_line_of_the_user_then_ours(files, place, monkeypatch):
    monkeypatch.chdir("/")
    assert user_frame(trace_through(*files))[0] == place.removeprefix("/")


def test_an_error_that_was_never_raised_has_no_place():
    assert describe(ValueError("x")).place == ""


def test_the_box_tells_all_and_is_a_box():
    log = "logs/rank-1.stderr.log"
    endings = [raised(0, "RankLost", 2.0), raised(1, "ZeroDivisionError", 1.0, log=log), raised(2, "KeyError", 1.5),
               Ending(3, -15, 3.0, asked=True), Ending(4, 0, 0.5)]
    lines = render(endings, pick_cause(endings), width=80).splitlines()
    assert {len(line) for line in lines} == {80}
    text = "\n".join(line.strip("\u2502 ") for line in lines)
    assert "rank 1 of 5 on host node-3" in lines[0]
    assert "error        ZeroDivisionError: it broke" in text
    assert "loss.py:7 in loss" in text and "return 1 / 0" in text and log in text
    assert "also failed  rank 2: KeyError: it broke" in text
    assert "stopped      because of it: ranks 0, 3" in text, "rank 4 was done before"


def test_of_a_long_log_only_the_end_is_read_for_the_last_words_of_a_rank(tmp_path):
    log = tmp_path / "rank-1.stderr.log"
    log.write_bytes(b"a step has ended\n" * 500_000 + b"\xff the disk is gone\n")
    tracemalloc.start()
    try:
        text = render([ending := Ending(1, 3, 1.0, log=str(log))], ending, width=80)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert text.count("a step has ended") == 5 and "the disk is gone" in text
    assert peak < log.stat().st_size / 2


def test_an_error_without_a_text_is_named_without_a_colon():
    text = render([raised(0, "MemoryError", 1.0, "")], raised(0, "MemoryError", 1.0, ""))
    assert "MemoryError " in text and "MemoryError:" not in text


def test_the_box_of_a_crash_names_the_signal_and_what_a_neighbour_saw():
    endings = [raised(0, "RankLost", 2.0, "rank 0: lost rank 1"), Ending(1, -signal.SIGSEGV, 1.0), Ending(2, 0, 0.5)]
    text = render(endings, endings[1])
    assert "SIGSEGV. It crashed in compiled code." in text and "RankLost: rank 0: lost rank 1" in text
    assert "signal 63" in render([Ending(0, -63, 1.0)], Ending(0, -63, 1.0)), "one without a name"


def test_ranks_that_raised_the_same_are_listed_as_such():
    endings = [raised(rank, "NonFinite", rank, f"rank {rank}: the loss is nan") for rank in range(4)]
    assert "the same  on ranks 1-3" in render(endings, endings[0])


def test_a_message_cannot_leave_the_box():
    endings = [raised(0, "ValueError", 1.0, "red \x1b[31m\rback\x00 [bold]kept[/bold] \u4f60 " + "long " * 60 + "\nline" * 100)]
    text = render(endings, endings[0], width=100)
    assert "\x1b" not in text and "\r" not in text and "\x00" not in text
    assert "\\x1b[31m\\rback\\x00 [bold]kept[/bold]" in text
    assert len(text.splitlines()) < 40, "the log has the rest"


@pytest.mark.parametrize("kind", ["ConfigError", "DataError", "MeshError"])
def test_what_the_user_can_mend_is_raised_again_when_all_ranks_say_it(kind):
    endings = [raised(rank, kind, rank, f"rank {rank}: no such file") for rank in range(3)]
    again = explain([*endings, Ending(3, -15, 9.0, asked=True), Ending(4, 0, 0.0)])
    assert type(again) is getattr(rl, kind) and str(again) == "rank 0: no such file"


@pytest.mark.parametrize("endings", [
    [raised(0, "ShapeMismatch", 1.0), raised(1, "RankLost", 2.0)],
    [raised(0, "DataError", 1.0), raised(1, "DataError", 2.0, "another")],
    [raised(0, "DataError", 1.0), Ending(1, -9, 2.0)],
    [raised(0, "NonFinite", 1.0), raised(1, "NonFinite", 1.0)],
    [raised(0, "ValueError", 1.0), raised(1, "ValueError", 1.0)],
])
def test_all_else_is_a_failed_rank_with_a_box(endings):
    error = explain(endings)
    assert isinstance(error, rl.RankFailed) and error.rank == 0
    assert str(error).startswith("rank 0 of 2 failed first\n\u256d")


@pytest.mark.parametrize(("ranks", "text"), [([3], "rank 3"), ([1, 0], "ranks 0-1"), ([0, 2, 4, 5, 6], "ranks 0, 2, 4-6")])
def test_ranks_are_listed_in_few_words(ranks, text):
    assert rank_list(ranks) == text
