"""Where packed documents begin in the rows of a batch. Tokens attend within their document only. Pure arithmetic."""

import reprlib
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from rankloom.base.errors import DataError

Documents = tuple[tuple[int, ...], ...]   # for each row: where its documents begin, and the length of the row


def document_cuts(documents: Tensor | Sequence[Sequence[int]] | None, length: int, rows: int | None = None) -> Documents:
    """Where the documents of each row begin, and where the row ends.

    documents: a number for each token [B, T], equal within a document; or each row's cumulative lengths, (0, ..., T); None: each row is
               one document
    rows:      how many rows the batch has, if known; `documents` then has as many, or one that holds for all
    raises:    DataError for another shape, when lengths do not add up to `length`, or a document number comes back after another

    >>> import torch
    >>> document_cuts(torch.tensor([[7, 7, 7, 2, 2]]), 5)
    ((0, 3, 5),)
    """
    if documents is None:
        return ((0, length),)
    if isinstance(documents, Tensor):
        found = [_cuts_of(row) for row in documents.tolist()] if documents.dim() == 2 else []
    else:
        given = documents if hasattr(documents, "__len__") else []
        found = [list(map(int, row)) for row in given] if all(hasattr(row, "__len__") for row in given) else []
    if not found or (rows is not None and len(found) not in (1, rows)):
        what = f"a tensor of shape {tuple(documents.shape)}" if isinstance(documents, Tensor) else reprlib.repr(documents)
        raise DataError(f"documents are {what}; expected, for {rows or 'some'} rows or for one that stands for all, a number for each of "
                        f"{length} tokens, as a tensor [rows, {length}], or lists that rise from 0 to {length}")
    for number, row in enumerate(found):
        if len(row) < 2 or row[0] != 0 or row[-1] != length or any(a >= b for a, b in pairwise(row)):
            raise DataError(f"row {number}: {row} are not the bounds of documents in {length} tokens; "
                            f"cumulative lengths rise from 0 to {length}")
    return tuple(map(tuple, found))


def _cuts_of(numbers: list[int]) -> list[int]:
    begins = [at for at, number in enumerate(numbers) if at == 0 or number != numbers[at - 1]]
    if len(begins) != len(set(numbers)):
        raise DataError(f"a document number comes back after another document ({len(begins)} stretches, {len(set(numbers))} numbers); "
                        "give every document its own")
    return [*begins, len(numbers)]
