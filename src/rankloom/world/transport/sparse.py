"""All-reduce of sparse tensors, which DDP uses for gradients of sparse embeddings: all ranks get all entries, and add them up.

Ranks first tell the number of their entries, in a call that blocks; then indices and values travel as two all-gathers.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from rankloom.base.errors import ShapeMismatch
from rankloom.world.transport.work import Pending, Work


def all_reduce_sparse(group: Any, x: Tensor, opts: Any) -> Work:
    """Sum sparse tensors over the ranks of a SharedMemoryGroup, in place. Every rank ends with the same bits, coalesced.

    x:      COO; shape, dtype and sparse dims the same on each of p ranks; the number of entries may differ
    sent:   the entries of this rank, to p-1 others
    raises: ShapeMismatch on all ranks when their tensors differ, and for any operation but a sum
    """
    where = group.channel.where("all_reduce of a sparse tensor")
    if opts.reduceOp.op != dist.ReduceOp.SUM:
        raise ShapeMismatch(f"{where}: {opts.reduceOp.op.name} is not offered, only SUM; pass x.to_dense()")
    mine = x.detach().coalesce()
    described = group.channel.gather_json([mine._nnz(), mine.sparse_dim(), str(x.dtype), *x.shape])
    if any(other[1:] != described[0][1:] for other in described):
        raise ShapeMismatch(f"{where}: ranks bring different tensors; entries, sparse dims, dtype and shape of each: {described}")
    indices = [mine.indices().new_empty(mine.sparse_dim(), entries) for entries, *_ in described]
    values = [mine.values().new_empty(entries, *mine.values().shape[1:]) for entries, *_ in described]

    def add_up() -> None:
        with torch.no_grad():
            x.copy_(torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), x.shape, device=x.device).coalesce())

    how = c10d.AllgatherOptions()
    how.timeout, how.asyncOp = opts.timeout, opts.asyncOp
    first, last = group.allgather([indices], [mine.indices()], how), group.allgather([values], [mine.values()], how)
    if isinstance(last, Pending):
        last.stand_for([first], [x], add_up)
        return last
    last.wait()   # does not block on a device: what follows runs after it
    add_up()
    return Work([x])
