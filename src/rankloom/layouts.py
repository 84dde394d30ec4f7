"""What `rankloom layout` does apart from printing: tables of what each rank holds, and the picture.

It computes no layout itself: `train/run/paper.py` runs the code of a real run. Read base/ranks.py for the values.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rankloom.base.errors import ConfigError, MeshError
from rankloom.base.files import expect_file, replacing
from rankloom.base.layout import Layout, Span
from rankloom.base.mesh import Mesh
from rankloom.base.quantities import show_bytes_alike
from rankloom.base.ranks import ParameterPart, RankPart, experts_of, kind_of, modules_of, say_modules, say_numbers
from rankloom.base.topology import Topology
from rankloom.data.tokenizer import load_tokenizer
from rankloom.models.config import GPTConfig, parameter_count, preset
from rankloom.train.run.config import config_of, load_config, parse_overrides, with_ranks
from rankloom.train.run.job import CUT
from rankloom.train.run.paper import ranks_on_paper
from rankloom.train.run.schema import BYTES_VOCAB, Config
from rankloom.watch.boxes import SHORT, Scene, draw_sheet
from rankloom.watch.canvas import Sheet, as_svg, write_png
from rankloom.world.cluster import read_cluster

PRESET, PRECISION = "8B", "bf16"   # the defaults without a file
SHOWN = 4                          # the most parts of a matrix, or groups of an axis, that are all listed
MANY, MOST = 64, 1024              # ranks: MANY take seconds, MOST ten times as long
TRAVELS = {"pipe": "activations of micro-batches, and their gradients back", "replicate": "gradients, summed",
           "shard": "gradients, summed and cut; parameters, gathered",
           "context": "keys and values of attention, around a ring; gradients, summed", "tensor": "activations, twice in each block",
           "expert": "tokens, to their experts and back; gradients of all but experts, summed"}
TIED = "; the gradient of the tied embedding, summed"
BYTES = ("bytes between two steps, if ranks share no memory (whole: parameters to compute with, beside a rank's own); "
         "activations and temporary gathers come on top")
NUMBER = re.compile(r"[\d.]+")
NAME = re.compile(r"(?<=[\w*])(?=[._/][a-z])")   # between two words of a name
BREAK = re.compile(f"{NAME.pattern}|(?<= )")     # where a line may end
DIMS = {1: ("elements",), 2: ("rows", "cols"), 3: ("experts", "rows", "cols")}


@dataclass(frozen=True, slots=True)
class RunOnPaper:
    """The run asked for, and what every rank holds."""

    config: Config
    shape: GPTConfig
    ranks: Sequence[RankPart]
    hosts: Sequence[Sequence[int]] | None

    @property
    def mesh(self) -> Mesh:
        """The grid."""
        return self.config.mesh.as_mesh()

    @property
    def title(self) -> str:
        """Model and mesh."""
        return f"{self.config.model.preset} on {self.mesh.product()}{f' = {self.mesh.size} ranks' if self.mesh.in_use() else ' rank'}"

    @property
    def note(self) -> str:
        """The other settings that decide what a rank holds."""
        train, batch = self.config.train, self.config.batch()
        cut = f"stage {train.stage}" + (f" ({CUT[train.stage]} cut)" if train.stage else "")
        pipe = f", schedule {train.pipe or '1f1b'}" if self.mesh.pipe > 1 else ""
        return (f"{parameter_count(self.shape):,} parameters, {cut}, {train.precision}, {self.config.optimizer.name}{pipe}; "
                f"{batch.global_} row{'' if batch.global_ == 1 else 's'} of {train.seq_len} tokens a step")


def show_layout(words: Sequence[str], *, ranks: int | None, ranks_per_host: int | None, out: Path | None) -> Iterator[str | Table]:
    """The whole output of `rankloom layout`. raises: ConfigError"""
    expect_file("--out", out, ".svg", ".png")
    config, shape = read(words, ranks)
    hosts = find_hosts(config, ranks_per_host)
    if (size := config.mesh.as_mesh().size) > MANY:
        yield f"asking what each of {size} ranks holds, one after the other ..."
    run = RunOnPaper(config, shape, ranks_on_paper(config, shape), hosts)
    yield run.title
    yield run.note
    yield table_of_ranks(run)
    yield BYTES
    if config.train.offload:
        yield "offload: slices of parameters, gradients and optimizer state are in the host's memory"
    if run.mesh.in_use():
        yield table_of_groups(run)
        yield table_of_parameters(run)
    if config.train.stage and run.mesh.shard > 1:
        yield f"each rank's optimizer updates 1/{run.mesh.shard} of these parts, a slice of each unit: see docs/sharding.md"
    if out is not None:
        yield save(draw_sheet(Scene(run.mesh, run.ranks, hosts, config.train.stage < 3, run.title, run.note)), out)


def read(words: Sequence[str], ranks: int | None) -> tuple[Config, GPTConfig]:
    """The config, with the size of every axis, and the shape of its model. raises: ConfigError"""
    file = Path(words[0]) if words and not words[0].startswith("--") else None
    config = load_config(file, words[1:]) if file else _without_file(words)
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks}: must be 1 or more")
    try:
        config = with_ranks(config, config.mesh.as_mesh().size if ranks is None else ranks, file)
    except MeshError as error:
        raise MeshError(f"--ranks {ranks}: {error}") from None
    if (size := config.mesh.as_mesh().size) > MOST:
        raise ConfigError(f"{config.mesh.as_mesh().product()} = {size} ranks: a table has a row for each, {MOST} at most; shorten an axis "
                          "along which ranks hold the same, such as replicate")
    return config, config.gpt(_vocabulary(config, file))


def _without_file(words: Sequence[str]) -> Config:
    """The config without a file: defaults under which --mesh alone is enough. Those of a train.toml differ."""
    flags = parse_overrides(words)
    given = {f"{flag.section}.{flag.key}": flag.text for flag in flags}
    name, pipe = given.get("model.preset", PRESET), given.get("mesh.pipe", "1")
    train: dict[str, object] = {"precision": PRECISION, "seq_len": preset(name).seq_len}
    if "train.global_batch_size" not in given:
        train |= {"local_batch_size": 1} | ({"accumulate": 2 * int(pipe)} if pipe.isdecimal() and int(pipe) > 1 else {})
    return config_of({"model": {"preset": name}, "train": train}, "rankloom layout", flags)


def _vocabulary(config: Config, file: Path | None) -> int:
    """The vocabulary size, as far as the config tells; without a file, that of the preset."""
    tokenizer = config.data.tokenizer or ""
    if file is None:
        return config.model.vocab_size or preset(config.model.preset).vocab_size
    if tokenizer.endswith(".json"):
        return load_tokenizer(tokenizer).vocab_size
    return config.data.vocab_size or BYTES_VOCAB


def find_hosts(config: Config, ranks_per_host: int | None) -> Sequence[Sequence[int]] | None:
    """The ranks of each host: `ranks_per_host` each, or as in the config's cluster file; None without either. raises: ConfigError"""
    size = config.mesh.as_mesh().size
    if ranks_per_host is not None:
        if ranks_per_host < 1:
            raise MeshError(f"--ranks-per-host {ranks_per_host}: expected 1 or more")
        if size % ranks_per_host:
            raise MeshError(f"--ranks-per-host {ranks_per_host}: the mesh needs {config.mesh.as_mesh().product()} = {size} ranks, "
                            f"and {size} / {ranks_per_host} is no whole number of hosts")
        return Topology.even(size // ranks_per_host, ranks_per_host).nodes
    if config.comm.topology is None:
        return None
    return read_cluster(config.comm.topology, size, Topology.even(1, size)).nodes


# ---------------------------------------------------------------------- tables


def table_of_ranks(run: RunOnPaper) -> Table:
    """A row for each rank: its place on the mesh, its share of the batch, its part of the model, its bytes."""
    columns = {"rank": [str(part.rank) for part in run.ranks]}
    if run.hosts:
        columns["host"] = [str(_host(run.hosts, part.rank)) for part in run.ranks]
    if axes := run.mesh.in_use():
        columns[",\n".join(axes)] = [", ".join(str(part.coords[axis]) for axis in axes) for part in run.ranks]
    if any(part.stages != (part.coords["pipe"],) for part in run.ranks):
        columns["stages"] = [say_numbers(part.stages) for part in run.ranks]
    columns["modules"] = [say_modules(modules_of(part)) for part in run.ranks]
    if run.mesh.expert > 1:
        found = [experts_of(part) for part in run.ranks]
        total = next(total for _, total in filter(None, found))
        columns[f"experts\nof {total}"] = [say_numbers(held[0]) if held else "-" for held in found]
    columns["rows"] = [_span(part.rows.start, part.rows.stop) for part in run.ranks]
    if run.mesh.context > 1:
        columns["tokens"] = [", ".join(_span(span.start, span.stop) for span in part.tokens) for part in run.ranks]
    kinds = [kind for kind in run.ranks[0].held if any(part.held[kind] for part in run.ranks)]
    held = {SHORT[kind]: [part.held[kind] for part in run.ranks] for kind in kinds} | {"all": [part.total for part in run.ranks]}
    for name, sizes in held.items():
        unit, cells = show_bytes_alike(sizes)
        columns[f"{name}\n{unit}"] = cells
    return _table(columns, gap=0)   # nine columns and more, for terminals of 80


def table_of_groups(run: RunOnPaper) -> Table:
    """A row for each axis: its groups of ranks, what they exchange, and whether between hosts."""
    rows = []
    for axis in run.mesh.in_use():
        groups = list(dict.fromkeys(run.mesh.peers(part.rank, axis) for part in run.ranks))
        row = {"axis": f"{axis} {len(groups[0])}", "groups of ranks": _some([say_numbers(group) for group in groups])}
        if run.hosts:
            most = max(len({_host(run.hosts, rank) for rank in group}) for group in groups)
            row["between"] = "ranks of a host" if most == 1 else f"{most} hosts"
        rows.append(row | {"what travels": TRAVELS[axis] + (TIED if axis == "pipe" and _is_tied_over_stages(run) else "")})
    return _table({name: [row[name] for row in rows] for name in rows[0]})


def _is_tied_over_stages(run: RunOnPaper) -> bool:
    """Whether ranks along the pipe share an embedding: a V-shaped schedule has its first and last stage on one rank."""
    return run.shape.tie and len({part.coords["pipe"] for part in run.ranks if "embedding" in modules_of(part)}) > 1


def table_of_parameters(run: RunOnPaper) -> Table:
    """A row for each kind of parameter: how it is cut, and its different parts, in rank order."""
    found: dict[str, list[tuple[RankPart, ParameterPart]]] = {}
    first: dict[str, str] = {}
    for part in run.ranks:
        for parameter in part.parameters:
            if first.setdefault(kind_of(parameter.name), parameter.name) == parameter.name:
                found.setdefault(kind_of(parameter.name), []).append((part, parameter))
    rows = [_parameter_row(kind, held, run.shape) for kind, held in found.items()]
    return _table({name: [row[name] for row in rows] for name in rows[0]})


def _parameter_row(kind: str, held: list[tuple[RankPart, ParameterPart]], shape: GPTConfig) -> dict[str, str]:
    one = held[0][1]
    parts = _some(list(dict.fromkeys(_say_spans(parameter, kind, shape) for _, parameter in held)))
    alike = {part.coords["tensor"] for part, parameter in held if parameter.spans == one.spans}
    layout = layout_of(held)
    if "/tensor" in layout and len(alike) > 1:   # fewer key-value heads than ranks
        parts += f"   (each on {len(alike)} tensor ranks)"
    return {"parameter": kind, "whole": " x ".join(map(str, one.whole)), "layout": layout, "parts": parts}


def layout_of(held: Sequence[tuple[RankPart, ParameterPart]]) -> str:
    """The layout of a parameter: an axis cuts a dim if ranks that differ only along this axis hold different spans of the dim.

    raises: AssertionError for a parameter without ranks
    """
    assert held, "a parameter that no rank holds"
    part, one = held[0]
    cut: list[list[str]] = [[] for _ in one.whole]
    for axis in part.coords:
        others = [other for there, other in held if {**there.coords, axis: 0} == {**part.coords, axis: 0}]
        for dim, spans in enumerate(one.spans):
            if any(other.spans[dim] != spans for other in others):
                cut[dim].append(axis)
    return str(Layout(DIMS.get(len(cut), tuple(f"dim{at}" for at in range(len(cut)))), tuple(map(tuple, cut))))


def _say_spans(parameter: ParameterPart, kind: str, shape: GPTConfig) -> str:
    if not parameter.cut_dims:
        return "whole"
    names, said = DIMS[len(parameter.whole)], []
    for dim in parameter.cut_dims:
        spans = parameter.spans[dim]
        said.append(f"{names[dim]} {', '.join(_span(*span) for span in spans)}")
        if ".attention." in kind:
            heads = ", ".join(_span(*_heads(span, shape)) for span in spans)
            said[-1] += f" ({'head' if heads.isdecimal() else 'heads'} {heads})"
    return "; ".join(said)


def _heads(span: Span, shape: GPTConfig) -> Span:
    return Span(span.start // shape.head_width, span.stop // shape.head_width)


def _span(start: int, stop: int) -> str:
    return "none" if stop == start else str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def _some(parts: Sequence[str]) -> str:
    """All parts, if they are few; otherwise the first ones and the last."""
    return "  |  ".join(parts if len(parts) <= SHOWN else [*parts[:SHOWN - 2], f"... {len(parts)} in all ...", parts[-1]])


def _host(hosts: Sequence[Sequence[int]], rank: int) -> int:
    return next(number for number, ranks in enumerate(hosts) if rank in ranks)


def _table(columns: dict[str, list[str]], gap: int = 1) -> Table:
    """A table; numbers are right-aligned. gap: spaces between columns, in addition to the one always there"""
    table = Table(box=SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False)
    for name, cells in columns.items():
        table.add_column(name, overflow="fold", justify="right" if all(NUMBER.fullmatch(cell) for cell in cells) else "left")
    for row in zip(*columns.values()):
        table.add_row(*(Named(cell) if NAME.search(cell) else Text(cell) for cell in row))   # never str: brackets would be markup
    return table


@dataclass(frozen=True, slots=True)
class Named:
    """A text with names in it, which a narrow table breaks between their words: `blocks.*.mlp` and `.down.weight`."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, BREAK.split(self.text))), len(self.text)).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [""]
        for piece in BREAK.split(self.text):
            if lines[-1] and len((lines[-1] + piece).rstrip()) > options.max_width:
                lines.append("")
            lines[-1] += piece
        yield Text("\n".join(lines), overflow="fold")


# ---------------------------------------------------------------------- the picture


def save(sheet: Sheet, path: Path) -> str:
    """Write the picture; returns a line with its path. raises: ConfigError"""
    try:
        with replacing(path) as temporary:   # a full disk leaves the picture that was there
            if path.suffix == ".svg":
                temporary.write_text(as_svg(sheet), encoding="utf-8")
            else:
                write_png(sheet, temporary)
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written ({error.strerror})") from None
    except ImportError:
        raise ConfigError(f"--out {path}: a PNG needs matplotlib (pip install matplotlib); an .svg needs nothing") from None
    return f"saved {path}"
