"""Data parallel (stage 0): every rank holds the whole model and a part of the batch; gradients are averaged over ranks.

`data_parallel` is for users with a training loop of their own. Like torch's DDP it averages, and when `loss.backward()` returns,
gradients are complete. parallel/gradients/reducer.py sums them, bucket by bucket. The engine (train/engine.py) uses the same reducer, but
it sums gradients, and divides once by the global count.

source: Li et al. 2020 (torch DDP)
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.compression import BACKEND, EXACT
from rankloom.base.errors import UnitError
from rankloom.base.hooks import hook_gradient, keep_with
from rankloom.base.names import full_name
from rankloom.comm.compress import Summing
from rankloom.parallel.gradients.reducer import GradientReducer
from rankloom.parallel.replicas.buffers import BufferKeeper
from rankloom.parallel.replicas.equal_start import expect_same_values, make_replicas_equal
from rankloom.parallel.replicas.guards import watch_optimizers
from rankloom.parallel.replicas.known_parameters import KnownParameters, expect_none_beside
from rankloom.parallel.replicas.refused import expect_model_and_group, expect_no_sync_batch_norm
from rankloom.world.connect import expect_cpu_backend
from rankloom.world.group import Group


class DataParallel(nn.Module):
    """A model whose gradients, after `backward()`, are the mean over all ranks of the group."""

    has_names_of_module = True   # in its state dict

    def __init__(self, module: nn.Module, reducer: GradientReducer):
        super().__init__()
        self.module, self._reducer = module, reducer
        self._known, self._keeper = KnownParameters(module), BufferKeeper(module, reducer.group)
        self._finish_queued = False
        for param in module.parameters():
            if param.requires_grad:
                hook_gradient(param, self._queue_finish)
        watch_optimizers()
        self.register_load_state_dict_post_hook(lambda mine, _: mine._begin_anew())   # see `_load_from_state_dict`
        keep_with(module, self)   # gradients are averaged even when the module is called directly, and this wrapper is dropped

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward.

        raises: UnitError when a parameter was replaced or added after the model was wrapped; ConfigError when a frozen one is now trainable
        """
        expect_none_beside(self)
        self._known.expect_unchanged(may_move=True)
        if self._finish_queued and torch._C._current_graph_task_id() != -1:   # a recomputed forward, inside a backward
            return self.module(*args, **kwargs)
        if self._finish_queued and torch.is_grad_enabled():
            self._finish_queued = False   # the last backward failed half way
            self._reducer.abandon()
        if not torch.compiler.is_compiling():   # a graph would be guarded by which gradients exist, and recompiled when that changes
            self._reducer.give_back()
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context: backward passes inside only accumulate; the first one outside all-reduces the accumulated gradients.

        An optimizer step inside is of this rank alone (local SGD). One outside, before that backward, is an error.
        """
        return self._reducer.sync(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of the plain model, under its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a plain model's state dict. The error that compression has kept of earlier gradients is dropped."""
        loaded = self.module.load_state_dict(*args, **kwargs)
        self._begin_anew()
        return loaded

    def __deepcopy__(self, memo: Any) -> "DataParallel":
        raise UnitError("a model that data_parallel has wrapped cannot be copied: the copy would average nothing. Copy what is inside, "
                        "`copy.deepcopy(ddp.module)`, and give that to what copies by itself, as `AveragedModel(ddp.module)` does")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnitError("a model that data_parallel has wrapped cannot be pickled, as `torch.save(ddp)` does: it belongs to a group of "
                        "ranks. Save `ddp.state_dict()`, which has the plain model's names")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:   # called by a module that contains this
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *more)

    def _begin_anew(self) -> None:
        """After loading: new buffer values are no change made by a step, and compression starts without an error."""
        self._keeper.forget_changes()
        self._reducer.summing.begin_anew()

    def _queue_finish(self, _: Tensor) -> None:
        if self._reducer.syncing and not self._finish_queued:
            self._finish_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        _, alike = self._reducer.finish(mark=self._keeper.mark())
        self._keeper.heed(alike)
        self._keeper.average_changed()
        self._finish_queued = False


def data_parallel(model: nn.Module, group: Group, *, all_reduce: str = BACKEND, compress: str = EXACT,
                  compress_after: int = 0, bucket_bytes: int | None = None) -> DataParallel:
    """Wrap `model` for a training loop of your own. After `loss.backward()` every gradient is the mean over the group. A collective.

    Use it as torch's DDP:

        ddp = rl.data_parallel(model, world)
        F.cross_entropy(ddp(inputs), targets).backward()   # of this rank's rows
        optimizer.step()

    The mean over ranks is the gradient of the whole batch only if every rank's loss is a mean over equally many items; `rl.prepare`
    divides by the global count, so it is right for unequal ranks too. All ranks must pass the same model; where values differ, rank 0's
    are taken, with a warning.

    all_reduce:     "backend", "ring", or a registered name
    compress:       a name of comm/compress.py: less is sent, and sums are approximate
    compress_after: how many first steps send exact gradients
    bucket_bytes:   the most that a bucket of several gradients holds; left out, 128 MiB for CPU ranks on one host, else 32 MiB
    sent:     2n(p-1)/p gradient elements per rank and step, in ceil(n / bucket) or more messages; less for embeddings
    raises:   ModelMismatch when names, shapes or dtypes differ between ranks; ConfigError for unknown names, for two that cannot be
              combined, for a process group that carries no tensors of the CPU, and, on all ranks, when their options differ
    """
    expect_model_and_group(model, group)
    expect_cpu_backend(group)
    expect_no_sync_batch_norm(model, group.size)
    expect_same_values(group, "way to reduce gradients", {
        "all_reduce": all_reduce, "compress": compress, "compress_after": compress_after, "bucket_bytes": bucket_bytes})
    make_replicas_equal(model, group)
    reducer = GradientReducer(trainable(model), group, summing=Summing(all_reduce, compress, compress_after), bucket_bytes=bucket_bytes,
                              average=True, by_rows=embeddings(model))
    return DataParallel(model, reducer)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters, each once; tied ones under their first name."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def embeddings(model: nn.Module) -> frozenset[str]:
    """Names of the weights of `nn.Embedding` modules, whose gradients may be mostly rows of zeros."""
    return frozenset(full_name(name, "weight") for name, module in model.named_modules() if isinstance(module, nn.Embedding))
