"""Forward and backward of a GPT whose matrices are cut over ranks: torch's `parallelize_module`, and ours, in turn.

    python benchmarks/tensor_parallel.py                       # 2 and 4 ranks, 11M and 57M, fp32, gloo
    python benchmarks/tensor_parallel.py --ranks 2 --models 11M --backend rankloom

Same model, same batch, same processes, same backend, interleaved: every round gives each variant a turn of three steps, in
rotating order, and ratios are taken inside a round. torch gets its own best: vocabulary-parallel embedding and output with
`loss_parallel`, so that it gathers no logits either. "by tokens" is sequence parallel, "in pieces" overlaps sums with products.
A step is the loss, its backward, and setting the gradients to None: the optimizer is the same work for all.
"""

import argparse
import json
import os
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Words, count, counts, keep, machine, median_ms, median_ratio, next_token, pin_to_core, run_ranks, show, take_turns
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import rankloom as rl
from rankloom.models.config import preset

Step = Callable[[], float]
VARIANTS = ("torch", "torch, by tokens", "rankloom", "rankloom, by tokens", "rankloom, in pieces")


def make_step(name: str, args: argparse.Namespace, world: rl.World) -> Step:
    """Loss and backward of one variant, with a model of its own."""
    model = rl.GPT(preset(args.models, vocab_size=8192, seq_len=max(args.tokens, 128), tie=False), seed=0)
    text = torch.randint(0, 8192, (args.rows, args.tokens + 1), generator=torch.Generator().manual_seed(0))
    tokens, targets = next_token(text)
    by_tokens = name.endswith("by tokens")
    if name.startswith("torch"):
        return with_torch(model, by_tokens, tokens, targets, world)
    rl.tensor_parallel(model, model.tp_sequence_plan if by_tokens else None, world, overlap=2 if name.endswith("in pieces") else 1)

    def step() -> float:
        total, count = model(tokens, targets=targets)
        loss = total / count
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.item()

    return step


def with_torch(model: Any, by_tokens: bool, tokens: torch.Tensor, targets: torch.Tensor, world: rl.World) -> Step:
    """The same with torch's own classes, as its tutorial has it."""
    mesh = init_device_mesh("cpu", (world.size,))
    stream = Shard(1) if by_tokens else Replicate()
    block = {f"attention.{part}": ColwiseParallel() for part in ("query", "key", "value")} | {
        "attention.output": RowwiseParallel(output_layouts=stream), "mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=stream)}
    if by_tokens:
        block |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel(),
                  "attention": PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)),
                  "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))}
    ends = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
            "head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)}
    for each in model.blocks:
        parallelize_module(each, mesh, block)
    parallelize_module(model, mesh, ends | ({"norm": SequenceParallel()} if by_tokens else {}))
    cos, sin = model.rotary(0, tokens.shape[1])

    def step() -> float:
        x = model.embedding(tokens)
        for each in model.blocks:
            x = x + each.attention(each.attention_norm(x), cos, sin)
            x = x + each.mlp(each.mlp_norm(x))
        with loss_parallel():
            loss = F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), targets.flatten())
            loss.backward()
        model.zero_grad(set_to_none=True)
        return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)

    return step


def worker(args: argparse.Namespace) -> None:
    """One rank under torchrun: measure, and let rank 0 write what it found."""
    warnings.filterwarnings("ignore")
    rank = int(os.environ["RANK"])
    pin_to_core(rank)
    dist.init_process_group(args.backend)
    world = rl.init(backend=args.backend)
    steps = {name: make_step(name, args, world) for name in VARIANTS}
    losses = {name: step() for name, step in steps.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-3, f"the variants do not compute the same: {losses}"
    times = take_turns(steps, args.repeat, world.barrier)
    if rank == 0:
        Path(args.out).write_text(json.dumps({"times": times}))
    world.close()
    dist.destroy_process_group()


def measure(ranks: int, size: str, args: argparse.Namespace) -> list[dict]:
    """Rows of the table for one model on one number of ranks."""
    times = run_ranks(__file__, ranks, args, models=size)["times"]
    best = min((name for name in times if name.startswith("torch")), key=lambda name: statistics.median(times[name]["wall"]))
    return [{
        "model": size, "ranks": ranks, "backend": args.backend, "batch": f"{args.rows} x {args.tokens}", "variant": name,
        "median ms": median_ms(t["wall"]), "min ms": round(min(t["wall"]) * 1e3, 1), "CPU ms of rank 0": median_ms(t["cpu"]),
        "over best torch": median_ratio(t["wall"], times[best]["wall"]),
    } for name, t in times.items()]


def main() -> None:
    """Measure all combinations, print the tables, keep them in benchmarks/results/."""
    parser = Words(__doc__, worker)
    parser.add_argument("--ranks", type=counts, default="2,4")
    parser.add_argument("--models", default="11M,57M")
    parser.add_argument("--backend", default="gloo", choices=["gloo", "rankloom"])
    parser.add_argument("--tokens", type=count, default=128, help="of a row")
    parser.add_argument("--rows", type=count, default=2)
    parser.add_argument("--repeat", type=count, default=8)
    parser.add_argument("--name", default="tensor_parallel", help="of the files in benchmarks/results/")
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
