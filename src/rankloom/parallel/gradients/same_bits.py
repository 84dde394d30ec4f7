"""Gradients summed so that every bit is the same on any number of ranks.

The global batch is cut into L logical shards; L is fixed for the run. Each shard is one micro-batch, and a leaf of the canonical tree
(comm/canonical.py), which fixes the order of all additions. A rank runs its leaves one after another, and adds up their gradients along
the tree as soon as it can; after its last leaf, the ranks add up their partial sums. So no order depends on which rank computed what.

price: up to log2(L) + 1 copies of the gradients, and communication is not overlapped with backward
"""

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor, nn

from rankloom.comm.canonical import Fold, Node, canonical_all_reduce
from rankloom.parallel.gradients.reducer import GradientReducer
from rankloom.world.group import Group

CACHED_BYTES = 8 << 20   # a bucket is distributed, folded and gathered before the next one: it should fit in the cache
TOTALS = "totals"   # the key of the numbers that are summed beside gradients


class ShardFolds:
    """The partial sums of one step: buffers by key, each folded over the logical shards of this rank, then over the ranks.

    memory: up to log2(shards) + 1 copies of each buffer
    """

    def __init__(self, shards: int):
        self.shards = shards
        self._folds: dict[Hashable, Fold] = {}

    def add(self, key: Hashable, shard: int, values: Tensor) -> None:
        """Add the buffer of one shard, which now belongs to the fold. Every shard must add the same keys."""
        self._folds.setdefault(key, Fold(self.shards)).push(Node(shard, 0), values)

    def sum(self, key: Hashable, group: Group, label: str) -> Tensor:
        """The sum over all shards, the same bits on any number of ranks. A collective, after the last shard of each rank."""
        return canonical_all_reduce(self._folds[key].values(), group, self.shards, label=label)


class CanonicalReducer(GradientReducer):
    """A GradientReducer that adds in the order of the canonical tree over logical shards."""

    def __init__(self, params: Mapping[str, nn.Parameter], group: Group, *, owners: Mapping[str, Tensor] | None = None):
        super().__init__(params, group, owners=owners, bucket_bytes=CACHED_BYTES)
        self.syncing = False   # gradients of a shard are only collected: nothing is sent during backward
        self._folds, self._used = ShardFolds(0), set[str]()

    def begin_shards(self, shards: int) -> None:
        """Start a step. shards: how many the batch has; fewer than usual when it has fewer rows"""
        self._folds, self._used = ShardFolds(shards), set()

    def add_shard(self, index: int, totals: Tensor) -> None:
        """After the backward of shard `index`: add its gradients and totals to the folds, and clear them."""
        if not self.buckets:
            self._lay_out()
        self._used |= {name for name, owner in self.owners.items() if owner.grad is not None}
        for bucket in self.buckets:
            for slot in bucket.slots:
                bucket.stand_in(slot.name, self.summing.factor)
            self._folds.add(bucket, index, bucket.flat.clone())
        self._folds.add(TOTALS, index, totals)
        self.zero()

    def finish(self, totals: Tensor | None = None, mark: int = 0) -> tuple[Tensor, bool]:
        """After the last shard of this rank: fold over the ranks. Returns the sum of all shards' totals, and whether marks are equal."""
        for bucket in self.buckets:
            bucket.open()
            bucket.flat.copy_(self._folds.sum(bucket, self.group, "gradients"))
        facts = torch.tensor([mark, -mark, *(name in self._used for name in self.owners)], dtype=torch.int32, device="cpu")
        most, least, *flags = self.group.all_reduce(facts, "max", label="used parameters").tolist()
        for (name, owner), used in zip(self.owners.items(), flags):
            owner.grad = self._home[name].gradient(name) if used else None
        return self._folds.sum(TOTALS, self.group, "totals"), most == -least
