"""Which ranks share a node, according to the launcher or a cluster file. base/topology.py describes the file."""

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rankloom.base.errors import ConfigError
from rankloom.base.files import expanded
from rankloom.base.text import with_its_line
from rankloom.base.topology import Links, Topology, parse_topology
from rankloom.world.launch import Place
from rankloom.world.transport.meet import hear_all

DEFAULT = Links()


def find_topology(place: Place, store: dist.Store, timeout: float, file: str | Path | None = None, *,
                  links: Links = DEFAULT) -> Topology:
    """The topology of the job, the same on all ranks. A launcher tells each rank only its own node, so ranks tell each other.

    timeout: seconds to wait for the other ranks
    file:    a cluster file; it overrides the launcher
    links:   the cost of links, where the file does not give it
    raises:  ConfigError, on all ranks, when the file is wrong on one of them or differs between them; RankLost
    """
    one_node = place.local_size == place.size
    names = [""] * place.size if one_node else hear_all(store, "node", place.rank, place.size, timeout, str(place.node))
    topology = Topology.of_names(names, links)
    if file is None:
        return topology
    try:
        topology = read_cluster(file, place.size, topology)
        problem = ""
    except ConfigError as error:
        problem = str(error)
    said = hear_all(store, "cluster file", place.rank, place.size, timeout, problem or _summary(topology))
    other = next((rank for rank, what in enumerate(said) if what != said[0]), None)
    if other is not None:
        raise ConfigError(f"{file}: not the same on all nodes. Rank 0: {said[0]}; rank {other}: {said[other]}")
    if problem:
        raise ConfigError(problem)
    return topology


def _summary(topology: Topology) -> str:
    """What ranks compare: all of it is a number for each rank, from each rank, for each rank."""
    return f"{len(topology.nodes)} node(s), {topology.links}, hash {hashlib.sha256(repr(topology).encode()).hexdigest()[:12]}"


def read_cluster(path: str | Path, size: int, otherwise: Topology) -> Topology:
    """Read a cluster file (TOML, or JSON as `rankloom bench --save` writes it); missing keys are as in `otherwise`.

    raises: ConfigError that names file and key
    """
    try:
        return parse_topology(_read_table(expanded(path)), size, otherwise)
    except ValueError as error:   # ConfigError is a ValueError; so is the error about an integer of too many digits to print
        raise ConfigError(f"{path}: {error}") from None


def write_links(path: str | Path, links: Links) -> None:
    """Write a cluster file in JSON with these links; the launcher still says which rank is on which node."""
    try:
        Path(path).write_text(json.dumps({"links": links.as_table()}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _read_table(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError("no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text (byte {error.start})") from None
    except (ValueError, RecursionError) as error:   # tomllib's and json's own errors are ValueErrors
        said = with_its_line(error, text) if isinstance(error, ValueError) else error
        raise ConfigError(f"not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {said}") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
