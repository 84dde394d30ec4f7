"""State over slices: whole it is that of one process, and any number of ranks goes on from it."""

from functools import partial

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.base.errors import ConfigError, ModelMismatch
from rankloom.shard.optimizer import ParameterSlice, make_optimizer
from rankloom.shard.optimizer_state import gather_optimizer_state, load_optimizer_state, misfit
from shard.slices import ELEMENTWISE, STEPS, WHOLE, Slices, by_dims, optim, plain_state, train_whole

ALL = {**ELEMENTWISE, **{f"whole {name}": build for name, build in WHOLE.items()}}


def gathered(world: rl.World, build, rank: int | None = None, steps: int = STEPS) -> dict | None:
    mine = Slices(build, world.rank, world.size).train(range(steps))
    return gather_optimizer_state(mine.optimizer, mine.owners, mine.slices, world, rank=rank)


def expect_same_state(mine: dict, expected: dict) -> None:
    assert mine.keys() == expected.keys()
    for name, held in expected.items():
        assert mine[name].keys() == held.keys(), name
        for key, value in held.items():
            if isinstance(value, torch.Tensor):
                found = mine[name][key]
                assert (found.shape, found.dtype, found.device.type) == (value.shape, value.dtype, "cpu"), f"{key} of {name}"
                assert torch.equal(found, value), f"{key} of {name}"
            else:
                assert mine[name][key] == value, f"{key} of {name}"


@pytest.mark.parametrize("name", ALL)
def test_gathered_state_is_that_of_one_process(name):
    expected = plain_state(*train_whole(ALL[name]))
    for ranks in (1, 2, 3, 4):
        for state in rl.simulate(ranks, lambda world: gathered(world, ALL[name])):
            expect_same_state(state["state"], expected)


def test_groups_are_gathered_by_name_with_their_settings():
    params, optimizer = train_whole(by_dims)
    names = {id(p): name for name, p in params.items()}
    expected = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    assert rl.simulate(2, lambda world: gathered(world, by_dims))[1]["param_groups"] == expected


@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_alone_can_get_the_whole(rank):
    found = rl.simulate(3, lambda world: gathered(world, by_dims, rank))
    assert [state is None for state in found] == [at != rank for at in range(3)]
    expect_same_state(found[rank]["state"], plain_state(*train_whole(by_dims)))


def test_each_piece_is_sent_once_to_the_one_rank_that_gets_it():
    def body(world):
        mine = Slices(by_dims, world.rank, world.size).train()
        sent, send = [], world.send
        world.send = lambda x, to, **more: (sent.append((to, x.nbytes)), send(x, to, **more))
        whole = gather_optimizer_state(mine.optimizer, mine.owners, mine.slices, world, rank=1)
        own = sum(value.nbytes for held in mine.optimizer.state.values() for value in held.values() if value.dim())
        return sent, own, whole and sum(value.nbytes for held in whole["state"].values() for value in held.values())

    (first, own_0, _), (none, own_1, whole), (last, own_2, _) = rl.simulate(3, body)
    assert none == [] and {to for to, _ in first + last} == {1}
    counters = whole - own_0 - own_1 - own_2
    assert 0 < counters < 50   # "step" of each parameter, from the first rank that has a slice of it
    assert own_0 <= sum(n for _, n in first) <= own_0 + counters and own_2 <= sum(n for _, n in last) <= own_2 + counters


@pytest.mark.parametrize("rank", [None, 1])
def test_state_is_gathered_over_shared_memory_too(rank):
    found = rl.simulate(3, lambda world: gathered(world, by_dims, rank), backend="rankloom")
    expect_same_state(found[1]["state"], plain_state(*train_whole(by_dims)))


@pytest.mark.parametrize("name", ALL)
def test_any_number_of_ranks_goes_on_from_the_state_of_any_other_number(name):
    expected, _ = train_whole(ALL[name])
    early, _ = train_whole(ALL[name], steps=3)
    for before, after in ((1, 3), (3, 2), (2, 4)):
        saved = rl.simulate(before, lambda world: gathered(world, ALL[name], rank=0, steps=3))[0]
        for rank in range(after):
            mine = Slices(ALL[name], rank, after)
            for owner, owned in ((mine.owners[n], mine.slices[n]) for n in mine.owners):
                owner.data.copy_(owned.cut(early[owned.name].detach()).view(owner.shape))
            load_optimizer_state(mine.optimizer, mine.owners, mine.slices, saved, rank=rank)
            assert not any(mine.slices[n].is_empty for n, owner in mine.owners.items() if owner in mine.optimizer.state)
            mine.train(range(3, STEPS))
            for n, owner in mine.owners.items():
                assert torch.equal(owner.detach().view(-1), mine.slices[n].cut(expected[n].detach())), f"{n} on rank {rank} of {after}"


def test_what_is_loaded_is_a_copy_and_replaces_what_was_there():
    saved = gathered_alone(by_dims)
    mine = Slices(by_dims, 0, 1).train(range(1))
    mine.optimizer.state[mine.owners["unused"]] = {"step": torch.tensor(9.0)}
    load_optimizer_state(mine.optimizer, mine.owners, mine.slices, saved, rank=0)
    assert mine.owners["unused"] not in mine.optimizer.state
    kept = saved["state"]["wide"]["exp_avg"].clone()
    mine.train(range(1))
    assert torch.equal(saved["state"]["wide"]["exp_avg"], kept) and saved["state"]["wide"]["step"] == STEPS


def gathered_alone(build, steps: int = STEPS) -> dict:
    return rl.simulate(1, lambda world: gathered(world, build, steps=steps))[0]


def test_rates_are_taken_over_and_how_to_compute_is_not():
    saved = gathered_alone(lambda p: optim.AdamW(p, lr=0.5, betas=(0.5, 0.75), fused=True))
    saved["param_groups"][0] |= {"capturable": True, "differentiable": True, "betas": [0.5, 0.75]}   # a list, as JSON has it
    mine = Slices(lambda p: optim.AdamW(p, lr=0.1, foreach=True), 0, 1)
    load_optimizer_state(mine.optimizer, mine.owners, mine.slices, saved, rank=0)
    group = mine.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["fused"], group["foreach"]) == (0.5, (0.5, 0.75), None, True)
    assert (group["capturable"], group["differentiable"]) == (False, False)


def test_groups_may_know_more_or_less_than_the_saved_ones():
    """A scheduler leaves notes in them, and versions of torch differ."""
    saved = gathered_alone(by_dims)
    saved["param_groups"][0]["initial_lr"] = torch.tensor(0.5)
    del saved["param_groups"][1]["maximize"]
    mine = Slices(by_dims, 0, 1)
    load_optimizer_state(mine.optimizer, mine.owners, mine.slices, saved, rank=0)
    saved["param_groups"][0]["initial_lr"].zero_()
    assert mine.optimizer.param_groups[0]["initial_lr"] == 0.5 and mine.optimizer.param_groups[1]["maximize"] is False


@pytest.mark.parametrize("how, device, dtype", [
    ({"fused": True}, "meta", torch.float32), ({"capturable": True}, "meta", torch.float32), ({}, "cpu", torch.float64)])
def test_a_counter_is_beside_the_parameter_only_where_a_kernel_reads_it(how, device, dtype):
    owners = {"w": nn.Parameter(torch.zeros(6, device="meta"))}
    optimizer = make_optimizer(lambda p: optim.AdamW(p, **how), owners)
    state = {"w": {"step": torch.tensor(3.0, dtype=torch.float64), "exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.ones(2, 3)}}
    saved = {"state": state, "param_groups": [{"params": ["w"], "lr": 0.5}]}
    load_optimizer_state(optimizer, owners, {"w": ParameterSlice("w", torch.Size([2, 3]), 0, 6)}, saved, rank=0)
    held = optimizer.state[owners["w"]]
    assert (held["step"].device.type, held["step"].dtype) == (device, dtype)
    assert held["exp_avg"].device.type == "meta" and held["exp_avg"].shape == (6,)


def test_state_of_matrices_is_held_to_their_shapes_and_state_of_any_other_shape_is_let_be():
    saved = gathered_alone(WHOLE["muon"])
    saved["state"]["wide"]["momentum_buffer"] = torch.zeros(23, 9)
    mine = Slices(WHOLE["muon"], 0, 1)
    assert "momentum_buffer of wide has shape (23, 9), expected (9, 23)" in misfit(mine.optimizer, mine.owners, mine.slices, saved)
    other = Slices(WHOLE["adafactor"], 0, 1)
    assert misfit(other.optimizer, other.owners, other.slices, gathered_alone(WHOLE["adafactor"])) is None


def test_state_of_torchs_own_takes_the_dtype_of_the_parameter_and_that_of_others_keeps_its_own():
    class Wide(optim.SGD):
        elementwise = True

    saved = gathered_alone(ELEMENTWISE["sgd nesterov"])
    for build, dtype in ((ELEMENTWISE["sgd nesterov"], torch.float64), (lambda p: Wide(p, nesterov=True, momentum=0.9), torch.float32)):
        mine = Slices(build, 0, 1, torch.float64)
        load_optimizer_state(mine.optimizer, mine.owners, mine.slices, saved, rank=0)
        assert {held["momentum_buffer"].dtype for held in mine.optimizer.state.values()} == {dtype}
    assert Slices(ELEMENTWISE["adamw"], 0, 1, torch.float64).train().optimizer.param_groups   # and goes on


@pytest.mark.parametrize("spoil, said", [
    (lambda s: s.pop("state"), r"rank 3: the saved optimizer has the keys \['param_groups'\], expected 'state' and 'param_groups'"),
    (lambda s: s["param_groups"].pop(), "rank 3: the saved optimizer has 1 parameter groups, expected 2"),
    (lambda s: s["param_groups"][0]["params"].append("wider"), "rank 3: parameter group 0 .* has 'wider'.*another model.*mean 'wide'"),
    (lambda s: s["param_groups"][1]["params"].remove("pair"), "rank 3: parameter group 1 has 'pair', the saved one's does not"),
    (lambda s: s["state"].update(tail={}), "rank 3: there is saved optimizer state of 'tail'.*Did you mean 'tall'"),
    (lambda s: s["state"]["wide"].update(exp_avg=torch.zeros(23, 9)), r"exp_avg of wide has shape \(23, 9\), expected \(9, 23\)"),
    (lambda s: s["state"]["pair"].update(exp_avg_sq=torch.zeros(3)), r"rank 3: .*exp_avg_sq of pair has shape \(3,\), expected \(2,\)"),
    (lambda s: s["param_groups"][0].update(nesterov=s["param_groups"][0].pop("betas")), "has nesterov where this one has betas"),
    (lambda s: s["param_groups"][1].update(params=[1, 2]), r"rank 3: the saved optimizer has numbers \(1 first\) in place of .*names\[i\]"),
], ids=["keys", "groups", "more", "fewer", "unknown", "shape", "shape elsewhere", "kind", "numbers"])
def test_the_state_of_another_model_is_refused_and_changes_nothing(spoil, said):
    saved = gathered_alone(by_dims)
    spoil(saved)
    saved["param_groups"][0]["lr"] = 7.0
    mine = Slices(by_dims, 3, 4).train(range(2))
    assert mine.slices["pair"].is_empty
    before = {id(p): {k: v.clone() for k, v in held.items()} for p, held in mine.optimizer.state.items()}
    with pytest.raises(ModelMismatch, match=said):
        load_optimizer_state(mine.optimizer, mine.owners, mine.slices, saved, rank=3)
    assert mine.optimizer.param_groups[0]["lr"] == 0.1
    assert all(torch.equal(v, before[id(p)][k]) for p, held in mine.optimizer.state.items() for k, v in held.items())


def test_state_that_a_rank_has_lost_or_has_otherwise_is_told_on_all_ranks():
    def body(world):
        mine = Slices(by_dims, world.rank, world.size).train()
        gather = lambda: gather_optimizer_state(mine.optimizer, mine.owners, mine.slices, world)
        if world.rank == 1:
            mine.optimizer.state[mine.owners["wide"]]["exp_avg"] = mine.optimizer.state[mine.owners["wide"]]["exp_avg"].double()
        with pytest.raises(ModelMismatch, match=r"rank 1: .* wide is .*exp_avg \(float64\).*, but on rank 0 it is .*exp_avg \(float32\)"):
            gather()
        if world.rank == 1:
            del mine.optimizer.state[mine.owners["wide"]]["exp_avg"]
        with pytest.raises(ModelMismatch, match=r"rank 1: the optimizer state of wide is .*, but on rank 0 it is .*exp_avg \(float32\)"):
            gather()
        if world.rank == 1:
            del mine.optimizer.state[mine.owners["wide"]]
        with pytest.raises(ModelMismatch, match=r"have optimizer state for \d+ elements of wide, expected all 207"):
            gather()
        return True

    shared = [not Slices(by_dims, rank, 4).slices["wide"].is_empty for rank in range(4)]
    assert shared[:2] == [True, True]
    assert all(rl.simulate(4, body))


def test_state_of_a_kind_that_cannot_be_sent_is_told_on_all_ranks():
    def body(world):
        mine = Slices(by_dims, world.rank, world.size).train()
        if world.rank == 1:
            mine.optimizer.state[mine.owners["tall"]]["history"] = [1, 2]
        with pytest.raises((ConfigError, ModelMismatch), match="history"):
            gather_optimizer_state(mine.optimizer, mine.owners, mine.slices, world, rank=0)
        return True

    assert all(rl.simulate(2, body))


def one_parameter(world: rl.World, shape: tuple[int, ...], start: int, stop: int, held: dict) -> dict:
    """A parameter "w" of which this rank has [start, stop), with this state; the whole state of it."""
    owners = {"w": nn.Parameter(torch.zeros(stop - start))}
    optimizer = make_optimizer(optim.SGD, owners)
    optimizer.state[owners["w"]] = held
    return gather_optimizer_state(optimizer, owners, {"w": ParameterSlice("w", torch.Size(shape), start, stop)}, world)["state"]["w"]


def test_lists_that_an_optimizer_keeps_in_its_groups_are_copied_out_and_in():
    """What it wrote to one later was in the state as well, and in other optimizers that had loaded that."""
    saved = gathered_alone(by_dims)
    saved["param_groups"][0]["seen"] = [1.0, {"at": torch.zeros(1)}]
    several = [Slices(by_dims, 0, 1) for _ in range(2)]
    for mine in several:
        load_optimizer_state(mine.optimizer, mine.owners, mine.slices, saved, rank=0)
    one, other = (mine.optimizer.param_groups[0]["seen"] for mine in several)
    again = rl.simulate(1, lambda world: gather_optimizer_state(several[0].optimizer, several[0].owners, several[0].slices, world))[0]
    one.append(2.0)
    one[1]["at"] += 1
    assert other == saved["param_groups"][0]["seen"] == again["param_groups"][0]["seen"] == [1.0, {"at": torch.zeros(1)}]


def test_state_of_which_two_ranks_hold_the_same_is_told_on_all_ranks():
    """As where the group has also the ranks that hold copies."""
    def body(world):
        with pytest.raises(ModelMismatch, match="ranks 0, 1 have optimizer state for 8 elements of w, expected all 4; .* cut over another"):
            one_parameter(world, (4,), 0, 4, {"sum": torch.ones(4)})

    rl.simulate(2, body)


def test_values_of_any_kind_and_dtype_come_through():
    values = {"flag": True, "rate": 0.1, "name": "x", "nothing": None, "bits": torch.tensor([True, False, True]),
              "half": torch.tensor([1.0, -2.0, 3.5], dtype=torch.bfloat16), "eight": torch.tensor([1.0, 2.0, 4.0]).to(torch.float8_e4m3fn),
              "count": torch.tensor(7), "rows": torch.arange(4.0).view(2, 2), "empty": torch.zeros(0)}
    for found in rl.simulate(2, lambda world: one_parameter(world, (2, 3), 3 * world.rank, 3 * world.rank + 3, dict(values))):
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                expected = torch.stack((value, value)) if value.shape == (3,) else value
                assert found[key].dtype == value.dtype and torch.equal(found[key].float(), expected.float()), key
            else:
                assert found[key] == value and type(found[key]) is type(value), key


def test_one_number_for_a_whole_tensor_comes_from_the_first_rank_that_has_a_piece():
    """Also where the last rank's slice has as many elements as the number has."""
    cuts = (0, 0, 3, 4)   # rank 0 has nothing, and remembers something outdated

    def body(world):
        start, stop = cuts[world.rank], cuts[world.rank + 1]
        return one_parameter(world, (4,), start, stop, {"step": torch.tensor(float(world.rank)), "rate": torch.tensor([float(world.rank)]),
                                                        "moment": torch.arange(4.0)[start:stop]})

    for found in rl.simulate(3, body):
        assert found["step"] == 1.0 and found["rate"].tolist() == [1.0] and found["moment"].tolist() == [0, 1, 2, 3]


def test_a_counter_of_a_parameter_without_dims_stays_without_dims():
    for build in (ELEMENTWISE["nadam"], lambda p: optim.NAdam([q for q in p if q.ndim == 0])):
        mine = Slices(build, 0, 1)
        load_optimizer_state(mine.optimizer, mine.owners, mine.slices, gathered_alone(build), rank=0)
        held = mine.optimizer.state[mine.owners["scale"]]
        assert held["exp_avg"].shape == mine.owners["scale"].shape == (1,) and held["step"].shape == ()


def test_state_that_is_there_from_the_start_is_gathered_of_one_element_too():
    def body(world):
        build = partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.5)
        model = nn.Linear(1, 1)
        for param in model.parameters():
            nn.init.zeros_(param)
        engine = rl.prepare(model, loss=lambda model, x: (model(x).sum(), len(x)), optimizer=build, world=world, stage=1)
        return {name: held["sum"].tolist() for name, held in engine.full_state_dict()["optimizer"]["state"].items()}

    assert rl.simulate(2, body) == [{"weight": [[0.5]], "bias": [0.5]}] * 2
