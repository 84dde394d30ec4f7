"""Tokenise a source once, and cache its tokens on disk: training and validation parts that do not overlap.

The cache key is a hash of the text, the split and the tokenizer. Files are replaced atomically, the small .json last. So ranks
may race, and a crash leaves no half-written file. Read text.py, tokenizer.py and arrays.py first.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO

import numpy as np

from rankloom.base.errors import ConfigError, DataError
from rankloom.base.files import expanded, replacing
from rankloom.base.rng import key_to_seed
from rankloom.data.arrays import TOKEN_DTYPES, Progress, Tokens, open_tokens, read_json, token_dtype
from rankloom.data.order import permute
from rankloom.data.text import ARRAY_SUFFIXES, Document, Survey, disk, documents, survey
from rankloom.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe

SAMPLE = 1 << 18                 # tokens at each end of an array, by which it is known again
FORMAT = 2                       # of the cache; part of the key, so a new number ignores old files
FEW = 20                         # with fewer documents, validation takes the tail of each
BPE_CHARACTERS = 100_000_000     # of training text that BPE learns from
PIECE = 1 << 20                  # characters encoded at a time; longer documents are cut, at a line end


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens for training and for validation, mapped from disk, and their tokenizer (None for arrays, unless one was named)."""

    source: str
    train: Tokens
    validation: Tokens
    vocab_size: int
    tokenizer: Tokenizer | None
    split: str   # identifies the text, and which part of it is for validation


@dataclass(frozen=True, slots=True)
class Split:
    """Which text of a source is kept for validation: the documents `held_out`, by number; if there are none, the tail of each document."""

    survey: Survey
    fraction: float
    held_out: frozenset[int]

    def key(self, *more: object) -> str:
        """A key of the cache, for this text in these two parts, and what else is given."""
        return _cache_key(self.survey.fingerprint, self.fraction, tuple(sorted(self.held_out)), *more)

    def cut(self, number: int, text: str) -> tuple[str, str]:
        """The training and the validation part of a document; either may be empty."""
        if self.held_out:
            return ("", text) if number in self.held_out else (text, "")
        keep = int(len(text) * (1 - self.fraction))
        line_end = text.find("\n", keep)
        at = line_end + 1 if 0 <= line_end < len(text) - 1 else keep
        return text[:at], text[at:]


def prepare_corpus(source: str | Path, *, tokenizer: str | Path = "bpe", vocab_size: int = 4096,
                   validation: float = 0.05, cache: str | Path | None = None, seed: int = 0,
                   progress: Progress | None = None) -> Corpus:
    """The tokens of a source. They are read from the cache, or made and kept there.

    source:     "stdlib", "shakespeare", a text file, a folder, a .jsonl file; or tokens as .npy or .bin
    tokenizer:  "bpe" (trained on the training part), "bytes", or the path of a saved one
    vocab_size: BPE: how many tokens to learn; token arrays: every token must be below it
    validation: the share kept for validation: whole documents, drawn by `seed`. With fewer than 20 documents, or where whole
                documents would give less than half of this share, the tail of each document
    cache:      a folder; left out, ~/.cache/rankloom
    raises:     DataError, ConfigError
    """
    if not 0 < validation < 1:
        raise ConfigError(f"data.validation = {validation}; it must be between 0 and 1, for example 0.05")
    if Path(source).suffix in ARRAY_SUFFIXES:
        return _from_array(expanded(source), tokenizer, vocab_size, validation, progress)
    folder = _default_cache() if cache is None else expanded(cache)
    split = choose_split(survey(source), validation, seed)
    with disk(folder, "keep tokens in this cache folder (data.cache)"):
        chosen = _make_tokenizer(source, tokenizer, vocab_size, folder, split, progress)
        train, held_out = _cached_tokens(source, chosen, folder, split, progress)
    return Corpus(str(source), train, held_out, chosen.vocab_size, chosen, split.key())


def _default_cache() -> Path:
    try:
        return Path.home() / ".cache" / "rankloom"
    except RuntimeError as error:   # no $HOME, and no entry in /etc/passwd
        raise ConfigError("there is no home folder to keep tokens in; name a folder for them, --data.cache FOLDER") from error


def choose_split(surveyed: Survey, fraction: float, seed: int) -> Split:
    """Draw whole documents for validation, up to `fraction` of the text. With fewer than FEW documents, or where those that fit give
    less than half of `fraction`, take the tail of each document instead.
    """
    sizes = surveyed.sizes
    wanted = fraction * sum(sizes)
    left = wanted
    held_out = list[int]()
    if len(sizes) >= FEW:
        for number in permute(np.arange(len(sizes)), len(sizes), key_to_seed(seed, "validation")).tolist():
            if sizes[number] <= left:
                held_out.append(number)
                left -= sizes[number]
    return Split(surveyed, fraction, frozenset(held_out if left <= wanted / 2 else ()))


def _from_array(path: Path, tokenizer: str | Path, vocab_size: int, validation: float,
                progress: Progress | None) -> Corpus:
    tokens = open_tokens(path, vocab_size, progress=progress)
    at = int(len(tokens) * (1 - validation))
    if at < 1 or at >= len(tokens):
        raise DataError(f"{path}: {len(tokens)} tokens are too few to keep {validation:g} of them for validation")
    reader = load_tokenizer(tokenizer) if str(tokenizer) not in ("bpe", "bytes") else None
    sample = hashlib.sha256(tokens[:SAMPLE].tobytes() + tokens[-SAMPLE:].tobytes()).hexdigest()
    return Corpus(str(path), tokens[:at], tokens[at:], vocab_size, reader, _cache_key(len(tokens), at, sample))


def _cache_key(*parts: object) -> str:
    return hashlib.sha256(repr((FORMAT, *parts)).encode()).hexdigest()[:24]


def _make_tokenizer(source: str | Path, wanted: str | Path, vocab_size: int, folder: Path, split: Split,
                    progress: Progress | None) -> Tokenizer:
    """The tokenizer asked for. BPE is trained once; every rank reads the first file written."""
    if str(wanted) == "bytes":
        return ByteTokenizer()
    if str(wanted) != "bpe":
        return load_tokenizer(wanted)
    path = folder / "tokenizers" / f"{split.key(vocab_size)}.json"
    if not path.exists():
        if progress:
            progress("train tokenizer", 0.0)
        trained = train_bpe(_training_text(source, split), vocab_size)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, keep_old=True) as temporary:
            temporary.write_text(trained.inner.to_str(), encoding="utf-8")
        if progress:
            progress("train tokenizer", 1.0)
    return load_tokenizer(path)


def _training_text(source: str | Path, split: Split) -> Iterator[str]:
    """The text BPE learns from: training text only, at most BPE_CHARACTERS."""
    left = BPE_CHARACTERS
    for number, document in enumerate(documents(source)):
        text = split.cut(number, document.text)[0][:left]
        yield from text_pieces(text)
        left -= len(text)
        if left <= 0:
            return


def _cached_tokens(source: str | Path, tokenizer: Tokenizer, folder: Path, split: Split,
                   progress: Progress | None) -> tuple[Tokens, Tokens]:
    """Training and validation tokens; encodes them if the cache lacks any."""
    digest = tokenizer_hash(tokenizer)
    base = folder / "tokens" / split.key(digest)
    paths = base.with_suffix(".train.bin"), base.with_suffix(".validation.bin")
    notes = [Path(f"{path}.json") for path in (*paths, base)]
    if not _is_complete(notes, paths):
        counts = _encode(source, tokenizer, split, paths, progress)
        entry = {"source": str(source), "source_sha256": split.survey.fingerprint, "tokenizer_sha256": digest,
                 "dtype": token_dtype(tokenizer.vocab_size).name, "train": counts[0], "validation": counts[1]}
        for note in notes:
            with replacing(note) as temporary:
                temporary.write_text(json.dumps(entry))
    train, held_out = map(open_tokens, paths)
    return train, held_out


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """SHA-256 of a tokenizer's contents."""
    text = tokenizer.inner.to_str() if hasattr(tokenizer, "inner") else type(tokenizer).__name__
    return hashlib.sha256(text.encode()).hexdigest()


def _is_complete(notes: Sequence[Path], paths: tuple[Path, Path]) -> bool:
    """Whether both arrays exist, and are as long as all notes say. A power cut may leave notes empty: they count as missing."""
    try:
        entry, *others = map(read_json, notes)
        itemsize = {dtype.name: dtype.itemsize for dtype in TOKEN_DTYPES}[entry["dtype"]]
        wanted = [entry[part] * itemsize for part in ("train", "validation")]
        return wanted == [path.stat().st_size for path in paths] and all(other == entry for other in others)
    except (OSError, DataError, KeyError, TypeError):
        return False


def _encode(source: str | Path, tokenizer: Tokenizer, split: Split, paths: tuple[Path, Path],
            progress: Progress | None) -> tuple[int, int]:
    """Write both arrays; returns how many tokens each has."""
    total = max(1, sum(split.survey.sizes))
    done, counts = 0, [0, 0]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        files = [stack.enter_context(open(stack.enter_context(replacing(path)), "wb")) for path in paths]
        for batch in _batches(documents(source)):
            cut = [split.cut(number, document.text) for number, document in batch]
            for side in (0, 1):
                counts[side] += _append(files[side], [parts[side] for parts in cut if parts[side]], tokenizer)
            done += sum(len(document.text) for _, document in batch)
            if progress:
                progress("tokenize", min(1.0, done / total))
        if not all(counts):
            raise DataError(f"{source}: {total} characters are too little text to keep {split.fraction:g} of it "
                            "for validation; use more text or a larger data.validation")
    return counts[0], counts[1]


def _batches(every: Iterator[Document]) -> Iterator[list[tuple[int, Document]]]:
    """Numbered documents in groups of about PIECE characters."""
    group: list[tuple[int, Document]] = []
    size = 0
    for number, document in enumerate(every):
        group.append((number, document))
        size += len(document.text)
        if size >= PIECE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _append(file: IO[bytes], texts: Sequence[str], tokenizer: Tokenizer) -> int:
    """Append the tokens of some documents, each followed by the end-of-text token; returns how many tokens."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.eot], dtype=dtype)
    cut = [list(text_pieces(text)) for text in texts]
    encoded = iter(tokenizer.encode_batch([piece for parts in cut for piece in parts]))
    count = 0
    for parts in cut:
        for tokens in chain(islice(encoded, len(parts)), [end]):
            file.write(tokens.astype(dtype).tobytes())
            count += len(tokens)
    return count


def text_pieces(text: str) -> Iterator[str]:
    """A text in parts of at most PIECE characters, cut after a line end where there is one."""
    start = 0
    while start < len(text):
        stop = min(len(text), start + PIECE)
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop
