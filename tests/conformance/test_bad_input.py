"""What cannot be right is refused by name, on every rank and soon; a rank that leaves, stays away or gives up sets the others free."""

import gc
import os
import threading
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import rankloom as rl
from conformance.ranks import BACKENDS, Ranks, make_group, make_ranks, seconds
from patience import AT_ONCE, threads_of_this_process, wait_until
from rankloom.base.errors import CollectiveMismatch, CollectiveTimeout, ConfigError, NotContiguous, RankloomError, RankLost, ShapeMismatch
from rankloom.world.transport import memory


@pytest.fixture(params=BACKENDS)
def ranks(request):
    """`ranks(size)`, as often as wanted; on each backend."""
    made = []
    yield lambda size, timeout=60.0: made.append(make_ranks(request.param, size, timeout)) or made[-1]
    for each in made:
        each.close()


def options(make=dist.AllreduceOptions, op=dist.ReduceOp.SUM, root=0, timeout=None):
    made = make()
    made.asyncOp = False
    if hasattr(made, "reduceOp"):
        made.reduceOp = op
    if hasattr(made, "rootRank"):
        made.rootRank = root
    if timeout:
        made.timeout = seconds(timeout)
    return made


def all_reduce(group, n=4, dtype=torch.float32, op=dist.ReduceOp.SUM, timeout=None):
    return group.allreduce([torch.ones(n, dtype=dtype)], options(op=op, timeout=timeout))


def broadcast(group, root=0, dtype=torch.float32):
    return group.broadcast([torch.ones(4, dtype=dtype)], options(dist.BroadcastOptions, root=root))


def barrier(group, timeout=None):
    return group.barrier(options(dist.BarrierOptions, timeout=timeout))


def gather_all(group, mine, lengths, dtype=torch.float32):
    outputs = [torch.zeros(n, dtype=dtype) for n in lengths]
    return group.allgather([outputs], [torch.ones(mine, dtype=dtype)], options(c10d.AllgatherOptions))


def deal(group, send, recv, rows=None):
    """`rows` when the tensors do not have as many as the splits say."""
    out, x = torch.zeros(rows or sum(recv)), torch.ones(rows or sum(send))
    return group.alltoall_base(out, x, recv, send, options(c10d.AllToAllOptions))


def send(group, to, n=1, dtype=torch.float32):
    return group.send([torch.ones(n, dtype=dtype)], to, 0).wait()


def recv(group, frm, n=1, dtype=torch.float32):
    return group.recv([torch.ones(n, dtype=dtype)], frm, 0).wait()


def raised(world, *bodies):
    """What each rank raises in its body, and after how many seconds; the last body is for all further ranks."""
    took = [0.0] * world.size

    def one(rank):
        begin = time.monotonic()
        try:
            bodies[min(rank, len(bodies) - 1)](world.groups[rank])
        finally:
            took[rank] = time.monotonic() - begin

    return world.errors(one), took


# ---------------------------------------------------------------- ranks that do not agree

MISMATCHES = {
    "lengths": (partial(all_reduce, n=4), partial(all_reduce, n=5), ["16 bytes", "20 bytes"]),
    "number types": (all_reduce, partial(all_reduce, dtype=torch.int32), ["float32", "int32"]),
    "operations": (all_reduce, partial(all_reduce, op=dist.ReduceOp.MAX), ["sum", "max"]),
    "collectives": (all_reduce, broadcast, ["all_reduce", "broadcast"]),
    "a call that one rank leaves out": (all_reduce, barrier, ["all_reduce", "barrier"]),
    "roots": (broadcast, partial(broadcast, root=1), ["root rank 0", "root rank 1"]),
    "number types that nobody adds": (broadcast, partial(broadcast, dtype=torch.int32), ["float32", "int32"]),
    "number types of a list": (partial(gather_all, mine=2, lengths=[2] * 3),
                               partial(gather_all, mine=2, lengths=[2] * 3, dtype=torch.int32), ["float32", "int32"]),
    "what one deals and another expects": (partial(deal, send=[1, 3, 1], recv=[1, 1, 1]),
                                           partial(deal, send=[1, 1, 1], recv=[1, 1, 1]), []),
    "the lengths that a list has room for": (partial(gather_all, mine=2, lengths=[2, 2, 2]),
                                             partial(gather_all, mine=2, lengths=[3, 2, 2]), []),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_differ_all_learn_of_it_at_once_and_nothing_moves(ranks, what):
    world = ranks(3)
    first, others, told = MISMATCHES[what]
    errors, took = raised(world, first, others)
    assert all(isinstance(error, CollectiveMismatch) for error in errors), errors
    assert max(took) < AT_ONCE
    for rank, error in enumerate(errors):
        assert str(error).startswith(f"rank {rank}: ") and all(word in str(error) for word in told), error


def test_calls_in_another_order_are_a_mismatch_although_their_sizes_agree(ranks):
    world = ranks(2)
    errors, _ = raised(world, lambda group: (all_reduce(group), broadcast(group)), lambda group: (broadcast(group), all_reduce(group)))
    assert [type(error) for error in errors] == [CollectiveMismatch] * 2
    assert "rank 0: all_reduce" in str(errors[0]) and "rank 1: broadcast" in str(errors[1])


def test_a_mismatch_in_the_background_is_raised_by_every_wait(ranks):
    world = ranks(2)

    def body(group):
        works = [group.allreduce([torch.ones(4 + group.rank())]), group.allreduce([torch.ones(1)])]
        for work in works:
            with pytest.raises(CollectiveMismatch):
                work.wait()
            assert work.is_completed() and not work.is_success() and isinstance(work.exception(), CollectiveMismatch)
        with pytest.raises(RuntimeError, match="CollectiveMismatch: "):   # as torch's C++ has it, which knows no other type
            works[0].get_future().wait()

    assert raised(world, body)[0] == [None] * 2


def test_a_message_that_does_not_fit_is_refused_by_its_receiver(ranks):
    world = ranks(2)
    errors, took = raised(world, partial(send, to=1, n=4), partial(recv, frm=0, n=3))
    assert isinstance(errors[1], CollectiveMismatch) and "rank 0" in str(errors[1]).removeprefix("rank 1: ") and max(took) < AT_ONCE


@pytest.mark.parametrize(("sent", "expected"), [((4, torch.float32), (4, torch.int32)), ((4, torch.float64), (8, torch.float32)),
                                                ((3, torch.bfloat16), (3, torch.float16))], ids=str)
def test_a_message_of_as_many_bytes_of_another_dtype_is_refused_also_one_that_came_early(ranks, sent, expected):
    def later(group):
        group.recv([torch.ones(1)], 0, 1).wait()   # the other message came before this one, and was put aside
        recv(group, 0, *expected)

    for early in (False, True):
        def both(group, early=early):
            works = [group.send([torch.ones(sent[0], dtype=sent[1])], 2, 0)]
            works += [group.send([torch.ones(1)], 2, 1)] if early else []
            [work.wait() for work in works]

        receiver = later if early else partial(recv, frm=0, n=expected[0], dtype=expected[1])
        errors, took = raised(ranks(3), both, lambda group: None, receiver)   # with hosts, the third rank is on another
        assert isinstance(errors[2], CollectiveMismatch) and "or another dtype, than its receiver expects" in str(errors[2])
        assert max(took) < AT_ONCE


def test_complex_numbers_and_the_pairs_that_torch_sends_of_them_are_one_dtype(ranks):
    world, got = ranks(3), torch.zeros(2, 2, dtype=torch.float64)   # with hosts, the third rank is on another
    works = [world.groups[0].send([torch.tensor([1 + 2j, 3 + 4j], dtype=torch.complex128)], 2, 0), world.groups[2].recv([got], 0, 0)]
    [work.wait() for work in works]
    assert got.tolist() == [[1, 2], [3, 4]]


def test_a_new_group_of_the_same_ranks_works_after_a_mismatch(ranks):
    world = ranks(2)
    raised(world, all_reduce, broadcast)
    again = world.group(range(2))
    assert world.errors(lambda rank: all_reduce(again[rank])) == [None, None]


# ---------------------------------------------------------------- what cannot be right on any rank

REFUSED = {
    "a factor before the sum": lambda group: group.allreduce([torch.ones(2)], options(op=c10d._make_nccl_premul_sum(2.0))),
    "bits of floats": lambda group: all_reduce(group, op=dist.ReduceOp.BAND),
    "the mean of the longest whole numbers": lambda group: all_reduce(group, dtype=torch.uint64, op=dist.ReduceOp.AVG),
    "the mean of bools": lambda group: all_reduce(group, dtype=torch.bool, op=dist.ReduceOp.AVG),
    "the smallest complex number": lambda group: all_reduce(group, dtype=torch.complex64, op=dist.ReduceOp.MIN),
    "the sum of what nobody adds": lambda group: group.allreduce([torch.ones(4).view(torch.float4_e2m1fn_x2)], options()),
    "a sparse tensor": lambda group: group.broadcast([torch.eye(3).to_sparse()], options(dist.BroadcastOptions)),
    "the largest of sparse tensors": lambda group: group.allreduce([torch.eye(3).to_sparse()], options(op=dist.ReduceOp.MAX)),
    "sparse tensors of several shapes": lambda group: group.allreduce([torch.eye(3 + group.rank()).to_sparse()], options()),
    "a tensor without memory": lambda group: group.allreduce([torch.ones(2, device="meta")], options()),
    "the values of a quantised tensor without its scale": lambda group: group.broadcast([quantised()], options(dist.BroadcastOptions)),
    "the sum of quantised tensors": lambda group: group.allreduce([quantised()], options()),
    "a message of a quantised tensor": lambda group: group.send([quantised()], 1, 0),
    "a message into a quantised tensor": lambda group: group.recv([quantised()], 1, 0),
    "no tensor": lambda group: group.allreduce([], options()),
    "two tensors": lambda group: group.broadcast([torch.ones(1), torch.ones(1)], options(dist.BroadcastOptions)),
    "a root that is not there": lambda group: broadcast(group, root=3),
    "a root below 0": lambda group: broadcast(group, root=-1),
    "a receiver that is not there": partial(send, to=3),
    "a sender that is not there": partial(recv, frm=-2),
    "a sender before the first, as rank - 1 is on rank 0": partial(recv, frm=-1),
    "a tag below 0": lambda group: group.send([torch.ones(1)], 1, -1),
    "a tag that is too large": lambda group: group.recv([torch.ones(1)], 1, 1 << 63),
    "a tag that is a word": lambda group: group.send([torch.ones(1)], 1, "later"),
    "an output that is too short": lambda group: group._allgather_base(torch.ones(5), torch.ones(2), options(c10d.AllgatherOptions)),
    "an output of another type": lambda group: group._allgather_base(torch.ones(6).int(), torch.ones(2), options(c10d.AllgatherOptions)),
    "too few outputs": lambda group: gather_all(group, 2, [2, 2]),
    "too few inputs": lambda group: group.reduce_scatter([torch.ones(1)], [[torch.ones(1)] * 2], options(dist.ReduceScatterOptions)),
    "inputs of several types": lambda group: group.reduce_scatter([torch.ones(1)], [[torch.ones(1), torch.ones(1).int(), torch.ones(1)]],
                                                                  options(dist.ReduceScatterOptions)),
    "splits that do not add up": partial(deal, send=[1, 1, 2], recv=[1, 1, 1], rows=3),
    "splits for fewer ranks": partial(deal, send=[2, 1], recv=[2, 1]),
    "splits for fewer ranks and for more": partial(deal, send=[2, 1], recv=[1, 1, 1, 0]),
    "splits of a tensor without rows": lambda group: group.alltoall_base(torch.ones(()), torch.ones(()), [1, 0, 0], [1, 0, 0],
                                                                         options(c10d.AllToAllOptions)),
    "splits below 0": partial(deal, send=[-1, 2, 2], recv=[1, 1, 1]),
    "rows that cannot be dealt evenly": partial(deal, send=[], recv=[], rows=4),
    "an output whose elements share one place": lambda group: group.allreduce([torch.ones(1).expand(4)], options()),
    "outputs that are one tensor": lambda group: group.allgather([[torch.zeros(4)] * 3], [torch.ones(4)], options(c10d.AllgatherOptions)),
    "outputs that are one transposed tensor": lambda group: group.allgather([[torch.zeros(3, 2).t()] * 3], [torch.ones(2, 3)],
                                                                            options(c10d.AllgatherOptions)),
    "outputs that overlap": lambda group: group.alltoall([*torch.zeros(6).unfold(0, 4, 1)], [*torch.ones(3, 4)],
                                                         options(c10d.AllToAllOptions)),
    "an output whose rows overlap": lambda group: group.allreduce([torch.ones(4).as_strided((3, 2), (1, 1))], options()),
}


def quantised():
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_right_is_refused_by_name_and_does_no_harm(ranks, what):
    world = ranks(3)
    errors, took = raised(world, REFUSED[what])
    assert all(isinstance(error, RankloomError) for error in errors), errors
    assert all(isinstance(error, ShapeMismatch | ConfigError | NotContiguous) and str(error) for error in errors), errors
    assert all("quantised" in str(error) for error in errors) == ("quantised" in what), "another's advice is false for it"
    assert max(took) < AT_ONCE
    assert raised(world, all_reduce)[0] == [None] * 3, "the group is whole"


def test_outputs_that_lie_between_each_other_but_share_nothing_are_filled(ranks):
    world = ranks(3)

    def columns(rank):
        table = torch.zeros(4, 3)
        world.groups[rank].allgather([[*table.unbind(1)]], [torch.full((4,), 1.0 + rank)], options(c10d.AllgatherOptions)).wait()
        return table.tolist()

    assert world.run(columns) == [[[1.0, 2.0, 3.0]] * 4] * 3


def test_tensors_of_one_call_that_differ_in_size_or_type_are_refused(ranks):
    """The kernel is told one size and one type: it would read what is not there, or take some numbers for others."""
    one, three, whole, deal = torch.ones(1), torch.ones(3), torch.ones(3).int(), options(c10d.AllToAllOptions)
    ones, wholes = [one] * 3, [one.int()] * 3
    wrong = [
        lambda group: group._reduce_scatter_base(one, torch.ones(2), options(dist.ReduceScatterOptions)),
        lambda group: group._reduce_scatter_base(one, whole, options(dist.ReduceScatterOptions)),
        lambda group: group.allgather([wholes], [one], options(c10d.AllgatherOptions)),
        lambda group: group.scatter([one], [wholes], options(dist.ScatterOptions)),
        lambda group: group.scatter([one], [ones[:2]], options(dist.ScatterOptions, root=group.rank())),
        lambda group: group.scatter([one], [], options(dist.ScatterOptions, root=group.rank())),
        lambda group: group.alltoall_base(three, whole, [], [], deal),
        lambda group: group.alltoall_base(three, torch.ones(6), [], [], deal),
        lambda group: group.alltoall(ones, [*ones[:2], one.int()], deal), lambda group: group.alltoall([*ones[:2], one.int()], ones, deal),
        lambda group: group.alltoall(ones[:2], ones, deal), lambda group: group.alltoall(ones, ones[:2], deal)]
    world = ranks(3)
    for at, call in enumerate(wrong):
        assert [type(error) for error in raised(world, call)[0]] == [ShapeMismatch] * 3, at


# ---------------------------------------------------------------- memory that is read and written at once


def overlapping(name, group, at):
    """One collective whose input and output share memory, the input `at` elements into it; what came out, and what should."""
    rank, p, n = group.rank(), group.size(), 40_000
    brought = [torch.arange(n * p, dtype=torch.float64) + 1000.0 * other for other in range(p)]
    memory = torch.zeros(2 * n * p + at, dtype=torch.float64)
    if name == "_allgather_base":
        memory[at: at + n] = brought[rank][:n]
        work = group._allgather_base(memory[: n * p], memory[at: at + n], options(c10d.AllgatherOptions))
        return work, memory[: n * p], torch.cat([x[:n] for x in brought])
    memory[: n * p] = brought[rank]
    if name == "_reduce_scatter_base":
        work = group._reduce_scatter_base(memory[at: at + n], memory[: n * p], options(dist.ReduceScatterOptions))
        return work, memory[at: at + n], sum(brought)[rank * n: rank * n + n]
    work = group.alltoall_base(memory[at: at + n * p], memory[: n * p], [], [], options(c10d.AllToAllOptions))
    return work, memory[at: at + n * p], torch.cat([x[rank * n: rank * n + n] for x in brought])


def overlapping_lists(name, group, at):
    """The same of tensors in lists."""
    rank, p, n = group.rank(), group.size(), 40_000
    brought = [torch.arange(n * p, dtype=torch.float64) + 1000.0 * other for other in range(p)]
    memory = torch.zeros(2 * n * p + at, dtype=torch.float64)
    whole, moved = memory[: n * p], memory[at: at + n * p]
    if name == "allgather":
        moved[:n] = brought[rank][:n]
        work = group.allgather([[*whole.split(n)]], [moved[:n]], options(c10d.AllgatherOptions))
        return work, whole, torch.cat([x[:n] for x in brought])
    whole[:] = brought[rank]
    if name == "reduce_scatter":
        work = group.reduce_scatter([moved[:n]], [[*whole.split(n)]], options(dist.ReduceScatterOptions))
        return work, moved[:n], sum(brought)[rank * n: rank * n + n]
    if name == "scatter":
        work = group.scatter([moved[:n]], [[*whole.split(n)]] if rank == 0 else [], options(dist.ScatterOptions))
        return work, moved[:n], brought[0][rank * n: rank * n + n]
    work = group.alltoall([*moved.split(n)], [*whole.split(n)], options(c10d.AllToAllOptions))
    return work, moved, torch.cat([x[rank * n: rank * n + n] for x in brought])


@pytest.mark.parametrize("at", [0, 40_000, 1, 12_345])
@pytest.mark.parametrize("name", ["_allgather_base", "_reduce_scatter_base", "alltoall_base", "allgather", "reduce_scatter", "scatter",
                                  "alltoall"])
def test_overlapping_input_and_output_give_the_right_result_or_a_refusal(ranks, name, at):
    world = ranks(3)

    def body(group):
        try:
            work, got, expected = (overlapping if "base" in name else overlapping_lists)(name, group, at)
            work.wait()
        except (ShapeMismatch, NotContiguous, ConfigError):
            return
        assert torch.equal(got, expected), "corrupted without a word"

    assert raised(world, body)[0] == [None] * 3


@pytest.mark.parametrize("name", ["_allgather_base", "_reduce_scatter_base"])
def test_the_usual_forms_in_place_work(ranks, name):
    """NCCL's: this rank's part lies at its own place in the whole."""
    world = ranks(3)

    def body(group):
        work, got, expected = overlapping(name, group, 40_000 * group.rank())
        work.wait()
        assert torch.equal(got, expected)

    assert raised(world, body)[0] == [None] * 3


def test_views_that_are_conjugated_or_negated_only_when_read_arrive_so(ranks):
    world = ranks(2)

    def body(group):
        x = torch.tensor([1 + 2j, 3 - 1j])
        for lazy in (x.conj(), x.conj().imag):
            out = torch.zeros(4, dtype=lazy.dtype)
            group._allgather_base(out, lazy, options(c10d.AllgatherOptions))
            assert torch.equal(out, torch.cat([lazy, lazy]).resolve_conj().resolve_neg())
            summed = lazy.clone().conj() if lazy.is_complex() else lazy.clone()
            expected = 2 * summed
            group.allreduce([summed], options())
            assert torch.equal(summed, expected)

    assert raised(world, body)[0] == [None] * 2


def test_a_reduce_changes_only_the_tensor_of_its_root(ranks):
    world = ranks(2)

    def body(group):
        x = torch.tensor([[4, 6], [8, 10]]).T * (1 + 2 * group.rank())   # whole numbers with gaps: both ways back to a tensor
        group.reduce([x], options(dist.ReduceOptions, dist.ReduceOp.AVG, root=1))
        assert x.tolist() == [[[4, 8], [6, 10]], [[8, 16], [12, 20]]][group.rank()]

    assert raised(world, body)[0] == [None] * 2


def test_a_result_may_be_a_parameter_that_wants_gradients(ranks):
    world = ranks(2)

    def body(group):
        p = torch.nn.Parameter(torch.ones(3, 2))
        group.allreduce([p], options())
        group.broadcast([p.t()], options(dist.BroadcastOptions))
        assert (p == 2).all() and p.is_leaf and p.grad is None
        (3 * p).sum().backward()

    assert raised(world, body)[0] == [None] * 2


# ---------------------------------------------------------------- ranks that stay away, leave, or give up


def monitored_barrier(group, timeout):
    group.monitored_barrier(seconds(timeout))


@pytest.mark.parametrize("call", [barrier, monitored_barrier, all_reduce], ids=lambda f: f.__name__)
def test_a_time_out_names_all_that_did_not_come_and_comes_neither_early_nor_late(ranks, call):
    world, timeout = ranks(4), 2.0
    errors, took = raised(world, lambda group: call(group, timeout=timeout), lambda group: None, lambda group: call(group, timeout=timeout),
                          lambda group: None)
    for rank in (0, 2):
        told = str(errors[rank]).removeprefix(f"rank {rank}: ")
        assert isinstance(errors[rank], CollectiveTimeout) and "rank 1" in told and "rank 3" in told and f"rank {2 - rank}" not in told
    assert timeout <= max(took) < timeout + AT_ONCE and min(took[0], took[2]) > timeout / 2, "whichever came first"


def test_the_time_out_of_the_group_holds_where_a_call_has_none(ranks):
    world = ranks(2, timeout=1.0)
    errors, took = raised(world, all_reduce, lambda group: None)
    assert isinstance(errors[0], CollectiveTimeout) and 1.0 <= took[0] < 1.0 + AT_ONCE
    world = ranks(2)
    world.groups[0].set_timeout(seconds(0.2))
    errors, took = raised(world, partial(recv, frm=1), lambda group: None)
    assert isinstance(errors[0], CollectiveTimeout) and "rank 1" in str(errors[0]) and 0.2 <= took[0] < 0.2 + AT_ONCE


def test_a_receive_from_anyone_that_times_out_blames_all_who_might_have_sent_and_not_its_own_rank(ranks):
    world = ranks(3, timeout=2.0)

    def body(rank):
        group = world.groups[rank]
        group.recv_anysource([torch.zeros(1)], 5).wait() if rank == 1 else all_reduce(group, timeout=20)

    silent = "rank 1 waited for a message of anyone, and none came from rank 0 (slow, or it skipped this call), rank 2 (slow"
    for error in world.errors(body):
        assert isinstance(error, CollectiveTimeout) and silent in str(error) and "rank 1 (" not in str(error)


def test_ranks_that_all_receive_first_name_each_the_one_that_it_waited_for_and_not_themselves(ranks):
    """One of them gives up first, and breaks the group for the sake of its own message."""
    world = ranks(3, timeout=1.0)
    for rank, error in enumerate(world.errors(lambda rank: recv(world.groups[rank], frm=(rank + 1) % 3))):
        assert isinstance(error, CollectiveTimeout)
        assert str(error).endswith(f": rank {(rank + 1) % 3} (slow, or it skipped this call) did not come")


def test_a_slow_rank_is_waited_for_as_long_as_the_time_out_allows(ranks):
    world = ranks(2)
    errors, _ = raised(world, all_reduce, lambda group: (time.sleep(1.5), all_reduce(group)))
    assert errors == [None, None]


def test_a_wait_that_is_over_leaves_the_call_going(ranks):
    world, waited = ranks(2), threading.Event()

    def patient(group):
        x = torch.ones(3)
        work = group.allreduce([x])
        with pytest.raises(CollectiveTimeout):
            work.wait(seconds(0.1))
        message = group.recv([torch.ones(1)], 1, 0)
        with pytest.raises(CollectiveTimeout):
            message.wait(seconds(0.1))
        waited.set()
        assert work.wait() and message.wait() and x.tolist() == [2.0] * 3

    def slow(group):
        waited.wait(AT_ONCE)
        group.allreduce([torch.ones(3)]).wait()
        group.send([torch.ones(1)], 0, 0).wait()

    assert raised(world, patient, slow)[0] == [None, None]


WAITS = {
    "all_reduce": all_reduce,
    "all_reduce in the background": lambda group: group.allreduce([torch.ones(3)]).wait(),
    "recv": partial(recv, frm=1),
    "a large send": partial(send, to=1, n=1 << 25),   # more than a socket takes, and a rank puts aside
    "barrier": barrier,
}
LEAVES = {
    "shuts down": (lambda world: world.groups[1].shutdown(), "left"),
    "aborts": (lambda world: world.groups[1].abort(), "abort"),
}


@pytest.mark.parametrize("waits", WAITS)
@pytest.mark.parametrize("leaves", LEAVES)
def test_whoever_waits_for_a_rank_that_leaves_is_set_free_soon_and_told_who_it_was(ranks, waits, leaves):
    world = ranks(3, timeout=60.0)
    how, word = LEAVES[leaves]
    left = []

    def leave(group):
        time.sleep(0.1)
        left.append(time.monotonic())
        how(world)

    ended = [0.0] * 3

    def wait(group):
        try:
            WAITS[waits](group)
        finally:
            ended[group.rank()] = time.monotonic()

    errors, _ = raised(world, wait, leave, wait)
    for rank in (0, 2):
        told = str(errors[rank]).removeprefix(f"rank {rank}: ")
        assert isinstance(errors[rank], RankLost) and "rank 1" in told and word in told
        assert 0 <= ended[rank] - left[0] < AT_ONCE


@pytest.mark.parametrize("begin", [lambda group: group.allreduce([torch.ones(3)]), lambda group: group.recv([torch.ones(3)], 1, 0)])
def test_whoever_polls_for_a_rank_that_leaves_is_told_soon_too(ranks, begin):
    world = ranks(2, timeout=60.0)

    def poll(group):
        work, late = begin(group), time.monotonic() + AT_ONCE
        while not work.is_completed() and time.monotonic() < late:
            time.sleep(1e-3)
        assert work.is_completed() and not work.is_success() and isinstance(work.exception(), RankLost)

    def leave(group):
        time.sleep(0.1)
        group.shutdown()

    assert raised(world, poll, leave)[0] == [None] * 2


def test_a_message_that_was_waited_for_in_vain_has_ended(ranks):
    world = ranks(2)

    def wait(group):
        work = group.recv([torch.ones(1)], 1, 0)
        with pytest.raises(RankLost):
            work.wait()
        assert work.is_completed() and not work.is_success() and isinstance(work.exception(), RankLost)

    assert raised(world, wait, lambda group: group.abort())[0] == [None] * 2


def test_an_abort_from_another_thread_ends_this_ranks_own_waits_too(ranks):
    world = ranks(2, timeout=60.0)

    def body(group):
        if group.rank() == 0:
            threading.Timer(0.1, group.abort).start()
            all_reduce(group)

    errors, took = raised(world, body)
    assert isinstance(errors[0], RankLost) and took[0] < 0.1 + AT_ONCE


def test_a_rank_that_drops_its_group_without_a_word_has_left(ranks):
    world = ranks(2, timeout=60.0)
    again = world.group(range(2))
    world._made = [group for group in world._made if group is not again[1]]

    def body(rank):
        if rank == 0:
            return all_reduce(again[0])
        time.sleep(0.1)
        again[1] = None
        return gc.collect()

    errors = world.errors(body)
    assert isinstance(errors[0], RankLost) and "rank 1" in str(errors[0]) and errors[1] is None


def test_calls_on_a_group_that_is_over_say_so(ranks):
    world = ranks(2)
    raised(world, lambda group: group.shutdown())
    in_background = lambda group: group.allreduce([torch.ones(1)]).wait()
    for call in (all_reduce, barrier, in_background, partial(recv, frm=1), partial(send, to=1), lambda group: group.buffer((3,))):
        errors, took = raised(world, call)
        assert all(isinstance(error, RankLost) for error in errors) and max(took) < AT_ONCE, errors


def test_a_rank_that_never_comes_to_the_meeting_is_named(ranks):
    begin = time.monotonic()
    with pytest.raises(RankLost, match=r"rank\(s\) 1, 2 did not join the group within 0.2 s"):
        make_group(dist.HashStore(), 0, 3, timeout=0.2)
    assert 0.2 <= time.monotonic() - begin < 0.2 + AT_ONCE


# ---------------------------------------------------------------- memory


def test_a_buffer_larger_than_memory_is_refused_on_every_rank_and_does_no_harm(ranks):
    world = ranks(2)
    errors, _ = raised(world, lambda group: group.buffer((1 << 45,), torch.uint8))
    assert all(isinstance(error, MemoryError) and f"{1 << 45:,}" in str(error) for error in errors)
    assert raised(world, all_reduce)[0] == [None] * 2


def test_buffers_of_different_sizes_are_refused_on_every_rank(ranks):
    errors, _ = raised(ranks(2), lambda group: group.buffer((100_000 * (1 + group.rank()),)))
    assert all(isinstance(error, ShapeMismatch) for error in errors)


def test_buffers_are_zeros_may_be_empty_and_are_given_back(ranks):
    world = ranks(2)

    def body(rank):
        group = world.groups[rank]
        for shape, dtype in (((3, 5), torch.bfloat16), ((0,), torch.float32), ((), torch.int64), ((70_000,), torch.complex64)):
            x = group.buffer(shape, dtype)
            assert x.shape == shape and x.dtype == dtype and not x.any()
            group.allreduce([x.fill_(1)], options())
            assert (x == 2).all()

    maps = lambda: sum("memfd:rankloom" in line for line in Path("/proc/self/maps").read_text().splitlines())
    world.run(body)
    gc.collect()
    before = maps()
    for _ in range(5):
        world.run(body)
    gc.collect()
    assert maps() == before


def test_a_group_has_as_many_buffers_as_are_asked_for(ranks):
    """More than the kernel has numbers for: the others are staged."""
    world = ranks(2)

    def body(rank):
        group = world.groups[rank]
        held = [group.buffer((5000 + k,)).fill_(k) for k in range(70)]
        for x in held:
            group.allreduce([x], options())
        return all((x == 2 * k).all() for k, x in enumerate(held))

    assert world.run(body) == [True] * 2


def test_a_group_leaves_no_file_no_thread_no_descriptor_and_no_memory_behind():
    def left():
        gc.collect()
        maps = sum("memfd" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return len(os.listdir("/proc/self/fd")), threads_of_this_process(), maps

    def use():
        world = Ranks(3)
        world.run(lambda rank: world.groups[rank].allreduce([torch.ones(100_000)]).wait())
        world.run(lambda rank: [w.wait() for w in (world.groups[rank].send([torch.ones(9)], (rank + 1) % 3, 0),
                                                   world.groups[rank].recv([torch.ones(9)], (rank - 1) % 3, 0))])
        world.close()

    use()
    before, files = left(), set(os.listdir("/dev/shm"))
    for _ in range(5):
        use()
    new = set(os.listdir("/dev/shm")) - files
    wait_until(lambda: not new & set(os.listdir("/dev/shm")))   # those of tests beside this one go
    assert left() == before


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_share_memory_tells_the_others_why(failing):
    """Here it has too little; in life it may lack the compiled part, or belong to another user."""
    real, store = memory.Mapping, dist.HashStore()

    def mapping(descriptor, nbytes):
        if int(threading.current_thread().name) == failing:
            raise MemoryError("no room")
        return real(descriptor, nbytes)

    errors, begin = {}, time.monotonic()

    def join(rank):
        try:
            make_group(store, rank, 3, timeout=60)
        except (MemoryError, RankLost) as error:
            errors[rank] = error

    with mock.patch.object(memory, "Mapping", mapping):
        threads = [threading.Thread(target=join, args=(rank,), name=str(rank)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert isinstance(errors.pop(failing), MemoryError) and time.monotonic() - begin < AT_ONCE
    assert len(errors) == 2 and all(isinstance(error, RankLost) for error in errors.values())
    assert all(f"rank {failing}" in str(error) and "no room" in str(error) for error in errors.values())


# ---------------------------------------------------------------- fork


def use_after_fork(port, world):
    """Fork with a group at hand; what the child was told by each call, and whether the parent's group is whole afterwards."""
    group = make_group(dist.TCPStore("127.0.0.1", port), world.rank, world.size)
    group.allreduce([torch.ones(1)]).wait()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        told = []
        in_background = lambda group: group.allreduce([torch.ones(1)]).wait()
        future = lambda group: group.allreduce([torch.ones(1)]).get_future().wait()
        buffer = lambda group: group.buffer((2,))
        for call in (all_reduce, barrier, in_background, future, partial(send, to=0), partial(recv, frm=0), buffer):
            try:
                call(group)
                told.append("nothing")
            except (ConfigError, RuntimeError) as error:
                told.append("fork" if "fork" in str(error) else str(error))
        group.abort()
        group.shutdown()
        os.write(writing, " ".join(told).encode())
        os._exit(0)
    os.waitpid(child, 0)
    x = torch.ones(2)
    group.allreduce([x]).wait()
    return os.read(reading, 1000).decode(), x.tolist()


def test_a_forked_child_is_refused_by_name_and_does_its_parent_no_harm():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for told, after in rl.spawn(2, partial(use_after_fork, store.port)):
        assert told == " ".join(["fork"] * 7) and after == [2.0, 2.0]
