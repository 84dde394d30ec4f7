"""Many groups, many calls in flight, waits in any order, messages in any order: nothing is mixed up and nothing waits for ever."""

import random
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from conformance.cases import BIG, Case, begin
from conformance.ranks import BACKENDS, make_ranks, seconds
from patience import AT_ONCE

LARGE = BIG // 4   # floats: more than any staging slot or ring holds


@pytest.fixture(params=BACKENDS)
def ranks(request):
    """`ranks(size)`, as often as wanted; on each backend."""
    made = []
    yield lambda size, timeout=60.0: made.append(make_ranks(request.param, size, timeout)) or made[-1]
    for each in made:
        each.close()


def add_up(group, x, asynchronous=True):
    options = dist.AllreduceOptions()
    options.asyncOp = asynchronous
    return group.allreduce([x], options)


def numbered(*key, n=5):
    """A tensor of whole numbers that says whose it is: sums of them are exact."""
    return torch.full((n,), float(hash(key) % 10007))


# ---------------------------------------------------------------- groups and waits


def test_64_groups_are_used_at_once_each_rank_calling_and_waiting_in_an_order_of_its_own(ranks):
    world = ranks(3)
    groups = [world.group(range(3)) for _ in range(64)]

    def body(rank):
        mine = [numbered(rank, k, n=1 + 700 * k) for k in range(64)]
        order = random.Random(rank)
        works = {k: add_up(groups[k][rank], mine[k]) for k in order.sample(range(64), 64)}
        for k in order.sample(range(64), 64):
            works[k].wait()
        return mine

    for sums in world.run(body):
        for k, x in enumerate(sums):
            assert torch.equal(x, sum(numbered(rank, k, n=1 + 700 * k) for rank in range(3)))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_calls_that_block_take_turns_on_overlapping_groups(ranks, size):
    world = ranks(size)
    rings = [[at, (at + 1) % size] for at in range(size)] if size > 2 else [[0, 1], [1, 0]]
    pairs = [world.group(range(2)) for _ in rings]

    def body(rank):
        x = torch.tensor([2.0**rank])
        for _ in range(20):
            for ring, pair in zip(rings, pairs):   # all ranks in the same order, as every backend wants it
                if rank in ring:
                    add_up(pair[ring.index(rank)], x, asynchronous=False).wait()
            add_up(world.groups[rank], x, asynchronous=False).wait()
            x /= x.norm() + 1
        return x

    first, *others = world.run(body)
    assert all(torch.equal(first, other) for other in others)


def test_200_calls_in_flight_are_waited_for_backwards_by_another_thread(ranks):
    world = ranks(3)

    def body(rank):
        mine = [numbered(rank, k, n=k) for k in range(200)]
        works = [add_up(world.groups[rank], x) for x in mine]
        waiter = threading.Thread(target=lambda: [work.wait() for work in reversed(works)])
        waiter.start()
        waiter.join(AT_ONCE)
        assert all(work.is_completed() and work.is_success() for work in works)
        return mine

    for sums in world.run(body):
        assert all(torch.equal(x, sum(numbered(rank, k, n=k) for rank in range(3))) for k, x in enumerate(sums))


def test_a_call_that_blocks_comes_after_those_in_flight(ranks):
    world = ranks(2)

    def body(rank):
        x = torch.ones(LARGE)
        for _ in range(3):
            add_up(world.groups[rank], x)
        add_up(world.groups[rank], x, asynchronous=False)
        return x

    assert all((x == 16).all() for x in world.run(body))


def test_work_that_nobody_waits_for_is_done_all_the_same_and_keeps_its_tensor(ranks):
    world = ranks(2)

    def body(rank):
        for k in range(50):
            add_up(world.groups[rank], torch.ones(10_000 * (k % 3) + 1))   # the tensor is ours no more
        last = add_up(world.groups[rank], x := torch.ones(4))
        last.wait()
        return x

    assert [x.tolist() for x in world.run(body)] == [[2.0] * 4] * 2


def test_a_tensor_that_was_waited_for_is_held_by_nobody_else(ranks):
    world = ranks(2)

    def body(rank):
        group, held = world.groups[rank], []
        for begin_with in (lambda x: add_up(group, x), lambda x: group.recv([x], 1, 0) if rank == 0 else group.send([x], 0, 0)):
            work = begin_with(x := torch.ones(3))
            held.append(weakref.ref(x))
            work.wait()
            del x, work
        future = add_up(group, x := torch.ones(3)).get_future()
        held.append(weakref.ref(x))
        future.wait()
        del x, future
        late = time.monotonic() + AT_ONCE
        while held[-1]() is not None and time.monotonic() < late:   # the thread that sets futures lets go a moment later
            time.sleep(1e-3)
        return [x() for x in held]

    assert world.run(body) == [[None] * 3] * 2


def test_work_tells_when_it_has_ended_and_what_came_of_it(ranks):
    world, late = ranks(2), threading.Event()

    def body(rank):
        x = torch.tensor([float(rank + 1)])
        if rank == 1:
            late.wait(AT_ONCE)
        work = add_up(world.groups[rank], x)
        if rank == 0:
            time.sleep(0.02)
            assert not work.is_completed() and not work.is_success(), "the other has not come"
            late.set()
        assert work.wait() and work.wait(seconds(1)), "waiting again changes nothing"
        assert work.is_completed() and work.is_success() and work.exception() is None
        assert [t.tolist() for t in work.result()] == [t.tolist() for t in work.get_future().wait()] == [[3.0]]
        return x.item()

    assert world.run(body) == [3.0, 3.0]


def test_calls_between_the_two_ends_of_a_batch_are_waited_for_as_one(ranks):
    """As torch's `_coalescing_manager(device=...)` asks for it."""
    world, late = ranks(2), threading.Event()

    def body(rank):
        group, x, y = world.groups[rank], torch.zeros(3), torch.ones(2)
        if rank == 1:
            late.wait(AT_ONCE)
        group._start_coalescing(torch.device("cpu"))
        group.recv([x], 1 - rank, 0)
        group.send([numbered(rank, n=3)], 1 - rank, 0)
        add_up(group, y)
        work = group._end_coalescing(torch.device("cpu"))
        if rank == 0:
            assert not work.is_completed() and not work.is_success()
            late.set()
        work.wait()
        alone = group._start_coalescing(torch.device("cpu")) or group._end_coalescing(torch.device("cpu"))
        return work.is_success() and alone.is_success(), torch.equal(x, numbered(1 - rank, n=3)), y.tolist()

    assert world.run(body) == [(True, True, [2.0, 2.0])] * 2


def test_futures_call_back_with_the_result(ranks):
    world = ranks(3)

    def body(rank):
        work = begin(Case("allreduce", how="future"), world.groups[rank], [], [torch.tensor([1.0])])
        return work.get_future().then(lambda future: 10 * future.value()[0]).wait().item()

    assert world.run(body) == [30.0] * 3


def test_what_a_future_calls_back_may_wait_for_other_futures(ranks):
    """For a sum of its own, as in the PowerSGD of torch's DDP, and for one that was asked for later."""
    world, asked = ranks(2, 5.0), threading.Event()

    def body(rank):
        group = world.groups[rank]

        def add_up_again(future):
            return add_up(group, future.value()[0]).get_future().wait()

        def add_up_twice_again(future):
            return add_up(group, future.value()[0]).get_future().then(add_up_again).wait()

        if rank == 1:
            asked.wait(AT_ONCE)
        sums = [add_up(group, torch.ones(1)).get_future() for _ in range(2)]
        waits = sums[0].then(lambda future: sums[1].wait())   # not there yet on rank 0
        asked.set()
        return waits.wait()[0].item(), sums[0].then(add_up_twice_again).wait()[0].item()

    assert world.run(body) == [(2.0, 8.0)] * 2


def test_futures_of_a_group_that_was_left_are_set_all_the_same(ranks):
    world = ranks(2, 5.0)
    works = world.run(lambda rank: add_up(world.groups[rank], torch.ones(1)))
    world.run(lambda rank: works[rank].get_future().wait())
    for group in world.groups:
        group.shutdown()
    assert [work.get_future().wait()[0].item() for work in works] == [2.0, 2.0]


def test_a_future_does_not_wait_for_one_that_was_asked_for_before(ranks):
    """The message comes only after the sum was seen, though its future was made first."""
    world, seen = ranks(2, 5.0), threading.Event()

    def body(rank):
        group, message = world.groups[rank], torch.tensor([rank + 7.0])
        if rank == 0:
            coming = group.recv([message], 1, 0).get_future()
            sum_is_there = add_up(group, torch.ones(1)).get_future()
            sum_is_there.wait()
            seen.set()
            coming.wait()
        else:
            add_up(group, torch.ones(1)).wait()
            assert seen.wait(AT_ONCE), "the future of the sum was not set"
            group.send([message], 0, 0).wait()
        return message.item()

    assert world.run(body) == [8.0, 8.0]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sparse_tensors_are_added_up_entry_by_entry(ranks, size, asynchronous):
    """As gradients of embeddings are: rows of which some ranks have others, some the same, some twice, and one has none."""
    def rows(rank):
        at = torch.tensor([[], [4, 1, 4], [1]][rank], dtype=torch.int64)
        return torch.sparse_coo_tensor(at[None], torch.arange(2.0 * len(at)).view(-1, 2) + 10 * rank, (6, 2))

    def body(rank):
        add_up(group := world.groups[rank], before := torch.ones(2))
        x = rows(rank)
        work = add_up(group, x, asynchronous)
        if asynchronous:
            assert work.get_future().wait()[0] is x
        return x.to_dense(), before

    world, total = ranks(size), sum(rows(rank).to_dense() for rank in range(size))
    for x, before in world.run(body):
        assert torch.equal(x, total) and before.tolist() == [size, size]


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize("n", [0, 3, LARGE])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_messages_go_around_a_ring_in_both_directions_at_once(ranks, size, n):
    world = ranks(size)

    def body(rank):
        group, right, left = world.groups[rank], (rank + 1) % size, (rank - 1) % size
        from_left, from_right = torch.empty(n), torch.empty(n)
        works = [group.send([numbered(rank, right, n=n)], right, 1), group.send([numbered(rank, left, n=n)], left, 2),
                 group.recv([from_right], right, 2), group.recv([from_left], left, 1)]
        for work in works:
            work.wait()
        return torch.equal(from_left, numbered(left, rank, n=n)) and torch.equal(from_right, numbered(right, rank, n=n))

    assert world.run(body) == [True] * size


@pytest.mark.parametrize("n", [1, LARGE])
def test_tags_may_be_received_in_another_order_than_they_were_sent(ranks, n):
    world = ranks(2)

    def body(rank):
        group = world.groups[rank]
        if rank == 0:
            for work in [group.send([torch.full((n,), float(tag))], 1, tag) for tag in range(6)]:
                work.wait()
            return None
        got = torch.empty(n)
        return [group.recv([got], 0, tag).wait() and got[-1].item() for tag in (4, 5, 0, 3, 2, 1)]

    assert world.run(body)[1] == [4, 5, 0, 3, 2, 1]


def test_messages_of_one_tag_arrive_in_the_order_in_which_they_were_sent(ranks):
    world = ranks(2)

    def body(rank):
        group = world.groups[rank]
        if rank == 0:
            for work in [group.send([torch.tensor([k])], 1, 3) for k in range(100)]:
                work.wait()
            return None
        got = [torch.zeros(1, dtype=torch.int64) for _ in range(100)]
        works = [group.recv([x], 0, 3) for x in got]
        for work in reversed(works):
            work.wait()
        return [x.item() for x in got]

    assert world.run(body)[1] == list(range(100))


def test_a_message_does_not_overtake_one_of_its_tag_that_is_still_being_put_aside(ranks):
    """A large message is on its way into a buffer, because one behind it is waited for, when somebody asks for it."""
    world, begun = ranks(2), threading.Barrier(2, timeout=60)

    def body(rank):
        group, n = world.groups[rank], 4 * BIG
        for delay in (0.0, 1e-3, 2e-3, 4e-3):
            begun.wait()
            if rank == 0:
                works = [group.send([torch.full((n,), float(k))], 1, 1) for k in (1, 2)] + [group.send([torch.zeros(1)], 1, 2)]
            else:
                works = [group.recv([torch.zeros(1)], 0, 2)]
                time.sleep(delay)
                got = [torch.zeros(n), torch.zeros(n)]
                works += [group.recv([x], 0, 1) for x in got]
            for work in works:
                work.wait()
            assert rank == 0 or [x[-1].item() for x in got] == [1.0, 2.0]

    world.run(body)


def test_whoever_sends_first_is_received_first_and_named(ranks):
    world, turns = ranks(4), [threading.Event() for _ in range(4)]
    turns[0].set()

    def body(rank):
        group = world.groups[rank]
        if rank < 3:
            assert turns[rank].wait(AT_ONCE)
            return group.send([torch.tensor([10.0 + rank])], 3, 5).wait()
        got = [torch.zeros(1) for _ in range(3)]
        works = [group.recv_anysource([x], 5) for x in got]
        for following, work in zip(turns[1:], works):
            assert work.wait()
            following.set()
        return [(work._source_rank(), x.item()) for work, x in zip(works, got)]

    assert world.run(body)[3] == [(0, 10.0), (1, 11.0), (2, 12.0)]


def test_a_message_that_is_asked_for_from_anyone_leaves_other_tags_alone(ranks):
    world = ranks(3)

    def body(rank):
        group = world.groups[rank]
        if rank:
            return [group.send([torch.tensor([10.0 * rank + tag])], 0, tag).wait() for tag in (1, 2)]
        anyone, named = [torch.zeros(1), torch.zeros(1)], [torch.zeros(1), torch.zeros(1)]
        works = [group.recv_anysource([x], 2) for x in anyone] + [group.recv([x], rank, 1) for rank, x in zip((2, 1), named)]
        assert all(work.wait() for work in works)
        return sorted(x.item() for x in anyone), [x.item() for x in named]

    assert world.run(body)[0] == ([12.0, 22.0], [21.0, 11.0])


def test_messages_pass_while_a_collective_waits(ranks):
    world = ranks(2)

    def body(rank):
        group, x, got = world.groups[rank], torch.ones(LARGE), torch.zeros(LARGE)
        if rank == 0:
            work = add_up(group, x)                       # waits for rank 1, which waits for the message
            group.send([torch.full((LARGE,), 5.0)], 1, 0).wait()
        else:
            group.recv([got], 0, 0).wait()
            work = add_up(group, x)
        work.wait()
        return x[-1].item(), got[-1].item()

    assert world.run(body) == [(2.0, 0.0), (2.0, 5.0)]


@pytest.mark.parametrize("seed", range(20))
def test_random_messages_between_all_ranks_arrive_whole_and_at_the_right_place(ranks, seed):
    """Everybody sends to everybody under few tags; receives are posted in any order that keeps one sender's tag in order."""
    rng, size = random.Random(seed), 2 + seed % 4
    world = ranks(size)
    posts = [(frm, to, rng.randrange(3), rng.choice((0, 1, 7, 1000, 5000, LARGE // 4)))
             for frm in range(size) for to in range(size) if frm != to for _ in range(rng.randrange(12))]
    lanes = {(frm, to, tag): [n for f, t, g, n in posts if (f, t, g) == (frm, to, tag)] for frm, to, tag, _ in posts}

    def body(rank):
        group, mine = world.groups[rank], random.Random(1000 * seed + rank)
        calls = []
        for (frm, to, tag), lengths in lanes.items():
            if rank in (frm, to):
                calls += [(frm, to, tag)] * len(lengths)
        mine.shuffle(calls)
        counts, held, works = dict.fromkeys(lanes, 0), [], []
        for lane in calls:
            frm, to, tag = lane
            k = counts[lane]
            counts[lane] += 1
            n = lanes[lane][k]
            if rank == frm:
                works.append(group.send([numbered(*lane, k, n=n)], to, tag))
            else:
                held.append((lane, k, torch.empty(n)))
                works.append(group.recv([held[-1][2]], frm, tag))
        mine.shuffle(works)
        for work in works:
            work.wait()
        return all(torch.equal(x, numbered(*lane, k, n=len(x))) for lane, k, x in held)

    assert all(world.run(body))


@pytest.mark.parametrize("size", [3, 6])
def test_long_sums_of_more_ranks_than_cores_are_right_although_ranks_are_often_behind(ranks, size):
    """Many windows each, and no rank waits for another between the calls."""
    world, n = ranks(size), BIG

    def body(rank):
        wrong = 0
        for k in range(4):
            x = torch.arange(n, dtype=torch.float32).remainder_(251 + k).add_(rank)
            add_up(world.groups[rank], x, asynchronous=bool(k % 2)).wait()
            expected = torch.arange(n, dtype=torch.float32).remainder_(251 + k).mul_(size).add_(sum(range(size)))
            wrong += int((x != expected).sum())
        return wrong

    assert world.run(body) == [0] * size
