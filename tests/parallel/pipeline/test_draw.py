"""Drawings: every action where it belongs, in text, SVG and trace."""

import json
import re
from xml.etree import ElementTree

import pytest

from rankloom.parallel.pipeline.draw import COLOURS, LATER, LEFT, STEP_WIDTH, as_svg, as_trace, grid, legend
from rankloom.parallel.pipeline.schedules import make_schedule
from rankloom.parallel.pipeline.simulate import Costs, simulate_schedule


def drawn(name: str, stages: int, microbatches: int, **costs: float):
    return simulate_schedule(make_schedule(name, stages, microbatches), Costs.even(stages, **costs))


def test_the_rows_of_a_terminal_show_who_computes_and_who_waits():
    text = grid(drawn("1f1b", 2, 2), columns=100)
    assert text.plain == ("rank 0  F0  F1  ........B0      ....B1      \n"
                          "rank 1  ....F0  B0      F1  B1      ........")


def test_a_narrow_cell_says_which_micro_batch_in_colours_and_what_is_computed_without():
    timeline = drawn("1f1b", 2, 2)
    assert grid(timeline, 17).plain == "rank 0  01..B0.B1\nrank 1  .0B01B1.."
    assert grid(timeline, 17, coloured=False).plain == "rank 0  FF..B0.B1\nrank 1  .FB0FB1.."


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved", "zb-h1"])
def test_rows_are_equally_long_and_fit(name, columns):
    for width in {len(row) for row in grid(drawn(name, 8, 8, forward=0.7), columns).plain.splitlines()}:
        assert width <= columns + 1
    assert len({len(row) for row in grid(drawn(name, 8, 8, forward=0.7), columns).plain.splitlines()}) == 1


def test_later_stages_of_a_rank_have_another_colour():
    styles = {str(span.style) for span in grid(drawn("zb-v", 4, 3)).spans}
    assert {f"#000000 on {COLOURS['F'][0]}", f"#ffffff on {COLOURS['F'][1]}"} <= styles
    assert {f"#ffffff on {COLOURS['F'][1]}"}.isdisjoint({str(span.style) for span in grid(drawn("zb-h1", 4, 3)).spans})


def test_the_legend_names_what_is_there():
    assert legend(drawn("1f1b", 2, 2)).plain == " F  forward    B  backward, both parts"
    assert "towards the weights" in legend(drawn("zb-h1", 2, 2)).plain
    assert LATER in legend(drawn("zb-v", 4, 2)).plain and LATER in as_svg(drawn("zb-v", 4, 2), "V")
    assert LATER not in as_svg(drawn("zb-h1", 2, 2), "H1")


def test_the_svg_has_a_cell_for_every_action_at_its_time():
    timeline = drawn("zb-h1", 3, 4)
    root = ElementTree.fromstring(as_svg(timeline, "H1 <3"))
    cells = {g.find("{*}title").text: g.find("{*}rect").attrib for g in root.iter("{http://www.w3.org/2000/svg}g")}
    assert len(cells) == 3 * 3 * 4
    for slot in timeline.slots:
        cell = cells[f"{slot.action}: {slot.start:g} to {slot.end:g}"]
        assert float(cell["x"]) == pytest.approx(LEFT + slot.start / timeline.makespan * STEP_WIDTH, abs=0.01)
        assert float(cell["width"]) == pytest.approx(STEP_WIDTH / timeline.makespan, abs=0.01)
        assert cell["fill"] == COLOURS[slot.action.kind][0]


def test_colour_alone_tells_kinds_apart_in_the_svg_only_where_cells_are_narrow():
    def texts(microbatches):
        root = ElementTree.fromstring(as_svg(drawn("zb-h1", 3, microbatches), "H1"))
        cells = list(root.iter("{http://www.w3.org/2000/svg}g"))
        named = [(cell.find("{*}title").text.split("@")[0], cell.find("{*}text")) for cell in cells]
        return [(action, None if text is None else text.text) for action, text in named], [text.text for text in root.iter() if text.text]

    wide, words = texts(4)
    assert all(text == action for action, text in wide) and {"F", "I", "W"} <= set(words)   # these in the legend
    assert {text in (action[1:], None) for action, text in texts(24)[0]} == {True}
    assert {text for _, text in texts(60)[0]} == {None}


@pytest.mark.parametrize("unit", [0.004, 1.0, 37.0])
def test_the_svg_has_a_time_axis_whose_ticks_are_round_and_where_they_say(unit):
    timeline = drawn("1f1b", 3, 4, forward=unit, input=unit, weight=unit)
    root = ElementTree.fromstring(as_svg(timeline, "1F1B"))
    words = list(root.iter("{http://www.w3.org/2000/svg}text"))
    bottom = next(word.get("y") for word in words if word.text == "time")
    ticks = [(float(word.get("x")), float(word.text)) for word in words if word.get("y") == bottom and word.text != "time"]
    assert 4 <= len(ticks) <= 13 and ticks[0] == (LEFT, 0) and len({y for _, y in ticks}) == len(ticks)
    for x, time in ticks:
        assert x == pytest.approx(LEFT + time / timeline.makespan * STEP_WIDTH, abs=0.01)
    assert f"{ticks[1][1]:e}"[0] in "125" and float(root.get("width")) >= LEFT + STEP_WIDTH + 7 * len(f"{ticks[-1][1]:g}") / 2
    bars = [float(rect.get("y")) for rect in root.iter("{http://www.w3.org/2000/svg}rect") if rect.get("width") == "14"]
    assert float(bottom) < min(bars), "the legend is below it"


def test_the_trace_has_a_slice_for_every_action_and_an_arrow_for_every_message():
    timeline = drawn("1f1b", 3, 4, message=0.5)
    events = json.loads(json.dumps(as_trace(timeline)))["traceEvents"]
    slices = {e["name"]: e for e in events if e["ph"] == "X"}
    assert {name: (e["tid"], e["ts"], e["dur"]) for name, e in slices.items()} == {
        str(s.action): (s.rank, s.start * 1000, (s.end - s.start) * 1000) for s in timeline.slots}
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert len(starts) == len(ends) == 2 * 2 * 4, "over each of 2 borders, forth and back, 4 micro-batches"
    for number, sent in starts.items():
        kind, m, stage = re.fullmatch(r"SEND_(.)(\d+)@(\d+)", sent["name"]).groups()
        to = int(stage) + (1 if kind == "F" else -1)
        assert (sent["tid"], ends[number]["tid"]) == (int(stage), to)
        assert ends[number]["ts"] == slices[f"{kind}{m}@{to}"]["ts"] >= slices[f"{kind}{m}@{stage}"]["ts"] + 500
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "rank 1", "rank 2"]
