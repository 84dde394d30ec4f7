"""A corpus: tokenised once, split without overlap, safe when ranks race, and honest about what cannot be read."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rankloom.base.errors import ConfigError, DataError
from rankloom.data import corpus as module
from rankloom.data.corpus import choose_split, prepare_corpus, text_pieces
from rankloom.data.text import Survey
from rankloom.data.tokenizer import ByteTokenizer, train_bpe


@pytest.fixture
def many(tmp_path):
    """40 documents, each with a word of its own."""
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"document{i:02} says: Gr\u00fc\u00dfe und viel Text\n" * 12)
    return folder


@pytest.fixture
def one(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("".join(f"line {i} of a long text\n" for i in range(400)))
    return path


def parts(corpus):
    """The documents of each side, as text."""
    sides = []
    for tokens in (corpus.train, corpus.validation):
        assert tokens[-1] == corpus.tokenizer.eot
        ends = np.flatnonzero(tokens == corpus.tokenizer.eot)
        sides.append([corpus.tokenizer.decode(piece.tolist()) for piece in np.split(tokens, ends + 1)[:-1]])
    return sides


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_every_document_comes_back_on_exactly_one_side(many, tmp_path, tokenizer):
    corpus = prepare_corpus(many, tokenizer=tokenizer, vocab_size=400, validation=0.1, cache=tmp_path / "c")
    train, held = parts(corpus)
    assert sorted(train + held) == [path.read_text() for path in sorted(many.iterdir())]
    assert len(held) == 4
    assert isinstance(corpus.train, np.memmap) and corpus.train.dtype == np.uint16
    assert corpus.vocab_size == corpus.tokenizer.vocab_size <= 400


def test_a_single_text_gives_its_tail_cut_at_a_line_end(one, tmp_path):
    train, held = parts(prepare_corpus(one, tokenizer="bytes", validation=0.25, cache=tmp_path / "c"))
    assert train[0] + held[0] == one.read_text()
    assert train[0].endswith("\n")
    assert len(held[0]) / len(one.read_text()) == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("line", ["x" * 1000, "x" * 999 + "\n"], ids=["open", "ended"])
def test_a_text_of_one_line_is_cut_all_the_same(tmp_path, line):
    path = tmp_path / "line.txt"
    path.write_text(line)
    corpus = prepare_corpus(path, tokenizer="bytes", validation=0.1, cache=tmp_path / "c")
    assert (len(corpus.train), len(corpus.validation)) == (901, 101)


def test_bpe_never_learns_from_validation_text(many, tmp_path, monkeypatch):
    learned = []

    def spy(texts, size):
        learned.extend(texts)
        return train_bpe(learned, size)

    monkeypatch.setattr(module, "train_bpe", spy)
    corpus = prepare_corpus(many, vocab_size=400, validation=0.2, cache=tmp_path / "c")
    train, held = parts(corpus)
    assert sorted(learned) == sorted(train)
    assert held and not set(held) & set(learned)


def test_bpe_learns_from_a_part_of_a_text_that_is_long(many, tmp_path, monkeypatch):
    learned = []
    monkeypatch.setattr(module, "BPE_CHARACTERS", 1000)
    monkeypatch.setattr(module, "train_bpe", lambda texts, size: learned.extend(texts) or train_bpe(learned, size))
    train, _ = parts(prepare_corpus(many, vocab_size=400, validation=0.2, cache=tmp_path / "c"))
    assert "".join(learned) == "".join(train)[:1000]


def test_the_second_time_nothing_is_encoded_or_trained(many, tmp_path, monkeypatch):
    first = prepare_corpus(many, vocab_size=400, cache=tmp_path / "c")
    for name in ("_encode", "train_bpe"):
        monkeypatch.setattr(module, name, None)
    again = prepare_corpus(many, vocab_size=400, cache=tmp_path / "c")
    assert np.array_equal(first.train, again.train) and np.array_equal(first.validation, again.validation)


@pytest.mark.parametrize("change", [dict(validation=0.3), dict(seed=1), dict(vocab_size=300), dict(tokenizer="bytes"),
                                    "text"])
def test_a_change_of_text_split_or_tokenizer_is_never_served_from_the_cache(many, tmp_path, change):
    before = prepare_corpus(many, vocab_size=400, cache=tmp_path / "c")
    if change == "text":
        for path in many.iterdir():   # as long as before, so as far as sizes tell it is the same split
            path.write_text(path.read_text().replace("viel", "mehr"))
        change = {}
    after = prepare_corpus(many, **{"vocab_size": 400, "cache": tmp_path / "c", **change})
    assert not (np.array_equal(before.train, after.train) and np.array_equal(before.validation, after.validation))


@pytest.mark.parametrize(("name", "content"), [
    ("*.train.bin", "\0\0"), ("*.validation.bin", "\0\0"), ("*.train.bin.json", ""), ("*.validation.bin.json", '{"dtype": "uint32"}'),
    *(("*[!n].json", content) for content in ("", "{}", "[]", '{"dtype": "u2,,"}', '{"dtype": "uint16", "train": null}'))])
def test_a_cache_damaged_by_a_crash_is_made_again(name, content, many, tmp_path):
    good = prepare_corpus(many, tokenizer="bytes", cache=tmp_path / "c")
    wanted = good.train.tolist(), good.validation.tolist()
    broken, = (tmp_path / "c" / "tokens").glob(name)
    broken.unlink()   # mapped memory stays
    broken.write_text(content)
    again = prepare_corpus(many, tokenizer="bytes", cache=tmp_path / "c")
    assert (again.train.tolist(), again.validation.tolist()) == wanted


def test_ranks_that_race_get_the_same_tokens(many, tmp_path):
    with ThreadPoolExecutor(4) as ranks:
        made = list(ranks.map(lambda _: prepare_corpus(many, vocab_size=400, cache=tmp_path / "c"), range(4)))
    for corpus in made[1:]:
        assert np.array_equal(corpus.train, made[0].train)
        assert corpus.tokenizer.inner.to_str() == made[0].tokenizer.inner.to_str()
    left = sorted(path.suffix for path in (tmp_path / "c").rglob("*") if path.is_file())
    assert left == [".bin"] * 2 + [".json"] * 4      # two arrays and their dtypes, the note, the tokenizer


def test_the_note_in_the_cache_says_what_the_tokens_are(many, tmp_path):
    corpus = prepare_corpus(many, tokenizer="bytes", cache=tmp_path / "c")
    note = json.loads(next(p for p in (tmp_path / "c" / "tokens").glob("*.json") if ".bin" not in p.name).read_text())
    assert (note["train"], note["validation"]) == (len(corpus.train), len(corpus.validation))
    assert note["dtype"] == "uint16" and len(note["source_sha256"]) == len(note["tokenizer_sha256"]) == 64


def test_a_saved_tokenizer_can_be_used_again(many, one, tmp_path):
    made = prepare_corpus(many, vocab_size=400, cache=tmp_path / "c").tokenizer
    made.save(tmp_path / "t.json")
    corpus = prepare_corpus(one, tokenizer=tmp_path / "t.json", cache=tmp_path / "c")
    assert "".join(parts(corpus)[0] + parts(corpus)[1]) == one.read_text()
    assert corpus.vocab_size == made.vocab_size


def test_long_documents_are_encoded_in_pieces_that_lay_together(one, tmp_path, monkeypatch):
    whole = prepare_corpus(one, tokenizer="bytes", cache=tmp_path / "c").train.tolist()
    monkeypatch.setattr(module, "PIECE", 100)
    assert prepare_corpus(one, tokenizer="bytes", cache=tmp_path / "d").train.tolist() == whole
    text = "ab\n" * 100 + "c" * 250
    assert "".join(text_pieces(text)) == text
    assert max(map(len, text_pieces(text))) <= 100
    assert all(piece.endswith("\n") for piece in list(text_pieces(text))[:3])
    assert list(text_pieces("")) == []


def test_long_work_reports_how_far_it_is(many, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 2000)
    seen = []
    prepare_corpus(many, vocab_size=300, cache=tmp_path / "c", progress=lambda what, done: seen.append((what, done)))
    encoding = [done for what, done in seen if what == "tokenize"]
    assert len(encoding) > 3 and encoding == sorted(encoding) and encoding[-1] == 1.0
    assert ("train tokenizer", 1.0) in seen


def test_a_huge_document_among_many_is_not_held_out_alone():
    split = choose_split(Survey("x", (1_000_000, *[100] * 30)), 0.1, seed=0)
    assert 0 not in split.held_out
    tails = choose_split(Survey("x", (1000,) * 30), 0.01, seed=0)      # each is larger than all of validation
    assert tails.held_out == frozenset()
    assert tails.cut(3, "x" * 1000) == ("x" * 990, "x" * 10)


@pytest.mark.parametrize(("sizes", "fraction"), [((1000,) * 50 + (3,), 0.01), ((1000,) + (5,) * 19, 0.05)])
def test_a_few_small_documents_among_large_ones_are_not_all_that_validates(sizes, fraction):
    split = choose_split(Survey("x", sizes), fraction, seed=0)
    kept = sum(len(split.cut(number, "x" * size)[1]) for number, size in enumerate(sizes))
    assert kept > fraction * sum(sizes) / 2


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5])
def test_a_validation_share_outside_zero_to_one_is_refused(one, tmp_path, fraction):
    with pytest.raises(ConfigError, match=r"data\.validation"):
        prepare_corpus(one, validation=fraction, cache=tmp_path)


def test_too_little_text_to_split_is_an_error_and_leaves_no_files(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("x")
    with pytest.raises(DataError, match=r"1 characters are too little"):
        prepare_corpus(path, tokenizer="bytes", cache=tmp_path / "c")
    assert [p for p in (tmp_path / "c").rglob("*") if p.is_file()] == []


def test_a_cache_that_cannot_be_written_is_named(one, tmp_path):
    (tmp_path / "c").write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"c: cannot keep tokens .*data\.cache"):
        prepare_corpus(one, tokenizer="bytes", cache=tmp_path / "c")


def test_a_full_disk_is_told_and_leaves_no_half_file(one, tmp_path, monkeypatch):
    def full(self, texts):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(ByteTokenizer, "encode_batch", full)
    with pytest.raises(DataError, match="No space left on device"):
        prepare_corpus(one, tokenizer="bytes", cache=tmp_path / "c")
    assert [p for p in (tmp_path / "c").rglob("*") if p.is_file()] == []


def test_token_arrays_are_taken_as_they_are(tmp_path):
    np.save(tmp_path / "t.npy", np.arange(100, dtype=np.uint16))
    corpus = prepare_corpus(tmp_path / "t.npy", vocab_size=100, validation=0.2)
    assert corpus.train.tolist() == list(range(80)) and corpus.validation.tolist() == list(range(80, 100))
    assert corpus.tokenizer is None and corpus.vocab_size == 100
    with pytest.raises(DataError, match="token 99 at position 99"):
        prepare_corpus(tmp_path / "t.npy", vocab_size=99)


def test_a_token_array_may_bring_its_tokenizer(tmp_path):
    np.save(tmp_path / "t.npy", np.frombuffer(b"hello world", dtype=np.uint8))
    ByteTokenizer().save(tmp_path / "t.json")
    corpus = prepare_corpus(tmp_path / "t.npy", tokenizer=tmp_path / "t.json", vocab_size=257, validation=0.5)
    assert corpus.tokenizer.decode(corpus.train.tolist()) == "hello"


def test_a_token_array_too_short_to_split_is_refused(tmp_path):
    np.save(tmp_path / "t.npy", np.zeros(1, dtype=np.uint16))
    with pytest.raises(DataError, match="too few"):
        prepare_corpus(tmp_path / "t.npy", vocab_size=9)


def test_without_a_home_folder_a_cache_must_be_named(one, tmp_path, monkeypatch):
    def none(_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(module.Path, "home", classmethod(none))
    with pytest.raises(ConfigError, match="no home folder to keep tokens in; name a folder for them, --data.cache FOLDER"):
        prepare_corpus(one, tokenizer="bytes")
    assert len(prepare_corpus(one, tokenizer="bytes", cache=tmp_path / "c").train)


def test_a_corpus_knows_its_split_again(one, many, tmp_path):
    ask = lambda source, **how: prepare_corpus(source, tokenizer="bytes", cache=tmp_path / "c", **how).split
    assert ask(one) == ask(one, seed=1) != ask(one, validation=0.2)   # the tail of one text is the same for each seed
    assert ask(many) != ask(many, seed=1)


def test_an_array_knows_its_split_again_by_its_length_its_two_ends_and_where_it_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SAMPLE", 10)   # tokens at each end
    plain = np.arange(100, dtype=np.uint16)
    first, last = (np.where(np.arange(100) == at, 7, plain) for at in (0, 99))
    asked = [(plain, 0.05), (plain[:99], 0.05), (first, 0.05), (last, 0.05), (plain, 0.1)]

    def split(number, tokens, validation):
        np.save(tmp_path / f"{number}.npy", tokens)
        return prepare_corpus(tmp_path / f"{number}.npy", vocab_size=200, validation=validation).split

    known = [split(number, *each) for number, each in enumerate(asked)]
    assert len(set(known)) == 5 and split("again", *asked[0]) == known[0]
