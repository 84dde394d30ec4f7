"""This rank's batches, made by a thread ahead of the step. Read order.py first.

The position of a loader is one number, the step. The thread makes at most `ahead` batches in advance. It ends when the loader is
closed or garbage-collected. An error in the thread is raised where its batch is asked for.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rankloom.base.errors import BatchError, DataError, RankloomError
from rankloom.base.shares import share
from rankloom.data.order import samples_of_step

Batch = tuple[Tensor, Tensor]


class Samples(Protocol):
    """A data set whose samples are numbered from 0."""

    def __len__(self) -> int:
        """How many there are."""

    def batch(self, ids: Sequence[int]) -> Batch:
        """Inputs and targets of the samples `ids`, one row each, in this order."""


class TokenSamples:
    """Cuts a stream of tokens in samples of `seq_len` (T) that do not overlap.

    Sample i has inputs tokens[iT : iT+T] and targets tokens[iT+1 : iT+T+1]. So no token is a target twice. A last part too short
    for a sample is left out. name: of the tokens, for an error
    """

    def __init__(self, tokens: NDArray[Any], seq_len: int, vocab_size: int | None = None, *, name: str = "tokens"):
        self.tokens, self.seq_len, self.vocab_size = tokens, seq_len, vocab_size
        if len(self) < 1:
            raise DataError(f"{len(tokens)} {name} are too few for one sample of seq_len = {seq_len}, which needs "
                            f"{seq_len + 1}; use more text, another data.validation, or a smaller seq_len")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def batch(self, ids: Sequence[int]) -> Batch:
        """tokens [B, T] and targets [B, T], int64."""
        starts = np.asarray(ids, dtype=np.int64) * self.seq_len
        rows = np.stack([np.asarray(self.tokens[s:s + self.seq_len + 1], dtype=np.int64) for s in starts])
        if self.vocab_size is not None and rows.max() >= self.vocab_size:
            raise DataError(f"token {rows.max()} is outside the vocabulary of {self.vocab_size}; the data was made "
                            "with another tokenizer, or model.vocab_size is too small")
        whole = torch.from_numpy(rows)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()


class Loader:
    """Iterates over steps, from `start_step` on. Each gives this rank's contiguous rows of the global batch.

    steps:   the number of steps in the whole run, those before `start_step` included; left out, it never ends
    ahead:   batches made in advance
    device:  of the batches; copies to a GPU use pinned memory, and do not block

        with Loader(samples, global_batch=64, rank=world.rank, ranks=world.size, seed=0) as loader:
            for tokens, targets in loader: ...

    raises: BatchError when the global batch has fewer rows than there are ranks; while iterating, a DataError that names the step
            and the sample that failed
    """

    def __init__(self, samples: Samples, *, global_batch: int, rank: int = 0, ranks: int = 1, seed: int = 0,
                 start_step: int = 0, steps: int | None = None, ahead: int = 2, device: torch.device | str = "cpu"):
        if global_batch < ranks:
            raise BatchError(f"a global batch of {global_batch} cannot be cut over {ranks} ranks; "
                             f"make it {ranks} or more")
        self.step = start_step
        self._device = torch.device(device)
        self._producer = _Producer(samples, global_batch, share(rank, ranks, global_batch), seed,
                                   ahead=ahead, pin=self._device.type == "cuda")
        to_make = count(start_step) if steps is None else range(start_step, steps)
        self._thread = threading.Thread(target=self._producer.run, args=(to_make,), name="rankloom-loader", daemon=True)
        self._finalizer = weakref.finalize(self, self._producer.stop)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._producer.stopped.is_set():
            raise StopIteration
        item = self._producer.items.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        self._producer.slots.release()
        self.step += 1
        tokens, targets = (t.to(self._device, non_blocking=True) for t in item)
        return tokens, targets

    def close(self) -> None:
        """End the thread. May be called twice."""
        self._finalizer()
        self._thread.join()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Producer:
    """Makes the batches, in the thread. A reference to the loader would keep the loader alive for ever."""

    def __init__(self, samples: Samples, global_batch: int, rows: range, seed: int, *, ahead: int, pin: bool):
        self.samples, self.global_batch, self.rows = samples, global_batch, rows
        self.seed, self.pin = seed, pin
        self.items: SimpleQueue[Batch | BaseException] = SimpleQueue()
        self.slots = threading.Semaphore(max(1, ahead))
        self.stopped = threading.Event()

    def stop(self) -> None:
        """End the thread, also where it waits for a slot."""
        self.stopped.set()
        self.slots.release()

    def run(self, steps: Iterable[int]) -> None:
        """The thread: for each step wait for a free slot, then make its batch."""
        try:
            for step in steps:
                self.slots.acquire()
                if self.stopped.is_set():
                    break
                self.items.put(self.make(step))
            self.items.put(StopIteration())
        except BaseException as error:      # raised again in `__next__`, whatever its type
            self.items.put(error)

    def make(self, step: int) -> Batch:
        """This rank's batch of one step."""
        ids = samples_of_step(step, self.global_batch, len(self.samples), self.seed, rows=self.rows)
        try:
            tokens, targets = self.samples.batch(ids.tolist())
        except Exception as error:
            raise DataError(f"step {step}: {blame(self.samples, ids.tolist())}: {error}") from error
        return (tokens.pin_memory(), targets.pin_memory()) if self.pin else (tokens, targets)


def blame(samples: Samples, ids: Sequence[int]) -> str:
    """Name the first sample that fails by itself, or all where none does."""
    for i in ids:
        try:
            samples.batch([i])
        except Exception:
            return f"sample {i}"
    return f"samples {list(ids)} together"


def evaluation_batches(samples: Samples, *, rows: int, rank: int = 0, ranks: int = 1,
                       device: torch.device | str = "cpu") -> Iterator[Batch]:
    """This rank's batches of an evaluation. All ranks together get each sample once.

    Samples are cut in batches of `rows` (the last may be shorter), and whole batches are dealt to ranks. So a batch has the same
    samples, and its loss the same bits, on any number of ranks. Some ranks may have fewer batches than others, or none.
    """
    for batch in share(rank, ranks, -(-len(samples) // rows)):
        ids = range(batch * rows, min((batch + 1) * rows, len(samples)))
        try:
            tokens, targets = samples.batch(ids)
        except RankloomError:
            raise
        except Exception as error:
            raise DataError(f"evaluation: samples {ids.start} to {ids.stop - 1}: {error}") from error
        yield tokens.to(device), targets.to(device)
