"""The matrix: every product of axes equals one process after three steps of AdamW with clipping, in fp64 to 1e-12 relative.

Every factorisation of 1, 2, 4, 6 and 8 ranks over replicate, shard, context, tensor and expert is tried, with dense models, mixtures of
experts, tied and untied heads. What cannot be is refused with the reason. The bound is that of test_equivalence.py. The largest
relative error of each layout is printed at the end of the run (tests/conftest.py).
"""

import itertools

import pytest
import torch

import rankloom as rl
from rankloom import GPT, GPTConfig
from rankloom.models.config import MoEConfig
from rankloom.models.loss import language_model_loss

AXES = ("replicate", "shard", "context", "tensor", "expert")
BOUND = 1e-12
ROWS, TOKENS, VOCAB, HEADS, EXPERTS = 12, 12, 37, 4, 4   # a vocabulary that nothing divides


def factorisations(ranks: int) -> list[rl.Mesh]:
    """All meshes of so many ranks."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    sizes = itertools.product(divisors, repeat=len(AXES))
    return [rl.Mesh(**dict(zip(AXES, size))) for size in sizes if torch.tensor(size).prod() == ranks]


STAGES = {1: (0, 1, 2, 3), 2: (0, 1, 2, 3), 4: (0, 1, 2, 3), 6: (1, 2), 8: (0, 3)}   # more ranks take longer and tell the same

MESHES = [mesh for ranks in (1, 2, 4, 6, 8) for mesh in factorisations(ranks)]


def refusal(mesh: rl.Mesh) -> str | None:
    """Why this model cannot be laid out so, in the words of the error."""
    if HEADS % mesh.tensor:
        return "heads"
    if EXPERTS % mesh.expert:
        return f"the expert axis must divide {EXPERTS}"
    return None


def build(mesh: rl.Mesh, stage: int) -> GPT:
    """A dense model where no expert axis asks for experts and the stage is even, else a mixture; tied and untied in turn."""
    moe = MoEConfig(experts=EXPERTS, top_k=2, ffn=12, shared=stage // 2) if mesh.expert > 1 or stage % 2 else None
    return GPT(GPTConfig(vocab_size=VOCAB, width=16, layers=2, heads=HEADS, kv_heads=2, ffn=24, seq_len=TOKENS, tie=stage < 2, moe=moe),
               dtype=torch.float64)


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three global batches whose rows hold different numbers of tokens."""
    draw, batches = torch.Generator().manual_seed(1), []
    for _ in range(3):
        tokens = torch.randint(0, VOCAB, (ROWS, TOKENS + 1), generator=draw)
        targets = tokens[:, 1:].clone()
        targets[torch.arange(ROWS)[:, None] + torch.arange(TOKENS) > TOKENS + 5] = -100
        batches.append((tokens[:, :-1].contiguous(), targets))
    return batches


def adamw(params):
    """With a decay that tells a zero gradient from none."""
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def train(world: rl.World, model: GPT, stage: int) -> tuple[list[tuple[float, ...]], dict]:
    """What must be equal: loss, norm and count of every step, and the whole state at the end."""
    engine = rl.prepare(model, loss=language_model_loss, optimizer=adamw, world=world, stage=stage, clip=0.5)
    rows = engine.group
    reports = [engine.step(tuple(t.tensor_split(rows.size)[rows.rank] for t in batch)) for batch in make_batches()]
    return [(r.loss, r.grad_norm, r.count) for r in reports], engine.full_state_dict()


def largest_error(mine: tuple[list, dict], truth: tuple[list, dict]) -> float:
    """Relative to the largest element of each tensor."""
    errors = [abs(a - b) / abs(b) for ours, theirs in zip(mine[0], truth[0], strict=True) for a, b in zip(ours, theirs, strict=True)]
    pairs = [(mine[1]["model"][name], value) for name, value in truth[1]["model"].items()]
    state, expected = mine[1]["optimizer"]["state"], truth[1]["optimizer"]["state"]
    assert state.keys() == expected.keys()
    pairs += [(state[name][key], value) for name, held in expected.items() for key, value in held.items()]
    for a, b in pairs:
        assert a.shape == b.shape
        errors.append(((a - b).abs().max() / b.abs().max().clamp(min=1e-300)).item())
    return max(errors)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_layout_equals_one_process(mesh, record_property):
    reason, worst = refusal(mesh), 0.0
    for stage in STAGES[mesh.size]:
        model = lambda stage=stage: build(mesh, stage)   # one for each rank
        if reason:
            with pytest.raises((rl.ConfigError, rl.ShapeMismatch), match=reason):
                rl.simulate(mesh, lambda world, model=model, stage=stage: train(world, model(), stage))
            continue
        (truth,) = rl.simulate(1, lambda world, model=model: train(world, model(), 0))
        for mine in rl.simulate(mesh, lambda world, model=model, stage=stage: train(world, model(), stage)):
            worst = max(worst, largest_error(mine, truth))
    record_property("layout", [str(mesh), f"refused: {reason}" if reason else f"{worst:.1e}"])
    assert worst < BOUND


def test_a_sample_of_layouts_in_processes_equals_one_process():
    for mesh in (rl.Mesh(shard=2, tensor=2), rl.Mesh(context=2, expert=2)):
        (truth,) = rl.simulate(1, lambda world, mesh=mesh: train(world, build(mesh, 3), 0))
        for mine in rl.spawn(mesh, train_in_a_process):
            assert largest_error(mine, truth) < BOUND


def train_in_a_process(world: rl.World) -> tuple[list[tuple[float, ...]], dict]:
    """At the top of the module, so that a process can be told to run it."""
    torch.set_num_threads(1)
    return train(world, build(world.mesh, 3), 3)
