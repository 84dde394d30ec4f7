"""Ranks as threads over gloo, whose calls differ: gloo would end the process, and with it this test run."""

import time
from contextlib import nullcontext

import pytest
import torch

import rankloom as rl
from patience import AT_ONCE, no_thread_is_left
from rankloom.world.debug import Fingerprint
from rankloom.world.referee import Referee, Seat


def ones(numel, dtype=torch.float32):
    return torch.ones(numel, dtype=dtype)


DTYPES = (torch.float32, torch.int32)
DIFFERENT_CALLS = {
    "lengths": lambda w: w.all_reduce(ones(4 + w.rank)),
    "dtypes": lambda w: w.all_reduce(ones(4, DTYPES[w.rank % 2])),
    "dtypes of as many bytes": lambda w: w.all_gather(ones(4, DTYPES[w.rank % 2])),
    "ops": lambda w: w.all_reduce(ones(4), ("sum", "max")[w.rank % 2]),
    "kinds": lambda w: w.all_reduce(ones(6)) if w.rank else w.reduce_scatter(ones(6)),
    "roots": lambda w: w.broadcast(ones(4), root=w.rank % 2),
    "asynchronous": lambda w: w.all_reduce(ones(4 + w.rank), async_op=True).wait(),
    "rows": lambda w: w.all_to_all(ones(w.size), send_rows=[1] * w.size, recv_rows=[1 + (w.rank == 1)] + [1] * (w.size - 1)),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("how", DIFFERENT_CALLS)
def test_ranks_that_make_different_calls_are_shown_side_by_side(how, ranks):
    with pytest.raises(rl.CollectiveMismatch, match=rf"(?s)collective number 1 .*  rank \d: .* at {__file__}:\d+\n  rank \d: .*"):
        rl.simulate(ranks, DIFFERENT_CALLS[how], backend="gloo")


@pytest.mark.parametrize("after", [torch.ones(5), torch.ones(4, dtype=torch.int32)], ids=["length", "dtype"])
def test_a_message_that_its_receiver_does_not_expect_is_shown_from_both_ends(after):
    def body(world):
        for x in (torch.ones(4), torch.ones(4)):   # the first two fit, with another tag between them
            world.send(x, 1, tag=3) if world.rank == 0 else world.recv(x, 0, tag=3)
            world.exchange(x, 1 - world.rank, torch.empty(4), 1 - world.rank)
        world.send(after, 1, tag=3) if world.rank == 0 else world.recv(torch.empty(4), 0, tag=3)

    with no_thread_is_left(), pytest.raises(rl.CollectiveMismatch, match=r"(?s)not what its .*:\n  rank 0: send of .*\n  rank 1: recv of"):
        rl.simulate(2, body, backend="gloo", timeout=10 * AT_ONCE)


@pytest.mark.parametrize("x", [lambda rank: torch.ones(7 + rank), lambda rank: ones(7, DTYPES[rank % 2])], ids=["lengths", "dtypes"])
def test_algorithms_made_of_messages_are_compared_too(x):
    with pytest.raises(rl.CollectiveMismatch, match="a message is not what its receiver expects"):
        rl.simulate(3, lambda w: rl.ring_all_reduce(x(w.rank), w), backend="gloo")


def test_groups_and_their_twins_are_compared_each_by_itself():
    def body(world):
        row, column = world.group("replicate"), world.group("shard")
        column.all_reduce(ones(4))
        if world.rank < 2:
            column.twin().all_reduce(ones(3))
        row.all_reduce(ones(5 + world.rank % 2))   # differs between the rows only
        return column.all_reduce(ones(2))[0].item()

    assert rl.simulate(rl.Mesh(replicate=2, shard=2), body, backend="gloo") == [2.0] * 4


def test_a_call_that_some_ranks_label_otherwise_is_the_same_call():
    assert rl.simulate(2, lambda w: w.all_reduce(ones(1), label=f"of {w.rank}").item(), backend="gloo") == [2.0, 2.0]


def test_messages_of_which_both_ends_have_come_are_forgotten_whatever_their_tags():
    def body(world):
        for step in range(5):
            world.send(ones(4), 1, tag=step) if world.rank == 0 else world.recv(ones(4), 0, tag=step)
        world.barrier()
        return len(world._inspector._referee.messages)

    assert rl.simulate(2, body, backend="gloo") == [0, 0]


def test_collectives_that_all_ranks_have_made_are_forgotten():
    def body(world):
        for _ in range(5):
            world.barrier()
        return len(world._inspector._referee.calls)

    assert rl.simulate(2, body, backend="gloo") == [0, 0]


@pytest.mark.parametrize("closed", [True, False])
def test_a_rank_may_return_when_the_one_that_waited_for_it_has_closed_the_group(closed):
    """That one has an error of its own, which is the one to be told."""
    referee = Referee()
    returns, waits = (Seat(referee, rank, range(2)) for rank in range(2))
    waits.checked(Fingerprint("barrier", "[1]", "float32", "", "here"), lambda pg: None, False)
    if closed:
        waits.close()
    with nullcontext() if closed else pytest.raises(rl.CollectiveMismatch, match="rank 0: has returned from its body"):
        returns.leave()


@pytest.mark.parametrize("returns_first", [True, False])
def test_a_rank_may_return_before_a_message_that_another_expects_but_does_not_wait_for(returns_first):
    """Such as a word to stop, for which a rank listens all the time."""
    def body(world):
        if (world.rank == 0) == returns_first:
            time.sleep(0.1)
        if world.rank == 0:
            listening = world.recv(torch.zeros(1), 1, tag=9, async_op=True)
            time.sleep(0.3)
            del listening

    rl.simulate(2, body, backend="gloo")


@pytest.mark.parametrize("returns_first", [True, False])
@pytest.mark.parametrize("waits", [True, False], ids=["blocking", "waited for later"])
def test_a_rank_that_sends_to_one_whose_body_has_returned_is_told_at_once(waits, returns_first):
    def body(world):
        if (world.rank == 0) == returns_first:
            time.sleep(0.1)
        if world.rank == 0:
            sent = world.send(torch.ones(4), 1, async_op=not waits)
            waits or sent.wait()

    began = time.monotonic()
    with pytest.raises(rl.CollectiveMismatch, match=r"one end only:\n  rank 0: send of float32\[4\] .*\n  rank 1: has returned from"):
        rl.simulate(2, body, backend="gloo", timeout=7)
    assert time.monotonic() - began < 5, "it waited for the time-out"
