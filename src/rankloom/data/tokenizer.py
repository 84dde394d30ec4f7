"""Tokenizers: plain bytes, which need no library, or byte-level BPE, trained on the text itself."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rankloom.base.errors import ConfigError, DataError
from rankloom.base.files import expanded
from rankloom.data.text import disk

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>")     # as in tokenizer.json files from elsewhere
BYTES = 256


class Tokenizer(Protocol):
    """Lossless: decode(encode(text)) == text. The end of a document has its own token."""

    @property
    def vocab_size(self) -> int:
        """Tokens are 0 .. vocab_size - 1."""

    @property
    def eot(self) -> int:
        """The token that ends a document; no text encodes to it, and it decodes to nothing."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, such as a prompt, without an end-of-text token.

        raises: DataError for a text that is not UTF-8
        """

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The tokens of many texts, faster than one by one."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens; bytes that are not UTF-8 (half a character) become U+FFFD."""

    def save(self, path: Path) -> None:
        """Write a file for `load_tokenizer`."""


class ByteTokenizer:
    """Each byte of UTF-8 is its own token; 256 is end of text."""

    vocab_size = BYTES + 1
    eot = BYTES

    def encode(self, text: str) -> list[int]:
        """One token per byte."""
        return list(_as_utf_8(text))

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Views of the bytes themselves."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """The bytes as text; tokens that are no byte are left out."""
        return bytes(t for t in tokens if t < BYTES).decode(errors="replace")

    def save(self, path: Path) -> None:
        """Write a file that marks a ByteTokenizer; it has no other state."""
        with disk(path, "write the tokenizer"):
            path.write_text(json.dumps({"rankloom": "bytes", "vocab_size": self.vocab_size}) + "\n")


class BPETokenizer:
    """Byte-level BPE of the `tokenizers` library, in its tokenizer.json format. It never truncates or pads, even if the file says so."""

    def __init__(self, inner: "tokenizers.Tokenizer", place: str = "tokenizer"):
        self.inner = inner
        self.inner.encode_special_tokens = True       # a text that contains "<|endoftext|>" must not end there
        self.inner.no_truncation()                    # a foreign file may have such settings of its model: they would
        self.inner.no_padding()                       # cut long texts, and pad short ones
        ends = [end for end in map(inner.token_to_id, _KNOWN_ENDS) if end is not None]
        if not ends:
            raise DataError(f"{place}: has no end-of-text token to put between documents; "
                            f"one of {', '.join(_KNOWN_ENDS)} is needed")
        self.eot: int = ends[0]
        self.vocab_size = 1 + max(inner.get_vocab().values())   # not their count: numbers may have gaps

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        _as_utf_8(text)
        return list(self.inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The tokens of many texts."""
        batch = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, dtype=np.uint32) for one in batch]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens, without end-of-text tokens."""
        return str(self.inner.decode([int(t) for t in tokens], skip_special_tokens=True))

    def save(self, path: Path) -> None:
        """Write tokenizer.json."""
        with disk(path, "write the tokenizer"):
            path.write_text(self.inner.to_str(), encoding="utf-8")


def _as_utf_8(text: str) -> bytes:
    """Raises DataError for a text that has no UTF-8 form, such as one from a command line in another encoding."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"the prompt is not UTF-8: its character {error.start} is {text[error.start]!a}, a byte or half of a surrogate "
                        "pair that stands for no character") from error


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Learn the merges that shorten these texts most. Short texts may give fewer tokens than asked for.

    raises: ConfigError for a vocabulary that cannot hold the 256 bytes and end of text
    """
    if vocab_size <= BYTES:
        raise ConfigError(f"data.vocab_size = {vocab_size}: byte-level BPE needs {BYTES + 1} or more, "
                          "for 256 bytes and the end of text")
    library = _library()
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator(texts, trainer)
    return BPETokenizer(inner)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer saved by rankloom, or another library's tokenizer.json."""
    path = expanded(path)
    with disk(path, "read the tokenizer"):
        data = path.read_bytes()
    try:
        entry = json.loads(data)
    except ValueError as error:
        raise DataError(f"{path}: not a tokenizer file: {error}. Delete it if it lies in the cache") from error
    if isinstance(entry, dict) and entry.get("rankloom") == "bytes":
        return ByteTokenizer()
    try:
        inner = _library().Tokenizer.from_str(data.decode())
    except ConfigError:
        raise
    except Exception as error:      # the library raises plain Exception
        raise DataError(f"{path}: not a tokenizer.json of the tokenizers library: {error}") from error
    return BPETokenizer(inner, str(path))


def expect_tokenizer(named: str | None) -> None:
    """Before a run has a folder: check that a tokenizer that is named by a file can be read from it. raises: ConfigError, DataError"""
    if named not in (None, "bytes", "bpe"):
        load_tokenizer(named)


def _library() -> Any:
    try:
        import tokenizers  # an optional extra
    except ImportError as error:
        raise ConfigError("BPE needs the tokenizers library: pip install tokenizers; "
                          'or use data.tokenizer = "bytes"') from error
    return tokenizers
