"""Time every algorithm of a collective, and the backend's own, at many sizes, on the ranks of one group.

At each size, it first checks the result of every algorithm. Then the algorithms take turns. A turn is a barrier and some
milliseconds of calls; its time is that of the slowest rank. Every round of turns has another order, so that a drift of the machine
affects all algorithms alike. The result is the median over the turns.
Read `comm/algorithms.py` first; `comm/fit.py` fits a model to the times.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from rankloom.base.errors import ConfigError, did_you_mean
from rankloom.base.events import Progressed, Sink, Timed
from rankloom.base.quantities import show_bytes
from rankloom.base.topology import Topology
from rankloom.comm.algorithms import ALGORITHMS, on_nodes
from rankloom.comm.price import BACKEND, algorithms_on, needs_tags
from rankloom.world.group import Group

NAMES = [*dict.fromkeys(chain(*ALGORITHMS.values(), *on_nodes(()).values())), BACKEND]   # of all algorithms, each once
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
SECONDS_PER_TURN = 0.003    # so that the barrier and the clock weigh little
CALLS_PER_TURN = 100        # at most
SECONDS_PER_SIZE = 1.0      # for one algorithm; then fewer turns, but
FEWEST_TURNS = 3
WARM_UP = 3                 # calls
QUARTILES = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64, device="cpu")
LARGEST = 1 << 40           # bytes
FIXED_BYTES = 1 << 20       # counted for each size beside its bytes, to estimate progress


@dataclass(frozen=True, slots=True)
class Study:
    """What to time. Made by `plan_bench`."""

    collectives: tuple[str, ...]
    algorithms: tuple[str, ...]   # names; a collective without one of them skips it
    sizes: tuple[int, ...]        # bytes, of the longer side
    dtype: str
    turns: int

    def subjects(self, collective: str, topology: Topology) -> list[str]:
        """The algorithms of one collective to time, the backend's own last."""
        return [name for name in (*algorithms_on(collective, topology), BACKEND) if not self.algorithms or name in self.algorithms]


def plan_bench(collectives: Sequence[str], algorithms: Sequence[str], sizes: Sequence[int], dtype: str, turns: int) -> Study:
    """Check the names and the number of turns. An empty list of algorithms means all. raises: ConfigError"""
    if not collectives:
        raise ConfigError(f"there is no collective to time; name one or more of {', '.join(ALGORITHMS)}")
    for what, names, known in (("collective", collectives, ALGORITHMS), ("algorithm", algorithms, NAMES), ("dtype", [dtype], DTYPES)):
        for name in names:
            if name not in known:
                raise ConfigError(f"there is no {what} {name!r}. {did_you_mean(name, known)}")
    if turns < 1:
        raise ConfigError(f"turns {turns}: must be 1 or more")
    if max(sizes, default=0) > LARGEST:
        raise ConfigError(f"a size of {max(sizes):,} bytes: at most {show_bytes(LARGEST)}, and every rank needs a few times that")
    return Study(tuple(dict.fromkeys(collectives)), tuple(algorithms), tuple(sizes), dtype, turns)


def expect_subjects(study: Study, topology: Topology) -> None:
    """Raise ConfigError for one rank alone, an algorithm that none of the collectives has on this topology, and a collective with none."""
    if topology.size == 1:
        raise ConfigError("one rank has nobody to talk to; start 2 or more")
    subjects = {collective: study.subjects(collective, topology) for collective in study.collectives}
    for name in study.algorithms:
        if not any(name in names for names in subjects.values()):
            is_flat = any(name in table for table in ALGORITHMS.values())
            needs = "" if is_flat else "; it needs several nodes of several ranks, see --topology"
            raise ConfigError(f"there is no {name} {' or '.join(study.collectives)} on {topology}{needs}")
    for collective, names in subjects.items():
        if not names:
            raise ConfigError(f"{collective} has none of the algorithms {', '.join(study.algorithms)}. "
                              f"Known: {', '.join(algorithms_on(collective, topology))}, {BACKEND}.")


def run_study(study: Study, group: Group, sink: Sink) -> list[Timed]:
    """Run a study; every rank calls it and gets the same times. Each result goes to `sink` as it comes.

    raises: ConfigError for an algorithm that cannot run here
    """
    expect_subjects(study, group.topology)
    cases = [(collective, size) for collective in study.collectives for size in distinct_sizes(collective, study, group.size)]
    total, done, found = sum(size + FIXED_BYTES for _, size in cases), 0.0, []
    for collective, size in cases:
        share = (size + FIXED_BYTES) / total
        tell = partial(_tell, sink, group, f"{collective} {show_bytes(size)}", done, share)
        for timed in time_size(collective, size, study, group, tell):
            found.append(timed)
            sink(timed)
        done += share
    return found


def _tell(sink: Sink, group: Group, what: str, done: float, share: float, part: float) -> None:
    sink(Progressed(group.rank, what, done + part * share))


def time_size(collective: str, nbytes: int, study: Study, group: Group, tell: Callable[[float], None]) -> list[Timed]:
    """Check, then time the algorithms of one collective at one size. tell: called with the fraction done, 0 to 1"""
    names, dtype = study.subjects(collective, group.topology), DTYPES[study.dtype]
    if not study.algorithms and group.in_order:
        names = [name for name in names if not needs_tags(collective, name, group.topology)]
    algorithms = [algorithm(collective, name, group.topology) for name in names]
    n = elements(collective, nbytes, dtype, group.size)
    wrong = [wrong_elements(run, collective, n, dtype, group) for run in algorithms]
    x = torch.zeros_like(operand(collective, n, dtype, group))   # sums of zeros stay zero, however often they are summed
    turns = take_turns([partial(run, x, group) for run in algorithms], study.turns, group, tell)
    found = []
    for name, seconds, bad in zip(names, turns, wrong):
        low, middle, high = torch.tensor(seconds, dtype=torch.float64, device="cpu").quantile(QUARTILES).tolist()
        found.append(Timed(group.rank, collective, name, group.size, n * dtype.itemsize, middle, low, high, bad))
    return found


def take_turns(calls: Sequence[Callable[[], object]], turns: int, group: Group, tell: Callable[[float], None]) -> list[list[float]]:
    """For each of `calls`, the seconds of one call in each turn. Slow calls get fewer turns than asked for."""
    for call in calls:
        _seconds(call, WARM_UP, group)
    pace = [seconds for (seconds,) in _slowest([[_seconds(call, 1, group)] for call in calls], group)]
    counts = [max(1, min(CALLS_PER_TURN, int(SECONDS_PER_TURN / seconds))) for seconds in pace]
    longest = max(count * seconds for count, seconds in zip(counts, pace))
    turns = max(min(turns, FEWEST_TURNS), min(turns, int(SECONDS_PER_SIZE / longest)))
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(turns):
        tell(turn / turns)
        for at in range(turn, turn + len(calls)):
            which = at % len(calls)
            seconds[which].append(_seconds(calls[which], counts[which], group))
    tell(1.0)
    return _slowest(seconds, group)


def _seconds(call: Callable[[], object], count: int, group: Group) -> float:
    """A barrier, then the mean time of `count` calls on this rank."""
    group.barrier(label="bench")
    begin = time.perf_counter()
    for _ in range(count):
        call()
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    return (time.perf_counter() - begin) / count


def _slowest(seconds: list[list[float]], group: Group) -> list[list[float]]:
    """The maximum of each number over the ranks."""
    return group.all_reduce(torch.tensor(seconds, dtype=torch.float64, device=group.device), "max", label="bench: times").tolist()


# ------------------------------------------------------------------ what is called, on what, with which result


def algorithm(collective: str, name: str, topology: Topology) -> Callable[[Tensor, Group], Tensor]:
    """The function (x, group) of a collective's algorithm."""
    if name != BACKEND:
        return algorithms_on(collective, topology)[name].run
    return lambda x, group: getattr(group, collective)(x)


def elements(collective: str, nbytes: int, dtype: torch.dtype, ranks: int) -> int:
    """How many elements of the longer side fit in `nbytes`: at least one for each rank; a multiple of the ranks where they share it."""
    n = nbytes // dtype.itemsize
    return max(1, n) if collective in ("all_reduce", "broadcast") else max(1, n // ranks) * ranks


def distinct_sizes(collective: str, study: Study, ranks: int) -> list[int]:
    """The sizes of a study, without those that round to the same number of elements as an earlier one."""
    first: dict[int, int] = {}
    for size in study.sizes:
        first.setdefault(elements(collective, size, DTYPES[study.dtype], ranks), size)
    return list(first.values())


def operand(collective: str, n: int, dtype: torch.dtype, group: Group) -> Tensor:
    """This rank's input: small whole numbers, whose sums are exact in every dtype."""
    mine = n // group.size if collective == "all_gather" else n
    return _numbers(group.rank, mine, group.device).to(dtype)


def expected(collective: str, n: int, dtype: torch.dtype, group: Group) -> Tensor:
    """The correct result on this rank, computed without communication."""
    rank, p, device = group.rank, group.size, group.device
    if collective == "broadcast":
        return _numbers(0, n, device).to(dtype)
    if collective == "all_gather":
        return torch.cat([_numbers(other, n // p, device) for other in range(p)]).to(dtype)
    if collective == "all_to_all":
        return torch.cat([_numbers(other, n, device).chunk(p)[rank] for other in range(p)]).to(dtype)
    total = torch.zeros(n, dtype=torch.int32, device=device)
    for other in range(p):
        total += _numbers(other, n, device)
    return (total if collective == "all_reduce" else total.chunk(p)[rank]).to(dtype)


def _numbers(rank: int, n: int, device: torch.device) -> Tensor:
    """0, 1 or 2, in another order on each rank."""
    return (torch.arange(n, device=device, dtype=torch.int32) * (rank + 1) + rank).remainder_(3)


def wrong_elements(run: Callable[[Tensor, Group], Tensor], collective: str, n: int, dtype: torch.dtype, group: Group) -> int:
    """How many elements of the result are wrong, summed over all ranks."""
    result, right = run(operand(collective, n, dtype, group), group), expected(collective, n, dtype, group)
    same_shape = result.shape == right.shape and result.dtype == right.dtype
    wrong = int((result != right).sum()) if same_shape else right.numel()
    return int(group.all_reduce(torch.tensor([wrong], device=group.device), label="bench: wrong elements"))
