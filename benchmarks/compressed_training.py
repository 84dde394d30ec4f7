"""A GPT on real text, trained with compressed gradients: how far from the exact run does it end?

    python benchmarks/compressed_training.py

Runs `rankloom train` with the same seed, data and steps for each compression, and compares validation losses. "fewer bytes" is how
much less a rank sends in a step than the exact run's, counted by the ledger: what is no matrix is exact, and included.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from common import keep, machine, show

import rankloom as rl
from rankloom.models.config import preset
from rankloom.models.loss import language_model_loss
from rankloom.train.sections import BYTES_VOCAB

NAMES = ("none", "bf16", "int8", "int4", "1bit", "topk", "powersgd", "powersgd:8", "powersgd:16")
WITHIN = {"int8": "1 %", "powersgd:16": "1 %"}


def train(compress: str, args: argparse.Namespace, folder: Path) -> tuple[float, float, float]:
    """Validation loss at the end, training loss of the last step, seconds."""
    settings = {
        "mesh.replicate": args.ranks, "model.preset": args.model, "comm.compress": compress, "data.source": args.source,
        "data.baseline": "false", "train.steps": args.steps, "train.seq_len": 128, "train.global_batch_size": args.rows,
        "train.samples": 0, "train.threads": 1, "optimizer.lr": args.lr, "schedule.warmup_steps": args.steps // 20,
        "run.folder": folder, "run.name": f"with-{compress.replace(':', '-')}"}
    config = folder / "train.toml"
    config.write_text("[train]\nglobal_batch_size = 2\n")
    command = [sys.executable, "-m", "rankloom", "train", str(config), *(f"--{key}={value}" for key, value in settings.items())]
    subprocess.run(command, check=True, capture_output=True)
    events = [json.loads(line) for line in (folder / settings["run.name"] / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "StepDone"]
    (validation,) = [event["loss"] for event in events if event["event"] == "Evaluated"]
    return validation, steps[-1]["loss"], sum(event["seconds"] for event in steps)


def sent(compress: str, args: argparse.Namespace) -> int:
    """Bytes that a rank sends in a step: the second, for in the first buckets are laid out."""
    shape = replace(preset(args.model), vocab_size=BYTES_VOCAB)

    def body(world: rl.World) -> int:
        engine = rl.prepare(rl.GPT(shape), loss=language_model_loss, world=world, compress=compress,
                            optimizer=lambda params: torch.optim.AdamW(params, lr=args.lr))
        tokens = torch.randint(BYTES_VOCAB, (2, 65), generator=torch.Generator().manual_seed(world.rank))
        for _ in range(2):
            before = world.ledger.bytes
            engine.step((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        return world.ledger.bytes - before

    return rl.simulate(args.ranks, body)[0]


def main() -> None:
    """Train with each compression, print the table, keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", default=",".join(NAMES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="1M")
    parser.add_argument("--source", default="stdlib")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rows", type=int, default=16, help="of 128 tokens, in the global batch")
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    where, rows, exact, whole = machine(), [], 0.0, sent("none", args)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.compress.split(","):
            validation, last, seconds = train(name, args, Path(folder))
            exact = exact or validation
            rows.append({"compress": name, "validation loss": round(validation, 4), "to the exact run": f"{validation / exact - 1:+.2%}",
                         "within": WITHIN.get(name, ""), "fewer bytes": f"{whole / sent(name, args):.1f}x",
                         "last training loss": round(last, 4), "s": round(seconds)})
            print(show(rows[-1:]).splitlines()[-1], flush=True)
            keep("compressed_training", where, rows)   # each takes many minutes
    print(show(rows))


if __name__ == "__main__":
    main()
