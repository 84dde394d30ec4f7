"""Write what is repeated of the source: docs/reference.md, the table of files in docs/start.md, and src/rankloom/__init__.pyi.

    python docs/make_reference.py

reference.md has every key of a config file, and every public name with its docstring. The table has the first sentence of every file.
The stub tells editors and type checkers where the public names come from, which are loaded only when they are used.
tests/test_docs.py compares all three with what this makes.
"""

import ast
import inspect
import json
import re
import tokenize
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import rankloom as rl
from rankloom.train.run.schema import Config

MADE_FOR_YOU = ("World", "Group", "Engine")   # by rl.init and rl.prepare
DOCS = Path(__file__).parent
PAGE, START = DOCS / "reference.md", DOCS / "start.md"
SOURCE = DOCS.parent / "src" / "rankloom"
FLOORS = ("base", "world", "world/transport", "comm", "shard", "parallel", "parallel/gradients", "parallel/sections", "parallel/replicas",
          "parallel/tensor", "parallel/context", "parallel/pipeline", "checkpoint", "models", "data", "train",
          "train/blocks", "train/pipeline", "train/run", "watch", ".")
STUB = SOURCE / "__init__.pyi"
BEGIN, END = "<!-- files -->\n", "<!-- end of files -->"
HEAD = """# Reference

Made by `python docs/make_reference.py` from the source; examples are in [start.md](start.md).

[Keys of a config file](#keys-of-a-config-file) · [Python](#python) · [Errors](#errors)
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, "## Keys of a config file\n", "Each can be given on the command line too: `--section.key value`; the value `none` "
             "removes it. `rankloom train` refuses what it does not know, and what has no effect beside other "
             "keys, except how long samples are where there are none, and how many checkpoints are kept where none is "
             "written. A key without a default may be left out.\n"]
    parts += section_tables(Config)
    parts += ["## Python\n", "`import rankloom as rl`, in the order of [rankloom/__init__.py](../src/rankloom/__init__.py).\n"]
    errors = [name for name in rl.__all__ if name in rl._ERRORS]
    for name in rl.__all__:
        if name not in ("__version__", *errors):
            parts += entry(name, getattr(rl, name))
    parts += ["## Errors\n", "All are a `rl.RankloomError`.\n", "| error | when |\n|---|---|"]
    parts[-1] += "".join(f"\n| `rl.{name}` | {first_sentence(getattr(rl, name))} |" for name in errors)
    return "\n".join(parts) + "\n"


# ---------------------------------------------------------------------- keys


def section_tables(config: type[BaseModel], path: str = "") -> Iterator[str]:
    """A heading and a table for each section, and for those inside."""
    for name, field in config.model_fields.items():
        section = section_of(field.annotation)
        if section is None:
            continue
        yield f"### [{path}{name}]\n\n{inspect.getdoc(section)}\n\n| key | values | default | meaning |\n|---|---|---|---|"
        comments, known = comments_of(section), section.model_json_schema()["properties"]
        for key, value in section.model_fields.items():
            if section_of(value.annotation) is None:
                yield f"| `{key}` | {shown_values(known[key])} | {shown_default(value.default)} | {comments.get(key, '')} |"
        yield ""
        yield from section_tables(section, f"{path}{name}.")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field is, or may be."""
    for kind in getattr(annotation, "__args__", (annotation,)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def shown_values(known: dict[str, Any]) -> str:
    """What a key may be, from its JSON schema."""
    kinds = [kind for kind in known.get("anyOf", [known]) if kind.get("type") != "null"]
    return " or ".join(shown_kind(kind) for kind in kinds)


def shown_kind(kind: dict[str, Any]) -> str:
    if "enum" in kind:
        return ", ".join(f"`{json.dumps(value)}`" for value in kind["enum"])
    if kind.get("type") == "array":
        return f"[{', '.join(map(shown_kind, kind['prefixItems']))}]"
    words = {"integer": "whole number", "boolean": "`true`, `false`"}.get(kind["type"], kind["type"])
    bounds = {">": "exclusiveMinimum", ">=": "minimum", "<": "exclusiveMaximum", "<=": "maximum"}
    limits = [f"{sign} {kind[name]:g}" for sign, name in bounds.items() if name in kind and abs(kind[name]) < 1e6]
    return " ".join([words, *limits[:1], *(f"and {limit}" for limit in limits[1:])])


def shown_default(value: Any) -> str:
    return "" if value is PydanticUndefined or value is None else f"`{json.dumps(value)}`"


def comments_of(section: type) -> dict[str, str]:
    """key -> the comment at the end of its line."""
    found: dict[str, str] = {}
    key = ""
    for token in tokenize.generate_tokens(StringIO(inspect.getsource(section)).readline):
        if token.type == tokenize.NAME and token.start[1] == 4:
            key = token.string
        if token.type == tokenize.COMMENT and token.start[1] > 4:
            found.setdefault(key, token.string.lstrip("# "))
    return found


# ---------------------------------------------------------------------- names


def entry(name: str, what: Any) -> Iterator[str]:
    """A heading, the signature, and what the docstring says."""
    text = inspect.getdoc(what) or ""
    summary, _, rest = text.partition("\n\n")
    yield f"### rl.{name}\n\n{summary}\n"
    if name not in MADE_FOR_YOU:
        yield f"```python\nrl.{name}{signature(what)}\n```\n"
    if rest.strip():
        yield f"```text\n{rest.strip()}\n```\n"
    made = what if inspect.isclass(what) else made_by(what)
    if made:
        described_here = [*takewhile(lambda of: of is made or has_no_entry(of), made.__mro__)]
        methods = {key: value for of in reversed(described_here) for key, value in vars(of).items()
                   if not key.startswith("_") and (inspect.isfunction(value) or isinstance(value, classmethod | staticmethod | property))}
        lines = [f"| `{member(made, key)}` | {first_sentence(value)} |" for key, value in methods.items()]
        if lines:
            whose = "member" if made is what else f"member of the {made.__name__} that it returns"
            yield f"| {whose} | what it is or does |\n|---|---|\n" + "\n".join(lines) + "\n"


def made_by(function: Any) -> type | None:
    """The class of what it returns, if that is one of ours without an entry of its own."""
    gives = inspect.signature(function).return_annotation
    return gives if inspect.isclass(gives) and has_no_entry(gives) else None


def has_no_entry(of: type) -> bool:
    """Whether it is a class of ours that is described only where others refer to it."""
    return of.__module__.startswith("rankloom.") and of.__name__ not in rl.__all__


def member(of: type, name: str) -> str:
    """A property with its type, or a method with its arguments, without `self`. For a cell of a table, where a bar would end the cell."""
    what = inspect.getattr_static(of, name)
    if isinstance(what, property):
        return f"{name}: {plain(annotation(inspect.signature(what.fget).return_annotation))}".replace("|", "\\|")
    found = inspect.signature(getattr(of, name))
    if inspect.isfunction(what):
        found = found.replace(parameters=list(found.parameters.values())[1:])
    return f"{name}({', '.join(arguments_of(found))}){returns(found)}".replace("|", "\\|")


def signature(what: Any) -> str:
    """(a, *, b=1) -> c, in one line if it is short, else a line for each argument."""
    try:
        found = inspect.signature(what)
    except (TypeError, ValueError):   # of an exception, or of what C has made
        return "(...)"
    arguments, gives = arguments_of(found), "" if inspect.isclass(what) else returns(found)
    line = f"({', '.join(arguments)}){gives}"
    return line if len(line) < 100 else "(\n    " + ",\n    ".join(arguments) + f",\n){gives}"


def arguments_of(found: inspect.Signature) -> list[str]:
    """Each with its type and its default; and the star before those that are given by name."""
    arguments, kinds = [], [parameter.kind for parameter in found.parameters.values()]
    for number, parameter in enumerate(found.parameters.values()):
        if parameter.kind is parameter.KEYWORD_ONLY and not {parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL} & {*kinds[:number]}:
            arguments.append("*")
        if isinstance(parameter.annotation, str):
            parameter = parameter.replace(annotation=Unquoted(parameter.annotation))
        if is_dataclass(parameter.default):
            parameter = parameter.replace(default=AsWritten(parameter.default))
        arguments.append(plain(str(parameter)))
    return arguments


class Unquoted(str):
    """A type that is not defined yet where it is named."""

    def __repr__(self) -> str:
        return str(self)


class AsWritten:
    """A value of a dataclass, shown without the fields that have their defaults: its repr would have all, and those inside."""

    def __init__(self, value: Any):
        self.value = value

    def __repr__(self) -> str:
        blank = {field.name: field.default for field in fields(self.value)}
        given = {name: getattr(self.value, name) for name in blank}
        shown = [f"{name}={AsWritten(value) if is_dataclass(value) else value!r}" for name, value in given.items() if value != blank[name]]
        return f"{type(self.value).__name__}({', '.join(shown)})"


def returns(found: inspect.Signature) -> str:
    """`-> c`, if it is said."""
    return "" if found.return_annotation is found.empty else f" -> {plain(annotation(found.return_annotation))}"


def annotation(kind: Any) -> str:
    return kind if isinstance(kind, str) else inspect.formatannotation(kind)


def plain(text: str) -> str:
    """Without modules and addresses."""
    text = re.sub(r"<(?:function|class) '?(?:\w+\.)*(\w+)'?(?: at 0x\w+)?>", r"\1", text)
    text = re.sub(r"<(?:\w+\.)*(\w+) object at 0x\w+>", r"\1()", text)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(\w+)", r"\1", text)


def first_sentence(what: Any) -> str:
    text = " ".join((inspect.getdoc(what) or "").split("\n\n")[0].split())
    return text.replace("|", "\\|")


# ---------------------------------------------------------------------- files


def table_of_files() -> str:
    """A heading for each folder, and a line for each file; bold where README.md sends its readers."""
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    parts = []
    for floor in FLOORS:
        folder = SOURCE / floor
        parts.append(f"### {'rankloom' if floor == '.' else floor}/\n\n{first_sentence_of(folder / '__init__.py', whole=True)}\n\n")
        parts.append("| file | what it is for |\n|---|---|\n")
        for file in sorted([*folder.glob("*.py"), *folder.glob("*.c")]):
            if not file.name.startswith("__"):
                name = str(file.relative_to(SOURCE))
                link = f"[{name}](../src/rankloom/{name})"
                bold = "**" if f"(src/rankloom/{name})" in readme else ""
                parts.append(f"| {bold}{link}{bold} | {first_sentence_of(file)} |\n")
        parts.append("\n")
    return "".join(parts)


def first_sentence_of(file: Path, *, whole: bool = False) -> str:
    """Of its docstring, or of the comment at the top of C. whole: the first paragraph"""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        said = re.sub(r"^ ?\*+/? ?", "", text[2 : text.index("*/")], flags=re.MULTILINE)
    paragraph = " ".join(said.strip().split("\n\n")[0].split())
    sentence = paragraph if whole else re.split(r"(?<=[\w`)\"])\.(?= [A-Z`]|$)", paragraph)[0]
    return sentence.removesuffix(":").replace("|", "\\|")


def with_table_of_files(start: str) -> str:
    """docs/start.md with the table as the source has it."""
    head, _, rest = start.partition(BEGIN)
    return head + BEGIN + table_of_files() + END + rest.partition(END)[2]


# ---------------------------------------------------------------------- types


def stub() -> str:
    """The public names as plain imports."""
    lines = ['"""Made by docs/make_reference.py from the list in __init__.py, for editors and type checkers."""\n']
    homes = sorted((module, name.lower(), name) for name, module in rl._HOME.items())
    lines += [f"from rankloom.{module} import {name} as {name}" for module, _, name in homes]
    return "\n".join([*lines, "\n__version__: str\n"])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    START.write_text(with_table_of_files(START.read_text(encoding="utf-8")), encoding="utf-8")
    STUB.write_text(stub(), encoding="utf-8")
