"""A GPT on real text, trained with compressed gradients: how far from the exact run does it end?

    python benchmarks/compressed_training.py [--compress none,int8,powersgd:16/150] [--add]

Runs `rankloom train` with the same seed, data and steps for each compression, and compares validation losses. `/150`: the first 150
steps are exact ([comm] compress_after). "fewer bytes" is how much less a rank sends than in the exact run, over all steps, counted by
the ledger: what is no matrix is exact, and included. Each row takes many minutes, so --add keeps the rows of earlier runs, except those of
the same compression; losses do not depend on how busy the machine is.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from common import RESULTS, Words, count, keep, machine, next_token, show

import rankloom as rl
from rankloom.models.config import preset
from rankloom.models.loss import language_model_loss
from rankloom.train.run.schema import BYTES_VOCAB

CASES = ("none", "bf16", "int8", "int4", "1bit", "topk", "powersgd", "powersgd:16", "powersgd:16/150", "powersgd:32")
WITHIN = {"int8": "1 %", "powersgd:32": "1 %"}


def train(case: str, args: argparse.Namespace, folder: Path) -> tuple[float, float, float]:
    """Validation loss at the end, training loss of the last step, seconds."""
    compress, _, after = case.partition("/")
    settings = {
        "mesh.replicate": args.ranks, "model.preset": args.model, "comm.compress": compress, "comm.compress_after": after or 0,
        "data.source": args.source, "data.baseline": "false", "train.steps": args.steps, "train.seq_len": 128,
        "train.global_batch_size": args.rows, "train.samples": 0, "train.threads": 1, "optimizer.lr": args.lr,
        "schedule.warmup_steps": args.steps // 20, "run.folder": folder, "run.name": "with-" + re.sub("[:/]", "-", case)}
    config = folder / "train.toml"
    config.write_text("[train]\nglobal_batch_size = 2\n")
    command = [sys.executable, "-m", "rankloom", "train", str(config), *(f"--{key}={value}" for key, value in settings.items())]
    subprocess.run(command, check=True, capture_output=True)
    events = [json.loads(line) for line in (folder / settings["run.name"] / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "StepDone"]
    (validation,) = [event["loss"] for event in events if event["event"] == "Evaluated"]
    return validation, steps[-1]["loss"], sum(event["seconds"] for event in steps)


def fewer_bytes(case: str, args: argparse.Namespace) -> float:
    """How much less than the exact run's a rank sends, over all steps."""
    compress, _, after = case.partition("/")
    exact, early = sent("none", args), int(after or 0) / args.steps
    return exact / (early * exact + (1 - early) * sent(compress, args))


def sent(compress: str, args: argparse.Namespace) -> int:
    """Bytes that a rank sends in a step: the second, for in the first buckets are laid out."""
    shape = replace(preset(args.model), vocab_size=BYTES_VOCAB)

    def body(world: rl.World) -> int:
        engine = rl.prepare(rl.GPT(shape), loss=language_model_loss, world=world, compress=compress,
                            optimizer=lambda params: torch.optim.AdamW(params, lr=args.lr))
        tokens = torch.randint(BYTES_VOCAB, (2, 65), generator=torch.Generator().manual_seed(world.rank))
        for _ in range(2):
            before = world.ledger.bytes
            engine.step(next_token(tokens))
        return world.ledger.bytes - before

    return rl.simulate(args.ranks, body)[0]


def compare_with_exact(rows: list[dict]) -> None:
    """Fill in how far each validation loss is from that of the exact run, if there is one."""
    for exact in (row["validation loss"] for row in rows if row["compress"] == "none"):
        for row in rows:
            row["to the exact run"] = f"{row['validation loss'] / exact - 1:+.2%}"


def main() -> None:
    """Train with each compression, print the table, keep it."""
    parser = Words(__doc__)
    parser.add_argument("--compress", default=",".join(CASES))
    parser.add_argument("--add", action="store_true", help="keep the other rows of results/compressed_training.json")
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--model", default="1M")
    parser.add_argument("--source", default="stdlib")
    parser.add_argument("--steps", type=count, default=1500)
    parser.add_argument("--rows", type=count, default=16, help="of 128 tokens, in the global batch")
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.read()
    rows = json.loads((RESULTS / "compressed_training.json").read_text())["rows"] if args.add else []
    where = machine()
    with tempfile.TemporaryDirectory() as folder:
        for case in args.compress.split(","):
            validation, last, seconds = train(case, args, Path(folder))
            row = {"compress": case, "validation loss": round(validation, 4), "to the exact run": "", "within": WITHIN.get(case, ""),
                   "fewer bytes": f"{fewer_bytes(case, args):.1f}x", "last training loss": round(last, 4), "s": round(seconds)}
            rows = list({one["compress"]: one for one in [*rows, row]}.values())   # in place of an earlier row of this case
            compare_with_exact(rows)
            print(show([row]).splitlines()[-1], flush=True)
            keep("compressed_training", where, rows)   # each takes many minutes
    print(show(rows))


if __name__ == "__main__":
    main()
