"""Whom the error of a call that timed out names, by what the link says of the ranks."""

import gc
import multiprocessing
import multiprocessing.util
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rankloom.base.errors import CollectiveTimeout, ConfigError, RankLost
from rankloom.world.transport.channel import KERNELS, ROOM, Channel, at_its_end, table_of_calls
from rankloom.world.transport.codes import ALL_GATHER, ALL_REDUCE, ANYONE, AVG, BARRIER, BROADCAST, REDUCE, SUM, TIMED_OUT
from rankloom.world.transport.operands import BYTES, NUMBERS


def told(rank: int, *, blamed: int = -1, arrived: list[int] | None = None, states: str = "SSSS", peers: tuple[int, ...] = ()) -> str:
    """What rank `rank` of four is told, behind the time-out; their numbers in the world are 10 to 13."""
    channel = Channel.__new__(Channel)
    channel.rank, channel.size, channel.ranks, channel.timeout, channel.name = rank, 4, (10, 11, 12, 13), 1.0, "world"
    status = TIMED_OUT, blamed, arrived or [1] * 4, list(states)
    channel.link = SimpleNamespace(status=lambda: status)
    text = str(channel.explain(TIMED_OUT, "call", peers=peers)).partition("timeout of 1 s: ")[2]
    return text.replace("slow, or it skipped this call", "slow")


def test_a_host_with_more_ranks_than_shared_memory_has_room_for_is_told_what_carries_them():
    with pytest.raises(ConfigError, match='rank 7: 257 ranks share a host, expected 256 at most in shared memory: use the backend "gloo"'):
        Channel(dist.HashStore(), 7, 257, timeout=1.0, name="world")


@pytest.mark.skipif("C" not in KERNELS, reason="no compiler when this was installed")
def test_the_kernel_has_room_for_as_many_ranks_as_are_let_in():
    assert KERNELS["C"].segment_size(ROOM)
    with pytest.raises(ValueError, match="the number of ranks on one host is 257"):
        KERNELS["C"].segment_size(ROOM + 1)


@pytest.mark.parametrize(("rank", "status", "text"), [
    (0, {"blamed": 1, "arrived": [5, 4, 5, 4]}, "rank 11 (slow), rank 13 (slow) did not come"),
    (0, {"blamed": 1, "arrived": [5, 4, 5, 4], "states": "SSST"}, "rank 13 (stopped by a signal) did not come"),
    (1, {"blamed": 1, "arrived": [5, 4, 5, 4], "states": "SST?"},
     "rank 12 (stopped by a signal), rank 13 (it does not answer) did not come"),
    (0, {"blamed": 1, "arrived": [5, 4, 5, 5], "states": "TSSS"}, "rank 11 (slow) did not come"),   # itself was stopped, and goes on
    (1, {"blamed": 1, "arrived": [5, 4, 5, 5]}, "this rank is the one that was waited for"),
    (0, {"blamed": -1}, "a rank did not come"),
    (0, {"blamed": 1, "peers": (1,)}, "rank 11 (slow) did not come"),
    (1, {"blamed": 1, "peers": (2,)}, "rank 12 (slow) did not come"),   # rank 0 gave up first, on this one
    (0, {"blamed": 2, "peers": (1, 2)}, "rank 12 (slow) did not come"),   # of the two ends of an exchange
    (0, {"blamed": 1, "peers": (1,), "states": "SSTS"}, "rank 12 (stopped by a signal) did not come"),
    (0, {"blamed": 1, "peers": (1,), "states": "SSLS"}, "rank 11 (slow) did not come"),   # who has left may have had nothing more to do
    (0, {"blamed": 1, "peers": (1,), "states": "SLSS"}, "rank 11 (it has left the group) did not come"),
    (2, {"peers": (2,)}, "this rank is the one that was waited for"),
    (0, {"blamed": 4, "peers": (ANYONE,), "states": "SSXS"},
     "rank 10 waited for a message of anyone, and none came from rank 12 (its process has ended)"),
    (0, {"blamed": 1, "peers": (ANYONE,)},
     "rank 10 waited for a message of anyone, and none came from rank 11 (slow), rank 12 (slow), rank 13 (slow)"),
])
def test_a_time_out_names_those_that_cannot_come_else_those_that_have_not_and_never_its_own_rank(rank, status, text):
    assert told(rank, **status) == text


def test_what_a_step_raises_on_one_rank_is_raised_on_all_also_where_it_is_more_special_than_what_is_expected():
    channel = Channel.__new__(Channel)
    channel.rank, channel.ranks, channel.name, channel.gather_json = 0, (10,), "world", lambda problem: [problem]

    def time_out():
        raise CollectiveTimeout("too late")

    with pytest.raises(RankLost, match="rank 10: buffer in group 'world', said rank 10: too late"):
        channel.do_together(time_out)


def test_calls_that_differ_are_told_by_what_their_kind_has_and_with_numbers_of_the_world():
    """A barrier had a sum and lengths, a sum had a root, no elements were "lengths of its own", and roots were counted in the group."""
    floats, doubles = NUMBERS[torch.float32], NUMBERS[torch.float64]
    calls = [(BROADCAST, floats, SUM, 1, 12), (REDUCE, doubles, AVG, 2, 16), (ALL_REDUCE, floats, SUM, 0, 0), (BARRIER, BYTES, SUM, 0, 0),
             (ALL_GATHER, floats, SUM, 0, 0), (ALL_GATHER, floats, SUM, 0, 8), None]
    assert table_of_calls(range(10, 17), calls).splitlines() == [
        "  rank 10: broadcast(root rank 11), 12 bytes of float32",
        "  rank 11: reduce(avg, root rank 12), 16 bytes of float64",
        "  rank 12: all_reduce(sum), 0 bytes of float32",
        "  rank 13: barrier",
        "  rank 14: all_gather, lengths of its own of float32",
        "  rank 15: all_gather, 8 bytes of float32",
        "  rank 16: has not come to this call",
    ]


class Owner:
    """Something that can be referred to weakly."""


def _open_until_the_end(pipe):
    global _held
    _held = Owner()
    at_its_end(_held, lambda: pipe.send("left"))


def test_a_child_of_multiprocessing_that_just_returns_has_left_and_is_not_lost():
    """It runs nothing that was registered with `atexit`."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_open_until_the_end, args=(theirs,))
    process.start()
    process.join()
    assert process.exitcode == 0 and ours.poll(0) and ours.recv() == "left"
    theirs.close()
    ours.close()


def test_an_owner_that_is_collected_has_left_once_and_nothing_of_it_stays_until_the_end_of_the_process():
    """multiprocessing kept an entry for each group that a process had ever made."""
    known, told = len(multiprocessing.util._finalizer_registry), []
    owner = Owner()
    at_its_end(owner, lambda: told.append("left"))
    assert len(multiprocessing.util._finalizer_registry) == known + 1 and not told
    del owner
    gc.collect()
    assert len(multiprocessing.util._finalizer_registry) == known and told == ["left"]
