"""A group of ranks: the one object that may communicate with other ranks. It is passed to functions, never looked up.

Every collective checks that its tensor is contiguous (gloo silently moves the wrong bytes of others), enters its cost into the group's
ledger, and turns a backend's failure into `RankLost` or `CollectiveTimeout` with a label. By default a collective returns its result; with
`async_op=True` it returns a `Handle` at once.

A group of one rank has no connection: every collective is the identity. `world/world.py` makes groups, `base/cost.py` has the bills.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from rankloom.base.cost import Bill, all_gather_bill, all_reduce_bill, broadcast_bill, scatter_bill
from rankloom.base.errors import ConfigError, RankloomError, RankLost, ShapeMismatch, UnitError
from rankloom.base.json_text import as_json, from_json
from rankloom.base.members import Members
from rankloom.base.quantities import seconds
from rankloom.base.tensors import as_bytes, as_reals
from rankloom.base.topology import Topology
from rankloom.world.debug import Fingerprint, Inspector, call_site
from rankloom.world.handle import Handle as Handle
from rankloom.world.handle import InFlight
from rankloom.world.ledger import Ledger as Ledger
from rankloom.world.pairwise import combine_in_order, expect_message, ignores_tags, in_order, keep, start_both, start_dealing, start_gather
from rankloom.world.referee import Seat
from rankloom.world.translate import TranslatedErrors
from rankloom.world.transport.at_once import AtOnce
from rankloom.world.transport.operands import completed, dealt_rows, expect_movable, expect_operand, expect_rank, reduction_of, untouched
from rankloom.world.transport.process_group import SharedMemoryGroup
from rankloom.world.transport.router import DeviceRouter


class Group(Members):
    """Ranks 0..size-1 of one process group, and the ledger of what this rank sent to it.

    `rank` and `ranks` are by default those of the process group; `ranks` are numbers in the world, for error messages. `device` is where
    this rank's tensors are; `one_host`: no byte leaves this host; `topology` says which ranks share a node, by default all of them;
    `twin()` gives a second connection of the same ranks, whose calls do not queue with those of this one; what it sends is in both ledgers.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, rank: int | None = None, ranks: Sequence[int] | None = None, *,
                 name: str = "world", device: torch.device | str = "cpu", timeout: float = 300.0, one_host: bool = False,
                 inspector: Inspector | Seat | None = None, topology: Topology | None = None, twin: "Callable[[], Group] | None" = None,
                 ledger: Ledger | None = None):
        own_rank, size = (process_group.rank(), process_group.size()) if process_group is not None else (0, 1)
        super().__init__(own_rank if rank is None else rank, range(size) if ranks is None else ranks, name)
        self.one_host, self.device = one_host, torch.device(device)
        self.timeout = seconds(timeout).total_seconds()
        self.topology = topology or Topology.even(1, len(self.ranks))
        if self.topology.size != len(self.ranks):
            raise ConfigError(f"the topology has {self.topology.size} ranks, but group {name!r} has {len(self.ranks)}")
        self._process_group, self._inspector = process_group, inspector
        self.twin, self.ledger = twin, ledger or Ledger()
        # Debug mode compares every call before it is made. The fast path (at_once.py) does not, so debug mode turns it off.
        self._at_once = AtOnce(shared.channel, self.ledger) if (shared := self._shared) and not inspector else None
        self.in_flight = InFlight()

    @property
    def debug(self) -> bool:
        """Whether ranks compare each call before they make it."""
        return isinstance(self._inspector, Inspector)

    @property
    def in_order(self) -> bool:
        """Whether messages from one rank to another must be received in the order of sending, whatever their tags: so with NCCL. All ranks
        must ask."""
        return in_order(self._process_group, self.device, range(self.size))

    @property
    def lends_memory(self) -> bool:
        """Whether `buffer` gives memory in which collectives reduce in place; if not, any memory is as good."""
        return isinstance(self._process_group, SharedMemoryGroup | DeviceRouter)

    def _goes_directly(self, x: Tensor) -> bool:
        """Whether gathers and reduce-scatters are made of point-to-point messages (world/pairwise.py)."""
        return self.size > 1 and x.device.type == "cpu" and not self.lends_memory

    @property
    def _shared(self) -> SharedMemoryGroup | None:
        return self._process_group if isinstance(self._process_group, SharedMemoryGroup) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Group":
        return self   # a copy of a model has the same peers

    def __copy__(self) -> "Group":
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnitError(f"{self.where('pickle')}: a group of ranks cannot be pickled, nor can a model that was cut over it, as "
                        "`torch.save(model)` does. Save its state: `engine.full_state_dict()`, or in a loop of your own "
                        "`full_state_dict(model, group)` of rankloom.parallel.model_split, have the plain model's names and shapes")

    def __repr__(self) -> str:
        return f"Group({self.name!r}, rank {self.rank} of {self.size})"

    # ------------------------------------------------------------------ collectives

    def all_reduce(self, x: Tensor, op: str = "sum", *, label: str = "", async_op: bool = False) -> Any:
        """Combine `x` over the ranks, in place; every rank gets the same result. op: sum, mean, max, min, product.

        x: any shape, the same on all ranks; over gloo, max and min may ignore a NaN   sent: 2n(p-1)/p, over gloo means of 16 bits as fp32
        """
        how = reduction_of(op, x, self.device, self.where, label or "all_reduce")
        if self._at_once and not async_op and self._at_once.all_reduce(x, how.kernel_op, label):
            return completed(x, op, self.size)
        expect_operand(x, self.device, self.where(label or "all_reduce"), alone=self.size == 1)
        options: Any = c10d.AllreduceOptions()
        options.reduceOp, options.asyncOp = how.torch_op, async_op
        summed = x
        if how.torch_op == dist.ReduceOp.AVG and self._goes_directly(x):   # gloo takes no means; it would round the sum, or overflow
            options.reduceOp, summed = dist.ReduceOp.SUM, x.detach().float()

        def finish() -> Tensor:
            if (total := completed(summed, op, self.size)) is not x:
                x.detach().copy_(total)
            return x
        return self._collect(f"all_reduce({op})", x, label, async_op, bill=all_reduce_bill(summed.nbytes, self.size),
                             start=lambda pg: pg.allreduce([summed], options), finish=finish)

    def broadcast(self, x: Tensor, root: int = 0, *, label: str = "", async_op: bool = False) -> Any:
        """Overwrite `x` on every rank with that of rank `root`. x: any shape, the same on all ranks."""
        expect_operand(x, self.device, self.where(label or "broadcast"), alone=self.size == 1)
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = self._peer(root), 0, async_op
        return self._collect(f"broadcast(from {root})", x, label, async_op, bill=broadcast_bill(x.nbytes, self.size, self.rank == root),
                             start=lambda pg: pg.broadcast([self._moved(x)], options), finish=lambda: x)

    def all_gather(self, x: Tensor, *, out: Tensor | None = None, label: str = "", async_op: bool = False) -> Any:
        """Concatenate all ranks' `x` in rank order. [n, ...] on each -> [p*n, ...]   sent: n(p-1)

        out: where to write the result, contiguous; by default a new tensor
        """
        if self._at_once and not async_op and (whole := self._at_once.all_gather(x, out, label)) is not None:
            return whole
        expect_operand(x, self.device, self.where(label or "all_gather"), alone=self.size == 1)
        rows = x.unsqueeze(0) if x.dim() == 0 else x
        whole = self._output(out, rows, (rows.shape[0] * self.size, *rows.shape[1:]), label or "all_gather")
        options = c10d.AllgatherOptions()
        options.asyncOp = async_op
        start = lambda pg: pg._allgather_base(*map(self._moved, (whole, rows)), options)
        if self._goes_directly(x):
            slices = whole.detach().unflatten(0, (self.size, rows.shape[0])).unbind()
            start = lambda pg: start_gather(pg, self.rank, rows.detach(), slices)
        return self._collect("all_gather", rows, label, async_op, bill=all_gather_bill(x.nbytes, self.size), start=start,
                             finish=lambda: whole)

    def reduce_scatter(self, x: Tensor, op: str = "sum", *, out: Tensor | None = None, scratch: Tensor | None = None, label: str = "",
                       async_op: bool = False) -> Any:
        """Combine this rank's slice of `x` over the ranks. [p*n, ...] on each -> [n, ...]   op: see `all_reduce`   sent: n(p-1)

        `x` is not changed, except where `out` overlaps it.
        scratch: where the others' slices arrive, if they must (world/pairwise.py), [n(p-1), ...]; by default new memory
        """
        how = reduction_of(op, x, self.device, self.where, label or "reduce_scatter")
        if self._at_once and not async_op and (mine := self._at_once.reduce_scatter(x, how.kernel_op, out, label)) is not None:
            return completed(mine, op, self.size)
        expect_operand(x, self.device, self.where(label or "reduce_scatter"), alone=self.size == 1)
        n = self._equal_rows(x, "reduce_scatter")
        mine = self._output(out, x, (n, *x.shape[1:]), label or "reduce_scatter")
        options = c10d.ReduceScatterOptions()
        options.reduceOp, options.asyncOp = how.torch_op, async_op
        start = lambda pg: pg._reduce_scatter_base(*map(as_reals, (mine, x)), options)
        finish = lambda: completed(mine, op, self.size)
        if self._goes_directly(x):
            room = self._output(scratch, x, (x.shape[0] - n, *x.shape[1:]), f"{label or 'reduce_scatter'}: scratch")
            slices, theirs = x.detach().unflatten(0, (self.size, n)).unbind(), room.unflatten(0, (self.size - 1, n)).unbind()
            start = lambda pg: start_dealing(pg, self.rank, slices, theirs)
            finish = lambda: combine_in_order(op, slices[self.rank], theirs, self.rank, mine)
        return self._collect(f"reduce_scatter({op})", x, label, async_op, bill=scatter_bill(x.nbytes, self.size), start=start,
                             finish=finish)

    def all_to_all(self, x: Tensor, *, send_rows: Sequence[int] | None = None, recv_rows: Sequence[int] | None = None,
                   out: Tensor | None = None, label: str = "", async_op: bool = False) -> Any:
        """Send rows of `x`: the first send_rows[0] to rank 0, the next send_rows[1] to rank 1, and so on.

        Returns the rows that all ranks sent to this one, in rank order: [sum(recv_rows), ...]. By default shares are equal.
        """
        is_even = send_rows is None and recv_rows is None
        if is_even and self._at_once and not async_op and (mine := self._at_once.all_to_all(x, out, label)) is not None:
            return mine
        where = self.where(label or "all_to_all")
        expect_operand(x, self.device, where, alone=self.size == 1)
        if is_even:
            send_rows = recv_rows = [self._equal_rows(x, "all_to_all")] * self.size
        send_rows, recv_rows = dealt_rows(x, send_rows, recv_rows, self.rank, self.size, where)
        splits: list[Sequence[int]] = [[], []] if is_even else [recv_rows, send_rows]   # empty: equal shares
        mine = self._output(out, x, (sum(recv_rows), *x.shape[1:]), label or "all_to_all")
        bill = Bill((x.shape[0] - send_rows[self.rank]) * (x.nbytes // max(x.shape[0], 1)), self.size - 1)
        options = c10d.AllToAllOptions()
        options.asyncOp = async_op
        return self._collect("all_to_all", x, label, async_op, bill=bill, rows=(send_rows, recv_rows), finish=lambda: mine,
                             start=lambda pg: pg.alltoall_base(*map(self._moved, (mine, untouched(x, mine))), *splits, options))

    def barrier(self, *, label: str = "", async_op: bool = False) -> Any:
        """Return when every rank has called this; with `async_op`, the handle's `wait` does (on CUDA it holds the stream only)."""
        arrived = self.all_reduce(torch.zeros(1, device=self.device), label=label or "barrier", async_op=async_op)
        if self.device.type == "cuda" and not async_op:
            torch.cuda.current_stream(self.device).synchronize()
        return arrived if async_op else None

    def buffer(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of zeros to communicate from; every rank of the group must ask for the same.

        If the ranks share a host, all of them map it, and collectives reduce it in place, without a copy.
        raises: on all ranks, MemoryError when there is not enough memory, ConfigError when one may open no more files; ShapeMismatch
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if min(sizes, default=0) < 0:
            raise ShapeMismatch(f"{self.where('buffer')}: there is no tensor of shape {sizes}")
        self._await_turn()
        if isinstance(self._process_group, DeviceRouter):
            return self._process_group.buffer(sizes, dtype, self.device)
        return shared.buffer(sizes, dtype) if (shared := self._shared) else torch.zeros(sizes, dtype=dtype, device=self.device)

    def common_buffer(self, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, bool]:
        """A flat tensor of n zeros, one for all ranks if they share the memory of one host; and whether it is shared.

        If it is, all ranks see what one writes, after a barrier: rank r of p writes [r * n / p : (r + 1) * n / p],
        and nothing has to be gathered. If not, each rank has its own tensor.
        raises: ShapeMismatch when n is not divisible by p, or ranks ask for different sizes; MemoryError and ConfigError as `buffer`
        """
        if n % self.size:
            raise ShapeMismatch(f"{self.where('common_buffer')}: {n} elements cannot be cut in {self.size} equal slices; pad them")
        self._await_turn()
        common = shared.common_buffer(n, dtype) if (shared := self._shared) else None
        return (torch.zeros(n, dtype=dtype, device=self.device), False) if common is None else (common, True)

    def alone(self) -> "Group":
        """A group of this rank only: every collective is the identity."""
        return Group(None, 0, (self.world_rank,), name="alone", device=self.device, timeout=self.timeout, one_host=True)

    # ------------------------------------------------------------------ one to one

    def send(self, x: Tensor, to: int, *, tag: int = 0, label: str = "", async_op: bool = False) -> Any:
        """Send `x` to rank `to` of this group."""
        if self._at_once and not async_op and self._at_once.send(x, to, tag, label):
            return x
        self._peer(to, tag)
        expect_movable(x, self.device, self.where(label or "send"))
        self._connected(label or "send")
        self.ledger.enter(x.nbytes, 1)
        met = self._announced("send", x, to, tag)   # with no local name for the process group: see `_launch`
        return self._launch(label or "send", async_op, lambda pg: [*met, pg.send([self._moved(x)], to, tag)], lambda: x)

    def recv(self, into: Tensor, frm: int, *, tag: int = 0, label: str = "", async_op: bool = False) -> Any:
        """Fill `into` with what rank `frm` of this group sends; the receiver must know shape and dtype."""
        if self._at_once and not async_op and self._at_once.recv(into, frm, tag, label):
            return into
        self._peer(frm, tag)
        expect_movable(into, self.device, self.where(label or "recv"))
        met = self._announced("recv", into, frm, tag)
        return self._launch(label or "recv", async_op, lambda pg: [*met, pg.recv([self._moved(into)], frm, tag)], lambda: into)

    def exchange(self, out: Tensor, to: int, into: Tensor, frm: int, *, tag: int = 0, label: str = "", async_op: bool = False) -> Any:
        """Send `out` to one rank while receiving `into` from another, or the same, or itself. Cannot deadlock, in whatever order ranks
        call it. Exception: an NCCL process group that you made yourself connects as a whole in its first call, so all ranks must have made
        a collective before only some exchange."""
        if self._at_once and not async_op and self._at_once.exchange(out, to, into, frm, tag=tag, label=label):
            return into
        label = label or "exchange"
        for x in (out, into):
            expect_movable(x, self.device, self.where(label))
        source = untouched(out, into)   # arriving bytes must not overwrite `out` before it is sent
        if to == frm == self.rank and not self.lends_memory:
            keep(source, into, self.where(label))
            return Handle(self, label, (), lambda: into) if async_op else into
        for peer in (to, frm):
            self._peer(peer, tag)
        self._connected(label)
        self.ledger.enter(out.nbytes, 1)
        met = [*self._announced("recv", into, frm, tag), *self._announced("send", source, to, tag)]
        return self._launch(label, async_op, lambda pg: [
            *met, *start_both(pg, self._moved(source), self._moved(into), to, frm, tag)], lambda: into)

    # ------------------------------------------------------------------ values that are not tensors

    def all_gather_object(self, value: Any, *, label: str = "") -> list[Any]:
        """Every rank's `value`, in rank order. JSON values only: nothing is unpickled. For others, all ranks raise ConfigError."""
        label = label or "all_gather_object"
        text, sign = as_json(value, self.where(label))
        sizes = self.all_gather(torch.tensor([sign * len(text)], device=self.device), label=f"{label}: length").tolist()
        padded = torch.frombuffer(bytearray(text.ljust(max(map(abs, sizes)))), dtype=torch.uint8)
        rows = self.all_gather(padded.to(self.device), label=f"{label}: text").view(self.size, -1).cpu()
        return from_json((row[:abs(n)].numpy().tobytes() for row, n in zip(rows, sizes)), sizes)

    def agree(self, problem: str | None, *, error: type[RankloomError] = ConfigError, label: str = "agree") -> None:
        """Every rank raises or none does: if one rank raised alone, the others would wait for it.

        problem: what is wrong on this rank, or None. Each rank raises `error` with the problems of all.
        """
        if problems := [said for said in self.all_gather_object(problem, label=label) if said]:
            raise error("\n".join(dict.fromkeys(problems)))

    # ------------------------------------------------------------------ life

    def close(self) -> None:
        """Drop the connection. Peers that wait for this rank get `RankLost` at once; what NCCL has begun is finished first."""
        if self._inspector:
            self._inspector.close()
        if (pg := self._process_group) is not None:
            pg.shutdown()   # if NCCL is dropped without this, it aborts what it is doing
        self._process_group = self._at_once = None
        self.in_flight.let_go()   # or peers would wait until the time-out

    def translated_errors(self, label: str) -> TranslatedErrors:
        """A context that turns a backend's failure into an error with rank, group and label."""
        return TranslatedErrors(self.where, label, self.timeout, self._inspector if isinstance(self._inspector, Inspector) else None)

    # ------------------------------------------------------------------ inside

    def _collect(self, op: str, x: Tensor, label: str, async_op: bool, *, bill: Bill, start: Callable,
                 finish: Callable[[], Tensor], rows: tuple[Sequence[int], Sequence[int]] | None = None) -> Any:
        """Enter into the ledger, and start: the common part of all collectives. rows: how many go to each rank, and come from it."""
        if self.size == 1:
            return Handle(self, label, (), finish) if async_op else finish()
        self._connected(label or op)
        if self._inspector:
            shape = str(list(x.shape[1:] if rows else x.shape))   # ranks may send different numbers of rows
            mine = Fingerprint(op, shape, str(x.dtype).removeprefix("torch."), label, call_site(), rows)
            start = self._inspector.checked(mine, start, async_op)
        self.ledger.enter(bill.sent, bill.messages)
        return self._launch(label or op, async_op, start, finish)

    def _launch(self, label: str, async_op: bool, start: Callable, finish: Callable[[], Tensor]) -> Any:
        handle = self._keep(Handle(self, label, self._started(label, start), finish))
        return handle if async_op else handle.wait_once()   # no local name for the works: a traceback would keep the connection open

    def _announced(self, op: str, x: Tensor, peer: int, tag: int) -> Sequence[Any]:
        """Where calls are compared: tell the other end of a message. Returns what to wait for, too."""
        debug = self._inspector
        return debug.announce(op, x, peer, 0 if ignores_tags(self._connected(op), x.device, peer) else tag) if debug else ()

    def _await_turn(self) -> None:
        """For a collective that is not compared. In debug mode a thread begins the asynchronous ones: wait for those before to begin."""
        if isinstance(self._inspector, Inspector):
            self._inspector.drain()

    def _started(self, label: str, start: Callable) -> list[Any]:
        with self.translated_errors(label):
            works = start(self._connected(label))
        return works if isinstance(works, list) else [works]

    def _keep(self, handle: Handle) -> Handle:
        """Remember a handle, so that `close` finds it."""
        with self.translated_errors(handle.label):
            self.in_flight.add(handle)
        if self._process_group is None:   # another thread has closed the group meanwhile
            handle.works = None
        return handle

    def _moved(self, x: Tensor) -> Tensor:
        return x if self.lends_memory else as_bytes(x)   # gloo and NCCL do not know every dtype; our backend compares them

    def _output(self, out: Tensor | None, x: Tensor, shape: tuple[int, ...], label: str) -> Tensor:
        """`out`, if it fits, or a new tensor. In a group of one rank: `out` with a copy of the input, or the input itself."""
        if out is None:
            return x.new_empty(shape) if self.size > 1 else x
        expect_movable(out, self.device, self.where(label))
        if out.shape != shape or out.dtype != x.dtype:
            raise ShapeMismatch(f"{self.where(label)}: out is {tuple(out.shape)} of {out.dtype}, expected {shape} of {x.dtype}")
        if self.size == 1:
            out.detach().copy_(untouched(x, out, 0))   # it may be a parameter
        return out

    def _connected(self, label: str) -> dist.ProcessGroup:
        if self._process_group is None:
            raise RankLost(f"{self.where(label)}: this group is closed, or has one rank only")
        self.in_flight.expect_owner(self.where, label)
        return self._process_group

    def _peer(self, rank: int, tag: int | None = None) -> int:
        expect_rank(rank, self.size, self.where("peer"))
        if tag is not None and self._process_group is not None:
            expect_message(rank, self.rank, tag, self.where("peer"), any_tag=self.lends_memory)
        return rank

    def _equal_rows(self, x: Tensor, op: str) -> int:
        if x.dim() == 0 or x.shape[0] % self.size:
            raise ShapeMismatch(f"{self.where(op)}: shape {tuple(x.shape)} cannot be cut in {self.size} equal slices along dim 0; pad it")
        return x.shape[0] // self.size
