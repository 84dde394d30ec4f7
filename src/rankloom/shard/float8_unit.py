"""A unit whose weights are gathered in eight bits. Layers multiply by the eight-bit weights; nothing is converted back.

The model's parameters hold no values then: each is a single NaN, expanded to the weight's shape. A layer that reads one all the same
returns NaN, and the step ends with an error.

Read shard/unit.py and shard/float8.py before this file.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rankloom.base.cost import Bill, all_reduce_bill
from rankloom.base.float8 import BothWays
from rankloom.shard.float8 import decode, encode_slice, own_amaxes
from rankloom.shard.unit import Formats, State, Unit
from rankloom.world.group import Group


class Float8Reader(Protocol):
    """A layer that multiplies by a weight in eight bits: `held`, while there is one"""

    held: BothWays | None

    @property
    def peers(self) -> Group | None:
        """The ranks that hold the other parts of the weight."""


Float8Readers = Mapping[str, Sequence[Float8Reader]]   # by the name of the weight


class Float8Unit(Unit):
    """Weights gathered in E4M3, each scaled by its largest magnitude over all ranks, tensor ranks with other parts of it included.

    formats: `compute` is the dtype of the weights in an unsharded model: they are rounded to that before they are cast
    readers: name -> the layers that multiply by this weight
    sent:    n(p-1)/p bytes a gather; one all-reduce of a number for each weight after an update
    memory:  n/p master elements, and n bytes while gathered
    """

    def __init__(self, name: str, params: Mapping[str, nn.Parameter], group: Group, formats: Formats,
                 readers: Float8Readers, **more: Any):
        self.readers, self._rounded = {name: readers[name] for name in params}, formats.compute
        self.peers = next((layer.peers for layers in self.readers.values() for layer in layers if layer.peers), None)
        self._amaxes = torch.zeros(len(params), dtype=torch.float32, device=group.device)
        super().__init__(name, params, group, Formats(torch.uint8, formats.master, formats.reduce), **more)

    @torch.no_grad()
    def publish(self) -> None:
        """-> SHARDED (GATHERED where one rank keeps the whole): `own` has changed. A collective: the ranks agree on the scales."""
        if self.state is State.GATHERING:
            self.wait()
        amaxes = own_amaxes(self._own_here().to(self._rounded), self.layout, self.group.rank)
        self._amaxes = self.group.all_reduce(amaxes, "max", label=f"scales of {self.name}")
        if self.peers:   # for weights that all of them hold whole, this changes nothing
            self._amaxes = self.peers.all_reduce(self._amaxes, "max", label=f"scales of {self.name}, of whole weights")
        super().publish()
        if self.stays:
            self._show()

    def publish_bill(self) -> Bill:
        """The messages about the scales."""
        elsewhere = self.peers.size if self.peers else 1
        return all_reduce_bill(self._amaxes.nbytes, self.group.size) + all_reduce_bill(self._amaxes.nbytes, elsewhere)

    def _write_slice(self, own: Tensor, out: Tensor) -> None:
        encode_slice(own.to(self._rounded), self.layout, self.group.rank, self._amaxes, out)

    def _place(self, name: str, values: Tensor) -> None:
        self.params[name].data = torch.full((), torch.nan, dtype=self._rounded, device=self.group.device).expand(values.shape)

    def _show(self) -> None:
        for name, eight in decode(self._bytes, self.layout, self._amaxes).items():
            for layer in self.readers[name]:
                layer.held = BothWays(eight, eight)

    @cached_property
    def _bytes(self) -> Tensor:
        """The whole, by `.data`, so that a gather does not bump the version of what autograd keeps for backward."""
        return self.whole.data

    def _read_in_backward(self) -> Iterable[Tensor]:
        return *self.params.values(), self._bytes

    def _hide(self) -> None:
        for layers in self.readers.values():
            for layer in layers:
                layer.held = None
