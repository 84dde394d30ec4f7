"""The table of all-reduce algorithms, how a program adds its own, and whom "auto" takes."""

import typing
from types import SimpleNamespace

import pytest
import torch

import rankloom as rl
from rankloom.base.topology import GPU_LINKS, Link, Links, Topology
from rankloom.comm import choose
from rankloom.comm.choose import all_reduce_named, auto_all_reduce, decide, describe_decisions, in_two_levels
from rankloom.train.run.schema import Comm

NAMES = ["backend", "auto", "naive", "tree", "double_tree", "ring", "halving", "hierarchical"]
NO_BACKEND = Link(1e6, 1e-3)   # so slow that one of ours wins
OURS = Links(backend=NO_BACKEND)
SLOW_BETWEEN = Links(inside=Link(20.0, 80.0), host=Link(1.0, 400.0), between=Link(100.0, 1.0), backend_between=NO_BACKEND)


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(choose, "_ALL_REDUCES", dict(choose._ALL_REDUCES))


def test_backend_means_the_backends_own_and_ring_means_the_ring():
    assert all_reduce_named("backend") is None
    assert all_reduce_named("ring") is rl.ring_all_reduce


def test_a_config_file_knows_every_name_that_there_is():
    assert list(typing.get_args(Comm.model_fields["all_reduce"].annotation)) == NAMES
    assert set(choose._ALL_REDUCES) == set(NAMES)


def test_a_registered_algorithm_is_found_by_its_name(table):
    rl.register_all_reduce("mine", lambda x, group: x.mul_(group))
    assert all_reduce_named("mine")(x := torch.ones(1), 3) is x and x.item() == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_taken_name_is_refused(table, name):
    with pytest.raises(rl.ConfigError, match=f"already an all-reduce named '{name}'"):
        rl.register_all_reduce(name, lambda x, group: x)


def test_an_unknown_name_is_answered_with_the_nearest_known_one():
    with pytest.raises(rl.ConfigError, match=r"no all-reduce 'rign'. Did you mean 'ring'"):
        all_reduce_named("rign")


# ------------------------------------------------------------------ decisions


@pytest.mark.parametrize(("nbytes", "topology", "winner", "reason"), [
    (1 << 10, Topology.even(1, 8, OURS), "tree", "latency"),           # few messages win small
    (1 << 26, Topology.even(1, 8, OURS), "halving", "bandwidth"),      # few bytes win large, and in fewer steps than the ring
    (1 << 26, Topology.even(1, 7, OURS), "ring", "bandwidth"),         # halving pays for its guests
    (1 << 10, Topology.even(1, 5, Links(inside=Link(50.0, 20.0), host=Link(0.0, 1e6), backend=NO_BACKEND)), "halving", "latency"),
    (1 << 26, Topology.even(1, 2, OURS), "ring", "bandwidth"),
    (1 << 10, Topology.even(1, 8, Links(backend=Link(1.0, 80.0))), "backend", "latency"),
    (1 << 28, Topology.even(2, 8, SLOW_BETWEEN), "hierarchical", "bandwidth"),
    (1 << 10, Topology.even(2, 8, SLOW_BETWEEN), "hierarchical", "latency"),
    (1 << 28, Topology(((0, 1, 2), (3, 4), (5,)), SLOW_BETWEEN), "hierarchical", "bandwidth"),
    (1 << 28, Topology.even(4, 1, SLOW_BETWEEN), "halving", "bandwidth"),
])
def test_the_cheapest_wins_and_says_which_term_decides(nbytes, topology, winner, reason):
    decision = decide(nbytes, topology)
    assert (decision.winner.name, decision.winner.price.reason.split()[0]) == (winner, reason), str(decision)


def test_a_decision_holds_every_candidate_with_its_price_the_cheapest_first():
    decision = decide(1 << 20, Topology.even(2, 2))
    prices = [one.price.seconds for one in decision.candidates]
    assert {one.name for one in decision.candidates} == set(NAMES) - {"auto"}
    assert prices == sorted(prices) and all(seconds > 0 for seconds in prices)
    assert str(decision).startswith(f"1 MiB: {decision.winner.name}: ")
    assert all(f"{one.name}: " in str(decision) and one.price.reason in str(decision) for one in decision.candidates)


def test_hierarchical_is_no_candidate_on_one_level():
    for flat in (Topology.even(1, 4), Topology.even(4, 1)):
        assert "hierarchical" not in [one.name for one in decide(1 << 20, flat).candidates]


def test_16_bits_may_decide_otherwise():
    """Partial sums travel in 32 bits: bytes weigh more, so latency decides up to a smaller size."""
    topology = Topology.even(1, 8, OURS)
    largest = [max(n for n in (1 << k for k in range(10, 30)) if decide(n, topology, wide=wide).winner.name == "tree") for wide in (1, 2)]
    assert largest[1] < largest[0]


def test_all_decisions_are_told_in_a_line():
    line = describe_decisions(Topology.even(1, 8, OURS))
    assert line.startswith("tree up to ") and line.endswith(", halving above")
    assert describe_decisions(Topology.even(1, 8, Links(backend=Link(0.0, 1e6)))) == "backend at any size"


@pytest.mark.parametrize("p", [2, 4, 8, 64])
def test_until_something_is_measured_the_backend_is_taken_on_one_node_and_on_gpus(p):
    assert describe_decisions(Topology.even(1, p)) == "backend at any size"
    assert describe_decisions(Topology.even(1, p, GPU_LINKS)) == "backend at any size"
    assert decide(1 << 26, Topology.even(4, p, GPU_LINKS)).winner.name == "backend"


# ------------------------------------------------------------------ on ranks


def summed(name, x, group):
    algorithm = all_reduce_named(name)
    return group.all_reduce(x) if algorithm is None else algorithm(x, group)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nodes", [((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2), (3,)), ((0,), (1,), (2,), (3,))])
def test_every_name_sums_on_every_topology(name, nodes):
    mine = lambda world: torch.arange(101, dtype=torch.float64) + 1000 * world.rank
    for total in rl.simulate(4, lambda world: summed(name, mine(world), world), topology=Topology(nodes)):
        assert torch.equal(total, 4 * torch.arange(101, dtype=torch.float64) + 6000)


@pytest.mark.gloo
def test_auto_passes_over_what_needs_tags_where_they_mean_nothing(one_queue, monkeypatch):
    ranking = [SimpleNamespace(name=name) for name in ("double_tree", "ring")]
    monkeypatch.setattr(choose, "decide", lambda *size, **how: SimpleNamespace(candidates=ranking))
    assert rl.simulate(3, lambda world: auto_all_reduce(torch.ones(4), world).tolist()) == [[3.0] * 4] * 3


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_auto_takes_another_algorithm_for_another_size_and_all_ranks_the_same(p, monkeypatch):
    taken: list[list[str]] = [[] for _ in range(p)]

    def noted(name):
        return lambda x, group: taken[group.rank].append(name) or summed(name, x, group)

    monkeypatch.setattr(choose, "all_reduce_named", noted)

    def body(world):
        return [auto_all_reduce(torch.ones(n), world)[0].item() for n in (4, 1 << 20)]

    assert rl.simulate(p, body, topology=Topology.even(1, p, OURS)) == [[p, p]] * p
    if p > 1:   # one rank alone may take anything
        assert all(names == taken[0] for names in taken)
        assert taken[0] == [decide(n, Topology.even(1, p, OURS)).winner.name for n in (16, 4 << 20)]
    if p == 5:
        assert taken[0][0] != taken[0][1]


def test_auto_counts_the_wider_partial_sums_of_16_bits(monkeypatch):
    topology = Topology.even(1, 8, OURS)
    nbytes = next(n for n in (1 << k for k in range(10, 30)) if len({decide(n, topology, wide=wide).winner.name for wide in (1, 2)}) == 2)
    taken = []
    monkeypatch.setattr(choose, "all_reduce_named", lambda name: taken.append(name) or (lambda x, group: x))
    rl.simulate(8, lambda world: auto_all_reduce(torch.zeros(nbytes // 2, dtype=torch.bfloat16), world), topology=topology)
    assert taken == [decide(nbytes, topology, wide=2).winner.name] * 8


def test_in_two_levels_any_all_reduce_goes_between_nodes_and_only_there():
    def body(world):
        sizes = []

        def between(x, group):
            sizes.append((group.size, x.numel()))
            return rl.ring_all_reduce(x, group)

        return in_two_levels(between)(torch.ones(100), world).sum().item(), sizes

    assert rl.simulate(4, body, topology=Topology.even(2, 2)) == [(400.0, [(2, 50)])] * 4


def gradients(world, name):
    linear = torch.nn.Linear(30, 7)
    torch.nn.init.ones_(linear.weight)   # ranks are threads here, which share torch's random stream
    torch.nn.init.zeros_(linear.bias)
    model = rl.data_parallel(linear, world, all_reduce=name)
    model(torch.full((3, 30), float(world.rank))).sum().backward()
    return model.module.weight.grad, model.module.bias.grad


@pytest.mark.parametrize("name", NAMES)
def test_training_takes_any_name_on_any_topology(name):
    for weight, bias in rl.simulate(4, lambda world: gradients(world, name), topology=Topology.even(2, 2)):
        assert torch.equal(weight, torch.full((7, 30), 3 * 1.5)) and torch.equal(bias, torch.full((7,), 3.0))


@pytest.mark.parametrize("way", ["in place", "in place, nothing returned", "returned"])
def test_a_registered_all_reduce_may_sum_in_place_or_return_the_sum(table, way):
    def mine(x, group):
        total = group.all_reduce(x if "in place" in way else x.clone())
        return None if "nothing" in way else total

    rl.register_all_reduce(f"mine, {way}", mine)

    def body(world):
        model = rl.data_parallel(torch.nn.Linear(3, 1), world, all_reduce=f"mine, {way}")
        model(torch.full((1, 3), world.rank + 1.0)).sum().backward()
        return model.module.weight.grad.tolist()

    assert rl.simulate(2, body) == [[[1.5] * 3]] * 2


@pytest.mark.parametrize(("result", "told"), [
    (lambda x: x[:2], r"\(2,\) of torch.float32"), (torch.Tensor.half, r"\(\d+,\) of torch.float16"), (torch.Tensor.tolist, "a list")],
    ids=["short", "narrow", "list"])
def test_a_registered_all_reduce_that_returns_no_sum_is_an_error(table, result, told):
    rl.register_all_reduce("other", lambda x, group: result(x))

    def body(world):
        model = rl.data_parallel(torch.nn.Linear(3, 1), world, all_reduce="other")
        with pytest.raises(rl.ShapeMismatch, match=rf"other in group 'world': the registered all-reduce returned {told}, expected the sum"):
            model(torch.ones(1, 3)).sum().backward()
        return True

    assert rl.simulate(2, body) == [True] * 2


@pytest.mark.parametrize("wrapped", ["data_parallel", "prepare"])
def test_after_a_registered_all_reduce_has_raised_on_all_ranks_training_goes_on_and_the_error_comes_once(table, wrapped):
    def fails_at_first(x, group):
        if failing[group.rank]:
            raise ValueError("not yet")
        return rl.ring_all_reduce(x, group)

    rl.register_all_reduce("fails at first", fails_at_first)
    failing = [True] * 2

    def body(world):
        model, rows = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 1)), torch.full((2, 30), world.rank + 1.0)
        for param in model.parameters():
            torch.nn.init.ones_(param)
        if wrapped == "prepare":
            engine = rl.prepare(model, loss=lambda model, x: (model(x).sum(), len(x)), world=world, all_reduce="fails at first",
                                optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
            engine.placement._reducer._bucket_bytes = 1   # four buckets, which all fail
            step = lambda: engine.step(rows)
        else:
            ddp = rl.data_parallel(model, world, all_reduce="fails at first", bucket_bytes=1)
            step = lambda: ddp(rows).sum().backward()
        with pytest.raises(ValueError, match="not yet"):
            step()
        failing[world.rank] = False
        step()
        return model[1].weight.grad.sum().item()

    hidden = sum(30 * (30 * (rank + 1.0) + 1) for rank in range(2))   # of one row of each rank
    assert rl.simulate(2, body) == [hidden / 2 if wrapped == "prepare" else hidden] * 2   # the mean of 4 rows; of 2 ranks' sums of 2 rows


@pytest.mark.parametrize(("name", "algorithm"), [("x", None), ("", lambda x, group: x), (3, lambda x, group: x)],
                         ids=["None", "empty", "3"])
def test_what_is_no_name_or_no_function_is_not_registered(table, name, algorithm):
    with pytest.raises(rl.ConfigError, match="register_all_reduce"):
        rl.register_all_reduce(name, algorithm)
