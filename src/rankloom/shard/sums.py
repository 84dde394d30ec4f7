"""How the gradient of a unit is summed: a reduce-scatter over the shard axis, then an all-reduce of the slices over the replicas.

Where a run compresses gradients (comm/compress.py), one of the two is compressed:

    with replicas   the all-reduce. So with `shard` inside a host and `replicate` between hosts only the slow messages are compressed
    without         the reduce-scatter, if the compression has one (comm/scatter.py)
"""

import time
from collections.abc import Callable
from functools import partial

from torch import Tensor

from rankloom.base.cost import Bill, all_reduce_bill, scatter_bill
from rankloom.comm.compress import Summing
from rankloom.comm.messages import Arrival
from rankloom.comm.worker import start_beside, worker_beside
from rankloom.shard.unit import Unit
from rankloom.world.group import Group


class UnitSums:
    """The collectives that sum the gradient of one unit.

    replicas: the ranks that own the same slice
    summing:  of the whole run; its `factor` multiplies all its gradients
    exact:    this unit is not compressed
    memory:   the fp32 errors of one buffer (comm/lossy.py): of the slice where there are replicas, else of the whole
    """

    def __init__(self, unit: Unit, replicas: Group, summing: Summing, *, exact: bool = False):
        self.unit, self.replicas, self.summing = unit, replicas, summing
        whole = [(slot.start, slot.shape) for slot in unit.layout.slots] if unit.group.size == 1 else []   # else slices cut them
        self.late = summing.new_late_sums()
        exact = exact or not unit.formats.reduce.is_floating_point   # complex numbers
        self._lossy_all_reduce = summing.new_compressed(whole) if replicas.size > 1 and not exact else None
        self._lossy_scatter = summing.new_compressed_scatter() if unit.group.size > 1 == replicas.size and not exact else None
        self._group = unit.group if self._lossy_scatter else replicas   # that of the compressed collective
        # Without a second connection it would mix with the gathers of backward.
        self._worker = worker_beside(self._group) if self.is_compressed and self._group.twin else None

    @property
    def is_compressed(self) -> bool:
        """Whether one of the collectives is, after the exact first steps."""
        return bool(self._lossy_scatter or self._lossy_all_reduce)

    @property
    def scatters_exactly(self) -> bool:
        """Whether this step's reduce-scatter is exact."""
        return self._lossy_scatter is None or self.summing.is_exact_now

    def start_scatter(self, whole: Tensor, out: Tensor, room: Tensor | None, label: str) -> Arrival:
        """Start to reduce-scatter `whole` into `out`; where it will be compressed, it is overwritten. A collective.

        room: see `scratch` of `Group.reduce_scatter`
        """
        if self.summing.factor != 1.0:
            whole.mul_(self.summing.factor)
        if self._lossy_scatter is not None and not self.scatters_exactly:
            return self._started(partial(self._lossy_scatter, whole, out))
        arrival: Arrival = self.unit.group.reduce_scatter(whole, out=out, scratch=room, label=label, async_op=True).wait
        return arrival

    def start_all_reduce(self, mine: Tensor, label: str) -> Arrival:
        """Start to sum the slice over the replicas, in place. A collective."""
        if self._lossy_all_reduce is not None and not self.summing.is_exact_now:
            return self._started(partial(self._lossy_all_reduce, mine))
        arrival: Arrival = self.replicas.all_reduce(mine, label=label, async_op=True).wait
        return arrival

    def bill(self) -> Bill:
        """What this rank sends for one sum, padding included; in a compressed step, if there are such."""
        n, p = self.unit.layout.total, self.unit.group.size
        nbytes = n * self.unit.formats.reduce.itemsize
        scatter = self._lossy_scatter.bill(n, p) if self._lossy_scatter else scatter_bill(nbytes, p)
        if self._lossy_all_reduce is not None:
            return scatter + self._lossy_all_reduce.bill(n // p, self.replicas)
        return scatter + all_reduce_bill(nbytes // p, self.replicas.size)

    def _started(self, job: Callable[[Group], Tensor]) -> Arrival:
        arrived, ledger = start_beside(self._worker, job, self._group), self._group.ledger

        def wait() -> Tensor:
            begin = time.perf_counter()
            total: Tensor = arrived()
            ledger.waited += time.perf_counter() - begin
            return total

        return wait
