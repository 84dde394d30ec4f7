"""The order of samples: pure functions of seed and step, with no state.

An epoch is a pseudo-random permutation, computed index by index and never stored. A Feistel network permutes a power of
two; a result that is no sample's number is permuted again until it is one ("cycle walking"). So the position of a run is one
number, the step, on any number of ranks.
"""

import numpy as np
from numpy.typing import NDArray

from rankloom.base.errors import BatchError, DataError
from rankloom.base.rng import key_to_seed

Ids = NDArray[np.int64]

ROUNDS = 8     # 4 look random to any cheap test; 8 leave a margin for tiny domains


def permute(index: Ids, n: int, key: int) -> Ids:
    """A pseudo-random permutation of 0 .. n-1, applied to each `index`.

    index: [k], each in 0 .. n-1 -> [k]. O(k) time and memory, whatever n is.
    source: Luby & Rackoff 1988 (Feistel); Black & Rogaway 2002 (cycle walking)
    """
    bits = max(2, (n - 1).bit_length())
    keys = [np.uint64(key_to_seed(key, "round", r)) for r in range(ROUNDS)]
    out = index.astype(np.uint64)
    outside = np.ones(len(out), dtype=bool)
    while outside.any():      # the domain is less than twice n (or 4): two rounds on average
        out[outside] = _feistel(out[outside], bits, keys)
        outside = out >= n
    return out.astype(np.int64)


def _feistel(x: NDArray[np.uint64], bits: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    """A permutation of 0 .. 2**bits - 1: in turn, each half is XORed with a hash of the other."""
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << (bits // 2)) - 1), np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = x >> low_bits, x & low_mask
    for r, key in enumerate(keys):
        if r % 2:
            low = low ^ (_mix(high ^ key) & low_mask)
        else:
            high = high ^ (_mix(low ^ key) & high_mask)
    return (high << low_bits) | low


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A 64-bit hash in which each bit of x reaches each bit of the result. Source: splitmix64, Steele et al. 2014."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_at(position: Ids, n_samples: int, seed: int) -> Ids:
    """The sample at each position of an endless run: epoch after epoch, each in its own order.

    position: [k] -> ids [k], each in 0 .. n_samples-1
    raises: DataError when there are no samples
    """
    if n_samples < 1:
        raise DataError("there are no samples to order; the data is shorter than one sequence")
    epoch, index = np.divmod(position, n_samples)
    ids = np.empty_like(position)
    for e in np.unique(epoch):
        mine = epoch == e
        ids[mine] = permute(index[mine], n_samples, key_to_seed(seed, "order", int(e)))
    return ids


def samples_of_step(step: int, global_batch: int, n_samples: int, seed: int, *, rows: range | None = None) -> Ids:
    """The samples of a step, counted from 0, in the order of the global batch: all [global_batch], or those of its `rows`.

    A step may end one epoch and begin the next. A batch larger than the data repeats samples, as epochs do.
    """
    if step < 0 or global_batch < 1:
        raise BatchError(f"step {step} with a global batch of {global_batch}: steps start at 0, batches at 1 sample")
    rows = range(global_batch) if rows is None else rows
    return sample_at(np.arange(rows.start, rows.stop, dtype=np.int64) + step * global_batch, n_samples, seed)
