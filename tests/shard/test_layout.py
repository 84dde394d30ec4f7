"""Layouts of units: every element has one owner, and every tensor is covered by its slices."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rankloom.shard.layout import lay_out_evenly

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(torch.Size), min_size=1, max_size=6)


@given(SHAPES, st.integers(1, 8), st.sampled_from([1, 2, 4, 8]))
def test_the_pieces_of_a_tensor_cover_it_once_in_rank_order(shapes, ranks, itemsize):
    layout = lay_out_evenly({f"t{i}": shape for i, shape in enumerate(shapes)}, itemsize, ranks)
    for slot in layout.slots:
        slices = [layout.slice_of(slot.name, rank) for rank in range(ranks)]
        covered = [element for start, stop in slices for element in range(start, stop)]
        assert covered == list(range(slot.shape.numel()))


@given(SHAPES, st.integers(1, 8), st.sampled_from([1, 2, 4, 8]))
def test_the_spans_are_equal_aligned_and_cover_the_buffer(shapes, ranks, itemsize):
    layout = lay_out_evenly({f"t{i}": shape for i, shape in enumerate(shapes)}, itemsize, ranks)
    spans = [layout.span(rank) for rank in range(ranks)]
    assert [start for start, _ in spans] == [rank * layout.total // ranks for rank in range(ranks)]
    assert spans[-1][1] == layout.total
    assert all(start * itemsize % 64 == 0 for start, _ in spans)
    assert all(slot.start * itemsize % 64 == 0 for slot in layout.slots)


@given(SHAPES, st.integers(1, 8))
def test_padding_is_less_than_64_bytes_for_each_tensor_and_rank(shapes, ranks):
    layout = lay_out_evenly({f"t{i}": shape for i, shape in enumerate(shapes)}, 4, ranks)
    assert layout.total - sum(shape.numel() for shape in shapes) < 16 * (len(shapes) + ranks)
