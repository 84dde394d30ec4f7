"""Both forms of torch's methods give the same, on this backend as on gloo, whose methods are torch's own."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from conformance.ranks import BACKENDS, Ranks, make_ranks, seconds
from patience import AT_ONCE
from rankloom.base.errors import CollectiveTimeout
from rankloom.world.transport import forms

MAX = dist.ReduceOp.MAX
P = 3


@pytest.fixture(scope="module", params=[*BACKENDS, "gloo"])
def world(request):
    made = Ranks(P, kernel=None) if request.param == "gloo" else make_ranks(request.param, P)
    yield made
    made.close()


def x_of(rank, n=2):
    """[n] of numbers that tell whose they are, and which."""
    return torch.arange(float(n)) + 10 * rank


def empties(n=2):
    return [torch.zeros(n) for _ in range(P)]


def outcome(world, method, *args_of, **named):
    """What each rank ends with: its first argument, after `method(*(a(rank) for a in args_of), **named)` was waited for."""
    def body(rank):
        args = [make(rank) for make in args_of]
        getattr(world.groups[rank], method)(*args, **named).wait()
        first = args[0] if args else []
        return [x.tolist() for x in first] if isinstance(first, list) else first.tolist()

    return world.run(body)


def same(value):
    return lambda rank: value


SUMS, LARGEST, EVERYONE = [30.0, 33.0], [20.0, 21.0], [[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]


@pytest.mark.parametrize(("args", "named", "expected"), [
    ((x_of,), {}, SUMS), ((x_of, same(MAX)), {}, LARGEST), ((x_of,), {"op": MAX}, LARGEST), ((x_of,), {"timeout": seconds(60)}, SUMS),
    ((lambda rank: [x_of(rank)],), {}, [SUMS]), ((lambda rank: [x_of(rank)], same(MAX)), {}, [LARGEST]),
    ((lambda rank: [x_of(rank)],), {"opts": dist.AllreduceOptions()}, [SUMS])])
def test_all_reduce_takes_one_tensor_with_an_operation_or_a_list_of_one_with_either(world, args, named, expected):
    assert outcome(world, "allreduce", *args, **named) == [expected] * P


@pytest.mark.parametrize("named", [False, True])
def test_broadcast_takes_one_tensor_and_the_root(world, named):
    got = outcome(world, "broadcast", x_of, root=1) if named else outcome(world, "broadcast", x_of, same(1))
    assert got == [EVERYONE[1]] * P


def test_reduce_takes_one_tensor_the_root_and_an_operation(world):
    assert outcome(world, "reduce", x_of, same(2))[2] == SUMS
    assert outcome(world, "reduce", x_of, same(1), op=MAX)[1] == LARGEST


def test_gathers_take_a_list_and_one_tensor(world):
    assert outcome(world, "allgather", lambda rank: empties(), x_of) == [EVERYONE] * P
    at_root = outcome(world, "gather", lambda rank: empties() if rank == 1 else [], x_of, same(1))
    assert at_root == [[], EVERYONE, []]


def test_scatters_take_one_tensor_and_a_list(world):
    got = outcome(world, "scatter", lambda rank: torch.zeros(2), lambda rank: [x_of(to) for to in range(P)] if rank == 2 else [], same(2))
    assert got == EVERYONE
    summed = outcome(world, "reduce_scatter", lambda rank: torch.zeros(2), lambda rank: [x_of(rank) + to for to in range(P)])
    assert summed == [[30.0 + 3 * to, 33.0 + 3 * to] for to in range(P)]
    largest = outcome(world, "reduce_scatter", lambda rank: torch.zeros(2), lambda rank: [x_of(rank) + to for to in range(P)], op=MAX)
    assert largest == [[20.0 + to, 21.0 + to] for to in range(P)]


ALL_TO_ALLS = [name for name in ("alltoall_base", "all_to_all_single") if hasattr(dist.ProcessGroup, name)]   # torch 2.11 has one


@pytest.mark.parametrize("method", ALL_TO_ALLS)
def test_all_to_all_takes_a_time_out_by_itself(world, method):
    dealt = outcome(world, method, lambda rank: torch.zeros(P), lambda rank: x_of(rank, P), same([]), same([]), same(seconds(60)))
    assert dealt == [[10.0 * frm + rank for frm in range(P)] for rank in range(P)]


@pytest.mark.parametrize("method", ALL_TO_ALLS)
def test_all_to_all_takes_the_splits_as_an_array_of_numpy(world, method):
    ones = same(np.ones(P, np.int64))
    dealt = outcome(world, method, lambda rank: torch.zeros(P), lambda rank: x_of(rank, P), ones, ones)
    assert dealt == [[10.0 * frm + rank for frm in range(P)] for rank in range(P)]


def test_a_barrier_takes_a_time_out_by_itself(world):
    assert outcome(world, "barrier", timeout=seconds(60)) == [[]] * P


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_time_out_of_the_second_form_counts(backend):
    world, begin = make_ranks(backend, 2, timeout=60.0), time.monotonic()
    errors = world.errors(lambda rank: rank or world.groups[0].broadcast(torch.ones(1), 0, seconds(0.3)).wait())
    assert isinstance(errors[0], CollectiveTimeout) and "timeout of 0.3 s" in str(errors[0]) and time.monotonic() - begin < AT_ONCE
    world.close()


@pytest.mark.parametrize(("method", "args", "named"), [
    ("broadcast", (torch.ones(1),), {}), ("broadcast", ([torch.ones(1)], 0), {}), ("allreduce", (torch.ones(1),), {"root": 0}),
    ("allreduce", (torch.ones(1),), {"opts": None, "op": MAX}), ("reduce", (torch.ones(1),), {"op": MAX}),
    ("gather", ([torch.ones(1)], torch.ones(1)), {}), ("scatter", ([torch.ones(1)], [torch.ones(1)], 0), {})], ids=str)
def test_what_fits_neither_form_is_refused(method, args, named):
    with pytest.raises(TypeError):
        forms.first_form(method, args, named)


def test_what_torch_itself_calls_is_passed_on_as_it_is():
    args = ([torch.ones(1)], dist.AllreduceOptions())
    assert forms.first_form("allreduce", args, {}) is args
