"""The run of `make train` on 1, 2 and 4 ranks with the same global batch: are the losses the same?

    python benchmarks/same_losses.py

Runs `rankloom train train.toml` on each number of ranks, in the free order and deterministic, and compares every step's loss and the
validation loss with those of one rank. In the free order sums are added in another order, so the last bits differ, and
training lets the difference grow; deterministic, it must be 0.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import Words, count, counts, keep, machine, show

ROOT = Path(__file__).parent.parent


def losses(ranks: int, steps: int, deterministic: bool, folder: Path) -> list[float]:
    """Every loss that a run reports, the validation's last."""
    name = f"{'deterministic' if deterministic else 'free'}-{ranks}"
    settings = {"mesh.replicate": ranks, "train.steps": steps, "schedule.warmup_steps": steps // 4, "train.eval_every": 0,
                "train.samples": 0, "data.baseline": "false", "run.folder": folder, "run.name": name}
    command = [sys.executable, "-m", "rankloom", "train", str(ROOT / "train.toml")]
    command += [f"--{key}={value}" for key, value in settings.items()]
    command += ["--train.deterministic=true"] if deterministic else ["--train.deterministic=false", "--train.threads=1"]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    events = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["event"] in ("StepDone", "Evaluated")]


def main() -> None:
    """Run all, print the table, keep it."""
    parser = Words(__doc__)
    parser.add_argument("--ranks", type=counts, default="1,2,4")
    parser.add_argument("--steps", type=count, default=60)
    args = parser.read()
    where = machine()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for deterministic in (False, True):
            alone = losses(1, args.steps, deterministic, Path(folder))
            for ranks in args.ranks:
                mine = losses(ranks, args.steps, deterministic, Path(folder)) if ranks > 1 else alone
                apart = [abs(a - b) / b for a, b in zip(mine, alone, strict=True)]
                rows.append({"order": "deterministic" if deterministic else "free", "ranks": ranks, "first loss": round(mine[0], 6),
                             "last loss": round(mine[-2], 6), "validation": round(mine[-1], 6),
                             "largest relative difference to 1 rank": f"{max(apart):.1e}" if max(apart) else "0, the same bits"})
                print(show(rows[-1:]).splitlines()[-1], flush=True)
    print(show(rows))
    keep("same_losses", where, rows)


if __name__ == "__main__":
    main()
