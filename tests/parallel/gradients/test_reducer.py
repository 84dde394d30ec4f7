"""GradientReducer, as the engine uses it: sums (no means), totals on the way, masters."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.comm.compress import Summing
from rankloom.parallel.gradients.reducer import GradientReducer


class Three(nn.Module):
    """Three parameters of different size; the last is used on request only."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.small = nn.Parameter(torch.full((3,), 0.5, dtype=dtype))
        self.large = nn.Parameter(torch.full((4, 64), 0.25, dtype=dtype))
        self.maybe = nn.Parameter(torch.full((3,), 2.0, dtype=dtype))

    def forward(self, x: float, maybe: bool = False) -> torch.Tensor:
        total = (self.small * x).sum() + (self.large.square() * x).sum()
        return total + (self.maybe * x).sum() if maybe else total


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())


def run(world: rl.World, steps: int = 3, **more) -> list:
    """Steps on x = rank + 1; `maybe` is used by the last rank in odd steps."""
    model = Three()
    reducer = GradientReducer(named(model), world, **more)
    seen = []
    for step in range(steps):
        reducer.abandon()
        model(world.rank + 1.0, maybe=step % 2 == 1 and world.rank == world.size - 1).backward()
        totals, _ = reducer.finish(torch.tensor([world.rank + 1.0, 10.0], dtype=torch.float64))
        seen.append((totals.tolist(), {name: None if p.grad is None else p.grad.clone() for name, p in named(model).items()}))
    return seen


@pytest.fixture(params=[None, 1], ids=["together", "one by one"])
def bucket_bytes(request):
    """All gradients in one bucket, or each in its own."""
    return request.param


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_gradients_and_totals_are_sums_over_the_ranks(p, bucket_bytes):
    total = p * (p + 1) / 2
    for seen in rl.simulate(p, lambda w: run(w, bucket_bytes=bucket_bytes)):
        for step, (totals, grads) in enumerate(seen):
            assert totals == [total, 10.0 * p]
            assert grads["small"].tolist() == [total] * 3 and (grads["large"] == 0.5 * total).all()
            assert grads["maybe"] is None if step % 2 == 0 else grads["maybe"].tolist() == [p] * 3


@pytest.mark.parametrize("p", [2, 3])
def test_accumulation_sums_micro_batches_and_sends_once(p, bucket_bytes):
    def body(world):
        model = Three()
        reducer = GradientReducer(named(model), world, bucket_bytes=bucket_bytes)
        for _ in range(2):
            reducer.abandon()
            before = world.ledger.calls
            for micro in range(3):
                with reducer.sync(micro == 2):
                    model(world.rank + 1.0, maybe=micro == 0).backward()
            during = world.ledger.calls - before
            reducer.finish()
        return during, world.ledger.calls - before, {name: q.grad.clone() for name, q in named(model).items()}, len(reducer.buckets)

    total = p * (p + 1) / 2
    for _, calls, grads, buckets in rl.simulate(p, body):
        assert calls == buckets + 1   # and one message that tells who was used
        assert grads["small"].tolist() == [3 * total] * 3 and (grads["large"] == 1.5 * total).all()
        assert grads["maybe"].tolist() == [total] * 3   # landed in the first micro-batch only, and travelled with the last


@pytest.mark.parametrize("master", [torch.float32, torch.float64])
def test_masters_accumulate_and_travel_in_their_own_dtype(master, bucket_bytes):
    """1 + 2**-8 needs more bits than bf16 has: in bf16, the small summands would be lost."""
    def body(world):
        model = Three(torch.bfloat16)
        owners = {name: nn.Parameter(p.detach().to(master, copy=True)) for name, p in named(model).items()}
        reducer = GradientReducer(named(model), world, owners=owners, bucket_bytes=bucket_bytes)
        for _ in range(2):
            reducer.abandon()
            for micro, x in enumerate((1.0, 2.0**-8, 2.0**-8)):
                with reducer.sync(micro == 2):
                    model(x).backward()
            reducer.finish()
        assert all(p.grad is None for p in model.parameters())
        return owners["small"].grad, owners["large"].grad, owners["maybe"].grad

    for small, large, maybe in rl.simulate(2, body):
        assert small.dtype == master and small.tolist() == [2 * (1 + 2.0**-7)] * 3
        assert (large == 1 + 2.0**-7).all() and maybe is None


@pytest.mark.parametrize("compress", ["none", "bf16"], ids=["exact", "compressed"])
def test_on_one_rank_gradients_stay_where_autograd_made_them_unless_they_are_rounded(compress):
    """A copy of all gradients into buckets was 3 to 5 % of a step on one rank, for nothing."""
    model, made = Three(torch.float32), {}
    model.large = nn.Parameter(torch.full((64, 4), 0.25).t())   # dense, and not contiguous
    for name, param in named(model).items():
        param.register_post_accumulate_grad_hook(lambda p, name=name: made.__setitem__(name, p.grad.data_ptr()))
    reducer = GradientReducer(named(model), rl.init(device="cpu"), summing=Summing(compress=compress))
    for step in range(3):
        reducer.abandon()
        model(2.0, maybe=step == 1).backward()
        reducer.finish()
        grads = {name: p.grad for name, p in named(model).items() if p.grad is not None}
        assert grads.keys() == {"small", "large"} | ({"maybe"} if step == 1 else set())
        stay = [grad.data_ptr() == made[name] for name, grad in grads.items()]
        assert not any(stay) if compress != "none" else all(stay)
        for flat in reducer.flat_gradients():   # what the engine multiplies by its factor
            flat.mul_(3.0)
        assert (grads["small"] == 6.0).all() and (grads["large"] == 3.0).all()


def test_the_flat_gradients_hold_every_element_exactly_once(bucket_bytes):
    class WithTable(Three):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(300, 2, dtype=torch.float64)

        def forward(self, x, maybe=False):
            return super().forward(x, maybe) + self.table(torch.tensor([5, 9])).sum() * x

    def body(world):
        model = WithTable()
        reducer = GradientReducer(named(model), world, by_rows=frozenset(["table.weight"]), bucket_bytes=bucket_bytes)
        norms = []
        for step in range(3):
            reducer.abandon()
            model(world.rank + 1.0, maybe=step == 1).backward()
            reducer.finish()
            flats = torch.cat([flat.view(-1) for flat in reducer.flat_gradients()])
            held = torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])
            norms.append((flats.norm().item(), held.norm().item()))
        return norms

    for norms in rl.simulate(2, body):
        for flat, by_parameter in norms:
            assert flat == pytest.approx(by_parameter, rel=1e-14)


def test_a_parameter_that_was_used_once_leaves_nothing_behind_when_it_is_unused_again(bucket_bytes):
    """Its bucket's memory still holds the old gradient; neither the norm nor the optimizer may see it."""
    def body(world):
        model = Three()
        reducer = GradientReducer(named(model), world, bucket_bytes=bucket_bytes)
        for maybe in (True, True, False):
            reducer.abandon()
            model(1.0, maybe=maybe).backward()
            reducer.finish()
        return model.maybe.grad, torch.cat(reducer.flat_gradients()).abs().sum().item()

    for grad, total in rl.simulate(2, body):
        assert grad is None and total == 2 * 3 + 2 * 0.5 * 256


def test_sync_restores_what_was_set_before_also_after_an_exception():
    reducer = rl.simulate(1, lambda w: GradientReducer(named(Three()), w))[0]
    with pytest.raises(KeyError), reducer.sync(False):
        with reducer.sync(True):
            assert reducer.syncing
        assert not reducer.syncing
        raise KeyError
    assert reducer.syncing


def test_parameters_without_a_gradient_in_the_first_step_do_not_hold_up_the_others():
    """They have a bucket of their own, so the first bucket leaves within backward although `maybe` never comes."""
    def body(world):
        model, launched = Three(), []
        reducer = GradientReducer(named(model), world)
        plain = world.all_reduce
        world.all_reduce = lambda x, *a, label="", **more: launched.append(label) or plain(x, *a, label=label, **more)
        for _ in range(2):
            reducer.abandon()
            del launched[:]
            model(1.0).backward()
            within = list(launched)
            reducer.finish()
        return within, [list(bucket.views) for bucket in reducer.buckets]

    for within, buckets in rl.simulate(2, body):
        assert within == ["gradients of bucket 0"]
        assert sorted(buckets[0]) == ["large", "small"] and buckets[1] == ["maybe"]


def test_a_bucket_that_holds_no_byte_is_refused():
    with pytest.raises(rl.ConfigError, match="bucket_bytes=0, expected 1 or more"):
        rl.simulate(2, lambda w: rl.data_parallel(Three(), w, bucket_bytes=0))


@pytest.mark.parametrize("p", [1, 2])
def test_gradients_that_a_cast_of_the_model_took_elsewhere_are_summed_all_the_same(p, bucket_bytes):
    def body(world):
        model = Three()
        reducer = GradientReducer(named(model), world, bucket_bytes=bucket_bytes)
        for step in range(3):
            reducer.abandon()
            with reducer.sync(False):
                model(world.rank + 1.0, maybe=True).backward()
            if step:
                model.float().double()
            model(world.rank + 1.0).backward()
            reducer.finish()
        return {name: param.grad.clone() for name, param in named(model).items()}

    total = p * (p + 1) / 2
    for grads in rl.simulate(p, body):
        assert grads["small"].tolist() == [2 * total] * 3 and (grads["large"] == total).all() and grads["maybe"].tolist() == [total] * 3


@pytest.mark.parametrize("p", [1, 2])
def test_what_a_forward_writes_beside_a_master_is_an_error_unless_it_is_what_the_master_has(p):
    def body(world):
        model = Three(torch.bfloat16)
        owners = {name: nn.Parameter(p.detach().to(torch.float32, copy=True)) for name, p in named(model).items()}
        reducer = GradientReducer(named(model), world, owners=owners)
        for written in (0.0, 1.0):
            reducer.abandon()
            with torch.no_grad():   # as a forward would
                model.small += written
            with pytest.raises(rl.UnitError, match="the forward has written small, .* is a copy in torch.float32: it would be lost") if (
                    written) else nullcontext():
                model(1.0).backward()

    rl.simulate(p, body)


def test_what_forwards_write_is_looked_at_in_the_first_step_only():
    """From then on an optimizer writes, too; and a look at each parameter takes time."""
    def body(world):
        model = Three()
        reducer = GradientReducer(named(model), world)
        for _ in range(2):
            reducer.abandon()
            model(1.0).backward()
            reducer.finish()
            with torch.no_grad():
                model.small += world.rank
        return reducer._unbucketed._writes

    assert rl.simulate(1, body) == [None] and rl.simulate(2, body) == [None] * 2


class Counted(str):
    """A name that counts how often it is compared with another one."""

    __hash__ = str.__hash__
    compared = 0

    def __eq__(self, other):
        Counted.compared += 1
        return str.__eq__(self, other)


def test_the_order_of_arrival_is_found_without_comparing_each_name_with_each():
    def body(world):
        params = {Counted(f"p{number}"): nn.Parameter(torch.zeros(1)) for number in range(300)}
        reducer = GradientReducer(params, world)
        sum(reversed(params.values())).backward()
        Counted.compared = 0
        reducer.finish()

    rl.simulate(2, body)
    assert Counted.compared < 2 * 300 * 10, "each with each are 2 ranks * 300 * 300 / 2"


def test_all_sums_have_ended_before_the_error_of_the_first_that_failed_is_raised_once():
    def body(world):
        model, waited = Three(), []
        reducer = GradientReducer(named(model), world, bucket_bytes=1)
        model(1.0, maybe=True).backward()
        reducer.finish()

        def fails(number):
            waited.append(number)
            raise ArithmeticError(f"sum {number}")

        for number, bucket in enumerate(reducer.buckets):
            bucket.wait = partial(fails, number)
        with pytest.raises(ArithmeticError, match="sum 0"):
            reducer.abandon()
        reducer.abandon()
        return waited

    assert rl.simulate(2, body) == [[0, 1, 2]] * 2


def test_a_mean_of_16_bit_gradients_is_rounded_in_the_masters_dtype_only():
    def body(world):
        model = Three(torch.bfloat16)
        owners = {name: nn.Parameter(p.detach().float()) for name, p in named(model).items()}
        reducer = GradientReducer(named(model), world, owners=owners, average=True)
        for _ in range(2):   # in the first backward gradients are not in buckets yet
            reducer.abandon()
            model(1.0).backward()
            reducer.finish()
            torch.testing.assert_close(owners["small"].grad, torch.ones(3), rtol=2**-22, atol=0)   # a third of one, three times

    rl.simulate(3, body)


def test_a_gradient_that_the_user_sets_after_all_were_dropped_is_no_sum_that_is_missing():
    def body(world):
        model = Three()
        reducer = GradientReducer(named(model), world)
        with reducer.sync(False):
            model(world.rank + 1.0).backward()
        reducer.zero()
        model.small.grad = torch.ones_like(model.small)
        reducer.expect_summed(list(model.parameters()))

    rl.simulate(2, body)


def test_the_order_of_gradients_is_told_once_also_where_all_go_by_rows():
    """A model of embeddings has no bucket, and told it in every step."""
    def body(world):
        table = nn.Embedding(1000, 8)
        reducer = GradientReducer(named(table), world, by_rows=frozenset({"weight"}))
        sent = []
        for _ in range(3):
            before = world.ledger.calls
            table(torch.tensor([world.rank])).sum().backward()
            reducer.finish()
            reducer.zero()
            sent.append(world.ledger.calls - before)
        return [sent[0] - more for more in sent[1:]]

    assert rl.simulate(2, body) == [[1, 1]] * 2
