"""One TCP connection between two ranks, and which receive gets each of its messages.

A message is a header (kind, tag, size) and its bytes. Messages of one sender arrive in order; a receive gets the first of
its kind and tag that no other receive has. A message that nobody has asked for yet is put aside.
Nothing here waits, or locks against other threads: wire.py does.
"""

import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from rankloom.world.transport.codes import ANYONE, nbytes_of

AT_ONCE = 8                    # messages that are sent with one system call
HEAD = struct.Struct("<qqq")   # kind, tag, size


@dataclass(eq=False, slots=True)
class Message:
    """One message as its sender or its receiver sees it. `peer` is ANYONE until a message has come."""

    kind: int
    peer: int
    tag: int
    data: memoryview
    size: int                        # the same at both ends: see codes.py
    moved: int = 0                   # the sender also counts the header
    done: bool = False
    heir: "Message | None" = None    # the receive that was posted after this came, to which it is copied once it is complete

    def matches(self, kind: int, peer: int, tag: int) -> bool:
        """Whether this receive takes such a message, or this message fits such a receive."""
        return self.kind == kind and self.tag == tag and (self.peer == peer or ANYONE in (self.peer, peer))

    def to_send(self) -> list[bytes | memoryview]:
        """The parts that its sender has not sent yet."""
        if self.moved < HEAD.size:
            return [HEAD.pack(self.kind, self.tag, self.size)[self.moved:], self.data]
        return [self.data[self.moved - HEAD.size:]]

    def advance(self, count: int) -> int:
        """Count bytes as sent, for this message and those after it. Returns how many were of this one."""
        sent = min(count, HEAD.size + self.data.nbytes - self.moved)
        self.moved += sent
        self.done = self.moved == HEAD.size + self.data.nbytes
        return sent

    def let_go(self) -> None:
        """Do not touch its memory any more. A message in flight goes on with a copy: sent as it is now, or received and ignored."""
        self.data = memoryview(bytearray(self.data))


class Line:
    """The connection to one other rank."""

    def __init__(self, peer: int, sock: socket.socket):
        self.peer, self.sock = peer, sock
        self.outbox: deque[Message] = deque()
        self.incoming: Message | None = None
        self.gone = 0          # why nothing will come any more; 0: more may come
        self.is_full = False   # the socket takes no more for now
        self._head, self._got = bytearray(HEAD.size), 0

    def push(self) -> None:
        """Send as much as possible, several messages at a time. raises: OSError when the connection is broken"""
        self.is_full = False
        while self.outbox:
            pieces = [piece for m in islice(self.outbox, AT_ONCE) for piece in m.to_send()]
            try:
                count = self.sock.sendmsg(pieces)
            except BlockingIOError:
                self.is_full = True
                return
            while count:
                count -= self.outbox[0].advance(count)
                if self.outbox[0].done:
                    self.outbox.popleft()

    def pull(self, open_message: Callable[[int, int, int], Message]) -> Message | None:
        """Read once. Returns a message when it is complete.

        open_message: returns the message to read into, for a kind, tag and size
        raises:       BlockingIOError when there is no more now, OSError when the connection has ended
        """
        if self.incoming is None:
            self._got += self._read(memoryview(self._head)[self._got:])
            if self._got < HEAD.size:
                return None
            self._got = 0
            self.incoming = open_message(*HEAD.unpack(self._head))
        m = self.incoming
        if m.moved < m.data.nbytes:
            m.moved += self._read(m.data[m.moved:])
        if m.moved < m.data.nbytes:
            return None
        m.done, self.incoming = True, None
        return m

    def _read(self, into: memoryview) -> int:
        count = self.sock.recv_into(into)
        if not count:
            raise ConnectionError("closed by the other side")
        return count


class Mailbox:
    """The receives that wait, and the messages that were put aside, both in order.

    awaited: the receives whose message is not complete yet, even if it is in flight
    unasked: the number of bytes put aside for which nobody has asked
    waiting: the number of calls of this rank that wait for anything
    """

    def __init__(self) -> None:
        self.receives: list[Message] = []
        self.aside: list[Message] = []
        self.awaited: set[Message] = set()
        self.unasked = self.waiting = 0

    def is_full(self, limit: int) -> bool:
        """Whether more than `limit` bytes are put aside, and this rank waits for nothing."""
        return self.unasked > limit and not self.awaited and not self.waiting

    def ask(self, m: Message) -> Message | None:
        """Add a receive. Returns the message that was put aside for it, if there is one, and links the two."""
        self.awaited.add(m)
        for early in self.aside:
            if early.heir is None and early.matches(m.kind, m.peer, m.tag):
                early.heir, m.peer = m, early.peer
                self.unasked -= early.data.nbytes
                return early
        self.receives.append(m)
        return None

    def open(self, kind: int, peer: int, tag: int, size: int) -> Message | None:
        """The message to read into when one begins: the receive that waits for it, else one put aside. None: the size does not fit."""
        for m in self.receives:
            if m.matches(kind, peer, tag):
                self.receives.remove(m)
                m.peer = peer
                return m if m.size == size else None
        self.unasked += nbytes_of(size)
        self.aside.append(Message(kind, peer, tag, np.empty(nbytes_of(size), np.uint8).data, size))
        return self.aside[-1]

    def hand_over(self, early: Message) -> bool:
        """Copy a message that was put aside to its receive, if it is complete and has one. False: the size does not fit."""
        heir = early.heir
        if heir is None or not early.done:
            return True
        self.aside.remove(early)
        self.awaited.discard(heir)
        if heir.size != early.size:
            return False
        heir.data[:] = early.data
        heir.done = True
        return True

    def forget(self, m: Message) -> None:
        """Remove a receive."""
        self.awaited.discard(m)
        self.receives = [other for other in self.receives if other is not m]


class Watch:
    """Tells which connections can be read or written; its wait can be ended from another thread."""

    def __init__(self, lines: Iterable[Line]):
        self._poll, self._bell, self._is_open = select.epoll(), os.eventfd(0), True
        self._lines = {line.sock.fileno(): line for line in lines}
        self._looks_for = dict.fromkeys(self._lines, select.EPOLLIN)
        self.unread: set[Line] = set()   # connections that are not read for now
        for file in (*self._lines, self._bell):
            self._poll.register(file, select.EPOLLIN)

    def wait(self) -> Iterator[tuple[Line, bool]]:
        """Block until something can be done. Yields the connections that can go on, and whether there is something to read."""
        for file, events in self._poll.poll():
            if file != self._bell:
                yield self._lines[file], bool(events & ~select.EPOLLOUT)

    def look_for(self, line: Line, *, reading: bool, writing: bool) -> None:
        """Set what to wait for on a connection. If it is gone, and nothing is left to send, do not even wait for its end."""
        (self.unread.discard if reading or line.gone else self.unread.add)(line)
        file, events = line.sock.fileno(), select.EPOLLIN * reading | select.EPOLLOUT * writing
        if self._looks_for.get(file, events) == events:   # unchanged, or no longer registered
            return
        if line.gone and not events:
            del self._looks_for[file]
            self._poll.unregister(file)
        else:
            self._looks_for[file] = events
            self._poll.modify(file, events)

    def wake(self) -> None:
        """End `wait`."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Close what this object has opened, not the connections. Later calls do nothing: other files may have the same numbers by then."""
        self.unread.clear()
        self._poll.close()
        was_open, self._is_open = self._is_open, False
        if was_open:
            os.close(self._bell)
