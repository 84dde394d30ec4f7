"""The first call of a group over NCCL, which is pretended, over gloo: as NCCL does, it connects a whole group in the group's first
collective or exchange, and blocks each rank in it until all have come.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import rankloom as rl
from patience import AT_ONCE
from rankloom.base.errors import CollectiveTimeout, DeviceError
from rankloom.world import connect
from rankloom.world.pairwise import start_both

CPU = torch.device("cpu")


class Lazy(dist.ProcessGroup):
    """Gloo, with the connections of NCCL. Stores of its own keep their meetings apart from everything else."""

    def __init__(self, gloo: dist.ProcessGroup, meeting: dist.ProcessGroup, rank: int, size: int):
        super().__init__(rank, size)
        self.gloo, self.meeting, self.works = gloo, meeting, []

    _device_types = (CPU,)

    def _get_backend(self, device):
        return SimpleNamespace(name=lambda: "nccl")

    def _connect_all(self):
        if self.meeting is not None:
            self.meeting.barrier().wait()
            self.meeting = None

    def allreduce(self, tensors, options):
        self._connect_all()
        return self.gloo.allreduce(tensors, options)

    def send(self, tensors, to, tag):
        self.works.append(self.gloo.send(tensors, to, tag))

    def recv(self, tensors, frm, tag):
        self.works.append(self.gloo.recv(tensors, frm, tag))

    def _start_coalescing(self, device):
        self._connect_all()

    def _end_coalescing(self, device):
        works, self.works = self.works, []
        return SimpleNamespace(wait=lambda: [work.wait() for work in works])


@pytest.fixture
def made(monkeypatch):
    """The names of the stores of groups that are connected as by NCCL."""
    plain, names = connect.connect, []

    def lazily(store, rank, size, device, *, timeout, **how):
        gloo, meeting = (plain(dist.PrefixStore(name, store), rank, size, device, timeout=seconds, **how)
                         for name, seconds in (("all", timeout), ("meeting", AT_ONCE)))
        names.append(size)
        return Lazy(gloo, meeting, rank, size)

    monkeypatch.setattr(connect, "connect", lazily)
    return names


def exchange_in_pairs(group) -> float:
    """The first two ranks of a group exchange a number, the others nothing."""
    x, into, other = torch.full((1,), float(group.rank)), torch.full((1,), -1.0), 1 - group.rank
    if group.rank < 2:
        for work in start_both(group._process_group, x, into, other, other):
            work.wait()
    return into.item()


@pytest.mark.parametrize("p", [3, 5])
def test_some_ranks_may_exchange_before_all_have_made_a_call(made, p):
    assert rl.simulate(p, exchange_in_pairs, backend="gloo") == [1.0, 0.0] + [-1.0] * (p - 2)


def test_so_they_may_in_the_group_of_an_axis(made):
    def body(world):
        return exchange_in_pairs(world.group("shard"))

    assert rl.simulate(rl.Mesh(replicate=2, shard=3), body, backend="gloo") == [1.0, 0.0, -1.0] * 2
    assert sorted(made) == [3] * 6 + [6] * 6


def test_a_second_connection_of_messages_only_is_not_connected_as_a_whole(made):
    def body(world):
        return world._process_group.meeting is None, world.twin()._process_group.meeting is None

    assert rl.simulate(2, body, backend="gloo") == [(True, False)] * 2


def test_a_group_makes_no_first_call_on_a_device_of_which_it_has_no_backend():
    def body(world):
        group = world._join(world.ranks, world.rank, torch.device("meta"), AT_ONCE, "another")[0]
        world.barrier()   # the other may still be connecting, and what is returned here is the last to hold this end
        return group.size()

    assert rl.simulate(2, body, backend="gloo") == [2, 2]


# ---------------------------------------------------------------- what it says


class Answering:
    """A group whose all-reduce gives a number, or fails with a text."""

    def __init__(self, answer):
        self.answer = answer

    def allreduce(self, tensors, options):
        def wait(limit):
            assert limit.total_seconds() == 3.0
            if isinstance(self.answer, Exception):
                raise self.answer
            tensors[0].fill_(self.answer)
        return SimpleNamespace(wait=wait)


UNREACHED = dist.DistBackendError("NCCL error in: NCCLUtils.cpp:94, unhandled system error\nncclSystemError: System call failed\n"
                                  "Last error:\nsocketStartConnect: Connect to 10.0.0.2 failed\nand\nmuch more")
SILENT = dist.DistBackendError("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1) ran for 3000 milliseconds")


@pytest.mark.parametrize("answer, kind, said", [
    (UNREACHED, rl.RankLost, r"rank 1: NCCL, in the first call of 4 ranks, could not connect all GPUs: .*10\.0\.0\.2 failed\)$"),
    (SILENT, CollectiveTimeout, r"rank 1: NCCL.* did not reach all GPUs within 3 s: a rank is missing, or a link lets nothing pass"),
    (3.0, DeviceError, r"rank 1: NCCL.* added up 4 ones to 3: a GPU or a link")], ids=["unreached", "silent", "wrong"])
def test_a_first_call_that_fails_names_the_rank_and_says_where_to_look(answer, kind, said):
    with pytest.raises(kind, match=said) as raised:
        connect.call_first(Answering(answer), 1, 4, CPU, 3.0)
    assert type(raised.value) is kind


def test_a_first_call_that_succeeds_says_nothing():
    connect.call_first(Answering(4.0), 1, 4, CPU, 3.0)
