"""Models of `transformers` that know nothing of this library, by their own plans: a Llama and a GPT-2 with random weights."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rankloom as rl
from closeness import error
from rankloom.parallel.tensor.apply import PLANS
from seeded import shaken
from split_model import expect_equals_plain

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(0, 39, (2, 12), generator=torch.Generator().manual_seed(5))
SEQUENCE = {"model.layers.0": "sequence_split", "model.layers.*.input_layernorm": "sequence_parallel", "model.norm": "sequence_parallel",
            "model.layers.*.post_attention_layernorm": "sequence_parallel"}
GPT2_SEQUENCE = {"transformer.drop": "sequence_split", "transformer.h.*.ln_1": "sequence_parallel",
                 "transformer.h.*.ln_2": "sequence_parallel", "transformer.ln_f": "sequence_parallel"}


@functools.cache
def llama(kv_heads: int = 4, tie: bool = False, vocab: int = 40, exact: bool = True, bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=kv_heads,
        max_position_embeddings=32, tie_word_embeddings=tie, attention_bias=bias, mlp_bias=bias, eos_token_id=2)).double()
    for name, module in list(model.named_modules()):
        if exact and type(module).__name__ == "LlamaRMSNorm":   # it rounds to fp32, whatever the model's dtype
            model.set_submodule(name, nn.RMSNorm(32, eps=module.variance_epsilon, dtype=torch.float64))
    return shaken(model)


@functools.cache
def gpt2(vocab: int = 40) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=vocab, n_embd=32, n_layer=2, n_head=8, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
                                     attn_pdrop=0.0, bos_token_id=0, eos_token_id=1)
    return shaken(transformers.GPT2LMHeadModel(config).double())


def run(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(TOKENS).logits
    return logits, F.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1, 1).flatten())


@pytest.mark.parametrize(("kv_heads", "tie"), [(8, False), (4, True), (2, False), (1, True)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_llama_is_split_by_its_own_plan(ranks, kv_heads, tie):
    expect_equals_plain(ranks, lambda: copy.deepcopy(llama(kv_heads, tie)), run)


def test_a_plan_may_name_layers_as_they_are_in_the_base_model():
    plan = llama().config.base_model_tp_plan
    assert all(pattern.startswith("layers.") for pattern in plan)
    expect_equals_plain(2, lambda: copy.deepcopy(llama()), run, plan=plan)
    with pytest.raises(rl.ConfigError, match="pattern 'layer.*.mlp.up_proj' matches no module of LlamaForCausalLM. Did you"):
        rl.simulate(2, lambda world: rl.tensor_parallel(copy.deepcopy(llama()), plan | {"layer.*.mlp.up_proj": "colwise"}, world))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_llama_is_split_by_tokens_too(ranks):
    make = lambda: copy.deepcopy(llama(2, bias=True))
    expect_equals_plain(ranks, make, run, plan=make().tp_plan | SEQUENCE)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gpt_2_with_its_fused_and_transposed_matrices_is_split(ranks):
    expect_equals_plain(ranks, lambda: copy.deepcopy(gpt2()), run)
    expect_equals_plain(ranks, lambda: copy.deepcopy(gpt2()), run, plan=PLANS["GPT2LMHeadModel"] | GPT2_SEQUENCE)


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_in_debug_mode_nothing_is_wrong_with_them(ranks, overlap, monkeypatch):
    monkeypatch.setenv("RANKLOOM_DEBUG", "1")
    models = [(lambda: llama(2), {}, SEQUENCE), (gpt2, PLANS["GPT2LMHeadModel"], GPT2_SEQUENCE)]
    make, plan, sequence = models[overlap % 2]
    for more in ({}, sequence):
        expect_equals_plain(ranks, lambda: copy.deepcopy(make()), run, plan=(plan or make().tp_plan) | more, overlap=overlap)


def test_biases_and_a_vocabulary_that_does_not_divide():
    expect_equals_plain(4, lambda: copy.deepcopy(llama(2, vocab=39, bias=True)), run)
    expect_equals_plain(4, lambda: copy.deepcopy(gpt2(vocab=39)), run)


def test_a_llama_as_it_comes_is_equal_up_to_the_rounding_of_its_norms():
    expect_equals_plain(2, lambda: copy.deepcopy(llama(exact=False)), run, rtol=1e-6)   # fp32 has 6e-8


def test_a_tied_head_alone_in_the_plan_takes_the_embedding_along():
    make = lambda: copy.deepcopy(llama(tie=True))
    plan = {name: word for name, word in make().tp_plan.items() if name != "model.embed_tokens"}
    expect_equals_plain(2, make, run, plan=plan)


def test_a_split_llama_writes_the_same_text():
    write = lambda model: model.generate(TOKENS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    truth = write(copy.deepcopy(llama(2)))
    for text in rl.simulate(4, lambda world: write(rl.tensor_parallel(copy.deepcopy(llama(2)), None, world))):
        assert torch.equal(text, truth)


def test_a_split_llama_trains_like_the_plain_one():
    def train(model):
        update = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(4):
            update.zero_grad()
            loss = run(model)[1]
            loss.backward()
            update.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    truth = train(copy.deepcopy(llama(2)))
    for losses in rl.simulate(4, lambda world: train(rl.tensor_parallel(copy.deepcopy(llama(2)), None, world))):
        assert error(losses, truth) < 1e-10   # Adam divides small gradients by their own size


OTHERS = {   # family -> what it takes beside the common numbers
    "Qwen3": dict(head_dim=4),    # norms inside heads
    "Gemma2": dict(head_dim=4),   # an embedding that scales, norms after the sums
    "Phi3": {},                   # fused matrices that its plan gathers
    "Olmo2": {},                  # norms over all heads
    "GPTNeoX": {},                # another fusing of heads, two biases
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2),                                            # matrices of experts
    "Qwen3Moe": dict(head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),           # a plan for dense layers too
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_are_split_by_the_plans_that_they_bring(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=39, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=2,
        max_position_embeddings=32, bos_token_id=0, eos_token_id=1, pad_token_id=2, **OTHERS[family])
    model = shaken(getattr(transformers, f"{family}ForCausalLM")(config).double().eval())
    model.set_experts_implementation("eager")   # torch multiplies groups in 32 bits at most
    for ranks in (2, 4):
        expect_equals_plain(ranks, lambda: copy.deepcopy(model), run, rtol=1e-6)   # their norms round to fp32, which has 6e-8


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_head_whose_query_and_gate_lie_in_a_row_is_never_cut(kv_heads):
    torch.manual_seed(0)
    make = lambda heads: shaken(transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=heads, head_dim=8, pad_token_id=0,
        num_key_value_heads=kv_heads, layer_types=["full_attention"], max_position_embeddings=32,
        attn_implementation="eager")).double().eval())
    model = make(4)
    for ranks in (2, 4):
        expect_equals_plain(ranks, lambda: copy.deepcopy(model), run, rtol=1e-6)   # their norms round to fp32, which has 6e-8
    odd = make(kv_heads * 3)
    with pytest.raises(rl.ConfigError, match=rf"{kv_heads * 3} query heads do not divide by 8 ranks, and a head is never cut"):
        rl.simulate(8, lambda world: rl.tensor_parallel(copy.deepcopy(odd), None, world))


def test_a_head_whose_query_key_and_value_lie_in_a_row_is_never_cut():
    model = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(
        vocab_size=8, hidden_size=24, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(rl.ConfigError, match=r"2 query heads do not divide by 3 ranks, and a head is never cut; choose tensor = 1 or 2"):
        rl.simulate(3, lambda world: rl.tensor_parallel(copy.deepcopy(model), None, world))
