"""Recompute: the same bits with fewer bytes, whatever is drawn, averaged, shared or frozen inside a block."""

import copy
from dataclasses import asdict, replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rankloom as rl
from gradients import expect_equal, gradients
from rankloom.models.config import GPTConfig, MoEConfig
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss
from rankloom.parallel.sections.wrapping import repeated_blocks
from rankloom.train import recompute as module
from rankloom.train.blocks.budget import CHOICES, NONE, BlockCost
from rankloom.train.blocks.forward_cost import Trace
from rankloom.train.blocks.wrap import blocks_of
from rankloom.train.dropout import DropoutKey, key_dropout
from rankloom.train.recompute import recompute
from seeded import seeded

CONFIG = GPTConfig(vocab_size=37, seq_len=32, width=32, layers=4, heads=4, kv_heads=2, ffn=96, dropout=0.2)
POLICIES = ["full", "selective", "800 KiB"]     # the last is a mixture for CONFIG in fp64, as the test of the plan shows


def tokens(rows=2, seed=0):
    ids = torch.randint(0, 37, (rows, 33), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def prepared(policy, dtype=torch.float64, config=CONFIG, **more):
    """A model with keyed dropout and recompute, its key, and what recompute returned."""
    model, key = GPT(config, dtype=dtype), DropoutKey(5)
    key_dropout(model, key)
    return model, key, recompute(model, policy, **more)


def train(policy, dtype=torch.float64, steps=2, config=CONFIG):
    """Losses and gradients of some micro-batches, one after the other."""
    model, key, _ = prepared(policy, dtype, config)
    losses = []
    for step in range(steps):
        key.set_rows(step, range(1))
        loss, _ = language_model_loss(model, tokens(seed=step))
        loss.backward()
        losses.append(loss.item())
    return losses, gradients(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", POLICIES)
def test_losses_and_gradients_are_the_same_bits(policy, dtype):
    policy = 100_000 * dtype.itemsize if policy == "800 KiB" else policy
    (losses, grads), (wanted, reference) = train(policy, dtype), train("none", dtype)
    assert losses == wanted
    expect_equal(grads, reference)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_runs_again_with_the_masks_of_its_own_micro_batch_whichever_is_current(policy):
    """Two micro-batches in flight, as in a pipeline: both forwards, then both backwards, first in first out."""
    def run(policy):
        model, key, _ = prepared(policy)
        for step in range(2):                       # in the second step a mixture is decided
            losses = []
            for micro in (3, 4):
                key.set_rows(step, range(micro, micro + 1))
                losses.append(language_model_loss(model, tokens(seed=micro))[0])
            key.set_rows(step, range(99, 100))
            for loss in losses:
                loss.backward()
        return gradients(model)

    expect_equal(run(policy), run("none"))


@pytest.mark.parametrize("policy", POLICIES)
def test_after_backward_the_dropout_key_is_as_it_was(policy):
    model, key, _ = prepared(policy)
    key.set_rows(1, range(2, 3))
    loss, _ = language_model_loss(model, tokens())
    key.set_rows(7, range(8, 9))
    key.calls["elsewhere"] = 3
    loss.backward()
    assert (key.step, key.rows, key.calls) == (7, range(8, 9), {"elsewhere": 3})


class CheckpointsItself(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)), reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def expect_full_only(model, x, refusal):
    """A number of bytes is refused in a forward, and with "full" the gradients are those without recompute."""
    budgeted, full = copy.deepcopy(model), copy.deepcopy(model)
    recompute(budgeted, "1 MiB")
    with pytest.raises(rl.ConfigError, match=refusal):
        budgeted(x).sum().backward()
    recompute(full, "full")
    for each in (model, full):
        each(x).sum().backward()
    expect_equal(gradients(full), gradients(model))


@pytest.mark.parametrize("reentrant", [False, True])
def test_bytes_for_a_model_that_checkpoints_its_own_blocks_are_refused_and_full_is_not(reentrant):
    model, x = seeded(0)(lambda: CheckpointsItself(reentrant))(), torch.ones(2, 6, requires_grad=True)
    expect_full_only(model, x, "blocks.. is called inside of torch.utils.checkpoint")


class CallsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.bend = nn.Linear(6, 6), nn.Tanh()

    def forward(self, x, depth=2):
        x = self.bend(self.linear(x))
        return x + self(x, depth - 1) if depth else x


def test_bytes_for_blocks_that_call_themselves_are_refused_by_that_name_and_full_is_not():
    model, x = seeded(0)(lambda: nn.Sequential(CallsItself(), CallsItself()))(), torch.ones(2, 6)
    expect_full_only(model, x, '0 is called inside of torch.utils.checkpoint, or by itself.*take recompute="full"')


class Drawing(nn.Module):
    """A block that draws from torch's own generator, is used twice, and averages running statistics."""

    def __init__(self, width=6):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3)

    def forward(self, x, *, gain=1.0):
        return x + gain * self.drop(F.dropout(torch.tanh(self.norm(self.linear(x))), 0.4))


class Looping(nn.Module):
    def __init__(self, frozen=False):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Drawing() for _ in range(2))
        self.blocks[0].requires_grad_(not frozen)

    def forward(self, x):
        x = self.first(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x, gain=0.5)
        return x.square().sum()


def looping(policy, frozen=False, autocast=False):
    torch.manual_seed(0)
    model, key = Looping(frozen), DropoutKey(1)
    key_dropout(model, key)
    found = recompute(model, policy)
    torch.manual_seed(11)
    for step in range(3):
        key.set_rows(step, range(1))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(torch.linspace(-1, 1, 48).view(8, 6))
        loss.backward()
    return gradients(model), {name: b.clone() for name, b in model.named_buffers()}, torch.rand(3), found


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("policy", ["full", "selective", "3 KiB"])
def test_torch_s_draws_running_statistics_two_uses_and_frozen_blocks_change_nothing(policy, frozen, autocast):
    grads, buffers, drawn, _ = looping(policy, frozen, autocast)
    wanted, averages, then, _ = looping("none", frozen, autocast)
    expect_equal(grads, wanted)
    expect_equal(buffers, averages)
    assert torch.equal(drawn, then), "the generator goes on where it would have been"


class Remembering(nn.Module):
    """A block whose forward reads a buffer that it has changed, in a way of its own."""

    def __init__(self, way):
        super().__init__()
        self.way, self.linear = way, nn.Linear(6, 6)
        if way == "spectral norm":
            self.linear = nn.utils.parametrizations.spectral_norm(self.linear)
        if way == "old spectral norm":
            self.linear = nn.utils.spectral_norm(self.linear)
        self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))   # `double` would part the two names
        self.twin = nn.Identity()
        if way == "under two names":
            self.twin.register_buffer("mean", self.mean)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("first", None)

    def forward(self, x):
        h = self.linear(x)
        if self.way in ("running mean", "under two names"):
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        if self.way == "counter":
            self.steps += 1
        if self.way == "written through data" and self.training:
            self.mean.data.lerp_(h.detach().mean(0), 0.5)
        if self.way == "put in its place":
            self.mean = self.mean.detach() * 0.9 + h.detach().mean(0)
        if self.way == "set at first":
            self.first = h.detach().mean(0) if self.first is None else self.first * 2
        mean = self.twin.mean if self.way == "under two names" else self.mean
        return x + torch.tanh((h - mean) * (1 + self.mean.detach()) / (1 + self.steps) * (1 if self.first is None else self.first))


WAYS = ["spectral norm", "old spectral norm", "running mean", "counter", "written through data", "put in its place", "set at first",
        "under two names"]


def trained_remembering(way, policy, evaluated=False):
    """Gradients and buffers after three forwards, of which two wait for their backward at the same time. evaluated: after an evaluation"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ModuleList(Remembering(way) for _ in range(3))).double()
    recompute(model, policy)
    if evaluated:
        model[1][1](model[1].eval()[0](torch.ones(1, 6, dtype=torch.float64))).sum().backward()
        model.train().zero_grad()
    waiting = []
    for seed in range(3):
        x = model[0](torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
        for block in model[1]:
            x = block(x)
        waiting.append(x.square().sum())
        if seed != 1:   # two are waiting after the second
            for loss in waiting:
                loss.backward()
            waiting.clear()
    return gradients(model), {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", ["full", "selective", "1 GiB", "4 KiB"])
def test_a_buffer_that_a_block_changes_and_reads_is_what_it_was_where_the_block_runs_again_and_changes_once(policy, way):
    (grads, buffers), (wanted, reference) = trained_remembering(way, policy), trained_remembering(way, "none")
    expect_equal(grads, wanted)
    expect_equal(buffers, reference)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_buffer_that_training_alone_changes_is_what_it_was_also_where_an_evaluation_came_first(policy):
    found, wanted = (trained_remembering("written through data", each, evaluated=True) for each in (policy, "none"))
    expect_equal(found[0], wanted[0])
    expect_equal(found[1], wanted[1])


class Normed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.BatchNorm1d(6))


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_statistics_that_were_frozen_in_the_first_forward_change_once_later(policy):
    def run(policy):
        torch.manual_seed(0)
        model = nn.ModuleList(Normed() for _ in range(2))
        recompute(model, policy)
        for frozen in (True, False):
            for block in model:
                block[1].train(not frozen)
            model[1](model[0](torch.randn(4, 6))).square().sum().backward()
        return dict(model.named_buffers())

    expect_equal(run(policy), run("none"))


def test_a_block_used_twice_is_counted_twice(monkeypatch):
    costs, cost = [], module._cost
    monkeypatch.setattr(module, "_cost", lambda *call: costs.append(cost(*call)) or costs[-1])
    found = looping("100 KiB")[3]
    once = costs[0].kept[NONE]
    assert [d.kept for d in found.plan.decisions] == [2 * once, 2 * once]


@pytest.mark.parametrize("policy", POLICIES)
def test_evaluation_without_gradients_keeps_nothing_and_runs_once(policy):
    model, _, found = prepared(policy)
    plain, _, _ = prepared("none")
    calls = []
    model.blocks[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        assert torch.equal(model(tokens()[0]), plain(tokens()[0]))
    with torch.inference_mode():
        model(tokens()[0])
    assert len(calls) == 2 and found.plan is None


def kept_by(policy, layers, dtype=torch.float32):
    """Bytes that autograd holds between forward and backward, whoever holds them for it; in the second micro-batch."""
    config = GPTConfig(vocab_size=37, seq_len=32, width=32, layers=layers, heads=4, kv_heads=2, ffn=96, dropout=0.2)
    model, _, _ = prepared(policy, dtype, config)
    language_model_loss(model, tokens())[0].backward()
    with Trace() as trace:
        loss, _ = language_model_loss(model, tokens())
    return trace.kept(loss)


def test_full_keeps_two_bytes_for_each_element_of_a_block_s_input_in_bf16():
    """2sbh, Korthikanti et al. 2022, Table 2, exactly: what one more block adds."""
    assert kept_by("full", 3, torch.bfloat16) - kept_by("full", 2, torch.bfloat16) == 2 * 32 * 2 * 32


def test_selective_keeps_inputs_products_and_attention_and_nothing_else():
    """One more block in fp32: its input, query, key and value (2 of 4 heads), attention and its logsumexp, the output
    matrix, gate, up and down."""
    elements = 2 * 32 * (32 + 32 + 16 + 16 + 32 + 4 + 32 + 96 + 96 + 32)
    assert kept_by("selective", 3) - kept_by("selective", 2) == 4 * elements


@pytest.mark.parametrize("budget", [220_000, 300_000, 400_000, 600_000])
def test_a_number_of_bytes_is_kept_to_and_used(budget):
    """Measured over the whole model: what is kept beyond `full` is at most what the plan says, and it is what the plan says."""
    model, _, found = prepared(budget, torch.float32)
    language_model_loss(model, tokens())[0].backward()
    with Trace() as trace:
        loss, _ = language_model_loss(model, tokens())
    more = trace.kept(loss) - kept_by("full", 4)
    inputs = 4 * 4 * 2 * 32 * 32
    assert sum(d.kept for d in found.plan.decisions) == more + inputs <= found.plan.peak <= budget


def test_the_plan_is_decided_in_the_first_backward_and_says_so():
    model, _, found = prepared("800 KiB")
    assert str(found).splitlines() == [f"blocks.{i}  undecided" for i in range(4)]
    loss, _ = language_model_loss(model, tokens())
    assert found.plan is None
    loss.backward()
    assert [d.block for d in found.plan.decisions] == [f"blocks.{i}" for i in range(4)]
    assert len({d.choice for d in found.plan.decisions}) > 1
    assert str(found) == str(found.plan) and "800 KiB" in str(found)


def test_a_forward_that_never_had_a_backward_is_not_counted():
    model, _, found = prepared("10 MiB")
    for _ in range(3):
        language_model_loss(model, tokens())
    language_model_loss(model, tokens())[0].backward()
    alone = prepared("10 MiB")
    language_model_loss(alone[0], tokens())[0].backward()
    assert found.plan == alone[2].plan


def test_too_few_bytes_are_told_in_the_first_backward():
    model, _, _ = prepared(1000)
    loss, _ = language_model_loss(model, tokens())
    with pytest.raises(rl.ConfigError, match="recompute = 1000 bytes: the activations of 4 blocks need .* micro-batches"):
        loss.backward()


def test_hooks_on_a_block_run_once_and_those_inside_it_again():
    model, _, _ = prepared("full")
    seen = []
    model.blocks[1].register_forward_pre_hook(lambda *_: seen.append("block"))
    model.blocks[1].attention.register_forward_pre_hook(lambda *_: seen.append("inside"))
    language_model_loss(model, tokens())[0].backward()
    assert seen == ["block", "inside", "inside"]


@pytest.mark.parametrize("words", ["tp_plan", "tp_sequence_plan"])
def test_a_product_whose_sum_over_ranks_is_made_in_its_place_is_handed_out_as_it_was(words):
    def body(world, policy):
        model = GPT(replace(CONFIG, dropout=0.0), dtype=torch.float64)
        rl.tensor_parallel(model, getattr(model, words), world)
        recompute(model, policy)
        language_model_loss(model, tokens())[0].backward()
        return gradients(model)

    for got, wanted in zip(*(rl.simulate(2, partial(body, policy=policy)) for policy in ("selective", "none")), strict=True):
        expect_equal(got, wanted)


def test_selective_computes_no_product_again():
    def products(policy):
        model, _, _ = prepared(policy, torch.float32)
        loss, _ = language_model_loss(model, tokens())
        with Trace() as trace:
            loss.backward()
        return trace.product_work

    assert products("selective") == products("none") < products("full")


def test_selective_learns_in_the_first_backward_that_the_last_product_is_not_asked_for():
    """Without dropout nothing after the last product saves a thing: of eight products and attention, seven and attention stay."""
    config = GPTConfig(vocab_size=37, seq_len=32, width=32, layers=3, heads=4, kv_heads=2, ffn=96)
    model, _, _ = prepared("selective", torch.float32, config)
    held = []
    for _ in range(2):
        with Trace() as trace:
            loss, _ = language_model_loss(model, tokens())
        held.append(trace.kept(loss))
        loss.backward()
    assert held[0] - held[1] == config.layers * 4 * 2 * 32 * 32


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_held_after_backward_or_when_a_forward_is_dropped(policy):
    model, _, _ = prepared(policy)
    language_model_loss(model, tokens())[0].backward()
    for backward in (True, False):
        with Trace() as trace:
            loss = language_model_loss(model, tokens())[0]
            if backward:
                loss.backward()
            del loss
        assert trace.kept(None) == 0


class Changing(nn.Module):
    """A block that writes into the outputs of its products, and whose output is written into by its caller."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        hidden = self.second(self.first(x).add_(0.25).relu_())
        return self.first(hidden.mul_(3.0).tanh_() + x)


class Gated(nn.Module):
    """A block with products into memory that is there already, and one that is written over."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        with torch.no_grad():
            room = torch.empty_like(x)
            gate = torch.mm(x, self.first.weight, out=room).clone()
            torch.mm(x, self.second.weight, out=room)
            more = torch.mm(x, self.first.weight)
            gate = torch.sigmoid(gate + room + more)
            torch.add(x, x, out=more)
        return self.second(torch.tanh(self.first(x)) * gate)


class Giving(nn.Module):
    """A block whose output is a product that its caller writes into; tanh saves what it made, not the product."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x):
        out = self.first(x)
        return out, self.second(torch.tanh(out)).sum()


def test_a_product_that_is_given_away_is_computed_again():
    def run(policy):
        torch.manual_seed(0)
        block = Giving()
        recompute(nn.ModuleList([block]), policy, blocks=(Giving,))
        out, total = block(torch.linspace(-1, 1, 12).view(3, 4).requires_grad_())
        (out.mul_(7).square().sum() + total).backward()
        return gradients(block)

    expect_equal(run("selective"), run("none"))


@pytest.mark.parametrize("kind", [Changing, Gated])
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_products_that_are_written_into_are_computed_again(policy, kind):
    def run(policy):
        torch.manual_seed(0)
        model = nn.ModuleList(kind() for _ in range(2))
        recompute(model, policy)
        for _ in range(2):
            x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
            for block in model:
                x = block(x).mul_(2)
            x.square().sum().backward()
        return gradients(model)

    expect_equal(run(policy), run("none"))


class Shifting(nn.Module):
    """Works in place on what it is given, of which no product needs the old value."""

    def __init__(self):
        super().__init__()
        self.shift, self.layers = nn.Parameter(torch.ones(8)), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x):
        x = x if isinstance(x, torch.Tensor) else x[0]
        x += self.shift
        return self.layers(x)


@pytest.mark.parametrize("policy", ["full", "selective", "1 MiB"])
@pytest.mark.parametrize("call", [
    lambda block, x: block(x), lambda block, x: block(x=x), lambda block, x: block((x, None)), lambda block, x: block([x]),
    lambda block, x: block(x={0: x}),
], ids=["by place", "by name", "in a tuple", "in a list", "in a dict"])
def test_an_input_that_the_block_changes_is_an_error_that_names_it(policy, call):
    """The block would run again with the changed one."""
    blocks = nn.ModuleList(Shifting() for _ in range(2))
    recompute(blocks, policy)
    with pytest.raises(rl.ConfigError, match=r"the forward of a Shifting changes its argument \d, a tensor of shape \[3, 8\], in place"):
        call(blocks[0], torch.ones(3, 8))


def test_the_cache_of_a_model_is_turned_off_with_the_first_block_that_is_computed_again():
    model = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    model.config = SimpleNamespace(use_cache=True)
    recompute(model, "none")
    assert model.config.use_cache
    recompute(model, "full")
    assert not model.config.use_cache


@pytest.mark.parametrize("policy", ["full", "selective", "1 MiB"])
def test_a_block_that_appends_to_a_cache_is_not_computed_again(policy):
    """It appended a second time, in backward: an error about the metadata of saved tensors."""
    transformers = pytest.importorskip("transformers")
    model = transformers.MambaForCausalLM(transformers.MambaConfig(
        vocab_size=8, hidden_size=8, state_size=4, num_hidden_layers=2, time_step_rank=2, pad_token_id=0))
    recompute(model, policy)
    tokens = torch.arange(6)[None]
    with pytest.raises(rl.ConfigError, match="a MambaBlock is given a cache, .* use_cache=False, or leave recompute out"):
        model(tokens, use_cache=True)
    assert model(tokens).logits.sum().backward() is None and model.backbone.layers[0].mixer.in_proj.weight.grad.any()
    with torch.no_grad():
        model.eval().generate(tokens, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("policy", ["full", "selective", "1 MiB"])
def test_an_input_that_changes_between_forward_and_backward_is_an_error(policy):
    blocks, x = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)), torch.ones(3, 8)
    recompute(blocks, policy)
    out = blocks[0](x)
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


class Noting(nn.Module):
    """Leaves a word for the next block in a dict, and its mean in a list."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, notes, means):
        y = torch.tanh(self.layer(x)) * notes["scale"]
        notes["scale"] = y.exp()
        means.append(y.mean())
        return y


@pytest.mark.parametrize("policy", POLICIES)
def test_lists_and_dicts_that_blocks_change_are_as_they_were_where_these_run_again(policy):
    def run(policy):
        torch.manual_seed(0)
        model, x, notes, means = nn.ModuleList(Noting() for _ in range(3)), torch.ones(2, 8), {"scale": torch.ones(2, 8)}, []
        recompute(model, policy)
        for block in model:
            x = block(x, notes, means=means)
        sum(means).backward()
        assert len(means) == 3 and notes.keys() == {"scale"}
        return gradients(model)

    expect_equal(run(policy), run("none"))


@pytest.mark.parametrize(("compiled", "said"), [("", "the model"), ("blocks.1", "blocks.1")])
def test_a_block_that_is_compiled_with_all_around_it_is_refused(compiled, said):
    """torch ended in an error of its own insides."""
    model = GPT(CONFIG)
    model.get_submodule(compiled).compile(backend="eager")
    model.blocks[0].mlp.compile(backend="eager")   # inside of a block it may be
    with pytest.raises(rl.ConfigError, match=rf"^{said} is compiled as it is, .* compile=True"):
        recompute(model, "full")


class Leaking(nn.Module):
    """Draws the slopes of its last operation."""

    def __init__(self, inplace):
        super().__init__()
        self.layer, self.leaky = nn.Linear(8, 8), nn.RReLU(inplace=inplace)

    def forward(self, x):
        return x + self.leaky(self.layer(x))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("policy", ["full", "selective", "11 KiB"])
def test_random_slopes_that_a_block_draws_last_are_drawn_again(policy, inplace):
    """torch's own checkpoint ends before it draws them, and reads memory that nobody has written."""
    def run(policy):
        torch.manual_seed(0)
        model, x = nn.ModuleList(Leaking(inplace) for _ in range(3)), torch.randn(64, 8)
        found = recompute(model, policy)
        for _ in range(2):
            y = x
            for block in model:
                y = block(y)
            y.square().sum().backward()
        assert policy != "11 KiB" or {d.choice for d in found.plan.decisions} - {"none"}
        return gradients(model)

    expect_equal(run(policy), run("none"))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_of_a_model_recomputes_itself_and_not_the_original(policy):
    model, _, _ = prepared(policy)
    twin = copy.deepcopy(model)
    for p in model.parameters():
        p.data.fill_(float("nan"))
    language_model_loss(twin, tokens())[0].backward()
    assert all(torch.isfinite(p.grad).all() for p in twin.parameters())


def test_an_exception_in_the_middle_of_a_second_run_leaves_the_key_as_it_was():
    model, key, _ = prepared("full")
    key.set_rows(1, range(2, 3))
    loss, _ = language_model_loss(model, tokens())
    key.set_rows(3, range(4, 5))
    model.blocks[2].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert (key.step, key.rows, key.calls) == (3, range(4, 5), {})


@pytest.mark.parametrize("policy", ["full", "800 KiB"])
def test_backward_may_go_through_a_recomputed_block_twice(policy):
    def run(policy):
        model, _, _ = prepared(policy)
        loss, _ = language_model_loss(model, tokens())
        for again in (True, False):
            loss.backward(retain_graph=again)
        return gradients(model)

    expect_equal(run(policy), run("none"))


def test_every_rank_of_a_run_trains_to_the_same_bits_with_and_without():
    """Inside the engine, on two ranks, with accumulation and keyed dropout."""
    def body(world, policy):
        model = GPT(CONFIG, dtype=torch.float64)
        engine = rl.prepare(model, loss=language_model_loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), world=world,
                            accumulate=2, recompute=policy)
        batch = tokens(rows=8)
        losses = [engine.step([t.tensor_split(world.size)[world.rank] for t in batch]).loss for _ in range(3)]
        return losses, engine.full_state_dict()["model"]

    wanted, reference = rl.simulate(2, lambda world: body(world, "none"))[0]
    for policy in POLICIES:
        for losses, params in rl.simulate(2, lambda world, policy=policy: body(world, policy)):
            assert losses == wanted
            expect_equal(params, reference)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_stages_of_a_pipeline_compute_again_under_every_kind_of_schedule(schedule):
    def body(world, policy):
        engine = rl.prepare(GPT(CONFIG, dtype=torch.float64), loss=language_model_loss, optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
                            world=world, accumulate=2, recompute=policy, pipe=schedule)
        losses = [engine.step(tokens(rows=4)).loss for _ in range(2)]
        return losses, engine.full_state_dict()["model"]

    wanted, reference = rl.simulate(rl.Mesh(pipe=2), lambda world: body(world, "none"))[0]
    for policy in ("full", "selective"):
        losses, params = rl.simulate(rl.Mesh(pipe=2), lambda world, policy=policy: body(world, policy))[0]
        assert losses == pytest.approx(wanted, rel=1e-13)
        for name, value in params.items():   # a weight's products are added in another order (see test_runtime.py)
            torch.testing.assert_close(value, reference[name], rtol=1e-12, atol=1e-12)


def test_ranks_that_exchange_tokens_measure_the_same_forwards_whatever_their_rows():
    """Micro-batches of 2 and 2 rows on one, of 3 and 2 on the other: a shape that is new to one of them only."""
    def body(world, policy="10 MiB"):
        model = GPT(replace(CONFIG, dropout=0.0, moe=MoEConfig(experts=4, top_k=2, ffn=8)), dtype=torch.float64)
        pipe = {"pipe": "gpipe"} if world.size > 1 else {}
        engine = rl.prepare(model, loss=language_model_loss, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), world=world, accumulate=2,
                            recompute=policy, **pipe)
        mine = {0: slice(0, 4), 1: slice(4, 9)}[engine.group.rank] if world.size > 1 else slice(0, 9)
        report = engine.step([t[mine] for t in tokens(rows=9)])
        return report.loss, report.grad_norm

    expected = rl.simulate(1, lambda world: body(world, "none"))[0]
    for found in rl.simulate(rl.Mesh(pipe=2, expert=2), body):
        assert found == pytest.approx(expected, rel=1e-12)


def test_a_block_waits_as_often_as_on_the_rank_where_it_does_so_most():
    cost = BlockCost("a", dict.fromkeys(CHOICES, 1), dict.fromkeys(CHOICES, 1), 1)
    told = [[asdict(replace(cost, calls=calls))] for calls in (1, 3, 2)]
    assert [each.calls for each in module._over_ranks(told)] == [3]


@pytest.mark.parametrize("p", [1, 2, 3])
def test_ranks_of_a_group_decide_alike_and_raise_together_though_their_batches_differ(p):
    def body(world, policy, rows):
        model, key = GPT(CONFIG), DropoutKey(5)
        key_dropout(model, key)
        found = recompute(model, policy, group=world)
        loss, _ = language_model_loss(model, tokens(rows=rows(world.rank)))
        try:
            loss.backward()
        except rl.ConfigError as error:
            return str(error)
        return found.plan

    plans = rl.simulate(p, lambda world: body(world, "600 KiB", lambda rank: 1 + rank))
    alone = rl.simulate(1, lambda world: body(world, "600 KiB", lambda rank: p))
    assert plans == alone * p, "that of the rank with the most rows"
    errors = rl.simulate(p, lambda world: body(world, 200_000, lambda rank: 1 + rank))   # enough for one row
    assert len(set(map(str, errors))) == 1 and ("200000 bytes" in str(errors[0])) is (p > 1)


@pytest.mark.parametrize("policy", ["ful", "", "-1", 0, -5, True, 1.5, "12 parsecs", None])
def test_another_policy_is_an_error_that_names_the_known_ones(policy):
    with pytest.raises(rl.ConfigError):
        recompute(GPT(CONFIG), policy)
    if policy == "ful":
        with pytest.raises(rl.ConfigError, match="recompute = 'ful', expected .* Did you mean 'full'?"):
            recompute(GPT(CONFIG), policy)


def test_recompute_twice_is_an_error():
    model, _, _ = prepared("full")
    with pytest.raises(rl.ConfigError, match="a Block has RecomputedForward already"):
        recompute(model, "selective")


def test_blocks_are_those_that_sharding_cuts_or_the_classes_that_are_named():
    model = GPT(CONFIG)
    assert list(blocks_of(model)) == list(repeated_blocks(model)) == [f"blocks.{i}" for i in range(4)]
    assert blocks_of(model)["blocks.2"] is model.blocks[2]
    assert list(blocks_of(model, (type(model.blocks[0].mlp),))) == [f"blocks.{i}.mlp" for i in range(4)]
    assert list(blocks_of(GPT(replace(CONFIG, layers=1)))) == ["blocks.0"], "alone in its list"
    nested = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2))
    assert list(blocks_of(nested, (nn.Sequential, nn.Linear))) == ["0", "1"], "the outermost"
    with pytest.raises(rl.ConfigError, match="Linear has no blocks that stand in a list"):
        recompute(nn.Linear(2, 2), "full")
    with pytest.raises(rl.ConfigError, match="GPT has no Conv1d"):
        recompute(model, "full", blocks=(nn.Conv1d,))
    assert str(recompute(nn.Linear(2, 2), "none")) == "nothing is computed again"


class Pairs(nn.Module):
    """Lists of modules that have no forward: what is inside is called, and they are not."""

    def __init__(self, container):
        super().__init__()
        self.pairs = nn.ModuleList(container() for _ in range(2))

    def forward(self, x):
        for pair in self.pairs:
            for inside in pair.children():
                x = inside(x)
        return x


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("options", [{"recompute": "full"}, {"recompute": "1 MiB"}, {"offload_activations": True}, {"compile": True}],
                         ids=str)
def test_a_list_of_modules_that_are_never_called_has_no_blocks_and_that_is_told(options, count):
    model = Pairs(lambda: nn.ModuleDict({"in": nn.Linear(4, 8), "out": nn.Linear(8, 4)}))
    del model.pairs[count:]
    with pytest.raises(rl.ConfigError, match=r"Pairs has no blocks that .* have a forward .*; name the classes of its blocks"):
        rl.simulate(1, lambda world: rl.prepare(model, loss=lambda model, x: (model(x).sum(), len(x)), world=world,
                                                optimizer=partial(torch.optim.SGD, lr=0.1), **options))


def test_blocks_of_named_classes_are_those_that_can_be_called():
    """What was put around the forward of a dict of modules never ran, and what is inside of it was no block of its own."""
    model = Pairs(lambda: nn.ModuleDict({"in": nn.Linear(4, 8), "out": nn.Linear(8, 4)}))
    assert list(blocks_of(model, (nn.ModuleDict, nn.Linear))) == ["pairs.0.in", "pairs.0.out", "pairs.1.in", "pairs.1.out"]
    for options in ({"recompute": "full"}, {"offload_activations": True}, {"compile": True}):
        with pytest.raises(rl.ConfigError, match=r"Pairs has no ModuleDict with a forward; name the classes of its blocks"):
            rl.simulate(1, lambda world, options=options: rl.prepare(
                model, loss=lambda model, x: (model(x).sum(), len(x)), optimizer=partial(torch.optim.SGD, lr=0.1), world=world,
                units=nn.ModuleDict, **options))


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"compile": True}, {"stage": 3}], ids=str)
def test_names_of_classes_are_no_classes_of_blocks(options):
    """Other libraries take names; here torch said that the second argument of isinstance must be a type."""
    model = Pairs(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(rl.ConfigError, match=r"units=\('Linear',\) is no way to cut a model: give .* a module class or a tuple of them"):
        rl.simulate(1, lambda world: rl.prepare(model, loss=lambda model, x: (model(x).sum(), len(x)), world=world, units=("Linear",),
                                                optimizer=partial(torch.optim.SGD, lr=0.1), **options))


def test_blocks_in_lists_of_lists_are_blocks():
    model = Pairs(lambda: nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    assert list(blocks_of(model)) == ["pairs.0.0", "pairs.0.1", "pairs.1.0", "pairs.1.1"]


class Echo(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.linear(x)))


class ThereAndBack(nn.Module):
    """The same blocks in two lists, as models of two directions have them."""

    def __init__(self):
        super().__init__()
        blocks = [Echo() for _ in range(3)]
        self.there, self.back = nn.ModuleList(blocks), nn.ModuleList(blocks[::-1])

    def forward(self, x):
        for block in (*self.there, *self.back):
            x = block(x)
        return x.square().sum()


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"recompute": "selective", "offload_activations": True}, {"recompute": "1 MiB"},
                                     {"offload_activations": True}, {"stage": 3, "recompute": "full"}], ids=str)
def test_blocks_that_stand_in_two_lists_are_blocks_once_and_train_to_the_same_bits(options):
    assert list(blocks_of(ThereAndBack())) == ["there.0", "there.1", "there.2"]

    def body(world, **options):
        engine = rl.prepare(seeded(0)(ThereAndBack)().double(), loss=lambda model, x: (model(x), len(x)), world=world,
                            optimizer=partial(torch.optim.SGD, lr=0.1), **options)
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return [engine.step(x).loss for _ in range(2)]

    assert rl.simulate(1, lambda world: body(world, **options)) == rl.simulate(1, body)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_without_repeated_blocks_names_their_classes_at_every_stage(stage):
    plain = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 1)).double()

    def body(world):
        model = copy.deepcopy(plain)
        runs: list[nn.Module] = []
        model[0][1].register_forward_pre_hook(lambda module, args: runs.append(module))
        engine = rl.prepare(model, loss=lambda model, rows: (model(rows).sum(), len(rows)), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                            world=world, stage=stage, recompute="full", units=nn.Sequential)
        engine.step(torch.ones(2, 3, dtype=torch.float64))   # the first looks at the loss of half a batch, too
        before = len(runs)
        engine.step(torch.ones(2, 3, dtype=torch.float64))
        return len(runs) - before

    assert rl.simulate(2, body) == [2, 2]


def test_tokens_of_experts_count_once_where_blocks_are_measured():
    """The router's bias moves by these counts."""
    def counted(policy):
        model, _, _ = prepared(policy, config=replace(CONFIG, moe=MoEConfig(experts=4, top_k=2, ffn=8, capacity=0.8)))
        language_model_loss(model, tokens())[0].backward()
        return [(block.mlp.routed.tolist(), block.mlp.dropped.item()) for block in model.blocks]

    assert counted("10 MiB") == counted("none")


class Peak(Trace):
    """The most bytes that were ever alive, gradients of parameters left out."""

    def __init__(self, model):
        super().__init__()
        self.most, self.model = 0, model

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        gradients = sum(p.grad.untyped_storage().nbytes() for p in self.model.parameters() if p.grad is not None)
        self._made = {key: made for key, made in self._made.items() if not made.expired()}   # else each look takes longer
        self.most = max(self.most, self.kept(out) - gradients)
        return out


@cache
def peak_of_a_step(policy):
    """Many tokens and small matrices, so that activations are nearly all there is."""
    config = GPTConfig(vocab_size=37, seq_len=64, width=16, layers=6, heads=2, kv_heads=2, ffn=48)
    model, _, found = prepared(policy, torch.float32, config)
    for _ in range(2):
        with Peak(model) as peak:
            model.hidden(torch.zeros(4, 64, dtype=torch.int64)).sum().backward()
    return peak.most, found.plan


@pytest.mark.parametrize("budget", ["700 KiB", "1500 KiB"])
def test_the_peak_of_a_plan_is_the_peak_of_a_step(budget):
    """Beside blocks a step holds a few tensors: embedding and norm at the ends, and what flows back. The same few whatever the plan."""
    (most, plan), (everything, whole) = peak_of_a_step(budget), peak_of_a_step("100 MiB")
    assert whole.repeated == 0 < plan.repeated
    assert most - plan.peak == everything - whole.peak < 8 * 4 * 4 * 64 * 16
