"""Where a call gathers parameters, ranks call the same blocks in the same order, or learn that they have not."""

from zlib import crc32

import pytest
import torch
from torch import nn

import rankloom as rl
from awkward import drawn
from rankloom.base.errors import UnitError
from rankloom.parallel.sections.call_order import Calls
from rankloom.parallel.sections.section import Section

WIDTH = 4


class Branches(nn.Module):
    """Two blocks alike, of which a batch goes through one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=draw))

    def forward(self, x, branch):
        return self.blocks[branch](x)


def batch(branch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(2 * WIDTH, dtype=torch.float64).view(2, WIDTH) / WIDTH + branch, torch.full((2,), branch)


def loss(model, given):
    x, branch = given
    return model(x, int(branch[0])).square().sum(), x.numel()


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def trained(world, steps, **options):
    """steps: for each, the branch of each rank of the data axes"""
    engine = rl.prepare(Branches().double(), loss=loss, optimizer=sgd, world=world, **options)
    for branches in steps:
        engine.step(batch(branches[world.rank]))
    return engine.full_state_dict()["model"]


def expect_right(found, steps):
    model = Branches().double()
    update = sgd(list(model.parameters()))
    for branches in steps:
        update.zero_grad()
        parts = [loss(model, batch(branch)) for branch in branches]
        (sum(total for total, _ in parts) / sum(count for _, count in parts)).backward()
        update.step()
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, rl.Mesh(replicate=2, shard=2)])   # of one replica or more, ranks 0 and 1 differ
def test_ranks_that_call_other_blocks_all_raise_and_nothing_has_changed(ranks):
    def body(world):
        engine = rl.prepare(Branches().double(), loss=loss, optimizer=sgd, world=world, stage=3)
        mine = min(world.rank, 1)
        with pytest.raises(UnitError, match=rf"rank {world.rank}: not all .* the last pass, root, blocks\.{mine}\. .*layerdrop at 0"):
            engine.step(batch(mine))
        engine.step(batch(1))
        return engine.full_state_dict()["model"]

    for found in rl.simulate(ranks, body, backend="gloo"):
        expect_right(found, [(1, 1)])


def test_so_do_those_that_call_them_in_another_micro_batch():
    def body(world):
        engine = rl.prepare(Branches().double(), loss=loss, optimizer=sgd, world=world, stage=3, accumulate=2, ahead=0)
        with pytest.raises(UnitError, match="not all ranks have called the same blocks"):
            engine.step([batch(world.rank), batch(1)])

    rl.simulate(2, body, backend="gloo")


def test_so_do_those_in_a_loop_of_ones_own():
    def body(world):
        model = rl.fully_shard(Branches(), world)
        with pytest.raises(UnitError, match="not all ranks have called the same blocks"):
            model(torch.ones(2, WIDTH), world.rank).sum().backward()

    rl.simulate(2, body, backend="gloo")


@pytest.mark.parametrize("ranks, backend, stage", [(2, "gloo", 2), (2, "rankloom", 3), (rl.Mesh(replicate=2, shard=2), "gloo", 3)])
def test_where_no_call_needs_the_others_ranks_may_have_branches_of_their_own(ranks, backend, stage):
    steps = [(0, 1), (1, 0), (1, 1)] if ranks == 2 else [(0, 0, 1, 1), (1, 1, 0, 0)]   # shards of one replica go together
    for found in rl.simulate(ranks, lambda world: trained(world, steps, stage=stage), backend=backend):
        expect_right(found, steps)


def test_what_ranks_compare_is_a_hash_of_every_gather_and_reduction():
    def body(world):
        seen, found = 0, []

        def noted(plain):
            def call(x, *, label, **more):
                nonlocal seen
                if label != "used parameters, totals":
                    seen = crc32(label.removeprefix("parameters of ").replace("root", "").encode(), seen)
                return plain(x, label=label, **more)

            return call

        for name in ("all_gather", "reduce_scatter"):
            setattr(world, name, noted(getattr(world, name)))
        model = rl.fully_shard(drawn(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))), world, units=lambda name, _: name > "0")
        calls = model._sharding.forward_backward.calls
        end_step = calls.end_step
        calls.end_step = lambda *given, **more: (found.append((calls.order_hash, seen)), end_step(*given, **more))
        for _ in range(2):   # the second time, what comes next is known
            seen = 0
            model(torch.ones(2, WIDTH).double()).sum().backward()
        return found

    for found in rl.simulate(2, body, backend="gloo"):
        assert all(ours == real for ours, real in found) and len(found) == 2


def test_backward_reaches_the_calls_of_a_section_from_the_last_to_the_first():
    a, b = (Section(name, nn.Module(), []) for name in "ab")
    calls = Calls()
    for section in (a, b, a):
        calls.note(section)
    a.pending = 1   # as it is when the backward of its second call begins
    assert calls.before(a, 1) == [b]
    a.pending = 0
    assert calls.before(a, 1) == []


def test_a_section_that_was_gathered_in_vain_is_released_once():
    a, b = (Section(name, nn.Module(), []) for name in "ab")
    calls = Calls(ahead={a: None, b: None})
    assert [calls.take_gathered_in_vain(following) for following in ([b], [b], [])] == [[a], [], [b]]


def test_a_section_that_awaits_more_gradients_stays_among_those_that_are_over_until_it_is_settled():
    a, b = (Section(name, nn.Module(), []) for name in "ab")
    calls = Calls()
    for section in (a, b):
        calls.note(section)
    calls.begin_backward([])
    calls.finish(a, calls.over(a))
    assert calls.over(a) == [b]
    b.settled = True
    calls.finish(a, calls.over(a))
    assert calls.over(a) == []


def test_a_backward_after_that_of_a_loss_which_died_is_inside_of_no_other():
    calls, begun = Calls(), []
    x = torch.ones(1, requires_grad=True) * 2
    x.register_hook(lambda gradient: begun.append(calls.begin_backward([])) or (1 / 0 if len(begun) == 1 else None))
    with pytest.raises(ZeroDivisionError), calls.noting_backward_of(x.sum()) as told:
        told.backward(retain_graph=True)
    x.sum().backward()
    assert begun == [True, True]
