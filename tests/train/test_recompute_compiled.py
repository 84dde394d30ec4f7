"""Recompute beside torch.compile: what cannot be one graph is refused or left out, and a graph around a block ends at the block."""

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import rankloom as rl
from gradients import expect_equal, gradients
from rankloom.models.config import GPTConfig, MoEConfig
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss
from rankloom.train import prepare
from rankloom.train.blocks.compiled import compile_blocks
from rankloom.train.recompute import recompute
from rankloom.train.rules import NOT_ONE_GRAPH, conflicts
from rankloom.train.run.config import load_config

CONFIG = GPTConfig(vocab_size=32, seq_len=16, width=16, layers=3, heads=2, kv_heads=2, ffn=48, dropout=0.1)
SGD = partial(torch.optim.SGD, lr=0.1)
compiled = partial(torch.compile, backend="aot_eager")


@pytest.fixture(autouse=True)
def _forget_graphs(monkeypatch):
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    monkeypatch.setattr(prepare, "compile_blocks", partial(compile_blocks, backend="aot_eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(seed=0):
    ids = torch.randint(0, 32, (4, 17), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def trained(mesh, policy, steps=3, config=CONFIG, loss=language_model_loss, before=lambda model: None, after=lambda model: None, **options):
    """For each rank: the losses, the weights, and what was decided."""
    def body(world):
        model = GPT(config, dtype=torch.float64)
        before(model)
        engine = rl.prepare(model, loss=loss, optimizer=SGD, world=world, recompute=policy, **options)
        after(engine.model)
        losses = [engine.step([t.tensor_split(engine.group.size)[engine.group.rank] for t in tokens(step)]).loss for step in range(steps)]
        return losses, engine.full_state_dict()["model"], engine.settings.recompute

    return rl.simulate(mesh, body)


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
@pytest.mark.parametrize("mesh", [rl.Mesh(), rl.Mesh(pipe=2)], ids=str)
def test_micro_batches_of_other_lengths_compile_and_a_block_that_runs_again_takes_its_own_graph(mesh, policy):
    """In a pipeline, forwards of other lengths come before a backward; the compiler would take a graph for any length then."""
    def body(world, **options):
        cut = {"pipe": "1f1b"} if world.mesh.pipe > 1 else {}
        engine = rl.prepare(GPT(replace(CONFIG, dropout=0.0), dtype=torch.float64), loss=language_model_loss, optimizer=SGD, world=world,
                            accumulate=4, **cut, **options)
        batches = [[tuple(t[:2, :length] for t in tokens(10 * step + length)) for length in (12, 8, 16, 5)] for step in range(2)]
        return [engine.step(batch).loss for batch in batches]

    (expected,) = rl.simulate(1, body)
    for losses in rl.simulate(mesh, partial(body, recompute=policy, compile=True)):
        assert losses == pytest.approx(expected, rel=1e-12)


# ---------------------------------------------------------------------- blocks that ranks share

@pytest.mark.parametrize(("axis", "moe"), [("tensor", None), ("context", None), ("expert", MoEConfig(experts=4, top_k=2, ffn=8))])
def test_selective_in_compiled_blocks_that_ranks_share_is_refused_when_prepared(axis, moe):
    def body(world):
        rl.prepare(GPT(CONFIG if moe is None else replace(CONFIG, moe=moe)), loss=language_model_loss, optimizer=SGD,
                   world=world, recompute="selective", compile=True)

    with pytest.raises(rl.ConfigError, match='recompute="selective" with compile wants each block in one graph.*take "full"'):
        rl.simulate(rl.Mesh(**{axis: 2}), body)


def test_selective_in_compiled_stages_whose_ranks_share_tokens_is_refused_in_the_first_step():
    with pytest.raises(rl.ConfigError, match='recompute="selective" with compile wants each block in one graph'):
        trained(rl.Mesh(pipe=2, context=2), "selective", compile=True, accumulate=2)


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_config_files_refuse_selective_in_compiled_blocks_that_ranks_share(tmp_path, axis):
    (tmp_path / "train.toml").write_text("[train]\nlocal_batch_size = 2\n")
    flags = ["--train.compile=true", "--model.heads=4", "--model.kv_heads=4", "--model.width=64", "--model.ffn=64"]
    load_config(tmp_path / "train.toml", [*flags, "--train.recompute=selective"])
    load_config(tmp_path / "train.toml", [*flags, "--train.recompute=full", f"--mesh.{axis}=2"])
    with pytest.raises(rl.ConfigError, match=r'\[train\] recompute = "selective" with compile wants each block in one graph'):
        load_config(tmp_path / "train.toml", [*flags, "--train.recompute=selective", f"--mesh.{axis}=2"])


def test_only_selective_conflicts_and_only_where_ranks_share_blocks():
    for axis in ("shard", "pipe", "context", "tensor", "expert"):
        for asked in ({"recompute": policy, "compile": compile} for policy in ("none", "selective", "full", "1 GiB") for compile in (0, 1)):
            found, shared = list(conflicts(asked, stage=0, ranks={axis: 2})), axis not in ("shard", "pipe")
            assert found == ([("recompute", NOT_ONE_GRAPH)] if shared and asked == {"recompute": "selective", "compile": 1} else [])


@pytest.mark.parametrize("mesh", [rl.Mesh(tensor=2), rl.Mesh(context=2)], ids=str)
def test_a_budget_leaves_selective_out_where_blocks_are_compiled_and_ranks_share_them(mesh):
    budget = "240 KiB" if mesh.tensor == 2 else "260 KiB"
    expected = trained(mesh, "none")
    plain, mine = trained(mesh, budget), trained(mesh, budget, compile=True)
    assert "selective" in {d.choice for d in plain[0][2].plan.decisions}, "or the budget tests nothing"
    assert {d.choice for d in mine[0][2].plan.decisions} == {"none", "full"}
    for (losses, weights, _), (wanted, reference, _) in zip(mine, expected):
        assert losses == pytest.approx(wanted, rel=1e-13)
        for name, weight in weights.items():   # a graph fuses, so sums may round otherwise
            torch.testing.assert_close(weight, reference[name], rtol=1e-12, atol=1e-12)


class Breaking(nn.Module):
    """No single graph."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 64, dtype=torch.float64), nn.Linear(64, 8, dtype=torch.float64)

    def forward(self, x):
        torch._dynamo.graph_break()
        return x + self.narrow(torch.sin(torch.cos(self.wide(x))))


def test_a_planned_selective_block_that_is_no_single_graph_runs_without_the_compiler():
    def run(policy, steps=2):
        torch.manual_seed(0)
        model, x = nn.ModuleList(Breaking() for _ in range(3)), torch.ones(16, 8, dtype=torch.float64)
        found = recompute(model, policy)
        if policy != "none":
            compile_blocks(model, backend="aot_eager")
        for _ in range(steps):
            y = x
            for block in model:
                y = block(y)
            y.sum().backward()
        return gradients(model), found

    (expected, _), (mine, found) = run("none"), run("50 KiB")
    assert "selective" in {d.choice for d in found.plan.decisions}
    expect_equal(mine, expected)


class Numbered(nn.Module):
    """A graph for each number."""

    def __init__(self, number):
        super().__init__()
        self.number, self.wide, self.narrow = number, nn.Linear(8, 64, dtype=torch.float64), nn.Linear(64, 8, dtype=torch.float64)

    def forward(self, x):
        return x + self.number * self.narrow(torch.sin(torch.cos(self.wide(x))))


def numbered_run(policy, kinds):
    torch.manual_seed(0)
    model = nn.ModuleList(kind(number) for number, kind in enumerate(kinds))
    found = recompute(model, policy, blocks=tuple(set(kinds)))
    if policy != "none":
        compile_blocks(model, blocks=tuple(set(kinds)), backend="eager")
    for _ in range(2):   # a plan is made in the first backward
        x = torch.ones(16, 8, dtype=torch.float64, requires_grad=True)
        for block in model:
            x = block(x)
        x.sum().backward()
    return gradients(model), found


def test_selective_blocks_of_more_classes_than_torch_keeps_graphs_of_a_function_are_all_compiled():
    kinds = [type(f"Numbered{n}", (Numbered,), {}) for n in range(torch._dynamo.config.recompile_limit + 2)]
    expect_equal(numbered_run("selective", kinds)[0], numbered_run("none", kinds)[0])


def test_selective_blocks_that_need_more_graphs_than_torch_keeps_are_an_error_that_says_what_to_do_and_planned_ones_run_uncompiled():
    kinds = [Numbered] * (torch._dynamo.config.recompile_limit + 2)
    with pytest.raises(rl.ConfigError, match=r'a Numbered needs more graphs than torch keeps.*recompile_limit = 64.*take recompute="full"'):
        numbered_run("selective", kinds)
    mine, found = numbered_run("200 KiB", kinds)
    assert "selective" in {decision.choice for decision in found.plan.decisions}
    expect_equal(mine, numbered_run("none", kinds)[0])


# ---------------------------------------------------------------------- something around a block is compiled

WAYS = {
    "the loss": {"loss": compiled(language_model_loss)},
    "the model's forward": {"before": lambda model: setattr(model, "forward", compiled(model.forward))},
    "the prepared model": {"after": lambda model: model.compile(backend="aot_eager")},
    "the prepared blocks": {"after": lambda model: [block.compile(backend="aot_eager") for block in model.blocks]},
}


@pytest.mark.parametrize("policy", ["full", "selective", "240 KiB"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_compiled_around_recomputed_blocks_trains_to_the_same_bits(way, policy):
    (losses, weights, found), = trained(rl.Mesh(), policy, **WAYS[way])
    (wanted, reference, _), = trained(rl.Mesh(), "none")
    assert losses == wanted and all(torch.equal(weights[name], value) for name, value in reference.items())
    assert not found.plan or "full" in {d.choice for d in found.plan.decisions}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_compiled_loss_around_compiled_and_recomputed_blocks_trains_to_the_same_bits(stage):
    (losses, weights, _), = trained(rl.Mesh(), "selective", loss=compiled(language_model_loss), compile=True, stage=stage)
    (wanted, reference, _), = trained(rl.Mesh(), "none", stage=stage)
    assert losses == wanted and all(torch.equal(weights[name], value) for name, value in reference.items())
