"""Messages between ranks that share a device, on one in host memory whose queues are threads."""

import datetime
import json
import random
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patience import AT_ONCE
from rankloom.base.errors import CollectiveMismatch, CollectiveTimeout, ConfigError, RankLost, ShapeMismatch
from rankloom.world.transport import parcels
from world.transport.test_rounds import DeviceRanks


@pytest.fixture(scope="module")
def pair():
    made = DeviceRanks(2, timeout=60.0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def trio():
    made = DeviceRanks(3, timeout=60.0)
    yield made
    made.close()


def numbers(rank, n=5):
    return torch.arange(float(n)) + 100 * rank


def test_two_ranks_may_both_receive_before_they_send(pair):
    def body(group, rank):
        work = group.recv([x := torch.zeros(5)], 1 - rank)
        group.send([numbers(rank)], 1 - rank).wait()
        assert work.wait() and work.source_rank() == 1 - rank
        return x.tolist()

    assert pair.each(body) == [numbers(1).tolist(), numbers(0).tolist()]


def test_two_ranks_may_both_send_and_wait_for_that_before_they_receive(pair):
    def body(group, rank):
        group.send([torch.full((3 << 20,), float(rank))], 1 - rank).wait()
        group.recv([x := torch.zeros(3 << 20)], 1 - rank).wait()
        return x.unique().tolist()

    assert pair.each(body) == [[1.0], [0.0]]


def test_messages_find_their_tag_and_keep_their_order_within_one(pair):
    def body(group, rank):
        if rank == 0:
            for tag, value in ((7, 1.0), (3, 2.0), (7, 3.0)):
                group.send([torch.tensor([value])], 1, tag)
            return None
        got = [torch.zeros(1) for _ in range(3)]
        for x, tag in zip(got, (3, 7, 7)):
            group.recv([x], 0, tag).wait()
        return [x.item() for x in got]

    assert pair.each(body)[1] == [2.0, 1.0, 3.0]


def test_a_message_from_anyone_says_who_sent_it(trio):
    def body(group, rank):
        if rank:
            return group.send([numbers(rank)], 0, 4).wait()
        got = {}
        for _ in range(2):
            work = group.recv_anysource([x := torch.zeros(5)], 4)
            work.wait()
            got[work.source_rank()] = x.tolist()
        return got

    assert trio.each(body)[0] == {rank: numbers(rank).tolist() for rank in (1, 2)}


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (33, 31), (3, 500_000)])
def test_messages_of_any_dtype_and_length_arrive_to_the_last_bit(pair, dtype, shape):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (torch.Size(shape).numel() * dtype.itemsize,), generator=generator)
    sent = bits.to(torch.uint8).view(dtype).view(shape)

    def body(group, rank):
        if rank == 0:
            return group.send([sent], 1).wait()
        group.recv([x := torch.zeros(shape, dtype=dtype)], 0).wait()
        return x

    got = pair.each(body)[1]
    assert got.reshape(-1).view(torch.uint8).equal(sent.reshape(-1).view(torch.uint8))


def test_gaps_in_tensors_are_skipped_and_left_alone(pair):
    def body(group, rank):
        if rank == 0:
            return group.send([numbers(0, 12).view(6, 2).t()], 1).wait()
        x = torch.ones(4, 6)
        group.recv([x[::2]], 0).wait()
        return x

    got = pair.each(body)[1]
    assert got[::2].tolist() == numbers(0, 12).view(6, 2).t().tolist() and got[1::2].eq(1).all()


def test_the_memory_of_a_message_serves_the_next_once_it_was_received_and_not_before():
    made = DeviceRanks(2)

    def body(group, rank):
        turns = []
        for turn in range(4):   # each is received before the next is sent
            if rank == 0:
                group.send([torch.full((1000,), float(turn))], 1)
            else:
                group.recv([x := torch.zeros(1000)], 0).wait()
                turns.append(x.unique().item())
            group.barrier().wait()
        one_after_the_other = len(group._parcels._mine)
        for turn in range(5):   # none is received before all are sent
            group.send([torch.full((1000,), float(turn))], 1) if rank == 0 else None
        group.barrier().wait()
        for _ in range(5 * rank):
            group.recv([x := torch.zeros(1000)], 0).wait()
            turns.append(x.unique().item())
        return one_after_the_other, len(group._parcels._mine), turns

    (few, many, _), (_, _, turns) = made.each(body)
    made.close()
    assert turns == [0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0, 4.0]
    assert few < 4 and many == 5


def test_a_message_of_another_length_or_dtype_is_refused_by_its_receiver_and_the_next_one_arrives(pair):
    def body(group, rank):
        if rank == 0:
            group.send([torch.ones(4)], 1).wait()
            group.send([torch.ones(5, dtype=torch.int32)], 1).wait()
            return group.send([torch.full((5,), 2.0)], 1).wait()
        x = torch.zeros(5)
        with pytest.raises(CollectiveMismatch, match="rank 1: recv .*rank 0 sends 16 bytes, but 20 are expected"):
            group.recv([x], 0).wait()
        with pytest.raises(CollectiveMismatch, match="sends 20 bytes, but 20 are expected, or another dtype"):
            group.recv([x], 0).wait()
        assert not x.any()
        group.recv([x], 0).wait()
        return x.tolist()

    assert pair.each(body)[1] == [2.0] * 5


def test_a_receive_has_a_future_that_is_set_when_the_message_has_come(pair):
    def body(group, rank):
        if rank == 0:
            go.wait(AT_ONCE)
            return group.send([numbers(0)], 1).wait()
        future = group.recv([x := torch.zeros(5)], 0).get_future()
        assert not future.done()
        go.set()
        assert future.wait()[0] is x
        return x.tolist()

    go = threading.Event()
    assert pair.each(body)[1] == numbers(0).tolist()


def test_a_message_has_come_only_when_the_device_has_brought_it(pair):
    def body(group, rank):
        if rank == 0:
            group.send([numbers(0)], 1).wait()
            return sent.set()
        group._device.run(lambda: stuck.wait(2 * AT_ONCE))
        work = group.recv([torch.zeros(5)], 0)
        sent.wait(AT_ONCE)
        for _ in range(100):   # its note has come by now
            assert not work.is_completed()
        stuck.set()
        work.wait()
        assert work.is_completed() and work.is_success()
        return None

    sent, stuck = threading.Event(), threading.Event()
    pair.each(body)


def test_a_message_that_does_not_come_in_time_leaves_the_receive_standing(pair):
    def body(group, rank):
        if rank == 0:
            go.wait(AT_ONCE)
            return group.send([numbers(0)], 1).wait()
        work = group.recv([x := torch.zeros(5)], 0)
        with pytest.raises(CollectiveTimeout, match="recv"):
            work.wait(datetime.timedelta(milliseconds=50))
        go.set()
        work.wait()
        return x.tolist()

    go = threading.Event()
    assert pair.each(body)[1] == numbers(0).tolist()


def test_a_rank_that_leaves_is_named_by_those_that_wait_for_its_message():
    made = DeviceRanks(2)

    def body(group, rank):
        if rank == 0:
            return group.shutdown()
        with pytest.raises(RankLost, match="recv .*lost rank 0: it has left"):
            group.recv([torch.zeros(5)], 0).wait()
        return None

    made.each(body)
    made.close()


def test_what_cannot_be_sent_is_refused_by_name(pair):
    group = pair.groups[0]
    with pytest.raises(ConfigError, match="there is no rank 2 in a group of 2"):
        group.send([torch.ones(1)], 2)
    with pytest.raises(ShapeMismatch, match="send"):
        group.send([torch.ones(1, device="meta")], 1)
    with pytest.raises(ShapeMismatch, match="2 tensors given"):
        group.recv([torch.ones(1)] * 2, 1)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2), st.integers(0, 2), st.sampled_from([0, 1, 7, 5000])), max_size=25))
def test_any_messages_in_any_order_arrive_each_with_its_own_values(trio, drawn):
    """drawn: from, how many ranks further to, tag, length. Some ranks send first, some receive first; all wait in any order."""
    messages = [(frm, (frm + step) % 3, tag, n) for frm, step, tag, n in drawn]

    def body(group, rank):
        calls = [(at, end) for end in (rank % 2, 1 - rank % 2) for at, message in enumerate(messages) if message[end] == rank]
        works, got = [], {}
        for at, is_receive in calls:
            frm, to, tag, n = messages[at]
            got |= {at: torch.zeros(n)} if is_receive else {}
            works.append(group.recv([got[at]], frm, tag) if is_receive else group.send([torch.full((n,), float(at))], to, tag))
        random.Random(rank).shuffle(works)
        for work in works:
            work.wait()
        return got

    for rank, got in enumerate(trio.each(body)):
        for at, x in got.items():
            assert messages[at][1] == rank and x.eq(at).all(), messages


def test_notes_fit_whatever_they_say():
    longest = [1 << 40, 1 << 20, 1 << 40, 1 << 40, "f" * 128]   # a handle has 64 bytes
    assert len(json.dumps(longest)) < parcels.NOTE
