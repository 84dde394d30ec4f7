"""Save and load a whole training state: `engine.save` and `load`, beside torch.distributed.checkpoint with FSDP2, in turn.

    python benchmarks/checkpoint.py                     # 57M GPT with AdamW, 2 ranks, sharded
    python benchmarks/checkpoint.py --model 11M --ranks 4

Both hold the same model at "stage 3" on gloo, after one step, in the same processes, a core each; every save and load is of all of it, onto
the same disk: parameters, two moments, counters. torch's is `dcp.save` and `dcp.load` of `get_state_dict` with its file system writer as it
comes, which syncs its files as ours are; it has no hashes, ours are made and compared.
"""

import argparse
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import Words, busy_cores, count, keep, machine, median_ms, median_ratio, next_token, pin_to_core, run_ranks, show, take_turns
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import rankloom as rl
from rankloom.models.config import preset
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss

SEQ_LEN = 64
OURS, TORCHS = "rankloom", "torch.distributed.checkpoint"


def adamw(params: list) -> torch.optim.Optimizer:
    """The same optimizer for both."""
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def batch_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A row for each rank."""
    row = torch.randint(0, 1000, (1, SEQ_LEN + 1), generator=torch.Generator().manual_seed(rank))
    return next_token(row)


def ours(args: argparse.Namespace, world: rl.World, folder: Path) -> dict[str, Callable[[], object]]:
    """Save and load of an engine."""
    model = GPT(preset(args.model, seq_len=SEQ_LEN))
    engine = rl.prepare(model, loss=language_model_loss, optimizer=adamw, world=world, stage=3)
    engine.step(batch_of(world.rank))
    return {"save": lambda: engine.save(folder), "load": lambda: engine.load(folder)}


def torchs(args: argparse.Namespace, rank: int, folder: Path) -> dict[str, Callable[[], object]]:
    """Save and load of an FSDP2 model and its optimizer."""
    model = GPT(preset(args.model, seq_len=SEQ_LEN))
    everyone: Any = dist.group.WORLD
    mesh = DeviceMesh.from_group(everyone, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(list(model.parameters()))
    total, count = model(batch_of(rank)[0], targets=batch_of(rank)[1])
    (total / count).backward()
    optimizer.step()
    optimizer.zero_grad()

    def save() -> None:
        values, remembered = get_state_dict(model, optimizer)
        dcp.save({"model": values, "optimizer": remembered}, checkpoint_id=str(folder))

    def load() -> None:
        values, remembered = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": values, "optimizer": remembered}
        dcp.load(state, checkpoint_id=str(folder))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    return {"save": save, "load": load}


def worker(args: argparse.Namespace) -> None:
    """One rank under torchrun: measure, and let rank 0 write what it found."""
    warnings.filterwarnings("ignore")
    rank = int(os.environ["RANK"])
    pin_to_core(rank)
    dist.init_process_group("gloo")
    world, folder = rl.init(backend="gloo"), Path(args.folder)
    variants = {OURS: ours(args, world, folder / "ours"), TORCHS: torchs(args, rank, folder / "torchs")}
    found = {what: take_turns({name: each[what] for name, each in variants.items()}, args.repeat, world.barrier, warm_up=1)
             for what in ("save", "load")}
    if rank == 0:
        Path(args.out).write_text(json.dumps({"times": found, "bytes": sum(path.stat().st_size for path in (folder / "ours").iterdir())}))
    dist.barrier()
    os._exit(0)   # the threads of two libraries need no farewell


def main() -> None:
    """Start the ranks, show and keep what they found."""
    words = Words(__doc__, worker)
    words.add_argument("--model", default="57M")
    words.add_argument("--ranks", type=count, default=2)
    words.add_argument("--repeat", type=count, default=8)
    words.add_argument("--name", default="checkpoint", help="of the files in benchmarks/results/")
    args = words.read()
    warning, where, folder = busy_cores(), machine(), tempfile.mkdtemp(prefix="checkpoint-")
    print(warning)
    try:
        found = run_ranks(__file__, args.ranks, args, folder=folder)
    finally:
        shutil.rmtree(folder)
    gigabytes = found["bytes"] / 1e9
    rows = []
    for what, times in found["times"].items():
        for name, each in times.items():
            rows.append({"model": args.model, "ranks": args.ranks, "GB": round(gigabytes, 2), "what": what, "library": name,
                         "median ms": median_ms(each["wall"]), "GB/s": round(gigabytes / median_ms(each["wall"]) * 1e3, 2),
                         "time, torch's = 1": median_ratio(each["wall"], times[TORCHS]["wall"])})
    print(show(rows), flush=True)
    keep(args.name, f"{where}\n{warning}".strip(), rows)


if __name__ == "__main__":
    main()
