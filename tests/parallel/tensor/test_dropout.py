"""Dropout in a split model drops what the plain model drops: whole activations alike on all ranks, split ones by part of one mask."""

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.base.errors import ConfigError
from rankloom.parallel.tensor.layers import TokenDropout
from rankloom.train.dropout import DropoutKey, key_dropout
from split_model import expect_equals_plain

from .test_gpt import make, run


def keyed(model: nn.Module) -> tuple[None, torch.Tensor]:
    """The loss in training, with masks keyed as the engine does it."""
    if not any(type(module).__name__ == "KeyedDropout" for module in model.modules()):
        key = DropoutKey(seed=4)
        key.set_rows(2, range(1, 2))
        assert key_dropout(model, key) == 5
    return None, run(model.train())[1]


@pytest.mark.parametrize("plan", ["tp_plan", "tp_sequence_plan"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_dropout_keyed_by_the_engine_drops_as_in_one_process(ranks, plan):
    expect_equals_plain(ranks, lambda: make(dropout=0.3), keyed, plan=getattr(make(dropout=0.3), plan))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_dropout_in_a_loop_of_ones_own_drops_as_in_one_process_where_ranks_are_seeded_alike(ranks):
    x = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(9)
    truth = nn.Dropout(0.4)(x)
    parts = []
    for rank in range(ranks):                  # in turn: threads share torch's generator
        layer = TokenDropout(0.4, type("Place", (), {"rank": rank, "size": ranks})())
        torch.manual_seed(9)
        parts.append(layer(x.chunk(ranks, 1)[rank]))
        assert layer.eval()(x) is x
    assert torch.equal(torch.cat(parts, 1), truth)


def test_something_else_than_dropout_is_refused():
    model = nn.Sequential(nn.Embedding(4, 4), nn.AlphaDropout(0.1))
    plan = {"0": "embedding_rowwise", "1": "sequence_dropout"}
    with pytest.raises(ConfigError, match="1: sequence_dropout wants an nn.Dropout, but this is a AlphaDropout"):
        rl.tensor_parallel(model, plan, rl.init())


def test_a_model_that_evaluates_still_does_once_it_is_split():
    def body(world):
        model = make(dropout=0.3).eval()
        return [module.training for module in rl.tensor_parallel(model, model.tp_sequence_plan, world).modules()]

    assert not any(any(training) for training in rl.simulate(2, body))
