"""What sharding does: gathers into the tensor that a slice is part of, sums into a slice of the input, tensors that exist once."""

import gc
import os
import threading
from pathlib import Path

import pytest
import torch

import rankloom as rl
from conformance.ranks import BACKENDS, Ranks, make_ranks
from rankloom.base.errors import RankLost, ShapeMismatch
from rankloom.world.group import Group
from rankloom.world.transport import buffers
from rankloom.world.transport import memory as shared
from rankloom.world.transport.codes import SUM

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
ROWS = [5, 1 << 13, 40_003]   # a slice that is not worth a second meeting, one that is, and one of several windows
MEMORY = ["shared", "private", "either"]
ROUNDS = 2


@pytest.fixture(scope="module", params=[*BACKENDS, "gloo"])
def ranks(request):
    """`ranks(size)`, kept from test to test."""
    kept: dict[int, Ranks] = {}

    def of(size):
        if size not in kept:
            kept[size] = Ranks(size, kernel=None) if request.param == "gloo" else make_ranks(request.param, size)
        return kept[size]

    yield of
    for made in kept.values():
        made.close()


def on_every_rank(world, body):
    """body(group, rank) on all ranks, with groups of ours."""
    return world.run(lambda rank: body(Group(world.groups[rank], rank, range(world.size)), rank))


def memory(group, n, dtype, where):
    """n elements in memory that all ranks map, or not, or on some ranks."""
    shared = group.buffer(n, dtype)
    return shared if where == "shared" or (where == "either" and group.rank % 2) else torch.zeros(n, dtype=dtype)


def small_numbers(n, seed, dtype):
    """Of which sums of a few are exact in every dtype."""
    return (torch.arange(n) % 7 + seed).to(dtype)


def call(collective, x, out, is_late):
    return collective(x, out=out, async_op=True).wait() if is_late else collective(x, out=out)


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("where", MEMORY)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_a_slice_is_gathered_into_the_tensor_that_it_is_part_of(ranks, p, where, is_late):
    def body(group, rank):
        for rows, dtype in ((rows, dtype) for rows in ROWS for dtype in DTYPES):
            whole = memory(group, p * rows, dtype, where)
            mine = whole[rank * rows:(rank + 1) * rows]
            for turn in range(ROUNDS):   # what is written after a call must not reach whoever still reads for it
                whole.fill_(-1)
                mine.copy_(small_numbers(rows, rank + turn, dtype))
                assert call(group.all_gather, mine, whole, is_late) is whole
                assert torch.equal(whole, torch.cat([small_numbers(rows, other + turn, dtype) for other in range(p)])), (rows, dtype)

    on_every_rank(ranks(p), body)


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("where", MEMORY)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_a_sum_lands_in_this_ranks_slice_of_what_is_summed_and_the_other_slices_stay(ranks, p, where, is_late):
    def body(group, rank):
        for rows, dtype in ((rows, dtype) for rows in ROWS for dtype in DTYPES):
            whole = memory(group, p * rows, dtype, where)
            mine, sums = whole[rank * rows:(rank + 1) * rows], sum(small_numbers(p * rows, other, torch.float64) for other in range(p))
            for turn in range(ROUNDS):
                expected = small_numbers(p * rows, rank + turn, dtype)
                whole.copy_(expected)
                assert call(group.reduce_scatter, whole, mine, is_late) is mine
                expected[rank * rows:(rank + 1) * rows] = (sums + p * turn)[rank * rows:(rank + 1) * rows].to(dtype)
                assert torch.equal(whole, expected), (rows, dtype)

    on_every_rank(ranks(p), body)


@pytest.mark.parametrize("kernel", ["C", "Python"])
def test_calls_in_place_take_the_short_way_and_calls_whose_tensors_overlap_otherwise_do_not(kernel):
    world = Ranks(3, kernel=kernel)

    def body(group, rank):
        whole, at_once = torch.ones(9), group._at_once
        mine, beside = whole[3 * rank:3 * rank + 3], whole[3 * rank - 1:3 * rank + 2] if rank else whole[1:4]
        taken = [at_once.all_gather(mine, whole, ""), at_once.reduce_scatter(whole, SUM, mine, ""), at_once.all_gather(beside, whole, ""),
                 at_once.reduce_scatter(whole, SUM, beside, ""), at_once.all_to_all(whole, whole, "")]
        return taken[0] is whole and taken[1] is mine and taken[2:] == [None] * 3

    assert on_every_rank(world, body) == [True] * 3
    world.close()


# ---------------------------------------------------------------- one tensor for all ranks


@pytest.mark.parametrize("kernel", ["C", "Python"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_what_each_rank_writes_to_its_slice_of_a_common_tensor_all_see_once_they_have_met(p, dtype, kernel):
    rows, world = 5000, Ranks(p, kernel=kernel)

    def body(group, rank):
        whole, is_common = group.common_buffer(p * rows, dtype)
        assert is_common and whole.shape == (p * rows,) and whole.dtype == dtype and whole.is_contiguous() and not whole.any()
        group.barrier()
        whole[rank * rows:(rank + 1) * rows] = small_numbers(rows, rank, dtype)
        group.barrier()
        assert torch.equal(whole, torch.cat([small_numbers(rows, other, dtype) for other in range(p)]))
        group.barrier()
        return whole.data_ptr()

    addresses = on_every_rank(world, body)
    assert len(set(addresses)) == p, "each rank has mapped it by itself"
    world.close()


def common_sums(world):
    whole, is_common = world.common_buffer(2 * 1000)
    whole[1000 * world.rank:1000 * (world.rank + 1)] = world.rank + 1.0
    world.barrier()
    return is_common, whole.sum().item()


def test_processes_share_a_common_tensor_too():
    assert rl.spawn(2, common_sums, backend="rankloom") == [(True, 3000.0)] * 2


@pytest.mark.parametrize(("p", "backend"), [(1, "rankloom"), (1, "gloo"), (3, "gloo")])
def test_where_no_memory_is_shared_each_rank_has_its_own(p, backend):
    def body(world):
        whole, is_common = world.common_buffer(6, torch.float64)
        whole += world.rank
        world.barrier()
        return is_common, whole.tolist()

    assert rl.simulate(p, body, backend=backend) == [(False, [float(rank)] * 6) for rank in range(p)]


def test_ranks_of_several_hosts_have_their_own_each():
    world = Ranks(3, hosts="aab")
    made = on_every_rank(world, lambda group, rank: group.common_buffer(3))
    assert [(x.tolist(), is_common) for x, is_common in made] == [([0.0] * 3, False)] * 3
    world.close()


def test_a_common_tensor_is_cut_in_equal_slices_or_refused_on_all_ranks():
    def refused(world):
        with pytest.raises(ShapeMismatch, match="7 elements cannot be cut in 2 equal slices"):
            world.common_buffer(7)
        with pytest.raises(ShapeMismatch, match=r"ranks ask for different sizes, in bytes: \[8, 16\]"):
            world.common_buffer(2 * (world.rank + 1))
        return world.common_buffer(0)[0].shape

    assert rl.simulate(2, refused, backend="rankloom") == [(0,)] * 2


def test_a_common_tensor_larger_than_what_is_free_is_refused_on_all_ranks(monkeypatch):
    monkeypatch.setattr(buffers, "available_memory", lambda: 1 << 20)

    def body(world):
        with pytest.raises(MemoryError, match=r"1,048,584 bytes of shared memory were asked for \(1 x 1,048,584\), 1,048,576 are free"):
            world.common_buffer((1 << 18) + 2)
        return world.common_buffer(1 << 18)[1]   # one for all, not one for each

    assert rl.simulate(2, body, backend="rankloom") == [True] * 2


def test_memory_that_others_take_after_all_have_agreed_is_not_asked_for_again_by_one_rank(monkeypatch):
    monkeypatch.setattr(buffers, "available_memory", lambda: 1 << 30)   # when ranks agree

    def body(world):
        world.barrier()
        monkeypatch.setattr(shared, "available_memory", lambda: 0)        # a moment later
        return world.common_buffer(1 << 10)[1]

    assert rl.simulate(2, body, backend="rankloom", timeout=20) == [True] * 2


@pytest.mark.parametrize("hosts", [["a"] * 3, ["a", "b", "a"]], ids=["one host", "two hosts"])
@pytest.mark.parametrize(("step", "failing", "error"), [
    ("create_memory", 0, MemoryError("no room")), ("open_memory", 2, RankLost("not mine")), ("map_memory", 2, MemoryError("no room"))])
def test_memory_that_one_rank_cannot_create_open_or_map_is_refused_on_all_and_no_file_stays_open(monkeypatch, hosts, step, failing, error):
    world, real = Ranks(3, hosts=hosts), getattr(buffers, step)
    before = len(os.listdir("/proc/self/fd"))

    def fail(*args):
        if threading.get_ident() == threads[failing]:
            raise error
        return real(*args)

    def body(group, rank):
        threads[rank] = threading.get_ident()
        with pytest.raises(type(error), match=f"rank {rank}: buffer in group 'world', said rank .: .*{error}"):
            group.buffer(7)
        return group.all_reduce(torch.ones(1)).item()

    threads = {}
    monkeypatch.setattr(buffers, step, fail)
    assert on_every_rank(world, body) == [3.0] * 3
    assert len(os.listdir("/proc/self/fd")) == before
    world.close()


def mapped():
    """How many pieces of this process's shared memory are of ours."""
    return Path("/proc/self/maps").read_text().count("memfd:rankloom")


def test_common_memory_is_given_back_with_the_last_view_of_it():
    def body(world):
        world.barrier()
        gc.collect()   # what other tests have left
        world.barrier()
        before = mapped()
        world.barrier()
        view = world.common_buffer(2000)[0][1000:].view(10, 100)
        world.barrier()
        while_held = mapped() - before
        view.fill_(1)
        world.barrier()
        del view
        gc.collect()
        world.barrier()
        left = mapped() - before
        world.barrier()   # a rank that returns gives back its memory of the group
        return while_held, left

    assert rl.simulate(2, body, backend="rankloom") == [(2, 0)] * 2   # two mappings, for both ranks are this process


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_buffer_of_one_dim_may_be_asked_for_by_its_length(backend):
    world = make_ranks(backend, 2)
    try:
        for shape in world.run(lambda rank: [world.groups[rank].buffer(n).shape for n in (5, (5,), [5], 0)]):
            assert shape == [(5,), (5,), (5,), (0,)]
    finally:
        world.close()


def test_a_buffer_may_be_found_by_the_collector_while_others_are_given_back():
    """It lies in a cycle, as that of an engine does: the first container that is made after it was dropped finds it."""
    class Engine:
        pass

    world, engine = Ranks(2), Engine()
    engine.itself, engine.memory = engine, world.run(lambda rank: world.groups[rank].buffer((1000,)))[0]
    mine, before = world.groups[0]._buffers, gc.get_threshold()
    lists = [[] for _ in range(1000)]   # Python keeps some that were given up, and looks for none as it deals them out
    gc.disable()
    try:
        gc.set_threshold(1)
        del engine
        gc.enable()
        mine._sweep()
    finally:
        gc.enable()
        gc.set_threshold(*before)
    gc.collect()
    assert list(mine._pieces) == [1] and lists, "the other, of the arena, is in use"
    world.close()
