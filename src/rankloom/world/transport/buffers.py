"""Memory that all ranks of a group map: tensors that collectives read and write in place.

A piece has a part for each rank, and a number from 1 to 63 that is free on all ranks. Every call tells which pieces each rank still
maps. A piece is read in place only if all map it, else it is staged. One that is dropped while a call runs is unmapped after it.
Each piece is an open file of every rank as long as it is mapped.

A common tensor is different: it exists once, and all ranks read and write it as their own. Collectives do not know of it.
"""

import contextlib
import ctypes
import os
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from rankloom.base.errors import ShapeMismatch
from rankloom.world.open_files import make_room
from rankloom.world.transport.channel import Channel
from rankloom.world.transport.free_memory import available_memory
from rankloom.world.transport.memory import PAGE, Mapping, create_memory, map_memory, open_memory

REGIONS = range(1, 64)


class Buffers:
    """The shared pieces of one group, as one rank sees them."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._pieces: dict[int, Mapping] = {}
        self._given_back: list[int] = []   # their tensors are gone, but the kernel has not dropped them yet

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros for each rank, which all ranks of the group map; every rank must ask for the same.

        The memory is given back when the tensor is gone.
        raises: on all ranks: MemoryError when there is not enough memory, ShapeMismatch when they ask for different sizes, ConfigError
                when the process of a rank may open no more files, RankLost when one cannot open the memory of another
        """
        numel = torch.Size(shape).numel()
        if not numel:
            return torch.empty(shape, dtype=dtype, device="cpu")
        self._sweep()
        stride = -(-numel * dtype.itemsize // PAGE) * PAGE
        free = self._agree(stride, self._channel.size)
        mapping = self._map(stride * self._channel.size)
        part = (ctypes.c_char * stride).from_buffer(mapping, self._channel.rank * stride)
        if free:
            self._pieces[free] = mapping
            self._channel.link.add_region(free, mapping.address, stride)
            weakref.finalize(part, _give_back, weakref.ref(self), free).atexit = False
        return torch.frombuffer(part, dtype=dtype, count=numel).view(shape)

    def common(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A flat tensor of zeros, one for all ranks; every rank must ask for the same. Raises as `new` does.

        The memory is given back when the tensors of all ranks are gone. Pages are allocated when they are first touched: ranks that
        fill a slice each do so in parallel, and reading what others have filled costs next to nothing.
        """
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        self._agree(nbytes := numel * dtype.itemsize, 1)
        return torch.frombuffer(self._map(nbytes), dtype=dtype, count=numel)

    def _agree(self, stride: int, parts: int) -> int:
        """The first number that is free on all ranks; 0 if there is none: then the piece is plain memory, and staged like any other.

        Afterwards each may open the files of a new piece: `_map` begins only when all have been asked, so none counts those of another.
        """
        channel = self._channel
        asked = channel.gather_json([stride, list(self._pieces), os.getpid()])
        strides = [asks for asks, *_ in asked]
        if len(set(strides)) > 1:
            raise ShapeMismatch(f"{channel.where('buffer')}: ranks ask for different sizes, in bytes: {strides}")
        ranks = [pid for *_, pid in asked].count(os.getpid())   # of this process: they may be threads
        # Each opens two files while a piece is mapped.
        channel.do_together(lambda: make_room(2 * ranks, "a tensor in shared memory"))
        memory = min(channel.gather_json(available_memory()))   # to look takes a file, too
        if stride * parts > memory:
            raise MemoryError(f"{channel.where('buffer')}: {stride * parts:,} bytes of shared memory were asked for "
                              f"({parts} x {stride:,}), {memory:,} are free on this host")
        taken = {number for _, numbers, _ in asked for number in numbers}
        return next((number for number in REGIONS if number not in taken), 0)

    def _map(self, nbytes: int) -> Mapping:
        """New memory, created by the first rank. What one rank cannot do, all raise: MemoryError, ConfigError or RankLost."""
        channel = self._channel

        def kept(descriptor: int) -> int:
            files.callback(os.close, descriptor)
            return descriptor

        with contextlib.ExitStack() as files:   # the first rank must not close its own before the others have opened it
            mine = channel.do_together(lambda: -1 if channel.rank else kept(create_memory(nbytes)))
            pid, number = channel.gather_json([os.getpid(), mine])[0]
            opened = lambda: kept(open_memory(pid, number, nbytes)) if channel.rank else mine
            return channel.do_together(lambda: map_memory(opened(), nbytes))

    def _sweep(self) -> None:
        """Unmap pieces that were given back, unless a call may be reading them. The garbage collector may give back more, and call this."""
        busy = []
        while self._given_back:
            number = self._given_back.pop()
            if self._channel.link.drop_region(number):
                del self._pieces[number]
            else:
                busy.append(number)
        self._given_back += busy


def _give_back(buffers: "weakref.ref[Buffers]", number: int) -> None:
    if owner := buffers():
        owner._given_back.append(number)
        owner._sweep()
