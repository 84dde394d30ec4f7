"""Eight ranks on one GPU, laid out over several axes, in bf16: the same losses as one rank, step by step.

    python benchmarks/gpu_layouts.py                # a CUDA device: the 57M shape, 16 x 512 tokens a step
    python benchmarks/gpu_layouts.py --small        # the same script at toy size, on whatever there is

    pipe 2 x shard 2 x tensor 2    a dense model, stage 3, schedule 1f1b
    expert 4 x tensor 2            a mixture of 8 experts, 2 for each token

Real text (the source of Python's own library, byte by byte), the same global batches and initial weights for all. Each layout's losses
are compared with one rank's in bf16; how far those are from one rank's in fp32 shows what bf16 alone costs.
The bound of every loss of every step is 2^-8 of it, one rounding to bf16: layouts round partial sums of bf16 products where one rank
rounds whole ones, which moves single activations by that much, and the loss, their mean, by less.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Words, count, keep, machine, next_token, show, synchronize, the_device, try_ranks
from gpu_fp8 import rows_of, text

import rankloom as rl
from rankloom.models.config import GPTConfig, MoEConfig, parameter_count, preset
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss

BOUND = 2.0**-8
WARM_UP = 4      # steps that are not timed
ONE = rl.Mesh()
DENSE, EXPERTS = "dense", "experts"


@dataclass(frozen=True)
class Run:
    """One way to train."""

    model: str
    mesh: rl.Mesh = ONE
    precision: str = "bf16"
    stage: int = 0


RUNS = {
    "dense, 1 rank, fp32": Run(DENSE, precision="fp32"),
    "dense, 1 rank": Run(DENSE),
    "pipe 2 x shard 2 x tensor 2": Run(DENSE, rl.Mesh(pipe=2, shard=2, tensor=2), stage=3),
    "experts, 1 rank, fp32": Run(EXPERTS, precision="fp32"),
    "experts, 1 rank": Run(EXPERTS),
    "expert 4 x tensor 2": Run(EXPERTS, rl.Mesh(expert=4, tensor=2)),
}


def shape(model: str, small: bool) -> tuple[GPTConfig, int]:
    """The model, and the rows of the global batch."""
    width = 128 if small else 768
    moe = MoEConfig(experts=8, top_k=2, ffn=width) if model == EXPERTS else None
    if small:
        return preset("1M", vocab_size=256, seq_len=64, moe=moe), 16
    return preset("57M", vocab_size=256, seq_len=512, moe=moe), 16


def worker(args: argparse.Namespace) -> None:
    """One rank of one run: its losses, and the seconds of each step."""
    run = RUNS[args.only]
    config, rows = shape(run.model, args.small)
    world = rl.init(run.mesh, device=the_device().type, backend="rankloom" if run.mesh.size > 1 else "auto")
    pipe: dict[str, Any] = {"pipe": "1f1b", "accumulate": 2} if run.mesh.pipe > 1 else {}
    engine = rl.prepare(GPT(config), loss=language_model_loss, world=world, stage=run.stage, precision=run.precision, clip=1.0, **pipe,
                        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4, betas=(0.9, 0.95), fused=True))
    corpus, draw = text(1 << 20), torch.Generator().manual_seed(0)
    seconds, losses = [], []
    for _ in range(args.steps):
        mine = rows_of(corpus, rows, config.seq_len + 1, draw).tensor_split(engine.group.size)[engine.group.rank]
        synchronize(world.device)
        begin = time.perf_counter()
        losses.append(engine.step(next_token(mine)).loss)
        synchronize(world.device)
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() if world.device.type == "cuda" else 0
    peaks = world.all_gather_object(peak)
    if world.rank == 0:
        told = {"losses": losses, "seconds": statistics.median(seconds[WARM_UP:] or seconds), "peaks": peaks}
        Path(args.out).write_text(json.dumps(told))
    world.close()


def row(name: str, found: dict, compared: dict, args: argparse.Namespace) -> dict:
    """One line of the table. compared: the run in bf16 on one rank"""
    config, rows = shape(RUNS[name].model, args.small)
    apart = max(abs(a - b) / b for a, b in zip(found["losses"], compared["losses"], strict=True))
    return {"run": name, "ranks": RUNS[name].mesh.size, "parameters": f"{parameter_count(config) / 1e6:,.1f}M",
            "first loss": round(found["losses"][0], 4), "last loss": round(found["losses"][-1], 4),
            "furthest from 1 rank's in bf16": f"{apart:.1e}", "bound": f"{BOUND:.1e}", "within": "yes" if apart <= BOUND else "NO",
            "ms": round(found["seconds"] * 1e3, 1), "tokens/s": round(rows * config.seq_len / found["seconds"]),
            "peak GiB, ranks summed": round(sum(found["peaks"]) / 2**30, 2)}


def main() -> None:
    """Every run in processes of its own; print the table and keep it."""
    parser = Words(__doc__, worker, gpu=True)
    parser.add_argument("--steps", type=count, default=20)
    args = parser.read()
    where = machine()
    found = {}
    print(where, flush=True)
    for name, run in RUNS.items():
        result = try_ranks(__file__, run.mesh.size, args, only=name)
        if "error" in result:
            print(f"{name} could not run: {result['error']}", flush=True)
            continue
        found[name] = result
    table = [row(name, result, found[f"{RUNS[name].model}, 1 rank"], args) for name, result in found.items()
             if f"{RUNS[name].model}, 1 rank" in found]
    print(show(table))
    if not args.small:
        keep("gpu_layouts", where, table)


if __name__ == "__main__":
    main()
