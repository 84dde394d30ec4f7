"""Sum the gradients of a model over a group, in flat buckets that are all-reduced while backward goes on.

Communication plan, one step:

    first backward       record the order in which gradients arrive, take rank 0's order on all ranks, and lay parameters and
                         gradients out in flat buckets in that order
    backward             each gradient is written into its bucket; a full bucket is all-reduced at once, asynchronously,
                         in bucket order on every rank
    end of backward      launch the remaining buckets, agree which parameters were used on any rank, wait
    embeddings           on the CPU only the rows that some rank touched are sent, where that is cheaper (embeddings.py)

Compression (comm/compress.py): each bucket has its own all-reduce with error feedback: what one step loses is added to the next.
Steps may have different numbers of items, so gradients are first multiplied by `summing.factor`, which makes them means. The error is
state of this rank and is in no checkpoint: after a resume it starts at zero, and the exact first steps are counted again. An
embedding is still sent by rows, exactly, where that is cheaper.

On one rank there is nothing to sum, and gradients stay where autograd made them.

A parameter that no rank used keeps `grad = None`, as in one process, so that the optimizer skips it. One that some rank used gets the
sum; the other ranks add zeros. With accumulation only the last micro-batch communicates.

Read bucket.py and unbucketed.py before this file; parallel/data.py and train/engine.py use it.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.compression import BACKEND, HIERARCHICAL
from rankloom.base.errors import ConfigError, UnitError
from rankloom.base.hooks import hook_gradient, landed
from rankloom.base.scoped import temporarily
from rankloom.comm.compress import Summing
from rankloom.comm.worker import start_beside, worker_beside
from rankloom.parallel.gradients.bucket import Bucket
from rankloom.parallel.gradients.embeddings import EmbeddingGradients
from rankloom.parallel.gradients.unbucketed import UnbucketedGradients
from rankloom.parallel.replicas.combine_facts import combine_facts
from rankloom.shard.flat import by_dtype, cut_into_buckets
from rankloom.world.group import Group

BUCKET_BYTES = 32 << 20
ONE_HOST_BYTES = 128 << 20   # here the cores that compute also move the bytes: overlap gains little, and a message costs 1 ms
WITHOUT_GRAPH = ("backward(create_graph=True): gradients that are summed over ranks are values without a graph, so a penalty made of "
                 "`.grad` would not be trained. Make it of torch.autograd.grad(loss, parameters, create_graph=True)")


class GradientReducer:
    """Sums the gradients of one model over one group, in buckets, while backward runs.

    params:  name -> the parameter that backward writes a gradient to
    owners:  name -> the tensor whose `.grad` the optimizer reads (a master copy); left out, the parameter itself
    bucket_bytes: the most that a bucket of several gradients holds; left out, 128 MiB for CPU ranks on one host, else 32 MiB
    summing: how; left out, exactly, by the backend. The steps that it counts end with `finish`
    average: divide the sum by the number of ranks
    by_rows: names of embeddings, whose gradients are mostly rows of zeros
    raises:  ConfigError for bucket_bytes below 1
    """

    def __init__(self, params: Mapping[str, nn.Parameter], group: Group, *, owners: Mapping[str, Tensor] | None = None,
                 summing: Summing | None = None, bucket_bytes: int | None = None, average: bool = False,
                 by_rows: frozenset[str] = frozenset()):
        self.owners, self.group, self.average, self.syncing = dict(owners or params), group, average, True
        self.summing = summing = summing or Summing()
        summing.factor = 1.0 / group.size if average else 1.0
        self.buckets: list[Bucket] = []
        in_two_levels = summing.all_reduce == HIERARCHICAL
        if in_two_levels and summing.is_compressed and group.rank == 0 and 1 == len(group.topology.nodes) < group.size:
            warnings.warn(f"compress={summing.compress!r} with all_reduce={HIERARCHICAL!r} compresses what goes between nodes, and all "
                          f"{group.size} ranks are on one: nothing is compressed. Leave all_reduce out to compress all sums", stacklevel=3)
        # Where the user chose an algorithm, it sums embeddings too.
        self._by_rows = EmbeddingGradients(self.owners, by_rows if summing.all_reduce == BACKEND else (), group, summing)
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes={bucket_bytes!r}, expected 1 or more; 1 gives each gradient a bucket of its own")
        self._bucket_bytes = bucket_bytes or (ONE_HOST_BYTES if group.one_host and group.device.type == "cpu" else BUCKET_BYTES)
        self._home: dict[str, Bucket] = {}
        self._unbucketed = UnbucketedGradients(params)
        self._launched = 0
        self._worker = worker_beside(group) if self.summing.in_python else None
        for name, param in params.items():
            hook_gradient(param, self._land, name)

    def sync(self, on: bool) -> AbstractContextManager[None]:
        """A context: whether backward passes inside launch full buckets. If not, gradients only accumulate."""
        return temporarily(self, syncing=on)

    def flat_gradients(self) -> list[Tensor]:
        """The summed gradients, each element once: buckets, with zeros for unused parameters, then the gradients outside buckets."""
        outside_buckets = [owner.grad for name, owner in self.owners.items() if name not in self._home]
        return [bucket.flat for bucket in self.buckets] + [grad for grad in outside_buckets if grad is not None]

    def zero(self) -> None:
        """Forget all gradients. The next one to arrive overwrites the old values."""
        for owner in self.owners.values():
            owner.grad = None
        self._none_unsynced()

    def expect_summed(self, params: Sequence[Tensor]) -> None:
        """Called before the user's own optimizer updates these: raise UnitError when ranks would diverge, unless inside `no_sync`."""
        meant = self.average and not self.syncing   # inside `no_sync` each rank may step on its own
        if meant or self.group.size == 1:
            return
        unsynced = {*self._unbucketed.arrived}.union(*(bucket.unsynced for bucket in self.buckets))   # of all optimizers
        updated = {id(param) for param in params if param.grad is not None} if unsynced else ()
        name = next((name for name in unsynced if id(self.owners[name]) in updated), None)
        if name is not None:
            raise UnitError(f"rank {self.group.world_rank}: an optimizer updates {name} by the gradient of this rank alone, so ranks would "
                            "diverge: the last backward ran inside of `no_sync`, or has not ended (an optimizer in a hook). Step after a "
                            "backward outside of `no_sync`; with `rl.prepare`, call `engine.step`")

    def abandon(self) -> None:
        """Clean up after a backward that failed half way."""
        self._wait_for_buckets()
        self._reset()
        self.zero()
        self.give_back()

    def give_back(self) -> None:
        """Free the buckets' memory, if no parameter has a gradient any more (`optimizer.zero_grad()` has run)."""
        self._unbucketed.begin_forward()
        if all(owner.grad is None for owner in self.owners.values()):
            for bucket in self.buckets:
                bucket.close()

    @torch.no_grad()
    def finish(self, totals: Tensor | None = None, mark: int = 0) -> tuple[Tensor | None, bool]:
        """After the last backward of a step, on every rank: launch the remaining buckets, and wait.

        Afterwards `.grad` is the sum over ranks if any rank used the parameter, else None.
        totals:  a few numbers to sum over the ranks in the same message
        mark:    a number that should be the same on all ranks, below 2**31
        returns: the summed totals, and whether all ranks have the same mark
        """
        if self._unbucketed.is_first_step and (self.group.size > 1 or self.summing.in_python):
            self._lay_out()
        self._unbucketed.end_first_step()
        self._launch_what_is_left()
        agreed = self._agree(totals, mark)
        self._wait_for_buckets()
        for bucket in self.buckets if self.summing.is_compressed else ():
            bucket.clear_strays()
        self.summing.end_step()
        self._reset()
        return agreed

    # ------------------------------------------------------------------ while backward runs

    @torch.no_grad()   # with create_graph=True it would become part of the graph
    def _land(self, name: str, param: Tensor) -> None:
        gradient = landed(param, name, self.group.world_rank, sparse=self.group.size == 1)
        if gradient.requires_grad and self.group.size > 1:
            warnings.warn(WITHOUT_GRAPH, stacklevel=2)
        owner, bucket = self.owners[name], self._home.get(name)
        if bucket is not None:
            if self.syncing and name not in bucket.waiting_for:
                raise UnitError(f"rank {self.group.world_rank}: a second gradient of {name} came in one backward, when the first may have "
                                "been sent: a module that is used several times under torch.utils.checkpoint(use_reentrant=True) does so. "
                                "Give it use_reentrant=False")
            if owner.dtype is not bucket.dtype:
                raise UnitError(f"rank {self.group.world_rank}: {name} was cast to {owner.dtype} after the first backward, and its "
                                f"gradients are summed in {bucket.dtype}. Cast the model before it is wrapped")
            bucket.land(name, param, owner, self.summing.factor if self.syncing else 1.0)
            if self.syncing:
                bucket.waiting_for.discard(name)
                self._launch_full_buckets()
            return
        self._unbucketed.land(name, param, owner, gradient)

    def _launch_full_buckets(self) -> None:
        # In bucket order, in whatever order gradients arrive on this rank: collectives must match.
        while self._launched < len(self.buckets) and not self.buckets[self._launched].waiting_for:
            bucket = self.buckets[self._launched]
            bucket.wait = self._start(bucket, f"gradients of bucket {self._launched}")
            self._launched += 1

    def _start(self, bucket: Bucket, label: str) -> Callable[[], Any]:
        """Start the all-reduce of a bucket. Returns a function that waits for it."""
        algorithm = self.summing.all_reduce_now(bucket.algorithm)
        if algorithm is None:
            return self.group.all_reduce(bucket.flat, label=label, async_op=True).wait   # type: ignore[no-any-return]
        return start_beside(self._worker, partial(algorithm, bucket.flat), self.group)

    # ------------------------------------------------------------------ at the end of backward

    def _launch_what_is_left(self) -> None:
        for bucket in self.buckets:
            for name in bucket.waiting_for:
                bucket.stand_in(name, self.summing.factor)
            bucket.waiting_for.clear()
        self._launch_full_buckets()
        if self._worker is not None:
            self._wait_for_buckets()   # or two threads would start collectives in a random order

    def _agree(self, totals: Tensor | None, mark: int) -> tuple[Tensor | None, bool]:
        """Sum the totals; set `.grad` of the parameters that any rank used; sum the gradients that go by rows.

        One small message carries it all: the mark, a flag per parameter, the number of touched rows per embedding, the totals. Thousands
        of flags go in a second one (replicas/combine_facts.py).
        """
        touched = self._by_rows.touched()
        flags = [owner.grad is not None for owner in self.owners.values()]
        facts = [mark, -mark, *(len(rows) for rows in touched.values())]   # the least mark is minus the largest of the negative
        (most, least, *rows), flags, numbers = combine_facts(facts, flags, totals, self.group)
        most_rows = dict(zip(touched, rows))
        for (name, owner), used in zip(self.owners.items(), flags):
            if not used:
                owner.grad = None
            elif name in touched:
                owner.grad = self._by_rows.sum(name, touched[name], int(most_rows[name]))
            elif name in self._home:
                owner.grad = self._home[name].gradient(name)
        return numbers, most == -least

    def _wait_for_buckets(self) -> None:
        """Until nothing is written to them any more, also where some fail. raises: the error of the first that has failed, once"""
        errors = []
        for bucket in self.buckets:
            try:
                if bucket.wait is not None:
                    bucket.wait()
            except Exception as error:
                errors.append(error)
            bucket.wait = None
        if errors:
            raise errors[0]

    def _reset(self) -> None:
        self._launched = 0
        for bucket in self.buckets:
            bucket.waiting_for = {slot.name for slot in bucket.slots}
        self._none_unsynced()

    def _none_unsynced(self) -> None:
        self._unbucketed.arrived.clear()
        for bucket in self.buckets:
            bucket.unsynced.clear()

    def _lay_out(self) -> None:
        """Lay parameters and gradients out in buckets, in the order in which gradients arrived on rank 0."""
        names = list(self.owners)
        number_of = {name: number for number, name in enumerate(names)}
        with_gradient = self._unbucketed.arrived
        without_gradient = [name for name in reversed(names) if name not in with_gradient]
        mine = [number_of[name] for name in (*with_gradient, *without_gradient)]
        message = torch.tensor([*mine, len(with_gradient), self._unbucketed.digest_of_writes()], device="cpu")
        *order, arrived, digest = self.group.broadcast(message, label="order of gradients").tolist()
        self._unbucketed.expect_same_writes(digest, self.group)
        ordered = [names[number] for number in order]
        # Parameters without a gradient get buckets of their own: they would hold up the others in every step.
        for part in (ordered[:arrived], ordered[arrived:]):
            for owners in by_dtype(self.owners, [name for name in part if name not in self._by_rows]):
                for members in cut_into_buckets({name: owner.nbytes for name, owner in owners.items()}, self._bucket_bytes):
                    self._add_bucket(members)

    def _add_bucket(self, names: list[str]) -> None:
        group = self._worker.group if self._worker else self.group
        bucket = Bucket({name: self.owners[name] for name in names}, group, self.summing)
        self.buckets.append(bucket)
        self._home |= dict.fromkeys(names, bucket)
