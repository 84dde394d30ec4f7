"""The numbers that callers and kernels share: kinds of calls, operations, and reasons of failure. _shared.c has the same."""

from typing import Any, NamedTuple

KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all", "barrier")
ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, GATHER, REDUCE_SCATTER, SCATTER, ALL_TO_ALL, BARRIER = range(len(KINDS))
SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR = range(8)
FINE, LOST, LEFT, ABORTED, TIMED_OUT, MISMATCHED, WRONG_LENGTH, INTERRUPTED, FORKED, DAMAGED, NO_MEMORY = range(11)
ANYONE = -1   # a receive from any rank, whichever sends first
NUMBER_AT = 56   # the size of a message is its bytes, and from this bit on its number type, so that one comparison finds both


def nbytes_of(size: int) -> int:
    """Of the size of a message: its number of bytes."""
    return size & (1 << NUMBER_AT) - 1


class Break(NamedTuple):
    """Why a group is broken, and the rank to blame; FINE and -1 while it is whole."""

    why: int
    blamed: int


class Gone(NamedTuple):
    """A rank that makes no more calls, and why: it has LEFT, or is LOST."""

    rank: int
    why: int


class Status(NamedTuple):
    """What a link knows of its group, as a `Break`, and of each rank.

    arrived: how many meetings the rank has come to; over several hosts, how many calls it has begun
    states:  the state letter of its process; X: it has ended; L: it has left; T: it is stopped; ?: it does not answer
    """

    why: int
    blamed: int
    arrived: list[int]
    states: list[str]


def status_of(link: Any) -> Status:
    """The status of a link in C, which returns a plain tuple, or in Python."""
    return Status(*link.status())
