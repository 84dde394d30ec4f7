"""A mixture of experts on one process: it is its formulas, and what looks at many tokens looks at their row only."""

import copy
import dataclasses
import json
import math
import types
from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rankloom.base.errors import ConfigError
from rankloom.base.loss import take_auxiliary_loss
from rankloom.models import moe
from rankloom.models.config import GPTConfig, MoEConfig, model_flops_per_token, parameter_count
from rankloom.models.gpt import GPT, initialize
from rankloom.models.moe import MoE, balance_loss, grouped_product, take_reported_auxiliary_loss, within_capacity
from rankloom.parallel.expert import expert_layers

RTOL = 1e-12   # fp64: the same terms in another order
SMALL = MoEConfig(experts=4, top_k=2, ffn=6, balance_loss=0.0)
TINY = GPTConfig(vocab_size=37, seq_len=12, width=16, layers=2, heads=4, kv_heads=2, ffn=24, moe=SMALL)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make_layer(width=5, **changes):
    layer = MoE(dataclasses.replace(SMALL, **changes), width).double()
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=number))
    return layer


def mlp_by_hand(x, gate, up, down):
    inner = gate @ x
    return down @ (inner * torch.sigmoid(inner) * (up @ x))


def kept_by_hand(chosen, config):
    """Who is kept of one row [T, k]: choice by choice, token by token, while there is room."""
    room, taken = math.ceil(Fraction(str(config.capacity)) * chosen.numel() / config.experts), [0] * config.experts
    kept = set()
    for choice in range(config.top_k):
        for token in range(len(chosen)):
            expert = int(chosen[token, choice])
            taken[expert] += 1
            if taken[expert] <= room:
                kept.add((token, choice))
    return kept


def layer_by_hand(layer, x):
    """Token by token, in plain formulas."""
    config, p = layer.config, dict(layer.named_parameters())
    rows = []
    for row in x:
        scores = torch.stack([(p["router.weight"] @ token).softmax(0) for token in row])
        chosen = torch.stack([s.argsort(descending=True)[:config.top_k] for s in scores])
        kept = kept_by_hand(chosen, config) if config.capacity else None
        out = []
        for at, token in enumerate(row):
            total = torch.zeros_like(token)
            whole = scores[at, chosen[at]].sum() if config.top_k > 1 else 1.0
            for choice, expert in enumerate(chosen[at].tolist()):
                if kept is None or (at, choice) in kept:
                    matrices = (p[f"experts.{name}"][expert] for name in ("gate", "up", "down"))
                    total = total + scores[at, expert] / whole * mlp_by_hand(token, *matrices)
            if config.shared:
                total = total + mlp_by_hand(token, *(p[f"shared.{name}.weight"] for name in ("gate", "up", "down")))
            out.append(total)
        rows.append(torch.stack(out))
    return torch.stack(rows)


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("capacity", [0.0, 0.5, 1.0])
def test_the_layer_is_its_formulas_forward_and_backward(top_k, shared, capacity):
    layer, x = make_layer(top_k=top_k, shared=shared, capacity=capacity), draw(3, 7, 5, seed=50)
    twin, grad = copy.deepcopy(layer), draw(3, 7, 5, seed=51)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    out, truth = layer(inputs[0]), layer_by_hand(twin, inputs[1])
    torch.testing.assert_close(out, truth, rtol=RTOL, atol=RTOL)
    out.backward(grad)
    truth.backward(grad)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=RTOL, atol=RTOL)
    for (name, mine), ref in zip(layer.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, torch.zeros_like(ref) if ref.grad is None else ref.grad, rtol=RTOL, atol=RTOL, msg=name)
    if capacity == 0.5:
        assert 0 < layer.dropped < layer.routed.sum() == 3 * 7 * top_k


@pytest.mark.parametrize("capacity", [1e30, 1.7e308])
def test_a_capacity_above_all_tokens_drops_none(capacity):
    chosen = torch.randint(0, SMALL.experts, (2, 9, 2), generator=torch.Generator().manual_seed(1))
    assert within_capacity(chosen, dataclasses.replace(SMALL, capacity=capacity)).all()


@pytest.mark.parametrize(("capacity", "length", "room"), [(1.1, 100, 11), (1.1, 200, 22), (2.2, 100, 22), (1.1, 50, 6)])
def test_a_capacity_is_the_decimal_number_that_was_written(capacity, length, room):
    """As a float, 1.1 is above 1.1: an expert would take one more."""
    chosen = torch.zeros(1, length, 1, dtype=torch.long)
    kept = within_capacity(chosen, dataclasses.replace(SMALL, experts=10, top_k=1, capacity=capacity))
    assert kept.sum() == room


def test_a_capacity_is_compiled_with_the_layer_for_any_length():
    torch._dynamo.reset()
    config = dataclasses.replace(SMALL, capacity=1.1)
    compiled = torch.compile(within_capacity, backend="eager", fullgraph=True, dynamic=True)
    for length in (8, 16, 24):
        chosen = draw(3, length, 4, seed=length).argsort(-1)[..., :2]
        assert torch.equal(compiled(chosen, config), within_capacity(chosen, config))
    torch._dynamo.reset()


def test_losses_add_up_for_who_takes_them_always_but_not_for_a_copy_nor_without_gradients():
    layer, x = make_layer(balance_loss=0.5), draw(2, 6, 5)
    layer(x)
    one = layer.take_auxiliary().item()
    layer.adds_up = True
    twin = copy.deepcopy(layer)
    for each in (layer, twin):
        for _ in range(3):
            each(x)
    with torch.no_grad():
        layer(x)
    assert layer.take_auxiliary().item() == pytest.approx(3 * one, rel=RTOL)
    assert twin.take_auxiliary().item() == pytest.approx(one, rel=RTOL)


@pytest.mark.parametrize("capacity", [0.25, 0.8, 1.0, 1.5])
def test_an_expert_takes_first_choices_before_second_ones_and_early_tokens_before_late_ones(capacity):
    config = dataclasses.replace(SMALL, capacity=capacity)
    chosen = torch.stack([draw(11, 4, seed=row).argsort(1)[:, :2] for row in range(5)])
    kept = within_capacity(chosen, config)
    for row in range(5):
        assert {tuple(at) for at in kept[row].nonzero().tolist()} == kept_by_hand(chosen[row], config)


def test_what_a_row_loses_does_not_depend_on_the_rows_beside_it():
    layer, x = make_layer(capacity=0.6, balance_loss=0.3, router_z_loss=0.1), draw(4, 9, 5, seed=60)
    whole, extra = layer(x), layer.auxiliary
    apart = [(layer(row[None])[0], layer.auxiliary) for row in x]
    torch.testing.assert_close(whole, torch.stack([out for out, _ in apart]), rtol=RTOL, atol=RTOL)
    torch.testing.assert_close(extra, sum(loss for _, loss in apart), rtol=RTOL, atol=RTOL)


@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 0, 5), (0, 0, 5)], ids=str)
@pytest.mark.parametrize("capacity", [0.0, 0.6])
def test_no_rows_and_rows_without_tokens_give_nothing_cost_nothing_and_have_gradients(shape, capacity):
    layer, x = make_layer(capacity=capacity, balance_loss=0.3, router_z_loss=0.1, shared=1), torch.zeros(shape, dtype=torch.float64)
    out = layer(x)
    assert out.shape == shape and layer.auxiliary.item() == 0.0
    (out.sum() + layer.auxiliary).backward()
    assert all(not param.grad.any() for param in layer.parameters() if param.grad is not None)


def test_outside_training_nothing_is_dropped_counted_or_charged():
    tight, wide = make_layer(capacity=0.5, balance_loss=0.5).eval(), make_layer().eval()
    x = draw(3, 7, 5)
    torch.testing.assert_close(tight(x), wide(x), rtol=0, atol=0)
    assert tight.routed is None and tight.dropped is None and tight.auxiliary is None
    assert not torch.equal(tight.train()(x), wide(x))


def test_an_old_loss_that_nobody_took_ends_with_an_evaluation_unless_losses_add_up():
    layer, x = make_layer(balance_loss=0.5), draw(2, 6, 5)
    for adds_up in (False, True):
        layer.adds_up = adds_up
        layer.train()(x)
        layer.eval()(x)
        assert (layer.take_auxiliary() is not None) == adds_up


def test_losses_that_were_taken_are_reported_once_as_a_sum_in_fp64_without_a_graph():
    layer, x, taken = make_layer(balance_loss=0.5).float(), draw(2, 6, 5).float(), []
    for _ in range(2):
        layer(x)
        taken.append(layer.take_auxiliary().item())
    told = take_reported_auxiliary_loss([layer, torch.nn.Identity()])
    assert told.dtype == torch.float64 and not told.requires_grad
    assert told.item() == pytest.approx(sum(taken), rel=2 ** -23) and take_reported_auxiliary_loss([layer]) is None


def test_counts_are_of_all_choices_and_of_those_that_were_dropped_and_add_up_over_forwards():
    layer, x = make_layer(capacity=0.5), draw(3, 7, 5)
    layer(x)
    routed, dropped, chosen = layer.routed, layer.dropped, layer.router(x).experts
    assert torch.equal(routed, chosen.flatten().bincount(minlength=4))
    assert dropped == chosen.numel() - sum(len(kept_by_hand(row, layer.config)) for row in chosen)
    layer(x)
    assert torch.equal(layer.routed, 2 * routed) and layer.dropped == 2 * dropped > 0


def test_all_tokens_to_one_expert_leave_the_others_a_gradient_of_zeros():
    layer, x = make_layer(top_k=1), draw(2, 6, 5).abs()
    with torch.no_grad():
        layer.router.weight.fill_(-1.0)[2].fill_(1.0)
    layer(x).sum().backward()
    assert layer.routed.tolist() == [0, 0, 12, 0]
    for name in ("gate", "up", "down"):
        grad = getattr(layer.experts, name).grad
        assert grad[2].abs().sum() > 0 and grad[[0, 1, 3]].abs().sum() == 0


def test_the_balance_loss_is_1_a_token_where_experts_are_used_alike_and_more_where_not():
    even = torch.arange(8).view(1, 8, 1) % 4
    assert balance_loss(even, torch.full((1, 8, 4), 0.25, dtype=torch.float64)).item() == 8.0
    one, sure = torch.zeros(1, 8, 1, dtype=torch.long), torch.tensor([1.0, 0, 0, 0]).expand(1, 8, 4)
    assert balance_loss(one, sure).item() == 8 * 4
    chosen, scores = draw(3, 7, 4).argsort(-1)[..., :2], draw(3, 7, 4, seed=1).softmax(-1)
    by_hand = sum((chosen[row] == expert).sum().double() * 4 / 14 * scores[row, :, expert].sum() for row in range(3) for expert in range(4))
    torch.testing.assert_close(balance_loss(chosen, scores), by_hand, rtol=RTOL, atol=0)


def test_auxiliary_losses_are_sums_over_tokens_and_belong_to_training_only():
    model, tokens = GPT(dataclasses.replace(TINY, moe=dataclasses.replace(SMALL, balance_loss=0.5, router_z_loss=0.25)),
                        dtype=torch.float64), torch.arange(24).view(2, 12)
    plain, count = model.eval()(tokens, targets=tokens)
    assert take_auxiliary_loss(model) is None and count == 24
    seen = {}
    for name, layer in expert_layers(model).items():
        layer.router.register_forward_hook(lambda _, args, choice, name=name: seen.update({name: choice}))
    total, _ = model.train()(tokens, targets=tokens)
    wanted = sum(0.5 * balance_loss(choice.experts, choice.scores) + 0.25 * choice.logsumexp.square().sum() for choice in seen.values())
    torch.testing.assert_close(total - plain, wanted, rtol=1e-10, atol=0)   # a difference of larger numbers
    assert take_auxiliary_loss(model) is None
    model(tokens)   # logits only, and nobody takes the losses
    assert model.eval()(tokens, targets=tokens)[0] == plain


def test_a_block_that_is_recomputed_is_counted_once_and_its_losses_too():
    config, tokens = dataclasses.replace(TINY, moe=dataclasses.replace(SMALL, balance_loss=0.5)), torch.arange(12)[None]
    model = GPT(config, dtype=torch.float64)
    twin = copy.deepcopy(model)
    for block in twin.blocks:
        plain = block.forward
        block.forward = lambda *args, plain=plain: checkpoint(plain, *args, use_reentrant=False)
    for each in (model, twin):
        each(tokens, targets=tokens)[0].backward()
    assert [layer.routed.sum().item() for layer in expert_layers(twin).values()] == [24, 24] and take_auxiliary_loss(twin) is None
    for mine, ref in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, ref.grad, rtol=RTOL, atol=RTOL)


@pytest.mark.parametrize("weights", [{"balance_loss": 0.5}, {"router_z_loss": 0.5}, {"balance_loss": 0.0}], ids=str)
def test_a_reentrant_checkpoint_would_leave_auxiliary_losses_untrained_and_is_refused(weights):
    layer, x = make_layer(**weights), draw(2, 6, 5).requires_grad_()
    total = checkpoint(layer, x, use_reentrant=True).sum()
    with pytest.raises(ConfigError, match="use_reentrant=False") if any(weights.values()) else nullcontext():
        total.backward()


def test_a_reentrant_checkpoint_is_fine_where_auxiliary_losses_train_nothing():
    layer, x, factor = make_layer(balance_loss=0.5), draw(2, 6, 5), torch.ones((), dtype=torch.float64, requires_grad=True)
    layer.router.requires_grad_(False)
    checkpoint(lambda x, factor: layer(x) * factor, x, factor, use_reentrant=True).sum().backward()
    assert factor.grad.isfinite()


def test_a_trial_run_leaves_losses_and_counts_as_they_were():
    layer, x = make_layer(capacity=0.5, balance_loss=0.5), draw(3, 7, 5)
    layer.adds_up = True
    layer(x)
    before = [layer.auxiliary, layer.routed, layer.dropped]
    with moe.uncounted(torch.nn.Sequential(layer)):
        layer(x)
    assert all(now is then for now, then in zip([layer.auxiliary, layer.routed, layer.dropped], before, strict=True))


def test_a_copy_of_a_layer_has_counted_nothing_and_has_no_losses_to_take_or_to_report():
    layer, x = make_layer(capacity=0.5, balance_loss=0.5), draw(3, 7, 5)
    layer(x)
    layer.take_auxiliary()
    layer(x)
    counts = lambda each: [each.auxiliary, each.reported_auxiliary, each.routed, each.dropped]
    assert counts(copy.deepcopy(layer)) == [None] * 4 and None not in counts(layer)


def test_a_copy_of_a_model_owes_no_auxiliary_losses():
    model, tokens = GPT(dataclasses.replace(TINY, moe=dataclasses.replace(SMALL, balance_loss=0.5))), torch.arange(12)[None]
    model(tokens)   # logits: the losses, with their graph, are not taken
    twin = copy.deepcopy(model)
    assert take_auxiliary_loss(model).requires_grad and take_auxiliary_loss(twin) is None
    assert all(layer.routed is None for layer in expert_layers(twin).values()) and torch.equal(twin(tokens), model(tokens))


def test_the_bias_changes_who_is_chosen_but_not_how_much_they_count():
    layer, x = make_layer(bias_rate=0.1), draw(2, 6, 5)
    before = layer.router(x)
    layer.router.bias += torch.tensor([0.0, 0, 0, 5.0])
    after = layer.router(x)
    assert (after.experts == 3).any(-1).all() and not (before.experts == 3).any(-1).all()
    torch.testing.assert_close(after.scores, before.scores, rtol=0, atol=0)
    chosen = after.scores.gather(-1, after.experts)
    torch.testing.assert_close(after.weights, chosen / chosen.sum(-1, keepdim=True), rtol=RTOL, atol=0)


def test_experts_that_a_bias_chooses_have_finite_weights_also_where_their_scores_underflow():
    layer, x = make_layer(bias_rate=0.1), torch.ones(1, 1, 5, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([400.0, 0, -1, 0])[:, None])   # logits 2000, 0, -5, 0: exp(-2000) is 0 in fp64
    layer.router.bias += torch.tensor([0.0, 5, 6, 0])
    choice = layer.router(x)
    assert choice.experts.flatten().tolist() == [2, 1] and choice.scores.flatten().tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(choice.weights.flatten(), torch.tensor([-5.0, 0], dtype=torch.float64).softmax(0), rtol=RTOL, atol=0)
    layer(x).sum().backward()
    assert x.grad.isfinite().all()


def test_the_bias_moves_towards_experts_with_few_tokens_and_stays_in_32_bits():
    layer = make_layer(bias_rate=0.001).to(torch.bfloat16)
    assert layer.router.weight.dtype == torch.bfloat16 and layer.router.bias.dtype == torch.float32
    assert make_layer(bias_rate=0.001).router.bias.dtype == torch.float64, "in an fp64 model"
    version = layer.router.bias._version
    for _ in range(2000):
        layer.rebalance(torch.tensor([10, 2, 6, 6]))
    assert layer.router.bias._version == version, "no running statistic, which ranks would average"
    torch.testing.assert_close(layer.router.bias, torch.tensor([-2.0, 2, 0, 0]), rtol=1e-4, atol=0)   # 2000 sums in fp32
    assert "router.bias" in layer.state_dict() and "router.bias" not in make_layer().state_dict()


def test_a_router_computes_in_32_bits_whatever_the_layer_does():
    layer = make_layer().to(torch.bfloat16)
    choice = layer.router(draw(1, 6, 5).to(torch.bfloat16))
    assert {choice.scores.dtype, choice.weights.dtype, choice.logsumexp.dtype} == {torch.float32}
    wanted = draw(1, 6, 5).to(torch.bfloat16).double() @ layer.router.weight.double().T
    torch.testing.assert_close(choice.scores.double(), wanted.softmax(-1), rtol=1e-5, atol=0)   # fp32
    assert layer(draw(1, 6, 5).to(torch.bfloat16)).dtype == torch.bfloat16
    layer, x = layer.float(), draw(1, 6, 5).float()
    with torch.autocast("cpu", torch.bfloat16):
        choice = layer.router(x)
    torch.testing.assert_close(choice, layer.router(x), rtol=0, atol=0)


def test_frozen_experts_stay_frozen_where_only_some_are_kept():
    layer = make_layer()
    layer.experts.up.requires_grad_(False)
    layer.experts.keep(1, 2)
    assert [p.requires_grad for p in (layer.experts.gate, layer.experts.up, layer.experts.down)] == [True, False, True]
    assert layer.experts.held == 2 and layer.experts.first == 1
    layer.experts.keep(1, 1)
    assert layer.experts.held == 1 and layer.experts.first == 2


def test_the_bias_evens_out_a_router_that_prefers_one_expert():
    layer, x = make_layer(top_k=1, bias_rate=0.02), draw(8, 32, 5)
    with torch.no_grad():
        layer.router.weight[1] += 1.5 * x.mean((0, 1)) / x.mean((0, 1)).norm()
    spread = []
    for _ in range(100):
        layer.routed = None
        layer(x)
        spread.append(layer.routed.max().item() / (8 * 32 / 4))
        layer.rebalance(layer.routed)
    assert spread[0] > 1.3 and max(spread[-10:]) < 1.2


def test_who_holds_which_experts_does_not_change_their_initial_weights():
    whole = GPT(TINY)
    for first in (0, 2):
        part = GPT(TINY, device="meta")
        for layer in expert_layers(part).values():
            layer.experts.keep(first, 2)
        initialize(part, seed=0, device="cpu")
        for (name, mine), ref in zip(part.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine, ref[first:first + 2] if ".experts." in name else ref), name


def test_biases_of_routers_start_at_0_whatever_lay_in_memory():
    torch.use_deterministic_algorithms(True)   # new memory is filled with NaN
    try:
        model = GPT(dataclasses.replace(TINY, moe=dataclasses.replace(SMALL, bias_rate=0.1)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(not layer.router.bias.any() for layer in expert_layers(model).values())


def test_outputs_of_experts_start_as_small_as_those_of_an_mlp():
    model = GPT(dataclasses.replace(TINY, width=64, layers=8, moe=MoEConfig(experts=4, ffn=64, shared=1)))
    p = dict(model.named_parameters())
    for name in ("experts.down", "shared.down.weight"):
        assert p[f"blocks.0.mlp.{name}"].std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert p["blocks.0.mlp.experts.gate"].std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(p["blocks.0.mlp.experts.gate"][0], p["blocks.0.mlp.experts.gate"][1])


@pytest.mark.parametrize("shared", [0, 1, 3])
def test_the_arithmetic_counts_the_parameters_and_only_the_work_of_chosen_experts(shared):
    config = dataclasses.replace(TINY, moe=dataclasses.replace(SMALL, shared=shared, bias_rate=0.1))
    assert parameter_count(config) == sum(p.numel() for p in GPT(config, device="meta").parameters())
    resting = 2 * 2 * 3 * 16 * 6   # two layers, two experts that a token does not go through
    assert model_flops_per_token(config, 0) == 6 * (parameter_count(config) - resting)


def test_a_shape_with_experts_is_read_back_from_json():
    assert GPTConfig(**json.loads(json.dumps(dataclasses.asdict(TINY)))) == TINY


def test_a_small_mixture_learns_a_pattern():
    model = GPT(dataclasses.replace(TINY, moe=dataclasses.replace(SMALL, ffn=16, balance_loss=0.01)))
    optimizer, tokens = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.arange(48).view(4, 12) % 5
    for _ in range(60):
        total, count = model(tokens[:, :-1], targets=tokens[:, 1:])
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert total / count < 0.1


def test_the_grouped_kernel_gives_what_the_loop_gives(monkeypatch):
    rows, matrices, counts = draw(20, 16, dtype=torch.bfloat16), draw(4, 8, 16, seed=1, dtype=torch.bfloat16), torch.tensor([7, 0, 12, 1])
    grad = draw(20, 8, seed=2, dtype=torch.bfloat16)
    found = []
    for kernel in (False, True):
        monkeypatch.setattr(moe, "_has_kernel", lambda *_, kernel=kernel: kernel)
        leaves = [rows.clone().requires_grad_(), matrices.clone().requires_grad_()]
        try:
            out = grouped_product(*leaves, counts)
        except (RuntimeError, AttributeError) as error:   # torch before 2.10 has it for GPUs only
            pytest.skip(f"this torch has no grouped kernel for the CPU: {error}")
        out.backward(grad)
        found.append([out.detach().double(), *(leaf.grad.double() for leaf in leaves)])
    torch.testing.assert_close(found[1], found[0], rtol=2 ** -7, atol=2 ** -7)   # one rounding of bf16


@pytest.mark.parametrize(("capability", "has"), [((8, 0), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_the_grouped_kernel_is_used_where_its_gradients_are_right(capability, has, monkeypatch):
    """On Blackwell those of experts without rows are not zero (pytorch issue 172439)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    rows = types.SimpleNamespace(device=types.SimpleNamespace(type="cuda"), dtype=torch.bfloat16)
    assert moe._has_kernel(rows, torch.empty(4, 8, 16)) == has


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_layer_of_the_cpu():
    layer, x = make_layer(width=16).double(), draw(2, 8, 16)
    layer.experts = moe.Experts(dataclasses.replace(SMALL, ffn=24), 16).double()
    with torch.no_grad():
        for number, parameter in enumerate(layer.experts.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=number) / 4)
    narrow = copy.deepcopy(layer).to("cuda", torch.bfloat16)
    choice = layer.router(x)
    narrow.router.forward = lambda _: moe.Choice(*(t.cuda() for t in choice))   # a rounded score sends a token elsewhere
    torch.testing.assert_close(narrow(x.cuda().to(torch.bfloat16)).double().cpu(), layer(x), rtol=2 ** -4, atol=2 ** -4)


@pytest.mark.parametrize(("field", "value"), [("experts", 0), ("top_k", True), ("ffn", 1.5), ("shared", -1)])
def test_sizes_that_are_none_are_refused(field, value):
    with pytest.raises(ConfigError, match=rf"model.moe.{field} is {value!r}; it must be a whole number"):
        MoEConfig(**{field: value})


def test_more_choices_than_experts_and_weights_below_0_are_refused():
    with pytest.raises(ConfigError, match="top_k = 3, but there are 2 experts"):
        MoEConfig(experts=2, top_k=3)
    assert MoEConfig(experts=2, top_k=2).top_k == 2
    for field in ("capacity", "balance_loss", "router_z_loss", "bias_rate"):
        with pytest.raises(ConfigError, match=f"model.moe.{field} = nan; it must be 0 or more"):
            MoEConfig(**{field: math.nan})
