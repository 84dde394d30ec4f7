"""The front door gives a pipeline that trains like the plain model."""

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.base.errors import ConfigError
from rankloom.models.config import GPTConfig
from rankloom.models.pieces import gpt_answer, gpt_pieces
from rankloom.parallel.pipeline.cut import pieces_of

CONFIG = GPTConfig(vocab_size=19, seq_len=8, width=8, layers=4, heads=2, kv_heads=1, ffn=12, tie=True)


def batches():
    text = torch.randint(0, 19, (4, 2, 9), generator=torch.Generator().manual_seed(2))
    return [(rows[:, :-1], rows[:, 1:]) for rows in text]


def plainly(steps):
    model = rl.GPT(CONFIG, dtype=torch.float64)
    update = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        update.zero_grad()
        results = [model(tokens, targets=targets) for tokens, targets in batches()]
        total, count = sum(t for t, _ in results), sum(c for _, c in results)
        (total / count).backward()
        update.step()
        losses.append((total / count).item())
    return losses, model.state_dict()


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", None), ("interleaved", 3), ("zb-v", None), ("zb-2p", None)])
@pytest.mark.parametrize("measured", [False, True])
def test_three_steps_of_a_pipeline_are_three_steps_of_the_model(schedule, chunks, measured):
    def body(world):
        model = rl.GPT(CONFIG, dtype=torch.float64)
        pipe = rl.pipeline(gpt_pieces(model), gpt_answer(model), world, microbatches=4, schedule=schedule, chunks=chunks,
                           example=batches()[0] if measured else None)
        params = list({id(p): p for stage in pipe.stages.values() for p in stage.parameters()}.values())
        update = torch.optim.AdamW(params, lr=1e-2)
        losses = []
        for _ in range(3):
            update.zero_grad()
            total, count = pipe.step(batches()).tolist()
            for param in params:
                param.grad /= count
            update.step()
            losses.append(total / count)
        return losses, {name: p.detach() for stage in pipe.stages.values() for name, p in stage.named_parameters()}

    expected, state = plainly(3)
    results = rl.simulate(2, body)
    for losses, params in results:
        assert losses == pytest.approx(expected, rel=1e-12)
        for name, param in params.items():
            torch.testing.assert_close(param, state[name], rtol=1e-11, atol=1e-12)   # AdamW divides by the gradient's own size
    assert {name for _, params in results for name in params} == state.keys()


def test_where_models_differ_rank_0_s_values_win():
    def body(world):
        model = rl.GPT(CONFIG, seed=world.rank, dtype=torch.float64)
        pipe = rl.pipeline(gpt_pieces(model), gpt_answer(model), world, microbatches=4)
        return pipe.step(batches())[0].item(), model.embedding.weight.detach()

    with pytest.warns(UserWarning, match=r"models of ranks \[1\] differed"):
        (loss, table), (again, other) = rl.simulate(2, body)
    model = rl.GPT(CONFIG, seed=0, dtype=torch.float64)
    expected = sum(model(tokens, targets=targets)[0].item() for tokens, targets in batches())
    assert loss == again == pytest.approx(expected, rel=1e-12) and torch.equal(table, other)
    pieces = lambda rank: [({"a": nn.Linear(1, 1 + rank)}, None), ({"b": nn.Linear(1, 1)}, None)]
    with pytest.raises(rl.ModelMismatch, match="rank 1 holds another model"):
        rl.simulate(2, lambda w: rl.pipeline(pieces(w.rank), len, w, microbatches=2))


def test_modules_that_are_no_pieces_are_refused_in_words():
    with pytest.raises(rl.ConfigError, match=r"piece 0 is a Linear, expected \({name: module}, function\)"):
        rl.simulate(2, lambda w: rl.pipeline([nn.Linear(1, 1), nn.Linear(1, 1)], None, w, microbatches=2))


@pytest.mark.parametrize(("wrong", "says"), [
    (dict(pieces=nn.Linear(1, 1)), r"pieces is of type Linear, expected a list of \({name: module}, function\)"),
    (dict(loss=3), "loss=3 cannot be called, expected a function of the last piece's output"),
    (dict(microbatches="2"), "a schedule for microbatches='2': expected a whole number"),
    (dict(microbatches=True), "a schedule for microbatches=True: expected a whole number"),
    (dict(microbatches=2.0, schedule="zb-1p"), "a schedule for microbatches=2.0: expected a whole number"),
    (dict(chunks="2"), "a schedule for chunks='2': expected a whole number"),
    (dict(memory="1 GiB"), "memory='1 GiB' is of type str, expected a number of bytes"),
], ids=str)
def test_options_of_another_type_are_refused_in_words(wrong, says):
    given = dict(pieces=[({name: layer}, layer) for name in "ab" for layer in [nn.Linear(1, 1)]], loss=len, microbatches=2) | wrong
    pieces, loss = given.pop("pieces"), given.pop("loss")
    with pytest.raises(rl.ConfigError, match=says):
        rl.simulate(2, lambda w: rl.pipeline(pieces, loss, w, **given))


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize(("given", "says"), [
    (batches()[0], "micro-batch 0 is a Tensor, expected two parts"),   # one micro-batch in place of a list of them
    ([batches()[0], (1, 2, 3)], "micro-batch 1 is a tuple, expected two parts"),
])
def test_micro_batches_that_are_no_pairs_are_refused_before_anything_runs(given, says, evaluates):
    def body(world):
        model = rl.GPT(CONFIG)
        pipe = rl.pipeline(gpt_pieces(model), gpt_answer(model), world, microbatches=2)
        (pipe.evaluate if evaluates else pipe.step)(given)

    with pytest.raises(rl.BatchError, match=says):
        rl.simulate(2, body)


def test_more_stages_than_pieces_and_unknown_schedules_are_refused():
    pieces = [({"a": nn.Linear(1, 1)}, None)] * 2
    with pytest.raises(rl.ConfigError, match="3 stages for a model of 2 pieces"):
        rl.simulate(3, lambda w: rl.pipeline(pieces, len, w, microbatches=2))
    with pytest.raises(rl.ConfigError, match="there is no schedule '1f1v'. Did you mean '1f1b'?"):
        rl.simulate(2, lambda w: rl.pipeline(pieces, len, w, microbatches=2, schedule="1f1v"))
    with pytest.raises(rl.ConfigError, match="'zb-1p' with 2 stages on each rank: it is made for 1"):
        rl.simulate(2, lambda w: rl.pipeline(pieces * 2, len, w, microbatches=2, schedule="zb-1p", chunks=2))
    with pytest.raises(rl.ConfigError, match="'1f1b' with 2 stages on each rank"):
        rl.simulate(2, lambda w: rl.pipeline(pieces, len, w, microbatches=2, chunks=2))


@pytest.mark.parametrize(("given", "said"), [
    ({"example": torch.ones(3, 4)}, "example: a micro-batch has two parts, .* this is a Tensor"),
    ({"example": (torch.ones(2, 4),)}, "example: a micro-batch has two parts, .* this is a tuple"),
    ({"loss": None}, "loss=None cannot be called"),
    ({"device": "meta"}, "pieces on the meta device have no values to measure")])
def test_what_cannot_be_measured_is_refused_before(given, said):
    options = {"loss": lambda y, _: (y.sum(), 1), "example": (torch.ones(2, 4), None), "device": "cpu"} | given

    def body(world):
        layers = nn.Sequential(*(nn.Linear(4, 4, device=options["device"]) for _ in range(2)))
        with pytest.raises(ConfigError, match=said):
            rl.pipeline(pieces_of(layers, "01"), options["loss"], world, microbatches=2, example=options["example"])

    rl.simulate(2, body)
