"""Clipping in a loop of one's own where expert ranks hold other experts; tensor ranks are in tensor/test_with_data.py."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.parallel.clip import clip_grad_norm_
from rankloom.parallel.expert import expert_parallel, gradient_axes
from rankloom.parallel.model_split import ModelSplit, full_state_dict, load_full_state_dict
from rankloom.parallel.tensor.holding import holdings

from .tensor.test_gpt import make
from .test_expert import RTOL, batch_of, make_model, train_once


def sum_gradients(model, world) -> None:
    """Of the ranks that have different tokens."""
    for param, axes in zip(model.parameters(), gradient_axes(model).values(), strict=True):
        group = world.group(*(axis for axis in axes if axis in ("replicate", "expert")))
        if param.grad is not None and group.size > 1:
            param.grad = group.all_reduce(param.grad.contiguous())


def ones(*features: int) -> nn.Linear:
    layer = nn.Linear(*features)
    for param in layer.parameters():
        nn.init.ones_(param)
    return layer


@pytest.mark.parametrize("order", [2.0, 1, "inf"])
@pytest.mark.parametrize("mesh", [rl.Mesh(expert=2), rl.Mesh(expert=3), rl.Mesh(replicate=2, expert=2), rl.Mesh(tensor=2, expert=2)])
def test_the_norm_over_expert_ranks_is_that_of_one_process(mesh, order):
    model, (rows, targets) = make_model(), batch_of(rows=12)
    truth = copy.deepcopy(model)
    train_once(truth, (rows, targets))
    norm = nn.utils.clip_grad_norm_(truth.parameters(), 0.1, float(order))

    def body(world):
        mine, data = copy.deepcopy(model), world.group("replicate", "expert")
        mine = rl.tensor_parallel(mine, None, world.group("tensor")) if mesh.tensor > 1 else mine
        mine = expert_parallel(mine, world.group("expert"))
        at = slice(data.rank, None, data.size)
        train_once(mine, (rows[at], targets[at]))
        sum_gradients(mine, world)
        found = clip_grad_norm_(mine, 0.1, order)
        return found, clip_grad_norm_(mine, 1.0, order), mine.norm.weight.grad

    for found, after, grad in rl.simulate(mesh, body):
        assert abs(found / norm - 1) < RTOL and abs(after / 0.1 - 1) < 1e-4   # the epsilon in the factor
        torch.testing.assert_close(grad, truth.norm.weight.grad, rtol=RTOL, atol=RTOL)


def test_what_fully_shard_returned_clips_itself():
    def body(world):
        sharded = rl.fully_shard(ones(4, 3), world)
        sharded(torch.ones(2, 4)).sum().backward()
        return clip_grad_norm_(sharded, 0.5).item(), sharded.clip_grad_norm_(1.0).item()

    for before, after in rl.simulate(2, body):
        assert before == pytest.approx((15 * 4) ** 0.5, rel=1e-6) and after == pytest.approx(0.5, rel=1e-5)


def test_gradients_that_have_a_graph_are_clipped_outside_of_it():
    def body(world):
        model = rl.tensor_parallel(nn.Sequential(ones(4, 3)), {"0": "rowwise"}, world.alone())
        loss = model(torch.ones(2, 4)).square().sum()
        model[0].weight.grad, = torch.autograd.grad(loss, model[0].weight, create_graph=True)
        return model[0].weight.grad.requires_grad, clip_grad_norm_(model, 0.5).requires_grad

    assert rl.simulate(1, body) == [(True, False)]


def test_a_part_that_fully_shard_has_cut_is_not_clipped_for_itself():
    """torch's function would see a slice of the gradients, and ranks would scale differently."""
    def body(world):
        sharded = rl.fully_shard(ones(4, 3), world)
        model = nn.Sequential(sharded, ones(3, 1))
        model(torch.ones(2, 4)).sum().backward()
        for outer in (model, sharded.module):
            with pytest.raises(rl.ConfigError, match=r"each rank holds a slice of \S*weight only. Call the method of this name of"):
                clip_grad_norm_(outer, 1.0)

    rl.simulate(2, body)


def spread_experts(world):
    return expert_parallel(make_model(), world.group("expert"))


def cut_matrices(world):
    return rl.tensor_parallel(make(), None, world.group("tensor"))


def replicas(model, group):
    return rl.fully_shard(model, group.alone(), replicas=group)


@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard, replicas])
@pytest.mark.parametrize(("split", "axis"), [(spread_experts, "expert"), (cut_matrices, "tensor")])
def test_a_group_whose_ranks_hold_other_parts_is_refused(split, axis, wrap):
    """Their gradients are of other elements: the mean would be of apples and pears."""
    def body(world):
        model, same = split(world), world.group("replicate")
        for group in (world, world.group(axis)):
            with pytest.raises(rl.ConfigError, match=rf"rank \d holds another part of the model, which was cut along the axis '{axis}'"):
                wrap(model, group)
        return wrap(model, same) is not None

    assert rl.simulate(rl.Mesh(replicate=2, **{axis: 2}), body) == [True] * 4


@pytest.mark.parametrize(("split", "axis"), [(spread_experts, "expert"), (cut_matrices, "tensor")])
def test_a_split_model_is_filled_as_the_whole_one(split, axis):
    """Every rank would begin with the same values, in place of its part. What rank 0 draws counts."""
    def fill(name, tensor, rank=0):
        tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(len(name) + 100 * rank), dtype=tensor.dtype))

    plain = {"expert": make_model, "tensor": make}[axis]()
    with torch.no_grad():
        for name, param in plain.named_parameters():
            fill(name, param)

    def body(world):
        model = split(world).to("meta")
        sharded = rl.fully_shard(model, world.group("shard"), fill=partial(fill, rank=world.rank))
        parts = ModelSplit.found_in(model, world.alone())
        return {name: parts.join(name, value) for name, value in sharded.state_dict().items()}

    for state in rl.simulate(rl.Mesh(shard=2, **{axis: 2}), body):
        for name, param in plain.named_parameters():
            assert torch.equal(state[name], param), name


@pytest.mark.parametrize(("split", "axis"), [(spread_experts, "expert"), (cut_matrices, "tensor")])
def test_prepare_takes_whole_models_only(split, axis):
    """It would give every rank the part of rank 0, or cut a part again."""
    def body(world):
        with pytest.raises(rl.ConfigError, match=rf"the model was cut along the axis '{axis}' before. Give `prepare` the whole model, "
                                                 rf"and a world made with a mesh, such as rl.init\(mesh=rl.Mesh\({axis}=2\)\)"):
            rl.prepare(split(world), loss=lambda model, batch: model(batch), optimizer=torch.optim.SGD, world=world)

    rl.simulate(rl.Mesh(**{axis: 2}), body)


def test_a_split_model_cannot_be_pickled_and_says_what_can():
    def body(world):
        with pytest.raises(rl.UnitError, match=r"a group of ranks cannot be pickled, .*`full_state_dict\(model, group\)` of rankloom"):
            torch.save(cut_matrices(world), io.BytesIO())

    rl.simulate(rl.Mesh(tensor=2), body)


@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard])
def test_the_whole_state_of_a_split_model_is_that_of_its_wrapper_too(wrap):
    def body(world):
        tensor = world.group("tensor")
        model = rl.tensor_parallel(make(), None, tensor)
        plain, wrapped = full_state_dict(model, tensor), wrap(model, world.group("replicate"))
        whole = full_state_dict(wrapped, tensor)
        assert whole.keys() == plain.keys() and all(torch.equal(whole[name], value) for name, value in plain.items())
        sent = tensor.ledger.bytes + world.group("replicate").ledger.bytes
        load_full_state_dict(wrapped, {name: value + 1 for name, value in plain.items()}, tensor)
        assert tensor.ledger.bytes + world.group("replicate").ledger.bytes <= sent + 64   # an agreement at most, and no values
        again = full_state_dict(wrapped, tensor)
        assert all(torch.equal(again[name], value + 1) for name, value in plain.items())
        assert any(held.dim is not None for held in holdings(model).values())

    rl.simulate(rl.Mesh(replicate=2, tensor=2), body)


@pytest.mark.parametrize("wrap", [lambda model, group: model, rl.data_parallel, rl.fully_shard])
@pytest.mark.parametrize("sizes", [{"expert": 2}, {"expert": 12}, {"tensor": 2, "expert": 2}], ids=str)
def test_the_whole_state_of_a_model_with_spread_experts_has_all_of_them(sizes, wrap):
    """Each rank saved those of its own, under the names of the whole, without an error."""
    plain = make_model().state_dict()

    def body(world):
        model = make_model()
        model = rl.tensor_parallel(model, None, world.group("tensor")) if "tensor" in sizes else model
        model = wrap(expert_parallel(model, world.group("expert")), world.group("replicate"))
        whole = full_state_dict(model, world)
        load_full_state_dict(model, {name: value + 1 for name, value in whole.items()}, world)
        own = {name: value[:1] for name, value in whole.items() if "experts" in name}
        with pytest.raises(rl.ShapeMismatch, match=r"experts\.\S+ in group '\S+': 1 experts do not divide by \d+ ranks"):
            load_full_state_dict(model, whole | own, world)
        return whole, full_state_dict(model, world)

    for before, after in rl.simulate(rl.Mesh(**sizes), body):
        torch.testing.assert_close(before, dict(plain), rtol=0, atol=0)
        torch.testing.assert_close(after, {name: value + 1 for name, value in plain.items()}, rtol=0, atol=0)


class Table(nn.Module):
    """An embedding by hand, whose gradient is sparse."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(20.0).view(5, 4))

    def forward(self, numbers):
        return nn.functional.embedding(numbers, self.weight, sparse=True)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard])
def test_a_sparse_gradient_is_refused_where_it_would_lie_in_a_flat_buffer(wrap, ranks):
    def body(world):
        model, numbers = wrap(Table(), world), torch.tensor([1, 3, 3])
        if ranks == 1 and wrap is rl.data_parallel:
            model(numbers).sum().backward()
            assert model.module.weight.grad.is_sparse
        else:
            with pytest.raises(rl.UnitError, match=r"rank \d: the gradient of weight is sparse, as of F.embedding\(sparse=True\)"):
                model(numbers).sum().backward()

    rl.simulate(ranks, body)


def test_an_embedding_may_be_cast_after_the_model_was_wrapped():
    def body(world):
        model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1, bias=False))
        nn.init.ones_(model[0].weight), nn.init.ones_(model[1].weight)
        wrapped = rl.data_parallel(model, world).to(torch.bfloat16)
        wrapped(torch.tensor([1, 1 + world.rank])).sum().backward()
        return model[0].weight.grad

    for grad in rl.simulate(2, body):
        assert grad.dtype is torch.bfloat16 and grad.sum(1).tolist() == [0.0, 6.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_a_hook_that_takes_the_gradient_away_from_slices_is_named():
    def take(param):
        param.grad = None

    def body(world):
        model = ones(3, 2)
        model.weight.register_post_accumulate_grad_hook(take)
        sharded = rl.fully_shard(model, world)
        with pytest.raises(rl.UnitError, match=r"rank \d: a hook has taken the gradient of weight away"):
            sharded(torch.ones(1, 3)).sum().backward()

    rl.simulate(2, body)
