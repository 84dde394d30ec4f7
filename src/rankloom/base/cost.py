"""What communication costs: bills, which add, and the bills of a backend's own collectives.

A `Bill` is what one rank pays, a `Path` what all wait for. An algorithm written in `comm/` keeps both beside it. The functions
here price the collectives that the backend (gloo, NCCL) runs inside: the bandwidth-optimal cost, which is also what gloo's ring pays.
"""

from dataclasses import dataclass, fields
from functools import cache


@dataclass(frozen=True, slots=True)
class Bill:
    """What one rank pays. Bills add; a planner only adds and compares.

    A bill of a collective alone is equal to the pair that a ledger counts: `(ledger.messages, ledger.bytes) == bill`.

    >>> Bill(sent=8, messages=1) + Bill(sent=4, messages=2)
    Bill(sent=12, messages=3, flops=0, memory=0)
    >>> (3, 12) == Bill(sent=12, messages=3)
    True
    """

    sent: int = 0       # bytes
    messages: int = 0
    flops: int = 0
    memory: int = 0     # bytes alive at the peak

    def __add__(self, other: "Bill") -> "Bill":
        return Bill(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __eq__(self, other: object) -> bool:
        same = (self.messages, self.sent, self.flops, self.memory)
        if isinstance(other, tuple):
            return same == (*other, 0, 0)
        return same == (other.messages, other.sent, other.flops, other.memory) if isinstance(other, Bill) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.messages, self.sent))


@dataclass(frozen=True, slots=True)
class Path:
    """The longest chain of waits in an algorithm, over all ranks: what its time depends on. Paths of parts done in turn add.

    time = alpha * steps + beta * bytes + gamma * added, with alpha, beta, gamma fitted by measurement

    >>> Path(steps=2, bytes=8) + Path(steps=1, bytes=4, added=4)
    Path(steps=3, bytes=12, added=4)
    """

    steps: int = 0    # messages, one after another
    bytes: int = 0    # that pass one link, one after another
    added: int = 0    # bytes of sums that one rank computes, one after another

    def __add__(self, other: "Path") -> "Path":
        return Path(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@cache
def all_reduce_bill(nbytes: int, ranks: int) -> Bill:
    """Reduce-scatter, then all-gather: 2n(p-1)/p bytes, nearly independent of p."""
    return Bill(sent=2 * nbytes * (ranks - 1) // ranks, messages=2 * (ranks - 1))


@cache
def scatter_bill(nbytes: int, ranks: int) -> Bill:
    """Reduce-scatter or all-to-all of n bytes per rank: every rank sends all chunks but its own."""
    return Bill(sent=nbytes * (ranks - 1) // ranks, messages=ranks - 1)


@cache
def all_gather_bill(nbytes: int, ranks: int) -> Bill:
    """All-gather of n bytes from each rank: around a ring, every rank passes on p-1 pieces."""
    return Bill(sent=nbytes * (ranks - 1), messages=ranks - 1)


@cache
def broadcast_bill(nbytes: int, ranks: int, is_root: bool) -> Bill:
    """Broadcast of n bytes, charged to the root although a tree spreads it: p-1 copies must leave someone."""
    return Bill(sent=nbytes * (ranks - 1), messages=ranks - 1) if is_root else Bill()
