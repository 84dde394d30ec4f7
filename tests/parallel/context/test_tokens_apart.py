"""A model whose tokens see each other elsewhere than in attention is told of before its first forward over context ranks."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rankloom as rl
from rankloom.models.sequence_part import WHOLE
from rankloom.parallel.context.apply import context_parallel, own_tokens
from rankloom.parallel.context.rows import KINDS
from rankloom.parallel.context.tokens_apart import AT_MOST
from seeded import seeded

LENGTH = 70   # more than are looked at


class Reader(nn.Module):
    """Right: it takes positions from its part, and lets tokens see each other in attention only."""

    def __init__(self):
        super().__init__()
        self.word, self.place, self.kind = nn.Embedding(37, 16), nn.Embedding(LENGTH, 16), nn.Embedding(5, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.output = nn.Linear(16, 37)

    def places(self, tokens, part):
        return torch.arange(tokens.shape[1], device=tokens.device) if part.positions is None else part.positions

    def mixed(self, x, part):
        return part.attend(*(layer(x).unflatten(-1, (2, 8)) for layer in self.layers)).flatten(2)

    def given(self, logits, targets):
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), (targets >= 0).sum()

    def forward(self, tokens, targets=None, kind=None, part=WHOLE):
        x = self.word(tokens) + self.place(self.places(tokens, part))
        x = x if kind is None else x + self.kind(kind)[:, None]
        return self.given(self.output(x + self.mixed(x, part)), targets)


class CountsFromZero(Reader):
    def places(self, tokens, part):
        return torch.arange(tokens.shape[1], device=tokens.device)


class Shifts(Reader):
    """Each token is shown the one before it, as a convolution would."""

    def mixed(self, x, part):
        return super().mixed(x + F.pad(x, (0, 0, 1, 0))[:, :-1], part)


class ShiftsThroughAGate(Reader):
    """As Shifts, once it has learned to open the gate."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def let_in(self, shifted):
        return self.gate * shifted if isinstance(self.gate, nn.Parameter) else self.gate(shifted)

    def mixed(self, x, part):
        return super().mixed(x + self.let_in(F.pad(x, (0, 0, 1, 0))[:, :-1]), part)


class AttendsByItself(Reader):
    def mixed(self, x, part):
        return F.scaled_dot_product_attention(*(layer(x) for layer in self.layers), is_causal=True)


class Pools(Reader):
    """One answer for a row."""

    def given(self, logits, targets):
        return logits.mean(1)


class PoolsTheLoss(Reader):
    def given(self, logits, targets):
        return F.cross_entropy(logits.mean(1), targets[:, 0], reduction="sum"), len(targets)


class Weighs(Reader):
    """The loss of a token depends on that of others."""

    def given(self, logits, targets):
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * losses.softmax(0)).sum(), targets.numel()


class BeginsSmall(AttendsByItself):
    """As GPT-2 does: what attention adds is at first a hundredth of what it is added to."""

    def __init__(self):
        super().__init__()
        for matrix in self.parameters():
            if matrix.dim() == 2:
                nn.init.normal_(matrix, std=0.02)
                matrix.data[0, 0] = 0.05


class LeavesOneOut(AttendsByItself):
    """Nothing becomes of one token."""

    def forward(self, tokens, targets=None, part=WHOLE):
        return super().forward(tokens, part=part) * (self.places(tokens, part) != 5)[:, None]


@seeded(3)
def make(kind):
    return kind()


def batch():
    make = torch.Generator().manual_seed(0)
    return [torch.randint(0, 37, (2, LENGTH), generator=make) for _ in range(2)]


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("kind", "told"), [
    (CountsFromZero, "the query of attention 1, of shape (1, 48, 2, 8) for 48 tokens, is another"), (Shifts, "the query of attention 1"),
    (AttendsByItself, "what it returns, of shape (1, 48, 37)"), (BeginsSmall, "what it returns, of shape (1, 48, 37)"),
    (LeavesOneOut, "what it returns, of shape (1, 48, 37)"),
    (Pools, "what it returns, of shape (1, 37)")],
    ids=lambda x: getattr(x, "__name__", ""))
def test_tokens_that_see_each_other_elsewhere_are_an_error_on_every_rank(kind, told, ranks, attention):
    model = make(kind)

    def body(world):
        mine = context_parallel(copy.deepcopy(model), world, attention)
        for _ in range(2):   # whoever goes on after it is told again
            with pytest.raises(rl.ConfigError) as raised:
                mine(batch()[0])
        return str(raised.value)

    assert all(told in said and "part.positions" in said for said in rl.simulate(ranks, body))


@pytest.mark.parametrize("mesh", [rl.Mesh(context=2), rl.Mesh(shard=2, context=2)], ids=str)
def test_an_engine_tells_before_its_first_step(mesh):
    wrong, right = make(CountsFromZero), make(Reader)
    loss = lambda model, batch: model(batch[0], targets=batch[1])

    def body(world):
        prepared = lambda model: rl.prepare(copy.deepcopy(model), loss=loss, optimizer=torch.optim.AdamW, world=world, stage=3)
        mine = prepared(right)
        rows = [x[mine.group.rank:][:2] for x in map(torch.cat, [(x, x) for x in batch()])]
        assert mine.step(rows).step == 1
        with pytest.raises(rl.ConfigError, match="CountsFromZero is not the same function of a token"):
            prepared(wrong).step(rows)

    rl.simulate(mesh, body)


def closed_gates():
    linear = nn.Linear(16, 16)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return {"number": nn.Parameter(torch.zeros(())), "vector": nn.Parameter(torch.full((16,), 1e-6)), "matrix": linear}


@pytest.mark.parametrize("stage", [None, 0, 3])
@pytest.mark.parametrize("kind", closed_gates())
def test_a_gate_that_begins_closed_does_not_hide_what_it_will_let_in(kind, stage):
    torch.manual_seed(3)
    model = ShiftsThroughAGate(closed_gates()[kind])
    loss = lambda model, batch: model(batch[0], targets=batch[1])

    def body(world):
        mine = copy.deepcopy(model)
        if stage is None:
            context_parallel(mine, world)(batch()[0])
        else:
            rl.prepare(mine, loss=loss, optimizer=torch.optim.AdamW, world=world, stage=stage).step(batch())

    with pytest.raises(rl.ConfigError, match="the query of attention 1, of shape .* is another"):
        rl.simulate(rl.Mesh(context=2), body)


@pytest.mark.parametrize("kind", ["number", "matrix"])
def test_a_frozen_gate_stays_closed(kind):
    torch.manual_seed(3)
    model = ShiftsThroughAGate(closed_gates()[kind])
    model.gate.requires_grad_(False)
    rl.simulate(2, lambda world: context_parallel(copy.deepcopy(model), world)(batch()[0]))


@pytest.mark.parametrize("kind", closed_gates())
@pytest.mark.parametrize("fails", [False, True])
def test_a_gate_has_its_own_values_again_after_the_look(kind, fails):
    class Gated(Reader):
        """Right: the gate lets in what the token itself has."""

        def mixed(self, x, part):
            if fails:
                raise ArithmeticError("in the middle")
            return super().mixed(x + (self.gate * x if isinstance(self.gate, nn.Parameter) else self.gate(x)), part)

    model = make(Gated)
    model.gate = closed_gates()[kind]
    truth, models, whole = copy.deepcopy(model), [model, copy.deepcopy(model)], {name: id(p) for name, p in model.named_parameters()}

    def body(world):
        mine = context_parallel(models[world.rank], world)
        with pytest.raises(ArithmeticError) if fails else nullcontext():
            mine(batch()[0])
        assert all(torch.equal(param, truth.get_parameter(name)) for name, param in mine.named_parameters())

    rl.simulate(2, body)
    assert {name: id(param) for name, param in model.named_parameters()} == whole
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", [PoolsTheLoss, Weighs])
def test_a_loss_that_is_no_sum_over_tokens_is_an_error(kind):
    model, (tokens, targets) = make(kind), batch()
    with pytest.raises(rl.ConfigError, match=r"what it returns, of shape \(\)"):
        rl.simulate(2, lambda world: context_parallel(copy.deepcopy(model), world)(tokens, targets=targets))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_what_rounding_leaves_is_no_difference(dtype, autocast):
    model, (tokens, targets) = make(Reader).to(dtype), batch()

    def body(world):
        mine = context_parallel(copy.deepcopy(model), world)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return mine(tokens, targets=targets)[1]

    assert sum(rl.simulate(2, body)) == tokens.numel()


def test_what_is_told_of_each_row_comes_whole():
    model, (tokens, _), kinds = make(Reader).double(), batch(), torch.tensor([4, 1])
    truth = model(tokens, kind=kinds)

    def body(world):
        logits = context_parallel(copy.deepcopy(model), world)(tokens, kind=kinds)
        torch.testing.assert_close(logits, own_tokens(truth, world), rtol=1e-12, atol=1e-12)

    rl.simulate(2, body)


class Draws(Pools):
    def given(self, logits, targets):
        return super().given(logits, targets) + torch.randn(37)


class AsksForRows(Pools):
    def mixed(self, x, part):
        return super().mixed(x, part) + part.gather(x).mean(1, keepdim=True)


@pytest.mark.parametrize("kind", [Draws, AsksForRows])
def test_a_model_that_draws_or_asks_for_whole_rows_is_not_judged(kind):
    model = make(kind)
    rl.simulate(2, lambda world: context_parallel(copy.deepcopy(model), world)(batch()[0]))


def test_only_the_first_call_looks_at_a_few_tokens_without_gradients_in_evaluation():
    class Noting(Reader):
        def forward(self, tokens, part=WHOLE):
            self.seen.append((tuple(tokens.shape), self.training, torch.is_grad_enabled()))
            return super().forward(tokens, part=part)

    def body(world):
        model = make(Noting)
        model.seen = []
        context_parallel(model, world)
        for _ in range(2):
            model(batch()[0])
        return model.seen

    half = ((1, AT_MOST // 2), False, False)
    whole = ((1, AT_MOST), False, False)
    for seen in rl.simulate(2, body):
        assert seen == [whole, whole, half, half] + [((2, LENGTH // 2), True, True)] * 2


@pytest.mark.parametrize("length", [2, 3])
def test_the_shortest_rows_are_looked_at_too(length):
    model = make(CountsFromZero)
    with pytest.raises(rl.ConfigError, match="part.positions"):
        rl.simulate(2, lambda world: context_parallel(copy.deepcopy(model), world)(batch()[0][:, :length]))
