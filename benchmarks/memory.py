"""What a rank holds and sends at each stage: counted in a running engine, beside the formulas; and what 7 billion parameters need.

    python benchmarks/memory.py                      # prints three tables, writes them into docs/sharding.md
    python benchmarks/memory.py --no-docs

The first table steps a small GPT on simulated ranks over gloo and asks `engine.held()` for its bytes at the start and the end of every
block, forward and backward, and between steps; shown is the largest of each kind. Where ZeRO's formulas for the same model (n parameters,
N ranks, Adam) say something else by more than padding, a hundredth, that stands beside it. Traffic is what the ledger counted in one step.

The second counts what autograd saves of a block, beside the formula for it. The third is arithmetic: both formulas for Llama 7B.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import Words, count, counts, keep, machine, names_of, next_token, show
from torch import Tensor

import rankloom as rl
from rankloom.models.config import GPTConfig, parameter_count, preset
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss

PAGE = Path(__file__).parent.parent / "docs" / "sharding.md"
LLAMA_7B = GPTConfig(width=4096, layers=32, heads=32, kv_heads=32, ffn=11008, vocab_size=32000, seq_len=4096)
KINDS = ("parameters", "gathered", "gradients", "optimizer")
FP32, BF16 = "fp32", "bf16"
COMPUTE = {FP32: 4, BF16: 2}   # bytes of a parameter in forward and backward
MASTER = {FP32: 0, BF16: 4}    # of the copy that the optimizer updates, where there is one
GRADIENT, ADAM = 4, 8          # gradients are added up in fp32; Adam keeps two moments


# ---------------------------------------------------------------------- the formulas

@dataclass(frozen=True)
class Bytes:
    """What one rank holds."""

    parameters: float
    gathered: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gathered + self.gradients + self.optimizer


@dataclass(frozen=True)
class Size:
    """How many parameters a model has: in all, in what is in no block (its root: embedding, last norm, head), and in a block."""

    all: int
    root: int
    block: int

    @classmethod
    def of(cls, config: GPTConfig) -> "Size":
        """That of a GPT."""
        everything = parameter_count(config)
        root = config.vocab_size * config.width * (1 if config.tie else 2) + config.width
        return cls(everything, root, (everything - root) // config.layers)


def held(stage: int, n: Size, ranks: int, precision: str) -> Bytes:
    """Bytes of a rank at the fullest moment of a step. Source: Rajbhandari et al. 2020, section 5, with fp32 gradients.

    What is whole for the moment: at stage 3 the parameters of the root and of two blocks, and from stage 2 on their gradients. A master
    that has the format of what is computed with is no second copy, but a part of it.
    """
    compute, master = COMPUTE[precision], MASTER[precision]
    alive = n.root + 2 * n.block
    gradients = GRADIENT * (n.all if stage < 2 else n.all / ranks + alive)
    if stage == 0:
        return Bytes((compute + master) * n.all, 0, gradients, ADAM * n.all)
    own = (master or compute) * n.all / ranks
    whole = compute * (alive if stage == 3 else n.all) - (own if stage < 3 and not master else 0)
    return Bytes(own, whole, gradients, ADAM * n.all / ranks)


def sent(stage: int, n: Size, ranks: int, precision: str) -> float:
    """Bytes that a rank sends in a step: gradients reduced, parameters gathered, (N-1)/N of them; at stage 3 blocks are gathered twice."""
    gathered = {0: GRADIENT * n.all, 3: COMPUTE[precision] * (2 * n.all - n.root)}.get(stage, COMPUTE[precision] * n.all)
    return (ranks - 1) / ranks * (GRADIENT * n.all + gathered)


def saved_by_block(config: GPTConfig, tokens: int, norm: int) -> int:
    """Bytes that autograd keeps of one block in bf16 until backward, attention scores never whole.

    Of each token: both norms' inputs (`norm` bytes an element: 2 where they are one kernel, 8 where they are taken apart, as on CPUs) and
    outputs; query, key and value as they go into attention, and what comes out; the gate before and after its nonlinearity, the other
    half, their product.
    """
    return tokens * (2 * (norm + 2) * config.width + 2 * (2 * config.width + 2 * config.kv_width + 4 * config.ffn))


# ---------------------------------------------------------------------- what is counted

class Probe(torch.autograd.Function):
    """The identity, which calls back when forward passes, and when backward does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, look: Callable[[], None]) -> Tensor:
        """x as it is."""
        ctx.look = look
        look()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient as it is."""
        ctx.look()
        return grad, None


def watch(model: GPT, look: Callable[[], None]) -> None:
    """Look at the start and at the end of every block, forward and backward."""
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: (Probe.apply(args[0], look), *args[1:]))
        block.register_forward_hook(lambda _, args, out: Probe.apply(out, look))


def largest_held(world: rl.World, stage: int, precision: str, config: GPTConfig) -> dict:
    """The most of each kind that this rank ever held in its third step, and the bytes that it sent."""
    seen: list[Any] = []
    model = GPT(config)
    engine = rl.prepare(model, loss=language_model_loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), world=world, stage=stage,
                        precision=precision)
    text = torch.randint(0, config.vocab_size, (1, 65), generator=torch.Generator().manual_seed(world.rank))
    batch = next_token(text)
    for _ in range(2):
        engine.step(batch)
    watch(model, lambda: seen.append(engine.held()))
    before = world.ledger.bytes
    engine.step(batch)
    seen.append(engine.held())
    most = {kind: max(getattr(moment, kind) for moment in seen) for kind in KINDS}
    total = max(sum(getattr(moment, kind) for kind in KINDS) for moment in seen)
    return most | {"total": total, "sent": world.ledger.bytes - before}


def stage_rows(ranks: int, precision: str, config: GPTConfig) -> Iterator[dict]:
    """One row per stage."""
    n = Size.of(config)
    for stage in range(4):
        most = rl.simulate(rl.Mesh(shard=ranks), partial(largest_held, stage=stage, precision=precision, config=config))[0]
        formula = held(stage, n, ranks, precision)
        expected = {kind: getattr(formula, kind) for kind in (*KINDS, "total")} | {"sent": sent(stage, n, ranks, precision)}
        yield {"precision": precision, "ranks": ranks, "stage": stage} | {
            kind: beside(most[kind], nbytes) for kind, nbytes in expected.items()}


def beside(counted: int, expected: float) -> str:
    """What was counted; and what the formula says, where padding does not explain the difference."""
    return readable(counted) if abs(counted - expected) <= 0.01 * expected else f"{readable(counted)}, by formula {readable(expected)}"


def saved_rows(config: GPTConfig, tokens: int) -> list[dict]:
    """What autograd keeps of a block in bf16, counted; each piece of memory once, parameters not at all."""
    model = GPT(config, dtype=torch.bfloat16)
    parts = {part.untyped_storage().data_ptr() for part in (*model.parameters(), model.rotary.cos, model.rotary.sin)}
    storages: dict[int, Any] = {}   # kept, so that no address is given twice

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    x = torch.randn(1, tokens, config.width, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.blocks[0](x, *model.rotary(0, tokens))
    counted = sum(storage.nbytes() for at, storage in storages.items() if at not in parts)
    return [{"width": config.width, "inner": config.ffn, "tokens": tokens, "counted": readable(counted),
             "by formula": readable(saved_by_block(config, tokens, 8))}]


# ---------------------------------------------------------------------- 7 billion parameters

class Way(NamedTuple):
    """One way to train, and the bytes that a rank needs for it."""

    name: str
    gpu: Bytes                # all but activations
    activations: float
    host: float = 0.0


def seven_billion(ranks: int, tokens: int) -> list[dict]:
    """What each way to train Llama 7B in bf16 needs on a GPU, and in host memory; GB are 10^9 bytes."""
    n, block = Size.of(LLAMA_7B), saved_by_block(LLAMA_7B, tokens, 2)
    kept = LLAMA_7B.layers * block
    recomputed = LLAMA_7B.layers * tokens * LLAMA_7B.width * 2 + block
    ways = [Way("one GPU", held(0, n, 1, BF16), kept), Way(f"DDP, {ranks} GPUs", held(0, n, ranks, BF16), kept)]
    ways += [Way(f"stage {stage}, {ranks} GPUs", held(stage, n, ranks, BF16), kept) for stage in (1, 2, 3)]
    ways.append(Way(f"stage 3, {ranks} GPUs, recompute", held(3, n, ranks, BF16), recomputed))
    for gpus, name in ((ranks, f"stage 3, {ranks} GPUs"), (1, "stage 3, one GPU")):
        whole = held(3, n, gpus, BF16).gathered   # slices of everything are in host memory; on the GPU is what is whole for the moment
        there = Bytes(0, whole, GRADIENT / COMPUTE[BF16] * whole, 0)
        ways.append(Way(f"{name}, offload, recompute", there, recomputed, (MASTER[BF16] + GRADIENT + ADAM) * n.all / gpus))
    alive = GRADIENT * (n.root + 2 * n.block)
    return [{"way": way.name, "parameters": gb(way.gpu.parameters), "gathered": gb(way.gpu.gathered), "gradients": gb(way.gpu.gradients),
             "optimizer": gb(way.gpu.optimizer), "activations": gb(way.activations), "GPU, GB": gb(fullest(way, alive)),
             "host of each rank, GB": gb(way.host)} for way in ways]


def fullest(way: Way, alive: float) -> float:
    """Bytes at the fullest moment of a step on a GPU, which begins without gradients: as they come, activations go.

    So either all activations are there, and gradients that are whole for the moment (`alive`), or all gradients.
    """
    gradients = way.gpu.gradients
    return way.gpu.total - gradients + max(gradients, way.activations + min(gradients, alive))


def gb(nbytes: float) -> str:
    """In 10^9 bytes."""
    return f"{nbytes / 1e9:.1f}" if nbytes else "-"


def readable(nbytes: float) -> str:
    """In units of 2^10 bytes."""
    if nbytes >= 1 << 20:
        return f"{nbytes / 2**20:.2f} MiB"
    return f"{nbytes / 2**10:.1f} KiB" if nbytes else "0"


def put(page: Path, name: str, table: str) -> None:
    """Write a table between the marks of its name in a page."""
    text = page.read_text()
    mark = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
    if not re.search(mark, text, re.DOTALL):
        raise SystemExit(f"{page} has no marks <!-- {name} --> and <!-- end -->")
    page.write_text(re.sub(mark, lambda found: found[1] + table + "\n" + found[2], text, count=1, flags=re.DOTALL))


def main() -> None:
    """Count, compute, print, keep."""
    parser = Words(__doc__)
    parser.add_argument("--ranks", type=counts, default="2,4")
    parser.add_argument("--precision", type=names_of([FP32, BF16]), default=f"{FP32},{BF16}")
    parser.add_argument("--gpus", type=count, default=8, help="of the table for 7B")
    parser.add_argument("--tokens", type=count, default=4096, help="of a rank, in the table for 7B")
    parser.add_argument("--no-docs", dest="docs", action="store_false")
    args = parser.read()
    config = preset("1M", vocab_size=512, seq_len=64, layers=24)
    saved, seven = saved_rows(preset("11M"), 256), seven_billion(args.gpus, args.tokens)
    stages = [row for precision in args.precision for ranks in args.ranks for row in stage_rows(ranks, precision, config)]
    tables = {"stages": stages, "saved": saved, "seven": seven}
    for name, rows in tables.items():
        print(show(rows), end="\n\n", flush=True)
        if args.docs:
            put(PAGE, name, show(rows))
    keep("memory", machine(), stages + saved + seven, shown="\n\n".join(show(rows) for rows in tables.values()))


if __name__ == "__main__":
    main()
