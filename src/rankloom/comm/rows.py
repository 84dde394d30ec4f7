"""Sum a matrix of which every rank has touched only a few rows: the gradient of an embedding.

A batch of t tokens gives an embedding of v rows a gradient with at most t rows that are not zero. Dense, all v rows
travel; here only the touched ones do, with their numbers: all ranks gather them and add them in rank order. The
result is the same sum, and the same bits on every rank. Which rows are touched is read from the gradient, not
guessed from the model, so a weight that is also used elsewhere (tied) is simply found to be dense.
"""

import torch
from torch import Tensor

from rankloom.base.cost import Bill, all_gather_bill, all_reduce_bill
from rankloom.world.group import Group


def touched_rows(x: Tensor) -> Tensor:
    """The numbers of the rows of `x` that hold anything but zeros, NaN included. x: [v, d] -> [k], ascending."""
    # Eight times as fast as x.any(dim=1), which is not vectorised; a norm would lose rows to underflow.
    return ((x.amax(dim=1) != 0) | (x.amin(dim=1) != 0)).nonzero().view(-1)


def rows_are_cheaper(rows: int, x: Tensor, ranks: int) -> bool:
    """Whether gathering `rows` rows from each rank sends fewer bytes than an all-reduce of all of `x`."""
    return sum_rows_bill(rows, x.shape[1], ranks, x.itemsize).sent < all_reduce_bill(x.nbytes, ranks).sent


def sum_rows(x: Tensor, touched: Tensor, rows: int, group: Group, *, label: str = "sum_rows") -> Tensor:
    """Sum `x` over the group, in place, by gathering touched rows only.

    x:       [v, d] on each of p ranks
    touched: [k] this rank's `touched_rows(x)`; k may differ between ranks
    rows:    the largest k of any rank, the same on all: shorter lists are filled up with zeros added to row 0
    sent:    2(p-1) messages, rows (d + 2)(p-1) words
    """
    numbers = torch.zeros(rows, dtype=torch.int64, device=x.device)
    numbers[: len(touched)] = touched
    values = torch.zeros(rows, x.shape[1], dtype=x.dtype, device=x.device)
    values[: len(touched)] = x[touched]
    all_numbers = group.all_gather(numbers, label=f"{label}: numbers", async_op=True)
    all_values = group.all_gather(values, label=f"{label}: values", async_op=True)
    x[touched] = 0
    for where, what in zip(all_numbers.wait().chunk(group.size), all_values.wait().chunk(group.size)):
        x.index_add_(0, where, what)
    return x


def sum_rows_bill(rows: int, width: int, ranks: int, itemsize: int) -> Bill:
    """What one rank sends in `sum_rows`."""
    return all_gather_bill(rows * 8, ranks) + all_gather_bill(rows * width * itemsize, ranks)
