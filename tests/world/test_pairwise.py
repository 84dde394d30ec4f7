"""Gathers and reduce-scatters that are made of messages: the same bits whatever lies where, and nothing mixed up."""

import pytest
import torch

import rankloom as rl
from patience import AT_ONCE
from rankloom.world.pairwise import TAG

RANKS = (1, 2, 3, 4, 5, 8)


def drawn(rank: int, rows: int) -> torch.Tensor:
    """Numbers whose sum depends on the order of addition."""
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank % 3)


def sum_in_rank_order(p: int, rows: int) -> torch.Tensor:
    total = drawn(0, rows)
    for rank in range(1, p):
        total = total + drawn(rank, rows)
    return total


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_slices_are_added_in_rank_order_wherever_the_sum_is_written(p, rows):
    def body(world):
        x, r = drawn(world.rank, p * rows), world.rank
        inside, beside = x.clone(), torch.empty(rows, 3)
        room = torch.full(((p - 1) * rows, 3), torch.nan)
        found = [world.reduce_scatter(x), world.reduce_scatter(x, out=beside, scratch=room),
                 world.reduce_scatter(inside, out=inside[r * rows:(r + 1) * rows]).clone()]
        inside[r * rows:(r + 1) * rows] = x[r * rows:(r + 1) * rows]
        return found, torch.equal(inside, x), room

    expected = sum_in_rank_order(p, p * rows).split(rows) if rows else [torch.empty(0, 3)] * p
    for mine, (found, is_unchanged, room) in zip(expected, rl.simulate(p, body)):
        assert all(torch.equal(each, mine) for each in found)
        assert is_unchanged, "what others own of x is theirs"
        assert not room.isnan().any(), "the scratch is where slices arrive"


@pytest.mark.parametrize("p", RANKS)
def test_a_rank_may_gather_from_where_its_slice_will_be(p):
    def body(world):
        whole, r = torch.full((4 * p,), torch.nan), world.rank
        whole[4 * r:4 * (r + 1)] = r
        in_place = world.all_gather(whole[4 * r:4 * (r + 1)], out=whole)
        return in_place is whole, whole.tolist(), world.all_gather(torch.full((4,), float(r))).tolist()

    expected = [float(rank) for rank in range(p) for _ in range(4)]
    assert rl.simulate(p, body) == [(True, expected, expected)] * p


@pytest.mark.parametrize("begin", [0, 1 << 17])
def test_what_is_gathered_may_lie_anywhere_in_the_whole(begin):
    """Where another rank's slice will be, it was overwritten while it was on its way."""
    def body(world):
        whole = torch.full((3 << 18,), torch.nan)
        mine = whole[begin:begin + (1 << 18)].fill_(world.rank)
        return [part.eq(rank).all().item() for rank, part in enumerate(world.all_gather(mine, out=whole).chunk(3))]

    for _ in range(10):
        assert rl.simulate(3, body) == [[True] * 3] * 3


@pytest.mark.parametrize("p", [2, 4])
def test_many_on_their_way_at_once_with_messages_between_them_are_not_mixed_up(p):
    def body(world):
        r, handles = world.rank, []
        after, before = (r + 1) % p, (r - 1) % p
        for number in range(20):
            handles.append(world.all_gather(torch.full((5 + number,), 100.0 * number + r), async_op=True))
            handles.append(world.reduce_scatter(torch.full((p * (3 + number),), 100.0 * number + r), async_op=True))
            handles.append(world.exchange(torch.full((2,), -1.0 - number), after, torch.empty(2), before, tag=7, async_op=True))
        return [handle.wait().unique().tolist() for handle in reversed(handles)][::-1]

    for found in rl.simulate(p, body):
        for number, (gathered, summed, passed) in enumerate(zip(found[::3], found[1::3], found[2::3])):
            assert gathered == [100.0 * number + rank for rank in range(p)]
            assert summed == [p * 100.0 * number + p * (p - 1) / 2]
            assert passed == [-1.0 - number]
    assert TAG >= 1 << 20, "a tag that people use"


def gather_other_sizes(world):
    world.all_gather(torch.ones(3 + world.rank), label="unit")


def scatter_other_sizes(world):
    world.reduce_scatter(torch.ones(2 * (3 + world.rank)), label="unit")


@pytest.mark.parametrize("call", [gather_other_sizes, scatter_other_sizes])
def test_ranks_that_bring_other_sizes_wait_for_each_other_until_the_time_out_and_the_process_lives(call):
    """As those that call other units of a sharded model. (Among threads the difference is seen at once.)"""
    with pytest.raises(rl.CollectiveTimeout, match="unit"):
        rl.spawn(2, call, timeout=AT_ONCE / 10, backend="gloo")
