"""One call of one collective, as a value: what is called, with which tensors, laid out how, and waited for how.

`random_case` draws one with hypothesis; `COLLECTIVES` says of each collective what it is called with, and what it must give.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from conformance import oracle
from conformance.oracle import MOVED, OPS, REDUCED, Answer, Given, Nodes, has_meaning

BIG = 3 << 20   # bytes: more than what a backend stages at once
PERIOD = 50021  # after so many elements values come again: a prime, so that no piece of a tensor can pass for another
LAYOUTS = ("plain", "guarded", "gaps", "transposed", "shared")   # the last: in memory that all ranks map
WAITS = ("at once", "wait", "wait with a time-out", "poll", "future")   # the first: the call itself blocks
SHAPES = ((3,), (), (0,), (1,), (2, 0, 3), (7, 5), (64,), (1000,), (33, 31), (2, 3, 4, 5), (4099,), (9000,))
Shape = tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Case:
    """See the module. `seed` decides the values, and the shapes of collectives whose ranks may bring different ones."""

    collective: str
    dtype: torch.dtype = torch.float32
    op: str = "sum"
    shape: Shape = (3,)        # of one rank's tensor, or of what one rank deals to one other
    layout: str = "plain"      # of what is only read
    into: str = "plain"        # of what is written
    how: str = "wait"
    late: bool = False         # waited for only after all other calls of the program were made
    halves: bool = False       # by the ranks of even and of odd number, as two groups at once
    root: int = 0              # modulo the size of the group
    uneven: bool = False
    seed: int = 0

    def __repr__(self) -> str:
        told = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"Case({', '.join(f'{name}={value!r}' for name, value in told.items())})"

    def draw(self, *key: int) -> np.random.Generator:
        """Random numbers of this case and key: the same wherever they are drawn."""
        return np.random.default_rng((self.seed, *key))

    def rows(self, size: int) -> list[list[int]]:
        """How many rows rank s deals to rank r: [s][r]."""
        if not self.uneven:
            return [[self.shape[0] if self.shape else 1] * size] * size
        rng = random.Random(self.seed)
        return [[rng.randrange(4) for _ in range(size)] for _ in range(size)]


@dataclass(frozen=True)
class Collective:
    """A collective as torch's ProcessGroup has it.

    brings: the shapes of each rank's tensors     gives: the oracle
    call:   (group, what it reads, what it writes, options, case) -> Work; where `in_place`, what it reads is what it writes
    """

    brings: Callable[[Case, int], list[list[Shape]]]
    gives: Callable[[Given, Case, Nodes], Answer]
    call: Callable[[Any, list[Tensor], list[Tensor], Any, Case], Any]
    options: Any
    reduces: bool = False
    in_place: bool = False


# ---------------------------------------------------------------- what the ranks bring


def one(case: Case, size: int) -> list[list[Shape]]:
    """One tensor each, of the same shape."""
    return [[case.shape]] * size


def some(case: Case, size: int) -> list[list[Shape]]:
    """Up to four tensors each, for the coalesced collectives; their shapes differ."""
    return [[case.shape, (5,), (2, 3), (0,)][: 1 + case.seed % 4]] * size


def one_of_any_length(case: Case, size: int) -> list[list[Shape]]:
    """One tensor each; when uneven, of different lengths."""
    return [[(n, *case.shape[1:])] for n in case.rows(size)[0]] if case.uneven else one(case, size)


def one_for_each(case: Case, size: int) -> list[list[Shape]]:
    """A tensor for each rank; when uneven, those for different ranks differ."""
    return [[(n, *case.shape[1:]) for n in case.rows(size)[0]]] * size if case.uneven else [[case.shape] * size] * size


def any_for_each(case: Case, size: int) -> list[list[Shape]]:
    """A tensor for each rank; when uneven, all differ."""
    return [[(n, *case.shape[1:]) for n in dealt] for dealt in case.rows(size)] if case.uneven else [[case.shape] * size] * size


def one_even_for_each(case: Case, size: int) -> list[list[Shape]]:
    """A tensor for each rank, all alike."""
    return [[case.shape] * size] * size


def end_to_end(case: Case, size: int) -> list[list[Shape]]:
    """One tensor each, with a share of its rows for each rank; when uneven, all shares differ."""
    return [[(sum(dealt), *case.shape[1:])] for dealt in case.rows(size)]


def even_end_to_end(case: Case, size: int) -> list[list[Shape]]:
    """One tensor each, with an equal share of its rows for each rank."""
    return [shapes[:1] for shapes in some_end_to_end(case, size)]


def some_end_to_end(case: Case, size: int) -> list[list[Shape]]:
    """Up to four tensors each, with a share of their rows for each rank."""
    return [[(size * (shape[0] if shape else 1), *shape[1:]) for shape in shapes] for shapes in some(case, size)]


# ---------------------------------------------------------------- how it is called

def begin(case: Case, group: Any, ins: list[Tensor], outs: list[Tensor]) -> Any:
    """Call the case's collective; its work."""
    collective = COLLECTIVES[case.collective]
    options = collective.options()
    options.asyncOp = case.how != "at once"
    if collective.reduces:
        options.reduceOp = getattr(dist.ReduceOp, case.op.upper())
    if hasattr(options, "rootRank"):
        options.rootRank = case.root % group.size()
    return collective.call(group, ins, outs, options, case)


def at_root(group: Any, options: Any, tensors: list[Tensor]) -> list[list[Tensor]]:
    """The list, on the root only."""
    return [tensors] if group.rank() == options.rootRank else []


def in_rows(tensors: list[Tensor], width: int) -> list[list[Tensor]]:
    """Cut a list in lists of equal length."""
    return [tensors[at: at + width] for at in range(0, len(tensors), width)]


def splits(group: Any, case: Case) -> tuple[list[int], list[int]]:
    """What this rank receives from each, and deals to each; both empty where all is even."""
    rows, rank = case.rows(group.size()), group.rank()
    return ([dealt[rank] for dealt in rows], rows[rank]) if case.uneven else ([], [])


COLLECTIVES = {
    "allreduce": Collective(
        one, lambda given, case, nodes: oracle.all_reduce(given, case.op, nodes), reduces=True, in_place=True,
        options=c10d.AllreduceOptions, call=lambda group, ins, outs, options, case: group.allreduce(outs, options)),
    "allreduce_coalesced": Collective(
        some, lambda given, case, nodes: oracle.all_reduce(given, case.op, nodes), reduces=True, in_place=True,
        options=c10d.AllreduceCoalescedOptions, call=lambda group, ins, outs, options, case: group.allreduce_coalesced(outs, options)),
    "reduce": Collective(
        one, lambda given, case, nodes: oracle.reduce(given, case.op, nodes, case.root % len(given)), reduces=True, in_place=True,
        options=c10d.ReduceOptions, call=lambda group, ins, outs, options, case: group.reduce(outs, options)),
    "broadcast": Collective(
        one, lambda given, case, nodes: oracle.broadcast(given, case.root % len(given)), in_place=True,
        options=c10d.BroadcastOptions, call=lambda group, ins, outs, options, case: group.broadcast(outs, options)),
    "allgather": Collective(
        one_of_any_length, lambda given, case, nodes: oracle.all_gather(given),
        options=c10d.AllgatherOptions, call=lambda group, ins, outs, options, case: group.allgather([outs], ins, options)),
    "allgather_coalesced": Collective(
        some, lambda given, case, nodes: oracle.all_gather(given),
        options=c10d.AllgatherOptions,
        call=lambda group, ins, outs, options, case: group.allgather_coalesced(in_rows(outs, len(ins)), ins, options)),
    "reduce_scatter": Collective(
        one_for_each, lambda given, case, nodes: oracle.reduce_scatter(given, case.op, nodes), reduces=True,
        options=c10d.ReduceScatterOptions, call=lambda group, ins, outs, options, case: group.reduce_scatter(outs, [ins], options)),
    "alltoall": Collective(
        any_for_each, lambda given, case, nodes: oracle.all_to_all(given),
        options=c10d.AllToAllOptions, call=lambda group, ins, outs, options, case: group.alltoall(outs, ins, options)),
    "gather": Collective(
        one, lambda given, case, nodes: oracle.gather(given, case.root % len(given)),
        options=c10d.GatherOptions, call=lambda group, ins, outs, options, case: group.gather(at_root(group, options, outs), ins, options)),
    "scatter": Collective(
        one_even_for_each, lambda given, case, nodes: oracle.scatter(given, case.root % len(given)),
        options=c10d.ScatterOptions,
        call=lambda group, ins, outs, options, case: group.scatter(outs, at_root(group, options, ins), options)),
}
# torch has two names for each of these, and calls both.
for name in ("_allgather_base", "all_gather_single"):
    COLLECTIVES[name] = Collective(
        one, lambda given, case, nodes: oracle.all_gather_single(given),
        options=c10d.AllgatherOptions,
        call=lambda group, ins, outs, options, case: getattr(group, case.collective)(outs[0], ins[0], options))
for name in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):
    COLLECTIVES[name] = Collective(
        some, lambda given, case, nodes: oracle.all_gather_single(given),
        options=c10d.AllgatherOptions, call=lambda group, ins, outs, options, case: getattr(group, case.collective)(outs, ins, options))
for name in ("_reduce_scatter_base", "reduce_scatter_single"):
    COLLECTIVES[name] = Collective(
        even_end_to_end, lambda given, case, nodes: oracle.reduce_scatter_single(given, case.op, nodes), reduces=True,
        options=c10d.ReduceScatterOptions,
        call=lambda group, ins, outs, options, case: getattr(group, case.collective)(outs[0], ins[0], options))
for name in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):
    COLLECTIVES[name] = Collective(
        some_end_to_end, lambda given, case, nodes: oracle.reduce_scatter_single(given, case.op, nodes), reduces=True,
        options=c10d.ReduceScatterOptions, call=lambda group, ins, outs, options, case: getattr(group, case.collective)(outs, ins, options))
for name in ("alltoall_base", "all_to_all_single"):
    COLLECTIVES[name] = Collective(
        end_to_end, lambda given, case, nodes: oracle.all_to_all_single(given, case.rows(len(given))),
        options=c10d.AllToAllOptions,
        call=lambda group, ins, outs, options, case: getattr(group, case.collective)(outs[0], ins[0], *splits(group, case), options))


# ---------------------------------------------------------------- values, and where they lie


def values(case: Case, shape: Shape, rank: int, k: int) -> Tensor:
    """What `rank` brings as its k-th tensor. Where nothing is added: any bits at all, NaNs too."""
    rng, dtype, n = case.draw(rank, k), case.dtype, math.prod(shape)
    if n == 0:
        return torch.empty(shape, dtype=dtype)
    if n > PERIOD:   # to draw them all would take longer than the collective
        bits = values(case, (PERIOD,), rank, k).view(torch.uint8).repeat(-(-n // PERIOD))
        return bits[: n * dtype.itemsize].view(dtype).view(shape)
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, n).astype(bool)).view(shape)
    if not COLLECTIVES[case.collective].reduces or dtype in oracle.WHOLE:
        return torch.from_numpy(rng.integers(0, 256, n * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
    if dtype in oracle.COMPLEX:
        return torch.from_numpy(rng.uniform(-2, 2, 2 * n).view(np.complex128)).to(dtype).view(shape)
    numbers = rng.uniform(0.5, 2, n) * rng.choice((-1, 1), n)
    if case.op in ("min", "max"):
        numbers[rng.random(n) < 0.1] = rng.choice((np.nan, np.inf, -np.inf))
    return torch.from_numpy(numbers).to(dtype).view(shape)


class Arena:
    """A piece of memory that all ranks of a group map, dealt out bit by bit."""

    def __init__(self, memory: Tensor):
        self.memory, self.used = memory, 0

    def take(self, nbytes: int) -> Tensor:
        """The next `nbytes` bytes; private ones when there are no more."""
        begin, self.used = self.used, self.used + -(-nbytes // 64) * 64
        return self.memory[begin: begin + nbytes] if self.used <= len(self.memory) else torch.empty(nbytes, dtype=torch.uint8)


class Held:
    """A tensor in a given layout inside a larger buffer, of which not one other element may be touched."""

    def __init__(self, like: Tensor, layout: str, arena: Arena, fill: bool = False):
        shape, dtype, n = tuple(like.shape), like.dtype, like.numel()
        step = 2 if layout == "gaps" else 1
        guard = 0 if layout in ("plain", "shared") else 1   # one element: nothing is aligned any more
        nbytes = (n * step + 2 * guard) * dtype.itemsize
        memory = arena.take(nbytes) if layout == "shared" else torch.empty(nbytes, dtype=torch.uint8)
        self.buffer = memory.fill_(1).view(dtype)
        inside = self.buffer[guard: guard + n * step: step]
        self.x = inside.view(shape[::-1]).permute(tuple(range(len(shape))[::-1])) if layout == "transposed" else inside.view(shape)
        if fill:
            self.x.copy_(like)
        end = guard + n * step
        elements = self.buffer.view(torch.uint8).view(-1, dtype.itemsize)
        around = [elements[:guard], elements[end:], *(elements[guard + gap: end: step] for gap in range(1, step))]
        self._others = [others for others in around if len(others)]

    def let_go(self) -> tuple[Tensor, bool]:
        """What the tensor holds now, and whether everything around it is as it was. From here on the memory is used for other things."""
        held = self.x.clone()
        untouched = all(bool((others == 1).all()) for others in self._others)
        self.buffer.view(torch.uint8).fill_(255 if self.buffer.dtype != torch.bool else 0)
        return held, untouched


def bits_of(x: Tensor) -> Tensor:
    """[elements, bytes of one]"""
    x = x.view(torch.uint8) if x.element_size() == 1 else x   # torch cannot transpose float4
    return x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8).view(-1, x.element_size())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit. Whether ranks end in [p * n] or [p, n] is the caller's to choose."""
    return a.dtype == b.dtype and a.numel() == b.numel() and (a.numel() == 0 or torch.equal(bits_of(a), bits_of(b)))


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, but one NaN is as good as another."""
    if same_bits(a, b):
        return True
    if a.dtype != b.dtype or not b.dtype.is_floating_point or a.numel() != b.numel():
        return False
    numbers_of_a, numbers_of_b = (~x.double().isnan().flatten() for x in (a, b))
    return torch.equal(numbers_of_a, numbers_of_b) and torch.equal(bits_of(a)[numbers_of_a], bits_of(b)[numbers_of_b])


# ---------------------------------------------------------------- drawing


# Made once: hypothesis takes longer to make such a strategy than to draw from it.
NAMES, SOME_SHAPE, SOME_LAYOUT, SOME_WAIT = map(st.sampled_from, (sorted(COLLECTIVES), SHAPES, LAYOUTS, WAITS))
SOME_DTYPE = {True: st.sampled_from(REDUCED), False: st.sampled_from(MOVED)}   # by whether the collective reduces
SOME_OP = {dtype: st.sampled_from([op for op in OPS if has_meaning(op, dtype)]) for dtype in REDUCED}
ONE_OF_50, SEEDS, YES_OR_NO = st.integers(0, 49), st.integers(0, 2**20), st.booleans()


@st.composite
def random_case(draw: Callable, size: int) -> Case:
    """Any collective with any dtype, operation, shape, layout, way of waiting and group."""
    name = draw(NAMES)
    reduces = COLLECTIVES[name].reduces
    dtype = draw(SOME_DTYPE[reduces])
    op = draw(SOME_OP[dtype]) if reduces else "sum"
    shape = draw(SOME_SHAPE)
    if draw(ONE_OF_50) == 49:
        shape = (BIG // dtype.itemsize // (1 if COLLECTIVES[name].in_place else size) + 1,)
    return Case(
        name, dtype, op, shape, layout=draw(SOME_LAYOUT), into=draw(SOME_LAYOUT), how=draw(SOME_WAIT), late=draw(YES_OR_NO),
        halves=draw(YES_OR_NO), root=draw(st.integers(0, size - 1)), uneven=bool(shape) and draw(YES_OR_NO), seed=draw(SEEDS))
