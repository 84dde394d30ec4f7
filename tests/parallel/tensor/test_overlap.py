"""Layers that compute while they send are the plain ones: values, gradients, bytes."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rankloom as rl
from noting import noting
from rankloom.base.errors import ConfigError, ShapeMismatch
from rankloom.parallel.tensor import overlap as overlap_file
from rankloom.parallel.tensor.moves import BY_TOKENS
from rankloom.parallel.tensor.overlap import OverlappedRowLinear
from rankloom.train.recompute import recompute
from rankloom.train.run.config import make_config
from rankloom.train.run.loop import build_engine
from split_model import expect_equals_plain

from .test_gpt import make, pause_before_collectives, run
from .test_styles import PAIRS, Gated, Pair, shaken
from .test_styles import run as run_pair

PLANS = ["tp_plan", "tp_sequence_plan"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("pieces", [2, 3, 50])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_gpt_in_pieces_is_the_plain_one(ranks, pieces, plan):
    shape = dict(kv_heads=1, tie=pieces == 2, layers=1)
    expect_equals_plain(ranks, lambda: make(**shape), run, plan=getattr(make(**shape), plan), overlap=pieces)


@pytest.mark.parametrize("plan", PLANS)
def test_late_ranks_change_nothing(plan):
    expect_equals_plain(3, make, run, plan=getattr(make(), plan), overlap=2, before=pause_before_collectives)


@pytest.mark.parametrize("pair", PAIRS)
def test_layers_with_and_without_bias_or_transposed(pair):
    expect_equals_plain(3, lambda: shaken(PAIRS[pair]()), run_pair, plan={"first": "colwise", "second": "rowwise"}, overlap=2)
    expect_equals_plain(3, lambda: shaken(PAIRS[pair]()), run_pair, plan={"first": "colwise_rep", "second": "rowwise_rep"}, overlap=2)
    expect_equals_plain(2, lambda: shaken(Gated()), run_pair, plan={"gate_up": "packed_colwise", "down": "rowwise"}, overlap=2)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_complex_layers_are_those_of_one_process(transposed):
    def complex_pair():
        pair = shaken(PAIRS["transposed" if transposed else "linear"]())
        for layer in (pair.first, pair.second):
            for name, param in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(torch.complex(param.detach(), param.detach().flip(-1))))
        return pair

    def run_complex(model):
        y = model(torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.complex128))
        return torch.view_as_real(y), y.abs().square().sum()

    expect_equals_plain(2, complex_pair, run_complex, plan={"first": "colwise", "second": "rowwise"}, overlap=2)


class InPlace(Pair):
    """Adds to what the row gives, in place, as Llama 4 does."""

    def forward(self, x):
        return super().forward(x).add_(1.0)


@pytest.mark.parametrize("pieces", [1, 2])
def test_what_a_row_gives_may_be_changed_in_place(pieces):
    expect_equals_plain(2, lambda: shaken(InPlace(nn.Linear(6, 12), nn.Linear(12, 5, bias=False))), run_pair, overlap=pieces,
                 plan={"first": "colwise", "second": "rowwise"})


def test_gradients_accumulate_and_activations_may_be_recomputed():
    def twice(model):
        for block in model.blocks:
            plain = block.forward
            block.forward = lambda *args, plain=plain: checkpoint(plain, *args, use_reentrant=False)
        run(model)[1].backward()
        return None, run(model)[1]

    for plan in PLANS:
        expect_equals_plain(2, make, twice, plan=getattr(make(), plan), overlap=2)


@pytest.mark.parametrize("plan", PLANS)
def test_products_that_selective_recompute_keeps_are_not_the_sums(plan):
    def some_kept(model):
        recompute(model, "selective")
        return None, run(model)[1]

    expect_equals_plain(2, make, some_kept, plan=getattr(make(), plan), overlap=2)


@pytest.mark.parametrize("frozen", ["query", "key", "query key value"])
def test_layers_that_share_an_entrance_may_be_frozen(frozen):
    def some_frozen():
        model = make(layers=1)
        for name in frozen.split():
            getattr(model.blocks[0].attention, name).requires_grad_(False)
        return model

    expect_equals_plain(2, some_frozen, run, overlap=2)


def test_layers_of_one_module_may_read_different_tensors_and_one_twice():
    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x):
            other = x.sin()
            twice = self.query(x) * self.query(x).tanh()
            return self.out(twice * self.key(other) + self.query(other) * self.key(x).tanh())

    plan = {"query": "colwise", "key": "colwise", "out": "rowwise"}
    expect_equals_plain(2, lambda: shaken(Cross()), run_pair, plan=plan)
    expect_equals_plain(2, lambda: shaken(Cross()), run_pair, plan=plan, overlap=2)


@pytest.mark.parametrize("overlap", [1, 2])
def test_one_backward_after_another_through_the_same_graph(overlap):
    def body(world):
        model = rl.tensor_parallel(shaken(PAIRS["linear"]()), {"first": "colwise", "second": "rowwise"}, world, overlap=overlap)
        loss = run_pair(model)[1]
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())), first, rtol=0, atol=0)

    rl.simulate(2, body)


@pytest.mark.parametrize("plan", PLANS)
def test_the_bytes_are_those_of_the_plain_path(plan):
    def sent(world, overlap):
        model = rl.tensor_parallel(make(), getattr(make(), plan), world, overlap=overlap)
        before = world.ledger.bytes, world.ledger.calls
        run(model)[1].backward()
        return world.ledger.bytes - before[0], world.ledger.calls - before[1]

    plain, = set(rl.simulate(3, lambda world: sent(world, 1)))
    pieces, = set(rl.simulate(3, lambda world: sent(world, 2)))
    exits = 2 * 2 * 2                                          # two half blocks, two layers; once without a gradient, once with
    backward = 0 if plan == "tp_plan" else 2 * 2               # gathers of the exits' gradients
    assert pieces == (plain[0], plain[1] + exits + backward)   # one more message for each


def test_of_inputs_that_want_no_gradient_none_is_summed():
    def body(world, overlap):
        model = rl.tensor_parallel(shaken(PAIRS["linear"]()), {"first": "colwise", "second": "rowwise"}, world, overlap=overlap)
        y = model(torch.ones(2, 6, dtype=torch.float64))
        before = world.ledger.calls
        y.sum().backward()
        return world.ledger.calls - before

    assert rl.simulate(2, lambda world: (body(world, 1), body(world, 2))) == [(0, 0)] * 2


def test_products_are_computed_while_a_sum_is_on_its_way(monkeypatch):
    notes = {}
    note = lambda word: notes.setdefault(threading.current_thread().name, []).append(word)
    for name, word in (("product", "multiplies"), ("_weight_gradient", "weights")):
        plain = getattr(overlap_file, name)
        monkeypatch.setattr(overlap_file, name, lambda *args, plain=plain, word=word: note(word) or plain(*args))

    def body(world):
        model = rl.tensor_parallel(shaken(PAIRS["linear"]()), {"first": "colwise", "second": "rowwise"}, world, overlap=2)
        model(torch.ones(2, 6, dtype=torch.float64))   # the first call compares it with the whole model
        notes[threading.current_thread().name].clear()
        world.all_reduce = noting(world.all_reduce, note)
        y = model(torch.ones(2, 6, dtype=torch.float64, requires_grad=True))
        note("backward")
        y.sum().backward()
        return notes[threading.current_thread().name]

    forward = ["multiplies", "multiplies", "begins", "multiplies", "begins", "waits", "waits"]
    assert rl.simulate(2, body) == [[*forward, "backward", "weights", "begins", "weights", "waits"]] * 2


def test_a_backward_that_failed_leaves_nothing_to_the_next():
    def run_twice(model):
        model.first.register_forward_hook(lambda module, args, y: y.register_hook(lambda grad: 1 / 0 if model.fails else grad) and None)
        model.fails, x = True, torch.ones(3, 6, dtype=torch.float64, requires_grad=True)
        with pytest.raises(ZeroDivisionError):
            model(x).sum().backward()   # once the second layer has left its note
        model.fails = False
        model.zero_grad()
        return None, model(x).sum()

    class Both(Pair):
        def forward(self, x):
            return (self.first(x) * self.second(x)).sum(-1)

    plan = {"first": "colwise_rep", "second": "colwise_rep"}
    expect_equals_plain(2, lambda: shaken(Both(nn.Linear(6, 8), nn.Linear(6, 8))), run_twice, plan=plan, overlap=2)


@pytest.mark.parametrize("plan", PLANS)
def test_under_autocast_the_products_are_16_bit(plan):
    def body(world, overlap):
        model = rl.tensor_parallel(make(dtype=torch.float32), getattr(make(), plan), world, overlap=overlap)
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(model)[1]
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        return loss.detach()

    plain = rl.simulate(2, lambda world: body(world, 1))
    torch.testing.assert_close(rl.simulate(2, lambda world: body(world, 2)), plain, rtol=2e-3, atol=0)
    torch.testing.assert_close(plain[0].double(), run(make())[1].detach(), rtol=2e-2, atol=0)


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_under_autocast_layers_with_a_bias_give_16_bits_as_in_one_process(ranks, overlap):
    def body(world):
        model = rl.tensor_parallel(shaken(PAIRS["linear"]()).float(), {"first": "colwise", "second": "rowwise"}, world, overlap=overlap)
        with torch.autocast("cpu", torch.bfloat16):
            first = model.first(torch.ones(2, 6, 6))
            return first.dtype, model.second(first).dtype

    assert set(rl.simulate(ranks, body)) == {(torch.bfloat16, torch.bfloat16)}


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("shape", [(6,), (0, 6), (2, 0, 6)])
def test_one_token_without_other_dims_and_no_token_at_all_go_through_layers_in_pieces(shape, overlap):
    """As an expert of a list of experts gets no token."""
    def once(model):
        y = model(torch.ones(shape, dtype=torch.float64))
        return y, y.sum()

    expect_equals_plain(2, lambda: shaken(PAIRS["linear"]()), once, plan={"first": "colwise", "second": "rowwise"}, overlap=overlap)


def test_what_cannot_be_cut_in_pieces_is_refused():
    with pytest.raises(ConfigError, match="overlap=0, expected a whole number of pieces, 1 or more"):
        rl.simulate(2, lambda world: rl.tensor_parallel(make(), None, world, overlap=0))

    def body(world):
        weight = nn.Parameter(torch.zeros(3, 4))
        layer = OverlappedRowLinear(weight, None, world, BY_TOKENS, transposed=False, slices=False, label="row", pieces=2)
        layer(torch.zeros(1, 7, 4))

    with pytest.raises(ShapeMismatch, match="row: forward in group 'world': the 7 tokens of .* cannot be split over 2 ranks; pad to 8"):
        rl.simulate(2, body)


def test_a_config_file_and_prepare_can_ask_for_products_in_pieces():
    sizes = {"model": {"preset": "1M", "width": 16, "layers": 1, "heads": 4, "ffn": 24}, "mesh": {"replicate": 1, "tensor": 2}}
    config = make_config(sizes | {"train": {"global_batch_size": 2, "seq_len": 8, "tensor_overlap": 3}}, "test")

    def pieces(world):
        model = build_engine(config, config.gpt(37), world).model
        return [module.pieces for module in model.modules() if isinstance(module, OverlappedRowLinear)]

    assert rl.simulate(rl.Mesh(tensor=2), pieces) == [[3, 3]] * 2   # of attention and of the MLP


def test_products_in_eight_bits_are_not_cut_in_pieces_and_that_is_said():
    with pytest.raises(ConfigError, match="tensor_overlap = 2 has no meaning with precision fp8"):
        train = {"global_batch_size": 2, "tensor_overlap": 2, "precision": "fp8"}
        make_config({"mesh": {"replicate": 1, "tensor": 2}, "train": train}, "test")

    def body(world):
        with pytest.raises(ConfigError, match="tensor_overlap=2 has no meaning with precision fp8"):
            rl.prepare(make(), loss=run, optimizer=torch.optim.SGD, world=world, tensor_overlap=2, precision="fp8")

    rl.simulate(rl.Mesh(tensor=2), body)
