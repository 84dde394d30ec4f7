"""Reading a run folder back."""

import json
import time
import tracemalloc
from itertools import pairwise
from statistics import fmean

import pytest

from rankloom.base.errors import DataError
from rankloom.watch.history import read_history, smooth

STEP = {"event": "StepDone", "step": 1, "loss": 3.0}


def write(folder, *events, tail=""):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + tail)


def test_steps_and_evaluations_come_back_in_order(tmp_path):
    evaluated = {"event": "Evaluated", "step": 1, "loss": 2.0}
    write(tmp_path, STEP, evaluated, {**STEP, "step": 2}, {"event": "Notice", "text": "x"})
    history = read_history(tmp_path)
    assert [step["step"] for step in history.steps] == [1, 2]
    assert history.evaluations == [{"step": 1, "loss": 2.0}]
    assert history.summary == {}


def test_a_last_line_cut_by_a_kill_is_left_out(tmp_path):
    write(tmp_path, STEP, tail='{"event": "StepDone", "st')
    assert read_history(tmp_path).steps == [{"step": 1, "loss": 3.0}]


def test_metrics_are_not_held_whole_in_memory(tmp_path):
    """A run of a million steps needed 2 GB at its end to draw its loss, and with the loads of many experts more than a host may have."""
    loads = {f"blocks.{layer}": {"routed": [10**9 + layer] * 32, "dropped": 0} for layer in range(32)}
    write(tmp_path, *({**STEP, "step": step, "seconds": 0.5, "experts": loads} for step in range(1, 301)))
    tracemalloc.start()
    try:
        history = read_history(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert history.steps[299] == {"step": 300, "loss": 3.0, "seconds": 0.5} and len(history.steps) == 300
    assert peak < (tmp_path / "metrics.jsonl").stat().st_size / 8


@pytest.mark.parametrize(("damaged", "how"), [
    (b"oops", "not a JSON object"), (b'"oops"', "not a JSON object"), (b'{"loss": 2.0, "s\xf4ep": 7}', "not a JSON object"),
    (b'{"event": "Evaluated", "loss": 2.0, "stdp": 7}', "lacks the step or its loss"),
    (b'{"event": "StepDone", "step": 2}', "lacks the step or its loss"),
])
def test_a_damaged_line_in_the_middle_is_named(tmp_path, damaged, how):
    write(tmp_path, STEP)
    with (tmp_path / "metrics.jsonl").open("ab") as metrics:
        metrics.write(damaged + b'\n{"event": "StepDone"}\n')
    with pytest.raises(DataError, match=rf"metrics.jsonl:2: {how}; the file is damaged"):
        read_history(tmp_path)


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(DataError, match=r"is .* a run folder"):
        read_history(tmp_path / "nothing")


def test_the_summary_is_read_when_it_is_whole(tmp_path):
    write(tmp_path, STEP)
    (tmp_path / "summary.json").write_text('{"trigram_loss": 2.5}')
    assert read_history(tmp_path).summary == {"trigram_loss": 2.5}
    (tmp_path / "summary.json").write_text('{"trigram_')
    assert read_history(tmp_path).summary == {}


def test_smoothing_neither_lags_nor_leads_and_keeps_the_ends():
    falling = [100.0 - i for i in range(100)]
    assert smooth(falling) == pytest.approx(falling, rel=1e-12), "a straight line is its own mean"
    jump = smooth([0.0] * 50 + [1.0] * 50, reach=5)
    assert jump[0] == 0.0 and jump[-1] == 1.0 and 0 < jump[46] < jump[49] < 0.5 < jump[50] < jump[53] < 1


@pytest.mark.parametrize("n", [80, 400])
def test_the_end_of_a_smoothed_curve_is_no_noisier_than_a_line_through_its_window(n):
    noisy = [3.0 - i / n + (0.5 if i % 2 else -0.5) for i in range(n)]
    curve, reach = smooth(noisy), n // 40
    off = [abs(value - (3.0 - i / n)) for i, value in enumerate(curve)]
    # windows are full from 4r on
    # noise that alternates moves the mean of 2r+1 values by 0.5/(2r+1), and the end of the line through them by no more than thrice that
    assert max(off[4 * reach:-reach]) < 0.51 / (2 * reach + 1) and max(off[-reach:]) < 1.6 / (2 * reach + 1)


@pytest.mark.parametrize("values", [[3.3, 3.1, 3.1, 3.2], [3.0, 3.2, 3.1, 3.23], [9.0, 5.0, 3.0, 2.9], [2.0, 2.0, 3.0]])
def test_the_end_of_a_smoothed_curve_lies_between_measured_values(values):
    assert min(values[-3:]) <= smooth(values)[-1] <= max(values[-3:])


def test_the_beginning_of_a_smoothed_curve_follows_losses_that_fall_fast():
    """A window over all values from the first on stays above them, and falls when the first ones leave it: a cliff at step 25 of 1000."""
    losses = [3.0 + 6.0 * 0.8**i for i in range(1000)]
    curve = smooth(losses)
    assert max(abs(value - loss) for value, loss in zip(curve, losses)) < 0.2
    falls = [before - after for before, after in pairwise(curve)]
    assert all(later <= earlier + 0.02 for earlier, later in pairwise(falls[4:])), "no step of it is much steeper than the last"


@pytest.mark.parametrize("values", [[], [2.0], [2.0, 1.0], [3.0, 2.0, 1.0]])
def test_few_values_are_smoothed_too(values):
    assert smooth(values) == pytest.approx(values)


def test_a_smoothed_curve_is_that_of_the_means_also_where_values_of_1e12_come_before_those_of_1e_3():
    values = [1e12 / (i + 1) for i in range(400)] + [1e-3 + 1e-6 * (i % 7) for i in range(1600)]
    spans = [min(50, -(-i // 4)) for i in range(1950)]
    means = [fmean(values[i - span : i + span + 1]) for i, span in enumerate(spans)]
    assert smooth(values)[:1950] == pytest.approx(means, rel=1e-14), "sums by pairs: 11 roundings, and no difference of large numbers"


def test_the_curve_of_a_million_steps_takes_a_moment():
    begin = time.process_time()
    assert len(smooth([1.0 / (i + 1) for i in range(10**6)])) == 10**6
    assert time.process_time() - begin < 20, "1 s; with a mean of each window by itself, an hour"
