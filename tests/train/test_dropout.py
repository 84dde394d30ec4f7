"""Keyed dropout: masks that depend on what is trained and never on where."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import rankloom as rl
from awkward import adamw, loss_sum, make_batches, make_model
from closeness import expect_close
from rankloom.base.errors import ConfigError
from rankloom.models.config import GPTConfig, MoEConfig
from rankloom.models.gpt import GPT
from rankloom.models.loss import language_model_loss
from rankloom.parallel.context.sequences import cut_sequence
from rankloom.parallel.tensor.cut_region import CutRegion
from rankloom.train import dropout
from rankloom.train.dropout import DropoutKey, KeyedDropout, key_dropout, keyed_mask
from seeded import seeded


def mask(seed=0, step=0, row=0, name="drop", p=0.5, n=1000, calls=1) -> torch.Tensor:
    key = DropoutKey(seed)
    key.set_rows(step, range(row, row + 1))
    module = KeyedDropout(p, name, key)
    return [module(torch.ones(n)) for _ in range(calls)][-1]


def test_equal_keys_give_equal_masks_whatever_the_global_generator_does():
    first = mask()
    torch.manual_seed(99)
    assert torch.equal(first, mask())


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}, {"row": 1}, {"name": "other"}, {"calls": 2}])
def test_every_part_of_the_key_changes_the_mask(other):
    agree = (mask() == mask(**other)).float().mean().item()
    assert 0.4 < agree < 0.6, "independent fair coins agree half of the time"


def test_a_probability_too_small_for_a_number_of_32_bits_drops_nothing():
    """One more than the largest of them would wrap around, and drop all."""
    assert torch.equal(mask(p=1e-12), torch.ones(1000))


def test_a_module_that_was_used_twice_is_still_known_as_such_when_its_micro_batch_comes_back_for_its_backward():
    key, x = DropoutKey(0), torch.ones(1, requires_grad=True)
    key.set_microbatches(0, [range(1), range(1, 2)])
    for microbatch in (0, 1):
        key.select_microbatch(microbatch)
        for _ in range(2 - microbatch):   # the second uses it once
            key.next_seed("drop")
    key.select_microbatch(0)
    y = x * 2

    def run_again(grad):   # as a checkpoint does
        key.next_seed("drop")

    y.register_hook(run_again)
    with pytest.raises(ConfigError, match="dropout drop is used several times"):
        y.backward()


def test_a_module_that_drops_nothing_does_not_hide_one_that_does():
    key = DropoutKey(0)
    for p in (0.5, 0.0):
        KeyedDropout(p, f"drop {p}", key)
    assert key.is_used, "ranks number their rows only then"


def test_the_next_micro_batch_starts_counting_calls_anew():
    key = DropoutKey(0)
    module = KeyedDropout(0.5, "drop", key)
    key.set_rows(0, range(1))
    first = [module(torch.ones(50)) for _ in range(2)]
    key.set_rows(0, range(1, 2))
    module(torch.ones(50))
    key.set_rows(0, range(1))
    again = [module(torch.ones(50)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(first, again)) and not torch.equal(*first)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_what_is_kept_is_scaled_so_that_the_mean_stays(p):
    got = mask(p=p, n=100_000)
    assert got.unique().tolist() == [0.0, pytest.approx(1 / (1 - p))]
    assert got.mean().item() == pytest.approx(1.0, abs=5 * (p / (1 - p) / 100_000) ** 0.5)   # five standard deviations


def test_the_gradient_passes_where_the_value_did():
    key, x = DropoutKey(0), torch.ones(100, requires_grad=True)
    out = KeyedDropout(0.25, "drop", key)(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False), (0.0, False)])
def test_without_dropout_or_in_evaluation_it_is_the_identity(p, training):
    x = torch.randn(5)
    assert KeyedDropout(p, "drop", DropoutKey(0)).train(training)(x) is x


def test_dropping_everything_gives_zeros():
    assert not mask(p=1.0).any()


def test_every_dropout_of_a_model_is_replaced_at_every_place_it_hangs():
    shared = nn.Dropout(0.2)
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), shared), "b": nn.Sequential(shared, nn.Dropout(0.3))}).eval()
    assert key_dropout(model, DropoutKey(0)) == 3
    keyed = {name: (module.p, module.name, module.training) for name, module in model.named_modules() if isinstance(module, KeyedDropout)}
    assert keyed == {"a.1": (0.2, "a.1", False), "b.0": (0.2, "b.0", False), "b.1": (0.3, "b.1", False)}
    assert not any(type(module) is nn.Dropout for module in model.modules())
    assert "p=0.2, keyed" in repr(model)


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_who_looks_for_dropout_in_a_prepared_model_finds_it_and_may_set_its_p(kind):
    key, model = DropoutKey(0), nn.Sequential(nn.Identity(), kind(0.0))
    key_dropout(model, key)
    found = [module for module in model.modules() if isinstance(module, kind)]
    x = torch.ones(2, 40, 1, 1, 1)
    assert len(found) == 1 and not key.is_used and model(x) is x
    found[0].p = 0.5
    assert key.is_used and model(x).unique().tolist() == [0.0, 2.0], "ranks ask each other for their rows from now on"
    found[0].eval()
    assert model(x) is x
    with pytest.raises(ConfigError, match=r"dropout 1: p=1.5, expected a probability from 0 to 1"):
        found[0].p = 1.5


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_dropout_in_place_changes_its_input_as_torch_s_does(p):
    model, key = nn.Sequential(nn.Dropout(p, inplace=True)), DropoutKey(0)
    key_dropout(model, key)
    x = torch.ones(1, 100)
    assert model(x) is x
    assert torch.equal(x, KeyedDropout(p, "0", DropoutKey(0))(torch.ones(1, 100))) and not x.all()


def test_what_is_hooked_on_a_dropout_is_hooked_on_the_keyed_one():
    model, seen = nn.Sequential(nn.Dropout(0.5), nn.Identity()), []
    handle = model[0].register_forward_hook(lambda module, args, output: seen.append(type(module)))
    key_dropout(model, DropoutKey(0))
    model(torch.ones(3))
    handle.remove()
    model(torch.ones(3))
    assert seen == [KeyedDropout]


@pytest.mark.parametrize(("ranks", "options"), [(1, {"accumulate": 4}), (2, {}), (2, {"accumulate": 3}), (3, {"accumulate": 2}), (4, {}),
                                               (5, {"accumulate": 2}), (1, {"deterministic": 4}), (3, {"deterministic": True})], ids=str)
def test_training_with_dropout_is_the_same_however_rows_lie_on_ranks_and_in_micro_batches(ranks, options):
    """23 rows, which nothing divides; fp64, so only the order of addition differs."""
    def body(world, **options):
        engine = rl.prepare(make_model(dropout=0.5), loss=loss_sum, optimizer=adamw, world=world, seed=3, **options)
        losses = [engine.step([t.tensor_split(world.size)[world.rank] for t in batch]).loss for batch in make_batches(3, rows=23)]
        return losses, engine.full_state_dict()["model"]

    losses, params = rl.simulate(ranks, lambda world: body(world, **options))[-1]
    truth, reference = rl.simulate(1, body)[0]
    assert losses == pytest.approx(truth, rel=1e-12)
    for name, expected in reference.items():
        torch.testing.assert_close(params[name], expected, rtol=1e-12, atol=1e-12)


def test_every_step_and_every_micro_batch_of_every_rank_draws_masks_of_its_own():
    """The learning rate is zero and the rows are all alike, so only masks can tell two losses apart."""
    def body(world):
        still = lambda params: torch.optim.SGD(params, lr=0.0)
        seen = []
        loss = lambda m, batch: (seen.append(loss_sum(m, batch)) or seen[-1])
        engine = rl.prepare(make_model(dropout=0.5), loss=loss, optimizer=still, world=world, accumulate=3)
        for _ in range(3):
            engine.step([t[:1].repeat(3, 1) for t in make_batches()[0]])
        return [total.item() for total, _ in seen[3:]]   # before the first step the loss is called three times to see if it is a sum

    drawn = [value for values in rl.simulate(2, body) for value in values]
    assert len(drawn) == len(set(drawn)) == 18


def test_a_run_that_goes_on_with_other_ranks_drops_what_it_would_have_dropped():
    def body(world, first, last, state=None):
        engine = rl.prepare(make_model(dropout=0.5), loss=loss_sum, optimizer=adamw, world=world, seed=3)
        if state:
            engine.load_full_state_dict(state)
        batches = make_batches(4, rows=24)[first:last]
        losses = [engine.step([t.tensor_split(world.size)[world.rank] for t in batch]).loss for batch in batches]
        return losses, engine.full_state_dict()

    before, state = rl.simulate(4, lambda world: body(world, 0, 2))[0]
    after, _ = rl.simulate(3, lambda world: body(world, 2, 4, state))[0]
    assert before + after == pytest.approx(rl.simulate(1, lambda world: body(world, 0, 4))[0][0], rel=1e-12)


def test_another_seed_and_no_dropout_train_otherwise():
    def body(world, p, seed):
        engine = rl.prepare(make_model(dropout=p), loss=loss_sum, optimizer=adamw, world=world, seed=seed)
        return [engine.step(make_batches()[0]).loss for _ in range(2)][-1]

    losses = {rl.simulate(1, lambda w, d=d, s=s: body(w, d, s))[0] for d, s in ((0.0, 0), (0.5, 0), (0.5, 1))}
    assert len(losses) == 3


def test_a_compiled_module_draws_the_same_masks_call_by_call_and_is_compiled_once():
    """Ten modules, two calls each: names, counters and keys are no part of the graph."""
    torch._dynamo.reset()
    counter, key = CompileCounterWithBackend("aot_eager"), DropoutKey(4)
    modules = [KeyedDropout(0.5, f"drop.{i}", key) for i in range(10)]
    compiled = torch.compile(lambda module, x: module(module(x)), backend=counter, fullgraph=True)
    for step in range(2):
        key.set_rows(step, range(1, 2))
        expected = [module(module(torch.ones(40))) for module in modules]
        key.set_rows(step, range(1, 2))
        assert all(torch.equal(compiled(module, torch.ones(40)), wanted) for module, wanted in zip(modules, expected))
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_two_calls_on_one_tensor_are_not_merged_by_the_compiler(backend):
    """Two views of the same rows: what is equal in a graph is computed once, unless torch is told otherwise."""
    torch._dynamo.reset()
    key = DropoutKey(4)
    module, x = KeyedDropout(0.5, "drop", key), torch.ones(40, requires_grad=True)
    views = lambda: torch.stack([module(x), module(x), module(x.view(8, 5).t()).t().reshape(40)])
    compiled = torch.compile(views, backend=backend, fullgraph=True)
    key.set_rows(1, range(1, 2))
    expected = views()
    key.set_rows(1, range(1, 2))
    found = compiled()
    assert torch.equal(found, expected) and not torch.equal(found[0], found[1]) and key.calls == {"drop": 2}
    weights = torch.arange(120.0).view(3, 40)
    assert torch.equal(*(torch.autograd.grad((each * weights).sum(), x)[0] for each in (found, expected)))
    torch._dynamo.reset()


def test_a_copy_of_a_module_draws_with_its_own_key():
    key = DropoutKey(4)
    module = KeyedDropout(0.5, "drop", key)
    twin = copy.deepcopy(module)
    key.set_rows(5, range(5, 6))
    assert torch.equal(keyed_mask(torch.ones(40), twin._place, torch.empty(0)), mask(4, name="drop", n=40))
    assert twin.key.calls == {"drop": 0} and key.calls == {}


# ---------------------------------------------------------------- sequences that are cut over ranks


def drawn(here, part=(0, 1), tokens: int | None = None, length: int = 23, calls: int = 1) -> torch.Tensor:
    """The mask of the tokens that are `here`, in rows of `length`; None: all."""
    key = DropoutKey(5)
    key.set_rows(3, range(4, 6))
    if here is not None:
        key.set_token_positions(here, length)
    count = tokens or (length if here is None else sum(map(len, here)))
    module = KeyedDropout(0.5, "drop", key, part)
    return [module(torch.ones(2, count, 3)) for _ in range(calls)][-1]


@pytest.mark.parametrize("at_once", [1, 5, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("zigzag", [True, False])
def test_every_token_is_dropped_as_in_the_whole_row_wherever_it_is(at_once, ranks, zigzag, monkeypatch):
    monkeypatch.setitem(dropout.AT_ONCE, "cpu", at_once)
    for calls in (1, 2):
        whole = drawn(None, calls=calls)
        for spans in cut_sequence(23, ranks, zigzag=zigzag):
            positions = [at for span in spans for at in span]
            assert torch.equal(drawn(spans, calls=calls), whole[:, positions])


def test_a_part_of_the_tokens_of_a_part_is_dropped_as_in_the_whole_row():
    whole = drawn(None, length=24)
    for spans in cut_sequence(24, 2, zigzag=True):
        positions = [at for span in spans for at in span]
        for rank in range(3):
            mine = drawn(spans, part=(rank, 3), tokens=4, length=24)
            assert torch.equal(mine, whole[:, positions[4 * rank:4 * rank + 4]])


def of_rows(rows: range, shape: tuple[int, ...]) -> torch.Tensor:
    key = DropoutKey(5)
    key.set_rows(3, rows)
    return KeyedDropout(0.5, "drop", key)(torch.ones(shape))


@pytest.mark.parametrize("row", [(), (40,), (8, 40), (3, 8, 40)], ids=str)
def test_a_row_is_dropped_as_by_itself_whichever_rows_are_beside_it(row):
    together = of_rows(range(7, 12), (5, *row))
    apart = [of_rows(range(number, number + 1), (1, *row)) for number in range(7, 12)]
    assert torch.equal(together, torch.cat(apart))
    assert len({tuple(values.flatten().tolist()) for values in apart}) == (5 if row else 2)


def test_tokens_that_a_model_lays_in_one_line_are_dropped_by_their_rows_and_positions():
    assert torch.equal(of_rows(range(2, 5), (12, 40)), of_rows(range(2, 5), (3, 4, 40)).flatten(0, 1))


@pytest.mark.parametrize("tokens", [1, 4, 6, 7])
@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_that_come_first_are_dropped_by_their_rows_and_positions(rows, tokens):
    numbers = range(2, 2 + rows)
    assert torch.equal(of_rows(numbers, (tokens, rows, 40)), of_rows(numbers, (rows, tokens, 40)).transpose(0, 1))


def test_attention_of_heads_that_lie_with_the_rows_is_dropped_by_rows_however_many_they_are():
    whole, first = of_rows(range(8), (16, 8, 8)), of_rows(range(5), (10, 8, 8))
    assert torch.equal(whole[:10], first)


def test_what_all_rows_share_is_dropped_as_a_whole():
    assert of_rows(range(2, 5), (1, 4, 40)).shape == (1, 4, 40)
    assert torch.equal(of_rows(range(2, 5), (7, 40)), of_rows(range(2, 3), (7, 40)))
    assert of_rows(range(2, 5), ()).shape == ()
    assert torch.equal(of_rows(range(2, 2), (7, 40)), of_rows(range(2, 3), (7, 40)))


CHANNELS = [(nn.Dropout1d, (6, 5, 7)), (nn.Dropout1d, (6, 9)), (nn.Dropout2d, (6, 5, 4, 3)), (nn.Dropout2d, (6, 5, 7)),
            (nn.Dropout3d, (6, 5, 2, 3, 4)), (nn.Dropout3d, (6, 3, 4, 5))]


@pytest.mark.filterwarnings("ignore:dropout2d")   # of shapes that torch will read otherwise some day
@pytest.mark.parametrize(("kind", "shape"), CHANNELS, ids=str)
def test_channels_are_dropped_whole_where_torch_drops_them_and_by_their_rows(kind, shape):
    def channels(seen: torch.Tensor) -> list[int]:   # how many trailing dims are alike
        return [dim for dim in range(1, seen.dim() + 1) if torch.equal(seen, seen.narrow(-dim, 0, 1).expand_as(seen))]

    key, model = DropoutKey(5), nn.Sequential(kind(0.5))
    torch_own = model(torch.ones(shape))
    key_dropout(model, key)
    key.set_rows(3, range(6))
    together = model(torch.ones(shape))
    assert channels(together) == channels(torch_own) and together.unique().tolist() == [0.0, 2.0]
    key.set_rows(3, range(2, 5))
    assert torch.equal(model(torch.ones(3, *shape[1:])), together[2:5])


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (3, 0, 4), (3, 4, 0)], ids=str)
def test_of_nothing_nothing_is_dropped(shape):
    assert of_rows(range(3), shape).shape == shape


def test_a_mask_does_not_depend_on_strides():
    key = DropoutKey(5)
    results = []
    for x in (torch.ones(4, 6, 5), torch.ones(6, 4, 5).transpose(0, 1), torch.ones(1, 1, 5).expand(4, 6, 5)):
        key.set_rows(0, range(1))
        results.append(KeyedDropout(0.5, "drop", key)(x))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("shape", [(2, 6, 3), (2, 5, 4, 3), (5, 3)])
def test_what_has_no_tokens_where_sequences_are_cut_is_refused(shape):
    key = DropoutKey(0)
    key.set_token_positions((range(2), range(7, 10)), 10)
    with pytest.raises(rl.ShapeMismatch, match=r"dropout drop: x has shape .*, expected \[rows, 5, features\]"):
        KeyedDropout(0.5, "drop", key)(torch.ones(shape))


CONFIG = GPTConfig(vocab_size=37, width=16, layers=2, heads=4, kv_heads=2, ffn=24, seq_len=24, dropout=0.3)
MESHES = [({"context": 2}, {}), ({"context": 3}, {}), ({"context": 4}, {}), ({"context": 2}, {"context": "all_to_all"}),
          ({"context": 2, "shard": 2}, {"stage": 3}), ({"context": 2, "tensor": 2}, {}), ({"tensor": 2}, {"sequence": True}),
          ({"context": 2, "tensor": 2}, {"sequence": True}), ({"pipe": 2, "context": 2}, {"pipe": "1f1b", "accumulate": 2}),
          ({"pipe": 2, "tensor": 2}, {"pipe": "zb-h1", "accumulate": 2}),
          ({"pipe": 2, "tensor": 2}, {"pipe": "1f1b", "accumulate": 2, "sequence": True}),
          ({"pipe": 2, "context": 2, "tensor": 2}, {"pipe": "1f1b", "accumulate": 2, "sequence": True})]


def train_gpt(world, *, sequence: bool = False, moe: MoEConfig | None = None, length: int = 24, **options):
    """Loss and norm of two steps, and the weights."""
    model = GPT(dataclasses.replace(CONFIG, moe=moe), dtype=torch.float64)
    plan = {"tensor_plan": model.tp_sequence_plan} if sequence else {}
    engine = rl.prepare(model, loss=language_model_loss, optimizer=adamw, world=world, clip=0.5, seed=7, **plan, **options)
    draw, reports = torch.Generator().manual_seed(1), []
    for _ in range(2):
        tokens = torch.randint(0, 37, (8, length + 1), generator=draw).tensor_split(engine.group.size)[engine.group.rank]
        reports.append(engine.step((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())))
    return [number for report in reports for number in (report.loss, report.grad_norm)], engine.full_state_dict()["model"]


def expect_one_process(mesh: dict[str, int], options: dict, **both) -> None:
    """In fp64, to the order of addition."""
    ((numbers, weights),) = rl.simulate(1, lambda world: train_gpt(world, **both))
    for mine, state in rl.simulate(rl.Mesh(**mesh), lambda world: train_gpt(world, **options, **both)):
        assert mine == pytest.approx(numbers, rel=1e-12)
        expect_close(state, weights, 1e-12)


@pytest.mark.parametrize(("mesh", "options"), MESHES, ids=str)
def test_sequences_cut_over_ranks_drop_what_one_process_drops(mesh, options):
    expect_one_process(mesh, options)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize(("mesh", "options"), [MESHES[0], MESHES[7], MESHES[8], MESHES[-2]], ids=str)
def test_what_is_computed_again_drops_the_same_tokens(recompute, mesh, options):
    expect_one_process(mesh, {**options, "recompute": recompute})


@pytest.mark.parametrize("mesh", [{"context": 2, "expert": 2}, {"context": 3}], ids=str)
def test_a_mixture_of_experts_and_rows_that_ranks_do_not_divide_drop_the_same(mesh):
    expect_one_process(mesh, {}, moe=MoEConfig(experts=4, top_k=2, ffn=12), length=19)


class Checkpointed(nn.Module):
    """Blocks that the model itself runs again in backward."""

    @seeded(0)
    def __init__(self, reentrant: bool | None, uses: int = 1):
        super().__init__()
        self.reentrant, self.uses = reentrant, uses
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3))
        self.double()

    def forward(self, x):
        x = self.first(x)
        for block in [*self.blocks] * self.uses:
            x = x + (block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant))
        return x


def train_checkpointed(world, reentrant: bool | None, uses: int = 1, **options):
    engine = rl.prepare(Checkpointed(reentrant, uses), loss=lambda model, x: (model(x).square().sum(), len(x)), world=world,
                        optimizer=lambda params: torch.optim.SGD(params, lr=0.1), **options)
    rows = torch.linspace(-1, 2, 48, dtype=torch.float64).view(8, 6).tensor_split(engine.group.size)[engine.group.rank]
    return [engine.step(rows).loss for _ in range(3)]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("mesh", "options"), [({}, {}), ({"replicate": 2}, {"accumulate": 2}), ({"shard": 2}, {"stage": 3})])
def test_a_model_that_checkpoints_its_own_blocks_drops_the_same_in_backward(mesh, options, reentrant):
    expected, = rl.simulate(1, lambda world: train_checkpointed(world, None))
    for found in rl.simulate(rl.Mesh(**mesh), lambda world: train_checkpointed(world, reentrant, **options)):
        assert found == pytest.approx(expected, rel=1e-12)


def test_forwards_between_two_steps_do_not_count_as_uses():
    def body(world):
        engine = rl.prepare(Checkpointed(False), loss=lambda model, x: (model(x).square().sum(), len(x)), world=world,
                            optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        rows, losses = torch.linspace(-1, 2, 48, dtype=torch.float64).view(8, 6), []
        for _ in range(3):
            losses.append(engine.step(rows).loss)
            with torch.no_grad():
                assert not torch.equal(engine.model(rows), engine.model(rows))
        return losses

    expected, = rl.simulate(1, lambda world: train_checkpointed(world, None))
    assert rl.simulate(1, body) == [pytest.approx(expected, rel=1e-12)]


def test_a_checkpoint_of_dropout_that_is_used_twice_is_refused_and_recompute_is_not():
    def body(world):
        with pytest.raises(ConfigError, match=r"dropout blocks.\d.2 is used several times, .* give `prepare` recompute='full'"):
            train_checkpointed(world, False, uses=2)
        return train_checkpointed(world, None, uses=2), train_checkpointed(world, None, uses=2, recompute="full")

    (expected, found), = rl.simulate(1, body)
    assert found == pytest.approx(expected, rel=1e-12)


def test_rows_of_two_lengths_in_one_loss_are_computed_again_as_they_were():
    """The loss calls the model twice before the first backward: what runs again must not take the second rows for the first."""
    def twice(model, batch):
        tokens, targets = batch
        (first, count), (second, more) = (model(tokens[:, :n], targets=targets[:, :n]) for n in (22, 21))
        return first + second, count + more

    def body(world, policy):
        engine = rl.prepare(GPT(CONFIG, dtype=torch.float64), loss=twice, optimizer=adamw, world=world, recompute=policy)
        tokens = torch.randint(0, 37, (2, 23), generator=torch.Generator().manual_seed(1))
        return [engine.step((tokens[:, :-1], tokens[:, 1:])).grad_norm for _ in range(2)]

    (alone,) = rl.simulate(1, lambda world: body(world, "none"))
    for found in rl.simulate(rl.Mesh(context=2), lambda world: body(world, "full")):
        assert found == pytest.approx(alone, rel=1e-12)


def test_other_kinds_of_dropout_are_refused_with_context_ranks():
    model = GPT(CONFIG, dtype=torch.float64)
    model.blocks[1].mlp_dropout = nn.AlphaDropout(0.1)
    for mesh in (rl.Mesh(context=2), rl.Mesh(pipe=2, context=2)):
        with pytest.raises(rl.ConfigError, match=r"blocks.1.mlp_dropout draws its mask by how many tokens are here"):
            rl.simulate(mesh, lambda world: rl.prepare(copy.deepcopy(model), loss=language_model_loss, optimizer=adamw, world=world))


class Attends(nn.Module):
    """Attention that drops probabilities of its heads, and features of what it returns."""

    def __init__(self, width: int, p: float, flat: bool):
        super().__init__()
        self.num_heads, self.flat = 4, flat
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.inside, self.after = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        shares = (q @ k.mT).softmax(-1)
        dropped = self.inside(shares.flatten(0, 1)).view_as(shares) if self.flat else self.inside(shares)
        return x + self.after(self.out((dropped @ v).transpose(1, 2).flatten(2)))


class Perceives(nn.Module):
    """As wide between its layers on each of two ranks as outside of them, so that shapes do not tell which is which."""

    def __init__(self, width: int, p: float):
        super().__init__()
        self.up, self.down, self.inside, self.after = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(p), nn.Dropout(p)

    def forward(self, x):
        return x + self.after(self.down(self.inside(self.up(x).tanh())))


def made_between(flat: bool, on: bool = True) -> nn.Module:
    torch.manual_seed(3)
    blocks = nn.Sequential(Attends(16, 0.3 * on, flat), Perceives(16, 0.4 * on))
    return nn.Sequential(nn.Embedding(37, 16), nn.Dropout(0.1 * on), blocks, nn.Linear(16, 37)).double()


def train_between(world, plain: nn.Module, plan=None, raised_to=None, **options):
    model = copy.deepcopy(plain)
    loss = lambda model, batch: (nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten(), reduction="sum"), batch.numel())
    engine = rl.prepare(model, loss=loss, optimizer=adamw, world=world, tensor_plan=plan, seed=7, **options)
    for module in (module for module in model.modules() if raised_to and isinstance(module, KeyedDropout)):
        module.p = raised_to
    tokens = torch.randint(0, 37, (4, 6), generator=torch.Generator().manual_seed(1)).tensor_split(engine.group.size)[engine.group.rank]
    return [number for _ in range(2) for report in [engine.step(tokens)] for number in (report.loss, report.grad_norm)]


BETWEEN = {f"2.0.{name}": "colwise" for name in "qkv"} | {"2.0.out": "rowwise", "2.1.up": "colwise", "2.1.down": "rowwise"}


@pytest.mark.parametrize(("mesh", "options"), [
    ({"tensor": 2}, {}), ({"tensor": 4}, {}), ({"tensor": 2, "shard": 2}, {"stage": 3}),
    ({"tensor": 2}, {"recompute": "full", "units": (Attends, Perceives)})], ids=["2", "4", "2 and stage 3", "2, computed again"])
@pytest.mark.parametrize("flat", [False, True])
def test_features_and_heads_that_ranks_share_are_dropped_as_in_one_process(flat, mesh, options):
    plain = made_between(flat)
    (alone,) = rl.simulate(1, lambda world: train_between(world, plain))
    for mine in rl.simulate(rl.Mesh(**mesh), lambda world: train_between(world, plain, BETWEEN, **options)):
        assert mine == pytest.approx(alone, rel=1e-12)


def test_dropout_that_is_turned_on_later_drops_as_in_one_process():
    plain = made_between(flat=False, on=False)
    (alone,) = rl.simulate(1, lambda world: train_between(world, plain, raised_to=0.3))
    assert alone != rl.simulate(1, lambda world: train_between(world, plain))[0]
    for mine in rl.simulate(rl.Mesh(tensor=2), lambda world: train_between(world, plain, BETWEEN, raised_to=0.3)):
        assert mine == pytest.approx(alone, rel=1e-12)


def test_a_compiled_block_knows_between_which_of_its_layers_features_are_cut():
    def build():
        layers = [nn.Identity(), KeyedDropout(0.5, "inside", DropoutKey(5)), nn.Identity(), KeyedDropout(0.5, "after", DropoutKey(5))]
        layers[1].cut_region = layers[3].cut_region = region = CutRegion(rank=1, heads=0)
        layers[0].register_forward_hook(region.enter)
        layers[2].register_forward_pre_hook(region.leave)
        return layers

    x, plain, block = torch.ones(1, 3, 40), nn.Sequential(*build()), torch.compile(nn.Sequential(*build()), backend="aot_eager")
    whole = KeyedDropout(0.5, "inside", DropoutKey(5))(torch.ones(1, 3, 80))[..., 40:] * KeyedDropout(0.5, "after", DropoutKey(5))(x)
    assert torch.equal(plain(x), whole) and torch.equal(block(x), whole)
