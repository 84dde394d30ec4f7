"""Recursive halving and doubling: the bytes of a ring in log2 p steps.

Halving (reduce-scatter): ranks p/2 apart swap halves of the buffer, and each adds up its own half. Then ranks p/4 apart swap
quarters, and so on, until every rank has the sum of one chunk. Doubling (all-gather) runs the same pairs backwards, with finished
chunks. The pairs need a power of two of ranks. With any other number, some ranks are guests: the rank to their right, their host,
does their part.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rankloom.base.cost import Bill, Path
from rankloom.base.shares import chunk_sizes
from rankloom.comm.messages import TAG
from rankloom.comm.operands import chunk_bounds, require_rows, summand, summing_dtype
from rankloom.comm.ring import begin_all_gather
from rankloom.world.group import Group


@dataclass(frozen=True, slots=True)
class Seats:
    """Which ranks take part: those with a seat. The number of seats is the largest power of two up to p. The other ranks are guests of
    the rank to their right: ranks 0, 2, 4 ..., as many as needed.

    >>> [(Seats(6).seat(rank), Seats(6).guest_of(rank)) for rank in range(6)]
    [(None, None), (0, 0), (None, None), (1, 2), (2, None), (3, None)]
    """

    ranks: int

    @property
    def count(self) -> int:
        """How many seats there are."""
        return 1 << (self.ranks.bit_length() - 1)

    @property
    def guests(self) -> int:
        """How many ranks have no seat."""
        return self.ranks - self.count

    def seat(self, rank: int) -> int | None:
        """The seat of a rank, None for a guest."""
        if rank < 2 * self.guests:
            return rank // 2 if rank % 2 else None
        return rank - self.guests

    def rank(self, seat: int) -> int:
        """The rank that has this seat."""
        return 2 * seat + 1 if seat < self.guests else seat + self.guests

    def guest_of(self, rank: int) -> int | None:
        """The guest of this rank, if it has one."""
        return rank - 1 if rank % 2 and rank < 2 * self.guests else None

    def row_bounds(self, rows: int) -> list[int]:
        """Where each seat's rows begin, when tensor_split cuts the rows over ranks. A seat's rows include its guest's, which come first."""
        starts = chunk_bounds(rows, self.ranks)
        return [starts[self.rank(seat) - (seat < self.guests)] for seat in range(self.count)] + [rows]


def halving_all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum `x` over the group, in place. Every rank ends with the same bits.

    x:      any shape of n elements, contiguous, the same on each of p ranks; p need not divide n
    sent:   2 log2 p messages, 2n(p-1)/p elements per rank, the first half in fp32 where x is narrower. If p is no power of two,
            log2 p is rounded down, a guest sends n elements, and its host n more than others
    steps:  2 log2 p, rounded down; 2 more where p is no power of two
    raises: NotContiguous; ConfigError for bool
    source: Rabenseifner 2004; Thakur, Rabenseifner & Gropp 2005
    """
    flat = summand(x, group, "halving_all_reduce")
    seats = Seats(group.size)
    starts = chunk_bounds(flat.numel(), seats.count)
    sums = _halve(flat.to(summing_dtype(x.dtype)), starts, seats, group, "halving_all_reduce")
    seat = seats.seat(group.rank)
    if seat is not None:
        mine = slice(starts[seat], starts[seat + 1])
        flat[mine].copy_(sums[mine])
    _double(flat, starts, seats, group, "halving_all_reduce")
    return x


def halving_reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks of this rank's rows of `x`, which is not changed.

    x:      [p*n, ...] on each of p ranks -> [n, ...]; where p does not divide the rows, rank r gets those of tensor_split
    sent:   log2 p messages, n(p-1) rows per rank, in fp32 where x is narrower. If p is no power of two, log2 p is rounded down,
            a guest sends p*n rows, and its host n more than others
    steps:  log2 p, rounded down; 2 more where p is no power of two
    raises: NotContiguous; ShapeMismatch for a tensor without rows; ConfigError for bool
    source: Thakur, Rabenseifner & Gropp 2005
    """
    rows = require_rows(x, group, "halving_reduce_scatter").tensor_split(group.size)
    seats, width = Seats(group.size), x.shape[1:].numel()
    sums = summand(x, group, "halving_reduce_scatter").to(summing_dtype(x.dtype), copy=True)
    _halve(sums, [start * width for start in seats.row_bounds(x.shape[0])], seats, group, "halving_reduce_scatter")
    of_rank = sums.split([piece.numel() for piece in rows])
    mine = of_rank[group.rank].to(x.dtype, copy=True)   # a copy, so that it does not keep the whole alive
    guest = seats.guest_of(group.rank)
    if guest is not None:
        group.send(of_rank[guest].to(x.dtype), guest, tag=TAG, label="halving_reduce_scatter: to the guest")
    elif seats.seat(group.rank) is None:
        group.recv(mine, group.rank + 1, tag=TAG, label="halving_reduce_scatter: from the host")
    return mine.view(rows[group.rank].shape)


def doubling_all_gather(x: Tensor, group: Group, *, out: Tensor | None = None) -> Tensor:
    """All ranks' `x` in rank order, by recursive doubling.

    x:      [n, ...] on each of p ranks -> [p*n, ...]
    out:    where to put them. Its rows may be uneven: then `x` has the rows that tensor_split gives this rank. `x` may be a view of it
    sent:   log2 p messages, n(p-1) rows per rank. If p is no power of two, log2 p is rounded down, a guest sends n rows, and its
            host p*n more than others
    steps:  log2 p, rounded down; 2 more where p is no power of two
    raises: NotContiguous; ShapeMismatch when `x` is not this rank's piece of `out`
    source: Thakur, Rabenseifner & Gropp 2005
    """
    pieces, out = begin_all_gather(x, group, out, "doubling_all_gather")
    seats = Seats(group.size)
    guest = seats.guest_of(group.rank)
    if guest is not None:
        group.recv(pieces[guest], guest, tag=TAG, label="doubling_all_gather: from the guest")
    elif seats.seat(group.rank) is None:
        group.send(pieces[group.rank], group.rank + 1, tag=TAG, label="doubling_all_gather: to the host")   # `x` may be overwritten by now
    starts = [start * out.shape[1:].numel() for start in seats.row_bounds(out.shape[0])]
    _double(out.detach().view(-1), starts, seats, group, "doubling_all_gather")
    return out


def _halve(sums: Tensor, starts: list[int], seats: Seats, group: Group, label: str) -> Tensor:
    """Reduce-scatter over seats: each seat ends with the total of its own span of `sums`. The rest of `sums` is left as partial sums."""
    seat, guest = seats.seat(group.rank), seats.guest_of(group.rank)
    if seat is None:
        group.send(sums, group.rank + 1, tag=TAG, label=f"{label}: to the host")
        return sums
    inbox = torch.empty_like(sums)
    if guest is not None:
        sums.add_(group.recv(inbox, guest, tag=TAG, label=f"{label}: from the guest"))
    for distance in reversed(_distances(seats)):
        keep, give = _sides(seat, distance, starts)
        partner = seats.rank(seat ^ distance)
        sums[keep].add_(group.exchange(sums[give], partner, inbox[keep], partner, tag=TAG, label=label))
    return sums


def _double(whole: Tensor, starts: list[int], seats: Seats, group: Group, label: str) -> None:
    """All-gather over seats: each brings its own span of `whole`, and every rank ends with all of it."""
    seat, guest = seats.seat(group.rank), seats.guest_of(group.rank)
    if seat is None:
        group.recv(whole, group.rank + 1, tag=TAG, label=f"{label}: from the host")
        return
    for distance in _distances(seats):
        have, lack = _sides(seat, distance, starts)
        partner = seats.rank(seat ^ distance)
        group.exchange(whole[have], partner, whole[lack], partner, tag=TAG, label=label)
    if guest is not None:
        group.send(whole, guest, tag=TAG, label=f"{label}: to the guest")


def _distances(seats: Seats) -> list[int]:
    return [1 << k for k in range(seats.count.bit_length() - 1)]


def _sides(seat: int, distance: int, starts: list[int]) -> tuple[slice, slice]:
    """The span of this seat's block of `distance` seats, and the span of its partner's block."""
    mine = seat & -distance
    theirs = mine ^ distance
    return slice(starts[mine], starts[mine + distance]), slice(starts[theirs], starts[theirs + distance])


def _length(span: slice) -> int:
    return int(span.stop - span.start)


def _halve_bill(starts: list[int], seats: Seats, itemsize: int, rank: int) -> Bill:
    """What `rank` sends in `_halve`."""
    seat = seats.seat(rank)
    if seat is None:
        return Bill(sent=starts[-1] * itemsize, messages=1)
    given = [_length(_sides(seat, distance, starts)[1]) for distance in _distances(seats)]
    return Bill(sent=sum(given) * itemsize, messages=len(given))


def _double_bill(starts: list[int], seats: Seats, itemsize: int, rank: int) -> Bill:
    """What `rank` sends in `_double`."""
    seat = seats.seat(rank)
    if seat is None:
        return Bill()
    passed = [_length(_sides(seat, distance, starts)[0]) for distance in _distances(seats)]
    passed += [starts[-1]] if seats.guest_of(rank) is not None else []
    return Bill(sent=sum(passed) * itemsize, messages=len(passed))


def halving_all_reduce_bill(n: int, p: int, itemsize: int, rank: int = 0, *, wide: int = 1) -> Bill:
    """What `rank` sends in `halving_all_reduce`."""
    seats = Seats(p)
    starts = chunk_bounds(n, seats.count)
    return _halve_bill(starts, seats, itemsize * wide, rank) + _double_bill(starts, seats, itemsize, rank)


def halving_reduce_scatter_bill(n: int, p: int, itemsize: int, rank: int = 0, *, wide: int = 1) -> Bill:
    """What `rank` sends in `halving_reduce_scatter` of n rows in all, of `itemsize` bytes each."""
    seats = Seats(p)
    guest = seats.guest_of(rank)
    bill = _halve_bill(seats.row_bounds(n), seats, itemsize * wide, rank)
    return bill if guest is None else bill + Bill(sent=chunk_sizes(n, p)[guest] * itemsize, messages=1)


def doubling_all_gather_bill(n: int, p: int, itemsize: int, rank: int = 0, *, wide: int = 1) -> Bill:
    """What `rank` sends in `doubling_all_gather` of n rows in all, of `itemsize` bytes each."""
    seats = Seats(p)
    bill = _double_bill(seats.row_bounds(n), seats, itemsize, rank)
    return bill if seats.seat(rank) is not None else bill + Bill(sent=chunk_sizes(n, p)[rank] * itemsize, messages=1)


def halving_all_reduce_path(nbytes: int, p: int, *, wide: int = 1) -> Path:
    """What all wait for in `halving_all_reduce` of `nbytes`."""
    seats = Seats(p)
    starts = chunk_bounds(nbytes, seats.count)
    return _halve_path(starts, seats, wide) + _double_path(starts, seats)


def halving_reduce_scatter_path(nbytes: int, p: int, *, wide: int = 1) -> Path:
    """What all wait for in `halving_reduce_scatter` of `nbytes` on each rank."""
    seats = Seats(p)
    return _halve_path(seats.row_bounds(nbytes), seats, wide) + _guest_path(nbytes, seats)


def doubling_all_gather_path(nbytes: int, p: int, *, wide: int = 1) -> Path:
    """What all wait for in `doubling_all_gather` to `nbytes` in all."""
    seats = Seats(p)
    return _guest_path(nbytes, seats) + _double_path(seats.row_bounds(nbytes), seats)


def _halve_path(starts: list[int], seats: Seats, wide: int) -> Path:
    there = _double_path(starts, seats)   # the same messages in reverse
    return Path(steps=there.steps, bytes=there.bytes * wide, added=there.bytes * wide)


def _double_path(starts: list[int], seats: Seats) -> Path:
    """Every round takes as long as its largest message; guests then wait for the whole."""
    longest = [max(_length(_sides(seat, distance, starts)[0]) for seat in range(seats.count)) for distance in _distances(seats)]
    longest += [starts[-1]] if seats.guests else []
    return Path(steps=len(longest), bytes=sum(longest))


def _guest_path(nbytes: int, seats: Seats) -> Path:
    """A guest's own rows, from or to its host."""
    return Path(steps=1, bytes=-(-nbytes // seats.ranks)) if seats.guests else Path()
