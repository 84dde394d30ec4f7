"""Small facts at the end of a step: in one message, and where flags are many, in two."""

import pytest
import torch

import rankloom as rl
from rankloom.parallel.replicas.combine_facts import APART, combine_facts

HASH = 2**32 - 1   # the largest that ranks compare


def agreed(world, n):
    """Each rank has the flags of its own number, modulo 5; one is set by none."""
    before = world.ledger.messages, world.ledger.bytes
    flags = [at % 5 == world.rank for at in range(n)]
    found = combine_facts([HASH - world.rank, -world.rank], flags, torch.full((3,), 0.5).double(), world)
    return found, (world.ledger.messages - before[0], world.ledger.bytes - before[1])


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", ["gloo", None])
@pytest.mark.parametrize("more", [0, 1])
def test_facts_flags_and_totals_are_agreed_on_in_one_message_or_in_two(p, backend, more):
    n = APART // (8 * p) + more
    for (facts, flags, totals), _ in rl.simulate(p, lambda world: agreed(world, n), **({"backend": backend} if backend else {})):
        assert facts == [HASH, 0]
        assert flags == [at % 5 < p for at in range(n)]
        assert totals.tolist() == [0.5 * p] * 3


def test_many_flags_cost_a_rank_two_bytes_each_whatever_the_ranks():
    p, n = 4, APART // 8
    (_, sent), *_ = rl.simulate(p, lambda world: agreed(world, n), backend="gloo")
    few = APART // (8 * p)
    (_, one), *_ = rl.simulate(p, lambda world: agreed(world, few), backend="gloo")
    assert one[1] == (p - 1) * 8 * (2 + few + 3)
    assert sent[1] == (p - 1) * 8 * (2 + 3) + 2 * n * (p - 1) // p
