"""How many rows a step takes: one equation, solved for what the user left out."""

from typing import NamedTuple

from rankloom.base.errors import BatchError

LOGICAL_SHARDS = 8   # of a `deterministic` run that does not set their number
FILLS_A_STAGE = 4    # micro-batches for each pipeline stage: then at most a fifth of a step of 1F1B is bubble


class Batch(NamedTuple):
    """Rows per rank and micro-batch, micro-batches per step, rows per step over all ranks."""

    local: int
    accumulate: int
    global_: int

    def equation(self, ranks: int) -> str:
        """The arithmetic with its numbers, as it is printed at the start of a run."""
        return _equation(self.local, ranks, self.accumulate, self.global_)


def solve_batch(ranks: int, local: int | None = None, accumulate: int | None = None, global_: int | None = None, *,
                pipe: int = 1) -> Batch:
    """Solve local x ranks x accumulate = global for what is None; with two unknowns, `accumulate` is 1.

    pipe:   pipeline stages: with several, and only `global_` given, `accumulate` is as many as keep them busy
    raises: BatchError with the equation when no whole numbers of 1 or more satisfy it

    >>> solve_batch(4, local=2, global_=24)
    Batch(local=2, accumulate=3, global_=24)
    >>> solve_batch(3, local=2)
    Batch(local=2, accumulate=1, global_=6)
    >>> solve_batch(2, global_=24, pipe=2)
    Batch(local=2, accumulate=6, global_=24)
    """
    asked = _equation(local or "?", ranks, accumulate or "?", global_ or "?")
    if any(number is not None and number < 1 for number in (ranks, local, accumulate, global_)):
        raise BatchError(f"{asked} has no solution: each of these is 1 or more")
    if local is None and global_ is None:
        raise BatchError(f"{asked} has no solution: give local_batch_size or global_batch_size")
    if global_ is not None and global_ < ranks:
        raise BatchError(f"global_batch_size {global_} is smaller than the {ranks} ranks; each needs at least one row")
    if global_ is None:
        assert local is not None, "one of the two is given: checked above"
        return Batch(local, accumulate or 1, local * ranks * (accumulate or 1))
    if local is None:
        return _divided(asked, global_, ranks, accumulate or _microbatches(global_ // ranks, pipe))
    return _accumulated(asked, local, ranks, accumulate, global_)


def _microbatches(rows: int, pipe: int) -> int:
    """Into how many micro-batches the rows of a rank are cut where nobody says it."""
    return 1 if pipe == 1 else max(n for n in range(1, FILLS_A_STAGE * pipe + 1) if rows % n == 0)


def _divided(asked: str, global_: int, ranks: int, accumulate: int) -> Batch:
    """Solve for `local`."""
    local, left = divmod(global_, ranks * accumulate)
    if left:   # so it is for a global batch that is too small
        raise BatchError(f"{asked} has no solution: {global_} does not divide by {ranks} x {accumulate}; "
                         f"take a multiple of {ranks * accumulate}, or other ranks or accumulate")
    return Batch(local, accumulate, global_)


def _accumulated(asked: str, local: int, ranks: int, accumulate: int | None, global_: int) -> Batch:
    """Solve for `accumulate`, or check the one that is given."""
    needed, left = divmod(global_, local * ranks)
    if left:
        raise BatchError(f"{asked} has no solution: {global_} does not divide by {local} x {ranks}; "
                         f"take a multiple of {local * ranks}, or another local_batch_size")
    if accumulate is not None and accumulate != needed:
        raise BatchError(f"{asked} does not hold: {local} x {ranks} x {accumulate} = {local * ranks * accumulate}")
    return Batch(local, needed, global_)


def _equation(local: int | str, ranks: int, accumulate: int | str, global_: int | str) -> str:
    return f"local {local} x ranks {ranks} x accumulate {accumulate} = global {global_}"
