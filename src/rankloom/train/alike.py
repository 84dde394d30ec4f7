"""Ranks that were given different things would each train in their own way, and nobody would know: they compare before the first step.

A host with an older file, a rate that depends on the rank. What may differ is left out: paths, and what a rank takes of its host.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rankloom.base.errors import ConfigError
from rankloom.shard.optimizer import Optimizer
from rankloom.train.schema import Config
from rankloom.world.group import Group

OWN = {"run.name", "run.folder", "data.source", "data.cache", "data.tokenizer", "train.threads", "comm.topology", "comm.timeout"}


def expect_alike(group: Group, what: str, mine: Mapping[str, Any]) -> None:
    """Raise ConfigError, on all ranks, when these values, by name, are not the same on all.

    sent: the values as text, once to every rank
    """
    everyone = group.all_gather_object({name: repr(value) for name, value in mine.items()}, label=f"the same {what}")
    expected, first = everyone[0], group.ranks[0]
    for rank, theirs in zip(group.ranks, everyone, strict=True):
        differ = [f"{name} is {theirs.get(name, 'missing')}, on rank {first} {expected.get(name, 'missing')}"
                  for name in dict.fromkeys((*expected, *theirs)) if theirs.get(name) != expected.get(name)]
        if differ:
            raise ConfigError(f"rank {rank} was given another {what} than rank {first}: {'; '.join(differ[:3])}; give all ranks the same")


def settings_of(config: Config) -> dict[str, Any]:
    """Every key of a config that must be the same on all ranks, with its section."""
    return {f"{section}.{key}": value for section, table in config.model_dump().items() for key, value in table.items()
            if f"{section}.{key}" not in OWN}


def numbers_of(optimizer: Optimizer) -> dict[str, Any]:
    """The rate, the decay ... of each group of parameters; a rate may be a tensor, on a device of its rank."""
    plain = int | float | str | tuple | list | None
    parts = [(at, key, value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
             for at, part in enumerate(optimizer.param_groups) for key, value in part.items() if key not in ("params", "param_names")]
    return {f"{key} of group {at}": value for at, key, value in parts if isinstance(value, plain)}
