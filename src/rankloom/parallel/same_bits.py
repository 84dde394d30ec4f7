"""Gradients summed so that every bit is the same on any number of ranks.

The global batch is cut in L logical shards, fixed for the run; each is one micro-batch, a leaf of the canonical tree of
comm/canonical.py. A rank runs its leaves one after another and folds their gradients as they come; after the last, the
ranks fold what is left together. Nothing is added in an order that depends on who computed it.

memory: up to log2(L) + 1 more copies of the gradients than in the free order; communication is not overlapped.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rankloom.comm.canonical import Fold, Node, canonical_all_reduce
from rankloom.parallel.gradients import GradientReducer
from rankloom.world.group import Group

CACHED_BYTES = 8 << 20   # a bucket is dealt, folded and gathered in turn: it should stay in the cache meanwhile


class CanonicalReducer(GradientReducer):
    """A GradientReducer that adds in the order of the canonical tree over `leaves` logical shards."""

    def __init__(self, params: Mapping[str, nn.Parameter], group: Group, leaves: int, *, owners: Mapping[str, Tensor] | None = None):
        super().__init__(params, group, owners=owners, bucket_bytes=CACHED_BYTES)
        self.leaves = leaves
        self.syncing = False   # every leaf's gradients land, none leave by themselves
        self._folds: list[Fold] = []
        self._totals = Fold(leaves)
        self._used: set[str] = set()

    def begin(self, leaves: int) -> None:
        """Start a step whose batch makes `leaves` leaves (fewer than usual when it has fewer rows)."""
        self.leaves, self._totals, self._folds, self._used = leaves, Fold(leaves), [], set()

    def add_shard(self, index: int, totals: Tensor) -> None:
        """After the backward of leaf `index`: fold its gradients and its numbers in, and forget them."""
        if not self.buckets:
            self._lay_out()
        self._folds = self._folds or [Fold(self.leaves) for _ in self.buckets]
        self._used |= {name for name, owner in self.owners.items() if owner.grad is not None}
        for bucket, fold in zip(self.buckets, self._folds):
            for slot in bucket.slots:
                self._stand_in(bucket, slot.name)
            fold.push(Node(index, 0), bucket.flat.clone())
        self._totals.push(Node(index, 0), totals)
        self.zero()

    def finish(self, totals: Tensor | None = None) -> Tensor:
        """After the last leaf of this rank: fold over the ranks. Returns the sum of all leaves' totals."""
        for bucket, fold in zip(self.buckets, self._folds):
            bucket.open()
            bucket.flat.copy_(canonical_all_reduce(fold.values(), self.group, self.leaves, label="gradients"))
        flags = torch.tensor([name in self._used for name in self.owners], dtype=torch.int32)
        flags = self.group.all_reduce(flags, "max", label="used parameters").tolist()
        for (name, owner), used in zip(self.owners.items(), flags):
            owner.grad = self._home[name].gradient(name) if used else None
        return canonical_all_reduce(self._totals.values(), self.group, self.leaves, label="totals")
