"""What _shared.c does, in numpy: for where it could not be built, and to read. Collectives between ranks that map the same memory.

One segment of memory for each group, the same bytes in every rank's address space. fallback_peers.py lists what lies in
it, and says how ranks wait for each other; fallback_messages.py is about messages between two. call.py says what a call is,
turns.py whose turn it is.

A collective is a row of windows. In each, every rank copies a piece of its input into its slot, all meet, and every rank
takes what is for it out of the slots of all; where values are reduced, it combines them in rank order, so that all end
with the same bits. There are two slots, used in turns: whoever writes one again has met all others since they read it,
so one meeting for each window is enough. At the first meeting each also reads what call the others make and how long
their parts are: all ranks find the same fault, or none.

The C kernel saves what can be saved: it reads inputs that lie in shared regions where they are, shares the work of a
large all-reduce, and sleeps until it is woken. Here everything is staged and every rank adds up everything.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce, wraps
from typing import Any, TypeVar

import numpy as np

from rankloom.world.transport.call import OWN_LENGTHS, Call, read_call
from rankloom.world.transport.codes import (
    ALL_REDUCE,
    ALL_TO_ALL,
    AVG,
    BAND,
    BOR,
    BROADCAST,
    BXOR,
    FINE,
    FORKED,
    MAX,
    MIN,
    MISMATCHED,
    PRODUCT,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SUM,
    TIMED_OUT,
    WRONG_LENGTH,
)
from rankloom.world.transport.fallback_messages import Post
from rankloom.world.transport.fallback_peers import SLOT, Peers
from rankloom.world.transport.fallback_peers import segment_size as segment_size
from rankloom.world.transport.turns import Turns

DTYPES = (np.float32, np.float64, np.float16, np.uint16, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
BF16 = 3    # numpy does not know it, so its bits are handled as uint16
LANE = 64   # bytes: where the lanes of a slot begin


class Windows:
    """The collectives of one rank, each a row of windows. window: bytes of a slot that are used"""

    def __init__(self, peers: Peers, window: int):
        self._peers, self._window = peers, window

    def perform(self, call: Call) -> int:
        """Make one call. Returns why it failed, or FINE."""
        with self._peers.breaking_when_interrupted():
            return self._perform(call)

    def _perform(self, call: Call) -> int:
        lanes = self._peers.ranks if call.kind in (REDUCE_SCATTER, SCATTER, ALL_TO_ALL) else 1   # one for each rank, or the same for all
        deadline, lane = time.monotonic() + call.timeout, max(LANE, self._window // lanes // LANE * LANE)
        why, begin, longest = self._peers.why(), 0, 0
        while not why and (begin == 0 or begin < longest):
            turn = (self._peers.meetings + 1) % 2
            window = slice(begin, begin + lane)
            if begin == 0:
                self._announce(call, turn)
            self._stage(call, turn, window)
            why = self._peers.meet(deadline)
            if begin == 0 and not why:
                why = self._compare(turn)
                longest = self._peers.memory.said[turn, :, 5].max()
            if not why:
                self._take(call, turn, window, self._peers.rank * lane if lanes > 1 else 0)
            begin += lane
        return why

    def _announce(self, call: Call, turn: int) -> None:
        """Tell the others what this rank is about to do, for the next meeting."""
        memory, rank, p = self._peers.memory, self._peers.rank, self._peers.ranks
        memory.said[turn, rank] = *call.said, max((x.size for x in call.inputs), default=0)
        lengths = call.lengths(p) or [-1] * 2 * p   # none: all are as the call says
        memory.sends[turn, rank], memory.wants[turn, rank] = lengths[:p], lengths[p:]

    def _compare(self, turn: int) -> int:
        """Do all make the same call, and does each send what its receivers expect? Every rank looks at all, so all find the same."""
        memory = self._peers.memory
        said, wants = memory.said[turn], memory.wants[turn]
        columns = 4 if said[0, 0] in OWN_LENGTHS else 5
        differs = (said[:, :columns] != said[0, :columns]).any(axis=1)
        if differs.any():
            return self._peers.break_group(int(differs.argmax()), MISMATCHED)
        wrong = (wants >= 0) & (wants != memory.sends[turn].T)   # [to, from]
        return self._peers.break_group(int(wrong.any(axis=0).argmax()), WRONG_LENGTH) if wrong.any() else FINE

    def _stage(self, call: Call, turn: int, window: slice) -> None:
        slot, lane = self._peers.memory.slots[turn, self._peers.rank], window.stop - window.start
        for number, x in enumerate(call.inputs):
            piece = x[window]
            slot[number * lane:number * lane + piece.size] = piece

    def _take(self, call: Call, turn: int, window: slice, begin: int) -> None:
        """What is for this rank begins at byte `begin` of each slot."""
        slots, reduces = self._peers.memory.slots[turn], call.kind in (ALL_REDUCE, REDUCE, REDUCE_SCATTER)
        targets = [out[window] for out in call.outputs]
        if reduces and targets:
            targets[0][:] = combine(call.said[1], call.op, [slot[begin:begin + targets[0].size] for slot in slots])
        elif not reduces:
            first = call.root if call.kind in (BROADCAST, SCATTER) else 0
            for slot, out in zip(slots[first:], targets):
                out[:] = slot[begin:begin + out.size]


# ------------------------------------------------------------------ arithmetic


def combine(number: int, op: int, pieces: Sequence[np.ndarray]) -> np.ndarray:
    """The bytes of pieces[0] op pieces[1] op ... in this order, 16-bit floats in fp32 with one rounding at the end."""
    with np.errstate(all="ignore"):
        total = reduce(JOIN[op], [_widen(number, piece) for piece in pieces])
        if op == AVG and total.dtype.kind == "f":
            total = total / total.dtype.type(len(pieces))
        return _narrow(number, total).view(np.uint8)


def _less(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where((a < b) | (a != a), a, b)   # NaN wins


def _greater(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where((a > b) | (a != a), a, b)


JOIN: dict[int, Callable[[Any, Any], Any]] = {
    SUM: np.add, AVG: np.add, PRODUCT: np.multiply, MIN: _less, MAX: _greater,
    BAND: np.bitwise_and, BOR: np.bitwise_or, BXOR: np.bitwise_xor}


def _widen(number: int, piece: np.ndarray) -> np.ndarray:
    if number == BF16:   # the upper half of the same number in fp32
        return (piece.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    x = piece.view(DTYPES[number])
    return x.astype(np.float32) if x.dtype == np.float16 else x


def _narrow(number: int, x: np.ndarray) -> np.ndarray:
    if number == BF16:   # to nearest, ties to even; NaN stays one
        bits = x.view(np.uint32)
        return np.where(np.isnan(x), 0x7FC0, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return x.astype(DTYPES[number], copy=False)


# ------------------------------------------------------------------ what callers see


Method = TypeVar("Method", bound=Callable[..., Any])


def unless_forked(otherwise: int | None, *, waits: bool = False) -> Callable[[Method], Method]:
    """A method of a link that does nothing in a forked child, and returns `otherwise` there.

    waits: for other ranks; so when it ends in an exception, their waits end too
    """
    def guard(method: Method) -> Method:
        @wraps(method)
        def call(link: "Link", *arguments: Any) -> Any:
            if link._peers.is_forked():
                return otherwise
            with link._peers.breaking_when_interrupted() if waits else nullcontext():
                return method(link, *arguments)

        return call   # type: ignore[return-value]

    return guard


class Link:
    """One rank's end of a group in shared memory, with the methods of _shared.Link. Reasons (`why`) are numbers; 0: none."""

    def __init__(self, address: int, rank: int, ranks: int, spin_us: int, yields: int, window: int):
        self._peers = Peers(address, rank, ranks, max(spin_us, yields))
        self._turns: Turns[Call] = Turns(Windows(self._peers, min(window, SLOT)).perform)
        self._post = Post(self._peers)

    @unless_forked(FORKED, waits=True)   # also while it waits for its turn: nobody may make it later
    def run(self, *call: Any) -> int:
        """A collective, now: kind, number, op, root, source, target, lengths, timeout -> why."""
        return self._turns.run(self._read(*call))

    @unless_forked(0)
    def submit(self, *call: Any) -> int:
        """A collective in its turn, in the background: the same -> ticket."""
        return self._turns.submit(self._read(*call))

    @unless_forked(FORKED, waits=True)
    def wait(self, ticket: int, seconds: float) -> int:
        """Until a ticket's collective has ended -> why. TIMED_OUT leaves the group whole: it may still end."""
        return self._turns.wait(ticket, seconds)

    def finished(self) -> int:
        """The last ticket that has ended."""
        return self._turns.finished

    @unless_forked(-FORKED, waits=True)
    def message(self, sending: int, address: int, nbytes: int, peer: int, tag: int, timeout: float) -> int:
        """Send or receive, now -> from whom, or -why. peer -1: from anyone."""
        return self._post.message(sending, address, nbytes, peer, tag, timeout)

    def exchange(self, *both: Any) -> int:
        """Send one message while receiving another -> why, or 0. (address, nbytes, to, address, nbytes, from, tag, timeout)"""
        out, out_bytes, to, into, in_bytes, frm, tag, timeout = both
        handle = self.post(0, into, in_bytes, frm, tag)
        try:
            sent = self.message(1, out, out_bytes, to, tag, timeout)
            got = self.settle(handle, timeout) if sent >= 0 else sent
            if got == -TIMED_OUT:   # a receive in the background would go on
                self.break_off(frm, TIMED_OUT)
        finally:
            self.drop(handle)
        return -min(got, 0)

    @unless_forked(0)
    def post(self, sending: int, address: int, nbytes: int, peer: int, tag: int) -> int:
        """Send or receive in the background -> handle; 0 in a forked child. The memory must stay until it has settled."""
        return self._post.post(sending, address, nbytes, peer, tag)

    @unless_forked(-FORKED, waits=True)
    def settle(self, handle: int, seconds: float) -> int:
        """Until a posted message has arrived -> from whom, or -why. -TIMED_OUT leaves the group whole."""
        return self._post.settle(handle, seconds)

    def settled(self, handle: int) -> bool:
        """Whether a posted message has arrived, or never will."""
        return self._post.posted[handle].done or self._peers.why() != FINE

    def drop(self, handle: int) -> None:
        """Nobody will ask for it again; a message on its way goes on."""
        self._post.posted.pop(handle, None)

    def add_region(self, region: int, address: int, stride: int) -> None:
        """Memory that all ranks map. Here inputs are always staged, wherever they lie."""

    def drop_region(self, region: int) -> bool:
        """See `add_region`. Whether it is forgotten."""
        return True

    @unless_forked(None)
    def break_off(self, rank: int, why: int) -> None:
        """End every wait of every rank."""
        self._peers.break_group(rank, why)

    @unless_forked(None)
    def leave(self) -> None:
        """No call will follow from this rank; whoever waits for it learns so. Ends its threads."""
        if not self._peers.closing:
            self._peers.closing = True
            self._peers.memory.left[self._peers.rank] = 1
            self._turns.close()
            self._post.end()

    def __del__(self) -> None:
        if hasattr(self, "_post"):
            self.leave()

    def status(self) -> tuple[int, int, list[int], list[str]]:
        """Why the group is broken, the rank to blame or -1, the meetings each rank came to, the state letter of its process."""
        return *self._peers.verdict(), self._peers.memory.arrived.tolist(), [self._peers.letter(r) for r in range(self._peers.ranks)]

    def calls(self) -> list[tuple[int, ...]]:
        """What each rank said at its last meeting: kind, number, op, root, bytes."""
        memory = self._peers.memory
        return [tuple(memory.said[met % 2, rank, :5].tolist()) for rank, met in enumerate(memory.arrived.tolist())]

    def _read(self, kind: int, number: int, op: int, root: int, *where: Any) -> Call:
        source, target, lengths, timeout = where
        said = kind, number, op, root
        call = read_call(self._peers.rank, self._peers.ranks, said, source, target, lengths, timeout=timeout)
        return call if isinstance(lengths, bytes) else replace(call, said=(*said, lengths))   # to be told of, as in C
