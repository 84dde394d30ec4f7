"""A replaced file is whole or untouched."""

import pytest

from rankloom.train.files import replacing


def test_a_block_that_ends_well_replaces_the_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old", "a reader in between sees the old file"
    assert path.read_text() == "new"


def test_a_block_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="disk"), replacing(path) as temporary:
        temporary.write_text("half")
        raise OSError("disk")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
