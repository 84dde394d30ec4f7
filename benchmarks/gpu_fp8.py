"""FP8 against our own bf16 on one GPU: tokens/s, peak memory, and the loss after 200 steps on real text.

    python benchmarks/gpu_fp8.py                    # a CUDA device from compute capability 8.9: the 1.24B Llama shape, batch 4 x 4096
    python benchmarks/gpu_fp8.py --small            # the same script at toy size, on whatever there is; the CPU emulates the products

Needs nothing but this repository (PYTHONPATH=src): the text is the source of Python's own library, byte by byte. Every variant runs
in a process of its own, one after another, from the same weights and on the same batches; blocks are compiled, AdamW is fused.
The loss is the mean of the last tenth of the steps, the time the median of those after the first tenth.

    bf16            rl.prepare, bf16 with fp32 masters
    fp8             the same, with the linear layers of the blocks in fp8: one scale a matrix, current
    fp8 delayed     scaled by the last 16 steps
    fp8 row         one scale a row
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from common import Words, count, keep, machine, names_of, next_token, run_alone, show, synchronize, the_device

import rankloom as rl
from rankloom.data.text import documents
from rankloom.models.config import GPTConfig, parameter_count, preset
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss, loss_and_gradient
from rankloom.train.fp8 import InFloat8, Recipe
from rankloom.train.precision import PRECISIONS

RECIPES = {"bf16": None, "fp8": Recipe(), "fp8 delayed": Recipe(timing="delayed"), "fp8 row": Recipe(scaling="row")}
WARM_UP = 20     # steps in which the learning rate rises
RATE = 3e-4


def shape(small: bool) -> tuple[GPTConfig, int]:
    """The model and the batch."""
    return (preset("1M", vocab_size=256, seq_len=64), 4) if small else (preset("1.2B"), 4)


def text(size: int) -> torch.Tensor:
    """The first bytes of Python's library."""
    found = bytearray()
    for document in documents("stdlib"):
        found += document.text.encode()
        if len(found) >= size:
            break
    return torch.frombuffer(found[:size], dtype=torch.uint8).long()


def rows_of(corpus: torch.Tensor, rows: int, length: int, draw: torch.Generator) -> torch.Tensor:
    """Pieces of the text from anywhere, [rows, length]."""
    starts = torch.randint(0, len(corpus) - length, (rows,), generator=draw)
    return torch.stack([corpus[at : at + length] for at in starts])


def worker(args: argparse.Namespace) -> None:
    """One variant, in this process."""
    device = the_device()
    torch.set_float32_matmul_precision("high")
    config, rows = shape(args.small)
    model = GPT(config, device=device)
    recipe = RECIPES[args.only]
    if not args.eager:
        model.loss_kernel = torch.compile(loss_and_gradient)
    engine = rl.prepare(model, loss=language_model_loss, world=rl.init(device=device.type), clip=1.0, compile=not args.eager,
                        precision=replace(PRECISIONS["fp8"], float8=recipe) if recipe else "bf16",
                        schedule=lambda step: RATE * min(1.0, (step + 1) / WARM_UP),
                        optimizer=lambda p: torch.optim.AdamW(p, lr=RATE, betas=(0.9, 0.95), fused=True))
    corpus, draw = text(1 << 18 if args.small else 1 << 23), torch.Generator().manual_seed(0)
    seconds, losses = [], []
    tenth = max(1, args.steps // 10)
    for step in range(1, args.steps + 1):
        piece = rows_of(corpus, rows, config.seq_len + 1, draw).to(device)
        synchronize(device)
        begin = time.perf_counter()
        losses.append(engine.step(next_token(piece)).loss)
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
        if step % tenth == 0:
            pace = statistics.median(seconds[-tenth:])
            print(f"{args.only}, step {step} of {args.steps}: loss {losses[-1]:.4f}, {pace * 1e3:.1f} ms a step", flush=True)
    found = {"seconds": statistics.median(seconds[tenth:]), "loss": statistics.mean(losses[-tenth:]), "losses": losses,
             "layers": sum(isinstance(module, InFloat8) for module in model.modules()),
             "peak": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0}
    Path(args.out).write_text(json.dumps(found))


def main() -> None:
    """Every variant, each compared with the first; print the table and keep it."""
    parser = Words(__doc__, worker, gpu=True)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--steps", type=count, default=200)
    parser.add_argument("--variants", type=names_of(RECIPES), default=",".join(RECIPES), help="the first is what others are compared with")
    args = parser.read()
    where, (config, rows) = machine(), shape(args.small)
    tokens = rows * config.seq_len
    print(f"{where}\n{parameter_count(config) / 1e6:.1f}M parameters, {rows} x {config.seq_len} tokens, {args.steps} steps", flush=True)
    table: list[dict] = []
    first: dict = {}
    for variant in args.variants:
        found = run_alone(__file__, args, only=variant)
        if "error" in found:
            print(f"{variant} could not run: {found['error']}", flush=True)
            continue
        first = first or found
        table.append({
            "variant": variant, "layers in fp8": found["layers"], "ms": round(found["seconds"] * 1e3, 1),
            "tokens/s": round(tokens / found["seconds"]), "speed-up": round(first["seconds"] / found["seconds"], 3),
            "peak GiB": round(found["peak"] / 2**30, 1), "loss": round(found["loss"], 4),
            "loss, against the first": f"{100 * (found['loss'] / first['loss'] - 1):+.2f} %",
        })
        print(show(table[-1:]), flush=True)
        if not args.small:   # now: a later one may take longer than there is time
            keep("gpu_fp8", where, table)


if __name__ == "__main__":
    main()
