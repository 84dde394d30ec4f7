"""A step of a GPT cut into stages: torch's `distributed.pipelining`, and ours, in turn.

    python benchmarks/pipeline.py                       # 2 and 4 ranks, 11M, fp32, gloo
    python benchmarks/pipeline.py --ranks 2 --backend rankloom
    python benchmarks/pipeline.py --ranks 2 --no-speed --rows 4 --microbatches 4 --name pipeline_bubbles

Same model, same stages, same micro-batches, same schedules, same processes, same backend, interleaved: every round gives each
variant a turn of three steps, in rotating order, and ratios are taken inside a round. A step is forward and backward of all
micro-batches, and setting the gradients to None. Ours sends a gradient before it multiplies the weights' products, as its front
doors do. Where the model is cut is what our measurement of its pieces says.

The second table sets the bubble that the simulator expects of each schedule beside the one of recorded steps. The simulator gets the costs
of pieces measured alone, and, apart from it, those in recorded steps before and after the one it is compared with, where caches hold what
other micro-batches left there and all ranks compute at once. It means something where every rank has a core of its own.
"""

import argparse
import json
import os
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from common import Words, count, counts, keep, machine, median_ms, median_ratio, next_token, pin_to_core, run_ranks, show, take_turns
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

import rankloom as rl
from rankloom.models.config import preset
from rankloom.models.loss import plain_cross_entropy
from rankloom.models.pieces import gpt_pieces
from rankloom.parallel.pipeline.cut import balance, make_stages
from rankloom.parallel.pipeline.measure import measure_message, measure_pieces, record_step, recorded_costs, stage_costs
from rankloom.parallel.pipeline.passes import send_gradients_first
from rankloom.parallel.pipeline.runtime import Pipeline
from rankloom.parallel.pipeline.schedules import SCHEDULES, make_schedule
from rankloom.parallel.pipeline.simulate import Timeline, simulate_schedule

Step = Callable[[], object]
TORCH = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B, "zb-v": ScheduleZBVZeroBubble}
OURS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
VOCABULARY = 8192


def pieces_with_logits(model: rl.GPT) -> list:
    """The pieces of a GPT, of which the last gives logits, as torch's loss wants them."""
    *rest, (parts, last) = gpt_pieces(model)
    return [*rest, (parts, lambda x: nn.functional.linear(*last(x)))]


def loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The loss, for both."""
    return plain_cross_entropy(logits, targets), targets.numel()


class Bench:
    """One rank: the model, the batch, and every variant of a step."""

    def __init__(self, args: argparse.Namespace, world: rl.World):
        self.world, self.count = world, args.microbatches
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.precision]
        self.model = rl.GPT(preset(args.models, vocab_size=VOCABULARY, seq_len=args.tokens, tie=False), seed=0).to(dtype)
        text = torch.randint(0, VOCABULARY, (args.rows * self.count, args.tokens + 1), generator=torch.Generator().manual_seed(0))
        self.tokens, self.targets = next_token(text)
        self.batches = list(zip(self.tokens.chunk(self.count), self.targets.chunk(self.count)))
        self.pieces = pieces_with_logits(self.model)
        self.measured = measure_pieces(self.pieces, self.batches[0], loss, world)
        self.border = torch.zeros(args.rows, args.tokens, self.model.config.width, dtype=dtype)   # what goes from stage to stage

    def cut(self, name: str) -> tuple:
        """A schedule, how many pieces each stage has, and this rank's stages."""
        stages = self.world.size * SCHEDULES[name].fewest
        schedule = send_gradients_first(make_schedule(name, stages, self.count))
        sizes = balance([piece.seconds for piece in self.measured], stages)
        modules = make_stages(self.pieces, sizes)
        return schedule, sizes, {stage: modules[stage] for stage in schedule.held_by(self.world.rank)}

    def pipeline(self, name: str) -> Pipeline:
        """Ours."""
        schedule, _, held = self.cut(name)
        return Pipeline(held, self.world, schedule, loss)

    def ours(self, name: str) -> Step:
        """A step of ours: the loss, on every rank."""
        pipeline = self.pipeline(name)

        def step() -> float:
            total, count = pipeline.step(self.batches).tolist()
            self.model.zero_grad(set_to_none=True)
            return total / count

        return step

    def torchs(self, name: str) -> Step:
        """A step of torch's: the loss on the rank that has it, else None."""
        schedule, _, held = self.cut(name)
        made = [PipelineStage(module, stage, schedule.stages, torch.device("cpu")) for stage, module in held.items()]
        one = made[0] if name in ("gpipe", "1f1b") else made
        torchs = TORCH[name](one, self.count, loss_fn=lambda y, t: loss(y, t)[0], scale_grads=False)
        first, last = 0 in held, schedule.stages - 1 in held

        def step() -> float | None:
            losses: list[torch.Tensor] = []
            torchs.step(*([self.tokens] if first else []), target=self.targets if last else None, losses=losses if last else None,
                          return_outputs=False)
            self.model.zero_grad(set_to_none=True)
            return sum(each.item() for each in losses) / self.targets.numel() if last else None

        return step

    def bubbles(self, name: str) -> dict:
        """What the simulator expects, and what recorded steps show: medians of nine rounds, for the speed of a machine changes by more
        than a bubble. Each round expects twice: from its pieces, measured alone, and from the costs in the recorded steps beside its own.
        """
        schedule, sizes, _ = self.cut(name)
        pipeline = self.pipeline(name)
        pipeline.step(self.batches)
        steps = [record_step(pipeline, self.batches)]
        alone, beside = [], []
        for _ in range(9):
            message = measure_message(self.border, self.world)
            measured = measure_pieces(self.pieces, self.batches[0], loss, self.world)
            alone.append(simulate_schedule(schedule, stage_costs(measured, sizes, message)))
            steps += [record_step(pipeline, self.batches) for _ in range(2)]
            beside.append(simulate_schedule(schedule, recorded_costs(steps[-3::2], message)))
        self.model.zero_grad(set_to_none=True)
        seen = steps[1::2]

        def bubble(timelines: list[Timeline]) -> float:
            return statistics.median(timeline.bubble for timeline in timelines)

        def took(timelines: list[Timeline]) -> float:
            return median_ms([timeline.makespan for timeline in timelines])

        return {"schedule": name, "pieces a stage": "+".join(map(str, sizes)),
                "ms by the pieces": took(alone), "ms by other steps": took(beside), "recorded ms": took(seen),
                "bubble by the pieces": f"{bubble(alone):.3f}", "bubble by other steps": f"{bubble(beside):.3f}",
                "recorded": f"{bubble(seen):.3f}", "over pieces": f"{bubble(seen) / bubble(alone):.2f}",
                "over other steps": f"{bubble(seen) / bubble(beside):.2f}"}


def time_variants(bench: Bench, names: list[str], repeat: int) -> dict:
    """Both sides of each schedule, in turns."""
    steps = {f"rankloom {name}": bench.ours(name) for name in names}
    steps |= {f"torch {name}": bench.torchs(name) for name in TORCH if name in names}
    losses = bench.world.all_gather_object({name: step() for name, step in steps.items()})
    found = [loss for told in losses for loss in told.values() if loss is not None]
    assert max(found) - min(found) < 1e-3, f"the variants do not compute the same: {losses}"
    return take_turns(steps, repeat, bench.world.barrier)


def worker(args: argparse.Namespace) -> None:
    """One rank under torchrun: measure, and let rank 0 write what it found."""
    warnings.filterwarnings("ignore")
    rank = int(os.environ["RANK"])
    pin_to_core(rank)
    dist.init_process_group(args.backend)
    world = rl.init(backend=args.backend)
    bench = Bench(args, world)
    fitting = [name for name in OURS if world.size * SCHEDULES[name].fewest <= len(bench.pieces)]
    times = {} if args.no_speed else time_variants(bench, fitting, args.repeat)
    bubbles = [bench.bubbles(name) for name in fitting]
    if rank == 0:
        Path(args.out).write_text(json.dumps({"times": times, "bubbles": bubbles}))
    world.close()
    dist.destroy_process_group()


def measure(ranks: int, size: str, args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """Rows of both tables for one model on one number of ranks."""
    found = run_ranks(__file__, ranks, args, models=size)
    where = {"model": size, "ranks": ranks, "precision": args.precision, "backend": args.backend,
             "batch": f"{args.microbatches} x {args.rows} x {args.tokens}"}

    def over_torch(name: str, wall: list[float]) -> object:
        twin = found["times"].get(f"torch {name.partition(' ')[2]}")
        return median_ratio(wall, twin["wall"]) if twin else "-"

    rows = [where | {"variant": name, "median ms": median_ms(t["wall"]), "min ms": round(min(t["wall"]) * 1e3, 1),
                     "over torch's": over_torch(name, t["wall"])} for name, t in found["times"].items()]
    return rows, [where | row for row in found["bubbles"]]


def tables(rows: list[dict], bubbles: list[dict]) -> str:
    """The times, if there are any, and the bubbles."""
    return "\n\n".join(show(table) for table in (rows, bubbles) if table)


def main() -> None:
    """Measure all combinations, print the tables, keep them in benchmarks/results/."""
    parser = Words(__doc__, worker)
    parser.add_argument("--ranks", type=counts, default="2,4")
    parser.add_argument("--models", default="11M")
    parser.add_argument("--backend", default="gloo", choices=["gloo", "rankloom"])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"], help="of the parameters, and so of all")
    parser.add_argument("--tokens", type=count, default=128, help="of a row")
    parser.add_argument("--rows", type=count, default=2, help="of a micro-batch")
    parser.add_argument("--microbatches", type=count, default=8)
    parser.add_argument("--repeat", type=count, default=8)
    parser.add_argument("--no-speed", action="store_true", help="the bubbles only")
    parser.add_argument("--name", default="pipeline", help="of the files in benchmarks/results/")
    args = parser.read()
    where = machine()
    rows: list[dict] = []
    bubbles: list[dict] = []
    for size in args.models.split(","):
        for ranks in args.ranks:
            some, more = measure(ranks, size, args)
            rows, bubbles = rows + some, bubbles + more
            print(f"{tables(some, more)}\n", flush=True)
    keep(args.name, where, rows + bubbles, shown=tables(rows, bubbles))


if __name__ == "__main__":
    main()
