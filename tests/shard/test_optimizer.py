"""An optimizer over slices updates each element to the very bits of the optimizer over whole parameters."""

import pytest
import torch
from torch import nn

from rankloom.base.errors import ConfigError
from rankloom.shard.optimizer import (
    Optimizers,
    ParameterSlice,
    give_owners,
    is_elementwise,
    make_optimizer,
    needs_whole_matrices,
    stand_in,
)
from shard.slices import ELEMENTWISE, SHAPES, STEPS, WHOLE, RowNorm, Slices, by_dims, draw, gradients, muon_and_adamw, optim, train_whole


def expect_pieces_of_the_whole(build, ranks, dtype=torch.float32):
    expected, _ = train_whole(build, dtype)
    for rank in range(ranks):
        mine = Slices(build, rank, ranks, dtype).train()
        for name, owner in mine.owners.items():
            assert torch.equal(owner.detach().view(-1), mine.slices[name].cut(expected[name].detach())), f"{name} on rank {rank}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_slices_are_updated_to_the_bits_of_the_whole(name, dtype):
    for ranks in (1, 2, 3, 4):
        expect_pieces_of_the_whole(ELEMENTWISE[name], ranks, dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_tensors_given_to_ranks_in_turn_are_updated_to_the_bits_of_one_process(name, ranks):
    expect_pieces_of_the_whole(WHOLE[name], ranks)


def test_these_tests_cut_parameters_and_leave_ranks_without():
    """Otherwise they would prove nothing."""
    slices = [Slices(by_dims, rank, 3).slices for rank in range(3)]
    assert any(not p.is_whole and not p.is_empty for p in slices[1].values())
    assert [p["pair"].is_empty for p in slices].count(True) == 2
    assert {name for name, p in Slices(muon_and_adamw, 0, 3).slices.items() if not p.is_empty} < SHAPES.keys()


def test_the_users_function_sees_the_plain_shapes_flags_and_attributes_and_no_memory():
    plain = nn.Parameter(torch.ones(1000, 1000), requires_grad=False)
    plain.no_decay = True
    stood = stand_in(plain, torch.float64)
    assert (stood.shape, stood.dtype, stood.requires_grad, stood.no_decay) == (plain.shape, torch.float64, False, True)
    assert isinstance(stood, nn.Parameter) and stood.untyped_storage().nbytes() == 8
    assert stood[3, 4].isnan()   # values are not known here, and whoever computes with them sees that


def test_groups_and_settings_are_those_that_the_user_made():
    mine = Slices(by_dims, 1, 2)
    decayed, others = mine.optimizer.param_groups
    names = {id(owner): name for name, owner in mine.owners.items()}
    assert {names[id(p)] for p in decayed["params"]} == {name for name, shape in SHAPES.items() if len(shape) >= 2}
    assert {names[id(p)] for p in others["params"]} == {"bias", "pair", "scale"}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)


def test_state_made_at_the_start_is_cut_to_the_piece():
    mine = next(p for p in (Slices(ELEMENTWISE["adagrad"], rank, 2) for rank in range(2)) if not p.slices["scale"].is_empty)
    assert {id(p) for p in mine.optimizer.state} == {id(mine.owners[name]) for name, owned in mine.slices.items() if not owned.is_empty}
    for owner, held in mine.optimizer.state.items():
        assert held["sum"].shape == owner.shape and held["step"].shape == ()
        assert held["sum"].untyped_storage().nbytes() == held["sum"].nbytes, "the whole is still in memory"


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", {**ELEMENTWISE, **WHOLE})
def test_a_plain_optimizers_state_that_is_loaded_is_cut_to_the_pieces_and_goes_on_alike(name, ranks):
    """Fused kernels look at no shapes: whole moments beside a slice were read at the wrong elements, without a word."""
    build = {**ELEMENTWISE, **WHOLE}[name]
    _, plain = train_whole(build, steps=2)
    expected, _ = train_whole(build)
    before, _ = train_whole(build, steps=2)
    for rank in range(ranks):
        mine = Slices(build, rank, ranks)
        with torch.no_grad():
            for at, owner in mine.owners.items():
                owner.copy_(mine.slices[at].cut(before[at]).view(owner.shape))
        mine.optimizer.load_state_dict(plain.state_dict())
        mine.optimizer.load_state_dict(mine.optimizer.state_dict())   # what is cut already stays so
        mine.train(range(2, STEPS))
        for at, owner in mine.owners.items():
            assert torch.equal(owner.detach().view(-1), mine.slices[at].cut(expected[at].detach())), f"{at} on rank {rank}"


def test_what_a_loaded_state_holds_for_no_parameter_is_kept():
    mine = Slices(ELEMENTWISE["sgd nesterov"], 1, 2)
    _, plain = train_whole(ELEMENTWISE["sgd nesterov"], steps=1)
    loaded = plain.state_dict()
    mine.optimizer.load_state_dict(loaded | {"state": loaded["state"] | {"for all": 7}})
    assert mine.optimizer.state["for all"] == 7


def test_a_state_that_is_neither_whole_nor_this_ranks_piece_is_refused():
    others, mine = Slices(by_dims, 0, 2).train().optimizer.state_dict(), Slices(by_dims, 1, 3)
    with pytest.raises(ConfigError, match=r"state 'exp_avg' of wide has the shape \[207\], expected \[9, 23\].*\.load_full_state_dict"):
        mine.optimizer.load_state_dict(others)
    assert not mine.optimizer.state


def test_a_rank_remembers_nothing_of_what_it_does_not_own():
    for name in ("adamw fused", "adagrad", "sgd nesterov"):
        mine = Slices(ELEMENTWISE[name], 2, 3).train()
        empty = {id(mine.owners[n]) for n, owned in mine.slices.items() if owned.is_empty}
        assert empty and not empty & {id(p) for p in mine.optimizer.state}


@pytest.mark.parametrize("name", {**ELEMENTWISE, **WHOLE})
def test_a_rank_that_owns_nothing_at_all_steps_too(name):
    stand_ins = {name: stand_in(nn.Parameter(torch.zeros(shape))) for name, shape in {"w": (2, 3), "b": (2,)}.items()}
    optimizer = make_optimizer({**ELEMENTWISE, **WHOLE}[name], stand_ins)
    owners = {name: nn.Parameter(torch.zeros(0)) for name in stand_ins}
    give_owners(optimizer, stand_ins, owners, {name: ParameterSlice(name, p.shape, 0, 0) for name, p in stand_ins.items()})
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.state == {}


def test_elementwise_is_known_of_torchs_own_and_asked_of_others():
    param = [nn.Parameter(torch.zeros(2, 2))]
    assert all(is_elementwise(make_optimizer(build, {"w": param[0]})) for name, build in ELEMENTWISE.items() if name != "sgd and adamw")
    assert not any(map(is_elementwise, (optim.Muon(param), optim.Adafactor(param), RowNorm(param))))

    class Whole(torch.optim.AdamW):
        elementwise = False

    class Lars(torch.optim.SGD):
        def step(self, closure=None):
            """Rates by the norms of whole tensors."""

    class Tagged(torch.optim.Adam):
        def tag(self):
            """Adds something, and steps as Adam does."""

    class Clipped(torch.optim.Adam):
        elementwise = True

        def step(self, closure=None):
            """The user knows."""

    assert not is_elementwise(Whole(param)) and not is_elementwise(Lars(param))
    assert is_elementwise(Tagged(param)) and is_elementwise(Clipped(param))


def test_only_the_tensors_of_the_optimizer_that_needs_them_are_whole():
    params = {name: nn.Parameter(value) for name, value in draw(0).items()}
    assert needs_whole_matrices(make_optimizer(muon_and_adamw, params), params) == {"wide", "tall", "unused"}
    assert needs_whole_matrices(make_optimizer(by_dims, params), params) == set()


@pytest.mark.parametrize("hooks", ["register_step_pre_hook", "register_step_post_hook"])
def test_tensors_of_an_optimizer_with_hooks_are_whole_unless_it_says_that_they_need_not_be(hooks):
    params = {name: nn.Parameter(value) for name, value in draw(0).items()}
    hooked = optim.AdamW(params.values())
    getattr(hooked, hooks)(lambda *_: None)
    assert needs_whole_matrices(hooked, params) == params.keys()
    hooked.elementwise = True
    assert needs_whole_matrices(hooked, params) == set()


def test_a_cut_tensor_is_not_given_to_an_optimizer_that_needs_it_whole():
    stand_ins = {"w": stand_in(torch.zeros(4, 4))}
    optimizer = make_optimizer(optim.Muon, stand_ins)
    with pytest.raises(AssertionError, match="w is cut, but its optimizer needs it whole"):
        give_owners(optimizer, stand_ins, {"w": nn.Parameter(torch.zeros(8))}, {"w": ParameterSlice("w", torch.Size([4, 4]), 0, 8)})


# ------------------------------------------------------------------ several optimizers as one


def two() -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))


def test_several_optimizers_have_live_groups_one_state_and_step_together():
    vector, matrix = two()
    both = make_optimizer(lambda p: [optim.SGD(p[:1], lr=1.0, momentum=0.5), optim.SGD(p[1:], lr=1.0)], {"v": vector, "m": matrix})
    assert isinstance(both, Optimizers) and len(both.param_groups) == 2
    both.param_groups[1]["lr"] = 0.25
    for p in (vector, matrix):
        p.grad = torch.ones_like(p)
    both.step()
    assert vector.tolist() == [0.0] * 3 and matrix.tolist() == [[0.75] * 2] * 2
    assert set(both.state[vector]) == {"momentum_buffer"}
    both.zero_grad(set_to_none=False)
    assert not vector.grad.any() and not matrix.grad.any()
    both.zero_grad()
    assert vector.grad is None and matrix.grad is None
    assert make_optimizer(lambda p: [optim.SGD(p)], {"v": vector}).param_groups[0]["params"] == [vector]


@pytest.mark.parametrize(("states", "given"), [([], "a list of 0"), ([{}] * 3, "a list of 3"), ({"state": {}}, "a dict")])
def test_several_optimizers_take_one_state_each(states, given):
    vector, matrix = two()
    both = make_optimizer(lambda p: [optim.SGD([q], lr=1.0) for q in p], {"v": vector, "m": matrix})
    with pytest.raises(ConfigError, match=f"the state of 2 optimizers was given as {given}; expected a list of one for each"):
        both.load_state_dict(states)


def test_a_factor_for_the_gradients_is_handed_to_all_parts_if_all_take_it():
    vector, matrix = two()
    fused = make_optimizer(lambda p: [optim.SGD([q], lr=1.0, fused=True) for q in p], {"v": vector, "m": matrix})
    assert fused._step_supports_amp_scaling
    vector.grad, matrix.grad = torch.full((3,), 8.0), torch.full((2, 2), 8.0)
    fused.grad_scale, fused.found_inf = torch.tensor(16.0), torch.tensor(0.0)
    fused.step()
    assert vector.tolist() == [0.5] * 3 and matrix.tolist() == [[0.5] * 2] * 2
    fused.found_inf = torch.tensor(1.0)
    fused.step()
    assert vector.tolist() == [0.5] * 3
    mixed = make_optimizer(lambda p: [optim.SGD(p[:1], lr=1.0, fused=True), optim.SGD(p[1:], lr=1.0)], {"v": vector, "m": matrix})
    assert not mixed._step_supports_amp_scaling


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize("build, said", [
    (optim.SGD([nn.Parameter(torch.zeros(1))]), "must be a function of the parameters"),
    (None, "must be a function of the parameters"),
    (lambda p: None, "returned None, expected a torch optimizer or a list"),
    (lambda p: [], r"returned \[\], expected a torch optimizer or a list"),
    (lambda p: [optim.SGD(p), "adam"], "expected a torch optimizer or a list"),
    (lambda p: optim.SGD([nn.Parameter(torch.zeros(1))]), "updates tensors that it was not given"),
    (lambda p: [optim.SGD(p), optim.SGD(p[1:])], "^m: updated by more than one optimizer"),
    (lambda p: optim.LBFGS(p), "LBFGS evaluates the loss many times"),
    (lambda p: [optim.LBFGS(p[:1]), optim.SGD(p[1:])], "LBFGS evaluates the loss many times"),
    (lambda p: torch.optim.Optimizer(p, {}), "^Optimizer has a group of parameters without a learning rate"),
], ids=["optimizer", "none", "nothing", "no parts", "odd part", "other tensors", "twice", "lbfgs", "lbfgs in a list", "no rate"])
def test_what_is_no_optimizer_of_these_parameters_is_refused(build, said):
    vector, matrix = two()
    with pytest.raises(ConfigError, match=said):
        make_optimizer(build, {"v": vector, "m": matrix})


def test_gradients_reach_all_elements_once():
    """The training that these tests compare with is not vacuous."""
    before, (after, _) = draw(0), train_whole(by_dims)
    assert all(not torch.equal(before[name], after[name]) for name in gradients(0)) and torch.equal(before["unused"], after["unused"])
