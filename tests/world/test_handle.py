"""Handles that are dropped before anyone has waited: what they stand for goes on, as if somebody had."""

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

import rankloom as rl
from patience import wait_until
from rankloom.world.group import Group
from rankloom.world.handle import MOST_DROPPED, Handle, InFlight
from streams import Stream, pretend, queue, stream

MANY = MOST_DROPPED + 10
both_backends = pytest.mark.parametrize("backend", ["gloo", "rankloom"])


@both_backends
def test_messages_whose_handles_are_dropped_arrive(backend):
    def body(world):
        for step in range(MANY):
            if world.rank == 0:
                world.send(torch.full((20_000,), float(step)), 1, async_op=True)
                gc.collect()
            else:
                assert world.recv(torch.zeros(20_000), 0).eq(step).all()
        return world.all_reduce(torch.ones(1)).item()

    assert rl.simulate(2, body, backend=backend, timeout=20) == [2.0, 2.0]


@both_backends
def test_messages_are_received_in_memory_that_nobody_holds(backend):
    """As a message that is of no interest: those behind it are."""
    def body(world):
        for step in range(MANY):
            if world.rank == 0:
                world.send(torch.full((10,), float(step)), 1)
            else:
                world.recv(torch.zeros(10), 0, async_op=True)
        return world.exchange(torch.full((10,), float(world.rank)), 1 - world.rank, torch.zeros(10), 1 - world.rank)[0].item()

    assert rl.simulate(2, body, backend=backend, timeout=20) == [1.0, 0.0]


@both_backends
@pytest.mark.parametrize("dropping", [(0,), (0, 1)])
def test_collectives_whose_handles_are_dropped_end_on_the_other_ranks(dropping, backend):
    def body(world):
        for step in range(10):
            x = torch.full((5000,), float(world.rank + step))
            begin = [lambda: world.all_gather(x, async_op=True), lambda: world.reduce_scatter(x, async_op=True),   # noqa: B023
                     lambda: world.all_to_all(x, async_op=True), lambda: world.all_reduce(x.clone(), async_op=True),   # noqa: B023
                     lambda: world.exchange(x, 1 - world.rank, x.clone(), 1 - world.rank, async_op=True)]   # noqa: B023
            handles = [each() for each in begin]
            if world.rank in dropping:
                del handles
                gc.collect()
            else:
                total = [float(handle.wait().sum()) for handle in handles]
                both, other = 5000.0 * (2 * step + 1), 5000.0 * (step + 1 - world.rank)
                assert total == [both, both / 2, both / 2, both, other]
        return world.all_gather(torch.full((1,), float(world.rank))).tolist()

    assert rl.simulate(2, body, backend=backend, timeout=20) == [[0.0, 1.0]] * 2


def test_what_has_ended_is_not_held():
    def body(world):
        x = torch.ones(100)
        held = weakref.ref(x.untyped_storage())
        for _ in range(3):
            world.all_reduce(x, async_op=True)
        del x
        wait_until(lambda: all(work.is_completed() for works in world.in_flight._dropped for work in works))
        world.barrier()
        gc.collect()
        return held() is None, len(world.in_flight._dropped)

    assert rl.simulate(2, body) == [(True, 0)] * 2


def test_no_more_than_a_few_dozen_are_held_of_those_that_do_not_say_that_they_ended():
    class Silent:
        waited = 0

        def is_completed(self) -> bool:
            return False

        def wait(self) -> None:
            Silent.waited += 1

    class Held:
        """As a handle."""

    flight = InFlight()
    for _ in range(MANY):
        flight.adopt([Silent()])
    flight.add(Held())
    assert Silent.waited == MANY - MOST_DROPPED


def test_a_call_of_several_works_is_held_until_all_have_ended():
    class Work:
        def __init__(self, is_over: bool):
            self.is_completed, self.waited = lambda: is_over, 0

        def wait(self) -> None:
            self.waited += 1

    class Held:
        """As a handle."""

    flight, works = InFlight(), [Work(True), Work(False)]
    flight.adopt(works)
    flight.add(Held())
    assert [*flight._dropped] == [works] and not any(work.waited for work in works)


def test_a_dropped_call_that_times_out_while_it_is_waited_for_is_an_error_of_ours():
    over = threading.Barrier(2)

    def body(world):
        world.barrier()
        if world.rank == 0:
            with pytest.raises(rl.CollectiveTimeout, match="rank 0"):
                for _ in range(MANY):
                    world.recv(torch.zeros(3), 1, async_op=True, label="never sent")
            world.close()
        over.wait(20)

    rl.simulate(2, body, timeout=1)


def test_a_handle_of_a_closed_group_says_so():
    both_receive = threading.Barrier(2)

    def body(world):
        world.barrier()
        handle = world.recv(torch.zeros(3), 1 - world.rank, async_op=True)
        both_receive.wait(20)
        world.close()
        with pytest.raises(rl.RankLost, match="the group was closed before this ended"):
            handle.wait()
        return handle.works is None

    assert rl.simulate(2, body) == [True] * 2


def test_a_world_has_ended_when_no_call_of_any_of_its_groups_is_in_flight():
    all_looked = threading.Barrier(4)

    def body(world):
        found = []
        for group in (world, world.group("shard")):
            handle = group.recv(torch.zeros(3), 1, async_op=True) if group.rank == 0 else None
            found.append(world.end_within(0.0))
            all_looked.wait(20)
            if group.rank == 1:
                group.send(torch.ones(3), 0)
            if handle is not None:
                handle.wait()
            found.append(world.end_within(0.0))
        return found

    waits, idles = [False, True], [True, True]
    expected = [waits + waits, idles + idles, idles + waits, idles + idles]
    assert rl.simulate(rl.Mesh(replicate=2, shard=2), body, backend="rankloom") == expected


def test_an_error_that_a_wait_has_raised_is_not_raised_again_by_another_call():
    over = threading.Barrier(2)

    def body(world):
        world.barrier()
        if world.rank == 0:
            handle = world.recv(torch.zeros(3), 1, async_op=True, label="never sent")
            with pytest.raises(rl.CollectiveTimeout, match="never sent"):
                handle.wait()
            del handle
            gc.collect()
            assert not world.in_flight._dropped
            world.close()
        over.wait(20)

    rl.simulate(2, body, timeout=1)


def test_a_closed_group_holds_no_works():
    both_receive = threading.Barrier(2)

    def body(world):
        world.barrier()
        world.recv(torch.zeros(3), 1 - world.rank, async_op=True)
        gc.collect()
        held = len(world.in_flight._dropped)
        both_receive.wait(20)   # one that closes ends the other's call
        world.close()
        return held, len(world.in_flight._dropped)

    assert rl.simulate(2, body) == [(1, 0)] * 2


GPU = Group(None, name="on a GPU", device="cuda")


def test_each_stream_that_waits_for_a_call_waits_until_its_result_is_complete(monkeypatch):
    """One of them ends the call, and divides a mean's sum; the others come later, and must not read what is half written."""
    main, side = pretend(monkeypatch), Stream()
    handle = Handle(GPU, "mean", [SimpleNamespace(wait=lambda: queue("the call"))], lambda: queue("the division") or torch.ones(3))
    with stream(side):
        result = handle.wait()
    assert main.known == set() and side.known == {"the call", "the division"}
    queue("something else")
    assert handle.wait() is result
    assert main.known == {"the call", "the division", "something else"} and "something else" not in side.known


def test_a_stream_that_waits_for_a_call_of_one_rank_waits_for_the_stream_that_has_called(monkeypatch):
    """Nothing is sent, and the result is what the caller's stream writes."""
    pretend(monkeypatch)
    queue("what the rank gives")
    handle = GPU.all_reduce(torch.ones(3), async_op=True)
    queue("something else")
    with stream(Stream()) as _, stream(side := Stream()):
        handle.wait()
    assert side.known == {"what the rank gives"}


def test_a_call_that_blocks_notes_no_place_in_a_stream(monkeypatch):
    """Nobody else can wait for it, there are hundreds in a step, and an event costs microseconds."""
    pretend(monkeypatch)
    monkeypatch.setattr(Stream, "record_event", lambda stream: pytest.fail("an event"))
    group = Group(None, 0, (0, 1), device="cuda")
    monkeypatch.setattr(group, "_process_group", SimpleNamespace())
    assert group._launch("sum", False, lambda pg: SimpleNamespace(wait=lambda: queue("the call")), lambda: torch.ones(3)).sum() == 3
