"""The pictures of a run: they are drawn, labelled, and hold what was measured."""

import json

import pytest
from matplotlib.figure import Figure

from rankloom.base.errors import DataError
from rankloom.base.events import Timed
from rankloom.watch.plots import COLOURS, MARKERS, plot_bench, plot_loss, plot_scaling
from rankloom.watch.scaling import MeasuredRun, scaling_rows


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, to look into."""
    figures, save = [], Figure.savefig

    def keep(figure, *args, **options):
        figures.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def write_run(folder, steps=5):
    events = [{"event": "StepDone", "step": i, "loss": None if i == 3 else 9.0 - i} for i in range(1, steps + 1)]
    events.append({"event": "Evaluated", "step": 5, "loss": 4.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "summary.json").write_text('{"trigram_loss": 5.25}')


def test_the_loss_plot_shows_training_validation_and_the_trigram(tmp_path, drawn):
    write_run(tmp_path)
    path = plot_loss(tmp_path)
    axes = drawn[0].axes[0]
    lines = {str(line.get_label()).partition(",")[0]: line for line in axes.get_lines()}
    assert path.read_bytes().startswith(b"\x89PNG")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss (nats per token)")
    assert list(lines["validation"].get_ydata()) == [4.5]
    assert list(lines["trigram model"].get_ydata()) == [5.25, 5.25]
    assert len([label for label in lines if label == "training"]) == 1


def test_a_step_without_a_finite_loss_is_left_out(tmp_path, drawn):
    write_run(tmp_path)
    plot_loss(tmp_path)
    line = drawn[0].axes[0].get_lines()[0]
    assert list(line.get_xdata()) == [1, 2, 4, 5] and line.get_label() == "training, each step (1 without a finite loss)"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("losses", [[1e308] * 50, [1.7e308, -1.7e308] * 20])
def test_losses_near_the_largest_number_are_drawn_too(tmp_path, drawn, losses):
    events = [{"event": "StepDone", "step": i, "loss": loss} for i, loss in enumerate(losses, 1)]
    events += [{"event": "Evaluated", "step": 1, "loss": loss} for loss in (losses[0], None)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert plot_loss(tmp_path).read_bytes().startswith(b"\x89PNG")


def test_a_run_of_one_step_is_a_point_at_a_whole_number(tmp_path, drawn):
    (tmp_path / "metrics.jsonl").write_text('{"event": "StepDone", "step": 1, "loss": 5.5}\n')
    plot_loss(tmp_path)
    axes = drawn[0].axes[0]
    assert axes.get_lines()[1].get_marker() == "o", "a line of one point is not seen"
    assert all(tick == int(tick) for tick in axes.get_xticks())


def test_the_name_of_a_run_is_not_cut_off_however_long_it_is(tmp_path, drawn):
    run = tmp_path / ("W" * 100)
    run.mkdir()
    write_run(run)
    plot_loss(run)
    drawn[0].draw_without_rendering()   # at the dots per inch of the figure, which are not those of the file
    title = drawn[0].axes[0].title.get_window_extent()
    assert title.x0 >= 0 and title.x1 <= drawn[0].bbox.width


def test_a_run_without_a_step_has_no_plot(tmp_path):
    write_run(tmp_path, steps=0)
    with pytest.raises(DataError, match="no step was finished"):
        plot_loss(tmp_path)


def test_a_picture_that_cannot_be_written_is_named(tmp_path):
    write_run(tmp_path)
    (tmp_path / "loss.png").mkdir()
    with pytest.raises(DataError, match=r"loss.png: cannot be written"):
        plot_loss(tmp_path)


def test_the_scaling_plot_shows_speed_up_beside_the_ideal(tmp_path, drawn):
    rows = scaling_rows([MeasuredRun(1, 8.0, 100, 0.0), MeasuredRun(2, 5.0, 100, 1.0)])
    path = plot_scaling(rows, tmp_path / "scale.png", "11M")
    left, right = drawn[0].axes
    ideal, measured = left.get_lines()
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(ideal.get_ydata()) == [1, 2]
    assert list(measured.get_ydata()) == [1.0, 1.6]
    assert [bar.get_height() for bar in right.patches] == [0.0, 20.0]
    assert (left.get_xlabel(), right.get_xlabel()) == ("ranks (log scale)", "ranks")


def timed(algorithm, ranks, nbytes, seconds):
    return Timed(0, "all_reduce", algorithm, ranks, nbytes, seconds, seconds / 2, seconds * 2, 0)


def test_a_scaling_plot_without_one_rank_says_what_is_the_measure(tmp_path, drawn):
    for first in (1, 2):
        plot_scaling(scaling_rows([MeasuredRun(n, 1.0 / n, 100, 0.0) for n in (first, 4)]), tmp_path / "scale.png", "1M")
    assert [figure.axes[0].get_ylabel() for figure in drawn] == [
        "speed-up over one rank (log scale)", "speed-up; 2 ranks count as 2 (log scale)"]


@pytest.mark.parametrize("seconds", [1.1, 0.55, 5.0])
def test_every_measured_speed_up_lies_between_two_ticks_and_is_written_beside_its_point(tmp_path, drawn, seconds):
    """On 2 ranks: 0.91, 1.82, 0.2."""
    plot_scaling(scaling_rows([MeasuredRun(1, 1.0, 100, 0.0), MeasuredRun(2, seconds, 100, 0.0)]), tmp_path / "scale.png", "1M")
    axes = drawn[0].axes[0]
    low, high = axes.get_ylim()
    seen = [tick for tick in axes.get_yticks() if low <= tick <= high]
    assert min(seen) <= 1 / seconds <= max(seen) and len(seen) >= 2
    assert [text.get_text() for text in axes.texts] == ["1", f"{1 / seconds:.3g}"]


@pytest.mark.parametrize("ranks", [(1, 2, 4), (1, 64), (3,)], ids=str)
def test_no_number_in_a_scaling_plot_lies_on_the_frame(tmp_path, drawn, ranks):
    plot_scaling(scaling_rows([MeasuredRun(n, 1.0 / n, 100, 0.0) for n in ranks]), tmp_path / "scale.png", "1M")
    axes = drawn[0].axes[0]
    frame = axes.get_window_extent()
    for text in axes.texts:
        box = text.get_window_extent()
        assert frame.y0 < box.y0 and box.y1 < frame.y1, f"{text.get_text()} lies on it"


def test_no_line_runs_through_a_number_in_a_scaling_plot(tmp_path, drawn):
    plot_scaling(scaling_rows([MeasuredRun(1, 1.0, 100, 0.0), MeasuredRun(2, 0.43, 100, 0.0)]), tmp_path / "scale.png", "1M")
    axes = drawn[0].axes[0]
    for text in axes.texts:
        assert text.get_bbox_patch().get_facecolor() == (1, 1, 1, 1) and text.zorder > max(line.zorder for line in axes.lines)


def test_a_picture_that_cannot_be_written_whole_leaves_the_old_one_there(tmp_path, monkeypatch):
    write_run(tmp_path)
    (tmp_path / "loss.png").write_text("the old one")

    def fill_the_disk(figure, path, **options):
        path.write_bytes(b"half of")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", fill_the_disk)
    with pytest.raises(DataError, match="No space left"):
        plot_loss(tmp_path)
    assert (tmp_path / "loss.png").read_text() == "the old one" and not list(tmp_path.glob(".loss*"))


def test_the_bench_plot_shows_time_and_busbw_over_size_and_the_model_as_thin_lines(tmp_path, drawn):
    times = [timed(name, ranks, size, size * 1e-9) for ranks in (4, 2) for size in (1 << 20, 1 << 10) for name in ("tree", "ring")]
    curves = {(4, "ring"): [(1 << 10, 1e-6), (1 << 20, 2e-3)]}
    path = plot_bench(times, curves, tmp_path / "bench.png", "all_reduce")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    above, below = drawn[0].axes[:2], drawn[0].axes[2:]
    assert [axes.get_title() for axes in above] == ["2 ranks", "4 ranks"]
    lines = {str(line.get_label()): line for line in above[1].get_lines()}
    assert list(lines["ring"].get_xdata()) == [1 << 10, 1 << 20] and list(lines["ring"].get_ydata()) == [1.024e-6, (1 << 20) * 1e-9]
    rates = below[1].get_lines()[0].get_ydata()
    assert list(rates) == pytest.approx([1.5, 1.5], rel=1e-12), "busbw on 4 ranks: 1 GB/s x 2(p-1)/p"
    model = [line for line in above[1].get_lines() if line.get_linestyle() == "--" and len(line.get_xdata())]
    assert [list(line.get_ydata()) for line in model] == [[1e-6, 2e-3]]
    assert model[0].get_color() == lines["ring"].get_color() and model[0].get_linewidth() < lines["ring"].get_linewidth()
    assert all(axes.get_xscale() == axes.get_yscale() == "log" for axes in (*above, *below))


def test_an_algorithm_has_one_colour_on_any_number_of_ranks_though_it_is_missing_on_some(tmp_path, drawn):
    times = [timed("ring", 2, 8, 1e-3), timed("tree", 2, 8, 1e-3), timed("tree", 4, 8, 1e-3)]
    plot_bench(times, {}, tmp_path / "bench.png", "all_reduce")
    colours = [{str(line.get_label()): line.get_color() for line in axes.get_lines()}.get("tree") for axes in drawn[0].axes[:2]]
    assert colours[0] == colours[1]
    assert len(COLOURS) == len(set(COLOURS)) == len(MARKERS)


def test_ticks_between_powers_of_ten_are_written_as_the_others_are(tmp_path, drawn):
    plot_bench([timed("ring", 2, size, seconds) for size, seconds in ((16, 4e-4), (4096, 7e-4))], {}, tmp_path / "bench.png", "all_reduce")
    ticks = [text.get_text() for axes in drawn[0].axes for text in (*axes.get_ymajorticklabels(), *axes.get_yminorticklabels())]
    assert "400 us" in ticks and not [text for text in ticks if "10^" in text]
