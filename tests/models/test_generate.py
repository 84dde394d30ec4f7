"""Generation: the cache changes nothing but the time, and draws depend on the seed and the row only."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from torch.nn import functional as F

import rankloom as rl
from rankloom.base.errors import ConfigError, DataError
from rankloom.models.config import GPTConfig, MoEConfig
from rankloom.models.generate import choose_token, generate, new_caches
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss

TINY = GPTConfig(vocab_size=37, seq_len=16, width=16, layers=2, heads=4, kv_heads=2, ffn=24)


@pytest.fixture
def model():
    model = GPT(TINY, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():     # confident enough that tokens differ
            p.mul_(20 if p.dim() > 1 else 1)
    return model


def prompt(rows=2, length=4):
    return torch.randint(0, 37, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("cuts", [[10], [1] * 10, [4, 1, 1, 3, 1], [3, 7]])
def test_logits_with_a_cache_are_the_logits_without(model, cuts):
    ids = prompt(length=10)
    caches, start, parts = new_caches(model), 0, []
    for n in cuts:
        parts.append(F.linear(model.hidden(ids[:, start:start + n], caches), model.output_weight))
        start += n
    torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=1e-11, atol=1e-11)    # fp64, other kernels


def test_temperature_zero_takes_the_likeliest_token_each_time(model):
    out = generate(model, prompt(), max_new_tokens=8, temperature=0)
    assert out.shape == (2, 12) and torch.equal(out[:, :4], prompt())
    for t in range(4, 12):
        assert torch.equal(out[:, t], model(out[:, :t])[:, -1].argmax(-1))


def test_the_same_seed_gives_the_same_text_and_another_seed_another(model):
    texts = [generate(model, prompt(), max_new_tokens=10, temperature=2.0, seed=s) for s in (0, 0, 1)]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_a_row_does_not_depend_on_its_neighbours(model):
    both = generate(model, prompt(2), max_new_tokens=10, temperature=2.0)
    alone = generate(model, prompt(2)[:1], max_new_tokens=10, temperature=2.0)
    assert torch.equal(both[:1], alone)
    twins = generate(model, prompt(1).expand(2, -1), max_new_tokens=10, temperature=2.0)
    assert not torch.equal(twins[0], twins[1])


def test_text_grows_past_the_models_length(model):
    out = generate(model, prompt(length=14), max_new_tokens=30, temperature=0)
    assert out.shape == (2, 44)
    assert torch.equal(out[:, 17], model(out[:, 17 - 8:17])[:, -1].argmax(-1))     # the later half, then on
    long_prompt = generate(model, prompt(length=40), max_new_tokens=3, temperature=0)
    assert torch.equal(long_prompt[:, 40], model(prompt(length=40)[:, -16:])[:, -1].argmax(-1))


def test_a_model_of_one_token_forgets_all_but_the_last_one():
    model = GPT(dataclasses.replace(TINY, seq_len=1), dtype=torch.float64)
    out = generate(model, prompt(length=1), max_new_tokens=3, temperature=0)
    assert torch.equal(out[:, 3], model(out[:, 2:3])[:, -1].argmax(-1))


def test_prompts_may_be_of_32_bits_and_any_token_may_end_a_row(model):
    assert torch.equal(generate(model, prompt().int(), max_new_tokens=4), generate(model, prompt(), max_new_tokens=4))
    assert generate(model, prompt(), max_new_tokens=4, stop=0).shape[0] == 2


def test_with_a_cache_the_logits_of_a_long_prompt_are_those_of_its_last_token_only(model):
    last = model(prompt(), caches=new_caches(model))
    torch.testing.assert_close(last, model(prompt())[:, -1:], rtol=1e-11, atol=1e-11)   # fp64, other kernels


def test_top_k_draws_among_the_k_likeliest_only():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    drawn = {int(choose_token(logits, 5.0, 2, [torch.Generator().manual_seed(s)])) for s in range(60)}
    assert drawn == {1, 3}
    everything = {int(choose_token(logits, 5.0, None, [torch.Generator().manual_seed(s)])) for s in range(200)}
    assert everything == {0, 1, 2, 3}


@pytest.mark.parametrize("top_k", [None, 2])
def test_a_temperature_near_zero_takes_the_likeliest_token(top_k):
    """Scores over 1e-320 had been infinite, and probabilities no numbers."""
    assert int(choose_token(torch.tensor([[0.0, 3.0, 1.0, -torch.inf]]), 1e-320, top_k, [torch.Generator().manual_seed(0)])) == 1


def test_draws_follow_the_probabilities():
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]]))
    g = torch.Generator().manual_seed(0)
    drawn = torch.stack([choose_token(logits, 1.0, None, [g]) for _ in range(4000)]).flatten()
    assert torch.bincount(drawn, minlength=3).div(4000) == pytest.approx([0.2, 0.5, 0.3], abs=0.04)


def test_no_kernel_that_plans_anew_for_each_length_runs_while_a_text_grows(model):
    allowed, before = [], torch.backends.cuda.cudnn_sdp_enabled()
    model.register_forward_hook(lambda *_: allowed.append(torch.backends.cuda.cudnn_sdp_enabled()))
    generate(model, prompt(), max_new_tokens=2, temperature=0)
    assert allowed == [False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_a_stop_token_ends_a_row_and_all_ended_ends_the_text(model):
    free = generate(model, prompt(), max_new_tokens=12, temperature=0)
    stop = int(free[0, 6])
    out = generate(model, prompt(), max_new_tokens=12, temperature=0, stop=stop)
    first = free[0, 4:].tolist().index(stop) + 4
    assert torch.equal(out[0, :first + 1], free[0, :first + 1])
    assert (out[0, first:] == stop).all()
    alone = generate(model, prompt()[:1], max_new_tokens=12, temperature=0, stop=stop)
    assert alone.shape[1] == first + 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_model_whose_weights_are_broken_says_so(model, broken, temperature):
    with torch.no_grad():
        model.norm.weight.fill_(broken)
    with pytest.raises(rl.NonFinite, match="logits are not finite.* load an earlier checkpoint"):
        generate(model, prompt(), max_new_tokens=2, temperature=temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[math.inf, 0.0], [math.inf, math.inf], [-math.inf, -math.inf], [math.nan, 1.0]])
def test_logits_of_which_none_is_the_highest_number_are_refused(row, temperature):
    with pytest.raises(rl.NonFinite, match="logits are not finite"):
        choose_token(torch.tensor([[0.0, 1.0], row]), temperature, None, [torch.Generator()] * 2)


def test_tokens_that_may_not_be_drawn_may_have_a_logit_of_minus_infinity():
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 1.5]])
    assert {choose_token(logits, 1e300, None, [torch.Generator().manual_seed(seed)]).item() for seed in range(40)} == {1, 3}
    assert choose_token(logits, 0, None, []).item() == 3


def test_generation_ignores_dropout_and_gives_every_module_its_mode_back_also_after_an_error():
    model = GPT(GPTConfig(vocab_size=37, seq_len=16, width=16, layers=1, heads=4, kv_heads=2, ffn=24, dropout=0.5))
    one, two = (generate(model, prompt(), max_new_tokens=6, temperature=0) for _ in range(2))
    assert torch.equal(one, two)
    model.blocks.eval()   # frozen by the user
    model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, prompt(), max_new_tokens=6)
    assert model.training and model.embedding_dropout.training and not any(module.training for module in model.blocks.modules())


@pytest.mark.parametrize(("wrong", "error", "message"), [
    (dict(prompt_tokens=torch.zeros(1, 0, dtype=torch.int64)), DataError, "one token"),
    (dict(prompt_tokens=torch.tensor([1, 2])), DataError, "rows"),
    (dict(prompt_tokens=torch.tensor([[1, 37]])), DataError, "0 to 36"),
    (dict(prompt_tokens=[[1, 2]]), ConfigError, "^prompt_tokens is of type list, expected a tensor of tokens"),
    (dict(prompt_tokens=torch.ones(1, 2)), DataError, "of torch.float32; tokens are of torch.int64"),
    (dict(max_new_tokens=2.0), ConfigError, "^max_new_tokens=2.0 is of type float, expected a whole number"),
    (dict(max_new_tokens=-1), ConfigError, "^max_new_tokens is -1, expected 0 or more"),
    (dict(top_k=2.5), ConfigError, "^top_k=2.5 is of type float, expected a whole number, or None"),
    (dict(stop=37), ConfigError, "^stop is 37, which no row ends with: the model's vocabulary is 0 to 36"),
    (dict(temperature=-1.0), ConfigError, "^temperature is -1.0, expected 0 or more$"),
    (dict(temperature=math.nan), ConfigError, "^temperature is nan"),
    (dict(temperature=math.inf), ConfigError, "^temperature is inf, expected a finite one$"),
    (dict(top_k=0), ConfigError, "^top_k is 0, expected 1 or more"),
])
def test_a_request_that_makes_no_sense_is_refused(model, wrong, error, message):
    with pytest.raises(error, match=message):
        generate(model, **{"prompt_tokens": prompt(), "max_new_tokens": 2, **wrong})


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_sharded_model_generates_the_text_of_a_whole_one(model, stage):
    expected = generate(model, prompt(), max_new_tokens=20, top_k=3)

    def body(world):
        engine = rl.prepare(copy.deepcopy(model), loss=language_model_loss, world=world, stage=stage, optimizer=torch.optim.SGD)
        found = [generate(engine.model, prompt(), max_new_tokens=20, top_k=3)]
        engine.step((prompt(), prompt()))
        return [*found, generate(engine.model, prompt(), max_new_tokens=20, top_k=3)]

    for before, after in rl.simulate(2, body, backend="gloo"):
        assert torch.equal(before, expected) and after.shape == expected.shape


@pytest.mark.parametrize(("mesh", "stage"), [
    (rl.Mesh(shard=3), 1), (rl.Mesh(shard=3), 3), (rl.Mesh(expert=2), 0), (rl.Mesh(shard=2, expert=2), 3)])
def test_ranks_may_end_their_texts_at_different_tokens(mesh, stage):
    """Those of a sharded model waited for one that had left."""
    shape = dataclasses.replace(TINY, moe=MoEConfig(experts=4, top_k=2, ffn=12)) if mesh.expert > 1 else TINY
    model = GPT(shape, dtype=torch.float64)
    prompts = [prompt()[:1, :1 + rank] + rank for rank in range(mesh.size)]
    options = {"max_new_tokens": 20, "temperature": 2.0}
    options["stop"] = int(generate(model, prompts[0], **options)[0, 3])
    expected = [generate(model, mine, **options, seed=rank) for rank, mine in enumerate(prompts)]
    assert len({text.shape[1] - len(mine[0]) for text, mine in zip(expected, prompts)}) > 1, "they end alike"

    def body(world):
        engine = rl.prepare(copy.deepcopy(model), loss=language_model_loss, world=world, stage=stage, optimizer=torch.optim.SGD)
        return generate(engine.model, prompts[world.rank], **options, seed=world.rank)

    assert all(map(torch.equal, rl.simulate(mesh, body, backend="gloo"), expected))


@pytest.mark.parametrize("stop", [None, 5])
@pytest.mark.parametrize(("mesh", "stage"), [(rl.Mesh(shard=3), 3), (rl.Mesh(expert=2), 0)])
def test_a_rank_without_a_prompt_takes_part_until_the_others_have_their_texts(mesh, stage, stop):
    """Of fewer prompts than ranks some get none."""
    model = GPT(dataclasses.replace(TINY, moe=MoEConfig(experts=4, top_k=2, ffn=12)) if mesh.expert > 1 else TINY, dtype=torch.float64)
    prompts = [prompt()[:1] if rank == 0 else prompt()[:0] for rank in range(mesh.size)]
    options = {"max_new_tokens": 20, "temperature": 2.0, "stop": stop}
    expected = generate(model, prompts[0], **options)

    def body(world):
        engine = rl.prepare(copy.deepcopy(model), loss=language_model_loss, world=world, stage=stage, optimizer=torch.optim.SGD)
        return generate(engine.model, prompts[world.rank], **options)

    first, *others = rl.simulate(mesh, body, backend="gloo")
    assert torch.equal(first, expected) and all(len(text) == 0 for text in others)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rank_whose_logits_are_not_finite_fails_when_all_ranks_are_done(model, temperature):
    """The others waited for its forwards until they timed out."""
    options = {"max_new_tokens": 20, "temperature": temperature}
    expected = generate(model, prompt(), **options)

    def body(world):
        engine = rl.prepare(copy.deepcopy(model), loss=language_model_loss, world=world, stage=3, optimizer=torch.optim.SGD)
        if world.rank == 0:
            return generate(engine.model, prompt(), **options)
        calls = itertools.count()
        engine.model.norm.register_forward_hook(lambda _module, _args, out: out * (math.nan if next(calls) == 4 else 1.0))
        with pytest.raises(rl.NonFinite, match="logits are not finite"):
            generate(engine.model, prompt(), **options)
        return expected

    for text in rl.simulate(2, body, timeout=20):
        assert torch.equal(text, expected)


def test_a_stage_of_a_pipeline_cannot_generate_and_says_what_can():
    with pytest.raises(rl.ConfigError, match=r"generate needs a whole GPT, and this is a Linear: .*full_state_dict"):
        generate(torch.nn.Linear(2, 2), torch.zeros(1, 1, dtype=torch.int64), max_new_tokens=1)
