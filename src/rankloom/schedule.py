"""What `rankloom schedule` does apart from printing: make or read a schedule, check it, simulate it, draw it, save it.

No tensors, so no torch. Read parallel/pipeline/ in the order actions, schedules, passes, check, simulate, draw.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from math import isfinite
from pathlib import Path

from rich.table import Table
from rich.text import Text

from rankloom.base.errors import ConfigError, did_you_mean
from rankloom.base.files import expect_file, saving
from rankloom.parallel.pipeline.actions import Schedule, parse_schedule
from rankloom.parallel.pipeline.check import check
from rankloom.parallel.pipeline.draw import TRACE_UNIT, WIDEST, as_svg, as_trace, grid, legend, say_squeezed, shortest
from rankloom.parallel.pipeline.passes import send_gradients_first
from rankloom.parallel.pipeline.schedules import SCHEDULES
from rankloom.parallel.pipeline.search import SEARCHED, named_schedule
from rankloom.parallel.pipeline.simulate import Costs, Timeline, simulate_schedule
from rankloom.watch.tables import folding_table

STAGES, MICROBATCHES = 4, 8
MOST = 1024   # stages; to make, check and simulate more takes minutes
Drawing = Callable[[Timeline], Iterator[str | Text]]   # the rows, and what they mean
UNITS = "computes, waits: time, in units of --costs; sends: messages; activations: 1 is those of all stages of the rank for one micro-batch"


def known() -> Table:
    """Every schedule by name, with the number of stages on a rank."""
    table = folding_table("schedule", "stages a rank", "in short")
    for name, one in SCHEDULES.items():
        table.add_row(name, f"{one.fewest}{'' if one.most else ' or more'}", one.says)
    for name, memory in SEARCHED.items():
        table.add_row(name, "1", f"made for the given costs, with {memory:g} times the memory of 1F1B")
    return table


def find_schedule(name: str, stages: int | None, microbatches: int | None, chunks: int | None, costs: str | None = None) -> Schedule:
    """A schedule by name, also one made for the costs, or one from a .txt file. It is checked. raises: ConfigError"""
    if not name.endswith(".txt"):
        stages = STAGES if stages is None else stages
        microbatches = MICROBATCHES if microbatches is None else microbatches
        if stages > MOST:
            raise ConfigError(f"--stages {stages}: expected at most {MOST}; a schedule of fewer looks alike")
        schedule = named_schedule(name, stages, microbatches, chunks, read_costs(costs, stages) if name in SEARCHED else None)
        check(schedule)
        return schedule
    given = [word for word, value in (("--stages", stages), ("--microbatches", microbatches), ("--chunks", chunks)) if value is not None]
    if given:
        raise ConfigError(f"{name} already defines stages and micro-batches; leave out {', '.join(given)}")
    text = _read(Path(name))
    try:
        schedule = parse_schedule(text)
        check(schedule)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return schedule


COSTS = ("forward", "input", "weight", "message", "send")   # of a file


def read_costs(text: str | None, stages: int) -> Costs:
    """Parse "F,I,W" or "F,I,W,message", the times of a stage; or a .json file with a list for each, and perhaps `send`. raises: ConfigError

    >>> read_costs("2,2,1,0.1", stages=2)
    Costs(forward=(2.0, 2.0), input=(2.0, 2.0), weight=(1.0, 1.0), message=0.1, send=0.0)
    """
    if text is None:
        return Costs.even(stages)
    read = _read(Path(text)) if text.endswith(".json") else None
    try:
        if read is not None:
            said = json.loads(read)
            if unknown := sorted(said.keys() - COSTS):
                raise ConfigError(f"there is no {unknown[0]!r} in such a file. {did_you_mean(unknown[0], COSTS)}")
            if not all(isinstance(said[key], list) for key in ("forward", "input", "weight")):
                raise ValueError
            forward, back, weight = (tuple(map(float, said[key])) for key in ("forward", "input", "weight"))
            return Costs(forward, back, weight, float(said.get("message", 0)), send=float(said.get("send", 0)))
        numbers = [float(word) for word in text.split(",")]
        if not 3 <= len(numbers) <= 4:
            raise ValueError
        return Costs.even(stages, forward=numbers[0], input=numbers[1], weight=numbers[2], message=sum(numbers[3:]))
    except ConfigError as error:
        raise ConfigError(f"--costs {text}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):   # the last: brackets in brackets
        raise ConfigError(f"--costs {text}: expected F,I,W or F,I,W,message, such as 18.5,18.1,9.3,0.6; or a .json file with lists "
                          "forward, input and weight (a number for each stage), and perhaps message and send") from None


def drawing(timeline: Timeline, columns: int, coloured: bool) -> Iterator[str | Text]:
    """The rows, what a column is if they are squeezed, and the legend."""
    yield grid(timeline, columns, coloured)
    if squeezed := say_squeezed(timeline, columns, coloured):
        yield squeezed
    yield legend(timeline, coloured)


def picture(timeline: Timeline, draw: Drawing) -> Iterator[str | Text | Table]:
    """The drawing, and the numbers of each rank. Activations as in docs/pipeline.md: 1 is a micro-batch in a rank's whole part."""
    yield from draw(timeline)
    table = folding_table("rank", "stages", "computes", "waits", "sends", "most activations")
    for rank, actions in enumerate(timeline.schedule.ranks):
        stages, sends = timeline.schedule.held_by(rank), sum(a.kind.startswith("SEND") for a in actions)
        times = (f"{timeline.busy[rank]:g}", f"{timeline.makespan - timeline.busy[rank]:g}")
        table.add_row(str(rank), ", ".join(map(str, stages)), *times, str(sends), f"{timeline.peaks[rank] / len(stages):.3g}")
    yield table
    yield UNITS
    yield _waits(timeline)
    if timeline.own_bubble < timeline.bubble - 0.0005:
        yield f"bubble {timeline.own_bubble:.1%} where a rank may begin the next step before the others have ended this one"


def as_run(schedule: Schedule, costs: Costs, draw: Drawing) -> Iterator[str | Text]:
    """The rows and the bubble as `rl.pipeline` and the engine run the schedule; nothing if they run it unchanged."""
    runs = send_gradients_first(schedule)
    if runs == schedule:
        return
    timeline = simulate_schedule(runs, costs)
    yield "as rl.pipeline and the engine run it: a gradient leaves before the products for the weights are computed"
    yield from draw(timeline)
    yield _waits(timeline)


def _waits(timeline: Timeline) -> str:
    return f"a step takes {timeline.makespan:g}; bubble: ranks wait {timeline.bubble:.1%} of the time"


def written(timeline: Timeline, title: str, svg: Path | None, trace: Path | None, save: Path | None) -> Iterator[str]:
    """Write the files asked for, with a line for each. raises: StorageError"""
    texts = ((svg, lambda: as_svg(timeline, title)), (trace, lambda: json.dumps(as_trace(timeline))),
             (save, lambda: f"{timeline.schedule}\n"))
    for path, make in texts:
        if path is None:
            continue
        with saving(path) as temporary:
            temporary.write_text(make(), encoding="utf-8")
        yield f"saved {path}"


def show_schedule(name: str, *, stages: int | None, microbatches: int | None, chunks: int | None, costs: str | None, columns: int,
                  coloured: bool, svg: Path | None, trace: Path | None, save: Path | None) -> Iterator[str | Text | Table]:
    """The whole output of `rankloom schedule show`. columns: width of the terminal"""
    for flag, path, ending in (("--svg", svg, ".svg"), ("--trace", trace, ".json"), ("--save", save, ".txt")):
        expect_file(flag, path, ending)   # three endings, so all names differ
    schedule = find_schedule(name, stages, microbatches, chunks, costs)
    of_stages = read_costs(costs, schedule.stages)
    timeline = simulate_schedule(schedule, of_stages)
    if not isfinite(timeline.makespan * len(schedule.ranks) * TRACE_UNIT):   # the largest number computed
        raise ConfigError(f"--costs {costs}: together they are more than a number can hold; give them in a larger unit")
    if not isfinite(WIDEST / shortest(timeline)):
        raise ConfigError(f"--costs {costs}: one is too small to draw; give them in a smaller unit")
    title = f"{name}: {schedule.stages} stages on {len(schedule.ranks)} ranks, {schedule.microbatches} micro-batches"
    yield title
    draw = partial(drawing, columns=columns, coloured=coloured)
    yield from picture(timeline, draw)
    if not name.endswith(".txt"):   # a file is run as written
        yield from as_run(schedule, of_stages, draw)
    yield from written(timeline, title, svg, trace, save)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot be read (it is no text)") from None
