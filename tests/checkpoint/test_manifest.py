"""What ranks write of a checkpoint is dealt by a pure function: each element once, in even shares; a manifest says where it is."""

from dataclasses import replace

import pytest
import torch

from rankloom.base.errors import DataError, ModelMismatch
from rankloom.base.layout import Span
from rankloom.checkpoint.manifest import Part, SavedFile, SavedTensor, StoredBox, announce, assemble, assign_writers, from_json, to_json


def part(name, shape, box, dtype=torch.float32, **more):
    spans = tuple(Span(*span) for span in box)
    return Part(name, shape, spans, torch.zeros([stop - start for start, stop in box], dtype=dtype), **more)


HALVES = [announce([part("w", (4, 2), [(0, 2), (0, 2)])]), announce([part("w", (4, 2), [(2, 4), (0, 2)])])]
REPEATED = [announce([part(f"w{i}", (100,), [(0, 100)]) for i in range(8)])] * 4


def test_every_rank_writes_what_only_it_has():
    assert assign_writers(HALVES) == [[0], [0]]


def test_what_all_ranks_have_is_written_once_and_by_each_an_even_share():
    shares = assign_writers(REPEATED)
    assert sorted(number for share in shares for number in share) == list(range(8))
    assert [len(share) for share in shares] == [2, 2, 2, 2]


def test_shares_are_even_in_bytes_not_in_elements():
    parts = announce([part("wide", (100,), [(0, 100)], torch.float64), *(part(f"w{i}", (100,), [(0, 100)]) for i in range(2))])
    assert assign_writers([parts, parts]) == [[0], [1, 2]]


def test_a_copy_that_is_cut_in_another_way_is_nobodys_to_write():
    announced = [announce([part("w", (4,), [(0, 4)])]), announce([part("w", (4,), [(1, 4)], is_copy=True)])]
    assert assign_writers(announced) == [[0], []]


@pytest.mark.parametrize("second, said", [
    (part("w", (4, 2), [(3, 4), (0, 2)]), "6 elements of w between them, expected 8"),
    (part("w", (4, 3), [(2, 4), (0, 2)]), "w is float32 (4, 2) on rank 0 and float32 (4, 3) on rank 1"),
    (part("w", (4, 2), [(2, 4), (0, 2)], torch.float64), "w is float32 (4, 2) on rank 0 and float64 (4, 2) on rank 1"),
])
def test_ranks_that_do_not_hold_one_tensor_between_them_are_told(second, said):
    with pytest.raises(ModelMismatch) as error:
        assign_writers([HALVES[0], announce([second])])
    assert said in str(error.value)


def manifest():
    files = [SavedFile("a.safetensors", 16, "aa"), None, SavedFile("b.safetensors", 16, "bb")]
    announced = [HALVES[0], [], HALVES[1]]
    return assemble(announced, assign_writers(announced), files, {"run": {"step": 3}})


@pytest.mark.parametrize("pieces", [
    [(0, [0, 2], [0, 2])], [(0, [0, 2], [0, 2]), (0, [1, 3], [0, 2])], [(0, [0, 4], [0, 1])] * 2, [(0, [-4, 0], [0, 2])],
    [(0, [0, 8], [0, 1])], [(0, [0, 4])], [(0, [0, 4], [0, 2]), (0, [4, 0], [0, 2]), (0, [0, 4], [0, 2])],
], ids=["too few", "a hole", "twice", "before it", "beyond it", "too few dims", "less than none"])
def test_pieces_that_are_not_each_element_once_are_refused(pieces):
    stored = [StoredBox(file, tuple(Span(*span) for span in box)) for file, *box in pieces]
    made = replace(manifest(), tensors={"w": SavedTensor(torch.float32, (4, 2), stored)})
    with pytest.raises(DataError, match=r"here: the pieces of w are not each element of \(4, 2\) once; the manifest is damaged"):
        from_json(to_json(made), "here")


@pytest.mark.parametrize("file", [-1, 2])
def test_a_piece_in_no_file_is_refused(file):
    made = replace(manifest(), tensors={"w": SavedTensor(torch.float32, (), [StoredBox(file, ())])})
    with pytest.raises(DataError, match=f"here: has a piece of w in file {file} of 2"):
        from_json(to_json(made), "here")


def test_a_dtype_that_torch_does_not_have_is_refused():
    made = replace(manifest(), tensors={"w": SavedTensor("torch.float33", (4, 2), [])})
    with pytest.raises(DataError, match="here: is no manifest of a checkpoint .*float33"):
        from_json(to_json(made), "here")


def test_a_manifest_is_the_same_after_it_was_written_and_read():
    made = manifest()
    assert from_json(to_json(made), "here") == made
    assert [(piece.file, piece.box[0]) for piece in made.tensors["w"].pieces] == [(0, Span(0, 2)), (1, Span(2, 4))]


@pytest.mark.parametrize("text, said", [
    ("", "is no manifest"), ("[]", "is no manifest"), ("{}", "is no manifest"),
    ('{"format": 99}', "is of format 99, this rankloom reads 1"),
    (to_json(manifest()).replace('"step": 3', '"step": 4'), "is not what was written"),
    (to_json(manifest()).replace("[[2, 4], [0, 2]]", "[[2, 3], [0, 2]]"), "is not what was written"),
    (to_json(manifest())[:-20], "is no manifest"),
])
def test_a_damaged_manifest_is_refused_by_name(text, said):
    with pytest.raises(DataError, match="here: " + said.replace("(", r"\(")):
        from_json(text, "here")
