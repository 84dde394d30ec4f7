"""One training step of a GPT on the backend "rankloom" and on gloo: torch's DDP and FSDP2, ours, and no communication, in turn.

    python benchmarks/backend_step.py                                        # 2 ranks, fp32 and bf16, 128 and 1024 tokens a rank
    python benchmarks/backend_step.py --precision bf16 --tokens 128

The loop, the model and the data are those of data_parallel.py: forward, backward, clipping, fused AdamW; here the 27M GPT of width 512.
All variants live in the same processes, one thread and one core each, and take turns of three steps. bf16 is autocast for torch's
classes and for loops of one's own, and precision="bf16" (16-bit weights, fp32 masters) for the engine; so the engine has a "no
communication" of its own, which is the engine on a world of one rank. torch's classes have to reach the same losses on both backends,
bit for bit: with two ranks a sum has one order only.
"""

import argparse
import itertools
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import (
    Words,
    busy_cores,
    count,
    counts,
    keep,
    machine,
    median_ms,
    median_ratio,
    names_of,
    next_token,
    pin_to_core,
    run_ranks,
    show,
    take_turns,
)
from data_parallel import CLIP, adamw, make_plain_step
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rankloom as rl
import rankloom.transport  # registers the backend with torch
from rankloom.models.config import preset
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss

BACKENDS = ("gloo", "rankloom")
KINDS = ("torch DDP", "torch FSDP2", "own loop", "engine")
ROW = 128   # tokens


class Variant(NamedTuple):
    """One way to train."""

    kind: str
    backend: str = ""   # "" for no communication

    @property
    def name(self) -> str:
        """How it is called in tables."""
        return f"{self.kind}, {self.backend or 'no communication'}"


VARIANTS = (Variant("own loop"), Variant("engine"), *(Variant(kind, backend) for kind in KINDS for backend in BACKENDS))
DDP = Variant("torch DDP", "gloo")


class Bench:
    """One rank: its groups on every backend, and the batch that all variants train on."""

    def __init__(self, args: argparse.Namespace):
        dist.init_process_group("gloo")
        self.rank, size = dist.get_rank(), dist.get_world_size()
        self.torch_groups = {"gloo": dist.group.WORLD, "rankloom": dist.new_group(backend="rankloom")}
        self.worlds = {backend: rl.init(backend=backend) for backend in BACKENDS}
        self.worlds[""] = alone()
        self.config, self.precision = preset("27M", vocab_size=8192, seq_len=ROW), args.precision
        text = torch.randint(0, 8192, (args.tokens // ROW, ROW + 1), generator=torch.Generator().manual_seed(self.rank))
        self.batch = next_token(text)
        self.size = size

    def step(self, variant: Variant) -> Callable[[], float]:
        """A training step of one variant, with a model and an optimizer of its own; returns its loss."""
        kind, backend = variant
        model: Any = GPT(self.config, seed=0)
        if kind == "engine":
            engine = rl.prepare(model, loss=language_model_loss, optimizer=adamw, world=self.worlds[backend], clip=CLIP,
                                precision=self.precision)
            return lambda: engine.step(self.batch).loss
        if kind == "torch FSDP2":
            mesh = DeviceMesh.from_group(self.torch_groups[backend], "cpu")
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif kind == "torch DDP":
            model = DistributedDataParallel(model, process_group=self.torch_groups[backend], gradient_as_bucket_view=True,
                                            static_graph=True, broadcast_buffers=False)
        elif backend:
            model = rl.data_parallel(model, self.worlds[backend])
        return make_plain_step(model, self.batch, torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"))


def alone() -> rl.World:
    """A world of one rank, which never communicates."""
    return rl.World(dist.HashStore(), 0, rl.Mesh(replicate=1), torch.device("cpu"), timeout=60.0)


def remember(step: Callable[[], float], losses: list[float]) -> Callable[[], None]:
    """The same step, its loss kept."""
    return lambda: losses.append(step())


def worker(args: argparse.Namespace) -> None:
    """One rank under torchrun: measure, and let rank 0 write what it found."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    pin_to_core(int(os.environ["RANK"]))
    bench = Bench(args)
    losses: dict[str, list[float]] = {variant.name: [] for variant in VARIANTS}
    steps = {variant.name: remember(bench.step(variant), losses[variant.name]) for variant in VARIANTS}
    times = take_turns(steps, args.repeat, bench.worlds["gloo"].barrier)
    if bench.rank == 0:
        Path(args.out).write_text(json.dumps({"times": times, "losses": losses}))
    dist.barrier()
    os._exit(0)   # two backends and their threads need no farewell


# ---------------------------------------------------------------------- what came out

def apart(a: list[float], b: list[float]) -> str:
    """The largest relative difference of two lists of losses."""
    largest = max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))
    return f"{largest:.1e}" if largest else "0, the same bits"


def verdict(text: str, met: bool) -> str:
    """A figure, and whether it meets its bar."""
    return f"{text}, {'met' if met else 'MISSED'}"


def verdicts(variant: Variant, walls: dict[str, list[float]], args: argparse.Namespace) -> str:
    """The bars that a variant on rankloom has to meet, and whether it does."""
    if variant.backend != "rankloom":
        return "-"
    mine = walls[variant.name]
    if variant.kind.startswith("torch"):
        ratio = median_ratio(mine, walls[Variant(variant.kind, "gloo").name])
        return verdict(f"{ratio} of its step on gloo (< 1)", ratio < 1)
    speed = median_ratio(walls[Variant(variant.kind).name], mine)
    said = verdict(f"{speed:.0%} of the speed of no communication (>= 90 %)", speed >= 0.9)
    if args.precision == "bf16" and args.tokens == ROW:
        faster = median_ratio(walls[DDP.name], mine)
        said += "; " + verdict(f"{faster}x DDP on gloo (>= 1.8)", faster >= 1.8)
    return said


def table(found: dict, args: argparse.Namespace) -> list[dict]:
    """One row per variant."""
    walls = {name: times["wall"] for name, times in found["times"].items()}
    rows = []
    for variant in VARIANTS:
        wall, losses = walls[variant.name], found["losses"][variant.name]
        on_gloo = found["losses"][Variant(variant.kind, "gloo").name]
        rows.append({
            "precision": args.precision, "tokens per rank": args.tokens, "ranks": args.ranks, "variant": variant.name,
            "median ms": median_ms(wall), "min ms": round(min(wall) * 1e3, 1),
            "CPU ms of rank 0": median_ms(found["times"][variant.name]["cpu"]),
            "over DDP on gloo": median_ratio(wall, walls[DDP.name]),
            "loss apart from gloo's": apart(losses, on_gloo) if variant.backend == "rankloom" else "-",
            "bar": verdicts(variant, walls, args)})
    return rows


def main() -> None:
    """Measure all combinations, print the tables, keep them in benchmarks/results/."""
    parser = Words(__doc__, worker)
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--precision", type=names_of(["fp32", "bf16"]), default="fp32,bf16")
    parser.add_argument("--tokens", type=counts, default="128,1024", help="per rank and step")
    parser.add_argument("--repeat", type=count, default=8)
    parser.add_argument("--name", default="backend_step", help="of the files in benchmarks/results/")
    args = parser.read()
    warning, where = busy_cores(), machine()
    rows = []
    print(warning)
    cases = [*itertools.product(args.precision, args.tokens)]
    for args.precision, args.tokens in cases:
        rows += table(run_ranks(__file__, args.ranks, args), args)
        print(show(rows[-len(VARIANTS):]), flush=True)
    keep(args.name, f"{where}\n{warning}".strip(), rows)


if __name__ == "__main__":
    main()
