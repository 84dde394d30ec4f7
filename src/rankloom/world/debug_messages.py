"""Debug mode: both ends of a message say what they send or expect, before it moves.

gloo ends the process when a message is longer than what it is received in, and takes one of another dtype as it is. So each end writes
its call to the group's store, under the number of the message, and then looks for that of the other end. Whichever of them comes later
finds a difference before it starts; a receiver looks once more when it waits.

Cost: two writes and two reads of the store at each end.
"""

import json
from collections import Counter, defaultdict
from typing import NamedTuple

from torch import Tensor

from rankloom.base.errors import CollectiveMismatch
from rankloom.world.debug_store import Board

Way = tuple[int, int, int]
"""Sender, receiver, tag."""

UNLIKE = "is not what its receiver expects"
ADVICE = "Give `recv` a tensor of the same dtype, with as many elements."


class End(NamedTuple):
    """What one end of a message sends or expects."""

    op: str      # send or recv
    numel: int
    dtype: str
    shape: list[int]
    site: str

    @classmethod
    def of(cls, op: str, x: Tensor, site: str) -> "End":
        """The end at which a call sends or receives `x`."""
        return cls(op, x.numel(), str(x.dtype).removeprefix("torch."), list(x.shape), site)

    def fits(self, other: "End") -> bool:
        """Whether as many elements of the same dtype are sent as are expected."""
        return (self.numel, self.dtype) == (other.numel, other.dtype)

    def __str__(self) -> str:
        return f"{self.op} of {self.dtype}{self.shape} at {self.site}"


class Messages:
    """The messages of one rank in one group, numbered for each sender, receiver and tag."""

    def __init__(self, board: Board):
        self._board = board
        self._counts: Counter[tuple[str, Way]] = Counter()   # by "send" and "recv": a rank may send to itself
        self._read: defaultdict[Way, list[tuple[int, str]]] = defaultdict(list)

    def announce(self, op: str, x: Tensor, peer: int, tag: int, site: str) -> "list[Announced]":
        """Say that this rank starts to `send` or to `recv` x. Returns what a receiver has to wait for, too.

        raises: CollectiveMismatch when the other end is known to expect, or to send, something else
        """
        me, sends = self._board.rank, op == "send"
        way = (me, peer, tag) if sends else (peer, me, tag)
        self._counts[op, way] += 1
        announced = Announced(self._board, peer, way, self._counts[op, way], self._read[way], End.of(op, x, site))
        self._board.ask(announced.begin, announced.what)
        return [] if sends else [announced]


class Announced:
    """A message that this rank has announced. To wait for it is to compare it with what its other end says.

    number: of the message on its way
    read:   numbers and keys of this rank's end of earlier messages, which the sender may still be reading
    """

    def __init__(self, board: Board, peer: int, way: Way, number: int, read: list[tuple[int, str]], mine: End):
        self._board, self._peer, self._number, self._read, self._mine = board, peer, number, read, mine
        sender, receiver, tag = way
        key, ranks = f"message/{sender}/{receiver}/{tag}/{number}", board.ranks
        self._key, self._theirs = key + f"/{mine.op}", key + f"/{'recv' if mine.op == 'send' else 'send'}"
        self.what = f"message number {number} from rank {ranks[sender]} to rank {ranks[receiver]} with tag {tag}"

    def begin(self) -> None:
        """Tell the other end, and compare if it has come. Call it through `Board.ask`."""
        self._board.tell_last(f"{self.what}, {self._mine}")
        self._board.store.set(self._key, json.dumps(self._mine))
        if self._board.store.check([self._theirs]):
            self._compare()

    def wait(self) -> None:
        """Wait until the other end has told, and compare. raises: CollectiveMismatch, CollectiveTimeout, RankLost"""
        self._board.ask(self._meet, self.what)

    def _meet(self) -> None:
        self._board.wait_for({self._peer: self._theirs}, self.what)
        self._compare()
        past = [entry for entry in self._read if entry[0] < self._number]   # the sender has announced this one, so it has read those
        for entry in past:
            self._read.remove(entry)
        for key in (self._theirs, *(key for _, key in past)):
            self._board.store.delete_key(key)
        self._read.append((self._number, self._key))

    def is_completed(self) -> bool:
        """Whether the other end has told what it does."""
        return self._board.ask(lambda: self._board.store.check([self._theirs]), self.what)

    def _compare(self) -> None:
        theirs = End(*json.loads(self._board.store.get(self._theirs)))
        if self._mine.fits(theirs):
            return
        me, peer = (self._board.ranks[rank] for rank in (self._board.rank, self._peer))
        raise CollectiveMismatch(f"rank {me}: {self.what} {UNLIKE}:\n  rank {me}: {self._mine}\n  rank {peer}: {theirs}\n{ADVICE}")
