"""Sharding on one GPU: stage 3 beside FSDP2, a 7B model in 24 GB, four ranks on one device.

    python benchmarks/gpu_sharded.py                          # a CUDA device: all parts
    python benchmarks/gpu_sharded.py --parts speed,ranks      # of speed, budget, ranks
    python benchmarks/gpu_sharded.py --small                  # the same script at toy size, on whatever there is

speed    The 1.24B Llama shape, sequence 4096, batch 4, one rank: ours at stage 3, where backward repeats what is cheap, and where it keeps
         all; FSDP2 with compiled blocks (parameters freed after forward, and kept, and with a compiled loss; the fastest counts); and
         FSDP2 with our loss in chunks, to see what that alone is worth.
budget   A 7B Llama with the allocator limited to 24 GB: stage 3; parameters, gradients and optimizer state in host memory; blocks
         recomputed.
ranks    Four ranks on the one device at stage 3, and one rank that holds everything: the same global batch.

Every variant runs in processes of its own, one after another, so that its peak is its own: the allocator's, and where several ranks
share a device what the device says is in use, less what was in use before there was a model.
"""

import argparse
import json
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Words, count, judge, keep, machine, names_of, next_token, run_alone, show, synchronize, try_ranks
from torch import Tensor, nn

import rankloom as rl
from rankloom.models.config import GPTConfig, parameter_count, preset
from rankloom.models.gpt import GPT, initial_values
from rankloom.models.loss import count_targets, language_model_loss, loss_and_gradient, plain_cross_entropy, plain_language_model_loss

BUDGET = 24 * 10**9
CHUNKS, WHOLE, COMPILED = "in chunks", "whole logits", "whole logits, compiled"   # ways to the loss; chunks have a compiled kernel
WARM_UP = 4
LLAMA_7B = GPTConfig(width=4096, layers=32, heads=32, kv_heads=32, ffn=11008, vocab_size=32000, seq_len=4096)
Loss = Callable[[nn.Module, tuple], tuple[Tensor, Tensor]]
Step = Callable[[tuple], float]


@dataclass(frozen=True)
class Variant:
    """One way to train, and how much of it is run."""

    part: str
    kind: str                  # "ours", "FSDP2"
    stage: int = 3
    ranks: int = 1
    keeps: bool = False        # FSDP2: parameters after forward
    loss: str = CHUNKS
    offload: bool = False      # in the budget
    recompute: str = "none"
    precision: str = "bf16"


VARIANTS = {
    "FSDP2 compiled": Variant("speed", "FSDP2", loss=WHOLE),
    "FSDP2 compiled, kept": Variant("speed", "FSDP2", keeps=True, loss=WHOLE),
    "FSDP2 and loss compiled": Variant("speed", "FSDP2", loss=COMPILED),
    "FSDP2 compiled, our loss": Variant("speed", "FSDP2"),
    "ours, stage 3": Variant("speed", "ours", recompute="selective"),   # in the compiled graph: outputs of matrix products are kept
    "ours, stage 3, all kept": Variant("speed", "ours"),
    "7B in 24 GB": Variant("budget", "ours", offload=True, recompute="full"),
    "1 rank, stage 0": Variant("ranks", "ours", stage=0),
    "4 ranks, stage 3": Variant("ranks", "ours", ranks=4),
}
PEERS = ("FSDP2 compiled", "FSDP2 compiled, kept", "FSDP2 and loss compiled")


def shape(variant: Variant, small: bool) -> tuple[GPTConfig, int]:
    """The model, and the rows of the global batch."""
    if small:
        return preset("1M", vocab_size=512, seq_len=128), 4
    return (LLAMA_7B, 4) if variant.offload else (preset("1.2B"), 4)


# ---------------------------------------------------------------------- one variant, in a process of its own

def adamw(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The same optimizer for all."""
    return torch.optim.AdamW(params, lr=1e-4, betas=(0.9, 0.95), fused=True)


def ours(variant: Variant, config: GPTConfig, world: rl.World, compiled: bool) -> Step:
    """A step of `rl.prepare`; the model of 7B is never whole anywhere."""
    model = GPT(config, device="meta" if variant.offload else world.device)
    if compiled:
        model.loss_kernel = torch.compile(loss_and_gradient)
    memory: dict[str, Any] = {"offload": True, "initialize": initial_values(model, 0)} if variant.offload else {}
    engine = rl.prepare(model, loss=language_model_loss, optimizer=adamw, world=world, stage=variant.stage, clip=1.0,
                        precision=variant.precision, compile=compiled, recompute=variant.recompute, **memory)
    return lambda batch: engine.step(batch).loss


def fsdp2(variant: Variant, config: GPTConfig, device: torch.device, compiled: bool) -> Step:
    """A step of torch's fully_shard on a group of one: a unit for each block, one for the rest."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = GPT(config, device=device)
    if compiled:
        for block in model.blocks:
            block.compile()
        if variant.loss == CHUNKS:
            model.loss_kernel = torch.compile(loss_and_gradient)
    for part in (*model.blocks, model):
        fully_shard(part, mp_policy=policy, reshard_after_forward=False if variant.keeps else None)   # None: all but the root's
    cross_entropy = torch.compile(plain_cross_entropy) if variant.loss == COMPILED and compiled else plain_cross_entropy

    def whole_logits(model: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
        return cross_entropy(model(batch[0]), batch[1]), count_targets(batch[1])

    return plain_step(model, adamw(model.parameters()), language_model_loss if variant.loss == CHUNKS else whole_logits)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss = plain_language_model_loss) -> Step:
    """Forward, backward, clip, step: what a user of the peers writes."""
    def step(batch: tuple) -> float:
        total, count = loss_of(model, batch)
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def step_of(variant: Variant, config: GPTConfig, world: rl.World, compiled: bool) -> Step:
    """A step of a variant."""
    return fsdp2(variant, config, world.device, compiled) if variant.kind == "FSDP2" else ours(variant, config, world, compiled)


def tokens_of(config: GPTConfig, rows: int, world: rl.World) -> tuple:
    """This rank's rows of the global batch: random tokens, the same in every step."""
    each = rows // world.size
    text = torch.randint(0, config.vocab_size, (rows, config.seq_len + 1), generator=torch.Generator().manual_seed(0))
    text = text[world.rank * each:(world.rank + 1) * each].to(world.device)
    return next_token(text)


class DeviceMemory:
    """What the device says is in use, looked up all the time; nothing on a CPU."""

    def __init__(self, device: torch.device):
        self._device, self._done = device, threading.Event()
        self.before = self.most = self._in_use()
        self._watcher = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "DeviceMemory":
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()

    def _look(self) -> None:
        while not self._done.wait(0.05):   # torch keeps what it has once taken; and who looks holds up those who start kernels
            self.most = max(self.most, self._in_use())

    def _in_use(self) -> int:
        if self._device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


def worker(args: argparse.Namespace) -> None:
    """One rank of one variant."""
    variant = VARIANTS[args.only]
    torch.set_float32_matmul_precision("high")
    config, rows = shape(variant, args.small)
    world = rl.init(rl.Mesh(shard=variant.ranks))
    device = world.device
    if variant.offload and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(BUDGET / torch.cuda.get_device_properties(device).total_memory)
    torch.zeros(1, device=device)   # the context is there before anything is counted
    world.barrier()
    with DeviceMemory(device) as watched:
        step = step_of(variant, config, world, compiled=not args.eager)
        steps = 2 + args.repeat // 3 if variant.offload else WARM_UP + args.repeat
        seconds, losses = run(step, tokens_of(config, rows, world), device, steps)
    peaks = world.all_gather_object(torch.cuda.max_memory_allocated() if device.type == "cuda" else 0)
    if world.rank == 0:
        Path(args.out).write_text(json.dumps({
            "seconds": statistics.median(seconds), "losses": losses, "peaks": peaks, "device": watched.most - watched.before,
            "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
    world.close()


def run(step: Step, batch: tuple, device: torch.device, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step after the first ones, which compile; the losses of all."""
    seconds, losses = [], []
    for _ in range(steps):
        synchronize(device)
        begin = time.perf_counter()
        losses.append(step(batch))
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return seconds[min(WARM_UP, steps // 2):], losses


def measure(name: str, args: argparse.Namespace) -> dict:
    """Run one variant; what it found, or why it could not run."""
    ranks = VARIANTS[name].ranks
    return try_ranks(__file__, ranks, args, only=name) if ranks > 1 else run_alone(__file__, args, only=name)


# ---------------------------------------------------------------------- what came out

def row(name: str, found: dict, args: argparse.Namespace) -> dict:
    """One line of the table."""
    variant = VARIANTS[name]
    config, rows = shape(variant, args.small)
    gib = 1 << 30
    return {"part": variant.part, "variant": name, "parameters": f"{parameter_count(config) / 1e6:,.1f}M",
            "ms": round(found["seconds"] * 1e3, 1), "tokens/s": round(rows * config.seq_len / found["seconds"]),
            "peak GiB, ranks summed": round(sum(found["peaks"]) / gib, 2),
            "of the largest rank": round(max(found["peaks"]) / gib, 2), "device GiB": round(found["device"] / gib, 2),
            "host GiB": round(found["host"] / gib, 1), "first loss": round(found["losses"][0], 4),
            "last loss": round(found["losses"][-1], 4)}


def verdicts(found: dict[str, dict]) -> list[str]:
    """The bars for which both sides ran."""
    said = []
    peers = [found[name] for name in PEERS if name in found]
    if peers and "ours, stage 3" in found:
        mine, best = found["ours, stage 3"], min(peers, key=lambda peer: peer["seconds"])
        speed = best["seconds"] / mine["seconds"]
        said.append(judge(f"stage 3 has {speed:.3f} x the tokens/s of FSDP2 with compiled blocks (>= 1.15)", speed >= 1.15))
        if best["peaks"][0]:   # nobody counts on a CPU
            memory = mine["peaks"][0] / best["peaks"][0]
            said.append(judge(f"and {memory:.1%} of its peak memory (<= 60 %)", memory <= 0.6))
    if {"1 rank, stage 0", "4 ranks, stage 3"} <= found.keys() and found["1 rank, stage 0"]["device"]:
        device = found["4 ranks, stage 3"]["device"] / found["1 rank, stage 0"]["device"]
        said.append(judge(f"4 ranks at stage 3 use together {device:.1%} of the device memory of one unsharded rank (< 100 %)", device < 1))
    return said


def main() -> None:
    """Run the parts asked for, print as they come, keep all."""
    parser = Words(__doc__, worker, gpu=True)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--parts", type=names_of(["speed", "budget", "ranks"]), default="speed,budget,ranks")
    parser.add_argument("--repeat", type=count, default=10)
    parser.add_argument("--name", default="gpu_sharded", help="of the files in benchmarks/results/")
    args = parser.read()
    where = machine()
    found, table = {}, []
    print(where, flush=True)
    for name in (name for name, variant in VARIANTS.items() if variant.part in args.parts):
        result = measure(name, args)
        if "error" in result:
            print(f"{name} could not run: {result['error']}", flush=True)
            continue
        found[name] = result
        table.append(row(name, result, args))
        print(show(table[-1:]), flush=True)
        if not args.small:   # now: a later one may take longer than there is time
            keep(args.name, where, table, note="\n" + "\n".join(verdicts(found)) + "\n")
    print("\n".join(verdicts(found)))


if __name__ == "__main__":
    main()
