"""One training step of a sharded GPT: FSDP2, DeepSpeed's ZeRO, ours at stages 1 to 3, torch DDP and no communication, in turn.

    python benchmarks/sharded.py                                  # 2 ranks, fp32 and bf16, then peak memory with 1, 2 and 4 ranks
    python benchmarks/sharded.py --precision bf16 --no-memory
    python benchmarks/sharded.py --variants FSDP2 "stage 3"       # those whose names hold one of these
    python benchmarks/sharded.py --model 1M --rounds 1 --name ""  # does everything, measures and keeps nothing

A step is forward, backward, clipping by the global norm and fused AdamW, of the 27M GPT of width 512 with 128 tokens a rank. All
variants of torch and of rankloom live in the same processes, DeepSpeed's in processes of its own that sleep meanwhile; one thread and one
core a rank. Every round gives each variant a turn of three steps, of which two are counted, in rotating order; ratios are taken inside
a round.

The peers get two settings each and the better one counts: FSDP2 with blocks freed after forward and kept (in bf16 by its mixed
precision; under autocast over fp32 weights, which its bars were set with, it stands apart), DeepSpeed with fused AdamW and with its own
CPU Adam. Of DeepSpeed's buckets, overlap and prefetching those are taken that need the least CPU time on such a machine. Its
environment is made on first use in build/deepspeed, on the torch that is installed here.

Memory is that of all ranks together, one variant in its processes: proportional set sizes, in which a page that several ranks map counts
once, read many times a step, the largest sum. "Before" is what the processes held before there was a model, the libraries and their kernels
loaded. Part of the rest is what glibc's heap hoards, most of all of the peers, whose wholes lie in it: MALLOC_MMAP_THRESHOLD_=1048576
before the command shows it without.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common import Words, busy_cores, count, counts, judge, keep, machine, median_ms, median_ratio, names_of, show
from pool import Pool

HERE = Path(__file__).parent
DEEPSPEED = HERE.parent / "build" / "deepspeed"
FREE, KEEP = "reshard", "keep"
Walls = dict[str, list[float]]   # variant -> seconds per step of each round


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    kind: str                # "own loop", "engine", "torch DDP", "FSDP2", "DeepSpeed"
    backend: str = ""        # "" for no communication
    stage: int = 0
    option: str = ""
    settings: dict = field(default_factory=dict)   # of DeepSpeed's zero_optimization

    @property
    def name(self) -> str:
        """How it is called in tables."""
        words = {"DeepSpeed": f"DeepSpeed ZeRO-{self.stage}", "engine": f"rl.prepare stage {self.stage}", "own loop": "rl.fully_shard"}
        if not self.backend:
            return f"no communication, {'rl.prepare' if self.kind == 'engine' else 'plain loop'}"
        return ", ".join(filter(None, (words.get(self.kind, self.kind), self.backend, self.option)))

    @property
    def library(self) -> str:
        """In whose processes it lives."""
        return "DeepSpeed" if self.kind == "DeepSpeed" else "torch"


DDP = Variant("torch DDP", "gloo")
FSDP2 = {backend: [Variant("FSDP2", backend, 3, option) for option in (FREE, KEEP)] for backend in ("gloo", "rankloom")}
SMALL_BUCKETS = {"reduce_bucket_size": 4_000_000, "allgather_bucket_size": 4_000_000}
IN_TURN = {"overlap_comm": False, "stage3_prefetch_bucket_size": 0}
AUTOCAST = Variant("FSDP2", "gloo", 3, "autocast")
ZERO = {stage: [Variant("DeepSpeed", "gloo", stage, option, SMALL_BUCKETS | (IN_TURN if stage == 3 else {}))
                for option in ("AdamW", "CPUAdam")] for stage in (1, 2, 3)}
ENGINES = [Variant("engine", backend, stage) for backend in ("gloo", "rankloom") for stage in (1, 2, 3)]
KEEPING = Variant("engine", "gloo", 3, KEEP)   # as FSDP2's: parameters stay from forward to backward
ALL = [Variant("own loop"), Variant("engine"), DDP, *FSDP2["gloo"], AUTOCAST, *FSDP2["rankloom"], *ZERO[1], *ZERO[2], *ZERO[3],
       *ENGINES, KEEPING, *(Variant("own loop", backend, 3) for backend in ("gloo", "rankloom"))]
IN_MEMORY = [DDP, FSDP2["gloo"][0], ZERO[3][0], *(variant for variant in ENGINES if variant.stage == 3)]
FASTER = {"fp32": 2.0, "bf16": 4.0}   # than FSDP2 on gloo, stage 3 on rankloom


# ---------------------------------------------------------------------- ranks

@contextmanager
def pools(libraries: Iterable[str], ranks: int) -> Iterator[dict[str, Pool]]:
    """The processes of each library, ended in the end."""
    started: dict[str, Pool] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for library in libraries:
                started[library] = start(library, ranks, Path(folder))
            yield started
        finally:
            for pool in started.values():
                pool.end()


def start(library: str, ranks: int, folder: Path) -> Pool:
    """The rank processes of a library."""
    python, env = sys.executable, {}
    if library == "DeepSpeed":
        make_deepspeed()
        python = str(DEEPSPEED / "bin" / "python")
        env = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(DEEPSPEED / "extensions"), "MAX_JOBS": "2",
               "PATH": f"{DEEPSPEED / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    return Pool(library, ranks, folder, [python, str(HERE / "sharded_rank.py"), library], env)


def make_deepspeed() -> None:
    """An environment with DeepSpeed that sees the packages of this one: nothing of this project may come to need it."""
    python = DEEPSPEED / "bin" / "python"
    ready = DEEPSPEED / ".ready"
    if ready.exists():
        return
    ours = sysconfig.get_path("purelib")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--no-build-isolation", "-r", str(HERE / "deepspeed-requirements.txt")]
    try:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(DEEPSPEED)], check=True)   # so that setuptools is ours too
        theirs = subprocess.run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True,
                                capture_output=True, text=True).stdout.strip()
        Path(theirs, "beside.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        subprocess.run(install, check=True, env=os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"})
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"DeepSpeed could not be installed ({error}); --variants FSDP2 rl. measures without it") from error
    ready.touch()


def build(pool: Pool, variant: Variant, args: argparse.Namespace, precision: str) -> None:
    """Let all ranks make a variant."""
    pool.ask(do="build", name=variant.name, asked=asdict(variant) | {"model": args.model, "tokens": args.tokens, "precision": precision})


# ---------------------------------------------------------------------- speed

def measure(variants: list[Variant], args: argparse.Namespace, precision: str) -> dict[str, dict[str, list]]:
    """Every variant once a round: wall and CPU seconds of the slowest rank, and all losses, the mean over ranks."""
    found: dict[str, dict[str, list]] = {variant.name: {"wall": [], "cpu": [], "losses": []} for variant in variants}
    with pools(dict.fromkeys(variant.library for variant in variants), args.ranks) as started:
        for variant in variants:
            build(started[variant.library], variant, args, precision)
        for turn in range(args.warm_up + args.rounds):
            first = turn % len(variants)
            for variant in variants[first:] + variants[:first]:
                said = started[variant.library].ask(do="step", name=variant.name, times=2)
                mine = found[variant.name]
                mine["losses"] += [statistics.fmean(ranks) for ranks in zip(*(rank["losses"] for rank in said))]
                if turn >= args.warm_up:
                    mine["wall"].append(max(rank["wall"] for rank in said))
                    mine["cpu"].append(max(rank["cpu"] for rank in said))
            print(f"{precision}: round {turn + 1} of {args.warm_up + args.rounds}", file=sys.stderr, flush=True)
    return found


def fastest(walls: Walls, variants: list[Variant]) -> list[float] | None:
    """The times of the best setting of a peer; None when it was not measured."""
    return min((walls[v.name] for v in variants if v.name in walls), key=statistics.median, default=None)


def times_faster(walls: Walls, variant: Variant, peers: list[Variant]) -> float | None:
    """A peer's best time over that of a variant."""
    theirs = fastest(walls, peers)
    return None if theirs is None else median_ratio(theirs, walls[variant.name])


def verdict(walls: Walls, variant: Variant, precision: str) -> str:
    """The bars that a variant of ours has to meet, and whether it does."""
    if variant.stage != 3 or variant.kind not in ("engine", "own loop"):
        return "-"
    bar = FASTER[precision] if variant.backend == "rankloom" else 1.2
    asked = {"FSDP2 on gloo": (FSDP2["gloo"], bar), "FSDP2 under autocast": ([AUTOCAST], bar)}
    if variant.backend == "rankloom":
        asked["DeepSpeed ZeRO-3"] = (ZERO[3], 2.0)
    said = []
    for peer, (theirs, bar) in asked.items():
        if reached := times_faster(walls, variant, theirs):
            said.append(f"{reached:.2f}x {peer}, {'met' if reached >= bar else 'MISSED'} {bar:g}")
    return "; ".join(said)


def apart(found: dict, variant: Variant) -> str:
    """The largest relative difference of the losses from those of DDP; no communication trains another model."""
    if not variant.backend or DDP.name not in found:
        return "-"
    pairs = zip(found[variant.name]["losses"], found[DDP.name]["losses"], strict=True)
    return f"{max(abs(a - b) / abs(b) for a, b in pairs):.1e}"


def speed_table(variants: list[Variant], found: dict, args: argparse.Namespace, precision: str) -> list[dict]:
    """One row per variant."""
    walls = {name: times["wall"] for name, times in found.items()}

    def ratio(variant: Variant, peers: list[Variant]) -> str:
        reached = times_faster(walls, variant, peers)
        return "-" if reached is None else f"{reached:.2f}x"

    return [{"precision": precision, "ranks": args.ranks, "variant": variant.name, "median ms": median_ms(walls[variant.name]),
             "min ms": round(min(walls[variant.name]) * 1e3, 1), "CPU ms": median_ms(found[variant.name]["cpu"]),
             "speed over FSDP2 on gloo": ratio(variant, FSDP2["gloo"]),
             "over DeepSpeed of that stage": ratio(variant, ZERO[variant.stage]) if variant.stage else "-",
             "losses apart from DDP's": apart(found, variant), "bar": verdict(walls, variant, precision)} for variant in variants]


# ---------------------------------------------------------------------- memory

def proportional(pids: Iterable[int]) -> int:
    """Bytes that some processes hold together: each page counts as much for a process as its share of all who map it."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total << 10


def highest(pids: list[int], work: Callable[[], object]) -> tuple[int, int]:
    """The largest sum that was seen while `work` went on, and how often was looked."""
    seen = [proportional(pids)]
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.append(proportional(pids))
            time.sleep(0.002)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return max(seen), len(seen)


def memory_row(variant: Variant, ranks: int, args: argparse.Namespace, precision: str) -> dict:
    """Peak memory of one variant in processes of its own."""
    with pools([variant.library], ranks) as started:
        pool = started[variant.library]
        before = proportional(pool.pids)
        build(pool, variant, args, precision)
        pool.ask(do="step", name=variant.name, times=1)   # state and buffers are there after two steps
        peak, looks = highest(pool.pids, lambda: pool.ask(do="step", name=variant.name, times=args.rounds))
    mib = 1 << 20
    return {"precision": precision, "variant": variant.name, "ranks": ranks, "before MiB": round(before / mib),
            "peak MiB": round(peak / mib), "of the model MiB": round((peak - before) / mib),
            "the same per rank": round((peak - before) / mib / ranks), "looks": looks}


def judge_memory(rows: list[dict]) -> list[str]:
    """Stage 3 against FSDP2 on the same number of ranks, and whether a rank holds less the more there are."""
    held = {(row["precision"], row["variant"], row["ranks"]): row["of the model MiB"] for row in rows}
    said = []
    for precision, name in dict.fromkeys((precision, name) for precision, name, _ in held if name.startswith("rl.prepare stage 3")):
        mine = {ranks: mib for (p, n, ranks), mib in held.items() if (p, n) == (precision, name)}
        for ranks, mib in mine.items():
            peers = [(precision, variant.name, ranks) for variant in FSDP2["gloo"]]
            if theirs := [held[peer] for peer in peers if peer in held]:
                least = min(theirs)
                said.append(judge(f"{precision}, {ranks} ranks, {name}: {mib} MiB on the host, less than FSDP2's {least}", mib < least))
        each = [mine[ranks] / ranks for ranks in sorted(mine)]
        if len(each) > 1:
            said.append(judge(f"{precision}, {name}: per rank {', '.join(f'{mib:.0f}' for mib in each)} MiB: falling with ranks",
                              all(a > b for a, b in itertools.pairwise(each))))
    return said


def main() -> None:
    """Measure, print the tables, keep them in benchmarks/results/."""
    parser = Words(__doc__)
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--precision", type=names_of(["fp32", "bf16"]), default="fp32,bf16")
    parser.add_argument("--model", default="27M")
    parser.add_argument("--tokens", type=count, default=128, help="per rank and step")
    parser.add_argument("--rounds", type=count, default=8)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds that are not counted")
    parser.add_argument("--variants", nargs="+", default=[""], help="parts of their names; all when left out")
    parser.add_argument("--no-speed", dest="speed", action="store_false")
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--memory-ranks", type=counts, default="1,2,4")
    parser.add_argument("--name", default="sharded", help="of the files in benchmarks/results/; empty: keep nothing")
    args = parser.read()
    if nothing := [part for part in args.variants if not any(part in variant.name for variant in (*ALL, *IN_MEMORY))]:
        parser.error(f"argument --variants: {nothing[0]!r} is in no name; they are {', '.join(variant.name for variant in ALL)}")
    wanted = lambda variant: any(part in variant.name for part in args.variants)
    warning, where = busy_cores(), machine()
    rows, tables = [], []
    print(warning, file=sys.stderr)
    for precision in args.precision if args.speed else ():
        variants = [variant for variant in ALL if wanted(variant) and (variant != AUTOCAST or precision == "bf16")]
        rows += speed_table(variants, measure(variants, args, precision), args, precision)
        tables.append(show(rows[-len(variants):]))
        print(tables[-1], flush=True)
    held = []
    for precision, ranks, variant in itertools.product(args.precision, args.memory_ranks, filter(wanted, IN_MEMORY)):
        if args.memory:
            held.append(memory_row(variant, ranks, args, precision))
            print(held[-1], file=sys.stderr, flush=True)
    if held:
        tables += [show(held), "\n".join(judge_memory(held))]
        print("\n\n".join(tables[-2:]))
    keep(args.name, f"{where}\n{warning}".strip(), rows + held, shown="\n\n".join(tables))


if __name__ == "__main__":
    main()
