"""Messages over NCCL, which is pretended: as with it, the first call over a connection blocks until both ends call, and its end too."""

import contextlib
import datetime
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from patience import AT_ONCE
from rankloom.base.errors import CollectiveTimeout, ConfigError, RankLost
from rankloom.world.transport import nccl
from rankloom.world.transport.nccl import Later, Nccl

CPU = torch.device("cpu")


class Arrival:
    """A receive, or a send, which has nothing left to do."""

    def __init__(self, bring=lambda: None):
        self._bring = bring

    def wait(self, timeout=None):
        self._bring()
        return True

    def is_completed(self):
        return True


class Connection:
    """A process group of NCCL's. Bytes travel in the store, numbered in the order of the calls, whatever their direction."""

    def __init__(self, store, rank, size, timeout):
        self.store, self.rank, self.others, self.calls = store, rank, [f"came {other}" for other in range(size)], 0

    def _call(self):
        if not self.calls:
            self._meet(self.others)
        self.calls += 1
        return str(self.calls)

    def _meet(self, keys):
        self.store.set(keys[self.rank], "")
        self.store.wait(keys, datetime.timedelta(seconds=AT_ONCE))

    def send(self, tensors, to, tag):
        self.store.set(self._call(), tensors[0].numpy().tobytes())
        return Arrival()

    def recv(self, tensors, frm, tag):
        number = self._call()
        return Arrival(lambda: tensors[0].copy_(torch.frombuffer(bytearray(self.store.get(number)), dtype=tensors[0].dtype)))

    def allreduce(self, tensors):
        self._call()
        return Arrival()

    def shutdown(self):
        self._meet([f"left, {key}" for key in self.others])


class Stream:
    def __init__(self, device=None, priority=0):
        self.behind = []

    def record_event(self):
        return self

    def wait_event(self, event):
        self.behind.append(event)


@pytest.fixture
def streams(monkeypatch):
    """The stream of the callers, and those of connections."""
    made = SimpleNamespace(caller=Stream(), sides=[])

    def new(device, priority):
        assert priority == nccl.SIDE
        made.sides.append(Stream())
        return made.sides[-1]

    @contextlib.contextmanager
    def entered(stream):
        current.stream = stream
        yield
        current.stream = made.caller

    current = threading.local()
    monkeypatch.setattr(torch.cuda, "Stream", new)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: getattr(current, "stream", made.caller))
    monkeypatch.setattr(nccl, "nccl_group", Connection)
    return made


def on_ranks(size, body, timeout=AT_ONCE):
    """What `body(nccl, rank)` returns on each of so many ranks, which are threads."""
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as threads:
        return [*threads.map(lambda rank: body(Nccl(store, rank, size, timeout, CPU), rank), range(size))]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("receives_first", [True, False])
def test_ranks_in_a_ring_do_not_wait_in_a_circle_for_their_connections_or_their_ends(streams, size, receives_first):
    def body(mine, rank):
        x = torch.zeros(2)
        calls = [lambda: mine.recv([x], (rank - 1) % size), lambda: mine.send([torch.full((2,), float(rank))], (rank + 1) % size)]
        for work in [call() for call in (calls if receives_first else reversed(calls))]:
            work.wait()
        mine.allreduce([x]).wait()
        mine.shutdown()
        return x.tolist()

    assert on_ranks(size, body) == [[float((rank - 1) % size)] * 2 for rank in range(size)]


def test_messages_keep_their_order_before_and_after_there_is_a_connection(streams):
    def body(mine, rank):
        numbers = [torch.full((1,), float(n * (rank == 0))) for n in range(6)]
        call = mine.send if rank == 0 else mine.recv
        early = [call([x], 1 - rank) for x in numbers[:3]]
        early[-1].wait()
        late = [call([x], 1 - rank) for x in numbers[3:]]
        for work in [*early, *late]:
            work.wait()
        return [x.item() for x in numbers], isinstance(late[-1], Later)

    (_, sender_waits), (arrived, receiver_waits) = on_ranks(2, body)
    assert arrived == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert not sender_waits and not receiver_waits, "nothing stands between when the connection is there"


def test_a_message_sets_out_behind_what_its_caller_had_submitted(streams):
    store = dist.HashStore()
    low, high = (Nccl(store, rank, 2, AT_ONCE, CPU) for rank in range(2))
    sent = low.send([torch.zeros(1)], 1)
    high.recv([torch.zeros(1)], 0).wait()
    sent.wait()
    assert [streams.caller] in [side.behind for side in streams.sides]


def test_a_rank_that_does_not_come_is_named_by_every_message_to_it(streams):
    alone = Nccl(dist.HashStore(), 0, 2, 0.2, CPU)
    first = alone.send([torch.zeros(1)], 1)
    assert not first.is_completed()
    with pytest.raises(CollectiveTimeout, match="a message from rank 0 to rank 1 has no connection within 0:00:00.01"):
        first.wait(datetime.timedelta(seconds=0.01))
    for ask in (first.wait, first.get_future, lambda: alone.send([torch.zeros(1)], 1).wait()):
        with pytest.raises(RankLost, match="rank\\(s\\) 1 did not join"):
            ask()
    assert first.is_completed() and isinstance(first.exception(), RankLost)
    alone.shutdown()


def test_a_rank_sends_nothing_to_itself(streams):
    with pytest.raises(ConfigError, match="rank 0: a message to itself"):
        Nccl(dist.HashStore(), 0, 2, AT_ONCE, CPU).send([torch.zeros(1)], 0)
