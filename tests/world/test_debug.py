"""Debug mode: calls that do not match are found before any byte moves, on every rank, with both call sites."""

import gc
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import rankloom as rl
from no_threads import no_thread_starts
from patience import AT_ONCE, no_thread_is_left, wait_until
from rankloom.world import debug
from rankloom.world.debug import Fingerprint
from rankloom.world.debug_queue import Queue


@pytest.fixture(autouse=True)
def debug_on(monkeypatch):
    monkeypatch.setenv("RANKLOOM_DEBUG", "1")


both_backends = pytest.mark.parametrize("backend", ["gloo", "rankloom"])


def errors_of(p: int, body, timeout: float = 20.0, backend: str = "gloo") -> list[Exception | None]:
    """What each rank's `body` raised; none is stopped because of another."""
    def catching(world):
        try:
            body(world)
        except rl.RankloomError as error:
            return error
        return None

    return rl.simulate(p, catching, timeout=timeout, backend=backend)


def swapped(world):
    a, b = torch.zeros(3), torch.ones(3)
    if world.rank == 1:
        world.all_reduce(b, label="b")
        world.all_reduce(a, label="a")
    else:
        world.all_reduce(a, label="a")
        world.all_reduce(b, label="b")


def other_shape(world):
    world.all_reduce(torch.zeros(3 + world.rank, 2))


def other_dtype(world):
    world.all_reduce(torch.zeros(3, dtype=torch.int32 if world.rank else torch.float32))


def other_call(world):
    world.broadcast(torch.zeros(3)) if world.rank else world.all_reduce(torch.zeros(3))


def other_operation(world):
    world.all_reduce(torch.zeros(3), "max" if world.rank else "sum")


def other_root(world):
    world.broadcast(torch.zeros(3), root=world.rank % 2)


def skipped(world):
    if world.rank != 1:
        world.all_reduce(torch.zeros(3), label="first")
    world.all_reduce(torch.zeros(3), label="second")


def uneven_gather(world):
    world.all_gather(torch.zeros(2 + world.rank))


def rows_that_do_not_meet(world):
    """Rank 0 sends two rows to rank 1, which expects one; sums and shapes fit on every rank."""
    p, at = world.size, world.rank
    send = [0, 2, *[1] * (p - 2)] if at == 0 else [1] * p
    receive = [0, *[1] * (p - 1)] if at == 0 else [1] * p
    world.all_to_all(torch.zeros(sum(send), 2), send_rows=send, recv_rows=receive)


BODIES = [swapped, other_shape, other_dtype, other_call, other_operation, other_root, skipped, uneven_gather, rows_that_do_not_meet]


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_mismatch_raises_on_every_rank_and_names_every_rank_and_call_site(body, p):
    begin = time.monotonic()
    for rank, error in enumerate(errors_of(p, body)):
        assert type(error) is rl.CollectiveMismatch
        lines = str(error).splitlines()
        assert lines[0].startswith(f"rank {rank}: collective number 1 of this group")
        assert [line.split(":")[0].strip() for line in lines[1:p + 1]] == [f"rank {r}" for r in range(p)]
        assert all(re.search(r"at .*test_debug\.py:\d+$", line) for line in lines[1:p + 1])
    assert time.monotonic() - begin < AT_ONCE


def test_the_table_shows_what_differs():
    said = str(errors_of(2, swapped)[0])
    first = swapped.__code__.co_firstlineno
    assert f"rank 0: all_reduce(sum) of float32[3] labelled 'a' at {__file__}:{first + 6}" in said
    assert f"rank 1: all_reduce(sum) of float32[3] labelled 'b' at {__file__}:{first + 3}" in said


def test_the_table_shows_the_rows_of_an_all_to_all():
    said = str(errors_of(2, rows_that_do_not_meet)[1])
    assert "rank 0: all_to_all of float32[2], sends [0, 2] rows and expects [0, 1], labelled '' at " in said
    assert "rank 1: all_to_all of float32[2], sends [1, 1] rows and expects [1, 1], labelled '' at " in said
    assert "deals rows that do not meet:" in said
    assert said.splitlines()[-1].startswith("Rank 0 sends 2 rows to rank 1, which expects 1; recv_rows must say")


@both_backends
def test_rows_that_meet_may_be_any_whole_numbers_and_some_ranks_may_leave_them_out(backend):
    def body(world):
        x = torch.full((4, 1), float(world.rank))
        shares = {} if world.rank else dict(send_rows=np.array([2, 2]), recv_rows=(2, np.int64(2)))
        return world.all_to_all(x, **shares).flatten().tolist()

    assert rl.simulate(2, body, backend=backend) == [[0.0, 0.0, 1.0, 1.0]] * 2


def test_nothing_has_moved_when_a_mismatch_is_found():
    def body(world):
        x = torch.full((3,), float(world.rank))
        with pytest.raises(rl.CollectiveMismatch):
            world.all_reduce(x, label=str(world.rank))
        return x.tolist(), world.ledger.calls

    assert rl.simulate(2, body) == [([0.0] * 3, 0), ([1.0] * 3, 0)]


def test_the_same_call_may_stand_on_different_lines():
    def body(world):
        if world.rank:
            return world.all_reduce(torch.ones(1)).item()
        else:
            return world.all_reduce(torch.ones(1)).item()

    assert rl.simulate(2, body) == [2.0, 2.0]
    site = Fingerprint("broadcast", "[1]", "int64", "x", "here:1")
    assert site.agrees_with(Fingerprint("broadcast", "[1]", "int64", "x", "there:2"))


def test_everything_that_is_right_works_in_debug_mode_and_leaves_the_store_small():
    """Keys of past calls are removed, so a long run does not fill the store."""
    def body(world):
        before = None
        for n in range(30):
            world.all_reduce(torch.ones(2), label=str(n))
            send, recv = ([1, 2], [1, 0]) if world.rank == 0 else ([0, 3], [2, 3])
            world.all_to_all(torch.zeros(3, 2), send_rows=send, recv_rows=recv)
            world.barrier()
            before = before or world._store.num_keys()
        world.barrier()
        return world._store.num_keys() - before

    assert max(rl.simulate(2, body)) <= 4


def test_a_rank_that_never_comes_is_named_with_the_last_call_it_made():
    def body(world):
        world.all_reduce(torch.zeros(1), label="together")
        world.all_reduce(torch.zeros(2), label="alone") if world.rank != 1 else time.sleep(7)

    first, second, third = errors_of(3, body, timeout=5.0)
    assert second is None
    for rank, error in ((0, first), (2, third)):
        assert type(error) is rl.CollectiveTimeout
        assert f"rank {rank}: rank 1 did not come to collective number 2 within 5 s" in str(error)
        assert re.search(r"rank 1: call 1, all_reduce\(sum\) of float32\[1\] labelled 'together' at .*test_debug", str(error))
        assert re.search(rf"rank {rank}: call 2, .*labelled 'alone'", str(error))


def test_a_rank_that_returns_while_its_calls_are_in_flight_is_not_gone(monkeypatch):
    compare = debug.Inspector._compare

    def late_on_rank_1(inspector, mine):
        time.sleep(inspector.board.rank)
        compare(inspector, mine)

    def body(world):
        summed = world.all_reduce(torch.ones(1), async_op=True)
        return summed.wait().item() if world.rank == 0 else None

    monkeypatch.setattr(debug.Inspector, "_compare", late_on_rank_1)
    assert rl.simulate(2, body) == [2.0, None]


def test_a_rank_that_made_no_call_at_all_is_said_to_have_made_none():
    error = errors_of(2, lambda w: None if w.rank else w.barrier(), timeout=5.0)[0]
    assert "rank 1: has made no call yet" in str(error)


def test_a_message_that_never_comes_times_out_and_tells_where_everybody_is():
    def body(world):
        world.barrier(label="start")
        world.recv(torch.zeros(1), 1, label="activations") if world.rank == 0 else time.sleep(7)

    error = errors_of(2, body, timeout=5.0)[0]
    assert type(error) is rl.CollectiveTimeout and "activations" in str(error) and "rank 1: call 1" in str(error)


@both_backends
def test_where_messages_do_not_meet_the_time_out_names_those_that_each_rank_waits_for(backend):
    def body(world):
        world.send(torch.zeros(3), 1, tag=5) if world.rank == 0 else world.recv(torch.zeros(3), 0, tag=6)

    said = [str(error) for error in errors_of(2, body, timeout=2.0, backend=backend) if error]
    assert said and "made no call" not in said[0]
    assert "\n  rank 1: message number 1 from rank 0 to rank 1 with tag 6, recv of float32[3] at " in said[0]
    assert "\n  rank 0: message number 1 from rank 0 to rank 1 with tag 5, send of float32[3] at " in said[0]


def over_gloo(send, expected, *, receives_first=False, async_op=False):
    """What sender and receiver raise; `receives_first`: the sender waits until the receiver has said what it expects."""
    def body(world):
        if world.rank == 0:
            if receives_first:
                wait_until(lambda: world._inspector.board.store.check(["message/0/1/3/1/recv"]))
            world.send(send, 1, tag=3, label="activations")
        else:
            if not receives_first:
                wait_until(lambda: world._inspector.board.store.check(["message/0/1/3/1/send"]))
            into = world.recv(expected, 0, tag=3, label="activations", async_op=async_op)
            if async_op:
                into.wait()

    return errors_of(2, body, timeout=20.0 if receives_first else 1.0)   # nobody receives what was sent


@pytest.mark.parametrize("expected", [torch.zeros(4, dtype=torch.int32), torch.zeros(3), torch.zeros(5)], ids=["dtype", "short", "long"])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("receives_first", [False, True], ids=["sender first", "receiver first"])
def test_a_message_that_its_receiver_does_not_expect_is_refused_and_both_call_sites_are_named(expected, async_op, receives_first):
    sender, receiver = over_gloo(torch.ones(4), expected, receives_first=receives_first, async_op=async_op)
    assert type(receiver) is rl.CollectiveMismatch and receiver.args[0].count("test_debug.py") == 2
    assert "message number 1 from rank 0 to rank 1 with tag 3" in str(receiver) and "rank 0: send of float32[4]" in str(receiver)
    assert not expected.any()
    if receives_first:   # the sender has not sent what would have ended the receiver's process
        assert type(sender) is rl.CollectiveMismatch and "recv of" in str(sender)


def test_a_message_may_have_another_shape_than_what_it_is_received_in():
    into = torch.zeros(2, 2)
    assert over_gloo(torch.ones(4), into) == [None, None] and into.all()


CALL = Fingerprint("broadcast", "[1]", "int64", "x", "here:1")


class Counted:
    """A store that counts what it is asked for."""

    def __init__(self):
        self._store, self.checked, self.read = dist.HashStore(), [], []

    def check(self, keys):
        self.checked.append(len(keys))
        return self._store.check(keys)

    def multi_get(self, keys):
        self.read.append(len(keys))
        return self._store.multi_get(keys)

    def __getattr__(self, name):
        return getattr(self._store, name)


def compared_by(inspectors, call) -> list[Exception | None]:
    """What `check` raises on each rank, all in threads of their own."""
    with ThreadPoolExecutor(len(inspectors)) as ranks:
        return [rank.exception() for rank in [ranks.submit(inspector.check, call(inspector.board.rank)) for inspector in inspectors]]


@pytest.mark.parametrize("p", [2, 64])
def test_one_rank_reads_the_calls_of_all_and_the_others_wait_for_one_key(p):
    """If each rank reads each, p ranks ask the store for p^2 keys at every call, and again whenever they look who has come."""
    store, calls = Counted(), 3
    inspectors = [debug.Inspector(store, rank, range(p), 60.0) for rank in range(p)]
    for _ in range(calls):
        assert compared_by(inspectors, lambda rank: replace(CALL, site=f"here:{rank}")) == [None] * p
    assert store.read == [p] * calls and {*store.checked} <= {1}
    assert store.num_keys() <= 2 * p + 2 + 1   # a call and the last call of each, and what was found; HashStore may have one of its own
    for rank, error in enumerate(compared_by(inspectors, lambda rank: replace(CALL, label=str(rank == 1)))):
        assert type(error) is rl.CollectiveMismatch and str(error).startswith(f"rank {rank}: collective number 4 of this group is not")
        assert str(error).count("labelled 'False'") == p - 1 and "rank 1: broadcast of int64[1] labelled 'True' at here:1" in str(error)


def test_the_rank_that_is_missing_among_many_is_found_with_few_questions():
    p, missing, store = 256, 77, Counted()
    for rank in {*range(p)} - {missing}:
        store.set(f"call/1/{rank}", "")
        store.set(f"last/{rank}", f"call 1, {CALL}")
    with pytest.raises(rl.CollectiveTimeout) as error:
        debug.Inspector(store, 0, range(p), 0.3).check(CALL)
    said = str(error.value)
    assert said.startswith("rank 0: rank 77 did not come to collective number 1 within 0.3 s.")
    assert said.count("call 1, broadcast") == p - 1 and "rank 77: has made no call yet\n" in said
    looks = store.checked[store.checked.index(p):]
    assert len(looks) <= 2 * (1 + 2 * 8 + 1)   # halves of the ranks: who has not come, and who has made a call; two for each rank before


def test_messages_are_compared_by_their_tags_in_both_directions_and_leave_the_store_small():
    def body(world):
        peer, two, four = 1 - world.rank, torch.zeros(2), torch.zeros(4, dtype=torch.int64)
        for step in range(20):
            handles = [world.recv(four, peer, tag=1, async_op=True), world.recv(two, peer, tag=2, async_op=True)]
            sent = [world.send(torch.full((2,), float(step)), peer, tag=2, async_op=True),
                    world.send(torch.full((4,), step), peer, tag=1, async_op=True)]
            for handle in (*reversed(handles), *sent):
                handle.wait()
            assert two.unique().tolist() == four.unique().tolist() == [step]
            world.exchange(torch.full((3,), world.rank), peer, mine := torch.zeros(3, dtype=torch.int64), peer)
            assert mine.unique().tolist() == [peer]
        world.barrier()
        return world._inspector.board.store.num_keys()

    assert max(rl.simulate(2, body, backend="gloo")) < 40


def test_a_message_of_a_rank_to_itself_is_compared_too():
    def body(world):
        into = torch.zeros(3)
        for step in range(3):
            world.exchange(torch.full((3,), float(step)), world.rank, into, world.rank)
            assert into.unique().tolist() == [step]
        world.exchange(torch.ones(3, dtype=torch.int32), world.rank, into, world.rank)

    assert [type(error) for error in errors_of(2, body, backend="rankloom")] == [rl.CollectiveMismatch] * 2


def test_sub_groups_are_compared_among_themselves():
    def body(world):
        world.group("shard").all_reduce(torch.zeros(2 + world.mesh.coords(world.rank)["replicate"]))   # differs between groups: fine
        world.group("replicate").all_reduce(torch.zeros(2 + world.mesh.coords(world.rank)["replicate"]))

    assert [type(error) for error in errors_of(rl.Mesh(replicate=2, shard=2), body)] == [rl.CollectiveMismatch] * 4


def test_the_call_site_is_the_users_line_and_not_one_inside_the_world():
    sites = []
    rl.simulate(2, lambda w: sites.append(debug.call_site()) or w.all_gather_object("x"))
    assert all("test_debug.py" in site for site in sites)


def test_ranks_of_a_part_of_the_world_are_named_by_their_numbers_in_it():
    def body(world):
        world.group("shard").all_reduce(torch.zeros(2 + world.rank))

    for rank, error in enumerate(errors_of(rl.Mesh(replicate=2, shard=2), body)):
        first = rank // 2 * 2
        assert str(error).startswith(f"rank {rank}: ") and f"\n  rank {first}: " in str(error) and f"\n  rank {first + 1}: " in str(error)


# ---------------------------------------------------------------- calls that do not wait for each other


@both_backends
def test_asynchronous_calls_in_two_groups_may_begin_in_another_order_on_each_rank(backend):
    def body(world):
        groups = [world, world.twin()][::1 if world.rank else -1]
        handles = [group.all_reduce(torch.ones(2), async_op=True) for group in groups]
        return [handle.wait().tolist() for handle in handles]

    assert rl.simulate(2, body, backend=backend, timeout=AT_ONCE) == [[[2.0] * 2] * 2] * 2


@both_backends
def test_an_asynchronous_call_may_begin_before_a_message_that_its_peer_sends_first(backend):
    def body(world):
        if world.rank:
            world.send(torch.full((2,), 7.0), 0)
            return world.all_reduce(torch.ones(2)).tolist()
        handle = world.all_reduce(torch.ones(2), async_op=True)
        return world.recv(torch.zeros(2), 1).tolist() and handle.wait().tolist()

    assert rl.simulate(2, body, backend=backend, timeout=AT_ONCE) == [[2.0] * 2] * 2


def use_two_groups_in_two_threads(world):
    """At the top of the module, for processes, where all threads of a rank share one client of the store."""
    twin, sums = world.twin(), {}

    def call(name, group, delay):
        time.sleep(delay)
        sums[name] = group.all_reduce(torch.ones(2)).tolist()

    late = 0.5   # seconds
    threads = [threading.Thread(target=call, args=("world", world, late * world.rank)),
               threading.Thread(target=call, args=("twin", twin, late * (1 - world.rank)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sums


def test_threads_of_a_rank_may_use_two_groups_in_another_order_on_each_rank():
    assert rl.spawn(2, use_two_groups_in_two_threads, timeout=AT_ONCE) == [{"world": [2.0] * 2, "twin": [2.0] * 2}] * 2


@both_backends
def test_calls_of_a_group_are_made_in_their_order_whether_they_are_asynchronous_or_not(backend):
    def body(world):
        handles = [world.all_reduce(torch.full((2,), float(n)), label=str(n), async_op=True) for n in range(5)]
        last = world.all_gather(torch.tensor([float(world.rank)]))
        return [handle.wait()[0].item() for handle in handles], last.tolist(), world.ledger.calls

    assert rl.simulate(2, body, backend=backend) == [([0.0, 2.0, 4.0, 6.0, 8.0], [0.0, 1.0], 6)] * 2


@both_backends
@pytest.mark.parametrize("ask", [lambda world: world.buffer(4), lambda world: world.common_buffer(4)[0]], ids=["buffer", "common"])
def test_a_buffer_may_be_asked_for_while_asynchronous_calls_wait_to_be_compared(backend, ask):
    """Over shared memory ranks meet to make it: they met those that were still at the calls before."""
    def body(world):
        found = []
        for n in range(10):
            handles = [world.all_reduce(torch.full((n + k + 1,), 1.0), async_op=True) for k in range(3)]
            buffer = ask(world)
            found += [handle.wait().sum().item() for handle in handles] + [len(buffer)]
        return found

    expected = [x for n in range(10) for x in (2.0 * (n + 1), 2.0 * (n + 2), 2.0 * (n + 3), 4)]
    assert rl.simulate(2, body, backend=backend, timeout=AT_ONCE) == [expected] * 2


@both_backends
def test_an_asynchronous_mismatch_is_raised_by_the_wait_on_every_rank_and_nothing_has_moved(backend):
    def body(world):
        handle = world.all_reduce(x := torch.full((3,), float(world.rank)), label=f"of {world.rank}", async_op=True)
        with pytest.raises(rl.CollectiveMismatch, match=rf"rank {world.rank}: .*(?s:.)*labelled 'of 0' at .*test_debug"):
            handle.wait()
        return x.tolist()

    assert rl.simulate(2, body, backend=backend) == [[0.0] * 3, [1.0] * 3]


@both_backends
def test_calls_behind_one_that_was_too_late_fail_with_it_at_once(backend):
    """They would wait for the time-out one after the other, and the last would be blamed."""
    took = []

    def body(world):
        if world.rank == 1:
            wait_until(lambda: took)
            return
        begin = time.monotonic()
        handles = [world.all_reduce(torch.ones(4), async_op=True, label=f"bucket {number}") for number in range(8)]
        for wait in (world.barrier, *(handle.wait for handle in handles)):
            with pytest.raises(rl.CollectiveTimeout, match=r"rank 1 did not come to collective number 1 .*(?s:.)*'bucket 0'"):
                wait()
        took.append(time.monotonic() - begin)

    rl.simulate(2, body, timeout=1.0, backend=backend)
    assert took[0] < 6   # of 9


def test_calls_behind_one_that_lost_a_rank_fail_with_it():
    def body(world):
        world.barrier()
        if world.rank == 1:
            world.close()
            return
        handles = [world.all_reduce(torch.ones(4), async_op=True, label=f"bucket {number}") for number in range(3)]
        for wait in (*(handle.wait for handle in handles), world.barrier):
            with pytest.raises(rl.RankLost, match=r"collective number 2 of this group: lost rank 1: it has ended"):
                wait()

    rl.simulate(2, body, timeout=60.0, backend="rankloom")


def test_an_asynchronous_call_works_in_inference_mode():
    def body(world):
        with torch.inference_mode():
            return world.reduce_scatter(torch.ones(4), async_op=True).wait().tolist()

    assert rl.simulate(2, body) == [[2.0, 2.0]] * 2


def test_closing_a_group_ends_what_waits_to_be_compared():
    def body(world):
        world.barrier()   # rank 1 has connected
        if world.rank == 0:
            handle = world.all_reduce(torch.ones(2), async_op=True)
            world.close()
            with pytest.raises(rl.RankLost, match="closed"):
                handle.wait()

    with no_thread_is_left("rankloom-debug"):
        rl.simulate(2, body, timeout=60.0)


# ---------------------------------------------------------------- ranks that are gone


@both_backends
def test_a_rank_that_has_gone_is_named_long_before_the_time_out_where_somebody_can_tell(backend):
    def body(world):
        world.all_reduce(torch.zeros(1), label="together")
        world.close() if world.rank == 1 else world.all_reduce(torch.zeros(2), label="without it")

    begin = time.monotonic()
    first, second, third = errors_of(3, body, timeout=600.0, backend=backend)
    assert time.monotonic() - begin < AT_ONCE and second is None
    for rank, error in ((0, first), (2, third)):
        assert type(error) is rl.RankLost
        assert str(error).startswith(f"rank {rank}: collective number 2 of this group: lost rank 1: it has ended, or has left the group")
        assert "rank 1: call 1, all_reduce(sum)" in str(error)


@both_backends
def test_ranks_that_wait_for_one_that_has_raised_are_set_free_and_no_thread_is_left_for_the_end_of_the_process(backend):
    """With gloo, they waited for its call until the time-out, and so did the program before it could end."""
    def body(world):
        group, mine = world.group("shard"), world.rank
        world.barrier()
        if mine == 0:
            raise ZeroDivisionError
        {1: lambda: group.all_reduce(torch.ones(1)), 2: world.barrier, 3: lambda: world.recv(torch.ones(1), 0)}[mine]()

    with no_thread_is_left(), pytest.raises(ZeroDivisionError):
        rl.simulate(rl.Mesh(replicate=2, shard=2), body, timeout=600.0, backend=backend)


def test_what_a_rank_announced_before_it_left_counts():
    store = dist.HashStore()
    ahead = debug.Inspector(store, 0, (0, 1), 20.0)
    mine = Fingerprint("broadcast", "[1]", "int64", "x", "here:1")
    thread = threading.Thread(target=ahead.check, args=(mine,))
    thread.start()
    wait_until(lambda: store.check(["call/1/0"]))
    debug.Inspector(store, 1, (0, 1), 20.0, lambda: [0]).check(mine)
    thread.join()


def test_a_store_that_has_gone_with_its_process_is_said_to_be_gone():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    inspector = debug.Inspector(dist.TCPStore("127.0.0.1", server.port, is_master=False), 1, (3, 5), 20.0, lambda: [0])
    del server
    gc.collect()
    with pytest.raises(rl.RankLost, match="rank 5: collective number 1 of this group: lost the store of the job, .*has ended .rank 0"):
        inspector.check(Fingerprint("broadcast", "[1]", "int64", "x", "here:1"))
    told = inspector.board.where_is_everyone()
    assert re.match("  not known. rank 5: .* lost the store .*; rank 3 has ended, or has left the group", told)


@pytest.mark.parametrize("value", ["0", "", None])
def test_without_debug_mode_no_call_touches_the_store(value, monkeypatch):
    monkeypatch.delenv("RANKLOOM_DEBUG") if value is None else monkeypatch.setenv("RANKLOOM_DEBUG", value)

    def body(world):
        world.barrier()
        keys = world._store.num_keys()
        for n in range(5):
            world.all_reduce(torch.ones(2), label=str(n))
            world.all_gather_object("x")
        world.barrier()
        return world._store.num_keys() - keys

    monkeypatch.setattr(debug.Inspector, "check", lambda self, mine: pytest.fail("compared without being asked to"))
    assert rl.simulate(2, body) == [0, 0]


def test_a_call_for_whose_comparison_no_thread_starts_is_an_error_and_the_next_one_is_made():
    queue, made = Queue(), []
    start = queue.behind(lambda: None, lambda pg: made.append(pg) or [])
    with no_thread_starts(), pytest.raises(RuntimeError, match="start new thread"):
        start("first")
    begin = time.monotonic()
    queue.drain(2 * AT_ONCE)
    start("second").wait()
    assert made == ["second"] and time.monotonic() < begin + AT_ONCE
