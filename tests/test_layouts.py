"""`rankloom layout`: which rank holds what, as tables and as a picture, and a mistake as one message."""

import errno
import io
import os
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console
from rich.table import Table

from rankloom.base.errors import ConfigError
from rankloom.base.mesh import TOKEN_AXES
from rankloom.base.ranks import experts_of, modules_of
from rankloom.layouts import find_hosts, layout_of, read, save, show_layout
from rankloom.train.run.paper import ranks_on_paper
from rankloom.watch.boxes import FEW, GHOST, Scene, colour_of, draw_bar, draw_sheet, draw_slab, draw_strip
from rankloom.watch.canvas import Box, Sheet, Word, as_svg, write_png

DOCS = Path(__file__).parent.parent / "docs"
SMALL = ["--model.preset", "1M", "--model.heads", "4", "--model.kv_heads", "2"]
EIGHT = [*SMALL, "--mesh.pipe", "2", "--mesh.tensor", "2", "--mesh.shard", "2"]
MIXTURE = [*SMALL, "--model.moe.experts", "4", "--model.moe.ffn", "64"]
TRAIN = '[model]\npreset = "1M"\n[train]\nglobal_batch_size = 8\nseq_len = 64\n'


def rankloom(*words, **options):
    argv = [sys.executable, "-m", "rankloom", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, **options)


def shown(*words, ranks=None, ranks_per_host=None, out=None) -> list:
    return list(show_layout(words, ranks=ranks, ranks_per_host=ranks_per_host, out=out))


def cells(table: Table) -> list[dict[str, str]]:
    """The rows of a table, by the names of its columns."""
    names = [str(column.header) for column in table.columns]
    return [dict(zip(names, map(str, row))) for row in zip(*(column.cells for column in table.columns))]


def scene_of(*words, per_host=None) -> Scene:
    config, shape = read(words, None)
    ranks = ranks_on_paper(config, shape)
    return Scene(config.mesh.as_mesh(), ranks, find_hosts(config, per_host), config.train.stage < 3, "title", "note")


def test_the_command_prints_three_tables_and_saves_a_picture(tmp_path):
    wide = {**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1"}
    done = rankloom("layout", *EIGHT, "--ranks-per-host", 4, "--out", tmp_path / "a.svg", env=wide)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1M on pipe 2 x shard 2 x tensor 2 = 8 ranks\n") and "\x1b" not in done.stdout
    assert "stage 3" in done.stdout and "bf16" in done.stdout, "what is assumed is told"
    assert "embedding, blocks 0-2" in done.stdout and "[rows/tensor, cols]" in done.stdout and done.stdout.endswith("a.svg\n")
    ElementTree.fromstring((tmp_path / "a.svg").read_text())


def test_help_imports_no_heavy_library():
    code = ("import sys; from rankloom.cli import main\ntry: main()\nexcept SystemExit as end: assert not end.code\n"
            "bad = {'torch', 'numpy', 'pydantic', 'matplotlib'} & set(sys.modules); assert not bad, bad")
    done = subprocess.run([sys.executable, "-c", code, "layout", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--ranks-per-host" in done.stdout, done.stderr


def test_the_table_of_ranks_says_place_stage_rows_and_bytes():
    ranks, groups, parameters = (cells(part) for part in shown(*EIGHT, ranks_per_host=4) if isinstance(part, Table))
    assert [row["rank"] for row in ranks] == [str(n) for n in range(8)]
    assert [row["host"] for row in ranks] == list("00001111")
    assert [row["pipe,\nshard,\ntensor"] for row in ranks] == [f"{p}, {s}, {t}" for p in (0, 1) for s in (0, 1) for t in (0, 1)]
    assert "stages" not in ranks[0], "a rank's place along pipe says it"
    assert ranks[0]["modules"] == "embedding, blocks 0-2" and ranks[7]["modules"] == "blocks 3, norm, embedding"
    assert [row["rows"] for row in ranks] == ["0-3", "0-3", "4-7", "4-7"] * 2, "micro-batches for the pipeline, one row each"
    assert [(row["axis"], row["groups of ranks"], row["between"]) for row in groups] == [
        ("pipe 2", "0, 4  |  1, 5  |  2, 6  |  3, 7", "2 hosts"), ("shard 2", "0, 2  |  1, 3  |  4, 6  |  5, 7", "ranks of a host"),
        ("tensor 2", "0-1  |  2-3  |  4-5  |  6-7", "ranks of a host")]
    kinds = {row["parameter"]: (row["whole"], row["layout"], row["parts"]) for row in parameters}
    assert kinds["blocks.*.attention.query.weight"] == (
        "128 x 128", "[rows/tensor, cols]", "rows 0-63 (heads 0-1)  |  rows 64-127 (heads 2-3)")
    assert kinds["blocks.*.attention.output.weight"][1:] == ("[rows, cols/tensor]", "cols 0-63 (heads 0-1)  |  cols 64-127 (heads 2-3)")
    assert kinds["blocks.*.mlp_norm.weight"] == ("128", "[elements]", "whole")


def test_rows_are_told_without_counting_them():
    """A batch given in tokens by mistake took minutes, and more memory than there is."""
    tracemalloc.start()
    try:
        ranks = cells(shown(*SMALL, "--mesh.tensor", "2", "--train.local_batch_size", "4000000")[2])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [row["rows"] for row in ranks] == ["0-3999999"] * 2
    assert most < 4_000_000, "less than a byte for each"


def test_stages_are_told_where_ranks_have_several():
    ranks = cells(shown(*SMALL, "--mesh.pipe", "2", "--train.pipe", "interleaved", "--train.accumulate", "4")[2])
    assert [row["stages"] for row in ranks] == ["0, 2", "1, 3"]


def test_key_value_heads_that_ranks_share_are_told():
    parameters = cells([part for part in shown(*SMALL, "--mesh.tensor", "4") if isinstance(part, Table)][2])
    key = next(row["parts"] for row in parameters if "key" in row["parameter"])
    assert key == "rows 0-31 (head 0)  |  rows 32-63 (head 1)   (each on 2 tensor ranks)"


def test_tokens_experts_and_rows_are_told_where_ranks_have_different_ones():
    words = [*MIXTURE, "--mesh.context", "2", "--mesh.expert", "2", "--train.seq_len", "64", "--train.global_batch_size", "6"]
    ranks = cells(shown(*words)[2])
    assert [row["experts\nof 4"] for row in ranks] == ["0-1", "2-3"] * 2
    assert [row["tokens"] for row in ranks] == ["0-15, 48-63"] * 2 + ["16-47"] * 2
    assert [row["rows"] for row in ranks] == ["0-2", "3-5"] * 2
    assert "context,\nexpert" in ranks[0] and "host" not in ranks[0]


def test_one_rank_holds_everything_and_there_is_nothing_to_say_about_others():
    said = shown("--model.preset", "1M")
    assert said[0] == "1M on 1 rank" and [type(part) for part in said].count(Table) == 1


def test_a_file_says_what_a_run_of_it_would_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.toml").write_text(TRAIN)
    title, note, ranks = shown("train.toml", "--mesh.tensor", "2", "--train.steps=7")[:3]
    assert "; 1 row of " in shown(*SMALL)[1]
    assert title == "1M on tensor 2 = 2 ranks" and "stage 0, fp32, adamw; 8 rows of 64 tokens a step" in note
    assert [row["rows"] for row in cells(ranks)] == ["0-7"] * 2
    Path("train.toml").write_text(TRAIN + 'stage = 1\n[mesh]\nshard = 2\n[comm]\ntopology = "c.toml"\n')
    Path("c.toml").write_text("nodes = [[0, 2], [1, 3]]\n")
    title, _, ranks = shown("train.toml", "--mesh.pipe", "2")[:3]
    assert title == "1M on pipe 2 x shard 2 = 4 ranks"
    assert [row["host"] for row in cells(ranks)] == list("0101"), "as the cluster file says"


def test_ranks_that_other_axes_leave_are_replicas_or_shards():
    assert shown(*SMALL, "--mesh.tensor", "2", ranks=6)[0] == "1M on replicate 3 x tensor 2 = 6 ranks"
    assert shown(*SMALL, "--train.stage", "2", ranks=3)[0] == "1M on shard 3 = 3 ranks"


def test_slices_that_lie_on_the_host_are_said_to():
    words = [*SMALL, "--mesh.shard", "2"]
    plain, there = shown(*words), shown(*words, "--train.offload", "true")
    assert cells(plain[2]) == cells(there[2]) and any("in the host's memory" in str(part) for part in there)


@pytest.mark.parametrize(("words", "options", "message"), [
    (["--mesh.tenosr", "2"], {}, "--mesh.tenosr: unknown key 'tenosr'. Did you mean 'tensor'?"),
    (["--mesh.tensor", "3"], {}, "[model] heads = 32 cannot be shared evenly by [mesh] tensor 3: 32 / 3 = 10.67"),
    (["--mesh.pipe", "40"], {}, "40 stages for a model of 34 pieces"),
    (["--mesh.tensor", "0"], {}, "--mesh.tensor: tensor = 0: must be greater than or equal to 1"),
    (["--mesh.expert", "2"], {}, "give --model.moe.experts"),
    (["--mesh.pipe", "2"], {"ranks": 5}, "--ranks 5: [mesh] pipe 2 does not divide the 5 ranks"),
    (["--mesh.pipe", "2", "--mesh.replicate", "2"], {"ranks": 8}, "needs pipe 2 x replicate 2 = 4 ranks, but there are 8"),
    ([], {"ranks": 0}, "--ranks 0: must be 1 or more"),
    (["--mesh.tensor", "8"], {"ranks_per_host": 3}, "--ranks-per-host 3: the mesh needs tensor 8 = 8 ranks, and 8 / 3 is no whole number"),
    (["--mesh.tensor", "8"], {"ranks_per_host": 0}, "--ranks-per-host 0"),
    (["none.toml"], {}, "none.toml: no such file"),
    (["--model.preset", "9B"], {}, "no model preset '9B'"),
    (["--train.stage", "2", "--mesh.replicate", "2"], {}, "stage 2 cuts over [mesh] shard, which is 1"),
    ([], {"out": Path("a.pdf")}, "--out a.pdf: expected a name that ends in .svg or .png"),
    ([], {"out": Path("none/a.svg")}, "--out none/a.svg: there is no folder none"),
])
def test_a_mistake_is_refused_with_what_was_expected(words, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        shown(*words, **options)


# ---------------------------------------------------------------------- the picture


def test_strip_square_and_bars_show_what_the_rank_holds():
    scene = scene_of(*MIXTURE, "--mesh.pipe", "2", "--mesh.tensor", "2", "--mesh.expert", "2", "--mesh.shard", "2")
    every = list(dict.fromkeys(piece for part in scene.ranks for piece in modules_of(part)))
    for part in scene.ranks:
        strip = [mark.fill for mark in draw_strip(scene, part, 0, 0)]
        assert [fill != GHOST for fill in strip] == [piece in modules_of(part) for piece in every]
        own = [(mark.left, mark.top) for mark in draw_slab(scene, part, 0, 0) if mark.fill == colour_of(part)]
        assert own == [(part.coords["shard"] * scene.size.slab / 2, part.coords["tensor"] * scene.size.slab / 2)]
        there, of = experts_of(part)
        _, whole, mine = draw_bar(scene, part, "experts", 0, 0)
        assert (mine.left - whole.left) / whole.width == there.start / of and mine.width / whole.width == len(there) / of


def test_bars_of_tokens_and_rows_fill_one_whole():
    scene = scene_of(*SMALL, "--mesh.context", "2", "--mesh.shard", "2", "--train.seq_len", "64", "--train.global_batch_size", "8")
    for kind, whole, step in (("tokens", 64, 1), ("rows", 8, 2)):   # ranks 0 and 1 have the tokens of a row, 0 and 2 all rows
        filled = []
        for part in (scene.ranks[0], scene.ranks[step]):
            _, ghost, *mine = draw_bar(scene, part, kind, 0, 0)
            place = lambda at, ghost=ghost, whole=whole: round((at - ghost.left) / ghost.width * whole)
            filled += [at for bar in mine for at in range(place(bar.left), place(bar.left + bar.width))]
        assert sorted(filled) == list(range(whole)), kind


def test_boxes_stand_with_those_of_their_host_and_none_lies_on_another():
    scene = scene_of(*EIGHT, per_host=4)
    sheet = draw_sheet(scene)
    width, height = scene.size.width, scene.height
    boxes = [(mark.left, mark.top) for mark in sheet.marks if isinstance(mark, Box) and (mark.width, mark.height) == (width, height)]
    assert len(boxes) == 8 and len({top for _, top in boxes}) == 2, "a row for each host"
    assert all(abs(a[0] - b[0]) >= width or abs(a[1] - b[1]) >= height for a in boxes for b in boxes if a != b)
    assert all(mark.left >= 0 and mark.left + mark.width <= sheet.width and mark.top + mark.height <= sheet.height
               for mark in sheet.marks if isinstance(mark, Box))
    titles = [mark.text for mark in sheet.marks if isinstance(mark, Word)]
    assert [text for text in titles if text.startswith("rank ")] == [f"rank {n}" for n in range(8)]
    assert "host 1" in titles and "pipe 1, shard 1, tensor 1" in titles


def test_many_ranks_get_small_boxes_that_fit_a_page():
    scene = scene_of(*SMALL, "--mesh.shard", "8", "--mesh.tensor", "2", "--mesh.pipe", "2", per_host=8)
    sheet = draw_sheet(scene)
    assert len(scene.ranks) == 32 > FEW and sheet.width < 1300
    words = [mark.text for mark in sheet.marks if isinstance(mark, Word)]
    assert "p1 s7 t1" in words and "letters: p pipe, s shard, t tensor" in words


def test_svg_and_png_are_of_the_same_sheet(tmp_path):
    sheet = Sheet(80, 40, (Box(0, 0, 40, 20, "#ff0000", "#00ff00", 4), Word(40, 30, "a < b $1$", at="middle", bold=True)), "t & t")
    tree = ElementTree.fromstring(as_svg(sheet))
    assert tree[0].text == "t & t" and tree[3].text == "a < b $1$" and tree[2].get("rx") == "4"
    write_png(sheet, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_an_axis_cuts_a_dim_only_where_ranks_differ_along_it_alone():
    scene = scene_of(*MIXTURE, "--mesh.expert", "2", "--mesh.tensor", "2")
    named = {name: [(part, parameter) for part in scene.ranks for parameter in part.parameters if parameter.name == name]
             for name in ("blocks.0.mlp.experts.up", "blocks.0.attention.output.weight", "norm.weight")}
    assert [layout_of(held) for held in named.values()] == ["[experts/expert, rows, cols]", "[rows, cols/tensor]", "[elements]"]


def test_the_picture_of_the_docs_is_the_one_that_is_drawn(tmp_path):
    shown("--mesh.pipe", "2", "--mesh.tensor", "2", "--mesh.shard", "2", ranks_per_host=4, out=tmp_path / "now.svg")
    docs, now = (re.sub(r">[\d.]+ GiB<", "> GiB<", path.read_text()) for path in (DOCS / "layout.svg", tmp_path / "now.svg"))
    assert docs == now, "draw it anew with the command in docs/start.md"   # bytes aside: train/test_paper.py holds those to real ranks


@pytest.mark.parametrize(("words", "hosts"), [
    (EIGHT, 4), ([*MIXTURE, "--mesh.shard", "2", "--mesh.context", "2", "--mesh.expert", "2"], None)], ids=["pipe", "experts"])
def test_tables_are_as_wide_as_the_terminal_lets_them(words, hosts):
    screen = Console(file=io.StringIO(), width=80)
    for part in shown(*words, "--train.stage", "2", "--train.seq_len", "4096", ranks_per_host=hosts):
        screen.print(part)
    text = screen.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"modules .*rows .*([KMG]iB +){5}\n", text), "the unit of each column is its own, in its head"
    assert "embedding," in text and ("3072-4095" in text or hosts), "no word is broken"


def test_what_a_square_is_stands_in_the_legend_where_nothing_is_cut_too():
    sheet = draw_sheet(scene_of(*SMALL, "--mesh.replicate", "2"))
    assert "square: their matrices, none is cut" in {mark.text for mark in sheet.marks if isinstance(mark, Word)}


@pytest.mark.parametrize("words, ranks", [([], 1_000_000), (["--mesh.replicate", "512", "--mesh.tensor", "4"], None)])
def test_more_ranks_than_a_table_can_show_are_refused_at_once(words, ranks):
    with pytest.raises(ConfigError, match=r"a table has a row for each, 1024 at most"):
        shown(*SMALL, *words, ranks=ranks)


def test_where_many_ranks_are_asked_the_first_line_says_so(monkeypatch):
    monkeypatch.setattr("rankloom.layouts.MANY", 3)
    parts = show_layout([*SMALL, "--mesh.replicate", "4"], ranks=None, ranks_per_host=None, out=None)
    assert next(parts) == "asking what each of 4 ranks holds, one after the other ..."


def test_gradients_are_said_to_travel_along_every_axis_over_which_they_are_summed():
    """To the axes of `TOKEN_AXES`, by which a run sums them; and along pipe where two ranks have the tied embedding."""
    def travels(*words):
        table = [part for part in shown(*words) if isinstance(part, Table)][1]
        return {row["axis"].split()[0]: row["what travels"] for row in cells(table)}

    said = travels(*MIXTURE, *(word for axis in TOKEN_AXES for word in (f"--mesh.{axis}", "2")), "--mesh.tensor", "2")
    assert {axis for axis, what in said.items() if "gradients" in what and "summed" in what} == set(TOKEN_AXES)
    assert said["expert"].endswith("gradients of all but experts, summed"), "an expert's gradient is complete along its axis"
    pipe = [*SMALL, "--mesh.pipe", "2"]
    assert "tied embedding" in travels(*pipe)["pipe"] and "tied" not in travels(*pipe, "--model.tie", "false")["pipe"]
    assert "tied" not in travels(*pipe, "--train.pipe", "zb-v")["pipe"], "the first and the last stage are of one rank"


@pytest.mark.parametrize("width", [60, 80])
def test_a_name_that_is_longer_than_its_column_is_broken_between_its_words(width):
    screen = Console(file=io.StringIO(), width=width)
    screen.print([part for part in shown(*MIXTURE, "--mesh.tensor", "2", "--mesh.expert", "2") if isinstance(part, Table)][2])
    lines = screen.file.getvalue().splitlines()
    start = lines[1].index("whole")
    pieces = [line[:start].strip() for line in lines if line[:start].strip(" ─")]
    assert max(map(len, lines)) <= width and any(piece.startswith(".") for piece in pieces), "some name is broken"
    words = {"blocks", "attention", "norm", "query", "key", "value", "output", "weight", "mlp", "router", "experts", "gate", "up", "down",
             "embedding", "head", "parameter", ""}
    assert {word for piece in pieces for word in re.split(r"[._*]+", piece)} <= words, "no word is broken"


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_a_picture_that_cannot_be_written_whole_leaves_the_old_one_there(tmp_path, monkeypatch, name):
    (tmp_path / name).write_text("the old one")

    def fill_the_disk(path, *args, **options):
        Path(path).write_bytes(b"half of")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", fill_the_disk)
    monkeypatch.setattr("rankloom.layouts.write_png", lambda sheet, path: fill_the_disk(path))
    with pytest.raises(ConfigError, match="cannot be written .No space left on device"):
        save(Sheet(8, 4, (), "t"), tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == [name] and (tmp_path / name).read_bytes() == b"the old one"
