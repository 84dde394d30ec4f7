"""One rank of one library for benchmarks/all_reduce.py: sleeps until it is told a case, measures it, answers.

    python collective_rank.py LIBRARY RANKS BYTES pinned|free SOCKET

Open MPI's ranks live in an environment of their own, without torch, so this file imports only what its library needs.
Every library is called as its users call it: gloo and rankloom through torch.distributed, rankloom also through its own
`Group`, Open MPI through mpi4py's buffers, in place where MPI has it.
"""

import itertools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from serve import serve

Call = Callable[[], Any]


@dataclass
class Way:
    """One way to call a library: its two buffers as numpy sees them, and what makes a call of an operation on `n` elements.

    A call leaves its result in `x` (all_reduce) or in `out` (the others).
    """

    x: np.ndarray
    out: np.ndarray
    make: Callable[[str, int], Call]


def ping_pong(rank: int, send: Call, recv: Call) -> Call:
    """There and back between ranks 0 and 1; the others have nothing to do."""
    first, second = (send, recv) if rank == 0 else (recv, send)

    def both() -> None:
        first()
        second()

    return both if rank < 2 else lambda: None


def open_mpi(elements: int) -> tuple[int, dict[str, Way]]:
    """mpi4py on numpy arrays."""
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    p, rank = comm.size, comm.rank
    x, out = np.ones(elements, np.float32), np.ones(elements, np.float32)

    def make(op: str, n: int) -> Call:
        whole, result, part = x[:n], out[:n], n // p
        mine, scattered = x[:part], out[:part]
        return {"all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, whole, MPI.SUM),
                "reduce_scatter": lambda: comm.Reduce_scatter_block(whole, scattered, MPI.SUM),
                "all_gather": lambda: comm.Allgather(mine, result),
                "all_to_all": lambda: comm.Alltoall(whole, result),
                "ping_pong": ping_pong(rank, lambda: comm.Send(whole, 1 - rank), lambda: comm.Recv(result, 1 - rank))}[op]

    return rank, {"": Way(x, out, make)}


def through_torch(x: Any, out: Any) -> Way:
    """torch.distributed's functions on its default group."""
    import torch.distributed as dist
    p, rank = dist.get_world_size(), dist.get_rank()

    def make(op: str, n: int) -> Call:
        whole, result, part = x[:n], out[:n], n // p
        mine, scattered = x[:part], out[:part]
        return {"all_reduce": lambda: dist.all_reduce(whole),
                "reduce_scatter": lambda: dist.reduce_scatter_single(scattered, whole),
                "all_gather": lambda: dist.all_gather_single(result, mine),
                "all_to_all": lambda: dist.all_to_all_single(result, whole),
                "ping_pong": ping_pong(rank, lambda: dist.send(whole, 1 - rank), lambda: dist.recv(result, 1 - rank))}[op]

    return Way(x.numpy(), out.numpy(), make)


def through_group(world: Any, x: Any, out: Any) -> Way:
    """rankloom's own `Group`."""
    p, rank = world.size, world.rank

    def make(op: str, n: int) -> Call:
        whole, result, part = x[:n], out[:n], n // p
        mine, scattered = x[:part], out[:part]
        return {"all_reduce": lambda: world.all_reduce(whole),
                "reduce_scatter": lambda: world.reduce_scatter(whole, out=scattered),
                "all_gather": lambda: world.all_gather(mine, out=result),
                "all_to_all": lambda: world.all_to_all(whole, out=result),
                "ping_pong": ping_pong(rank, lambda: world.send(whole, 1 - rank), lambda: world.recv(result, 1 - rank))}[op]

    return Way(x.numpy(), out.numpy(), make)


def gloo(elements: int) -> tuple[int, dict[str, Way]]:
    """torch.distributed on gloo; and a `Group` on gloo, whose thread waits for its turn (world/connect.py)."""
    import torch
    import torch.distributed as dist

    import rankloom as rl
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = rl.init(backend="gloo")
    x, out = torch.ones(elements), torch.ones(elements)
    return world.rank, {"": through_torch(x, out), "Group": through_group(world, x, out)}


def rankloom(elements: int) -> tuple[int, dict[str, Way]]:
    """The backend "rankloom": tensors from anywhere and from the group's arena, through torch and through `Group`."""
    import torch
    import torch.distributed as dist

    import rankloom as rl
    import rankloom.transport
    assert "rankloom" in dist.Backend.backend_list, f"{rankloom.transport} did not register the backend"
    torch.set_num_threads(1)
    dist.init_process_group("rankloom")
    world = rl.init(backend="rankloom")
    anywhere = torch.ones(elements), torch.ones(elements)
    arena = world.buffer(elements).fill_(1), world.buffer(elements).fill_(1)   # touched, so that no page is missing
    return world.rank, {"": through_torch(*anywhere), "Group": through_group(world, *anywhere),
                        "arena, torch": through_torch(*arena), "arena": through_group(world, *arena)}


def expected(op: str, rank: int, p: int, n: int) -> np.ndarray:
    """What rank `rank` of `p` ends with when rank r starts with (0, 1 ... 60, 0, 1 ...) * (r + 1)."""
    base, part = pattern(n), n // p
    mine = base[rank * part:(rank + 1) * part]
    if op == "all_reduce":
        return base * (p * (p + 1) // 2)
    if op == "reduce_scatter":
        return mine * (p * (p + 1) // 2)
    if op == "ping_pong":
        return base * (2 - rank) if rank < 2 else base[:0]
    piece = base[:part] if op == "all_gather" else mine
    return np.concatenate([piece * (r + 1) for r in range(p)])


def pattern(n: int) -> np.ndarray:
    """0, 1 ... 60, 0, 1 ...: exact in fp32 when summed over a few hundred ranks."""
    return np.arange(n, dtype=np.float32) % 61


def check(way: Way, op: str, n: int, rank: int, p: int) -> None:
    """Call once on known numbers and compare every element; leaves zeros, which stay finite however often they are summed."""
    way.x[:n] = pattern(n) * (rank + 1)
    way.make(op, n)()
    wanted = expected(op, rank, p, n)
    got = (way.x if op == "all_reduce" else way.out)[:len(wanted)]
    if not np.array_equal(got, wanted):
        at = int(np.flatnonzero(got != wanted)[0])
        raise ValueError(f"rank {rank} of {p}: {op} of {n} elements is wrong, first at {at}: {got[at]}, expected {wanted[at]}")
    way.x[:n] = 0


def measure(call: Call, calls: int, loops: int) -> list[float]:
    """Seconds per call of `loops` loops of `calls` calls each, without a barrier between; one loop before them is not counted."""
    marks = []
    for _ in range(loops + 2):
        marks.append(time.perf_counter())
        for _ in range(calls):
            call()
    return [(end - begin) / calls for begin, end in itertools.pairwise(marks[1:])]


def answer(question: dict, ways: dict[str, Way], rank: int, p: int) -> list[float]:
    """Check a case, or measure it."""
    way, op, n = ways[question["way"]], question["op"], question["bytes"] // 4
    if question["do"] == "check":
        check(way, op, n, rank, p)
        return []
    return measure(way.make(op, n), question["calls"], question["loops"])


def main() -> None:
    """Join, then answer questions until the other side closes."""
    library, ranks, size, address = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[5]
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
    if sys.argv[4] == "pinned":
        os.sched_setaffinity(0, {rank})
    rank, ways = {"gloo": gloo, "Open MPI": open_mpi, "rankloom": rankloom}[library](size // 4)
    serve(address, rank, lambda question: answer(question, ways, rank, ranks))
    if library != "Open MPI":
        os._exit(0)   # all ranks end at once, and a group whose peers have gone may wait for them in its clean-up


if __name__ == "__main__":
    main()
