"""Counts the memory of tensors, as one thread makes them."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Storages(TorchDispatchMode):
    """While it is entered, follows the storages of all results: the most bytes that were alive at once, each storage once.

    fresh: only of those that an operation has made, not of what was there before
    """

    def __init__(self, *, fresh: bool = False) -> None:
        super().__init__()
        self.fresh, self.peak = fresh, 0
        self._alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))} if self.fresh else set()
        for storage in _storages(result):
            if storage._cdata not in given:
                self._alive[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, sum(storage.nbytes() for ref in self._alive.values() if (storage := ref()) is not None))
        return result


def _storages(tree):
    return [tensor.untyped_storage() for tensor in tree_flatten(tree)[0] if isinstance(tensor, torch.Tensor) and not tensor.is_meta]
