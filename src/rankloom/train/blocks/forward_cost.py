"""What a forward costs: the bytes it keeps for its backward, and its work, both traced from its operations.

Bytes are those of storages that the forward made and that are alive when it ends, whether autograd, hooks, checkpoints or caches hold
them; each counts once. Parameters and inputs existed before, so they do not count.

Work is counted, not timed: ranks must come to the same decision, and their clocks differ. The unit is a byte of memory traffic; a
matrix product counts as its flops divided by the flops that a device does in the time of one byte.
"""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from rankloom.train.blocks.selective import ATTENTION, is_kept, storages

aten = torch.ops.aten
FLOPS_PER_BYTE = {"cpu": 16, "cuda": 200}   # of a desktop's core; of an A100, an H100 or an H200 in bf16


class Trace(TorchDispatchMode):
    """Records the storages and the work of the operations that run inside it.

    >>> x = torch.ones(8, requires_grad=True)
    >>> with Trace() as trace:
    ...     out = (x.exp() * 2).sum()
    >>> trace.kept(out)      # 8 exponentials, which the backward of `exp` needs, and the sum
    36
    """

    def __init__(self) -> None:
        super().__init__()   # type: ignore[no-untyped-call]
        self.work = self.product_work = 0   # of all operations; of products and attention alone
        self._made: dict[int, StorageWeakRef] = {}

    def __enter__(self) -> "Trace":
        """Turn off autocast's cache of weights: the trace neither uses casts from before nor leaves any behind."""
        self._caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        """Restore autocast's cache."""
        super().__exit__(*failure)
        torch.set_autocast_cache_enabled(self._caches)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation; record the storages it made, and its work."""
        out = func(*args, **(kwargs or {}))
        given, made = storages((args, kwargs)), storages(out)
        for key, storage in made.items():
            if key not in given and key not in self._made:   # while there is a weak reference, no other storage gets the address
                self._made[key] = StorageWeakRef(storage)   # type: ignore[no-untyped-call]
        if is_kept(func, args):
            cost = _flops(func.overloadpacket, args, kwargs, out) // FLOPS_PER_BYTE.get(_device(out), FLOPS_PER_BYTE["cuda"])
            self.product_work += cost
        else:
            cost = _traffic(args, out) if made.keys() - given.keys() or func._schema.is_mutable else 0   # a view is free
        self.work += cost
        return out

    def kept(self, *alive: Any) -> int:
        """Bytes that are still held. alive: the outputs, which the caller must still hold"""
        assert alive, "hold the outputs: without them the graph of the forward is freed"
        held = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._made.values() if not ref.expired()]
        return sum(storage.nbytes() for storage in held if storage is not None)


def _flops(packet: Any, args: Any, kwargs: Any, out: Any) -> int:
    if packet is aten._grouped_mm:   # not in torch's table
        (rows, width), matrices = args[0].shape, args[1]
        return int(2 * rows * width * matrices.shape[-1])
    if packet in ATTENTION:          # torch 2.11 refuses keys of fewer heads
        query, key, value = args[:3]
        return int(2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1]))
    return int(flop_registry[packet](*args, **(kwargs or {}), out_val=out))


def _traffic(args: Any, out: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves((args, out)) if isinstance(t, Tensor))


def _device(out: Any) -> str:
    return next(t.device.type for t in tree_leaves(out) if isinstance(t, Tensor))
