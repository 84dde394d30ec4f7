"""One collective as a value: the bytes that it reads and those that it writes, in the memory of the tensors.

The compiled kernel takes addresses and lengths. Here they become arrays, called lanes: one for each rank if each has other bytes,
else one for all. Arrays can be cut, sent, and passed on to another kernel.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch

from rankloom.world.transport.codes import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BARRIER, BROADCAST, GATHER, REDUCE, REDUCE_SCATTER, SCATTER
from rankloom.world.transport.operands import NUMBERS

LARGEST = 32 << 20   # bytes of the largest piece of scratch memory that is kept for reuse
EMPTY = np.empty(0, np.uint8)
DTYPES = list(NUMBERS)
Memory = TypeVar("Memory", np.ndarray, torch.Tensor)   # bytes, [n]
EACH = -1         # a lane for each rank


class Lanes(NamedTuple):
    """How many lanes a rank reads, and how many it writes, in a call of one kind."""

    read: int
    written: int


OF_ROOT = {
    ALL_REDUCE: Lanes(1, 1), REDUCE: Lanes(1, 1), BROADCAST: Lanes(1, 0), ALL_GATHER: Lanes(1, EACH), GATHER: Lanes(1, EACH),
    REDUCE_SCATTER: Lanes(EACH, 1), SCATTER: Lanes(EACH, 1), ALL_TO_ALL: Lanes(EACH, EACH), BARRIER: Lanes(1, 1)}
OF_OTHERS = OF_ROOT | {REDUCE: Lanes(1, 0), BROADCAST: Lanes(0, 1), GATHER: Lanes(1, 0), SCATTER: Lanes(0, 1)}   # kinds with a root
REDUCING = (ALL_REDUCE, REDUCE, REDUCE_SCATTER)
DEALT = tuple(kind for kind, lanes in OF_ROOT.items() if lanes.read == EACH)   # whose slots hold another lane for each rank
ROOTED = tuple(kind for kind, lanes in OF_ROOT.items() if lanes != OF_OTHERS[kind])
OWN_LENGTHS = tuple(kind for kind, lanes in OF_ROOT.items() if EACH in lanes)   # each pair of ranks may have another length


class Descriptor(NamedTuple):
    """What all ranks must agree on of a call."""

    kind: int
    number: int   # the number type
    op: int
    root: int     # in kinds that have one
    nbytes: int   # 0: lengths may differ


@dataclass(frozen=True, eq=False)
class Call(Generic[Memory]):
    """A collective as one rank sees it, in the memory of the host (arrays) or of a device (tensors of bytes).

    inputs:  one lane for each rank, or one for all; none if this rank sends nothing
    outputs: one lane for each rank that sends something, or one; none if this rank gets nothing
    """

    descriptor: Descriptor
    inputs: Sequence[Memory]
    outputs: Sequence[Memory]
    timeout: float

    @classmethod
    def read(cls, rank: int, size: int, memory: Callable[[int, int], Memory], arguments: Sequence[Any]) -> Self:
        """A rank's call, from a kernel's arguments: kind, number, op, root, address to read, address to write, lengths, time-out.

        memory: gives the bytes at an address, so many
        """
        kind, number, op, root, source, target, lengths, timeout = arguments
        in_lanes, out_lanes = (OF_ROOT if rank == root else OF_OTHERS)[kind]
        if isinstance(lengths, bytes):
            in_at, in_len, out_at, out_len = np.frombuffer(lengths, np.uint64).reshape(4, size).tolist()
        else:
            in_at = out_at = [lane * lengths for lane in range(size)]
            in_len = out_len = [lengths] * size
        inputs = [memory(source + at, n) for at, n, _ in zip(in_at, in_len, range(size if in_lanes == EACH else in_lanes))]
        outputs = [memory(target + at, n) for at, n, _ in zip(out_at, out_len, range(size if out_lanes == EACH else out_lanes))]
        nbytes = 0 if isinstance(lengths, bytes) or kind in OWN_LENGTHS else lengths
        return cls(Descriptor(kind, number, op, root, nbytes), inputs, outputs, timeout)

    @property
    def kind(self) -> int:
        """Which collective it is."""
        return self.descriptor.kind

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return DTYPES[self.descriptor.number]

    @property
    def op(self) -> int:
        """The operation that combines values."""
        return self.descriptor.op

    @property
    def root(self) -> int:
        """The rank that sends or receives, in kinds that have a root."""
        return self.descriptor.root

    def sources(self, size: int) -> Sequence[int]:
        """The ranks that send something to this one: one for each output, or all for a single output."""
        if not self.outputs:
            return ()
        return (self.root,) if self.kind in (BROADCAST, SCATTER) else range(size)

    def lengths(self, size: int) -> list[int]:
        """Bytes for rank 0, 1, ..., then bytes expected from rank 0, 1, ...; -1: nothing."""
        has: list[int] = [len(x) for x in self.inputs] or [-1]
        wants: list[int] = [len(x) for x in self.outputs]
        expects: dict[int, int] = dict(zip(self.sources(size), wants if len(wants) > 1 else wants * size))
        return [*(has if len(has) > 1 else has * size), *(expects.get(rank, -1) for rank in range(size))]


class Scratch:
    """Memory that is reused when nothing refers to it any more: new pages cost more than the work on them."""

    def __init__(self) -> None:
        self._free: dict[int, list[bytearray]] = {}

    def take(self, nbytes: int) -> np.ndarray:
        """Uninitialized bytes."""
        size = 1 << max(nbytes - 1, 1).bit_length()
        if size > LARGEST:
            return np.empty(nbytes, np.uint8)
        free = self._free.setdefault(size, [])
        block = free.pop() if free else bytearray(size)
        lease = (ctypes.c_ubyte * size).from_buffer(block)
        weakref.finalize(lease, free.append, block).atexit = False
        return np.frombuffer(memoryview(lease), np.uint8, nbytes)


def address_of(x: np.ndarray) -> int:
    """The address of an array; 0 for an empty one."""
    return x.__array_interface__["data"][0] if x.size else 0


def cut_in_units(x: np.ndarray, parts: int, unit: int = 1) -> list[np.ndarray]:
    """Nearly equal parts, each of whole units."""
    bounds = [x.size // unit * at // parts * unit for at in range(parts + 1)]
    return [x[begin:end] for begin, end in pairwise(bounds)]


def as_lanes(lanes: Sequence[np.ndarray], ranks: int) -> tuple[int, list[int], list[int]]:
    """Lanes as a kernel takes them: an address, the offset of each lane from there, and the lengths. A single lane is for all ranks.

    The address is that of the first lane if lanes lie end to end: then the kernel can tell whether they lie in a shared region.
    """
    lanes = [*lanes] * ranks if len(lanes) == 1 else lanes or [EMPTY] * ranks
    at, lengths = [address_of(x) for x in lanes], [x.size for x in lanes]
    end_to_end = [at[0] + sum(lengths[:lane]) for lane in range(ranks)]
    is_packed = len(set(at)) == 1 or all(a == b or not n for a, b, n in zip(at, end_to_end, lengths))
    begin = at[0] if is_packed else 0
    return begin, [a - begin if n else 0 for a, n in zip(at, lengths)], lengths
