"""One training step of a GPT: torch's DistributedDataParallel, ours, and no communication at all, in turn.

    python benchmarks/data_parallel.py                                   # 2 and 4 ranks, 11M and 57M, fp32
    python benchmarks/data_parallel.py --ranks 2 --models 11M --precision bf16

A step is forward, backward, clipping by the global norm, and fused AdamW: for torch a loop with `clip_grad_norm_`; for us
`engine.step` ("rankloom") and the same plain loop around `rl.data_parallel` ("rankloom, own loop").

Same model, same data, in the same processes, all on gloo, interleaved: every round gives each variant a turn of three steps, in
rotating order, and ratios are taken inside a round. DDP gets its best settings: gradients as bucket views, static graph, no buffer
broadcast, and the better of two bucket sizes. Peak memory comes from separate runs, one variant a process, as the largest resident
set of any rank.
"""

import argparse
import json
import os
import resource
import statistics
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from common import Words, count, counts, keep, machine, median_ms, median_ratio, next_token, pin_to_core, run_ranks, show, take_turns
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import rankloom as rl
from rankloom.models.config import preset
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss

CLIP = 1.0
Step = Callable[[], float]
VARIANTS = ("no communication", "torch DDP, 25 MiB", "torch DDP, 100 MiB", "rankloom", "rankloom, own loop")


def make_step(name: str, args: argparse.Namespace, world: rl.World) -> Step:
    """A training step of one variant, with a model and an optimizer of its own; returns the loss of this rank's batch."""
    model = GPT(preset(args.models, vocab_size=8192, seq_len=max(args.tokens, 128)), seed=0)
    text = torch.randint(0, 8192, (1, args.tokens + 1), generator=torch.Generator().manual_seed(world.rank))
    batch = next_token(text)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16")
    if name != "rankloom":
        return make_plain_step(wrap(name, model, world), batch, autocast)

    def loss(model: torch.nn.Module, batch: tuple) -> tuple:
        with autocast:
            return language_model_loss(model, batch)

    engine = rl.prepare(model, loss=loss, optimizer=adamw, world=world, clip=CLIP)
    return lambda: engine.step(batch).loss


def wrap(name: str, model: torch.nn.Module, world: rl.World) -> torch.nn.Module:
    """The model as the variant wants it."""
    if name == "no communication":
        return model
    if name == "rankloom, own loop":
        return rl.data_parallel(model, world)
    return DistributedDataParallel(model, bucket_cap_mb=100 if "100" in name else 25, gradient_as_bucket_view=True, static_graph=True,
                                   broadcast_buffers=False)


def make_plain_step(wrapped: torch.nn.Module, batch: tuple, autocast: torch.autocast) -> Step:
    """The loop that a user of DDP writes."""
    optimizer = adamw(wrapped.parameters())

    def step() -> float:
        with autocast:
            total, count = language_model_loss(wrapped, batch)
            loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The same for all."""
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def worker(args: argparse.Namespace) -> None:
    """One rank under torchrun: measure, and let rank 0 write what it found."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    rank = int(os.environ["RANK"])
    pin_to_core(rank)
    dist.init_process_group("gloo")
    world = rl.init(backend="gloo")   # what torch DDP runs on here
    steps = {name: make_step(name, args, world) for name in args.variants}
    times = take_turns(steps, args.repeat, world.barrier)
    peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0])
    peak = world.all_reduce(peak, "max").item()
    if rank == 0:
        Path(args.out).write_text(json.dumps({"times": times, "peak": peak}))
    world.close()
    dist.destroy_process_group()


def measure(ranks: int, size: str, args: argparse.Namespace) -> list[dict]:
    """Rows of the table for one model on one number of ranks."""
    times = run_ranks(__file__, ranks, args, models=size, variants=VARIANTS)["times"]
    rivals = [name for name in VARIANTS if name.startswith("torch")]
    best = min(rivals, key=lambda name: statistics.median(times[name]["wall"]))
    alone = times["no communication"]["wall"]
    peaks = {name: run_ranks(__file__, ranks, args, models=size, variants=[name], repeat=3)["peak"] for name in VARIANTS if args.memory}
    return [{
        "model": size, "ranks": ranks, "precision": args.precision, "tokens per rank": args.tokens, "variant": name,
        "median ms": median_ms(t["wall"]), "min ms": round(min(t["wall"]) * 1e3, 1), "CPU ms of rank 0": median_ms(t["cpu"]),
        "over best DDP": median_ratio(t["wall"], times[best]["wall"]), "over no communication": median_ratio(t["wall"], alone),
        "peak MiB": round(peaks[name] / 2**20) if peaks else "-",
    } for name, t in times.items()]


def main() -> None:
    """Measure all combinations, print the tables, keep them in benchmarks/results/."""
    parser = Words(__doc__, worker)
    parser.add_argument("--ranks", type=counts, default="2,4")
    parser.add_argument("--models", default="11M,57M")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--tokens", type=count, default=128, help="per rank and step")
    parser.add_argument("--repeat", type=count, default=8)
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--name", default="data_parallel", help="of the files in benchmarks/results/")
    args = parser.read()
    where = machine()
    rows = []
    for size in args.models.split(","):
        for ranks in args.ranks:
            rows += measure(ranks, size, args)
            print(show(rows[-len(VARIANTS):]), flush=True)
    keep(args.name, where, rows)


if __name__ == "__main__":
    main()
