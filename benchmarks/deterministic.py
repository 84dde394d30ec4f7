"""What `deterministic` costs: the engine's step with the same bits on any number of ranks, and with a free order.

    python benchmarks/deterministic.py

All variants take the same global batch. "free, same micro-batches" cuts it in the same eight pieces, so the difference
to "deterministic" is the canonical tree alone; "free" runs each rank's share as one piece.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Words, count, counts, keep, machine, median_ms, median_ratio, next_token, pin_to_core, run_ranks, show, take_turns

import rankloom as rl
from rankloom.models.config import preset
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss


def make_step(world: rl.World, size: str, rows: int, **settings: Any) -> Callable[[], object]:
    """A step of an engine of its own on this rank's share of `rows` rows of 128 tokens."""
    engine = rl.prepare(GPT(preset(size, vocab_size=8192, seq_len=128), seed=0), loss=language_model_loss, world=world, clip=1.0,
                        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True), **settings)
    text = torch.randint(0, 8192, (rows, 129), generator=torch.Generator().manual_seed(0)).tensor_split(world.size)[world.rank]
    return lambda: engine.step(next_token(text))


def worker(args: argparse.Namespace) -> None:
    """One rank under torchrun."""
    world = rl.init()
    pin_to_core(world.rank)
    steps = {
        "free": make_step(world, args.model, args.rows),
        "free, same micro-batches": make_step(world, args.model, args.rows, accumulate=8 // world.size),
        "deterministic": make_step(world, args.model, args.rows, deterministic=True),
    }
    times = take_turns(steps, args.repeat, world.barrier)
    if world.rank == 0:
        Path(args.out).write_text(json.dumps(times))
    world.close()


def main() -> None:
    """Measure for each number of ranks, print the table, keep it."""
    parser = Words(__doc__, worker)
    parser.add_argument("--ranks", type=counts, default="1,2,4")
    parser.add_argument("--model", default="11M")
    parser.add_argument("--rows", type=count, default=8, help="of 128 tokens, in the global batch")
    parser.add_argument("--repeat", type=count, default=8)
    args = parser.read()
    where = machine()
    rows = []
    for ranks in args.ranks:
        times = run_ranks(__file__, ranks, args)
        rows += [{"model": args.model, "ranks": ranks, "variant": name, "median ms": median_ms(t["wall"]),
                  "over free": median_ratio(t["wall"], times["free"]["wall"]),
                  "over free, same micro-batches": median_ratio(t["wall"], times["free, same micro-batches"]["wall"])}
                 for name, t in times.items()]
    print(show(rows))
    keep("deterministic", where, rows)


if __name__ == "__main__":
    main()
