"""From a TOML file and command-line overrides to one frozen `Config`, or to one clear error.

The error names the file or the flag, the section, the key, what was expected, and the nearest known key. `schema.py` defines the keys.
No torch here: reading a config takes milliseconds.
"""

import re
import tomllib
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rankloom.base.errors import ConfigError, did_you_mean
from rankloom.base.files import saving
from rankloom.base.text import with_its_line
from rankloom.train.run.schema import Config

Table = dict[str, Any]
OWN = {"run.name", "run.folder", "data.source", "data.cache", "data.tokenizer",   # paths, and settings of a host: these may
       "train.threads", "comm.topology", "comm.timeout"}                           # differ between ranks
MANY_SHARDS = 1 << 30   # logical shards enough for any ranks
NAME_RULE = "must be ASCII letters, digits, `.`, `_` and `-` only, at most 100, the first a letter or a digit"


@dataclass(frozen=True, slots=True)
class Override:
    """One value from the command line: the flag as it was typed, where it goes, and the text of the value.

    section: may be nested, as `model.moe`
    """

    flag: str
    section: str
    key: str
    text: str


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply the overrides (`--mesh.replicate 4`, `--train.steps=200`), and check the result.

    The value `none` removes a key.
    raises: ConfigError, which lists all mistakes
    """
    return config_of(read_table(path), str(path), parse_overrides(overrides))


def config_of(file: Table, where: str, flags: Sequence[Override]) -> Config:
    """Apply overrides to a nested table, and check the result. where: its source, for errors. raises: ConfigError"""
    table = deepcopy(file)
    for flag in flags:
        _lay_over(table, flag)
    given = {(flag.section, flag.key): flag.flag for flag in flags}
    if ("train", "steps") in given and ("schedule", "warmup_steps") not in given:
        _shorten_warm_up(table)
    try:
        return make_config(table, where, given)
    except ConfigError as error:
        if ("train", "deterministic") in given or not given:
            raise
        return _without_deterministic(table, file, where, error)


def make_config(table: Table, where: str, flags: Mapping[tuple[str, str], str] | None = None) -> Config:
    """Check a nested table. where: its source, for errors; flags: the keys that came from the command line"""
    try:
        return Config.model_validate(_with_stage(table))
    except ValidationError as error:
        raise ConfigError(_explain(error, where, flags or {})) from None


def with_ranks(config: Config, ranks: int, file: Path | None = None) -> Config:
    """The same config on `ranks` ranks; raises MeshError when its mesh asks for another number. file: where it is from, for errors"""
    if config.mesh.is_known():
        config.mesh.as_mesh().expect_ranks(ranks)
        return config
    table = config.model_dump(exclude_none=True)
    table["mesh"] |= config.mesh.filled(ranks, config.train.stage)
    return make_config(table, f"{file}, on {ranks} ranks" if file else f"on {ranks} ranks")


def shared_settings(config: Config) -> dict[str, Any]:
    """Every key that must be the same on all ranks, with its section."""
    return {f"{section}.{key}": value for section, table in config.model_dump().items() for key, value in table.items()
            if f"{section}.{key}" not in OWN}


def write_config(config: Config, path: str | Path) -> None:
    """Write every key with its value, defaults and overrides included, so that `load_config` reads it back equal. raises: StorageError"""
    with saving(Path(path)) as temporary:
        temporary.write_text(tomli_w.dumps(config.model_dump(exclude_none=True)), encoding="utf-8")


def parse_overrides(words: Sequence[str]) -> list[Override]:
    """Parse command-line words into overrides; the last one of a key wins. `--mesh pipe=2,tensor=2` is `--mesh.pipe 2 --mesh.tensor 2`."""
    found, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        up_to_next_flag = list(takewhile(lambda later: not later.startswith("--"), rest))
        if of_section := _overrides_of_section(flag, " ".join([text] * bool(equals) + up_to_next_flag)):
            found += of_section
            rest = rest[len(up_to_next_flag):]
            continue
        name = flag.removeprefix("--")
        section, dot, key = name.rpartition(".")
        if not (flag.startswith("--") and section and dot and key):
            example = ", as in --mesh pipe=2,tensor=2" if flag == "--mesh" else _in_sections(name)
            raise ConfigError(f"{word}: not an option; a setting of the file is overridden by --section.key value{example}")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{flag}: needs a value after it, also where that is true or false")
            text = rest.pop(0)
        found.append(Override(flag, section, key, text))
    return found


def _in_sections(key: str) -> str:
    """Where a key that was given without its section belongs, for an error; empty if no section has it."""
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    found = [f"--{name}.{key}" for name, section in sections.items() if key in getattr(section, "model_fields", ())]
    return f". Did you mean {' or '.join(found)}?" if found else ""


def _overrides_of_section(flag: str, text: str) -> list[Override]:
    """The overrides of a flag that names a section, `--mesh` with the text `pipe=2,tensor=2`; empty for any other."""
    section = flag.removeprefix("--")
    if not flag.startswith("--") or ("." in section and not _keys_of(section)):
        return []
    pairs = _key_value_pairs(text)
    if twice := [key for key, times in Counter(key for key, _ in pairs).items() if times > 1]:
        raise ConfigError(f"{flag}: {twice[0]} is given twice in {text.strip()!r}")
    return [Override(f"{flag}.{key}", section, key, value) for key, value in pairs]


def _key_value_pairs(text: str) -> list[tuple[str, str]]:
    """The keys and values of `pipe=2,tensor=2`; empty if the text is not such a list."""
    pairs = [part.partition("=") for part in re.split(r"[,\s]+(?=\w+=)", text)]
    return [(name, value) for name, _, value in pairs] if all(name.isidentifier() and value for name, _, value in pairs) else []


def read_table(path: str | Path) -> Table:
    """The nested table of a TOML file. raises: ConfigError"""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")   # some editors write a byte-order mark
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {with_its_line(error, text)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: not a config: brackets in brackets, too many to read") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); a config is a TOML file") from None
    except FileNotFoundError:
        order = "; the file comes first, then its keys" if str(path).startswith("--") else ""
        raise ConfigError(f"{path}: no such file{order}{_neighbours(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name the TOML file in it{_neighbours(path / 'x')}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _neighbours(path: Path) -> str:
    """The TOML files in the folder of a path that does not exist, for an error."""
    try:
        near = sorted(p.name for p in path.parent.glob("*.toml"))
    except (OSError, ValueError):
        near = []
    return f". There: {', '.join(near[:8])}" if near else ""


def _lay_over(table: Table, flag: Override) -> None:
    """Set the key of an override in the nested table, or remove it."""
    removes, section = flag.text == "none", table
    for name in flag.section.split("."):
        section = section.get(name, {}) if removes else section.setdefault(name, {})
        if not isinstance(section, dict):
            _expect_section(flag)
            return   # the check of the whole table reports it
    if removes:
        section.pop(flag.key, None)
        _expect_known(flag)
    else:
        section[flag.key] = _value(flag)


def _shorten_warm_up(table: Table) -> None:
    """Let the warm-up end with the run, at the latest: the file's may be for a longer run."""
    schedule, train = table.get("schedule"), table.get("train")
    warmup, steps = (section.get(key) if isinstance(section, dict) else None
                     for section, key in ((schedule, "warmup_steps"), (train, "steps")))
    if isinstance(warmup, int) and isinstance(steps, int) and 0 < steps < warmup:
        table["schedule"] = schedule | {"warmup_steps": steps}   # type: ignore[operator]


def _without_deterministic(table: Table, file: Table, where: str, error: ConfigError) -> Config:
    """The config without the file's `deterministic`, where no number of logical shards would go with the overrides. Warns.

    table:  the file's, with the overrides; file: without them
    error:  why the table is wrong
    raises: `error`, where its cause is not `deterministic`; an error of the rest of the table, if that is wrong, too
    """
    train = table.get("train")
    if not (isinstance(train, dict) and train.get("deterministic") and _is_valid(file, where)):
        raise error
    free, of_any_number = (table | {"train": train | {"deterministic": shards}} for shards in (False, MANY_SHARDS))
    if _is_valid(of_any_number, where):
        raise error
    config = make_config(free, where)
    warnings.warn(f"[train] deterministic of {where} is off in this run, because of what the command line asks for: {error}", stacklevel=3)
    return config


def _is_valid(table: Table, where: str) -> bool:
    try:
        make_config(table, where)
    except ConfigError:
        return False
    return True


def _with_stage(table: Table) -> Table:
    """The table, with stage 3 if it has several shard ranks and no stage: at a lower stage they would share less, or nothing."""
    mesh, train = table.get("mesh"), table.get("train")
    shard = mesh.get("shard") if isinstance(mesh, dict) else None
    if isinstance(train, dict) and "stage" not in train and isinstance(shard, int) and shard > 1:
        return table | {"train": train | {"stage": 3}}
    return table


def _expect_known(flag: Override) -> None:
    """Check the key of an override with `none`, which removes it: the check of the table would not see a typo."""
    _expect_section(flag)
    if flag.key not in _keys_of(flag.section):
        raise ConfigError(_unknown((flag.section, flag.key), flag.flag))


def _expect_section(flag: Override) -> None:
    if not _keys_of(flag.section):
        raise ConfigError(_unknown((flag.section,), flag.flag))


def _value(flag: Override) -> object:
    """The value as TOML reads it; verbatim if the key holds text, so that `--run.name 7` is a name."""
    annotation = str(_keys_of(flag.section).get(flag.key, ""))
    if "str" in annotation or "Literal" in annotation:
        return flag.text
    try:
        return tomllib.loads(f"value = {flag.text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return _number(flag.text)


def _number(text: str) -> float | str:
    """A number without digits on one side of its point, which TOML has not, such as .001; any other text as it is."""
    try:
        return float(text)
    except ValueError:
        return text


def _keys_of(section: str) -> dict[str, Any]:
    """Key -> type of a section; empty when there is no such section."""
    model = _sections(Config).get(section)
    return {} if model is None else {key: field.annotation for key, field in model.model_fields.items()}


def _sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Every section a file may have, by its name in brackets."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):   # an optional section is in a union
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= {name: kind} | {f"{name}.{inner}": each for inner, each in _sections(kind).items()}
    return found


def _section_and_key(loc: Sequence[int | str]) -> tuple[str, ...]:
    """The section, and the key if any, that an error is about."""
    parts, known = [str(part) for part in loc], _sections(Config)
    depth = max((n for n in range(len(parts) + 1) if ".".join(parts[:n]) in known), default=0)
    return (".".join(parts[:depth]), *parts[depth : depth + 1]) if depth else tuple(parts[:1])


def _explain(error: ValidationError, where: str, flags: Mapping[tuple[str, str], str]) -> str:
    """One line per wrong key, even where pydantic reports several errors for it."""
    problems: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in error.errors():
        problems.setdefault(_section_and_key(detail["loc"]), []).append(detail)
    return "\n".join(_line(loc, details, where, flags) for loc, details in problems.items())


def _line(loc: tuple[str, ...], details: list[ErrorDetails], where: str, flags: Mapping[tuple[str, str], str]) -> str:
    kind, name = details[0]["type"], ".".join(loc)
    origin = next((flag for place, flag in flags.items() if ".".join(place) == name), where)
    if kind == "extra_forbidden":
        return _unknown(loc, next((flag for (section, _), flag in flags.items() if section == name), origin))
    expected = " or ".join(dict.fromkeys(_expectation(detail) for detail in details)).replace("or must be", "or")
    place = f"{origin} [{loc[0]}]" if loc and origin == where else origin
    if kind == "value_error" and len(loc) < 2:
        return f"{place}: {expected}"
    if len(loc) < 2:
        return f"{place}: must be a section of `key = value` lines"
    return f"{place}: {loc[1]} = {details[0]['input']!r}: {expected}"


def _expectation(detail: ErrorDetails) -> str:
    text = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    text = text.replace("valid boolean", "valid boolean (true or false)")
    if detail["type"] == "string_pattern_mismatch":
        return NAME_RULE if detail["loc"] == ("run", "name") else "must not be empty nor hold control characters"
    if detail["type"] in ("tuple_type", "too_long", "too_short", "missing"):
        return "must be two numbers in brackets, such as [0.9, 0.95]"
    return text


def _unknown(loc: tuple[str, ...], origin: str) -> str:
    if len(loc) == 2:
        return f"{_place(origin, loc[0])}: unknown key {loc[1]!r}. {did_you_mean(loc[1], _keys_of(loc[0]))}"
    known = _sections(Config)
    owners = [section for section in known if loc[0] in _keys_of(section)]
    hint = f"It is a key of [{owners[0]}]." if owners else did_you_mean(loc[0], known)
    return f"{origin}: unknown section [{loc[0]}]. {hint}"


def _place(origin: str, section: str) -> str:
    return origin if origin.startswith("--") else f"{origin} [{section}]"
