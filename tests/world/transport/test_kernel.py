"""Both kernels do the same, and what numpy says: ranks are threads here, or forked processes, over one piece of memory."""

import ctypes
import mmap
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rankloom
from bell import Bell, bell_once_inside
from no_threads import no_thread_starts
from patience import AT_ONCE, wait_until
from rankloom.base.errors import ConfigError
from rankloom.world.transport import codes, fallback, fallback_peers, operands
from rankloom.world.transport.codes import (
    ABORTED,
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    AVG,
    BARRIER,
    BOR,
    BROADCAST,
    BXOR,
    FINE,
    FORKED,
    GATHER,
    INTERRUPTED,
    LEFT,
    LOST,
    MAX,
    MIN,
    MISMATCHED,
    PRODUCT,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SUM,
    TIMED_OUT,
    WRONG_LENGTH,
)
from rankloom.world.transport.fallback_messages import Exchanges

try:
    from rankloom.world.transport import _shared as compiled
except ImportError as error:
    compiled, missing = None, str(error)
else:
    missing = ""

F32, F64, F16, BF16, I8, U8, I16, U16, I32, U32, I64, U64 = range(12)
DTYPES = list(operands.NUMBERS)   # torch dtypes by number
OPS = range(8)
LONG = 60.0                       # seconds: a time-out that no test waits for
WINDOW = 4096                     # small, so that few bytes are several windows
NOBODY = 1 << 30                  # a number that no process has

without_c = pytest.mark.skipif(not compiled, reason=f"the C kernel is not built: {missing}")
both_kernels = pytest.mark.parametrize("kernel", [pytest.param(fallback, id="python"), pytest.param(compiled, id="C", marks=without_c)])
world_sizes = pytest.mark.parametrize("p", [1, 2, 3, 4])


class Team:
    """p ranks over one mapping; a rank in `elsewhere` is made by another process.

    Those of odd teams yield to nobody, as if each had a core of its own: then their slots take many turns, else two.
    """

    def __init__(self, kernel: Any, p: int, window: int = WINDOW, elsewhere: tuple[int, ...] = ()):
        self.memory = mmap.mmap(-1, kernel.segment_size(p))
        self.kernel, self.p, self.window, self.yields = kernel, p, window, 0 if p % 2 else 20
        self.links: dict[int, Any] = {}
        self.elsewhere = elsewhere

    def link(self, rank: int) -> Any:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.links[rank] = self.kernel.Link(address, rank, self.p, 0, self.yields, self.window)
        return self.links[rank]

    def __enter__(self) -> "Team":
        for rank in range(self.p):
            if rank not in self.elsewhere:
                self.link(rank)
        return self

    def __exit__(self, *error: object) -> None:
        for link in self.links.values():   # before the memory goes
            link.leave()

    def each(self, body: Callable[[Any, int], Any], ranks: Any = None) -> list[Any]:
        """body(link, rank) in a thread for each rank; results in rank order."""
        ranks = list(self.links if ranks is None else ranks)
        results: dict[int, Any] = {}

        def go(rank: int) -> None:
            results[rank] = body(self.links[rank], rank)

        threads = [threading.Thread(target=go, args=(rank,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG + AT_ONCE)
        assert results.keys() == set(ranks), f"ranks {set(ranks) - results.keys()} raised or hang"
        return [results[rank] for rank in ranks]

    def in_process(self, rank: int, body: Callable[[Any], int]) -> int:
        """body(link) in a forked process that makes the link of `rank`; returns its process number."""
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = body(self.link(rank))
            finally:
                os._exit(code)
        return pid


def at(x: np.ndarray | None) -> int:
    return x.ctypes.data if x is not None else 0


def run(link: Any, kind: int, x: np.ndarray | None = None, out: np.ndarray | None = None, lengths: int | bytes | None = None, *,
        number: int = U8, op: int = SUM, root: int = 0, timeout: float = LONG) -> int:
    nbytes = lengths if lengths is not None else x.nbytes if x is not None else 0
    return link.run(kind, number, op, root, at(x), at(out), nbytes, timeout)


def submit(link: Any, kind: int, x: np.ndarray, out: np.ndarray, nbytes: int, *, number: int = I32, timeout: float = LONG) -> int:
    return link.submit(kind, number, SUM, 0, at(x), at(out), nbytes, timeout)


def send(link: Any, x: np.ndarray, peer: int, tag: int = 0, timeout: float = LONG) -> int:
    return link.message(1, at(x), x.nbytes, peer, tag, timeout)


def receive(link: Any, x: np.ndarray, peer: int, tag: int = 0, timeout: float = LONG) -> int:
    return link.message(0, at(x), x.nbytes, peer, tag, timeout)


def rows(*table: list[int]) -> bytes:
    return np.array(table, np.uint64).tobytes()


def numbers_of(rank: int, n: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(-(1 << 30), 1 << 30, n, np.int32)


# ------------------------------------------------------------------ collectives against numpy

SIZES = [0, 1, 5, 6000]   # the last: several windows, and more than the C kernel reduces without sharing the work


@both_kernels
@world_sizes
@pytest.mark.parametrize("n", SIZES)
def test_all_reduce_gives_every_rank_the_sum(kernel, p, n):
    given = [numbers_of(r, n) for r in range(p)]
    expected = sum(given, np.zeros(n, np.int32))
    with Team(kernel, p) as team:
        assert team.each(lambda link, r: run(link, ALL_REDUCE, given[r], given[r], number=I32)) == [FINE] * p
    for x in given:
        np.testing.assert_array_equal(x, expected)


@both_kernels
@world_sizes
@pytest.mark.parametrize("n", SIZES)
def test_reduce_changes_the_root_only(kernel, p, n):
    root, given, out = p - 1, [numbers_of(r, n) for r in range(p)], [np.full(n, r, np.int32) for r in range(p)]
    with Team(kernel, p) as team:
        assert team.each(lambda link, r: run(link, REDUCE, given[r], out[r], number=I32, root=root)) == [FINE] * p
    for r in range(p):
        np.testing.assert_array_equal(out[r], sum(given, np.zeros(n, np.int32)) if r == root else np.full(n, r))


@both_kernels
@world_sizes
@pytest.mark.parametrize("n", SIZES)
def test_broadcast_copies_the_root_s(kernel, p, n):
    root, x = p // 2, [numbers_of(r, n) for r in range(p)]
    with Team(kernel, p) as team:
        assert team.each(lambda link, r: run(link, BROADCAST, x[r], x[r], root=root)) == [FINE] * p
    for r in range(p):
        np.testing.assert_array_equal(x[r], numbers_of(root, n))


@both_kernels
@world_sizes
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", [ALL_GATHER, GATHER])
def test_gathers_put_parts_in_rank_order(kernel, p, n, kind):
    root, out = p - 1, [np.zeros((p, n), np.int32) for _ in range(p)]
    with Team(kernel, p) as team:
        assert team.each(lambda link, r: run(link, kind, numbers_of(r, n), out[r], root=root if kind == GATHER else 0)) == [FINE] * p
    for r in range(p):
        everything = [numbers_of(other, n) for other in range(p)] if kind == ALL_GATHER or r == root else np.zeros((p, n))
        np.testing.assert_array_equal(out[r], everything)


@both_kernels
@world_sizes
@pytest.mark.parametrize("n", SIZES)
def test_reduce_scatter_gives_each_rank_its_rows_of_the_sum(kernel, p, n):
    given, out = [numbers_of(r, p * n).reshape(p, n) for r in range(p)], [np.zeros(n, np.int32) for _ in range(p)]
    with Team(kernel, p) as team:
        assert team.each(lambda link, r: run(link, REDUCE_SCATTER, given[r], out[r], 4 * n, number=I32)) == [FINE] * p
    for r in range(p):
        np.testing.assert_array_equal(out[r], sum(x[r] for x in given))


@both_kernels
@world_sizes
@pytest.mark.parametrize("n", SIZES)
def test_scatter_deals_the_root_s_rows(kernel, p, n):
    root, given, out = p // 2, [numbers_of(r, p * n).reshape(p, n) for r in range(p)], [np.zeros(n, np.int32) for _ in range(p)]
    with Team(kernel, p) as team:
        assert team.each(lambda link, r: run(link, SCATTER, given[r] if r == root else None, out[r], 4 * n, root=root)) == [FINE] * p
    for r in range(p):
        np.testing.assert_array_equal(out[r], given[root][r])


@both_kernels
@world_sizes
@pytest.mark.parametrize("n", SIZES)
def test_all_to_all_transposes(kernel, p, n):
    given, out = [numbers_of(r, p * n).reshape(p, n) for r in range(p)], [np.zeros((p, n), np.int32) for _ in range(p)]
    with Team(kernel, p) as team:
        assert team.each(lambda link, r: run(link, ALL_TO_ALL, given[r], out[r], 4 * n)) == [FINE] * p
    for r in range(p):
        np.testing.assert_array_equal(out[r], [x[r] for x in given])


@both_kernels
@world_sizes
def test_a_barrier_lets_nobody_through_before_all_have_come(kernel, p):
    came = []

    def late_one_after_the_other(link, rank):
        for turn in range(3):
            time.sleep(0.02 * ((rank + turn) % p))
            came.append(turn)
            assert run(link, BARRIER) == FINE
            assert came.count(turn) == p
        return True

    with Team(kernel, p) as team:
        assert all(team.each(late_one_after_the_other))


@both_kernels
@world_sizes
@pytest.mark.parametrize("unit", [1, 3000])
def test_lengths_may_differ_from_rank_to_rank(kernel, p, unit):
    """Rank r has (r + 2d) units for rank d, at absolute addresses, some of them none."""
    length = [[unit * (r + 2 * d) for d in range(p)] for r in range(p)]   # [from][to]
    given = [[numbers_of(10 * r + d, length[r][d]).astype(np.uint8) for d in range(p)] for r in range(p)]
    out = [[np.zeros(length[r][d], np.uint8) for r in range(p)] for d in range(p)]

    def body(link, r):
        table = rows([at(x) for x in given[r]], length[r], [at(x) for x in out[r]], [x.nbytes for x in out[r]])
        return run(link, ALL_TO_ALL, lengths=table)

    with Team(kernel, p) as team:
        assert team.each(body) == [FINE] * p
    for r in range(p):
        for d in range(p):
            np.testing.assert_array_equal(out[d][r], given[r][d])


@both_kernels
@pytest.mark.parametrize("window", [100 << 10, 1 << 20])
@pytest.mark.parametrize("offset", [0, 3, 17])
def test_a_large_result_is_written_where_it_belongs_and_nowhere_else(kernel, offset, window):
    """More than 8 MiB, which the C kernel writes past the caches, line by line; parts begin and end in the middle of lines."""
    lengths = [(3 << 20) + 5, 70, (6 << 20) - 63]
    given = [np.random.default_rng(r).integers(0, 256, n, np.uint8) for r, n in enumerate(lengths)]
    begin, gap = offset + np.cumsum([0, *lengths[:-1]]) + [0, 1, 2], 0xEE   # a byte between the parts belongs to none
    out = [np.full(sum(lengths) + offset + 200, gap, np.uint8) for _ in lengths]

    def body(link, r):
        return run(link, ALL_GATHER, lengths=rows([at(given[r])] * 3, [lengths[r]] * 3, [at(out[r]) + int(x) for x in begin], lengths))

    with Team(kernel, 3, window) as team:
        assert team.each(body) == [FINE] * 3
    expected = np.full_like(out[0], gap)
    for x, at_byte in zip(given, begin):
        expected[at_byte:at_byte + len(x)] = x
    for got in out:
        np.testing.assert_array_equal(got, expected)


@both_kernels
@world_sizes
@pytest.mark.parametrize("kind", [ALL_GATHER, GATHER, SCATTER, REDUCE_SCATTER])
def test_tables_serve_every_kind_whose_parts_may_differ(kernel, p, kind):
    size = [(7 * r + 1) % 5 * 1200 for r in range(p)]   # numbers of 4 bytes; none on some rank of several
    parts = [[numbers_of(10 * r + d, size[d]) for d in range(p)] for r in range(p)]
    mine = [numbers_of(r, size[r]) for r in range(p)]
    result, many = [np.zeros(size[r], np.int32) for r in range(p)], [[np.zeros(n, np.int32) for n in size] for _ in range(p)]
    root = p - 1

    def body(link, r):
        if kind in (ALL_GATHER, GATHER):
            given, out = [mine[r]] * p, many[r] if kind == ALL_GATHER or r == root else [np.zeros(0, np.int32)] * p
        else:
            given, out = parts[r] if kind == REDUCE_SCATTER or r == root else [np.zeros(0, np.int32)] * p, [result[r]] * p
        table = rows([at(x) for x in given], [x.nbytes for x in given], [at(x) for x in out], [x.nbytes for x in out])
        return run(link, kind, lengths=table, number=I32, root=0 if kind in (ALL_GATHER, REDUCE_SCATTER) else root)

    with Team(kernel, p) as team:
        assert team.each(body) == [FINE] * p
    for r in range(p):
        if kind == ALL_GATHER or (kind == GATHER and r == root):
            assert all(np.array_equal(got, x) for got, x in zip(many[r], mine))
        elif kind == SCATTER:
            np.testing.assert_array_equal(result[r], parts[root][r])
        elif kind == REDUCE_SCATTER:
            np.testing.assert_array_equal(result[r], sum(x[r] for x in parts))


@both_kernels
@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("all_in_regions", [True, False])
def test_inputs_in_shared_regions_give_the_same_results(kernel, p, all_in_regions):
    n = 1 << 15
    memory = mmap.mmap(-1, 4 * n * p)
    shared = np.frombuffer(memory, np.int32).reshape(p, n)
    x = [shared[r] if all_in_regions or r else numbers_of(0, n) for r in range(p)]
    out = [np.zeros((p, n), np.int32) for _ in range(p)]
    expected = sum(numbers_of(r, n) for r in range(p))
    for r in range(p):
        x[r][:] = numbers_of(r, n)

    def body(link, r):
        link.add_region(1, at(shared), 4 * n)
        whys = [run(link, ALL_GATHER, x[r], out[r]), run(link, ALL_REDUCE, x[r], x[r], number=I32)]
        assert np.array_equal(x[r], expected)
        whys.append(run(link, BARRIER))   # the last look at the sum comes before its end
        if r == 1:
            x[r][:] = 7
        whys.append(run(link, BROADCAST, x[r], x[r], root=1))
        link.drop_region(1)
        return whys

    with Team(kernel, p) as team:
        assert team.each(body) == [[FINE] * 4] * p
    for r in range(p):
        np.testing.assert_array_equal(out[r], [numbers_of(other, n) for other in range(p)])
        assert (x[r] == 7).all()


def shared_by(team: Team, shared: np.ndarray, ranks: Any = None) -> None:
    """Let ranks, by default all, know that each has a row of `shared`."""
    for rank in team.links if ranks is None else ranks:
        team.links[rank].add_region(1, at(shared), shared[0].nbytes)


LANES = {   # bytes: where the lanes of rank 0 and of rank 1 begin in their rows, and their lengths
    "end to end": ([0, 20_000], [0, 30_000], [20_000, 5_000], [30_000, 7]),
    "with a gap": ([0, 20_008], [0, 30_016], [20_000, 5_000], [30_000, 7]),
    "not from the beginning": ([8, 20_008], [16, 30_016], [20_000, 5_000], [30_000, 7]),
}


@both_kernels
@pytest.mark.parametrize("lanes", LANES)
def test_lanes_in_shared_regions_are_found_wherever_they_lie(kernel, lanes):
    *begins, first, second = LANES[lanes]
    lengths, given = [first, second], np.random.default_rng(0).integers(0, 256, (2, 40_000), np.uint8)
    shared = np.frombuffer(mmap.mmap(-1, given.nbytes), np.uint8).reshape(given.shape)
    shared[:] = given
    out = [np.zeros(first[r] + second[r], np.uint8) for r in range(2)]
    with Team(kernel, 2) as team:
        shared_by(team, shared)
        assert team.each(lambda link, r: run(link, ALL_TO_ALL, shared[r], out[r], rows(
            begins[r], lengths[r], [0, first[r]], [first[r], second[r]]))) == [FINE] * 2
    for r in range(2):
        np.testing.assert_array_equal(out[r], np.concatenate([given[f, begins[f][r]:][:lengths[f][r]] for f in range(2)]))


@both_kernels
@pytest.mark.parametrize("kind", [ALL_REDUCE, ALL_TO_ALL])
def test_an_input_in_a_shared_region_is_not_overwritten_while_others_read_it(kernel, kind):
    """A sum that goes elsewhere leaves it as it was; rows that go to each other's places are read before they are written."""
    given = np.stack([numbers_of(r, 1 << 15) for r in range(2)])
    shared = np.frombuffer(mmap.mmap(-1, given.nbytes), np.int32).reshape(given.shape)
    shared[:] = given
    out = np.zeros_like(given) if kind == ALL_REDUCE else shared
    with Team(kernel, 2) as team:
        shared_by(team, shared)
        nbytes = shared[0].nbytes // (1 if kind == ALL_REDUCE else 2)
        assert team.each(lambda link, r: run(link, kind, shared[r], out[r], nbytes, number=I32)) == [FINE] * 2
    if kind == ALL_REDUCE:
        np.testing.assert_array_equal(shared, given)
        np.testing.assert_array_equal(out, [given.sum(0, dtype=np.int32)] * 2)
    else:
        np.testing.assert_array_equal(out.reshape(2, 2, -1), given.reshape(2, 2, -1).swapaxes(0, 1))


@both_kernels
def test_an_input_just_behind_a_shared_region_is_not_taken_for_a_part_of_it(kernel):
    shared, out = np.stack([numbers_of(r, 1 << 14) for r in range(3)]), np.zeros((2, 2, 1 << 14), np.int32)
    with Team(kernel, 2) as team:
        shared_by(team, shared)   # the first two rows
        assert team.each(lambda link, r: run(link, ALL_GATHER, shared[2 * r], out[r])) == [FINE] * 2
    np.testing.assert_array_equal(out, [shared[[0, 2]]] * 2)


@both_kernels
def test_an_input_in_a_region_that_one_rank_has_given_back_reaches_it_all_the_same(kernel):
    shared, out = np.stack([numbers_of(r, 1 << 14) for r in range(2)]), np.zeros(1 << 14, np.int32)
    with Team(kernel, 2) as team:
        shared_by(team, shared, [1])
        assert team.each(lambda link, r: run(link, BROADCAST, shared[r], shared[r] if r else out, root=1)) == [FINE] * 2
    np.testing.assert_array_equal(out, numbers_of(1, 1 << 14))


@without_c
def test_a_region_is_not_forgotten_while_a_call_may_be_reading_it():
    shared = np.zeros((2, 1 << 15), np.uint8)
    with Team(compiled, 2) as team:
        shared_by(team, shared)
        reads = threading.Thread(target=run, args=(team.links[0], ALL_GATHER, shared[0], np.zeros_like(shared)))
        reads.start()
        wait_until(lambda: team.links[0].status()[2][0])
        assert not team.links[0].drop_region(1)
        assert run(team.links[1], ALL_GATHER, shared[1], np.zeros_like(shared)) == FINE
        reads.join()
        assert team.links[0].drop_region(1)


# ------------------------------------------------------------------ arithmetic

SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 65504.0, 6e-8, 3.3895e38, -1.0]


def some_numbers(number: int, n: int, seed: int) -> torch.Tensor:
    dtype, random = DTYPES[number], np.random.default_rng(seed)
    if not dtype.is_floating_point:
        bits = torch.from_numpy(random.integers(0, 256, n * dtype.itemsize, np.uint8))
        return bits.view(dtype)
    x = torch.from_numpy(random.standard_normal(n) * 10.0 ** random.integers(-6, 6, n))
    for special in SPECIAL:
        x[random.integers(0, n, n // 16)] = special
    return x.to(dtype)


def all_reduced(kernel: Any, given: list[torch.Tensor], op: int) -> list[torch.Tensor]:
    x = [tensor.clone() for tensor in given]
    number = DTYPES.index(x[0].dtype)
    with Team(kernel, len(x)) as team:
        whys = team.each(lambda link, r: link.run(ALL_REDUCE, number, op, 0, x[r].data_ptr(), x[r].data_ptr(), x[r].nbytes, LONG))
    assert whys == [FINE] * len(x)
    return x


def in_torch(given: list[torch.Tensor], op: int) -> torch.Tensor:
    """The same in torch, one after the other."""
    join = {SUM: torch.add, AVG: torch.add, PRODUCT: torch.mul, MIN: torch.minimum, MAX: torch.maximum,
            BOR: torch.bitwise_or, BXOR: torch.bitwise_xor}.get(op, torch.bitwise_and)
    dtype = given[0].dtype
    signed = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.float16: torch.float32, torch.bfloat16: torch.float32}
    wide = [x.to(signed.get(dtype, dtype)) for x in given]
    if dtype == torch.uint64:   # torch has few operations on it: shifted, the order is that of int64
        shift = op in (MIN, MAX)
        wide = [x.view(torch.int64) ^ (-(1 << 63) if shift else 0) for x in given]
    total = wide[0]
    for x in wide[1:]:
        total = join(total, x)
    if op == AVG:
        total = total / len(given)
    return (total ^ (-(1 << 63) if shift else 0)).view(dtype) if dtype == torch.uint64 else total.to(dtype)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Zero and minus zero differ; one NaN is as good as another."""
    if actual.dtype.is_floating_point:
        nan = expected.isnan()
        assert torch.equal(actual.isnan(), nan)
        actual, expected = actual[~nan], expected[~nan]
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def is_offered(number: int, op: int) -> bool:
    return op <= MAX if DTYPES[number].is_floating_point else op != AVG


@both_kernels
@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize(("number", "op"), [(number, op) for number in range(12) for op in OPS if is_offered(number, op)])
def test_every_operation_on_every_number_type_is_torch_s(kernel, p, number, op):
    given = [some_numbers(number, 333, seed) for seed in range(p)]
    if op in (MIN, MAX) and DTYPES[number].is_floating_point:   # torch does not say which of two zeros it takes
        given = [x.where(x != 0, torch.ones_like(x)) for x in given]
    for x in all_reduced(kernel, given, op):
        assert_same_bits(x, in_torch(given, op))


@both_kernels
@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("number", [F32, BF16])
@pytest.mark.parametrize("op", [SUM, AVG, MAX])
def test_operations_in_shared_regions_give_what_they_give_elsewhere(kernel, op, number, p):
    given = [some_numbers(number, 1 << 14, seed) for seed in range(p)]
    shared = torch.stack(given)
    with Team(kernel, p) as team:
        shared_by(team, shared.view(torch.uint8).numpy())
        whys = team.each(lambda link, r: link.run(ALL_REDUCE, number, op, 0, *[shared[r].data_ptr()] * 2, shared[r].nbytes, LONG))
    assert whys == [FINE] * p
    for got in shared:
        assert_same_bits(got, in_torch(given, op))


@both_kernels
def test_16_bit_sums_are_rounded_once(kernel):
    """256 + 1 + 1 in bfloat16: each step alone would be rounded back to 256."""
    given = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert [x.item() for x in all_reduced(kernel, given, SUM)] == [258.0] * 3
    assert [x.item() for x in all_reduced(kernel, [torch.tensor([60000.0], dtype=torch.float16)] * 2, AVG)] == [60000.0] * 2


@both_kernels
def test_sums_are_taken_in_rank_order(kernel):
    """(1e8 + 1) - 1e8 is 0 in fp32; in any other order it is 1."""
    given = [torch.tensor([value], dtype=torch.float32) for value in (1e8, 1.0, -1e8)]
    assert [x.item() for x in all_reduced(kernel, given, SUM)] == [0.0] * 3


@without_c
@settings(max_examples=60)
@given(st.integers(0, 11), st.sampled_from(OPS), st.integers(1, 4), st.integers(16, 9000), st.integers(0, 1 << 30))
def test_both_kernels_give_the_same_bits(number, op, p, n, seed):
    op = op if is_offered(number, op) else SUM
    given = [some_numbers(number, n, seed + r) for r in range(p)]
    for python, c in zip(all_reduced(fallback, given, op), all_reduced(compiled, given, op)):
        assert_same_bits(python, c)


def test_number_types_and_operations_are_numbered_alike():
    same = [torch.bfloat16 if number == fallback.BF16 else getattr(torch, np.dtype(x).name) for number, x in enumerate(fallback.DTYPES)]
    assert same == DTYPES
    for op, code in operands.OPS.items():
        assert getattr(codes, op.name) == code


# ------------------------------------------------------------------ background


@both_kernels
@pytest.mark.parametrize("p", [1, 2, 4])
def test_background_calls_end_in_the_order_of_their_tickets(kernel, p):
    calls = 12
    given = [[numbers_of(100 * r + i, 700 * (i % 4)) for i in range(calls)] for r in range(p)]
    expected = [sum(given[r][i].copy() for r in range(p)) for i in range(calls)]

    def body(link, r):
        tickets = [submit(link, ALL_REDUCE, x, x, x.nbytes) for x in given[r]]
        assert tickets == sorted(tickets) and len(set(tickets)) == calls
        assert run(link, BARRIER) == FINE   # takes its turn behind them
        assert link.finished() >= tickets[-1]
        return [link.wait(ticket, LONG) for ticket in reversed(tickets)]

    with Team(kernel, p) as team:
        assert team.each(body) == [[FINE] * calls] * p
    for r in range(p):
        assert all(np.array_equal(x, whole) for x, whole in zip(given[r], expected))


@both_kernels
def test_a_wait_may_end_before_its_call_and_leaves_the_group_whole(kernel):
    x = [numbers_of(r, 10) for r in range(2)]
    with Team(kernel, 2) as team:
        first, second = team.links.values()
        ticket = submit(first, ALL_REDUCE, x[0], x[0], 40)
        assert first.wait(ticket, 0.1) == TIMED_OUT and first.finished() < ticket
        assert run(second, ALL_REDUCE, x[1], x[1], number=I32) == FINE
        assert first.wait(ticket, 5.0) == FINE
    np.testing.assert_array_equal(x[0], numbers_of(0, 10) + numbers_of(1, 10))


@both_kernels
@pytest.mark.parametrize("patience", [AT_ONCE, 0.0])
def test_a_thread_that_waits_for_less_than_the_time_out_of_a_call_does_not_keep_it_from_its_turn(kernel, patience):
    """It waits while the turn before ends, and may be gone before the call has begun: so others must begin it."""
    with Team(kernel, 2) as team:
        first, second = team.links.values()
        x = [numbers_of(r, 10) for r in range(2)]
        before = threading.Thread(target=run, args=(first, BARRIER))
        before.start()
        wait_until(lambda: first.status()[2] == [1, 0])
        ticket, whys = submit(first, ALL_REDUCE, x[0], x[0], 40), []
        time.sleep(0.1)   # until the worker has seen that it is not its turn
        waits = threading.Thread(target=lambda: whys.append(first.wait(ticket, patience)))
        waits.start()
        time.sleep(0.01)
        assert run(second, BARRIER) == FINE
        assert run(second, ALL_REDUCE, x[1], x[1], number=I32, timeout=AT_ONCE / 2) == FINE
        waits.join()
        before.join()
        assert first.wait(ticket, LONG) == FINE and (whys == [FINE] or not patience)


@both_kernels
def test_the_time_out_of_a_call_begins_with_its_turn(kernel):
    with Team(kernel, 2) as team:
        first, second = team.links.values()
        whys: list[int] = []
        calls = [threading.Thread(target=lambda limit=limit: whys.append(run(first, BARRIER, timeout=limit))) for limit in (LONG, 0.2)]
        calls[0].start()
        wait_until(lambda: first.status()[2] == [1, 0])
        calls[1].start()
        time.sleep(0.4)
        assert not whys and [run(second, BARRIER, timeout=AT_ONCE) for _ in calls] == [FINE] * 2
        for call in calls:
            call.join()
        assert whys == [FINE] * 2


@both_kernels
def test_every_background_call_that_has_failed_says_so_and_none_before(kernel):
    x = np.zeros(4, np.int32)
    with Team(kernel, 2) as team:
        first, second = team.links.values()
        assert submit(first, ALL_REDUCE, x, x, 16) == 1 and run(second, ALL_REDUCE, x.copy(), x.copy(), number=I32) == FINE
        assert first.wait(1, LONG) == FINE
        assert [submit(first, ALL_REDUCE, x, x, 16) for _ in range(2)] == [2, 3]
        second.break_off(1, ABORTED)
        wait_until(lambda: first.finished() == 3)
        assert [first.wait(ticket, LONG) for ticket in (1, 2, 3)] == [FINE, ABORTED, ABORTED]


@both_kernels
def test_several_threads_of_one_rank_may_call_at_once(kernel):
    """Calls of a rank's threads have no order, so all are alike here."""
    with Team(kernel, 2) as team:
        def body(link, r):
            whys: list[int] = []
            threads = [threading.Thread(target=lambda: whys.append(run(link, BARRIER))) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return whys

        assert team.each(body) == [[FINE] * 8] * 2


# ------------------------------------------------------------------ what goes wrong


@both_kernels
@pytest.mark.parametrize("change", ["kind", "number", "op", "root", "nbytes"])
def test_different_calls_are_found_on_all_ranks(kernel, change):
    usual = dict(kind=ALL_REDUCE, number=I32, op=SUM, root=0, nbytes=64)
    other = usual | {change: {"kind": ALL_GATHER, "number": F32, "op": MAX, "root": 1, "nbytes": 60}[change]}

    def body(link, r):
        x, out = np.zeros(64, np.uint8), np.zeros(256, np.uint8)
        call = other if r == 2 else usual
        return link.run(call["kind"], call["number"], call["op"], call["root"], at(x), at(out), call["nbytes"], LONG)

    with Team(kernel, 3) as team:
        assert team.each(body) == [MISMATCHED] * 3
        assert team.links[0].calls()[2] == tuple(other.values()) and team.links[0].calls()[1] == tuple(usual.values())
        assert team.links[1].status()[0] == MISMATCHED
        assert team.each(lambda link, r: run(link, BARRIER)) == [MISMATCHED] * 3   # it stays broken


@both_kernels
def test_a_wrong_length_is_found_on_all_ranks(kernel):
    """Rank 1 sends rank 2 three bytes, which expects four; rank 0 has no part in it."""
    def body(link, r):
        lengths = [3 if (r, d) == (1, 2) else 4 for d in range(3)]
        x, out = np.zeros(12, np.uint8), np.full(12, 9, np.uint8)
        why = run(link, ALL_TO_ALL, x, out, rows([0, 4, 8], lengths, [0, 4, 8], [4, 4, 4]))
        assert (out == 9).all()   # and before anything is written
        return why, run(link, BARRIER)

    with Team(kernel, 3) as team:
        assert team.each(body) == [(WRONG_LENGTH, WRONG_LENGTH)] * 3
        assert team.links[0].status()[:2] == (WRONG_LENGTH, 1)


@both_kernels
@pytest.mark.parametrize("kind", [ALL_GATHER, GATHER, REDUCE_SCATTER, SCATTER, ALL_TO_ALL])
def test_lengths_that_do_not_fit_are_a_wrong_length_not_a_different_call(kernel, kind):
    x, out = np.zeros(64, np.uint8), [np.zeros(64, np.uint8) for _ in range(2)]
    with Team(kernel, 2) as team:
        whys = team.each(lambda link, r: run(link, kind, x, out[r], 8 + 8 * r, number=F32))
    assert whys == [WRONG_LENGTH] * 2


@both_kernels
def test_one_length_and_a_table_that_says_the_same_fit(kernel):
    given, out = [numbers_of(r, 8) for r in range(2)], [np.zeros(8, np.int32) for _ in range(2)]
    with Team(kernel, 2) as team:
        assert team.each(lambda link, r: run(link, ALL_TO_ALL, given[r], out[r],
                                             rows([0, 16], [16, 16], [0, 16], [16, 16]) if r else 16)) == [FINE] * 2
    for r in range(2):
        np.testing.assert_array_equal(out[r], np.concatenate([x[4 * r:4 * r + 4] for x in given]))


@both_kernels
def test_a_time_out_tells_who_has_not_come(kernel):
    with Team(kernel, 3) as team:
        whys: list[int] = []
        early = threading.Thread(target=lambda: whys.append(run(team.links[2], BARRIER)))
        early.start()
        wait_until(lambda: team.links[0].status()[2][2])   # it has come
        begin = time.monotonic()
        assert run(team.links[0], BARRIER, timeout=0.2) == TIMED_OUT
        early.join()
        assert whys == [TIMED_OUT]
        assert 0.2 <= time.monotonic() - begin < 0.2 + AT_ONCE
        why, blamed, arrived, states = team.links[0].status()
        assert (why, blamed, arrived) == (TIMED_OUT, 1, [1, 0, 1]) and set(states) <= set("RSDI")


@both_kernels
def test_a_rank_that_is_late_is_waited_for(kernel):
    """Its link is not even made when the others begin to wait."""
    whys: list[int] = []
    with Team(kernel, 2, elsewhere=(1,)) as team:
        early = threading.Thread(target=lambda: whys.append(run(team.links[0], BARRIER)))
        early.start()
        time.sleep(0.3)
        whys.append(run(team.link(1), BARRIER))
        early.join()
    assert whys == [FINE, FINE]


@both_kernels
def test_a_rank_that_leaves_ends_the_waits_for_it(kernel):
    def body(link, r):
        if r == 1:
            time.sleep(0.1)
            link.leave()
            return run(link, BARRIER)
        return run(link, BARRIER)

    with Team(kernel, 3) as team:
        begin = time.monotonic()
        assert team.each(body) == [LEFT] * 3
        assert time.monotonic() - begin < AT_ONCE
        assert team.links[0].status()[:2] == (LEFT, 1)


@both_kernels
def test_a_rank_that_leaves_while_it_waits_in_another_thread_ends_that_wait(kernel):
    whys: list[int] = []
    with Team(kernel, 2) as team:
        waits = threading.Thread(target=lambda: whys.append(run(team.links[0], BARRIER)), daemon=True)
        waits.start()
        wait_until(lambda: team.links[1].status()[2][0])
        team.links[0].leave()
        waits.join(AT_ONCE)
        assert whys == [LEFT]


@both_kernels
def test_the_state_of_a_rank_that_has_left_says_so(kernel):
    with Team(kernel, 2) as team:
        assert "L" not in team.links[0].status()[3]
        team.links[1].leave()
        assert team.links[0].status()[3][1] == "L" and team.links[0].status()[3][0] != "L"


@both_kernels
def test_the_state_of_a_rank_that_has_not_come_yet_says_so(kernel):
    with Team(kernel, 2, elsewhere=(1,)) as team:
        assert team.links[0].status()[3][1] == "?"
        assert team.link(1).status()[3][1] in "RSD"


@both_kernels
@pytest.mark.parametrize("p", [1, 2])
def test_calls_of_a_rank_that_has_left_fail(kernel, p):
    with Team(kernel, p) as team:
        link, x = team.links[0], np.zeros(8, np.uint8)
        link.leave()
        assert link.wait(submit(link, ALL_GATHER, x[:4], x, 4), 1.0) == LEFT
        assert run(link, ALL_GATHER, x[:4], x) == LEFT


@both_kernels
def test_messages_of_a_rank_that_has_left_fail(kernel):
    with Team(kernel, 2) as team:
        link, x = team.links[0], np.zeros(4, np.uint8)
        handle = link.post(0, at(x), 4, 1, 0)
        link.leave()
        assert link.settle(handle, 1.0) == -LEFT and link.settled(handle), "it never will arrive"
        assert send(link, x, 1) == -LEFT and receive(link, x, 1) == -LEFT


@both_kernels
def test_what_was_finished_before_a_rank_left_stays_so(kernel):
    x = np.zeros(4, np.uint8)
    with Team(kernel, 2) as team:
        first, second = team.links.values()
        assert send(second, x + 5, 0) == 0
        second.leave()
        assert receive(first, x, 1) == 1 and x.tolist() == [5] * 4   # it was on its way already
        assert receive(first, x, 1) == -LEFT


@both_kernels
def test_abort_ends_every_wait_of_every_rank(kernel):
    x = [np.zeros(8, np.uint8) for _ in range(4)]

    def body(link, r):
        if r == 0:
            time.sleep(0.1)
            return link.break_off(0, ABORTED)
        if r == 1:
            return run(link, BARRIER)
        if r == 2:
            return -receive(link, x[r], 1, tag=4)
        return link.wait(submit(link, ALL_GATHER, x[r][:2], x[r], 2), LONG)

    with Team(kernel, 4) as team:
        begin, polled = time.monotonic(), team.links[1].post(0, at(x[0]), 4, 2, 9)
        assert team.each(body) == [None, ABORTED, ABORTED, ABORTED]
        assert time.monotonic() - begin < AT_ONCE and team.links[1].settled(polled)
        assert team.links[3].status()[:2] == (ABORTED, 0)
        assert send(team.links[1], x[0], 0) == -ABORTED


@both_kernels
@pytest.mark.parametrize("what", ["run", "wait", "receive", "settle"])
def test_a_signal_handler_that_raises_ends_the_call_and_the_others_waits(kernel, what):
    x = np.zeros(4, np.uint8)
    calls = {
        "run": lambda link: run(link, BARRIER),
        "wait": lambda link: link.wait(submit(link, ALL_GATHER, x[:1], x, 1), LONG),
        "receive": lambda link: receive(link, x, 1),
        "settle": lambda link: link.settle(link.post(0, at(x), 4, 1, 0), LONG),
    }
    whys: list[int] = []
    with Team(kernel, 3) as team:
        waiting = threading.Thread(target=lambda: whys.append(run(team.links[2], BARRIER)))
        waiting.start()
        with pytest.raises(Bell), bell_once_inside(calls[what]):
            calls[what](team.links[0])
        waiting.join(AT_ONCE)
        assert whys == [INTERRUPTED] and team.links[2].status()[:2] == (INTERRUPTED, 0)


@both_kernels
def test_a_signal_whose_handler_returns_disturbs_nobody(kernel):
    rung: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: rung.append(number))
    try:
        with Team(kernel, 2) as team:
            def ring_and_come():
                time.sleep(0.1)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
                wait_until(lambda: rung)
                run(team.links[1], BARRIER)

            late = threading.Thread(target=ring_and_come)
            late.start()
            assert run(team.links[0], BARRIER) == FINE and rung == [signal.SIGUSR1]
            late.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


# ------------------------------------------------------------------ processes


def in_child(body: Callable[[], int]) -> int:
    """The exit code of body() in a forked child; -1 when it hangs."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = body()
        finally:
            os._exit(code)
    end = time.monotonic() + AT_ONCE
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


@both_kernels
@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_child_is_no_rank(kernel, busy):
    """Nothing that it does reaches the group, whatever threads its parent had."""
    x, out = np.arange(4, dtype=np.uint8), np.zeros(8, np.uint8)
    with Team(kernel, 2) as team:
        link = team.links[0]
        if busy:
            pending, handle = submit(link, ALL_GATHER, x, out, 4), link.post(0, at(out), 4, 1, 9)

        def body():
            assert run(link, BARRIER) == FORKED
            assert link.wait(submit(link, ALL_GATHER, x, out, 4), 5.0) == FORKED
            assert send(link, x, 1) == -FORKED and link.exchange(at(x), 4, 1, at(out), 4, 1, 0, 5.0) == FORKED
            mine = link.post(1, at(x), 4, 1, 0)
            assert mine == 0 and link.settle(mine, 5.0) == -FORKED
            link.drop(mine)
            link.break_off(0, ABORTED)
            link.leave()
            time.sleep(0.2)   # a thread of its own would have moved by now
            return 7

        assert in_child(body) == 7
        assert link.status()[:2] == (FINE, -1)
        if busy:
            assert submit(team.links[1], ALL_GATHER, x + 4, np.zeros(8, np.uint8), 4) == 1
            assert link.wait(pending, LONG) == FINE and out.tolist() == list(range(8))
            assert send(team.links[1], x, 0, tag=9) == 0 and link.settle(handle, LONG) == 1
            link.drop(handle)
        else:
            assert link.status()[2] == [0, 0]


@both_kernels
@pytest.mark.parametrize("what", ["collective", "background", "receive", "any source", "large send", "settle"])
def test_a_killed_rank_is_noticed_long_before_the_time_out(kernel, what):
    x = np.zeros(4 << 20, np.uint8)
    waits = {
        "collective": lambda link: run(link, BARRIER),
        "background": lambda link: link.wait(submit(link, ALL_GATHER, x[:4], x, 4), LONG),
        "receive": lambda link: -receive(link, x, 1, tag=3),
        "any source": lambda link: -receive(link, x, -1, tag=3),
        "large send": lambda link: -send(link, x, 1),
        "settle": lambda link: -link.settle(link.post(0, at(x), 4, 1, 0), LONG),
    }
    team = Team(kernel, 2, elsewhere=(1,))
    pid = team.in_process(1, lambda link: run(link, BARRIER) or time.sleep(60) or 0)
    with team:
        assert run(team.links[0], BARRIER) == FINE
        killed: list[float] = []

        def kill():
            killed.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

        threading.Timer(0.2, kill).start()
        assert waits[what](team.links[0]) == LOST
        assert killed and time.monotonic() - killed[0] < AT_ONCE
        assert team.links[0].status()[:2] == (LOST, 1)
        assert team.links[0].status()[3][1] == "X"   # nobody has asked for its exit code yet
        os.waitpid(pid, 0)
        assert team.links[0].status()[3][1] == "X"


def test_a_message_in_python_for_which_no_thread_starts_is_withdrawn():
    """In C: test_damage.py."""
    first, second, sent = np.zeros(4, np.uint8), np.zeros(4, np.uint8), np.full(4, 5, np.uint8)
    with Team(fallback, 2) as team:
        with no_thread_starts(), pytest.raises(RuntimeError, match="start new thread"):
            team.links[1].post(0, first.ctypes.data, 4, 0, 7)
        handle = team.links[1].post(0, second.ctypes.data, 4, 0, 7)
        team.links[0].post(1, sent.ctypes.data, 4, 1, 7)
        assert team.links[1].settle(handle, LONG) == 0 and (first.tolist(), second.tolist()) == ([0] * 4, [5] * 4)


def test_a_message_in_python_of_which_a_part_was_sent_breaks_the_group_where_no_thread_starts_for_the_rest():
    long = np.zeros(2 << 20, np.uint8)
    with Team(fallback, 2) as team:
        with no_thread_starts(), pytest.raises(RuntimeError, match="start new thread"):
            team.links[0].post(1, long.ctypes.data, long.size, 1, 7)
        assert team.links[1].status()[:2] == (ABORTED, 0)


def process_of_1(team: Team) -> np.ndarray:
    """What rank 1 has written of itself: the number of its process, and when that was started."""
    return team.links[0]._peers.memory.process[1] if team.kernel is fallback else np.frombuffer(team.memory, np.int64, 2, 11 * 64 + 8)


@both_kernels
def test_another_process_with_the_number_of_a_rank_that_has_ended_is_not_taken_for_it(kernel):
    with Team(kernel, 2) as team:
        process_of_1(team)[1] += 1
        assert team.links[0].status()[3][1] == "X"
        assert run(team.links[0], BARRIER) == LOST


def may_open_no_more_files() -> None:
    """From now on in this process: it cannot look at others in /proc."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@both_kernels
@pytest.mark.parametrize("from_the_start", [False, True])
def test_a_rank_that_may_open_no_more_files_takes_nobody_for_dead(kernel, from_the_start):
    """Nor do the others take it for dead, though it may not even have found out when it was started itself."""
    with Team(kernel, 2, elsewhere=(1,)) as team:
        def body():
            if from_the_start:
                may_open_no_more_files()
            link = team.link(1)
            may_open_no_more_files()
            return run(link, BARRIER)

        threading.Timer(0.3, lambda: run(team.links[0], BARRIER)).start()   # several looks later
        assert in_child(body) == FINE
        assert team.links[0].status()[:2] == (FINE, -1)


@both_kernels
def test_a_rank_that_may_open_no_more_files_still_notices_that_another_has_died(kernel):
    with Team(kernel, 3, elsewhere=(1, 2)) as team:
        waiting = team.in_process(1, lambda link: may_open_no_more_files() or run(link, BARRIER))
        killed = team.in_process(2, lambda link: time.sleep(LONG) or 0)
        wait_until(lambda: "?" not in team.links[0].status()[3])
        os.kill(killed, signal.SIGKILL)
        os.waitpid(killed, 0)
        assert os.waitstatus_to_exitcode(os.waitpid(waiting, 0)[1]) == LOST
        assert team.links[0].status()[:2] == (LOST, 2)


@both_kernels
def test_a_rank_killed_inside_a_call_is_noticed_while_another_is_late(kernel):
    team = Team(kernel, 3, elsewhere=(2,))
    pid = team.in_process(2, lambda link: run(link, BARRIER) or run(link, BARRIER))
    with team:
        assert team.each(lambda link, r: run(link, BARRIER)) == [FINE] * 2
        wait_until(lambda: team.links[0].status()[2][2] == 2)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        begin = time.monotonic()
        assert run(team.links[0], BARRIER) == LOST   # rank 1 lives, and does something else
        assert time.monotonic() - begin < AT_ONCE
        assert run(team.links[1], BARRIER) == LOST


@pytest.mark.parametrize("sender", [-1, 2], ids=["of anyone", "of a third rank"])
@both_kernels
def test_a_rank_killed_ends_the_wait_for_a_message_though_another_lives(kernel, sender):
    """A third rank may itself be waiting for the one that was killed; if it leaves because of that, it would be named."""
    team = Team(kernel, 3, elsewhere=(1,))
    pid = team.in_process(1, lambda link: run(link, BARRIER) or time.sleep(60) or 0)
    with team:
        assert team.each(lambda link, r: run(link, BARRIER)) == [FINE] * 2
        threading.Timer(0.1, os.kill, (pid, signal.SIGKILL)).start()
        begin = time.monotonic()
        assert receive(team.links[0], np.zeros(4, np.uint8), sender, tag=3) == -LOST
        assert team.links[0].status()[:2] == (LOST, 1) and time.monotonic() - begin < AT_ONCE
        os.waitpid(pid, 0)


@both_kernels
def test_where_one_rank_has_died_and_another_has_left_a_wait_for_anyone_names_the_one_that_died(kernel):
    with Team(kernel, 3) as team:
        process_of_1(team)[0] = NOBODY
        team.links[2].leave()
        assert receive(team.links[0], np.zeros(4, np.uint8), -1) == -LOST
        assert team.links[0].status()[:2] == (LOST, 1)


@both_kernels
def test_a_stopped_rank_is_waited_for_until_the_time_out(kernel):
    team = Team(kernel, 2, elsewhere=(1,))
    pid = team.in_process(1, lambda link: run(link, BARRIER) or time.sleep(60) or 0)
    try:
        with team:
            assert run(team.links[0], BARRIER) == FINE
            os.kill(pid, signal.SIGSTOP)
            assert run(team.links[0], BARRIER, timeout=0.5) == TIMED_OUT
            assert team.links[0].status()[1:] == (1, [2, 1], [team.links[0].status()[3][0], "T"])
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@both_kernels
def test_ranks_in_processes_exchange_as_threads_do(kernel):
    n = 5000
    team = Team(kernel, 3, elsewhere=(1, 2))

    def body(link):
        x, out = numbers_of(link_rank, n), np.zeros((3, n), np.int32)
        for _ in range(20):
            assert run(link, ALL_GATHER, x, out) == FINE
            assert all(np.array_equal(out[r], numbers_of(r, n)) for r in range(3))
        return 0

    pids = []
    for link_rank in (1, 2):
        pids.append(team.in_process(link_rank, body))
    link_rank = 0
    with team:
        assert body(team.links[0]) == 0
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]


# ------------------------------------------------------------------ messages


@both_kernels
@pytest.mark.parametrize("n", [0, 1, 100, 3 << 20])
def test_a_message_arrives_whole_however_large(kernel, n):
    given, out = np.random.default_rng(0).integers(0, 256, n, np.uint8), np.zeros(n, np.uint8)
    with Team(kernel, 2) as team:
        assert team.each(lambda link, r: send(link, given, 1, tag=5) if r == 0 else receive(link, out, 0, tag=5)) == [1, 0]
    np.testing.assert_array_equal(out, given)


@both_kernels
def test_tags_may_be_asked_for_in_any_order(kernel):
    """Messages of three tags, the first larger than a ring, asked for from the last to the first."""
    given = {tag: np.full(2 << 20 if tag == 1 else 10, tag, np.uint8) for tag in (1, 2, 3)}
    out = {tag: np.zeros_like(x) for tag, x in given.items()}

    def body(link, r):
        if r == 0:
            return [send(link, x, 1, tag) for tag, x in given.items()]
        return [receive(link, out[tag], 0, tag) for tag in (3, 2, 1)]

    with Team(kernel, 2) as team:
        assert team.each(body) == [[1] * 3, [0] * 3]
    assert all((out[tag] == tag).all() for tag in given)


@both_kernels
@pytest.mark.parametrize("delay", [0.0, 0.0005, 0.001, 0.002, 0.004])
def test_messages_of_one_tag_are_received_in_order(kernel, delay):
    """Also when the first was half put aside, because another tag was waited for, when it was asked for."""
    n = 4 << 20
    given = [np.full(n, 1, np.uint8), np.full(n, 2, np.uint8), np.full(4, 3, np.uint8)]
    out = [np.zeros_like(x) for x in given]
    with Team(kernel, 2) as team:
        first, second = team.links.values()
        wanted = [second.post(0, at(out[2]), 4, 0, 7)]
        sent = [first.post(1, at(x), x.nbytes, 1, tag) for x, tag in zip(given, (1, 1, 7))]
        time.sleep(delay)
        wanted += [second.post(0, at(x), n, 0, 1) for x in out[:2]]
        assert [second.settle(handle, LONG) for handle in wanted] == [0] * 3
        assert [first.settle(handle, LONG) for handle in sent] == [1] * 3
        for handle in wanted:
            second.drop(handle)
    assert [(x == x[0]).all() and x[0] for x in out] == [1, 2, 3]


@both_kernels
def test_anyone_s_messages_come_with_their_sender(kernel):
    def body(link, r):
        if r:
            return send(link, np.full(3, r, np.uint8), 0, tag=2)
        senders = []
        for _ in range(3):
            x = np.zeros(3, np.uint8)
            senders.append(receive(link, x, -1, tag=2))
            assert x.tolist() == [senders[-1]] * 3
        return sorted(senders)

    with Team(kernel, 4) as team:
        assert team.each(body) == [[1, 2, 3], 0, 0, 0]


@both_kernels
def test_anyone_s_message_may_have_been_put_aside(kernel):
    x = np.zeros(4, np.uint8)
    with Team(kernel, 3) as team:
        for tag in (1, 2):
            assert send(team.links[1], np.full(4, tag, np.uint8), 0, tag) == 0
        assert receive(team.links[0], x, -1, tag=2) == 1 and x.tolist() == [2] * 4
        assert receive(team.links[0], x, -1, tag=1) == 1 and x.tolist() == [1] * 4


@both_kernels
def test_anyone_s_message_is_waited_for_while_anyone_is_left(kernel):
    x = np.zeros(4, np.uint8)
    with Team(kernel, 3) as team:
        team.links[1].leave()
        threading.Timer(0.3, send, (team.links[2], x + 2, 0)).start()
        assert receive(team.links[0], x, -1) == 2
        team.links[2].leave()
        assert receive(team.links[0], x, -1) == -LEFT


@both_kernels
def test_what_nobody_asks_for_stays_with_its_sender(kernel):
    """A message larger than a ring is not taken in, though its receiver moves other messages, before it is asked for."""
    large, x = np.full(4 << 20, 9, np.uint8), np.zeros(4, np.uint8)
    out = np.zeros_like(large)
    with Team(kernel, 3) as team:
        handle = team.links[1].post(1, at(large), large.nbytes, 0, 0)
        for _ in range(50):
            assert send(team.links[2], x, 0) == 0 and receive(team.links[0], x, 2) == 2
            time.sleep(0.002)
        assert not team.links[1].settled(handle)
        assert receive(team.links[0], out, 1) == 1 and (out == 9).all()
        assert team.links[1].settle(handle, LONG) == 0


@without_c
@pytest.mark.parametrize(("p", "turns"), [(2, 2), (3, 8)], ids=["cores are shared", "a core each"])
def test_slots_take_turns_over_all_the_staging_memory_where_each_rank_has_a_core(p, turns):
    marks = [f"rank 0's input of call {call:2}".encode() for call in range(12)]
    with Team(compiled, p, window=256 << 10) as team:
        for mark in marks:
            x = np.frombuffer(mark, np.uint8)
            assert team.each(lambda link, r, x=x: run(link, ALL_GATHER, x, np.zeros((p, len(x)), np.uint8))) == [FINE] * p
        staged = [mark for mark in marks if team.memory.find(mark) >= 0]
    assert staged == marks[-turns:]


@without_c
def test_what_a_ring_has_room_for_leaves_as_it_is_posted():
    envelope = 16
    x = np.arange((1 << 20) - envelope, dtype=np.uint8)
    out = np.zeros_like(x)
    with Team(compiled, 2) as team:
        handle = team.links[0].post(1, at(x), x.nbytes, 1, 0)
        assert team.links[0].settled(handle)   # though nobody has asked for it
        assert receive(team.links[1], out, 0) == 0
    np.testing.assert_array_equal(out, x)


@both_kernels
@pytest.mark.parametrize("room", [0, 1, 15, 16])
def test_a_message_waits_until_a_ring_has_room_for_its_whole_envelope(kernel, room):
    ring = fallback_peers.RINGS // 2 if kernel is fallback else 1 << 20
    given = [numbers_of(0, ring // 4).view(np.uint8)[:ring - 16 - room], np.full(5, 2, np.uint8)]
    with Team(kernel, 2) as team:
        handles = [team.links[0].post(1, at(x), x.nbytes, 1, 0) for x in given]
        assert [team.links[0].settled(handle) for handle in handles] == [True, False]
        for x in given:
            out = np.zeros_like(x)
            assert receive(team.links[1], out, 0, timeout=AT_ONCE) == 0
            np.testing.assert_array_equal(out, x)


@both_kernels
@pytest.mark.parametrize("n", [8, 1 << 20, 3 << 20])
def test_posted_messages_cross_in_both_directions(kernel, n):
    p, count = 3, 4
    given = {(a, b, i): numbers_of(100 * a + 10 * b + i, n // 4) for a in range(p) for b in range(p) for i in range(count)}
    out = {key: np.zeros(n // 4, np.int32) for key in given}

    def body(link, r):   # everything to everyone, also to itself, all sends first
        sends = [link.post(1, at(given[r, b, i]), n, b, 0) for b in range(p) for i in range(count)]
        receives = [link.post(0, at(out[a, r, i]), n, a, 0) for a in range(p) for i in range(count)]
        peers = [link.settle(handle, LONG) for handle in sends + receives]
        assert all(link.settled(handle) for handle in sends + receives)
        for handle in sends + receives:
            link.drop(handle)
        return peers

    with Team(kernel, p) as team:
        expected = [r for r in range(p) for _ in range(count)] * 2
        assert team.each(body) == [expected] * p
    assert all(np.array_equal(out[key], x) for key, x in given.items())


@both_kernels
def test_a_dropped_message_goes_on(kernel):
    x = numbers_of(0, 1 << 19)
    with Team(kernel, 2) as team:
        first, second = team.links.values()
        for _ in range(2):   # the second when the thread that carries them sleeps
            out = np.zeros_like(x)
            handle = first.post(1, at(x), x.nbytes, 1, 0)
            assert not first.settled(handle)
            first.drop(handle)
            assert receive(second, out, 0, timeout=AT_ONCE) == 0
            np.testing.assert_array_equal(out, x)
            time.sleep(0.1)


@both_kernels
def test_a_message_of_another_length_is_an_error_for_both(kernel):
    x = np.zeros(1 << 21, np.uint8)
    with Team(kernel, 2) as team:
        assert team.each(lambda link, r: send(link, x, 1) if r == 0 else receive(link, x[:10], 0)) == [-WRONG_LENGTH] * 2
        assert team.links[0].status()[:2] == (WRONG_LENGTH, 0)


@both_kernels
def test_a_message_that_nobody_sends_times_out(kernel):
    x = np.zeros(4, np.uint8)
    with Team(kernel, 2) as team:
        begin = time.monotonic()
        assert receive(team.links[0], x, 1, timeout=0.2) == -TIMED_OUT
        assert 0.2 <= time.monotonic() - begin < 0.2 + AT_ONCE
        assert team.links[0].status()[:2] == (TIMED_OUT, 1)


@both_kernels
def test_a_wait_for_a_posted_message_may_end_before_it_and_leaves_the_group_whole(kernel):
    x = np.zeros(4, np.uint8)
    with Team(kernel, 2) as team:
        handle = team.links[0].post(0, at(x), 4, 1, 0)
        assert team.links[0].settle(handle, 0.1) == -TIMED_OUT and not team.links[0].settled(handle)
        assert team.links[0].status()[:2] == (FINE, -1)
        assert send(team.links[1], x + 3, 0) == 0
        assert team.links[0].settle(handle, LONG) == 1 and x.tolist() == [3] * 4


@both_kernels
def test_collectives_and_messages_do_not_disturb_each_other(kernel):
    def body(link, r):
        rings = np.zeros(1000, np.int32)
        for i in range(20):
            x = numbers_of(r + i, 1000)
            ticket, handle = submit(link, ALL_REDUCE, x, x, x.nbytes), link.post(0, at(rings), 4000, (r - 1) % 3, i)
            assert send(link, numbers_of(100 * r + i, 1000), (r + 1) % 3, tag=i) == (r + 1) % 3
            assert link.settle(handle, LONG) == (r - 1) % 3 and link.wait(ticket, LONG) == FINE
            link.drop(handle)
            assert np.array_equal(rings, numbers_of(100 * ((r - 1) % 3) + i, 1000))
            assert np.array_equal(x, sum(numbers_of(other + i, 1000) for other in range(3)))
        return True

    with Team(kernel, 3) as team:
        assert all(team.each(body))


# ------------------------------------------------------------------ the Python kernel alone


def test_other_processors_need_the_compiled_kernel(monkeypatch):
    monkeypatch.setattr(fallback_peers.platform, "machine", lambda: "aarch64")
    with pytest.raises(ConfigError, match="aarch64; install a C compiler"):
        fallback.segment_size(2)


def test_no_thread_is_left_when_a_rank_has_left():
    before = set(threading.enumerate())
    with Team(fallback, 2) as team:
        x = np.zeros(4, np.uint8)
        submit(team.links[0], ALL_GATHER, x[:2], x, 2)
        team.links[0].post(0, at(x), 4, 1, 0)
        assert {thread.name for thread in set(threading.enumerate()) - before} == {"rankloom-calls", "rankloom-messages"}
    assert set(threading.enumerate()) <= before


def test_a_rank_that_is_forgotten_leaves():
    """Though threads of its own were at work for it."""
    with Team(fallback, 2) as team:
        x = np.zeros(4, np.uint8)
        assert submit(team.links[0], BARRIER, x, x, 0) == 1 and run(team.links[1], BARRIER, number=I32) == FINE
        assert team.links[0].wait(1, LONG) == FINE
        team.links[0].post(0, at(x), 4, 1, 0)
        del team.links[0]
        assert run(team.links[1], BARRIER) == LEFT


def peers_of_two() -> tuple[list[fallback_peers.Peers], mmap.mmap]:
    memory = mmap.mmap(-1, fallback.segment_size(2))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return [fallback_peers.Peers(address, rank, 2, 0) for rank in range(2)], memory


def test_what_a_rank_did_before_it_went_counts():
    """It does its part, then leaves, both after the other's last look at the one and before its look at the other."""
    (mine, other), _memory = peers_of_two()
    came: list[int] = []

    def needed() -> list[int]:
        came.append(1)
        other.memory.left[1] = 1
        return [1]

    assert mine.wait_until(lambda: bool(came), needed, time.monotonic() + LONG) == FINE
    assert came and mine.broken() == (FINE, -1)


@without_c
def test_what_a_rank_did_before_it_died_counts_in_c_too():
    """It comes last to the meeting, and dies, between the other's last look at the one and its look at the other."""
    whys: list[int] = []
    with Team(compiled, 2) as team:
        epoch, sleepers = (ctypes.c_uint32.from_buffer(team.memory, line * 64) for line in range(2))
        waits = threading.Thread(target=lambda: whys.append(run(team.links[0], BARRIER)), daemon=True)
        waits.start()
        wait_until(lambda: sleepers.value)
        time.sleep(0.005)   # until it sleeps
        process_of_1(team)[0], epoch.value = NOBODY, 1
        waits.join(AT_ONCE)
        assert whys == [MISMATCHED]   # not LOST: rank 1, written by hand, makes an all-reduce


@without_c
def test_a_call_that_finds_a_fault_in_a_broken_group_returns_the_first_reason():
    """The group breaks between the coming of the last rank and the comparison; rank 1, written by hand, makes an all-reduce."""
    whys: list[int] = []
    with Team(compiled, 2) as team:
        epoch, sleepers, arrivals, broken = (ctypes.c_uint32.from_buffer(team.memory, line * 64) for line in range(4))
        waits = threading.Thread(target=lambda: whys.append(run(team.links[0], BARRIER)), daemon=True)
        waits.start()
        wait_until(lambda: sleepers.value)
        broken.value, epoch.value, arrivals.value = ABORTED << 16 | 1, 1, 2
        waits.join(AT_ONCE)
    assert whys == [ABORTED]


def test_the_first_reason_is_everyone_s_reason():
    """Also when two ranks break the group at once, so that neither has seen the other's."""
    peers, memory = peers_of_two()
    assert peers[1].break_group(1, ABORTED) == ABORTED
    assert peers[0].break_group(1, LOST) == ABORTED
    peers[0].memory.broken[0] = time.monotonic_ns(), 16 * 1 + LOST
    assert [peer.broken() for peer in peers] == [(ABORTED, 1)] * 2 and len(memory)


@both_kernels
def test_a_wait_with_a_time_out_is_no_longer_than_that(kernel):
    x, naps = np.zeros(4, np.int32), []
    with Team(kernel, 2) as team:
        ticket = submit(team.links[0], ALL_REDUCE, x, x, x.nbytes)
        for _ in range(20):   # the shortest counts: others may use the cores
            begin = time.monotonic()
            assert team.links[0].wait(ticket, 0.001) == TIMED_OUT
            naps.append(time.monotonic() - begin)
        team.links[0].break_off(0, ABORTED)
    assert min(naps) < 0.03


@without_c
@pytest.mark.parametrize("what", ["a meeting", "a message", "room for a message", "an abort", "a rank that leaves"])
def test_a_rank_that_sleeps_is_woken_by_what_it_waits_for(what):
    """Not by its next look whether the others still live, 50 ms after the last one."""
    x, many, naps = np.zeros(4, np.uint8), np.zeros(2 << 20, np.uint8), []
    wait, wake = {
        "a meeting": (lambda link: run(link, BARRIER), lambda other: run(other, BARRIER)),
        "a message": (lambda link: receive(link, x, 1), lambda other: send(other, x + 1, 0)),
        "room for a message": (lambda link: send(link, many, 1), lambda other: receive(other, many, 0)),
        "an abort": (lambda link: run(link, BARRIER), lambda other: other.break_off(1, ABORTED)),
        "a rank that leaves": (lambda link: receive(link, x, 1), lambda other: other.leave()),
    }[what]
    for _ in range(5):   # the shortest counts: others may use the cores
        with Team(compiled, 2) as team:
            sleeps = threading.Thread(target=wait, args=(team.links[0],), daemon=True)
            sleeps.start()
            time.sleep(0.01)
            begin = time.monotonic()
            wake(team.links[1])
            sleeps.join(AT_ONCE)
            naps.append(time.monotonic() - begin)
    assert min(naps) < 0.025


@both_kernels
@pytest.mark.parametrize("nbytes", [0, 5, 1 << 20])
def test_an_exchange_around_a_ring_never_deadlocks_however_large(kernel, nbytes):
    p = 3
    out, into = [np.full(nbytes, r + 1, np.uint8) for r in range(p)], [np.zeros(nbytes, np.uint8) for _ in range(p)]
    with Team(kernel, p) as team:
        whys = team.each(lambda link, r: link.exchange(at(out[r]), nbytes, (r + 1) % p, at(into[r]), nbytes, (r - 1) % p, 3, 10.0))
        assert kernel is not fallback or not any(link._post.posted for link in team.links.values())   # nothing of it is kept
    assert whys == [FINE] * p
    assert all((into[r] == (r - 1) % p + 1).all() for r in range(p))


def test_an_exchange_in_python_takes_its_timeout_once_though_it_waits_twice():
    class Slow(Exchanges):
        def message(self, *both):
            time.sleep(0.2)
            return 1

        def settle(self, handle, seconds):
            self.left = seconds
            return 1

        post = drop = message

    link = Slow()
    assert link.exchange(0, 0, 1, 0, 0, 1, 0, 1.0) == FINE and link.left <= 0.8


@both_kernels
@pytest.mark.parametrize("silent", ["sender", "receiver"])
def test_an_exchange_that_times_out_breaks_the_group_and_blames_who_was_silent(kernel, silent):
    large, into = np.zeros(3 << 20, np.uint8), np.zeros(4, np.uint8)
    with Team(kernel, 3) as team:
        if silent == "receiver":
            assert send(team.links[2], np.ones(4, np.uint8), 0) == 0
        out = large if silent == "receiver" else large[:4]
        assert team.links[0].exchange(at(out), out.nbytes, 1, at(into), 4, 2, 0, 0.3) == TIMED_OUT
        assert run(team.links[1], BARRIER) == TIMED_OUT
        assert team.links[1].status()[:2] == (TIMED_OUT, 1 if silent == "receiver" else 2)


@both_kernels
def test_an_exchange_with_a_rank_that_has_left_fails(kernel):
    x, y = np.zeros(4, np.uint8), np.zeros(4, np.uint8)
    with Team(kernel, 2) as team:
        team.links[1].leave()
        assert team.links[0].exchange(at(x), 4, 1, at(y), 4, 1, 0, 5.0) == LEFT


def allocated() -> int:
    """Bytes that were taken by malloc and not given back."""
    names = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
    kind = type("Info", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = kind
    info = ask()
    return info.uordblks + info.hblkhd


def gather_by_table(link, x):
    table = rows([at(x)], [4], [at(x)], [4])
    assert run(link, ALL_GATHER, lengths=table) == FINE
    assert link.wait(link.submit(ALL_GATHER, U8, SUM, 0, 0, 0, table, LONG), LONG) == FINE


def message_to_itself(link, x):
    handles = [link.post(1, at(x), 4, 0, 0), link.post(0, at(x), 4, 0, 0)]
    assert [link.settle(handle, LONG) for handle in handles] == [0, 0]
    for handle in handles:
        link.drop(handle)


def message_that_is_dropped(link, x):
    link.drop(link.post(0, at(x), 4, 0, 0))
    assert send(link, x, 0) == 0


def message_put_aside(link, x):
    for tag in (1, 2):
        assert send(link, x, 0, tag) == 0
    for tag in (2, 1):
        assert receive(link, x, 0, tag) == 0


@without_c
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library does not tell what is allocated")
@pytest.mark.parametrize("call", [gather_by_table, message_to_itself, message_that_is_dropped, message_put_aside])
def test_calls_leave_no_memory_behind(call):
    x = np.zeros(4, np.uint8)
    with Team(compiled, 1) as team:
        for _ in range(100):
            call(team.links[0], x)
        before = allocated()
        for _ in range(2000):
            call(team.links[0], x)
        assert allocated() - before < 2000 * 16


@without_c
def test_calls_that_return_none_use_up_no_reference_to_it():
    """The last one ends the interpreter, before Python 3.12."""
    with Team(compiled, 1) as team:
        before = sys.getrefcount(None)
        for _ in range(1000):
            team.links[0].drop(0)
        assert sys.getrefcount(None) > before - 500


def test_no_c_source_leaves_it_to_pythons_headers_whether_returning_none_counts_a_reference():
    """Those of Python 3.12 and later count none, and what they build serves 3.11 too: one build has the interface of 3.11."""
    sources = sorted(Path(rankloom.__file__).parent.rglob("*.c"))
    assert len(sources) >= 4
    assert not [source.name for source in sources if "Py_RETURN_" in re.sub(r"/\*.*?\*/", "", source.read_text(), flags=re.DOTALL)]
