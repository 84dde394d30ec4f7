"""Options that exclude each other are refused alike by `rl.prepare` and in config files."""

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.base.float8 import GRAIN
from rankloom.models.config import MoEConfig
from rankloom.models.loss import language_model_loss
from rankloom.train.rules import FLOAT8_GRAIN, HAS_EFFECT, conflicts, float8_misfit
from rankloom.train.run.config import load_config

OTHER = {"all_reduce": "ring", "compress": "int8", "compress_after": 3, "units": 5, "offload": True, "gradient_memory": 1,
         "reshard_after_forward": False, "ahead": 2}


def found(asked, stage=0, **ranks):
    return [conflict.option for conflict in conflicts(asked, stage=stage, ranks=ranks)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_option_conflicts_with_the_stages_at_which_it_has_no_effect_and_its_default_with_none(stage):
    assert OTHER.keys() == HAS_EFFECT.keys()
    for option, (default, stages) in HAS_EFFECT.items():
        assert found({option: OTHER[option]}, stage) == ([] if stage in stages else [option])
        assert found({option: default}, stage) == []


def test_one_is_not_taken_for_true():
    assert found({"reshard_after_forward": 1}, 2) == ["reshard_after_forward"]


@pytest.mark.parametrize(("asked", "where", "expected"), [
    ({"deterministic": 8}, {"tensor": 2}, ["deterministic"]), ({"deterministic": 0}, {"tensor": 2}, []),
    ({"deterministic": 8}, {"replicate": 2, "shard": 3, "stage": 3}, []), ({"deterministic": 8}, {"expert": 1, "pipe": 1}, []),
    ({"deterministic": 8, "all_reduce": "ring"}, {}, ["all_reduce"]), ({"deterministic": 8, "compress": "int8"}, {}, ["compress"]),
    ({"all_reduce": "ring"}, {"tensor": 2}, ["all_reduce"]), ({"offload": True}, {"tensor": 2, "stage": 1}, []),
    ({"pipe": "1f1b"}, {}, ["pipe"]), ({"pipe": "1f1b"}, {"pipe": 2}, []), ({"ahead": 2}, {"pipe": 2, "stage": 3}, ["ahead"]),
    ({"compress": "int8"}, {"tensor": 2}, ["compress"]), ({"compress": "int8"}, {"pipe": 2, "context": 2}, []),
    ({"compress": "int8"}, {}, []), ({"compress": "int8"}, {"tensor": 2, "shard": 2, "stage": 1}, []),
    ({"compress": "topk"}, {"shard": 2, "stage": 1}, ["compress"]), ({"compress": "topk"}, {"shard": 2, "stage": 0}, []),
    ({"compress": "topk"}, {"shard": 2, "tensor": 2, "stage": 1}, ["compress"]),
    ({"compress": "topk"}, {"shard": 2, "replicate": 2, "stage": 1}, []), ({"compress": "topk"}, {"shard": 2, "expert": 2, "stage": 1}, []),
    ({"compress": "powersgd"}, {"shard": 2, "replicate": 2, "stage": 1}, ["compress"]),
    ({"tensor_overlap": 2}, {"tensor": 2}, []), ({"tensor_overlap": 2, "float8": True}, {"tensor": 2}, ["tensor_overlap"]),
    ({"tensor_overlap": 1, "float8": True}, {"pipe": 2}, []), ({"tensor_overlap": 2}, {"pipe": 2}, ["tensor_overlap"]),
], ids=str)
def test_options_conflict_with_others_and_with_axes(asked, where, expected):
    assert found(asked, **where) == expected


def test_an_axis_that_is_not_known_yet_may_have_several_ranks():
    unknown = {"replicate": None, "shard": 2}
    assert found({"compress": "topk"}, 2, **unknown) == [], "with replicas, slices can be summed so"
    assert found({"compress": "powersgd"}, 2, **unknown) == ["compress"], "never on slices"
    assert found({"compress": "int8"}, 0, tensor=2, replicate=None, shard=None) == []


@pytest.mark.parametrize(("flags", "options", "reason"), [
    (["--train.stage=1", "--mesh.shard=2", "--comm.all_reduce=ring"], {"stage": 1, "all_reduce": "ring"},
     "has no meaning at stage 1, only at stage 0"),
    (["--train.deterministic=true", "--comm.all_reduce=ring"], {"deterministic": True, "all_reduce": "ring"},
     "has no meaning with deterministic: it adds in an order of its own"),
    (["--train.pipe=gpipe"], {"pipe": "gpipe"}, "has no meaning on a mesh without pipe ranks"),
    (["--train.tensor_overlap=2"], {"tensor_overlap": 2}, "has no meaning on a mesh without tensor ranks"),
    (["--train.recompute=4 MiB", "--train.offload_activations=true"], {"recompute": "4 MiB", "offload_activations": True},
     "moves away what recompute counts, a number of bytes: only with none, selective or full")], ids=str)
def test_config_files_and_prepare_give_the_same_reason(tmp_path, flags, options, reason):
    def body(world):
        rl.prepare(nn.Linear(2, 2), loss=lambda model, x: (model(x).sum(), 1), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), world=world,
                   **options)

    (tmp_path / "train.toml").write_text("[train]\nlocal_batch_size = 2\n")
    option = flags[-1].removeprefix("--").partition("=")[0].partition(".")
    with pytest.raises(rl.ConfigError, match=rf'\[{option[0]}\] {option[2]} = "?\w+"? {reason}'):
        load_config(tmp_path / "train.toml", flags)
    with pytest.raises(rl.ConfigError, match=rf"{option[2]}='?\w+'? {reason}; leave it out"):
        rl.simulate(2, body)


@pytest.mark.parametrize("experts", [None, MoEConfig(experts=2, top_k=1, ffn=8, shared=1)], ids=["dense", "experts"])
@pytest.mark.parametrize(("tensor", "width", "heads", "kv_heads", "ffn"), [
    (1, 24, 4, 4, 32), (1, 16, 4, 1, 24), (2, 16, 4, 4, 32), (2, 32, 2, 1, 32), (2, 32, 2, 1, 24), (2, 32, 2, 1, 48), (2, 64, 4, 2, 32),
    (2, 32, 4, 2, 32), (4, 64, 4, 2, 24)])
def test_a_config_refuses_fp8_before_ranks_start_where_and_only_where_a_run_would(tensor, width, heads, kv_heads, ffn, experts):
    shape = rl.GPTConfig(vocab_size=32, seq_len=8, width=width, layers=1, heads=heads, kv_heads=kv_heads, ffn=ffn, moe=experts)

    def body(world):
        try:
            rl.prepare(rl.GPT(shape, seed=0), loss=language_model_loss, optimizer=torch.optim.SGD, world=world, precision="fp8")
        except rl.ConfigError as error:
            return str(error)
        return ""

    assert GRAIN == FLOAT8_GRAIN
    for error in rl.simulate(rl.Mesh(tensor=tensor), body):
        assert bool(error) == bool(float8_misfit(shape, tensor)), error
