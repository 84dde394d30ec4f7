"""Models that are refused before anything is changed: what this rank alone can see. equal_start.py compares ranks."""

import gc
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError
from rankloom.base.expect import expect_type
from rankloom.base.hooks import keeps, waiting_for
from rankloom.base.tensors import memory_address
from rankloom.parallel.axes import expect_same_part
from rankloom.parallel.replicas.guards import is_sharded
from rankloom.world.connect import has_default_group
from rankloom.world.group import Group

COLLECTING = threading.Lock()   # a second thread's `gc.collect` would return at once


def expect_model_and_group(model: Any, group: Any) -> None:
    """Check the types of model and group. Raises ConfigError, also for a model that has no shapes yet, or that `data_parallel` or
    `fully_shard` has changed, and for a group in which ranks hold different parts."""
    expect_type("model", model, nn.Module, "a torch module")
    expect_type("group", group, Group, "a Group: the world that rl.init gives, world.group(axis), or rl.Group(process_group)")
    expect_fresh(model)
    expect_same_part(model, group)


def expect_fresh(model: nn.Module) -> None:
    """Raise ConfigError when a lazy module of the model has not been called yet, so that nobody knows its shapes; when the gradients of the
    model, or of a part of it, are summed already; and when its parameters are cut."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(f"{name} of a lazy module has no shape yet: call the model once, with an example of its inputs, before it is "
                              "given to rankloom")
    for name, param in model.named_parameters():
        if is_sharded(param):
            raise ConfigError(f"{name} has been sharded before, and is not whole on any rank: shard a model once, as a whole (blocks are "
                              "found by themselves, or as `units` says), and wrap it in nothing else; `replicas` adds ranks")
    for name, module in model.named_modules():
        if keeps(module):
            raise ConfigError(f"{name or 'the model'} has been wrapped by data_parallel before, and its gradients are averaged even when "
                              "the wrapper is gone: take a fresh copy (`copy.deepcopy(model)`)")
    for name, param in model.named_parameters():
        if param.requires_grad and any(waiting_for(param)):
            with COLLECTING:
                gc.collect()   # a wrapper that was dropped may be waiting to be collected
        if param.requires_grad and any(waiting_for(param)):
            raise ConfigError(f"{name} is a parameter of another model too, which data_parallel or prepare has taken before: the gradient "
                              "would be summed twice. Models that share parameters train as one: put them in an "
                              "`nn.ModuleDict`, and wrap or prepare that")


def expect_plain_embeddings(model: nn.Module, ranks: int) -> None:
    """Raise ConfigError for embeddings with sparse gradients, which do not fit in a flat buffer.

    On several ranks also for those whose weight or gradient depends on which rows are on the same rank.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(f"{name or 'the model'} is an embedding with sparse=True; leave it out: gradients lie end to end in memory "
                              "(at stage 0 only the touched rows travel anyway)")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and ranks > 1 and (module.max_norm is not None or module.scale_grad_by_freq):
            raise ConfigError(f"{name or 'the model'} is an embedding with max_norm or scale_grad_by_freq, which look at the rows of one "
                              "rank: leave them out, or train it on one rank")


def expect_memory_of_their_own(model: nn.Module) -> None:
    """Raise ConfigError for two parameters in the same memory: flat buffers would separate them, and train them apart.

    Two of which neither is trained may share it.
    """
    with_memory = [(name, param) for name, param in model.named_parameters() if memory_address(param)]
    for device in {param.device for _, param in with_memory}:
        names, params = zip(*(pair for pair in with_memory if pair[1].device == device))
        if shared := _first_shared([_runs(param) for param in params], [param.requires_grad for param in params]):
            first, second = (names[which] for which in shared)
            raise ConfigError(f"{second} and {first} are two parameters in one memory, as after `a.weight.data = b.weight.data`: they "
                              "would be updated separately. Tie them as one parameter: `a.weight = b.weight`")


def _first_shared(runs: Sequence[Tensor], trained: Sequence[bool]) -> tuple[int, int] | None:
    """Which two tensors have a byte in common, and not both are frozen; None if there are no such two. runs: see `_runs`"""
    owner = torch.arange(len(runs), device="cpu").repeat_interleave(torch.tensor([len(of_one) for of_one in runs], device="cpu"))
    begin, end = torch.cat(list(runs)).unbind(1)
    begin, order = begin.sort(stable=True)
    end, owner = end[order], owner[order]
    is_trained = torch.tensor(trained, device="cpu")[owner]
    reach, reaching = end.cummax(0)   # of each run and those before it: where the farthest ends, and which run that is
    reach_trained, reaching_trained = end.where(is_trained, 0).cummax(0)
    before = torch.where(is_trained[1:], reaching[:-1], reaching_trained[:-1])
    overlaps = begin[1:] < torch.where(is_trained[1:], reach[:-1], reach_trained[:-1])
    found = (overlaps & (owner[before] != owner[1:])).nonzero()
    return (int(owner[before[found[0]]]), int(owner[1:][found[0]])) if len(found) else None


def _runs(x: Tensor) -> Tensor:
    """The runs of memory without gaps that a tensor takes: address of the first byte, and of the one behind the last. [runs, 2]"""
    begin, length = torch.tensor([x.data_ptr()], device="cpu"), x.itemsize
    for stride, size in sorted((stride * x.itemsize, size) for stride, size in zip(x.stride(), x.shape) if stride):
        if stride == length:
            length *= size
        else:
            begin = (begin[:, None] + torch.arange(size, device="cpu") * stride).flatten()
    return torch.stack([begin, begin + length], 1)


def expect_no_sync_batch_norm(model: nn.Module, ranks: int) -> None:
    """Raise ConfigError for torch's `nn.SyncBatchNorm`, which would silently see only the rows of its own rank.

    ranks: the number of ranks over which the rows of a batch are distributed
    """
    if ranks == 1 or has_default_group():
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ConfigError(f"{name or 'the model'} is a SyncBatchNorm. It takes its statistics over torch's default process group, and "
                              f"rankloom makes none: on {ranks} ranks each would normalise by its own rows, as a plain BatchNorm does. "
                              "Use nn.GroupNorm or nn.LayerNorm; or nn.BatchNorm, where each rank's own rows are enough (running "
                              "statistics are averaged after each step)")
