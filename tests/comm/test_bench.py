"""Timing on ranks: every result is checked, turns alternate, all ranks get the same numbers; and what is refused."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import rankloom as rl
from rankloom.base.events import Progressed, Timed
from rankloom.base.topology import Topology
from rankloom.comm import bench
from rankloom.comm.algorithms import ALGORITHMS
from rankloom.comm.bench import DTYPES, NAMES, Study, elements, expected, operand, plan_bench, run_study, take_turns, wrong_elements
from rankloom.comm.choose import all_reduce_named
from rankloom.comm.price import BACKEND

ALL = tuple(ALGORITHMS)
SMALL = Study(ALL, (), (1, 400), "fp32", 1)


def run(p, study, topology=None):
    """(times, events) of each rank."""
    def body(world):
        events = []
        return run_study(study, world, events.append), events

    return rl.simulate(p, body, topology=topology)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_every_algorithm_of_every_collective_is_timed_and_right(p, dtype):
    times = run(p, replace(SMALL, dtype=dtype))[0][0]
    assert {(timed.collective, timed.algorithm) for timed in times} == {
        (collective, name) for collective in ALL for name in (*ALGORITHMS[collective], BACKEND)}
    assert [timed for timed in times if timed.wrong] == []
    assert all(0 < timed.low <= timed.seconds <= timed.high and timed.ranks == p for timed in times)


@pytest.mark.gloo
def test_what_needs_tags_is_not_timed_where_they_mean_nothing_unless_it_is_asked_for(one_queue):
    study = Study(("all_reduce",), (), (16,), "fp32", 1)
    assert {timed.algorithm for timed in run(2, study)[0][0]} == {*ALGORITHMS["all_reduce"], BACKEND} - {"double_tree"}
    with pytest.raises(rl.ConfigError, match="its trees send in orders of their own"):
        run(2, replace(study, algorithms=("double_tree",)))


def test_all_ranks_get_the_same_times():
    first, *others = run(3, replace(SMALL, collectives=("all_reduce",)))
    for times, _ in others:
        assert [replace(timed, rank=0) for timed in times] == first[0]


def test_two_levels_are_timed_where_there_are_two():
    times = run(4, Study(("all_reduce", "all_to_all"), ("hierarchical",), (400,), "fp32", 1), Topology.even(2, 2))[0][0]
    assert [(timed.collective, timed.algorithm, timed.wrong) for timed in times] == [
        ("all_reduce", "hierarchical", 0), ("all_to_all", "hierarchical", 0)]


@pytest.mark.parametrize(("collectives", "algorithms", "message"), [
    (("all_reduce",), ("hierarchical",), "no hierarchical all_reduce on 1 node of 2 ranks; it needs several nodes"),
    (("all_reduce", "broadcast"), ("ring",), "broadcast has none of the algorithms ring. Known: binomial, chain, backend"),
    (("broadcast",), ("backend", "tree"), "there is no tree broadcast on 1 node of 2 ranks"),
])
def test_an_algorithm_without_a_collective_is_refused_before_anything_is_timed(collectives, algorithms, message):
    with pytest.raises(rl.ConfigError, match=message):
        run(2, Study(collectives, algorithms, (4,), "fp32", 1))


def test_one_rank_which_a_launcher_may_start_is_refused_before_anything_is_timed():
    with pytest.raises(rl.ConfigError, match="one rank has nobody to talk to; start 2 or more"):
        run(1, SMALL)


def test_progress_goes_from_nothing_to_all_and_every_result_is_an_event():
    times, events = run(2, replace(SMALL, collectives=("all_reduce", "broadcast"), turns=2))[0]
    done = [event.done for event in events if isinstance(event, Progressed)]
    assert done[0] == 0 and done == sorted(done) and done[-1] == pytest.approx(1.0, rel=1e-12)
    assert [event for event in events if isinstance(event, Timed)] == times
    assert next(event for event in events if isinstance(event, Progressed)).what == "all_reduce 1 B"


# ------------------------------------------------------------------ checking


@pytest.mark.parametrize("collective", ALL)
def test_an_algorithm_that_does_nothing_is_found_out(collective):
    lazy = {"all_gather": lambda x, group: x.repeat(group.size), "reduce_scatter": lambda x, group: x.chunk(group.size)[group.rank]}

    def body(world):
        return wrong_elements(lazy.get(collective, lambda x, group: x), collective, 60, torch.float32, world)

    found = rl.simulate(3, body)
    assert found[0] > 20 and found == [found[0]] * 3, "all ranks know"


def test_one_wrong_element_on_one_rank_is_counted_and_so_is_a_wrong_shape():
    def off_by_one(x, group):
        group.all_reduce(x)
        if group.rank == 1:
            x[7] += 1
        return x

    def body(world):
        wrong = (off_by_one, lambda x, group: group.all_reduce(x)[:-1], lambda x, group: group.all_reduce(x).double())
        return [wrong_elements(run, "all_reduce", 60, torch.float32, world) for run in wrong]

    assert rl.simulate(2, body) == [[1, 120, 120]] * 2


def test_no_two_ranks_bring_the_same_so_swapped_pieces_are_seen():
    group = rl.simulate(1, lambda world: world)[0]
    brought = [bench._numbers(rank, 30, group.device).tolist() for rank in range(3)]
    assert brought[0] != brought[1] != brought[2] != brought[0]


@pytest.mark.parametrize("p", [2, 7, 8])
def test_sums_are_whole_numbers_that_16_bits_hold_exactly(p):
    total = sum(bench._numbers(rank, 100, torch.device("cpu")) for rank in range(p))
    for dtype in DTYPES.values():
        assert torch.equal(total.to(dtype).int(), total)


@pytest.mark.parametrize(("collective", "nbytes", "p", "n"), [
    ("all_reduce", 4096, 3, 1024), ("all_reduce", 1, 3, 1), ("broadcast", 7, 3, 1),
    ("all_gather", 4096, 3, 1023), ("reduce_scatter", 1, 3, 3), ("all_to_all", 28, 3, 6),
])
def test_sizes_are_cut_to_what_divides_and_never_to_nothing(collective, nbytes, p, n):
    assert elements(collective, nbytes, torch.float32, p) == n


def test_sizes_that_are_rounded_to_the_same_one_are_timed_once():
    times, events = run(3, Study(("all_reduce", "all_gather"), ("ring",), (1, 2, 3, 4, 20, 23, 24), "fp32", 1))[0]
    assert [(timed.collective, timed.bytes) for timed in times] == [
        *(("all_reduce", nbytes) for nbytes in (4, 20, 24)), *(("all_gather", nbytes) for nbytes in (12, 24))]
    assert [event.done for event in events if isinstance(event, Progressed)][-1] == pytest.approx(1.0, rel=1e-12)


def test_the_expected_results_are_those_of_the_collectives_themselves():
    """The check must not share a mistake with what it checks: here it is compared with plain torch on one process."""
    def body(world):
        return {name: (operand(name, 12, torch.float64, world), expected(name, 12, torch.float64, world)) for name in ALL}

    ranks = rl.simulate(3, body)
    brought = {name: [found[name][0] for found in ranks] for name in ALL}
    for rank, found in enumerate(ranks):
        assert torch.equal(found["all_reduce"][1], sum(brought["all_reduce"]))
        assert torch.equal(found["reduce_scatter"][1], sum(brought["reduce_scatter"])[rank * 4: rank * 4 + 4])
        assert torch.equal(found["all_gather"][1], torch.cat(brought["all_gather"]))
        assert torch.equal(found["broadcast"][1], brought["broadcast"][0])
        assert torch.equal(found["all_to_all"][1], torch.cat([x[rank * 4: rank * 4 + 4] for x in brought["all_to_all"]]))


# ------------------------------------------------------------------ timing


def test_turns_alternate_and_begin_with_another_each_time():
    def body(world):
        order = []
        calls = [lambda name=name: (order.append(name), time.sleep(0.02)) for name in "abc"]
        take_turns(calls, 3, world, lambda part: order.append("|"))
        return "".join(order)

    assert rl.simulate(1, body)[0].partition("|")[2] == "abc|bca|cab|"


def test_the_slowest_rank_counts_for_each_turn():
    def body(world):
        (seconds,) = take_turns([lambda: time.sleep(0.001 + 0.02 * world.rank)], 3, world, lambda part: None)
        return seconds

    first, second = rl.simulate(2, body)
    assert first == second and len(first) == 3 and min(first) >= 0.021


@pytest.fixture
def work(monkeypatch):
    """`work(seconds)` takes so long by the clock that calls are timed with, whatever else the machine does."""
    now = [0.0]
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def take(seconds):
        now[0] += seconds

    return take


def test_quick_calls_are_repeated_in_a_turn_and_slow_ones_have_fewer_turns(monkeypatch, work):
    monkeypatch.setattr(bench, "SECONDS_PER_SIZE", 0.05)
    counts = {"quick": 0, "slow": 0}

    def call(name, seconds):
        counts[name] += 1
        work(seconds)

    def body(world):
        return [len(turns) for turns in take_turns([lambda: call("quick", 1e-5), lambda: call("slow", 12e-3)], 50, world, lambda _: None)]

    turns = rl.simulate(1, body)[0]
    assert turns == [turns[0]] * 2 and 3 <= turns[0] <= 4, "at most 50 ms of turns of 12 ms, and never fewer than 3"
    assert counts["slow"] == bench.WARM_UP + 1 + turns[0]
    assert counts["quick"] > bench.WARM_UP + 1 + 5 * turns[0]


def test_a_time_is_that_of_one_call_however_many_a_turn_has(work):
    (seconds,) = rl.simulate(1, lambda world: take_turns([lambda: work(0.0005)], 9, world, lambda part: None))[0]
    assert seconds == pytest.approx([0.0005] * 9)


# ------------------------------------------------------------------ plans


@pytest.mark.parametrize(("words", "message"), [
    ((["allreduce"], [], [4], "fp32", 1), "no collective 'allreduce'. Did you mean 'all_reduce'"),
    (([], [], [4], "fp32", 1), "no collective to time; name one or more of all_reduce, reduce_scatter, all_gather, broadcast, all_to_all"),
    ((["all_reduce"], ["rign"], [4], "fp32", 1), "no algorithm 'rign'. Did you mean 'ring'"),
    ((["all_reduce"], [], [4], "float32", 1), "no dtype 'float32'. Known: bf16, fp16, fp32, fp64."),
    ((["all_reduce"], [], [4], "fp32", 0), "turns 0: must be 1 or more"),
    ((["all_reduce"], [], [4, 1 << 60], "fp32", 1), "a size of 1,152,921,504,606,846,976 bytes: at most 1024 GiB"),
])
def test_what_there_is_not_is_refused_with_the_nearest_there_is(words, message):
    with pytest.raises(rl.ConfigError, match=message):
        plan_bench(*words)


def test_a_name_given_twice_is_timed_once():
    study = plan_bench(["broadcast", "broadcast"], ["chain", "backend", "chain"], [4], "fp32", 1)
    assert study.collectives == ("broadcast",)
    assert study.subjects("broadcast", Topology.even(1, 2)) == ["chain", "backend"]


def test_every_name_that_can_be_chosen_in_training_can_be_timed():
    trainable = {name for name in NAMES if name in ALGORITHMS["all_reduce"]} | {"hierarchical", BACKEND}
    for name in trainable:
        all_reduce_named(name)
    assert len(NAMES) == len(set(NAMES))
