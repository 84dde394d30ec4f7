"""Text from a model: prompts, and how they are continued."""

import numpy as np
import pytest

from rankloom.base.errors import DataError
from rankloom.data.tokenizer import ByteTokenizer
from rankloom.models.config import GPTConfig
from rankloom.models.gpt import GPT
from rankloom.train.run.samples import continue_texts, starts

SHAPE = GPTConfig(vocab_size=257, seq_len=16, width=16, layers=1, heads=2, kv_heads=1, ffn=16)


def test_starts_are_spread_over_the_text():
    assert starts(np.arange(100), 3, 4) == [[0, 1, 2, 3], [32, 33, 34, 35], [64, 65, 66, 67]]


def test_starts_of_a_short_text_are_shorter():
    assert starts(np.arange(3), 2, 8) == [[0, 1, 2], [0, 1, 2]]
    assert starts(np.arange(3), 0, 8) == []


def test_each_text_begins_with_its_prompt_and_goes_on():
    tokenizer = ByteTokenizer()
    texts = continue_texts(GPT(SHAPE), tokenizer, [tokenizer.encode("abc"), []], max_tokens=5)
    assert texts[0].startswith("abc") and len(texts[0]) > 3
    assert len(texts[1]) <= 5, "an empty prompt adds nothing of its own"


def test_the_same_seed_writes_the_same_text_and_another_seed_another():
    tokenizer = ByteTokenizer()
    first, again, other = (
        continue_texts(GPT(SHAPE), tokenizer, [tokenizer.encode("a")], max_tokens=20, seed=seed)[0] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_prompt_that_the_model_cannot_know_is_an_error():
    with pytest.raises(DataError, match="vocabulary"):
        continue_texts(GPT(SHAPE), ByteTokenizer(), [[300]], max_tokens=1)
