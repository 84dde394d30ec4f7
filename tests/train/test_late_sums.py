"""Parameters that only some steps use, with compressed gradients: nothing sent for them is lost, and no optimizer sees it early."""

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.comm.late import LateSums

WIDTH, ROWS, STEPS = 24, 6, 41
MESHES = [(rl.Mesh(replicate=2), 0), (rl.Mesh(shard=2), 1), (rl.Mesh(shard=3), 2), (rl.Mesh(shard=2), 3),
          (rl.Mesh(replicate=2, shard=2), 3)]


class Block(nn.Module):
    """Linear in its parameters, so gradients depend on the rows alone."""

    def __init__(self, seed: int):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 40)
        self.register_buffer("signs", torch.randn(40, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.signs).sum(-1)


class Sum(nn.Module):
    """All begins at zero; `skipped` names a block that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.skipped = nn.ModuleList(Block(seed) for seed in range(3)), -1
        for param in self.parameters():
            nn.init.zeros_(param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(block(x) for at, block in enumerate(self.blocks) if at != self.skipped)


def rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)) + 0.3


def trained(world: rl.World, stage: int, compress: str, every: int) -> rl.Engine:
    """By SGD at rate 1. Block 1 is called in the first step, and in every second, third or fourth."""
    model = Sum()
    engine = rl.prepare(model, loss=lambda model, x: (model(x).sum(), len(x)), optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
                        world=world, stage=stage, compress=compress)
    for step in range(STEPS):
        model.skipped = 1 if step % every else -1
        engine.step(rows(step, engine.group.rank))
    return engine


@pytest.mark.parametrize(("mesh", "stage"), MESHES, ids=str)
@pytest.mark.parametrize("every", [2, 4])
def test_a_block_that_is_not_always_used_stays_within_one_rounding_of_the_exact_run(mesh, stage, every):
    """The last step uses it, so nothing waits. What is missing is what is remembered, half a step of the grid in each of two roundings. A
    step is the largest of a block / levels, and that is a gradient with such errors: at most a half more than the largest gradient where
    levels are 7.
    """
    def body(world):
        exact, *lossy = (trained(world, stage, name, every).full_state_dict()["model"] for name in ("none", "int8", "int4"))
        used = [name for name in exact if "blocks.1" in name]
        return [torch.cat([(state[name] - exact[name]).flatten() for name in used]).abs().max().item() for state in lossy]

    ranks = mesh.size
    largest = max((torch.outer(Block(1).signs, sum(rows(step, rank).sum(0) for rank in range(ranks))) / (ranks * ROWS)).abs().max().item()
                  for step in range(0, STEPS, every))
    alone = max((torch.outer(Block(1).signs, rows(step, rank).sum(0)) / (ranks * ROWS)).abs().max().item()
                for step in range(0, STEPS, every) for rank in range(ranks))
    for of_int8, of_int4 in rl.simulate(mesh, body):
        assert 0 < of_int8 <= 1.5 * (ranks * alone + largest) / 127 / 2
        assert 0 < of_int4 <= 1.5 * (ranks * alone + largest) / 7 / 2


@pytest.mark.parametrize(("mesh", "stage"), MESHES[:4], ids=str)
def test_what_waits_is_counted_among_what_a_rank_holds_and_dropped_with_the_errors_when_a_state_is_loaded(mesh, stage):
    def body(world):
        engine, fresh = (trained(world, stage, "1bit", every) for every in (3, 1))
        before, state = engine.held().gradients, engine.full_state_dict()
        norms = []
        for run in (engine, fresh):
            run.load_full_state_dict(state)
            run.model.skipped = -1
            norms.append(run.step(rows(99, run.group.rank)).grad_norm)
        return before - engine.held().gradients, norms

    waited, norms = zip(*rl.simulate(mesh, body))
    assert sum(waited) > 0
    assert all(mine == other for mine, other in norms)


def test_a_sum_waits_for_the_next_use_and_what_is_not_finite_does_not_stay():
    late, seen = LateSums(), []
    for values, used in (([1.0, 2.0], False), ([float("nan"), 4.0], False), ([10.0, 20.0], True), ([1.0, 1.0], True)):
        total = torch.tensor(values)
        late.settle("weight", total, used=used)
        seen.append((total.tolist(), late.held()))
    assert seen == [([0.0, 0.0], 8), ([0.0, 0.0], 8), ([11.0, 26.0], 0), ([1.0, 1.0], 0)]


def test_a_parameter_that_is_never_used_costs_nothing():
    late = LateSums()
    late.settle("weight", torch.zeros(3), used=False)
    assert late.held() == 0
