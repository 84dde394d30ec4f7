"""Expert parallel: experts on many ranks give the outputs and gradients of one process, each gradient summed over the right axes."""

import copy
import dataclasses
import random
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import rankloom as rl
from closeness import expect_close
from gradients import gradients
from noting import late
from rankloom.base.errors import ConfigError
from rankloom.models.config import GPTConfig, MoEConfig
from rankloom.models.gpt import GPT
from rankloom.models.moe import MoE
from rankloom.parallel.all_to_all import deal_rows, deal_rows_bill
from rankloom.parallel.context.apply import context_parallel
from rankloom.parallel.expert import Load, expert_layers, expert_parallel, gradient_axes, rebalance, spread_parameters

RTOL = 1e-12   # fp64: the same terms in another order
MOE = MoEConfig(experts=12, top_k=2, ffn=6, shared=1, balance_loss=0.3, router_z_loss=0.2)
CONFIG = GPTConfig(vocab_size=37, seq_len=24, width=16, layers=2, heads=2, kv_heads=2, ffn=24, moe=MOE)
RANKS = [1, 2, 3, 4]


def make_model(**changes):
    model = GPT(dataclasses.replace(CONFIG, moe=dataclasses.replace(MOE, **changes)), dtype=torch.float64)
    with torch.no_grad():
        for layer in expert_layers(model).values():   # larger, so that tokens disagree and every term matters
            for parameter in layer.parameters():
                parameter.mul_(20)
    return model


def batch_of(rows=6, length=9, seed=0):
    make = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 37, (rows, length), generator=make) for _ in range(2))


def train_once(model, batch):
    total, count = model(batch[0], targets=batch[1])
    total.backward()
    return total.detach(), count


def summed_by_the_ledger(model, world):
    """Every parameter's gradient, summed over the axes that the ledger names and no others; experts gathered whole."""
    grads = {}
    for (name, parameter), axes in zip(model.named_parameters(), gradient_axes(model).values(), strict=True):
        grad = parameter.grad.contiguous()
        grads[name] = world.group(*axes).all_reduce(grad) if world.group(*axes).size > 1 else grad
        if "expert" not in axes:
            grads[name] = world.group("expert").all_gather(grads[name])
    return grads


def expect_equal(grads, truth):
    expect_close(grads, gradients(truth), RTOL)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("capacity", [0.0, 0.7])
def test_experts_over_ranks_give_the_loss_and_gradients_of_one_process(ranks, top_k, capacity):
    model, (tokens, targets) = make_model(top_k=top_k, capacity=capacity), batch_of(rows=12)
    truth = copy.deepcopy(model)
    total, _ = train_once(truth, (tokens, targets))
    dropped = sum(int(layer.dropped or 0) for layer in expert_layers(truth).values())
    assert (dropped > 0) == (capacity > 0)

    def body(world):
        mine, at = expert_parallel(copy.deepcopy(model), world.group("expert")), slice(world.rank, None, ranks)
        part, _ = train_once(mine, (tokens[at], targets[at]))
        torch.testing.assert_close(world.all_reduce(part), total, rtol=RTOL, atol=0)
        expect_equal(summed_by_the_ledger(mine, world), truth)
        return sum(load.dropped for load in rebalance(expert_layers(mine), world).values())

    assert set(rl.simulate(rl.Mesh(expert=ranks), body)) == {dropped}


MESHES = [rl.Mesh(replicate=2, expert=2), rl.Mesh(shard=2, expert=2), rl.Mesh(replicate=2), rl.Mesh(context=2, expert=2)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("capacity", [0.0, 0.7])
def test_beside_other_axes_every_gradient_is_summed_as_often_as_its_tokens_are_split(mesh, capacity):
    model, (tokens, targets) = make_model(capacity=capacity), batch_of(rows=8)
    truth = copy.deepcopy(model)
    total, _ = train_once(truth, (tokens, targets))

    def body(world):
        mine, data = expert_parallel(copy.deepcopy(model), world.group("expert")), world.group("replicate", "shard", "expert")
        if mesh.context > 1:
            context_parallel(mine, world.group("context"))
        at = slice(data.rank, None, data.size)
        part, _ = train_once(mine, (tokens[at], targets[at]))
        torch.testing.assert_close(world.all_reduce(part), total, rtol=RTOL, atol=0)
        expect_equal(summed_by_the_ledger(mine, world), truth)

    rl.simulate(mesh, body)


def test_the_ledger_leaves_out_the_expert_axis_for_spread_experts_only():
    def body(world):
        plain, spread = make_model(), expert_parallel(make_model(), world)
        assert set(gradient_axes(plain).values()) == {("replicate", "shard", "context", "expert")}
        fewer = {name for name, axes in gradient_axes(spread).items() if axes == ("replicate", "shard", "context")}
        assert fewer == {name for name, _ in plain.named_parameters() if ".experts." in name} != set()
        assert list(gradient_axes(spread)) == list(gradient_axes(plain))

    rl.simulate(2, body)


def test_the_ledger_of_a_model_that_is_one_layer_of_experts_leaves_it_out_too():
    def body(world):
        axes = gradient_axes(expert_parallel(MoE(MOE, 16), world))
        assert {name for name in axes if "expert" not in axes[name]} == {"experts.gate", "experts.up", "experts.down"}

    rl.simulate(2, body)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_holds_its_share_of_the_experts_and_no_more(ranks):
    def body(world):
        model, mine = make_model(), expert_parallel(make_model(), world)
        for (name, whole), part in zip(model.named_parameters(), mine.parameters(), strict=True):
            expected = whole.chunk(ranks)[world.rank] if ".experts." in name else whole
            assert torch.equal(part, expected) and part.untyped_storage().nbytes() == expected.nbytes, name
        return {layer.experts.first for layer in expert_layers(mine).values()}

    assert rl.simulate(ranks, body) == [{rank * 12 // ranks} for rank in range(ranks)]


def all_to(experts, model):
    """Routers that send every token to the named experts."""
    with torch.no_grad():
        for layer in expert_layers(model).values():
            layer.router.bias.fill_(0.0)[experts] = 9.0
    return model


@pytest.mark.parametrize("experts", [[0], [11], [4, 5], [0, 11]])
def test_all_tokens_may_go_to_one_rank_and_the_others_stay_empty(experts):
    model, (tokens, targets) = all_to(experts, make_model(top_k=len(experts), bias_rate=0.1)), batch_of()
    truth = copy.deepcopy(model)
    train_once(truth, (tokens, targets))

    def body(world):
        mine = expert_parallel(copy.deepcopy(model), world)
        train_once(mine, (tokens[world.rank::3], targets[world.rank::3]))
        expect_equal(summed_by_the_ledger(mine, world), truth)
        for layer in expert_layers(mine).values():
            rested = [e - layer.experts.first for e in range(12) if e not in experts and 0 <= e - layer.experts.first < 4]
            assert layer.experts.down.grad[rested].abs().sum() == 0
        return rebalance(expert_layers(mine), world)

    for loads in rl.simulate(rl.Mesh(expert=3), body):
        for load in loads.values():
            assert {e for e, n in enumerate(load.routed) if n} == set(experts) and load.imbalance == 12 / len(experts)


def test_ranks_may_have_different_numbers_of_rows():
    model, (tokens, targets) = make_model(), batch_of(rows=7)
    truth = copy.deepcopy(model)
    train_once(truth, (tokens, targets))

    def body(world):
        mine, at = expert_parallel(copy.deepcopy(model), world), [slice(0, 1), slice(1, 6), slice(6, 7)][world.rank]
        train_once(mine, (tokens[at], targets[at]))
        expect_equal(summed_by_the_ledger(mine, world), truth)

    rl.simulate(rl.Mesh(expert=3), body)


def test_a_copy_of_the_model_has_the_same_peers():
    model, (tokens, targets) = make_model(), batch_of(rows=4)
    total, _ = train_once(copy.deepcopy(model), (tokens, targets))

    def body(world):
        mine = copy.deepcopy(expert_parallel(copy.deepcopy(model), world))
        part, _ = train_once(mine, (tokens[world.rank::2], targets[world.rank::2]))
        torch.testing.assert_close(world.all_reduce(part), total, rtol=RTOL, atol=0)

    rl.simulate(2, body)


def test_late_ranks_change_nothing():
    model, (tokens, targets) = make_model(), batch_of()
    truth = copy.deepcopy(model)
    train_once(truth, (tokens, targets))

    def body(world):
        world.all_to_all = late(world.all_to_all, random.Random(world.rank), 0.02)
        mine = expert_parallel(copy.deepcopy(model), world)
        train_once(mine, (tokens[world.rank::3], targets[world.rank::3]))
        expect_equal(summed_by_the_ledger(mine, world), truth)

    rl.simulate(rl.Mesh(expert=3), body)


@pytest.mark.parametrize("ranks", RANKS)
def test_only_rows_whose_expert_is_elsewhere_travel_and_each_four_times(ranks):
    layer, x = MoE(dataclasses.replace(MOE, balance_loss=0.0), 16).double(), torch.randn(ranks, 1, 10, 16, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))

    def body(world):
        mine = expert_parallel(copy.deepcopy(layer), world)
        local = x[world.rank].clone().requires_grad_()
        rows = layer.router(local).experts.flatten().bincount(minlength=12).view(ranks, -1).sum(1).tolist()   # to each rank
        out = mine(local)
        before = world.ledger.bytes, world.ledger.messages
        out.sum().backward()
        theirs = world.all_gather(torch.tensor(rows)).view(ranks, ranks)[:, world.rank].tolist()
        there, back = deal_rows_bill(rows, 16 * 8, world.rank), deal_rows_bill(theirs, 16 * 8, world.rank)
        counts = (ranks - 1) * 12 // ranks * 8
        assert before == (there.sent + back.sent + counts, 3 * (ranks - 1))
        gathered = (ranks - 1) * ranks * 8
        assert world.ledger.bytes - before[0] - gathered == there.sent + back.sent
        assert world.ledger.messages - before[1] == 3 * (ranks - 1)   # two of backward, one of this test

    rl.simulate(ranks, body)


def test_dealt_rows_remember_where_they_came_from_and_their_gradients_go_back():
    sends = [[1, 0, 2], [3, 1, 0], [0, 2, 2]]   # from each rank to each

    def body(world):
        here = sends[world.rank]
        rows = torch.tensor([[world.rank, to, i] for to in range(3) for i in range(here[to])], dtype=torch.float64, requires_grad=True)
        recv = [sends[frm][world.rank] for frm in range(3)]
        got = deal_rows(rows, world, here, recv, "test")
        assert got.tolist() == [[frm, world.rank, i] for frm in range(3) for i in range(recv[frm])]
        (got * (world.rank + 1)).sum().backward()
        assert rows.grad[:, 0].tolist() == [to + 1 for to in range(3) for _ in range(here[to])]
        bill = deal_rows_bill(here, 24, world.rank) + deal_rows_bill(recv, 24, world.rank)
        assert (world.ledger.bytes, world.ledger.messages) == (bill.sent, bill.messages)

    rl.simulate(3, body)


def test_biases_move_alike_on_all_ranks_by_the_tokens_of_all():
    model, (tokens, targets) = make_model(bias_rate=0.1), batch_of(rows=4)
    truth = copy.deepcopy(model)
    train_once(truth, (tokens, targets))
    loads = rebalance(expert_layers(truth), rl.simulate(1, lambda world: world)[0])

    def body(world):
        mine = expert_parallel(copy.deepcopy(model), world)
        train_once(mine, (tokens[world.rank::2], targets[world.rank::2]))
        assert rebalance(expert_layers(mine), world) == loads
        for layer, ref in zip(expert_layers(mine).values(), expert_layers(truth).values(), strict=True):
            assert torch.equal(layer.router.bias, ref.router.bias) and layer.router.bias.abs().sum() > 0
        quiet = rebalance(expert_layers(mine), world)   # counted anew: nothing since
        assert {sum(load.routed) for load in quiet.values()} == {0}

    rl.simulate(rl.Mesh(expert=2), body)
    assert {sum(load.routed) for load in loads.values()} == {4 * 9 * 2} and loads["blocks.0.mlp"].dropped == 0


def test_biases_stay_where_a_step_did_not_change_the_model():
    def body(world):
        mine, batch = expert_parallel(make_model(bias_rate=0.1), world), batch_of()
        layers = expert_layers(mine)
        before = [layer.router.bias.clone() for layer in layers.values()]
        train_once(mine, batch)
        assert all(sum(load.routed) for load in rebalance(layers, world, move=False).values())
        assert all(map(torch.equal, before, [layer.router.bias for layer in layers.values()]))

    rl.simulate(rl.Mesh(expert=2), body)


def test_spread_parameters_are_known_under_all_of_their_names():
    def body(world):
        model = make_model()
        model.again = model.blocks[0].mlp
        found = spread_parameters(expert_parallel(model, world))
        assert {"again.experts.down", "blocks.0.mlp.experts.down", "blocks.1.mlp.experts.down"} <= found

    rl.simulate(2, body)


def test_a_model_without_experts_has_nothing_to_rebalance():
    assert rebalance(expert_layers(GPT(dataclasses.replace(CONFIG, moe=None))), rl.simulate(1, lambda world: world)[0]) == {}
    assert Load((4, 4), 0).imbalance == 1.0


def test_experts_that_cannot_be_spread_are_refused_with_the_reason():
    def body(world):
        with pytest.raises(ConfigError, match=r"blocks.0.mlp has 12 experts, which 5 ranks cannot share evenly; .* must divide 12"):
            expert_parallel(make_model(), world)
        with pytest.raises(ConfigError, match=r"GPT has no layers of experts to spread: modules with config, .*tensor, by a plan"):
            expert_parallel(GPT(dataclasses.replace(CONFIG, moe=None)), world)
        spread = expert_parallel(make_model(experts=10), world)
        with pytest.raises(ConfigError, match="group=None is of type NoneType, expected a Group"):
            expert_parallel(make_model(), None)
        with pytest.raises(ConfigError, match=r"the experts of blocks.0.mlp are spread already"):
            expert_parallel(spread, world)
        own = make_model(experts=10)
        own.blocks[1].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(3, 3)])
        with pytest.raises(ConfigError, match=r"the experts of blocks.1.mlp, ModuleList, cannot be shared; they need `held`"):
            expert_parallel(own, world)

    rl.simulate(5, body)


def test_recomputed_layers_trade_their_rows_again_and_are_counted_once():
    model, (tokens, targets) = make_model(capacity=0.7), batch_of()
    truth = copy.deepcopy(model)
    train_once(truth, (tokens, targets))

    def body(world):
        mine = expert_parallel(copy.deepcopy(model), world)
        for block in mine.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        train_once(mine, (tokens[world.rank::2], targets[world.rank::2]))
        expect_equal(summed_by_the_ledger(mine, world), truth)
        assert {sum(load.routed) for load in rebalance(expert_layers(mine), world).values()} == {tokens.numel() * 2}

    rl.simulate(rl.Mesh(expert=2), body)


def test_a_compiled_layer_breaks_its_graph_where_ranks_talk_and_counts_as_before():
    layer, x = expert_layers(make_model())["blocks.0.mlp"], torch.randn(2, 5, 16, dtype=torch.float64)
    truth = copy.deepcopy(layer)
    truth(x).sum().backward()

    def body(world):
        mine = expert_parallel(copy.deepcopy(layer), world)
        again = partial(checkpoint, torch.compile(mine, backend="eager"), use_reentrant=False)
        again(x[world.rank:world.rank + 1]).sum().backward()
        torch.testing.assert_close(world.all_reduce(mine.router.weight.grad), truth.router.weight.grad, rtol=RTOL, atol=RTOL)
        assert world.all_reduce(mine.routed.clone()).tolist() == truth.routed.tolist()

    rl.simulate(2, body)


def in_a_process(world):
    model, (tokens, targets) = expert_parallel(make_model(), world.group("expert")), batch_of()
    total, _ = train_once(model, (tokens[world.rank::2], targets[world.rank::2]))
    return world.all_reduce(total).item()


def test_real_processes_agree_with_one():
    total, _ = train_once(make_model(), batch_of())
    assert rl.spawn(rl.Mesh(expert=2), in_a_process) == pytest.approx([total.item()] * 2, rel=RTOL)
