"""A training step over a real slow link, sharded, with exact and with compressed gradients: two hosts joined by 1 Gbit/s.

    sudo .venv/bin/python benchmarks/slow_step.py

The hosts and the link are those of benchmarks/slow_link.py. Variants take turns; shown are medians, ratios taken round by round.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from common import Words, count, keep, machine, median_ms, median_ratio, next_token, show, take_turns
from slow_link import end_unless_permitted, launch, limit, two_hosts

import rankloom as rl
from rankloom.models.config import preset
from rankloom.models.loss import language_model_loss

TOKENS = 128
LAYOUTS = {1: [("stage 0", 0, rl.Mesh(replicate=2)), ("stage 2", 2, rl.Mesh(shard=2)), ("stage 3", 3, rl.Mesh(shard=2))],
           2: [("stage 0", 0, rl.Mesh(replicate=4)), ("stage 2, shard inside hosts", 2, rl.Mesh(replicate=2, shard=2)),
               ("tensor inside hosts", 0, rl.Mesh(replicate=2, tensor=2))]}
COMPRESS = ("none", "int8", "int4")


def worker(args: argparse.Namespace) -> None:
    """One rank: all variants of one number of ranks per host in turn."""
    torch.set_num_threads(1)
    steps = {}
    for name, stage, mesh in LAYOUTS[args.ranks_per_host]:
        world = rl.init(mesh, backend="gloo")
        for compress in COMPRESS:
            engine = rl.prepare(rl.GPT(preset(args.model, seq_len=TOKENS), seed=0), loss=language_model_loss, world=world, stage=stage,
                                optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4), compress=compress)
            tokens = torch.randint(0, 1000, (1, TOKENS + 1), generator=torch.Generator().manual_seed(engine.group.rank))
            steps[f"{name}: {compress}"] = partial(engine.step, next_token(tokens))
    found = {name: times["wall"] for name, times in take_turns(steps, args.repeat, world.barrier).items()}
    if world.rank == 0:
        Path(args.out).write_text(json.dumps(found))


def main() -> None:
    """Measure, print the tables, keep them."""
    parser = Words(__doc__, worker)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--model", default="11M", help="a preset")
    parser.add_argument("--repeat", type=count, default=5)
    parser.add_argument("--ranks-per-host", type=count, help="left out: 1, then 2")
    args = parser.read()
    end_unless_permitted()
    where = machine()
    rows = []
    with two_hosts():
        limit(args.rate)
        for ranks in [args.ranks_per_host] if args.ranks_per_host else LAYOUTS:
            found = launch(__file__, ranks, args, ranks_per_host=ranks)
            exact = {name.removesuffix(": none"): times for name, times in found.items() if name.endswith(": none")}
            rows += [{"link": args.rate, "ranks": f"2 x {ranks}", "what": name, "ms a step": median_ms(times),
                      "times as fast as exact": median_ratio(exact[name.partition(":")[0]], times)} for name, times in found.items()]
            print(show(rows[-len(found):]), flush=True)
    keep("slow_step", where, rows)


if __name__ == "__main__":
    main()
