"""Stages keep the names of the whole model, and the cut is the best there is."""

import copy
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from awkward import make_model
from rankloom.base.errors import ConfigError
from rankloom.models.config import GPTConfig
from rankloom.models.gpt import GPT
from rankloom.models.pieces import gpt_answer, gpt_pieces
from rankloom.parallel.pipeline.cut import Stage, balance, find_tied, make_stages, pieces_of

CONFIG = dict(vocab_size=19, seq_len=8, width=8, layers=3, heads=2, kv_heads=1, ffn=12)


@pytest.mark.parametrize("tie", [True, False])
def test_pieces_of_a_gpt_in_a_row_are_the_gpt_and_keep_its_names(tie):
    model = GPT(GPTConfig(**CONFIG, tie=tie), dtype=torch.float64)
    stages = make_stages(gpt_pieces(model), [1, 2, 2])
    tokens = torch.arange(16).view(2, 8)
    hidden = tokens
    for stage in stages:
        hidden = stage(hidden)
    assert torch.equal(hidden[0], model.hidden(tokens))
    for mine, truth in zip(gpt_answer(model)(hidden, tokens), model(tokens, targets=tokens)):
        assert torch.equal(mine, truth)
    named = [(name, id(p)) for stage in stages for name, p in stage.named_parameters()]
    assert set(named) == {(name, id(p)) for name, p in model.named_parameters()}
    assert len(named) - len(set(named)) == tie, "the tied matrix stands in two stages"
    assert find_tied(stages) == ([((0, "embedding.weight"), (2, "embedding.weight"))] if tie else [])


def test_tied_parameters_are_found_under_both_of_their_names():
    model = make_model()
    stages = make_stages(pieces_of(model, ["embed", "hidden", "out", "head"]), [1, 1, 1, 1])
    assert find_tied(stages) == [((0, "embed.weight"), (3, "head.weight"))]
    assert find_tied(make_stages(pieces_of(model, ["embed", "hidden", "out", "head"]), [4])) == []


def test_a_stage_is_let_go_of_the_rest_of_the_model():
    """Else every rank would hold all of it."""
    model = GPT(GPTConfig(**CONFIG), dtype=torch.float32)
    stage = make_stages(gpt_pieces(model), [1, 1, 3])[1]
    held = {id(p) for p in stage.parameters()}
    reachable = [cell.cell_contents for run in stage._runs for cell in (getattr(run, "func", run).__closure__ or ())]
    reachable += [value for run in stage._runs for value in run.args]
    assert held == {id(p) for p in model.blocks[0].parameters()} and not any(isinstance(value, GPT) for value in reachable)


@pytest.mark.parametrize("tie", [True, False])
def test_a_copy_of_the_stages_of_a_gpt_computes_with_parameters_of_its_own(tie):
    """Such as a running mean of the weights, torch's `AveragedModel`."""
    stages = make_stages(gpt_pieces(GPT(GPTConfig(**CONFIG, tie=tie), dtype=torch.float64)), [1, 2, 2])
    copies = copy.deepcopy(stages)
    x = torch.arange(16).view(2, 8)
    for stage in copies:
        x = stage(x)
    x.hidden.sum().backward(retain_graph=True)
    x.weight.sum().backward()
    assert all(p.grad is not None for stage in copies for p in stage.parameters())
    assert all(p.grad is None for stage in stages for p in stage.parameters())


@pytest.mark.parametrize("times", [[1, 1, 1, 1, 4], [3, 1, 2, 5, 1, 1, 2], [0, 0, 0, 1], [5, 4, 3, 2, 1, 1]])
def test_the_cut_is_the_best_of_all(times):
    n = len(times)
    for stages in range(1, n + 1):
        cuts = [(0, *inner, n) for inner in combinations(range(1, n), stages - 1)]
        best = min(max(sum(times[a:b]) for a, b in pairwise(cut)) for cut in cuts)
        sizes = balance(times, stages)
        ends = [sum(sizes[:i]) for i in range(stages + 1)]
        assert min(sizes) >= 1 and ends[-1] == n
        assert max(sum(times[a:b]) for a, b in pairwise(ends)) == best


def test_of_equally_fast_cuts_the_most_even_one_is_taken():
    assert balance([6, 1, 1, 1, 1], 3) == [1, 2, 2]


def test_memory_keeps_pieces_apart_that_time_would_join():
    assert balance([1, 1, 1, 4], 2) == [3, 1]
    assert balance([1, 1, 1, 4], 2, memory=[5, 5, 1, 1], limit=10) == [2, 2]
    assert balance([1, 1, 1, 4], 2, memory=[5, 5, 1, 1], limit=7) == [1, 3]


@pytest.mark.parametrize(("call", "message"), [
    (lambda: balance([1, 1, 1], 4), "4 stages for a model of 3 pieces: each stage takes one piece or more; use fewer stages"),
    (lambda: balance([1], 0), "0 stages for a model of 1 pieces"),
    (lambda: balance([1, 1, 1], 2, memory=[4, 9, 4], limit=9), "within 9 of memory; .* need 17 in all, the largest 9"),
    (lambda: make_stages([({}, nn.Identity())] * 3, [1, 1]), r"stages of \[1, 1\] pieces: expected 3 pieces in all"),
    (lambda: make_stages([({}, nn.Identity())] * 3, [3, 0]), "one or more in each"),
])
def test_a_cut_that_cannot_be_is_refused_with_the_reason(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_list_is_arguments_of_the_next_piece_as_between_two_stages():
    halve, join = nn.Identity(), nn.Identity()
    pieces = [({"halve": halve}, lambda x: [x / 2, x]), ({"join": join}, lambda half, whole: [half + whole])]
    assert Stage(pieces)(torch.ones(2))[0].tolist() == [1.5, 1.5] and type(Stage(pieces)(torch.ones(2))) is list
