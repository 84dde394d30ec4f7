"""A budget of bytes measures every kind of block, and each kind once."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.models.config import GPTConfig, MoEConfig
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss
from rankloom.train import recompute as module
from rankloom.train.measure import Trace
from rankloom.train.recompute import recompute

CONFIG = GPTConfig(vocab_size=32, seq_len=16, width=16, layers=5, heads=2, kv_heads=2, ffn=48, dropout=0.1)


@dataclass   # equal to others with the same values, and so without a hash
class Options:
    loops: int


class Repeating(nn.Module):
    """Keeps more for each loop. Neither its parameters nor its repr show how many there are."""

    def __init__(self, loops=1, **attributes):
        super().__init__()
        self.layer, self.loops = nn.Linear(8, 8), loops
        vars(self).update(attributes)

    def forward(self, x, more=0):
        h = self.layer(x)
        for _ in range(self.loops + more):
            h = torch.sin(h)
        return x + h


class Nested(nn.Module):
    def __init__(self, loops):
        super().__init__()
        self.inner = Repeating(loops)

    def forward(self, x):
        return self.inner(x)


class Configured(Repeating):
    def __init__(self, loops):
        super().__init__()
        self._options = Options(loops)

    def forward(self, x):
        return super().forward(x, self._options.loops - 1)


class Windowed(nn.Module):
    """A buffer says how much is kept."""

    def __init__(self, loops):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("scales", torch.ones(loops, 1, 1), persistent=False)

    def forward(self, x):
        return x + torch.sin(self.layer(x) * self.scales).sum(0)


def run(model, extra=()):
    x = torch.ones(64, 8, requires_grad=True)
    for i, block in enumerate(model):
        x = block(x, *(extra[i:i + 1]))
    return x


def planned(make, policy="10 MiB", extra=()):
    model = nn.ModuleList(make())
    found = recompute(model, policy)
    run(model, extra).sum().backward()
    return model, found


@pytest.fixture
def measured(monkeypatch):
    """The blocks that were measured."""
    blocks, cost = [], module._cost
    monkeypatch.setattr(module, "_cost", lambda forward, *call: blocks.append(forward.block) or cost(forward, *call))
    return blocks


@pytest.mark.parametrize("kind", [Repeating, Nested, Configured, Windowed])
def test_a_budget_counts_what_blocks_keep_that_differ_in_an_attribute_only(kind):
    model, found = planned(lambda: [kind(loops) for loops in (1, 1, 20, 20)])
    with Trace() as trace:
        out = run(model)
    kept = [decision.kept for decision in found.plan.decisions]
    assert sum(kept) == trace.kept(out) - 64 * 8 * 4, "all but the first input"
    assert kept[0] == kept[1] < kept[2] == kept[3] and {decision.choice for decision in found.plan.decisions} == {"none"}


def test_a_budget_counts_what_blocks_keep_that_differ_in_an_argument_only():
    model, found = planned(lambda: [Repeating() for _ in range(3)], extra=(1, 20, 20))
    with Trace() as trace:
        out = run(model, (1, 20, 20))
    assert sum(decision.kept for decision in found.plan.decisions) == trace.kept(out) - 64 * 8 * 4


def test_a_step_stays_within_a_budget_that_the_first_block_alone_would_not_exceed():
    budget = 120_000   # ten blocks like the first would fit

    def make():
        return [Repeating(loops) for loops in (1, 1, 40, 40)]

    model, found = planned(make, budget)
    with Trace() as trace:
        out = run(model)
    assert trace.kept(out) - 64 * 8 * 4 <= found.plan.peak <= budget
    assert planned(make)[1].plan.peak > budget, "so something had to be recomputed"


@pytest.mark.parametrize("attributes", [{}, {"sizes": [1, {"a": (2.0, None)}]}, {"options": Options(1)}, {"act": torch.sin}],
                         ids=["plain", "nested", "a frozen dataclass", "a function"])
def test_blocks_that_are_equal_or_share_an_object_are_measured_once(attributes, measured):
    model, _ = planned(lambda: [Repeating(2, **attributes) for _ in range(32)])
    assert measured == [model[0]]


def test_blocks_with_objects_that_cannot_be_compared_are_measured_apart(measured):
    model, _ = planned(lambda: [Repeating(2, options=Options(1)) for _ in range(3)])
    assert measured == list(model)


@pytest.mark.parametrize(("mesh", "options"), [(rl.Mesh(), {}), (rl.Mesh(tensor=2), {}), (rl.Mesh(context=2), {}),
                                               (rl.Mesh(shard=2), {"stage": 3}), (rl.Mesh(expert=2), {})], ids=str)
def test_equal_blocks_of_a_split_model_are_measured_once_in_each_forward(mesh, options, measured):
    """The engine tries a few forwards before its first backward. Labels and helpers that rankloom gives a block make no difference."""
    config = replace(CONFIG, moe=MoEConfig(experts=4, top_k=2, ffn=8)) if mesh.expert > 1 else CONFIG
    ids = torch.randint(0, 32, (4, 17), generator=torch.Generator().manual_seed(0))

    def body(world):
        engine = rl.prepare(GPT(config), loss=language_model_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), world=world,
                            recompute="10 MiB", **options)
        engine.step([t.tensor_split(engine.group.size)[engine.group.rank] for t in (ids[:, :-1], ids[:, 1:])])
        return engine.model.blocks[0]

    first = rl.simulate(mesh, body)
    assert {id(block) for block in measured} == {id(block) for block in first}
