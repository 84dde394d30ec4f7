"""Replicas start equal: before training, all ranks must have the same options and tensors, and take the values of rank 0."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from rankloom.base.alike import first_difference
from rankloom.base.errors import ConfigError, ModelMismatch
from rankloom.base.tensors import bytes_of, keep_until_read, overwrite, strided_parts
from rankloom.parallel.replicas.refused import expect_memory_of_their_own, expect_plain_embeddings
from rankloom.shard.flat import cut_into_buckets, kept_strides
from rankloom.world.group import Group

MESSAGE_BYTES = 4 << 20   # thousands of small tensors would be as many messages; a larger one travels alone


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers of `model`, each once; tied ones under their first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def expect_same_values(group: Group, what: str, mine: Mapping[str, Any], advice: str = "") -> None:
    """Raise ConfigError, on all ranks, unless every rank was given the same values. A collective.

    mine:   this rank's values, by name
    advice: appended to the message
    sent:   the values as text, once to every rank
    """
    if problem := _first_difference(group, what, mine):
        raise ConfigError(problem + advice)


def expect_same_values_in(part: Group, everyone: Group, what: str, mine: Mapping[str, Any]) -> None:
    """As `expect_same_values` among the ranks of each part; the error is raised on all ranks of `everyone`."""
    everyone.agree(_first_difference(part, what, mine), label=f"the same {what}")


def _first_difference(group: Group, what: str, mine: Mapping[str, Any]) -> str | None:
    everyone = group.all_gather_object({name: repr(value) for name, value in mine.items()}, label=f"the same {what}")
    return first_difference(what, everyone, group.ranks)


def make_replicas_equal(model: nn.Module, group: Group) -> list[str]:
    """Check that all ranks hold the same tensors, and give every rank the values of rank 0. A collective.

    returns: names of the tensors whose values differed on this rank; rank 0 warns for all ranks
    sent:    the model once, from rank 0, small tensors together
    raises:  ModelMismatch, on all ranks, when names, shapes, dtypes or frozen parameters differ; ConfigError for models whose replicas
             could not stay equal
    """
    expect_same_tensors(model, group)
    if group.size == 1:
        return []
    _lie_as_on_rank_0(model, group)
    strided = {name: tensor for name, tensor in named_state(model) if tensor.layout is torch.strided}   # others are the same already
    changed = []
    for device in dict.fromkeys(tensor.device for tensor in strided.values()):
        sizes = {name: tensor.nbytes for name, tensor in strided.items() if tensor.device == device}
        for names in cut_into_buckets(sizes, MESSAGE_BYTES):
            changed += _take_from_rank_0({name: strided[name] for name in names}, group)
    everyone = group.all_gather_object(changed, label="who differed")
    if group.rank == 0 and any(everyone):   # only rank 0's warnings reach the console
        ranks = [rank for rank, names in zip(group.ranks, everyone) if names]
        names, root = next(filter(None, everyone)), group.world_rank
        warnings.warn(f"the models of ranks {ranks} differed from rank {root}'s, that of rank {ranks[0]} in {len(names)} tensors "
                      f"(first: {names[0]}); rank {root}'s values are used. Seed the model's initialisation the same on all ranks "
                      "to avoid this warning; threads of `rl.simulate` share torch's generator: make the model before, and copy it.",
                      stacklevel=3)
    return changed


def _take_from_rank_0(tensors: Mapping[str, Tensor], group: Group) -> list[str]:
    """Give these tensors, of one device, the values of rank 0, in one message. Returns the names of those that had others."""
    message = torch.cat([bytes_of(tensor) for tensor in tensors.values()])
    group.broadcast(message, label=f"initial {', '.join(list(tensors)[:3])}")
    theirs = dict(zip(tensors, message.split([tensor.nbytes for tensor in tensors.values()])))
    changed = [name for name, tensor in tensors.items() if not torch.equal(theirs[name], bytes_of(tensor))]
    for tensor in tensors.values():   # it was read here, and may be replaced now, or cut later
        keep_until_read(tensor)
    for name in changed:   # of several, cloned: a tensor's bytes may begin anywhere in the message, and numbers may not
        values = theirs[name] if len(tensors) == 1 else theirs[name].clone()
        overwrite(tensors[name], values.view(tensors[name].dtype).view(tensors[name].shape))
    return changed


@torch.no_grad()
def _lie_as_on_rank_0(model: nn.Module, group: Group) -> None:
    """Give parameters the strides that they have on the first rank: gradients that are summed keep them (shard/flat.py)."""
    mine = {name: list(strides) for name, param in model.named_parameters() if (strides := kept_strides(param)) is not None}
    first = group.all_gather_object(mine, label="how parameters lie in memory")[0]
    for name, param in model.named_parameters():
        if mine.get(name) != first.get(name):
            contiguous = torch.empty_like(param, memory_format=torch.contiguous_format)
            keep_until_read(param)
            param.data = (contiguous if name not in first else contiguous.as_strided(param.shape, first[name])).copy_(param)


def expect_same_tensors(model: nn.Module, group: Group) -> None:
    """Raise ModelMismatch, on all ranks, when names, shapes, dtypes or frozen parameters differ between ranks. A collective.

    Raises ConfigError when two ranks (threads) share one model object, when two parameters share memory, and for the embeddings of
    `expect_plain_embeddings`.
    """
    expect_plain_embeddings(model, group.size)
    expect_memory_of_their_own(model)
    _expect_own(model, group)
    mine = {name: _description(tensor) for name, tensor in named_state(model)}
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    if len(set(group.all_gather_object(digest, label="shape of the model"))) == 1:
        return
    root = group.all_gather_object(mine if group.rank == 0 else None, label="rank 0's model")[0]
    first = group.ranks[0]
    differ = [f"{name}: {mine.get(name, 'missing')} here, {root.get(name, 'missing')} on rank {first}"
              for name in dict.fromkeys((*root, *mine)) if mine.get(name) != root.get(name)]
    if not differ and list(mine) != list(root):
        here, there = next(pair for pair in zip(mine, root) if pair[0] != pair[1])
        differ = [f"the same tensors in another order, {here} here where rank {first} has {there}"]
    problem = f"rank {group.world_rank} holds another model than rank {first}: {'; '.join(differ[:3])}" if differ else None
    group.agree(problem, error=ModelMismatch, label="same model")


def _description(x: Tensor) -> str:
    """What must be equal on all ranks, in words."""
    frozen = "" if x.requires_grad else " frozen"
    return f"{list(x.shape)} {x.dtype}{frozen}{_sparse_values(x)}"


def _sparse_values(x: Tensor) -> str:
    """A checksum of a sparse tensor, in words; empty for others. It is not sent from rank 0: its size may differ by rank."""
    if x.layout is torch.strided:
        return ""
    if not (parts := strided_parts(x.detach().coalesce() if x.layout is torch.sparse_coo else x.detach())):
        return f" {x.layout}"
    return f" sparse, of checksum {crc32(torch.cat([bytes_of(part.cpu()) for part in parts]).numpy().tobytes()):x}"


def _expect_own(model: nn.Module, group: Group) -> None:
    """Raise ConfigError when two ranks share a model object: threads would overwrite each other's gradients."""
    holder = vars(model).setdefault("_held_by_rankloom", group.world_rank)   # atomic: the first thread's rank stays
    try:
        holders = group.all_gather_object(holder, label="a model for each rank")
    finally:
        vars(model).pop("_held_by_rankloom", None)
    for rank, holder in zip(group.ranks, holders):
        if rank != holder:
            raise ConfigError(f"rank {rank} was given the very object that rank {holder} has as its model: ranks of `rl.simulate` are "
                              "threads, and each needs a model of its own. Make it inside of the body, or copy it there: "
                              "`copy.deepcopy(model)`")
