"""Multi-head latent attention (DeepSeek-V2 and its kin), by the plans of `transformers`: latents whole, heads cut, and the one rotated key
that all heads of all ranks read."""

import copy
import functools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rankloom as rl
from closeness import error
from rankloom.base.cost import all_reduce_bill
from rankloom.base.errors import ConfigError
from seeded import seeded, shaken
from split_model import expect_equals_plain

TOKENS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(5))
PLAN = {"kv_a_proj": "mla_kv_a_proj", "kv_b": "colwise", "q": "colwise", "out": "rowwise"}


class Latent(nn.Module):
    """The attention alone: 4 heads, whose queries have 5 features, of which 2 are rotated, and whose values have 3; 6 latents."""

    def __init__(self, heads: int = 4, rotated: int = 2, **told):
        super().__init__()
        vars(self).update({"num_heads": heads, "qk_rope_head_dim": rotated, "rotated": rotated} | told)
        self.q, self.kv_a_proj = nn.Linear(6, heads * (3 + rotated)), nn.Linear(6, 6 + rotated)
        self.norm, self.kv_b, self.out = nn.RMSNorm(6), nn.Linear(6, heads * (3 + 3), bias=False), nn.Linear(heads * 3, 6)

    def forward(self, x):
        latent, rotated = self.kv_a_proj(x).split([6, self.rotated], dim=-1)
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        keys, values = self.kv_b(self.norm(latent)).unflatten(-1, (self.num_heads, 6)).transpose(1, 2).split(3, dim=-1)
        k = torch.cat([keys, rotated.sin().unsqueeze(1).expand(-1, self.num_heads, -1, -1)], dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, values, is_causal=True).transpose(1, 2).flatten(2))


@seeded(3)
def latent(**told) -> nn.Module:
    return shaken(Latent(**told).double())


def run_alone(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    loss = (model(x) ** 2).sum()
    return torch.autograd.grad(loss, x, retain_graph=True)[0], loss   # the input's too


@pytest.mark.parametrize("debug", ["0", "1"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_heads_may_be_of_another_width_in_each_matrix(ranks, debug, monkeypatch):
    monkeypatch.setenv("RANKLOOM_DEBUG", debug)
    expect_equals_plain(ranks, latent, run_alone, plan=PLAN)
    expect_equals_plain(ranks, latent, run_alone, plan=PLAN, overlap=2)
    expect_equals_plain(ranks, partial(latent, rotated=0), run_alone, plan=PLAN)   # as in GLM-5
    expect_equals_plain(ranks, partial(latent, head_dim=2), run_alone, plan=PLAN)   # of the rotated part, as the configs of that family say


def test_beside_the_sums_of_its_entrances_backward_sums_the_rotated_features_alone():
    def body(world):
        model, seen = rl.tensor_parallel(latent(), PLAN, world), world.ledger.bytes
        x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
        y = model(x)
        after = world.ledger.bytes
        y.sum().backward()
        return after - seen, world.ledger.bytes - after

    bill = lambda width: all_reduce_bill(3 * 4 * width * 8, 2).sent
    assert rl.simulate(2, body) == [(bill(6), bill(6) + bill(6) + bill(2))] * 2   # out; queries, latents, rotated keys


@pytest.mark.parametrize(("make", "plan", "ranks", "said"), [
    (latent, PLAN | {"kv_a_proj": "replicate"}, 2, "kv_a_proj .* say mla_kv_a_proj for it"),
    (latent, PLAN, 3, "the model: 4 query heads do not divide by 3 ranks, .* choose tensor = 1, 2 or 4"),
    (partial(latent, qk_rope_head_dim=None), PLAN, 2, "kv_a_proj: .* qk_rope_head_dim"),
    (partial(latent, qk_rope_head_dim=9), PLAN, 2, "kv_a_proj: .* 8 features, .* qk_rope_head_dim=9"),
    (partial(latent, num_heads=None), PLAN, 2, "the model does not say how many heads it has; give it num_heads"),
    (partial(latent, num_heads=7), PLAN, 2, "the model: 24 features are not equally many for each of 7 heads"),
    (latent, PLAN | {"norm": "mla_kv_a_proj"}, 2, "norm: mla_kv_a_proj .* RMSNorm"),
])
def test_latent_attention_that_cannot_be_split_is_refused_with_the_reason(make, plan, ranks, said):
    with pytest.raises(ConfigError, match=said):
        rl.simulate(ranks, lambda world: rl.tensor_parallel(make(), plan, world))


def test_latents_are_not_split_by_tokens():
    model = nn.Sequential(nn.RMSNorm(6), Latent()).double()
    plan = {f"1.{name}": word for name, word in PLAN.items()} | {"0": "sequence_parallel", "1": "sequence_split"}
    with pytest.raises(ConfigError, match="1.kv_a_proj: mla_kv_a_proj wants whole tokens, but the norms of this plan are sequence_"):
        rl.simulate(2, lambda world: rl.tensor_parallel(copy.deepcopy(model), plan, world))


# ------------------------------------------------------------------ models of transformers

SIZES = dict(vocab_size=40, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=8,
             num_key_value_heads=8, kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=10, max_position_embeddings=32,
             n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=2, bos_token_id=0, eos_token_id=1, pad_token_id=2)
MLP = {"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
GROUPS = dict(n_group=2, topk_group=1)
ATTENTION = {"layers.*.self_attn.q_b_proj": "colwise", "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
             "layers.*.self_attn.kv_b_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}


@functools.cache
@seeded(0)
def deepseek(family: str, dense: int = 2, exact: bool = True, **more) -> nn.Module:
    """A tiny one, of 2 layers, of which `dense` have no experts. exact: with norms in the model's dtype, where its own round to fp32"""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**SIZES | dict(q_lora_rank=16, first_k_dense_replace=dense) | more)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    model.set_experts_implementation("eager")   # torch multiplies groups in 32 bits at most
    for name, module in list(model.named_modules()):
        if exact and type(module).__name__ == f"{family}RMSNorm":
            model.set_submodule(name, nn.RMSNorm(len(module.weight), eps=module.variance_epsilon, dtype=torch.float64))
    return shaken(model)


@pytest.fixture
def exact_rotation(monkeypatch):
    """DeepSeek-V2 rotates in fp32, whatever the model's dtype: the same in fp64."""
    module = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")

    def rotated(x, turns):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns.unsqueeze(1)).flatten(3)

    monkeypatch.setattr(module, "apply_rotary_emb", lambda q, k, turns: (rotated(q, turns), rotated(k, turns)))


def run(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(TOKENS).logits
    return logits, F.cross_entropy(logits.flatten(0, 1), TOKENS.roll(-1, 1).flatten())


@pytest.mark.parametrize("more", [{}, {"q_lora_rank": None}, {"attention_bias": True}], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_deepseek_v2_is_split_by_its_own_plan(ranks, more, exact_rotation):
    assert "mla_kv_a_proj" in deepseek("DeepseekV2", **more).tp_plan.values()
    expect_equals_plain(ranks, lambda: copy.deepcopy(deepseek("DeepseekV2", **more)), run)


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_deepseek_v3_is_split_by_its_own_plan_and_by_one_that_names_its_attention_too(ranks, interleave):
    make = lambda: copy.deepcopy(deepseek("DeepseekV3", rope_interleave=interleave, **GROUPS))
    expect_equals_plain(ranks, make, run)   # that says nothing of attention, which stays whole
    expect_equals_plain(ranks, make, run, plan=MLP | ATTENTION)


@pytest.mark.parametrize("ranks", [2, 4])
def test_in_debug_mode_nothing_is_wrong_with_them(ranks, exact_rotation, monkeypatch):
    monkeypatch.setenv("RANKLOOM_DEBUG", "1")
    expect_equals_plain(ranks, lambda: copy.deepcopy(deepseek("DeepseekV2")), run)
    make = lambda: copy.deepcopy(deepseek("DeepseekV3", **GROUPS))
    expect_equals_plain(ranks, make, run, plan=MLP | ATTENTION)


OTHERS = {   # family -> what it takes beside the common numbers
    "DeepseekV2": {},
    "DeepseekV3": GROUPS,
    "Glm4MoeLite": GROUPS,
    "MiniCPM3": {},
    "LongcatFlash": dict(num_layers=2, ffn_hidden_size=48, expert_ffn_hidden_size=16, zero_expert_num=2, moe_topk=3, head_dim=4),
}


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_with_experts_and_in_other_families_it_is_equal_up_to_what_they_round_to_fp32(ranks, family):
    """Norms, routers and rotations, whatever the model's dtype."""
    expect_equals_plain(ranks, lambda: copy.deepcopy(deepseek(family, 1, exact=False, **OTHERS[family])), run, rtol=1e-6)


def test_a_split_deepseek_v2_writes_the_same_text():
    write = lambda model: model.generate(TOKENS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    truth = write(copy.deepcopy(deepseek("DeepseekV2")))   # with a cache of latents, the same on all ranks
    for text in rl.simulate(2, lambda world: write(rl.tensor_parallel(copy.deepcopy(deepseek("DeepseekV2")), None, world))):
        assert torch.equal(text, truth)


@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3"])
@pytest.mark.parametrize("mesh", [rl.Mesh(tensor=2), rl.Mesh(tensor=2, shard=2)], ids=str)
def test_an_engine_trains_them_like_one_process(mesh, family, exact_rotation):
    def loss(model, batch):
        return F.cross_entropy(model(batch).logits.flatten(0, 1), batch.roll(-1, 1).flatten(), reduction="sum"), batch.numel()

    more = GROUPS if family == "DeepseekV3" else {}

    def body(world):
        engine = rl.prepare(copy.deepcopy(deepseek(family, **more)), loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1), world=world,
                            clip=0.5)
        mine = TOKENS.tensor_split(engine.group.size)[engine.group.rank]
        return torch.tensor([(report.loss, report.grad_norm) for report in (engine.step(mine) for _ in range(3))], dtype=torch.float64)

    truth = rl.simulate(1, body)[0]
    for found in rl.simulate(mesh, body):
        assert error(found, truth) < 1e-12
