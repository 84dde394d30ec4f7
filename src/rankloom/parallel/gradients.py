"""Sum the gradients of a model over a group, in flat buckets that leave while backward goes on.

Communication plan, one step:

    first backward       learn the order in which gradients come, agree on rank 0's, lay parameters and
                         gradients out in flat buckets in that order
    backward             a gradient lands in its bucket; a full bucket leaves at once (all-reduce, asynchronous),
                         in bucket order on every rank, while backward goes on
    end of backward      launch what is left, agree which parameters were used anywhere, wait
    embeddings           on the CPU only the rows that some rank touched travel, where that is cheaper (comm/rows.py)

Compressed (comm/compress.py), every bucket has an all-reduce of its own, which remembers what it lost: that is state of this rank
and of this run, in no checkpoint, so after a resume the first step begins without it, and steps that are exact first are counted
anew. What is lost of one step goes with the next one, so gradients of steps of different size are multiplied by `summing.factor`
before they leave, to be means. An embedding goes by rows, exact, where that is cheaper still.

On one rank there is nothing to sum, and gradients stay where autograd made them.

A parameter that no rank used keeps `grad = None`, as in one process, so that the optimizer skips it; one that some rank
used gets the sum, zeros standing in for the others. With accumulation only the last micro-batch communicates.

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
ONE_HOST_BYTES = 128 << 20   # where the cores that compute also move the bytes, overlap gains little and a message costs a millisecond


class Bucket:
    """Gradients that travel together: a flat buffer, and who has not landed in it in this backward.

    Its parameters are moved into a flat buffer of the same layout. The gradients lie in memory that the group hands out, where its
    ranks share a host: there they are summed where they lie. Else on a GPU the memory is given back when a step begins. A gradient
    that the user still holds stays valid: the bucket then allocates new memory.
    """

    def __init__(self, owners: Mapping[str, Tensor], group: Group, summing: Summing):
        gradients = {name: owner.grad for name, owner in owners.items()}
        for owner in owners.values():
            owner.grad = None   # torch checks a gradient against its parameter's memory when that moves
        parameters = FlatBuffer(owners)
        move_into(parameters, owners)
        self.slots, self.dtype = parameters.slots, parameters.flat.dtype
        self.owners, self.has_unsynced = owners, False   # gradients of this rank alone
        size = (parameters.flat.numel(), self.dtype)
        self._window = memory_lent(group.buffer(*size)) if group.lends_memory else between_steps(*size, group.device)
        self.views: dict[str, Tensor] = {}   # while it is open
        self.open()
        self.algorithm = summing.algorithm([(slot.start, slot.shape) for slot in self.slots])
        self.waiting_for = set(owners)
        self.wait: Callable[[], Any] | None = None   # for its all-reduce, while that is on its way
        for name, owner in owners.items():
            gradient = gradients.pop(name)
            if gradient is not None:
                self.views[name].copy_(gradient)
                owner.grad = self.gradient(name)

    @property
    def flat(self) -> Tensor:
        """All its gradients, and zeros between them."""
        return self._window.tensor

    def open(self) -> None:
        """Gradients may come: over those of the step before, if nobody but this holds them."""
        if not self.has_unsynced and self._has_guests() and not any(self.holds(name, owner.grad) for name, owner in self.owners.items()):
            self.close()
        if not self.views:
            self._window.open()
            self.views, self.gaps = views_of(self.flat, self.slots), gaps_of(self.flat, self.slots)
            for gap in self.gaps:   # norms read the whole
                gap.zero_()

    def close(self) -> None:
        """No parameter has a gradient of it."""
        if self._has_guests() or not self._window.stays:   # else to make the views again would be time lost
            self.views, self.gaps = {}, []
            self._window.close()

    def _has_guests(self) -> bool:
        """Whether anyone outside the bucket holds a view of its memory."""
        return bool(self.views) and tensors_in(self.flat) > 1 + len(self.views) + len(self.gaps)

    def gradient(self, name: str) -> Tensor:
        """The gradient to hang at a parameter: an alias of the view, because casting or moving a model gives that tensor other memory."""
        return self.views[name].detach()

    def holds(self, name: str, gradient: Tensor | None) -> bool:
        """Whether `gradient` lies in its place here."""
        return gradient is not None and gradient.data_ptr() == self.views[name].data_ptr()

    def land(self, name: str, param: Tensor, owner: Tensor, scale: float) -> None:
        """Take over the gradient that backward has just left in `param.grad`; `owner.grad` becomes the one that lies here.

        owner: whom the optimizer updates: `param` itself, or its master copy in another dtype
        """
        self.open()
        self.has_unsynced = True
        view, gradient = self.views[name], param.grad
        assert gradient is not None, f"{name}: hook without a gradient"
        if self.holds(name, gradient):       # accumulated in place by autograd
            _multiply(view, scale)
        elif self.holds(name, owner.grad):   # accumulated here, in the master's dtype
            _multiply(view.add_(gradient), scale)
        elif scale == 1.0 or gradient.dtype is not self.dtype:   # `mul` would round in the gradient's format, then copy
            _multiply(view.copy_(gradient), scale)
        else:
            torch.mul(gradient, scale, out=view)
        if owner is not param:
            param.grad = None
        owner.grad = self.gradient(name)


class GradientReducer:
    """Sums the gradients of one model over one group, in buckets, while backward runs.

    params:  name -> the parameter that backward writes a gradient to
    owners:  name -> whose `.grad` the optimizer reads, where that is not the parameter itself (a master copy)
    bucket_bytes: the most that a bucket of several gradients holds; left out, it is chosen by where the ranks are
    average: divide the sum by the ranks
    by_rows: names of embeddings, whose gradients are mostly rows of zeros
    compress_after: how many calls of `finish` sum exactly before sums are compressed
    raises:  ConfigError when there is no such all-reduce or compression, or they do not go together, or no byte goes in a bucket
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
        # Counting rows on a GPU would stop its queue; and whoever chose an algorithm wants that one.
        rows_pay = all_reduce == BACKEND and group.device.type == "cpu" and group.size > 1
        self._by_rows = {name: self.summing.lossy([(0, owner.shape)]) for name, owner in self.owners.items()
                         if name in by_rows and rows_pay and owner.dtype in BITS}
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes={bucket_bytes!r}, expected 1 or more; 1 gives each gradient a bucket of its own")
        self._bucket_bytes = bucket_bytes or (ONE_HOST_BYTES if group.one_host and group.device.type == "cpu" else BUCKET_BYTES)
        self._home: dict[str, Bucket] = {}
        self._arrivals = Arrivals(params)   # gradients of this rank alone in no bucket; in the first backward all
        self._launched = 0
        self._worker = worker_beside(group) if self.summing.in_python and group.device.type == "cpu" and group.size > 1 else None
        for name, param in params.items():
            hook_gradient(param, self._land, name)

    def sync(self, on: bool) -> AbstractContextManager[None]:
        """Whether backward passes inside launch full buckets; without, gradients only accumulate."""
        return temporarily(self, syncing=on)

    def flat_gradients(self) -> list[Tensor]:
        """The summed gradients, each element once: buckets, with zeros where a parameter was not used, and what lies in none."""
        outside_buckets = [owner.grad for name, owner in self.owners.items() if name not in self._home]
        return [bucket.flat for bucket in self.buckets] + [grad for grad in outside_buckets if grad is not None]

    def zero(self) -> None:
        """Forget all gradients; the next to land overwrites its place."""
        for owner in self.owners.values():
            owner.grad = None
        self._none_unsynced()

    def expect_summed(self, param: Tensor) -> None:
        """Before an optimizer of the user's updates it: raise UnitError when the ranks would part, and nobody has asked for that."""
        has_unsynced = bool(self._arrivals) or any(bucket.has_unsynced for bucket in self.buckets)
        meant = self.average and not self.syncing   # a step of each rank for itself, inside of `no_sync`
        if has_unsynced and not meant and param.grad is not None and self.group.size > 1:
            name = next(name for name, owner in self.owners.items() if owner is param)
            raise UnitError(f"rank {self.group.world_rank}: an optimizer updates {name} by the gradient of this rank alone, so ranks would "
                            "part: the last backward ran inside of `no_sync`, or has not ended (an optimizer in a hook). Step after a "
                            "backward outside of `no_sync`; with `rl.prepare` its engine steps")

    def abandon(self) -> None:
        """Clear away a backward that died half way, so that the next step starts clean."""
        self._wait_for_buckets()
        self._reset()
        self.zero()
        self.give_back()

    def give_back(self) -> None:
        """The memory goes, if nobody holds a gradient any more: an optimizer forgets them, too."""
        self._arrivals.begin()
        if all(owner.grad is None for owner in self.owners.values()):
            for bucket in self.buckets:
                bucket.close()

    @torch.no_grad()
    def finish(self, totals: Tensor | None = None) -> Tensor | None:
        """After the last backward of a step, on every rank: launch what is left, and wait.

        Afterwards `.grad` is the sum over ranks where any rank used the parameter, else None.
        totals: a few numbers to sum over the ranks on the way; returned
        """
        if not self.buckets and (self.group.size > 1 or self.summing.in_python):
            self._lay_out()
        self._arrivals.end()
        self._launch_what_is_left()
        summed = self._agree(totals)
        self._wait_for_buckets()
        self._end_step()
        return summed

    # ------------------------------------------------------------------ while backward runs

    @torch.no_grad()   # else it is part of a graph, where the backward makes one
    def _land(self, name: str, param: Tensor) -> None:
        if param.grad is None:
            raise UnitError(f"rank {self.group.world_rank}: a hook has taken the gradient of {name} away before it was summed over ranks. "
                            "Hooks may read it or change it; let the optimizer forget it, after its step")
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
        # In the first backward, and by rows in every one, gradients stay where autograd made them.
        self._arrivals.note(name, param, owner)
        if owner is not param:
            assert param.grad is not None, f"{name}: hook without a gradient"
            owner.grad = param.grad.to(owner.dtype) if owner.grad is None else owner.grad.add_(param.grad)
            param.grad = None

    def _launch_full_buckets(self) -> None:
        # In bucket order on every rank, whatever order gradients came in here: collectives must match.
        while self._launched < len(self.buckets) and not self.buckets[self._launched].waiting_for:
            bucket = self.buckets[self._launched]
            bucket.wait = self._start(bucket, f"gradients of bucket {self._launched}")
            self._launched += 1

    def _start(self, bucket: Bucket, label: str) -> Callable[[], Any]:
        """Let the bucket leave. Returns a function that waits until its sum is there."""
        algorithm = self.summing.now(bucket.algorithm)
        if algorithm is None:
            return self.group.all_reduce(bucket.flat, label=label, async_op=True).wait   # type: ignore[no-any-return]
        if self._worker is not None:
            return self._worker.submit(partial(algorithm, bucket.flat, self._worker.group))
        algorithm(bucket.flat, self.group)
        return lambda: None   # its kernels are in the GPU's queue, where the stream keeps the order

    # ------------------------------------------------------------------ at the end of backward

    def _launch_what_is_left(self) -> None:
        for bucket in self.buckets:
            for name in bucket.waiting_for:
                self._stand_in(bucket, name)
            bucket.waiting_for.clear()
        self._launch_full_buckets()
        if self._worker is not None:
            self._wait_for_buckets()   # two threads must not start collectives in an order of chance

    def _stand_in(self, bucket: Bucket, name: str) -> None:
        """A parameter without a gradient in this backward adds what it has accumulated before, or nothing."""
        bucket.open()
        view, gradient = bucket.views[name], self.owners[name].grad
        if gradient is None:
            view.zero_()
            return
        if not bucket.holds(name, gradient):
            view.copy_(gradient)
        _multiply(view, self.summing.factor)

    def _agree(self, totals: Tensor | None) -> Tensor | None:
        """Sum the totals; hand gradients over where any rank used the parameter; sum those that go by rows.

        One small message tells all: a flag for each parameter, how many rows were touched of each embedding, the totals.
        """
        touched = {name: touched_rows(self._own_gradient(name)) for name in self._by_rows}
        facts = [float(owner.grad is not None) for owner in self.owners.values()] + [float(len(rows)) for rows in touched.values()]
        flags, numbers = max_of_flags_and_sum(facts, totals, self.group)
        most_rows = dict(zip(touched, flags[len(self.owners):]))
        for (name, owner), used in zip(self.owners.items(), flags):
            if not used:
                owner.grad = None
            elif name in touched:
                owner.grad = self._sum_by_rows(name, touched[name], int(most_rows[name]))
            elif name in self._home:
                owner.grad = self._home[name].gradient(name)
        return numbers

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
        """Compressed sums leave something where there is no gradient: between tensors, and in parameters that no rank used."""
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
        """Lay parameters and gradients out in buckets, in the order in which rank 0's gradients came."""
        names = list(self.owners)
        late = [name for name in reversed(names) if name not in self._arrivals]
        order = torch.tensor([names.index(name) for name in (*self._arrivals, *late)] + [len(self._arrivals), self._arrivals.digest()])
        *indices, arrived, digest = self.group.broadcast(order, label="order of gradients").tolist()
        self._arrivals.expect_alike(digest, self.group)
        ordered = [names[index] for index in indices]
        # Parameters that got no gradient have buckets of their own: they would hold up the others every step.
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
    if factor != 1.0:   # which would be a pass over memory for nothing
        x.mul_(factor)
