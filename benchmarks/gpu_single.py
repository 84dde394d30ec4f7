"""One GPU trains the 1.24B Llama shape: ours beside FSDP2 and torch.compile, in one run.

    python benchmarks/gpu_single.py                 # a CUDA device: sequence 4096, batch 4
    python benchmarks/gpu_single.py --small         # the same script at toy size, on whatever there is

Every variant runs in a process of its own, one after another, so that peak memory is its own; all take the same batch and fused AdamW.
Model TFLOP/s count 6 x parameters + causal attention, once per token: work done again (recompute) does not count.
The share is of the rate that a large bf16 matrix product reaches on the same device in the same run.

    ours             rl.prepare, bf16 with fp32 masters, each block compiled, cross-entropy in chunks
    FSDP2 eager      fully_shard per block, bf16 compute, fp32 parameters
    FSDP2 compiled   the same with each block compiled
    compile          torch.compile of the whole model and its loss as one, under autocast, no wrapper
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from common import Words, count, keep, machine, names_of, run_alone, show, synchronize, the_device
from gpu_sharded import VARIANTS as SHARDED
from gpu_sharded import WARM_UP, Step, Variant, adamw, plain_step, run, step_of, tokens_of
from torch import Tensor, nn

import rankloom as rl
from rankloom.models.config import GPTConfig, model_flops_per_token, parameter_count, preset
from rankloom.models.gpt import GPT
from rankloom.models.loss import plain_language_model_loss

STAGE_0 = Variant("", "ours", stage=0)   # all is kept for backward: it fits in 40 GiB
VARIANTS = ("ours", "FSDP2 eager", "FSDP2 compiled", "compile")


def shape(small: bool) -> tuple[GPTConfig, int]:
    """The model and the batch."""
    return (preset("1M", vocab_size=512, seq_len=128), 2) if small else (preset("1.2B"), 4)


def whole_compile(config: GPTConfig, device: torch.device, compiled: bool) -> Step:
    """A step of a plain model, compiled as a whole, under autocast. The loss is in it: its whole logits in fp32 are then never there."""
    model = GPT(config, device=device)
    loss = torch.compile(plain_language_model_loss) if compiled else plain_language_model_loss

    def under_autocast(model: nn.Module, batch: tuple) -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, torch.bfloat16):
            return loss(model, batch)

    return plain_step(model, adamw(model.parameters()), under_autocast)


def worker(args: argparse.Namespace) -> None:
    """One variant, in this process."""
    device = the_device()
    torch.set_float32_matmul_precision("high")
    config, rows = shape(args.small)
    world, compiled = rl.init(device=device.type), args.only != "FSDP2 eager" and not args.eager
    if args.only == "compile":
        step = whole_compile(config, device, compiled)
    else:
        step = step_of(STAGE_0 if args.only == "ours" else SHARDED["FSDP2 compiled"], config, world, compiled)
    seconds, losses = run(step, tokens_of(config, rows, world), device, WARM_UP + args.repeat)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    found = {"seconds": statistics.median(seconds), "peak": peak, "first loss": losses[0], "last loss": losses[-1]}
    Path(args.out).write_text(json.dumps(found))


def matmul_rate(n: int) -> float:
    """TFLOP/s of a bf16 matrix product of random n x n matrices: the ceiling of everything below."""
    device = the_device()
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(12):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(4):
            a @ b
        synchronize(device)
        times.append((time.perf_counter() - begin) / 4)
    return 2 * n**3 / statistics.median(times) / 1e12


def main() -> None:
    """Measure the device's ceiling, then every variant; print the table and keep it."""
    parser = Words(__doc__, worker, gpu=True)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--repeat", type=count, default=10)
    parser.add_argument("--variants", type=names_of(VARIANTS), default=",".join(VARIANTS))
    args = parser.read()
    where, (config, rows) = machine(), shape(args.small)
    ceiling, tokens = matmul_rate(512 if args.small else 8192), rows * config.seq_len
    size = f"{parameter_count(config) / 1e6:.1f}M parameters, {rows} x {config.seq_len} tokens"
    print(f"{where}\n{size}, matmul {ceiling:.4g} TFLOP/s", flush=True)
    table = []
    for variant in args.variants:
        found = run_alone(__file__, args, only=variant)
        if "error" in found:
            print(f"{variant} could not run: {found['error']}", flush=True)
            continue
        rate = tokens * model_flops_per_token(config, config.seq_len) / found["seconds"] / 1e12
        table.append({
            "variant": variant, "ms": round(found["seconds"] * 1e3, 1), "tokens/s": round(tokens / found["seconds"]),
            "model TFLOP/s": round(rate, 4 if args.small else 1), "of matmul": round(rate / ceiling, 3),
            "peak GiB": round(found["peak"] / 2**30, 1),
            "first loss": round(found["first loss"], 4), "last loss": round(found["last loss"], 4),
        })
        print(show(table[-1:]), flush=True)
        if not args.small:   # now: a later one may take longer than there is time
            keep("gpu_single", f"{where}, matmul {ceiling:.1f} TFLOP/s", table)


if __name__ == "__main__":
    main()
