"""Boxes of elements of a tensor: their intersection, and the boxes that make up a run of its flat memory.

Pure arithmetic, to save and load tensors of which ranks hold pieces. A box has one span for each dim; for a tensor without dims it is
`()`, and holds one element.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, product
from math import prod

from rankloom.base.layout import Span

Box = tuple[Span, ...]


def whole_box(shape: Sequence[int]) -> Box:
    """All elements of a tensor of this shape."""
    return tuple(Span(0, length) for length in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """The shape of a tensor of the box's elements."""
    return tuple(stop - start for start, stop in box)


def numel(box: Box) -> int:
    """How many elements the box has."""
    return prod(shape_of(box))


def intersection(one: Box, other: Box) -> Box | None:
    """The intersection, or None if it is empty.

    >>> intersection((Span(0, 4), Span(2, 6)), (Span(3, 8), Span(0, 3)))
    (Span(start=3, stop=4), Span(start=2, stop=3))
    """
    both = tuple(Span(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def is_partition(boxes: Iterable[Box], shape: Sequence[int]) -> bool:
    """Whether the boxes hold each element of a tensor of this shape once, and nothing else.

    By inclusion and exclusion: each box counts +1 or -1 at each of its corners. The boxes are a partition if these sum to its own.

    >>> is_partition([(Span(0, 2),), (Span(2, 5),)], (5,)), is_partition([(Span(0, 2),), (Span(1, 4),)], (5,))
    (True, False)
    """
    corners = Counter[tuple[int, ...]]()
    for weight, box in chain([(-1, whole_box(shape))], ((1, box) for box in boxes)):
        if weight == 1 and (len(box) != len(shape) or any(start > stop for start, stop in box)):
            return False
        for ends in product((0, 1), repeat=len(box)):
            corners[tuple(span[end] for span, end in zip(box, ends))] += weight * (-1) ** sum(ends)
    return not any(corners.values())


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The index of `box` in a tensor that holds the elements of `outer`, which contains it.

    >>> within((Span(3, 4),), (Span(2, 6),))
    (slice(1, 2, None),)
    """
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements [start, stop) of a flattened tensor as boxes, in the order of memory: the rest of a row, whole rows, a row's beginning.

    At most 2d - 1 boxes in d dims. Laid end to end they are the run.

    >>> [[tuple(span) for span in box] for box in boxes_of_run((3, 4), 2, 9)]
    [[(0, 1), (2, 4)], [(1, 2), (0, 4)], [(2, 3), (0, 1)]]
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row, inside = prod(shape[1:]), shape[1:]
    first, last = -(-start // row), stop // row   # the whole rows are first .. last - 1
    if first > last:   # the run begins and ends within one row
        yield from _in_row(last, inside, start - last * row, stop - last * row)
        return
    yield from _in_row(first - 1, inside, start - (first - 1) * row, row if start < first * row else 0)
    if first < last:
        yield (Span(first, last), *whole_box(inside))
    yield from _in_row(last, inside, 0, stop - last * row)


def _in_row(row: int, shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_run(shape, start, stop):
        yield (Span(row, row + 1), *box)
