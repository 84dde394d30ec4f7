"""One rank of benchmarks/sharded.py: builds the variants it is asked for, each with a model and an optimizer of its own, and steps them.

    python sharded_rank.py LIBRARY SOCKET        # under RANK and WORLD_SIZE; LIBRARY: "torch" (and rankloom), or "DeepSpeed"

Every variant does the same work in a step: forward, backward, clipping by the global norm, fused AdamW. fp32 is fp32 everywhere. bf16 is
what each library calls by that name: 16-bit weights in forward and backward with fp32 masters in the optimizer, and gradients summed
in fp32, for FSDP2, DeepSpeed and rankloom; autocast over fp32 weights for DDP and for no communication, and once for FSDP2 too.
DeepSpeed lives in an environment of its own, so nothing but it imports deepspeed.
"""

import ctypes
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import next_token, pin_to_core
from data_parallel import CLIP, adamw, make_plain_step
from serve import serve
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import rankloom as rl
from rankloom.models.config import preset
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss

ROW, VOCABULARY = 128, 8192   # tokens of a sequence
LR = 1e-4                     # of data_parallel.adamw, whose weight decay is torch's default
Step = Callable[[], float]    # returns its loss: of this rank's batch, or of all ranks'


class Torch:
    """The ranks in which torch's classes and ours live: groups on both backends, made once."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        import rankloom.transport
        assert "rankloom" in dist.Backend.backend_list, f"{rankloom.transport} did not register the backend"
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        self.groups = {"gloo": dist.group.WORLD, "rankloom": dist.new_group(backend="rankloom")}
        self.worlds = {backend: rl.init(rl.Mesh(shard=ranks), backend=backend, device="cpu") for backend in self.groups}
        self.worlds[""] = rl.World(dist.HashStore(), 0, rl.Mesh(replicate=1), torch.device("cpu"), timeout=60.0)

    def build(self, asked: dict, model: GPT, batch: tuple) -> Step:
        """A step of the variant asked for."""
        kind, backend, is_bf16 = asked["kind"], asked["backend"], asked["precision"] == "bf16"
        under_autocast = kind != "FSDP2" or asked["option"] == "autocast"
        if kind == "engine":
            engine = rl.prepare(model, loss=language_model_loss, optimizer=adamw, world=self.worlds[backend], stage=asked["stage"],
                                precision=asked["precision"], clip=CLIP, reshard_after_forward=asked["option"] != "keep")
            return lambda: engine.step(batch).loss
        if kind == "own loop" and backend:
            return own_loop(model, self.worlds[backend], batch, is_bf16)
        if kind == "FSDP2":
            fsdp2(model, self.groups[backend], is_bf16 and not under_autocast, keeps=asked["option"] == "keep")
        elif kind == "torch DDP":
            ddp = nn.parallel.DistributedDataParallel(model, process_group=self.groups[backend], gradient_as_bucket_view=True,
                                                      static_graph=True, broadcast_buffers=False)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=is_bf16 and under_autocast)
        return make_plain_step(ddp if kind == "torch DDP" else model, batch, autocast)


def own_loop(model: GPT, world: rl.World, batch: tuple, is_bf16: bool) -> Step:
    """The plain loop around `rl.fully_shard`."""
    sharded = rl.fully_shard(model, world, compute=torch.bfloat16 if is_bf16 else None)
    optimizer = adamw(sharded.parameters())

    def step() -> float:
        total, count = language_model_loss(sharded, batch)
        loss = total / count
        loss.backward()
        sharded.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def fsdp2(model: GPT, group: dist.ProcessGroup, is_bf16: bool, keeps: bool) -> None:
    """torch's fully_shard, a unit for each block and one for the rest, which it keeps after forward in any case.

    Its casts of a block's inputs are off: they are in 16 bits already but for the rotary tables, which have to stay in 32.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False) if is_bf16 else (
        MixedPrecisionPolicy())
    mesh = DeviceMesh.from_group(group, "cpu")
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False if keeps else None)


class DeepSpeed:
    """The ranks in which DeepSpeed lives: its CPU accelerator on gloo."""

    def __init__(self) -> None:
        import deepspeed
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        self._deepspeed, self.rank = deepspeed, dist.get_rank()

    def build(self, asked: dict, model: GPT, batch: tuple) -> Step:
        """A step of ZeRO at the stage asked for."""
        config = {"train_micro_batch_size_per_gpu": len(batch[0]), "gradient_clipping": CLIP,
                  "bf16": {"enabled": asked["precision"] == "bf16"}, "steps_per_print": 1 << 30,
                  "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
                  "zero_optimization": {"stage": asked["stage"]} | asked["settings"]}
        parameters = list(model.parameters())
        optimizer = self._deepspeed.ops.adam.DeepSpeedCPUAdam(parameters, lr=LR, weight_decay=0.01) if asked["option"] == "CPUAdam" else (
            adamw(parameters))
        engine, *_ = self._deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        tokens, targets = batch

        def step() -> float:
            total, count = engine(tokens, targets=targets)
            loss = total / count
            engine.backward(loss)
            engine.step()
            return loss.item()

        return step


class Bench:
    """What a rank is asked to do, and the variants it has built."""

    def __init__(self, library: Any):
        self._library = library
        self._steps: dict[str, Callable[[], float]] = {}

    def answer(self, question: dict) -> Any:
        """Build a variant, or step one."""
        answers: dict[str, Callable[..., Any]] = {"build": self._build, "step": self._step}
        return answers[question.pop("do")](**question)

    def _build(self, name: str, asked: dict) -> None:
        text = torch.randint(0, VOCABULARY, (asked["tokens"] // ROW, ROW + 1), generator=torch.Generator().manual_seed(self._library.rank))
        model = GPT(preset(asked["model"], vocab_size=VOCABULARY, seq_len=ROW), seed=0)
        self._steps[name] = self._library.build(asked, model, next_token(text))
        del model
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)   # what building has freed goes back: peaks shall be those of training

    def _step(self, name: str, times: int) -> dict:
        """Wall and CPU seconds of a step, when `times` follow one that is not counted; the losses of all."""
        losses = [self._steps[name]()]
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        losses += [self._steps[name]() for _ in range(times)]
        dist.barrier()
        return {"wall": (time.perf_counter() - wall) / times, "cpu": (time.process_time() - cpu) / times, "losses": losses}


def load_kernels() -> None:
    """A step of a tiny model in both precisions, so that what torch loads on first use is not counted as memory of a variant."""
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for enabled in (False, True):
        make_plain_step(GPT(preset("1M", vocab_size=64, layers=1)), (tokens, tokens), torch.autocast("cpu", torch.bfloat16, enabled))()


def main() -> None:
    """Join the others, then serve."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    library, address = sys.argv[1:]
    rank = int(os.environ["RANK"])
    pin_to_core(rank)
    bench = Bench({"torch": Torch, "DeepSpeed": DeepSpeed}[library]())
    load_kernels()
    serve(address, rank, bench.answer)
    os._exit(0)   # all ranks end at once, and a group whose peers have gone may wait for them in its clean-up


if __name__ == "__main__":
    main()
