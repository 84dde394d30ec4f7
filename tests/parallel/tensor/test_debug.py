"""In debug mode what the layouts say is checked: a tensor that should be the same on all ranks and is not, is named."""

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.base.errors import CollectiveMismatch
from split_model import expect_equal

from .test_gpt import make, run, tokens
from .test_styles import PAIRS, shaken


@pytest.fixture(autouse=True)
def debug(monkeypatch):
    monkeypatch.setenv("RANKLOOM_DEBUG", "1")


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("plan", ["tp_plan", "tp_sequence_plan"])
def test_a_model_that_is_right_passes(plan, overlap):
    expect_equal(2, lambda: make(layers=1), run, plan=getattr(make(), plan), overlap=overlap)


@pytest.mark.parametrize(("overlap", "plan", "where"), [
    (1, "tp_plan", r"entrance of blocks.0.mlp: forward .* laid out as \[..., tokens, width\], .* ranks \[2\] hold another than rank 0"),
    (2, "tp_plan", r"entrance of blocks.0.mlp: forward .* ranks \[2\] hold another than rank 0"),
])
def test_dropout_that_differs_between_ranks_is_named_by_all(overlap, plan, where):
    class Disturbed(nn.Module):
        def __init__(self, rank: int):
            super().__init__()
            self.rank = rank

        def forward(self, x):
            return x * (2.0 if self.rank == 2 else 1.0)

    def body(world):
        model = make()
        model.blocks[0].attention_dropout = Disturbed(world.rank)
        rl.tensor_parallel(model, getattr(model, plan), world, overlap=overlap)
        with pytest.raises(CollectiveMismatch, match=where):
            run(model)

    rl.simulate(3, body)


@pytest.mark.parametrize("what", ["tokens", "targets"])
def test_a_batch_that_differs_between_ranks_is_named_by_all(what):
    def body(world):
        model = rl.tensor_parallel(make(layers=1), None, world)
        ids = tokens(40)
        other = ids.flip(0) if world.rank == 1 else ids   # the same tokens in another order
        with pytest.raises(CollectiveMismatch, match=rf"{what} .* laid out as \[..., tokens\], alike on all ranks, but ranks \[1\]"):
            model(other if what == "tokens" else ids, targets=other if what == "targets" else ids)

    rl.simulate(2, body)


def test_a_gradient_that_differs_between_ranks_is_named_by_all():
    def body(world):
        model = rl.tensor_parallel(shaken(PAIRS["linear"]()), {"first": "colwise", "second": "rowwise"}, world)
        y = model(torch.ones(2, 4, 6, dtype=torch.float64))
        with pytest.raises(CollectiveMismatch, match=r"second: backward .* ranks \[1\] hold another than rank 0"):
            (y.sum() * (1 + world.rank)).backward()

    rl.simulate(2, body)


def test_values_that_are_no_numbers_are_alike():
    def body(world):
        model = rl.tensor_parallel(make(layers=1), None, world)
        with torch.no_grad():
            model.norm.weight.fill_(float("nan"))
            return model(tokens(40)).isnan().all().item()

    assert rl.simulate(2, body) == [True, True]
