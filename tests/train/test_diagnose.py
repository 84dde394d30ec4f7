"""What a step says is wrong: the same sentence on every rank, and the right one."""

import copy
import math
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rankloom as rl
from rankloom.models.config import GPTConfig
from rankloom.models.loss import language_model_loss
from rankloom.models.sequence_part import WholeSequence
from rankloom.train import put_back
from rankloom.train.batches import with_halves
from rankloom.train.diagnose import explain_non_finite
from rankloom.train.first_steps import FEW_STEPS
from rankloom.train.put_back import state_put_back
from rankloom.train.sum_check import expect_sum


def explain(world: rl.World, *, bad_loss: dict | None = None, bad_gradients: dict | None = None) -> str:
    """Rank r's own batch gives loss bad_loss[r], and gradients with NaN in the tensors bad_gradients[r]."""
    owners = {name: nn.Parameter(torch.zeros(2, 3)) for name in ("first", "second", "unused")}

    def run_alone():
        for name in ("first", "second"):
            owners[name].grad = torch.ones(2, 3)
            if name in (bad_gradients or {}).get(world.rank, ()):
                owners[name].grad[0, :2] = math.nan
        return torch.tensor([(bad_loss or {}).get(world.rank, 1.0), 4.0], dtype=torch.float64)

    error = explain_non_finite(world, run_alone, lambda: {n: o.grad for n, o in owners.items() if o.grad is not None}, "step 9: loss nan")
    assert type(error) is rl.NonFinite
    return str(error)


def all_say(p: int, **what) -> str:
    said = set(rl.simulate(p, lambda w: explain(w, **what)))
    assert len(said) == 1, "ranks tell different stories"
    return said.pop()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_named_with_its_rank_before_any_gradient(value):
    said = all_say(3, bad_loss={2: value}, bad_gradients={2: ["first"]})
    assert said.startswith(f"step 9: loss nan. rank 2: the loss of its own batch is {value:g}. ")


def test_the_first_bad_gradient_in_the_order_of_backward_is_named_with_how_much_of_it_is_bad():
    said = all_say(2, bad_gradients={1: ["first", "second"]})
    assert "rank 1: the gradient of second has 2 elements of 6 that are not finite" in said and "first" not in said and "rank 0" not in said


def test_several_ranks_are_all_named():
    said = all_say(4, bad_loss={0: math.nan}, bad_gradients={3: ["first"]})
    assert "rank 0: the loss" in said and "; rank 3: the gradient of first" in said


def test_when_every_rank_alone_is_finite_that_is_said():
    assert "repeated on each rank alone the step was finite" in all_say(2)


def test_the_message_says_that_nothing_is_lost_and_what_to_do():
    assert "The parameters are those of the step before; lower the learning rate, clip" in all_say(1, bad_loss={0: math.nan})


@pytest.mark.parametrize(("batch", "named"), [
    ((torch.ones(4, 4), torch.ones(3)), ["rank 0: a batch", "rank 1: a batch", "rank 2: a batch", "rank 3: a batch"]),
    ((torch.full((4, 4), math.nan), torch.ones(4)), ["rank 2: the loss", "rank 3: the loss", "rank 2: the loss", "rank 3: the loss"]),
])
def test_ranks_that_share_their_rows_are_named_by_their_number_in_the_world(batch, named):
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def body(world):
        engine = rl.prepare(copy.deepcopy(whole), loss=lambda model, batch: (model(batch[0]).sum(), len(batch[1])), world=world,
                            optimizer=lambda p: torch.optim.SGD(p, lr=0.1), tensor_plan={"0": "colwise", "1": "rowwise"}, accumulate=2)
        with pytest.raises((rl.BatchError, rl.NonFinite)) as error:
            engine.step(batch)
        return str(error.value)

    said = rl.simulate(rl.Mesh(replicate=2, tensor=2), body)
    assert all(name in text for name, text in zip(named, said, strict=True)), said


@pytest.mark.parametrize(("precision", "value"), [("fp16", math.nan), ("fp16", math.inf), ("fp32", math.nan)])
def test_when_the_loss_of_one_tensor_rank_alone_is_not_finite_none_of_them_updates(precision, value):
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def body(world):
        bad = {"now": 0.0}
        loss = lambda model, x: (model(x).sum() + bad["now"], len(x))
        engine = rl.prepare(copy.deepcopy(whole), loss=loss, world=world, precision=precision, tensor_plan={"0": "colwise", "1": "rowwise"},
                            optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        before = [engine.step(torch.ones(4, 4)) for _ in range(FEW_STEPS)]   # in which losses are compared
        bad["now"] = value if world.rank == 1 else 0.0
        try:
            said = engine.step(torch.ones(4, 4)).skipped
        except rl.NonFinite as error:
            said = str(error)[str(error).index("rank"):]
        bad["now"] = 0.0
        return said, engine.scale.value, before[-1].skipped, engine.step(torch.ones(4, 4)).skipped

    one, other = rl.simulate(rl.Mesh(tensor=2), body)
    assert one == other and one[2:] == (False, False)
    assert one[0] is True if precision == "fp16" else one[0].startswith("rank 1: the loss of its own batch is nan. ")


def test_a_bad_loss_on_one_tensor_rank_is_told_as_a_difference_in_the_first_steps():
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def body(world):
        bad = math.nan if world.rank == 1 else 0.0
        engine = rl.prepare(copy.deepcopy(whole), loss=lambda model, x: (model(x).sum() + bad, len(x)), world=world,
                            tensor_plan={"0": "colwise", "1": "rowwise"}, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        with pytest.raises(rl.LossError, match=r"the loss of the same rows is \S+ on rank 0 and nan on rank 1"):
            engine.step(torch.ones(4, 4))

    rl.simulate(rl.Mesh(tensor=2), body)


class RootOfZero(nn.Module):
    """Its slope is infinite, and times 0 no number; its value is fine."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sqrt(x * 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_ranks_of_a_pipeline_name_the_gradient_of_a_stage(precision):
    whole = nn.Sequential(nn.Linear(4, 4), RootOfZero(), nn.Linear(4, 4), nn.Tanh())

    def body(world):
        engine = rl.prepare(copy.deepcopy(whole), loss=lambda model, batch: (model(batch[0]).sum() + batch[1].sum(), len(batch[0])),
                            world=world, accumulate=2, precision=precision, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        with pytest.raises(rl.NonFinite) as error:
            engine.step((torch.ones(4, 4), torch.ones(4, 4)))
        return str(error.value)

    one, other = rl.simulate(rl.Mesh(pipe=2), body)
    assert one == other and " rank 0: the gradient of 0.bias has 4 elements of 4 that are not finite. " in one


def test_of_many_ranks_a_few_are_named():
    said = all_say(10, bad_loss=dict.fromkeys(range(10), math.nan))
    assert "; rank 7: the loss of its own batch is nan; and 2 more ranks. " in said and "rank 8" not in said


def judge(loss, *, rows: int = 6, model: nn.Module | None = None) -> None:
    """Let `expect_sum` look at a loss(model, x) -> (loss, count)."""
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(2))
    model = model or nn.Linear(4, 4)

    def totals(part):
        value, count = loss(model, part)
        return torch.stack((value.detach().double(), torch.tensor(float(count), dtype=torch.float64)))

    expect_sum(totals, model, with_halves(x, rows, 3), rank=3, on_any=bool)


def test_a_mean_with_a_count_is_refused_with_the_arithmetic():
    with pytest.raises(rl.LossError, match=r"rank 3: the loss function counts 6 items, but seems to return their mean"):
        judge(lambda model, x: (model(x).square().sum(1).mean(), len(x)))


def test_a_sum_with_a_count_passes_also_of_one_row_and_with_dropout():
    def total(model, x):
        return model(x).square().sum(), len(x)

    judge(total)
    judge(total, rows=1)
    noisy = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    judge(total, model=noisy)
    assert noisy.training, "the check leaves the model as it was"


def test_a_sum_of_random_numbers_is_not_taken_for_a_mean():
    """As of a model that adds noise, or of diffusion: here the halves happen to add up to nearly twice the whole."""
    drawn = iter([23.1, 20.8, 25.3, 31.7])
    judge(lambda model, x: (model(x).sum() * 0 + next(drawn), len(x)))


def test_a_sum_over_a_model_that_takes_another_branch_for_each_half_is_not_taken_for_a_mean():
    """Its halves may add up to nearly twice the whole."""
    judge(lambda model, x: (torch.tensor({3: 11.7, 2: 5.2, 1: 14.5}[len(x)]), len(x)), rows=3)


def test_a_mean_over_what_is_not_padding_is_refused_though_all_tokens_are_counted():
    losses, kept = torch.tensor([[5.5, 5.6], [5.4, 5.7], [5.5, 5.2], [5.6, 0.0]]), torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]])
    parts = iter([slice(0, 4), slice(0, 2), slice(2, 4), slice(0, 4)])
    with pytest.raises(rl.LossError, match="mean, not their sum"):
        judge(lambda model, x: (losses[part := next(parts)].sum() / kept[part].sum(), losses[part].numel()), rows=4)


def test_a_mean_over_rows_is_refused_though_items_are_counted_and_rows_have_unequally_many():
    losses, items = torch.tensor([1.0, 1.0, 3.0, 3.0]), torch.tensor([1, 1, 10, 10])
    parts = iter([slice(0, 4), slice(0, 2), slice(2, 4), slice(0, 4)])
    with pytest.raises(rl.LossError, match="counts 22 items, but seems to return their mean"):
        judge(lambda model, x: (losses[part := next(parts)].mean(), int(items[part].sum())), rows=4)


@pytest.mark.parametrize("counted", [20, 1, 0])
def test_a_sum_is_no_mean_where_one_half_has_nearly_all_that_is_counted(counted):
    """As of a long answer beside a short one, or beside a row that is all padding."""
    losses = torch.rand(2, 1000, generator=torch.Generator().manual_seed(0)) + 0.5
    losses[1, counted:] = 0.0
    parts = iter([slice(0, 2), slice(0, 1), slice(1, 2), slice(0, 2)])
    judge(lambda model, x: (losses[part := next(parts)].sum(), int((losses[part] > 0).sum())), rows=2)


def test_a_mean_that_counts_one_however_many_rows_there_are_is_told_of():
    torch.manual_seed(0)   # the weights
    with pytest.warns(UserWarning, match=r"rank 3: the loss function returns a mean and counts 1, however many rows it gets \(6 rows give"):
        judge(lambda model, x: (model(x).square().mean() + model(x)[:, 0].abs().mean(), 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        judge(lambda model, x: (model(x).square().sum(), len(x)))
        judge(lambda model, x: (next(model.parameters()).square().sum(), 1))   # of the weights alone
        judge(lambda model, x: (model(x).square().sum() / (1 + model(x).square().sum()), 1))   # another function of all rows
        judge(lambda model, x: (1e4 + model(x).square().sum(), 1))   # rows beside a large constant


def test_a_mean_that_counts_one_is_told_of_where_all_rows_lose_nearly_the_same():
    """As those of a language model whose weights are still random."""
    torch.manual_seed(0)   # the weights
    with pytest.warns(UserWarning, match="rank 3: the loss function returns a mean and counts 1"):
        judge(lambda model, x: ((100 + model(x)).mean(), 1))


def test_a_mean_over_one_item_is_its_sum():
    judge(lambda model, x: (model(x).square().mean(), 1))


@pytest.mark.parametrize("rows", [8, 1])
def test_the_engine_refuses_a_mean_before_the_first_step(rows):
    plain = nn.Linear(4, 2)

    def body(world):
        model = copy.deepcopy(plain)
        engine = rl.prepare(model, loss=lambda m, x: (m(x).square().mean(), len(x)), world=world,
                            optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
        before = model.weight.detach().clone()
        with pytest.raises(rl.LossError, match="mean, not their sum"):
            engine.step(torch.ones(rows, 4))
        assert torch.equal(before, model.weight)

    rl.simulate(2, body)


def test_all_ranks_compute_a_loss_again_where_it_seems_a_mean_on_one():
    """At stage 3 a forward is a collective: a rank that looked alone would wait for ever."""
    plain = nn.Linear(4, 2)
    drawn = {0: iter([23.1, 20.8, 25.3, 31.7]), 1: iter([20.0, 10.0, 10.0, 20.0])}   # one seems a mean, until it is another; one is a sum

    def body(world):
        calls = []

        def loss(model, x):
            calls.append(len(x))
            return model(x).sum() * 0 + next(drawn[world.rank], 0.0), len(x)

        engine = rl.prepare(copy.deepcopy(plain), loss=loss, world=world, stage=3,
                            optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        engine.step(torch.ones(4, 4))
        return calls

    assert rl.simulate(2, body, backend="gloo") == [[4, 2, 2, 4, 4]] * 2


def test_frozen_parameters_that_are_released_between_two_tries_of_a_loss_are_left_alone():
    """With context ranks it is tried by rows, which leaves the root gathered, and by tokens, which releases it."""
    tokens = torch.randint(0, 37, (4, 13), generator=torch.Generator().manual_seed(0))

    def body(world):
        model = rl.GPT(GPTConfig(vocab_size=37, seq_len=12, width=16, layers=2, heads=2, kv_heads=2, ffn=24), dtype=torch.float64)
        model.embedding.weight.requires_grad_(False)
        engine = rl.prepare(model, loss=language_model_loss, world=world, stage=3, offload=True,
                            optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        return [engine.step((tokens[:, :-1], tokens[:, 1:])).loss for _ in range(2)]

    alone, = rl.simulate(1, body)
    for losses in rl.simulate(rl.Mesh(context=2), body):
        torch.testing.assert_close(losses, alone, rtol=1e-12, atol=0)


@pytest.mark.parametrize("other", [torch.ones(3), torch.tensor(0.5)], ids=["shorter", "one number"])
def test_a_loss_of_tensors_that_differ_in_length_is_not_looked_at_and_that_is_said(other):
    engine = rl.prepare(nn.Linear(4, 2), loss=lambda model, batch: (model(batch[0]).mean(), len(batch[0])), world=rl.init(device="cpu"),
                        optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.warns(UserWarning, match="one sample .a graph, packed tokens.. Its loss is not tried in halves: make sure"):
        engine.step((torch.ones(4, 4), other))


def test_a_loss_of_a_batch_that_has_no_tensors_is_not_looked_at_and_that_is_said():
    engine = rl.prepare(nn.Linear(4, 2), loss=lambda model, batch: (model(torch.tensor(batch["rows"])).mean(), 4),
                        world=rl.init(device="cpu"), optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.warns(UserWarning, match="a batch without tensors, or .* is one sample"):
        engine.step({"rows": [[1.0] * 4] * 4})


class TwoHeads(nn.Module):
    """In training it returns two things, as GoogLeNet does, in evaluation one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        y = self.layer(x)
        return (y, 2 * y) if self.training else y


def loss_of_two(model, x):
    first, second = model(x)   # of two rows it would not fail in evaluation either
    return (first + second).square().sum(), len(x)


def probed(stage: int, model, loss, p: int = 2) -> list:
    """Rank 0 has 4 rows of ones, rank 1 has 5 of twos."""
    def body(world):
        engine = rl.prepare(copy.deepcopy(model), loss=loss, world=world, stage=stage,
                            optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        return engine.step(torch.full((4 + world.rank, 4), 1.0 + world.rank)).count, engine.model

    return rl.simulate(p, body, backend="gloo")   # where ranks share memory, parameters are not gathered


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_that_returns_other_things_in_training_than_in_evaluation_trains(stage):
    assert [count for count, _ in probed(stage, TwoHeads(), loss_of_two)] == [9, 9]


def test_one_rank_whose_loss_raises_when_it_is_tried_computes_as_often_as_the_others():
    """At stage 3 they would wait for it."""
    def loss(model, x):
        y = model(x)
        if not model.training and x[0, 0] == 2.0:   # of rank 1
            raise KeyError("only in evaluation")
        return y.square().sum(), len(x)

    assert [count for count, _ in probed(3, nn.Linear(4, 2), loss)] == [9, 9]


class TrainsOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.training, "this model is for training"
        return self.layer(x)


def test_what_is_raised_amid_a_forward_that_ranks_share_is_raised_with_a_note_and_is_no_matter_elsewhere():
    square = lambda model, x: (model(x).square().sum(), len(x))
    assert [count for count, _ in probed(0, TrainsOnly(), square)] == [9, 9]
    with pytest.raises(AssertionError, match="for training") as error:
        probed(3, TrainsOnly(), square)
    assert any("the loss was tried in evaluation mode when this was raised" in note for note in error.value.__notes__)


class Seen(nn.Module):
    """Counts rows in every mode, in place and anew, and makes a table when it is first called."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        self.calls = self.calls + 1
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.ones(2))
        return self.layer(x) * self.table


def test_what_forwards_count_in_buffers_begins_with_the_first_step():
    (_, model), = probed(0, Seen(), lambda model, x: (model(x).square().sum(), len(x)), p=1)
    assert (model.rows, model.calls) == (4, 1)


class CountingGPT(rl.GPT):
    """Counts its calls, in a buffer and in an attribute."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen = []

    def forward(self, tokens, targets, *, part=None):
        self.calls += 1
        self.seen.append(len(tokens))
        return super().forward(tokens, targets, part=part or WholeSequence())


def test_so_it_does_where_context_ranks_have_tried_the_loss_by_tokens_too():
    plain = CountingGPT(GPTConfig(vocab_size=37, seq_len=12, width=16, layers=2, heads=2, kv_heads=2, ffn=24))
    tokens = torch.randint(0, 37, (4, 13), generator=torch.Generator().manual_seed(0))

    def body(world):
        engine = rl.prepare(copy.deepcopy(plain), loss=language_model_loss, world=world,
                            optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        engine.step((tokens[:, :-1], tokens[:, 1:]))
        return engine.model.calls.item(), engine.model.seen

    assert rl.simulate(rl.Mesh(context=2), body) == [(1, [4])] * 2


class TrainsOnlyGPT(rl.GPT):
    def forward(self, tokens, targets, *, part=None):
        assert self.training, "this model is for training"
        return super().forward(tokens, targets, part=part or WholeSequence())


def test_what_is_raised_amid_a_forward_of_tensor_ranks_is_raised_with_a_note_too():
    plain = TrainsOnlyGPT(GPTConfig(vocab_size=37, seq_len=12, width=16, layers=2, heads=2, kv_heads=2, ffn=24))
    tokens = torch.zeros(4, 12, dtype=torch.int64)

    def body(world):
        rl.prepare(copy.deepcopy(plain), loss=language_model_loss, world=world,
                   optimizer=lambda params: torch.optim.SGD(params, lr=0.1)).step((tokens, tokens))

    with pytest.raises(AssertionError, match="for training") as error:
        rl.simulate(rl.Mesh(tensor=2), body)
    assert any("the loss was tried in evaluation mode when this was raised" in note for note in error.value.__notes__)


class Remembers(nn.Module):
    """Keeps things from call to call in plain attributes: a state as long as the batch, a queue, counts, and what it makes when called."""

    def __init__(self):
        super().__init__()
        self.layer, self.state, self.calls, self.queue, self.seen = nn.Linear(4, 2), None, 0, [], {}
        self.sum, self.bank, self.made = torch.zeros(2), {"sums": [torch.zeros(2)]}, False
        self.others = [torch.ones(2, device="meta"), torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)]   # cannot be compared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.made:
            self.layer.register_forward_hook(lambda module, given, y: y * 0.5)
        y = self.layer(x) + (0 if self.state is None else self.state)
        self.state, self.calls, self.made = y.detach(), self.calls + 1, True
        self.queue.append(len(x))
        self.seen[len(x)] = True
        self.sum.add_(1.0)
        self.bank["sums"][0].add_(1.0)
        return y


def test_what_forwards_keep_in_attributes_begins_with_the_first_step():
    (_, model), = probed(0, Remembers(), lambda model, x: (model(x).square().sum(), len(x)), p=1)
    assert (model.calls, model.queue, model.seen, model.sum.tolist(), len(model.state)) == (1, [4], {4: True}, [1.0, 1.0], 4)
    assert model.bank["sums"][0].tolist() == [1.0, 1.0] and len(model.layer._forward_hooks) == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_more_than_the_trained_parameters_is_not_copied_and_stays_as_forwards_leave_it(frozen):
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(8, 8).requires_grad_(False))
    model.table = torch.zeros(8, 8)
    large, trained = model[1].weight if frozen else model.table, model[0].weight
    with torch.no_grad(), state_put_back(model):
        large.fill_(3.0)
        trained.fill_(3.0)
    assert (large == 3.0).all() and not (trained == 3.0).any()


class Doubles(nn.Linear):
    """Doubles its weight when it is first called, and notes that it did."""

    def __init__(self, double):
        super().__init__(4, 2)
        self.double, self.is_doubled = double, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_doubled:
            with torch.no_grad():
                self.double(self.weight)
        self.is_doubled = True
        return super().forward(x)


@pytest.mark.parametrize("double", [
    lambda w: w.mul_(2), lambda w: w.data.mul_(2), lambda w: w.detach().mul_(2), lambda w: w.view(-1).mul_(2),
    lambda w: [row.mul_(2) for row in w.unbind()], lambda w: torch.mul(w, 2, out=w), lambda w: torch._foreach_mul_([w], 2)],
    ids=["in place", "data", "detached", "view", "rows", "out", "list"])
def test_a_trained_parameter_that_the_first_forward_writes_is_written_once(double):
    model = Doubles(double)
    (_, trained), = probed(0, model, lambda model, x: (model(x).sum() * 0, len(x)), p=1)
    assert torch.equal(trained.weight, 2 * model.weight)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_sharded_parameters_that_a_forward_reads_detached_are_not_copied_for_the_trial(stage, monkeypatch):
    """Copies of all that is gathered, one block after the other, would be the whole model."""
    copied = []
    monkeypatch.setattr(put_back, "same_bits", lambda one, other: copied.append(one) or True)
    probed(stage, Doubles(lambda w: w.detach().sum()), lambda model, x: (model(x).sum() * 0, len(x)))
    assert bool(copied) is (stage == 0)


class Grows(nn.Module):
    """Keeps the largest values in a buffer that its first forward makes: observers for quantization do."""

    def __init__(self, make):
        super().__init__()
        self.layer, self.make = nn.Linear(4, 2), make
        self.register_buffer("largest", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        with torch.no_grad():
            now = y.abs().amax(0)
            if self.largest.numel():
                self.largest.mul_(0.9).add_(now, alpha=0.1)
            else:
                self.make(self, now)
        return y / self.largest


def resized(module: Grows, now: torch.Tensor) -> None:
    module.largest.resize_(now.shape).copy_(now)


def replaced(module: Grows, now: torch.Tensor) -> None:
    module.largest.data = now.clone()


@pytest.mark.parametrize("make", [resized, replaced])
def test_a_buffer_that_a_forward_makes_larger_in_place_begins_with_the_first_step_too(make):
    plain, x = Grows(make), torch.randn(4, 4, generator=torch.Generator().manual_seed(0))   # the largest of a half are others
    model = copy.deepcopy(plain)
    plain(x)
    rl.simulate(1, lambda world: rl.prepare(model, loss=lambda model, x: (model(x).square().sum(), len(x)), world=world,
                                            optimizer=lambda params: torch.optim.SGD(params, lr=0.1)).step(x))
    assert torch.equal(model.largest, plain.largest)


def test_a_sum_over_a_single_row_passes_the_engine_though_other_ranks_have_more():
    plain = nn.Linear(4, 2)

    def body(world):
        engine = rl.prepare(copy.deepcopy(plain), loss=lambda m, x: (m(x).square().sum(), len(x)), world=world,
                            optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
        return engine.step(torch.ones(1 + world.rank, 4)).count

    assert rl.simulate(2, body) == [3, 3]


def test_a_part_that_was_put_in_eval_mode_stays_there_through_the_check_a_step_and_an_evaluation():
    def body(world):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        engine = rl.prepare(model, loss=lambda m, x: (m(x).square().sum(), len(x)), world=world,
                            optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        model[1].eval()
        x = torch.arange(32.0).view(8, 4)
        engine.step(x)
        engine.evaluate([x])
        assert model.training and model[0].training and not model[1].training
        assert model[1].num_batches_tracked == 0

    rl.simulate(1, body)


class Functional(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, self.training)


class Attention(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, None], x[:, None], x[:, None], need_weights=False)[0][:, 0]


class Noise(nn.Module):
    def __init__(self, generator: torch.Generator | None):
        super().__init__()
        self.generator = generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=self.generator)


def one_step(layer: nn.Module, **how) -> int:
    return steps(1, layer, **how)


def steps(count: int, layer: nn.Module, **how) -> int:
    def body(world):
        model = nn.Sequential(nn.Linear(4, 4), layer)
        engine = rl.prepare(model, loss=lambda m, x: (m(x).square().sum(), len(x)), world=world,
                            optimizer=lambda params: torch.optim.SGD(params, lr=0.1), **how)
        return [engine.step(torch.ones(8, 4)).step for _ in range(count)][-1]

    return rl.simulate(1, body)[0]


@pytest.mark.parametrize("make", [
    Functional, lambda: nn.AlphaDropout(0.5), nn.RReLU, lambda: Attention(4, 2, dropout=0.5),
    lambda: Noise(None), lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5),
], ids=["F.dropout", "AlphaDropout", "RReLU", "attention", "noise", "encoder"])
def test_draws_that_no_rank_could_repeat_are_refused_where_bits_must_not_depend_on_ranks(make):
    with pytest.raises(rl.ConfigError, match="rank 0: aten.* draws from torch's own generator, so deterministic"):
        one_step(make(), deterministic=True)
    assert one_step(make()) == 1


@pytest.mark.parametrize("make", [
    lambda: nn.Dropout(0.5), lambda: Attention(4, 2), lambda: Noise(torch.Generator()), lambda: nn.Dropout1d(0.5),
    lambda: nn.AlphaDropout(0.0), lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
], ids=["dropout", "attention", "noise", "Dropout1d", "AlphaDropout", "encoder"])
def test_what_draws_nothing_or_with_a_key_or_generator_of_its_own_passes(make):
    assert one_step(make(), deterministic=True) == 1


class Counting(nn.Module):
    """Its forward leaves something for the next one: how often it ran, and how large inputs were."""

    def __init__(self, buffer: str):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.full((4,), float("nan")))
        self.register_buffer("cache", torch.zeros(0))
        self.buffer = buffer

    def forward(self, x):
        if self.training and self.buffer == "calls":
            self.calls += 1
        if self.training and self.buffer == "seen":
            self.seen = x.detach().mean(0)
        if self.buffer == "cache":
            self.cache = torch.arange(len(x))
        return x


@pytest.mark.parametrize("buffer", ["calls", "seen"])
def test_a_forward_that_changes_a_buffer_is_refused_where_bits_must_not_depend_on_ranks(buffer):
    with pytest.raises(rl.ConfigError, match=f"rank 0: the forward has changed the buffer 1.{buffer}, .*deterministic"):
        one_step(Counting(buffer), deterministic=True)
    assert one_step(Counting(buffer)) == 1


@pytest.mark.parametrize("found", [False, True], ids=["still looked for", "found"])
def test_a_spectral_norm_is_refused_also_where_its_vector_has_been_found_for_the_first_weights(found):
    def make():
        linear = nn.Linear(4, 4)
        linear.weight.data = torch.diag(torch.tensor([1.0, 0.0, 0.0, 0.0] if found else [1.0, 0.9, 0.8, 0.7]))
        return nn.utils.parametrizations.spectral_norm(linear)

    assert one_step(make(), deterministic=True) == 1 if found else True
    with pytest.raises(rl.ConfigError, match="rank 0: the forward has changed the buffer 1.parametrizations.weight.0._u, .*deterministic"):
        steps(2 if found else 1, make(), deterministic=True)
    assert steps(2, make()) == 2


@pytest.mark.parametrize("buffer", ["none", "cache"])
def test_a_buffer_that_keeps_its_values_or_grows_passes(buffer):
    assert one_step(Counting(buffer), deterministic=True) == 1


# ---------------------------------------------------------------------- noise

def warnings_of_noise(world: rl.World, apart: bool) -> list[str]:
    """What a rank is told while it trains with noise that it draws itself."""
    torch.manual_seed(0)
    engine = rl.prepare(nn.Linear(2, 2), loss=lambda m, x: (m(x + torch.randn_like(x)).square().sum(), len(x)), optimizer=torch.optim.AdamW,
                        world=world)
    if apart:
        torch.manual_seed(world.rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            engine.step(torch.ones(4, 2))
    return [str(warning.message) for warning in caught if "torch.manual_seed(" in str(warning.message)]


@pytest.mark.parametrize("apart", [False, True])
def test_ranks_that_draw_the_same_noise_for_different_rows_are_told_once(apart):
    """Every rank seeds its model alike, as it has to, and time steps of a diffusion were the same on all of them."""
    mine, others = rl.spawn(2, partial(warnings_of_noise, apart=apart))
    assert len(mine) == (not apart) and others == []


def test_simulated_ranks_share_a_generator_and_are_not_told():
    assert rl.simulate(2, partial(warnings_of_noise, apart=False)) == [[], []]


# ---------------------------------------------------------------------- where warnings point

def warnings_of_a_first_step(world: rl.World) -> list[tuple[str, str]]:
    """The first words of each, and the file that it names, where all that can be told of is wrong."""
    noisy = lambda model, x: (model(x + torch.randn_like(x)).square().sum(), len(x))
    mean_of_one = lambda model, x: (model(x).square().mean() + model(x)[:, 0].abs().mean(), 1)
    in_one_sample = lambda model, batch: (model(batch[0]).square().sum(), len(batch[0]))
    rows = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loss, batch in [(noisy, rows), (mean_of_one, rows + world.rank), (in_one_sample, (rows + world.rank, torch.ones(3)))]:
            torch.manual_seed(0)
            rl.prepare(nn.Linear(2, 2), loss=loss, optimizer=torch.optim.AdamW, world=world).step(batch)
    return [(str(warning.message)[:30], warning.filename) for warning in caught if warning.category is UserWarning]


def test_every_warning_of_a_first_step_names_the_line_that_called_it():
    first, _ = rl.spawn(2, warnings_of_a_first_step)
    assert first == [(words, __file__) for words in ("ranks [0, 1] brought the same ", "the loss or the model draws fr",
                                                     "rank 0: the loss function retu", "a batch without tensors, or wi")]
