"""Training on compressed gradients: a GPT ends where the exact run ends, loss scales and bad steps do no harm, settings are checked."""

import math
from functools import cache

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.base.compression import EXACT, NAMES
from rankloom.comm.compress import compressed_all_reduce
from rankloom.comm.lossy import Compressed
from rankloom.models.config import GPTConfig
from rankloom.models.loss import language_model_loss
from rankloom.train.run.config import load_config

VOCAB, SEQ = 32, 16


@cache   # and not at the top: every worker reads this file
def text(rows: int, seed: int) -> torch.Tensor:
    """A Markov chain of first order: a model can learn it, but not at once. [rows, SEQ + 1]"""
    follows = (3 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))).softmax(-1)
    draw = torch.Generator().manual_seed(seed)
    out = torch.randint(0, VOCAB, (rows, 1), generator=draw)
    for _ in range(SEQ):
        out = torch.cat((out, torch.multinomial(follows[out[:, -1]], 1, generator=draw)), 1)
    return out


def validation_loss(world: rl.World, compress: str, steps: int = 300) -> float:
    train, validation = text(4000, 1), text(256, 2)
    share = lambda rows: (lambda mine: (mine[:, :-1].contiguous(), mine[:, 1:].contiguous()))(rows.tensor_split(world.size)[world.rank])
    shape = GPTConfig(vocab_size=VOCAB, seq_len=SEQ, width=32, layers=1, heads=2, kv_heads=2, ffn=64)
    engine = rl.prepare(rl.GPT(shape, seed=0), loss=language_model_loss, world=world, clip=1.0, compress=compress,
                        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
                        schedule=lambda step: 1e-2 * min(1, (step + 1) / 10) * (1 - 0.9 * step / steps))
    for step in range(steps):
        engine.step(share(train[torch.randint(0, len(train), (16,), generator=torch.Generator().manual_seed(step))]))
    return engine.evaluate([share(validation)]).loss


def test_gradients_are_weighed_by_the_items_of_all_micro_batches_of_a_step():
    def body(world):
        engine = rl.prepare(nn.Linear(2, 2), loss=lambda model, x: (model(x).square().sum(), len(x)), world=world, compress="int8",
                            accumulate=3, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        return engine.step(torch.ones(7 + world.rank, 2)).count, engine.placement.summing.factor

    assert rl.simulate(2, body) == [(15.0, 1 / 15)] * 2


@pytest.fixture(scope="module")
def exact() -> float:
    return rl.simulate(2, lambda world: validation_loss(world, "none"))[0]


@pytest.mark.parametrize("compress", ["int8", "powersgd"])
def test_a_gpt_ends_within_one_per_cent_of_the_exact_runs_validation_loss(exact, compress):
    """benchmarks/compressed_training.py is the same on real text."""
    assert exact < 0.5 * math.log(VOCAB), "the exact run has learned nothing, so equality would prove nothing"
    assert abs(rl.simulate(2, lambda world: validation_loss(world, compress))[0] / exact - 1) < 0.01


class Line(nn.Module):
    """y = w x, of 600 weights: three blocks of int8."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(24, 25))   # a matrix, for powersgd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w.flatten()


def squares(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (model(x) - 1).square().sum(), len(x)


def rows(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, 600, generator=torch.Generator().manual_seed(seed))


def prepare(world: rl.World, **more) -> rl.Engine:
    return rl.prepare(Line(), **{"loss": squares, "optimizer": lambda params: torch.optim.SGD(params, lr=1e-3), "world": world, **more})


@pytest.mark.parametrize("compress", ["int8", "1bit", "topk"])
def test_a_skipped_step_poisons_nothing_and_a_new_loss_scale_leaves_what_is_remembered(compress):
    def body(world):
        engine = prepare(world, compress=compress, precision="fp16")
        while engine.step(rows(4, world.rank)).skipped:   # until the first scale fits
            pass
        (lossy,) = engine.placement._reducer.summing._lossy
        error = lambda: torch.cat([lossy._error] if compress == "topk" else [lossy._own, lossy._sums])
        scale, before = engine.scale.value, error()
        bad = rows(4, world.rank)
        bad[0, 300] = math.inf
        skipped = engine.step(bad).skipped
        after = error()
        return skipped, engine.scale.value / scale, before, after, engine.step(rows(4, world.rank + 5)).skipped

    for skipped, factor, before, after, skipped_again in rl.simulate(2, body):
        assert skipped and factor == 0.5 and not skipped_again
        assert torch.equal(after, before) and before.any()   # all of it: every weight's gradient was NaN


class Same(nn.Module):
    """Its mean gradient is the same vector in every step, whatever the items."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(32, 64))

    def forward(self, g: torch.Tensor) -> torch.Tensor:
        return ((self.w * g).sum() + (self.v * g[:32]).sum())[None]


def counted(model: nn.Module, items: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (model(GRADIENT) * items.sum()).sum(), items.sum()


GRADIENT = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
LARGE_AND_SMALL = [1000.0, 10.0, 500.0, 1.0]


def path(world: rl.World, counts: list[float], accumulate: int = 1, **more) -> tuple[torch.Tensor, list[float], list[float]]:
    """20 steps on `counts` items in turn, other ranks half as many: where the weights end, gradient norms, losses."""
    if more.get("all_reduce"):
        world.topology = rl.Topology(((0, 1), (2, 3)))
    model = Same()
    engine = rl.prepare(model, loss=counted, optimizer=lambda params: torch.optim.SGD(params, lr=0.05), world=world,
                        accumulate=accumulate, **more)
    engine.placement._reducer._bucket_bytes = 1   # a bucket for each parameter
    batch = lambda step: torch.full((accumulate, 1), counts[step % len(counts)] / (1 + world.rank))
    reports = [engine.step(batch(step)) for step in range(20)]
    return nn.utils.parameters_to_vector(model.parameters()).detach(), [r.grad_norm for r in reports], [r.loss for r in reports]


@pytest.mark.parametrize(("compress", "more"), [
    *((name, {}) for name in ("bf16", "fp16", "int8", "int4", "1bit", "topk", "powersgd")), ("1bit", {"accumulate": 3}),
    ("topk", {"precision": "fp16"}), ("int8", {"precision": "bf16"}), ("int8", {"compress_after": 3}), ("1bit", {"clip": 1.0}),
    ("1bit", {"all_reduce": "hierarchical"})], ids=str)
def test_a_small_batch_after_a_large_one_is_owed_no_more_than_after_one_of_its_size(compress, more):
    """What is remembered is in the units of a mean. In those of a sum, the step of 1 item took what 500 owed 500 times."""
    p = 4 if "all_reduce" in more else 2
    mixed, even = (rl.simulate(p, lambda w, c=c: path(w, c, compress=compress, **more)) for c in (LARGE_AND_SMALL, [64.0]))
    for (ends, norms, losses), (end, norm, loss) in zip(mixed, even):
        # Sums of 10 items and of 1000 are rounded otherwise, so a value half way between two codes may get the other one.
        assert (ends - end).norm() < 0.02 * end.norm()
        assert norms == pytest.approx(norm, rel=0.02, nan_ok=True) and losses == pytest.approx(loss, rel=0.02, abs=1e-6)


def test_fp16_carries_means_so_many_items_are_no_overflow_and_an_overflow_names_it():
    def body(world, factor):
        engine = prepare(world, compress="fp16", loss=lambda model, x: (model(x).sum() * factor, len(x) * 1e6))
        return engine.step(torch.ones(4, 600)).grad_norm

    assert rl.simulate(2, lambda world: body(world, 1e6))[0] == pytest.approx(600**0.5, rel=1e-3)   # a sum of 8e6
    with pytest.raises(rl.NonFinite, match="compress='fp16' carries numbers up to 65504 only.* 'bf16' is as short"):
        rl.simulate(2, lambda world: body(world, 1e12))


def test_the_count_of_a_compressed_step_costs_one_message_and_exact_steps_have_none():
    def body(world, **more):
        engine, labels = prepare(world, accumulate=2, **more), []
        reduce = world.all_reduce
        world.all_reduce = lambda x, *a, **k: (labels.append(k.get("label")), reduce(x, *a, **k))[1]
        for step in range(4):
            engine.step(rows(4, step))
        return labels.count("items of the step")

    runs = ({}, {"compress": "int8"}, {"compress": "int8", "compress_after": 3})
    assert [rl.simulate(2, lambda w, m=m: body(w, **m))[0] for m in runs] == [0, 4, 1]


@pytest.mark.parametrize("compress", ["int8", "powersgd"])
def test_after_a_step_that_raises_non_finite_training_goes_on(compress):
    def body(world):
        engine = prepare(world, compress=compress)
        losses = [engine.step(rows(8, world.rank)).loss]
        bad = rows(8, world.rank)
        if world.rank == 1:
            bad[0, 0] = math.nan
        with pytest.raises(rl.NonFinite):
            engine.step(bad)
        return losses + [engine.step(rows(8, world.rank)).loss for _ in range(20)]

    for losses in rl.simulate(2, body):
        assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(("compress", "stage"), [("bf16", 0), ("int8", 0), ("1bit", 0), ("int8", 1), ("int4", 3)])
def test_a_step_that_raises_non_finite_leaves_nothing_to_the_next(compress, stage):
    """The rounding error of its finite blocks came with the next gradient: 1e18 of the 1e20 here, with 1bit all of it."""
    def body(world, first):
        model = Line()
        engine = rl.prepare(model, loss=squares, optimizer=lambda params: torch.optim.SGD(params, lr=1e-3), world=world, stage=stage,
                            compress=compress)
        if first:
            bad = rows(8, world.rank)
            bad[0, 0], bad[0, 300] = 3e38, 1e20   # the gradient, twice that, is not finite in the first block only
            with pytest.raises(rl.NonFinite):
                engine.step(bad)
        engine.step(rows(8, world.rank))
        return engine.full_state_dict()["model"]["w"]

    alone, after = (rl.simulate(2, lambda w, first=first: body(w, first))[0] for first in (False, True))
    assert torch.equal(alone, after)


def test_exact_steps_first_are_those_of_the_exact_run_to_the_bit():
    """Losses of a step tell the parameters before it; the fourth is the first that a compressed update can have changed."""
    def body(world, **more):
        engine = prepare(world, **more)
        return [engine.step(rows(4, 10 * step + world.rank)).loss for step in range(6)]

    exact, later = (rl.simulate(2, lambda w, m=m: body(w, **m)) for m in ({}, {"compress": "1bit", "compress_after": 2}))
    for mine, its in zip(later, exact):
        assert mine[:3] == its[:3] and mine[3] != its[3]


@pytest.mark.parametrize("more", [{"compress": "1bit"}, {"compress": "topk", "precision": "fp16"}, {"compress": "powersgd:1"},
                                  {"compress": "1bit", "compress_after": 2}], ids=str)
def test_a_state_begins_without_what_the_engine_that_loads_it_remembers_of_other_steps(more):
    """What those had lost was added to the first gradient after it, in fp16 in the units of another loss scale."""
    def body(world):
        losses = lambda engine: [engine.step(rows(4, 100 + step)).loss for step in range(6)]
        fresh, used = prepare(world, **more), prepare(world, **more)
        state = fresh.full_state_dict()
        for step in range(5):
            used.step(rows(4, 10 * step + world.rank))
        for engine in (fresh, used):
            engine.load_full_state_dict(state)
        return losses(fresh), losses(used)

    for fresh, used in rl.simulate(2, body):
        assert fresh == used


def test_one_rank_trains_exactly():
    def body(world, compress):
        engine = prepare(world, compress=compress)
        return [engine.step(rows(4, step)).loss for step in range(3)]

    assert rl.simulate(1, lambda w: body(w, "1bit")) == rl.simulate(1, lambda w: body(w, "none"))


def test_what_has_no_meaning_is_refused():
    def body(world):
        with pytest.raises(rl.ConfigError, match="compress='int8' has no meaning with deterministic"):
            prepare(world, compress="int8", deterministic=True)
        with pytest.raises(rl.ConfigError, match="no compression 'int7'. Did you mean"):
            prepare(world, compress="int7")
        with pytest.raises(rl.ConfigError, match="no compression 'powersgd:none': the rank must be"):
            prepare(world, compress="powersgd:none")
        with pytest.raises(rl.ConfigError, match="compress_after=3 has no meaning with compress='none'"):
            prepare(world, compress_after=3, deterministic=True)
        with pytest.raises(rl.ConfigError, match="compress='powersgd' needs whole matrices"):
            prepare(world, compress="powersgd", compress_after=3, stage=1)

    rl.simulate(2, body)


@pytest.mark.parametrize(("settings", "said"), [
    (["--comm.compress=int88"], "compress = 'int88': there is no compression 'int88'. Did you mean 'int8'"),
    (["--comm.compress=int8:4"], "int8 has no rank; only powersgd has one"),
    *(([f"--comm.compress=powersgd:{rank}"], "the rank must be a whole number") for rank in ("", "0", "-4", "x", "4.5", " 4", "4:4")),
    (["--comm.compress=powersgd:8", "--comm.all_reduce=hierarchical"], "'powersgd:8' needs whole matrices"),
    (["--comm.compress=int8", "--comm.all_reduce=ring"], "sums in its own way"),
    (["--comm.compress=powersgd", "--comm.all_reduce=hierarchical"], "whole matrices"),
    (["--comm.compress=int8", "--train.deterministic=true"], "no meaning with"),
    (["--comm.compress_after=5"], "compress_after=5 has no meaning with compress='none'"),
    (["--comm.compress_after=-1", "--comm.compress=int8"], "compress_after"),
    (["--comm.compress_after=100", "--comm.compress=int8", "--train.steps=100"], "100 leaves no step to compress of .* 100"),
])
def test_a_config_that_has_no_meaning_is_refused_before_any_rank_starts(tmp_path, settings, said):
    file = tmp_path / "train.toml"
    file.write_text("[train]\nlocal_batch_size = 1\n")
    with pytest.raises(rl.ConfigError, match=said):
        load_config(file, settings)
    assert load_config(file, ["--comm.compress=int8", "--comm.all_reduce=hierarchical"]).comm.compress == "int8"
    comm = load_config(file, ["--comm.compress=powersgd:16", "--comm.compress_after=99", "--train.steps=100"]).comm
    assert (comm.compress, comm.compress_after) == ("powersgd:16", 99)


def test_every_compression_that_the_config_knows_can_be_made():
    parts = [(0, torch.Size([4, 4]))]
    assert all(isinstance(compressed_all_reduce(name, parts), Compressed) for name in NAMES if name != EXACT)
