"""Speed-up and efficiency from measured runs."""

import json

import pytest

from rankloom.base.errors import DataError
from rankloom.watch.scaling import WARM_UP_STEPS, MeasuredRun, measure, scaling_rows, title_of


def write_run(folder, seconds):
    folder.mkdir(exist_ok=True)
    events = [{"event": "StepDone", "step": i, "seconds": s, "count": 100.0, "exposed": s / 4, "loss": 1.0}
              for i, s in enumerate(seconds, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_strong_scaling_efficiency_is_t1_over_n_tn():
    rows = scaling_rows([MeasuredRun(1, 8.0, 100, 0.0), MeasuredRun(2, 5.0, 100, 1.0), MeasuredRun(4, 4.0, 100, 1.0)])
    assert [row.efficiency for row in rows] == pytest.approx([1.0, 8 / (2 * 5), 8 / (4 * 4)], rel=1e-12)
    assert [row.speed_up for row in rows] == pytest.approx([1.0, 1.6, 2.0], rel=1e-12)
    assert [row.communication for row in rows] == [0.0, 0.2, 0.25]


def test_weak_scaling_efficiency_is_t1_over_tn():
    rows = scaling_rows([MeasuredRun(1, 8.0, 100, 0.0), MeasuredRun(2, 10.0, 200, 1.0)])
    assert rows[1].efficiency == pytest.approx(8 / 10, rel=1e-12)
    assert rows[1].speed_up == pytest.approx(1.6, rel=1e-12)


def test_without_a_run_on_one_rank_the_fewest_ranks_are_the_measure():
    rows = scaling_rows([MeasuredRun(4, 2.0, 100, 0.0), MeasuredRun(2, 3.0, 100, 0.0)])
    assert [row.ranks for row in rows] == [2, 4]
    assert rows[0].efficiency == 1.0
    assert rows[1].efficiency == pytest.approx(3 * 2 / (2 * 4), rel=1e-12)


def test_the_first_steps_and_a_slow_one_do_not_count(tmp_path):
    run = write_run(tmp_path / "run", [50.0] * WARM_UP_STEPS + [1.0, 1.0, 9.0])
    assert measure(run, 2) == MeasuredRun(2, 1.0, 100.0, 0.25)


def test_a_run_of_warm_up_only_is_refused(tmp_path):
    run = write_run(tmp_path / "run", [1.0] * WARM_UP_STEPS)
    with pytest.raises(DataError, match="no step after its first 3"):
        measure(run, 1)


def test_the_title_says_beside_what_ranks_are_measured():
    alone, four = (scaling_rows([MeasuredRun(ranks, 1.0, 100, 0.0)]) for ranks in (1, 4))
    assert title_of("3M", alone, weak=True) == "3M, weak scaling"
    assert title_of("3M", four, weak=False) == "3M, strong scaling, beside 4 ranks (efficiency 100% by definition)"
