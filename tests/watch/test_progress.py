"""The progress line: what it says, and when it is drawn."""

import errno
import io
import signal
from dataclasses import replace

import pytest
from rich.console import Console

from rankloom.base.events import Evaluated, Load, Notice, Progressed, Saved, StepDone, Timed
from rankloom.watch.progress import BenchProgress, Pace, Progress, Screen, as_clock, decimal, format_line, printable, si


def done(step, *, seconds=0.5, exposed=0.1, count=1000.0, skipped=False):
    return StepDone(0, step, 3.21, count, 0.5, 1e-3, seconds, exposed, 300_000_000, skipped)


def fold(*events):
    pace = Pace()
    for event in events:
        pace = pace.after(event)
    return pace


def test_the_line_tells_all_that_was_promised():
    line = format_line(done(20), fold(done(20)), 100)
    assert line == "step 20/100  loss 3.210  grad 0.50  2.0k tok/s  0:40 left  comm 20%  300 MB"


def test_the_line_of_a_thousand_steps_fits_in_80_columns():
    assert len(format_line(done(1000), fold(done(1000)), 1000)) < 80


def test_a_skipped_step_says_so():
    assert format_line(done(1, skipped=True), fold(done(1)), 2).endswith("SKIPPED: overflow")


def test_a_mixture_of_experts_tells_its_busiest_expert_what_was_dropped_and_its_auxiliary_losses():
    loads = {"blocks.0.mlp": Load((6, 2), 1), "blocks.1.mlp": Load((4, 4), 0)}
    line = format_line(replace(done(1), experts=loads, auxiliary=0.02), fold(done(1)), 2)
    assert line.endswith("300 MB  experts 1.5x  dropped 6.2%  aux 0.020")
    even = replace(done(1), experts={"mlp": Load((4, 4), 0)})
    assert format_line(even, fold(even), 2).endswith("300 MB  experts 1.0x")


def test_a_line_that_is_too_long_leaves_out_what_matters_least():
    event = replace(done(1234), experts={"mlp": Load((6, 2), 1)}, auxiliary=0.02, count=100_000.0, skipped=True)
    fit = lambda width: format_line(event, fold(event), 20000, width)
    assert fit(None) == ("step 1234/20000  loss 3.210  grad 0.50  200.0k tok/s  2:36:23 left  comm 20%  300 MB  experts 1.5x  "
                         "dropped 12.5%  aux 0.020  SKIPPED: overflow")
    assert fit(125) == fit(None).replace("  300 MB", "").replace("  comm 20%", "")
    assert fit(80) == "step 1234/20000  loss 3.210  2:36:23 left  experts 1.5x  SKIPPED: overflow"
    assert fit(20) == "step 1234/20000  loss 3.210  SKIPPED: overflow", "the console cuts what is still too long"
    for width in range(45, 140):
        assert len(fit(width)) <= max(width, len(fit(20)))


class Gone(io.StringIO):
    """An output that cannot be written."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error


def hang_ups(output):
    """How often a progress whose output this is sends the signal of a closed terminal."""
    told = []
    before = signal.signal(signal.SIGHUP, lambda number, frame: told.append(number))
    try:
        with Progress(Screen(file=output), 2) as progress:
            for event in (Notice(0, "a"), done(1), done(2)):
                progress(event)
    finally:
        signal.signal(signal.SIGHUP, before)
    return len(told)


@pytest.mark.parametrize(("error", "said"), [
    (BrokenPipeError(), ""), (OSError(errno.EIO, "Input/output error"), ""),
    (OSError(errno.ENOSPC, "No space left on device"), "the output cannot be written, so this ends: No space left on device\n")], ids=str)
def test_a_screen_that_is_gone_is_told_once_as_a_closed_terminal_is_and_raises_nothing(error, said, capsys):
    assert hang_ups(Gone(error)) == 1 and capsys.readouterr().err == said


def test_a_screen_and_errors_that_go_to_one_full_disk_raise_nothing_either(monkeypatch):
    """As of `rankloom train ... > log 2>&1`."""
    full = Gone(OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("sys.stderr", full)
    assert hang_ups(full) == 1


def test_a_step_of_no_time_divides_by_nothing():
    event = done(1, seconds=0.0, exposed=0.0)
    assert "0 tok/s" in format_line(event, fold(event), 2)


def test_the_pace_forgets_the_first_step():
    assert fold(done(1, seconds=60.0), done(2, seconds=1.0)).seconds == 1.0


def test_the_pace_is_a_mean_of_the_steps_after_the_first():
    pace = fold(done(1, seconds=60.0), done(2, seconds=1.0), done(3, seconds=2.0), done(4, seconds=3.0))
    assert pace.seconds == pytest.approx(2.0, rel=1e-12)


def test_the_pace_follows_a_run_that_has_become_slower():
    pace = fold(*(done(i, seconds=1.0) for i in range(200)), *(done(i, seconds=3.0) for i in range(100)))
    assert 2.9 < pace.seconds < 3.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3725, "1:02:05"), (86399, "23:59:59"), (180_000, "2d 2h"), (float("inf"), "?")],
)
def test_seconds_are_told_as_a_clock(seconds, text):
    assert as_clock(seconds) == text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(12, 1, "12"), (1234, 1, "1.2k"), (5_600_000, 1, "5.6M"), (268e6, 0, "268 M"), (40e9, 0, "40.0 G"), (0, 0, "0 ")],
)
def test_numbers_have_metric_prefixes(value, digits, text):
    assert si(value, digits) == text


@pytest.mark.parametrize(("value", "text"), [
    (0.0, "0.00"), (0.5, "0.50"), (12345.678, "12345.68"), (1e9, "1.0e+09"), (0.0004, "4.0e-04"),
    (float("nan"), "nan"), (float("inf"), "inf"),
])
def test_no_number_is_hidden_by_its_places_nor_spoils_the_line(value, text):
    assert decimal(value, 2) == text
    assert f"grad {text}  " in format_line(replace(done(20), grad_norm=value), fold(done(20)), 100)


def test_text_cannot_move_the_cursor():
    assert printable("a\x1b[2Jb\r\nc\u009b") == "a\\x1b[2Jb\\r\nc\\x9b"


class Ticks:
    """A clock that is moved by hand."""

    now = 0.0

    def __call__(self):
        return self.now


def run(events_at, *, terminal=False, steps=100, **options):
    out, ticks = io.StringIO(), Ticks()
    console = Console(file=out, force_terminal=terminal, width=60, **options)
    with Progress(console, steps, clock=ticks) as progress:
        for at, event in events_at:
            ticks.now = at
            progress(event)
    return out.getvalue()


def test_without_a_terminal_lines_are_few_and_the_last_step_is_among_them():
    text = run([(step * 0.5, done(step)) for step in range(1, 101)])
    steps = [int(line.split("/")[0].removeprefix("step ")) for line in text.splitlines()]
    assert steps == [*range(1, 100, 10), 100], "one line each 5 s, and the last"
    assert "\x1b" not in text and "\r" not in text


def test_a_line_without_a_terminal_is_not_broken_at_its_width():
    assert len(run([(0, done(1))]).splitlines()) == len(run([(0, Notice(0, "a long path " * 9))]).splitlines()) == 1


def test_evaluations_files_and_notices_are_always_told():
    text = run([(0, done(1)), (0, Evaluated(0, 1, 2.5, 512.0)), (0, Saved(0, "runs/[red]a")), (0, Notice(0, "hello"))])
    assert "validation loss 2.5000 over 512 tokens" in text
    assert "saved runs/[red]a" in text, "square brackets in a path are text, not markup"
    assert "hello" in text


def test_on_a_terminal_of_60_columns_the_line_of_a_mixture_is_not_cut_off():
    event = replace(done(1), experts={"mlp": Load((6, 2), 1)})
    text = run([(0, event)], terminal=True, no_color=True)
    assert "0:50 left  experts 1.5x" in text and "\u2026" not in text
    assert "300 MB  experts 1.5x  dropped 12.5%" in run([(0, event)])


def test_on_a_terminal_one_line_is_drawn_over_and_over():
    text = run([(step, done(step)) for step in range(1, 4)], terminal=True)
    assert text.count("\n") == 1 and text.count("\x1b[2K") >= 2
    assert "step 3/100" in text.rpartition("\x1b[2K")[2]
    assert text.endswith("\x1b[?25h"), "the cursor is shown again"


def test_a_terminal_without_codes_gets_whole_lines_now_and_then(monkeypatch):
    """Of TERM=dumb, as in an editor's shell: rich draws nothing there before the end."""
    monkeypatch.setenv("TERM", "dumb")
    event = replace(done(1), experts={"mlp": Load((6, 2), 1)})
    text = run([(0, event), (1, done(2)), (6, done(3))], terminal=True)
    assert [line.split()[1] for line in text.splitlines()] == ["1/100", "3/100"] and "\x1b" not in text
    assert "300 MB  experts 1.5x" in text, "nothing is left out for the width"


def test_on_a_terminal_drawing_is_rate_limited():
    text = run([(step * 0.001, done(step)) for step in range(1, 90)], terminal=True)
    assert "step 1/" in text and "step 2/" not in text


def test_the_terminal_is_given_back_when_the_run_fails():
    out = io.StringIO()
    with pytest.raises(ZeroDivisionError), Progress(Console(file=out, force_terminal=True), 9) as progress:
        progress(done(1))
        raise ZeroDivisionError
    assert out.getvalue().endswith("\x1b[?25h")


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = run([(0, done(1))], terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[36m" in coloured
    assert "\x1b[36m" not in run([(0, done(1))], terminal=True)


def bench(events_at, *, terminal=False):
    out, ticks = io.StringIO(), Ticks()
    with BenchProgress(Console(file=out, force_terminal=terminal, width=60), 4, clock=ticks) as progress:
        for at, event in events_at:
            ticks.now = at
            progress(event)
    return out.getvalue()


def test_a_bench_tells_what_it_times_how_far_it_is_and_how_long_it_may_take():
    text = bench([(0, Progressed(0, "ring 4 KiB", 0.0)), (10, Progressed(0, "ring 1 MiB", 0.25)), (40, Progressed(0, "ring 1 MiB", 1.0))])
    assert text.splitlines() == [
        "ring 4 KiB on 4 ranks  0%  ? left", "ring 1 MiB on 4 ranks  25%  0:30 left", "ring 1 MiB on 4 ranks  100%  0:00 left"]


def test_a_bench_prints_a_few_lines_only_and_notices_in_full():
    text = bench([(0, Notice(0, "2 nodes")), *((at / 10, Progressed(0, "x", at / 100)) for at in range(101))])
    assert [line.split()[-3] for line in text.splitlines()[1:]] == ["0%", "50%", "100%"], "one each 5 s, and the last"
    assert text.startswith("2 nodes\n")


def test_a_bench_is_one_line_on_a_terminal_and_results_do_not_disturb_it():
    timed = Timed(0, "all_reduce", "ring", 4, 4096, 1.0, 1.0, 1.0, 0)
    text = bench([(0, Progressed(0, "x", 0.0)), (1, timed), (1, Progressed(0, "x", 0.5)), (2, Progressed(0, "x", 1.0))], terminal=True)
    assert text.count("\n") == 1 and "x on 4 ranks  100%" in text.rpartition("\x1b[2K")[2]
