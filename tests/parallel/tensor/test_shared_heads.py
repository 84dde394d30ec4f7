"""Queries, keys and values in one matrix, with fewer key-value heads than ranks: only those heads are held by several ranks, and summed."""

import copy
import functools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rankloom as rl
from closeness import expect_close
from rankloom.base.layout import Span
from rankloom.parallel.clip import clip_grad_norm_
from rankloom.parallel.model_split import ModelSplit, full_state_dict
from rankloom.parallel.tensor.holding import Holding, holdings, sum_partial_gradients
from seeded import seeded, shaken
from split_model import Conv1D, expect_equals_plain, whole_gradients

WIDTH, HEAD = 8, 2
PLAN = {"*.qkv": "packed_qkv_colwise", "*.out": "rowwise"}


class Attention(nn.Module):
    """A residual block of it."""

    def __init__(self, heads: int, kv_heads: int, transposed: bool):
        super().__init__()
        self.head_dim, self.num_heads, self.num_kv_heads = HEAD, heads, kv_heads
        features = (heads + 2 * kv_heads) * HEAD
        self.qkv = Conv1D(features, WIDTH) if transposed else nn.Linear(WIDTH, features, bias=False)
        self.out = nn.Linear(heads * HEAD, WIDTH)

    def forward(self, x):
        sizes = [n * self.head_dim for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.qkv(x).split(sizes, dim=-1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))


@functools.cache
@seeded(2)
def made(heads: int = 6, kv_heads: int = 1, transposed: bool = False) -> nn.Module:
    return shaken(nn.Sequential(*(Attention(heads, kv_heads, transposed) for _ in range(2))).double())


def make(*numbers) -> nn.Module:
    return copy.deepcopy(made(*numbers))


def rows(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def run(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    y = model(rows())
    return y, y.square().sum()


def split(world, *numbers, **options) -> nn.Module:
    return rl.tensor_parallel(make(*numbers), PLAN, world, **options)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(6, 1, 2), (6, 2, 6), (6, 1, 3), (8, 2, 4), (4, 1, 4), (8, 4, 2), (6, 3, 3)])
def test_it_is_the_plain_model(heads, kv_heads, ranks):
    for transposed in (False, True):
        expect_equals_plain(ranks, partial(make, heads, kv_heads, transposed), run, plan=PLAN, rtol=1e-11 if transposed else 1e-12)
    expect_equals_plain(ranks, partial(make, heads, kv_heads), run, plan=PLAN, overlap=2)


def test_in_debug_mode_nothing_is_wrong_with_it(monkeypatch):
    monkeypatch.setenv("RANKLOOM_DEBUG", "1")
    expect_equals_plain(4, partial(make, 8, 2), run, plan=PLAN)


def test_a_rank_holds_its_queries_and_the_key_value_head_that_they_read():
    def body(world):
        model = split(world, 8, 2)
        held = holdings(model)["0.qkv.weight"]
        return held.spans[world.rank], held.grad_partial, tuple(model[0].qkv.weight.shape), (model[0].num_heads, model[0].num_kv_heads)

    starts = [(0, 16, 20), (4, 16, 20), (8, 18, 22), (12, 18, 22)]
    expected = [(tuple(Span(at, at + n) for at, n in zip(begin, (4, 2, 2))), True, (8, WIDTH), (2, 1)) for begin in starts]
    assert rl.simulate(4, body) == expected


@pytest.mark.parametrize("dim", [0, 1])
def test_only_the_spans_that_several_ranks_hold_are_summed_and_sent(dim):
    spans = tuple((Span(rank, rank + 1), Span(4 + rank // 2, 5 + rank // 2)) for rank in range(4))
    held = {"it": Holding((6, 6), 2, dim, spans, grad_partial=True)}

    def body(world):
        gradient, before = torch.full(held["it"].local_shape, 2.0 ** world.rank), world.ledger.bytes
        sum_partial_gradients([("it", gradient)], held, world)
        return gradient.unbind(dim), world.ledger.bytes - before

    for rank, ((own, both), sent) in enumerate(rl.simulate(4, body)):
        assert own.unique().tolist() == [2.0 ** rank] and both.unique().tolist() == [[3.0, 12.0][rank // 2]] and sent == 6 * 4


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("norm_type", [2, 1, "inf"])
def test_clipping_counts_each_element_once(norm_type, transposed):
    def clipped(model, clip, gradients):
        run(model)[1].backward()
        return clip(model), gradients(model)

    plain = make(6, 1, transposed)
    norm, truth = clipped(plain, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type),
                          lambda model: {name: p.grad for name, p in model.named_parameters()})

    def body(world):
        over, clip = world.group("tensor"), lambda model: clip_grad_norm_(model, 0.1, norm_type)
        found = clipped(split(over, 6, 1, transposed), clip, lambda model: whole_gradients(model, over))
        sharded = clipped(rl.fully_shard(split(over, 6, 1, transposed), world.group("shard")), clip, lambda model: None)
        return *found, sharded[0]

    for seen, grads, sharded in rl.simulate(rl.Mesh(shard=3, tensor=2), body):
        torch.testing.assert_close(torch.stack([seen, sharded]).double(), norm.double().expand(2), rtol=1e-12, atol=0)
        expect_close(grads, truth, 1e-12)


def loss(model, batch):
    return model(batch).square().sum(), len(batch)


def engine_of(world, loss, transposed: bool = False, **options):
    plan = {"tensor_plan": PLAN} if world.mesh.tensor > 1 else {}
    adam = partial(torch.optim.AdamW, lr=0.01)
    return rl.prepare(make(6, 1, transposed), loss=loss, optimizer=adam, world=world, clip=0.5, **plan, **options)


def trained(world, folder=None, **options):
    engine = engine_of(world, loss, **options)
    mine = rows(12).tensor_split(engine.group.size)[engine.group.rank]
    reports = [engine.step(mine) for _ in range(2)]
    if folder:
        engine.save(folder)
        engine = engine_of(world, loss, **options)
        engine.load(folder)
    reports.append(engine.step(mine))
    return [(report.loss, report.grad_norm) for report in reports], engine.full_state_dict()["model"]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("mesh", "stage"), [(rl.Mesh(tensor=2), 0), (rl.Mesh(shard=3, tensor=2), 1), (rl.Mesh(shard=3, tensor=2), 3),
                                             (rl.Mesh(replicate=2, tensor=2), 0)], ids=str)
def test_an_engine_trains_saves_and_goes_on_like_one_process(mesh, stage, transposed, tmp_path):
    reports, state = rl.simulate(1, partial(trained, transposed=transposed))[0]
    for found, values in rl.simulate(mesh, partial(trained, folder=tmp_path, transposed=transposed, stage=stage)):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(reports), rtol=1e-10, atol=0)
        if values is not None:
            expect_close(values, state, 1e-10)


def test_a_checkpoint_is_that_of_the_plain_model(tmp_path):
    rl.simulate(rl.Mesh(tensor=2), partial(trained, folder=tmp_path))

    def body(world):
        engine = engine_of(world, loss)
        engine.load(tmp_path)
        report = engine.step(rows(12))
        return report.loss, report.grad_norm

    reports, _ = rl.simulate(1, trained)[0]
    torch.testing.assert_close(torch.tensor(rl.simulate(1, body)[0]), torch.tensor(reports[2]), rtol=1e-10, atol=0)


def test_stages_of_a_pipeline_count_each_element_once():
    options = dict(accumulate=2, pipe="1f1b")
    found = rl.simulate(rl.Mesh(pipe=2, tensor=2), partial(pipelined, **options))
    truth = rl.simulate(1, partial(pipelined, accumulate=2))[0]
    for reports in found:
        torch.testing.assert_close(torch.tensor(reports), torch.tensor(truth), rtol=1e-11, atol=0)


def pipelined(world, **options):
    def squared(model, batch):
        return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])

    engine = engine_of(world, squared, **options)
    return [(report.loss, report.grad_norm) for report in (engine.step((rows(), rows().cos())) for _ in range(3))]


def test_which_parameters_are_repeated_counts_these():
    def body(world):
        model = split(world, 8, 2)
        whole = ModelSplit.found_in(model, world.alone())
        return whole.is_repeated("0.qkv.weight"), whole.is_repeated("0.out.weight"), full_state_dict(model, world)["0.qkv.weight"]

    for repeated, not_so, weight in rl.simulate(4, body):
        assert repeated and not not_so and torch.equal(weight, made(8, 2)[0].qkv.weight)
