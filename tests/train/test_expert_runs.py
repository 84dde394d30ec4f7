"""Mixtures of experts from a file: the same run on any mesh, what it leaves behind, and the command line."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import rankloom as rl
from rankloom.base.events import Evaluated, Notice, StepDone
from rankloom.train.run import loop
from rankloom.train.run.config import make_config, write_config
from rankloom.train.run.schema import MoESection
from rankloom.train.run.weights import load_model
from tiny_runs import maker_of_configs

RTOL = 1e-12   # fp64: the same terms in another order
TABLE = {
    "model": {"preset": "1M", "width": 32, "layers": 2, "heads": 2, "kv_heads": 2,
              "moe": {"experts": 4, "ffn": 16, "balance_loss": 0.0, "bias_rate": 0.01, "capacity": 1.0}},
    "data": {"validation": 0.1},
    "train": {"steps": 3, "seq_len": 16, "global_batch_size": 8, "samples": 1, "sample_tokens": 8, "precision": "fp64", "eval_every": 2},
}


@pytest.fixture
def table(tmp_path):
    return maker_of_configs(tmp_path, TABLE)


def run(config):
    """(summary, events) of every rank."""

    def body(world):
        events = []
        return loop.train(config, world, events.append), events

    return rl.simulate(config.mesh.as_mesh(), body)


def told(events):
    """Losses of steps and evaluations, and on rank 0 who had how many tokens."""
    losses = [event.loss for event in events if isinstance(event, StepDone | Evaluated)]
    return losses, [event.experts for event in events if isinstance(event, StepDone)]


@pytest.fixture
def alone(table):
    """What the run tells on one rank, and its weights."""
    summary, events = run(table())[0]
    return told(events), load_model(Path(summary.folder))[0]


MESHES = [{"expert": 2}, {"expert": 2, "replicate": 2}, {"expert": 4}, {"expert": 2, "shard": 2}, {"expert": 2, "tensor": 2},
          {"expert": 2, "context": 2}, {"expert": 2, "pipe": 2}]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: " x ".join(f"{axis} {n}" for axis, n in mesh.items()))
def test_a_run_on_any_mesh_has_the_losses_the_tokens_and_the_weights_of_one_rank(table, alone, mesh):
    (losses, experts), model = alone
    results = run(table(mesh=mesh, train={"stage": 3 if "shard" in mesh else 0}))
    assert len(losses) == 3 + 2 and all(sum(load.routed) == 8 * 16 * 2 for step in experts for load in step.values())
    for rank, (_, events) in enumerate(results):
        found, counted = told(events)
        assert found == pytest.approx(losses, rel=RTOL)
        assert counted == ([{}] * 3 if rank else experts)
    summary = results[0][0]
    mine, _ = load_model(Path(summary.folder))
    for name, whole in model.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[name], whole, rtol=1e-9, atol=1e-12)   # Adam divides by gradients near 0
    assert mine.state_dict()["blocks.0.mlp.router.bias"].abs().sum() > 0, "moved, and saved"
    assert (Path(summary.folder) / "samples.txt").exists()


def test_metrics_hold_the_tokens_of_each_expert_the_dropped_ones_and_the_auxiliary_losses(table):
    moe = TABLE["model"]["moe"] | {"balance_loss": 0.01}
    summary, events = run(table(mesh={"expert": 2}, model={"moe": moe}))[0]
    lines = [json.loads(line) for line in (Path(summary.folder) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "StepDone"]
    for step, event in zip(steps, (event for event in events if isinstance(event, StepDone)), strict=True):
        assert step["experts"] == {name: {"routed": list(load.routed), "dropped": load.dropped} for name, load in event.experts.items()}
        assert step["auxiliary"] == event.auxiliary > 2 * 0.01 * 0.99, "two layers, 1 or more for a token each"
    said = "experts: 4 in each of 2 blocks, 2 for each token; 2 on each rank; one takes at most 1 times its even share of a row"
    assert any(isinstance(event, Notice) and event.text == said for event in events)


@pytest.mark.parametrize("moe", [{"experts": 1, "top_k": 1}, {"experts": 4, "top_k": 4}, {"capacity": 1e-9}, {"experts": 64, "top_k": 1}])
def test_extreme_mixtures_train_and_evaluate_alike_on_one_rank_and_on_several(table, moe):
    moe = TABLE["model"]["moe"] | moe
    mesh = {"expert": 2} if moe["experts"] > 1 else {"replicate": 2}
    expected = told(run(table(model={"moe": moe}))[0][1])
    found = told(run(table(model={"moe": moe}, mesh=mesh))[0][1])
    assert found[0] == pytest.approx(expected[0], rel=RTOL) and found[1] == expected[1]
    if moe["capacity"] == 1e-9:   # one place for each expert in a row
        assert {load.dropped for step in found[1] for load in step.values()} <= set(range(8 * 16 * 2 - 8 * 4, 8 * 16 * 2))
    if moe["experts"] == 64:
        assert any(0 in load.routed for step in found[1] for load in step.values()), "experts without a token"


def test_the_table_of_the_page_on_experts_is_a_config():
    page = (Path(__file__).parents[2] / "docs" / "experts.md").read_text()
    table = tomllib.loads(page.partition("```toml\n")[2].partition("```")[0])
    config = make_config(table | {"train": {"global_batch_size": 8}}, "docs/experts.md")
    assert config.mesh.as_mesh() == rl.Mesh(expert=2) and set(table["model"]["moe"]) == set(MoESection.model_fields)


def test_the_command_trains_on_an_expert_axis_and_generate_reads_its_run(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    write_config(table(train={"precision": "fp32"}), tmp_path / "train.toml")

    def rankloom(*words):
        return subprocess.run([sys.executable, "-m", "rankloom", *words], capture_output=True, text=True, check=False)

    done = rankloom("train", "train.toml", "--mesh.expert", "2", "--run.name", "spread", "--data.baseline", "false")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mesh: expert 2" in done.stdout and "  experts " in done.stdout and "  dropped " in done.stdout
    written = rankloom("generate", "runs/spread", "--prompt", "the q", "--max-tokens", "5")
    assert written.returncode == 0 and written.stdout.startswith("the q"), written.stderr
    refused = rankloom("train", "train.toml", "--mesh.expert", "2", "--model.moe.experts", "3")
    assert refused.returncode == 2 and "experts = 3 cannot be shared evenly by [mesh] expert 2: 3 / 2 = 1.5 on each rank" in refused.stderr
