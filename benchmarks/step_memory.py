"""Memory over one training step of the 1.24B Llama on one GPU: ours beside FSDP2, counted without a GPU.

    python benchmarks/step_memory.py                 # all ways, blocks compiled
    python benchmarks/step_memory.py --scale 16      # a smaller model: quicker

How: width, heads, inner width, vocabulary and sequence are those of the 1.24B Llama divided by 8. Then every tensor that matters is 1/64 of
its size: a matrix by its two sides, an activation by its tokens and its width, logits by tokens and vocabulary. Every byte that torch's
allocator gives and takes in a step on the CPU is noted, with the memory of units and gradients managed as on a GPU, and multiplied by 64.
Kernels are those for the CPU: what a kernel for CUDA needs beside its inputs and outputs is not in it, nor is what the allocator loses
to fragments. Every way runs in a process of its own; the loss in chunks has chunks of 1/64, too.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from common import RESULTS, Words, count, keep, machine, run_alone, show
from gpu_sharded import VARIANTS, step_of, tokens_of
from gpu_single import STAGE_0
from matplotlib.figure import Figure

import rankloom as rl
from rankloom.base import loss
from rankloom.models.config import GPTConfig, preset
from rankloom.shard import frames

ROWS, STEPS = 4, 3
ALONE = "ours, stage 0"   # of gpu_single.py
NAMES = ("FSDP2 compiled", "FSDP2 compiled, kept", "FSDP2 and loss compiled", "FSDP2 compiled, our loss",
         ALONE, "ours, stage 3, all kept", "ours, stage 3")
PEER = "FSDP2 compiled"
DRAWN = {   # way -> line, and what the legend says
    PEER: (":", PEER), "FSDP2 and loss compiled": ("--", "FSDP2 and loss compiled"),
    "ours, stage 3": ("-", "ours, stage 3, + selective recompute"), "ours, stage 3, all kept": ("-.", "ours, stage 3")}
GIB = 1 << 30


def scaled(by: int) -> GPTConfig:
    """The 1.24B Llama, a `by`-th in every direction but the depth."""
    whole = preset("1.2B")
    return preset("1.2B", width=whole.width // by, heads=whole.heads // by, kv_heads=max(1, whole.kv_heads // by), ffn=whole.ffn // by,
                  vocab_size=whole.vocab_size // by, seq_len=whole.seq_len // by)


def worker(args: argparse.Namespace) -> None:
    """One way: the bytes in use over its last step."""
    frames.has_allocator = lambda device: True
    loss.CHUNK_ELEMENTS["cpu"] = loss.CHUNK_ELEMENTS["cuda"] // args.scale**2
    torch.set_num_threads(1)
    config, world = scaled(args.scale), rl.init(rl.Mesh(shard=1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as noted:
        step = step_of(STAGE_0 if args.only == ALONE else VARIANTS[args.only], config, world, compiled=True)
        batch = tokens_of(config, ROWS, world)
        for number in range(STEPS):
            with torch.profiler.record_function(f"step {number}"):
                step(batch)
    world.close()
    with tempfile.TemporaryDirectory() as folder:
        noted.export_chrome_trace(str(Path(folder) / "trace.json"))
        events = json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
    Path(args.out).write_text(json.dumps({"moments": moments_of(events, f"step {STEPS - 1}")}))


def moments_of(events: list[dict], step: str) -> list[tuple[float, int]]:
    """When in a step, from 0 to 1, how many bytes were in use."""
    found = next(event for event in events if event.get("name") == step and event.get("ph") == "X")
    begin, took = found["ts"], found["dur"]
    notes = sorted((event["ts"], event["args"]["Total Allocated"]) for event in events if event.get("name") == "[memory]")
    return [((at - begin) / took, held) for at, held in notes if begin <= at <= begin + took]


def row(name: str, moments: list[tuple[float, int]], scale: int, peer: float) -> dict:
    """One line of the table."""
    peak = max(held for _, held in moments) * scale**2
    return {"way": name, "peak GiB": round(peak / GIB, 1), "over FSDP2 compiled": f"{peak / peer:.1%}" if peer else "-"}


def draw(found: dict[str, list[tuple[float, int]]], scale: int, path: Path) -> None:
    """Bytes over the step, ours beside the peers'."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for name, (style, said) in DRAWN.items():
        times, held = zip(*found[name])
        axes.plot(times, [nbytes * scale**2 / GIB for nbytes in held], style, label=said, drawstyle="steps-post")
    axes.set(xlabel="one step: forward, loss, backward, update", ylabel="GiB in use", xlim=(0, 1), ylim=(0, None))
    axes.set_xticks([])
    axes.legend(frameon=False)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Count, print, draw, keep."""
    parser = Words(__doc__, worker)
    parser.add_argument("--scale", type=count, default=8, help="divides every side of the model: 8 or 16")
    parser.add_argument("--name", default="step_memory", help="of the files in benchmarks/results/")
    args = parser.read()
    where = machine()
    found: dict[str, list[tuple[float, int]]] = {}
    peer = 0.0
    table = []
    for name in NAMES:
        result = run_alone(__file__, args, only=name)
        if "error" in result:
            raise SystemExit(f"{name} could not run: {result['error']}")
        found[name] = result["moments"]
        peer = peer or max(held for _, held in found[PEER]) * args.scale**2
        table.append(row(name, found[name], args.scale, peer))
        print(show(table[-1:]), flush=True)
    keep(args.name, where, table)
    if args.name:
        draw(found, args.scale, RESULTS / f"{args.name}.png")


if __name__ == "__main__":
    main()
