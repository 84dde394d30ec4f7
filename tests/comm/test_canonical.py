"""The canonical tree: one shape, whoever computes what; and its price."""

import pytest
import torch

import rankloom as rl
from rankloom.base.shares import share
from rankloom.comm.canonical import Fold, Node, canonical_all_reduce_bill, owned_nodes

LEAVES = [1, 2, 3, 5, 6, 7, 8, 12, 13]
SPLITS = [(ranks, leaves) for leaves in LEAVES for ranks in range(1, leaves + 1)]


class Formula:
    """A summand that only remembers how it was added."""

    def __init__(self, text: str):
        self.text = text

    def add_(self, other: "Formula") -> "Formula":
        self.text = f"({self.text}+{other.text})"
        return self


def tree(first: int, end: int, leaves: int) -> str:
    """The canonical formula over [first, end), written from its definition: halve at the power of two."""
    if end - first == 1:
        return str(first)
    middle = (first + end) // 2
    return f"({tree(first, middle, leaves)}+{tree(middle, end, leaves)})" if middle < leaves else tree(first, middle, leaves)


def canonical_formula(leaves: int) -> str:
    return tree(0, 1 << (leaves - 1).bit_length(), leaves)


def fold_run(run: range, leaves: int) -> Fold:
    fold = Fold(leaves)
    for leaf in run:
        fold.push(Node(leaf, 0), Formula(str(leaf)))
    return fold


def leaf_values(leaf: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of very different size, so that another order of addition shows."""
    draw = torch.Generator().manual_seed(leaf)
    return (torch.randn(n, generator=draw) * 10.0 ** torch.randint(-4, 5, (n,), generator=draw)).to(dtype)


def reduce_leaves(world: rl.World, leaves: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    fold = Fold(leaves)
    for leaf in share(world.rank, world.size, leaves):
        fold.push(Node(leaf, 0), leaf_values(leaf, n, dtype))
    return rl.canonical_all_reduce(fold.values(), world, leaves)


@pytest.mark.parametrize(("ranks", "leaves"), SPLITS)
def test_ranks_own_all_leaves_once_in_order_and_evenly(ranks, leaves):
    runs = [share(rank, ranks, leaves) for rank in range(ranks)]
    assert [leaf for run in runs for leaf in run] == list(range(leaves))
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@pytest.mark.parametrize(("ranks", "leaves"), SPLITS)
def test_folding_a_run_of_leaves_leaves_exactly_the_nodes_that_the_rank_owns(ranks, leaves):
    for rank in range(ranks):
        run = share(rank, ranks, leaves)
        assert fold_run(run, leaves).nodes() == owned_nodes(run, leaves)


@pytest.mark.parametrize(("ranks", "leaves"), SPLITS)
def test_however_the_leaves_are_split_the_formula_is_that_of_the_tree(ranks, leaves):
    whole = Fold(leaves)
    for rank in range(ranks):
        part = fold_run(share(rank, ranks, leaves), leaves)
        for node, value in zip(part.nodes(), part.values()):
            whole.push(node, value)
    assert whole.total().text == canonical_formula(leaves)


def test_the_tree_over_seven_leaves_is_the_one_in_the_drawing():
    assert canonical_formula(8) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert canonical_formula(7) == "(((0+1)+(2+3))+((4+5)+6))"
    assert canonical_formula(1) == "0"


@pytest.mark.parametrize("leaves", [1, 7, 8, 64, 100])
def test_a_fold_holds_no_more_than_its_docstring_says(leaves):
    fold, most = Fold(leaves), 0
    for leaf in range(leaves):
        fold.push(Node(leaf, 0), Formula(""))
        most = max(most, len(fold.kept))
    assert most <= leaves.bit_length()


def test_a_tree_with_a_missing_leaf_has_no_total():
    fold = fold_run(range(1, 4), 4)
    with pytest.raises(rl.ShapeMismatch, match="tree over 4 leaves is not whole"):
        fold.total()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("leaves", [1, 3, 6, 8])
def test_the_bits_are_the_same_for_any_number_of_ranks(leaves, dtype):
    results = [x for ranks in range(1, leaves + 1) for x in rl.simulate(ranks, lambda w: reduce_leaves(w, leaves, 23, dtype))]
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_these_numbers_do_show_another_order_of_addition():
    """Otherwise the test above would prove nothing."""
    values = [leaf_values(leaf, 23) for leaf in range(8)]
    assert not torch.equal(sum(values), rl.simulate(1, lambda w: reduce_leaves(w, 8, 23))[0])


@pytest.mark.parametrize("leaves", [3, 8])
def test_it_is_the_sum_of_the_leaves(leaves):
    expected = sum(leaf_values(leaf, 10).double() for leaf in range(leaves))
    # fp32 adds `leaves` terms of up to 1e5: the error is below leaves * 2**-24 * the largest partial sum.
    mine = rl.simulate(3, lambda w: reduce_leaves(w, leaves, 10))[2].double()
    torch.testing.assert_close(mine, expected, rtol=0, atol=leaves * 2**-24 * 1e6)


@pytest.mark.parametrize("n", [1, 2, 24, 31])
@pytest.mark.parametrize(("ranks", "leaves"), [(1, 8), (2, 8), (3, 8), (4, 8), (3, 5), (5, 6)])
def test_every_rank_pays_exactly_its_bill(ranks, leaves, n):
    def body(world):
        reduce_leaves(world, leaves, n)
        return rl.Bill(sent=world.ledger.bytes, messages=world.ledger.messages)

    expected = [canonical_all_reduce_bill(n, ranks, leaves, itemsize=4, rank=rank) for rank in range(ranks)]
    assert rl.simulate(ranks, body) == expected


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_where_powers_of_two_divide_the_traffic_is_that_of_a_ring(ranks):
    assert canonical_all_reduce_bill(64, ranks, 8, itemsize=4) == rl.Bill(sent=2 * 64 * 4 * (ranks - 1) // ranks, messages=2 * (ranks - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3, 5), (2, 0)])
def test_the_sum_has_the_shape_of_the_partial_sums_on_any_number_of_ranks(shape, dtype):
    """On one rank it had, on several a matrix ended in torch's words about sizes that must match."""
    for p in (1, 2, 3):
        owned = [owned_nodes(share(rank, p, 3), 3) for rank in range(p)]
        for total in rl.simulate(p, lambda world, owned=owned: rl.canonical_all_reduce(
                [torch.full(shape, min(3, node.end) - node.first, dtype=dtype) for node in owned[world.rank]], world, 3)):
            assert torch.equal(total, torch.full(shape, 3, dtype=dtype))


def test_more_ranks_than_leaves_and_a_wrong_number_of_partial_sums_are_refused():
    def body(world):
        with pytest.raises(rl.ConfigError, match="2 logical shards cannot feed 3 ranks"):
            rl.canonical_all_reduce([torch.zeros(1)], world, 2)
        with pytest.raises(rl.ShapeMismatch, match=rf"rank {world.rank}: .* 5 partial sums, expected"):
            rl.canonical_all_reduce([torch.zeros(1)] * 5, world, 4)

    rl.simulate(3, body)


def test_bool_has_no_sum():
    def body(world):
        with pytest.raises(rl.ConfigError, match="the sum of torch.bool is not of that dtype"):
            rl.canonical_all_reduce([torch.ones(3, dtype=torch.bool)], world, 2)
        return True

    assert rl.simulate(2, body) == [True] * 2
