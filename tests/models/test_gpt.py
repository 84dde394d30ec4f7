"""The model: positions, causality, initial weights that depend on names only, and real fp64 throughout."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rankloom.base.errors import DataError
from rankloom.models import sequence_part
from rankloom.models.config import GPTConfig
from rankloom.models.gpt import GPT, Rotary, check_tokens, rotate
from rankloom.models.loss import language_model_loss

TINY = GPTConfig(vocab_size=37, seq_len=12, width=16, layers=2, heads=4, kv_heads=2, ffn=24)


def tokens(rows=2, length=10, vocab=37, seed=0):
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def by_hand(model, ids):
    """The same model written in loops and plain formulas, in fp64, one row at a time."""
    c, p = model.config, {name: t.double() for name, t in model.named_parameters()}

    def norm(x, weight):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + c.norm_eps) * weight

    def turn(x):      # [T, D]
        half = c.head_width // 2
        out = x.clone()
        for t in range(len(x)):
            for i in range(half):
                angle = t * c.rope_base ** (-2 * i / c.head_width)
                out[t, i] = x[t, i] * math.cos(angle) - x[t, i + half] * math.sin(angle)
                out[t, i + half] = x[t, i + half] * math.cos(angle) + x[t, i] * math.sin(angle)
        return out

    x = p["embedding.weight"][ids]
    for layer in range(c.layers):
        own = {n.removeprefix(f"blocks.{layer}."): t for n, t in p.items() if n.startswith(f"blocks.{layer}.")}
        h = norm(x, own["attention_norm.weight"])
        heads = []
        for head in range(c.heads):
            d, shared = c.head_width, head // (c.heads // c.kv_heads)
            q = turn(h @ own["attention.query.weight"][head * d:(head + 1) * d].T)
            k = turn(h @ own["attention.key.weight"][shared * d:(shared + 1) * d].T)
            v = h @ own["attention.value.weight"][shared * d:(shared + 1) * d].T
            scores = q @ k.T / math.sqrt(d)
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ own["attention.output.weight"].T
        h = norm(x, own["mlp_norm.weight"])
        gate = h @ own["mlp.gate.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ own["mlp.up.weight"].T)) @ own["mlp.down.weight"].T
    return norm(x, p["norm.weight"]) @ p.get("head.weight", p["embedding.weight"]).T


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tie", [False, True])
def test_the_model_is_the_formulas_in_fp64(kv_heads, tie):
    config = GPTConfig(vocab_size=37, seq_len=12, width=16, layers=2, heads=4, kv_heads=kv_heads, ffn=24, tie=tie)
    model = GPT(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():      # larger weights, so that every term matters
            parameter.mul_(20 if parameter.dim() > 1 else 1).add_(0.01)
    ids = tokens()
    wanted = torch.stack([by_hand(model, row) for row in ids])
    torch.testing.assert_close(model(ids), wanted, rtol=1e-12, atol=1e-12)     # fp64: only rounding differs


def test_a_later_token_never_changes_an_earlier_logit():
    model = GPT(TINY, dtype=torch.float64)
    ids = tokens()
    other = ids.clone()
    other[:, 6:] = (other[:, 6:] + 1) % 37
    before, after = model(ids), model(other)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6], after[:, 6])


@pytest.mark.parametrize(("device", "dtype", "mask", "writes"), [
    ("cuda", torch.bfloat16, None, False), ("cuda", torch.float32, None, True), ("cuda", torch.float16, torch.ones(1), True),
    ("cpu", torch.float32, None, False)])
def test_shared_heads_are_repeated_where_a_gpu_would_write_all_scores(device, dtype, mask, writes, monkeypatch):
    """Before Hopper torch takes flash attention, which reads shared heads, or the formulas; not the kernel that takes fp32 and masks."""
    assert sequence_part.writes_scores(device, dtype, mask) == writes
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 7, heads, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2))
    plain = sequence_part.WHOLE.attend(query, key, value)
    monkeypatch.setattr(sequence_part, "writes_scores", lambda *_: True)
    torch.testing.assert_close(sequence_part.WHOLE.attend(query, key, value), plain, rtol=1e-12, atol=1e-14)


def test_rotation_depends_on_the_distance_only():
    rotary = Rotary(TINY)
    rotary.build(torch.device("cpu"), torch.float64)
    q, k = torch.randn(2, 1, 1, 1, 4, dtype=torch.float64)
    at = [rotary(t, t + 1) for t in range(12)]
    products = [(rotate(q, *at[t + 3]) * rotate(k, *at[t])).sum() for t in range(9)]
    torch.testing.assert_close(torch.stack(products), products[0].expand(9), rtol=1e-12, atol=1e-12)
    assert not torch.isclose(products[0], (q * k).sum())


@pytest.mark.parametrize(("move", "tables"), [
    (lambda m: m.double(), torch.float64), (lambda m: m.bfloat16(), torch.float32), (lambda m: m.half(), torch.float32),
    (lambda m: m.bfloat16().float(), torch.float32), (lambda m: m.bfloat16().double(), torch.float64)])
def test_rotary_tables_stay_exact_when_the_model_changes_dtype(move, tables):
    model = move(GPT(TINY))
    fresh = Rotary(TINY)
    fresh.build(torch.device("cpu"), tables)
    assert model.rotary.cos.dtype == tables
    assert torch.equal(model.rotary.cos, fresh.cos) and torch.equal(model.rotary.sin, fresh.sin)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_model_has_the_dtype_that_was_asked_for_on_the_meta_device_too(device, dtype):
    model, tables = GPT(TINY, dtype=dtype, device=device), torch.float64 if dtype == torch.float64 else torch.float32
    assert {p.dtype for p in model.parameters()} == {dtype} and model.rotary.cos.dtype == model.rotary.sin.dtype == tables


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16])
def test_initial_weights_do_not_depend_on_torch_s_default_dtype(default):
    reference = GPT(TINY).state_dict()
    torch.set_default_dtype(default)
    try:
        model = GPT(TINY)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, reference[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_logits_have_the_dtype_of_the_parameters(dtype):
    model = GPT(TINY, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model(tokens()).dtype == dtype
    reference = GPT(TINY, dtype=torch.float64)(tokens())
    close = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float64: 1e-15}[dtype]     # a few units of each dtype
    assert (model(tokens()).double() - reference).abs().max() < close


def test_nothing_but_parameters_is_in_the_model_to_save_or_broadcast():
    model = GPT(TINY)
    assert list(model.buffers()) == []
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


def test_a_tied_output_is_one_parameter_under_one_name():
    model = GPT(GPTConfig(vocab_size=37, seq_len=12, width=16, layers=1, heads=4, kv_heads=4, ffn=24, tie=True))
    assert model.output_weight is model.embedding.weight
    assert not any("head" in name for name in model.state_dict())
    total, _ = language_model_loss(model, (tokens(), tokens(seed=1)))
    total.backward()
    used_twice = model.embedding.weight.grad
    never_read = sorted(set(range(37)) - set(tokens().flatten().tolist()))
    assert used_twice[never_read].abs().sum() > 0       # as output: rows of tokens that no input had


def test_initial_weights_follow_names_and_nothing_else():
    one, again, other = GPT(TINY), GPT(TINY), GPT(TINY, seed=1)
    deeper = GPT(GPTConfig(vocab_size=37, seq_len=12, width=16, layers=5, heads=4, kv_heads=2, ffn=24))
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        if parameter.dim() > 1:
            assert not torch.equal(parameter, other.get_parameter(name))
        if name.endswith(("query.weight", "up.weight", "embedding.weight")):
            assert torch.equal(parameter, deeper.get_parameter(name))
    weights = [p.flatten()[:8].tolist() for p in one.parameters() if p.dim() > 1]
    assert len({tuple(w) for w in weights}) == len(weights)       # no two parameters share their draws


def test_building_a_model_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    GPT(TINY)
    assert torch.equal(before, torch.get_rng_state())


def test_outputs_into_the_residual_stream_start_smaller():
    model = GPT(GPTConfig(vocab_size=64, width=256, layers=8, heads=4, kv_heads=4, ffn=512))
    std = {n: p.std().item() for n, p in model.named_parameters() if p.dim() > 1}
    assert std["blocks.3.attention.query.weight"] == pytest.approx(0.02, rel=0.02)
    assert std["embedding.weight"] == pytest.approx(0.02, rel=0.02)
    for name in ("blocks.3.attention.output.weight", "blocks.3.mlp.down.weight"):
        assert std[name] == pytest.approx(0.02 / 4, rel=0.02)
    assert all(torch.equal(p, torch.ones_like(p)) for p in model.parameters() if p.dim() == 1)


def test_a_meta_model_holds_no_memory_and_knows_its_shapes():
    model = GPT(TINY, device="meta")
    assert all(p.is_meta for p in model.parameters())
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in GPT(TINY).named_parameters()}


def test_dropout_modules_exist_only_when_there_is_dropout():
    def dropouts(model):
        return [name for name, module in model.named_modules() if isinstance(module, nn.Dropout)]

    dropping = GPT(GPTConfig(vocab_size=37, seq_len=12, width=16, layers=2, heads=4, kv_heads=2, ffn=24, dropout=0.3))
    assert dropouts(GPT(TINY)) == []
    assert len(dropouts(dropping)) == 1 + 2 * 2
    assert not torch.equal(dropping(tokens()), dropping(tokens()))
    dropping.eval()
    assert torch.equal(dropping(tokens()), GPT(TINY)(tokens()))


def test_a_deep_copy_is_independent():
    model = GPT(TINY)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.norm.weight.zero_()
    assert model(tokens()).abs().sum() > 0 and twin(tokens()).abs().sum() == 0


def test_a_sequence_too_long_for_the_model_is_refused():
    with pytest.raises(DataError, match=r"13 tokens.*at most 12"):
        GPT(TINY)(tokens(length=13))
    GPT(TINY)(tokens(length=12))


@pytest.mark.parametrize("wrong", [37, -1])
def test_a_token_outside_the_vocabulary_is_named(wrong):
    ids = tokens()
    check_tokens(ids, 37)
    ids[1, 3] = wrong
    with pytest.raises(DataError, match=rf"{wrong}.*0 to 36"):
        check_tokens(ids, 37)


def test_a_small_model_learns_a_pattern():
    model = GPT(GPTConfig(vocab_size=8, seq_len=16, width=32, layers=2, heads=2, kv_heads=1, ffn=64))
    ids = torch.arange(17).remainder(5).repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        total, count = language_model_loss(model, (ids[:, :-1], ids[:, 1:]))
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    assert (total / count).item() < 0.1 < math.log(8)
    assert F.one_hot(model(ids[:, :-1]).argmax(-1), 8).equal(F.one_hot(ids[:, 1:], 8))
