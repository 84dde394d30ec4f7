"""What a rank holds of a parameter, the way back to the whole, and gradients of which each rank has one term."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import rankloom as rl
from rankloom.base.errors import ConfigError, ModelMismatch, ShapeMismatch
from rankloom.base.layout import Span
from rankloom.parallel.model_split import ModelSplit, full_state_dict, load_full_state_dict
from rankloom.parallel.tensor.holding import Holding, cut_each, cut_padded, cut_shared, holdings, sum_partial_gradients
from split_model import joined


def make(**shape) -> rl.GPT:
    numbers = dict(vocab_size=13, seq_len=8, width=16, layers=1, heads=8, kv_heads=2, ffn=16) | shape
    return rl.GPT(rl.GPTConfig(**numbers), seed=3, dtype=torch.float64)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 6))
def test_pieces_cover_every_element_once_and_are_equally_long(units, ranks):
    spans = cut_each([n * ranks for n in units], ranks)
    covered = sorted(i for held in spans for start, stop in held for i in range(start, stop))
    assert covered == list(range(sum(units) * ranks))
    assert {sum(stop - start for start, stop in held) for held in spans} == {sum(units)}


@given(st.integers(0, 40), st.integers(1, 8))
def test_padded_spans_cover_every_element_once_and_none_is_longer_than_the_part(length, ranks):
    part, spans = cut_padded(length, ranks)
    assert [i for held in spans for start, stop in held for i in range(start, stop)] == list(range(length))
    assert all(stop - start <= part for held in spans for start, stop in held) and part * ranks < length + ranks


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_shared_units_are_held_by_equally_many_neighbours(units, copies, width):
    spans = cut_shared(units, width, units * copies)
    assert spans == tuple((Span(rank // copies * width, (rank // copies + 1) * width),) for rank in range(units * copies))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("length", "spans"), [(4, cut_each([8], 2)), (4, cut_each([4, 4], 2)), (5, cut_padded(8, 2)[1]),
                                               (2, cut_shared(2, 2, 4)), (8, (((Span(0, 8)),),) * 3)])
def test_what_is_cut_joins_to_the_whole(length, spans, dim):
    whole = torch.arange(24.0).view(8, 3) if dim == 0 else torch.arange(24.0).view(3, 8)
    held = Holding(tuple(whole.shape), length, dim, spans)
    parts = [held.cut(whole, rank) for rank in range(len(spans))]
    assert all(tuple(part.shape) == held.local_shape for part in parts)
    covered = torch.tensor(sorted({i for own in spans for start, stop in own for i in range(start, stop)}))
    assert torch.equal(held.join(parts).index_select(dim, covered), whole.index_select(dim, covered))


def test_the_copy_is_the_ranks_own():
    whole = torch.zeros(4, 2)
    for held in (Holding((4, 2)), Holding((4, 2), 2, 0, cut_each([4], 2))):
        held.cut(whole, 0).add_(1.0)
        assert not whole.any()


def test_a_tensor_of_another_shape_is_not_cut():
    with pytest.raises(ShapeMismatch, match=r"rank 1: a tensor of shape \(3, 2\), expected the whole of \(4, 2\)"):
        Holding((4, 2), 2, 0, cut_each([4], 2)).cut(torch.zeros(3, 2), 1)
    with pytest.raises(ShapeMismatch, match="9 does not divide by 2 ranks"):
        cut_each([9], 2)


def test_holdings_say_how_every_parameter_lies_and_who_holds_the_same():
    def body(world):
        model = rl.tensor_parallel(make(), make().tp_sequence_plan, world)
        held = holdings(model)
        assert {name: value.local_shape for name, value in held.items()} == {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert {name: value.shape for name, value in held.items()} == {name: tuple(p.shape) for name, p in make().named_parameters()}
        partial = sorted(name for name, value in held.items() if value.grad_partial)
        names = ("blocks.0.attention.key.weight", "norm.weight", "blocks.0.mlp.up.weight")
        return partial, *(held[name].sharers(world.rank, world.size) for name in names)

    norms = ["blocks.0.attention_norm.weight", "blocks.0.mlp_norm.weight", "norm.weight"]
    heads = ["blocks.0.attention.key.weight", "blocks.0.attention.value.weight"]
    assert rl.simulate(2, body) == [(norms, (rank,), (0, 1), (rank,)) for rank in range(2)]
    assert rl.simulate(4, body) == [(sorted(norms + heads), (rank // 2 * 2, rank // 2 * 2 + 1), (0, 1, 2, 3), (rank,)) for rank in range(4)]


@pytest.mark.parametrize("plan", ["tp_plan", "tp_sequence_plan"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_element_counts_once_in_a_norm_over_ranks(ranks, plan):
    def body(world):
        model = rl.tensor_parallel(make(), getattr(make(), plan), world)
        held = holdings(model)
        mine = sum(p.detach().square().sum() / len(held[name].sharers(world.rank, ranks)) for name, p in model.named_parameters())
        return world.all_reduce(mine).sqrt()

    truth = torch.linalg.vector_norm(torch.cat([p.flatten() for p in make().parameters()])).detach()
    for norm in rl.simulate(ranks, body):
        torch.testing.assert_close(norm, truth, rtol=1e-12, atol=0)


@pytest.mark.parametrize("plan", ["tp_plan", "tp_sequence_plan"])
def test_gradients_summed_once_a_step_are_those_summed_in_backward(plan):
    def body(world, finish):
        model = rl.tensor_parallel(make(), getattr(make(), plan), world, finish_gradients=finish)
        ids = torch.randint(0, 13, (2, 8), generator=torch.Generator().manual_seed(1))
        for _ in range(2):   # accumulated
            model(ids, targets=ids)[0].backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        if not finish:
            sum_partial_gradients(grads.items(), holdings(model), world)
        return joined(grads, model, world)

    for once, always in zip(rl.simulate(4, lambda world: body(world, False)), rl.simulate(4, lambda world: body(world, True))):
        torch.testing.assert_close(once, always, rtol=1e-12, atol=1e-14)


def test_ranks_that_hold_the_same_get_the_same_bits():
    def body(world):
        model = rl.tensor_parallel(make(kv_heads=1), make().tp_sequence_plan, world)
        ids = torch.randint(0, 13, (2, 8), generator=torch.Generator().manual_seed(1))
        model(ids, targets=ids)[0].backward()
        held = holdings(model)
        return {name: p.grad for name, p in model.named_parameters() if len(held[name].sharers(world.rank, world.size)) == world.size}

    first, *others = rl.simulate(4, body)
    assert len(first) == 5
    for grads in others:
        torch.testing.assert_close(grads, first, rtol=0, atol=0)


def test_three_ranks_that_share_a_unit_add_in_the_same_order():
    held = {"unit": Holding((2, 500), 1, 0, cut_shared(2, 1, 6), grad_partial=True)}

    def body(world):
        gradient = torch.randn(1, 500, generator=torch.Generator().manual_seed(world.rank))
        sum_partial_gradients([("unit", gradient)], held, world)
        return gradient

    sums = rl.simulate(6, body)
    for first in (0, 3):
        terms = [torch.randn(1, 500, generator=torch.Generator().manual_seed(rank)) for rank in range(first, first + 3)]
        torch.testing.assert_close(sums[first], terms[0] + terms[1] + terms[2], rtol=1e-5, atol=1e-6)
        assert torch.equal(sums[first], sums[first + 1]) and torch.equal(sums[first], sums[first + 2])


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_on_the_meta_device_is_cut_and_filled_from_whole_tensors(ranks):
    whole = make().state_dict()

    def body(world):
        model = rl.GPT(make().config, device="meta")
        rl.tensor_parallel(model, None, world)
        assert all(p.is_meta for p in model.parameters()) and world.ledger.bytes < 4000   # the plan, no weights
        model.double().to_empty(device="cpu")
        load_full_state_dict(model, whole, world)
        return full_state_dict(model, world), model(torch.arange(8)[None]).detach()

    logits = make()(torch.arange(8)[None]).detach()
    for state, mine in rl.simulate(ranks, body):
        torch.testing.assert_close(state, dict(whole), rtol=0, atol=0)
        torch.testing.assert_close(mine, logits, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_a_model_that_is_cut_and_then_sharded_is_loaded_from_whole_tensors(backend):
    whole = {name: torch.full_like(value, 0.5) for name, value in make().state_dict().items()}

    def body(world):
        over = world.group("tensor")
        model = rl.fully_shard(rl.tensor_parallel(make(), None, over), world.group("shard"))
        before = full_state_dict(model, over)
        load_full_state_dict(model, whole, over)
        model(torch.arange(8)[None]).sum().backward()
        load_full_state_dict(model, before, over)
        load_full_state_dict(model, whole, over)
        return before, full_state_dict(model, over)

    for before, after in rl.simulate(rl.Mesh(shard=2, tensor=2), body, backend=backend):
        torch.testing.assert_close(before, dict(make().state_dict()), rtol=0, atol=0)
        torch.testing.assert_close(after, whole, rtol=0, atol=0)


def test_a_state_with_other_names_or_shapes_is_not_loaded():
    def body(world):
        model = rl.tensor_parallel(make(), None, world)
        state = full_state_dict(model, world)
        with pytest.raises(ModelMismatch, match=r"1 names of the state differ from the model's; norm.weight is missing"):
            load_full_state_dict(model, {name: value for name, value in state.items() if name != "norm.weight"}, world)
        with pytest.raises(ModelMismatch, match="extra is not in the model"):
            load_full_state_dict(model, state | {"extra": torch.zeros(1)}, world)
        with pytest.raises(ShapeMismatch, match=r"head.weight in group 'world' has shape \(12, 16\), the model's has \(13, 16\)"):
            load_full_state_dict(model, state | {"head.weight": state["head.weight"][1:]}, world)
        with pytest.raises(ConfigError, match="state=None is of type NoneType, expected names and whole tensors"):
            load_full_state_dict(model, None, world)
        with pytest.raises(ShapeMismatch, match=r"head.weight in group 'world' has shape \(2, 2\), the plan expects \(7, 16\)"):
            ModelSplit.found_in(model, world.alone()).join("head.weight", torch.zeros(2, 2))

    rl.simulate(2, body)


def test_buffers_moments_extra_state_and_modules_of_two_names_come_along():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 8, dtype=torch.float64)
            self.register_buffer("seen", torch.arange(3.0))
            self.note: object = {"steps": 3}

        def get_extra_state(self):
            return self.note

        def set_extra_state(self, state):
            self.note = state

    def body(world):
        model = Counting()
        with torch.no_grad():
            model.up.weight.copy_(torch.arange(32.0).view(8, 4))
            model.up.bias.copy_(torch.arange(8.0))
        model = nn.ModuleList([model, model])   # one module under two names
        rl.tensor_parallel(model, {"0.up": "colwise"}, world)
        moments = {name: p.detach() * 2 for name, p in model.named_parameters()}
        state, parts = full_state_dict(model, world), copy.deepcopy(dict(model.state_dict()))
        model[0].note = None
        load_full_state_dict(model, state, world)
        torch.testing.assert_close(dict(model.state_dict()), parts, rtol=0, atol=0)
        return state, joined(moments, model, world)

    for state, moments in rl.simulate(2, body):
        assert torch.equal(state["0.seen"], torch.arange(3.0)) and state["0._extra_state"] == {"steps": 3}
        assert torch.equal(moments["0.up.weight"], 2 * torch.arange(32.0, dtype=torch.float64).view(8, 4)) and torch.equal(
            moments["0.up.bias"], 2 * state["0.up.bias"])
        assert torch.equal(state["1.up.weight"], state["0.up.weight"])
