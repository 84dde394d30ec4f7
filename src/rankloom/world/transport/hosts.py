"""Groups whose ranks are on several hosts: the same channel as on one host, on another link.

A link runs collectives and moves messages. Here collectives have two levels (levels.py), and messages go over TCP
(wire.py). It has the methods of the compiled link (_shared.c), so process_group.py and work.py can use either.
"""

import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankloom.base.errors import ShapeMismatch
from rankloom.world.transport.address import own_address
from rankloom.world.transport.buffers import Buffers
from rankloom.world.transport.call import Call
from rankloom.world.transport.channel import Channel, at_its_end
from rankloom.world.transport.codes import ABORTED, BARRIER, FINE, FORKED, LEFT, LOST, Status, nbytes_of, status_of
from rankloom.world.transport.dial import dial_all
from rankloom.world.transport.fallback_messages import Exchanges
from rankloom.world.transport.fallback_peers import memory_at
from rankloom.world.transport.levels import Levels
from rankloom.world.transport.lines import Message
from rankloom.world.transport.meet import Neighbours
from rankloom.world.transport.turns import Turns
from rankloom.world.transport.wire import MESSAGE, Wire


class HostsChannel(Channel):
    """This rank's end of a group whose ranks are on several hosts."""

    def __init__(self, store: dist.Store, neighbours: Neighbours, *, timeout: float, name: str,
                 ranks: Sequence[int] | None = None):
        self.rank, self.size, self.timeout, self.name = neighbours.rank, len(neighbours.hosts), timeout, name
        self.ranks, self.closed = tuple(ranks or range(self.size)), False
        node = neighbours.on_host_of(self.rank)
        self.inside = Channel(dist.PrefixStore(f"host of {node[0]}", store), node.index(self.rank), len(node), timeout=timeout,
                              ranks=[self.ranks[rank] for rank in node], name=name)
        self.link = HostsLink(store, neighbours, self.inside, timeout)
        at_its_end(self, self.link.leave)
        self.call(BARRIER)

    def set_timeout(self, seconds: float) -> None:
        """See `Channel.set_timeout`: of calls inside the host, too."""
        super().set_timeout(seconds)
        self.inside.set_timeout(seconds)

    def gone(self) -> list[int]:
        """See `Channel.gone`. Returns what is known already, without asking the other ranks."""
        return self.link.gone()


class HostsBuffers(Buffers):
    """Memory that the ranks of each host map: sums inside a host read it in place."""

    def __init__(self, channel: HostsChannel):
        super().__init__(channel)
        self._of_host = Buffers(channel.inside)

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Buffers.new`. Errors on one host are raised on all."""
        asked = self._channel.gather_json([*shape, str(dtype)])
        if any(other != asked[0] for other in asked):
            raise ShapeMismatch(f"{self._channel.where('buffer')}: ranks ask for different buffers: {asked}")
        return self._channel.do_together(lambda: self._of_host.new(shape, dtype))

    def common(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """None: the ranks of several hosts cannot map the same memory."""
        return None


class HostsLink(Exchanges):
    """One rank's end of a group on several hosts, with the methods of _shared.Link. `why`: a reason from codes.py, 0 for none."""

    def __init__(self, store: dist.Store, neighbours: Neighbours, inside: Channel, timeout: float):
        self._rank, self._size, self._inside = neighbours.rank, len(neighbours.hosts), inside
        sockets = dial_all(store, self._rank, self._size, own_address(store), timeout)
        self._wire = Wire(self._rank, sockets, lambda: inside.link.break_off(inside.rank, ABORTED))
        self._levels = Levels(neighbours.nodes, self._rank, self._wire, inside.link if inside.size > 1 else None)
        self._turns: Turns[Call] = Turns(self._levels.perform)
        self._posted: dict[int, Message] = {}
        self._handles = count(1)

    def run(self, *call: Any) -> int:
        """Run a collective now: kind, number, op, root, source, target, lengths, timeout -> why."""
        with self._wire.breaking_when_interrupted():   # also while it waits for its turn: if interrupted, it is never run
            return self._wire.why() or self._turns.run(self._read(*call))

    def submit(self, *call: Any) -> int:
        """Queue a collective for the background: the same arguments -> ticket; 0 in a forked child."""
        return 0 if self._wire.why() == FORKED else self._turns.submit(self._read(*call))

    def wait(self, ticket: int, seconds: float) -> int:
        """Wait until a ticket's collective has ended -> why. TIMED_OUT does not break the group: it may still end."""
        with self._wire.breaking_when_interrupted():
            return FORKED if self._wire.why() == FORKED else self._turns.wait(ticket, seconds)

    def finished(self) -> int:
        """The last ticket that has ended."""
        return self._turns.finished

    def message(self, sending: int, address: int, size: int, peer: int, tag: int, timeout: float) -> int:
        """Send or receive now -> the other rank, or -why. peer -1: receive from any rank."""
        m = self._begin(sending, address, size, peer, tag)
        try:
            return self._until_done(m, timeout, breaks=True)
        finally:
            self._wire.drop([m])

    def post(self, sending: int, address: int, size: int, peer: int, tag: int) -> int:
        """Start to send or receive -> handle; 0 in a forked child. The memory must stay until the message has settled, or was dropped."""
        if self._wire.why() == FORKED:
            return 0
        handle = next(self._handles)
        self._posted[handle] = self._begin(sending, address, size, peer, tag)
        return handle

    def settle(self, handle: int, seconds: float) -> int:
        """Wait until a posted message is done -> the other rank, or -why. TIMED_OUT does not break the group."""
        return self._until_done(self._posted[handle], seconds, breaks=False)

    def settled(self, handle: int) -> bool:
        """Whether a posted message is done, or never will be."""
        return self._posted[handle].done or self._wire.why() != FINE

    def drop(self, handle: int) -> None:
        """Forget a posted message, and do not touch its memory any more."""
        if handle in self._posted:
            self._wire.drop([self._posted.pop(handle)])

    def break_off(self, rank: int, why: int) -> None:
        """Break the group: end every wait of every rank."""
        self._wire.break_group(rank, why)

    def leave(self) -> None:
        """Make no more calls on this rank, and tell ranks that wait for it. Ends its threads."""
        self._wire.leave()
        self._inside.close()
        self._turns.close()

    def gone(self) -> list[int]:
        """The ranks that have ended, or left."""
        return [rank for rank in range(self._size) if self._wire.why_gone(rank)]

    def status(self) -> Status:
        """See `Status`. Asks the other ranks."""
        calls, letters = self._wire.ask_around(), {FINE: "?", LEFT: "L", LOST: "X"}
        states = ["S" if rank in calls else letters[self._wire.why_gone(rank)] for rank in range(self._size)]
        for rank, state in zip(self._levels.my.node, status_of(self._inside.link).states):
            states[rank] = state if states[rank] == "?" else states[rank]
        return Status(*self._wire.broken, [calls[rank][0] if rank in calls else 0 for rank in range(self._size)], states)

    def calls(self) -> list[tuple[int, ...] | None]:
        """The last call of each rank: kind, number, op, root, bytes; None if it has begun fewer calls than this rank."""
        calls, number = self._wire.ask_around(), self._wire.call_number
        return [tuple(calls[rank][1:]) if rank in calls and calls[rank][0] >= number else None for rank in range(self._size)]

    def _begin(self, sending: int, address: int, size: int, peer: int, tag: int) -> Message:
        data = memory_at(address, nbytes_of(size)).data
        return (self._wire.send if sending else self._wire.receive)(MESSAGE, peer, tag, data, size)

    def _until_done(self, m: Message, seconds: float, *, breaks: bool) -> int:
        with self._wire.breaking_when_interrupted():
            why = self._wire.wait([m], time.monotonic() + seconds, breaks=breaks)
        return -why if why else m.peer

    def _read(self, *arguments: Any) -> Call:
        return Call.read(self._rank, self._size, memory_at, arguments)
