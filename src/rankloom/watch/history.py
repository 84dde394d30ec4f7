"""Read the history of a run from its folder: `metrics.jsonl` and `summary.json`."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankloom.base.errors import DataError
from rankloom.base.files import json_object

KINDS = ("StepDone", "Evaluated")   # the events of a history
USED = ("step", "loss", "count", "seconds", "exposed")   # of an event; its others may be thousands of numbers, such as the loads of experts


@dataclass(frozen=True, slots=True)
class History:
    """The steps and evaluations of a run, oldest first, each as those fields of its event that are USED."""

    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any]


def read_history(run: Path) -> History:
    """Read a run folder, line by line: its metrics may be larger than memory. Leaves out a last line that is incomplete because the run
    was killed.

    raises: DataError when there is no run, or when a line in the middle is damaged
    """
    path = run / "metrics.jsonl"
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    try:
        with path.open("rb") as lines:
            for kind, event in _events(path, lines):
                found[kind].append(event)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); is {run} a run folder?") from None
    return History(found["StepDone"], found["Evaluated"], json_object(run / "summary.json"))   # empty if the run did not finish


def _events(path: Path, lines: Iterable[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The kind and the USED fields of each step and evaluation."""
    for number, line in enumerate(lines, 1):
        event = _event(path, number, line) if line.endswith(b"\n") else {}
        if (kind := event.get("event")) in KINDS:
            yield kind, {key: event[key] for key in USED if key in event}


def _event(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise DataError(f"{path}:{number}: not a JSON object; the file is damaged")
    if event.get("event") in KINDS and not {"step", "loss"} <= event.keys():
        raise DataError(f"{path}:{number}: lacks the step or its loss; the file is damaged")
    return event


def smooth(values: list[float], reach: int | None = None) -> list[float]:
    """The mean of each value and its neighbours, the same number on both sides, so that the curve neither lags nor leads.

    The last values have too few neighbours. Their curve is the straight line through the last full window, so that it ends on the
    trend, not at the last value. It stays between the least and the greatest value of that window.

    reach: neighbours on each side; left out, a fortieth of all values. The i-th value has at most i/4: losses fall fastest in the
           beginning, and a wide window would show a false cliff where it leaves the first, largest ones

    >>> smooth([1.0, 2.0, 6.0, 2.0], reach=1)
    [1.0, 3.0, 3.3333333333333335, 3.3333333333333335]
    """
    reach = max(1, len(values) // 40) if reach is None else reach
    whole = max(0, len(values) - reach)   # the number of values with enough neighbours after them
    spans = np.minimum(reach, -(-np.arange(whole) // 4))
    window = values[-2 * reach - 1 :]
    least, greatest = min(window, default=0.0), max(window, default=0.0)
    end = [min(max(value, least), greatest) for value in _line(window)]
    return _means(values, spans) + end[len(end) - len(values) + whole :]


def _means(values: list[float], spans: NDArray[np.int64]) -> list[float]:
    """The mean of values[i - spans[i] : i + spans[i] + 1] for each i. O(n log n).

    Sums of 1, 2, 4, 8 ... neighbours are put together. Differences of running sums would lose small values that follow large ones.
    """
    start, length = np.arange(len(spans)) - spans, 2 * spans + 1
    total = np.zeros(len(spans))
    sums, width = np.array(values, dtype=np.float64), 1   # sums[i]: of values[i : i + width]
    while width <= length.max(initial=0):
        takes = (length & width) != 0
        total[takes] += sums[start[takes]]
        start[takes] += width
        sums, width = sums[:-width] + sums[width:], 2 * width
    return (total / length).tolist()   # type: ignore[no-any-return]


def _line(values: list[float]) -> list[float]:
    """The least-squares straight line through the values, at their places."""
    places = [i - (len(values) - 1) / 2 for i in range(len(values))]
    slope = sum(x * y for x, y in zip(places, values)) / max(1e-9, sum(x * x for x in places))
    middle = fmean(values) if values else 0.0
    return [middle + slope * x for x in places]
