"""What the benchmarks share: start ranks under torchrun, take turns, show and keep tables."""

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

RESULTS = Path(__file__).parent / "results"
COUNTED = 2   # steps of a turn


class Words(argparse.ArgumentParser):
    """The command line of a benchmark, whose text about itself is the help.

    worker: what the processes do that `run_ranks` and `run_alone` start; it writes what it found to `args.out`
    gpu:    it measures one CUDA device, unless --small is given
    """

    def __init__(self, text: str | None, worker: Callable[[argparse.Namespace], None] | None = None, *, gpu: bool = False):
        super().__init__(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._worker, self._gpu = worker, gpu
        if gpu:
            self.add_argument("--small", action="store_true", help="toy size: checks the script, measures nothing")
        if worker:
            self.add_argument("--worker", help=argparse.SUPPRESS)   # the arguments of a process that was started to work, as JSON

    def read(self) -> argparse.Namespace:
        """What was given. A process that was started to work does that, and ends here."""
        args = self.parse_args()
        if self._worker and args.worker:
            self._worker(argparse.Namespace(**json.loads(args.worker)))
            raise SystemExit
        if self._gpu and not args.small and not torch.cuda.is_available():
            raise SystemExit(f"{self.prog} measures one CUDA device, and there is none here; --small runs the script at toy size")
        return args


def count(text: str) -> int:
    """The number in an argument of the command line: a whole one, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)


def counts(text: str) -> list[int]:
    """Several of them, with commas between."""
    return [count(part) for part in text.split(",")]


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A function that reads names with commas between, all of which are known."""
    def read(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return text.split(",")

    return read


def worker_command(script: str, args: argparse.Namespace, **changed: object) -> list[str]:
    """Run a script's worker with the arguments that its command line was given, but for what is changed or added."""
    return [script, "--worker", json.dumps(vars(args) | changed)]


def run_ranks(script: str, ranks: int, args: argparse.Namespace, **changed: object) -> Any:
    """Run the script's worker on `ranks` processes of this host; what rank 0 wrote to `args.out`. The rest as `worker_command`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d",
                   "--rdzv-endpoint", "127.0.0.1:0", "--log-dir", folder, *worker_command(script, args, **changed, out=str(out))]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        return json.loads(out.read_text())


def run_alone(script: str, args: argparse.Namespace, **changed: object) -> dict:
    """Run the script's worker in one process; what it found, or why it could not run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, *worker_command(script, args, **changed, out=str(out))]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)   # what it prints is progress
        if done.returncode:
            return {"error": last_line(done.stderr)}
        return json.loads(out.read_text())


def try_ranks(script: str, ranks: int, args: argparse.Namespace, **changed: object) -> Any:
    """`run_ranks`; or why it could not run."""
    try:
        return run_ranks(script, ranks, args, **changed)
    except SystemExit as error:
        return {"error": last_line(str(error))}


def last_line(text: str) -> str:
    """Of an error's output: the line that says what it was, not that a launcher saw a process fail."""
    lines = [line for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
    return (telling or lines or ["it said nothing"])[-1].strip()[:300]


def pin_to_core(rank: int) -> None:
    """One thread for each rank, on one core: what moves between runs is then the code."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})


def the_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def next_token(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a language model reads of rows [rows, n + 1], and what it shall say: [rows, n] each."""
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def synchronize(device: torch.device) -> None:
    """Wait for the device; a clock read before that measures nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turns(steps: Mapping[str, Callable[[], object]], rounds: int, barrier: Callable[[], object], warm_up: int = 2) -> dict[str, dict]:
    """Run every variant once a round, in rotating order; wall and CPU seconds of each counted step.

    A turn is three steps, of which the first is not counted: it finds the caches full of another variant's model.
    """
    names = list(steps)
    times: dict[str, dict] = {name: {"wall": [], "cpu": []} for name in names}
    for turn in range(warm_up + rounds):
        for name in names[turn % len(names):] + names[: turn % len(names)]:
            steps[name]()
            barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(COUNTED):
                steps[name]()
            barrier()
            if turn >= warm_up:
                times[name]["wall"].append((time.perf_counter() - wall) / COUNTED)
                times[name]["cpu"].append((time.process_time() - cpu) / COUNTED)
    return times


def median_ms(seconds: Sequence[float]) -> float:
    """Their median, in milliseconds."""
    return round(statistics.median(seconds) * 1e3, 1)


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """The median of a/b taken round by round, so that a drift of the machine cancels."""
    return round(statistics.median(x / y for x, y in zip(a, b)), 3)


def show(rows: list[dict]) -> str:
    """Rows as a Markdown table."""
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(row[key]) for key in head) + " |" for row in rows])


def judge(text: str, met: bool) -> str:
    """A figure, and whether it meets its bar."""
    return f"- {text}: {'met' if met else 'MISSED'}"


def machine() -> str:
    """What and when: a figure without these means nothing."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (f"{platform.machine()}, {os.cpu_count()} cores{gpu}, torch {torch.__version__}, Python {platform.python_version()}, "
            f"{datetime.date.today()}, load at start {os.getloadavg()[0]:.2f}")


def busy_cores() -> str:
    """A warning when other processes keep the cores busy now; nothing when they do not."""
    busy = psutil.cpu_percent(interval=1.0)
    return f"WARNING: other processes keep {busy:.0f} % of the cores busy; these figures are disturbed" if busy > 5 else ""


def keep(name: str, where: str, rows: list[dict], note: str = "", shown: str = "") -> None:
    """Write the rows to benchmarks/results/NAME.json, and as a table (or `shown` in its place) to NAME.md; again as more of them come.

    With an empty name nothing is kept.
    """
    if not name:
        return
    RESULTS.mkdir(exist_ok=True)
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    (RESULTS / f"{name}.json").write_text(json.dumps({"command": command, "machine": where, "rows": rows}, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(f"`{command}`\n\n{where}\n\n{shown or show(rows)}\n{note}")
