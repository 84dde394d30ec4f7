"""Moves between layouts carry out what the table derives, cost what it says, and have the adjoint as gradient."""

import pytest
import torch
from torch import nn

import rankloom as rl
from rankloom.base.errors import ConfigError, ShapeMismatch
from rankloom.base.layout import collective, conjugate
from rankloom.parallel.tensor.moves import AXIS, BY_TOKENS, BY_WIDTH, GRAD_PARTIAL, PARTIAL, WHOLE, Entrance, claim, redistribute

LAYOUTS = [WHOLE, GRAD_PARTIAL, PARTIAL, BY_TOKENS, BY_WIDTH]
NAMES = ["whole", "grad_partial", "partial", "tokens", "width"]
RANKS = [1, 2, 3, 4]


def possible(src, dst) -> bool:
    try:
        return collective(src, dst, AXIS) is not None
    except ConfigError:
        return False


STEPS = [pytest.param(src, dst, id=f"{a}-{b}") for src, a in zip(LAYOUTS, NAMES) for dst, b in zip(LAYOUTS, NAMES) if possible(src, dst)]


def spread(whole: torch.Tensor, layout, rank: int, ranks: int) -> torch.Tensor:
    """A rank's part of `whole`; of a sum, a term: whole numbers, so that the sum has no rounding."""
    if layout == PARTIAL:
        others = [torch.full_like(whole, float(r + 1)) for r in range(1, ranks)]
        return whole - sum(others) if rank == 0 else others[rank - 1]
    for dim in (-1, -2):
        if layout.cut[dim]:
            return whole.chunk(ranks, dim)[rank].contiguous()
    return whole.clone()


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, lying in memory the other way round."""
    return x.mT.contiguous().mT


def collect(parts: list[torch.Tensor], layout) -> torch.Tensor:
    """The whole that the parts of all ranks stand for."""
    if layout == PARTIAL:
        return sum(parts)
    for dim in (-1, -2):
        if layout.cut[dim]:
            return torch.cat(parts, dim)
    for part in parts:
        torch.testing.assert_close(part, parts[0], rtol=0, atol=0)
    return parts[0]


def numbers(shape, seed: int) -> torch.Tensor:
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("shape", [(12, 24), (1, 12, 12), (2, 2, 12, 12)], ids=str)
@pytest.mark.parametrize(("src", "dst"), STEPS)
def test_the_value_stays_and_the_gradient_comes_back(src, dst, shape):
    value, slope = numbers(shape, 1), numbers(shape, 2)

    for ranks in RANKS:
        def body(world, ranks=ranks):
            x = transposed(spread(value, src, world.rank, ranks)).requires_grad_()
            y = redistribute(x, src, dst, world, label="move")
            forward = (world.ledger.messages, world.ledger.bytes)
            y.backward(transposed(spread(slope, dst.gradient() if ranks > 1 else WHOLE, world.rank, ranks)))
            there = collective(src, dst, AXIS).bill(x.nbytes, ranks)
            back = conjugate(src, dst, AXIS).bill(y.nbytes, ranks)
            assert forward == (there.messages, there.sent)
            assert (world.ledger.messages, world.ledger.bytes) == (there.messages + back.messages, there.sent + back.sent)
            return y.detach(), x.grad

        outputs, gradients = zip(*rl.simulate(ranks, body))
        torch.testing.assert_close(collect(outputs, dst), value, rtol=0, atol=0)
        torch.testing.assert_close(collect(gradients, src.gradient()), slope, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("src", "dst"), [step for step in STEPS if collective(*step.values, AXIS).kind != "nothing"])
def test_what_has_moved_may_be_changed_in_place(src, dst, rows):
    def body(world):
        x = spread(numbers((rows, 4, 6), 1), src, world.rank, 2).requires_grad_()
        found = []
        for change in (lambda y: y.add_(1.0).square_(), lambda y: (y + 1.0).square()):
            change(redistribute(x * 1, src, dst, world, label="move")).sum().backward()
            found.append(x.grad)
            x.grad = None
        torch.testing.assert_close(*found, rtol=0, atol=0)

    rl.simulate(2, body)


@pytest.mark.parametrize("dst", [BY_TOKENS, BY_WIDTH])
def test_what_cannot_be_split_is_refused_by_all_ranks_with_the_reason(dst):
    x = torch.zeros(2, 7, 9)
    length, dim, other = (7, "tokens", BY_WIDTH) if dst is BY_TOKENS else (9, "width", BY_TOKENS)
    for src in (WHOLE, PARTIAL, other):
        with pytest.raises(ShapeMismatch, match=rf"the {length} {dim} of .* cannot be split over 4 ranks; pad to"):
            rl.simulate(4, lambda world, src=src: redistribute(x, src, dst, world, label="move"))


def test_a_sum_overwrites_its_input_only_when_it_may():
    def body(world):
        kept, used = torch.ones(2, 3), torch.ones(2, 3)
        assert redistribute(kept, PARTIAL, WHOLE, world, label="keep") is not kept
        y = redistribute(used, PARTIAL, WHOLE, world, label="use", overwrite=True)
        return kept.sum().item(), y.data_ptr() == used.data_ptr(), y.sum().item()

    assert rl.simulate(3, body) == [(6.0, True, 18.0)] * 3


def test_a_gather_that_was_to_be_read_by_split_layers_is_an_error_in_backward_until_one_claims_it():
    def body(world, claims):
        x = torch.ones(2, 4, requires_grad=True)
        y = redistribute(x, BY_TOKENS, GRAD_PARTIAL, world, label="gather", unread=True)
        if claims:
            claim(y, world, "reader")
        y.sum().backward()
        return x.grad.unique().tolist()

    assert rl.simulate(2, lambda world: body(world, True)) == [[2.0], [2.0]]
    with pytest.raises(ConfigError, match="gather in group 'world': no split layer has read these"):
        rl.simulate(2, lambda world: body(world, False))


def test_siblings_share_one_entrance_and_the_next_tensor_gets_its_own():
    def body(world):
        parent = nn.Identity()
        enter = Entrance(world, "entrance").ends_with(parent)
        x = torch.ones(2, 3, requires_grad=True)
        y = x * 1.0
        first, second, other = enter(y), enter(y), enter(x)
        assert first is second and other is not first
        (first.sum() * (world.rank + 1) + second.sum()).backward()
        assert world.ledger.calls == 1
        again = enter(x)
        assert again is other
        parent(x)
        assert enter(x) is not other          # the forward of the parent has ended
        with torch.no_grad():
            assert enter(x).grad_fn is None   # another mode, another entrance
        return x.grad.unique().tolist()

    assert rl.simulate(2, body) == [[5.0], [5.0]]   # (1 + 1) + (2 + 1)


def test_an_entrance_sees_that_its_tensor_was_changed_in_place():
    def body(world):
        enter = Entrance(world, "entrance")
        x = torch.ones(2, 3)
        before = enter(x)
        x.add_(1.0)
        return enter(x) is before

    assert rl.simulate(2, body) == [False, False]


def test_an_entrance_forgets_also_after_a_forward_that_failed():
    class Fails(nn.Module):
        def forward(self, x):
            self.enter(x)
            raise ValueError("no")

    def body(world):
        module = Fails()
        module.enter = Entrance(world, "entrance").ends_with(module)
        with pytest.raises(ValueError, match="no"):
            module(torch.ones(2, 3))
        return module.enter._seen is None

    assert rl.simulate(2, body) == [True, True]


def test_a_sum_in_place_over_what_a_gradient_still_needs_is_seen():
    def body(world):
        x = torch.ones(2, 3, requires_grad=True)
        y = redistribute(x.tanh(), PARTIAL, WHOLE, world, label="sum", overwrite=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    rl.simulate(2, body)
