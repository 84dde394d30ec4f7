"""The same as _shared.c in numpy, for hosts where that could not be built, and to read: collectives of ranks that map the same memory.

Each group has one segment of memory, the same bytes in every rank's address space. fallback_peers.py lists its contents,
and has how ranks wait for each other; fallback_messages.py has messages between two ranks. call.py defines a call,
and turns.py runs calls in order.

A collective is a sequence of windows. In each, every rank copies a piece of its input into its slot, all meet, and every rank
copies what is for it from the slots of all; where values are reduced, it combines them in rank order, so that all end
with the same bits. There are two slots, used in turns: a rank that writes one again has met all others since they read it,
so one meeting for each window is enough. At the first meeting each rank also reads which call the others make and how long
their parts are: all ranks find the same fault, or none.

The C kernel does more to save time: it reads inputs in shared regions in place, divides the work of a
large all-reduce, and sleeps until it is woken. Here everything is staged and every rank adds up everything.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce, wraps
from typing import Any, TypeVar

import numpy as np

from rankloom.world.transport.call import DEALT, OWN_LENGTHS, REDUCING, Call
from rankloom.world.transport.codes import AVG, BAND, BOR, BXOR, FINE, FORKED, MAX, MIN, MISMATCHED, PRODUCT, SUM, WRONG_LENGTH, Status
from rankloom.world.transport.fallback_messages import Exchanges, Post
from rankloom.world.transport.fallback_peers import SLOT, Peers, memory_at
from rankloom.world.transport.fallback_peers import segment_size as segment_size
from rankloom.world.transport.turns import Turns

DTYPES = (np.float32, np.float64, np.float16, np.uint16, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
BF16 = 3    # bf16: numpy does not have it, so its bits are handled as uint16
LANE = 64   # bytes: lanes of a slot begin at multiples of it


class Windows:
    """The collectives of one rank, each a sequence of windows. window: bytes of a slot that are used"""

    def __init__(self, peers: Peers, window: int):
        self._peers, self._window = peers, window

    def perform(self, call: Call) -> int:
        """Run one call. Returns why it failed, or FINE."""
        with self._peers.breaking_when_interrupted():
            return self._perform(call)

    def _perform(self, call: Call) -> int:
        lanes = self._peers.ranks if call.kind in DEALT else 1   # one for each rank, or the same for all
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
        memory.said[turn, rank] = *call.descriptor, max((x.size for x in call.inputs), default=0)
        lengths = call.lengths(p)
        memory.sends[turn, rank], memory.wants[turn, rank] = lengths[:p], lengths[p:]

    def _compare(self, turn: int) -> int:
        """Check that all make the same call, and that each sends what its receivers expect. Every rank checks all, so all find the same."""
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
        """Copy what is for this rank, which begins at byte `begin` of each slot."""
        slots, reduces = self._peers.memory.slots[turn], call.kind in REDUCING
        targets = [out[window] for out in call.outputs]
        if reduces and targets:
            targets[0][:] = combine(call.descriptor.number, call.op, [slot[begin:begin + targets[0].size] for slot in slots])
        elif not reduces:
            for source, out in zip(call.sources(len(slots)), targets):
                out[:] = slots[source, begin:begin + out.size]


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
    if number == BF16:   # round to nearest, ties to even; NaN stays NaN
        bits = x.view(np.uint32)
        return np.where(np.isnan(x), 0x7FC0, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return x.astype(DTYPES[number], copy=False)


# ------------------------------------------------------------------ what callers see


Method = TypeVar("Method", bound=Callable[..., Any])


def unless_forked(otherwise: int | None, *, waits: bool = False) -> Callable[[Method], Method]:
    """Decorate a method of a link: in a forked child it does nothing, and returns `otherwise`.

    waits: it waits for other ranks; so if it ends in an exception, their waits end too
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


class Link(Exchanges):
    """One rank's end of a group in shared memory, with the methods of _shared.Link. `why`: a reason from codes.py, 0 for none."""

    def __init__(self, address: int, rank: int, ranks: int, spin_us: int, yields: int, window: int):
        self._peers = Peers(address, rank, ranks, max(spin_us, yields))
        self._turns: Turns[Call] = Turns(Windows(self._peers, min(window, SLOT)).perform)
        self._post = Post(self._peers)

    @unless_forked(FORKED, waits=True)   # also while it waits for its turn: if interrupted, it is never run
    def run(self, *call: Any) -> int:
        """Run a collective now: kind, number, op, root, source, target, lengths, timeout -> why."""
        return self._turns.run(self._read(*call))

    @unless_forked(0)
    def submit(self, *call: Any) -> int:
        """Queue a collective for the background: the same arguments -> ticket."""
        return self._turns.submit(self._read(*call))

    @unless_forked(FORKED, waits=True)
    def wait(self, ticket: int, seconds: float) -> int:
        """Wait until a ticket's collective has ended -> why. TIMED_OUT does not break the group: it may still end."""
        return self._turns.wait(ticket, seconds)

    def finished(self) -> int:
        """The last ticket that has ended."""
        return self._turns.finished

    @unless_forked(-FORKED, waits=True)
    def message(self, sending: int, address: int, size: int, peer: int, tag: int, timeout: float) -> int:
        """Send or receive now -> the other rank, or -why. peer -1: receive from any rank."""
        return self._post.message(sending, address, size, peer, tag, timeout)

    @unless_forked(0)
    def post(self, sending: int, address: int, size: int, peer: int, tag: int) -> int:
        """Start to send or receive in the background -> handle; 0 in a forked child. The memory must stay until it has settled."""
        return self._post.post(sending, address, size, peer, tag)

    @unless_forked(-FORKED, waits=True)
    def settle(self, handle: int, seconds: float) -> int:
        """Wait until a posted message is done -> the other rank, or -why. -TIMED_OUT does not break the group."""
        return self._post.settle(handle, seconds)

    def settled(self, handle: int) -> bool:
        """Whether a posted message is done, or never will be."""
        return self._post.posted[handle].done or self._peers.why() != FINE

    def drop(self, handle: int) -> None:
        """Forget a posted message; if it is in flight, it goes on."""
        self._post.posted.pop(handle, None)

    def add_region(self, region: int, address: int, stride: int) -> None:
        """Add memory that all ranks map. Does nothing here: inputs are always staged, wherever they are."""

    def drop_region(self, region: int) -> bool:
        """See `add_region`. Returns whether it is forgotten."""
        return True

    @unless_forked(None)
    def break_off(self, rank: int, why: int) -> None:
        """Break the group: end every wait of every rank."""
        self._peers.break_group(rank, why)

    @unless_forked(None)
    def leave(self) -> None:
        """Make no more calls on this rank, and tell ranks that wait for it. Ends its threads."""
        if not self._peers.closing:
            self._peers.closing = True
            self._peers.memory.left[self._peers.rank] = 1
            self._turns.close()
            self._post.end()

    def __del__(self) -> None:
        if hasattr(self, "_post"):
            self.leave()

    def status(self) -> Status:
        """See `Status`."""
        letters = [self._peers.letter(rank) for rank in range(self._peers.ranks)]
        return Status(*self._peers.broken(), self._peers.memory.arrived.tolist(), letters)

    def calls(self) -> list[tuple[int, ...]]:
        """The call of each rank at its last meeting: kind, number, op, root, bytes."""
        memory = self._peers.memory
        return [tuple(memory.said[met % 2, rank, :5].tolist()) for rank, met in enumerate(memory.arrived.tolist())]

    def _read(self, *arguments: Any) -> Call:
        call, lengths = Call.read(self._peers.rank, self._peers.ranks, memory_at, arguments), arguments[6]
        if isinstance(lengths, bytes):
            return call
        return replace(call, descriptor=call.descriptor._replace(nbytes=lengths))   # so that others see the length, as in C
