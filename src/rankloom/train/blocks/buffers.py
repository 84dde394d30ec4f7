"""Buffers that a block's forward changes, and may read too: running statistics, counters, vectors of spectral norm, codebooks.

When such a forward is recomputed, it must see the values of its first run, and its changes must not count twice. So it runs on
copies, which take the places of the buffers meanwhile. The buffers themselves are not touched, and backward may keep the copies.

    Before(block)     copies all buffers, before a forward
    changed(...)      after the forward: the copies of the buffers that it changed, to be kept until backward
    on_copies(...)    around a forward that is recomputed, or a trial

Only buffers that are registered in the block's own modules are seen.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.names import full_name
from rankloom.base.tensors import strided_parts, version_of

Values = dict[str, Tensor | None]   # name of a buffer -> value; None: the buffer is None


class Before:
    """The buffers of a block before a forward: the tensors, their versions, and copies.

    price: a copy of all buffers of the block, until its forward has ended
    """

    def __init__(self, block: nn.Module):
        self._block = block
        self._buffers = _buffers(block)
        self._versions = {name: version_of(buffer) for name, buffer in self._buffers.items() if buffer is not None}
        self.values = _copies(self._buffers)

    def changed(self, known: set[str], compare: bool) -> Values:
        """After the forward: earlier values of the buffers that it changed, and of those in `known`. Adds the changed names to `known`.

        compare: compare values too, as torch does not count writes through `.data`; this waits for the device
        """
        if not self.values:
            return {}
        now = _buffers(self._block)
        for name, value in self.values.items():
            old, new = self._buffers[name], now.get(name)
            written = old is not new or (old is not None and self._versions[name] != version_of(old))
            if written or (compare and value is not None and new is not None and not _equal(value, new)):
                known.add(name)
        known |= statistics(self._block)
        return {name: value for name, value in self.values.items() if name in known}


@contextmanager
def on_copies(block: nn.Module, values: Mapping[str, Tensor | None]) -> Iterator[None]:
    """A context in which the block's buffers are copies of these values. Afterwards it has its own buffers again, untouched."""
    found = [(holder, key, holder[key], name) for name, (holder, key) in _places(block).items() if name in values]
    copies = _copies(values)
    for holder, key, _, name in found:
        holder[key] = copies[name]
    try:
        yield
    finally:
        for holder, key, buffer, _ in found:
            holder[key] = buffer


def _places(block: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Name of a buffer -> the `_buffers` of its module, and the key there."""
    return {full_name(prefix, key): (module._buffers, key) for prefix, module in block.named_modules() for key in module._buffers}


def _buffers(block: nn.Module) -> Values:
    return {name: holder[key] for name, (holder, key) in _places(block).items()}


def _copies(values: Mapping[str, Tensor | None]) -> Values:
    """Copies; a buffer with two names is copied once."""
    made = {id(value): value.detach().clone() for value in values.values() if value is not None}
    return {name: None if value is None else made[id(value)] for name, value in values.items()}


def _equal(value: Tensor, new: Tensor) -> bool:
    return value.layout is new.layout and all(map(torch.equal, strided_parts(value), strided_parts(new)))


def statistics(block: nn.Module) -> set[str]:
    """Names of running statistics, which training forwards write and do not read. Batch norm's kernels do not bump versions."""
    return {full_name(prefix, key) for prefix, module in block.named_modules()
            if module.training and getattr(module, "track_running_stats", False) for key in module._buffers}
