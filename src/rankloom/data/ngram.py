"""A baseline for the loss: a trigram model of the same training tokens, with modified Kneser-Ney smoothing.

Counts are sorted arrays, so millions of tokens take seconds. Kneser-Ney is the best of the classical smoothings: a model with a
higher loss has learned less than counting gives. A token is predicted from the two before it, across document ends, as in the
language model.
source: Chen & Goodman 1999, "An empirical study of smoothing techniques for language modeling"
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankloom.base.errors import DataError

Counts = NDArray[np.int64]
Weights = NDArray[np.float64]

_BLOCK = 1 << 20
LARGEST_VOCABULARY = 1 << 21      # a trigram is one 63-bit number


@dataclass(frozen=True, slots=True)
class Baseline:
    """The trigram model's loss, and how many tokens it counted and predicted: fewer than there are, where the text is long."""

    loss: float                # nats per token of the validation text
    train_tokens: int          # read for counting
    validation_tokens: int     # predicted


@dataclass(frozen=True, slots=True)
class Level:
    """The counts of one n-gram length. An n-gram and its context are whole numbers in base `vocab`."""

    grams: Counts          # [n] sorted
    counts: Counts         # [n] trigrams: how often each occurs; shorter ones: after how many different tokens
    contexts: Counts       # [m] sorted
    totals: Weights        # [m] sum of the counts in each context
    discounted: Weights    # [m] what discounts took from `totals`: the share of the shorter n-gram
    discounts: Weights     # [4] by min(count, 3)


def trigram_loss(train: NDArray[Any], validation: NDArray[Any], vocab_size: int, *, max_tokens: int = 10_000_000,
                 progress: Callable[[str, float], None] | None = None) -> Baseline:
    """Cross-entropy, in nats per token, of a trigram model of `train` on `validation`.

    max_tokens: the most tokens read, from the beginning of each; about 40 bytes of memory per token
    raises: DataError for too few tokens, or a vocabulary above 2**21
    """
    if len(train) < 3 or len(validation) < 3:
        raise DataError(f"a trigram model needs 3 tokens or more, got {len(train)} to train on "
                        f"and {len(validation)} to predict")
    if vocab_size > LARGEST_VOCABULARY:
        raise DataError(f"the trigram baseline holds vocabularies up to {LARGEST_VOCABULARY}, not {vocab_size}")
    levels = count_levels(np.asarray(train[:max_tokens], dtype=np.int64), vocab_size)
    text = np.asarray(validation[:max_tokens], dtype=np.int64)
    predicted = len(text) - 2
    total = 0.0
    for start in range(0, predicted, _BLOCK):
        stop = min(predicted, start + _BLOCK)
        before_last, last, now = (text[start + shift:stop + shift] for shift in range(3))
        total -= float(np.log(probability(levels, before_last, last, now, vocab_size)).sum())
        if progress:
            progress("trigram baseline", stop / predicted)
    return Baseline(total / predicted, min(len(train), max_tokens), predicted)


def count_levels(tokens: Counts, vocab: int) -> tuple[Level, Level, Level]:
    """Unigrams, bigrams and trigrams of a text [n]. For the shorter ones, a count is the number of different tokens before them."""
    trigrams, times = np.unique((tokens[:-2] * vocab + tokens[1:-1]) * vocab + tokens[2:], return_counts=True)
    bigrams, before = np.unique(trigrams % (vocab * vocab), return_counts=True)
    unigrams, before_that = np.unique(bigrams % vocab, return_counts=True)
    return _level(unigrams, before_that, vocab), _level(bigrams, before, vocab), _level(trigrams, times, vocab)


def _level(grams: Counts, counts: Counts, vocab: int) -> Level:
    """These counts, and what smoothing needs of them. grams: sorted"""
    discounts = _discounts(counts)
    contexts, first = np.unique(grams // vocab, return_index=True)      # a context is a run of grams
    totals = np.add.reduceat(counts, first).astype(np.float64)
    discounted = np.add.reduceat(discounts[np.minimum(counts, 3)], first)
    return Level(grams, counts, contexts, totals, discounted, discounts)


def _discounts(counts: Counts) -> Weights:
    """[4] The discounts of counts 0 (none), 1, 2 and 3 or more, estimated from how many n-grams have each count.

    At least 0.1, where a text is too short for the estimate, so that unseen n-grams keep some probability.
    """
    n = np.bincount(np.minimum(counts, 5), minlength=6).astype(np.float64)
    y = n[1] / max(1.0, n[1] + 2 * n[2])
    discounts = [0.0]
    for k in (1, 2, 3):
        estimate = k - (k + 1) * y * n[k + 1] / max(1.0, n[k])
        discounts.append(min(float(k), max(0.1, float(estimate))))
    return np.array(discounts)


def probability(levels: tuple[Level, Level, Level], a: Counts, b: Counts, c: Counts, vocab: int) -> Weights:
    """P(c after a, b), elementwise: from discounted counts; the rest of the probability comes from the shorter context."""
    found = np.full(len(c), 1.0 / vocab)
    for level, context in zip(levels, (np.zeros_like(c), b, a * vocab + b), strict=True):
        found = _refine(level, context, context * vocab + c, found)
    return found


def _refine(level: Level, context: Counts, gram: Counts, shorter: Weights) -> Weights:
    """The probability of each n-gram after its context; `shorter`, that of the shorter n-gram, where the context is unknown."""
    at_context, is_known = _find(level.contexts, context)
    at_gram, is_seen = _find(level.grams, gram)
    count = np.where(is_seen, level.counts[at_gram], 0)
    kept = count - level.discounts[np.minimum(count, 3)]
    return np.where(is_known, (kept + level.discounted[at_context] * shorter) / level.totals[at_context], shorter)


def _find(keys: Counts, wanted: Counts) -> tuple[Counts, NDArray[np.bool_]]:
    """The index of each wanted number in sorted keys, and whether it is there."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return place, keys[place] == wanted
