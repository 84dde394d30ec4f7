"""The matrix: every product of axes equals one process after three steps of AdamW with clipping, in fp64 to 1e-12 relative.

Every factorisation of 1, 2, 4, 6 and 8 ranks over pipe, replicate, shard, context, tensor and expert is tried, with dense models, mixtures
of experts, tied and untied heads, stages and schedules in turn. What cannot be is refused with the reason. The bound is that of
test_equivalence.py. The largest relative error of each layout is printed at the end of the run (tests/conftest.py).
"""

import itertools
from functools import cache

import pytest
import torch

import rankloom as rl
from closeness import expect_close, numbered, tensors_of
from rankloom import GPT, GPTConfig
from rankloom.models.config import MoEConfig
from rankloom.models.loss import language_model_loss
from token_rows import token_batches

AXES = ("pipe", "replicate", "shard", "context", "tensor", "expert")
SCHEDULES = ("gpipe", "1f1b")
BOUND = 1e-12
ROWS, TOKENS, VOCAB, HEADS, EXPERTS, LAYERS = 12, 12, 37, 4, 4, 2   # a vocabulary that nothing divides


def factorisations(ranks: int) -> list[rl.Mesh]:
    """All meshes of so many ranks."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    sizes = itertools.product(divisors, repeat=len(AXES))
    return [rl.Mesh(**dict(zip(AXES, size))) for size in sizes if torch.tensor(size).prod() == ranks]


MESHES = [mesh for ranks in (1, 2, 4, 6, 8) for mesh in factorisations(ranks)]


def stages_for(mesh: rl.Mesh) -> list[int]:
    """All of them up to 4 ranks; above, where a layout takes seconds, one each in turn."""
    return [0, 1, 2, 3] if mesh.size < 6 else [MESHES.index(mesh) % 4]


def refusal(mesh: rl.Mesh) -> str | None:
    """Why this model cannot be laid out so, in the words of the error."""
    if HEADS % mesh.tensor:
        return "heads"
    if EXPERTS % mesh.expert:
        return f"the expert axis must divide {EXPERTS}"
    if mesh.pipe > LAYERS + 2:
        return f"stages for a model of {LAYERS + 2} pieces"
    return None


def build(stage: int, experts: bool) -> GPT:
    """Dense, or a mixture of experts; tied and untied in turn."""
    moe = MoEConfig(experts=EXPERTS, top_k=2, ffn=12, shared=stage // 2) if experts else None
    shape = GPTConfig(vocab_size=VOCAB, width=16, layers=LAYERS, heads=HEADS, kv_heads=2, ffn=24, seq_len=TOKENS, tie=stage < 2, moe=moe)
    return GPT(shape, dtype=torch.float64)


def has_experts(mesh: rl.Mesh, stage: int) -> bool:
    """Where an axis asks for them, and at odd stages."""
    return mesh.expert > 1 or stage % 2 == 1


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return token_batches(ROWS, TOKENS, VOCAB, beyond=5)


def adamw(params):
    """With a decay that tells a zero gradient from none."""
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def train(world: rl.World, model: GPT, stage: int, **more) -> dict[str, torch.Tensor]:
    """What must be equal: loss, norm and count of every step, and the whole state at the end."""
    pipe = {"pipe": SCHEDULES[stage % 2], "accumulate": 2} if world.mesh.pipe > 1 else {}
    engine = rl.prepare(model, loss=language_model_loss, optimizer=adamw, world=world, stage=stage, clip=0.5, **(pipe | more))
    rows = engine.group
    reports = [engine.step(tuple(t.tensor_split(rows.size)[rows.rank] for t in batch)) for batch in make_batches()]
    return numbered("report", [x for r in reports for x in (r.loss, r.grad_norm, r.count)]) | tensors_of(engine.full_state_dict())


@cache
def truth(stage: int, experts: bool) -> dict[str, torch.Tensor]:
    """The same on one process, at stage 0."""
    return rl.simulate(1, lambda world: train(world, build(stage, experts), 0))[0]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_layout_equals_one_process(mesh, record_property):
    reason, worst = refusal(mesh), 0.0
    for stage in stages_for(mesh)[: 1 if reason else None]:
        experts = has_experts(mesh, stage)
        if reason:
            with pytest.raises((rl.ConfigError, rl.ShapeMismatch), match=reason):
                rl.simulate(mesh, lambda world, stage=stage, experts=experts: train(world, build(stage, experts), stage))
            continue
        expected = truth(stage, experts)
        for mine in rl.simulate(mesh, lambda world, stage=stage, experts=experts: train(world, build(stage, experts), stage)):
            worst = max(worst, expect_close(mine, expected, BOUND))
    record_property("layout", [str(mesh), f"refused: {reason}" if reason else f"{worst:.1e}"])


@pytest.mark.parametrize("mesh", [rl.Mesh(tensor=2), rl.Mesh(tensor=4), rl.Mesh(shard=2, tensor=2), rl.Mesh(context=2, tensor=2),
                                  rl.Mesh(pipe=2, tensor=2), rl.Mesh(tensor=2, expert=2)], ids=str)
@pytest.mark.parametrize("stage", [0, 3])
def test_every_axis_beside_tensor_ranks_that_send_while_they_multiply_equals_one_process(mesh, stage):
    experts = mesh.expert > 1
    options = {"pipe": "zb-h1"} if mesh.pipe > 1 else {"recompute": "full" if stage else "selective"}

    def body(world, plan):
        model = build(stage, experts)
        return train(world, model, stage, tensor_plan=getattr(model, plan), tensor_overlap=3, **options)

    for plan in ("tp_plan", "tp_sequence_plan")[: 1 if experts else 2]:
        for mine in rl.simulate(mesh, lambda world, plan=plan: body(world, plan)):
            expect_close(mine, truth(stage, experts), BOUND)


@pytest.mark.parametrize("mesh", [rl.Mesh(tensor=2), rl.Mesh(pipe=2, shard=2, tensor=2), rl.Mesh(shard=2, context=2),
                                  rl.Mesh(shard=2, expert=2)], ids=str)
def test_a_state_moves_to_another_layout_and_back(mesh):
    def go_on(world: rl.World, stage: int, batches: slice, state: dict | None = None) -> tuple[dict, float]:
        pipe = {"pipe": "1f1b", "accumulate": 2} if world.mesh.pipe > 1 else {}
        engine = rl.prepare(build(3, True), loss=language_model_loss, optimizer=adamw, world=world, stage=stage, clip=0.5, **pipe)
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
    expected = truth(3, True)
    for mine in rl.spawn(mesh, train_in_a_process):
        expect_close(mine, expected, BOUND)


@pytest.mark.parametrize("mesh", [rl.Mesh(shard=4), rl.Mesh(shard=2, tensor=2), rl.Mesh(shard=2, context=2), rl.Mesh(shard=2, expert=2),
                                  rl.Mesh(replicate=2, shard=2), rl.Mesh(pipe=2, shard=2), rl.Mesh(pipe=2, shard=2, tensor=2)], ids=str)
def test_a_sample_of_layouts_over_gloo_where_sections_are_gathered_equals_one_process(mesh):
    """Where ranks share memory, as above, the whole of each section stays there, and gathers are barriers."""
    experts = has_experts(mesh, 3)
    expected = truth(3, experts)
    for mine in rl.simulate(mesh, lambda world: train(world, build(3, experts), 3), backend="gloo"):
        expect_close(mine, expected, BOUND)


def train_in_a_process(world: rl.World) -> dict[str, torch.Tensor]:
    """At the top of the module, so that a process can be told to run it."""
    torch.set_num_threads(1)
    return train(world, build(3, True), 3)


def test_these_ranks_meet_in_shared_memory():
    assert rl.simulate(2, lambda world: world.backend) == ["rankloom", "rankloom"]
