"""Collectives of ranks that share a device, on one in host memory whose queues are threads: all but the GPU itself."""

import functools
import gc
import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance.cases import COLLECTIVES, LAYOUTS, WAITS, Case, random_case
from conformance.oracle import MOVED, OPS, REDUCED, has_meaning
from conformance.ranks import Ranks
from conformance.test_collectives import run_and_check
from patience import AT_ONCE
from rankloom.base.errors import CollectiveMismatch, DeviceError, RankLost, ShapeMismatch
from rankloom.world.transport import arithmetic, codes, device, fallback, operands, rounds
from rankloom.world.transport.device_group import DeviceGroup
from world.transport.twin import Twin

SMALL_SLOT, SMALL_SHARES = 8192, 1024   # bytes: so that few bytes are several windows, and are summed in shares


class DeviceRanks(Ranks):
    """Ranks whose groups are on a device that all share."""

    def group(self, members):
        return [DeviceGroup(host, Twin(seed)) for seed, host in enumerate(super().group(members))]

    def each(self, body, group="groups"):
        """`body(group, rank)` on all ranks."""
        return self.run(lambda rank: body(getattr(self, group)[rank], rank))


@pytest.fixture(scope="module")
def ranks():
    """`ranks(size)`, kept from one test to the next, and made anew when one has failed."""
    kept = {}

    def of(size):
        if size not in kept or kept[size].closed:
            kept[size] = DeviceRanks(size)
        return kept[size]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "SLOT", SMALL_SLOT)
        patch.setattr(rounds, "IN_SHARES", SMALL_SHARES)
        yield of
        for made in kept.values():
            made.close()


@pytest.fixture
def new_pair(ranks):
    """Two ranks that have not called anything: those of `ranks(2)` know the arguments of earlier tests, at addresses that come again."""
    made = DeviceRanks(2)
    yield made
    made.close()


@pytest.fixture
def trio(ranks):
    """Three ranks for a test that breaks them."""
    made = ranks(3)
    yield made
    made.close()


# ---------------------------------------------------------------- every bit


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", MOVED, ids=lambda d: str(d).removeprefix("torch."))
def test_every_collective_has_every_dtype_and_operation(ranks, size, dtype):
    named = [(name, op) for name, c in COLLECTIVES.items() for op in (OPS if c.reduces else ("sum",))
             if not c.reduces or (dtype in REDUCED and has_meaning(op, dtype))]
    run_and_check(ranks(size), [Case(name, dtype, op, (5, 3), seed=n) for n, (name, op) in enumerate(named)])


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_reads_and_writes_every_layout_and_can_be_waited_for_in_every_way(ranks, name):
    run_and_check(ranks(3), [Case(name, dtype, "sum", shape, layout, into, how, late)
                             for layout in LAYOUTS for into in LAYOUTS for how, late in zip(WAITS, (False, False, True, True, True))
                             for shape, dtype in (((6, 4), torch.float32), ((65,), torch.bfloat16))])


@pytest.mark.parametrize("size", [1, 2, 4, 5, 8])
def test_tensors_of_many_windows_arrive_whole(ranks, size):
    elements = 3 * SMALL_SLOT // 4 + 7
    run_and_check(ranks(size), [Case(name, torch.float32, "sum", (elements // (size if "scatter" in name or "alltoall" in name else 1),),
                                     into=into, seed=n) for n, name in enumerate(COLLECTIVES) for into in ("plain", "shared")])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_slices_are_gathered_and_summed_in_the_tensor_that_they_are_part_of(ranks, size, shared, dtype):
    """What sharding does, in several windows; `shared`: in memory that all ranks map."""
    rows = 2 * SMALL_SLOT // dtype.itemsize + 3

    def body(group, rank):
        whole = group.buffer((size * rows,), dtype) if shared else torch.zeros(size * rows, dtype=dtype)
        mine, numbers = whole[rank * rows:(rank + 1) * rows], (torch.arange(size * rows) % 7).to(dtype)
        whole.fill_(-1)
        mine.copy_(numbers[:rows] + rank)
        group._allgather_base(whole, mine).wait()
        assert torch.equal(whole, torch.cat([numbers[:rows] + other for other in range(size)]))
        whole.copy_(numbers + rank)
        group._reduce_scatter_base(mine, whole).wait()
        expected = numbers + rank
        expected[rank * rows:(rank + 1) * rows] = (size * numbers + sum(range(size)))[rank * rows:(rank + 1) * rows]
        assert torch.equal(whole, expected)

    ranks(size).each(body)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_programs_give_every_rank_every_bit(ranks, size):
    @settings(max_examples=12, suppress_health_check=list(HealthCheck))
    @given(st.lists(random_case(size).filter(lambda case: np.prod(case.shape) < 10_000), min_size=1, max_size=12))
    def run(cases):
        run_and_check(ranks(size), cases)

    run()


@pytest.mark.parametrize("dtype", [*arithmetic.FLOATS, torch.int8, torch.uint8, torch.int32, torch.uint16, torch.uint32, torch.uint64],
                         ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.parametrize("in_place", [False, True])
def test_pieces_are_combined_to_the_bits_of_the_kernel_in_shared_memory(dtype, pieces, in_place):
    ops = range(5) if dtype.is_floating_point else [op for op in range(8) if op != codes.AVG]
    for op in ops:
        rng = np.random.default_rng(op)
        numbers = torch.from_numpy(rng.uniform(0.5, 2, (pieces, 33))).to(dtype) if dtype.is_floating_point else torch.from_numpy(
            rng.integers(0, 256, (pieces, 33 * dtype.itemsize), dtype=np.uint8)).view(dtype)
        given_bytes = [x.view(torch.uint8) for x in numbers]
        code = operands.NUMBERS[dtype]
        wanted = fallback.combine(code, op, [x.numpy().copy() for x in given_bytes])
        targets = given_bytes if in_place else [torch.zeros_like(given_bytes[0])]
        arithmetic.combine(targets, given_bytes, dtype, op)
        assert all(target.numpy().tobytes() == wanted.tobytes() for target in targets), (op, numbers)


# ---------------------------------------------------------------- what it costs


def test_a_shared_buffer_is_summed_where_it_lies_by_each_rank_in_turn_with_two_meetings_and_no_copy(ranks):
    def body(group, rank):
        x, logs = group.buffer((4096,)), []
        group.allreduce([torch.ones(1)]).wait()   # the first makes the slots
        for turn in range(4):
            x.copy_(torch.arange(4096.0) + rank + turn)
            group._device.log.clear()
            group.allreduce([x]).wait()
            logs.append(list(group._device.log))
            assert x.tolist() == (3 * torch.arange(4096.0) + 3 + 3 * turn).tolist()
        return logs

    adds, waits = (["mark", "follow", "follow", *then, "end"] for then in (["run", "mark"], ["follow"]))
    turns = [*zip(*ranks(3).each(body))]
    adders = [logs.index(adds) for logs in turns]
    assert all(logs == tuple(adds if rank == adder else waits for rank in range(3)) for logs, adder in zip(turns, adders))
    assert adders in ([2, 1, 0, 2], [1, 0, 2, 1], [0, 2, 1, 0]), "in turn, wherever earlier calls have left off"


def test_a_small_tensor_costs_one_meeting(ranks):
    def body(group, rank):
        group.allreduce([torch.ones(3)]).wait()
        group._device.log.clear()
        group.allreduce([torch.ones(3)]).wait()
        return list(group._device.log)

    assert ranks(3).each(body) == [["run", "mark", "follow", "follow", "run", "end"]] * 3


def test_a_step_of_many_calls_and_windows_makes_its_views_and_copies_in_the_first_two_rounds(ranks, monkeypatch):
    """Windows take turns with two slots."""
    made, fill = [], rounds.Slots.fill
    monkeypatch.setattr(rounds.Slots, "fill", lambda slots, *args: [made.append(args), *fill(slots, *args)][1:])

    def body(group, rank):
        tensors = [torch.ones(n) for n in [*range(1, 400), *[40 * SMALL_SLOT] * 12]]
        counts = []
        for _ in range(4):
            for x in tensors:
                group.allreduce([x]).wait()
            group.barrier().wait()
            counts.append(len(made))
        return counts

    for first, second, *later in ranks(2).each(body):
        assert 0 < first <= second and later == [second] * 2


def test_a_buffer_that_is_shared_on_some_ranks_only_is_staged_on_all(ranks):
    def body(group, rank):
        shared = group.buffer((4096,))
        x = shared if rank else torch.zeros(4096)
        x.copy_(torch.arange(4096.0) * (rank + 1))
        group.allreduce([x]).wait()
        return x.tolist()

    for size in (2, 3):
        assert ranks(size).each(body) == [(torch.arange(4096.0) * sum(range(1, size + 1))).tolist()] * size


def test_a_part_of_a_shared_buffer_at_the_same_place_everywhere_is_summed_where_it_lies_and_the_rest_stays(ranks):
    def body(group, rank):
        x = group.buffer((4096,)).fill_(rank)
        group.allreduce([torch.ones(1)]).wait()   # the first makes the slots
        group._device.log.clear()
        group.allreduce([x[1000:3000]]).wait()
        return x.tolist(), group._device.log.count("run")

    (first, *ran), (second, *runs) = ranks(2).each(body)
    assert [first, second] == [[rank] * 1000 + [1.0] * 2000 + [rank] * 1096 for rank in (0, 1)]
    assert sorted(ran + runs) == [0, 1], "one rank adds up"


@pytest.mark.parametrize("ranks_", range(1, 9))
@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 257, 1000, 4096, 100_001])
def test_shares_follow_each_other_begin_where_copies_are_wide_and_leave_nothing_out(ranks_, nbytes):
    parts = rounds.shares(nbytes, ranks_)
    assert parts[0][0] == 0 and parts[-1][1] == nbytes and len(parts) == ranks_
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(parts))
    assert all(begin % rounds.GRAIN == 0 or begin == nbytes for begin, _ in parts)
    assert max(end - begin for begin, end in parts) < nbytes / ranks_ + rounds.GRAIN


def test_rows_that_were_found_right_are_not_looked_through_again(new_pair, monkeypatch):
    looked = []
    monkeypatch.setattr(rounds, "find_fault", lambda table, numbers: looked.append(table.tolist()))
    given = [torch.ones(77), torch.ones(77)]
    new_pair.each(lambda group, rank: [group.allreduce([given[rank]]).wait() for _ in range(20)])
    assert len(looked) == 2, "once by each rank"


def test_views_of_the_arguments_of_a_call_are_not_made_again_when_it_comes_again(new_pair, monkeypatch):
    def body(group, rank):
        tensors = torch.ones(3), group.buffer((4096,)), torch.ones(4096)
        for x in tensors:
            group.allreduce([x]).wait()
        view, made = group._device.memory, []
        monkeypatch.setattr(group._device, "memory", lambda *span: made.append(span) or view(*span))
        for turn in range(4):
            for x in tensors:
                group.allreduce([x.fill_(rank + turn)]).wait()
                assert x.eq(2 * turn + 1).all()
        group.allreduce([tensors[0][:2].fill_(5)]).wait()
        return tensors[0].tolist(), len(made)

    assert new_pair.each(body) == [([10.0, 10.0, 7.0], 2)] * 2, "one to read and one to write, for the call that is new"


def test_of_what_was_made_of_a_call_no_more_is_kept_than_so_much(monkeypatch):
    monkeypatch.setattr(rounds, "KEPT", 4)
    call = rounds.DeviceCall(None, (), (), 1.0)
    for number in range(10):
        assert call.once(str, number) is call.once(str, number)
        assert len(call.kept) <= 4



def test_a_shared_buffer_in_the_place_of_one_that_is_gone_is_summed_in_its_own_memory(ranks):
    def body(group, rank):
        for turn in range(6):
            x = group.buffer((4096,)).fill_(rank + turn)
            group.allreduce([x]).wait()
            assert x.eq(3 * turn + 3).all()
            del x
            gc.collect()

    ranks(3).each(body)


# ---------------------------------------------------------------- what goes wrong


def test_a_rank_that_cannot_add_up_in_place_ends_the_wait_of_the_others(trio, monkeypatch):
    def body(group, rank):
        x = group.buffer((4096,))
        group.allreduce([torch.ones(1)]).wait()
        monkeypatch.setattr(group._device, "run", lambda work: work.anything)
        with pytest.raises((AttributeError, RankLost)) as caught:
            group.allreduce([x])
        all_know.wait(20)   # before a rank has left
        return caught.type

    all_know = threading.Barrier(3)
    monkeypatch.setattr(rounds, "IN_SHARES", 4096)
    assert sorted(trio.each(body), key=str) == [AttributeError, RankLost, RankLost]


def test_ranks_that_make_different_calls_all_find_out_and_can_go_on(ranks):
    def body(group, rank):
        for _ in range(2):   # also when the same fault comes again
            with pytest.raises(CollectiveMismatch) as caught:
                group.broadcast([torch.ones(3)]) if rank == 1 else group.allreduce([torch.ones(3)])
        group.allreduce([x := torch.ones(3)]).wait()
        return str(caught.value), x.tolist()

    for rank, (said, total) in enumerate(ranks(3).each(body)):
        assert f"rank {rank}: " in said and "ranks made different calls" in said
        assert "rank 1: broadcast(root rank 0), 12 bytes of float32" in said and "rank 2: all_reduce(sum)" in said
        assert total == [3.0] * 3


@pytest.mark.parametrize("numel", [3, 4096])
def test_lengths_dtypes_and_operations_that_differ_are_found_before_a_byte_moves(ranks, numel):
    def body(group, rank):
        for x in (torch.ones(numel + 256 * rank), torch.ones(numel, dtype=torch.float32 if rank else torch.int32)):
            with pytest.raises(CollectiveMismatch, match="different calls"):
                group.allreduce([x])
            assert x.eq(1).all()
        with pytest.raises(CollectiveMismatch, match="rank 1 sends 4 bytes to rank 0, which expects 8; compare sizes and dtypes"):
            group.alltoall([torch.ones(2), torch.ones(2)], [torch.ones(2), torch.ones(2)] if rank == 0 else [torch.ones(1), torch.ones(2)])

    ranks(2).each(body)


def test_the_same_fault_is_found_in_the_rows_of_all_ranks():
    row = lambda said, sends, wants: [*said, 0, 0, *sends, *wants]
    fine = (0, 0, 0, 0, 8)
    find = lambda *rows: rounds.find_fault(np.array(rows, np.int64), [4, 7])
    assert find(row(fine, [8, 8], [8, 8]), row(fine, [8, 8], [8, 8])) is None
    assert find(row(fine, [8, 0], [8, -1]), row(fine, [9, 9], [-1, 9])) is None, "who expects nothing is sent nothing"
    assert "rank 4 sends 6 bytes to rank 7, which expects 8" in find(row(fine, [8, 6], [8, 8]), row(fine, [8, 8], [8, 8]))
    assert "rank 7: reduce(" in find(row(fine, [8, 8], [8, 8]), row((1, 0, 0, 0, 8), [8, 8], [8, 8]))


def test_a_rank_that_leaves_is_named_by_those_that_call(trio):
    def body(group, rank):
        group.allreduce([torch.ones(3)]).wait()
        if rank == 2:
            group.shutdown()
            return "left"
        with pytest.raises(RankLost, match="all_reduce.* lost rank 2: it has left the group"):
            group.allreduce([torch.ones(3)])
        return "said so"

    assert trio.each(body) == ["said so", "said so", "left"]


def test_a_queue_that_follows_a_mark_which_never_comes_is_set_free_by_an_abort(trio):
    def body(group, rank):
        group.allreduce([torch.ones(3)]).wait()
        if rank == 2:
            group._device.run(functools.partial(stuck.wait, 30))
        work = group.allreduce([torch.ones(3)])
        all_are_here.wait(AT_ONCE)   # all have submitted: only rank 2's device is stuck
        assert not work.is_completed()
        all_are_here.wait(AT_ONCE)
        if rank == 0:
            group.abort()
        if rank < 2:
            work.wait()
        with pytest.raises(RankLost):
            group.allreduce([torch.ones(3)])

    stuck, all_are_here = threading.Event(), threading.Barrier(3)
    try:
        trio.each(body)
    finally:
        stuck.set()


def test_what_follows_a_lost_rank_is_set_free_and_nothing_else():
    class Channel:
        size, closed, rank = 3, False, 0

        class link:
            @staticmethod
            def status():
                return 0, -1, [5, 5, 5], ["S", "X", "S"]

    twin = Twin()
    flags, mine, lost = device.Flags(Channel, twin), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    flags.add(0, mine), flags.add(1, lost)
    assert flags.release_lost()
    assert (mine.item(), lost.item()) == (0, device.RELEASED)


# ---------------------------------------------------------------- memory


def test_buffers_are_zeros_of_any_shape_and_their_memory_is_given_back_with_the_last_view(ranks):
    def body(group, rank):
        x, before = group.buffer((3, 5), torch.bfloat16), len(group._regions._parts)
        assert x.shape == (3, 5) and x.dtype == torch.bfloat16 and not x.any()
        assert group.buffer((0, 4)).shape == (0, 4)
        view, mine = x[1], group._regions.parts(group._regions._added)[rank]
        del x
        gc.collect()
        view.fill_(1)
        assert view.tolist() == [1.0] * 5, "a view keeps the memory"
        del view
        gc.collect()
        return before - len(group._regions._parts), mine.eq(255).all().item()   # so the twin marks what was given back

    assert ranks(2).each(body) == [(1, True)] * 2


def expect_nothing_kept(refused):
    """That what some ranks had already allocated for a buffer, before another refused it, was given back."""
    before = {*Twin.exported}
    refused()
    assert {*Twin.exported} <= before


def test_memory_that_one_rank_does_not_have_is_refused_on_all(ranks, monkeypatch):
    def body(group, rank):
        monkeypatch.setattr(group._device, "room", 1000 if rank == 1 else 1 << 30)
        with pytest.raises(MemoryError, match=f"rank {rank}: buffer .*said rank 1: 1024 bytes"):
            group.buffer((256,))
        with pytest.raises(ShapeMismatch, match="ranks ask for different sizes, in bytes: \\[256, 512\\]"):
            group.buffer((64 * (rank + 1),))
        with pytest.raises(ShapeMismatch, match="ranks ask for different sizes, in bytes: \\[256, 4096\\]"):   # one is too large, too
            group.buffer((1024 if rank else 64,))

    expect_nothing_kept(lambda: ranks(2).each(body))


def test_memory_that_one_rank_cannot_share_is_refused_on_all(ranks, monkeypatch):
    def refuse(nbytes):
        raise DeviceError("the driver gives no handle")

    def body(group, rank):
        if rank:
            monkeypatch.setattr(group._device, "export", refuse)
        with pytest.raises(DeviceError, match=f"rank {rank}: buffer .*said rank 1: the driver gives no handle"):
            group.buffer((8,))

    expect_nothing_kept(lambda: ranks(2).each(body))


def test_memory_that_one_rank_cannot_open_is_refused_on_all(ranks, monkeypatch):
    def body(group, rank):
        if rank:
            monkeypatch.setattr(group._device, "open", lambda handle, nbytes: Twin.open(group._device, "x", nbytes))
        with pytest.raises(DeviceError, match=f"rank {rank}: buffer .*said rank 1: there is no memory x"):
            group.buffer((8,))

    expect_nothing_kept(lambda: ranks(2).each(body))


def test_a_tensor_on_another_device_is_refused_by_name(ranks):
    def body(group, rank):
        with pytest.raises(ShapeMismatch, match="all_reduce"):
            group.allreduce([torch.ones(3, device="meta")])

    ranks(2).each(body)
