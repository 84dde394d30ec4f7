"""A replaced file is whole or untouched."""

import os
from pathlib import Path

import pytest

from rankloom.base.errors import StorageError
from rankloom.base.files import expect_file, json_object, replacing


def test_a_block_that_ends_well_replaces_the_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old", "a reader in between sees the old file"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_block_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="disk"), replacing(path) as temporary:
        temporary.write_text("half")
        raise OSError("disk")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def no_links(*names):
    raise OSError("no links")


@pytest.mark.parametrize("links", [True, False])
def test_of_several_writers_the_first_wins_when_told_so(tmp_path, links, monkeypatch):
    path = tmp_path / "x"
    if not links:   # a file system without hard links: who comes later is asked by nobody, and the file is whole all the same
        monkeypatch.setattr(os, "link", no_links)
    with replacing(path, keep_old=True) as outer, replacing(path, keep_old=True) as inner:
        outer.write_text("done last")
        inner.write_text("done first")
    assert path.read_text() == ("done first" if links else "done last")
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_told_before_the_work():
    with pytest.raises(StorageError, match="--save /proc/links.json: /proc cannot be written"):
        expect_file("--save", Path("/proc/links.json"), ".json")
    expect_file("--save", None, ".json")
    with pytest.raises(StorageError, match="cannot be written .File name too long.; give another folder"):   # or no permission to look
        expect_file("--save", Path("x" * 300, "links.json"), ".json")


@pytest.mark.parametrize(("text", "found"), [('{"a": 1}', {"a": 1}), ('{"a"', {}), ("[1]", {}), (None, {})])
def test_a_json_file_that_is_missing_or_no_whole_object_is_empty(tmp_path, text, found):
    if text is not None:
        (tmp_path / "x.json").write_text(text)
    assert json_object(tmp_path / "x.json") == found
