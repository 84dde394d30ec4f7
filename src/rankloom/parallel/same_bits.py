"""Gradients summed so that every bit is the same on any number of ranks.

The global batch is cut in L logical shards, fixed for the run; each is one micro-batch, a leaf of the canonical tree of
comm/canonical.py. A rank runs its leaves one after another and folds their gradients as they come; after the last, the
ranks fold what is left together. Nothing is added in an order that depends on who computed it.

memory: up to log2(L) + 1 more copies of the gradients than in the free order; communication is not overlapped.
"""

from collections.abc import Hashable, Mapping

import torch
from torch import Tensor, nn

from rankloom.comm.canonical import Fold, Node, canonical_all_reduce
from rankloom.parallel.gradients import GradientReducer
from rankloom.world.group import Group

CACHED_BYTES = 8 << 20   # a bucket is dealt, folded and gathered in turn: it should stay in the cache meanwhile


TOTALS = "totals"   # the key of the numbers that are summed beside gradients


class ShardFolds:
    """Of one step: buffers by key, each folded over the logical shards of this rank, then over the ranks.

    memory: up to log2(shards) + 1 copies of each buffer
    """

    def __init__(self, shards: int):
        self.shards = shards
        self._folds: dict[Hashable, Fold] = {}

    def add(self, key: Hashable, shard: int, values: Tensor) -> None:
        """Fold in the buffer that one shard has made; it now belongs to the fold. Every shard brings the same keys."""
        self._folds.setdefault(key, Fold(self.shards)).push(Node(shard, 0), values)

    def sum(self, key: Hashable, group: Group, label: str) -> Tensor:
        """The sum over all shards, the same bits on any number of ranks. A collective, after the last shard of each rank."""
        return canonical_all_reduce(self._folds[key].values(), group, self.shards, label=label)


class CanonicalReducer(GradientReducer):
    """A GradientReducer that adds in the order of the canonical tree over `shards` logical shards."""

    def __init__(self, params: Mapping[str, nn.Parameter], group: Group, shards: int, *, owners: Mapping[str, Tensor] | None = None):
        super().__init__(params, group, owners=owners, bucket_bytes=CACHED_BYTES)
        self.syncing = False   # every shard's gradients land, none leave by themselves
        self._folds, self._used = ShardFolds(shards), set[str]()

    def begin_shards(self, shards: int) -> None:
        """Start a step whose batch makes so many shards (fewer than usual when it has fewer rows)."""
        self._folds, self._used = ShardFolds(shards), set()

    def add_shard(self, index: int, totals: Tensor) -> None:
        """After the backward of shard `index`: fold its gradients and its numbers in, and forget them."""
        if not self.buckets:
            self._lay_out()
        self._used |= {name for name, owner in self.owners.items() if owner.grad is not None}
        for bucket in self.buckets:
            for slot in bucket.slots:
                self._stand_in(bucket, slot.name)
            self._folds.add(bucket, index, bucket.flat.clone())
        self._folds.add(TOTALS, index, totals)
        self.zero()

    def finish(self, totals: Tensor | None = None) -> Tensor:
        """After the last shard of this rank: fold over the ranks. Returns the sum of all shards' totals."""
        for bucket in self.buckets:
            bucket.open()
            bucket.flat.copy_(self._folds.sum(bucket, self.group, "gradients"))
        flags = torch.tensor([name in self._used for name in self.owners], dtype=torch.int32)
        flags = self.group.all_reduce(flags, "max", label="used parameters").tolist()
        for (name, owner), used in zip(self.owners.items(), flags):
            owner.grad = self._home[name].gradient(name) if used else None
        return self._folds.sum(TOTALS, self.group, "totals")
