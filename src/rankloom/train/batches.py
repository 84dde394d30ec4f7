"""Cut a batch into micro-batches, and distribute its rows over ranks.

A batch is a tensor, or tuples, lists, dicts and dataclasses of tensors, nested in any way. Every tensor has one row per sample along
dim 0. Numpy arrays of the same length are cut by rows too, and so are lists and tuples of that length without tensors (captions). Where
no tensor says how many rows there are, numpy arrays do. Anything else goes unchanged into every micro-batch. Micro-batches of unequal
length do not fit in one batch: pass them already cut.

A batch without such rows (a graph and its edges, packed tokens, boxes, nested tensors) is never cut: it is one micro-batch, and counts as
one row.
"""

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rankloom.base.errors import BatchError
from rankloom.base.nested import all_of, map_rows, map_tensors
from rankloom.base.shares import chunk_sizes, share
from rankloom.world.group import Group

SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


class MicroBatches(list[Any]):
    """A batch that the user has already cut into micro-batches."""


def as_given(batch: Any, accumulate: int, rank: int) -> Any:
    """The `MicroBatches` in an iterator, or in a list of `accumulate` batches none of which is a plain tensor; if there is one, that batch.
    Anything else is a batch to cut, and is returned as it is.

    raises: BatchError when an iterator does not give `accumulate` micro-batches
    """
    if isinstance(batch, Iterator):
        taken = MicroBatches(islice(batch, accumulate + 1))   # it may be endless
        if len(taken) != accumulate:
            count = f"{len(taken)} micro-batches" if len(taken) < accumulate else "more micro-batches"
            raise BatchError(f"rank {rank}: the iterator given to a step has {count}, but accumulate={accumulate}. Of a longer one give "
                             "the next: itertools.islice(iterator, accumulate)")
        return taken if accumulate > 1 else taken[0]
    if not _is_list_of_batches(batch) or len(batch) != accumulate:
        return batch
    return MicroBatches(batch) if accumulate > 1 else batch[0]


def _is_list_of_batches(batch: Any) -> bool:
    return isinstance(batch, list) and all(isinstance(each, dict | UserDict | tuple | list) or is_dataclass(each) for each in batch)


@contextmanager
def step_with(batch: Any, accumulate: int, rank: int) -> Iterator[Any]:
    """A context for a step on the batch `as_given`. An error inside gets a note if a list was taken as one batch but may hold several."""
    given = as_given(batch, accumulate, rank)
    try:
        yield given
    except Exception as error:
        if given is batch and isinstance(batch, list) and (accumulate > 1 or _is_list_of_batches(batch)):
            error.add_note(f"rank {rank}: this list of {len(batch)} was taken as one batch, to be cut in accumulate={accumulate} "
                           f"micro-batches. If it holds micro-batches, give exactly {accumulate} of them; those that are plain tensors as "
                           "an iterator, `iter(batch)`")
        raise


@contextmanager
def several_batches(batches: Any, rank: int) -> Iterator[None]:
    """A context for an evaluation. An error inside gets a note if `batches` may be one batch, as a step takes it: a tensor or a tuple.

    raises: BatchError for a mapping, which is one for certain
    """
    told = (f"rank {rank}: evaluate(batches) takes several batches, and this {type(batches).__name__} looks like one: give them in a list, "
            "evaluate([batch])")
    if isinstance(batches, Mapping):
        raise BatchError(told)
    try:
        yield
    except Exception as error:
        if isinstance(batches, Tensor | tuple):
            error.add_note(told)
        raise


def rows_of(batch: Any, rank: int) -> int:
    """How many samples a batch holds that is to be cut.

    raises: BatchError when it has no tensors, or tensors of different length along dim 0
    """
    if (rows := rows_if_any(batch)) is None:
        raise BatchError(f"rank {rank}: a batch must hold tensors or numpy arrays with one row per sample along dim 0, all equally long, "
                         f"to be cut; found lengths {_lengths(batch)} in a {type(batch).__name__}; looked for in tuples, lists, dicts and "
                         "dataclasses. Where samples are no rows (graphs, packed tokens), give `accumulate` micro-batches, already cut, in "
                         "a list or an iterator; if training is deterministic, tensors with a leading dim of 1")
    return rows


def rows_if_any(batch: Any) -> int | None:
    """How many samples a batch holds; None when it cannot be cut by rows."""
    lengths = set(_lengths(batch))
    return lengths.pop() if len(lengths) == 1 and -1 not in lengths else None


def _lengths(batch: Any) -> list[int]:
    """The length of dim 0 of each tensor, or of each numpy array if there is no tensor; -1 of one without dims, and of a nested tensor."""
    return [x.shape[0] if x.ndim and not getattr(x, "is_nested", False) else -1
            for x in all_of(Tensor, batch) or all_of(np.ndarray, batch)]


def cut_batch(batch: Any, microbatches: int, rank: int) -> list[Any]:
    """Cut the batch into so many micro-batches; if they cannot be equal, the first are one row longer. `MicroBatches` stay as they are.

    raises: BatchError when there are fewer rows than micro-batches
    """
    if isinstance(batch, MicroBatches):
        return list(batch)
    if microbatches == 1 and rows_if_any(batch) is None:
        return [batch]
    rows = rows_of(batch, rank)
    expect_rows(rows, microbatches, rank)
    runs = [share(at, microbatches, rows) for at in range(microbatches)]
    return [map_rows(partial(_rows, first=run.start, end=run.stop), batch, rows) for run in runs]


def cut_again(batch: Any, microbatches: int, rank: int) -> list[Any]:
    """As `cut_batch`, but into fewer when there are fewer rows. A batch without rows is one micro-batch."""
    if isinstance(batch, MicroBatches):
        return list(batch)
    rows = rows_if_any(batch)
    return cut_batch(batch, min(rows, microbatches), rank) if rows else [batch]


def with_halves(batch: Any, rows: int, rank: int) -> list[Any]:
    """The first `rows` rows, and the two halves of these. For one row: the row twice, and it alone as each half."""
    middle = (rows + 1) // 2
    runs = [partial(_rows, first=first, end=end) for first, end in ((0, rows), (0, middle), (middle, rows))]
    change: list[Callable[[Any], Any]] = [*runs] if rows > 1 else [_twice, runs[0], runs[0]]
    return [map_rows(each, batch, rows_of(batch, rank)) for each in change]


def expect_rows(rows: int, microbatches: int, rank: int) -> None:
    """Raise BatchError when a rank has fewer rows than micro-batches."""
    if rows < microbatches:
        advice = "one row for each, or accumulate less" if microbatches > 1 else "one row, of which the loss may count 0 items"
        raise BatchError(f"rank {rank}: a batch of {rows} rows cannot be cut in {microbatches} micro-batches; give it at least {advice}")


def laid_out_anew(x: Tensor) -> Tensor:
    """A contiguous copy at an address of its own. Kernels may round differently for other strides and alignments, and without a copy
    the alignment would depend on how many rows other ranks have.
    """
    return x.clone() if x.layout in SPARSE else x.clone(memory_format=torch.contiguous_format)


def _rows(x: Any, first: int, end: int) -> Any:
    if isinstance(x, Tensor) and x.layout in SPARSE:   # these cannot be sliced
        return x.to_sparse_coo().index_select(0, torch.arange(len(x), device=x.device)[first:end]).to_sparse(layout=x.layout)
    return x[first:end]


def _twice(x: Any) -> Any:
    """The first row, twice."""
    row = _rows(x, 0, 1)
    if isinstance(row, Tensor) and row.layout in SPARSE:
        return torch.cat([row.to_sparse_coo()] * 2).to_sparse(layout=row.layout)
    return torch.cat((row, row)) if isinstance(row, Tensor) else np.concatenate((row, row)) if isinstance(row, np.ndarray) else row + row


class DealtRows(NamedTuple):
    """The rows of this rank's logical shards, the number of the first of them in the global batch, and of how many shards in all."""

    batch: Any
    first: int
    shards: int


def deal_shards(batch: Any, group: Group, shards: int) -> DealtRows:
    """Send each rank the rows of the logical shards that it owns. A collective.

    The global batch is the batches of all ranks, concatenated in rank order. It is cut into `shards` contiguous shards, or fewer when
    it has fewer rows.
    raises: BatchError, on all ranks, when there are fewer rows than ranks, or rows that are no dense tensors would have to be sent
    """
    rows = rows_of(batch, group.rank)
    found: list[Any] = []
    map_rows(found.append, batch, rows)
    others = sum(not isinstance(each, Tensor) or each.layout in SPARSE for each in found)
    told = group.all_gather(torch.tensor([[rows, others]], device="cpu"), label="rows").tolist()   # a GPU would have to be waited for
    held = [rows for rows, _ in told]
    shards = min(shards, sum(held))
    if shards < group.size:
        raise BatchError(f"a global batch of {sum(held)} rows in {shards} logical shards is too small for {group.size} ranks")
    sizes = chunk_sizes(sum(held), shards)
    wanted = [sum(sizes[shard] for shard in share(rank, group.size, shards)) for rank in range(group.size)]
    first = sum(wanted[:group.rank])
    if wanted == held:
        return DealtRows(batch, first, shards)
    if brings := [rank for rank, (_, others) in zip(group.ranks, told) if others]:
        raise BatchError(f"rank {brings[0]} brings rows that are no dense tensors (but sparse, a numpy array, or a list or tuple as long "
                         f"as the batch), and ranks brought {held} rows where deterministic training wants {wanted}: only dense tensors "
                         "are sent on. Make such of them (`torch.as_tensor`, numbers that stand for texts), or bring as many rows as are "
                         "wanted")
    send, recv = _overlaps(held, wanted, group.rank), _overlaps(wanted, held, group.rank)
    deal = lambda t: group.all_to_all(t.contiguous(), send_rows=send, recv_rows=recv, label="deal rows")
    return DealtRows(map_tensors(deal, batch), first, shards)


def _overlaps(mine: Sequence[int], theirs: Sequence[int], rank: int) -> list[int]:
    """Cut the rows into runs of the lengths `mine`: how many rows of run `rank` are in each run of a cut into the lengths `theirs`."""
    start, end = sum(mine[:rank]), sum(mine[: rank + 1])
    bounds = [(sum(theirs[:r]), sum(theirs[: r + 1])) for r in range(len(theirs))]
    return [max(0, min(end, stop) - max(start, first)) for first, stop in bounds]
