"""Replicas begin equal, and stay equal where nobody sums: parameters at the start and in the first forward, buffers after each step."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError, ModelMismatch, UnitError
from rankloom.base.expect import expect_type
from rankloom.base.hooks import keeps
from rankloom.shard.flat import by_dtype
from rankloom.world.group import Group


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers of `model`, each once, tied ones under their first name."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def expect_model_and_group(model: Any, group: Any) -> None:
    """raises: ConfigError when one of them is something else, or the model is averaged already"""
    expect_type("model", model, nn.Module, "a torch module")
    expect_type("group", group, Group, "a Group: the world that rl.init gives, world.group(axis), or rl.Group(process_group)")
    expect_not_averaged(model)


def expect_not_averaged(model: nn.Module) -> None:
    """Raise ConfigError when `data_parallel` has wrapped the model or a part of it: two who sum a gradient sum it twice."""
    for name, module in model.named_modules():
        if keeps(module):
            raise ConfigError(f"{name or 'the model'} has been wrapped by data_parallel before, and whatever became of the wrapper, its "
                              "gradients are averaged: take a fresh copy (`copy.deepcopy(model)`)")


def make_replicas_equal(model: nn.Module, group: Group) -> list[str]:
    """Check that all ranks hold the same tensors, and give every rank the values of rank 0.

    returns: names of the tensors whose values differed on this rank before; rank 0 warns for all
    sent:    the model once, from rank 0
    raises:  ModelMismatch, on all ranks, when names, shapes, dtypes or frozen parameters differ; ConfigError for what cannot stay equal
    """
    expect_same_tensors(model, group)
    if group.size == 1:
        return []
    changed = []
    for name, tensor in named_state(model):
        mine = tensor.detach().contiguous().view(-1).view(torch.uint8)   # bytes: backends refuse some dtypes, and a NaN is itself
        theirs = group.broadcast(mine.clone(), label=f"initial {name}")
        if not torch.equal(theirs, mine):
            changed.append(name)
            with torch.no_grad():
                tensor.copy_(theirs.view(tensor.dtype).view(tensor.shape))
    everyone = group.all_gather_object(changed, label="who differed")
    if group.rank == 0 and any(everyone):   # whose words reach the console
        ranks = [rank for rank, names in zip(group.ranks, everyone) if names]
        names, root = next(filter(None, everyone)), group.world_rank
        warnings.warn(f"the models of ranks {ranks} differed from rank {root}'s, that of rank {ranks[0]} in {len(names)} tensors "
                      f"(first: {names[0]}); rank {root}'s values are used. Seed the model's initialisation the same on all ranks "
                      "to be rid of this warning.", stacklevel=3)
    return changed


def expect_same_tensors(model: nn.Module, group: Group) -> None:
    """Raise ModelMismatch, on all ranks, when names, shapes, dtypes or frozen parameters differ; ConfigError when two ranks have been
    given one object, or parameters share memory; see `_expect_plain_embeddings` too."""
    _expect_plain_embeddings(model, group.size)
    _expect_memory_of_their_own(model)
    _expect_own(model, group)
    mine = {name: f"{list(t.shape)} {t.dtype}{'' if t.requires_grad else ' frozen'}" for name, t in named_state(model)}
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


def _expect_own(model: nn.Module, group: Group) -> None:
    """Ranks that are threads may hold the same object by accident, and would write over each other's gradients."""
    holder = vars(model).setdefault("_held_by_rankloom", group.world_rank)   # in one go: the first of the threads
    try:
        holders = group.all_gather_object(holder, label="a model for each rank")
    finally:
        vars(model).pop("_held_by_rankloom", None)
    for rank, holder in zip(group.ranks, holders):
        if rank != holder:
            raise ConfigError(f"rank {rank} was given the very object that rank {holder} has as its model: ranks of `rl.simulate` are "
                              "threads, and each needs a model of its own. Make it inside of the body, or copy it there: "
                              "`copy.deepcopy(model)`")


def _expect_memory_of_their_own(model: nn.Module) -> None:
    """Raise ConfigError for two parameters in one memory: they get others, in flat buffers, and would be trained apart."""
    found: dict[tuple[torch.device, int], tuple[str, nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if address := _address(param):
            first, other = found.setdefault((param.device, address), (name, param))
            if other is not param and (param.requires_grad or other.requires_grad):
                raise ConfigError(f"{name} and {first} are two parameters in one memory, as after `a.weight.data = b.weight.data`: they "
                                  "would be trained apart. Tie them as one parameter: `a.weight = b.weight`")


def _address(tensor: Tensor) -> int:
    """Where its elements lie; 0 where they have no memory."""
    return tensor.data_ptr() if tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta else 0


def _expect_plain_embeddings(model: nn.Module, ranks: int) -> None:
    """Raise ConfigError for one with sparse gradients, which have no place in a flat buffer; and on several ranks for one whose weight,
    or whose gradient, depends on which rows meet on a rank.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(f"{name or 'the model'} is an embedding with sparse=True; leave it out: gradients lie end to end in memory "
                              "(at stage 0 only the touched rows travel anyway)")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and ranks > 1 and (module.max_norm is not None or module.scale_grad_by_freq):
            raise ConfigError(f"{name or 'the model'} is an embedding with max_norm or scale_grad_by_freq, which look at the rows of one "
                              "rank: leave them out, or train it on one rank")


LOAD = "Load values with `load_full_state_dict` of the engine (`load_state_dict` of what is wrapped, in a loop of one's own)"
Seen = tuple[Tensor, int, int]   # a buffer, how often its module's buffers had been written, and where it lay


class BufferKeeper:
    """Keeps buffers that training changes (running statistics) equal over the ranks: their mean, after each step.

    Which buffers those are is seen from torch's version counters, module by module, and from some of their bits, and agreed on, so a
    buffer that only some ranks changed is no hang. One that was found by its bits is averaged from then on in every step: the next write
    may be to others. Constants (rotary tables) never travel, and a cache that is not alike on all ranks, or that only some have made, is
    left to each.
    It also knows the modules and parameters that there were, and which were frozen: nobody sums the gradient of one that comes or is
    thawed later.
    """

    def __init__(self, model: nn.Module, group: Group):
        self.model, self.group = model, group
        self._before = self._seen()
        self._always = set[str]()   # names of those that are written by what nobody counts
        self._sampled = Sampled(self._quiet(self._before))
        self._own = self._common = list(self._before)   # names here, and everywhere, when ranks last told each other
        self._places = [(module._parameters, key, f"{prefix}.{key}" if prefix else key, param, param.requires_grad)
                        for prefix, module in model.named_modules() for key, param in module._parameters.items() if param is not None]
        self._parts = self._all_parts()

    def expect_parameters(self) -> None:
        """Before a step: raise UnitError when another parameter is in the place of one, or one has come; ConfigError when one is frozen
        no more."""
        self.expect_no_more()
        for place, key, name, param, trained in self._places:
            if place.get(key) is not param:
                raise UnitError(f"{name} was replaced after the model was prepared: nobody sums the gradient of the new tensor. "
                                f"{LOAD}, or replace it before")
            if param.requires_grad and not trained:
                raise ConfigError(f"{name} was frozen when the model was prepared, and is to be trained now: its gradient would be summed "
                                  "by nobody. Prepare the model with all that will be trained, and freeze parts of it afterwards")

    def expect_no_more(self) -> None:
        """Raise UnitError when a parameter has come that was not there before, alone or in a module that is new."""
        if all(list(module._modules.values()) == parts and len(module._parameters) == size for module, parts, size in self._parts):
            return
        known = {param for *_, param, _ in self._places}
        if new := [name for name, param in self.model.named_parameters() if param not in known]:
            raise UnitError(f"{new[0]} came after the model was prepared: nobody sums its gradient, and no state holds it. Prepare the "
                            "model with all its parts")
        self._parts = self._all_parts()

    def _all_parts(self) -> list[tuple[nn.Module, list[nn.Module | None], int]]:
        """Each module, what is in it, and how many parameters it has."""
        return [(module, list(module._modules.values()), len(module._parameters)) for module in self.model.modules()]

    def average_changed(self) -> list[str]:
        """After a step: the names of the buffers that changed on any rank, now equal on all. Every rank must call it."""
        now = self._seen()
        if not (now or self._common):
            return []
        self._always |= self._sampled.changed() & self._quiet(now).keys()
        mine = [(list(now) != self._own, 0, 0)]
        for name, seen in ((name, now.get(name)) for name in self._common):
            kind = crc32(f"{list(seen[0].shape)} {seen[0].dtype}".encode()) if seen else 0
            mine.append((name in self._always or not _same(self._before.get(name), seen), kind, -kind))
        flags = torch.tensor(mine, device=self.group.device)
        (others, *_), *found = self.group.all_reduce(flags, "max", label="which buffers changed").tolist()
        if others:
            everyone = self.group.all_gather_object(list(now), label="which buffers there are")
            self._own, self._common = list(now), [name for name in everyone[0] if all(name in names for names in everyone)]
            return self.average_changed()
        changed = [name for name, (flag, most, least) in zip(self._common, found) if flag and most == -least]
        for name in changed:
            buffer = now[name][0].detach()
            buffer = torch.view_as_real(buffer) if buffer.is_complex() else buffer
            # A count (batches tracked) is the same everywhere; where it is not, the largest is the honest one.
            op = "mean" if buffer.is_floating_point() else "max"
            buffer.copy_(self.group.all_reduce(buffer.clone(memory_format=torch.contiguous_format), op, label=f"buffer {name}"))
        now = self._seen()
        if (quiet := self._quiet(now)).keys() != self._sampled.names:
            self._sampled = Sampled(quiet)
        self._before = now
        return changed

    def forget_changes(self) -> None:
        """What has been written so far is equal on all ranks."""
        self._before = self._seen()
        self._sampled = Sampled(self._quiet(self._before))

    def _quiet(self, now: dict[str, Seen]) -> dict[str, Tensor]:
        """Buffers that nobody is known to have written."""
        if self.group.size == 1:
            return {}
        return {name: seen[0] for name, seen in now.items() if name not in self._always and _same(self._before.get(name), seen)}

    def _seen(self) -> dict[str, Seen]:
        # Batch norm's kernels write their statistics without counting; but its number of batches is counted, beside them.
        versions = {id(b): sum(_version(other) for other in module.buffers(recurse=False))
                    for module in self.model.modules() for b in module.buffers(recurse=False)}
        return {name: (buffer, versions[id(buffer)], _address(buffer)) for name, buffer in self.model.named_buffers()}


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version   # torch counts no writes of what inference mode has made


def _same(before: Seen | None, now: Seen | None) -> bool:
    """Whether it is the same tensor, untouched like those beside it; a module may also put another in its place."""
    return before is not None and now is not None and before[0] is now[0] and before[1:] == now[1:]


SAMPLE = 512   # elements: every write of a whole is seen in them, and 64 tables of 1 MiB take 0.2 ms
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}   # by their bytes


class Sampled:
    """Elements of tensors as bits: torch's version counters see no write through `.data`, nor those of some kernels (batch norm).

    In tensors of more than SAMPLE elements it sees a write only if that changes one of those that are looked at.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.names = set(tensors)
        views = {name: view for name, tensor in tensors.items() if (view := _bits(tensor)) is not None}
        self._views = by_dtype(views, list(views))   # some: a copy and a comparison for each, however many tensors there are
        self._before = self._now()

    def changed(self) -> set[str]:
        """Names of those that were written since this was made, as far as it sees."""
        found: set[str] = set()
        for views, before, now in zip(self._views, self._before, self._now()):
            if not torch.equal(before, now):
                sizes = [view.numel() for view in views.values()]
                found |= {name for name, old, new in zip(views, before.split(sizes), now.split(sizes)) if not torch.equal(old, new)}
        return found

    def _now(self) -> list[Tensor]:
        return [torch.cat(list(views.values())) for views in self._views]


def _bits(tensor: Tensor) -> Tensor | None:
    """At most SAMPLE elements of a tensor of floats, as integers (a NaN is itself), in its own memory; None where they cannot be had."""
    tensor = tensor.detach()
    if not _address(tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    tensor = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))   # so that one whose dims were swapped is flat
    if not tensor.is_contiguous():
        return None
    step = -(-tensor.numel() // SAMPLE)
    step += step % 2 == 0   # or it would see few columns of a matrix
    return tensor.view(-1).view(INTEGERS[tensor.itemsize])[::step]


BEFORE = "Where that gives first values by a batch, run one through the plain model before it is wrapped: all ranks get those of rank 0"


class Arrivals(dict[str, None]):
    """Names of parameters, in the order in which their gradients came. In the first step it also sees which of them the forward wrote.

    A forward that gives a parameter its first values by the rows it sees (ActNorm) gives each rank others. One that does to it what every
    rank does (a norm of its own) is fine.
    """

    def __init__(self, params: Mapping[str, nn.Parameter]):
        super().__init__()
        self._params = dict(params)
        self._versions: dict[str, int] = {}

    def begin(self) -> None:
        """A forward begins."""
        if self or not self._versions:   # else no optimizer can have stepped since the last one
            self._versions = {name: param._version for name, param in self._params.items()}

    def note(self, name: str, param: Tensor, owner: Tensor) -> None:
        """A gradient has come, for an optimizer that updates `owner`; raises UnitError when that has other values than `param`."""
        self.setdefault(name)
        if self._versions and self._versions[name] != param._version and owner is not param and not torch.equal(param, owner.to(param)):
            raise UnitError(f"{self._told(name)}, and what is trained is a copy in {owner.dtype}: it would be lost. {BEFORE}")

    def end(self) -> None:
        """The first step has ended."""
        self._params, self._versions = {}, {}

    def _written(self) -> dict[str, Tensor]:
        """What has changed since the forward began; by loading, too, which gives all ranks the same."""
        return {name: self._params[name] for name, version in self._versions.items() if self._params[name]._version != version}

    def digest(self) -> int:
        """Of the values that have been written; 0 for none."""
        found = 0
        for name, param in sorted(self._written().items()):
            values = param.detach().cpu().contiguous().view(-1).view(torch.uint8)
            found = crc32(values.numpy().tobytes(), crc32(name.encode(), found))
        return found

    def expect_alike(self, first: int, group: Group) -> None:
        """The first backward has ended. Raise UnitError when rank 0 has written other values, whose digest is `first`: on all ranks, if it
        has written any."""
        problem, root = None, group.ranks[0]
        if self.digest() != first:
            told = (f"{self._told(next(iter(written)))}, to other values than on rank {root}" if (written := self._written()) else
                    f"the forward of rank {root} has written a parameter that is trained, and the one of this rank has not")
            problem = f"rank {group.world_rank}: {told}: ranks would part. {BEFORE}"
        if first:
            group.agree(problem, error=UnitError, label="written by a forward")
        elif problem:
            raise UnitError(problem)
        self.end()

    def _told(self, name: str) -> str:
        return f"the forward has written {name}, a parameter that is trained"
