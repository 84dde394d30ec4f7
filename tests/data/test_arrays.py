"""Token arrays on disk: read as they were written, whole or not at all, and checked against the vocabulary."""

import json

import numpy as np
import pytest

from rankloom.base.errors import DataError
from rankloom.data import arrays
from rankloom.data.arrays import open_tokens, token_dtype


def test_the_dtype_is_the_smallest_that_holds_every_token():
    assert token_dtype(257) == token_dtype(65536) == np.uint16
    assert token_dtype(65537) == token_dtype(128256) == np.uint32


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_tokens_come_back_mapped_from_both_formats(tmp_path, dtype):
    tokens = np.array([5, 0, 250, 7], dtype=dtype)
    np.save(tmp_path / "t.npy", tokens)
    tokens.tofile(tmp_path / "t.bin")
    (tmp_path / "t.bin.json").write_text(json.dumps({"dtype": dtype}))
    for name in ("t.npy", "t.bin"):
        found = open_tokens(tmp_path / name, 251)
        assert isinstance(found, np.memmap) and found.dtype == tokens.dtype
        assert np.array_equal(found, tokens)


def test_a_bin_file_alone_is_uint16(tmp_path):
    np.array([1, 2, 65535], dtype=np.uint16).tofile(tmp_path / "t.bin")
    assert open_tokens(tmp_path / "t.bin").tolist() == [1, 2, 65535]


@pytest.mark.parametrize(("bad", "cure"), [(9, "raise data.vocab_size"), (-1, "it may mark what is no text")])
def test_a_token_outside_the_vocabulary_is_named_with_its_place_and_a_cure(tmp_path, bad, cure, monkeypatch):
    monkeypatch.setattr(arrays, "_BLOCK", 4)
    tokens = np.arange(9, dtype=np.int32)
    tokens[6] = bad
    np.save(tmp_path / "t.npy", tokens)
    open_tokens(tmp_path / "t.npy")
    with pytest.raises(DataError, match=rf"t.npy: token {bad} at position 6 .*0 to 8; .*{cure}"):
        open_tokens(tmp_path / "t.npy", 9)


def test_the_check_reports_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "_BLOCK", 4)
    np.save(tmp_path / "t.npy", np.zeros(10, dtype=np.uint16))
    seen = []
    open_tokens(tmp_path / "t.npy", 5, progress=lambda what, done: seen.append((what, done)))
    assert seen == [("check tokens", 0.4), ("check tokens", 0.8), ("check tokens", 1.0)]


def test_what_is_not_a_token_array_is_refused(tmp_path):
    np.save(tmp_path / "float.npy", np.ones(3))
    np.save(tmp_path / "flat.npy", np.ones((2, 2), dtype=np.int64))
    np.save(tmp_path / "none.npy", np.ones(0, dtype=np.int64))
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    with (tmp_path / "several.npy").open("wb") as file:
        np.savez(file, tokens=np.ones(3, dtype=np.int64))
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "named.bin").write_bytes(b"ab")
    (tmp_path / "named.bin.json").write_text('{"dtype": "float32"}')
    for name, message in {"float.npy": "float64", "flat.npy": r"\(2, 2\)", "none.npy": r"\(0,\)",
                          "object.npy": "not an array", "text.npy": "not an array", "several.npy": "not an array", "empty.bin": "0 bytes",
                          "odd.bin": "3 bytes", "named.bin": "'float32'", "missing.bin": "No such file"}.items():
        with pytest.raises(DataError, match=message) as caught:
            open_tokens(tmp_path / name)
        assert name in str(caught.value)
