"""What a run folder tells about its run, read back from `metrics.jsonl` and `summary.json`."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rankloom.base.errors import DataError


@dataclass(frozen=True, slots=True)
class History:
    """The steps and the evaluations of a run, oldest first, each as the fields of its event."""

    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any]


def read_history(run: Path) -> History:
    """Read a run folder; a last line that was cut by a kill is left out.

    raises: DataError when there is no run, or when a line in the middle is damaged
    """
    path = run / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); is {run} a run folder?") from None
    events = [_event(path, number, line) for number, line in enumerate(lines[:-1], 1)]
    return History(
        [event for event in events if event.get("event") == "StepDone"],
        [event for event in events if event.get("event") == "Evaluated"],
        _summary(run / "summary.json"),
    )


def _event(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise DataError(f"{path}:{number}: not a JSON object; the file is damaged")
    return event


def _summary(path: Path) -> dict[str, Any]:
    """The summary of a finished run; empty for one that did not finish."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def smooth(values: list[float], reach: int | None = None) -> list[float]:
    """The mean of each value and its neighbours, as many on either side: it neither lags nor leads.

    At the end there are no neighbours to come. The straight line through the last full window stands for them, so that the curve ends
    where the values are going, and not at whatever the last one happens to be.

    reach: neighbours on a side; a fortieth of all when left out. The i-th value has i/4 at most: losses fall fastest in the beginning, and
           a window that holds the first, greatest ones until they all leave it at once would show a cliff that is not there

    >>> smooth([1.0, 2.0, 6.0, 2.0], reach=1)
    [1.0, 3.0, 3.3333333333333335, 3.3333333333333335]
    """
    reach = max(1, len(values) // 40) if reach is None else reach
    whole = max(0, len(values) - reach)   # so many have neighbours to come
    spans = [min(reach, -(-i // 4)) for i in range(whole)]
    end = _line(values[-2 * reach - 1 :])
    return [fmean(values[i - span : i + span + 1]) for i, span in enumerate(spans)] + end[len(end) - len(values) + whole :]


def _line(values: list[float]) -> list[float]:
    """The straight line that lies nearest to the values, at their places."""
    places = [i - (len(values) - 1) / 2 for i in range(len(values))]
    slope = sum(x * y for x, y in zip(places, values)) / max(1e-9, sum(x * x for x in places))
    return [fmean(values) + slope * x for x in places] if values else []
