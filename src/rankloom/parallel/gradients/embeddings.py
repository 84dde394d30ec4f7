"""Gradients of embeddings, which are mostly rows of zeros: only the rows that some rank touched are sent, where that is cheaper.

On the CPU only: counting rows would make it wait for a GPU. comm/rows.py has the sum and its bill.
"""

from collections.abc import Container, Mapping

import torch
from torch import Tensor

from rankloom.comm.compress import Summing
from rankloom.comm.rows import BITS, rows_are_cheaper, sum_rows, touched_rows
from rankloom.world.group import Group


class EmbeddingGradients:
    """The gradients of some embeddings, which are in no bucket.

    owners: name -> the tensor whose `.grad` the optimizer reads, of all parameters
    names:  the embeddings; of those on a GPU, or in another dtype than fp32 and fp64, `self` has none
    """

    def __init__(self, owners: Mapping[str, Tensor], names: Container[str], group: Group, summing: Summing):
        pays = group.device.type == "cpu" and group.size > 1
        self._owners = {name: owner for name, owner in owners.items() if pays and name in names and owner.dtype in BITS}
        self._group, self._summing = group, summing
        self._lossy = {name: summing.new_compressed([(0, owner.shape)]) for name, owner in self._owners.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._owners

    def touched(self) -> dict[str, Tensor]:
        """name -> the numbers of the rows that are not zero on this rank."""
        return {name: touched_rows(self._gradient(name)) for name in self._owners}

    def sum(self, name: str, touched: Tensor, rows: int) -> Tensor:
        """The sum of an embedding's gradient over the ranks, times `summing.factor`, in the gradient's own memory. A collective.

        touched: this rank's rows. rows: how many the rank with the most has
        """
        gradient = self._gradient(name)
        total = self._sum(name, gradient.contiguous(), touched, rows)
        return total if gradient.is_contiguous() else gradient.copy_(total)   # fused optimizers want the strides of the parameter

    def _sum(self, name: str, gradient: Tensor, touched: Tensor, rows: int) -> Tensor:
        lossy = None if self._summing.is_exact_now else self._lossy[name]
        dense = lossy.bill(gradient.numel(), self._group) if lossy else None
        if gradient.dtype in BITS and rows_are_cheaper(rows, gradient, self._group.size, dense=dense):
            return sum_rows(gradient, touched, rows, self._group, scale=self._summing.factor, label=f"rows of {name}")
        gradient.mul_(self._summing.factor)
        return lossy(gradient, self._group) if lossy else self._group.all_reduce(gradient, label=f"gradient of {name}")

    def _gradient(self, name: str) -> Tensor:
        gradient = self._owners[name].grad
        return torch.zeros_like(self._owners[name]) if gradient is None else gradient.detach()
