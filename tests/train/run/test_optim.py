"""The learning rate as a function of the step, its scaling with the batch, and the optimizers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rankloom.base.errors import ConfigError
from rankloom.train.run.config import make_config
from rankloom.train.run.optim import build_optimizer, learning_rate, scale_learning_rate, schedule
from rankloom.train.run.schema import Optimizer

DECAYS = ["cosine", "linear", "constant"]
lengths = st.tuples(st.integers(0, 30), st.integers(1, 60)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def rates(warmup, steps, decay, min_ratio=0.1):
    return [
        learning_rate(s, peak=2.0, warmup_steps=warmup, steps=steps, decay=decay, min_ratio=min_ratio)
        for s in range(steps)
    ]


@pytest.mark.parametrize("decay", DECAYS)
@given(lengths=lengths)
def test_the_rate_rises_to_the_peak_and_never_rises_again(decay, lengths):
    warmup, steps = lengths
    found = rates(warmup, steps, decay)
    rising, falling = found[:warmup], found[warmup:]
    assert rising == sorted(set(rising)), "every step of the warm-up is above the one before it"
    assert falling == sorted(falling, reverse=True)
    assert all(0 < rate <= 2.0 for rate in found)
    assert not rising or rising[-1] == 2.0


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@given(lengths=lengths)
def test_the_last_step_has_the_floor_and_later_steps_too(decay, lengths):
    warmup, steps = lengths
    assert rates(warmup, steps, decay)[-1] == pytest.approx(0.2, rel=1e-12)
    later = learning_rate(steps + 5, peak=2.0, warmup_steps=warmup, steps=steps, decay=decay, min_ratio=0.1)
    assert later == pytest.approx(0.2, rel=1e-12)


def test_half_way_down_a_cosine_and_a_line_are_at_the_middle():
    assert rates(0, 4, "cosine", 0.0)[1] == pytest.approx(1.0, rel=1e-12)
    assert rates(0, 4, "linear", 0.0) == [1.5, 1.0, 0.5, 0.0]
    assert rates(0, 4, "cosine", 0.0)[0] > rates(0, 4, "linear", 0.0)[0], "a cosine starts more slowly"


def test_an_unknown_decay_or_scaling_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'cosine'"):
        learning_rate(3, peak=1.0, warmup_steps=0, steps=9, decay="cosin")
    with pytest.raises(ConfigError, match="Did you mean 'linear'"):
        scale_learning_rate(1.0, 2, 1, "linaer")


def test_linear_scaling_is_by_the_batch_and_sqrt_by_its_root():
    assert scale_learning_rate(0.5, 32, 8, "none") == 0.5
    assert scale_learning_rate(0.5, 32, 8, "linear") == 2.0
    assert scale_learning_rate(0.5, 32, 8, "sqrt") == 1.0
    assert scale_learning_rate(0.5, 2, 8, "linear") == 0.125


def test_the_schedule_of_a_run_scales_by_its_global_batch_and_counts_its_steps():
    sizes = {"mesh": {"replicate": 3}, "train": {"steps": 4, "local_batch_size": 2, "accumulate": 4}}   # 24 rows in a step
    scaled = {"optimizer": {"lr": 0.5, "base_batch_size": 6, "lr_scaling": "linear"}}
    shape = {"schedule": {"warmup_steps": 2, "decay": "linear", "min_lr_ratio": 0.0}}
    rate = schedule(make_config(sizes | scaled | shape, "test"))
    assert [rate(step) for step in range(5)] == [1.0, 2.0, 1.0, 0.0, 0.0], "a floor of 0 is one, and not left out"
    assert schedule(make_config(sizes | shape | {"optimizer": {"lr": 0.5}}, "test"))(1) == 0.5
    shape["schedule"].pop("min_lr_ratio")
    assert schedule(make_config(sizes | scaled | shape, "test"))(3) == pytest.approx(0.2, rel=1e-12)


def step_once(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_weight_decay_shrinks_matrices_and_leaves_vectors(name):
    model = nn.Linear(3, 2)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    step_once(build_optimizer(Optimizer(name=name, lr=0.5, weight_decay=0.1), model.parameters()))
    torch.testing.assert_close(model.weight.detach(), weight * 0.95, rtol=1e-6, atol=0)   # fp32 rounding of one product
    assert torch.equal(model.bias, bias)


def test_the_optimizers_are_fused_and_carry_the_numbers_of_the_config():
    params = [nn.Parameter(torch.ones(2, 2))]
    adamw = build_optimizer(Optimizer(betas=(0.8, 0.9), lr=0.3), params).param_groups[0]
    assert (adamw["fused"], adamw["betas"], adamw["lr"], adamw["weight_decay"]) == (True, (0.8, 0.9), 0.3, 0.1)
    sgd = build_optimizer(Optimizer(name="sgd", momentum=0.7), params).param_groups[0]
    assert (sgd["fused"], sgd["momentum"]) == (True, 0.7)
    assert build_optimizer(Optimizer(name="sgd", momentum=0.0), params).param_groups[0]["momentum"] == 0.0


def test_left_out_numbers_have_the_documented_values():
    params = [nn.Parameter(torch.ones(2))]
    assert build_optimizer(Optimizer(), params).param_groups[0]["betas"] == (0.9, 0.95)
    assert build_optimizer(Optimizer(name="sgd"), params).param_groups[0]["momentum"] == 0.9
