"""The trigram baseline against the definition written in dictionaries, and against what a probability must be."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from rankloom.base.errors import DataError
from rankloom.data.ngram import count_levels, probability, trigram_loss


def text(n=400, vocab=7, seed=0):
    """A text with structure: the next token is often a function of the two before it."""
    rng, out = np.random.default_rng(seed), [0, 1]
    for _ in range(n - 2):
        out.append((out[-1] * 3 + out[-2]) % vocab if rng.random() < 0.7 else int(rng.integers(vocab)))
    return np.array(out)


def by_definition(train, vocab):
    """P(c | a, b) of modified Kneser-Ney, from Chen & Goodman's formulas, with dictionaries."""
    train = train.tolist()
    trigrams = Counter(zip(train, train[1:], train[2:], strict=False))
    bigrams = Counter((b, c) for _, b, c in trigrams)          # distinct tokens before
    unigrams = Counter(c for _, c in bigrams)

    def model(counts, context_of, shorter):
        n = Counter(counts.values())
        y = n[1] / max(1, n[1] + 2 * n[2])
        n4 = {1: n[1], 2: n[2], 3: n[3], 4: n[4]}
        take = {k: min(k, max(0.1, k - (k + 1) * y * n4[k + 1] / max(1, n4[k]))) for k in (1, 2, 3)}
        total, saved = defaultdict(float), defaultdict(float)
        for gram, count in counts.items():
            total[context_of(gram)] += count
            saved[context_of(gram)] += take[min(count, 3)]

        def p(gram):
            context, count = context_of(gram), counts[gram]
            if context not in total:
                return shorter(gram)
            kept = count - take[min(count, 3)] if count else 0.0
            return (kept + saved[context] * shorter(gram)) / total[context]
        return p

    one = model(unigrams, lambda c: (), lambda c: 1 / vocab)
    two = model(bigrams, lambda bc: bc[0], lambda bc: one(bc[1]))
    return model(trigrams, lambda abc: abc[:2], lambda abc: two(abc[1:]))


@pytest.mark.parametrize(("n", "vocab"), [(400, 7), (60, 7), (12, 5), (3, 4), (5000, 3)])
def test_the_arrays_give_what_the_definition_gives(n, vocab):
    train, validation = text(n, vocab), text(80, vocab, seed=1)
    p = by_definition(train, vocab)
    ids = validation.tolist()
    wanted = -np.mean([math.log(p(abc)) for abc in zip(ids[:-2], ids[1:-1], ids[2:], strict=True)])
    found = trigram_loss(train, validation, vocab)
    assert found.loss == pytest.approx(wanted, rel=1e-12)
    assert (found.train_tokens, found.validation_tokens) == (n, 78)


@pytest.mark.parametrize("n", [3, 12, 400])
def test_the_probabilities_of_all_next_tokens_add_to_one(n):
    vocab = 9                               # two tokens never occur in the text
    levels = count_levels(text(n), vocab)
    for a in range(vocab):
        for b in range(vocab):
            every = np.arange(vocab)
            probabilities = probability(levels, np.full(vocab, a), np.full(vocab, b), every, vocab)
            assert probabilities.min() > 0
            assert probabilities.sum() == pytest.approx(1, rel=1e-12)


def test_it_finds_the_structure_that_is_there():
    vocab = 7
    loss = trigram_loss(text(20_000), text(2000, seed=1), vocab).loss
    right, wrong = 0.7 + 0.3 / vocab, 0.3 / vocab
    entropy = -(right * math.log(right) + 6 * wrong * math.log(wrong))
    assert entropy * 0.97 < loss < entropy * 1.05 < math.log(vocab)


def test_it_is_stronger_than_a_bigram_model_with_add_one():
    vocab, train, validation = 50, text(3000, 50), text(500, 50, seed=1)
    pairs, singles = Counter(zip(train.tolist(), train[1:].tolist(), strict=False)), Counter(train.tolist())
    bigram = -np.mean([math.log((pairs[b, c] + 1) / (singles[b] + vocab))
                       for b, c in zip(validation[1:-1].tolist(), validation[2:].tolist(), strict=True)])
    assert trigram_loss(train, validation, vocab).loss < bigram


def test_it_reads_no_more_than_told_and_says_so():
    train, validation = text(400), text(100, seed=1)
    bounded = trigram_loss(train, validation, 7, max_tokens=50)
    assert bounded == trigram_loss(train[:50], validation[:50], 7)
    assert (bounded.train_tokens, bounded.validation_tokens) == (50, 48)


def test_blocks_of_validation_text_add_up(monkeypatch):
    whole = trigram_loss(text(400), text(100, seed=1), 7).loss
    seen = []
    monkeypatch.setattr("rankloom.data.ngram._BLOCK", 30)
    blocks = trigram_loss(text(400), text(100, seed=1), 7, progress=lambda what, done: seen.append(done)).loss
    assert blocks == pytest.approx(whole, rel=1e-12)
    assert len(seen) == 4 and seen[-1] == 1.0


def test_tokens_as_they_lie_on_disk_do_not_overflow():
    vocab = 60_000
    train = np.random.default_rng(0).integers(0, vocab, 3000).astype(np.uint16)
    assert trigram_loss(train, train, vocab).loss < math.log(vocab)
    assert trigram_loss(train, train, vocab) == trigram_loss(train.astype(np.int64), train.astype(np.int64), vocab)


@pytest.mark.parametrize(("train", "validation", "vocab", "message"), [
    (2, 9, 7, "3 tokens or more"), (9, 2, 7, "3 tokens or more"), (9, 9, (1 << 21) + 1, "vocabularies up to")])
def test_what_cannot_be_counted_is_refused(train, validation, vocab, message):
    with pytest.raises(DataError, match=message):
        trigram_loss(np.zeros(train, dtype=int), np.zeros(validation, dtype=int), vocab)
