"""Messages between ranks on several hosts, and news of their state, over one TCP connection between any two ranks of a group.

gloo is not used for this. If ranks disagree about a length, it ends the process without an error; its waits cannot
be ended; and it does not say which rank is lost. Here a connection that breaks names its rank, and every wait ends when the
group breaks.

One thread of each rank, the postman, moves all bytes. Besides messages it carries news: a rank leaves; the group is broken,
and why; what a rank is doing (the postman answers even when its rank is busy elsewhere); and which collective a rank begins, so
that ranks notice when they make different calls. It stops reading while much is put aside and this rank waits for nothing:
then the senders wait.
dial.py makes the connections, lines.py matches messages with receives; hosts.py uses this file.
"""

import array
import atexit
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rankloom.world.transport.codes import ANYONE, FINE, FORKED, INTERRUPTED, LEFT, LOST, MISMATCHED, TIMED_OUT, WRONG_LENGTH, Break, Gone
from rankloom.world.transport.lines import Line, Mailbox, Message, Watch
from rankloom.world.transport.roll import Roll

MESSAGE, PART, NEWS = range(3)                   # kinds: messages between two ranks, parts of a collective, news of ranks' states
BROKEN, LEAVING, ASKED, ANSWER, BEGUN = range(5)   # tags of news
ASIDE = 64 << 20   # bytes put aside, above which the postman reads no more while this rank waits for nothing
AT_ONCE = 16       # reads of one connection before the next has its turn
LINGER = 1.0       # seconds to send, when a rank leaves, what is still queued
PATIENCE = 0.3     # seconds to wait for ranks to tell what they are doing


class Wire:
    """This rank's connections to all others of its group.

    on_break: called once, when the group breaks, whoever broke it
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket], on_break: Callable[[], object]):
        self.rank, self.size, self.on_break = rank, len(sockets) + 1, on_break
        self.changed = threading.Condition()   # guards everything below
        self.broken = Break(FINE, -1)
        self.closing = False
        self._lines = {peer: Line(peer, sock) for peer, sock in sockets.items()}
        self._mailbox, self._roll, self._watch = Mailbox(), Roll(), Watch(self._lines.values())
        self._unsent: set[Line] = set()
        self._postman = threading.Thread(target=self._work, name="rankloom-postman", daemon=True)
        _wires.add(self)
        self._postman.start()

    # ------------------------------------------------------------------ messages

    def send(self, kind: int, peer: int, tag: int, data: memoryview, size: int | None = None) -> Message:
        """Start to send `data`, which must not change until the message is done. size: of both ends; left out, its bytes (codes.py)"""
        m = Message(kind, peer, tag, data, data.nbytes if size is None else size)
        with self.changed:
            if peer == self.rank:
                self._send_to_myself(m)
            else:
                self._put(self._lines[peer], m)
        return m

    def receive(self, kind: int, peer: int, tag: int, into: memoryview, size: int | None = None) -> Message:
        """Start to receive from `peer`, or from ANYONE. size: as for `send`"""
        m = Message(kind, peer, tag, into, into.nbytes if size is None else size)
        with self.changed:
            if early := self._mailbox.ask(m):
                self._hand_over(early)
            self._read_on()
        return m

    def wait(self, messages: Sequence[Message], deadline: float, *, breaks: bool = True) -> int:
        """Wait until all are done. Returns why they will not be, or FINE.

        breaks: whether the group breaks at the deadline; if not, they may still be done later
        """
        with self.changed:
            while late := [m for m in messages if not m.done]:
                if why := self._await_change([m.peer for m in late], deadline, breaks=breaks):
                    return why
        return FINE

    def _await_change(self, peers: Sequence[int], deadline: float, *, breaks: bool = True) -> int:
        """Wait until anything changes. Returns why messages of these peers will not come any more, or FINE. `changed` is held"""
        if why := self.why():
            return why
        if gone := self._find_gone(peers):
            return self.break_group(gone.rank, gone.why)
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return self.break_group(peers[0], TIMED_OUT) if breaks else TIMED_OUT
        if self._flush():   # this may have taken time, so check again
            return FINE
        self.changed.wait(min(seconds, threading.TIMEOUT_MAX))
        return FINE

    def drop(self, messages: Sequence[Message]) -> None:
        """Do not touch the memory of these messages any more, whether they are done or not."""
        with self.changed:
            for m in messages:
                if not m.done:
                    self._mailbox.forget(m)
                    m.let_go()

    # ------------------------------------------------------------------ the state of ranks

    def why(self) -> int:
        """Why no call can succeed any more, or FINE."""
        return self.broken.why or (LEFT if self.closing else FINE)

    def break_group(self, blamed: int, why: int) -> int:
        """End every wait of every rank. Returns the reason that counts: the first."""
        with self.changed:
            if not self.broken.why:
                self._tell_all(BROKEN, [blamed, why])
                self._break(blamed, why)
            return self.broken.why

    def await_break(self, seconds: float) -> None:
        """Wait until the group is broken, but at most so many seconds."""
        with self.changed:
            self.changed.wait_for(lambda: self.broken.why, seconds)

    @contextmanager
    def breaking_when_interrupted(self) -> Iterator[None]:
        """Around every call that waits. If it ends in an exception, such as Ctrl-C, others would wait for this rank: end their waits."""
        try:
            with self._reading():
                yield
        except BaseException:
            self.break_group(self.rank, INTERRUPTED)
            raise

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Read on, however much is put aside: what this rank waits for may come after messages that nobody has asked for yet."""
        with self.changed:
            self._mailbox.waiting += 1
            self._read_on()
        try:
            yield
        finally:
            with self.changed:
                self._mailbox.waiting -= 1

    def begin_call(self, call: Sequence[int]) -> int:
        """Note what this rank is about to do: kind, number type, operation, root, bytes. Returns why it cannot, or FINE."""
        with self.changed:
            other = self._roll.begin(call)
            return self.why() if other is None else self.break_group(other, MISMATCHED)

    def tell_of_call(self, peers: Sequence[int], words: Sequence[int]) -> None:
        """Tell others that this rank has begun its call; `words` say which call, and what else they should know.

        It is sent with the next message to them, or when this rank waits.
        """
        with self.changed:
            for peer in peers:
                self._lines[peer].outbox.append(_news(peer, BEGUN, [self._roll.number, *words]))
                self._unsent.add(self._lines[peer])

    def hear_of_call(self, peers: Sequence[int], deadline: float) -> tuple[int, list[list[int]]]:
        """Wait until others have told of the same call. Returns why they have not, or FINE; and what they told."""
        with self.changed:
            self._flush()
            while late := [peer for peer in peers if self._roll.begun_by(peer) is None]:
                if why := self._await_change(late, deadline):
                    return why, []
            return self.why(), [words[1:] for peer in peers if (words := self._roll.begun_by(peer))]

    @property
    def call_number(self) -> int:
        """The number of the last collective that this rank has begun."""
        return self._roll.number

    def ask_around(self) -> dict[int, list[int]]:
        """What each rank is doing: the number of its calls so far, and the last one. Ranks that do not answer are left out."""
        with self.changed:
            self._roll.answers = {self.rank: self._roll.mine}   # shared by all threads that ask: one answer of each rank is enough
            self._tell_all(ASKED, [])
            has_answered = lambda peer, line: peer in self._roll.answers or line.gone
            with self._reading():   # a forked child is closing from the start, and nobody reads there
                self.changed.wait_for(lambda: self.closing or all(has_answered(*line) for line in self._lines.items()), PATIENCE)
            return self._roll.answers

    def why_gone(self, peer: int) -> int:
        """LOST if a rank has ended, LEFT if it has left, else FINE."""
        return FINE if peer == self.rank else self._lines[peer].gone

    def leave(self) -> None:
        """Tell the others, send what is still queued if possible, and close all connections."""
        with self.changed:
            if self.closing:
                return
            self._tell_all(LEAVING, [])
            self.changed.wait_for(lambda: not any(line.outbox for line in self._lines.values()), LINGER)
            if self.closing:   # another thread has left meanwhile
                return
            self.closing = True
            self.changed.notify_all()
        self._watch.wake()
        if self._postman is not threading.current_thread():
            self._postman.join()
        self._close()

    def end_in_child(self) -> None:
        """Stop in a forked child: it is not a rank, and must not keep the connections of its parent open."""
        self.changed = threading.Condition()   # another thread may have held the old one
        self.broken, self.closing = Break(FORKED, self.rank), True
        self._close()

    def _close(self) -> None:
        _wires.discard(self)   # a child that is forked later has nothing to close here
        self._watch.close()
        for line in self._lines.values():
            line.sock.close()

    # ------------------------------------------------------------------ the postman, and what he does; `changed` is held

    def _work(self) -> None:
        while not self.closing:
            for line, may_read in self._watch.wait():
                with self.changed:
                    self._serve(line, may_read)

    def _serve(self, line: Line, may_read: bool) -> None:
        if line.outbox:
            self._push(line)
        if may_read and not line.gone:
            self._pull(line)
        self._watch_for(line)

    def _watch_for(self, line: Line) -> None:
        """Set what the postman waits for on a connection."""
        is_full = self._mailbox.is_full(ASIDE)
        self._watch.look_for(line, reading=not (is_full or line.gone), writing=bool(line.outbox))

    def _read_on(self) -> None:
        """Resume reading connections that were left unread, if less is put aside now, or this rank waits for something."""
        if self._watch.unread and not self._mailbox.is_full(ASIDE):
            for line in [*self._watch.unread]:
                self._watch_for(line)

    def _put(self, line: Line, m: Message) -> None:
        line.outbox.append(m)
        if not line.is_full:
            self._push(line)
            self._watch_for(line)

    def _flush(self) -> bool:
        """Send what was queued to go with the next message. Returns whether there was anything."""
        lines, self._unsent = self._unsent, set()
        for line in lines:
            if line.outbox and not line.is_full:
                self._push(line)
                self._watch_for(line)
        return bool(lines)

    def _push(self, line: Line) -> None:
        before = len(line.outbox)
        try:
            line.push()
        except OSError:   # reading finds out how it ended, after what can still be read
            line.outbox.clear()
        if len(line.outbox) < before:
            self.changed.notify_all()

    def _pull(self, line: Line) -> None:
        try:
            for _ in range(AT_ONCE):
                if m := line.pull(partial(self._open, line.peer)):
                    self._arrived(line, m)
        except BlockingIOError:   # everything that has come is read
            pass
        except OSError:           # nothing will come any more
            line.gone = line.gone or LOST
            self.changed.notify_all()

    def _open(self, peer: int, kind: int, tag: int, size: int) -> Message:
        if kind == NEWS:
            return Message(kind, peer, tag, memoryview(bytearray(size)), size)
        m = self._mailbox.open(kind, peer, tag, size)
        if m is None:
            self.break_group(peer, WRONG_LENGTH)
            raise ConnectionError("what follows fits nowhere")
        return m

    def _arrived(self, line: Line, m: Message) -> None:
        if m.kind == NEWS:
            self._hear(line, m.tag, array.array("q", m.data.tobytes()).tolist())
        else:
            self._hand_over(m)

    def _hand_over(self, m: Message) -> None:
        if m.done:   # it was read directly into its receive
            self._mailbox.awaited.discard(m)
        if not self._mailbox.hand_over(m):
            self.break_group(m.peer, WRONG_LENGTH)
        self.changed.notify_all()

    def _send_to_myself(self, m: Message) -> None:
        m.done = True
        here = self._mailbox.open(m.kind, m.peer, m.tag, m.size)
        if here is None:
            self.break_group(self.rank, WRONG_LENGTH)
            return
        here.data[:], here.done = m.data, True
        self._hand_over(here)

    # ------------------------------------------------------------------ news; `changed` is held

    def _tell(self, line: Line, tag: int, words: Sequence[int]) -> None:
        if not line.gone:
            self._put(line, _news(line.peer, tag, words))

    def _tell_all(self, tag: int, words: Sequence[int]) -> None:
        for line in self._lines.values():
            self._tell(line, tag, words)

    def _hear(self, line: Line, tag: int, words: list[int]) -> None:
        if tag == BROKEN and not self.broken.why:
            self._break(*words)
        elif tag == LEAVING:
            line.gone = LEFT
        elif tag == ASKED:
            self._tell(line, ANSWER, self._roll.mine)
        elif tag == ANSWER:
            self._roll.answers[line.peer] = words
        elif tag == BEGUN and not self._roll.hear(line.peer, words):
            self.break_group(line.peer, MISMATCHED)
        self.changed.notify_all()

    def _break(self, blamed: int, why: int) -> None:
        self.broken = Break(why, blamed)
        self.changed.notify_all()
        self.on_break()

    def _find_gone(self, peers: Sequence[int]) -> Gone | None:
        """One of these peers that is gone, or any rank that has died: they may wait for it. ANYONE is gone when all have."""
        dead = [line for line in self._lines.values() if line.gone == LOST]
        for peer in peers:
            lines = list(self._lines.values()) if peer == ANYONE else [self._lines[peer]] if peer != self.rank else []
            if lines and all(line.gone for line in lines):
                return Gone(lines[-1].peer, lines[-1].gone)
        return Gone(dead[-1].peer, LOST) if dead else None


def _news(peer: int, tag: int, words: Sequence[int]) -> Message:
    data = memoryview(array.array("q", words).tobytes())
    return Message(NEWS, peer, tag, data, data.nbytes)


_wires: weakref.WeakSet[Wire] = weakref.WeakSet()


def _leave_all() -> None:
    for wire in list(_wires):
        wire.leave()


def _end_all_in_child() -> None:
    for wire in list(_wires):
        wire.end_in_child()


atexit.register(_leave_all)   # before Python stops the postman threads
os.register_at_fork(after_in_child=_end_all_in_child)
