"""Debug mode: both ends of a message say what they send or expect, before it moves.

gloo ends the process when a message is longer than what it is received in, and takes one of another dtype as it is. So each end writes
its call to the group's store, under the number of the message, and then looks for that of the other end. Whichever of them comes later
finds a difference before it starts; a receiver looks once more when it waits.

Cost: a write and two reads of the store at each end.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from rankloom.base.errors import CollectiveMismatch

T = TypeVar("T")
Way = tuple[int, int, int]
"""Sender, receiver, tag."""


class Compares(Protocol):
    """What must be known of the inspector of a group (world/debug.py)."""

    rank: int
    ranks: Any
    store: dist.Store

    def ask(self, question: Callable[[], T], seconds: float | None = None) -> T:
        """What a question to the store gives, or raises. raises: CollectiveTimeout, RankLost"""

    def wait_for(self, keys: Mapping[int, str], what: str) -> None:
        """Wait until these ranks have written their keys. raises: CollectiveTimeout, RankLost"""


class Messages:
    """The messages of one rank in one group, numbered for each sender, receiver and tag."""

    def __init__(self, inspector: Compares):
        self._inspector = inspector
        self._counts: Counter[tuple[str, Way]] = Counter()   # by "send" and "recv": a rank may send to itself
        self._read: defaultdict[Way, list[tuple[int, str]]] = defaultdict(list)

    def announce(self, op: str, x: Tensor, peer: int, tag: int, site: str) -> "list[Announced]":
        """Say that this rank starts to `send` or to `recv` x. Returns what a receiver has to wait for, too.

        raises: CollectiveMismatch when the other end is known to expect, or to send, something else
        """
        me, sends = self._inspector.rank, op == "send"
        way = (me, peer, tag) if sends else (peer, me, tag)
        self._counts[op, way] += 1
        announced = Announced(self._inspector, peer, way, self._counts[op, way], self._read[way],
                              {"op": op, "numel": x.numel(), "dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape),
                               "site": site})
        self._inspector.ask(announced.begin)
        return [] if sends else [announced]


class Announced:
    """A message that this rank has announced. To wait for it is to compare it with what its other end says.

    number: of the message on its way
    read:   numbers and keys of this rank's end of earlier messages, which the sender may still be reading
    """

    def __init__(self, inspector: Compares, peer: int, way: Way, number: int, read: list[tuple[int, str]], mine: dict[str, Any]):
        self._inspector, self._peer, self._number, self._read, self._mine = inspector, peer, number, read, mine
        sender, receiver, tag = way
        key, ranks = f"message/{sender}/{receiver}/{tag}/{number}", inspector.ranks
        self._key, self._theirs = key + f"/{mine['op']}", key + f"/{'recv' if mine['op'] == 'send' else 'send'}"
        self._what = f"message number {number} from rank {ranks[sender]} to rank {ranks[receiver]} with tag {tag}"

    def begin(self) -> None:
        """Tell the other end, and compare if it has come."""
        self._inspector.store.set(self._key, json.dumps(self._mine))
        if self._inspector.store.check([self._theirs]):
            self._compare()

    def wait(self) -> None:
        """Of a receiver. raises: CollectiveMismatch, CollectiveTimeout, RankLost"""
        self._inspector.ask(self._meet)

    def _meet(self) -> None:
        self._inspector.wait_for({self._peer: self._theirs}, self._what)
        self._compare()
        past = [entry for entry in self._read if entry[0] < self._number]   # the sender has announced this one, so it has read those
        for entry in past:
            self._read.remove(entry)
        for key in (self._theirs, *(key for _, key in past)):
            self._inspector.store.delete_key(key)
        self._read.append((self._number, self._key))

    def is_completed(self) -> bool:
        """Whether the other end has told what it does."""
        return self._inspector.ask(lambda: self._inspector.store.check([self._theirs]))

    def _compare(self) -> None:
        theirs = json.loads(self._inspector.store.get(self._theirs))
        if all(theirs[what] == self._mine[what] for what in ("numel", "dtype")):
            return
        me, peer = (self._inspector.ranks[rank] for rank in (self._inspector.rank, self._peer))
        calls = "\n".join(f"  rank {rank}: {call['op']} of {call['dtype']}{call['shape']} at {call['site']}"
                          for rank, call in ((me, self._mine), (peer, theirs)))
        raise CollectiveMismatch(f"rank {me}: {self._what} is not what its receiver expects:\n{calls}\n"
                                 "Give `recv` a tensor of the same dtype, with as many elements.")
