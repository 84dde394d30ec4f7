"""Files of a checkpoint: what was written is read in any other boxes, and what is damaged or half there is refused."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from patience import AT_ONCE
from rankloom.base.errors import ConfigError, DataError, StorageError
from rankloom.base.layout import Span
from rankloom.base.spans import boxes_of_run, shape_of, whole_box, within
from rankloom.checkpoint import files
from rankloom.checkpoint.files import (
    FORMATS,
    Reader,
    commit,
    expect_free,
    expect_unchanged,
    expect_writable,
    file_name,
    read_manifest,
    reading,
    removing,
    sole_writer,
    write_parts,
)
from rankloom.checkpoint.manifest import Part, announce, assemble, assign_writers, key_of, to_json

TOKENS = ("0" * 12, "1" * 12)


def whole(name, values):
    return Part(name, tuple(values.shape), whole_box(values.shape), values)


def cut(name, values, at):
    """Two runs of the flat memory of `values`, as two ranks would have them."""
    box = whole_box(values.shape)
    runs = (0, at), (at, values.numel())
    return [[Part(name, tuple(values.shape), each, values[within(each, box)]) for each in boxes_of_run(values.shape, *run)] for run in runs]


def save(folder, ranks, token=TOKENS[0], facts=None):
    folder.mkdir(exist_ok=True)
    announced = [announce(parts) for parts in ranks]
    shares = assign_writers(announced)
    files = [write_parts(folder / file_name(token, rank), [ranks[rank][number] for number in share]) for rank, share in enumerate(shares)]
    made = assemble(announced, shares, files, facts or {})
    commit(folder, made)
    return made


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (5, 3), (2, 0, 3), (3, 4, 2)], ids=str)
def test_what_was_written_in_two_runs_is_read_in_two_others(tmp_path, dtype, shape):
    values = torch.arange(torch.Size(shape).numel()).remainder(2 if dtype is torch.bool else 100).view(shape).to(dtype)
    saved = cut("w", values, values.numel() // 3) if values.numel() > 1 else [[whole("w", values)], []]
    manifest = save(tmp_path, saved)
    into = torch.zeros_like(values)
    with Reader(tmp_path, manifest) as reader:
        for parts in cut("w", into, 2 * values.numel() // 3) if values.numel() > 1 else [[whole("w", into)]]:
            for part in parts:
                reader.fill(part)
    assert torch.equal(into.view(torch.uint8) if shape else into, values.view(torch.uint8) if shape else values)


def test_memory_in_any_order_is_written_as_it_reads_and_the_file_is_plain_safetensors(tmp_path):
    values = torch.randn(4, 6).t()[1:5, ::2]
    part = whole("w", values)
    write_parts(tmp_path / "x.safetensors", [part])
    assert torch.equal(load_file(tmp_path / "x.safetensors")[key_of("w", part.box)], values)


@pytest.mark.parametrize("values, said", [
    (torch.zeros(1, dtype=torch.complex128), "w is torch.complex128, which a checkpoint cannot store"),
    (torch.zeros(1).expand(4), "w is expanded: several elements share memory"),
    (torch.eye(2).to_sparse(), "w is torch.sparse_coo: a checkpoint keeps dense tensors only"),
], ids=["complex128", "expanded", "sparse"])
def test_what_could_not_be_read_back_is_told_before_anything_is_written(values, said):
    with pytest.raises(ConfigError, match=said):
        expect_writable([whole("w", values)])


def test_a_dim_of_one_element_may_have_any_stride():
    expect_writable([whole("w", torch.zeros(1).expand(1, 1).as_strided((1, 1), (0, 0)))])


def test_a_conjugate_is_written_as_it_reads(tmp_path):
    part = whole("w", torch.tensor([1 + 2j, 3 - 4j]).conj())
    write_parts(tmp_path / "x.safetensors", [part])
    assert torch.equal(load_file(tmp_path / "x.safetensors")[key_of("w", part.box)], part.values.resolve_conj())


def test_a_manifest_of_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "file").touch()
    for nothing in (tmp_path, tmp_path / "file"):
        expect_free(nothing)
    save(tmp_path, [[whole("w", torch.zeros(3))]])
    expect_free(tmp_path)
    (tmp_path / "manifest.json").write_text('{"name": "my app"}')
    with pytest.raises(ConfigError, match="not of a checkpoint that can be read, so it is not overwritten"):
        expect_free(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="so it is not overwritten"):
        expect_free(tmp_path)
    with pytest.raises(DataError, match="manifest.json: cannot be read"):
        read_manifest(tmp_path)


def test_a_disk_that_syncs_no_folders_and_keeps_old_files_has_the_new_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, [[whole("w", torch.zeros(3))]])

    def refuse(*_, **__):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(files, "_sync_folder", refuse)
    monkeypatch.setattr(files.Path, "unlink", refuse)
    made = save(tmp_path, [[whole("w", torch.ones(3))]], TOKENS[1])
    assert read_manifest(tmp_path)[1] == made and (tmp_path / file_name(TOKENS[0], 0)).exists()


def test_a_folder_that_cannot_be_listed_has_the_new_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, [[whole("w", torch.zeros(3))]])

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files.Path, "iterdir", refuse)
    made = save(tmp_path, [[whole("w", torch.ones(3))]], TOKENS[1])
    monkeypatch.undo()
    assert read_manifest(tmp_path)[1] == made and (tmp_path / file_name(TOKENS[0], 0)).exists()


def test_one_save_at_a_time_has_a_folder_whatever_a_killed_one_has_left_there(tmp_path):
    (tmp_path / files.LOCK).touch()
    with sole_writer(tmp_path), pytest.raises(StorageError, match="another job is saving into this folder"), sole_writer(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_save_leaves_no_file_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    with sole_writer(tmp_path):
        save(tmp_path, [[whole("w", torch.zeros(3))]])
    assert os.listdir("/proc/self/fd") == before


def test_a_lock_that_its_holder_removed_while_another_opened_it_is_none(tmp_path, monkeypatch):
    """Else a third job, which makes the file anew, would have the folder too."""
    real = files.fcntl.flock
    monkeypatch.setattr(files.fcntl, "flock", lambda *how: ((tmp_path / files.LOCK).unlink(), real(*how)))
    with pytest.raises(StorageError, match="another job is saving into this folder"), sole_writer(tmp_path):
        pass


def test_files_that_somebody_reads_are_left_to_the_next_save(tmp_path):
    """A load that had read the manifest spoke of a damaged checkpoint, or had loaded half of it."""
    before = save(tmp_path, [[whole("w", torch.zeros(3))]])
    into = torch.ones(3)
    with reading(tmp_path):
        after = save(tmp_path, [[whole("w", torch.ones(3))]], TOKENS[1])
        assert read_manifest(tmp_path)[1] == after
        expect_unchanged(tmp_path, before.files)
        with Reader(tmp_path, before) as reader:
            reader.fill(whole("w", into))
    assert into.sum() == 0
    save(tmp_path, [[whole("w", torch.ones(3))]], "2" * 12)
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", file_name("2" * 12, 0)}


def test_who_would_read_waits_while_files_are_removed(tmp_path):
    save(tmp_path, [[whole("w", torch.zeros(3))]])
    with ThreadPoolExecutor(1) as beside:
        with removing(tmp_path) as unread:
            read = beside.submit(read_manifest, tmp_path)
            with pytest.raises(TimeoutError):
                read.result(timeout=0.2)
        assert unread and read.result(AT_ONCE)


def test_where_a_file_system_has_no_locks_saves_go_on_without(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    with sole_writer(tmp_path), sole_writer(tmp_path):
        pass
    with reading(tmp_path), removing(tmp_path) as unread:
        assert unread
    assert not list(tmp_path.iterdir())


def test_a_new_checkpoint_replaces_the_old_one_and_touches_no_other_file(tmp_path):
    strangers = ["model.safetensors", "notes.txt", "abc-00000.safetensors"]
    for name in strangers:
        (tmp_path / name).write_text("mine")
    (tmp_path / file_name("f" * 12, 7)).write_text("of a save that was never finished")
    (tmp_path / f".manifest.json.{'f' * 12}.tmp").write_text("and of one that was killed as it wrote its manifest")
    save(tmp_path, [[whole("w", torch.zeros(3))]])
    save(tmp_path, [[whole("w", torch.ones(3))]], TOKENS[1])
    assert {path.name for path in tmp_path.iterdir()} == {*strangers, "manifest.json", file_name(TOKENS[1], 0)}
    assert all((tmp_path / name).read_text() == "mine" for name in strangers)


def test_a_file_that_cannot_be_written_whole_is_gone_and_the_checkpoint_from_before_is_there(tmp_path):
    before = save(tmp_path, [[whole("w", torch.zeros(3))]])
    with pytest.raises(ConfigError, match="cannot be written"):
        write_parts(tmp_path / "nowhere" / "x", [whole("w", torch.ones(3))])
    written = write_parts(tmp_path / file_name(TOKENS[1], 0), [whole("w", torch.ones(3))])
    (tmp_path / written.name).unlink()   # as on a host that does not share the folder
    announced = [announce([whole("w", torch.ones(3))])]
    with pytest.raises(ConfigError, match="give a folder that all hosts share"):
        commit(tmp_path, assemble(announced, assign_writers(announced), [written], {}))
    assert read_manifest(tmp_path)[1] == before


def test_a_file_that_the_disk_does_not_take_is_gone_and_the_error_is_told(tmp_path, monkeypatch):
    def refuse(handle):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(StorageError, match="cannot be written .Input/output error"):
        write_parts(tmp_path / "x", [whole("w", torch.ones(3))])
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["w", "weight", "a.longer.name"])
def test_tensors_begin_at_a_multiple_of_8_bytes(tmp_path, name):
    write_parts(tmp_path / "x", [whole(name, torch.ones(3))])
    assert (tmp_path / "x").stat().st_size % 8 == 12 % 8


def test_a_file_that_was_changed_cut_short_or_removed_is_noticed(tmp_path):
    manifest = save(tmp_path, [[whole("w", torch.zeros(300))]])
    path = tmp_path / manifest.files[0].name
    data = bytearray(path.read_bytes())
    expect_unchanged(tmp_path, manifest.files)
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="has SHA-256 .* the file is damaged"):
        expect_unchanged(tmp_path, manifest.files)
    path.write_bytes(data[:-1])
    with pytest.raises(DataError, match="bytes, expected .* the checkpoint is damaged"):
        read_manifest(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="is not here: the checkpoint is damaged; copy it again from where it is whole, or take another"):
        read_manifest(tmp_path)


def test_a_checkpoint_is_on_the_disk_before_its_manifest_has_its_name_and_then_the_name_is(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def note(handle):
        synced.append((Path(os.readlink(f"/proc/self/fd/{handle}")).name, (tmp_path / "manifest.json").exists()))
        real(handle)

    monkeypatch.setattr(files.os, "fsync", note)
    save(tmp_path, [[whole("w", torch.zeros(3))]])
    (data, *before), (manifest, *then), (folder, *after) = synced
    assert (data, folder) == (file_name(TOKENS[0], 0), tmp_path.name) and manifest.startswith(".manifest.json.")
    assert [before, then, after] == [[False], [False], [True]]


def test_a_file_that_is_none_of_safetensors_is_named_as_it_is_read(tmp_path):
    manifest = save(tmp_path, [[part := whole("w", torch.zeros(3))]])
    path = tmp_path / manifest.files[0].name
    path.write_bytes(bytes(path.stat().st_size))
    with Reader(tmp_path, manifest) as reader, pytest.raises(DataError, match=f"{path.name}: w cannot be read"):
        reader.fill(part)


@pytest.mark.parametrize("name", ["../{}", "{}/", "other.safetensors"])
def test_a_manifest_that_names_files_elsewhere_is_refused(tmp_path, name):
    made = save(tmp_path / "a", [[whole("w", torch.zeros(3))]])
    other = [replace(file, name=name.format(file.name)) for file in made.files]
    (tmp_path / "a" / "manifest.json").write_text(to_json(replace(made, files=other)))
    with pytest.raises(DataError, match="manifest.json: names .*, expected files beside it such as 000000000000-00000.safetensors"):
        read_manifest(tmp_path / "a")


def test_a_tensor_that_is_of_another_dtype_in_its_file_is_refused(tmp_path):
    made = save(tmp_path, [[part := whole("w", torch.zeros(3))]])
    other = replace(made, tensors={"w": replace(made.tensors["w"], dtype=torch.float16)})
    with Reader(tmp_path, other) as reader, pytest.raises(DataError, match="w is torch.float32 in its file, .* says torch.float16"):
        reader.fill(part)


def test_where_there_is_no_checkpoint_the_reason_is_told(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        read_manifest(tmp_path / "never")
    with pytest.raises(DataError, match=r"holds no manifest.json"):
        read_manifest(tmp_path)


def test_a_reader_takes_no_more_than_the_box_that_is_asked_for(tmp_path):
    manifest = save(tmp_path, [[whole("w", torch.arange(12.0).view(3, 4))]])
    into = torch.full((3, 4), -1.0)
    box = (Span(1, 3), Span(1, 2))
    with Reader(tmp_path, manifest) as reader:
        reader.fill(Part("w", (3, 4), box, into[within(box, whole_box((3, 4)))]))
    assert into[1:3, 1].tolist() == [5.0, 9.0] and (into == -1).sum() == 10 and shape_of(box) == (2, 1)
