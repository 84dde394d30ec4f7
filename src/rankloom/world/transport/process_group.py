"""torch's whole ProcessGroup on shared memory: torch's own DDP, FSDP2 and `dist.` functions run on it unchanged. docs/design.md: limits.

Every method turns its tensors into addresses and lengths (operands.py), makes one call (channel.py) and returns work
(work.py): at once if the caller waits anyway, else in the background.
torch has two generations of names for some methods, and two forms of arguments (forms.py). All are here, as torch uses all of them.
"""

import datetime
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from rankloom.world.transport import operands
from rankloom.world.transport.buffers import Buffers
from rankloom.world.transport.channel import Channel
from rankloom.world.transport.codes import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    ANYONE,
    BARRIER,
    BROADCAST,
    FORKED,
    GATHER,
    KINDS,
    LEFT,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SUM,
)
from rankloom.world.transport.forms import in_either_form
from rankloom.world.transport.herald import Herald
from rankloom.world.transport.hosts import HostsBuffers, HostsChannel
from rankloom.world.transport.meet import find_neighbours, name_of
from rankloom.world.transport.operands import BYTES, Finish, countable, dense, dense_output, number_of, only_one
from rankloom.world.transport.profiled import profiled
from rankloom.world.transport.sparse import all_reduce_sparse
from rankloom.world.transport.work import DONE, AsBackend, Pending, PendingCollective, PendingMessage, Unwatched, Work, last_of

Arguments = tuple[int, int, int, int, int, int, int | bytes]
"""Kind, number type, operation, root, address to read, address to write, lengths."""


class SharedMemoryGroup(AsBackend, dist.ProcessGroup):
    """The ranks of one host as a torch process group."""

    def __init__(self, store: dist.Store, rank: int, size: int, channel: Channel, buffers: Buffers):
        super().__init__(rank, size)
        self.channel, self._store = channel, store
        self._herald, self._buffers = Herald(), buffers
        self._in_flight = Unwatched()
        self._name = self._description = ""

    # ------------------------------------------------------------------ who and where

    def rank(self) -> int:
        """This rank's number in the group. Written in Python, as torch's own is slower."""
        return self.channel.rank

    def size(self) -> int:
        """The number of ranks in the group."""
        return self.channel.size

    def getBackendName(self) -> str:
        """The name of this backend in torch."""
        return "rankloom"

    name = _get_backend_name = getBackendName

    def setGroupName(self, name: str) -> None:
        """Set the name that torch gives the group."""
        self._name = name

    def getGroupName(self) -> str:
        """The name that torch gave the group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Set torch's description of the group."""
        self._description = description

    def getGroupDesc(self) -> str:
        """The description that torch gave the group."""
        return self._description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def get_group_store(self) -> dist.Store:
        """The store in which this group met."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def buffer(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor that all ranks map: collectives read and write it in place. Every rank must ask for the same."""
        return self._buffers.new((shape,) if isinstance(shape, int) else shape, dtype)

    def common_buffer(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """A flat tensor, one for all ranks, or None if they are on several hosts. Every rank must ask for the same."""
        return self._buffers.common(numel, dtype)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set how long a call waits for the other ranks, from now on."""
        self.channel.set_timeout(timeout.total_seconds())

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """End every wait of every rank with RankLost, at once."""
        self.channel.abort()

    def shutdown(self) -> None:
        """Leave the group. A rank that still waits for this one gets RankLost."""
        self.channel.close()
        self._herald.close()

    # ------------------------------------------------------------------ collectives that reduce

    @in_either_form
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Combine over the ranks, in place."""
        opts = opts or c10d.AllreduceOptions()
        x = only_one(tensors, "all_reduce")
        return all_reduce_sparse(self, x, opts) if x.layout == torch.sparse_coo else self._reduce(ALL_REDUCE, x, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Combine each of several tensors over the ranks, in place."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        return last_of([self._reduce(ALL_REDUCE, x, opts) for x in tensors], tensors)

    @in_either_form
    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Combine over the ranks; the root gets the result."""
        opts = opts or c10d.ReduceOptions()
        return self._reduce(REDUCE, only_one(tensors, "reduce"), opts, opts.rootRank)

    def _reduce(self, kind: int, x: Tensor, opts: Any, root: int = 0) -> Work:
        flat, number, op, back = countable(x, opts.reduceOp, self._where(kind), self.size())
        if kind == REDUCE and self.rank() != root:
            back = None
        address = flat.data_ptr()
        return self._start((kind, number, op, root, address, address, flat.nbytes), opts, [x], [flat], back)

    @in_either_form
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        """Rank r gets the combination of all ranks' r-th tensors; lengths may differ between r."""
        opts = opts or c10d.ReduceScatterOptions()
        out, parts = only_one(outputs, "reduce_scatter"), only_one(inputs, "reduce_scatter")
        operands.expect_one_each(parts, self.size(), "reduce_scatter", "input")
        where = self._where(REDUCE_SCATTER)
        target, number, op, back = countable(out, opts.reduceOp, where, self.size())
        operands.expect_dtype(out, parts, where)
        given = operands.all_untouched([countable(part.detach(), opts.reduceOp, where, 1)[0] for part in parts], [target])
        table = operands.table_of(given, [target], self.size())
        return self._start((REDUCE_SCATTER, number, op, 0, 0, 0, table), opts, [out], [given, target], back)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        opts = opts or c10d.ReduceScatterOptions()
        where = self._where(REDUCE_SCATTER)
        given, number, op, _ = countable(input.detach(), opts.reduceOp, where, 1)
        target, _, _, back = countable(output, opts.reduceOp, where, self.size())
        operands.expect_size(given.numel(), target.numel() * self.size(), where, "input")
        operands.expect_dtype(output, [input], where)
        given = operands.untouched(given, target, self.rank())
        return self._start((REDUCE_SCATTER, number, op, 0, given.data_ptr(), target.data_ptr(), target.nbytes), opts, [output],
                           [given, target], back)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """`reduce_scatter_single` for each pair."""
        return last_of([self._reduce_scatter_base(out, x, opts) for out, x in zip(outputs, inputs, strict=True)], outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # ------------------------------------------------------------------ collectives that only copy

    @in_either_form
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Overwrite with the root's tensor."""
        opts = opts or c10d.BroadcastOptions()
        x = only_one(tensors, "broadcast")
        flat, back = dense_output(x, self._where(BROADCAST))
        address = flat.data_ptr()
        return self._start((BROADCAST, number_of(x), SUM, opts.rootRank, address, address, flat.nbytes), opts, [x], [flat],
                           None if self.rank() == opts.rootRank else back)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        where = self._where(ALL_GATHER)
        given = dense(input, where)
        target, back = dense_output(output, where)
        operands.expect_size(target.numel(), given.numel() * self.size(), where, "output")
        operands.expect_dtype(output, [input], where)
        given = operands.untouched(given, target, self.rank())
        return self._start((ALL_GATHER, number_of(input), SUM, 0, given.data_ptr(), target.data_ptr(), given.nbytes),
                           opts or c10d.AllgatherOptions(), [output], [given, target], back)

    all_gather_single = _allgather_base

    @in_either_form
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """All ranks' tensors, each to its place in a list; lengths may differ between ranks."""
        return self._into_list(ALL_GATHER, only_one(outputs, "all_gather"), only_one(inputs, "all_gather"),
                               opts or c10d.AllgatherOptions())

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """`all_gather_single` for each pair."""
        return last_of([self._allgather_base(out, x, opts) for out, x in zip(outputs, inputs, strict=True)], outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather_coalesced(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """`allgather` for each input; output_lists[rank][input]."""
        works = [self.allgather([[row[at] for row in output_lists]], [x], opts) for at, x in enumerate(inputs)]
        return last_of(works, [x for row in output_lists for x in row])

    @in_either_form
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """All ranks' tensors, into the root's list."""
        opts = opts or c10d.GatherOptions()
        return self._into_list(GATHER, outputs[0] if outputs else [], only_one(inputs, "gather"), opts, opts.rootRank)

    def _into_list(self, kind: int, outputs: list[Tensor], x: Tensor, opts: Any, root: int = 0) -> Work:
        where = self._where(kind)
        given = dense(x, where)
        if kind == ALL_GATHER or self.rank() == root:
            operands.expect_one_each(outputs, self.size(), where, "output")
        operands.expect_dtype(x, outputs, where)
        targets, backs = operands.dense_outputs(outputs, where)
        given = operands.all_untouched([given], targets)[0]
        table = operands.table_of([given], targets, self.size())
        return self._start((kind, number_of(x), SUM, root, 0, 0, table), opts, outputs, [given, targets], *backs)

    @in_either_form
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        """The root's r-th tensor goes to rank r."""
        opts = opts or c10d.ScatterOptions()
        where = self._where(SCATTER)
        out, parts = only_one(outputs, "scatter"), [dense(x, where) for x in (inputs[0] if inputs else [])]
        if self.rank() == opts.rootRank:
            operands.expect_one_each(parts, self.size(), where, "input")
        operands.expect_dtype(out, parts, where)
        target, back = dense_output(out, where)
        parts = operands.all_untouched(parts, [target])
        table = operands.table_of(parts, [target], self.size())
        return self._start((SCATTER, number_of(out), SUM, opts.rootRank, 0, 0, table), opts, [out], [parts, target], back)

    @in_either_form
    def alltoall_base(self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None) -> Work:
        """Send each rank its rows; if the splits are empty, shares are equal."""
        where = self._where(ALL_TO_ALL)
        given = dense(input, where)
        target, back = dense_output(output, where)
        opts = opts or c10d.AllToAllOptions()
        operands.expect_dtype(output, [input], where)
        given = operands.untouched(given, target)
        if not len(output_splits) and not len(input_splits):   # not by their truth, which an array of numpy does not have
            operands.expect_size(target.numel(), given.numel(), where, "output")
            operands.expect_size(given.numel() % self.size(), 0, where, "input modulo ranks")
            lengths: int | bytes = given.nbytes // self.size()
        else:
            lengths = operands.lengths_table(*operands.cut_rows(given, input_splits, self.size(), where),
                                             *operands.cut_rows(target, output_splits, self.size(), where))
        return self._start((ALL_TO_ALL, number_of(input), SUM, 0, given.data_ptr(), target.data_ptr(), lengths), opts, [output],
                           [given, target], back)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """The r-th input goes to rank r; the r-th output comes from it."""
        where = self._where(ALL_TO_ALL)
        operands.expect_one_each(outputs, self.size(), where, "output")
        operands.expect_one_each(inputs, self.size(), where, "input")
        operands.expect_dtype(outputs[0], [*outputs, *inputs], where)
        targets, backs = operands.dense_outputs(outputs, where)
        given = operands.all_untouched([dense(x, where) for x in inputs], targets)
        table = operands.table_of(given, targets, self.size())
        return self._start((ALL_TO_ALL, number_of(outputs[0]), SUM, 0, 0, 0, table), opts or c10d.AllToAllOptions(), outputs,
                           [given, targets], *backs)

    @in_either_form
    def barrier(self, opts: Any = None) -> Work:
        """Return when every rank has called this; the error names those that did not."""
        return self._start((BARRIER, BYTES, SUM, 0, 0, 0, 0), opts or c10d.BarrierOptions(), [])

    # ------------------------------------------------------------------ messages

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work:
        """Send to one rank of this group."""
        operands.expect_rank(to, self.size(), self._where("send"))
        x = only_one(tensors, "send")
        return self._post(1, dense(x, self._where("send")), x, to, tag, None)

    def recv(self, tensors: list[Tensor], frm: int, tag: int = 0) -> Work:
        """Receive from one rank of this group."""
        operands.expect_rank(frm, self.size(), self._where("recv"))   # a program's rank - 1 may be -1, which is ANYONE below
        return self._receive(tensors, frm, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Receive from any rank, whichever sends first; the work's `source_rank()` tells which."""
        return self._receive(tensors, ANYONE, tag)

    def _receive(self, tensors: list[Tensor], frm: int, tag: int) -> Work:
        x = only_one(tensors, "recv")
        flat, back = dense_output(x, self._where("recv"))
        return self._post(0, flat, x, frm, tag, back)

    def _post(self, sending: int, flat: Tensor, x: Tensor, peer: int, tag: int, back: Finish | None) -> Work:
        label = "send" if sending else "recv"
        if self.channel.closed:
            raise self.channel.explain(LEFT, label)
        self._expect_here([x], label)
        operands.expect_tag(tag, self._where(label))
        return self._message(sending, flat, x, peer, tag, back)

    def _message(self, sending: int, flat: Tensor, x: Tensor, peer: int, tag: int, back: Finish | None) -> Work:
        work = PendingMessage(self.channel, self._herald, "send" if sending else "recv", [x], [flat], [back] if back else [])
        work.peers = (peer,)
        work.handle = self.channel.link.post(sending, flat.data_ptr(), flat.nbytes | operands.SIZE_TYPE[x.dtype], peer, tag)
        return self._remember(work, work.handle)

    # ------------------------------------------------------------------ groups of groups

    def split_group(self, ranks: list[int], timeout: datetime.timedelta | None = None, opts: Any = None,
                    group_name: str | None = None, group_desc: str | None = None, device_types: Any = None) -> "SharedMemoryGroup | None":
        """A group of some of this group's ranks, for the same devices; None on the others. Every rank of this group calls it."""
        self._splits = getattr(self, "_splits", 0) + 1
        if self.rank() not in ranks:
            return None
        chosen, me = sorted(ranks), sorted(ranks).index(self.rank())
        store = dist.PrefixStore(f"split {self._splits} {name_of(chosen)}", self._store)
        seconds = timeout.total_seconds() if timeout else self.channel.timeout
        group = build(store, me, len(chosen), seconds, ranks=[self.channel.ranks[rank] for rank in chosen], name=group_name or "split")
        group._name, group._description = group_name or "", group_desc or ""
        return group

    # ------------------------------------------------------------------ inside

    def _start(self, call: Arguments, opts: Any, result: Sequence[Tensor], keep: Sequence[object] = (), *backs: Finish | None) -> Work:
        """Check one call, and make it, at once or in the background."""
        kind, root = call[0], call[3]
        if root:
            operands.expect_rank(root, self.size(), self._where(kind))
        self._expect_here([*result, *keep], kind)
        timeout = opts.timeout.total_seconds()   # 0: unset
        return self._make((*call, timeout if timeout > 0 else self.channel.timeout), opts.asyncOp, result, keep, [*filter(None, backs)])

    def _make(self, call: Sequence[Any], is_async: bool, result: Sequence[Tensor], keep: Sequence[object], backs: list[Finish]) -> Work:
        label, timeout = KINDS[call[0]], call[-1]
        if is_async:
            work = PendingCollective(self.channel, self._herald, label, result, (result, keep), backs)
            work.ticket, work.timeout = self.channel.link.submit(*call), timeout
            return self._remember(work, work.ticket)
        with profiled(label):
            why = self.channel.link.run(*call)
        if why:
            raise self.channel.explain(why, label, timeout)
        for back in backs:
            back()
        return DONE

    def _expect_here(self, tensors: Sequence[object], label: int | str) -> None:
        """Refuse tensors on another device. The first is enough: `expect_dtype` has found all of a call in one place."""
        for x in tensors[:1]:
            if isinstance(x, Tensor) and not x.is_cpu:
                raise operands.misplaced(x, self._where(label))

    def _remember(self, work: Pending, number: int) -> Work:
        if not number:
            raise self.channel.explain(FORKED, work.label)
        self._in_flight.add(work)
        return self._noted(work)

    def _where(self, kind: int | str) -> str:
        return self.channel.where(kind if isinstance(kind, str) else KINDS[kind])


def build(store: dist.Store, rank: int, size: int, timeout: float, *, name: str, ranks: Sequence[int] | None = None,
          host: str | None = None) -> SharedMemoryGroup:
    """A group of ranks that meet in `store`: in shared memory, and over TCP if they are on several hosts.

    name:   the name of the group, for error messages, as `ranks`: their numbers in the world
    host:   the host that this rank claims to be on; by default the real one
    raises: RankLost when the others do not come within `timeout` seconds
    """
    neighbours = find_neighbours(store, rank, size, timeout, host=host, ranks=ranks)
    if len(neighbours.nodes) > 1:
        spread = HostsChannel(store, neighbours, timeout=timeout, ranks=ranks, name=name)
        return SharedMemoryGroup(store, rank, size, spread, HostsBuffers(spread))
    channel = Channel(store, rank, size, timeout=timeout, ranks=ranks, name=name)
    return SharedMemoryGroup(store, rank, size, channel, Buffers(channel))
