"""Shapes of models: presets, the size dial, and arithmetic that must agree with the real model."""

import math
import re
import subprocess
import sys

import pytest

from rankloom.base.errors import ConfigError
from rankloom.models.config import PRESETS, GPTConfig, MoEConfig, model_flops_per_token, parameter_count, preset
from rankloom.models.gpt import GPT

UNITS = {"M": 1e6, "B": 1e9}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_its_name_says(name):
    promised = float(name[:-1]) * UNITS[name[-1]]
    assert parameter_count(preset(name)) == pytest.approx(promised, rel=0.08)


@pytest.mark.parametrize("name", PRESETS)
def test_the_arithmetic_counts_what_the_real_model_has(name):
    config = preset(name)
    model = GPT(config, device="meta")
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())


def test_the_presets_that_figures_are_quoted_for_keep_their_shape():
    assert parameter_count(preset("27M")) == 27_294_208
    big = preset("1.2B")
    assert (big.width, big.layers, big.heads, big.kv_heads, big.ffn) == (2048, 16, 32, 8, 8192)
    assert (big.vocab_size, big.tie, big.seq_len) == (128256, True, 4096)
    assert parameter_count(big) == 1_235_814_400
    assert preset("11M").vocab_size == preset("27M").vocab_size == preset("57M").vocab_size == 8192


def test_presets_grow_with_their_names():
    counts = [parameter_count(config) for config in PRESETS.values()]
    assert counts == sorted(counts)


def test_an_override_replaces_one_field_only():
    changed = preset("11M", seq_len=64)
    assert changed.seq_len == 64
    assert changed.width == preset("11M").width


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match=r"'27m'.*Did you mean '27M'"):
        preset("27m")


def test_an_unknown_override_names_the_nearest():
    with pytest.raises(ConfigError, match=r"'widht'.*Did you mean 'width'"):
        preset("27M", widht=3)


@pytest.mark.parametrize(("wrong", "message"), [
    (dict(heads=7), "must cut width = 512"),
    (dict(width=24, heads=8), "heads of an even width"),
    (dict(kv_heads=3), "must divide heads = 8"),
    (dict(layers=0), "model.layers is 0"),
    (dict(width=512.0), "whole number"),
    (dict(vocab_size=True), "whole number"),
    (dict(dropout=1.0), "dropout"),
    (dict(dropout=-0.1), "dropout"),
    (dict(norm_eps=0.0), "above 0"),
    (dict(rope_base=-1.0), "above 0"),
    (dict(rope_base=math.nan), "above 0, and finite"),
    (dict(norm_eps=math.inf), "above 0, and finite"),
    (dict(norm_eps="1e-5"), "norm_eps = '1e-5' must be numbers"),
    (dict(dropout=None), "dropout = None; it must be a number"),
    (dict(tie="no"), "model.tie is 'no'; it must be True or False"),
    (dict(moe=8), "model.moe is 8; it must be a MoEConfig"),
    (dict(moe={"expert": 8}), "model.moe.expert is unknown. Did you mean 'experts'?"),
])
def test_an_impossible_shape_is_refused_with_its_numbers(wrong, message):
    with pytest.raises(ConfigError, match=message):
        GPTConfig(**wrong)


def test_flops_are_six_per_parameter_plus_attention_that_grows_with_length():
    config = preset("1.2B")
    assert model_flops_per_token(config, 0) == 6 * 1_235_814_400
    per_token = 3 * 16 * 4 * 2048 * 4096 // 2      # forward and backward x layers x (scores, values) x half the past
    assert model_flops_per_token(config) - model_flops_per_token(config, 0) == per_token


def test_config_needs_no_torch():
    code = "import sys, rankloom.models.config as c; c.preset('27M'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["capacity", "balance_loss", "router_z_loss", "bias_rate"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan, None, True, [0.5]])
def test_numbers_of_experts_that_are_none_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"model.moe.{name} = {re.escape(repr(value))}; it must be 0 or more, and finite"):
        MoEConfig(**{name: value})
