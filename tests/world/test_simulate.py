"""Ranks as threads: results, the first failure, and that nobody is left waiting because of it."""

import _thread
import os
import re
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

import rankloom as rl
from patience import AT_ONCE, no_thread_is_left, wait_until
from rankloom.world.simulate import _resolve_operators
from rankloom.world.world import World


class Mine(Exception):
    """An exception of the user's own, that wants two arguments."""

    def __init__(self, code: int, text: str):
        super().__init__(code, text)


def quickly(ranks, body, error, **options):
    """`body` must raise `error` in simulate, well before its time-out; returns the exception."""
    begin = time.monotonic()
    with pytest.raises(error) as caught:
        rl.simulate(ranks, body, timeout=AT_ONCE + 5, **options)   # until then a rank that is left behind keeps its process
    assert time.monotonic() - begin < AT_ONCE, "the others were left waiting"
    return caught.value


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_results_come_in_rank_order_whoever_ends_first(p):
    def body(world):
        time.sleep(0.03 * (p - world.rank))
        return world.rank, world.size, world.local_rank, world.local_size, world.device.type

    assert rl.simulate(p, body) == [(rank, p, rank, p, "cpu") for rank in range(p)]


def test_ranks_run_at_the_same_time_in_one_thread_each():
    def body(world):
        world.barrier()
        return threading.current_thread().name, torch.get_num_threads()

    before = torch.get_num_threads()
    assert rl.simulate(3, body) == [(f"rank-{rank}", 1) for rank in range(3)]
    assert torch.get_num_threads() == before


def test_a_mesh_says_how_many_ranks_there_are_and_where_each_stands():
    mesh = rl.Mesh(pipe=2, tensor=2)
    assert rl.simulate(mesh, lambda w: w.mesh.coords(w.rank)["pipe"]) == [0, 0, 1, 1]


@pytest.mark.parametrize("ranks", [0, -1, 2.0, "2", True, None])
def test_a_number_of_ranks_that_cannot_be_is_refused(ranks):
    with pytest.raises(rl.MeshError, match=r"number of ranks is .*1 or more"):
        rl.simulate(ranks, lambda w: None)


@pytest.mark.parametrize("waits", [True, False], ids=["blocking", "its handle dropped"])
@pytest.mark.parametrize("numel", [4, 1 << 18])
@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_an_early_end_of_one_rank_does_not_cut_off_a_slower_one(backend, numel, waits):
    def body(world):
        if world.rank == 0:
            world.send(torch.ones(numel), 1, async_op=not waits)
            return None
        time.sleep(0.1)
        return world.recv(torch.zeros(numel), 0).sum().item()

    assert rl.simulate(2, body, backend=backend) == [None, float(numel)]


CALLS_OF_ONE_RANK = {
    "a collective": lambda w: w.all_reduce(torch.ones(3)),
    "an asynchronous one": lambda w: w.all_gather(torch.ones(3), async_op=True).wait(),
    "a message": lambda w: w.recv(torch.ones(3), 1),
    "an exchange": lambda w: w.exchange(torch.ones(3), 1, torch.ones(3), 1),
    "a collective of a sub-group": lambda w: w.group("shard").barrier(),
    "a message of a twin": lambda w: w.group("shard").twin().recv(torch.ones(3), 1),
}


@pytest.mark.parametrize("returns_first", [True, False])
@pytest.mark.parametrize("call", CALLS_OF_ONE_RANK)
@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_a_rank_that_waits_for_one_whose_body_has_returned_is_told_at_once(backend, call, returns_first):
    def body(world):
        group = world.group("shard")
        group.barrier()
        group.twin().barrier()
        if (world.rank == 0) == returns_first:
            time.sleep(0.1)
        if world.rank == 0:
            CALLS_OF_ONE_RANK[call](world)

    kind = rl.CollectiveMismatch if backend == "gloo" else rl.RankLost
    error = quickly(rl.Mesh(replicate=2, shard=2), body, kind, backend=backend)
    assert re.search(r"rank \d: has returned from its body|lost rank \d: it has left", str(error))


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_rank_that_raises_frees_the_others_at_once_and_its_own_exception_surfaces(bad):
    def body(world):
        if world.rank == bad:
            raise Mine(7, "in the body")
        world.all_reduce(torch.zeros(3))

    error = quickly(3, body, Mine)
    assert error.args == (7, "in the body")
    assert error.__notes__ == [f"(rank {bad} of 3 failed first; the others were stopped because of it)"]


@pytest.mark.parametrize("wait", ["all_reduce", "all_gather", "broadcast", "recv", "barrier", "handle", "sub-group"])
def test_whatever_the_others_wait_in_they_are_set_free_with_rank_lost(wait):
    told = {}

    def body(world):
        group, x = world.group("shard"), torch.zeros(3)
        waits = {"all_reduce": lambda: world.all_reduce(x), "all_gather": lambda: world.all_gather(x),
                 "broadcast": lambda: world.broadcast(x), "recv": lambda: world.recv(x, 0),
                 "barrier": world.barrier, "sub-group": lambda: group.all_reduce(x),
                 "handle": lambda: world.all_reduce(x, async_op=True).wait()}
        try:
            group.barrier()   # of which a slow rank may see no more than that the other is gone
            if world.rank == 0:
                raise Mine(1, "")
            waits[wait]()
        except rl.RankLost as error:
            told[world.rank] = str(error)
            raise

    quickly(rl.Mesh(shard=2), body, Mine)
    wait_until(lambda: told)
    assert told[1].startswith("rank 1: ") and "lost its connection" in told[1]


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_ranks_that_make_groups_when_one_raises_are_set_free_and_no_thread_is_left_for_the_end_of_the_process(backend):
    """gloo itself would wait until its time-out, first for the rank that does not come, then for those that waited for it."""
    def body(world):
        for axes in ("pipe",), ("shard",):
            world.group(*axes)
        if world.rank == 0:
            raise Mine(3, "on one rank")
        for axes in ("replicate",), ("pipe", "shard"), ("pipe", "replicate"), ("replicate", "shard"):
            world.group(*axes)

    for _ in range(5):
        with no_thread_is_left(), pytest.raises(Mine):
            rl.simulate(rl.Mesh(pipe=2, replicate=2, shard=2), body, backend=backend, timeout=10 * AT_ONCE)


def test_a_rank_that_nobody_joins_to_make_a_group_is_told_so_after_the_time_out():
    with pytest.raises(rl.RankLost, match=r"rank 0: only 1 of 2 ranks came to make a group; the others did not come within 0.5 s"):
        rl.simulate(rl.Mesh(replicate=2, shard=2), lambda world: world.group("shard") if world.rank == 0 else time.sleep(1), timeout=0.5)


@pytest.mark.parametrize("dropped", [True, False])
@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_a_message_that_nobody_waits_for_and_that_cannot_come_any_more_ends_no_call_of_others(backend, dropped):
    """In shared memory, to look whether it had come broke the group for all ranks."""
    def body(world):
        if world.rank == 1:
            listening = world.recv(torch.zeros(1), 2, tag=9, async_op=True)
            time.sleep(0.2)   # rank 2 has returned
            if dropped:
                listening = None
            world.send(torch.ones(1), 0, async_op=True)
            del listening
        if world.rank == 0:
            time.sleep(0.4)   # rank 1 has returned
            return world.recv(torch.zeros(1), 1).item()
        return None

    assert rl.simulate(3, body, backend=backend, timeout=10) == [1.0, None, None]


@pytest.mark.parametrize(("rank", "peer"), [(0, 1), (3, 2)])
def test_a_rank_that_makes_a_group_with_one_whose_body_has_returned_is_told_at_once(rank, peer):
    error = quickly(rl.Mesh(replicate=2, shard=2), lambda world: world.group("shard") if world.rank == rank else None, rl.RankLost)
    assert str(error) == f"rank {rank}: only 1 of 2 ranks came to make a group; rank {peer} has returned from its body"


def test_a_rank_that_raises_while_it_holds_unfinished_handles_frees_the_others_too():
    """The traceback keeps its local variables alive, and these kept the connection open."""
    told = {}

    def body(world):
        done = world.all_reduce(torch.zeros(3), async_op=True)
        done.wait()
        try:
            coming = world.recv(torch.zeros(3), 1 - world.rank, async_op=True)   # the other may be gone by now
            if world.rank == 0:
                raise Mine(1, coming.label)
            world.barrier()
        except rl.RankLost as error:
            told[world.rank] = error
            raise

    quickly(2, body, Mine)
    wait_until(lambda: told)   # rank 1 is not left behind; on a busy machine simulate does not wait so long
    assert list(told) == [1]


def test_an_error_that_is_kept_keeps_no_connection():
    """Whoever waited for that rank was left to its time-out, and the thread that moves bytes turned in circles meanwhile."""
    kept, told = [], []

    def body(world):
        try:
            world.barrier()   # of which a slow rank may see no more than that the other is gone
            if world.rank == 0:
                raise Mine(6, "")
            if world.rank == 1:
                world.exchange(torch.zeros(3), 0, torch.zeros(3), 0)
            world.recv(torch.zeros(3), 1)
        except rl.RankLost as error:
            kept.append(error)
            world.close()
            told.append(world.rank)

    quickly(3, body, Mine)
    wait_until(lambda: len(told) == 2)


def wait_for_a_message(world):
    world.recv(torch.zeros(3), 0)


def wait_for_a_group(world):
    world.group("shard")
    time.sleep(4)   # those that are not of the group of rank 0


def wait_for_nothing_of_ours(world):
    time.sleep(4)


@pytest.mark.parametrize("wait", [wait_for_a_message, wait_for_a_group, wait_for_nothing_of_ours])
def test_a_rank_that_cannot_be_set_free_is_left_behind(wait):
    """A call of rank 0 is in flight that rank 1 never joins, so rank 0 cannot even close; or rank 1 does not listen at all."""
    def body(world):
        world.barrier()
        if world.rank == 0:
            started = world.all_reduce(torch.zeros(3), async_op=True)
            raise Mine(5, started.label)
        wait(world)

    quickly(rl.Mesh(shard=2, replicate=2) if wait is wait_for_a_group else 2, body, Mine)


class Fuse(torch.autograd.Function):
    """The identity, whose backward raises when it is lit."""

    @staticmethod
    def forward(ctx, x, lit):
        ctx.lit = lit
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.lit:
            raise Mine(2, "in the middle of backward")
        return gradient, None


@pytest.mark.parametrize("all_reduce", ["backend", "ring"])
@pytest.mark.parametrize("p", [2, 3])
def test_one_rank_raising_in_the_middle_of_backward_frees_the_others(p, all_reduce):
    def body(world):
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        for param in layers.parameters():
            nn.init.constant_(param, 0.1)
        replica = rl.data_parallel(layers, world, bucket_bytes=1, all_reduce=all_reduce)
        for step in range(3):
            x = torch.ones(2, 4)
            for at, layer in enumerate(replica.module):
                x = Fuse.apply(layer(x), step == 2 and at == 1 and world.rank == 1)
            x.sum().backward()

    assert quickly(p, body, Mine).args == (2, "in the middle of backward")


def test_the_first_failure_wins_over_those_that_it_causes():
    def body(world):
        if world.rank == 2:
            time.sleep(0.1)
            raise Mine(3, "")
        world.all_reduce(torch.zeros(1))

    for _ in range(5):
        assert quickly(4, body, Mine).__notes__[0].startswith("(rank 2 of 4 failed first")


@pytest.mark.parametrize("cause", [rl.CollectiveTimeout("rank 0: nobody came"), Mine(7, "")], ids=["time-out", "own"])
def test_a_rank_that_tells_of_its_closed_connection_before_its_peer_tells_why_it_closed_is_not_the_first(cause):
    """gloo closes the connections of a call that times out before the call returns."""
    joined, told = threading.Barrier(2), threading.Event()

    def body(world):
        joined.wait(AT_ONCE)
        if world.rank == 1:
            told.set()
            raise rl.RankLost("rank 1: connection closed by peer")
        told.wait()
        time.sleep(0.1)
        raise cause

    assert quickly(2, body, type(cause)) is cause


@pytest.mark.parametrize(("code", "shown"), [(None, ""), (0, "0"), ("late", "'late'")])
def test_a_rank_that_exits_does_not_end_the_caller_without_a_word(code, shown):
    def body(world):
        if world.rank == 1:
            sys.exit(code)
        world.barrier()

    with pytest.raises(rl.RankFailed, match=rf"rank 1 called sys.exit\({shown}\).* ends with `return`") as caught:
        rl.simulate(2, body)
    assert caught.value.rank == 1 and isinstance(caught.value.__cause__, SystemExit)


def test_a_failed_simulation_leaves_no_thread_behind():
    def body(world):
        if world.rank == 1:
            raise Mine(4, "")
        world.barrier()

    before = threading.active_count()
    quickly(3, body, Mine)
    wait_until(lambda: threading.active_count() <= before, 2 * AT_ONCE)   # gloo may leave one to its time-out


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_an_interrupted_simulation_leaves_no_thread_behind(backend):
    """Python ended under those that it left, and aborted. gloo does not always wake a call whose peer has gone: then the time-out does."""
    def body(world):
        world.barrier()
        if world.rank == 1:
            _thread.interrupt_main()
        while True:
            world.barrier()

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        rl.simulate(3, body, backend=backend, timeout=5)
    wait_until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("moment", ["rank-0", "rank-2"])
def test_an_interrupt_while_the_ranks_start_leaves_no_thread_behind(monkeypatch, moment):
    """When rank 2 has started, all are at work for ever; when only rank 0 has, it still waits for the others to make its world."""
    def start_and_be_interrupted(thread):
        start(thread)
        if thread.name == moment:
            if moment == "rank-2":
                at_work.wait()
            raise KeyboardInterrupt

    def body(world):
        world.barrier()
        at_work.set()
        while True:
            world.barrier()

    at_work, start = threading.Event(), threading.Thread.start
    before = set(threading.enumerate())
    monkeypatch.setattr(threading.Thread, "start", start_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        rl.simulate(3, body, timeout=5 if moment == "rank-2" else 10 * AT_ONCE)   # gloo does not always wake a call whose peer has gone
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_a_world_that_is_made_after_an_interrupt_is_closed(monkeypatch):
    """All ranks are still making their worlds when the interrupt comes: nobody could close them then."""
    class Late(World):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            if self.rank == 1:
                _thread.interrupt_main()
            released.wait()

    def body(world):
        while True:
            world.barrier()

    released = threading.Event()
    before = set(threading.enumerate())
    monkeypatch.setattr("rankloom.world.simulate.World", Late)
    with pytest.raises(KeyboardInterrupt):
        rl.simulate(3, body, timeout=5)
    released.set()
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_a_rank_that_makes_no_call_does_not_keep_an_interrupt_waiting():
    released = threading.Event()

    def body(world):
        if world.rank == 0:
            _thread.interrupt_main()
        released.wait()

    with pytest.raises(KeyboardInterrupt):
        rl.simulate(2, body)
    released.set()


def test_a_call_that_other_ranks_have_not_made_does_not_keep_an_interrupt_waiting():
    """gloo closes a rank when the calls that it has begun have ended, and nobody closed the others meanwhile."""
    released = threading.Event()

    def body(world):
        if world.rank == 0:
            world.all_reduce(torch.ones(3), async_op=True)
            _thread.interrupt_main()
        released.wait()

    before, begin = set(threading.enumerate()), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        rl.simulate(3, body, timeout=2 * AT_ONCE)
    assert time.monotonic() - begin < AT_ONCE
    released.set()
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_two_simulations_at_once_do_not_disturb_each_other():
    results = {}
    one = lambda n: results.update({n: rl.simulate(2, lambda w: w.all_reduce(torch.tensor(n)).item())})
    outer = [threading.Thread(target=one, args=(n,)) for n in (1, 10)]
    for thread in outer:
        thread.start()
    for thread in outer:
        thread.join()
    assert results == {1: [2, 2], 10: [20, 20]}


BYTES_MOVED_BY = """
import os, time, torch, rankloom as rl

def body(world):
    world.twin().barrier()
    return world.all_reduce(torch.ones(1)).item()

assert rl.simulate(3, body) == [3.0] * 3
end = time.monotonic() + 20
while (threads := len(os.listdir("/proc/self/task"))) > 2 and time.monotonic() < end:   # those of the ranks go a moment after `join`
    time.sleep(0.01)
assert threads == 2, "this thread, and gloo's"
child = os.fork()
if child == 0:
    os._exit(rl.simulate(3, body) != [3.0] * 3)
assert os.waitpid(child, 0)[1] == 0
"""


def test_one_thread_moves_the_bytes_of_all_groups_of_a_process_and_a_fork_has_its_own():
    subprocess.run([sys.executable, "-c", BYTES_MOVED_BY], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})   # no threads of torch


@pytest.mark.parametrize("operator", [torch.ops.aten.sinc, torch.ops.c10d.monitored_barrier_], ids=str)   # hardly used
def test_operators_of_torch_have_their_python_objects_before_there_are_threads(operator):
    """Two threads that each make one leave torch with one that is freed; the process died of it, once in many runs."""
    vars(operator).pop("default", None)
    _resolve_operators.cache_clear()
    assert rl.simulate(2, lambda world: "default" in vars(operator)) == [True, True]
