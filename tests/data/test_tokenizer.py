"""Both tokenizers keep one contract: any text comes back, and no text can end a document."""

import json
import sys

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rankloom.base.errors import ConfigError, DataError
from rankloom.data.corpus import prepare_corpus
from rankloom.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe

SAMPLE = ["the quick brown fox jumps over the lazy dog. " * 20, "def f(x):\n    return x + 1\n" * 20,
          "Gr\u00fc\u00dfe, \u4e16\u754c \U0001f642 " * 20]
BPE = train_bpe(SAMPLE, 400)
BOTH = pytest.mark.parametrize("made", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
TRICKY = ["", " ", "\n\n\t ", "plain", "h\u00e9llo w\u00f6rld", "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
          "\U0001f642\U0001f469\u200d\U0001f469\u200d\U0001f467",
          "a\r\nb\x00c", "<|endoftext|>", "x<|endoftext|>y", " lead"]


@BOTH
@pytest.mark.parametrize("text", TRICKY)
def test_any_text_comes_back_unchanged(made, text):
    assert made.decode(made.encode(text)) == text


@BOTH
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=80)
def test_random_text_comes_back_unchanged_and_never_ends_a_document(made, text):
    tokens = made.encode(text)
    assert made.decode(tokens) == text
    assert made.eot not in tokens
    assert all(0 <= t < made.vocab_size for t in tokens)


@BOTH
def test_text_that_spells_end_of_text_does_not_end_a_document(made):
    assert made.eot not in made.encode("one<|endoftext|>two")
    assert made.eot not in made.encode_batch(["one<|endoftext|>two"])[0].tolist()


@BOTH
def test_a_batch_encodes_as_its_texts_do(made):
    assert [tokens.tolist() for tokens in made.encode_batch(TRICKY)] == [made.encode(text) for text in TRICKY]


@BOTH
def test_end_of_text_decodes_to_nothing(made):
    assert made.decode([*made.encode("a"), made.eot, *made.encode("b")]) == "ab"


@BOTH
def test_half_a_character_becomes_a_replacement_not_an_error(made):
    rare = made.encode("\u0950")          # 3 bytes that no merge joined
    assert len(rare) == 3
    assert made.decode(rare[:2]) == "\ufffd"


@BOTH
def test_a_saved_tokenizer_is_the_same_tokenizer(made, tmp_path):
    path = tmp_path / "tokenizer.json"
    made.save(path)
    back = load_tokenizer(path)
    assert (type(back), back.vocab_size, back.eot) == (type(made), made.vocab_size, made.eot)
    assert [back.encode(text) for text in TRICKY] == [made.encode(text) for text in TRICKY]


def test_a_tilde_before_a_tokenizer_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    assert isinstance(load_tokenizer("~/tokenizer.json"), ByteTokenizer)


def test_bpe_shortens_what_it_was_trained_on():
    assert BPE.vocab_size <= 400
    assert len(BPE.encode(SAMPLE[0])) < len(SAMPLE[0]) / 3


def test_bpe_training_gives_the_same_tokenizer_each_time():
    assert train_bpe(SAMPLE, 400).inner.to_str() == BPE.inner.to_str()


def test_a_short_text_gives_fewer_tokens_than_asked_for():
    small = train_bpe(["ab ab"], 5000)
    assert 257 <= small.vocab_size < 270
    assert small.decode(small.encode("zebra")) == "zebra"


@pytest.mark.parametrize("size", [0, 256])
def test_a_vocabulary_too_small_for_all_bytes_is_refused(size):
    with pytest.raises(ConfigError, match=rf"vocab_size = {size}.*257 or more"):
        train_bpe(SAMPLE, size)


def test_files_that_are_no_tokenizers_are_named(tmp_path):
    path = tmp_path / "t.json"
    for content, message in (("not json", "not a tokenizer file"), ('{"a": 1}', "not a tokenizer.json")):
        path.write_text(content)
        with pytest.raises(DataError, match=message) as caught:
            load_tokenizer(path)
        assert str(path) in str(caught.value)
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path / "missing.json")


def test_a_tokenizer_from_elsewhere_needs_an_end_of_text(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    path = tmp_path / "other.json"
    inner.save(str(path))
    with pytest.raises(DataError, match="no end-of-text token"):
        load_tokenizer(path)
    inner.add_special_tokens(["</s>"])
    inner.save(str(path))
    assert load_tokenizer(path).eot == json.loads(path.read_text())["added_tokens"][0]["id"]


@pytest.mark.parametrize("ask", [lambda inner: inner.enable_truncation(4), lambda inner: inner.enable_padding(length=64)],
                         ids=["truncation", "padding"])
def test_lengths_that_a_file_from_elsewhere_asks_for_neither_cut_nor_fill_up_texts(tmp_path, ask):
    made, path = train_bpe(SAMPLE, 400), tmp_path / "model.json"
    ask(made.inner)
    made.save(path)
    assert load_tokenizer(path).encode(SAMPLE[0]) == BPE.encode(SAMPLE[0])
    assert [tokens.tolist() for tokens in load_tokenizer(path).encode_batch(SAMPLE)] == [BPE.encode(text) for text in SAMPLE]


def test_a_tokenizer_from_elsewhere_adds_nothing_to_a_text_and_ends_it_as_ours_do(tmp_path):
    """As those of Llama, which begin every text with a token."""
    inner = train_bpe(SAMPLE, 400).inner
    inner.add_special_tokens(["</s>", "<s>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))])
    inner.save(str(tmp_path / "model.json"))
    loaded = load_tokenizer(tmp_path / "model.json")
    assert loaded.encode(SAMPLE[0]) == loaded.encode_batch(SAMPLE)[0].tolist() == BPE.encode(SAMPLE[0])
    assert loaded.eot == BPE.eot


def test_numbers_with_gaps_fit_in_the_vocabulary(tmp_path):
    words = {"<|endoftext|>": 0, "[UNK]": 1, "a": 70_000, "b": 70_003}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "gaps.json"))
    loaded = load_tokenizer(tmp_path / "gaps.json")
    assert loaded.vocab_size == 70_004
    (tmp_path / "text.txt").write_text("a b\n" * 50)
    corpus = prepare_corpus(tmp_path / "text.txt", tokenizer=tmp_path / "gaps.json", cache=tmp_path / "cache")
    assert corpus.train[:4].tolist() == [70_000, 70_003, 70_000, 70_003]


@BOTH
def test_a_prompt_that_is_not_utf_8_is_named(made):
    with pytest.raises(DataError, match=r"the prompt is not UTF-8: its character 2 is '\\udcff'"):
        made.encode("ab" + b"\xff".decode(errors="surrogateescape"))


def test_without_the_library_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r'pip install tokenizers.*"bytes"'):
        train_bpe(SAMPLE, 400)
