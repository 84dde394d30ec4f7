"""Every collective, dtype, operation, layout, world size and way of waiting against the oracle: each bit, and none besides."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance.cases import COLLECTIVES, LAYOUTS, WAITS, Arena, Case, Held, begin, random_case, same_bits, same_numbers, values
from conformance.oracle import FLOAT4, MOVED, OPS, REDUCED, Answer, Given, Nodes, has_meaning, nodes_of
from conformance.ranks import BACKENDS, Ranks, make_ranks, seconds
from patience import wait_until

SIZES = range(2, 9)
LATE_OR_NOT = list(zip(WAITS, (False, False, True, True, True)))   # how, and whether after all other calls
PROGRAMS, LENGTH = {"C": 100, "Python": 25, "hosts": 25}, 24   # of each size; six cases each on average


@dataclass
class Part:
    """A case as one group runs it: what each member brings and holds, and what it must end with."""

    case: Case
    members: list[int]
    brought: Given
    expected: Answer
    ins: list[list[Held]]
    outs: list[list[Held]]
    ended: dict[int, list[list[tuple[Tensor, bool]]]] = field(default_factory=dict)   # by member: its ins and outs when the call ended

    def end(self, at: int, work: Any) -> None:
        """Wait, then look at once, and use the memory for other things: no other rank may need it any more."""
        finish(work, self.case.how)
        self.ended[at] = [[held.let_go() for held in some[at]] for some in (self.ins, self.outs)]


def make_part(case: Case, members: list[int], arenas: list[Arena], nodes: Nodes) -> Part:
    """Draw what everybody brings, and ask the oracle."""
    collective = COLLECTIVES[case.collective]
    brought = [[values(case, shape, rank, k) for k, shape in enumerate(shapes)]
               for rank, shapes in enumerate(collective.brings(case, len(members)))]
    expected = collective.gives(brought, case, nodes)
    if collective.in_place:
        ins: list[list[Held]] = [[] for _ in members]
        outs = [[Held(x, case.into, arena, fill=True) for x in mine] for mine, arena in zip(brought, arenas)]
    else:
        ins = [[Held(x, case.layout, arena, fill=True) for x in mine] for mine, arena in zip(brought, arenas)]
        outs = [[Held(x, case.into, arena) for x in end or []] for end, arena in zip(expected, arenas)]
    return Part(case, members, brought, expected, ins, outs)


def plan(case: Case, ranks: Ranks) -> list[Part]:
    """One part for the group of all, or one for each half of it."""
    halves = [list(range(parity, ranks.size, 2)) for parity in (0, 1)]
    arenas = ranks.arenas[case.halves]
    return [make_part(case, members, [arenas[rank] for rank in members], nodes_of([ranks.hosts[rank] for rank in members]))
            for members in (halves if case.halves else [list(range(ranks.size))])]


def run_program(ranks: Ranks, program: list[list[Part]]) -> None:
    """Every rank makes all calls in order; those that are late are waited for in the end, in an order of its own."""
    def body(rank: int) -> None:
        late = []
        for parts in program:
            part = next(part for part in parts if rank in part.members)
            at, case = part.members.index(rank), part.case
            group = (ranks.halves if case.halves else ranks.groups)[rank]
            work = begin(case, group, [h.x for h in part.ins[at]], [h.x for h in part.outs[at]])
            if case.late:
                late.append((part, at, work))
            else:
                part.end(at, work)
        random.Random(rank).shuffle(late)
        for part, at, work in late:
            part.end(at, work)

    ranks.run(body)


def finish(work: Any, how: str) -> None:
    """Wait for a call in one of the ways there are."""
    if how == "poll":
        wait_until(work.is_completed)
    if how == "future":
        work.get_future().wait()
    elif how == "wait with a time-out":
        work.wait(seconds(20))
    else:
        work.wait()


def check(program: list[list[Part]], same: Callable = same_numbers) -> None:
    """Every promised bit is there; what was only read, and what lies around, is as it was."""
    for part in (part for parts in program for part in parts):
        for at, end in enumerate(part.expected):
            where = lambda part=part, at=at: f"rank {at} of {len(part.members)}, {part.case}"
            ins, outs = part.ended[at]
            equal = same if COLLECTIVES[part.case.collective].reduces else same_bits
            for k, ((got, _), wanted) in enumerate(zip(outs, end or [])):
                assert equal(got, wanted), f"{where()}: tensor {k} is {got}, expected {wanted}; all brought {part.brought}"
            for (held, _), was in zip(ins, part.brought[at]):
                assert same_bits(held, was), f"{where()}: what was only to be read is changed"
            assert all(whole for _, whole in ins + outs), f"{where()}: written beside the tensor"


def run_and_check(ranks: Ranks, cases: list[Case], same: Callable = same_numbers) -> None:
    """Run the cases as one program."""
    for arena in ranks.arenas[False] + ranks.arenas[True]:
        arena.used = 0
    program = [plan(case, ranks) for case in cases]
    run_program(ranks, program)
    check(program, same)


# ---------------------------------------------------------------- tests


@pytest.fixture(scope="module", params=BACKENDS)
def ranks(request) -> Iterator[Any]:
    """`ranks(size)`, on each backend; kept from one test to the next, and made anew when one has failed."""
    kept: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        if size not in kept or kept[size].closed:
            kept[size] = make_ranks(request.param, size)
        return kept[size]

    of.programs = PROGRAMS[request.param]
    yield of
    for made in kept.values():
        made.close()


@pytest.mark.parametrize("dtype", MOVED, ids=lambda d: str(d).removeprefix("torch."))
def test_every_collective_has_every_dtype_and_operation(ranks, dtype):
    named = [(name, op) for name, c in COLLECTIVES.items() for op in (OPS if c.reduces else ("sum",))
             if not c.reduces or (dtype in REDUCED and has_meaning(op, dtype))]
    run_and_check(ranks(3), [Case(name, dtype, op, (5, 3), seed=n) for n, (name, op) in enumerate(named)])


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_reads_and_writes_every_layout_and_can_be_waited_for_in_every_way(ranks, name):
    """Any two of layout, other layout and way of waiting come together; any three now and then, in random programs."""
    run_and_check(ranks(3), [Case(name, dtype, "sum", shape, LAYOUTS[i], LAYOUTS[j], *LATE_OR_NOT[(i + j + k) % 5])
                             for i in range(5) for j in range(5)
                             for k, (shape, dtype) in enumerate([((6, 4), torch.float32), ((65,), torch.bfloat16)])])


@pytest.mark.parametrize("dtype", FLOAT4)
def test_float4_lies_in_any_layout_though_torch_cannot_transpose_it(ranks, dtype):
    run_and_check(ranks(3), [Case(name, dtype, "sum", (60, 61), "transposed", "transposed")
                             for name, collective in COLLECTIVES.items() if not collective.reduces])


@pytest.mark.parametrize("size", SIZES)
def test_random_programs_give_every_rank_every_bit(ranks, size):
    @settings(max_examples=ranks.programs, suppress_health_check=list(HealthCheck))
    @given(st.lists(random_case(size), min_size=1, max_size=LENGTH))
    def run(cases: list[Case]) -> None:
        run_and_check(ranks(size), cases)

    run()


class Told:
    """A link that notes which of its two ways a collective takes, and with which time-out."""

    def __init__(self, link: Any):
        self._link, self.calls = link, set[tuple[str, float]]()

    def __getattr__(self, name: str) -> Any:
        if name in ("run", "submit"):
            return lambda *call: self.calls.add((name, call[-1])) or getattr(self._link, name)(*call)
        return getattr(self._link, name)


def test_every_collective_takes_from_its_options_whether_it_waits_and_for_how_long(monkeypatch):
    world = Ranks(1)
    told = world.groups[0].channel.link = Told(world.groups[0].channel.link)
    for name, collective in [*COLLECTIVES.items()]:
        def patient(make: Callable = collective.options) -> Any:
            options = make()
            options.timeout = seconds(7)
            return options

        monkeypatch.setitem(COLLECTIVES, name, replace(collective, options=patient))
        for how, way in (("at once", "run"), ("wait", "submit")):
            told.calls.clear()
            run_and_check(world, [Case(name, how=how)])
            assert told.calls == {(way, 7.0)}, name
    world.close()


@pytest.mark.parametrize("size", [2, 3])
def test_the_oracle_agrees_with_gloo_where_gloo_knows_the_case(size):
    """gloo adds in another order: each of the size - 1 additions of numbers below 2 rounds by half an eps of their sum at most."""
    gloo, bound = Ranks(size, kernel=None), size * size * torch.finfo(torch.float32).eps
    close = lambda a, b: torch.allclose(a.flatten().double(), b.flatten().double(), rtol=0, atol=bound)
    older = {"alltoall"} if torch.__version__ < (2, 13) else set()   # in these, torch has it for gloo in another form only
    known = {name: each for name, each in COLLECTIVES.items() if hasattr(dist.ProcessGroup, name) and name not in older}
    for name, collective in known.items():
        ops = ("sum", "product", "min", "max") if collective.reduces else ("sum",)
        run_and_check(gloo, [Case(name, torch.int32, op, (5, 3)) for op in ops])
        if collective.reduces:
            run_and_check(gloo, [Case(name, torch.float32, op, (5, 3)) for op in ("sum", "avg")], close)
    gloo.close()
