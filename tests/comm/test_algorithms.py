"""Every algorithm of the table: right numbers, its price, and by histories that all parts arrive, each exactly once."""

import random
import threading
import time
from collections import Counter, defaultdict
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rankloom as rl
from provenance import Trace, trace
from rankloom.base.cost import Path
from rankloom.comm.algorithms import ALGORITHMS, Algorithm, on_nodes
from rankloom.comm.all_to_all import pairwise_all_to_all
from rankloom.comm.halving import doubling_all_gather
from rankloom.comm.operands import chunk_bounds, widening
from rankloom.comm.ring import ring_all_gather
from rankloom.comm.subgroup import Subgroup

RANKS = [1, 2, 3, 4, 5, 6, 7, 8]
NODES = {1: ((0,),), 2: ((0,), (1,)), 3: ((0, 2), (1,)), 4: ((0, 1), (2, 3)), 5: ((0, 1), (2, 3), (4,)), 6: ((2, 1, 0), (3, 4, 5)),
         7: ((6, 0), (1, 2, 3), (4, 5)), 8: ((0, 4), (1, 5), (2, 6), (3, 7))}   # even and uneven, in order and not
SUMS = ("all_reduce", "reduce_scatter")
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def in_small_blocks(collective: str, name: str) -> Algorithm:
    """So small that even short buffers are cut in several."""
    whole = ALGORITHMS[collective][name]
    return Algorithm(*(partial(f, block=16) for f in (whole.run, whole.path, whole.bill)))


def algorithms(p: int) -> dict[tuple[str, str], Algorithm]:
    """All there are, on p ranks."""
    found = {(collective, name): way for table in (ALGORITHMS, on_nodes(NODES[p])) for collective in table
             for name, way in table[collective].items()}
    blocks = [("all_reduce", "double_tree"), ("broadcast", "chain")]
    return found | {(collective, f"{name} in small blocks"): in_small_blocks(collective, name) for collective, name in blocks}


CASES = sorted(algorithms(1))
BOUNDED = [case for case in CASES if "double_tree" in case[1] or "hierarchical" in case]   # their paths are upper bounds
SUM_CASES = [case for case in CASES if case[0] in SUMS]


def lengths(collective: str, p: int) -> list[int]:
    """Rows of the whole: none, fewer than ranks, not divisible, divisible; an all-to-all needs equal shares."""
    return [0, p, 3 * p] if collective == "all_to_all" else [0, 1, 5, 24, 31]


def bring(collective: str, whole: Tensor, rank: int, p: int) -> Tensor:
    """What a rank gives, of `whole`: its piece for an all-gather, all of it otherwise. A clone: it may be overwritten."""
    return whole.tensor_split(p)[rank].clone() if collective == "all_gather" else whole.clone()


def call(collective: str, way: Algorithm, x: Tensor, group: rl.Group, rows: int) -> Tensor:
    """Run it; an all-gather into a buffer of `rows` rows, so that they may be uneven."""
    return way.run(x, group, out=x.new_empty(rows, *x.shape[1:])) if collective == "all_gather" else way.run(x, group)


def expected(collective: str, wholes: list[Tensor], rank: int) -> Tensor:
    """What one process makes of all ranks' wholes."""
    p = len(wholes)
    if collective == "broadcast":
        return wholes[0]
    if collective == "all_gather":
        return torch.cat([whole.tensor_split(p)[r] for r, whole in enumerate(wholes)])
    if collective == "all_to_all":
        return torch.cat([whole.tensor_split(p)[rank] for whole in wholes])
    total = sum(wholes[1:], wholes[0].clone())
    return total.tensor_split(p)[rank] if collective == "reduce_scatter" else total


def whole_numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    """Small enough to add exactly in every format but float8."""
    return torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(100 + rank)).to(dtype)


def spread(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of different size, so that another order of addition shows; they stay inside every format but float8."""
    draw = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=draw) * 4.0 ** torch.randint(-4, 5, shape, generator=draw)).to(dtype)


def paid(world: rl.World, before: tuple[int, int] = (0, 0)) -> rl.Bill:
    return rl.Bill(sent=world.ledger.bytes - before[0], messages=world.ledger.messages - before[1])


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_any_length_comes_out_right_and_is_charged(case, p):
    way, collective = algorithms(p)[case], case[0]

    def body(world, rows, width, dtype):
        before = (world.ledger.bytes, world.ledger.messages)
        x = bring(collective, whole_numbers(world.rank, (rows, *width), dtype), world.rank, p)
        result = call(collective, way, x, world, rows)
        return result, result is x, paid(world, before)

    runs = [(rows, width, dtype) for rows in lengths(collective, p)
            for width, dtype in [((), torch.int64), ((3,), torch.float32), ((), torch.bfloat16), ((), torch.int16)]]
    everything = rl.simulate(p, lambda world: [body(world, *run) for run in runs])
    for at, (rows, width, dtype) in enumerate(runs):
        wholes = [whole_numbers(rank, (rows, *width), dtype) for rank in range(p)]
        # Where rows are cut, bills count rows; an all-reduce and a broadcast cut between any two elements.
        by_rows = collective in ("reduce_scatter", "all_gather", "all_to_all")
        each = torch.Size(width).numel()
        n, itemsize = (rows, each * dtype.itemsize) if by_rows else (rows * each, dtype.itemsize)
        for rank, (result, in_place, bill) in enumerate(results[at] for results in everything):
            torch.testing.assert_close(result, expected(collective, wholes, rank), rtol=0, atol=0)
            assert in_place == (collective in ("all_reduce", "broadcast"))
            assert bill == way.bill(n, p, itemsize, rank, wide=widening(dtype))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_message_that_the_caller_expects_is_none_of_the_algorithms_own(case):
    """They were sent with tags 0 and 1, so a `recv` that was waiting already got one of them."""
    way, collective, p, rows = algorithms(4)[case], case[0], 4, 24

    def body(world):
        others = [rank for rank in range(p) if rank != world.rank]
        expecting = [world.recv(torch.empty(6), rank, tag=tag, async_op=True) for rank in others for tag in (0, 1)]
        result = call(collective, way, bring(collective, whole_numbers(world.rank, (rows,), torch.float32), world.rank, p), world, rows)
        sent = [world.send(torch.full((6,), world.rank + tag / 2), rank, tag=tag, async_op=True) for rank in others for tag in (0, 1)]
        return result, [handle.wait()[0].item() for handle in expecting], [handle.wait() for handle in sent]

    wholes = [whole_numbers(rank, (rows,), torch.float32) for rank in range(p)]
    for rank, (result, got, _) in enumerate(rl.simulate(p, body)):
        assert torch.equal(result, expected(collective, wholes, rank))
        assert got == [other + half for other in range(p) if other != rank for half in (0, 0.5)]


@pytest.mark.parametrize("case", [case for case in CASES if case[0] == "all_reduce"], ids="-".join)
def test_a_sum_keeps_its_shape_and_may_have_no_dims_at_all(case):
    run, shapes = algorithms(3)[case].run, ((), (2, 1, 3))
    for sums in rl.simulate(3, lambda world: [run(torch.full(shape, 2.0), world) for shape in shapes]):
        assert [total.shape for total in sums] == [*map(torch.Size, shapes)] and all(total.eq(6.0).all() for total in sums)


def source_of(collective: str, rank: int, at: int, n: int, p: int) -> Counter:
    """Which (rank, element) must make up element `at` of what `rank` ends with."""
    if collective == "broadcast":
        return Counter({(0, at): 1})
    if collective == "all_gather":
        owner = next(r for r in range(p) if chunk_bounds(n, p)[r] <= at < chunk_bounds(n, p)[r + 1])
        return Counter({(owner, at): 1})   # it brings its piece of the whole, under the whole's numbers
    if collective == "all_to_all":
        share = n // p
        return Counter({(at // share, rank * share + at % share): 1})
    element = at + (chunk_bounds(n, p)[rank] if collective == "reduce_scatter" else 0)
    return Counter({(r, element): 1 for r in range(p)})


def traces(case: tuple[str, str], p: int, n: int) -> list[Trace]:
    way, collective = algorithms(p)[case], case[0]
    return trace(p, n, lambda x, group: call(collective, way, bring(collective, x, group.rank, p) if collective == "all_gather" else x,
                                             group, n))


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_part_lands_where_it_should_exactly_once(case, p):
    n = 2 * p if case[0] == "all_to_all" else 19
    for rank, story in enumerate(traces(case, p, n)):
        for at, history in enumerate(story.held):
            assert history == source_of(case[0], rank, at, n, p), f"rank {rank}, element {at}"


@pytest.mark.parametrize("p", [3, 4, 7])
@pytest.mark.parametrize("case", SUM_CASES, ids="-".join)
def test_no_message_holds_a_part_twice_or_parts_of_different_elements(case, p):
    for story in traces(case, p, 19):
        for _, elements in story.sent:
            for history in elements:
                assert set(history.values()) <= {1} and len({element for _, element in history}) <= 1


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("case", [case for case in CASES if case[0] == "all_reduce"], ids="-".join)
def test_all_ranks_end_with_the_same_bits(case, p):
    def body(world):
        return [algorithms(p)[case].run(spread(world.rank, (101,), dtype), world) for dtype in (torch.float32, torch.bfloat16)]

    first, *others = rl.simulate(p, body)
    assert all(torch.equal(mine, theirs) for other in others for mine, theirs in zip(first, other))


@pytest.mark.parametrize("p", [2, 3, 4, 6, 7, 8])
@pytest.mark.parametrize("case", SUM_CASES, ids="-".join)
def test_every_float_is_summed_within_the_bound_of_its_format(case, p):
    """At most p-1 additions in fp32 (fp64 for itself) on any element's way, in whatever order, then one rounding."""
    def body(world):
        inputs = [spread(world.rank, (31,)).clamp(-8, 8).to(dtype) for dtype in FLOATS]
        return [(x.clone(), algorithms(p)[case].run(x, world)) for x in inputs]

    everything = rl.simulate(p, body)
    for at, dtype in enumerate(FLOATS):
        wholes = [results[at][0].double() for results in everything]
        for rank, results in enumerate(everything):
            exact, size = (expected(case[0], values, rank) for values in (wholes, [whole.abs() for whole in wholes]))
            adding = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
            info = torch.finfo(dtype)
            # The sum may have been (1 + p adding) times as large when it was rounded; below the normal numbers the step is fixed.
            bound = 1.01 * (p - 1) * adding * size + 1.01 * info.eps / 2 * exact.abs() + info.smallest_normal * info.eps / 2
            bound += (2 * torch.finfo(torch.float64).eps * p * size if dtype == torch.float64 else 0)   # of the reference itself
            assert ((results[at][1].double() - exact).abs() <= bound).all(), f"{dtype} on rank {rank}"


@pytest.mark.parametrize("case", SUM_CASES, ids="-".join)
def test_a_sum_in_16_bits_does_not_lose_small_parts_to_a_large_one(case):
    def body(world):
        return algorithms(8)[case].run(torch.full((24,), 256.0 if world.rank == 3 else 1.0, dtype=torch.bfloat16), world)

    for total in rl.simulate(8, body):   # in bf16 256 + 1 is 256, seven times over
        assert (total == torch.tensor(263.0).bfloat16()).all()


@pytest.mark.parametrize("case", [case for case in CASES if case[0] in ("reduce_scatter", "all_gather", "all_to_all")], ids="-".join)
@pytest.mark.parametrize("p", [1, 3, 4])
def test_what_is_not_in_place_leaves_its_input_alone_and_keeps_no_memory_but_its_own(case, p):
    def body(world):
        x = whole_numbers(world.rank, (2 * p, 2))
        result = algorithms(p)[case].run(x, world)
        result.fill_(99)
        return torch.equal(x, whole_numbers(world.rank, (2 * p, 2))) and result.untyped_storage().nbytes() == result.nbytes

    assert all(rl.simulate(p, body))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_list_in_place_of_a_tensor_is_refused(case):
    def body(world):
        with pytest.raises(rl.ConfigError, match=rf"rank {world.rank}: \w+ in group 'world': operand is of type list, expected a tensor"):
            algorithms(2)[case].run([1.0, 2.0], world)

    rl.simulate(2, body)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_tensor_with_gaps_is_refused_before_anything_is_sent(case):
    def body(world):
        with pytest.raises(rl.NotContiguous, match=rf"rank {world.rank}: \w+ in group 'world': .*\(4, 3\) has strides \(1, 4\)"):
            algorithms(2)[case].run(torch.zeros(3, 4).t(), world)
        return world.ledger.calls

    assert rl.simulate(2, body) == [0, 0]


@pytest.mark.parametrize("case", [case for case in CASES if case[0] not in ("all_reduce", "broadcast")], ids="-".join)
def test_a_tensor_without_rows_is_refused_where_rows_are_dealt(case):
    def body(world):
        with pytest.raises(rl.ShapeMismatch, match=rf"rank {world.rank}: \w+ in group 'world': a tensor without dims has no rows"):
            algorithms(2)[case].run(torch.tensor(1.0), world)

    rl.simulate(2, body)


@pytest.mark.parametrize("case", SUM_CASES, ids="-".join)
def test_a_sum_of_bools_is_refused(case):
    def body(world):
        with pytest.raises(rl.ConfigError, match=rf"rank {world.rank}: .*the sum of torch.bool is not of that dtype"):
            algorithms(2)[case].run(torch.ones(4, dtype=torch.bool), world)

    rl.simulate(2, body)


@pytest.mark.parametrize("case", [case for case in CASES if case[0] not in SUMS], ids="-".join)
def test_what_only_moves_carries_every_dtype(case):
    dtypes = [torch.bool, torch.uint8, torch.complex64, torch.float8_e5m2, torch.float16, torch.int32]

    def body(world):
        wholes = [whole_numbers(rank, (6,)).to(dtype) for rank in range(3) for dtype in dtypes]
        mine = wholes[len(dtypes) * world.rank:][:len(dtypes)]
        got = [call(case[0], algorithms(3)[case], bring(case[0], x, world.rank, 3), world, 6) for x in mine]
        return [torch.equal(x.view(torch.uint8), expected(case[0], [whole for whole in wholes if whole.dtype == x.dtype], world.rank)
                            .view(torch.uint8)) for x in got]

    assert rl.simulate(3, body) == [[True] * len(dtypes)] * 3


def leaf_and_graph(case: tuple[str, str], p: int, world: rl.World) -> list[bool]:
    """Whether a parameter is taken as a plain tensor is."""
    way, mine = algorithms(p)[case], bring(case[0], whole_numbers(world.rank, (2 * p, 2), torch.float32), world.rank, p)
    plain, parameter = call(case[0], way, mine.clone(), world, 2 * p), torch.nn.Parameter(mine.clone())
    result = call(case[0], way, parameter, world, 2 * p)
    return [torch.equal(result, plain), result.grad_fn is None, (result is parameter) == (case[0] in ("all_reduce", "broadcast"))]


@pytest.mark.parametrize("p", [1, 3, 4])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_parameter_is_taken_where_gradients_are_on(case, p):
    assert rl.simulate(p, partial(leaf_and_graph, case, p)) == [[True] * 3] * p


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_tensor_with_a_graph_is_refused_before_anything_is_sent(case):
    def body(world):
        x = 2 * torch.ones(4, requires_grad=True)
        with pytest.raises(rl.ConfigError, match=rf"rank {world.rank}: \w+ in group 'world': a tensor of shape \(4,\) has a graph"):
            algorithms(2)[case].run(x, world)
        return world.ledger.calls

    assert rl.simulate(2, body) == [0, 0]


OVERLAPPING = {
    "ring_all_gather": ring_all_gather, "doubling_all_gather": doubling_all_gather, "pairwise_all_to_all": pairwise_all_to_all,
    **{f"{place}.{name}": partial(lambda x, world, place, name, *, out: getattr(part_or_whole(world, place), name)(x, out=out),
                                  place=place, name=name)
       for place in ("Group", "Subgroup") for name in ("all_gather", "reduce_scatter", "all_to_all")},
}


def part_or_whole(world: rl.World, place: str) -> rl.Group:
    return world if place == "Group" else Subgroup(world, range(world.size))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", OVERLAPPING)
def test_an_output_that_shares_memory_with_the_input_gets_what_any_other_gets(name, p):
    n, m = (2, 2 * p) if "gather" in name else (2 * p, 2) if "scatter" in name else (2 * p, 2 * p)

    def body(world):
        wrong = []
        for at in range(n + m + 1):   # the input lies before the output, then a row further each time, until it lies behind
            memory = torch.zeros(2 * n + m)
            x, out = memory[at: at + n], memory[n: n + m]
            x.copy_(torch.arange(n) + 100.0 * world.rank)
            apart = OVERLAPPING[name](x.clone(), world, out=torch.empty(m))
            result = OVERLAPPING[name](x, world, out=out)
            wrong += [at] if not torch.equal(result, apart) or result is not out else []
        return wrong

    assert rl.simulate(p, body) == [[]] * p


@pytest.mark.parametrize("send_rows", [[-1, 4], [4, -1], [1, 1], [1, 1, 1], [2, 1]])
def test_rows_that_cannot_be_dealt_are_refused_by_name(send_rows):
    def body(world):
        with pytest.raises(rl.ShapeMismatch, match=rf"rank {world.rank}: pairwise_all_to_all .*: 3 rows cannot be dealt as send_rows="):
            pairwise_all_to_all(torch.arange(3.0), world, send_rows=send_rows, recv_rows=[*send_rows[::-1]])
        return world.ledger.calls

    assert rl.simulate(2, body) == [0, 0]


class Delayed:
    """A group whose ranks dawdle before every message, each in its own way."""

    def __init__(self, world: rl.World):
        self.world, self.draw = world, random.Random(world.rank)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.world, name)
        if name in ("send", "recv", "exchange"):
            time.sleep(self.draw.random() * 0.003)
        return found


@pytest.mark.parametrize("p", [4, 7])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_random_delays_before_every_message_change_no_bit(case, p):
    way = algorithms(p)[case]

    def body(world):
        x = spread(world.rank, (4 * p,))
        twins = [way.run(x.clone(), group) for group in (world, Delayed(world))]
        return torch.equal(*twins)

    assert all(rl.simulate(p, body))


@pytest.mark.parametrize("case", [case for case in CASES if "hierarchical" not in case], ids="-".join)
def test_two_sub_groups_work_side_by_side(case):
    def body(world):
        group = world.group("shard")
        x = whole_numbers(world.rank, (6,))
        return group.ranks, call(case[0], algorithms(2)[case], bring(case[0], x, group.rank, 2), group, 6)

    for rank, (ranks, result) in enumerate(rl.simulate(rl.Mesh(replicate=2, shard=2), body)):
        assert torch.equal(result, expected(case[0], [whole_numbers(r, (6,)) for r in ranks], ranks.index(rank)))


@settings(max_examples=60)
@given(case=st.sampled_from(CASES), p=st.integers(1, 6), rows=st.integers(0, 40), width=st.sampled_from([(), (1,), (2, 3)]),
       dtype=st.sampled_from([torch.int8, torch.int32, torch.float16, torch.float32]))
def test_whatever_is_drawn_comes_out_as_on_one_process(case, p, rows, width, dtype):
    rows *= p if case[0] == "all_to_all" else 1

    def body(world):
        x = bring(case[0], whole_numbers(world.rank, (rows, *width), dtype), world.rank, p)
        return call(case[0], algorithms(p)[case], x, world, rows)

    wholes = [whole_numbers(rank, (rows, *width), dtype) for rank in range(p)]
    for rank, result in enumerate(rl.simulate(p, body)):
        assert result.dtype == dtype and torch.equal(result, expected(case[0], wholes, rank))


class Clocked:
    """A group in a time of its own: a message costs alpha + beta bytes, and passes one port out and one port in, one by one."""

    def __init__(self, world: rl.World, wires: dict, alpha: int, beta: int):
        self.world, self.wires, self.alpha, self.beta = world, wires, alpha, beta
        self.now = self.out_free = self.in_free = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def send(self, x: Tensor, to: int, *, tag: int = 0, label: str = "", async_op: bool = False) -> Any:
        start = max(self.now, self.out_free)
        self.out_free = end = start + self.alpha + self.beta * x.nbytes
        self.wires[self.world.rank, to, tag].put(start)
        late = Late(self, self.world.send(x, to, tag=tag, async_op=True), lambda: end)
        return late if async_op else late.wait()

    def recv(self, into: Tensor, frm: int, *, tag: int = 0, label: str = "", async_op: bool = False) -> Any:
        late = Late(self, self.world.recv(into, frm, tag=tag, async_op=True), lambda: self._take(into, frm, tag))
        return late if async_op else late.wait()

    def exchange(self, out: Tensor, to: int, into: Tensor, frm: int, *, tag: int = 0, label: str = "", async_op: bool = False) -> Any:
        assert not async_op, "an algorithm of this folder waits for its exchanges"
        going = self.send(out, to, tag=tag, async_op=True)
        self.recv(into, frm, tag=tag)
        going.wait()
        return into

    def _take(self, into: Tensor, frm: int, tag: int) -> int:
        start = self.wires[frm, self.world.rank, tag].get()
        self.in_free = max(start, self.in_free) + self.alpha + self.beta * into.nbytes
        return self.in_free


class Late:
    """A handle that moves its group's clock when it is awaited."""

    def __init__(self, group: Clocked, handle: Any, end: Any):
        self.group, self.handle, self.end = group, handle, end

    def wait(self) -> Tensor:
        result = self.handle.wait()
        self.group.now = max(self.group.now, self.end())
        return result


class Wires(defaultdict):
    """A queue of starting times for each (from, to, tag)."""

    def __init__(self):
        super().__init__(SimpleQueue)
        self.lock = threading.Lock()

    def __getitem__(self, key: tuple[int, int, int]) -> SimpleQueue:
        with self.lock:
            return super().__getitem__(key)


class Additions(TorchDispatchMode):
    """Counts the bytes of sums that one thread computes."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.add_.Tensor:
            self.total += args[0].nbytes
        return func(*args, **(kwargs or {}))


def measured_path(case: tuple[str, str], p: int, n: int, dtype: torch.dtype) -> Path:
    def body(world, wires, alpha, beta):
        clock = Clocked(world, wires, alpha, beta)
        with Additions() as additions:
            call(case[0], algorithms(p)[case], bring(case[0], torch.zeros(n, dtype=dtype), world.rank, p), clock, n)
        return clock.now, additions.total

    steps, travelled = ([*rl.simulate(p, partial(body, wires=Wires(), alpha=alpha, beta=beta))] for alpha, beta in ((1, 0), (0, 1)))
    return Path(steps=max(now for now, _ in steps), bytes=max(now for now, _ in travelled), added=max(total for _, total in steps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("case", [case for case in CASES if case not in BOUNDED], ids="-".join)
def test_the_path_is_what_the_slowest_rank_waits_for_on_a_network_of_equal_links(case, p, dtype):
    n = 840   # all of 1 to 8 divide it
    assert measured_path(case, p, n, dtype) == algorithms(p)[case].path(n * dtype.itemsize, p, wide=widening(dtype))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_step_of_a_path_carries_a_byte_at_least_however_little_there_is(case):
    for p in RANKS:
        path = algorithms(p)[case].path(1, p)
        assert path.bytes >= path.steps, f"{p} ranks"


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("case", BOUNDED, ids="-".join)
def test_where_the_path_is_a_bound_it_is_kept_and_within_four_times_of_what_is_waited_for_and_of_many_blocks_a_tenth(case, p):
    found, told = measured_path(case, p, 840, torch.bfloat16), algorithms(p)[case].path(1680, p, wide=2)
    for mine, bound in ((found.steps, told.steps), (found.bytes, told.bytes), (found.added, told.added)):
        assert mine <= bound <= (1.1 if "small blocks" in case[1] else 4) * mine
