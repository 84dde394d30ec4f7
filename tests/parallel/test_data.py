"""`rl.data_parallel`: for a loop of one's own, the gradients of one process with everybody's rows, whatever the model does."""

import copy
import io
import itertools
import threading
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import rankloom as rl
from awkward import loss_sum, make_batches, make_model, share
from gradients import expect_equal as expect_equal_to
from gradients import gradients
from rankloom.base.errors import UnitError
from rankloom.comm import choose
from rankloom.parallel.data import embeddings, trainable
from rankloom.shard import frames

RTOL = 1e-12   # the same terms in another order: see tests/test_equivalence.py
expect_equal = partial(expect_equal_to, tolerance=RTOL)
RANKS = [1, 2, 3, 4]


def make_layers(dtype: torch.dtype = torch.float64, widths: tuple[int, ...] = (4, 6, 5, 1)) -> nn.Sequential:
    """A plain perceptron with equal weights at every call."""
    layers = nn.Sequential(*(part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())))
    draw = torch.Generator().manual_seed(1)
    for param in layers.parameters():
        param.data = torch.randn(param.shape, generator=draw) * 0.5
    return layers.to(dtype)


def rows_of(rank: int, step: int = 0, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def mean_of(per_rank: list[dict]) -> dict[str, torch.Tensor | None]:
    """The mean over ranks; a rank without a gradient counts as zeros."""
    means = {}
    for name in per_rank[0]:
        held = [grads[name] for grads in per_rank if grads[name] is not None]
        means[name] = torch.stack(held).sum(0) / len(per_rank) if held else None
    return means


def plain_gradients(make, backward, ranks: int) -> dict[str, torch.Tensor | None]:
    """The truth: every rank's backward on a model of its own, in one process, then the mean."""
    per_rank = []
    for rank in range(ranks):
        model = make()
        backward(model, rank)
        per_rank.append(gradients(model))
    return mean_of(per_rank)


def square_loss(model: nn.Module, rank: int, step: int = 0) -> None:
    model(rows_of(rank, step)).square().mean().backward()


# ---------------------------------------------------------------- the gradients


@pytest.mark.parametrize("all_reduce", ["backend", "ring"])
@pytest.mark.parametrize("bucket_bytes", [1, 200, None])
@pytest.mark.parametrize("p", RANKS)
def test_gradients_are_the_mean_over_ranks_in_the_first_step_and_after(p, bucket_bytes, all_reduce):
    def body(world):
        replica = rl.data_parallel(make_layers(), world, bucket_bytes=bucket_bytes, all_reduce=all_reduce)
        seen = []
        for step in range(3):
            replica.zero_grad()
            square_loss(replica, world.rank, step)
            seen.append(gradients(replica.module))
        return seen

    truth = [plain_gradients(make_layers, lambda m, r, step=step: square_loss(m, r, step), p) for step in range(3)]
    for seen in rl.simulate(p, body):
        for mine, expected in zip(seen, truth):
            expect_equal(mine, expected)


def awkward_backward(model: nn.Module, rank: int, ranks: int, step: int = 0) -> None:
    total, count = loss_sum(model, share(make_batches()[step], rank, ranks))
    (total / count).backward()


@pytest.mark.parametrize("p", RANKS)
def test_tied_frozen_unused_and_conditional_parameters_are_as_in_one_process(p):
    """`sometimes` is used on the rank that holds row 4 only; `unused` nowhere: its gradient stays None."""
    def body(world):
        replica = rl.data_parallel(make_model(), world, bucket_bytes=400)
        seen = []
        for step in range(2):
            replica.zero_grad()
            awkward_backward(replica, world.rank, p, step)
            seen.append(gradients(replica.module))
        return seen

    for step in range(2):
        truth = plain_gradients(make_model, lambda m, r, step=step: awkward_backward(m, r, p, step), p)
        assert truth["unused.weight"] is None and truth["frozen.weight"] is None and truth["sometimes.weight"] is not None
        for seen in rl.simulate(p, body):
            expect_equal(seen[step], truth)


def train_with_ddp_beside(world):
    """At the top of the module, for processes: torch's own DDP and ours, the same steps."""
    dist.init_process_group("gloo", store=dist.PrefixStore("ddp", world._store), rank=world.rank, world_size=world.size)
    theirs = nn.parallel.DistributedDataParallel(make_model(), find_unused_parameters=True)
    ours = rl.data_parallel(make_model(), world)
    seen = []
    for model in (theirs, ours):
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            update.zero_grad()
            awkward_backward(model, world.rank, world.size, step)
            update.step()
        seen.append(gradients(model.module))
    dist.destroy_process_group()
    return seen


def test_gradients_equal_those_of_torchs_own_ddp_after_three_steps_in_processes():
    for theirs, ours in rl.spawn(2, train_with_ddp_beside):
        for name, expected in theirs.items():
            if expected is None:
                assert ours[name] is None
            else:
                torch.testing.assert_close(ours[name], expected, rtol=RTOL, atol=RTOL)


@pytest.mark.parametrize("bucket_bytes", [1, None])
def test_no_sync_accumulates_and_the_next_backward_reduces_the_sum_once(bucket_bytes):
    def body(world):
        labels = record(world)
        replica = rl.data_parallel(make_layers(), world, bucket_bytes=bucket_bytes)
        seen, counts = [], []
        for step in range(3):
            replica.zero_grad()
            del labels[:]
            for micro in range(3):
                with replica.no_sync() if micro < 2 else warnings.catch_warnings():
                    square_loss(replica, world.rank, 10 * step + micro)
                if micro < 2:
                    assert not any(label.startswith("gradients") for label in labels), "communicated inside no_sync"
            seen.append(gradients(replica.module))
            counts.append([label for label in labels if label.startswith("gradients")])
        return seen, counts, len(replica._reducer.buckets)

    for seen, counts, buckets in rl.simulate(3, body):
        for step in range(3):
            truth = plain_gradients(make_layers, lambda m, r, s=step: [square_loss(m, r, 10 * s + k) for k in range(3)], 3)
            expect_equal(seen[step], truth)
            assert counts[step] == [f"gradients of bucket {n}" for n in range(buckets)]


def make_table() -> nn.Embedding:
    return nn.Embedding.from_pretrained(torch.ones(5, 2, dtype=torch.float64), freeze=False)


@pytest.mark.parametrize("make", [make_layers, make_table])
def test_a_step_by_gradients_that_were_never_averaged_is_an_error(make):
    def body(world):
        replica = rl.data_parallel(make(), world)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        x = torch.tensor([world.rank]) if isinstance(replica.module, nn.Embedding) else rows_of(world.rank)
        for _ in range(2):   # in the first backward gradients are not in buckets yet
            with replica.no_sync():
                replica(x).sum().backward()
            with pytest.raises(UnitError, match=rf"rank {world.rank}: .* by the gradient of this rank alone.*outside of `no_sync`"):
                optimizer.step()
            optimizer.zero_grad()
            optimizer.step()   # of nothing
            with replica.no_sync():
                replica(x).sum().backward()
            replica(x).sum().backward()
            optimizer.step()
        return [param.detach() for param in replica.parameters()]

    first, *others = rl.simulate(3, body)
    for other in others:
        assert all(map(torch.equal, first, other))


def test_a_step_inside_of_no_sync_is_meant_for_this_rank_alone():
    def body(world):
        replica = rl.data_parallel(make_layers(), world)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        with replica.no_sync():
            square_loss(replica, world.rank, 0)
            optimizer.step()
        return replica.module[0].weight.detach()

    first, second = rl.simulate(2, body)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("hooked", ["before", "after"])
@pytest.mark.parametrize("engine", [False, True])
def test_an_optimizer_that_steps_in_a_hook_of_backward_is_an_error(hooked, engine):
    def body(world):
        model = make_layers()
        optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

        def update(param):
            optimizers[param].step()
            optimizers[param].zero_grad()

        def hook():
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(update)

        if hooked == "before":
            hook()
        run = (rl.prepare(model, loss=lambda m, x: (m(x).sum(), len(x)), optimizer=torch.optim.SGD, world=world) if engine
               else rl.data_parallel(model, world))
        if hooked == "after":
            hook()
        with pytest.raises(UnitError, match=r"rank \d: .*(gradient of this rank alone|a hook has taken the gradient)"):
            run.step(rows_of(world.rank)) if engine else square_loss(run, world.rank, 0)

    rl.simulate(2, body)


@pytest.mark.parametrize("p", [2, 3])
def test_two_backward_passes_without_no_sync_add_their_means(p):
    def body(world):
        replica = rl.data_parallel(make_layers(), world)
        for _ in range(2):
            replica.zero_grad()
            square_loss(replica, world.rank, 0)
            square_loss(replica, world.rank, 1)
        return gradients(replica.module)

    truth = plain_gradients(make_layers, lambda m, r: [square_loss(m, r, step) for step in (0, 1)], p)
    for mine in rl.simulate(p, body):
        expect_equal(mine, truth)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_either_way_of_zeroing_gradients_is_fine(set_to_none):
    def body(world):
        replica = rl.data_parallel(make_layers(), world)
        for step in range(3):
            replica.zero_grad(set_to_none=set_to_none)
            square_loss(replica, world.rank, step)
        return gradients(replica.module)

    expect_equal(rl.simulate(2, body)[1], plain_gradients(make_layers, lambda m, r: square_loss(m, r, 2), 2))


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations_give_the_same_gradients(reentrant):
    class Recomputing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = make_layers()

        def forward(self, x):
            x.requires_grad_(True)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    def body(world):
        replica = rl.data_parallel(Recomputing(), world, bucket_bytes=1)
        for _ in range(3):
            replica.zero_grad()
            square_loss(replica, world.rank)
        return gradients(replica.module)

    expect_equal(rl.simulate(2, body)[0], plain_gradients(Recomputing, square_loss, 2))


def test_a_model_that_is_recomputed_twice_in_one_backward_gives_the_same_gradients():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.heads = make_layers(widths=(4, 4)), nn.ModuleList([make_layers(widths=(4, 4)), make_layers(widths=(4, 4))])

        def forward(self, x, head):
            return self.heads[head](torch.tanh(self.trunk(x)))

    def backward(model, rank, step=0):
        inner = checkpoint(model, rows_of(rank, step), 0, use_reentrant=False)
        checkpoint(model, inner, 1, use_reentrant=False).square().mean().backward()

    def body(world):
        model = rl.data_parallel(Heads(), world, bucket_bytes=1)
        for step in range(2):
            model.zero_grad()
            backward(model, world.rank, step)
        return gradients(model.module)

    expected = plain_gradients(Heads, lambda model, rank: backward(model, rank, 1), 2)
    for found in rl.simulate(2, body):
        expect_equal(found, expected)


def test_a_wrapped_part_of_a_larger_model_is_loaded_with_it():
    def body(world):
        outer = nn.ModuleDict({"part": rl.data_parallel(make_layers(), world), "rest": nn.Linear(2, 2)})
        state = {name: torch.full_like(value, 0.5) for name, value in outer.state_dict().items()}
        assert not outer.load_state_dict(state).missing_keys
        torch.testing.assert_close(dict(outer.state_dict()), state, rtol=0, atol=0)
        del state["part.0.bias"]
        with pytest.raises(RuntimeError, match="Missing key.*0.bias"):
            outer.load_state_dict(state)

    rl.simulate(2, body)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_may_have_a_graph_of_their_own():
    """As for a product with the Hessian; what is summed over the ranks is a value."""
    def backward(model, rank, step=0):
        model(rows_of(rank, step)).square().mean().backward(create_graph=True)

    def body(world):
        replica = rl.data_parallel(make_layers(), world)
        for step in range(3):
            replica.zero_grad()
            backward(replica, world.rank, step)
        return gradients(replica.module)

    with pytest.warns(UserWarning, match="without a graph, so a penalty made of `.grad` would not be trained"):
        found = rl.simulate(2, body)
    expect_equal(found[1], plain_gradients(make_layers, lambda m, r: backward(m, r, 2), 2))


class Fuse(torch.autograd.Function):
    """The identity; its backward raises when it is lit."""

    @staticmethod
    def forward(ctx, x, lit):
        ctx.lit = lit
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.lit:
            raise ValueError("half way")
        return gradient, None


@pytest.mark.parametrize("broken_step", [0, 1])
def test_a_step_after_a_backward_that_died_half_way_is_right(broken_step):
    """On all ranks, as a loss that overflows would: some buckets have left by then."""
    class Breakable(nn.Module):
        def __init__(self):
            super().__init__()
            self.front, self.back, self.lit = make_layers()[:2], make_layers()[2:], False

        def forward(self, x):
            return self.back(Fuse.apply(self.front(x), self.lit))

    def body(world):
        replica = rl.data_parallel(Breakable(), world, bucket_bytes=1)
        for step in range(3):
            replica.zero_grad()
            replica.module.lit = step == broken_step
            try:
                square_loss(replica, world.rank, step)
            except ValueError:
                assert step == broken_step
        return gradients(replica.module)

    expect_equal(rl.simulate(2, body)[0], plain_gradients(Breakable, lambda m, r: square_loss(m, r, 2), 2))


def test_mixed_dtypes_and_a_parameter_without_dims_travel_each_in_their_own():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.single, self.wide = make_layers(torch.float32, (4, 3)), make_layers(torch.float64, (4, 3))
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

        def forward(self, x):
            return self.single(x.float()) * self.scale + self.wide(x).float() * self.narrow.float()

    def body(world):
        replica = rl.data_parallel(Mixed(), world)
        for _ in range(2):
            replica.zero_grad()
            square_loss(replica, world.rank)
        return gradients(replica.module)

    truth = plain_gradients(Mixed, square_loss, 2)
    for mine in rl.simulate(2, body):
        for name, expected in truth.items():
            assert mine[name].dtype == expected.dtype and mine[name].shape == expected.shape
            torch.testing.assert_close(mine[name], expected)   # torch's own tolerance for each dtype


# ---------------------------------------------------------------- when and what is sent


def record(world: rl.World) -> list[str]:
    """Every all-reduce of this rank leaves its label in the list that this returns."""
    labels, plain = [], world.all_reduce

    def recording(x, op="sum", *, label="", async_op=False):
        labels.append(label)
        return plain(x, op, label=label, async_op=async_op)

    world.all_reduce = recording
    return labels


def test_buckets_leave_before_backward_ends():
    """Launches are recorded between the hooks of the parameters whose gradients come before and after them."""
    def body(world):
        events, model = record(world), make_layers()
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
        replica = rl.data_parallel(model, world, bucket_bytes=1)
        for _ in range(2):
            replica.zero_grad()
            del events[:]
            square_loss(replica, world.rank)
        names = [name for event in events if (name := event) in dict(model.named_parameters())]
        return events, names

    for events, names in rl.simulate(2, body):
        assert len(names) == 6
        for n, name in enumerate(names[:-1]):
            assert events.index(f"gradients of bucket {n}") < events.index(names[n + 1]), f"{name} did not leave at once: {events}"


class Branches(nn.Module):
    """Two branches whose gradients come in the order that `flip` says."""

    def __init__(self):
        super().__init__()
        self.a, self.b = make_layers(widths=(4, 2)), make_layers(widths=(4, 2))
        self.flip = False

    def forward(self, x):
        first, second = (self.b, self.a) if self.flip else (self.a, self.b)
        return first(x) * 2 + second(x)


def test_buckets_leave_in_one_order_on_all_ranks_whatever_order_gradients_come_in():
    def body(world):
        labels = record(world)
        replica = rl.data_parallel(Branches(), world, bucket_bytes=1)
        arrived = []
        for name, param in replica.module.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
        for step in range(3):
            replica.module.flip = (world.rank + step) % 2 == 1
            replica.zero_grad()
            del labels[:], arrived[:]
            square_loss(replica, world.rank, step)
        return labels, arrived, gradients(replica.module)

    def truth(model, rank):
        model.flip = rank % 2 == 1
        square_loss(model, rank, 2)

    results = rl.simulate(2, body)
    assert results[0][1] != results[1][1], "the test is void: gradients came in the same order"
    for labels, _, mine in results:
        assert [label for label in labels if label.startswith("gradients")] == [f"gradients of bucket {n}" for n in range(4)]
        expect_equal(mine, plain_gradients(Branches, truth, 2))


def test_buckets_hold_parameters_in_the_order_in_which_rank_0_saw_their_gradients():
    def body(world):
        model = Branches()
        model.flip = world.rank == 1
        arrived = []
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
        replica = rl.data_parallel(model, world, bucket_bytes=1)
        square_loss(replica, world.rank)
        return [name for bucket in replica._reducer.buckets for name in bucket.views], arrived

    (order, arrived), (other_order, _) = rl.simulate(2, body)
    assert order == arrived == other_order


def test_parameters_and_gradients_of_a_bucket_are_views_of_one_buffer():
    def body(world):
        replica = rl.data_parallel(make_layers(), world)
        before = {id(p) for p in replica.parameters()}
        for _ in range(2):
            replica.zero_grad()
            square_loss(replica, world.rank)
        params = list(replica.parameters())
        assert {id(p) for p in params} == before, "an optimizer built before would update orphans"
        place = lambda tensors: {t.untyped_storage().data_ptr() for t in tensors}
        (bucket,) = replica._reducer.buckets
        assert place(p.grad for p in params) == {bucket.flat.untyped_storage().data_ptr()}
        return len(place(params)), len(place(p.grad for p in params))

    assert rl.simulate(2, body) == [(1, 1)] * 2


@pytest.mark.parametrize("bytes_too_small", [1, 100])
def test_small_buckets_cut_the_gradients_in_several_messages(bytes_too_small):
    def body(world):
        replica = rl.data_parallel(make_layers(), world, bucket_bytes=bytes_too_small)
        square_loss(replica, world.rank)
        held = [[p.nbytes for p in bucket.views.values()] for bucket in replica._reducer.buckets]
        assert all(len(bucket) == 1 or sum(bucket) <= bytes_too_small for bucket in held)
        return len(held)

    assert rl.simulate(2, body) == [{1: 6, 100: 4}[bytes_too_small]] * 2


def test_the_bytes_sent_are_those_of_the_gradients_and_little_more():
    """4 ranks: 2n(p-1)/p for the gradients, padding below 64 bytes each, and one small message of flags."""
    def body(world):
        replica = rl.data_parallel(make_layers(widths=(4, 200, 300, 1)), world)
        for step in range(2):
            replica.zero_grad()
            before = world.ledger.bytes
            square_loss(replica, world.rank, step)
        return world.ledger.bytes - before, sum(p.nbytes for p in replica.parameters()), len(list(replica.parameters()))

    for sent, n, params in rl.simulate(4, body):
        assert 2 * n * 3 // 4 <= sent <= 2 * (n + 64 * params) * 3 // 4 + 8 * params * 3


class Lookup(nn.Module):
    """An embedding of 5,000 rows of which a step touches a few."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5000, 8), nn.Linear(8, 1)
        draw = torch.Generator().manual_seed(5)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=draw, dtype=torch.float64)

    def forward(self, tokens):
        return self.head(self.table(tokens))


def look_up(model: nn.Module, rank: int, step: int = 0) -> None:
    tokens = torch.tensor([0, 7 + rank, 7 + rank, 4999, 100 * step])[: 3 + rank]
    model(tokens).square().mean().backward()


@pytest.mark.parametrize("p", [2, 3])
def test_an_embedding_sends_only_its_touched_rows_and_gets_the_same_gradient(p):
    def body(world):
        replica = rl.data_parallel(Lookup(), world)
        for step in range(3):
            replica.zero_grad()
            before = world.ledger.bytes
            look_up(replica, world.rank, step)
        return world.ledger.bytes - before, gradients(replica.module)

    for sent, mine in rl.simulate(p, body):
        expect_equal(mine, plain_gradients(Lookup, lambda m, r: look_up(m, r, 2), p))
        assert sent < 5000 * 8 * 8 / 20, "the whole table travelled"


def test_an_embedding_accumulates_over_micro_batches_too():
    def body(world):
        replica = rl.data_parallel(Lookup(), world)
        for _ in range(2):
            replica.zero_grad()
            with replica.no_sync():
                look_up(replica, world.rank, 1)
            look_up(replica, world.rank, 2)
        return gradients(replica.module)

    expect_equal(rl.simulate(2, body)[0], plain_gradients(Lookup, lambda m, r: [look_up(m, r, step) for step in (1, 2)], 2))


def test_an_embedding_that_only_one_rank_used_and_one_that_nobody_used():
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.none, self.last = nn.Embedding(60, 2), nn.Embedding(60, 2), nn.Parameter(torch.ones(2))
            for table in (self.one, self.none):
                nn.init.constant_(table.weight, 0.5)
            self.double()

        def forward(self, rank):
            return (self.one(torch.tensor([3])) if rank == 1 else torch.ones(1, 2, dtype=torch.float64)) * self.last

    def body(world):
        replica = rl.data_parallel(Tables(), world)
        for _ in range(2):
            replica.zero_grad()
            replica(world.rank).sum().backward()
        return gradients(replica.module)

    for mine in rl.simulate(3, body):
        expect_equal(mine, plain_gradients(Tables, lambda m, r: m(r).sum().backward(), 3))
        assert mine["none.weight"] is None


# ---------------------------------------------------------------- choosing the all-reduce


def test_a_registered_all_reduce_is_used_in_a_thread_of_its_own_and_sees_every_bucket(monkeypatch):
    monkeypatch.setattr(choose, "_ALL_REDUCES", dict(choose._ALL_REDUCES))
    seen = {}

    def halving(x, group):
        """A 'compressed' all-reduce: everything is sent as fp32."""
        seen.setdefault(group.rank, []).append((x.numel(), threading.current_thread().name))
        return x.copy_(group.all_reduce(x.float()).double())

    rl.register_all_reduce("in fp32", halving)

    def body(world):
        replica = rl.data_parallel(make_layers(), world, bucket_bytes=1, all_reduce="in fp32")
        for _ in range(2):
            replica.zero_grad()
            square_loss(replica, world.rank)
        return gradients(replica.module)

    truth = plain_gradients(make_layers, square_loss, 2)
    for rank, mine in enumerate(rl.simulate(2, body)):
        assert len(seen[rank]) == 12 and all(name.startswith("all-reduce") for _, name in seen[rank])
        for name, expected in truth.items():
            torch.testing.assert_close(mine[name], expected, rtol=1e-6, atol=1e-6)    # fp32 on the way: 2**-23 relative of each term
            assert not torch.equal(mine[name], expected), "the compressed sum cannot be exact"


def test_an_unknown_all_reduce_is_refused_by_name():
    with pytest.raises(rl.ConfigError, match="Did you mean 'ring'"):
        rl.simulate(1, lambda w: rl.data_parallel(make_layers(), w, all_reduce="rings"))


# ---------------------------------------------------------------- the wrapper


def test_names_of_the_state_are_those_of_the_plain_model():
    def body(world):
        replica = rl.data_parallel(make_layers(), world)
        square_loss(replica, world.rank)
        other = {name: torch.zeros_like(value) for name, value in replica.state_dict().items()}
        replica.load_state_dict(other)
        assert all(not p.any() for p in replica.module.parameters())
        return list(other)

    assert rl.simulate(2, body)[0] == list(make_layers().state_dict())


def test_training_goes_on_right_after_weights_were_loaded():
    """Loading copies into the flat buffers; a replaced tensor would be left out of the optimizer's sight."""
    def body(world):
        replica = rl.data_parallel(make_layers(), world)
        square_loss(replica, world.rank)
        replica.load_state_dict({name: value + 0.1 for name, value in make_layers().state_dict().items()})
        replica.zero_grad()
        square_loss(replica, world.rank, 1)
        return gradients(replica.module)

    def truth(model, rank):
        model.load_state_dict({name: value + 0.1 for name, value in model.state_dict().items()})
        square_loss(model, rank, 1)

    expect_equal(rl.simulate(2, body)[0], plain_gradients(make_layers, truth, 2))


def test_buffers_that_were_loaded_keep_their_bits_whatever_their_dtype():
    """A mean over three ranks has others, and of complex numbers there is none."""
    def body(world):
        model = make_layers()
        model.register_buffer("table", torch.rand(9, generator=torch.Generator().manual_seed(0)) / 3)
        model.register_buffer("turns", torch.polar(torch.ones(9), torch.arange(9.0)))
        model.register_buffer("short", torch.arange(9, dtype=torch.int16))
        replica, before = rl.data_parallel(model, world), {name: value.clone() for name, value in model.named_buffers()}
        replica.load_state_dict({name: value.clone() for name, value in replica.state_dict().items()})
        square_loss(replica, world.rank)
        return [torch.equal(before[name], value) for name, value in model.named_buffers()]

    assert rl.simulate(3, body, backend="gloo") == [[True] * 3] * 3   # which knows no int16


def test_gradients_may_be_clipped_and_stepped_with_by_any_optimizer():
    def steps(model, ranks_rows):
        update = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(4):
            update.zero_grad()
            F.mse_loss(model(ranks_rows(step)), torch.zeros(1, dtype=torch.float64).expand_as(model(ranks_rows(step)))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            update.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    truth = steps(make_layers(), lambda step: torch.cat([rows_of(0, step), rows_of(1, step)]))
    body = lambda w: steps(rl.data_parallel(make_layers(), w), lambda step: rows_of(w.rank, step))
    for mine in rl.simulate(2, body):
        for name, expected in truth.items():
            torch.testing.assert_close(mine[f"module.{name}"], expected, rtol=RTOL, atol=RTOL)


def test_tied_parameters_count_once_and_frozen_ones_not_at_all():
    names = trainable(make_model())
    assert "head.weight" not in names and "embed.weight" in names and not any(name.startswith("frozen") for name in names)
    assert embeddings(make_model()) == {"embed.weight", "rows.weight"}
    assert embeddings(nn.Embedding(3, 2)) == {"weight"}


WAYS_TO_TRAIN = [rl.data_parallel, rl.fully_shard, *(partial(
    lambda model, world, stage: rl.prepare(model, loss=lambda m, b: (m(b).sum(), 1), optimizer=torch.optim.AdamW, world=world, stage=stage),
    stage=stage) for stage in (0, 1, 2, 3))]


@pytest.mark.parametrize("wrap", WAYS_TO_TRAIN)
@pytest.mark.parametrize("module", [nn.Embedding(9, 3, sparse=True), nn.Sequential(nn.EmbeddingBag(9, 3, sparse=True))])
def test_torchs_sparse_gradients_are_refused_with_the_way_out(module, wrap):
    with pytest.raises(rl.ConfigError, match="sparse=True; leave it out"):
        rl.simulate(1, lambda w: wrap(copy.deepcopy(module), w))


@pytest.mark.parametrize("wrap", [*WAYS_TO_TRAIN, lambda model, world: rl.tensor_parallel(model, {"2": "colwise"}, world)])
@pytest.mark.parametrize(("lazy", "name"), [(lambda: nn.LazyLinear(4), "1.weight"),
                                             (lambda: nn.LazyBatchNorm1d(affine=False), "1.running_mean")])
def test_a_lazy_module_that_was_never_called_is_named(lazy, name, wrap):
    with pytest.raises(rl.ConfigError, match=f"{name} of a lazy module has no shape yet: call the model once"):
        rl.simulate(2, lambda w: wrap(nn.Sequential(nn.Linear(4, 4), lazy(), nn.Linear(4, 4)), w))


def test_a_parameter_replaced_after_wrapping_is_an_error():
    def body(world):
        wrapped = rl.data_parallel(make_layers(), world)
        square_loss(wrapped, world.rank)
        wrapped.module[0].weight = torch.nn.Parameter(wrapped.module[0].weight.detach().clone())
        with pytest.raises(UnitError, match=r"0.weight was replaced after the model was prepared"):
            square_loss(wrapped, world.rank)

    rl.simulate(2, body)


def prepared(model, world):
    return rl.prepare(model, loss=lambda m, x: (m(x).sum(), len(x)), optimizer=torch.optim.SGD, world=world)


@pytest.mark.parametrize("first", [rl.data_parallel, prepared])
@pytest.mark.parametrize("wrap", [rl.data_parallel, prepared])
def test_models_that_share_parameters_are_refused_one_by_one(wrap, first):
    """Two heads on one encoder: each of two would sum the encoder's gradients, and divide."""
    def body(world):
        encoder = make_layers(widths=(4, 6))
        one, other = (nn.Sequential(encoder, make_layers(widths=(6, 1))) for _ in range(2))
        kept = first(one, world)
        with pytest.raises(rl.ConfigError, match=r"0\.0\.weight is a parameter of another model too.*put them in an `nn\.ModuleDict`"):
            wrap(other, world)
        return kept is not None

    assert all(rl.simulate(2, body))


@pytest.mark.parametrize("ranks", RANKS)
def test_models_that_share_parameters_train_as_one_module(ranks):
    def heads() -> nn.ModuleDict:
        encoder = make_layers(widths=(4, 6))
        return nn.ModuleDict({name: nn.Sequential(encoder, make_layers(widths=(6, 1))) for name in ("a", "b")})

    def train(both: nn.ModuleDict, step_rows) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.Adam(both.parameters(), lr=0.01)
        for step in range(4):   # in turn: each leaves the other's head without a gradient
            optimizer.zero_grad()
            both["ab"[step % 2]](step_rows(step)).square().mean().backward()
            optimizer.step()
        return dict(both.state_dict())

    def body(world):
        wrapped = rl.data_parallel(heads(), world)
        return train(wrapped.module, lambda step: rows_of(world.rank, step))

    expected = train(heads(), lambda step: torch.cat([rows_of(rank, step) for rank in range(ranks)]))
    for state in rl.simulate(ranks, body):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=RTOL, atol=1e-12)


@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard, prepared])
def test_a_model_that_is_averaged_already_is_refused_and_a_copy_of_it_is_not(wrap):
    """As when the cell of a notebook runs again: each of two would sum, and divide."""
    def body(world):
        model = make_layers()
        rl.data_parallel(model[0], world)
        with pytest.raises(rl.ConfigError, match="0 has been wrapped by data_parallel before"):
            wrap(model, world)
        wrap(copy.deepcopy(model), world)

    rl.simulate(2, body)


def frozen_around_backward(model, rows, freeze) -> None:
    """As in a GAN that freezes one half only while the other's gradients are computed."""
    loss = model(rows).square().mean()
    freeze(model, False)
    loss.backward()
    freeze(model, True)


def frozen_between_forwards(model, rows, freeze) -> None:
    """The first loss was computed while all were trained, and so are its gradients."""
    first = model(rows).square().mean()
    freeze(model, False)
    second = model(rows + 1).square().mean()
    freeze(model, True)
    first.backward()
    second.backward()


def freeze_second(model, on: bool) -> None:
    for name, param in model.named_parameters():
        if name.removeprefix("module.").startswith("2."):
            param.requires_grad_(on)


def frozen_while_others_accumulate(model, rows, freeze) -> None:
    with getattr(model, "no_sync", nullcontext)():
        frozen_around_backward(model, rows, freeze)
    model(rows + 1).square().mean().backward()


@pytest.mark.parametrize("backward", [frozen_around_backward, frozen_between_forwards, frozen_while_others_accumulate])
@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard, partial(rl.fully_shard, reshard_after_forward=False)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_freezing_counts_when_backward_runs(ranks, wrap, backward):
    def train(model, rows_at):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, rows_at(step), freeze_second)
            optimizer.step()
        return dict(model.state_dict())

    expected = train(make_layers(), lambda step: torch.cat([rows_of(rank, step) for rank in range(ranks)]))
    for state in rl.simulate(ranks, lambda world: train(wrap(make_layers(), world), lambda step: rows_of(world.rank, step))):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=RTOL, atol=1e-12)


@pytest.mark.parametrize("when", ["before the first step", "between two"])
def test_a_model_may_be_pruned_after_it_was_wrapped(when):
    def train(model, layers, rows_at):
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.05)
        for step in range(4):
            if step == (0 if when == "before the first step" else 2):
                prune.l1_unstructured(layers[2], "weight", amount=0.3)
            if step == 3:
                prune.remove(layers[2], "weight")
            optimizer.zero_grad()
            model(rows_at(step)).square().mean().backward()
            optimizer.step()
        return dict(layers.state_dict())

    def body(world):
        wrapped = rl.data_parallel(make_layers(), world)
        return train(wrapped, wrapped.module, lambda step: rows_of(world.rank, step))

    plain = make_layers()
    expected = train(plain, plain, lambda step: torch.cat([rows_of(rank, step) for rank in range(2)]))
    for state in rl.simulate(2, body):
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=RTOL, atol=1e-12)


def test_what_was_frozen_stays_known_while_others_move():
    def body(world):
        model = make_layers()
        model[0].requires_grad_(False)
        wrapped = rl.data_parallel(model, world)
        square_loss(wrapped, world.rank)
        prune.l1_unstructured(model[2], "weight", amount=0.3)
        model[0].weight.requires_grad_(True)
        with pytest.raises(rl.ConfigError, match=r"0.weight was frozen when the model was prepared"):
            square_loss(wrapped, world.rank)

    rl.simulate(2, body)


def test_a_parameter_that_comes_while_others_move_is_an_error():
    def body(world):
        wrapped = rl.data_parallel(make_layers(), world)
        square_loss(wrapped, world.rank)
        prune.l1_unstructured(wrapped.module[2], "weight", amount=0.3)
        layer = wrapped.module[0]
        layer.bias = nn.Parameter(layer.bias.detach().clone())
        with pytest.raises(UnitError, match=r"0.bias was replaced after the model was prepared"):
            square_loss(wrapped, world.rank)

    rl.simulate(2, body)


@pytest.mark.parametrize("how", ["dropped", "frozen"])
def test_a_trained_encoder_may_get_another_head(how):
    """Without the first wrapper, or frozen."""
    def body(world):
        encoder = make_layers(widths=(4, 6))
        first = rl.data_parallel(nn.Sequential(encoder, make_layers(widths=(6, 1))), world)
        square_loss(first, world.rank)
        if how == "frozen":
            encoder.requires_grad_(False)
        else:
            del first
        second = rl.data_parallel(nn.Sequential(encoder, make_layers(widths=(6, 1))), world)
        square_loss(second, world.rank)
        return gradients(second.module)

    for one, other in itertools.pairwise(rl.simulate(2, body)):
        assert all(torch.equal(one[name], other[name]) for name in one if one[name] is not None)


def test_a_tied_parameter_that_gets_a_rival_is_an_error():
    """The one that was known is still in the model, elsewhere."""
    def body(world):
        model = make_layers(widths=(4, 4, 4, 1))
        model[2].weight = model[0].weight
        wrapped = rl.data_parallel(model, world)
        square_loss(wrapped, world.rank)
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
        with pytest.raises(UnitError, match=r"2.weight came after the model was prepared"):
            square_loss(wrapped, world.rank)

    rl.simulate(2, body)


class TwoHalves(nn.ModuleDict):
    """Two models that train by turns, with an optimizer each."""

    def __init__(self):
        super().__init__({"a": make_layers(widths=(4, 5, 1)), "b": make_layers(widths=(4, 3, 1))})

    def forward(self, rows, which):
        return self[which](rows)


@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard])
def test_one_optimizer_may_step_while_the_parameters_of_another_accumulate(wrap):
    def train(model, rows_at, accumulating):
        named = {name.removeprefix("module."): param for name, param in model.named_parameters()}
        a, b = (torch.optim.SGD([param for name, param in named.items() if name.startswith(half)], lr=0.05) for half in "ab")
        sum(model(rows_at(9), half).square().mean() for half in "ab").backward()   # from now on they lie in one bucket
        for step in range(3):
            a.zero_grad(), b.zero_grad()
            model(rows_at(step), "a").square().mean().backward()
            with accumulating():
                model(rows_at(step) + 1, "b").square().mean().backward()
            a.step()
            model(rows_at(step) - 1, "b").square().mean().backward()
            b.step()
        return dict(model.state_dict())

    def body(world):
        model = wrap(TwoHalves(), world)
        state = train(model, lambda step: rows_of(world.rank, step), model.no_sync)
        named = [param for name, param in model.named_parameters() if "b." in name]
        with model.no_sync():
            model(rows_of(world.rank), "b").square().mean().backward()
        with pytest.raises(UnitError, match="no_sync"):
            torch.optim.SGD(named, lr=0.05).step()
        return state

    expected = train(TwoHalves(), lambda step: torch.cat([rows_of(rank, step) for rank in range(2)]), nullcontext)
    for state in rl.simulate(2, body):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=RTOL, atol=1e-12)


@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard])
def test_no_parameter_is_updated_by_the_gradient_of_one_rank(wrap):
    def body(world):
        model = wrap(make_layers(), world)
        square_loss(model, world.rank)
        with model.no_sync():
            square_loss(model, world.rank)
        for param in model.parameters():
            with pytest.raises(UnitError, match="no_sync"):
                torch.optim.SGD([param], lr=0.05).step()

    rl.simulate(2, body)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard])
def test_a_parameter_that_comes_after_wrapping_is_an_error(wrap, ranks):
    def body(world):
        wrapped = wrap(make_layers(), world)
        square_loss(wrapped, world.rank)
        wrapped.module.append(torch.nn.Linear(3, 3))
        with pytest.raises(UnitError, match=r"6.weight came after the model was prepared"):
            square_loss(wrapped, world.rank)
        del wrapped.module[6]
        wrapped.module[0] = torch.nn.Linear(4, 3).double()
        with pytest.raises(UnitError, match=r"0.weight came after the model was prepared"):
            square_loss(wrapped, world.rank)

    rl.simulate(ranks, body)


class Bank(nn.Linear):
    """Its length is how much it holds: nothing yet, so that it counts as false."""

    def __len__(self):
        return 0


@pytest.mark.parametrize("kind", [nn.Linear, Bank])
@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard])
def test_parameters_beside_a_wrapped_model_are_an_error_if_they_are_trained(wrap, kind):
    def body(world):
        wrapped = wrap(make_layers(), world)
        wrapped.criterion, wrapped.teacher = torch.nn.MSELoss(), torch.nn.Linear(1, 1).requires_grad_(False)
        square_loss(wrapped, world.rank)
        wrapped.head = kind(1, 1)
        with pytest.raises(UnitError, match=r"head.weight came after the model was wrapped, and stands beside it"):
            square_loss(wrapped, world.rank)
        del wrapped.head
        wrapped.scale = nn.Parameter(torch.ones(1))
        with pytest.raises(UnitError, match=r"scale came after the model was wrapped, and stands beside it"):
            square_loss(wrapped, world.rank)
        del wrapped.scale
        square_loss(wrapped, world.rank)

    rl.simulate(2, body)


def test_a_replica_that_is_compiled_whole_is_compiled_once(monkeypatch):
    """Also where a forward gives back the memory of gradients, which in a graph would be guards on what gradients there are."""
    monkeypatch.setattr(frames, "has_allocator", lambda device: True)
    graphs = []

    def body(world):
        replica = rl.data_parallel(make_layers(), world)
        compiled = torch.compile(replica, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
        for step in range(4):
            replica.zero_grad(set_to_none=step != 2)
            square_loss(compiled, world.rank)
        return gradients(replica.module)

    expect_equal(rl.simulate(1, body)[0], plain_gradients(make_layers, square_loss, 1))
    assert len(graphs) == 1


def test_what_was_frozen_when_the_model_was_wrapped_cannot_be_trained_later():
    def body(world):
        model = make_layers()
        model[0].requires_grad_(False)
        wrapped = rl.data_parallel(model, world)
        square_loss(wrapped, world.rank)
        model[0].weight.requires_grad_(True)
        with pytest.raises(rl.ConfigError, match=r"0.weight was frozen when the model was prepared"):
            square_loss(wrapped, world.rank)

    rl.simulate(2, body)


def test_a_wrapped_model_is_neither_copied_nor_pickled_and_says_what_to_take():
    """A copy averaged nothing, without a word; as a pickle torch named a store that the user has never seen."""
    def body(world):
        replica = rl.data_parallel(make_layers(), world)
        for copied in (copy.deepcopy, torch.optim.swa_utils.AveragedModel):
            with pytest.raises(UnitError, match=r"`copy.deepcopy\(ddp.module\)`.*`AveragedModel\(ddp.module\)`"):
                copied(replica)
        with pytest.raises(UnitError, match=r"Save `ddp.state_dict\(\)`"):
            torch.save(replica, io.BytesIO())
        for _ in range(2):
            replica.zero_grad()
            square_loss(replica, world.rank)
        average = torch.optim.swa_utils.AveragedModel(replica.module)
        average.update_parameters(replica.module)
        file = io.BytesIO()
        torch.save(copy.deepcopy(replica.module), file)
        return gradients(replica.module)

    expect_equal(rl.simulate(2, body)[0], plain_gradients(make_layers, square_loss, 2))


def test_a_cast_after_the_first_backward_is_an_error_that_names_both_dtypes():
    def body(world):
        replica = rl.data_parallel(make_layers(), world)
        square_loss(replica, world.rank)
        replica.zero_grad()
        replica.float()
        with pytest.raises(UnitError, match=r"rank \d: \d.bias was cast to torch.float32 after the first backward, .* in torch.float64"):
            replica(rows_of(world.rank).float()).sum().backward()

    rl.simulate(2, body)


class Shared(nn.Module):
    """One block, used three times and recomputed."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.first, self.block, self.reentrant = make_layers(widths=(4, 6)), make_layers(widths=(6, 6)), reentrant
        self.last = make_layers(widths=(6, 1))

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize("bucket_bytes", [1, None])
def test_a_second_gradient_in_one_backward_is_an_error_and_one_that_torch_adds_up_itself_is_none(bucket_bytes):
    """A nested backward leaves a gradient for each use of a block: the second was added to what was scaled already, maybe under way."""
    def body(world):
        seen = []
        for reentrant in (False, True):
            replica = rl.data_parallel(Shared(reentrant), world, bucket_bytes=bucket_bytes)
            for step in range(2):
                replica.zero_grad()
                with pytest.raises(UnitError, match=r"a second gradient of block.0.bias .*use_reentrant=False") if (
                        reentrant and step) else warnings.catch_warnings():
                    square_loss(replica, world.rank)
                if not (reentrant and step):
                    seen.append(gradients(replica.module))
        return seen

    truth = plain_gradients(lambda: Shared(False), square_loss, 2)
    for seen in rl.simulate(2, body):
        assert len(seen) == 3
        for mine in seen:
            expect_equal(mine, truth)


@pytest.mark.parametrize("forwards", ["before each backward", "all first"])
@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("p", [2, 3])
def test_gradients_that_somebody_holds_are_not_written_over(p, backend, forwards):
    """As for PCGrad: the gradients of each task are kept as they are, and put together afterwards."""
    def two_tasks(model, rank, held=None):
        rows = [rows_of(rank, step) for step in (0, 1)]
        outputs = [model(x) for x in rows] if forwards == "all first" else None
        for task in (0, 1):
            model.zero_grad()
            (outputs[task] if outputs else model(rows[task])).square().mean().backward()
            kept = [param.grad for param in model.parameters()]
            held = kept if held is None else [a - 0.5 * b for a, b in zip(held, kept)]
        for param, gradient in zip(model.parameters(), held):
            param.grad = gradient

    def body(world):
        replica, seen = rl.data_parallel(make_layers(), world, bucket_bytes=200), []
        for _ in range(3):
            two_tasks(replica, world.rank)
            seen.append(gradients(replica.module))
        return seen

    truth = plain_gradients(make_layers, two_tasks, p)
    for seen in rl.simulate(p, body, backend=backend):
        for mine in seen:
            expect_equal(mine, truth)


@pytest.mark.parametrize("unsynced", [False, True])
@pytest.mark.parametrize("cleared", ["some", "all"])
@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
@pytest.mark.parametrize("bucket_bytes", [None, 1])
def test_gradients_that_somebody_holds_stay_where_others_accumulate_and_inside_no_sync(bucket_bytes, backend, cleared, unsynced):
    """One gradient of a bucket that goes on accumulating, or a first one of `no_sync`, kept all of them from new memory."""
    def steps(model, rank, pause):
        params, seen = list(model.parameters()), []
        for step in range(3):
            model.zero_grad()
            out = model(rows_of(rank, step))
            with pause():
                out.square().mean().backward(retain_graph=True)
                kept = [param.grad for param in params]
                for param in params[:2] if cleared == "some" else params:
                    param.grad = None
                out.abs().mean().backward()
                seen.append([x.clone() for x in (*kept[:2], params[0].grad, params[1].grad, params[-1].grad)])
        return seen

    def body(world):
        replica = rl.data_parallel(make_layers(), world, bucket_bytes=bucket_bytes)
        square_loss(replica, world.rank, 9)   # lays out the buckets
        return steps(replica, world.rank, replica.no_sync if unsynced else nullcontext)

    alone = [steps(make_layers(), rank, nullcontext) for rank in range(2)]
    for rank, found in enumerate(rl.simulate(2, body, backend=backend)):
        expected = alone[rank] if unsynced else [[(a + b) / 2 for a, b in zip(*both)] for both in zip(*alone)]
        for mine, truth in zip(found, expected):
            torch.testing.assert_close(mine, truth, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("backend", ["gloo", "rankloom"])
def test_gradients_that_nobody_holds_are_written_over_where_they_lie(backend):
    """Fresh memory costs a fault for each of its pages; and that which ranks share is taken again when it is free."""
    def body(world):
        replica, places, kept = rl.data_parallel(make_layers(), world), [], None
        for step in range(8):
            replica.zero_grad()
            square_loss(replica, world.rank, step)
            places.append(replica._reducer.buckets[0].flat.data_ptr())
            kept = replica.module[0].weight.grad if step == 3 and world.rank == 1 else kept if step < 6 else None
            square_loss(replica, world.rank, step)   # on top
        return places

    for rank, places in enumerate(rl.simulate(2, body, backend=backend)):
        assert len(set(places[:4])) == 1 and len(set(places[4:7])) == 1
        assert (places[4] != places[3]) == (rank == 1)
        assert places[7] == (places[0] if backend == "rankloom" else places[6])
