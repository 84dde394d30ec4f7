"""The layout that cuts no tensor: every one whole on one rank, little padding, the same on every rank."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from rankloom.shard.flat import ALIGN
from rankloom.shard.matrices import lay_out_matrices

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(torch.Size), max_size=8).map(
    lambda shapes: {str(n): shape for n, shape in enumerate(shapes)})
ITEMSIZES = st.sampled_from([1, 2, 4, 8])


@given(SHAPES, ITEMSIZES, st.integers(1, 5))
def test_every_tensor_is_whole_in_exactly_one_span_aligned_and_beside_the_others(shapes, itemsize, ranks):
    layout = lay_out_matrices(shapes, itemsize, ranks)
    assert layout.ranks == ranks and layout.whole_tensors
    assert {slot.name: slot.shape for slot in layout.slots} == shapes and len(layout.slots) == len(shapes)
    for before, after in itertools.pairwise(layout.slots):
        assert before.end <= after.start
    for slot in layout.slots:
        assert slot.start * itemsize % ALIGN == 0 and slot.end <= layout.total
        whole = (0, slot.shape.numel())
        homes = [rank for rank in range(ranks) if layout.slice_of(slot.name, rank) == whole]
        assert len(homes) == (1 if slot.shape.numel() else ranks)   # all ranks have all of nothing
        assert all(layout.slice_of(slot.name, rank) == (0, 0) for rank in range(ranks) if rank not in homes)


@given(SHAPES, ITEMSIZES, st.integers(1, 5))
def test_spans_are_equal_and_the_padding_is_at_most_the_longest_tensor_for_each_rank_but_one(shapes, itemsize, ranks):
    """The fullest rank had least before its last tensor came: at most an equal share of the others."""
    layout = lay_out_matrices(shapes, itemsize, ranks)
    step = ALIGN // itemsize
    sizes = [-(-shape.numel() // step) * step for shape in shapes.values()]
    spans = [layout.span(rank) for rank in range(ranks)]
    assert len({stop - start for start, stop in spans}) == 1 and spans[-1][1] == layout.total
    assert layout.total - sum(sizes) <= (ranks - 1) * max(sizes, default=0)


@given(SHAPES, ITEMSIZES, st.integers(1, 5))
def test_every_rank_finds_the_same_layout(shapes, itemsize, ranks):
    assert lay_out_matrices(shapes, itemsize, ranks) == lay_out_matrices(dict(shapes), itemsize, ranks)


def test_the_longest_come_first_so_that_short_ones_fill_the_gaps():
    shapes = {name: torch.Size([n]) for name, n in {"a": 16, "b": 16, "c": 32}.items()}
    layout = lay_out_matrices(shapes, itemsize=4, ranks=2)
    assert layout.total == 64   # no padding; in the order given it would be 96
    assert [(slot.name, slot.start) for slot in layout.slots] == [("c", 0), ("a", 32), ("b", 48)]


def test_equal_tensors_go_to_the_ranks_in_turn():
    layout = lay_out_matrices({name: torch.Size([4, 4]) for name in "abcdef"}, itemsize=4, ranks=3)
    assert [[slot.name for slot in layout.slots if slot.start // 32 == rank] for rank in range(3)] == [["a", "d"], ["b", "e"], ["c", "f"]]


def test_more_ranks_than_tensors_leaves_some_with_padding_only():
    layout = lay_out_matrices({"w": torch.Size([2, 8])}, itemsize=4, ranks=3)
    assert layout.total == 48 and [layout.slice_of("w", rank) for rank in range(3)] == [(0, 16), (0, 0), (0, 0)]
