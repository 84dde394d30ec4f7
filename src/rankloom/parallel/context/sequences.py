"""Which rank owns which tokens of a sequence, and which queries see which keys. Pure arithmetic.

Under a causal mask late tokens see more keys than early ones. So a causal sequence is dealt in zig-zag: it is cut into 2p chunks, and
rank r owns chunks r and 2p-1-r, an early one and a late one. All ranks then have equal work, in every step of a ring too.
Documents packed in one sequence see only themselves. They are cut where the ranks' shares end, and nowhere else.

The result is a list of tiles: queries of this rank against keys of another. In a tile every query sees every key; if both are the same
tokens, only earlier ones. No mask is ever made: a tile in which nothing is seen is left out.

source: Liu et al. 2023 (rings); Zhu 2024 (zig-zag)
"""

from bisect import bisect_right
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from rankloom.base.documents import Documents
from rankloom.base.shares import chunk_sizes

Spans = tuple[range, ...]            # positions that a rank owns, in order


class Tile(NamedTuple):
    """Queries of one rank against keys of another: slices of their rows and of their own tokens."""

    rows: slice
    query: slice
    key: slice
    causal: bool


class _Fragment(NamedTuple):
    """A run of a rank's tokens, within one document."""

    document: int
    positions: range
    here: slice       # where they are among the tokens of their rank


def cut_sequence(length: int, ranks: int, *, zigzag: bool) -> tuple[Spans, ...]:
    """The positions that each rank owns. Where the chunks do not divide the length, the first are one longer.

    >>> cut_sequence(8, 2, zigzag=True)
    ((range(0, 2), range(6, 8)), (range(2, 6),))
    >>> cut_sequence(7, 2, zigzag=False)
    ((range(0, 4),), (range(4, 7),))
    """
    chunks = 2 * ranks if zigzag else ranks
    ends = accumulate(chunk_sizes(length, chunks), initial=0)
    cuts = [range(start, stop) for start, stop in pairwise(ends)]
    if not zigzag:
        return tuple((cut,) for cut in cuts)
    return tuple(_joined(cuts[rank], cuts[-1 - rank]) for rank in range(ranks))


def _joined(early: range, late: range) -> Spans:
    return (range(early.start, late.stop),) if early.stop == late.start else (early, late)


def take_run(spans: Spans, start: int, count: int) -> Spans:
    """The positions of `count` consecutive tokens of those at `spans`, from the `start`-th on.

    >>> take_run((range(0, 2), range(6, 8)), 1, 2)
    (range(1, 2), range(6, 7))
    """
    found, before = [], 0
    for span in spans:
        part = span[max(start - before, 0):max(start + count - before, 0)]
        found += [part] if part else []
        before += len(span)
    return tuple(found)


def tiles(mine: Spans, theirs: Spans, *, causal: bool, documents: Documents) -> list[Tile]:
    """The tiles of queries `mine` against keys `theirs`; the spans are equal, or have no token in common.

    documents: one row stands for all rows
    """
    found = []
    for row, cuts in enumerate(documents):
        rows = slice(None) if len(documents) == 1 else slice(row, row + 1)
        keys: dict[int, list[_Fragment]] = {}
        for fragment in _fragments(theirs, cuts):
            keys.setdefault(fragment.document, []).append(fragment)
        found += [Tile(rows, query.here, key.here, causal and query.positions == key.positions)
                  for query in _fragments(mine, cuts) for key in keys.get(query.document, ())
                  if not causal or key.positions.start <= query.positions.start]
    return found


def merged(found: list[Tile]) -> list[Tile]:
    """The same pairs of tokens in fewer and larger tiles: adjacent ones become one.

    >>> side_by_side = [Tile(slice(None), query, slice(0, 2), causal=False) for query in (slice(0, 2), slice(2, 4))]
    >>> merged(side_by_side)
    [Tile(rows=slice(None, None, None), query=slice(0, 4, None), key=slice(0, 2, None), causal=False)]
    """
    for side, other in (("key", "query"), ("query", "key")):
        joined: list[Tile] = []
        for tile in found:
            before = joined[-1] if joined else tile
            alike = before.rows == tile.rows and getattr(before, other) == getattr(tile, other) and not (before.causal or tile.causal)
            if alike and getattr(before, side).stop == getattr(tile, side).start:
                both: dict[str, Any] = {side: slice(getattr(before, side).start, getattr(tile, side).stop)}
                joined[-1] = before._replace(**both)
            else:
                joined.append(tile)
        found = joined
    return found


def _fragments(spans: Spans, cuts: tuple[int, ...]) -> list[_Fragment]:
    """`spans`, cut where documents begin."""
    fragments, here = [], 0
    for span in spans:
        for document in range(bisect_right(cuts, span.start) - 1, len(cuts) - 1):
            part = range(max(span.start, cuts[document]), min(span.stop, cuts[document + 1]))
            if not part:
                break
            start = here + part.start - span.start
            fragments.append(_Fragment(document, part, slice(start, start + len(part))))
        here += len(span)
    return fragments
