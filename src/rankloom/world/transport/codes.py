"""The numbers that callers and kernels share: kinds of calls, operations, and reasons of failure. _shared.c has the same."""

KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all", "barrier")
ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, GATHER, REDUCE_SCATTER, SCATTER, ALL_TO_ALL, BARRIER = range(len(KINDS))
SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR = range(8)
FINE, LOST, LEFT, ABORTED, TIMED_OUT, MISMATCHED, WRONG_LENGTH, INTERRUPTED, FORKED, DAMAGED, NO_MEMORY = range(11)
ANYONE = -1   # a receive from any rank, whichever sends first
NUMBER_AT = 56   # the size of a message is its bytes, and from this bit on its number type, so that one comparison finds both


def bytes_of(size: int) -> int:
    """Of the size of a message: its number of bytes."""
    return size & (1 << NUMBER_AT) - 1
