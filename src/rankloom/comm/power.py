"""PowerSGD: an all-reduce that sends matrices as products of low rank.

A matrix M [a, b] is sent as P Q, with P [a, r] and Q [r, b]. Each training step does one step of subspace iteration. It starts from
the Q of the training step before:

    M = gradient + error
    P = M Q^T                     all-reduce of P, together with all values that are in no matrix, which are not compressed
    orthonormalise P              on every rank, to the same bits
    own = P^T M                   all-reduce: Q is the sum of `own` over the ranks
    gradient = P Q; error = M - P own

Both messages are sums, so their size does not grow with the number of ranks. The errors of all ranks add up to the error of the sum.
The error is not stored: M is, and the next step's first pass over it subtracts P own.

The passes over M are in C (_lowrank.c); where that was not built, and on a GPU, torch does the same.
Read comm/lossy.py first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from rankloom.base.cost import Bill, all_reduce_bill
from rankloom.base.errors import ConfigError, ShapeMismatch
from rankloom.base.rng import stream
from rankloom.base.tensors import memory_of
from rankloom.comm.lossy import LABEL, Compressed
from rankloom.world.group import Group

try:
    from rankloom.comm import _lowrank  # type: ignore[attr-defined]
except ImportError:   # there was no compiler when this was installed
    _lowrank = None

NATIVE = _lowrank is not None
RANK = 4
IN_C = 16   # up to this rank, sums stay in registers and the nearest caches; above it, torch multiplies
SMALL = 1e-30
NOTHING = 2.0**-40   # a column (scaled to a maximum of 1) whose mean square falls below this is only rounding error

BufferParts = Sequence[tuple[int, Sequence[int]]]
"""The tensors in a flat buffer: the first element and the shape of each."""


class MatrixPlace(NamedTuple):
    """A matrix [a, b] in a flat buffer, at its first element."""

    start: int
    a: int
    b: int

    @property
    def end(self) -> int:
        """One past its last element."""
        return self.start + self.a * self.b


@dataclass(slots=True)
class Matrix:
    """A matrix in the buffer, and its state between steps, in fp32."""

    start: int
    kept: Tensor      # [a, b]   the last step's M
    p: Tensor         # [a, r]   orthonormal columns
    own: Tensor       # [r, b]   P^T M; the error is kept - p own
    q: Tensor         # [r, b]   from which the next step starts; equal on all ranks

    def of(self, values: Tensor) -> Tensor:
        """The view of this matrix in the flat buffer."""
        return values[self.start : self.start + self.kept.numel()].view_as(self.kept)

    def absorb(self, x: Tensor) -> Tensor:
        """kept = M = x + error. Returns M Q^T [a, r], times a factor that is equal on all ranks."""
        p, q = torch.empty_like(self.p), self.q / self.q.abs().amax().clamp(min=SMALL)   # so that no product overflows
        if NATIVE and x.device.type == "cpu" and len(q) <= IN_C:
            _lowrank.absorb(*map(memory_of, (x, self.kept, self.p, self.own, q, p)), *self.kept.shape, len(q))
            return p
        self.kept.addmm_(self.p, self.own, alpha=-1).add_(x)
        return torch.mm(self.kept, q.t(), out=p)

    def turn(self, p: Tensor) -> Tensor:
        """p: the sum of P over all ranks. Returns `own`, whose sum over all ranks is the next Q."""
        self.p = orthonormal(p)
        if NATIVE and p.device.type == "cpu" and len(self.q) <= IN_C:
            _lowrank.combine(*map(memory_of, (self.kept, self.p, self.own)), *self.kept.shape, len(self.q))
        else:
            torch.mm(self.p.t(), self.kept, out=self.own)
        return self.own

    def spread(self, x: Tensor) -> None:
        """x = P Q. C and torch add the terms in the same order, so they give the same bits."""
        if NATIVE and x.device.type == "cpu":
            _lowrank.spread(*map(memory_of, (self.p, self.q, x)), *x.shape, len(self.q))
            return
        torch.mul(self.p[:, :1], self.q[:1], out=x)
        for column, row in zip(self.p.t()[1:], self.q[1:]):
            x += torch.outer(column, row)

    def revive(self) -> None:
        """Replace rows of Q that are all zero by random ones: they would stay zero for ever."""
        dead = ~self.q.any(1)
        if dead.any():
            self.q = torch.where(dead[:, None], first_directions(self.start, *self.q.shape).to(self.q.device), self.q)

    def restore(self, x: Tensor) -> None:
        """Undo `absorb`: the error is again what it was before x; zero where x was not finite."""
        self.kept.sub_(x).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self.own.zero_()


def orthonormal(p: Tensor) -> Tensor:
    """An orthonormal basis of the span of the columns of `p`. p: [a, r], finite -> [a, r]; a column that depends on others becomes zero

    Every rank computes it from the same sums, and all must get the same bits. On the CPU, the rounding of torch's QR depends on the
    number of threads, which may differ between ranks. So the CPU uses Gram-Schmidt, with a fixed order of sums. A GPU uses QR, which
    gives the same bits on cards of one kind.
    """
    if p.device.type != "cpu":
        return torch.linalg.qr(p).Q.contiguous()
    rows = p.t() / p.abs().amax(0).clamp(min=SMALL)[:, None]   # so that squares neither overflow nor underflow
    rows = rows.contiguous()
    if NATIVE:
        _lowrank.orthonormalise(memory_of(rows), memory_of(torch.empty_like(rows[0])), *rows.shape)
    else:
        _gram_schmidt_twice(rows)
    return rows.t().contiguous()


def _gram_schmidt_twice(rows: Tensor) -> None:
    """As in C, to the same bits. rows: [r, a]"""
    for k in (*range(len(rows)), *range(len(rows))):
        square = _folded(rows[k] * rows[k]).item()
        rows[k] *= 1.0 / sqrt(square) if square > NOTHING * rows.shape[1] else 0.0   # torch's square root does not round as IEEE demands
        rows[k + 1 :] -= _folded(rows[k + 1 :] * rows[k])[:, None] * rows[k]


def _folded(products: Tensor) -> Tensor:
    """The sum over the last dim, by halves, so that its order does not depend on threads. [..., n] -> [...]"""
    while (n := products.shape[-1]) > 1:
        half = 1 << (n - 1).bit_length() - 1
        products[..., : n - half] += products[..., half:]
        products = products[..., :half]
    return products[..., 0]


class PowerSGD(Compressed):
    """The all-reduce of this file.

    parts:  the tensors in the buffer; one of two dims or more is a matrix, its first dim by all others
    rank:   r, the rank of the products; docs/design.md says how high training needs it
    sent:   4(p-1) messages: an all-reduce of r(a+b) values for each matrix [a, b] where that is at most half of it, and of all other
            values
    memory: n + 3r(a+b) fp32
    raises: ConfigError without parts, as nothing would be compressed, and for parts of another form
    source: Vogels, Karimireddy & Jaggi 2019
    """

    def __init__(self, parts: BufferParts, rank: int = RANK):
        super().__init__()
        if not parts:
            raise ConfigError("powersgd needs to know where the matrices in the buffer are: give parts=[(first element, shape), ...]")
        self.rank = rank
        try:
            sizes = [(index(start), [*map(index, shape)]) for start, shape in parts]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"powersgd: parts={parts!r}, expected [(first element, shape), ...], such as [(0, (64, 32))]") from error
        places = [MatrixPlace(start, shape[0] if shape else 1, prod(shape[1:])) for start, shape in sizes]
        self._places = [place for place in places if rank * (place.a + place.b) <= place.a * place.b // 2]
        self._matrices: list[Matrix] = []

    def _plain(self, n: int) -> list[slice]:
        """The parts of a buffer of n values that are in no matrix."""
        ends = [0, *(place.end for place in self._places)]
        starts = [*(place.start for place in self._places), n]
        return [slice(end, start) for end, start in zip(ends, starts)]

    def _sum(self, values: Tensor, group: Group) -> None:
        plain = self._plain(len(values))
        if any(part.stop < part.start for part in plain):
            raise ShapeMismatch(f"{group.where(LABEL)}: {len(values)} values, in which the parts do not lie one after the other")
        if not self._matrices:
            self._matrices = [new_matrix(place, self.rank, values.device) for place in self._places]
        if values.is_meta:   # on paper: only what is kept counts
            return
        products = [matrix.absorb(matrix.of(values)) for matrix in self._matrices]
        first = torch.cat([p.view(-1) for p in products] + [values[part] for part in plain])
        group.all_reduce(first, label=LABEL)
        if not first.isfinite().all():   # a test of the sum, so all ranks agree
            for matrix in self._matrices:
                matrix.restore(matrix.of(values))
            values.fill_(torch.nan)
            return
        sums = first.split([p.numel() for p in products] + [part.stop - part.start for part in plain])
        for part, total in zip(plain, sums[len(products) :]):
            values[part] = total
        if products:
            self._spread([total.view_as(p) for total, p in zip(sums, products)], values, group)

    def _spread(self, ps: list[Tensor], values: Tensor, group: Group) -> None:
        """The second all-reduce. ps: the sums of P of all matrices"""
        second = torch.cat([matrix.turn(p).view(-1) for matrix, p in zip(self._matrices, ps)])
        group.all_reduce(second, label=LABEL)
        for matrix, q in zip(self._matrices, second.split([matrix.q.numel() for matrix in self._matrices])):
            matrix.q = q.view_as(matrix.q)
            matrix.spread(matrix.of(values))
            matrix.revive()
        if not second.isfinite().all():   # the sum overflowed, so Q is of no use for the next step
            self._matrices = []

    def held(self) -> int:
        """Bytes kept between steps."""
        return sum(x.nbytes for matrix in self._matrices for x in (matrix.kept, matrix.p, matrix.own, matrix.q))

    def rescale(self, factor: float) -> None:
        """Multiply the errors."""
        if not factor:   # Q goes too: it has the directions of what is forgotten
            self._matrices = []
        for matrix in self._matrices:
            matrix.kept.mul_(factor)
            matrix.own.mul_(factor)

    def bill(self, n: int, group: Group) -> Bill:
        """What this rank of `group` sends for n values."""
        if not n:
            return Bill()
        ps = 4 * self.rank * sum(place.a for place in self._places)
        qs = 4 * self.rank * sum(place.b for place in self._places)
        plain = 4 * (n - sum(place.a * place.b for place in self._places))
        return all_reduce_bill(ps + plain, group.size) + (all_reduce_bill(qs, group.size) if qs else Bill())


def new_matrix(place: MatrixPlace, rank: int, device: torch.device) -> Matrix:
    """A matrix at its first step: no error, and a random Q, the same on all ranks."""
    start, a, b = place
    zeros = partial(torch.zeros, dtype=torch.float32, device=device)
    return Matrix(start, zeros(a, b), zeros(a, rank), zeros(rank, b), first_directions(start, rank, b).to(device))


def first_directions(start: int, rank: int, b: int) -> Tensor:
    """A random Q [r, b] for the matrix at `start`: the same on all ranks."""
    return torch.randn(rank, b, generator=stream(0, "powersgd", start), dtype=torch.float32, device="cpu")
