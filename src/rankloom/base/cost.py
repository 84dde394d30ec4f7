"""What communication costs: what one rank pays (`Bill`), and what all ranks wait for (`Path`). Both add.

Each algorithm in `comm/` has a bill and a path beside its code. The functions here give the bills of the backend's own collectives
(gloo, NCCL): the fewest bytes that a collective needs, which is also what gloo's ring sends.
"""

from dataclasses import dataclass
from functools import lru_cache

KEPT = 4096   # bills of each kind: every call asks for one, and a run may have a new size in every step


@dataclass(frozen=True, slots=True)
class Bill:
    """What one rank pays. A bill is equal to the pair that a ledger counts: `(ledger.messages, ledger.bytes) == bill`.

    >>> Bill(sent=8, messages=1) * 2 + Bill(sent=4, messages=2)
    Bill(sent=20, messages=4)
    >>> (3, 12) == Bill(sent=12, messages=3)
    True
    """

    sent: int = 0       # bytes
    messages: int = 0

    def __add__(self, other: "Bill") -> "Bill":
        return Bill(self.sent + other.sent, self.messages + other.messages)

    def __mul__(self, times: int) -> "Bill":
        return Bill(self.sent * times, self.messages * times)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, tuple):
            return (self.messages, self.sent) == other
        return (self.messages, self.sent) == (other.messages, other.sent) if isinstance(other, Bill) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.messages, self.sent))


@dataclass(frozen=True, slots=True)
class Path:
    """The longest chain of waits in an algorithm, over all ranks: its time depends on it. Paths of steps done in turn add.

    time = alpha * steps + beta * bytes + gamma * added, with alpha, beta, gamma fitted by measurement

    >>> Path(steps=2, bytes=8) + Path(steps=1, bytes=4, added=4)
    Path(steps=3, bytes=12, added=4)
    """

    steps: int = 0    # messages, one after another
    bytes: int = 0    # that pass one link, one after another
    added: int = 0    # bytes of sums that one rank computes, one after another

    def __add__(self, other: "Path") -> "Path":
        return Path(self.steps + other.steps, self.bytes + other.bytes, self.added + other.added)


@lru_cache(KEPT)
def all_reduce_bill(nbytes: int, ranks: int) -> Bill:
    """Reduce-scatter, then all-gather: 2n(p-1)/p bytes, nearly independent of p."""
    return Bill(sent=2 * nbytes * (ranks - 1) // ranks, messages=2 * (ranks - 1))


@lru_cache(KEPT)
def scatter_bill(nbytes: int, ranks: int) -> Bill:
    """Reduce-scatter or all-to-all of n bytes per rank: every rank sends all chunks but its own."""
    return Bill(sent=nbytes * (ranks - 1) // ranks, messages=ranks - 1)


@lru_cache(KEPT)
def all_gather_bill(nbytes: int, ranks: int) -> Bill:
    """All-gather of n bytes from each rank: around a ring, every rank passes on p-1 pieces."""
    return Bill(sent=nbytes * (ranks - 1), messages=ranks - 1)


@lru_cache(KEPT)
def broadcast_bill(nbytes: int, ranks: int, is_root: bool) -> Bill:
    """Broadcast of n bytes, all p-1 copies charged to the root, although a tree spreads them over ranks."""
    return Bill(sent=nbytes * (ranks - 1), messages=ranks - 1) if is_root else Bill()
