"""Replicas begin equal or not at all, and their running statistics stay equal."""

import random
import threading
import time
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rankloom as rl
from patience import AT_ONCE
from rankloom.parallel.replicas import guards
from rankloom.parallel.replicas.buffers import SAMPLE, BufferKeeper, Sampled
from rankloom.parallel.replicas.equal_start import MESSAGE_BYTES, make_replicas_equal, named_state
from rankloom.parallel.replicas.refused import _first_shared, _runs


def make(first: int = 2, second: int = 3, value: float = 0.5, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(first, second), nn.BatchNorm1d(second)).to(dtype)
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_equal_models_are_left_alone_and_nobody_is_warned(value):
    def body(world):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return make_replicas_equal(make(value=value), world)

    assert rl.simulate(3, body) == [[]] * 3


@pytest.mark.parametrize("take", [rl.data_parallel, rl.fully_shard, make_replicas_equal])
def test_one_model_in_the_hands_of_two_ranks_is_an_error_that_says_so(take):
    shared = make()

    def body(world):
        with pytest.raises(rl.ConfigError, match=r"rank [12] was given the very object that rank \d has as its model") as found:
            take(make() if world.rank == 0 else shared, world)
        return str(found.value)

    assert len(set(rl.simulate(3, body))) == 1
    rl.simulate(1, lambda world: take(shared, world))   # nothing was changed


@pytest.mark.filterwarnings("ignore:the models of ranks")
def test_small_tensors_come_from_rank_0_in_one_message_whatever_their_dtypes_and_a_large_one_in_its_own():
    def body(world):
        model, labels, plain = nn.Module(), [], world.broadcast
        for number, dtype in enumerate((torch.uint8, torch.float64, torch.bool, torch.complex64, torch.bfloat16) * 20):
            model.register_buffer(f"small{number}", torch.full((3,), world.rank).to(dtype))   # 3 bytes: the next begins at no multiple
        model.register_buffer("large", torch.full((MESSAGE_BYTES // 4,), float(world.rank)))
        world.broadcast = lambda x, **more: labels.append(more["label"]) or plain(x, **more)
        changed = make_replicas_equal(model, world)
        assert changed == ([] if world.rank == 0 else [name for name, _ in named_state(model)])
        assert all((tensor == 0).all() for _, tensor in named_state(model))
        return labels

    assert rl.simulate(3, body) == [["initial small0, small1, small2", "initial large"]] * 3


@pytest.mark.filterwarnings("ignore:the models of ranks")
def test_models_with_other_values_take_those_of_rank_0_and_say_which_differed():
    def body(world):
        model = make(value=1.0 + world.rank)
        model[1].running_mean += world.rank
        changed = make_replicas_equal(model, world)
        return changed, [t.detach().flatten()[0].item() for _, t in named_state(model)]

    results = rl.simulate(3, body)
    assert results[0][0] == [] and results[1][0] == results[2][0]
    assert set(results[1][0]) == {"0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean"}
    assert results[0][1] == results[1][1] == results[2][1] and results[0][1][:4] == [1.0] * 4


LAZY = {   # torch conjugates or negates these when they are read
    "conjugated": lambda value: torch.complex(torch.tensor([1.0, value]), torch.tensor([2.0, value])).conj(),
    "negated": lambda value: torch._neg_view(torch.tensor([1.0, value])),
}


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_buffer_that_is_conjugated_or_negated_when_read_is_that_of_rank_0_and_averaged(kind, stage):
    class Turned(nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.linear = nn.Linear(2, 1)
            self.register_buffer("turn", LAZY[kind](3.0 + rank))

        def forward(self, x):
            self.turn.data += x.sum()
            return self.linear(x)

    def body(world):
        model = Turned(world.rank)
        nn.init.ones_(model.linear.weight)
        nn.init.zeros_(model.linear.bias)
        engine = rl.prepare(model, loss=lambda model, x: (model(x).sum(), len(x)), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                            stage=stage, world=world)
        start = model.turn.clone()
        engine.step(torch.full((1, 2), 1.0 + world.rank))
        return start, model.turn

    with pytest.warns(UserWarning, match="in 1 tensors .first: turn"):
        both = rl.simulate(2, body)
    for start, after in both:
        assert torch.equal(start, LAZY[kind](3.0)) and torch.equal(after, start + 3.0)


@pytest.mark.parametrize("kind", LAZY)
def test_an_uncounted_write_to_a_buffer_that_is_turned_when_read_is_seen(kind):
    turned = LAZY[kind](3.0)
    sampled = Sampled({"turned": turned})
    assert sampled.compare()(among=sampled.names) == set()
    turned.data.fill_(1.0)
    assert sampled.compare()(among=sampled.names) == {"turned"}


def test_the_warning_of_rank_0_names_the_ranks_and_the_first_tensor():
    def body(world):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            world.barrier()
            make_replicas_equal(make(value=1.0 + world.rank), world)
            world.barrier()   # recording is for the whole process: collect before anybody leaves
            return [str(warning.message) for warning in caught]

    said = {text for texts in rl.simulate(3, body) for text in texts}
    assert len(said) == 1, "rank 0 speaks for all"
    told = "the models of ranks [1, 2] differed from rank 0's, that of rank 1 in 4 tensors (first: 0.weight); rank 0's values"
    assert said.pop().startswith(told)


def test_ranks_are_named_by_their_numbers_in_the_world_whatever_group_compares():
    def body(world):
        pair, warned = world.group("tensor"), None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            world.barrier()
            make_replicas_equal(make(value=1.0 + world.rank), pair)
            world.barrier()
            warned = {str(warning.message)[:46] for warning in caught}
        with pytest.raises(rl.ModelMismatch) as error:
            make_replicas_equal(make(second=3 + pair.rank), pair)
        return warned, str(error.value)

    results = rl.simulate(rl.Mesh(replicate=2, tensor=2), body)
    assert set().union(*(warned for warned, _ in results)) == {
        f"the models of ranks [{rank + 1}] differed from rank {rank}'s" for rank in (0, 2)}
    for rank, (_, said) in enumerate(results):
        first = rank // 2 * 2
        assert said.startswith(f"rank {first + 1} holds another model than rank {first}: ") and f"on rank {first}" in said


class Ordered(nn.Module):
    """The same two tensors, in the order in which their names are given."""

    def __init__(self, *names: str):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Parameter(torch.zeros(2)))


def other_shape(rank):
    return make(second=3 + (rank == 1))


def other_dtype(rank):
    return make(dtype=torch.float64 if rank == 1 else torch.float32)


def other_name(rank):
    return nn.ModuleDict({"head" if rank == 1 else "tail": nn.Linear(2, 2)})


def one_more(rank):
    return nn.Sequential(nn.Linear(2, 2), *[nn.Linear(2, 2)] * (rank == 1))


def one_frozen(rank):
    model = make()
    model[0].bias.requires_grad_(rank != 1)
    return model


def other_order(rank):
    return Ordered(*("ba" if rank == 1 else "ab"))


@pytest.mark.parametrize(("different", "says"), [
    (other_shape, r"0.weight: \[4, 2\] torch.float32 here, \[3, 2\]"), (other_dtype, r"torch.float64 here, .*torch.float32 on rank 0"),
    (other_name, r"tail.weight: missing here|head.weight: .*missing on rank 0"), (one_more, r"1.weight: .*missing on rank 0"),
    (one_frozen, r"0.bias: .* frozen here"), (other_order, r"another order, b here where rank 0 has a"),
])
@pytest.mark.parametrize("p", [2, 3])
def test_models_of_another_make_are_refused_on_all_ranks_with_what_differs(p, different, says):
    def body(world):
        with pytest.raises(rl.ModelMismatch, match=f"rank 1 holds another model than rank 0: .*{says}"):
            rl.data_parallel(different(world.rank), world)
        return True

    assert rl.simulate(p, body) == [True] * p


@pytest.mark.parametrize("option", [
    {"units": nn.Linear}, {"units": lambda module: True}, {"compute": torch.bfloat16}, {"reduce": torch.float64}, {"compress": "int8"},
    {"reshard_after_forward": False}, {"ahead": 2}], ids=lambda option: next(iter(option)))
@pytest.mark.parametrize("other", [1, 2])
def test_fully_shard_with_another_option_on_one_rank_is_an_error_on_all_ranks_and_replicas(other, option):
    def body(world):
        mine = option if world.rank == other else {}
        with pytest.raises(rl.ConfigError, match=f"another way to shard than rank .*: {next(iter(option))} is .*; give all ranks the same"):
            rl.fully_shard(make(), world.group("shard"), replicas=world.group("replicate"), **mine)
        return True

    assert rl.simulate(rl.Mesh(replicate=2, shard=2), body) == [True] * 4


def test_functions_that_choose_the_same_units_are_the_same_option():
    def body(world):
        return [name for name, _ in rl.fully_shard(make(), world, units=lambda name, module: name == "0").named_parameters()]

    assert rl.simulate(2, body) == [["0.weight", "0.bias", "1.weight", "1.bias"]] * 2


@pytest.mark.parametrize("option", [{"all_reduce": "ring"}, {"compress": "int8"}, {"bucket_bytes": 8}], ids=lambda option: min(option))
def test_data_parallel_with_another_option_on_one_rank_is_an_error_on_all_ranks(option):
    def body(world):
        mine = option if world.rank == 1 else {}
        with pytest.raises(rl.ConfigError, match=f"rank 1 was given another way to reduce gradients than rank 0: {next(iter(option))} is "):
            rl.data_parallel(make(), world, **mine)
        return True

    assert rl.simulate(3, body) == [True] * 3


@pytest.mark.parametrize("wrap", [
    lambda model, world: rl.fully_shard(model, world),
    *(lambda model, world, stage=stage: rl.prepare(model, loss=lambda m, x: (m(x).sum(), len(x)), optimizer=torch.optim.SGD, world=world,
                                                   stage=stage) for stage in (1, 2, 3))])
@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_an_embedding_that_changes_its_weight_in_forward_is_not_cut(kind, wrap):
    """On one rank, too: the optimizer has slices, of which forward knows nothing."""
    with pytest.raises(rl.ConfigError, match="0 is an embedding with max_norm, which changes its weight .* train at stage 0 on one rank"):
        rl.simulate(1, lambda world: wrap(torch.nn.Sequential(kind(5, 4, max_norm=1.0)), world))


@pytest.mark.parametrize("told", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_an_embedding_that_depends_on_the_rows_of_one_rank_is_refused_on_several(told):
    """The weights of stage 0 drifted apart, rank by rank, or its gradients were others."""
    make_embedding = lambda: nn.Sequential(nn.Embedding(3, 2, **told), nn.BatchNorm1d(2))
    assert rl.simulate(1, lambda world: make_replicas_equal(make_embedding(), world)) == [[]]
    with pytest.raises(rl.ConfigError, match="0 is an embedding with max_norm or scale_grad_by_freq"):
        rl.simulate(2, lambda world: make_replicas_equal(make_embedding(), world))


def alike(model: nn.Module) -> nn.Module:
    """With the same parameters on all ranks, which are threads with one generator."""
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    return model


def prepared(model, world):
    return rl.prepare(model, loss=lambda m, x: (m(x).sum(), len(x)), optimizer=torch.optim.SGD, world=world)


@pytest.mark.parametrize("take", [rl.data_parallel, rl.fully_shard, prepared])
@pytest.mark.parametrize("trained", [True, False])
def test_two_parameters_in_one_memory_are_an_error_that_says_how_to_tie_them(take, trained):
    """They were silently two from the first step on: each got a place of its own in the flat buffers."""
    def body(world):
        model = alike(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        model[1].weight.data = model[0].weight.data
        model[0].weight.requires_grad_(trained)
        with pytest.raises(rl.ConfigError, match=r"1.weight and 0.weight are two parameters in one memory.*`a.weight = b.weight`"):
            take(model, world)
        if take is not prepared:   # which takes a model once
            model[1].weight = model[0].weight
            take(model, world)

    rl.simulate(2, body)


@pytest.mark.parametrize("take", [rl.data_parallel, rl.fully_shard])
def test_parameters_that_share_a_part_of_their_memory_are_refused_and_two_halves_of_one_are_not(take):
    def body(world):
        overlapping, columns, rows = (alike(nn.Sequential(nn.Linear(2, 6), nn.Linear(2, 3))) for _ in range(3))
        overlapping[1].weight.data = overlapping[0].weight.data[3:]
        with pytest.raises(rl.ConfigError, match=r"1.weight and 0.weight are two parameters in one memory"):
            take(overlapping, world)
        whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        wide = nn.Sequential(nn.Linear(264, 264, bias=False), nn.Linear(264, 264, bias=False))
        both = torch.randn(264, 528, generator=torch.Generator().manual_seed(0))
        wide[0].weight.data, wide[1].weight.data = both[:, :264], both[:, 263:527]
        with pytest.raises(rl.ConfigError, match=r"1.weight and 0.weight are two parameters in one memory"):
            take(wide, world)
        wide[1].weight.data = both[:, 264:]
        columns[0].weight.data, columns[1].weight.data = whole[:, :2], whole[:3, 2:]
        rows[0].weight.data, rows[1].weight.data = (part.view(-1, 2) for part in whole.clone().view(-1).split([12, 6, 6])[:2])
        for model in (columns, rows, wide):
            take(model, world)

    rl.simulate(2, body)


def strided_anyhow(memory: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """A tensor of up to 3 dims in any order, with or without gaps; no element lies in another's place."""
    shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 3))]
    strides, stride = [0] * len(shape), draw.choice((1, 1, 2, 3))
    for dim in draw.sample(range(len(shape)), len(shape)):
        strides[dim] = stride
        stride = stride * shape[dim] + draw.choice((0, 0, 1, 3))
    return memory.as_strided(shape, strides, draw.randint(0, 60))


def bytes_taken(x: torch.Tensor) -> set[int]:
    places = [0]
    for size, stride in zip(x.shape, x.stride()):
        places = [place + stride * at for place in places for at in range(size)]
    return {x.data_ptr() + place * x.itemsize + byte for place in places for byte in range(x.itemsize)}


def test_two_tensors_share_memory_where_a_byte_belongs_to_both_and_not_both_are_frozen():
    draw, memory, answers = random.Random(0), torch.zeros(400), []
    for _ in range(500):
        tensors = [strided_anyhow(memory, draw) for _ in range(draw.randint(1, 5))]
        trained = [draw.random() < 0.5 for _ in tensors]
        taken = [bytes_taken(x) for x in tensors]
        shared = {(a, b) for a, b in permutations(range(len(tensors)), 2) if (trained[a] or trained[b]) and taken[a] & taken[b]}
        found = _first_shared([_runs(x) for x in tensors], trained)
        assert found in shared if shared else found is None
        answers.append(bool(shared))
    assert 100 < sum(answers) < 400
    within = [_runs(memory[start:stop]) for start, stop in ((0, 10), (2, 4), (6, 8))]   # the third is in the first, behind the second
    assert _first_shared(within, [False, False, True]) == (0, 2)


def test_many_columns_of_one_matrix_are_looked_at_in_a_moment():
    """Each pair was compared, place by place."""
    model, whole = nn.Module(), torch.randn(512, 1024)
    for at in range(1024):
        model.register_parameter(f"column{at}", nn.Parameter(torch.zeros(0)))
        getattr(model, f"column{at}").data = whole[:, at:at + 1]
    begin = time.monotonic()
    rl.simulate(1, lambda world: make_replicas_equal(model, world))
    assert time.monotonic() - begin < AT_ONCE


def test_parameters_without_elements_and_frozen_ones_may_be_where_others_are():
    def body(world):
        model = alike(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)))
        model[1].weight.data = model[0].weight.data[:0]
        model[2].requires_grad_(False).bias.data = model[2].weight.data[0]
        make_replicas_equal(model, world)

    rl.simulate(2, body)


# ---------------------------------------------------------------- parameters that a forward writes


class FirstValues(nn.Module):
    """As ActNorm: the first batch gives `shift` its values. `by_rows`: or what is the same whatever the rows are."""

    def __init__(self, by_rows: bool = True, kept: bool = True):
        super().__init__()
        self.linear, self.shift, self.by_rows = alike(nn.Linear(2, 3)), nn.Parameter(torch.zeros(3)), by_rows
        self.kept = kept   # what tells whether it has them, as a buffer
        self.register_buffer("done", torch.tensor(False)) if kept else setattr(self, "done", False)

    def forward(self, x):
        y = self.linear(x)
        if not self.done:
            with torch.no_grad():
                self.shift.copy_(-y.mean(0) if self.by_rows else F.normalize(self.shift + 1.0, dim=0))
            self.done = torch.tensor(True) if self.kept else True
        return y + self.shift


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("kept", [True, False])
def test_a_parameter_that_a_forward_gives_values_by_its_own_rows_is_an_error_on_all_ranks(kept, engine):
    """Each rank trained on from values of its own, and nobody knew."""
    def body(world):
        run = (prepared if engine else rl.data_parallel)(FirstValues(kept=kept), world)
        x = torch.full((2, 2), world.rank + 1.0)
        with pytest.raises(rl.UnitError, match="the forward has written shift, .*than on rank 0: ranks would part. .* run one through"):
            run.step(x) if engine else run(x).sum().backward()

    rl.simulate(3, body)


@pytest.mark.parametrize("writer", [0, 1])
def test_a_parameter_that_the_forward_of_one_rank_only_writes_is_an_error(writer):
    def body(world):
        model = FirstValues(by_rows=False, kept=False)
        ddp = rl.data_parallel(model, world)
        model.done = world.rank != writer
        ddp(torch.ones(2, 2)).sum().backward()

    with pytest.raises(rl.UnitError, match="rank 1: the forward .*rank 0.*: ranks would part"):
        rl.simulate(2, body)


def test_a_parameter_that_every_forward_writes_in_the_same_way_is_fine():
    def body(world):
        model = FirstValues(by_rows=False, kept=False)
        ddp, update = rl.data_parallel(model, world), torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model.done = False
            ddp(torch.full((2, 2), 1.0 + world.rank)).sum().backward()
            update.step()
            update.zero_grad()
        return model.shift.detach().clone()

    first, second = rl.simulate(2, body)
    assert torch.equal(first, second)


def test_what_an_optimizer_of_each_rank_writes_in_no_sync_is_not_taken_for_a_forwards():
    def body(world):
        ddp = rl.data_parallel(make(), world)
        update = torch.optim.SGD(ddp.parameters(), lr=0.1)
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(world.rank))
        for step in range(3):
            with ddp.no_sync() if step < 2 else nullcontext():
                ddp(x).square().sum().backward()
                update.step()
                update.zero_grad()
        return ddp.module[0].weight.detach().clone()

    first, second = rl.simulate(2, body)
    assert not torch.equal(first, second)   # local SGD


@pytest.mark.parametrize("p", [1, 2])
def test_a_parameter_that_a_forward_writes_beside_its_master_is_an_error(p):
    """The step put the master's values back, and what had been written was lost."""
    def body(world):
        engine = rl.prepare(FirstValues(by_rows=False), loss=lambda m, x: (m(x).sum(), len(x)), optimizer=torch.optim.SGD, world=world,
                            precision="bf16")
        with pytest.raises(rl.UnitError, match=r"shift.*, and what is trained is a copy in torch.float32: .* would be lost"):
            engine.step(torch.ones(2, 2))

    rl.simulate(p, body)


# ---------------------------------------------------------------- buffers


def test_batch_norm_statistics_are_averaged_after_each_step_and_counts_kept():
    def body(world):
        replica = rl.data_parallel(make(), world)
        alone, truth = make(), []
        for step in range(3):
            x = torch.randn(8, 2, generator=torch.Generator().manual_seed(10 * step + world.rank))
            replica(x).sum().backward()
            alone[1].load_state_dict({**alone[1].state_dict(), **(truth[-1] if truth else {})})
            alone(x)
            mean = lambda t: world.all_reduce(t.double(), "mean").float()
            truth.append({name: mean(alone[1].get_buffer(name)) for name in ("running_mean", "running_var")})
        norm = replica.module[1]
        return norm.num_batches_tracked.item(), {n: norm.get_buffer(n) for n in truth[-1]}, truth[-1]

    for count, mine, truth in rl.simulate(3, body):
        assert count == 3
        for name in truth:
            torch.testing.assert_close(mine[name], truth[name], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard])
def test_a_value_that_all_ranks_write_stays_as_it_is_to_the_last_bit(wrap, dtype):
    """A sum of 16-bit numbers would be infinite, and a sum of seven equal fp32 numbers is seldom seven times one of them."""
    values = (torch.rand(500, generator=torch.Generator().manual_seed(0)) * 60000).to(dtype)

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = alike(nn.Linear(2, 2))
            self.register_buffer("seen", torch.zeros_like(values))

        def forward(self, x):
            self.seen.copy_(values)
            return self.linear(x)

    def body(world):
        model = Writes()
        wrap(model, world)(torch.ones(2, 2)).sum().backward()
        return model.seen

    assert all(torch.equal(seen, values) for seen in rl.simulate(7, body))


def test_only_buffers_that_changed_somewhere_travel():
    def body(world):
        model = nn.Module()
        model.other = nn.Module()
        model.other.register_buffer("constant", torch.zeros(2))
        for name in ("everywhere", "somewhere", "replaced"):
            model.register_buffer(name, torch.zeros(2))
        model.register_buffer("count", torch.tensor(0))
        model.register_buffer("flag", torch.tensor([False]))
        model.register_buffer("gaps", torch.zeros(3, 2).t())
        model.register_buffer("turn", torch.zeros(2, dtype=torch.complex64))
        keeper = BufferKeeper(model, world)
        first = keeper.average_changed()
        model.everywhere += world.rank
        model.replaced = torch.full((2,), float(world.rank))
        model.gaps += torch.arange(6.0).view(2, 3) * world.rank
        model.count += world.rank
        model.turn += 1j * world.rank
        if world.rank == 1:
            model.somewhere += 6
            model.flag.fill_(True)
        changed = keeper.average_changed()
        return first, changed, {name: b.tolist() for name, b in model.named_buffers()}, keeper.average_changed()

    for first, changed, values, again in rl.simulate(3, body):
        assert first == again == []
        assert changed == ["everywhere", "somewhere", "replaced", "count", "flag", "gaps", "turn"]   # and not other.constant
        assert values == {"everywhere": [1, 1], "somewhere": [2, 2], "replaced": [1, 1], "count": 2, "flag": [True],
                          "gaps": [[0, 1, 2], [3, 4, 5]], "turn": [1j, 1j], "other.constant": [0, 0]}


def test_values_that_were_loaded_are_no_change_and_no_sign_of_writes_that_are_not_counted():
    def body(world):
        model = nn.Module()
        model.register_buffer("constant", torch.zeros(2))
        keeper = BufferKeeper(model, world)
        model.constant += 1
        keeper.forget_changes()
        return [keeper.average_changed() for _ in range(3)]

    assert rl.simulate(2, body) == [[[], [], []]] * 2


def test_a_cache_that_one_rank_has_made_larger_is_its_own():
    """As rotary tables for the longest row so far: the process ended in the backend, for messages of other lengths met."""
    def body(world):
        model = nn.Module()
        model.register_buffer("seen", torch.zeros(1))
        model.register_buffer("table", torch.arange(2.0), persistent=False)
        keeper = BufferKeeper(model, world)
        model.seen += world.rank
        if world.rank == 1:
            model.table = torch.arange(4.0)
        changed = keeper.average_changed()
        model.table = torch.arange(4.0)
        return changed, model.seen.item(), len(model.table), keeper.average_changed()

    assert rl.simulate(2, body) == [(["seen"], 0.5, 4, ["table"])] * 2


def test_a_buffer_that_only_some_ranks_have_or_have_in_another_form_is_their_own():
    def body(world):
        model = nn.Module()
        for name in ("seen", "form", "kind", "gone"):
            model.register_buffer(name, torch.zeros(2, 1))
        keeper, changed = BufferKeeper(model, world), []
        model.seen += world.rank
        if world.rank == 1:
            model.register_buffer("late", torch.ones(3))
            model.form, model.kind = torch.ones(1, 2), torch.ones(2, 1, dtype=torch.float64)
            del model.gone
        changed.append(keeper.average_changed())
        calls = world.ledger.calls
        changed.append(keeper.average_changed())
        assert world.ledger.calls == calls + 1
        if world.rank == 0:
            model.register_buffer("late", torch.zeros(3))
        changed.append(keeper.average_changed())
        return changed, model.seen.tolist(), model.late.tolist(), model.form.sum().item()

    for rank, found in enumerate(rl.simulate(2, body)):
        assert found == ([["seen"], [], ["late"]], [[0.5], [0.5]], [0.5] * 3, 2.0 * rank)


def by_engine(model, world, stage=0):
    return rl.prepare(model, loss=lambda m, x: (m(x).sum(), len(x)), optimizer=torch.optim.SGD, world=world, stage=stage).step


def by_backward(wrap):
    def taken(model, world):
        wrapped = wrap(model, world)
        return lambda x: wrapped(x).sum().backward()
    return taken


@pytest.mark.parametrize("take", [by_backward(rl.data_parallel), by_backward(rl.fully_shard), by_engine, partial(by_engine, stage=3)])
def test_the_first_buffer_of_a_model_may_be_that_of_one_rank_and_costs_nothing_before(take, monkeypatch):
    """The others did not send what that rank waited for: they hung, or mixed it with the next message."""
    plain, labels = rl.Group.all_reduce, ([], [])
    monkeypatch.setattr(rl.Group, "all_reduce", lambda self, *args, **more: labels[self.rank].append(more["label"]) or plain(
        self, *args, **more))

    def body(world):
        model = alike(nn.Sequential(nn.Linear(2, 2)))
        step, x, sent = take(model, world), torch.ones(1, 2), []
        for number in range(5):
            if number == 2 and world.rank == 1:
                model[0].register_buffer("cache", torch.full((3,), 7.0))
            if number == 4:
                model.register_buffer("seen", torch.full((1,), float(world.rank)))
            labels[world.rank].clear()
            step(x)
            sent.append(sum("buffer" in label for label in labels[world.rank]))
        return sent, model.seen.item(), model[0].cache.tolist() if world.rank == 1 else None

    for rank, (sent, seen, cache) in enumerate(rl.simulate(2, body)):
        assert sent == [0, 0, 2, 1, 3]
        assert seen == 0.5 and cache == [None, [7.0] * 3][rank]


def test_what_has_been_loaded_is_no_change():
    def body(world):
        model = nn.Module()
        model.register_buffer("table", torch.rand(9, generator=torch.Generator().manual_seed(0)) / 3)
        keeper, before = BufferKeeper(model, world), model.table.clone()
        model.load_state_dict(model.state_dict())
        keeper.forget_changes()
        return keeper.average_changed(), torch.equal(model.table, before)

    assert rl.simulate(3, body) == [([], True)] * 3   # a mean of three equal numbers has other bits


def test_a_model_without_buffers_sends_nothing():
    def body(world):
        BufferKeeper(nn.Linear(2, 2), world).average_changed()
        return world.ledger.calls

    assert rl.simulate(2, body) == [0, 0]


def test_evaluation_does_not_change_the_statistics():
    def body(world):
        replica = rl.data_parallel(make(), world)
        replica.eval()
        replica(torch.randn(4, 2)).sum().backward()
        return replica.module[1].running_mean.tolist()

    assert rl.simulate(2, body) == [[0.0] * 3] * 2


class Watched(nn.Module):
    """A linear layer that follows its inputs by a buffer, which `write` does in a way of its own."""

    def __init__(self, write):
        super().__init__()
        self.linear, self.write = alike(nn.Linear(3, 3)), write
        for name in ("mean", "var"):
            self.register_buffer(name, torch.ones(3))
        self.register_buffer("table", torch.rand(2 * SAMPLE, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 3)

    def forward(self, x):
        self.write(self, x)
        return self.linear(x)


def by_data(module, x):
    module.mean.data.mul_(0.9).add_(x.mean(0), alpha=0.1)


def by_other_memory(module, x):
    module.mean.data = module.mean * 0.9 + x.mean(0) * 0.1


def by_a_kernel_that_nobody_counts(module, x):
    F.batch_norm(x, module.mean, module.var, training=True)


@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard])
@pytest.mark.parametrize("write", [by_data, by_other_memory, by_a_kernel_that_nobody_counts])
def test_buffers_that_are_written_without_being_counted_are_averaged_too(write, wrap):
    """As codebooks often are, `self.codes.data.mul_(...)`: ranks parted, and nobody knew."""
    def body(world):
        model = Watched(write)
        wrapped, alone = wrap(model, world), Watched(write)
        for step in range(3):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + world.rank))
            wrapped(x).sum().backward()
            write(alone, x)
            for name in ("mean", "var"):
                alone.get_buffer(name).copy_(world.all_reduce(alone.get_buffer(name).double(), "mean"))
        return model.mean, model.var, alone.mean, alone.var, torch.equal(model.table, alone.table)

    for mean, var, true_mean, true_var, same in rl.simulate(3, body):
        assert same   # a mean of three equal numbers has other bits
        assert torch.equal(mean, true_mean) and torch.equal(var, true_var) and not torch.equal(mean, torch.ones(3))


@pytest.mark.parametrize("write", [by_data, by_a_kernel_that_nobody_counts])
def test_a_write_that_nobody_counts_is_seen_in_the_step_after_one_that_was_counted(write):
    """The values that such a step leaves are those to compare with."""
    def body(world):
        model = Watched(write)
        keeper, found = BufferKeeper(model, world), []
        for step in range(4):
            if step == 1:
                model.mean.fill_(2.0)
            else:
                write(model, torch.full((2, 3), 1.0 + 3 * step + world.rank) * torch.tensor([[1.0], [2.0]]))
            found.append((keeper.average_changed(), model.mean.tolist()))
        return found

    one, other = rl.simulate(2, body)
    assert one == other and all("mean" in changed for changed, _ in one)


def test_whole_numbers_that_are_written_uncounted_are_made_equal_too():
    def body(world):
        model = nn.Module()
        model.register_buffer("seen", torch.zeros(4, dtype=torch.int64))
        model.register_buffer("used", torch.zeros(3, dtype=torch.bool))
        keeper = BufferKeeper(model, world)
        model.seen.data[world.rank] = 5 + world.rank
        model.used.data[world.rank] = True
        keeper.average_changed()
        return model.seen.tolist(), model.used.tolist()

    assert rl.simulate(2, body) == [([5, 6, 0, 0], [True, True, False])] * 2


def test_a_buffer_that_was_once_found_to_be_written_uncounted_travels_in_every_step_whoever_wrote_it():
    def body(world):
        model = nn.Module()
        model.register_buffer("queue", torch.zeros(50 * SAMPLE))   # of which it looks at some elements
        keeper = BufferKeeper(model, world)
        if world.rank == 1:
            model.queue.data += 2.0
        changed = [keeper.average_changed()]
        model.queue.data[1] += world.rank
        changed.append(keeper.average_changed())
        return changed, model.queue[:3].tolist()

    assert rl.simulate(2, body) == [([["queue"], ["queue"]], [1.0, 1.5, 1.0])] * 2


def test_what_a_comparison_of_samples_tells_is_that_of_the_moment_when_it_was_begun():
    table = torch.zeros(3)
    sampled = Sampled({"table": table})
    tell = sampled.compare()
    table.data += 1.0
    assert tell(among={"table"}) == set()
    tell = sampled.compare()
    table.data.zero_()
    assert tell(among={"table"}) == {"table"} and tell(among=set()) == set()


def test_ranks_on_a_gpu_agree_between_cpus_and_read_samples_one_step_late():
    """What was queued on the GPU for the backward would have to end first. tests/test_gpu.py looks at whole steps."""
    def body(world):
        world.device = torch.device("meta")   # in the place of a GPU: what asks it for a value is an error
        model = nn.Module()
        model.other = nn.Module()
        for holder, name in ((model, "first"), (model, "later"), (model.other, "counted")):
            holder.register_buffer(name, torch.zeros(3))
        keeper, changed = BufferKeeper(model, world), []
        for step in range(4):
            model.first.data += 1.0
            model.other.counted += 1.0
            if step == 1 and world.rank == 1:
                model.later.data += 2.0
            changed.append(keeper.average_changed())
        return changed, model.later.tolist()

    usual, later = ["first", "other.counted"], ["first", "later", "other.counted"]
    assert rl.simulate(2, body) == [([usual, usual, later, later], [1.0] * 3)] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128])
def test_a_write_is_seen_in_its_bits_whatever_the_dtype_and_the_order_of_dims(dtype):
    kinds = {"plain": torch.zeros(5, 3), "turned": torch.zeros(5, 3).t(), "single": torch.zeros(()), "none": torch.zeros(0, 3),
             "long": torch.zeros(9 * SAMPLE), "nan": torch.full((2,), float("nan")), "other": torch.zeros(4)}
    tensors = {name: value.to(dtype) for name, value in kinds.items()} | {"count": torch.zeros(3, dtype=torch.int64),
                                                                          "flags": torch.zeros(3, dtype=torch.bool)}
    sampled = Sampled(tensors)
    assert sampled.compare()(among=sampled.names) == set()
    for name in ("plain", "turned", "single", "long", "flags"):
        tensors[name].data.fill_(1.0)
    assert sampled.compare()(among=sampled.names) == {"plain", "turned", "single", "long", "flags"}


def test_of_a_large_buffer_few_elements_are_looked_at_in_every_column():
    """A rotary table may be large, and a pass over it in each step would be felt."""
    table = torch.zeros(4 * SAMPLE, 16)
    sampled = Sampled({"table": table})
    (views,) = sampled._views
    assert 0.9 * SAMPLE < views["table"].numel() <= SAMPLE
    for column in range(16):
        table.data[:, column] += 1.0
        assert sampled.compare()(among=sampled.names) == {"table"}
        table.data.zero_()


@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard])
def test_a_buffer_that_was_made_in_inference_mode_is_averaged_like_others(wrap):
    """As a cache that an evaluation before the first step has made: torch tells no version of it, and the backward died."""
    def body(world):
        model = alike(nn.Sequential(nn.Linear(2, 2)))
        wrapped = wrap(model, world)
        with torch.inference_mode():
            model.register_buffer("table", torch.full((3,), float(world.rank)))
        for _ in range(2):
            wrapped(torch.ones(1, 2)).sum().backward()
        return model.table.tolist()

    assert rl.simulate(2, body) == [[0.5] * 3] * 2


class Graph(nn.Module):
    """A layer of a graph network, with the graph as a sparse constant."""

    def __init__(self, layout, weight=1.0):
        super().__init__()
        self.linear = alike(nn.Linear(3, 3))
        dense = torch.eye(4) * weight + torch.eye(4).roll(1, 0)
        self.register_buffer("adjacency", dense.to_sparse(layout=layout, **({"blocksize": (2, 2)} if "bs" in str(layout) else {})))

    def forward(self, x):
        return self.linear((self.adjacency.to_dense() @ x.unsqueeze(-2).expand(-1, 4, 3)).sum(1))


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc], ids=str)
@pytest.mark.parametrize("options", [{}, {"stage": 3}, {"deterministic": 2}], ids=str)
def test_a_sparse_buffer_is_a_constant_that_must_be_the_same_on_all_ranks(layout, options):
    def body(world):
        made = lambda weight: rl.prepare(Graph(layout, weight), loss=lambda model, x: (model(x).square().sum(), len(x)),
                                         optimizer=lambda p: torch.optim.SGD(p, lr=0.01), world=world, **options)
        engine, x = made(1.0), torch.arange(12.0).view(4, 3) / 12
        losses = [engine.step(x.tensor_split(world.size)[world.rank]).loss for _ in range(3)]
        if world.size > 1:
            with pytest.raises(rl.ModelMismatch, match=r"adjacency: \[4, 4\] .* sparse, of checksum .* here, .* sparse, .* on rank 0"):
                made(1.0 + world.rank)
        return losses

    (alone,), both = rl.simulate(1, body), rl.simulate(2, body)
    assert all(losses == pytest.approx(alone, rel=1e-6) for losses in both)


@pytest.mark.parametrize("wrap", [rl.data_parallel, rl.fully_shard])
def test_an_expanded_buffer_is_made_equal_and_averaged_as_any(wrap):
    """Its elements are in one place, in which torch writes no others."""
    class Scales(nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.linear = alike(nn.Linear(2, 2))
            self.register_buffer("scale", torch.tensor(1.0 + rank).expand(4))

        def forward(self, x):
            self.scale = x.detach().abs().mean().expand(4)
            return self.linear(x)

    def body(world):
        model = Scales(world.rank)
        wrapped, start = wrap(model, world), model.scale.clone()
        wrapped(torch.full((1, 2), 3.0 + world.rank)).sum().backward()
        return start.tolist(), model.scale.tolist()

    with pytest.warns(UserWarning, match="first: scale"):
        both = rl.simulate(2, body)
    assert both == [([1.0] * 4, [3.5] * 4)] * 2 and rl.simulate(1, body) == [([1.0] * 4, [3.0] * 4)]


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.uint32, torch.int64])
def test_counts_of_any_whole_numbers_become_the_largest(dtype):
    def body(world):
        model = nn.Module()
        model.register_buffer("count", torch.zeros(2, dtype=dtype))
        keeper = BufferKeeper(model, world)
        model.count.copy_(torch.tensor([40_000 if dtype != torch.int16 else 30_000, world.rank]))
        return keeper.average_changed(), model.count.tolist()

    assert rl.simulate(3, body) == [(["count"], [30_000 if dtype == torch.int16 else 40_000, 2])] * 3


def test_optimizers_are_watched_once_however_many_threads_begin_at_once(monkeypatch):
    """Hooks that are there twice would publish each step twice."""
    before, after = dict[int, object](), list[object]()
    monkeypatch.setattr(guards, "_global_optimizer_pre_hooks", before)
    monkeypatch.setattr(guards, "register_optimizer_step_pre_hook",
                        lambda hook: time.sleep(0.02) or before.setdefault(threading.get_ident(), hook))
    monkeypatch.setattr(guards, "register_optimizer_step_post_hook", after.append)
    threads = [threading.Thread(target=guards.watch_optimizers) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [*before.values()] == [guards._before_step] and after == [guards._after_step]
