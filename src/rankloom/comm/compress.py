"""Compressed all-reduces by name: the sum of a buffer over a group with fewer bytes on the wire.

    bf16, fp16    2x     carried in 16 bits, summed in fp32                  comm/blockwise.py
    int8          3.97x  blocks of 256 values with a step of their own       comm/blockwise.py
    int4          7.76x  blocks of 128                                       comm/blockwise.py
    1bit          30x    signs, and the mean magnitude of 256 values         comm/blockwise.py
    topk                 the largest hundredth of the values                 comm/sparse.py
    powersgd             matrices as products of rank 4                      comm/power.py
    powersgd:16          ... of rank 16

All remember what they have lost and add it to the next buffer (error feedback), so each buffer has its own object.
"""

from collections.abc import Callable

import torch

from rankloom.base.compression import EXACT, HIERARCHICAL, POWERSGD, expect_compression, expect_exact_steps, split_compression
from rankloom.base.errors import ConfigError
from rankloom.comm.blockwise import Blockwise
from rankloom.comm.choose import AllReduce, all_reduce_named, in_two_levels
from rankloom.comm.lossy import Compressed
from rankloom.comm.power import BufferParts, PowerSGD
from rankloom.comm.quantize import INT4, INT8, ONE_BIT, Floats
from rankloom.comm.sparse import TopK
from rankloom.comm.two_levels import TwoLevels

_COMPRESSED: dict[str, Callable[[BufferParts], Compressed]] = {
    "bf16": lambda parts: Blockwise(Floats(torch.bfloat16)),
    "fp16": lambda parts: Blockwise(Floats(torch.float16)),
    "int8": lambda parts: Blockwise(INT8),
    "int4": lambda parts: Blockwise(INT4),
    "1bit": lambda parts: Blockwise(ONE_BIT),
    "topk": lambda parts: TopK(),
    POWERSGD: PowerSGD,
}


def compressed_all_reduce(name: str, parts: BufferParts = ()) -> Compressed:
    """A compressed all-reduce for one buffer: call it with (buffer, group) in every step.

    parts:  where each tensor in the buffer begins, and its shape; powersgd needs them, the others do not
    raises: ConfigError for an unknown name, and for "none"
    """
    kind, rank = split_compression(name)
    if kind == EXACT:
        raise ConfigError(f"compress={name!r} compresses nothing, so there is no compressed all-reduce of that name")
    return PowerSGD(parts, rank) if rank else _COMPRESSED[kind](parts)


class Summing:
    """How the gradients of one run are summed: all by one all-reduce; or compressed, each buffer by one of its own.

    What a compressed buffer loses is added to the next one, so all must be in one unit: those of a run with micro-batches of any size
    are means over the items of their step. `factor` makes them so.
    after:  steps in which sums are exact before they are compressed
    factor: every gradient is multiplied by it before it is summed
    raises: ConfigError when there is no such all-reduce or compression, or they do not go together
    """

    def __init__(self, all_reduce: str, compress: str, after: int = 0, factor: float = 1.0):
        expect_compression(compress, all_reduce)
        expect_exact_steps(after, compress)
        self.compress, self._in_two_levels, self._after, self._exact_steps = compress, all_reduce == HIERARCHICAL, after, after
        self.factor, self._exact = factor, all_reduce_named(all_reduce)
        self._lossy: list[Compressed] = []

    @property
    def is_compressed(self) -> bool:
        """Whether sums differ from the exact ones by what is remembered."""
        return self.compress != EXACT

    @property
    def in_python(self) -> bool:
        """Whether it is more than one call of the backend, which runs by itself."""
        return self.is_compressed or self._exact is not None

    @property
    def is_exact_now(self) -> bool:
        """Whether the sums of this step are exact."""
        return not self.is_compressed or self._exact_steps > 0

    def end_step(self) -> None:
        """All sums of a step are there. Every rank says so after every step, so all change over in the same one."""
        self._exact_steps = max(0, self._exact_steps - 1)

    def now(self, algorithm: AllReduce | None) -> AllReduce | None:
        """What sums a buffer in this step: its own `algorithm`, or the exact one."""
        return self._exact if self.is_exact_now else algorithm

    def lossy(self, parts: BufferParts) -> Compressed | None:
        """A new compressed all-reduce, for one buffer over the whole group; None where sums are exact."""
        if not self.is_compressed:
            return None
        self._lossy.append(compressed_all_reduce(self.compress, parts))
        return self._lossy[-1]

    def algorithm(self, parts: BufferParts) -> AllReduce | None:
        """What sums one buffer, in which tensors lie as `parts` say; None means the backend's own all-reduce."""
        lossy = self.lossy(parts)
        if lossy is None:
            return self._exact
        if not self._in_two_levels:
            return lossy
        return TwoLevels(lossy) if isinstance(lossy, Blockwise) else in_two_levels(between=lossy)

    def begin_anew(self) -> None:
        """Another run goes on here: nothing is owed to its gradients, and its exact steps come first."""
        for lossy in self._lossy:
            lossy.rescale(0.0)
        self._exact_steps = self._after
