"""Several ranks on one GPU: all-reduces and the like in its memory, beside gloo through the host, and a plain copy as floor.

    python benchmarks/gpu_shared.py                 # a CUDA device: 2, 4 and 8 ranks on it
    python benchmarks/gpu_shared.py --small         # the same script at toy size, on whatever there is

    in place      all-reduce of a tensor from `group.buffer`: summed where it lies
    any tensor    all-reduce of one that torch has allocated: through slots that all ranks map
    gloo          all-reduce of the same by gloo, which copies to the host and back
    all-gather, reduce-scatter, all-to-all        of any tensor; the bytes are those of the whole
    ring          everybody sends that many bytes to the next rank and receives from the one before
    copy          one rank alone copies that many bytes on the device; it reads and writes each once

All in one run, in turns; the median of the turns, on rank 0. GB/s are bytes over time (nccl-tests' algorithm bandwidth). An all-reduce
by 2 ranks in place reads and writes every byte of both: as much as two copies.
Every result is checked before the clock runs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from common import Words, busy_cores, count, counts, keep, machine, show, synchronize, the_device, try_ranks

import rankloom as rl
from rankloom.world.connect import connect
from rankloom.world.group import Group

SIZES = (4 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
SMALL_SIZES = (4 << 10, 1 << 20)
BUDGET = 0.5   # seconds of one turn of one variant, about
Call = Callable[[], object]


def variants(world: rl.World, gloo: Group, nbytes: int) -> dict[str, tuple[Call, Call]]:
    """For each name: the call, and a look at whether what it leaves is right. Whole numbers stay exact, and zeros zeros."""
    p, device = world.size, world.device
    n = nbytes // 4 // p * p
    shared, plain, through = world.buffer(n), torch.empty(n, device=device), torch.empty(n, device=device)
    out, part = torch.empty(n, device=device), torch.empty(n // p, device=device)
    place = torch.arange(n, device=device) % 1000

    def reduced(x: torch.Tensor, group: Group) -> tuple[Call, Call]:
        def check() -> bool:
            x.copy_(place + world.rank)
            group.all_reduce(x)
            is_right = x.equal((place * p + sum(range(p))).float())
            x.zero_()   # sums of sums would grow without end
            return is_right

        return lambda: group.all_reduce(x), check

    def gathered() -> bool:
        part.fill_(world.rank)
        world.all_gather(part, out=out)
        return bool(out.view(p, -1).eq(torch.arange(p, device=device)[:, None]).all())

    def scattered() -> bool:
        out.copy_(place)
        return world.reduce_scatter(out, out=part).equal((place.view(p, -1)[world.rank] * p).float())

    def dealt() -> bool:
        out.view(p, -1).copy_(torch.arange(p, device=device)[:, None] + 10 * world.rank)
        return world.all_to_all(out, out=plain).view(p, -1).eq(10 * torch.arange(p, device=device)[:, None] + world.rank).all().item()

    def ring() -> torch.Tensor:
        return world.exchange(plain, (world.rank + 1) % p, out, (world.rank - 1) % p)

    return {
        "in place": reduced(shared, world), "any tensor": reduced(plain, world), "gloo": reduced(through, gloo),
        "all-gather": (lambda: world.all_gather(part, out=out), gathered),
        "reduce-scatter": (lambda: world.reduce_scatter(out, out=part), scattered),
        "all-to-all": (lambda: world.all_to_all(out, out=plain), dealt),
        "ring": (ring, lambda: (plain.fill_(world.rank), ring().eq((world.rank - 1) % p).all().item())[1]),
        "copy": (lambda: out.copy_(plain) if world.rank == 0 else None, lambda: True),
    }


def seconds_of(call: Call, world: rl.World, times: int) -> float:
    """Of one call, when `times` are made in a row."""
    world.barrier()
    synchronize(world.device)
    begin = time.perf_counter()
    for _ in range(times):
        call()
    synchronize(world.device)
    return (time.perf_counter() - begin) / times


def worker(args: argparse.Namespace) -> None:
    """One number of ranks: every size, every variant, in turns."""
    world = rl.init(device=the_device().type, backend="rankloom")
    rows = []
    pg = connect(dist.PrefixStore("gloo", world._store), world.rank, world.size, world.device, timeout=300.0, loopback=True, own_gpu=False)
    gloo = Group(pg, world.rank, range(world.size), name="gloo", device=world.device)
    for nbytes in SMALL_SIZES if args.small else SIZES:
        times: dict[str, int] = {}   # that a call is made in a row
        seconds: dict[str, list[float]] = {}
        calls = variants(world, gloo, nbytes)
        for name, (call, check) in calls.items():
            world.agree(None if check() else f"rank {world.rank}: {name} of {nbytes} bytes is wrong")
            first = max(world.all_gather_object(seconds_of(call, world, 3)))
            times[name], seconds[name] = max(3, min(1000, int(BUDGET / args.repeat / first))), []
        for _ in range(args.repeat):
            for name, (call, _) in calls.items():
                seconds[name].append(seconds_of(call, world, times[name]))
        medians = {name: statistics.median(turns) for name, turns in seconds.items()}
        rows += [{"ranks": world.size, "bytes": nbytes, "variant": name, "us": round(median * 1e6, 1),
                  "GB/s": round(nbytes / median / 1e9, 2), "times a copy": round(median / medians["copy"], 2)}
                 for name, median in medians.items()]
    if world.rank == 0:
        Path(args.out).write_text(json.dumps(rows))
    world.close()


def main() -> None:
    """Every number of ranks in processes of its own; print the table and keep it."""
    parser = Words(__doc__, worker, gpu=True)
    parser.add_argument("--ranks", type=counts, default="2,4,8")
    parser.add_argument("--repeat", type=count, default=9)
    args = parser.read()
    where = machine()
    table: list[dict] = []
    print(f"{where}\n{busy_cores()}", flush=True)
    for ranks in args.ranks:
        rows = try_ranks(__file__, ranks, args)
        if "error" in rows:
            print(f"{ranks} ranks could not run: {rows['error']}", flush=True)
            continue
        table += rows
        print(show(rows), flush=True)
        if not args.small:   # now: more ranks may take longer than there is time
            keep("gpu_shared", where, table)


if __name__ == "__main__":
    main()
