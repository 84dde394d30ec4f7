"""The matrix: every product of axes equals one process after three steps of AdamW with clipping, in fp64 to 1e-12 relative.

Every factorisation of 1, 2, 4, 6 and 8 ranks over pipe, replicate, shard, context, tensor and expert is tried, with dense models, mixtures
of experts, tied and untied heads, stages and schedules in turn, such that over all meshes each of these meets each other. What cannot be
is refused with the reason. The bound is that of test_equivalence.py. The largest relative error of each layout is printed at the end of
the run (tests/conftest.py). Ranks are threads that share memory, where stages 2 and 3 do the same. With real gathers, over gloo, seven of
these meshes are tried here, and those of data and shard ranks in test_sharded_equivalence.py.

    pytest tests/test_matrix.py -k every_layout --whole-matrix -n 4 --dist load     # the whole product, 4888 cases: 25 minutes or more
"""

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter

import pytest
import torch

import rankloom as rl
from closeness import expect_close, numbered, tensors_of
from rankloom import GPT, GPTConfig
from rankloom.models.config import MoEConfig
from rankloom.models.loss import language_model_loss
from rankloom.parallel.pipeline.schedules import SCHEDULES as KNOWN_SCHEDULES
from rankloom.parallel.pipeline.search import stages_a_rank
from token_rows import token_batches

SCHEDULES = tuple(KNOWN_SCHEDULES)
AXES = ("pipe", "replicate", "shard", "context", "tensor", "expert")
BOUND = 1e-12
ROWS, TOKENS, VOCAB, HEADS, EXPERTS, LAYERS = 12, 12, 37, 4, 4, 2   # a vocabulary that nothing divides
MOST_STAGES = 4   # of a pipeline


@dataclass(frozen=True)
class Case:
    """What is trained on a mesh, beside the mesh."""

    stage: int
    experts: bool = False
    tied: bool = True
    schedule: str = "1f1b"


WITH_EXPERTS = Case(3, experts=True, tied=False)


def factorisations(ranks: int) -> list[rl.Mesh]:
    """All meshes of so many ranks."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    sizes = itertools.product(divisors, repeat=len(AXES))
    return [rl.Mesh(**dict(zip(AXES, size))) for size in sizes if torch.tensor(size).prod() == ranks]


MESHES = [mesh for ranks in (1, 2, 4, 6, 8) for mesh in factorisations(ranks)]


def all_cases(mesh: rl.Mesh) -> list[Case]:
    """The whole product on one mesh."""
    experts = [True] if mesh.expert > 1 else [False, True]
    schedules = SCHEDULES if mesh.pipe > 1 else ["1f1b"]
    return [Case(*each) for each in itertools.product(range(4), experts, [False, True], schedules)]


@cache
def cases_in_turn() -> dict[rl.Mesh, list[Case]]:
    """Every stage up to 4 ranks; above, where a layout takes seconds, one of them. Each time that a stage comes it takes its next model
    and schedule.
    """
    cases, times = {}, Counter()
    for turn, mesh in enumerate(MESHES):
        cases[mesh] = []
        for stage in range(4) if mesh.size < 6 else [turn % 4]:
            n = 3 * stage + times[stage, mesh.pipe > 1]
            times[stage, mesh.pipe > 1] += not refusal(mesh)
            cases[mesh].append(Case(stage, experts=mesh.expert > 1 or n // 8 % 2 == 1, tied=(n // 2 + n // 8) % 2 == 1,
                                    schedule=SCHEDULES[n % len(SCHEDULES)]))
    return cases


def refusal(mesh: rl.Mesh) -> str | None:
    """Why this model cannot be laid out so, in the words of the error."""
    if HEADS % mesh.tensor:
        return "heads"
    if EXPERTS % mesh.expert:
        return f"the expert axis must divide {EXPERTS}"
    if mesh.pipe > MOST_STAGES:
        return f"stages for a model of {LAYERS + 2} pieces"
    return None


def layers_of(mesh: rl.Mesh, case: Case) -> int:
    """As few as give every stage a piece of the model; embedding and head are one each."""
    stages = mesh.pipe * stages_a_rank(case.schedule, None) if mesh.pipe <= MOST_STAGES else 0
    return max(LAYERS, stages - 2)


def build(case: Case, layers: int = LAYERS) -> GPT:
    """Dense, or a mixture of experts."""
    moe = MoEConfig(experts=EXPERTS, top_k=2, ffn=12, shared=int(case.tied)) if case.experts else None
    shape = GPTConfig(vocab_size=VOCAB, width=16, layers=layers, heads=HEADS, kv_heads=2, ffn=24, seq_len=TOKENS, tie=case.tied, moe=moe)
    return GPT(shape, dtype=torch.float64)


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return token_batches(ROWS, TOKENS, VOCAB, beyond=5)


def adamw(params):
    """With a decay that tells a zero gradient from none."""
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def train(world: rl.World, case: Case, *, layers: int | None = None, **more) -> dict[str, torch.Tensor]:
    """What must be equal: loss, norm and count of every step, and the whole state at the end. layers: left out, as the mesh needs"""
    model = build(case, layers or layers_of(world.mesh, case))
    pipe = {"pipe": case.schedule, "accumulate": max(2, world.mesh.pipe)} if world.mesh.pipe > 1 else {}
    engine = rl.prepare(model, loss=language_model_loss, optimizer=adamw, world=world, stage=case.stage, clip=0.5, **(pipe | more))
    rows = engine.group
    reports = [engine.step(tuple(t.tensor_split(rows.size)[rows.rank] for t in batch)) for batch in make_batches()]
    return numbered("report", [x for r in reports for x in (r.loss, r.grad_norm, r.count)]) | tensors_of(engine.full_state_dict())


def truth(case: Case, mesh: rl.Mesh) -> dict[str, torch.Tensor]:
    """The same on one process, at stage 0."""
    return train_alone(replace(case, stage=0, schedule="1f1b"), layers_of(mesh, case))


@cache
def train_alone(case: Case, layers: int) -> dict[str, torch.Tensor]:
    return rl.simulate(1, lambda world: train(world, case, layers=layers))[0]


def pytest_generate_tests(metafunc):
    """One test for each mesh; of the whole product, for each mesh and stage."""
    if "cases" not in metafunc.fixturenames:
        return
    if metafunc.config.getoption("--whole-matrix"):
        each = {f"{mesh}, stage {stage}": (mesh, [case for case in all_cases(mesh) if case.stage == stage])
                for mesh in MESHES if not refusal(mesh) for stage in range(4)}
    else:
        each = {str(mesh): (mesh, cases_in_turn()[mesh]) for mesh in MESHES}
    metafunc.parametrize(("mesh", "cases"), each.values(), ids=each)


def test_every_layout_equals_one_process(mesh, cases, request, record_property):
    reason, worst = refusal(mesh), 0.0
    for case in cases[: 1 if reason else None]:
        if reason:
            with pytest.raises((rl.ConfigError, rl.ShapeMismatch), match=reason):
                rl.simulate(mesh, lambda world, case=case: train(world, case))
            continue
        expected = truth(case, mesh)
        for mine in rl.simulate(mesh, lambda world, case=case: train(world, case)):
            worst = max(worst, expect_close(mine, expected, BOUND))
    record_property("layout", [request.node.callspec.id, f"refused: {reason}" if reason else f"{worst:.1e} in {len(cases)}"])


def test_in_turn_every_stage_model_and_schedule_meets_every_other_and_each_axis_every_stage_and_model():
    """Beside a pipe, where there are schedules."""
    pipes = [mesh for mesh in MESHES if mesh.pipe > 1 and not refusal(mesh)]

    def expect_all(meshes: list[rl.Mesh], value: attrgetter) -> None:
        in_turn = {value(case) for mesh in meshes for case in cases_in_turn()[mesh]}
        assert in_turn == {value(case) for mesh in meshes for case in all_cases(mesh)}

    for names in itertools.combinations(("stage", "experts", "tied", "schedule"), 2):
        expect_all(pipes, attrgetter(*names))
    for axis, name in itertools.product(AXES, ("stage", "experts", "tied")):
        expect_all([mesh for mesh in pipes if getattr(mesh, axis) > 1], attrgetter(name))


@pytest.mark.parametrize("mesh", [rl.Mesh(tensor=2), rl.Mesh(tensor=4), rl.Mesh(shard=2, tensor=2), rl.Mesh(context=2, tensor=2),
                                  rl.Mesh(pipe=2, tensor=2), rl.Mesh(tensor=2, expert=2)], ids=str)
@pytest.mark.parametrize("stage", [0, 3])
def test_every_axis_beside_tensor_ranks_that_send_while_they_multiply_equals_one_process(mesh, stage):
    case = Case(stage, experts=mesh.expert > 1, tied=stage == 0, schedule="zb-h1")
    options = {} if mesh.pipe > 1 else {"recompute": "full" if stage else "selective"}
    for plan in ("tp_plan", "tp_sequence_plan")[: 1 if case.experts else 2]:
        options["tensor_plan"] = getattr(build(case), plan)
        for mine in rl.simulate(mesh, lambda world: train(world, case, tensor_overlap=3, **options)):
            expect_close(mine, truth(case, mesh), BOUND)


@pytest.mark.parametrize("mesh", [rl.Mesh(tensor=2), rl.Mesh(pipe=2, shard=2, tensor=2), rl.Mesh(shard=2, context=2),
                                  rl.Mesh(shard=2, expert=2)], ids=str)
def test_a_state_moves_to_another_layout_and_back(mesh):
    def go_on(world: rl.World, stage: int, batches: slice, state: dict | None = None) -> tuple[dict, float]:
        pipe = {"pipe": "1f1b", "accumulate": 2} if world.mesh.pipe > 1 else {}
        engine = rl.prepare(build(WITH_EXPERTS), loss=language_model_loss, optimizer=adamw, world=world, stage=stage, clip=0.5, **pipe)
        if state:
            engine.load_full_state_dict(state)
        mine = [tuple(t.tensor_split(engine.group.size)[engine.group.rank] for t in batch) for batch in make_batches()]
        for batch in mine[batches]:
            engine.step(batch)
        return engine.full_state_dict(), engine.evaluate(mine[:1]).loss

    ((expected, loss),) = rl.simulate(1, lambda world: go_on(world, 0, slice(0, 3)))
    ((begun, _),) = rl.simulate(1, lambda world: go_on(world, 0, slice(0, 2)))
    there = rl.simulate(mesh, lambda world: go_on(world, 3, slice(2, 3), begun))
    ((back, _),) = rl.simulate(1, lambda world: go_on(world, 0, slice(2, 3), rl.simulate(mesh, lambda w: go_on(w, 1, slice(0, 2)))[0][0]))
    for state in (back, *(state for state, _ in there)):
        expect_close(tensors_of(state), tensors_of(expected), BOUND)
    assert [evaluated for _, evaluated in there] == pytest.approx([loss] * mesh.size, rel=BOUND)


@pytest.mark.parametrize("mesh", [rl.Mesh(shard=2, tensor=2), rl.Mesh(pipe=2, expert=2)], ids=str)
def test_a_sample_of_layouts_in_processes_equals_one_process(mesh):
    for mine in rl.spawn(mesh, train_in_a_process):
        expect_close(mine, truth(WITH_EXPERTS, mesh), BOUND)


@pytest.mark.parametrize("mesh", [rl.Mesh(shard=4), rl.Mesh(shard=2, tensor=2), rl.Mesh(shard=2, context=2), rl.Mesh(shard=2, expert=2),
                                  rl.Mesh(replicate=2, shard=2), rl.Mesh(pipe=2, shard=2), rl.Mesh(pipe=2, shard=2, tensor=2)], ids=str)
def test_a_sample_of_layouts_over_gloo_where_sections_are_gathered_equals_one_process(mesh):
    """Where ranks share memory, as above, the whole of each section stays there, and gathers are barriers."""
    for mine in rl.simulate(mesh, lambda world: train(world, WITH_EXPERTS), backend="gloo"):
        expect_close(mine, truth(WITH_EXPERTS, mesh), BOUND)


def train_in_a_process(world: rl.World) -> dict[str, torch.Tensor]:
    """At the top of the module, so that a process can be told to run it."""
    torch.set_num_threads(1)
    return train(world, WITH_EXPERTS)


def test_these_ranks_meet_in_shared_memory():
    assert rl.simulate(2, lambda world: world.backend) == ["rankloom", "rankloom"]
