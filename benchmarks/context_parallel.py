"""How long a sequence may be in the same memory: forward and backward of a GPT on one process, and cut over context ranks.

    python benchmarks/context_parallel.py

Counted is what the resident memory of the fullest rank grew by, at its highest, during a step. A step of a short sequence goes before
it, so that libraries, threads and connections are there already; and tensors get pages of their own, so that what malloc keeps of
freed ones is not counted. Linux only: there a process may forget its peak.
"""

import argparse
import json
import os
import re
from pathlib import Path

import torch
from common import Words, count, keep, machine, pin_to_core, run_ranks, show

import rankloom as rl
from rankloom.models.config import GPTConfig
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss
from rankloom.parallel.context.apply import context_parallel
from rankloom.parallel.context.rows import KINDS

SHORT = 64


def resident(which: str) -> int:
    """KiB of this process: VmRSS is now, VmHWM the most so far."""
    return int(re.findall(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


def worker(args: argparse.Namespace) -> None:
    """One rank under torchrun: a step, and by how much memory grew at the highest."""
    world = rl.init()
    pin_to_core(world.rank)
    shape = GPTConfig(vocab_size=512, seq_len=args.length, width=256, layers=args.layers, heads=4, kv_heads=4, ffn=704)
    model = GPT(shape) if world.size == 1 else context_parallel(GPT(shape), world, args.kind)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    text = torch.randint(0, 512, (1, args.length + 1), generator=torch.Generator().manual_seed(0))
    for stop in (SHORT, args.length):
        world.barrier()
        Path("/proc/self/clear_refs").write_text("5")   # forget the peak
        before = resident("VmRSS")
        total, _ = language_model_loss(model, (text[:, :stop], text[:, 1:stop + 1]))
        total.backward()
        grown = resident("VmHWM") - before
    loss = world.all_reduce(total.detach()).item() / args.length
    highest = world.all_reduce(torch.tensor([grown]), "max").item()
    if world.rank == 0:
        Path(args.out).write_text(json.dumps({"MiB": round(highest / 1024, 1), "loss": round(loss, 5)}))
    world.close()


def main() -> None:
    """Measure one process, then the ranks, print the table, keep it."""
    parser = Words(__doc__, worker)
    parser.add_argument("--ranks", type=count, default=4)
    parser.add_argument("--length", type=count, default=2048, help="tokens that one process reads")
    parser.add_argument("--layers", type=count, default=4)
    args = parser.read()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"   # for the ranks: larger tensors go back to the system when they are freed
    where = machine()
    rows: list[dict] = []
    longer = args.length * args.ranks
    for ranks, length, kind in [(1, args.length, ""), (1, longer, ""), *((args.ranks, longer, kind) for kind in KINDS)]:
        found = run_ranks(__file__, ranks, args, length=length, kind=kind)
        first = rows[0]["peak MiB of a rank"] if rows else found["MiB"]
        rows.append({"ranks": ranks, "kind": kind or "one process", "tokens": length, "peak MiB of a rank": found["MiB"],
                     "over the first": round(found["MiB"] / first, 2), "loss": found["loss"]})
    keep("context_parallel", where, rows)
    print(show(rows))


if __name__ == "__main__":
    main()
