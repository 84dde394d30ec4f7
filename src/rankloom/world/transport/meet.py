"""How ranks meet in a store: find those of this start, not of an earlier one, and which of them share a host."""

import datetime
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

import torch.distributed as dist

from rankloom.base.errors import ConfigError, RankLost
from rankloom.world.transport.ask import ask

NAP = 0.01   # seconds between two checks of which ranks have come
SECONDS_TO_TELL = 5.0   # how long rank 0 stays to tell those that have yet to come that the ranks do not fit together
LOOK = 0.25   # the longest time between two, where it is also checked which ranks are gone
ALL_CAME = "all came"   # rank 0 says so, or what is wrong
CLOSED = "the rank that serves it, usually 0, has ended, or two ranks were started with the same number"
T = TypeVar("T")


class Reunion(dist.PrefixStore):
    """A part of a store, for ranks that have a group already, and make another: whoever waits in it, or in a part of it, is told who is
    gone. Keep this object while they meet: parts refer to its half in C++ only.

    ranks: those that meet, by their numbers in the world
    gone:  all of which the group that they have knows that they have ended or left
    """

    def __init__(self, prefix: str, store: dist.Store, ranks: Sequence[int], gone: Callable[[], Sequence[int]]):
        super().__init__(prefix, store)
        self._ranks, self._gone = {*ranks}, gone

    def expect_all(self, rank: int) -> None:
        """raises: RankLost if one is gone: none leaves the group that it has before all have made the new one"""
        if gone := sorted(self._ranks.intersection(self._gone())):
            raise RankLost(f"rank {rank}: rank(s) {', '.join(map(str, gone))} ended, or left, before all ranks came to make a group")


@cache
def this_host() -> str:
    """What processes must have in common to share memory: the running kernel, its PID and network namespaces, and the user."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return " ".join([boot, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net"), f"user {os.getuid()}"])


@dataclass(frozen=True)
class Neighbours:
    """The host of every rank of a group, in rank order."""

    hosts: tuple[str, ...]
    rank: int

    def on_host_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that share memory with `rank`, ascending."""
        return tuple(other for other, host in enumerate(self.hosts) if host == self.hosts[rank])

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host; hosts in the order of their first ranks."""
        nodes: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            nodes.setdefault(host, []).append(rank)
        return tuple(map(tuple, nodes.values()))


def name_of(ranks: Sequence[int]) -> str:
    """A name for a group of these ranks, which stands before each of its keys: short, as stores refuse keys above 8 KiB."""
    return hashlib.sha256("-".join(map(str, ranks)).encode()).hexdigest()[:16]


def find_neighbours(store: dist.Store, rank: int, size: int, timeout: float, *, host: str | None = None,
                    ranks: Sequence[int] | None = None) -> Neighbours:
    """Tell the others where this rank is, and read where they are. Arguments and errors: see `hear_all`."""
    return Neighbours(tuple(hear_all(store, "host", rank, size, timeout, host or this_host(), ranks=ranks)), rank)


def hear_all(store: dist.Store, what: str, rank: int, size: int, timeout: float, mine: str, *,
             ranks: Sequence[int] | None = None) -> list[str]:
    """Tell the others `mine`. Returns what each of them tells, in rank order.

    Rank 0 collects it, and the others read that: if each waited for each, the store would hold p^2 waits.
    ranks:  the numbers of the group's ranks in the world, for error messages
    price:  p texts to and from the store for each rank
    raises: RankLost naming the ranks that did not come within `timeout` seconds
    """
    names = ranks or range(size)
    me, keys, everything = names[rank], {f"{what}/{other}": names[other] for other in range(size)}, f"{what}, of all"
    ask_store(lambda: store.set(f"{what}/{rank}", mine), me, timeout)
    if rank:
        wait_for(store, keys, me, timeout, until=everything)
        return json.loads(ask_store(lambda: store.get(everything), me, timeout))   # type: ignore[no-any-return]
    wait_for(store, keys, me, timeout)
    texts = [text.decode() for text in ask_store(lambda: store.multi_get([*keys]), me, timeout)]
    ask_store(lambda: store.set(everything, json.dumps(texts)), me, timeout)
    return texts


def start_afresh(store: dist.Store, rank: int, size: int, timeout: float, *, ranks: Sequence[int] | None = None) -> dist.Store:
    """A part of `store` for the ranks of this start only. The store may hold what others wrote, before a restart or for another group.

    Ranks cannot compare how often they were started: torchrun counts for each node alone. So each writes a new random word, and
    rank 0 answers every word that it finds with the name of the part, until all ranks have come there.
    ranks:  the numbers of the group's ranks in the world, for error messages
    raises: RankLost naming the ranks that did not come within `timeout` seconds; ConfigError if one counts other ranks than rank 0
    """
    names = ranks or range(size)
    if rank == 0:
        return _lead(store, names, timeout)
    word, me = secrets.token_hex(8), names[rank]
    ask_store(lambda: store.set(f"word/{rank}", word), me, timeout)
    wait_for(store, {f"part/{word}": names[0]}, me, timeout)
    part = dist.PrefixStore(ask_store(lambda: store.get(f"part/{word}"), me, timeout).decode(), store)
    ask_store(lambda: part.set(f"came/{rank}", str(size)), me, timeout)
    wait_for(part, {f"came/{other}": names[other] for other in range(1, size)}, me, timeout, until=ALL_CAME)
    if problem := ask_store(lambda: part.get(ALL_CAME), me, timeout).decode():
        raise ConfigError(problem)
    return part


def _lead(store: dist.Store, names: Sequence[int], timeout: float) -> dist.Store:
    """`start_afresh` of rank 0: name the part, and tell all others."""
    name = secrets.token_hex(8)
    part = dist.PrefixStore(name, store)
    missing, answered = list(range(1, len(names))), set[str]()
    problem, deadline = "", time.monotonic() + timeout
    while missing and time.monotonic() < deadline:
        if reunion := _reunion(store):
            reunion.expect_all(names[0])
        # One look at a time: what is asked goes on in a thread if this rank is interrupted, and must not answer the next start's ranks.
        ask_store(partial(_answer, store, name, missing, answered), names[0], timeout)
        missing, found = ask_store(partial(_who_misses, part, missing, names), names[0], timeout)
        if found and not problem:   # those that have yet to come shall be told, not left to wait for this rank
            problem, deadline = found, min(deadline, time.monotonic() + SECONDS_TO_TELL)
        time.sleep(NAP)
    if missing and not problem:
        raise _absent(names[0], [names[rank] for rank in missing], timeout)
    ask_store(lambda: part.set(ALL_CAME, problem), names[0], timeout)
    if problem:
        raise ConfigError(problem)
    return part


def _answer(store: dist.Store, name: str, missing: Sequence[int], answered: set[str]) -> None:
    """Tell the ranks that have written a word the name of the part. answered: the words that were answered; it grows"""
    words = [f"word/{rank}" for rank in missing]
    for word in {store.get(key).decode() for key in {*words} - {*unset_keys(store, words)}} - answered:
        store.set(f"part/{word}", name)
        answered.add(word)


def _who_misses(part: dist.Store, missing: Sequence[int], names: Sequence[int]) -> tuple[list[int], str]:
    """Those that have not come yet, and what is wrong if one that has come counts other ranks than there are `names`."""
    size, keys, problem = len(names), {f"came/{rank}": rank for rank in missing}, ""
    unset = unset_keys(part, [*keys])
    for key in {*keys} - {*unset}:
        if (counts := part.get(key).decode()) != str(size):
            problem = (f"rank {names[keys[key]]} was started as one of {counts} ranks, rank {names[0]} as one of {size}: "
                       "give all the same WORLD_SIZE (torchrun: the same --nnodes and --nproc-per-node)")
    return [keys[key] for key in unset], problem


def wait_for(store: dist.Store, keys: dict[str, int], rank: int, timeout: float, *, until: str | None = None) -> None:
    """Wait until every key is set; `keys` tells which rank sets each.

    until:  the key that one rank sets when it has seen them all, to wait for in their place; they tell who is missing
    raises: RankLost naming those that did not come within `timeout` seconds; or at once, in a `Reunion`, any that is gone; ConfigError
    """
    begin = time.monotonic()
    try:
        ask(lambda: _wait(store, [*keys] if until is None else [until], rank, timeout), timeout)
    except RankLost:   # a RuntimeError, too
        raise
    except ConfigError as error:
        raise ConfigError(f"rank {rank}: {error}") from error
    except TimeoutError as error:
        raise RankLost(f"rank {rank}: {error}") from None
    except RuntimeError as error:
        waited, silent = time.monotonic() - begin, _silent(store, keys)
        if waited < timeout / 2 or rank in silent:   # no time-out; what this rank has told has gone with the store
            raise RankLost(f"rank {rank}: the store in which ranks meet closed after {waited:.1f} s: {CLOSED}") from error
        raise _absent(rank, silent, timeout) from error


def ask_store(question: Callable[[], T], rank: int, timeout: float) -> T:
    """`ask` something that does not wait in the store for another rank. raises: RankLost, ConfigError"""
    try:
        return ask(question, timeout)
    except RankLost:   # a RuntimeError, too
        raise
    except ConfigError as error:
        raise ConfigError(f"rank {rank}: {error}") from error
    except TimeoutError as error:
        raise RankLost(f"rank {rank}: {error}") from None
    except RuntimeError as error:
        raise RankLost(f"rank {rank}: the store in which ranks meet closed: {CLOSED}") from error


def _wait(store: dist.Store, keys: list[str], rank: int, timeout: float) -> None:
    """Wait until the keys are set. In a `Reunion` by looking again and again: torch's wait cannot be ended when a rank is gone, and a
    thread that is still in it when Python ends, and the store too, aborts the process.
    """
    begin, waited, reunion = time.monotonic(), 0.0, _reunion(store)
    while reunion and waited < timeout:
        if store.check(keys):
            return
        reunion.expect_all(rank)
        time.sleep(min(NAP / 10 + waited / 8, LOOK))   # so the last nap, which may be for nothing, is short beside the wait
        waited = time.monotonic() - begin
    store.wait(keys, datetime.timedelta(seconds=max(timeout - waited, NAP)))   # for torch, zero is without end


def _reunion(store: dist.Store) -> Reunion | None:
    while isinstance(store, dist.PrefixStore) and not isinstance(store, Reunion):
        store = store.underlying_store
    return store if isinstance(store, Reunion) else None


def _silent(store: dist.Store, keys: dict[str, int]) -> list[int]:
    """The ranks whose keys are not set: all if the store has ended, none if it does not answer."""
    try:
        return sorted({keys[key] for key in ask(lambda: unset_keys(store, [*keys]), 0)})
    except TimeoutError:
        return []
    except RuntimeError:   # the store has ended, with its host
        return sorted({*keys.values()})


def _absent(rank: int, missing: Sequence[int], timeout: float) -> RankLost:
    return RankLost(f"rank {rank}: rank(s) {', '.join(map(str, missing)) or 'unknown'} did not join the group within {timeout:g} s; "
                    "are all ranks running, and are they given the same store?")


def unset_keys(store: dist.Store, keys: Sequence[str]) -> list[str]:
    """Those of the keys that are not set, in order. Asks about halves: few questions if few are missing.

    raises: RuntimeError if the store has ended: whoever took all keys for unset would wait for ranks that cannot come
    """
    if not keys or store.check([*keys]):
        return []
    half = len(keys) // 2
    return unset_keys(store, keys[:half]) + unset_keys(store, keys[half:]) if half else [*keys]
