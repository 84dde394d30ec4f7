"""`rankloom schedule`: makes, reads, proves, prices and draws; and does so without torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from rankloom.base.errors import ConfigError, StorageError
from rankloom.parallel.pipeline.draw import LATER, grid
from rankloom.parallel.pipeline.passes import add_gathers, apply_pass, send_gradients_first
from rankloom.parallel.pipeline.schedules import SCHEDULES, make_schedule
from rankloom.parallel.pipeline.search import SEARCHED
from rankloom.parallel.pipeline.simulate import Costs, simulate_schedule
from rankloom.schedule import UNITS, find_schedule, known, read_costs, show_schedule

DOCS = Path(__file__).parent.parent / "docs"
NOTHING = dict(stages=None, microbatches=None, chunks=None, costs=None, columns=100, coloured=True, svg=None, trace=None, save=None)


def rankloom(*words):
    argv = [sys.executable, "-m", "rankloom", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def test_show_draws_the_rows_and_tells_the_numbers(tmp_path):
    svg, trace, save = tmp_path / "a.svg", tmp_path / "a.json", tmp_path / "a.txt"
    done = rankloom("schedule", "show", "1f1b", "--stages", 4, "--microbatches", 8, "--svg", svg, "--trace", trace, "--save", save)
    assert done.returncode == 0, done.stderr
    assert "1f1b: 4 stages on 4 ranks, 8 micro-batches" in done.stdout and "\x1b" not in done.stdout
    assert "rank 3  " in done.stdout and "backward, both parts" in done.stdout
    assert "a step takes 33; bubble: ranks wait 27.3% of the time" in done.stdout
    assert "as rl.pipeline and the engine run it" in done.stdout and "a step takes 30; bubble: ranks wait 20.0% of the time" in done.stdout
    assert svg.read_text().startswith("<svg") and json.loads(trace.read_text())["traceEvents"]
    assert find_schedule(str(save), None, None, None).microbatches == 8, "what is saved can be shown again"


@pytest.mark.parametrize("table", [next(part for part in show_schedule("1f1b", **NOTHING) if isinstance(part, Table)), known()])
def test_a_narrow_table_cuts_no_word(table):
    console = Console(width=36)
    with console.capture() as capture:
        console.print(table)
    assert "\N{HORIZONTAL ELLIPSIS}" not in capture.get()


@pytest.mark.parametrize("name", SCHEDULES)
def test_show_draws_how_a_schedule_runs_where_that_is_another(name):
    chunks = SCHEDULES[name].fewest
    schedule = make_schedule(name, 4 * chunks, 8)
    told = [str(part) for part in show_schedule(name, **{**NOTHING, "stages": 4 * chunks, "costs": "1,1,2"})]
    timeline = simulate_schedule(send_gradients_first(schedule), Costs.even(4 * chunks, weight=2.0))
    assert ("W" in str(schedule) and "B" not in str(schedule)) == (not any(part.startswith("as rl.pipeline") for part in told))
    if "B" in str(schedule):
        assert told[-1] == f"a step takes {timeline.makespan:g}; bubble: ranks wait {timeline.bubble:.1%} of the time"
        assert str(grid(timeline, 100)) in told[next(at for at, part in enumerate(told) if part.startswith("as rl.pipeline")) :]


def test_a_file_is_shown_as_it_is_and_runs_so(tmp_path):
    (tmp_path / "mine.txt").write_text(str(make_schedule("1f1b", 2, 2)))
    assert not any("as rl.pipeline" in str(part) for part in show_schedule(str(tmp_path / "mine.txt"), **NOTHING))


@pytest.mark.parametrize(("files", "said"), [
    ({"save": "s.json"}, "--save s.json: expected a name that ends in .txt"),
    ({"svg": "x.png"}, "--svg x.png: expected a name that ends in .svg"),
    ({"svg": "both.svg", "trace": "both.svg"}, "--trace both.svg: expected a name that ends in .json"),
    ({"svg": "x.svg", "trace": "nowhere/x.json"}, "--trace nowhere/x.json: there is no folder nowhere"),
])
def test_a_name_that_ends_as_another_kind_of_file_or_lies_nowhere_is_refused_before_any_is_written(files, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(said)):
        list(show_schedule("1f1b", **NOTHING | {flag: Path(name) for flag, name in files.items()}))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("costs", ["1e-320,1,1", "1e-320,0,0"])
def test_costs_too_small_to_be_drawn_are_refused(costs):
    with pytest.raises(ConfigError, match=f"--costs {costs}: one is too small to draw; give them in a smaller unit"):
        list(show_schedule("1f1b", **NOTHING | {"costs": costs}))


@pytest.mark.parametrize(("said", "told"), [
    ({"mesage": 5}, "there is no 'mesage' in such a file. Did you mean 'message'"), ({"kept": 0.5}, "there is no 'kept'"),
    ({"forward": "12"}, "expected F,I,W"), ({"forward": 1}, "expected F,I,W")])
def test_a_file_of_costs_is_read_to_the_letter(tmp_path, said, told):
    """An unknown key was ignored, and a text read as a list of digits."""
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"forward": [1, 1], "input": [1, 1], "weight": [1, 1]} | said))
    with pytest.raises(ConfigError, match=f"--costs {file}: {told}"):
        read_costs(str(file), 2)


@pytest.mark.parametrize("costs", ["1e308,1e308,1e308", "1e307,1,1", "1e304,1,1"])   # the last: in the units of a trace
def test_costs_that_add_up_to_more_than_a_number_holds_are_refused(costs):
    with pytest.raises(ConfigError, match=f"--costs {costs}: together they are more than a number can hold"):
        list(show_schedule("1f1b", **NOTHING | {"costs": costs}))


def test_list_names_every_schedule():
    done = rankloom("schedule", "list")
    assert done.returncode == 0 and all(name in done.stdout for name in [*SCHEDULES, *SEARCHED])
    assert known().row_count == len(SCHEDULES) + len(SEARCHED)


def test_a_searched_schedule_is_made_for_the_costs_that_are_given():
    options = {**NOTHING, "stages": 8, "microbatches": 24, "costs": "29.7,29.4,19.9,0.5"}
    shown = [str(part) for part in show_schedule("zb-2p", **options)]
    assert shown[0] == "zb-2p: 8 stages on 8 ranks, 24 micro-batches" and shown[-1].startswith("bubble 0.2% where a rank may begin")
    with pytest.raises(ConfigError, match="'zb-2p' with 2 stages on each rank: it is made for 1"):
        list(show_schedule("zb-2p", **{**options, "chunks": 2}))
    with pytest.raises(ConfigError, match="0 stages: expected 1 or more of each"):
        list(show_schedule("zb-2p", **{**NOTHING, "stages": 0}))


@pytest.mark.parametrize(("name", "stages"), [("1f1b", 4), ("zb-h1", 4), ("zb-v", 8)])
def test_the_pictures_of_the_docs_are_those_that_are_drawn(name, stages, tmp_path):
    list(show_schedule(name, **{**NOTHING, "stages": stages, "microbatches": 8, "svg": tmp_path / "now.svg"}))
    assert (DOCS / f"pipeline-{name}.svg").read_text() == (tmp_path / "now.svg").read_text()


def test_the_numbers_of_the_docs_are_those_of_the_simulator():
    lines = (DOCS / "pipeline.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    told = {re.match(r"`(.*?)`", row[0])[1]: row[4:] for row in rows}
    assert told.keys() == SCHEDULES.keys()
    for name, (waits, share, activations, gathers) in told.items():
        chunks = SCHEDULES[name].fewest
        schedule = make_schedule(name, 4 * chunks, 16)
        timeline = simulate_schedule(schedule, Costs.even(4 * chunks, forward=1 / chunks, input=1 / chunks, weight=1 / chunks))
        between = ", between steps 0" if timeline.own_bubble < 1e-9 else ""
        assert waits == f"{timeline.makespan - 48:.3g}{between}"
        assert share == f"{timeline.bubble:.1%}{', 0%' if between else ''}"
        assert activations == f"{max(timeline.peaks) / chunks:.3g}"
        assert int(gathers) == max(str(actions).count("GATHER") for actions in apply_pass(schedule, add_gathers).ranks)


def test_a_schedule_edited_into_a_deadlock_is_one_message_with_the_cycle(tmp_path):
    (tmp_path / "mine.txt").write_text("F0@0 B0@0 F1@0 B1@0\nF0@1 F1@1 B0@1 B1@1\n")
    done = rankloom("schedule", "show", tmp_path / "mine.txt")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "mine.txt: deadlock: rank 0 is at RECV_B0@0 and waits for SEND_B0@1, which rank 1 does after RECV_F1@1; rank 1 is" in done.stderr


def test_drawing_a_schedule_imports_no_torch():
    drawn = f"rankloom.schedule.show_schedule('zb-v', **{NOTHING | {'stages': 4}})"
    code = f"import sys, rankloom.schedule; list({drawn}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_costs_are_numbers_or_a_file_with_a_number_for_each_stage(tmp_path):
    assert read_costs(None, 3) == Costs.even(3)
    assert read_costs("2,1.5,1", 2) == Costs.even(2, forward=2.0, input=1.5)
    measured = {"forward": [1, 2], "input": [2, 4], "weight": [1, 1], "message": 0.5}
    (tmp_path / "busy.json").write_text(json.dumps(measured | {"send": 0.25}))
    assert read_costs(str(tmp_path / "busy.json"), 2) == Costs((1.0, 2.0), (2.0, 4.0), (1.0, 1.0), 0.5, send=0.25)
    (tmp_path / "costs.json").write_text(json.dumps(measured))
    assert read_costs(str(tmp_path / "costs.json"), 2) == Costs((1.0, 2.0), (2.0, 4.0), (1.0, 1.0), 0.5)
    shown = list(show_schedule("1f1b", **{**NOTHING, "stages": 2, "microbatches": 2, "costs": str(tmp_path / "costs.json")}))
    assert any("a step takes 19;" in str(part) for part in shown)


@pytest.mark.parametrize(("options", "message"), [
    ({"costs": "1,2"}, "--costs 1,2: expected F,I,W"), ({"costs": "1,2,x"}, "expected F,I,W"), ({"costs": "1,2,3,4,5"}, "expected F,I,W"),
    ({"costs": "none.json"}, "none.json: cannot be read"), ({"costs": "1,-2,3"}, "none below 0"),
    ({"costs": "1,1,1,-1"}, "^--costs 1,1,1,-1: a cost of kind message is -1: expected each a number, and none below 0$"),
    ({"costs": "nan,1,1"}, "each a number"),
    ({"costs": "1,1,1,inf"}, "each a number"),
    ({"costs": "0,0,0"}, "give some time to F, I or W"),
    ({"stages": 3, "chunks": 2}, "made for 1"), ({"svg": "/proc/x.svg"}, "cannot be written"),
])
def test_a_mistake_is_refused_with_what_was_expected(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {key: Path(value) if key == "svg" else value for key, value in options.items()}
    with pytest.raises(ConfigError, match=message):
        list(show_schedule("1f1b", **{**NOTHING, **options}))


def test_a_file_says_itself_how_large_it_is(tmp_path):
    (tmp_path / "one.txt").write_text("F0@0 B0@0\n")
    with pytest.raises(ConfigError, match="leave out --stages, --chunks"):
        find_schedule(str(tmp_path / "one.txt"), 4, None, 2)
    (tmp_path / "two.txt").write_bytes(b"F0@0 \xff")
    with pytest.raises(ConfigError, match="two.txt: cannot be read .it is no text"):
        find_schedule(str(tmp_path / "two.txt"), None, None, None)
    with pytest.raises(ConfigError, match="none.txt: cannot be read"):
        find_schedule("none.txt", None, None, None)


@pytest.mark.parametrize("text", ["{}", "[1]", '{"forward": 1}', '{"forward": ["x"], "input": [1], "weight": [1]}', "not json",
                                  "[" * 100_000])
def test_a_file_of_costs_that_is_none_is_refused(text, tmp_path):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ConfigError, match="expected F,I,W"):
        read_costs(str(tmp_path / "c.json"), 1)


def test_a_wrong_line_of_a_schedule_is_told_with_its_file_and_number(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("# two ranks\nF0@0 B0@0\nF0@1 Q0@1\n")
    with pytest.raises(ConfigError, match=f"^{path}: line 3: action 'Q0@1': there is no kind 'Q'"):
        find_schedule(str(path), None, None, None)


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "a.svg"
    path.write_text("old")
    real = Path.write_text

    def full(self, text, **options):
        real(self, text[:9], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StorageError, match=r"a.svg: cannot be written \(No space left on device\)"):
        list(show_schedule("1f1b", **NOTHING | {"svg": path}))
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("name", "stages", "microbatches", "columns", "coloured", "squeezed"), [
    ("zb-v", 8, 16, 60, False, True), ("gpipe", 40, 64, 100, True, True), ("1f1b", 4, 8, 200, False, False),
    ("1f1b", 4, 12, 90, True, True), ("1f1b", 4, 12, 100, True, False), ("1f1b", 4, 12, 100, False, True),
])
def test_a_drawing_too_narrow_for_the_names_of_its_actions_says_what_a_column_is(name, stages, microbatches, columns, coloured, squeezed):
    how = NOTHING | {"stages": stages, "microbatches": microbatches, "columns": columns, "coloured": coloured}
    parts = [str(part) for part in show_schedule(name, **how)]
    notes = [part for part in parts[:3] if part.startswith("one column = ")]
    assert len(notes) == squeezed
    if name == "gpipe":
        assert notes[0].startswith("one column = 3.4 time units, too narrow to name every action; a wider terminal, or --svg FILE, shows")


def test_only_a_coloured_drawing_says_that_later_stages_are_darker():
    shown = lambda coloured: "\n".join(map(str, show_schedule("zb-v", **NOTHING | {"stages": 8, "coloured": coloured})))
    assert LATER in shown(True) and LATER not in shown(False) and "towards the weights" in shown(False)


def test_the_table_counts_activations_in_the_unit_of_the_docs_and_names_its_units():
    shown = list(show_schedule("zb-v", **NOTHING | {"stages": 8, "microbatches": 16}))
    table = next(part for part in shown if isinstance(part, Table))
    by_name = {str(column.header): list(column.cells) for column in table.columns}
    assert max(map(float, by_name["most activations"])) == 4, "as in the last columns of docs/pipeline.md"
    assert {"computes", "waits", "sends"} <= by_name.keys() and UNITS in shown


@pytest.mark.parametrize("words", [["schedule", "show", "1f1b", "--microbatches", "8.5"], ["layout", "--ranks", "4.9"],
                                   ["bench", "--turns", "2.5"], ["schedule", "show", "1f1b", "--stages", "4.0"]])
def test_a_number_that_is_not_whole_is_refused_and_not_rounded(words):
    done = rankloom(*words)
    assert done.returncode == 2 and f"Invalid value for {words[-2]}: '{words[-1]}' is not a whole number" in done.stderr


def test_more_stages_than_can_be_drawn_in_a_minute_are_refused():
    with pytest.raises(ConfigError, match=r"--stages 100000: expected at most 1024"):
        find_schedule("1f1b", 100_000, 8, None)
