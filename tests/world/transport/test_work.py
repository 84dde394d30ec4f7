"""Work on its way: when it has ended, and who is told what of it."""

import datetime
import functools
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import rankloom as rl
from conformance.ranks import Ranks, seconds
from no_threads import no_thread_starts
from patience import AT_ONCE, no_thread_is_left, wait_until
from rankloom.base.errors import CollectiveTimeout, ConfigError, RankLost
from rankloom.world.transport.through_host import HostWork
from rankloom.world.transport.work import DONE, FEW, Unwatched

CPU = torch.device("cpu")
ASYNC = c10d.AllreduceOptions()
ASYNC.asyncOp = True


@pytest.fixture
def ranks():
    made = Ranks(2)
    yield made
    made.close()


def test_work_has_ended_for_every_thread_only_when_its_results_are_home(ranks):
    def bring():
        began.set()
        time.sleep(0.2)
        home.append(True)

    began, home, x = threading.Event(), [], torch.ones(4)
    work = ranks.groups[0].allreduce([x])
    work.stand_for([], [x], bring)
    future = work.get_future()   # its thread brings them
    ranks.groups[1].allreduce([torch.ones(4)])
    assert began.wait(AT_ONCE)
    work.wait()
    assert home == [True] and future.wait() == [x]


def test_a_running_profiler_shows_calls_made_at_once_and_those_that_are_waited_for(ranks):
    def body(rank):
        group = ranks.groups[rank]
        group.broadcast([torch.ones(4)], at_once(c10d.BroadcastOptions()))   # not shown: the profiler does not run yet
        with torch.autograd.profiler.profile(enabled=rank == 0) as profile:
            for _ in range(3):
                group.allreduce([torch.ones(4)], at_once(c10d.AllreduceOptions()))
            group.allreduce([torch.ones(4)], ASYNC).wait()
        return {each.key: each.count for each in profile.key_averages() if "rankloom" in each.key} if rank == 0 else None

    def at_once(options):
        options.asyncOp = False
        return options

    assert ranks.run(body)[0] == {"rankloom:all_reduce": 4}


def test_everyone_who_asks_hears_what_went_wrong_as_results_were_brought_home(ranks):
    def fail():
        raise ValueError("no room at home")

    work = ranks.groups[0].allreduce([x := torch.ones(4)])
    work.stand_for([], [x], fail)
    ranks.groups[1].allreduce([torch.ones(4)]).wait()
    ranks.groups[0].allreduce([torch.ones(4)])   # looks which have ended, and is not told of another's failure
    ranks.groups[1].allreduce([torch.ones(4)])
    for _ in range(2):
        with pytest.raises(ValueError, match="no room at home"):
            work.wait()
    assert work.is_completed() and not work.is_success()


def test_a_future_for_which_no_thread_starts_is_an_error_and_the_next_one_is_set(ranks):
    works = [ranks.groups[0].allreduce([torch.ones(4)], ASYNC) for _ in range(2)]
    with no_thread_starts(), pytest.raises(RuntimeError, match="start new thread"):
        works[0].get_future()
    future = works[1].get_future()
    for _ in works:
        ranks.groups[1].allreduce([torch.ones(4)], ASYNC)
    wait_until(future.done)
    assert future.value()[0].tolist() == [2.0] * 4


def test_a_future_is_set_although_no_thread_starts_for_those_after_it(ranks):
    works = [ranks.groups[0].allreduce([torch.ones(4)], ASYNC) for _ in range(2)]
    futures = [work.get_future() for work in works]
    with no_thread_starts():
        for _ in works:
            ranks.groups[1].allreduce([torch.ones(4)], ASYNC)
        for future in futures:
            wait_until(future.done)
    assert [future.value()[0].tolist() for future in futures] == [[2.0] * 4] * 2


def test_a_work_that_has_ended_keeps_nothing_alive_but_its_result(ranks):
    class Scratch:
        pass

    work, scratch = ranks.groups[0].allreduce([x := torch.ones(1)], ASYNC), Scratch()
    work.stand_for([], [x], functools.partial(id, scratch))
    seen, scratch = weakref.ref(scratch), None
    ranks.groups[1].allreduce([torch.ones(1)], ASYNC)
    assert work.wait() and seen() is None and work.result() == [x]


def test_a_message_waited_for_by_cpp_which_says_zero_for_no_time_out_has_that_of_the_group():
    world = Ranks(2, 0.3)
    with pytest.raises(CollectiveTimeout, match="recv .*within its timeout of 0.3 s: rank 1"):
        world.groups[0].recv([torch.ones(4)], 1).wait(datetime.timedelta(0))
    world.close()


@pytest.mark.parametrize(("of_group", "of_call"), [(0.3, None), (60.0, 0.3)])
@pytest.mark.parametrize("is_polled", [False, True])
def test_a_call_that_timed_out_names_its_own_time_out_not_that_of_the_wait_or_the_group(of_group, of_call, is_polled):
    world, options = Ranks(2, of_group), c10d.AllreduceOptions()
    if of_call:
        options.timeout = seconds(of_call)
    work = world.groups[0].allreduce([torch.ones(4)], options)
    wait_until(work.is_completed if is_polled else work._has_ended)
    with pytest.raises(CollectiveTimeout, match="within its timeout of 0.3 s: rank 1"):
        work.wait(seconds(30.0))
    world.close()


def test_a_wait_that_is_over_before_its_call_names_its_own_time_out(ranks):
    work = ranks.groups[0].allreduce([torch.ones(4)])
    with pytest.raises(CollectiveTimeout, match="within its timeout of 0.2 s: rank 1"):
        work.wait(seconds(0.2))
    ranks.groups[1].allreduce([torch.ones(4)])
    assert work.wait()


@pytest.mark.parametrize(("what", "expected"), [("a collective", 3.0), ("a message", 2.0)])
def test_what_ends_in_the_moment_in_which_a_wait_for_it_is_over_has_ended_well(ranks, what, expected):
    def begin(rank):
        group, x = ranks.groups[rank], torch.full((2, 2), rank + 1.0).T   # in a layout for which results are brought home
        message = group.send if rank else group.recv
        return x, message([x], 1 - rank) if what == "a message" else group.allreduce([x], ASYNC)

    def late(limit):
        why = look(0.0)
        if not came:
            came.append(begin(1))
            wait_until(work._has_ended)
        return why

    came, (x, work) = [], begin(0)
    look, work._await = work._await, late
    assert work.wait(seconds(0.01)) and x.tolist() == [[expected] * 2] * 2 and work.is_success()


def test_what_came_through_the_host_is_brought_once_whoever_waits_again():
    there, here = torch.zeros(3), torch.ones(3)
    work = HostWork(DONE, [(there, here)])
    assert work.is_completed() and there.tolist() == [1.0] * 3
    there.fill_(2.0)   # by its owner, who has it now
    assert work.wait() and there.tolist() == [2.0] * 3


def lose_a_rank_in_backward(world):
    """At the top of the module, for processes: what rank 0 is told as rank 1 leaves before the third backward of torch's DDP."""
    dist.init_process_group("rankloom", store=dist.PrefixStore("torch", world._store), rank=world.rank, world_size=world.size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    for _ in range(2):   # in the second forward DDP orders its buckets anew, and asks rank 0
        model(torch.ones(2, 8)).sum().backward()
    told = ""
    if world.rank == 0:
        try:
            model(torch.ones(2, 8)).sum().backward()
        except RuntimeError as error:
            told = str(error)
    dist.destroy_process_group()
    return told


def test_a_rank_that_is_lost_in_a_backward_of_ddp_is_an_error_in_its_cpp_and_no_crash():
    told, _ = rl.spawn(2, lose_a_rank_in_backward)
    assert "RankLost: rank 0: all_reduce in group '0' lost rank 1" in told


def test_works_after_a_batch_that_an_error_has_ended_are_forgotten_when_they_have_ended(ranks):
    def body(rank):
        group = ranks.groups[rank]
        group._start_coalescing(CPU)
        with pytest.raises(ConfigError, match="the tag is -5"):   # torch closes no batch then
            group.send([torch.ones(1)], 1 - rank, -5)
        seen = weakref.WeakSet()
        for _ in range(100):
            seen.add(x := torch.ones(1000))
            group.allreduce([x], ASYNC).wait()
        del x
        return len(seen)

    assert max(ranks.run(body)) <= 2 * FEW


def test_a_work_that_has_ended_stands_at_once_for_what_else_is_to_be_done(ranks):
    home, work = [], ranks.groups[0].allreduce([x := torch.ones(1)], ASYNC)
    ranks.groups[1].allreduce([torch.ones(1)], ASYNC)
    wait_until(work.is_completed)
    work.stand_for([], [x], lambda: home.append(x.item()))
    assert home == [2.0]


def test_a_message_that_has_ended_and_that_nobody_holds_is_forgotten():
    world = Ranks(2, kernel="Python")
    works = [world.groups[0].send([torch.ones(2)], 1), world.groups[1].recv([torch.ones(2)], 0)]
    while works:
        works.pop().wait()
    assert [group.channel.link._post.posted for group in world.groups] == [{}, {}]
    world.close()


def test_the_error_of_a_batch_is_that_of_the_work_that_failed(ranks):
    group = ranks.groups[0]
    group._start_coalescing(CPU)
    group.send([torch.ones(1)], 1)
    group.recv([torch.ones(1)], 1)
    batch = group._end_coalescing(CPU)
    ranks.groups[1].abort()
    with pytest.raises(RankLost):
        batch.wait()
    assert isinstance(batch.exception(), RankLost) and not batch.is_success()


def test_a_batch_is_of_one_thread(ranks):
    group, x, y = ranks.groups[0], torch.zeros(1), torch.zeros(1)

    def elsewhere():
        group._start_coalescing(CPU)
        group.recv([y], 1)   # ends later than the batch of the other thread
        return group._end_coalescing(CPU)

    group._start_coalescing(CPU)
    group.recv([x], 1, 7)
    with ThreadPoolExecutor(1) as thread:
        others = thread.submit(elsewhere).result()
    mine = group._end_coalescing(CPU)
    assert not mine.is_completed()
    ranks.groups[1].send([torch.ones(1)], 0, 7)
    mine.wait(datetime.timedelta(seconds=AT_ONCE))
    assert x.item() == 1.0 and not others.is_completed()
    ranks.groups[1].send([torch.ones(1)], 0)
    assert others.wait() and y.item() == 1.0


def test_the_threads_that_set_futures_end_with_the_group_and_works_that_were_not_left_but_dropped(ranks):
    with no_thread_is_left("rankloom-herald"):
        futures = [group.allreduce([torch.ones(1)], ASYNC).get_future() for group in ranks.group(range(2))]
        ranks._made.clear()
        assert all(future.wait() for future in futures)


class Looked:
    """A work that notes how often it is looked at, and ends when it is told to."""

    is_one_number = False
    looks = 0

    def settle(self):
        self.looks += 1


def test_many_works_in_flight_are_looked_at_seldom_and_few_each_time():
    flight, works = Unwatched(), [Looked() for _ in range(4096)]
    for number, work in enumerate(works):
        flight.add(work)
        if number == FEW:
            assert [one.looks for one in works[:number]] == [*range(FEW, 0, -1)]
    assert len(flight) == 4096 and sum(work.looks for work in works) < 4 * 4096
    for work in works[FEW:]:
        flight.discard(work)
    flight.add(Looked())
    before = works[0].looks
    flight.add(Looked())
    assert works[0].looks == before + 1 - (len(flight) - 2 == FEW)
