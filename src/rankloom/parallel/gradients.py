"""Sum the gradients of a model over a group, in flat buckets that are all-reduced while backward goes on.

Communication plan, one step:

    first backward       record the order in which gradients arrive, take rank 0's order on all ranks, and lay parameters and
                         gradients out in flat buckets in that order
    backward             each gradient is written into its bucket; a full bucket is all-reduced at once, asynchronously,
                         in bucket order on every rank
    end of backward      launch the remaining buckets, agree which parameters were used on any rank, wait
    embeddings           on the CPU only the rows that some rank touched are sent, where that is cheaper (comm/rows.py)

Compression (comm/compress.py): each bucket has its own all-reduce with error feedback: what one step loses is added to the next.
Steps may have different numbers of items, so gradients are first multiplied by `summing.factor`, which makes them means. The error is
state of this rank and is in no checkpoint: after a resume it starts at zero, and the exact first steps are counted again. An
embedding is still sent by rows, exactly, where that is cheaper.

On one rank there is nothing to sum, and gradients stay where autograd made them.

A parameter that no rank used keeps `grad = None`, as in one process, so that the optimizer skips it. One that some rank used gets the
sum; the other ranks add zeros. With accumulation only the last micro-batch communicates.

Read shard/flat.py before this file; parallel/data.py and train/engine.py use it.
"""

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.compression import HIERARCHICAL
from rankloom.base.errors import ConfigError, UnitError
from rankloom.base.hooks import hook_gradient
from rankloom.base.scoped import temporarily
from rankloom.comm.choose import BACKEND
from rankloom.comm.compress import EXACT, Summing
from rankloom.comm.rows import BITS, rows_are_cheaper, sum_rows, touched_rows
from rankloom.parallel.agree import max_of_flags_and_sum
from rankloom.parallel.arrivals import Arrivals
from rankloom.parallel.worker import worker_beside
from rankloom.shard.flat import FlatBuffer, by_dtype, cut_into_buckets, gaps_of, move_into, views_of
from rankloom.shard.frames import between_steps, memory_lent, tensors_in
from rankloom.world.group import Group

BUCKET_BYTES = 32 << 20
ONE_HOST_BYTES = 128 << 20   # here the cores that compute also move the bytes: overlap gains little, and a message costs 1 ms


class Bucket:
    """Gradients that are all-reduced together: a flat buffer, and the names still missing from it in this backward.

    The parameters are moved into a flat buffer of the same layout. Where the ranks share a host, the group lends memory for the
    gradients, and they are summed in place. Otherwise, on a GPU, the memory is freed when a step begins. A gradient that the user
    still holds stays valid: the bucket then allocates new memory.
    """

    def __init__(self, owners: Mapping[str, Tensor], group: Group, summing: Summing):
        gradients = {name: owner.grad for name, owner in owners.items()}
        for owner in owners.values():
            owner.grad = None   # torch would check it against the parameter when that moves to other memory
        parameters = FlatBuffer(owners)
        move_into(parameters, owners)
        self.slots, self.dtype = parameters.slots, parameters.flat.dtype
        self.owners, self.has_unsynced = owners, False   # has_unsynced: it holds gradients of this rank alone
        size = (parameters.flat.numel(), self.dtype)
        self._window = memory_lent(group.buffer(*size)) if group.lends_memory else between_steps(*size, group.device)
        self.views: dict[str, Tensor] = {}   # name -> gradient, while the bucket is open
        self.open()
        self.algorithm = summing.algorithm([(slot.start, slot.shape) for slot in self.slots])
        self.waiting_for = set(owners)
        self.wait: Callable[[], Any] | None = None   # waits for the all-reduce, while that is in flight
        for name, owner in owners.items():
            gradient = gradients.pop(name)
            if gradient is not None:
                self.views[name].copy_(gradient)
                owner.grad = self.gradient(name)

    @property
    def flat(self) -> Tensor:
        """All gradients of the bucket, with zeros in the gaps between them."""
        return self._window.tensor

    def open(self) -> None:
        """Make room for gradients. They overwrite those of the last step, unless the user still holds one of these."""
        if not self.has_unsynced and self._has_guests() and not any(self.holds(name, owner.grad) for name, owner in self.owners.items()):
            self.close()
        if not self.views:
            self._window.open()
            self.views, self.gaps = views_of(self.flat, self.slots), gaps_of(self.flat, self.slots)
            for gap in self.gaps:   # norms read the whole buffer
                gap.zero_()

    def close(self) -> None:
        """Called when no parameter has a gradient in this bucket: free the memory."""
        if self._has_guests() or not self._window.stays:   # otherwise closing would free nothing, and the views would be made again
            self.views, self.gaps = {}, []
            self._window.close()

    def _has_guests(self) -> bool:
        """Whether a view of the memory is held outside the bucket, for example by the user."""
        return bool(self.views) and tensors_in(self.flat) > 1 + len(self.views) + len(self.gaps)

    def gradient(self, name: str) -> Tensor:
        """The tensor for a parameter's `.grad`: an alias of the view, because casting or moving a model swaps the memory of that tensor."""
        return self.views[name].detach()

    def holds(self, name: str, gradient: Tensor | None) -> bool:
        """Whether `gradient` is the one in this bucket."""
        return gradient is not None and gradient.data_ptr() == self.views[name].data_ptr()

    def land(self, name: str, param: Tensor, owner: Tensor, scale: float) -> None:
        """Put the gradient that backward has just written to `param.grad` into the bucket; `owner.grad` becomes its alias there.

        owner: the tensor that the optimizer updates: `param` itself, or its master copy in another dtype
        """
        self.open()
        self.has_unsynced = True
        view, gradient = self.views[name], param.grad
        assert gradient is not None, f"{name}: hook without a gradient"
        if self.holds(name, gradient):       # accumulated in place by autograd
            _multiply(view, scale)
        elif self.holds(name, owner.grad):   # accumulated here, in the master's dtype
            _multiply(view.add_(gradient), scale)
        elif scale == 1.0 or gradient.dtype is not self.dtype:   # here `mul` would round to the gradient's dtype before the copy
            _multiply(view.copy_(gradient), scale)
        else:
            torch.mul(gradient, scale, out=view)
        if owner is not param:
            param.grad = None
        owner.grad = self.gradient(name)


class GradientReducer:
    """Sums the gradients of one model over one group, in buckets, while backward runs.

    params:  name -> the parameter that backward writes a gradient to
    owners:  name -> the tensor whose `.grad` the optimizer reads (a master copy); left out, the parameter itself
    bucket_bytes: the most that a bucket of several gradients holds; left out, 128 MiB for CPU ranks on one host, else 32 MiB
    average: divide the sum by the number of ranks
    by_rows: names of embeddings, whose gradients are mostly rows of zeros
    compress_after: how many calls of `finish` sum exactly before compression starts
    raises:  ConfigError for an unknown all-reduce or compression, for two that cannot be combined, and for bucket_bytes below 1
    """

    def __init__(self, params: Mapping[str, nn.Parameter], group: Group, *, owners: Mapping[str, Tensor] | None = None,
                 all_reduce: str = BACKEND, compress: str = EXACT, compress_after: int = 0, bucket_bytes: int | None = None,
                 average: bool = False, by_rows: frozenset[str] = frozenset()):
        self.owners, self.group, self.average, self.syncing = dict(owners or params), group, average, True
        self.summing = Summing(all_reduce, compress, compress_after, factor=1.0 / group.size if average else 1.0)
        self.buckets: list[Bucket] = []
        if all_reduce == HIERARCHICAL and self.summing.is_compressed and group.rank == 0 and 1 == len(group.topology.nodes) < group.size:
            warnings.warn(f"compress={compress!r} with all_reduce={HIERARCHICAL!r} compresses what goes between nodes, and all "
                          f"{group.size} ranks are on one: nothing is compressed. Leave all_reduce out to compress all sums", stacklevel=3)
        # Not on a GPU: counting rows would make the CPU wait for it. Nor where the user chose an algorithm: then that one is used.
        rows_pay = all_reduce == BACKEND and group.device.type == "cpu" and group.size > 1
        self._by_rows = {name: self.summing.lossy([(0, owner.shape)]) for name, owner in self.owners.items()
                         if name in by_rows and rows_pay and owner.dtype in BITS}
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes={bucket_bytes!r}, expected 1 or more; 1 gives each gradient a bucket of its own")
        self._bucket_bytes = bucket_bytes or (ONE_HOST_BYTES if group.one_host and group.device.type == "cpu" else BUCKET_BYTES)
        self._home: dict[str, Bucket] = {}
        self._arrivals = Arrivals(params)   # gradients of this rank alone, outside buckets; in the first backward all
        self._launched = 0
        self._worker = worker_beside(group) if self.summing.in_python and group.device.type == "cpu" and group.size > 1 else None
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

    def expect_summed(self, param: Tensor) -> None:
        """Called before the user's own optimizer updates `param`: raise UnitError when ranks would diverge, unless inside `no_sync`."""
        has_unsynced = bool(self._arrivals) or any(bucket.has_unsynced for bucket in self.buckets)
        meant = self.average and not self.syncing   # inside `no_sync` each rank may step on its own
        if has_unsynced and not meant and param.grad is not None and self.group.size > 1:
            name = next(name for name, owner in self.owners.items() if owner is param)
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
        self._arrivals.begin()
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
        if not self.buckets and (self.group.size > 1 or self.summing.in_python):
            self._lay_out()
        self._arrivals.end()
        self._launch_what_is_left()
        agreed = self._agree(totals, mark)
        self._wait_for_buckets()
        self._end_step()
        return agreed

    # ------------------------------------------------------------------ while backward runs

    @torch.no_grad()   # with create_graph=True it would become part of the graph
    def _land(self, name: str, param: Tensor) -> None:
        if param.grad is None:
            raise UnitError(f"rank {self.group.world_rank}: a hook has taken the gradient of {name} away before it was summed over ranks. "
                            "Hooks may read or change gradients; clear them with `optimizer.zero_grad()`, after the step")
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
        # No bucket: in the first backward, and always for embeddings sent by rows, gradients stay where autograd made them.
        self._arrivals.note(name, param, owner)
        if owner is not param:
            assert param.grad is not None, f"{name}: hook without a gradient"
            owner.grad = param.grad.to(owner.dtype) if owner.grad is None else owner.grad.add_(param.grad)
            param.grad = None

    def _launch_full_buckets(self) -> None:
        # In bucket order, in whatever order gradients arrive on this rank: collectives must match.
        while self._launched < len(self.buckets) and not self.buckets[self._launched].waiting_for:
            bucket = self.buckets[self._launched]
            bucket.wait = self._start(bucket, f"gradients of bucket {self._launched}")
            self._launched += 1

    def _start(self, bucket: Bucket, label: str) -> Callable[[], Any]:
        """Start the all-reduce of a bucket. Returns a function that waits for it."""
        algorithm = self.summing.now(bucket.algorithm)
        if algorithm is None:
            return self.group.all_reduce(bucket.flat, label=label, async_op=True).wait   # type: ignore[no-any-return]
        if self._worker is not None:
            return self._worker.submit(partial(algorithm, bucket.flat, self._worker.group))
        algorithm(bucket.flat, self.group)
        return lambda: None   # its kernels are queued on the GPU, and the stream keeps their order

    # ------------------------------------------------------------------ at the end of backward

    def _launch_what_is_left(self) -> None:
        for bucket in self.buckets:
            for name in bucket.waiting_for:
                self._stand_in(bucket, name)
            bucket.waiting_for.clear()
        self._launch_full_buckets()
        if self._worker is not None:
            self._wait_for_buckets()   # or two threads would start collectives in a random order

    def _stand_in(self, bucket: Bucket, name: str) -> None:
        """For a parameter without a gradient in this backward: send what it has accumulated before, or zeros."""
        bucket.open()
        view, gradient = bucket.views[name], self.owners[name].grad
        if gradient is None:
            view.zero_()
            return
        if not bucket.holds(name, gradient):
            view.copy_(gradient)
        _multiply(view, self.summing.factor)

    def _agree(self, totals: Tensor | None, mark: int) -> tuple[Tensor | None, bool]:
        """Sum the totals; set `.grad` of the parameters that any rank used; sum the gradients that go by rows.

        One small message carries it all: the mark, a flag per parameter, the number of touched rows per embedding, the totals.
        """
        touched = {name: touched_rows(self._own_gradient(name)) for name in self._by_rows}
        facts = [float(owner.grad is not None) for owner in self.owners.values()] + [float(len(rows)) for rows in touched.values()]
        (most, least, *flags), numbers = max_of_flags_and_sum([mark, -mark, *facts], totals, self.group)
        most_rows = dict(zip(touched, flags[len(self.owners):]))
        for (name, owner), used in zip(self.owners.items(), flags):
            if not used:
                owner.grad = None
            elif name in touched:
                owner.grad = self._sum_by_rows(name, touched[name], int(most_rows[name]))
            elif name in self._home:
                owner.grad = self._home[name].gradient(name)
        return numbers, most == -least

    def _own_gradient(self, name: str) -> Tensor:
        gradient = self.owners[name].grad
        return torch.zeros_like(self.owners[name]) if gradient is None else gradient.detach()

    def _sum_by_rows(self, name: str, touched: Tensor, rows: int) -> Tensor:
        gradient, lossy = self._own_gradient(name).contiguous(), None if self.summing.is_exact_now else self._by_rows[name]
        dense = lossy.bill(gradient.numel(), self.group) if lossy else None
        if rows_are_cheaper(rows, gradient, self.group.size, dense=dense):
            return sum_rows(gradient, touched, rows, self.group, scale=self.summing.factor, label=f"rows of {name}")
        gradient.mul_(self.summing.factor)
        return lossy(gradient, self.group) if lossy else self.group.all_reduce(gradient, label=f"gradient of {name}")

    def _clear_strays(self) -> None:
        """Zero what compression wrote where there is no gradient: between tensors, and in parameters that no rank used."""
        for bucket in self.buckets:
            unused = [view for name, view in bucket.views.items() if self.owners[name].grad is None]
            if bucket.gaps or unused:
                torch._foreach_zero_(bucket.gaps + unused)

    def _wait_for_buckets(self) -> None:
        for bucket in self.buckets:
            if bucket.wait is not None:
                bucket.wait()
                bucket.wait = None

    def _end_step(self) -> None:
        if self.summing.is_compressed:
            self._clear_strays()
        self.summing.end_step()
        self._reset()

    def _reset(self) -> None:
        self._launched = 0
        for bucket in self.buckets:
            bucket.waiting_for = {slot.name for slot in bucket.slots}
        self._none_unsynced()

    def _none_unsynced(self) -> None:
        self._arrivals.clear()
        for bucket in self.buckets:
            bucket.has_unsynced = False

    def _lay_out(self) -> None:
        """Lay parameters and gradients out in buckets, in the order in which gradients arrived on rank 0."""
        names = list(self.owners)
        late = [name for name in reversed(names) if name not in self._arrivals]
        order = torch.tensor([names.index(name) for name in (*self._arrivals, *late)] + [len(self._arrivals), self._arrivals.digest()])
        *indices, arrived, digest = self.group.broadcast(order, label="order of gradients").tolist()
        self._arrivals.expect_alike(digest, self.group)
        ordered = [names[index] for index in indices]
        # Parameters without a gradient get buckets of their own: they would hold up the others in every step.
        for part in (ordered[:arrived], ordered[arrived:]):
            for owners in by_dtype(self.owners, [name for name in part if name not in self._by_rows]):
                for names in cut_into_buckets({name: owner.nbytes for name, owner in owners.items()}, self._bucket_bytes):
                    self._add_bucket(names)

    def _add_bucket(self, names: list[str]) -> None:
        group = self._worker.group if self._worker else self.group
        bucket = Bucket({name: self.owners[name] for name in names}, group, self.summing)
        self.buckets.append(bucket)
        self._home |= dict.fromkeys(names, bucket)


def _multiply(x: Tensor, factor: float) -> None:
    if factor != 1.0:   # else it would be a pass over memory for nothing
        x.mul_(factor)
