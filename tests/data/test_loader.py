"""The loader: this rank's rows of every step, made ahead in a thread that always ends."""

import gc
import threading
import time

import numpy as np
import pytest
import torch

from patience import AT_ONCE, wait_until
from rankloom.base.errors import BatchError, DataError
from rankloom.data import order
from rankloom.data.loader import Loader, TokenSamples, evaluation_batches
from rankloom.data.order import samples_of_step


def samples(n=50, seq_len=4):
    return TokenSamples(np.arange(n * seq_len + 1, dtype=np.uint16), seq_len)


class Watched:
    """Samples that remember what was asked for, and fail or wait when told to."""

    def __init__(self, n=50, broken=None, gate=None):
        self.n, self.broken, self.gate, self.asked = n, broken, gate, []

    def __len__(self):
        return self.n

    def batch(self, ids):
        self.asked.append(list(ids))
        if self.gate:
            self.gate.wait(60)
        if self.broken in ids:
            raise OSError("the disk is gone")
        rows = torch.tensor(ids)[:, None]
        return rows, rows


def loader_threads():
    return [t for t in threading.enumerate() if t.name == "rankloom-loader"]


def test_a_sample_is_asked_for_the_token_after_each_of_its_own():
    tokens, targets = samples().batch([0, 3])
    assert tokens.tolist() == [[0, 1, 2, 3], [12, 13, 14, 15]]
    assert targets.tolist() == [[1, 2, 3, 4], [13, 14, 15, 16]]
    assert tokens.dtype == targets.dtype == torch.int64


@pytest.mark.parametrize(("tokens", "count"), [(5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_samples_do_not_overlap_and_a_short_tail_is_left_out(tokens, count):
    cut = TokenSamples(np.arange(tokens), 4)
    assert len(cut) == count
    targets = cut.batch(range(count))[1].flatten().tolist()
    assert targets == list(range(1, 4 * count + 1))


def test_too_few_tokens_for_one_sample_is_an_error_with_the_numbers():
    with pytest.raises(DataError, match=r"4 tokens.*seq_len = 4.*needs 5"):
        TokenSamples(np.arange(4), 4)


def test_a_token_outside_the_vocabulary_is_found_when_it_is_read():
    cut = TokenSamples(np.array([1, 2, 3, 9, 1, 2, 3, 1, 2]), 4, vocab_size=9)
    cut.batch([1])
    with pytest.raises(DataError, match=r"token 9 .* vocabulary of 9"):
        cut.batch([0])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_the_ranks_rows_laid_together_are_the_global_batch_of_each_step(ranks):
    per_rank = []
    for rank in range(ranks):
        with Loader(samples(), global_batch=12, rank=rank, ranks=ranks, seed=7, steps=9) as loader:
            per_rank.append(list(loader))
    for step in range(9):
        rows = torch.cat([batches[step][0] for batches in per_rank])
        wanted, _ = samples().batch(samples_of_step(step, 12, 50, 7).tolist())
        assert torch.equal(rows, wanted)


def test_a_rank_finds_the_numbers_of_its_own_samples_only(monkeypatch):
    found, plain = [], order.permute
    monkeypatch.setattr(order, "permute", lambda index, *more: found.append(len(index)) or plain(index, *more))
    with Loader(samples(), global_batch=12, rank=1, ranks=3, seed=7, steps=3) as loader:
        assert len(list(loader)) == 3
    assert found == [4, 4, 4]


def test_resuming_on_another_number_of_ranks_gives_the_batches_that_would_have_come():
    with Loader(samples(), global_batch=6, seed=1, steps=8) as whole:
        straight = [tokens for tokens, _ in whole]
    resumed = []
    for rank in range(3):
        with Loader(samples(), global_batch=6, rank=rank, ranks=3, seed=1, start_step=5, steps=8) as loader:
            assert loader.step == 5
            resumed.append([tokens for tokens, _ in loader])
            assert loader.step == 8
    for step in range(3):
        assert torch.equal(torch.cat([r[step] for r in resumed]), straight[5 + step])


def test_it_runs_ahead_but_only_as_far_as_told():
    source = Watched()
    with Loader(source, global_batch=2, ahead=3) as loader:
        wait_until(lambda: len(source.asked) == 3)
        time.sleep(0.05)
        assert len(source.asked) == 3
        next(loader)
        wait_until(lambda: len(source.asked) == 4)


def test_closing_ends_the_thread_even_while_it_waits_for_room():
    loader = Loader(Watched(), global_batch=2, ahead=0)   # one is always made
    next(loader)
    thread = loader._thread
    loader.close()
    loader.close()
    assert not thread.is_alive()
    assert list(loader) == []


def test_a_loader_that_is_forgotten_ends_its_thread():
    loader = Loader(Watched(), global_batch=2)
    next(loader)
    thread = loader._thread
    del loader
    gc.collect()
    thread.join(AT_ONCE)
    assert not thread.is_alive()


def test_an_error_in_the_thread_comes_out_in_its_step_and_names_the_sample():
    ids = samples_of_step(1, 4, 50, 0).tolist()
    with Loader(Watched(broken=ids[2]), global_batch=4) as loader:
        next(loader)
        with pytest.raises(DataError, match=rf"step 1: sample {ids[2]}: the disk is gone") as caught:
            next(loader)
        assert isinstance(caught.value.__cause__, OSError)
        assert list(loader) == []
        assert not loader._thread.is_alive()


def test_an_empty_source_is_an_error_not_a_hang():
    with Loader(Watched(n=0), global_batch=4) as loader, pytest.raises(DataError, match="no samples"):
        next(loader)


def test_a_batch_smaller_than_the_ranks_is_refused():
    with pytest.raises(BatchError, match=r"global batch of 3 .* 4 ranks"):
        Loader(samples(), global_batch=3, rank=0, ranks=4)


def test_the_run_ends_after_its_last_step():
    with Loader(samples(), global_batch=2, start_step=3, steps=5) as loader:
        assert len(list(loader)) == 2
        assert list(loader) == []
    with Loader(samples(), global_batch=2, start_step=5, steps=5) as done:
        assert list(done) == []


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n", [1, 5, 23])
def test_evaluation_reads_each_sample_on_exactly_one_rank(ranks, n):
    seen = []
    for rank in range(ranks):
        for tokens, targets in evaluation_batches(samples(n), rows=4, rank=rank, ranks=ranks):
            assert 1 <= len(tokens) <= 4 and tokens.shape == targets.shape
            seen += tokens.tolist()
    assert seen == samples(n).batch(range(n))[0].tolist()


def test_an_error_in_evaluation_names_the_samples():
    with pytest.raises(DataError, match="samples 4 to 7: the disk is gone"):
        list(evaluation_batches(Watched(broken=6), rows=4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_arrive_on_the_gpu():
    with Loader(samples(), global_batch=4, steps=3, device="cuda") as loader:
        for step, (tokens, _) in enumerate(loader):
            assert tokens.is_cuda
            assert torch.equal(tokens.cpu(), samples().batch(samples_of_step(step, 4, 50, 0).tolist())[0])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_which_samples_share_a_batch_of_an_evaluation_does_not_depend_on_the_ranks(ranks):
    alone = [tokens.tolist() for tokens, _ in evaluation_batches(samples(11), rows=4)]
    dealt = [tokens.tolist() for rank in range(ranks) for tokens, _ in evaluation_batches(samples(11), rows=4, rank=rank, ranks=ranks)]
    assert dealt == alone and [len(batch) for batch in alone] == [4, 4, 3]
