"""What every collective must give, computed in one place from what all ranks bring. Bits, not tolerances.

`given[rank]` is the list of tensors that a rank brings; the answer's `[rank]` is the list it must end with, or None
where a rank is promised nothing (reduce and gather, everywhere but on the root).

How a backend must add, so that its bits do not depend on sizes, chunks or chance:
- in rank order: ((x0 + x1) + x2) + ...; a product likewise; a mean is that sum, divided by the number of ranks;
  where ranks are on several hosts: so on each host, and then the results of the hosts, in the order of their first ranks;
- floats of 16 and 8 bits in fp32, rounded once in the end; fp32 and fp64 in themselves; complex as pairs;
- whole numbers wrap around, and their mean is that sum, divided, towards zero (there is none of uint64);
- for bool, a sum and a maximum are "or", a product and a minimum "and" (as NCCL and torch have it);
- a minimum or maximum of anything and NaN is a NaN (of whatever bits: processors and torch make different ones).
"""

from collections.abc import Callable, Sequence
from functools import reduce as reduce_all
from typing import Any

import numpy as np
import torch
from torch import Tensor

Given = list[list[Tensor]]
Answer = list[list[Tensor] | None]
Nodes = Sequence[Sequence[int]]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
COMPLEX = (torch.complex64, torch.complex128)
WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
REDUCED = (*FLOATS, *COMPLEX, *WHOLE, torch.bool)
# Dtypes that nobody adds travel all the same: a collective that only moves must not look inside.
FLOAT4 = (torch.float4_e2m1fn_x2,) if torch.__version__ >= (2, 11) else ()   # older ones cannot copy it
MOVED = (*REDUCED, torch.complex32, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, *FLOAT4)
BITWISE = ("band", "bor", "bxor")
OPS = ("sum", "avg", "product", "min", "max", *BITWISE)

FOLD: dict[str, Callable] = {"sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
FOLD_WHOLE: dict[str, Callable] = {"sum": np.add, "avg": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum,
                                   "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}


def has_meaning(op: str, dtype: torch.dtype) -> bool:
    """Whether `op` can be right for `dtype`. What has no meaning must be refused by name, on every rank."""
    if op == "avg" and dtype in (torch.uint64, torch.bool):
        return False
    if dtype in WHOLE or dtype == torch.bool:
        return True
    return op in ("sum", "avg") or (op in ("product", "min", "max") and dtype in FLOATS)


def nodes_of(hosts: Sequence[str | None]) -> Nodes:
    """The ranks of each host, hosts in the order of their first ranks; `hosts[rank]` is where that rank is."""
    return [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]


def reduced(parts: Sequence[Tensor], op: str, nodes: Nodes) -> Tensor:
    """The tensors of all ranks, combined."""
    dtype, shape = parts[0].dtype, parts[0].shape
    if dtype in COMPLEX:   # in pairs: complex division need not be that of the parts
        return torch.view_as_complex(reduced([torch.view_as_real(part) for part in parts], op, nodes))
    if dtype in WHOLE or dtype == torch.bool:   # in numpy: torch has few operations on uint16 to uint64
        total = fold([part.reshape(-1).numpy() for part in parts], FOLD_WHOLE[op], nodes)
        if op == "avg":
            wide = total.astype(np.int64)
            total = (wide // len(parts) + ((wide % len(parts) != 0) & (wide < 0))).astype(total.dtype)
        return torch.from_numpy(total.copy()).view(shape)
    total = fold([part.to(torch.float32 if dtype.itemsize < 4 else dtype) for part in parts], FOLD[op], nodes)
    return (total / len(parts) if op == "avg" else total).to(dtype)


def fold(parts: Sequence[Any], join: Callable, nodes: Nodes) -> Any:
    """Join the parts of each host, then those of the hosts."""
    return reduce_all(join, [reduce_all(join, [parts[rank] for rank in node]) for node in nodes])


# ---------------------------------------------------------------- collectives


def all_reduce(given: Given, op: str, nodes: Nodes) -> Answer:
    """Also coalesced: the k-th tensors of all ranks, combined."""
    return [[reduced(parts, op, nodes) for parts in zip(*given)]] * len(given)


def reduce(given: Given, op: str, nodes: Nodes, root: int) -> Answer:
    """The root alone gets the result; what the others' tensors hold then is nobody's business."""
    return only(root, all_reduce(given, op, nodes))


def broadcast(given: Given, root: int) -> Answer:
    """Everybody ends with what the root brought."""
    return [given[root]] * len(given)


def all_gather(given: Given) -> Answer:
    """Everybody ends with everybody's tensor; their shapes may differ. Coalesced: all of rank 0, all of rank 1, and so on."""
    return [[x for brought in given for x in brought]] * len(given)


def all_gather_single(given: Given) -> Answer:
    """Laid end to end in one tensor; coalesced: one for each k."""
    return [[torch.cat([torch.atleast_1d(x) for x in parts]) for parts in zip(*given)]] * len(given)


def gather(given: Given, root: int) -> Answer:
    """All-gather, for the root alone."""
    return only(root, all_gather(given))


def scatter(given: Given, root: int) -> Answer:
    """Rank r ends with the root's r-th tensor."""
    return [[x] for x in given[root]]


def reduce_scatter(given: Given, op: str, nodes: Nodes) -> Answer:
    """Rank r ends with the r-th tensors of all ranks, combined; the r-th and the s-th may differ in shape."""
    return [[reduced(parts, op, nodes)] for parts in zip(*given)]


def reduce_scatter_single(given: Given, op: str, nodes: Nodes) -> Answer:
    """Rank r ends with the r-th slice of the combination; coalesced: of each."""
    totals = all_reduce(given, op, nodes)[0]
    return [[total.tensor_split(len(given))[rank] for total in totals] for rank in range(len(given))]


def all_to_all(given: Given) -> Answer:
    """Rank r ends with the r-th tensor of every rank, in rank order."""
    return [list(parts) for parts in zip(*given)]


def all_to_all_single(given: Given, rows: Sequence[Sequence[int]]) -> Answer:
    """One tensor for each rank: rank s deals rows[s][r] of its rows to rank r."""
    dealt = all_to_all([list(x.split(list(to))) for (x,), to in zip(given, rows)])
    return [[torch.cat(parts)] for parts in dealt]


def only(root: int, answer: Answer) -> Answer:
    """The same for the root, and no promise to the others."""
    return [x if rank == root else None for rank, x in enumerate(answer)]
