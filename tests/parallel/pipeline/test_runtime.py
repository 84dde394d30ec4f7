"""The runtime: under every schedule, gradients and loss equal one process.

Why 1e-12: the same terms are added in another order only where gradients of a tied parameter meet, and where a weight's product
is made from rows that are laid out differently; sums of fewer than 200 terms in fp64 (see test_equivalence.py).
"""

import gc
import random
import weakref
from functools import cache, partial
from itertools import count

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rankloom as rl
from awkward import make_batches, make_model
from closeness import expect_close
from noting import late
from rankloom.base.errors import BatchError, ConfigError, LossError, ShapeMismatch
from rankloom.base.loss import take_auxiliary_loss
from rankloom.models.config import GPTConfig, MoEConfig
from rankloom.models.gpt import GPT
from rankloom.models.pieces import gpt_answer, gpt_pieces
from rankloom.parallel.pipeline import messages
from rankloom.parallel.pipeline.actions import needs, parse_schedule
from rankloom.parallel.pipeline.check import peak_live
from rankloom.parallel.pipeline.cut import Stage, balance, find_tied, make_stages
from rankloom.parallel.pipeline.messages import AHEAD, in_order_of_sending, proven_arrivals
from rankloom.parallel.pipeline.passes import add_gathers, add_reductions, apply_pass, send_gradients_first, with_messages
from rankloom.parallel.pipeline.runtime import Hooks, Pipeline
from rankloom.parallel.pipeline.schedules import SCHEDULES, make_schedule
from split_model import joined

RTOL = 1e-12
CHUNKS = {name: schedule.fewest for name, schedule in SCHEDULES.items()}


def make_gpt(tie: bool = True) -> GPT:
    config = GPTConfig(vocab_size=19, seq_len=8, width=8, layers=6, heads=2, kv_heads=1, ffn=12, tie=tie)
    return GPT(config, seed=3, dtype=torch.float64)


gpt_loss = gpt_answer(make_gpt())


def token_batches(count: int, vocab: int = 19, lengths=(8,)):
    """Of different lengths, some targets not counted, so that micro-batches weigh differently."""
    draw = torch.Generator().manual_seed(11)
    batches = []
    for number in range(count):
        tokens = torch.randint(1, vocab, (2, lengths[number % len(lengths)]), generator=draw)
        targets = tokens.roll(-1, 1)
        targets[:, -1 - number % 3:] = -100
        batches.append((tokens, targets))
    return batches


def one_process(pieces, loss, batches):
    """The truth: the whole model, one micro-batch after the other."""
    (whole,) = make_stages(pieces, [len(pieces)])
    totals = torch.zeros(2, dtype=torch.float64)
    for inputs, targets in batches:
        total, count = loss(whole(inputs), targets)
        total.backward()
        totals += torch.tensor([total.item(), float(count)], dtype=torch.float64)
    return totals, {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}


def run(world, build, loss, schedule, batches, steps: int = 1, change=lambda stages: None, **options):
    """Steps of a pipeline on this rank: totals of the last, and the gradients of its stages by name."""
    pieces = build()
    stages = make_stages(pieces, balance([1.0] * len(pieces), schedule.stages))
    change(stages)
    held = {stage: stages[stage] for stage in schedule.held_by(world.rank)}
    pipeline = Pipeline(held, world, schedule, loss, tied=find_tied(stages), **options)
    for _ in range(steps):
        for stage in held.values():
            stage.zero_grad()
        totals = pipeline.step(batches)
    return totals, {name: p.grad for stage in held.values() for name, p in stage.named_parameters(remove_duplicate=False)}


def expect_equal(results, expected):
    totals, grads = expected
    seen = set()
    for mine, held in results:
        torch.testing.assert_close(mine, totals, rtol=RTOL, atol=0)
        expect_close(held, {name: grads[name] for name in held}, RTOL)
        seen |= held.keys()
    assert seen == grads.keys(), "no parameter was left out"


def expect_gpt_equal(name, ranks, microbatches, tie=True, lengths=(8,), **options):
    schedule = make_schedule(name, ranks * CHUNKS[name], microbatches)
    batches = token_batches(microbatches, lengths=lengths)
    results = rl.simulate(ranks, lambda w: run(w, lambda: gpt_pieces(make_gpt(tie)), gpt_loss, schedule, batches, **options))
    expect_equal(results, gpt_alone(microbatches, tie, lengths))


@cache
def gpt_alone(microbatches, tie=True, lengths=(8,)):
    return one_process(gpt_pieces(make_gpt(tie)), gpt_loss, token_batches(microbatches, lengths=lengths))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gradients_and_loss_of_a_gpt_equal_one_process(name, ranks):
    for microbatches in (1, 2, 5, 8)[:1 + ranks]:
        expect_gpt_equal(name, ranks, microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_micro_batches_may_have_different_lengths(name):
    expect_gpt_equal(name, 2, 7, lengths=(8, 3, 5, 3))


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_an_untied_head_is_left_alone(name):
    expect_gpt_equal(name, 3, 4, tie=False)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_a_second_step_with_known_shapes_equals_the_first(name):
    expect_gpt_equal(name, 3, 5, steps=3, lengths=(8, 4))


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v"])
def test_it_runs_over_shared_memory_too(name):
    schedule, batches = make_schedule(name, 3 * CHUNKS[name], 6), token_batches(6)
    results = rl.simulate(3, lambda w: run(w, lambda: gpt_pieces(make_gpt()), gpt_loss, schedule, batches, steps=2), backend="rankloom")
    expect_equal(results, gpt_alone(6))


# ---------------------------------------------------------------------- the awkward model


def awkward_pieces():
    """Four pieces between which two tensors travel, one of them without a gradient; see awkward.py for what is awkward."""
    model = make_model()

    def embed(tokens):
        return model.embed(tokens) + model.rows(tokens), (tokens == 0).any(dim=1)

    def middle(x, rows):
        return x + model.drop(model.out(torch.tanh(model.hidden(model.frozen(x))))), rows

    def sometimes(x, rows):
        return (x + rows[:, None, None] * model.sometimes(x), rows) if rows.any() else (x, rows)

    def head(x, rows):
        return model.head(x * model.scale)

    named = [["embed", "rows"], ["frozen", "hidden", "drop", "out", "unused"], ["sometimes"], ["scale", "head"]]
    return [({name: getattr(model, name) for name in names}, function) for names, function in zip(named, (embed, middle, sometimes, head))]


def awkward_loss(logits, targets):
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


@pytest.mark.parametrize(("name", "ranks"), [(name, ranks) for name in SCHEDULES for ranks in (1, 2, 3, 4) if ranks * CHUNKS[name] <= 4])
def test_the_awkward_model_equals_one_process(name, ranks):
    """Tied, frozen, unused and conditional parameters, a parameter of no module, a border of two tensors."""
    batches = [tuple(t[start:start + 5] for t in make_batches(1)[0]) for start in range(0, 25, 5)]
    schedule = make_schedule(name, ranks * CHUNKS[name], len(batches))
    results = rl.simulate(ranks, lambda w: run(w, awkward_pieces, awkward_loss, schedule, batches, steps=2))
    expect_equal(results, one_process(awkward_pieces(), awkward_loss, batches))


@pytest.mark.parametrize("name", ["gpipe", "zb-h1"])
def test_a_tied_parameter_that_is_frozen_stays_without_a_gradient(name):
    def frozen():
        pieces = awkward_pieces()
        pieces[0][0]["embed"].requires_grad_(False)
        return pieces

    batches = make_batches(2)
    results = rl.simulate(2, lambda w: run(w, frozen, awkward_loss, make_schedule(name, 2, 2), batches))
    expect_equal(results, one_process(frozen(), awkward_loss, batches))


def test_of_a_tied_parameter_that_is_frozen_nothing_is_sent():
    def sent(world, tied):
        stage = nn.Linear(2, 2)
        stage.weight.requires_grad_(False)
        pipeline = Pipeline({world.rank: stage}, world, make_schedule("1f1b", 2, 1), lambda y, _: (y.sum(), 1), tied=tied)
        before = world.ledger.messages
        pipeline.step([(torch.ones(1, 2), None)])
        return world.ledger.messages - before

    assert rl.simulate(2, lambda w: sent(w, [((0, "weight"), (1, "weight"))])) == rl.simulate(2, lambda w: sent(w, []))


def test_a_tied_parameter_that_a_step_does_not_use_keeps_the_gradient_of_the_step_before():
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias, self.uses = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2)), True

        def forward(self, x):
            return (x * self.weight if self.uses else x) + self.bias

    def body(world):
        stage = Scales()
        pipeline = Pipeline({world.rank: stage}, world, make_schedule("1f1b", 2, 1), lambda y, _: (y.sum(), 1),
                            tied=[((0, "weight"), (1, "weight"))])
        pipeline.step([(torch.ones(1, 2), None)])
        stage.uses = False
        pipeline.step([(torch.ones(2, 2), None)])   # other shapes: their gradients need not come back
        return stage.weight.grad.tolist()

    assert rl.simulate(2, body) == [[2.0, 2.0]] * 2


def test_where_nothing_below_is_trained_no_gradient_travels():
    def frozen_below():
        pieces = awkward_pieces()
        for parts, _ in pieces[:2]:
            for part in parts.values():
                part.requires_grad_(False)
        return pieces

    def body(world):
        result = run(world, frozen_below, awkward_loss, schedule, batches)
        before = world.ledger.messages
        return result, before

    schedule, batches = make_schedule("1f1b", 2, 3), make_batches(3)
    results = rl.simulate(2, body)
    expect_equal([result for result, _ in results], one_process(frozen_below(), awkward_loss, batches))
    forth, back = (messages for _, messages in results)
    assert forth - back == 3 * 2 + 1, "two tensors of each micro-batch and one header; all else is sent by both"


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
@pytest.mark.parametrize("trained", [False, True])   # in the last step
def test_what_is_frozen_up_to_a_border_after_the_first_step_equals_one_process_and_may_be_thawed(name, trained):
    """The receiver was told in the first step that gradients are wanted, and hears of nothing else."""
    def freeze_first_half(pieces, frozen=True):
        for parts, _ in pieces[:2]:
            for part in parts.values():
                part.requires_grad_(not frozen)
        return pieces

    def body(world):
        pieces = layers()
        stages = make_stages(pieces, [4 // schedule.stages] * schedule.stages)
        held = {stage: stages[stage] for stage in schedule.held_by(world.rank)}
        pipeline = Pipeline(held, world, schedule, loss)
        for frozen in (False, True, not trained):
            freeze_first_half(pieces, frozen)
            for stage in held.values():
                stage.zero_grad()
            totals = pipeline.step(batches)
        return totals, {name: p.grad for stage in held.values() for name, p in stage.named_parameters()}

    def layers():
        return [({f"layer{at}": layer}, lambda x, layer=layer: layer(x).tanh()) for at in range(4) for layer in (linear(4, 4),)]

    schedule = make_schedule(name, 2 * CHUNKS[name], 3)
    loss, batches = lambda y, _: (y.square().sum(), 1), [(torch.full((2, 4), i / 4, dtype=torch.float64), None) for i in range(3)]
    expect_equal(rl.simulate(2, body), one_process(freeze_first_half(layers(), not trained), loss, batches))


def test_a_stage_that_ignores_its_input_leaves_those_below_without_a_gradient():
    def deaf():
        first, second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        return [({"first": first}, first), ({"second": second}, lambda x: second(torch.ones_like(x)) + 0 * x.detach())]

    batches = [(torch.ones(2, 4, dtype=torch.float64), None)] * 3
    for totals, grads in rl.simulate(2, lambda w: run(w, deaf, lambda y, _: (y.sum(), 1), make_schedule("1f1b", 2, 3), batches, steps=2)):
        assert totals[1] == 3
        assert all((grad is None) == name.startswith("first") for name, grad in grads.items())


def linear(inside, outside):
    """The same whatever thread asks."""
    layer, draw = nn.Linear(inside, outside).double(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=draw, dtype=torch.float64))
    return layer


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("deaf_to", [{0}, {1, 2}, {3}])
def test_a_stage_may_ignore_its_input_for_some_micro_batches_only(name, deaf_to):
    def moody():
        first, second, heard = linear(4, 4), linear(4, 4), count()
        return [({"first": first}, first), ({"second": second}, lambda x: second(torch.ones_like(x) if next(heard) % 4 in deaf_to else x))]

    loss, batches = lambda y, _: (y.square().sum(), 1), [(torch.full((2, 4), float(i), dtype=torch.float64), None) for i in range(4)]
    results = rl.simulate(2, lambda w: run(w, moody, loss, make_schedule(name, 2, 4), batches, steps=2))
    expect_equal(results, one_process(moody(), loss, batches))


@pytest.mark.parametrize("keep_graph", [True, False])
def test_a_stage_may_take_gradients_of_its_own(keep_graph):
    """Forces, as the gradient of an energy: what is asked for is that of the input, so the weights get none by it."""
    def forces(first, second, x):
        force, = torch.autograd.grad(second(first(x).tanh()).sum(), x, create_graph=keep_graph)
        return first(x) * force

    def build():
        below, first, second = linear(4, 4), linear(4, 4), linear(4, 1)
        return [({"below": below}, below), ({"first": first, "second": second}, partial(forces, first, second))]

    loss, batches = lambda y, _: (y.square().sum(), 1), [(torch.full((2, 4), i / 4, dtype=torch.float64), None) for i in range(3)]
    results = rl.simulate(2, lambda w: run(w, build, loss, make_schedule("zb-h1", 2, 3), batches, steps=2))
    expect_equal(results, one_process(build(), loss, batches))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_stage_may_take_gradients_of_its_own_in_its_backward(name):
    """An implicit layer: z = tanh(layer z + x). A hook solves for the gradient of x, and takes gradients towards z only."""
    def implicit(layer, x):
        with torch.no_grad():
            z = x
            for _ in range(3):
                z = (layer(z) + x).tanh()
        z, start = (layer(z) + x).tanh(), z.requires_grad_()
        again = (layer(start) + x).tanh()

        def solve(grad):
            return sum(torch.autograd.grad(again, start, grad, retain_graph=True)) + grad

        z.register_hook(solve)
        return z

    def build():
        below, layer = linear(4, 4), linear(4, 4)
        return [({"below": below}, below), ({"layer": layer}, partial(implicit, layer))]

    loss, batches = lambda y, _: (y.square().sum(), 1), [(torch.full((2, 4), i / 4, dtype=torch.float64), None) for i in range(3)]
    results = rl.simulate(2, lambda w: run(w, build, loss, send_gradients_first(make_schedule(name, 2, 3)), batches, steps=2))
    expect_equal(results, one_process(build(), loss, batches))


def test_a_stage_may_go_backward_in_its_forward():
    def early(first, x):
        first(x.detach().requires_grad_()).square().sum().backward()
        return first(x)

    def build():
        below, first = linear(4, 4), linear(4, 4)
        return [({"below": below}, below), ({"first": first}, partial(early, first))]

    loss, batches = lambda y, _: (y.square().sum(), 1), [(torch.full((2, 4), i / 4, dtype=torch.float64), None) for i in range(3)]
    results = rl.simulate(2, lambda w: run(w, build, loss, make_schedule("zb-h1", 2, 3), batches))
    expect_equal(results, one_process(build(), loss, batches))


@pytest.mark.parametrize("plan", ["F0@0 F1@0 F0@1 F1@1 B0@1 B1@1 B0@0 B1@0", "F0@0 F1@0 B0@0 B1@0\nF0@1 F1@1 B0@1 B1@1"],
                         ids=["one rank", "two ranks"])
def test_a_buffer_that_a_stage_hands_on_and_then_changes_arrives_as_it_was(plan):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1 << 18, dtype=torch.float64))   # long enough to be under way for a while
            self.layer = linear(4, 4)

        def forward(self, x):
            self.calls += 1
            return self.layer(x), self.calls[1:]

    def body(world):
        seen, layer = [], linear(4, 4)

        def look(x, calls):
            seen.append((calls.min().item(), calls.max().item()))
            return layer(x)

        stages = [Counts(), Stage([({"layer": layer}, look)])]
        held = {stage: stages[stage] for stage in schedule.held_by(world.rank)}
        pipeline = Pipeline(held, world, schedule, lambda y, _: (y.sum(), 1))
        batches = [(torch.ones(2, 4, dtype=torch.float64), None)] * 2
        pipeline.step(batches)
        pipeline.evaluate(batches)
        return seen

    schedule = parse_schedule(plan)
    assert rl.simulate(len(schedule.ranks), body)[-1] == [(n, n) for n in (1.0, 2.0, 3.0, 4.0)]


@pytest.mark.parametrize(("name", "ranks"), [("1f1b", 4), ("zb-v", 2)])
def test_the_first_layer_of_a_stage_may_work_in_place(name, ranks):
    def build():
        layers = [linear(4, 4), nn.ReLU(inplace=True), linear(4, 4), nn.Hardtanh(inplace=True)]
        return [({str(number): layer}, layer) for number, layer in enumerate(layers)]

    loss, batches = lambda y, _: (y.square().sum(), 1), [(torch.full((2, 4), i / 4, dtype=torch.float64), None) for i in range(3)]
    results = rl.simulate(ranks, lambda w: run(w, build, loss, make_schedule(name, 4, 3), batches))
    expect_equal(results, one_process(build(), loss, batches))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_matrix_that_comes_from_the_stage_before_gets_its_gradient_with_the_first_part(name):
    def build():
        first, second = linear(4, 4), linear(2, 3)
        return [({"first": first}, lambda x: (first(x), first(x + 1))), ({"second": second}, lambda x, y: second(F.linear(x, y)))]

    loss, batches = lambda y, _: (y.square().sum(), 1), [(torch.full((2, 4), i / 4, dtype=torch.float64), None) for i in range(3)]
    results = rl.simulate(2, lambda w: run(w, build, loss, make_schedule(name, 2, 3), batches))
    expect_equal(results, one_process(build(), loss, batches))


def test_outputs_and_gradients_with_gaps_between_their_numbers_travel_too():
    def turned():
        first, second = linear(3, 4), linear(2, 5)
        return [({"first": first}, lambda x: first(x).T), ({"second": second}, lambda x: second(x).T)]

    loss, batches = lambda y, _: (y.square().sum(), 1), [(torch.ones(2, 3, dtype=torch.float64), None)] * 3
    results = rl.simulate(2, lambda w: run(w, turned, loss, make_schedule("1f1b", 2, 3), batches, steps=2))
    expect_equal(results, one_process(turned(), loss, batches))


def test_outputs_and_gradients_that_are_conjugated_only_when_read_travel_too():
    def conjugated():
        first, second = linear(4, 4), linear(4, 4)
        return [({"first": first}, lambda x: torch.complex(first(x), x).conj()), ({"second": second}, lambda x: second(x.conj().imag))]

    loss, batches = lambda y, _: (y.square().sum(), 1), [(torch.ones(2, 4, dtype=torch.float64), None)] * 3
    results = rl.simulate(2, lambda w: run(w, conjugated, loss, make_schedule("1f1b", 2, 3), batches, steps=2))
    expect_equal(results, one_process(conjugated(), loss, batches))


def test_a_tied_parameter_that_no_stage_uses_stays_without_a_gradient():
    def spare():
        shared, first, second = nn.Linear(2, 2).double(), nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        return [({"first": first, "spare": shared}, first), ({"second": second, "spare": shared}, second)]

    batches = [(torch.ones(2, 4, dtype=torch.float64), None)] * 2
    for _, grads in rl.simulate(2, lambda w: run(w, spare, lambda y, _: (y.sum(), 1), make_schedule("1f1b", 2, 2), batches)):
        assert {name for name, grad in grads.items() if grad is None} == {"spare.weight", "spare.bias"}


# ---------------------------------------------------------------------- what it promises


def test_a_known_border_costs_one_message_each_way_and_a_new_one_a_header_more():
    schedule, batches = make_schedule("1f1b", 4, 8), token_batches(8)

    def body(world):
        counts = []
        stages = make_stages(gpt_pieces(make_gpt(tie=False)), [2, 2, 2, 2])
        pipeline = Pipeline({world.rank: stages[world.rank]}, world, schedule, gpt_loss)
        for _ in range(2):
            before = world.ledger.messages, world.ledger.bytes
            pipeline.step(batches)
            counts.append((world.ledger.messages - before[0], world.ledger.bytes - before[1]))
        return counts

    totals = 2 * 3, 2 * 16 * 3 // 4               # the all-reduce of (sum, count) over 4 ranks
    for rank, (first, second) in enumerate(rl.simulate(4, body)):
        borders = (rank > 0) + (rank < 3)
        assert second == (borders * 8 + totals[0], borders * 8 * (2 * 8 * 8 * 8) + totals[1])
        assert first == (second[0] + borders, second[1] + borders * 64 * 8)


def test_what_needs_no_gradient_costs_no_headers_on_the_way_back():
    def body(world):
        first, second, mask = linear(4, 4), linear(4, 4), torch.ones(4, dtype=torch.bool)
        pieces = [({"first": first}, lambda x: (first(x), mask)), ({"second": second}, lambda x, mask: second(x * mask))]
        pipeline = rl.pipeline(pieces, lambda y, _: (y.sum(), 1), world, microbatches=4)
        batches = [(torch.ones(2, 4, dtype=torch.float64), None)] * 4
        pipeline.step(batches)
        before = world.ledger.messages
        pipeline.step(batches)
        return world.ledger.messages - before

    total, forward, back = 2, 4 * 2, 4
    assert rl.simulate(2, body) == [forward + total, back + total]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v"])
def test_no_more_activations_live_than_the_plan_says(name):
    schedule, batches = make_schedule(name, 3 * CHUNKS[name], 8), token_batches(8)

    def body(world):
        stages = make_stages(gpt_pieces(make_gpt()), balance([1.0] * 8, schedule.stages))
        held = {stage: stages[stage] for stage in schedule.held_by(world.rank)}
        pipeline, seen = Pipeline(held, world, schedule, gpt_loss), []
        for stage in held.values():
            stage.register_forward_hook(lambda *_: seen.append(len(pipeline._live) + 1))
        pipeline.step(batches)
        assert not pipeline._live and not pipeline._border and not pipeline._messages._sent
        return max(seen)

    assert rl.simulate(3, body) == [peak_live(actions) for actions in schedule.ranks]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "dualpipe-v"])
def test_gradients_that_leave_before_the_weights_products_are_the_same(name):
    schedule = send_gradients_first(make_schedule(name, 3 * CHUNKS[name], 4))
    assert len(schedule.split) >= 2, "those that send something back"
    results = rl.simulate(3, lambda w: run(w, lambda: gpt_pieces(make_gpt()), gpt_loss, schedule, token_batches(4)))
    expect_equal(results, gpt_alone(4))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_stages_that_compute_their_forward_again_may_have_their_backward_in_two_parts(name, reentrant):
    def pieces():
        return [(parts, partial(checkpoint, f, use_reentrant=reentrant)) if 0 < i < 7 else (parts, f)
                for i, (parts, f) in enumerate(gpt_pieces(make_gpt()))]

    schedule = send_gradients_first(make_schedule(name, 2, 3))
    results = rl.simulate(2, lambda w: run(w, pieces, gpt_loss, schedule, token_batches(3)))
    expect_equal(results, gpt_alone(3))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "interleaved"])
def test_sent_tensors_are_let_go_while_the_step_goes_on(name):
    schedule = with_messages(make_schedule(name, 4 * CHUNKS[name], 64))
    for rank, actions in enumerate(schedule.ranks):
        proven, held, most = proven_arrivals(schedule, rank), 0, 0
        for action in actions:
            held += action.kind.startswith("SEND") - len(proven.get(action, ()))
            most = max(most, held)
        assert most <= 4 * 4 * CHUNKS[name], "depends on the stages, not on 64 micro-batches"


def test_a_long_step_holds_no_more_messages_than_a_short_one():
    def body(world):
        pipeline = Pipeline({world.rank: nn.Linear(4, 4)}, world, make_schedule("1f1b", 3, 24), lambda y, _: (y.sum(), 1))
        seen = {"sent": 0, "open": 0}
        pipeline.stages[world.rank].register_forward_hook(lambda *_: seen.update(
            sent=max(seen["sent"], len(pipeline._messages._sent)), open=max(seen["open"], len(pipeline._messages._open))))
        for _ in range(2):
            pipeline.step([(torch.ones(2, 4), None)] * 24)
        return seen

    for seen in rl.simulate(3, body):
        assert seen["sent"] <= 2 * 3 and seen["open"] == AHEAD


def test_steps_that_all_bring_new_shapes_equal_one_process_and_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(messages, "KEPT", 4)
    rows = range(1, 21)

    def body(world):
        stage, most = linear(4, 4), 0
        pipeline = Pipeline({world.rank: stage}, world, make_schedule("1f1b", 2, 2), lambda y, _: (y.sum(), 1))
        for some in zip(rows[::2], rows[1::2]):
            pipeline.step([(torch.ones(n, 4, dtype=torch.float64), None) for n in some])
            most = max(most, len(pipeline._messages._numbers), len(pipeline._messages._known) // 2)   # one for each way
        return most, {name: param.grad for name, param in stage.named_parameters()}

    alone = nn.Sequential(linear(4, 4), linear(4, 4))
    alone(torch.ones(sum(rows), 4, dtype=torch.float64)).sum().backward()
    for stage, (most, grads) in zip(alone, rl.simulate(2, body)):
        assert most <= 4 + 2
        expect_close(grads, {name: param.grad for name, param in stage.named_parameters()}, RTOL)


def test_loss_without_gradients_is_the_same_for_any_number_of_micro_batches():
    schedule, batches = make_schedule("interleaved", 6, 4), token_batches(7, lengths=(8, 5))

    def body(world):
        stages = make_stages(gpt_pieces(make_gpt()), balance([1.0] * 8, 6))
        held = {stage: stages[stage] for stage in schedule.held_by(world.rank)}
        pipeline = Pipeline(held, world, schedule, gpt_loss, tied=find_tied(stages))
        pipeline.step(batches[:4])
        for stage in held.values():
            stage.zero_grad()
        totals = pipeline.evaluate(batches)
        assert all(p.grad is None for stage in held.values() for p in stage.parameters())
        assert not pipeline._live, "nothing is kept for a backward"
        return totals

    expected, _ = one_process(gpt_pieces(make_gpt()), gpt_loss, batches)
    for totals in rl.simulate(3, body):
        torch.testing.assert_close(totals, expected, rtol=RTOL, atol=0)


def test_gathers_and_reductions_are_called_where_the_plan_has_them():
    schedule = apply_pass(apply_pass(make_schedule("breadth-first", 4, 2), add_gathers), add_reductions)
    batches, called = token_batches(2), {0: [], 1: []}

    def body(world):
        log = called[world.rank]
        return run(world, lambda: gpt_pieces(make_gpt()), gpt_loss, schedule, batches,
                   hooks=Hooks(gather=lambda stage: log.append(f"GATHER@{stage}"), reduce=lambda stage: log.append(f"REDUCE@{stage}")))

    expect_equal(rl.simulate(2, body), one_process(gpt_pieces(make_gpt()), gpt_loss, batches))
    assert called == {rank: [str(a) for a in actions if a.microbatch is None] for rank, actions in enumerate(schedule.ranks)}


def test_gradients_of_several_steps_add_up_also_of_a_tied_parameter():
    batches, pieces = token_batches(2), lambda: gpt_pieces(make_gpt())

    def body(world):
        stages = make_stages(pieces(), [3, 5])
        pipeline = Pipeline({world.rank: stages[world.rank]}, world, make_schedule("1f1b", 2, 1), gpt_loss, tied=find_tied(stages))
        totals = sum(pipeline.step([batch]) for batch in batches)
        return totals, {name: p.grad for name, p in stages[world.rank].named_parameters()}

    expect_equal(rl.simulate(2, body), one_process(pieces(), gpt_loss, batches))


def routed_pieces():
    """A GPT with experts, whose routers leave a loss of their own in their stage."""
    experts = MoEConfig(experts=3, top_k=2, ffn=6, balance_loss=0.1, router_z_loss=0.01)
    config = GPTConfig(vocab_size=19, seq_len=8, width=8, layers=2, heads=2, kv_heads=1, ffn=12, moe=experts)
    return gpt_pieces(GPT(config, seed=3, dtype=torch.float64))


@pytest.mark.parametrize("order", [2.0, 1, "inf"])
@pytest.mark.parametrize("mesh", [rl.Mesh(pipe=2), rl.Mesh(pipe=3), rl.Mesh(pipe=2, tensor=2)])
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_clipping_over_all_stages_is_that_of_the_whole_model(name, mesh, order):
    """The embedding and the head are tied: on two ranks, or in two stages of one. Tensor ranks share the KV head."""
    whole = make_gpt()
    for tokens, targets in token_batches(6):
        gpt_loss(make_stages(gpt_pieces(whole), [len(gpt_pieces(whole))])[0](tokens), targets)[0].backward()
    expected = {name: p.grad for name, p in whole.named_parameters()}
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.01, float(order))

    def body(world):
        model, tensor = make_gpt(), world.group("tensor")
        if tensor.size > 1:
            rl.tensor_parallel(model, None, tensor)
        pipe = rl.pipeline(gpt_pieces(model), gpt_answer(model), world.group("pipe"), schedule=name, microbatches=6)
        pipe.step(token_batches(6))
        found, after = pipe.clip_grad_norm_(0.01, order), pipe.clip_grad_norm_(1.0, order)
        mine = {id(param) for stage in pipe.stages.values() for param in stage.parameters()}
        grads = {name: param.grad for name, param in model.named_parameters() if id(param) in mine}
        return found, after, joined(grads, model, tensor)

    seen = set()
    for found, after, grads in rl.simulate(mesh, body):
        assert abs(found / norm - 1) < RTOL and abs(after / 0.01 - 1) < 1e-3   # the epsilon in the factor
        seen |= grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, dict(whole.named_parameters())[name].grad, rtol=RTOL, atol=RTOL * float(norm))
    assert seen == expected.keys()


def test_a_tied_parameter_that_was_frozen_since_its_gradient_came_counts_once_in_the_norm():
    def body(world):
        pipe = rl.pipeline(gpt_pieces(make_gpt()), gpt_answer(make_gpt()), world, microbatches=2)
        pipe.step(token_batches(2))
        norm = pipe.clip_grad_norm_(1e9)
        for stage in pipe.stages.values():
            stage.requires_grad_(False)
        return norm, pipe.clip_grad_norm_(1e9)

    for trained, frozen in rl.simulate(2, body):
        assert torch.equal(trained, frozen)


def test_clipping_stages_of_which_only_some_were_cut_is_refused_on_all_ranks():
    def body(world):
        tensor = world.group("tensor")
        stages = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))]
        for param in nn.ModuleList(stages).parameters():
            nn.init.ones_(param)
        rl.tensor_parallel(stages[1], {"0": "colwise", "1": "rowwise"}, tensor)
        pipe = world.group("pipe")
        held = {pipe.rank: stages[pipe.rank]}
        with pytest.raises(ConfigError, match="the stages of some ranks were cut over tensor or expert ranks"):
            Pipeline(held, pipe, make_schedule("1f1b", 2, 2), gpt_loss).clip_grad_norm_(1.0)

    rl.simulate(rl.Mesh(pipe=2, tensor=2), body)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_losses_that_routers_leave_in_a_stage_are_counted_and_trained(name):
    batches, schedule = token_batches(3), make_schedule(name, 3, 3)
    (whole,) = make_stages(routed_pieces(), [4])

    def with_extra(output, targets):
        total, count = gpt_loss(output, targets)
        return total + take_auxiliary_loss(whole), count

    expected = torch.zeros(2, dtype=torch.float64)
    for tokens, targets in batches:
        total, count = with_extra(whole(tokens), targets)
        total.backward()
        expected += torch.tensor([total.item(), float(count)], dtype=torch.float64)
    grads = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}
    results = rl.simulate(3, lambda w: run(w, routed_pieces, gpt_loss, schedule, batches))
    expect_equal(results, (expected, grads))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_gradients_are_of_the_scaled_loss_and_the_loss_is_told_unscaled(name):
    batches, schedule = token_batches(3), make_schedule(name, 3, 3)
    totals, grads = gpt_alone(3)
    results = rl.simulate(3, lambda w: run(w, lambda: gpt_pieces(make_gpt()), gpt_loss, schedule, batches, hooks=Hooks(scale=lambda: 8.0)))
    expect_equal(results, (totals, {key: 8 * grad for key, grad in grads.items()}))


def test_before_each_forward_and_backward_its_micro_batch_is_told():
    schedule, told = make_schedule("1f1b", 2, 3), {0: [], 1: []}
    rl.simulate(2, lambda w: small(w, schedule, 3, hooks=Hooks(before=told[w.rank].append)))
    assert told == {rank: [a.microbatch for a in actions] for rank, actions in enumerate(schedule.ranks)}


def test_ranks_may_take_micro_batches_in_different_orders():
    schedule = parse_schedule("F0@0 F1@0 F2@0 B1@0 B2@0 B0@0\nF2@1 F0@1 B0@1 F1@1 B2@1 B1@1")
    batches = token_batches(3, lengths=(8, 5, 8))
    results = rl.simulate(2, lambda w: run(w, lambda: gpt_pieces(make_gpt()), gpt_loss, schedule, batches, steps=2))
    expect_equal(results, one_process(gpt_pieces(make_gpt()), gpt_loss, batches))


def test_so_they_may_where_a_stage_ignores_its_input_for_some():
    """Then a header says of each gradient whether it comes, and headers come in another order than they are asked for."""
    def build():
        first, second = linear(4, 4), linear(4, 4)
        hears = lambda x, number: second(torch.ones_like(x) if int(number) in (1, 2) else x)
        return [({"first": first}, lambda x: (first(x), x[0, 0])), ({"second": second}, hears)]

    schedule = parse_schedule("F3@0 F0@0 F1@0 F2@0 B1@0 B3@0 B0@0 B2@0\nF3@1 F0@1 F1@1 B0@1 B1@1 F2@1 B2@1 B3@1")
    loss, batches = lambda y, _: (y.square().sum(), 1), [(torch.full((2, 4), float(i), dtype=torch.float64), None) for i in range(4)]
    results = rl.simulate(2, lambda w: run(w, build, loss, schedule, batches))
    expect_equal(results, one_process(build(), loss, batches))


@pytest.mark.parametrize("name", ["1f1b", "dualpipe-v"])
def test_random_delays_before_every_message_change_nothing(name):
    schedule, batches = make_schedule(name, 3 * CHUNKS[name], 5), token_batches(5, lengths=(8, 4))

    def body(world):
        draw = random.Random(world.rank)
        for verb in ("send", "recv"):
            setattr(world, verb, late(getattr(world, verb), draw, 0.003))
        return run(world, lambda: gpt_pieces(make_gpt()), gpt_loss, schedule, batches, steps=2)

    expect_equal(rl.simulate(3, body), one_process(gpt_pieces(make_gpt()), gpt_loss, batches))


def in_a_process(world):
    """At the top of the module, so that a process can be told to run it."""
    return run(world, lambda: gpt_pieces(make_gpt()), gpt_loss, make_schedule("zb-v", 4, 5), token_batches(5, lengths=(8, 4)), steps=2)


def test_processes_equal_one_process_too():
    expect_equal(rl.spawn(2, in_a_process), one_process(gpt_pieces(make_gpt()), gpt_loss, token_batches(5, lengths=(8, 4))))


# ---------------------------------------------------------------------- mistakes


def small(world, schedule, microbatches=2, module=None, loss=lambda y, _: (y.sum(), 1), batches=None, **options):
    """One step of a schedule over linear layers."""
    module = module or nn.Linear(4, 4)
    batches = batches or [(torch.ones(2, 4), None)] * microbatches
    return Pipeline(dict.fromkeys(schedule.held_by(world.rank), module), world, schedule, loss, **options).step(batches)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"microbatches": 3}, BatchError, "rank 0: step in group 'world': 3 micro-batches for a schedule of 2; make one"),
    ({"loss": lambda y, _: y.mean()}, LossError, r"F0@0 in group 'world': the loss function returned .*expected \(sum, count\)"),
    ({"loss": lambda y, _: (y, 1)}, LossError, r"expected \(sum, count\)"),
    ({"loss": lambda y, _: (y.sum(), 1, y)}, LossError, r"expected \(sum, count\)"),
    ({"loss": lambda y, _: (y.sum(), None)}, LossError, "F0@0 in group 'world': the loss function counted a NoneType, expected one number"),
    ({"loss": lambda y, _: (y.sum().detach(), 1)}, LossError, "F0@0 in group 'world': the sum .* has no gradient; was it detached"),
    ({"batches": [("text", None)] * 2}, ConfigError, "a micro-batch gives str; stages take and return tensors, one or several"),
])
def test_a_mistake_is_refused_with_what_was_expected(options, error, message):
    with pytest.raises(error, match=message):
        rl.simulate(1, lambda w: small(w, make_schedule("1f1b", 1, 2), **options))


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused_on_all_ranks(off):
    def body(world):
        with off(), pytest.raises(LossError, match="step in group 'world': gradients are switched off"):
            small(world, make_schedule("1f1b", 2, 2))

    rl.simulate(2, body)


@pytest.mark.parametrize("call", [Pipeline.step, Pipeline.evaluate])
def test_micro_batches_in_no_list_are_refused(call):
    with pytest.raises(ConfigError, match="microbatches .*generator.* a list of micro-batches, each \\(input of stage 0, targets\\)"):
        rl.simulate(1, lambda w: call(Pipeline({0: nn.Linear(1, 1)}, w, make_schedule("1f1b", 1, 1), None), (pair for pair in [])))


def test_a_plan_or_stages_that_do_not_fit_are_refused_on_all_ranks():
    schedules = {"a schedule for 3 ranks in a group of 2": make_schedule("1f1b", 3, 2),
                 "stage 0 is on rank 1": parse_schedule("F0@0\nB0@0")}
    for message, schedule in schedules.items():
        with pytest.raises(ConfigError, match=message):
            rl.simulate(2, lambda w, schedule=schedule: small(w, schedule))
    with pytest.raises(ConfigError, match=r"given stages \[0\], but the schedule has \[0, 1\] on this rank"):
        rl.simulate(1, lambda w: Pipeline({0: nn.Linear(1, 1)}, w, make_schedule("interleaved", 2, 1), None))
    with pytest.raises(ConfigError, match="the schedule has GATHER actions; say what they do with Hooks\\(gather="):
        rl.simulate(1, lambda w: small(w, apply_pass(make_schedule("1f1b", 1, 2), add_gathers)))


# ---------------------------------------------------------------------- messages as NCCL carries them


@pytest.mark.gloo
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_equal_one_process_where_tags_mean_nothing(name, ranks, one_queue):
    expect_gpt_equal(name, ranks, 5, steps=2, lengths=(8, 3))


@pytest.mark.gloo
def test_gradients_that_nobody_wants_are_not_waited_for_where_tags_mean_nothing(one_queue):
    batches = [tuple(t[start:start + 5] for t in make_batches(1)[0]) for start in range(0, 25, 5)]
    schedule = make_schedule("zb-v", 4, len(batches))
    results = rl.simulate(2, lambda w: run(w, awkward_pieces, awkward_loss, schedule, batches, steps=2))
    expect_equal(results, one_process(awkward_pieces(), awkward_loss, batches))


@pytest.mark.gloo
def test_stages_give_each_other_complex_and_short_numbers_where_the_backend_knows_neither(one_queue):
    def pieces():
        first, second = linear(4, 4), linear(4, 4)
        return [({"first": first}, lambda x: (torch.complex(first(x), x), torch.arange(4, dtype=torch.int16))),
                ({"second": second}, lambda x, weight: second(x.abs() * weight))]

    loss, batches = lambda y, _: (y.square().sum(), 1), [(torch.ones(2, 4, dtype=torch.float64), None)] * 3
    results = rl.simulate(2, lambda w: run(w, pieces, loss, make_schedule("1f1b", 2, 3), batches, steps=2))
    expect_equal(results, one_process(pieces(), loss, batches))


def test_connections_are_made_before_the_first_step_by_all_ranks_in_one_order(one_queue, monkeypatch):
    """Who makes one waits for the other rank, so in different orders all might wait in a circle."""
    made = []
    for name in ("send", "recv"):
        monkeypatch.setattr(rl.Group, name, lambda group, x, peer, name=name, label="": made.append((group.rank, name, peer, label)))
    schedule = make_schedule("interleaved", 6, 3)
    rl.simulate(3, lambda w: Pipeline(dict.fromkeys(schedule.held_by(w.rank), nn.Linear(1, 1)), w, schedule, None))
    pairs = [(frm, to) for frm in range(3) for to in range(3) if frm != to]   # the ring of stages 0 to 5, forth and back
    for rank in range(3):
        assert [call for call in made if call[0] == rank] == [
            (rank, "send", to, "hello") if rank == frm else (rank, "recv", frm, "hello") for frm, to in pairs if rank in (frm, to)]


@pytest.mark.gloo
def test_an_evaluation_equals_one_process_where_tags_mean_nothing(one_queue):
    schedule, batches = make_schedule("interleaved", 4, 4), token_batches(6)

    def body(world):
        stages = make_stages(gpt_pieces(make_gpt()), [2] * 4)
        return Pipeline({s: stages[s] for s in schedule.held_by(world.rank)}, world, schedule, gpt_loss).evaluate(batches)

    for totals in rl.simulate(2, body):
        torch.testing.assert_close(totals, gpt_alone(6)[0], rtol=RTOL, atol=0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_receives_are_opened_in_the_order_of_sending(name):
    schedule = with_messages(make_schedule(name, 4 * CHUNKS[name], 8))
    for actions in schedule.ranks:
        receives = [action for action in actions if action.kind.startswith("RECV")]
        opened = in_order_of_sending(receives, schedule)
        assert sorted(opened) == sorted(receives)
        for peer in {schedule.owner[needs(receive, schedule)[0].stage] for receive in receives}:
            sent = [action for action in schedule.ranks[peer] if action.kind.startswith("SEND")]
            from_peer = [needs(receive, schedule)[0] for receive in opened if schedule.owner[needs(receive, schedule)[0].stage] == peer]
            assert from_peer == [send for send in sent if send in from_peer]


def test_the_folded_schedules_do_send_in_another_order_than_they_receive():
    """Else the tests above prove nothing."""
    schedule = with_messages(make_schedule("zb-v", 8, 8))
    receives = [[action for action in actions if action.kind.startswith("RECV")] for actions in schedule.ranks]
    assert any(in_order_of_sending(mine, schedule) != mine for mine in receives)


def test_a_process_group_without_tags_and_without_a_second_connection_is_refused(monkeypatch):
    assert rl.simulate(2, lambda w: w.in_order) == [False, False]
    monkeypatch.setattr(rl.Group, "in_order", property(lambda self: True))
    with pytest.raises(ConfigError, match="stages need a second connection, which a process group made elsewhere cannot give"):
        rl.simulate(2, lambda w: small(rl.Group(w._process_group), make_schedule("1f1b", 2, 2)))


class Moody(nn.Module):
    """Gives something else the second time."""

    def __init__(self, second):
        super().__init__()
        self.layer, self.calls, self.second = nn.Linear(4, 4), 0, second

    def forward(self, x):
        self.calls += 1
        return self.layer(x) if self.calls == 1 else self.second(self.layer(x))


@pytest.mark.parametrize(("second", "shown"), [(lambda y: y[:1], r"\(1, 4\), gradient=True\)"), (lambda y: (y, y), r".*\(2, 4\), .*")])
def test_a_stage_whose_output_has_another_shape_for_the_same_input_is_named(second, shown):
    with pytest.raises(ShapeMismatch, match=rf"rank 0: SEND_F1@0 .*dims={shown}.*neither shapes nor what needs"):
        rl.simulate(2, lambda w: small(w, make_schedule("1f1b", 2, 2), module=Moody(second)))


class Wide(nn.Module):
    """Returns something that no header describes."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, *_):
        return self.output


@pytest.mark.parametrize(("output", "message"), [
    ({"x": torch.ones(1)}, "stage 0 gives dict"), ((torch.ones(1),) * 16, "16 tensors of 16 dims in all are more than one message"),
    ((), "stage 0 gives nothing; stages take and return tensors"),
    (torch.ones(1).to(torch.float8_e4m3fn), "a tensor of torch.float8_e4m3fn cannot go from stage to stage"),
])
def test_what_cannot_travel_between_stages_is_refused(output, message):
    with pytest.raises(ConfigError, match=message):
        rl.simulate(2, lambda w: small(w, make_schedule("1f1b", 2, 2), module=Wide(output)))


def test_activations_of_a_step_that_failed_do_not_outlive_the_next_call():
    made = []

    def notes(module, args, output):
        made.append(weakref.ref(output.untyped_storage()))

    def loss(output, fails):
        if fails:
            raise LossError("no loss")
        return output.sum(), 1

    def body(world):
        stages = [nn.Linear(2, 2), nn.Linear(2, 2)]
        stages[0].register_forward_hook(notes)
        pipeline = Pipeline(dict(enumerate(stages)), world, parse_schedule("F0@0 F1@0 F0@1 F1@1 B0@1 B1@1 B0@0 B1@0"), loss)
        with pytest.raises(LossError):
            pipeline.step([(torch.ones(1, 2), True)] * 2)
        pipeline.evaluate([(torch.ones(1, 2), False)])
        gc.collect()
        assert len(made) == 3 and not any(ref() for ref in made)

    rl.simulate(1, body)
