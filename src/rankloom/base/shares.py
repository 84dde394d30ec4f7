"""Which of n things a rank has, where they are dealt out in contiguous shares."""

from rankloom.base.errors import BatchError


def chunk_sizes(n: int, p: int) -> list[int]:
    """The sizes of p contiguous chunks of n things, as `tensor_split` cuts: the first n % p are one longer.

    >>> chunk_sizes(8, 3)
    [3, 3, 2]
    """
    return [n // p + (chunk < n % p) for chunk in range(p)]


def share(rank: int, ranks: int, n: int) -> range:
    """This rank's contiguous share of n things. Shares are disjoint and complete; their sizes differ by at most one.

    >>> [share(r, 3, 7) for r in range(3)]
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    if not 0 <= rank < ranks:
        raise BatchError(f"rank {rank} of {ranks} ranks does not exist; ranks count from 0")
    size, longer = divmod(n, ranks)   # the first `longer` shares are one longer
    start = rank * size + min(rank, longer)
    return range(start, start + size + (rank < longer))
