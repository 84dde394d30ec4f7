"""Steps of the engine over sharded models: what is awkward, what goes wrong, and what comes after it."""

import copy
import io
import pickle
import re
import sys
import time
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rankloom as rl
from awkward import Dies, adamw, drawn, loss_sum, share, train_plainly
from blocky import make_blocky, make_turns
from rankloom.base.errors import CollectiveTimeout, NonFinite, UnitError
from rankloom.models.config import GPTConfig
from rankloom.models.loss import language_model_loss
from rankloom.parallel.sections.wrapping import section_names
from rankloom.shard.offload import Host

WIDTH = 6
ROWS = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Pair(nn.Module):
    """x * sum(w) + sum(v)."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.zeros(wide)), nn.Parameter(torch.zeros(narrow))

    def forward(self, x):
        return x * self.w.sum() + self.v.sum()


class Gaps(nn.Sequential):
    """Units of one padded size whose tensors lie in other places, so that one has gaps where another has a tensor."""

    def __init__(self) -> None:
        super().__init__(Pair(8, 8), Pair(9, 3), Pair(1, 16), Pair(3, 9))


class Line(nn.Module):
    """A root of two matrices around blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(3)))

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))


def squares(model, x):
    """A sum over elements, and their number."""
    y = model(x)
    return y.square().sum(), y.numel()


def sgd(params):
    """Whatever a gradient is, it shows."""
    return torch.optim.SGD(params, lr=0.05)


def expect_as_plain(build, loss, batches, ranks=(1, 2, 3), backends=("gloo", "rankloom"), stages=(1, 2, 3), **options):
    """The engine leaves the parameters and reports the norms of plain torch, in fp64 to 1e-12."""
    truth = train_plainly(1.0, model=build(), loss=loss, batches=batches)

    def body(world, stage):
        engine = rl.prepare(build(), loss=loss, optimizer=adamw, world=world, stage=stage, clip=1.0, **options)
        mine = [share(b, world.rank, world.size) if isinstance(b, tuple) else b.tensor_split(world.size)[world.rank] for b in batches]
        found = [engine.step(batch) for batch in mine]
        return engine.full_state_dict()["model"], [report.grad_norm for report in found]

    for stage in stages:
        for p in ranks:
            for backend in backends:
                for state, mine in rl.simulate(p, lambda world, stage=stage: body(world, stage), backend=backend):
                    torch.testing.assert_close(mine, truth["norms"], rtol=1e-12, atol=0)
                    for name, value in truth["params"].items():
                        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12, msg=f"{name}, stage {stage}, {p} ranks")


def test_units_that_take_turns_with_one_buffer_leave_nothing_in_each_others_norm():
    expect_as_plain(lambda: drawn(Gaps()), squares, [ROWS, ROWS * 2, ROWS * 3], units=Pair)


def test_a_step_may_bring_one_row_to_some_ranks_and_two_to_others():
    few = [tuple(t[:4] for t in batch) for batch in make_turns()[:2]]
    expect_as_plain(make_blocky, loss_sum, few, ranks=(3,), stages=(1, 3))


def squares_frozen_later(model, x):
    """As `squares`; the last batch is larger, and finds a block and a matrix of another frozen."""
    if x.abs().max() > 50:
        model.blocks[1].requires_grad_(False)
        model.blocks[2][0].weight.requires_grad_(False)
    return squares(model, x)


def test_a_block_may_be_frozen_between_two_steps():
    expect_as_plain(lambda: drawn(Line()), squares_frozen_later, [ROWS, ROWS * 2, ROWS * 100], ranks=(2,))


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_gradients_parts_of_the_model_may_be_called_by_themselves(stage, backend):
    """As `generate` of transformers calls an encoder, and then the model again and again. They leave nothing in memory."""
    def sample(model):
        with torch.no_grad():
            return model.last(model.blocks(model.first(ROWS)))

    def body(world):
        engine = rl.prepare(drawn(Line()), loss=squares, optimizer=adamw, world=world, stage=stage)
        mine, found, held = ROWS.tensor_split(world.size)[world.rank], [], []
        for _ in range(3):
            held.append(engine.held())
            found.append(sample(engine.model))
            held.append(engine.held())
            engine.step(mine)
        assert stage < 3 or held[::2] == held[1::2]
        return found, engine.full_state_dict()["model"]

    plain, expected = drawn(Line()), []
    update = adamw(plain.parameters())
    for _ in range(3):
        expected.append(sample(plain))
        update.zero_grad()
        total, count = squares(plain, ROWS)
        (total / count).backward()
        update.step()
    for found, state in rl.simulate(2, body, backend=backend):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-12, atol=1e-12)


def test_a_rank_without_batches_follows_a_loss_that_calls_parts_of_the_model():
    def loss(model, x):
        if model.training:
            return squares(model, x)
        y = model.last(model.first(x)) + model(x) + model.last(model.first(x))
        return y.square().sum(), y.numel()

    def body(world):
        engine = rl.prepare(drawn(Line()), loss=loss, optimizer=adamw, world=world, stage=3)
        return [engine.evaluate([ROWS] if world.rank == one else []).loss for one in range(world.size)]

    total, count = loss(drawn(Line()).eval(), ROWS)
    for found in rl.simulate(2, body):
        assert found == pytest.approx([total.item() / count] * 2, rel=1e-12)


class Scaled(nn.Module):
    """So short a vector that one rank owns all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x, picked):
        return x + picked * x * self.scale if picked.any() else x


class Picky(nn.Module):
    """Scales rows that begin with a positive number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scaled = nn.Linear(WIDTH, WIDTH), Scaled()

    def forward(self, x):
        return self.scaled(self.first(x), x[:, :1] > 0)


def test_a_parameter_may_be_used_in_one_micro_batch_of_a_rank_that_owns_nothing_of_it():
    rows = ROWS[:4].abs() * torch.tensor([[-1.0], [-1], [1], [-1]])
    expect_as_plain(lambda: drawn(Picky()), squares, [rows, rows * 2], ranks=(2,), backends=("gloo",), stages=(2, 3), units=Scaled,
                    accumulate=2)


def test_a_module_may_be_called_root():
    build = lambda: drawn(nn.Sequential(OrderedDict(root=nn.Linear(WIDTH, WIDTH), last=nn.Linear(WIDTH, WIDTH))))
    expect_as_plain(build, squares, [ROWS, ROWS * 2], ranks=(2,), backends=("gloo",), stages=(3,), deterministic=2,
                    units=lambda name, module: name == "root")


@pytest.mark.parametrize("options", [{}, {"deterministic": 4}, {"accumulate": 2}], ids=str)
def test_gradients_are_in_the_hosts_memory_before_the_update_however_long_the_copy_takes(options, monkeypatch):
    def store(host, into, result):
        vars(host).setdefault("copies", []).append((into, result.clone()))

    def wait(host):
        for into, result in vars(host).pop("copies", ()):
            into.copy_(result)

    monkeypatch.setattr(Host, "store", store)
    monkeypatch.setattr(Host, "wait", wait)
    expect_as_plain(lambda: drawn(Line()), squares, [ROWS, ROWS * 2], ranks=(2,), backends=("gloo",), stages=(2,), offload=True,
                    **options)


def test_offloaded_gradients_of_one_rank_are_in_the_hosts_memory_and_not_on_the_device_too():
    """Who owns a whole gradient keeps it where it lands, unless that is the device: those of a 7B model take 27 GB there."""
    def held(world):
        engine = rl.prepare(drawn(Line()), loss=squares, optimizer=adamw, world=world, stage=3, offload=True)
        engine.step(ROWS)
        return engine.held()

    [after] = rl.simulate(rl.Mesh(shard=1), held)
    assert after.gradients == after.parameters and after.gathered == 0


class Numbers(nn.Module):
    """Parameters and buffers that are no floats: whole, truth and complex numbers, of these trained ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.tensor([1, 0, 2, 5, 3, 4]), requires_grad=False)
        self.keep = nn.Parameter(torch.tensor([True, True, False]), requires_grad=False)
        self.turn = nn.Parameter(torch.tensor([1 + 1j, 2j, -1, 0.5, 1j]))
        self.register_buffer("table", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.matrix = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1).tril())

    def forward(self, x):
        pairs = torch.view_as_complex((x @ self.matrix)[:, self.order].float().unflatten(1, (3, 2))) * self.table * self.keep
        return torch.view_as_real(pairs * self.turn.sum()).flatten(1)


class Several(nn.Module):
    """Some of them as units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Numbers() for _ in range(2))

    def forward(self, x):
        return sum(block(x) for block in self.blocks)


@pytest.mark.parametrize("precision", [None, "fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_no_float_is_cast_by_no_precision(stage, precision):
    def body(world):
        engine = rl.prepare(Several(), loss=squares, optimizer=sgd, world=world, stage=stage, precision=precision, clip=1.0,
                            **({"units": Numbers} if stage else {}))
        norm = engine.step(ROWS.float().tensor_split(world.size)[world.rank]).grad_norm
        return norm, engine.full_state_dict()["model"]

    truth = train_plainly(1.0, sgd, model=Several(), loss=squares, batches=[ROWS.float()])
    for norm, state in rl.simulate(2, body):
        near = {"rtol": 2.0**-6, "atol": 2.0**-8} if precision == "bf16" else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(norm, truth["norms"][0], **near)
        for name, value in truth["params"].items():
            assert state[name].dtype == value.dtype
            torch.testing.assert_close(state[name], value, **near)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_backward_outside_of_a_step_is_none_of_its_gradients(stage, backend):
    def body(world):
        engine = rl.prepare(drawn(Line()), loss=squares, optimizer=adamw, world=world, stage=stage, clip=1.0)
        mine = ROWS.tensor_split(world.size)[world.rank]
        for factor in (1, 2):
            engine.model(mine * 3).sum().backward()
            engine.step(mine * factor)
        return engine.full_state_dict()["model"]

    expected = train_plainly(1.0, model=drawn(Line()), loss=squares, batches=[ROWS, ROWS * 2])["params"]
    for state in rl.simulate(3, body, backend=backend):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


def slope(model, x):
    """A loss with a gradient of its own, by the inputs."""
    x = x.clone().requires_grad_()
    y = model(x)
    slopes, = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return y.square().sum() + slopes.sum(), y.numel()


class InPlace(nn.Module):
    """Blocks that return views, which a linear layer does of [rows, tokens, width]; who called them changes these."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).add_(x.tanh())
        return x


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_what_a_block_returns_may_be_changed_in_place(backend):
    def body(world, stage):
        engine = rl.prepare(drawn(InPlace()), loss=squares, optimizer=adamw, world=world, stage=stage)
        return [engine.step(ROWS.view(4, 3, WIDTH).tensor_split(world.size)[world.rank]).loss for _ in range(3)]

    (expected,) = rl.simulate(1, lambda world: body(world, 0))
    assert rl.simulate(2, lambda world: body(world, 3), backend=backend) == [pytest.approx(expected, rel=1e-12)] * 2


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=str)
def test_a_loss_may_take_gradients_of_its_own(options):
    expect_as_plain(lambda: drawn(Line()), slope, [ROWS, ROWS * 2], ranks=(1, 2), stages=(0, 1, 2, 3), **options)


class Rare(nn.Module):
    """Its last layer calls the parts of its list only if a row of the batch has such a class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 12, [3, 6])

    def forward(self, x, classes):
        return self.last(self.first(x), classes).output


def unlikely(model, batch):
    return -model(*batch).sum(), len(batch[0])


COMMON_THEN_RARE = ROWS, torch.tensor([0, 1, 2, 1, 0, 2, 7, 8, 9, 10, 11, 6])


@pytest.mark.parametrize("tie", [False, True], ids=["own", "tied"])
@pytest.mark.parametrize("units", [500, nn.Linear, nn.Embedding], ids=str)
def test_the_output_matrix_of_a_gpt_stays_with_the_root_whatever_units_hold_its_module(units, tie):
    """The model reads it when the module that has it does not run, or runs no more."""
    tokens = torch.randint(0, 37, (4, 13), generator=torch.Generator().manual_seed(0))

    def body(world, **options):
        model = rl.GPT(GPTConfig(vocab_size=37, seq_len=12, width=24, layers=2, heads=2, kv_heads=1, ffn=24, tie=tie), dtype=torch.float64)
        engine = rl.prepare(model, loss=language_model_loss, optimizer=adamw, world=world, **options)
        return [engine.step(share((tokens[:, :-1], tokens[:, 1:]), world.rank, world.size)).loss for _ in range(3)]

    alone, = rl.simulate(1, body)
    for losses in rl.simulate(2, lambda world: body(world, stage=3, units=units), backend="gloo"):   # in shared memory nothing is released
        torch.testing.assert_close(losses, alone, rtol=1e-12, atol=0)


def test_the_parts_of_an_adaptive_softmax_are_no_blocks_for_not_every_rank_calls_them():
    assert section_names(Rare()) == [""] and section_names(nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 12, [3, 6])) == [""]
    assert section_names(Rare(), nn.Linear) == section_names(Rare(), 1) == ["", "first"]
    assert "last.tail.0.1" in section_names(Rare(), lambda module: isinstance(module, nn.Linear))   # as it was asked for
    expect_as_plain(lambda: drawn(Rare()), unlikely, [COMMON_THEN_RARE], ranks=(2,), backends=("gloo",), stages=(3,))


class FixedPoint(nn.Module):
    """z = f(z, x), where f is two blocks. A hook solves the linear equation of its gradient, by backward passes inside of the backward."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.last = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)))

    def f(self, z, x):
        for block in self.blocks:
            z = 0.3 * (checkpoint(block, z, use_reentrant=False) if self.recomputes else block(z)) + x
        return z

    def forward(self, x):
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(5):
                z = self.f(z, x)
        z = self.f(z, x)
        if z.requires_grad:
            before = z.detach().requires_grad_()
            after = self.f(before, x)

            def solve(gradient):
                solved = gradient
                for _ in range(4):
                    solved, = torch.autograd.grad(after, before, solved, retain_graph=True)
                    solved = solved + gradient
                return solved

            z.register_hook(solve)
        return self.last(z)


class FixedPointOfMore(FixedPoint):
    """The gradient of a bias is not whole when the backward of its block is over, which the hook comes after."""

    def forward(self, x):
        return super().forward(x + self.last[0][0].bias)


def test_a_block_waits_for_the_rest_of_its_gradients_while_a_hook_takes_others():
    expect_as_plain(lambda: drawn(FixedPointOfMore(False)), squares, [ROWS, ROWS * 2], ranks=(2,), stages=(1, 2))


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_hook_may_take_gradients_inside_of_the_backward(recomputes):
    expect_as_plain(lambda: drawn(FixedPoint(recomputes)), squares, [ROWS, ROWS * 2], ranks=(2,), stages=(1, 2, 3))


def test_a_backward_inside_of_the_backward_that_leaves_gradients_of_a_reduced_unit_is_refused_in_words():
    def body(world):
        def loss(model, x):
            total = squares(model, x)
            if total[0].requires_grad:
                total[0].register_hook(lambda gradient: torch.enable_grad()(lambda: squares(model, x)[0].backward())())
            return total

        engine = rl.prepare(drawn(Line()), loss=loss, optimizer=adamw, world=world, stage=1)
        with pytest.raises(UnitError, match="came twice in one step: .* by torch.autograd.grad"):
            engine.step(ROWS)

    rl.simulate(2, body)


class OnlyFixedPoint(FixedPoint):
    """Nothing comes after it: the hook is on the output of the model."""

    def __init__(self) -> None:
        super().__init__(False)
        self.last = nn.Sequential()


def test_the_output_of_the_model_may_have_a_hook_that_takes_gradients():
    expect_as_plain(lambda: drawn(OnlyFixedPoint()), squares, [ROWS, ROWS * 2], ranks=(2,), stages=(0, 1, 2, 3))
    expect_as_plain(lambda: drawn(OnlyFixedPoint()), squares, [ROWS], ranks=(2,), backends=("gloo",), accumulate=2)


def squares_of_fixed_point(model, x):
    """The model is f, and the loss solves z = f(z) + x."""
    f = lambda z: 0.2 * model(z) + x
    with torch.no_grad():
        z = f(f(x))
    z = f(z)
    before = z.detach().requires_grad_()
    after = f(before)
    total = z.square().sum()
    slope = lambda gradient: torch.autograd.grad(after, before, gradient, retain_graph=True)[0]
    z.register_hook(lambda gradient: gradient + slope(gradient))
    total.register_hook(lambda gradient: None if slope(torch.ones_like(z)).isfinite().all() else gradient * torch.nan)
    return total, z.numel()


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=str)
def test_hooks_of_a_loss_that_take_gradients_may_come_before_the_backward_of_the_model(options):
    expect_as_plain(lambda: drawn(Line()), squares_of_fixed_point, [ROWS, ROWS * 2], ranks=(2,), stages=(0, 1, 2, 3), **options)


def squares_of_checkpoints(model, x):
    """Two backward passes inside that of the loss, which leave the gradients."""
    x = x.clone().requires_grad_()
    y = checkpoint(model, x, use_reentrant=True) + checkpoint(model, 2 * x, use_reentrant=True)
    return y.square().sum(), y.numel()


def test_a_backward_inside_that_of_the_loss_which_leaves_gradients_is_one_of_its_own():
    expect_as_plain(lambda: drawn(Line()), squares_of_checkpoints, [ROWS, ROWS * 2], ranks=(2,), stages=(2, 3))


# ---------------------------------------------------------------------- what goes wrong

@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_is_not_finite_names_rank_and_tensor_and_the_next_step_goes_on(stage, backend):
    def body(world):
        engine = rl.prepare(drawn(Line()), loss=squares, optimizer=adamw, world=world, stage=stage, clip=1.0)
        mine = ROWS.tensor_split(world.size)[world.rank]
        engine.step(mine)
        bad = mine.clone()
        if world.rank == 1:
            bad[0, 0] = torch.nan
        with pytest.raises(NonFinite, match=r"rank 1: the loss of its own batch is nan") as caught:
            engine.step(bad)
        assert "rank 0:" not in str(caught.value)
        engine.step(mine * 2)
        return engine.full_state_dict()["model"]

    expected = train_plainly(1.0, model=drawn(Line()), loss=squares, batches=[ROWS, ROWS * 2])["params"]
    for state in rl.simulate(3, body, backend=backend):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


class Bad(torch.autograd.Function):
    """The identity, with a gradient that is infinite where told so."""

    @staticmethod
    def forward(ctx, x, on):
        ctx.on = on
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return (grad * torch.inf if ctx.on else grad), None


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_infinite_gradient_of_a_finite_loss_is_found_in_the_tensor_where_backward_met_it_first(stage):
    def body(world):
        class Poisoned(Line):
            def forward(self, x):
                return self.last(Bad.apply(self.blocks(self.first(x)), bool(x[0, 0] == 0)))

        engine = rl.prepare(drawn(Poisoned()), loss=squares, optimizer=adamw, world=world, stage=stage)
        mine = ROWS.tensor_split(world.size)[world.rank].clone()
        if world.rank == 1:
            mine[0, 0] = 0
        with pytest.raises(NonFinite, match=r"rank 1: the gradient of blocks.2.2.(weight|bias) has"):
            engine.step(mine)

    rl.simulate(2, body)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(stage, backend):
    def body(world):
        factor = [1.0]
        engine = rl.prepare(drawn(Line(), torch.float32), loss=lambda m, x: ((m(x).float() * factor[0]).square().sum(), x.numel()),
                            optimizer=sgd, world=world, stage=stage, precision="fp16")
        mine = ROWS.float().tensor_split(world.size)[world.rank]
        engine.step(mine)
        before, scale = engine.full_state_dict()["model"], engine.scale.value
        factor[0] = 1e3 if world.rank == 1 else 1.0
        huge = engine.step(mine)
        after = engine.full_state_dict()["model"]
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        factor[0] = 1.0
        return huge.skipped, engine.scale.value / scale, engine.step(mine).skipped

    assert rl.simulate(2, body, backend=backend) == [(True, 0.5, False)] * 2


class Mortal(Line):
    """Dies between its blocks."""

    def __init__(self):
        super().__init__()
        self.dies = Dies()

    def forward(self, x):
        x = self.blocks[1](self.blocks[0](self.first(x)))
        return self.last(self.blocks[2](self.dies(x)))


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("stage, options", [(1, {}), (1, {"accumulate": 2}), (2, {"accumulate": 2}), (3, {}), (3, {"accumulate": 2}),
                                            (3, {"accumulate": 2, "gradient_memory": 1 << 20})])
def test_a_step_that_dies_leaves_nothing_behind(stage, options, when):
    def body(world):
        engine = rl.prepare(drawn(Mortal()), loss=squares, optimizer=adamw, world=world, stage=stage, clip=1.0, **options)
        mine = ROWS.tensor_split(world.size)[world.rank]
        engine.step(mine)
        engine.model.dies.when = when
        with pytest.raises(ArithmeticError):
            engine.step(mine * 9)
        engine.model.dies.when = ""
        engine.step(mine * 2)
        return engine.full_state_dict()["model"]

    expected = train_plainly(1.0, model=drawn(Mortal()), loss=squares, batches=[ROWS, ROWS * 2])["params"]
    for backend in ("gloo", "rankloom"):
        for state in rl.simulate(2, body, backend=backend):
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


def test_ranks_whose_step_dies_inside_of_a_block_and_right_behind_it_go_on_together():
    """The same blocks were gathered; on one of the ranks, one is still running."""
    def die(*_):
        raise ArithmeticError("in forward")

    def body(world):
        engine = rl.prepare(drawn(Line()), loss=squares, optimizer=adamw, world=world, stage=3, clip=1.0)
        mine, block = ROWS.tensor_split(world.size)[world.rank], engine.model.blocks[2]
        engine.step(mine)
        hook = (block if world.rank else block[2]).register_forward_hook(die)
        with pytest.raises(ArithmeticError):
            engine.step(mine * 9)
        hook.remove()
        engine.step(mine * 2)
        return engine.full_state_dict()["model"]

    expected = train_plainly(1.0, model=drawn(Line()), loss=squares, batches=[ROWS, ROWS * 2])["params"]
    for state in rl.simulate(2, body, backend="gloo"):
        torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stage, backend", [(1, "gloo"), (2, "gloo"), (3, "rankloom")])
def test_parameters_that_were_cast_or_moved_are_an_error_and_do_not_stop_to_learn(stage, backend):
    def body(world):
        engine = rl.prepare(drawn(Line()), loss=squares, optimizer=adamw, world=world, stage=stage)
        engine.step(ROWS)
        engine.model.to("cpu")     # nothing to do
        engine.step(ROWS)
        engine.model.blocks[1].float().double()
        with pytest.raises(UnitError, match=r"blocks.1.0.weight was cast or moved after the model was sharded"):
            engine.step(ROWS)

    rl.simulate(2, body, backend=backend)


def two_layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    return model


@pytest.mark.parametrize("part", ["", "0"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("take", "verb"), [(copy.deepcopy, "copied"), (lambda model: torch.save(model, io.BytesIO()), "pickled")],
                         ids=["copy", "save"])
def test_a_copy_of_a_sharded_model_is_refused_in_words_and_so_is_saving_it_as_a_whole(take, verb, stage, part):
    def body(world):
        engine = rl.prepare(two_layers(), loss=lambda m, x: (m(x).sum(), len(x)), world=world, optimizer=torch.optim.AdamW, stage=stage)
        with pytest.raises(UnitError, match=f"a sharded model cannot be {verb}|weight was used .* while it is released"):
            take(engine.model.get_submodule(part))

    rl.simulate(2, body)


@pytest.mark.gloo
@pytest.mark.parametrize("penalty", [torch.Tensor.norm, lambda w: w.T.sum(), lambda w: torch.stack([w, w]).sum()])
@pytest.mark.parametrize("model_first", [True, False])
def test_a_loss_that_uses_a_parameter_which_is_away_is_told_so(penalty, model_first):
    """In memory that is gone it would find nothing, and add nothing."""
    def body(world):
        model = two_layers()

        def loss(model, x):
            if model_first:
                model(x)
            return penalty(model[1].weight) * len(x), len(x)

        engine = rl.prepare(model, loss=loss, optimizer=torch.optim.AdamW, world=world, stage=3, units=nn.Linear)
        with pytest.raises(UnitError, match=rf"rank {world.rank}: 1.weight was used \(.*\) while it is released: unit 1 is in memory only"):
            engine.step(torch.ones(2, 4))
        away = model[1].weight   # looking is allowed
        return away.requires_grad, away.dtype, away.grad, away.shape, away.size(0), sum(param.numel() for param in model.parameters())

    assert rl.simulate(2, body) == [(True, torch.float32, None, (4, 4), 4, 40)] * 2


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("read", [
    lambda m: m.state_dict().items(), nn.Module.named_parameters, lambda m: copy.deepcopy(dict(m.named_parameters())).items(),
    lambda m: [(name, pickle.loads(pickle.dumps(param))) for name, param in m.named_parameters()],
], ids=["state", "names", "copies", "pickles"])
def test_parameters_that_are_on_their_way_after_a_step_are_waited_for_by_whoever_reads_them(stage, read):
    """An average of weights, or a checkpoint, would be of old values beside new ones."""
    def body(world):
        engine = rl.prepare(drawn(Line()), loss=squares, optimizer=adamw, world=world, stage=stage)
        publish = engine.placement.publish
        engine.placement.publish = lambda: (time.sleep(0.2 * world.rank), publish())   # rank 0 is done before rank 1 has sent
        engine.step(ROWS)
        seen = {name: value.clone() for name, value in read(engine.model)}
        whole = engine.full_state_dict()["model"]
        return all(torch.equal(seen[name], whole[name]) for name in seen) and len(seen) == len(whole)

    assert rl.simulate(2, body) == [True, True]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("backend", "precision"), [("rankloom", None), ("rankloom", "bf16"), ("gloo", "bf16")])
def test_a_write_by_data_that_is_lost_or_done_once_by_every_rank_is_an_error(backend, precision, stage):
    """Autograd does not count it; merging adapters, a bound or a decay of weights, and many an average are written so."""
    def body(world):
        engine = rl.prepare(two_layers(), loss=squares, optimizer=adamw, world=world, stage=stage, precision=precision)
        engine.step(torch.ones(2, 4))
        engine.model[1].weight.data.sum()   # looking is allowed, where it is here
        engine.step(torch.ones(2, 4))
        engine.model[1].weight.data.mul_(0.5)
        engine.step(torch.ones(2, 4))

    with pytest.raises(UnitError, match=r"1.weight was (changed in place after the model was sharded|used \(data\) while it is released)"):
        rl.simulate(2, body, backend=backend)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda param: pickle.loads(pickle.dumps(param))], ids=["copy", "pickle"])
def test_a_copy_of_a_parameter_whose_writes_are_counted_is_a_plain_one(copied):
    def body(world):
        engine = rl.prepare(two_layers(), loss=squares, optimizer=adamw, world=world, stage=1)
        param = engine.model[1].weight
        param.data.sum()
        made = copied(param)
        return type(made) is nn.Parameter and torch.equal(made.data, param.data) and made.data_ptr() != param.data_ptr()

    assert all(rl.simulate(2, body, backend="rankloom"))


def by_inputs_twice(model, x):
    """As an equation's loss has it: second derivatives by the inputs."""
    return torch.func.vmap(torch.func.hessian(lambda row: torch.sin(model(row)).sum()))(x).square().sum(), len(x)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loss_of_derivatives_that_torch_func_takes_is_that_of_one_process(stage):
    def body(world, stage):
        engine = rl.prepare(drawn(Line()), loss=by_inputs_twice, optimizer=adamw, world=world, stage=stage)
        return [(report.loss, report.grad_norm) for report in (engine.step(ROWS) for _ in range(3))]

    expected = rl.simulate(1, lambda world: body(world, 0))[0]   # one rank: torch keeps one level of forward derivatives for all threads
    assert np.allclose(rl.simulate(1, lambda world: body(world, stage))[0], expected, rtol=1e-12, atol=0)


def test_a_rank_that_waits_for_a_block_which_another_does_not_call_is_told_what_to_do():
    def body(world):
        sharded = rl.fully_shard(drawn(Rare()), world, units=lambda module: isinstance(module, nn.Sequential))
        sharded(*share(COMMON_THEN_RARE, world.rank, world.size))
        time.sleep(3)   # rank 0 is here at once, and must not leave before rank 1 has waited long enough

    with pytest.raises(CollectiveTimeout, match="parameters of last.tail.[01]") as error:
        rl.simulate(2, body, timeout=1, backend="gloo")
    assert re.search("do not call last.tail.[01]. Call each block on every rank", "".join(error.value.__notes__))


class Adjoint(torch.autograd.Function):
    """f(x), computed again in backward, with gradients of parameters that are given as arguments."""

    @staticmethod
    def forward(ctx, f, x, *params):
        ctx.f, ctx.x = f, x.detach()
        ctx.save_for_backward(*params)
        with torch.no_grad():
            return f(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            return None, *torch.autograd.grad(ctx.f(x), (x, *ctx.saved_tensors), gradient)


class Integrated(Line):
    """The blocks are called by a function that is given their parameters."""

    def forward(self, x):
        return self.last(Adjoint.apply(self.blocks, self.first(x), *self.blocks.parameters()))


def test_parameters_of_blocks_that_a_function_is_given_are_an_error_of_torchs_and_right_where_it_has_no_units_inside():
    expect_as_plain(lambda: drawn(Integrated()), squares, [ROWS], ranks=(2,), stages=(1, 2))
    expect_as_plain(lambda: drawn(Integrated()), squares, [ROWS], ranks=(2,), backends=("gloo",), stages=(3,), units=Integrated)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|expected shape compatible with \[0\]"):
        expect_as_plain(lambda: drawn(Integrated()), squares, [ROWS], ranks=(2,), backends=("gloo",), stages=(3,))


def after_an_inner_step(model, x):
    """As MAML has it: the loss of weights that were trained on other rows, which is a function of the model's own."""
    own, (inner, outer) = dict(model.named_parameters()), x.chunk(2)
    first = torch.func.functional_call(model, own, (inner,)).square().mean()
    slopes = torch.autograd.grad(first, list(own.values()), create_graph=True)
    fast = {name: param - 0.1 * slope for (name, param), slope in zip(own.items(), slopes)}
    return squares(lambda rows: torch.func.functional_call(model, fast, (rows,)), outer)


def test_a_loss_may_call_the_model_with_other_weights_where_parameters_are_kept():
    task = torch.cat([ROWS, ROWS * 0.5])
    model = drawn(Line())
    total, count = after_an_inner_step(model, task)
    total, count = total + after_an_inner_step(model, task * 2)[0], 2 * count
    (total / count).backward()
    sgd(model.parameters()).step()

    def body(world, stage):
        engine = rl.prepare(drawn(Line()), loss=after_an_inner_step, optimizer=sgd, world=world, stage=stage)
        engine.step(task * (world.rank + 1))
        return engine.full_state_dict()["model"]

    for stage in (1, 2):
        for state in rl.simulate(2, lambda world, stage=stage: body(world, stage), backend="gloo"):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("stage", "kind"), [(1, nn.Parameter), (3, torch.Tensor)])
def test_a_call_with_other_weights_that_cannot_be_told_from_a_replacement_says_what_to_do(stage, kind):
    def body(world):
        others = {name: kind(torch.zeros(param.shape)) for name, param in drawn(Line()).named_parameters()}
        loss = lambda model, x: squares(lambda rows: torch.func.functional_call(model, others, (rows,)), x)
        rl.prepare(drawn(Line()), loss=loss, optimizer=sgd, world=world, stage=stage).step(ROWS)

    with pytest.raises(UnitError, match=r"first.weight was replaced .*functional_call.*`.detach\(\)` .* a stage below 3"):
        rl.simulate(2, body, backend="gloo")


@pytest.mark.parametrize("kept", [False, True], ids=["released", "gathered by the step's first forward"])
@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: lambda x: torch.func.vjp(f, x)[1](x)[0]])
def test_torch_func_around_a_model_whose_parameters_are_let_go_is_an_error_in_words(transform, kept):
    def body(world):
        engine = rl.prepare(drawn(Line()), loss=lambda m, x: (transform(m)(x).sum(), len(x)), optimizer=adamw, world=world, stage=3,
                            reshard_after_forward=not kept)
        with pytest.raises(UnitError, match=rf"rank {world.rank}: the model is called inside of torch.func .* a stage below 3"):
            engine.step(ROWS)

    rl.simulate(2, body, backend="gloo")


def test_a_plain_state_dict_of_parameters_that_are_away_is_an_error_and_not_empty():
    def body(world):
        engine = rl.prepare(drawn(Line()), loss=squares, optimizer=adamw, world=world, stage=3)
        engine.step(ROWS)
        for part in (engine.model, engine.model.blocks[1]):
            with pytest.raises(UnitError, match=r"is sharded, so a plain state dict of it would be empty: engine.full_state_dict"):
                part.state_dict()
        return len(engine.full_state_dict()["model"])

    assert rl.simulate(2, body, backend="gloo") == [len(Line().state_dict())] * 2


# ---------------------------------------------------------------------- number formats

NORM_FULL = rl.Precision("bf16, last full", torch.bfloat16, master=torch.float32, full=("last",), output=torch.float32)


def train_for_bits(world, stage, precision, *, model=None, **options):
    """Three steps, deterministic, of all ranks on one batch."""
    engine = rl.prepare(drawn(model or Line(), torch.float32), loss=squares, optimizer=adamw, world=world, stage=stage, precision=precision,
                        deterministic=4, **options)
    rows = ROWS[:8].float().tensor_split(world.size)[world.rank]
    losses = [engine.step(rows * k).loss for k in (1, 2, 3)]
    return losses, engine.full_state_dict()["model"]


@pytest.mark.parametrize("precision", ["bf16", NORM_FULL], ids=["bf16", "full"])
def test_sixteen_bits_at_every_stage_are_those_of_one_whole_process(precision):
    (losses, expected), = rl.simulate(1, lambda world: train_for_bits(world, 0, precision))
    for stage in (1, 2, 3):
        for p, backend in ((1, "gloo"), (2, "gloo"), (4, "rankloom")):
            for mine, state in rl.simulate(p, lambda world, stage=stage: train_for_bits(world, stage, precision), backend=backend):
                assert mine == losses
                assert all(torch.equal(state[name], value) for name, value in expected.items()), (stage, p)


class Transposed(nn.Module):
    """Its matrix lies in memory column by column, as that of a convolution in channels_last does."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.out = nn.Parameter(torch.zeros(9, WIDTH).t()), nn.Linear(9, WIDTH)

    def forward(self, x):
        return self.out(torch.tanh(x @ self.matrix))


def test_bits_do_not_depend_on_how_a_parameter_lay_in_memory():
    """The first leaf of a rank at stage 0 comes before the flat buffers: kernels added in another order for it."""
    found = [result for stage in (0, 1, 2, 3) for p in (1, 2, 4) for result in rl.simulate(
        p, lambda world, stage=stage: train_for_bits(world, stage, "fp32", model=Transposed()))]
    for losses, state in found:
        assert losses == found[0][0]
        assert all(torch.equal(state[name], value) for name, value in found[0][1].items())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_reduced_in_bf16_are_near_those_reduced_in_fp32(stage):
    def gradients(world, reduce):
        form = rl.Precision("mine", torch.float32, master=torch.float32, reduce=reduce)
        engine = rl.prepare(drawn(Line(), torch.float32), loss=squares, world=world, stage=stage, precision=form,
                            optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
        before = engine.full_state_dict()["model"]
        engine.step(ROWS.float().tensor_split(world.size)[world.rank])
        after = engine.full_state_dict()["model"]
        return {name: before[name] - after[name] for name in before}

    def alone(rank):
        model = drawn(Line(), torch.float32)
        squares(model, ROWS.float().tensor_split(2)[rank])[0].backward()
        return {name: param.grad for name, param in model.named_parameters()}

    exact, coarse = (rl.simulate(2, lambda world, reduce=reduce: gradients(world, reduce))[0] for reduce in (None, torch.bfloat16))
    parts = [alone(0), alone(1)]
    assert any(not torch.equal(exact[name], coarse[name]) for name in exact)
    for name in exact:   # each part is rounded, and so is their sum: bf16 is right to 2**-8
        bound = 2 * 2.0**-8 * sum(part[name].abs() for part in parts) / ROWS.numel() + 1e-6
        assert ((exact[name] - coarse[name]).abs() <= bound).all(), name


def lines_of_a_step(units: int) -> int:
    """How many lines of this library a rank runs in a step, those of hooks in backward included."""
    def body(world):
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(units)))
        engine = rl.prepare(model, loss=squares, optimizer=sgd, world=world, stage=3, units=nn.Linear)
        for _ in range(2):   # the first learns the order, the second prefetches by it
            engine.step(torch.ones(1, 1))
        ran = 0

        def count(frame, event, arg):
            nonlocal ran
            ran += 1
            return count if "rankloom" in frame.f_code.co_filename else None

        before = sys.gettrace()
        sys.settrace(count)
        try:
            engine.step(torch.ones(1, 1))
        finally:
            sys.settrace(before)
        return ran

    return rl.simulate(1, body)[0]


def test_the_work_of_a_step_grows_with_the_units_and_not_with_their_square():
    few, some, many = map(lines_of_a_step, (20, 40, 80))
    assert many - some < 2.1 * (some - few), "as 2 to 1, and 0.1 for searches by halves; squares are as 4 to 1"
