"""Compressed all-reduces by name: they sum a buffer over a group, and send fewer bytes.

    bf16, fp16    2x     sent in 16 bits, summed in fp32                     comm/blockwise.py
    int8          3.97x  blocks of 256 values, each with its own step        comm/blockwise.py
    int4          7.76x  the same, blocks of 128                             comm/blockwise.py
    1bit          30x    signs, and the mean magnitude of 256 values         comm/blockwise.py
    topk          100/p  the largest hundredth of the values, p ranks        comm/sparse.py
    powersgd             matrices as products of rank 4                      comm/power.py
    powersgd:16          ... of rank 16: ab / 16(a+b) for a matrix [a, b]

All keep the compression error and add it to the next values of the buffer (error feedback). So each buffer has its own object.
Those of comm/blockwise.py have a reduce-scatter, too: comm/scatter.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rankloom.base.compression import EXACT, HIERARCHICAL, POWERSGD, TOPK, expect_compression, expect_exact_steps, split_compression
from rankloom.base.errors import ConfigError
from rankloom.comm.blockwise import Blockwise
from rankloom.comm.choose import BACKEND, AllReduce, all_reduce_named, in_two_levels
from rankloom.comm.late import LateSums
from rankloom.comm.lossy import Compressed
from rankloom.comm.power import BufferParts, PowerSGD
from rankloom.comm.quantize import INT4, INT8, ONE_BIT, Floats, Format
from rankloom.comm.scatter import CompressedScatter
from rankloom.comm.sparse import TopK
from rankloom.comm.two_levels import TwoLevels
from rankloom.world.group import Group

_FORMATS: dict[str, Format] = {
    "bf16": Floats(torch.bfloat16), "fp16": Floats(torch.float16), "int8": INT8, "int4": INT4, "1bit": ONE_BIT}


def compressed_all_reduce(name: str, parts: BufferParts = ()) -> Compressed:
    """A compressed all-reduce for one buffer: call it with (buffer, group) in every step.

    parts:  where each tensor in the buffer begins, and its shape; powersgd needs them, the others do not
    raises: ConfigError for an unknown name, and for "none"
    """
    kind, rank = split_compression(name)
    if kind == EXACT:
        raise ConfigError(f"compress={name!r} compresses nothing, so there is no compressed all-reduce of that name")
    if kind == POWERSGD:
        return PowerSGD(parts) if rank is None else PowerSGD(parts, rank)
    return TopK() if kind == TOPK else Blockwise(_FORMATS[kind])


class Summing:
    """How a run sums its gradients: exactly, by one all-reduce for all buffers; or compressed, by one object for each buffer.

    A compressed all-reduce adds its error to the next step's gradients, so both must have the same unit. Where micro-batches differ
    in size, gradients are therefore means over the items of their step: each is multiplied by `factor` before it is summed.
    after:  steps with exact sums before compression starts
    raises: ConfigError for an unknown all-reduce or compression, and for two that do not go together
    """

    def __init__(self, all_reduce: str = BACKEND, compress: str = EXACT, after: int = 0):
        expect_compression(compress, all_reduce)
        expect_exact_steps(after, compress)
        self.all_reduce, self.compress, self._after, self._exact_steps = all_reduce, compress, after, after
        self.factor, self._exact = 1.0, all_reduce_named(all_reduce)
        self._lossy: list[Compressed | CompressedScatter] = []
        self._late: list[LateSums] = []

    @property
    def is_compressed(self) -> bool:
        """Whether this run compresses gradients."""
        return self.compress != EXACT

    @property
    def in_python(self) -> bool:
        """Whether sums need Python. If not, each is one call of the backend, which runs in the background."""
        return self.is_compressed or self._exact is not None

    @property
    def is_exact_now(self) -> bool:
        """Whether this step's sums are exact."""
        return not self.is_compressed or self._exact_steps > 0

    def weigh(self, items: Tensor, scale: float, groups: Sequence[Group]) -> None:
        """Before a step's sums: set the factor that turns gradients into means over the items of the step, without the loss scale.

        The error of this step's compression is added to the next step, which may have another count and loss scale; means can be
        added, sums cannot. And a sum may be too large for fp16.
        items:  how many this rank has counted, fp64      groups: those over which they are summed
        scale:  the factor that the losses were multiplied by
        sent:   all-reduce of one fp64 over each group, which the caller waits for; nothing in exact steps
        """
        self.factor = 1.0
        if not self.is_exact_now and any(group.size > 1 for group in groups):
            items = items.clone()
            for group in groups:
                group.all_reduce(items, label="items of the step")
            divisor = scale * items.item()
            self.factor = 1.0 / divisor if divisor > 0 else 1.0   # the engine refuses a step without items

    def end_step(self) -> None:
        """Every rank calls this after every step, when all sums are done. So all start to compress in the same step."""
        self._exact_steps = max(0, self._exact_steps - 1)

    def all_reduce_now(self, algorithm: AllReduce | None) -> AllReduce | None:
        """The all-reduce for a buffer in this step: the buffer's own `algorithm`, or the exact one. None: the backend's own"""
        return self._exact if self.is_exact_now else algorithm

    def new_compressed(self, parts: BufferParts) -> Compressed | None:
        """A new compressed all-reduce for one buffer over the whole group; None if this run does not compress."""
        if not self.is_compressed:
            return None
        self._lossy.append(made := compressed_all_reduce(self.compress, parts))
        return made

    def new_compressed_scatter(self) -> CompressedScatter | None:
        """A new compressed reduce-scatter for one buffer; None if this run does not compress, or not in blocks."""
        if (form := _FORMATS.get(self.compress)) is None:
            return None
        self._lossy.append(made := CompressedScatter(form))
        return made

    def new_late_sums(self) -> LateSums:
        """A new place, for one buffer, where its compressed sums wait while no rank uses their parameters."""
        self._late.append(made := LateSums())
        return made

    def new_all_reduce(self, parts: BufferParts, dtype: torch.dtype) -> AllReduce | None:
        """An all-reduce for one buffer; None means the backend's own. parts: where its tensors lie; complex ones are not compressed"""
        lossy = self.new_compressed(parts) if dtype.is_floating_point else None
        if lossy is None:
            return self._exact
        if self.all_reduce != HIERARCHICAL:
            return lossy
        return TwoLevels(lossy) if isinstance(lossy, Blockwise) else in_two_levels(between=lossy)

    def held(self) -> int:
        """Bytes that compression keeps between steps, for all buffers."""
        return sum(kept.held() for kept in (*self._lossy, *self._late))

    def forget(self) -> None:
        """Forget the errors, on all ranks: what they are of is no part of the run, such as a step that was not finite."""
        for lossy in self._lossy:
            lossy.rescale(0.0)
        for late in self._late:
            late.forget()

    def begin_anew(self) -> None:
        """Another run continues on these buffers: forget the errors, and start with its exact steps."""
        self.forget()
        self._exact_steps = self._after
