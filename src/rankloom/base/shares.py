"""Which of n things a rank has, where they are dealt out in contiguous shares."""

from rankloom.base.errors import BatchError


def share(rank: int, ranks: int, n: int) -> range:
    """This rank's contiguous share of n things. Shares are disjoint and complete; their sizes differ by at most one.

    >>> [share(r, 3, 7) for r in range(3)]
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    if not 0 <= rank < ranks:
        raise BatchError(f"rank {rank} of {ranks} ranks does not exist; ranks count from 0")
    each, more = divmod(n, ranks)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))
