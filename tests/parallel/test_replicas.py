"""Replicas begin equal or not at all, and their running statistics stay equal."""

import warnings

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.parallel.replicas import BufferKeeper, make_replicas_equal, named_state


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


@pytest.mark.parametrize("told", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_an_embedding_that_depends_on_the_rows_of_one_rank_is_refused_on_several(told):
    """The weights of stage 0 drifted apart, rank by rank, or its gradients were others."""
    make_embedding = lambda: nn.Sequential(nn.Embedding(3, 2, **told), nn.BatchNorm1d(2))
    assert rl.simulate(1, lambda world: make_replicas_equal(make_embedding(), world)) == [[]]
    with pytest.raises(rl.ConfigError, match="0 is an embedding with max_norm or scale_grad_by_freq"):
        rl.simulate(2, lambda world: make_replicas_equal(make_embedding(), world))


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
            mean = lambda t: world.all_reduce(t.clone(), "mean")
            truth.append({name: mean(alone[1].get_buffer(name)) for name in ("running_mean", "running_var")})
        norm = replica.module[1]
        return norm.num_batches_tracked.item(), {n: norm.get_buffer(n) for n in truth[-1]}, truth[-1]

    for count, mine, truth in rl.simulate(3, body):
        assert count == 3
        for name in truth:
            torch.testing.assert_close(mine[name], truth[name], rtol=0, atol=0)


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
