"""What the documents say is true: files exist, links lead somewhere, the API example runs."""

import inspect
import re
import tomllib
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from matplotlib.figure import Figure

import rankloom as rl
from rankloom.train.run.config import load_config

ROOT = Path(__file__).parent.parent
START = (ROOT / "docs" / "start.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md")) + [ROOT / "README.md", ROOT / "benchmarks" / "README.md"]


@pytest.mark.gloo   # the default of `rl.simulate` as users have it
def test_the_reference_the_table_of_files_and_the_stub_are_those_of_the_source(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    make_reference = import_module("make_reference")
    assert make_reference.page() == (ROOT / "docs" / "reference.md").read_text(), "run `python docs/make_reference.py`"
    assert make_reference.with_table_of_files(START) == START, "run `python docs/make_reference.py`"
    assert make_reference.stub() == make_reference.STUB.read_text(), "run `python docs/make_reference.py`"
    files = {str(file.relative_to(make_reference.SOURCE)) for file in make_reference.SOURCE.rglob("*.py") if not file.name.startswith("__")}
    assert files <= set(re.findall(r"\[([\w/]+\.py)\]\(\.\./src/rankloom/", START)), "FLOORS in docs/make_reference.py lacks a folder"


def test_an_installed_package_tells_type_checkers_that_it_has_types():
    carried = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["rankloom"]
    assert sorted(carried) == ["__init__.pyi", "py.typed"] and all((ROOT / "src" / "rankloom" / name).exists() for name in carried)


def test_the_reference_has_the_arguments_types_and_defaults_of_functions_and_methods():
    page = (ROOT / "docs" / "reference.md").read_text()
    for shown in (
            "links: Links = Links())", "hooks: Hooks = Hooks(),", "`size: int`", "part: SequencePart = WholeSequence()",
            "`even(nodes: int, ranks_per_node: int, links: Links = Links()) -> Topology`",
            "`all_to_all(x: Tensor, *, send_rows: Sequence[int] \\| None = None, recv_rows: Sequence[int] \\| None = None, ",
            "`exchange(out: Tensor, to: int, into: Tensor, frm: int, *, tag: int = 0, "):
        assert shown in page, shown
    assert "Ellipsis" not in page and " at 0x" not in page
    for what in filter(inspect.isclass, map(partial(getattr, rl), rl.__all__)):
        for key, method in vars(what).items():
            if inspect.isfunction(method) and key[0] != "_":
                arguments = ".*".join([*inspect.signature(method).parameters][1:])
                assert re.search(rf"^\| `{key}\(.*{arguments}.*` \|", page, re.MULTILINE), f"{what.__name__}.{key}"


def test_the_picture_of_hops_numbers_every_tile_and_names_its_axes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    picture = import_module("make_context_picture")
    axes, spans = Figure().subplots(), picture.cut_sequence(picture.LENGTH, picture.RANKS, zigzag=True)
    picture.draw(axes, spans, picture.DOCUMENTS, "packed")
    assert len(axes.texts) == len(axes.patches) > 10 and {text.get_text() for text in axes.texts} == set("0123")
    assert "keys" in axes.get_xlabel() and "queries" in axes.get_ylabel()


def test_the_picture_of_experts_draws_the_way_of_every_token_once(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    picture = import_module("make_experts_picture")
    seen = rl.simulate(picture.RANKS, picture.watch)
    tokens = [row for each in seen for row in each.tokens]
    assert sorted(tokens) == sorted(row for each in seen for row in each.at_experts) and len(set(tokens)) == picture.RANKS * picture.TOKENS
    (axes,) = picture.draw(seen).axes
    ways = [patch for patch in axes.patches if isinstance(patch, picture.PathPatch)]
    assert len(ways) == len(tokens) and len(axes.patches) == 5 * len(tokens) + picture.EXPERTS
    assert any(row.expert // picture.EACH == row.source for row in tokens)   # one that stays


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_files_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^)#:]*)\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), f"{page.name} points to {target}"
        assert not anchor or anchor in anchors_of(there), f"{page.name} points to {target}#{anchor}"


def anchors_of(page: Path) -> set[str]:
    """What GitHub makes of headings: small letters, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def python_with(words: str) -> str:
    """The first block of Python in start.md in which these words are."""
    return next(code for code in re.findall(r"```python\n(.*?)```", START, re.DOTALL) if words in code)


def test_the_example_of_the_api_runs_learns_and_leaves_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(python_with("rl.prepare"), "docs/start.md", "exec"), names)
    assert set(names["state"]) == {"model", "optimizer"}
    assert names["report"].loss < 1.39 and names["report"].count == 16   # ln 4 is what guessing costs
    names["engine"].load("ckpt")
    assert names["engine"].steps_done == 20


def test_the_program_of_the_readme_runs_and_its_last_line_says_what_was_learned(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    exec(compile(code, "README.md", "exec"), {})
    ranks, loss, rows = re.fullmatch(r"(\d+) ranks: loss ([\d.]+) over (\d+) rows\n", capsys.readouterr().out).groups()
    assert (ranks, rows) == ("1", "64") and float(loss) < 0.5   # ln 4 is what guessing costs
    assert (tmp_path / "ckpt" / "manifest.json").exists()


def test_the_files_that_the_source_tells_to_read_are_there():
    source = ROOT / "src" / "rankloom"
    for file in source.rglob("*.py"):
        for name in re.findall(r"(?<![\w/.])(?:\w+/)+\w+\.(?:py|c|md)\b", file.read_text()):
            assert any((place / name).exists() for place in (source, ROOT, *file.parents)), f"{file.name} names {name}"


def test_the_example_of_ranks_in_one_process_says_what_it_gives(capsys):
    exec(compile(python_with("rl.simulate(4, body)"), "docs/start.md", "exec"), {})
    assert capsys.readouterr().out == "[([6.0, 6.0], 12), ([6.0, 6.0], 16), ([6.0, 6.0], 12), ([6.0, 6.0], 8)]\n"


@pytest.mark.filterwarnings("ignore:the models of ranks")   # threads draw their first values from one generator
def test_the_model_of_hugging_face_is_saved_as_its_ranks_have_trained_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = python_with("save_pretrained").replace("rl.init(rl.Mesh(shard=2, tensor=2))", "world").replace('"bf16"', '"fp64"')
    tokens = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(1))
    rows = tokens[:, :-1], tokens[:, 1:]

    def body(world):
        names = {"world": world}
        exec(compile(code, "docs/start.md", "exec"), names)
        return names["tokens"], names["text"], names["engine"].evaluate([rows]).loss, names["loss"]

    prompt, text, trained, loss = rl.simulate(rl.Mesh(shard=2, tensor=2), body)[0]
    again = transformers.LlamaForCausalLM.from_pretrained("tuned", dtype=torch.float64)
    assert torch.equal(again.generate(prompt[:1, :4], max_new_tokens=8, do_sample=False), text)
    total, count = loss(again, rows)
    assert total.item() / count.item() == pytest.approx(trained, rel=1e-6)   # logits are rounded to fp32


@pytest.mark.parametrize(("ranks", "stage"), [(3, 0), (3, 3), (rl.Mesh(shard=2, tensor=2), 3), (rl.Mesh(replicate=2, shard=2), 2)])
def test_the_contrastive_loss_of_the_documents_is_that_of_one_process(ranks, stage):
    """To 1e-12 in fp64, at stages with and without whole parameters; its gradient goes to other ranks' rows too."""
    names: dict = {}
    exec(compile(python_with("class Gather"), "docs/start.md", "exec"), names)
    rows = torch.randn(2, 12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def body(world, stage=0):
        plan = {"one.0": "colwise", "one.1": "rowwise"} if world.mesh.tensor > 1 else None
        engine = rl.prepare(Towers(), loss=names["contrast"](world), optimizer=partial(torch.optim.SGD, lr=0.1), world=world, stage=stage,
                            tensor_plan=plan)
        mine = tuple(rows.tensor_split(engine.group.size, 1)[engine.group.rank])
        return [(report.loss, report.grad_norm) for report in (engine.step(mine) for _ in range(3))]

    alone = rl.simulate(1, body)[0]
    for found in rl.simulate(ranks, partial(body, stage=stage)):
        assert np.allclose(found, alone, rtol=1e-12, atol=0)


class Towers(torch.nn.Module):
    """Two towers, the same in every process. Tensor ranks can cut the first."""

    def __init__(self):
        super().__init__()
        self.one = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)).double()
        self.other = torch.nn.Linear(4, 3, bias=False).double()
        draw = torch.Generator().manual_seed(1)
        for param in self.parameters():
            torch.nn.init.normal_(param, generator=draw)

    def forward(self, x, y):
        return self.one(x), self.other(y)


def test_the_names_that_the_documents_use_are_there():
    for page in PAGES:
        for name in re.findall(r"\brl\.(\w+)\b", page.read_text()):
            assert name in rl.__all__, f"{page.name}: there is no rl.{name}"
        for module, names in re.findall(r"^from (rankloom\.[\w.]+) import (.+)$", page.read_text(), re.MULTILINE):
            assert all(hasattr(import_module(module), name.strip()) for name in names.split(",")), f"{page.name}: {module}, {names}"


TRAINED = re.compile(r"rankloom (?:train|scale) train\.toml((?: --\w+\.[\w.]+ [^\s`]+)*)")
ARGUMENTS = [(page.name, found) for page in PAGES for found in TRAINED.findall(page.read_text())]


@pytest.mark.parametrize(("page", "arguments"), ARGUMENTS)
def test_what_the_documents_train_is_not_refused(page, arguments):
    load_config(str(ROOT / "train.toml"), arguments.split())
