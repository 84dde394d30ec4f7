"""Where the time of a step goes on one GPU: its kernels by kind, and the gaps in which none runs.

    python benchmarks/gpu_profile.py                                   # a CUDA device: stage 3 and FSDP2, the 1.24B Llama shape
    python benchmarks/gpu_profile.py --variants "ours, stage 0" "ours, stage 0, fp8"
    python benchmarks/gpu_profile.py --small                           # the same script at toy size, on whatever there is

Variants are those of gpu_sharded.py, part `speed`, and stage 0 in bf16 and fp8, each in a process of its own. "step" is the median of
steps that nobody watches; the rest is of two steps under torch's profiler, which slows Python, and so widens gaps. A kernel's kind is
told by its name.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import Words, count, keep, machine, run_alone, show, synchronize
from gpu_sharded import VARIANTS, WARM_UP, Variant, run, shape, step_of, tokens_of
from torch.profiler import ProfilerActivity, profile

import rankloom as rl

KINDS = {   # kind: parts of kernels' names; the first that fits counts
    "attention": ("sdpa", "fmha", "flash", "compute_dot_do_o", "convert_dq", "scaled_dot_product"),
    "compiled": ("triton_",),
    "casts to 8 bits": ("cast_twice",),
    "products": ("nvjet", "gemm", "cutlass", "splitk", "aten::mm", "aten::addmm"),
    "optimizer": ("fusedoptimizer", "adam"),
    "conversions": ("copy", "memcpy"),
}
WATCHED = {name: variant for name, variant in VARIANTS.items() if variant.part == "speed"} | {
    "ours, stage 0": Variant("profile", "ours", stage=0), "ours, stage 0, fp8": Variant("profile", "ours", stage=0, precision="fp8")}
STEPS = 2    # under the profiler
LONGEST = 12   # kernels that are listed
Span = tuple[float, float]   # microseconds: begin, end


def kind_of(kernel: str) -> str:
    """The kind of a kernel."""
    return next((kind for kind, parts in KINDS.items() if any(part in kernel.lower() for part in parts)), "the rest")


def covered(spans: Iterable[Span]) -> float:
    """How long at least one of the spans lasts.

    >>> covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def kernels_of(events: Sequence[Any], device: torch.device) -> list[tuple[str, Span]]:
    """Name and span of all that ran on the device; on the CPU, of the operators that call no other."""
    def is_operator(event: Any) -> bool:
        return bool(event.name.startswith("aten::"))

    if device.type == "cuda":
        wanted = [event for event in events if "CUDA" in str(event.device_type) and not event.is_user_annotation]
    else:
        wanted = [event for event in events if is_operator(event) and not any(map(is_operator, event.cpu_children))]
    return [(event.name, (event.time_range.start, event.time_range.end)) for event in wanted]


def worker(args: argparse.Namespace) -> None:
    """One variant: its steps timed, then watched."""
    variant = WATCHED[args.only]
    torch.set_float32_matmul_precision("high")
    config, rows = shape(variant, args.small)
    world = rl.init(rl.Mesh(shard=1))
    device = world.device
    step, batch = step_of(variant, config, world, compiled=not args.eager), tokens_of(config, rows, world)
    seconds, _ = run(step, batch, device, WARM_UP + args.repeat)
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
    with profile(activities=activities, acc_events=True) as watched:
        for _ in range(STEPS):
            step(batch)
        synchronize(device)
    kernels = kernels_of(watched.events(), device)
    Path(args.out).write_text(json.dumps({"seconds": statistics.median(seconds), "kernels": kernels}))


def times_of(found: dict) -> tuple[dict[str, float], Counter[str]]:
    """Milliseconds of a step: by kind, with gaps; and by kernel."""
    by_kind, by_kernel = Counter[str](), Counter[str]()
    for name, (begin, end) in found["kernels"]:
        by_kind[kind_of(name)] += end - begin
        by_kernel[name] += end - begin
    spans = [span for _, span in found["kernels"]]
    gaps = max(end for _, end in spans) - min(begin for begin, _ in spans) - covered(spans)
    each = {kind: round(by_kind[kind] / STEPS / 1e3, 1) for kind in [*KINDS, "the rest"]}
    return {"step": round(found["seconds"] * 1e3, 1), **each, "gaps": round(gaps / STEPS / 1e3, 1)}, by_kernel


def main() -> None:
    """Every variant; print where its time goes, and keep it."""
    parser = Words(__doc__, worker, gpu=True)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--repeat", type=count, default=10)
    parser.add_argument("--variants", nargs="+", choices=WATCHED, default=["FSDP2 compiled", "ours, stage 3"])
    args = parser.read()
    where = machine()
    table = []
    print(where, flush=True)
    for variant in args.variants:
        found = run_alone(__file__, args, only=variant)
        if "error" in found:
            print(f"{variant} could not run: {found['error']}", flush=True)
            continue
        times, kernels = times_of(found)
        table.append({"variant": variant, **{f"{kind}, ms": ms for kind, ms in times.items()}})
        print(show(table[-1:]), flush=True)
        for name, microseconds in kernels.most_common(LONGEST):
            print(f"{microseconds / STEPS / 1e3:9.2f} ms  {name[:120]}", flush=True)
        if not args.small:   # now: a later one may take longer than there is time
            keep("gpu_profile", where, table)


if __name__ == "__main__":
    main()
