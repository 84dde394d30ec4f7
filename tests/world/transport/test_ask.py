"""A store that takes questions and says nothing, as one whose process is stopped: nobody waits for it without end."""

import _thread
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import rankloom as rl
from no_threads import no_thread_starts
from patience import AT_ONCE, STARTED
from rankloom.world.cluster import find_topology
from rankloom.world.debug import Fingerprint, Inspector
from rankloom.world.transport import ask
from rankloom.world.transport.meet import start_afresh, wait_for
from rankloom.world.transport.memory import map_together
from rankloom.world.transport.nccl import Lane
from rankloom.world.transport.router import DeviceRouter

KERNELS = {"C": SimpleNamespace(segment_size=lambda size: 4096)}


class Stopped(dist.Store):
    """A store that hears and does not answer."""

    def __init__(self):
        super().__init__()
        self.goes_on = threading.Event()

    def wait(self, *_):
        self.goes_on.wait()

    get = set = check = multi_get = add = wait


class Ended:
    """A store whose process ends while a rank waits."""

    def wait(self, *_):
        time.sleep(0.3)
        self.check()

    def check(self, *_):
        raise dist.DistNetworkError("connection was reset")


@pytest.fixture
def stopped(monkeypatch):
    monkeypatch.setattr(ask, "SLACK", 0.2)
    store = Stopped()
    yield store
    store.goes_on.set()


def test_an_answer_and_an_error_come_back():
    assert ask.ask(lambda: 3, 1.0) == 3
    with pytest.raises(KeyError, match="no"):
        ask.ask(lambda: {}["no"], 1.0)


@pytest.mark.parametrize("meet", [
    lambda store: wait_for(store, {"a": 0}, 1, 5.0),
    lambda store: start_afresh(store, 1, 2, 5.0),
    lambda store: map_together(store, 1, 2, KERNELS, 5.0),
    lambda store: Inspector(store, 0, [1, 0], timeout=5.0).announce("send", torch.zeros(3), 1, 7),
], ids=["wait", "start", "memory", "debug mode"])
def test_where_no_thread_starts_to_ask_no_rank_and_no_store_is_blamed(meet):
    with no_thread_starts(), pytest.raises(rl.ConfigError, match=r"^rank 1: .*this host starts no more threads .*start new.*\(ulimit -u\)"):
        meet(dist.HashStore())


def test_ranks_that_meet_do_not_wait_for_a_stopped_store(stopped):
    begin = time.monotonic()
    with pytest.raises(rl.RankLost, match=r"rank 1: the store of the job does not answer: .* is stopped, or its host is cut off"):
        wait_for(stopped, {"a": 0}, 1, 0.3)
    assert time.monotonic() - begin < AT_ONCE


@pytest.mark.parametrize("first", [
    lambda store: start_afresh(store, 0, 2, 0.3),
    lambda store: map_together(store, 0, 2, KERNELS, 0.3),
    lambda store: Lane._meet(SimpleNamespace(_ends=(0, 1), _rank=0, _store=store, _timeout=0.3)),
    lambda store: in_front_of(store)._choose(SimpleNamespace(index=0), (0, 1)),
], ids=["start", "memory", "nccl", "gpus"])
def test_the_first_rank_does_not_wait_for_a_stopped_store_either(stopped, first, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="uuid"))
    begin, descriptors = time.monotonic(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(rl.RankLost, match=r"rank 0: the store of the job does not answer"):
        first(stopped)
    assert time.monotonic() - begin < AT_ONCE and len(os.listdir("/proc/self/fd")) == descriptors


def test_memory_is_asked_for_once_in_a_stopped_store(stopped):
    begin = time.monotonic()
    with pytest.raises(rl.RankLost, match="does not answer"):
        map_together(stopped, 0, 2, KERNELS, 2.0)
    assert time.monotonic() - begin < 4.0   # seconds; 2.0 and twice a little


def test_a_start_that_was_interrupted_does_not_answer_the_ranks_of_the_next():
    """As by Ctrl-C in a notebook: of what rank 0 has asked the store, no more than one look goes on in a thread."""
    store = dist.HashStore()
    threading.Timer(0.2, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        start_afresh(store, 0, 2, STARTED)
    for start in range(3):
        with ThreadPoolExecutor(2) as ranks:
            parts = [*ranks.map(lambda rank: start_afresh(store, rank, 2, 3.0), range(2))]
        parts[0].set("here", str(start))
        assert parts[1].check(["here"]) and parts[1].get("here") == str(start).encode()


def in_front_of(store):
    """Rank 0 of two, which has yet to say which GPU it uses."""
    return DeviceRouter(SimpleNamespace(rank=lambda: 0, size=lambda: 2, get_group_store=lambda: store), 0.3)


def test_ranks_that_say_where_they_are_do_not_wait_for_a_stopped_store(stopped):
    with pytest.raises(rl.RankLost, match=r"rank 1: the store of the job does not answer"):
        find_topology(SimpleNamespace(rank=1, size=2, local_size=1, node="b"), stopped, 0.3)


def test_a_store_that_ended_with_what_this_rank_told_is_said_to_have_closed_and_no_rank_is_blamed():
    with pytest.raises(rl.RankLost, match=r"rank 1: the store in which ranks meet closed after 0\.\d s"):
        wait_for(Ended(), {"came/0": 0, "came/1": 1}, 1, 0.3)


def test_debug_mode_does_not_wait_for_a_stopped_store(stopped):
    inspector, call = Inspector(stopped, 0, [4, 5], timeout=0.3), Fingerprint("barrier", "[]", "float32", "", "here")
    for _ in range(2):   # the second fails with the same, at once
        with pytest.raises(rl.CollectiveTimeout, match=r"rank 4: collective number 1 of this group: the store of the job does not answer"):
            inspector.check(call)
    assert inspector.board.where_is_everyone().startswith("  not known. rank 4: ")


@pytest.mark.parametrize("op, text", [("send", "message number 1 from rank 4 to rank 5 with tag 7"),
                                      ("recv", "message number 1 from rank 5 to rank 4 with tag 7")])
def test_a_message_that_cannot_be_announced_is_not_called_a_collective(stopped, op, text):
    inspector = Inspector(stopped, 0, [4, 5], timeout=0.3)
    with pytest.raises(rl.CollectiveTimeout, match=f"rank 4: {text} of this group: the store of the job does not answer"):
        inspector.announce(op, torch.zeros(3), 1, 7)


def test_who_waits_at_the_meeting_point_names_the_rank_that_is_missing_and_not_rank_0_which_waits_too():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        leader, other = (pool.submit(start_afresh, store, rank, 3, seconds) for rank, seconds in ((0, 2.0), (1, 0.5)))
        for waiting in (leader, other):
            with pytest.raises(rl.RankLost, match=r"rank \d: rank\(s\) 2 did not join the group"):
                waiting.result()
