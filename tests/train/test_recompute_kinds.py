"""A budget of bytes measures every block, also where blocks look alike; and what buffers a block may have."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import rankloom as rl
from gradients import expect_equal, gradients
from rankloom.models.loss import language_model_loss
from rankloom.train import recompute as module
from rankloom.train.blocks.activation_offload import offload_activations
from rankloom.train.blocks.forward_cost import Trace
from rankloom.train.recompute import recompute


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


def run(model, extra=(), rows=64):
    x = torch.ones(rows, 8, requires_grad=True)
    for i, block in enumerate(model):
        x = block(x, *(extra[i:i + 1]))
    return x


def planned(make, policy="10 MiB", extra=()):
    model = nn.ModuleList(make())
    found = recompute(model, policy)
    run(model, extra).sum().backward()
    return model, found


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


def test_each_block_is_measured_once_in_each_forward_of_the_first_step_and_not_in_trials_before_it(monkeypatch):
    measured = []
    monkeypatch.setattr(module, "_cost", lambda forward, *given, plain=module._cost: measured.append(forward) or plain(forward, *given))
    shape, text = rl.GPTConfig(vocab_size=16, width=16, layers=3, heads=2, kv_heads=2, ffn=16, seq_len=4), torch.arange(20).view(4, 5) % 16

    def body(world):
        engine = rl.prepare(rl.GPT(shape, seed=0), loss=language_model_loss, world=world, optimizer=torch.optim.AdamW, accumulate=2,
                            recompute="1 MiB")
        for _ in range(2):
            engine.step((text[:, :-1], text[:, 1:]))

    rl.simulate(1, body)
    assert len(measured) == 3   # the plan is made in the first backward, before the second forward


class OverGraph(nn.Module):
    """Adds up neighbours, by a sparse buffer, which it changes in place if it is told to."""

    def __init__(self, layout, grows):
        super().__init__()
        self.layer, self.grows = nn.Linear(8, 8), grows
        self.register_buffer("edges", (torch.eye(8) + torch.eye(8).roll(1, 0)).to_sparse(layout=layout))

    def forward(self, x):
        x = x + torch.sparse.mm(self.edges.clone(), torch.sin(self.layer(x)))   # a clone: backward needs the values of now
        if self.grows and self.training:
            with torch.no_grad():
                self.edges.values().mul_(1.5)   # which no version counts
        return x


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("grows", [False, True], ids=["constant", "changed"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("policy", ["full", "selective", "1 MiB", "1 KiB", "offload"])
def test_a_block_may_have_a_sparse_buffer(policy, layout, grows):
    def trained(policy):
        torch.manual_seed(0)
        model = nn.ModuleList(OverGraph(layout, grows) for _ in range(3))
        offload_activations(model, small=1) if policy == "offload" else recompute(model, policy)
        for _ in range(2):
            run(model, rows=8).sum().backward()
        return gradients(model), [block.edges.values() for block in model]

    (mine, edges), (theirs, wanted) = trained(policy), trained("none")
    expect_equal(mine, theirs)
    assert all(map(torch.equal, edges, wanted))
