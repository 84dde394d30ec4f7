"""Messages between two ranks when the kernel is in Python. Read fallback.py first.

A message goes over a ring buffer, one for each sender and receiver: an envelope (tag, size), then its bytes, as space
becomes free. Messages of one sender arrive in order; those of one tag are also received in order. A message that nobody has asked
for stays in the ring, unless one after it is waited for: then it is put aside, as an early one.

A thread that waits for a message moves all messages of its rank as far as possible; a background thread does so for posted ones.
"""

import itertools
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankloom.world.transport.codes import ABORTED, ANYONE, LOST, NO_MEMORY, TIMED_OUT, WRONG_LENGTH, nbytes_of
from rankloom.world.transport.fallback_peers import Peers, memory_at, naps

ENVELOPE = 16   # bytes: tag and size


@dataclass(eq=False)
class Message:
    """One message as its sender or its receiver sees it. `peer` is ANYONE until a message has come; `size`: see codes.py."""

    sending: bool
    bytes: np.ndarray
    size: int
    peer: int
    tag: int
    started: bool = False
    moved: int = 0

    @property
    def done(self) -> bool:
        """Whether all of it is in the ring, or read from it."""
        return self.started and self.moved == self.bytes.size


class Exchanges:
    """`exchange` for a link in Python, by its other calls for messages."""

    message: Any
    post: Any
    settle: Any
    drop: Any
    break_off: Any

    def exchange(self, *both: Any) -> int:
        """Send one message while receiving another -> why, or 0. (address, size, to, address, size, from, tag, timeout)"""
        out, out_size, to, into, in_size, frm, tag, timeout = both
        deadline = time.monotonic() + timeout
        handle = self.post(0, into, in_size, frm, tag)
        try:
            sent = self.message(1, out, out_size, to, tag, timeout)
            got = self.settle(handle, max(0.0, deadline - time.monotonic())) if sent >= 0 else sent
            if got == -TIMED_OUT:   # otherwise the posted receive would go on
                self.break_off(frm, TIMED_OUT)
        finally:
            self.drop(handle)
        return int(-min(got, 0))


class Post:
    """All messages of one rank."""

    def __init__(self, peers: Peers):
        self.peers = peers
        self.posted: dict[int, Message] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()                # guards the three below
        self._messages: list[Message] = []           # in flight, in the order of the calls
        self._early: list[Message] = []              # put aside before anyone asked for them
        self._incoming: dict[int, Message] = {}      # the message that is being read from the ring of each rank
        self._news = threading.Event()
        self._carrier: threading.Thread | None = None

    def message(self, sending: int, address: int, size: int, peer: int, tag: int, timeout: float) -> int:
        """Send or receive now. Returns the other rank, or -why."""
        m = self._add(sending, address, size, peer, tag)
        try:
            return self._deliver(m, timeout, breaks=True)
        finally:
            self._withdraw(m)

    def post(self, sending: int, address: int, size: int, peer: int, tag: int) -> int:
        """Send or receive in the background. Returns a handle; the memory must stay until it has settled.

        raises: RuntimeError if no thread can be started for it
        """
        handle = next(self._numbers)
        m = self.posted[handle] = self._add(sending, address, size, peer, tag)
        self._move()   # a small one is sent here and now
        try:
            self._expect_carrier(m)
        except RuntimeError:
            self.posted.pop(handle)
            self._withdraw(m)
            if m.started:   # what comes next from this rank, or to it, would be taken for the rest of this message
                self.peers.break_group(self.peers.rank, ABORTED)
            raise
        self._news.set()
        return handle

    def _expect_carrier(self, m: Message) -> None:
        """Start the background thread, if this message needs it. raises: RuntimeError if that cannot be"""
        with self._lock:
            if self._carrier is None and not self.peers.closing and not m.done:
                carrier = threading.Thread(target=self._carry, name="rankloom-messages", daemon=True)
                carrier.start()
                self._carrier = carrier

    def settle(self, handle: int, seconds: float) -> int:
        """Wait until a posted message is done. Returns the other rank, or -why. After TIMED_OUT the message goes on."""
        return self._deliver(self.posted[handle], seconds, breaks=False)

    def end(self) -> None:
        """End the thread."""
        self._news.set()
        if self._carrier and self._carrier is not threading.current_thread():
            self._carrier.join()

    def _add(self, sending: int, address: int, size: int, peer: int, tag: int) -> Message:
        m = Message(bool(sending), memory_at(address, nbytes_of(size)), size, peer, tag)
        with self._lock:
            self._messages.append(m)
        return m

    def _withdraw(self, m: Message) -> None:
        """Forget a message: nothing touches its memory from here on."""
        with self._lock:
            self._messages = [other for other in self._messages if other is not m]
            self._incoming = {peer: other for peer, other in self._incoming.items() if other is not m}

    def _deliver(self, m: Message, seconds: float, *, breaks: bool) -> int:
        def done() -> bool:
            self._move()
            return m.done

        def needed() -> list[int]:
            others = [rank for rank in range(self.peers.ranks) if rank != self.peers.rank]
            gone = [found for rank in others if (found := self.peers.find_gone([rank]))]
            dead = [other.rank for other in gone if other.why == LOST]   # the sender may be waiting for one of them
            if m.peer != ANYONE:
                return [m.peer, *dead]
            return dead or (others if len(gone) == len(others) else [])   # a rank that has left was not going to send it

        why = self.peers.wait_until(done, needed, time.monotonic() + seconds, breaks=breaks)
        return -why if why else m.peer

    def _carry(self) -> None:
        waits = naps(self.peers.spins)
        while not self.peers.why():
            if not self._messages:
                self._news.wait()
                self._news.clear()
            elif self._move():
                waits = naps(self.peers.spins)
            else:
                time.sleep(next(waits))

    def _move(self) -> bool:
        """Move every message as far as possible. Returns whether anything moved."""
        with self._lock:
            if self.peers.why():
                return False
            moved, blocked = False, set()
            for m in self._messages:
                if not m.sending:
                    self._take_early(m)
                elif m.peer not in blocked:   # messages to one rank do not overtake each other
                    moved |= self._push(m)
                    blocked |= set() if m.done else {m.peer}
            for peer in range(self.peers.ranks):
                moved |= self._pull(peer)
            self._messages = [m for m in self._messages if not m.done]
            return moved

    def _push(self, m: Message) -> bool:
        """Put as much of it in the ring as fits. Returns whether anything moved."""
        memory, way = self.peers.memory, (self.peers.rank, m.peer)
        ring, begin = memory.rings[way], int(memory.written[way])
        free = begin + ring.size - (begin - int(memory.read[way]))   # where the free space ends
        at = begin
        if not m.started and free - at >= ENVELOPE:
            at = _put(ring, at, np.array([m.tag, m.size]).view(np.uint8))
            m.started = True
        if m.started:
            piece = m.bytes[m.moved:m.moved + free - at]
            at = _put(ring, at, piece)
            m.moved += piece.size
            memory.written[way] = at   # after the bytes
        return at != begin

    def _pull(self, peer: int) -> bool:
        """Read what has come from one rank, of one message at most: a wait must see it before the next one is opened."""
        memory, way = self.peers.memory, (peer, self.peers.rank)
        ring, begin, end = memory.rings[way], int(memory.read[way]), int(memory.written[way])
        at = begin
        if peer not in self._incoming and end - at >= ENVELOPE:
            tag, size = _get(ring, at, ENVELOPE).view(np.int64).tolist()
            if m := self._addressee(peer, tag, size):
                self._incoming[peer], at = m, at + ENVELOPE
        if m := self._incoming.get(peer):
            piece = _get(ring, at, min(end - at, m.bytes.size - m.moved))
            m.bytes[m.moved:m.moved + piece.size] = piece
            m.moved += piece.size
            memory.read[way] = at = at + piece.size   # after the bytes: they may be overwritten now
            if m.done:
                del self._incoming[peer]
        return at != begin

    def _addressee(self, peer: int, tag: int, size: int) -> Message | None:
        """The receive that gets the next message of a ring, by its tag; else one put aside, if receives wait for later messages."""
        waiting = [m for m in self._messages if not m.sending and not m.started and m.peer in (peer, ANYONE)]
        for m in waiting:
            if m.tag == tag:
                return m if self._begin(m, peer, size) else None
        if not waiting:
            return None
        try:
            room = np.empty(nbytes_of(size), np.uint8)
        except MemoryError:
            self.peers.break_group(self.peers.rank, NO_MEMORY)
            return None
        self._early.append(Message(False, room, size, peer, tag, started=True))
        return self._early[-1]

    def _begin(self, m: Message, peer: int, size: int) -> bool:
        if m.size != size:
            self.peers.break_group(peer, WRONG_LENGTH)
            return False
        m.peer, m.started = peer, True
        return True

    def _take_early(self, m: Message) -> None:
        for early in self._early:
            if not m.started and early.done and early.tag == m.tag and m.peer in (early.peer, ANYONE):
                if self._begin(m, early.peer, early.size):
                    m.bytes[:], m.moved = early.bytes, m.bytes.size
                    self._early.remove(early)
                return


def _put(ring: np.ndarray, at: int, data: np.ndarray) -> int:
    """Write bytes at a position that only grows; returns the position after them."""
    begin = at % ring.size
    first = min(data.size, ring.size - begin)
    ring[begin:begin + first] = data[:first]
    ring[:data.size - first] = data[first:]
    return at + data.size


def _get(ring: np.ndarray, at: int, nbytes: int) -> np.ndarray:
    begin = at % ring.size
    return np.concatenate([ring[begin:begin + nbytes], ring[:max(0, begin + nbytes - ring.size)]])
