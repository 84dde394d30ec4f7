"""Debug mode: what the ranks of a group tell each other, in the store, about the calls that they make.

Nobody hangs there: a question that gets no answer, and a rank that does not come, end in errors that say who is where.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from rankloom.base.errors import CollectiveTimeout, ConfigError, RankLost
from rankloom.world.transport.ask import ask
from rankloom.world.transport.meet import unset_keys

SHORTEST_NAP, LONGEST_NAP = 1e-4, 2e-2   # seconds between two reads of the store; other threads use it meanwhile
LOOK_AROUND = 0.2                        # seconds between two checks whether the others are still there
T = TypeVar("T")


class Board:
    """A group's part of the store, as one of its ranks sees it.

    rank:  this rank's number in the group
    ranks: the numbers of the group's ranks in the world, for error messages
    gone:  returns the ranks of the group that have ended or left, as far as is known
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: float, gone: Callable[[], Sequence[int]] = tuple):
        self.store, self.rank, self.ranks, self.timeout = store, rank, ranks, timeout
        self._gone, self._closed = gone, False

    @property
    def me(self) -> str:
        """This rank, as error messages name it."""
        return f"rank {self.ranks[self.rank]}"

    def close(self) -> None:
        """Stop waiting: `wait_for` fails. A closed group must not keep the connection, to which `gone` refers."""
        self._closed, self._gone = True, tuple

    def ask(self, question: Callable[[], T], what: str, seconds: float | None = None) -> T:
        """What a question to the store gives, or raises.

        what:    which call it is about, for error messages
        seconds: after which it should have ended by itself; left out, the time-out
        raises:  RankLost when the store is gone; CollectiveTimeout when it does not answer; ConfigError where no thread can be started
        """
        try:
            return ask(question, self.timeout if seconds is None else seconds)
        except ConfigError as error:
            raise ConfigError(f"{self.me}: {what} of this group: {error}") from error
        except TimeoutError as error:
            raise CollectiveTimeout(f"{self.me}: {what} of this group: {error}") from None
        except dist.DistError as error:
            gone = ", ".join(f"rank {self.ranks[rank]}" for rank in self._gone())
            raise RankLost(f"{self.me}: {what} of this group: lost the store of the job, in which ranks compare their calls: the process "
                           f"that keeps it has ended (rank 0, or torchrun's agent): {str(error).splitlines()[0]}"
                           + (f"; {gone} has ended, or has left the group" if gone else "")) from error

    def wait_for(self, keys: Mapping[int, str], what: str, until: str | None = None) -> None:
        """Wait until these ranks have written their keys. Polls: while a thread waits inside the store, no other thread can use it.

        what:   which call, for error messages
        until:  the key that the last of them writes then, to wait for in their place; they tell who is missing
        raises: CollectiveTimeout, RankLost
        """
        begin = looked = time.monotonic()
        nap = SHORTEST_NAP
        awaited = [*keys.values()] if until is None else [until]
        while not self.store.check(awaited):
            now = time.monotonic()
            if self._closed:
                raise RankLost(f"{self.me}: {what} of this group was not made: this rank has closed the group")
            if now > looked + LOOK_AROUND:
                self._expect_alive(keys, what)
                looked = now
            if now > begin + self.timeout:
                raise self._too_late(self._silent(keys), what)
            time.sleep(nap)
            nap = min(1.5 * nap, LONGEST_NAP)

    def tell_last(self, call: str) -> None:
        """Write down the call, or the message, that this rank is about to make."""
        self.store.set(f"last/{self.rank}", call)

    def where_is_everyone(self) -> str:
        """One line per rank: the last call or message it announced."""
        try:
            return self.ask(self._last_calls, "the last call", 0.0)
        except (RankLost, CollectiveTimeout, ConfigError) as error:
            return f"  not known. {error}"

    def _last_calls(self) -> str:
        keys = {rank: f"last/{rank}" for rank in range(len(self.ranks))}
        silent = {*self._silent(keys)}
        came = [rank for rank in keys if rank not in silent]
        told = self.store.multi_get([keys[rank] for rank in came]) if came else ()
        lines = dict.fromkeys(silent, "has made no call yet") | {rank: text.decode() for rank, text in zip(came, told)}
        return "\n".join(f"  rank {name}: {lines[rank]}" for rank, name in enumerate(self.ranks))

    def _expect_alive(self, keys: Mapping[int, str], what: str) -> None:
        if gone := [*self._gone()]:
            for rank in self._silent(keys):   # after `_gone`: a call that a rank announced before it went counts
                if rank in gone:
                    raise RankLost(f"{self.me}: {what} of this group: lost rank {self.ranks[rank]}: it has ended, or has left the group. "
                                   f"Who is where:\n{self.where_is_everyone()}")

    def _too_late(self, silent: Sequence[int], what: str) -> CollectiveTimeout:
        who = ", ".join(f"rank {self.ranks[rank]}" for rank in silent) or "the rank that came last, and has not told what it found,"
        return CollectiveTimeout(f"{self.me}: {who} did not come to {what} within {self.timeout:g} s. "
                                 f"Who is where:\n{self.where_is_everyone()}")

    def _silent(self, keys: Mapping[int, str]) -> list[int]:
        unset = {*unset_keys(self.store, [*keys.values()])}
        return [rank for rank, key in keys.items() if key in unset]
