"""Who owns which tokens, and which tiles they see: against a mask of every pair, made by hand."""

import random

import pytest
import torch

from rankloom.base.documents import document_cuts
from rankloom.base.errors import DataError
from rankloom.parallel.context.sequences import cut_sequence, merged, tiles

CASES = [(length, ranks) for ranks in (1, 2, 3, 4, 5, 8) for length in (1, 2, 5, 7, 8, 16, 33) if length >= ranks]


def seen_pairs(length, ranks, *, zigzag, causal, documents, then=lambda found: found):
    """{(row, query, key)} over all ranks' tiles, by position; no pair may come twice."""
    spans = cut_sequence(length, ranks, zigzag=zigzag)
    at = [[position for span in mine for position in span] for mine in spans]
    pairs = []
    for me in range(ranks):
        for other in range(ranks):
            for rows, query, key, triangle in then(tiles(spans[me], spans[other], causal=causal, documents=documents)):
                for row in range(len(documents))[rows]:
                    pairs += [(row, q, k) for i, q in enumerate(at[me][query]) for j, k in enumerate(at[other][key])
                              if not triangle or j <= i]
    assert len(pairs) == len(set(pairs)), "a pair is in two tiles"
    return set(pairs)


@pytest.mark.parametrize(("length", "ranks"), CASES)
@pytest.mark.parametrize("zigzag", [False, True])
def test_every_token_has_one_owner_and_every_rank_a_token(length, ranks, zigzag):
    spans = cut_sequence(length, ranks, zigzag=zigzag)
    owned = [position for mine in spans for span in mine for position in span]
    assert sorted(owned) == list(range(length))
    sizes = [sum(map(len, mine)) for mine in spans]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 2
    assert all(list(mine) == sorted(mine, key=lambda span: span.start) for mine in spans)


@pytest.mark.parametrize(("length", "ranks"), CASES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("zigzag", [False, True])
def test_the_tiles_are_the_pairs_that_see_each_other(length, ranks, causal, zigzag):
    draw = random.Random(length * ranks)
    cuts = tuple((0, *sorted(draw.sample(range(1, length), min(length - 1, n))), length) for n in (0, 1, 3))
    numbers = [[sum(position >= cut for cut in row) for position in range(length)] for row in cuts]
    wanted = {(row, q, k) for row in range(3) for q in range(length) for k in range(length)
              if numbers[row][q] == numbers[row][k] and (not causal or k <= q)}
    for then in (list, merged):
        assert seen_pairs(length, ranks, zigzag=zigzag, causal=causal, documents=cuts, then=then) == wanted


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_in_zigzag_a_rank_computes_three_tiles_of_its_own_tokens_and_one_of_every_other_rank_s(ranks):
    spans = cut_sequence(8 * ranks, ranks, zigzag=True)
    for me in range(ranks):
        counts = [len(merged(tiles(spans[me], theirs, causal=True, documents=((0, 8 * ranks),)))) for theirs in spans]
        own = 1 if len(spans[me]) == 1 else 3
        assert counts == [own if other == me else 1 for other in range(ranks)]


def work(spans, me):
    """Pairs of tokens that rank `me` computes scores for, hop by hop around the ring."""
    count = lambda tile: (n := tile.query.stop - tile.query.start) * (n + 1) // 2 if tile.causal else (
        (tile.query.stop - tile.query.start) * (tile.key.stop - tile.key.start))
    length = sum(len(span) for mine in spans for span in mine)
    seen = lambda other: tiles(spans[me], spans[other], causal=True, documents=((0, length),))
    return [sum(map(count, seen((me - hop) % len(spans)))) for hop in range(len(spans))]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_in_zigzag_all_ranks_have_the_same_work_in_every_hop(ranks):
    spans = cut_sequence(16 * ranks, ranks, zigzag=True)
    assert len({tuple(work(spans, me)) for me in range(ranks)}) == 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_without_zigzag_the_last_rank_works_longest(ranks):
    spans = cut_sequence(64 * ranks, ranks, zigzag=False)
    totals = [sum(work(spans, me)) for me in range(ranks)]
    assert totals == sorted(totals) and totals[-1] > 1.9 * (ranks - 0.5) * totals[0]


@pytest.mark.parametrize("length", [31, 97, 130])
def test_lengths_that_do_not_divide_cost_little_balance(length):
    totals = [sum(work(cut_sequence(length, 4, zigzag=True), me)) for me in range(4)]
    assert max(totals) - min(totals) <= 2 * length   # a token more or less, and what it looks at


def test_documents_are_told_by_numbers_or_by_cumulative_lengths():
    numbers = torch.tensor([[4, 4, 4, 4, 4], [1, 1, 0, 2, 2]])
    assert document_cuts(numbers, 5) == ((0, 5), (0, 2, 3, 5)) == document_cuts([(0, 5), (0, 2, 3, 5)], 5)
    assert document_cuts(None, 5) == ((0, 5),)
    assert document_cuts([torch.tensor([0, 5]), torch.tensor([0, 2, 3, 5])], 5, 2) == ((0, 5), (0, 2, 3, 5))


@pytest.mark.parametrize("cuts", [(), (0,), (1, 5), (0, 4), (0, 6), (0, 3, 3, 5), (0, 4, 2, 5)])
def test_cumulative_lengths_that_are_none_are_refused(cuts):
    with pytest.raises(DataError, match="row 1: .* cumulative lengths rise from 0 to 5"):
        document_cuts([(0, 5), cuts], 5)


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("documents", [[], [0, 2, 5], torch.tensor([1, 1, 2, 2, 2]), torch.zeros(0, 5), torch.zeros(1, 1, 5), 5])
def test_documents_that_are_no_rows_are_refused(documents, rows):
    with pytest.raises(DataError, match=rf"documents are .*; expected, for {rows or 'some'} rows or for one that stands for all, a number"):
        document_cuts(documents, 5, rows)


@pytest.mark.parametrize("documents", [torch.zeros(3, 5), [(0, 5)] * 3])
def test_documents_of_another_number_of_rows_than_the_batch_are_refused(documents):
    assert len(document_cuts(documents, 5)) == len(document_cuts(documents, 5, 3)) == 3
    with pytest.raises(DataError, match=r"documents are .*; expected, for 2 rows or for one"):
        document_cuts(documents, 5, 2)


def test_the_error_for_many_documents_is_short():
    with pytest.raises(DataError) as error:
        document_cuts([(0, 5)] * 10_000, 5, 2)
    assert len(str(error.value)) < 400


def test_a_document_in_two_places_is_refused():
    with pytest.raises(DataError, match="3 stretches, 2 numbers"):
        document_cuts(torch.tensor([[1, 1, 2, 1]]), 4)
