"""Boxes of tensors: a run of flat memory is made of few, end to end, and what two of them share is what both hold."""

from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankloom.base.layout import Span
from rankloom.base.spans import boxes_of_run, intersection, is_partition, numel, shape_of, whole_box, within

SHAPES = st.lists(st.integers(0, 5), max_size=4)


@st.composite
def runs(draw):
    shape = draw(SHAPES)
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@given(runs())
@settings(max_examples=300, deadline=None)
def test_the_boxes_of_a_run_laid_end_to_end_are_the_run_and_they_are_few(run):
    shape, start, stop = run
    whole = torch.arange(prod(shape)).view(shape)
    boxes = list(boxes_of_run(shape, start, stop))
    found = [number for box in boxes for number in whole[within(box, whole_box(shape))].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@st.composite
def boxes(draw, lengths):
    ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in lengths]
    return tuple(Span(*pair) for pair in ends)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_what_two_boxes_share_is_what_lies_in_both(data):
    lengths = data.draw(SHAPES)
    one, other = data.draw(boxes(lengths)), data.draw(boxes(lengths))

    def marked(box):
        cells = torch.zeros(lengths, dtype=torch.bool)
        cells[within(box, whole_box(lengths))] = True
        return cells

    both = intersection(one, other)
    expected = marked(one) & marked(other)
    assert int(expected.sum()) == (0 if both is None else numel(both))
    assert both is None or torch.equal(marked(both), expected)


def test_a_number_without_dims_is_one_box():
    assert list(boxes_of_run((), 0, 1)) == [()] and intersection((), ()) == () and numel(()) == 1 and shape_of(()) == ()


def test_an_empty_box_of_another_number_of_dims_makes_up_no_tensor():
    whole, empty = (Span(0, 5),), (Span(2, 2), Span(0, 3))
    assert is_partition([whole], (5,)) and not is_partition([whole, empty], (5,))
