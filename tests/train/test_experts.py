"""Mixtures of experts in training: evaluation where ranks have different numbers of batches, counts of tokens, auxiliary losses."""

import copy
import dataclasses
from collections import Counter

import pytest
import torch

import rankloom as rl
from rankloom.models.config import GPTConfig, MoEConfig
from rankloom.models.gpt import GPT, Block
from rankloom.models.loss import language_model_loss
from rankloom.models.moe import Experts, MoE
from rankloom.parallel.expert import expert_layers, expert_parallel, rebalance
from rankloom.parallel.zero import step_bill
from rankloom.world.group import Group

RTOL = 1e-12   # fp64: the same terms in another order
MOE = MoEConfig(experts=4, top_k=2, ffn=12, shared=1, balance_loss=0.3, router_z_loss=0.2, bias_rate=0.05)
SHAPE = GPTConfig(vocab_size=37, width=16, layers=2, heads=2, kv_heads=2, ffn=24, seq_len=12, moe=MOE)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def make_engine(world, stage, *, sink=None, moe=MOE, **options):
    if world.mesh.pipe > 1:
        options = {"accumulate": 2} | options
    model = GPT(dataclasses.replace(SHAPE, moe=moe), dtype=torch.float64)
    return rl.prepare(model, loss=language_model_loss, optimizer=adamw, world=world, stage=stage, clip=0.5, sink=sink, **options)


def rows(number, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 37, (number, 12), generator=draw) for _ in range(2))


def share(batch, group):
    return tuple(t.tensor_split(group.size)[group.rank] for t in batch)


LAYOUTS = [
    (rl.Mesh(expert=2), 0, {}), (rl.Mesh(expert=4), 1, {}), (rl.Mesh(replicate=2, expert=2), 0, {}), (rl.Mesh(shard=2, expert=2), 3, {}),
    (rl.Mesh(shard=2, expert=2), 2, {}), (rl.Mesh(shard=2, expert=2), 3, {"units": MoE}),
    (rl.Mesh(shard=2, expert=2), 3, {"units": (Block, Experts)}),
    (rl.Mesh(tensor=2, expert=2), 0, {}), (rl.Mesh(context=2, expert=2), 3, {}), (rl.Mesh(pipe=2, expert=2), 0, {}),
    (rl.Mesh(pipe=2, shard=2, expert=2), 3, {}),
    (rl.Mesh(pipe=2, shard=2), 3, {}), (rl.Mesh(shard=2), 3, {}), (rl.Mesh(shard=2), 3, {"reshard_after_forward": False}),
    (rl.Mesh(shard=2), 3, {"deterministic": 8}),
]


@pytest.mark.parametrize(("mesh", "stage", "options"), LAYOUTS, ids=str)
@pytest.mark.parametrize("uneven", [(1,), (0, 2, 1, 3)], ids=["one batch for all", "different numbers"])
def test_an_evaluation_is_exact_however_few_batches_a_rank_has(mesh, stage, options, uneven):
    def body(world):
        engine = make_engine(world, stage, **options)
        engine.step(share(rows(8), engine.group))
        held = dict(enumerate(uneven)).get(engine.group.rank, 0)
        mine = [rows(3, seed=10 * engine.group.rank + n + 1) for n in range(held)]
        found = engine.evaluate(mine)
        engine.step(share(rows(8), engine.group))   # and training goes on
        return found.loss, found.count, engine.evaluate(iter(mine)).loss

    def alone(world):
        engine = make_engine(world, 0)
        engine.step(rows(8))
        groups = mesh.replicate * mesh.shard * mesh.expert
        everything = [rows(3, seed=10 * rank + n + 1) for rank, held in enumerate(uneven[:groups]) for n in range(held)]
        found = engine.evaluate(everything)
        engine.step(rows(8))
        return found.loss, found.count, engine.evaluate(everything).loss

    expected = rl.simulate(1, alone)[0]
    for found in rl.simulate(mesh, body, backend="gloo"):   # where ranks share memory, nothing is gathered, and nothing announced
        assert found == pytest.approx(expected, rel=RTOL)


# ---------------------------------------------------------------------- what a step tells


def trained(world, stage, steps=3, **options):
    """The reports of some steps on the same global batches, and the whole model afterwards."""
    engine = make_engine(world, stage, **options)
    reports = [engine.step(share(rows(8, seed), engine.group)) for seed in range(steps)]
    return reports, engine.full_state_dict()["model"]


def truth(**options):
    return rl.simulate(1, lambda world: trained(world, 0, **options))[0]


def numbers(report):
    return report.loss, report.auxiliary, report.count


@pytest.mark.parametrize(("mesh", "stage"), [
    (rl.Mesh(replicate=3), 0), (rl.Mesh(shard=2), 3), (rl.Mesh(expert=2), 0), (rl.Mesh(shard=2, expert=2), 3),
    (rl.Mesh(context=2, expert=2), 1), (rl.Mesh(tensor=2, expert=2), 0), (rl.Mesh(pipe=2, expert=2), 2), (rl.Mesh(pipe=4), 0)], ids=str)
def test_losses_counts_and_biases_do_not_depend_on_the_layout(mesh, stage):
    moe = dataclasses.replace(MOE, capacity=0.9)   # context ranks drop what one process drops: capacities look at whole rows
    expected, model = truth(moe=moe)
    assert all(load.dropped for load in expected[0].experts.values())
    for reports, state in rl.simulate(mesh, lambda world: trained(world, stage, moe=moe)):
        for report, one in zip(reports, expected, strict=True):
            assert numbers(report) == pytest.approx(numbers(one), rel=RTOL)
            assert report.experts == one.experts
        for name, bias in model.items():
            if name.endswith("router.bias"):
                assert torch.equal(state[name], bias) and bias.abs().sum() > 0


def test_layers_of_experts_are_told_in_the_order_of_the_model_also_where_stages_are_interleaved():
    def body(world):
        model = GPT(dataclasses.replace(SHAPE, layers=4), dtype=torch.float64)
        engine = rl.prepare(model, loss=language_model_loss, optimizer=adamw, world=world, accumulate=2, pipe="interleaved")
        return list(engine.step(rows(4)).experts)

    for told in rl.simulate(rl.Mesh(pipe=2), body):
        assert told == [f"blocks.{depth}.mlp" for depth in range(4)]


def test_the_loss_is_the_cross_entropy_and_auxiliary_losses_stand_beside_it():
    with_losses, _ = truth()
    without, _ = truth(moe=dataclasses.replace(MOE, balance_loss=0.0, router_z_loss=0.0))
    first, plain = with_losses[0], without[0]
    assert first.loss == pytest.approx(plain.loss, rel=RTOL)          # the same weights
    assert with_losses[1].loss != pytest.approx(without[1].loss, rel=1e-6), "they are trained on all the same"
    assert plain.auxiliary == 0.0
    assert first.auxiliary > 2 * MOE.balance_loss, "two layers, each 1 or more for a token, and the routers' own"


def row_by_row(model, batch):
    """Calls the model several times before anybody takes auxiliary losses, and in evaluation mode too."""
    logits = torch.cat([model(row[None]) for row in batch[0]])
    with torch.no_grad():
        model.eval()(batch[0], targets=batch[1])
        model.train()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


@pytest.mark.parametrize("mesh", [rl.Mesh(), rl.Mesh(shard=2), rl.Mesh(expert=2), rl.Mesh(replicate=2)], ids=str)
def test_a_loss_may_call_the_model_several_times_and_every_call_is_charged(mesh):
    def body(world, loss):
        model = GPT(SHAPE, dtype=torch.float64)
        engine = rl.prepare(model, loss=loss, optimizer=adamw, world=world, stage=3 if mesh.shard > 1 else 0)
        model(rows(2, seed=9)[0])   # a forward of the user's, whose losses nobody takes
        engine.evaluate([share(rows(8), engine.group)])
        reports = []
        for seed in range(2):
            reports.append(engine.step(share(rows(8, seed), engine.group)))
            engine.model(rows(2, seed=9)[0])
        return [(*numbers(report), report.grad_norm) for report in reports]

    expected = rl.simulate(1, lambda world: body(world, language_model_loss))[0]
    for found in rl.simulate(mesh, lambda world: body(world, row_by_row)):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=RTOL)


def sharing_blocks(moe=MOE):
    """A GPT whose blocks have one layer of experts between them."""
    model = GPT(dataclasses.replace(SHAPE, layers=3, moe=moe), dtype=torch.float64)
    for block in model.blocks[1:]:
        block.mlp = model.blocks[0].mlp
    return model


@pytest.mark.parametrize(("mesh", "stage"), [
    (rl.Mesh(expert=2), 0), (rl.Mesh(expert=2, shard=2), 3), (rl.Mesh(expert=2, tensor=2), 1)], ids=str)
def test_experts_that_blocks_share_are_whole_under_each_of_their_names(mesh, stage):
    def body(world):
        engine, other = (rl.prepare(sharing_blocks(), loss=language_model_loss, optimizer=adamw, world=world,
                                    stage=stage if world.size > 1 else 0) for _ in range(2))
        engine.step(share(rows(8), engine.group))
        state = engine.full_state_dict()
        other.load_full_state_dict(state)
        return state["model"], [each.step(share(rows(8, 1), each.group)).loss for each in (engine, other)]

    ((truth, (loss, _)),) = rl.simulate(1, body)
    assert sum(name.endswith("experts.gate") for name in truth) == 3
    for state, losses in rl.simulate(mesh, body):
        assert losses == pytest.approx([loss, loss], rel=RTOL)
        for name, value in truth.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def of_the_first(kind):
    """A GPT whose blocks have a layer of experts each, but of these something is the first one's: the `Experts`, all weights, or one."""
    model = GPT(dataclasses.replace(SHAPE, layers=3, moe=MOE), dtype=torch.float64)
    first, *others = (block.mlp for block in model.blocks)
    for layer in others:
        if kind == "experts":
            layer.experts = first.experts
        for name in {"experts": (), "weights": ("gate", "up", "down"), "gate": ("gate",)}[kind]:
            setattr(layer.experts, name, getattr(first.experts, name))
    if kind == "gate":
        first.experts.up = first.experts.gate   # also twice in one layer
    return model


@pytest.mark.parametrize("kind", ["experts", "weights", "gate"])
@pytest.mark.parametrize(("mesh", "stage"), [
    (rl.Mesh(expert=2), 0), (rl.Mesh(expert=2, shard=2), 3), (rl.Mesh(expert=2, pipe=2), 0)], ids=str)
def test_weights_that_layers_of_experts_share_stay_one_when_experts_are_spread(mesh, stage, kind):
    """Each layer kept a share of its own, and they were trained apart; a shared module was cut twice."""
    def body(world):
        engine = rl.prepare(of_the_first(kind), loss=language_model_loss, optimizer=adamw, world=world, accumulate=2,
                            stage=stage if world.size > 1 else 0)
        losses = [engine.step(share(rows(8, seed), engine.group)).loss for seed in range(2)]
        return losses, engine.full_state_dict()["model"]

    ((losses, truth),) = rl.simulate(1, body)
    for found, state in rl.simulate(mesh, body):
        assert found == pytest.approx(losses, rel=RTOL)
        for name, value in truth.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def test_experts_that_are_tied_to_another_module_are_refused():
    def body(world):
        model = GPT(SHAPE, dtype=torch.float64)
        model.twin = torch.nn.Module()
        model.twin.weight = model.blocks[0].mlp.experts.gate
        expert_parallel(model, world)

    with pytest.raises(rl.ConfigError, match=r"twin.weight is a parameter of experts and of another module.*do not tie"):
        rl.simulate(2, body)


def test_experts_that_stages_of_several_ranks_share_are_refused():
    body = lambda world: rl.prepare(sharing_blocks(), loss=language_model_loss, optimizer=adamw, world=world, accumulate=2)
    with pytest.raises(rl.ConfigError, match=r"blocks.0.mlp, a MoE, is used on pipe ranks \[0, 1\], and each would count"):
        rl.simulate(rl.Mesh(pipe=2), body)


def test_a_layer_that_runs_twice_in_a_forward_is_charged_twice():
    class Twice(torch.nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.first = MoE(MOE, 8).double()
            with torch.no_grad():
                for number, param in enumerate(self.first.parameters()):
                    param.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(number)) / 3)
            self.second = self.first if shared else copy.deepcopy(self.first)

        def forward(self, x):
            return self.second(self.first(x))

    def body(world, shared):
        engine = rl.prepare(Twice(shared), loss=lambda model, batch: (model(batch[0]).square().sum(), batch[0].shape[0]),
                            optimizer=adamw, world=world)
        report = engine.step((torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(50), dtype=torch.float64),))
        return report.loss, report.auxiliary

    found, expected = (rl.simulate(1, lambda world, shared=shared: body(world, shared))[0] for shared in (True, False))
    assert found == pytest.approx(expected, rel=RTOL) and expected[1] > 0


@pytest.mark.parametrize("accumulate", [1, 4])
def test_every_choice_of_a_step_is_counted_once(accumulate):
    def body(world):
        return make_engine(world, 0, accumulate=accumulate, recompute="full").step(share(rows(8), world)).experts

    for experts in rl.simulate(rl.Mesh(replicate=2), body):
        assert list(experts) == ["blocks.0.mlp", "blocks.1.mlp"]
        assert {sum(load.routed) for load in experts.values()} == {8 * 12 * MOE.top_k}


def test_only_rank_0_tells_the_sink_who_had_how_many():
    def body(world):
        told = []
        make_engine(world, 0, sink=told.append).step(share(rows(8), world))
        return told[0]

    first, second = rl.simulate(rl.Mesh(expert=2), lambda world: body(world))
    assert first.experts["blocks.0.mlp"] == truth()[0][0].experts["blocks.0.mlp"] and not second.experts
    assert first.auxiliary == second.auxiliary > 0


def test_a_step_that_died_leaves_no_counts_and_no_auxiliary_losses_behind():
    def body(world):
        calls = []

        def loss(model, batch):
            found = language_model_loss(model, batch)
            if model.training and calls.append(1) is None and len(calls) == 3:
                raise RuntimeError("half way")
            return found

        engine = rl.prepare(GPT(SHAPE, dtype=torch.float64), loss=loss, optimizer=adamw, world=world, accumulate=4, clip=0.5)
        with pytest.raises(RuntimeError, match="half way"):
            engine.step(rows(8))
        return engine.step(rows(8))

    (report,), ((one, *_), _) = rl.simulate(1, body), truth()
    assert numbers(report) == pytest.approx(numbers(one), rel=RTOL)
    assert report.experts == one.experts


def test_a_step_that_changed_nothing_is_counted_and_moves_no_bias():
    model = GPT(SHAPE)
    world, layers = rl.simulate(1, lambda world: world)[0], expert_layers(model)
    for moves in (False, True):
        language_model_loss(model, rows(8))
        assert {sum(load.routed) for load in rebalance(layers, world, move=moves).values()} == {8 * 12 * MOE.top_k}
        assert all(bool(layer.router.bias.abs().sum()) == moves for layer in layers.values())


@pytest.mark.parametrize("ranks", [2, 3])
def test_deterministic_training_tells_the_same_bits_on_any_number_of_ranks(ranks):
    def body(world):
        engine = rl.prepare(GPT(SHAPE), loss=language_model_loss, optimizer=adamw, world=world, deterministic=6, clip=0.5)
        return [(r.loss, r.auxiliary, r.experts) for r in (engine.step(share(rows(12, seed), world)) for seed in range(3))]

    expected = rl.simulate(1, body)[0]
    assert rl.simulate(ranks, body) == [expected] * ranks


@pytest.mark.parametrize(("mesh", "stage"), [(rl.Mesh(expert=2), 1), (rl.Mesh(shard=2, expert=2), 3)], ids=str)
def test_what_a_step_sends_for_parameters_and_gradients_is_its_bill_where_experts_have_fewer_replicas(mesh, stage, monkeypatch):
    sent, counted, collect = Counter[int](), set[int](), Group._collect

    def counting(group, op, x, label, async_op, *, bill, **more):
        rank = group.ranks[group.rank]
        sent[rank] += bill.sent * (rank in counted and label.startswith(("parameters of", "gradients of")))
        return collect(group, op, x, label, async_op, bill=bill, **more)

    def body(world):
        engine = make_engine(world, stage)
        engine.step(share(rows(8), engine.group))
        counted.add(world.rank)
        engine.step(share(rows(8), engine.group))
        return step_bill(engine.placement.sharding).sent

    monkeypatch.setattr(Group, "_collect", counting)
    assert dict(enumerate(rl.simulate(mesh, body))) == sent


def loss_of_logits(model, batch):
    """As many write it: the model is asked for logits only."""
    logits, targets = model(batch[0]), batch[1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


@pytest.mark.parametrize("mesh", [rl.Mesh(), rl.Mesh(replicate=2), rl.Mesh(shard=2, expert=2)], ids=str)
def test_auxiliary_losses_count_whatever_loss_is_made_of_the_logits(mesh):
    def steps(world, loss):
        model = GPT(SHAPE, dtype=torch.float64)
        engine = rl.prepare(model, loss=loss, optimizer=adamw, world=world, stage=3 if mesh.shard > 1 else 0, accumulate=2)
        reports = [engine.step(share(rows(8), engine.group)) for _ in range(3)]
        return [(report.loss, report.auxiliary, report.grad_norm) for report in reports]

    flat = lambda reports: [number for step in reports for number in step]
    expected = flat(rl.simulate(1, lambda world: steps(world, language_model_loss))[0])
    assert expected[1] > 2 * MOE.balance_loss
    for found in rl.simulate(mesh, lambda world: steps(world, loss_of_logits)):
        assert flat(found) == pytest.approx(expected, rel=RTOL)
