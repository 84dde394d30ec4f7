"""The fast path for a small call in shared memory: contiguous CPU tensors, and the caller waits at once.

torch's options, work objects and enums cost several microseconds per call, many times the call itself. This path has
addresses and lengths only. A method that returns False or None has done nothing: the caller then takes the normal path, which
also reports what is wrong with the call (world/group.py, process_group.py).
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from rankloom.base.cost import all_reduce_bill
from rankloom.world.ledger import Ledger
from rankloom.world.transport.channel import Channel
from rankloom.world.transport.codes import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, KINDS, REDUCE_SCATTER, SUM
from rankloom.world.transport.operands import NUMBERS, SIZE_TYPE, expects_gradient, is_tag


class AtOnce:
    """Calls of one rank on one group. Each returns when it is done, and has then been entered into the ledger."""

    def __init__(self, channel: Channel, ledger: Ledger):
        self._channel, self._ledger, self._size, self._rank = channel, ledger, channel.size, channel.rank
        self._ranks = range(channel.size)   # `in` takes anything, such as None; `<` does not
        self._run, self._message, self._exchange = channel.link.run, channel.link.message, channel.link.exchange

    def all_reduce(self, x: Tensor, op: int, label: str) -> bool:
        """Combine over the ranks, in place; op: the kernel's number for it."""
        number = NUMBERS.get(x.dtype)
        if number is None or not _is_plain(x) or expects_gradient(x):
            return False
        address, nbytes = x.data_ptr(), x.nbytes
        if nbytes and not address:   # a wrapper, or a fake tensor
            return False
        self._call(ALL_REDUCE, number, op, (address, address, nbytes), label)
        bill = all_reduce_bill(nbytes, self._size)
        self._ledger.enter(bill.sent, bill.messages)
        return True

    def all_gather(self, x: Tensor, out: Tensor | None, label: str) -> Tensor | None:
        """All ranks' `x`, in rank order; it may be its part of `out`. x: [n, ...]  out: [p*n, ...]"""
        if not _is_plain(x) or not (shape := x.shape):
            return None
        whole, nbytes = _shaped(x, out, (shape[0] * self._size, *shape[1:])), x.nbytes
        return self._move(ALL_GATHER, x, whole, nbytes, -self._rank * nbytes, label)

    def reduce_scatter(self, x: Tensor, op: int, out: Tensor | None, label: str) -> Tensor | None:
        """Combine this rank's slice of `x` over the ranks; the slice may be `out`. x: [p*n, ...]  out: [n, ...]"""
        if not _is_plain(x) or not (shape := x.shape) or shape[0] % self._size:
            return None
        mine, nbytes = _shaped(x, out, (shape[0] // self._size, *shape[1:])), x.nbytes // self._size
        return self._move(REDUCE_SCATTER, x, mine, nbytes, self._rank * nbytes, label, op=op)

    def all_to_all(self, x: Tensor, out: Tensor | None, label: str) -> Tensor | None:
        """The r-th slice of `x` goes to rank r. x, out: [p*n, ...]"""
        if not _is_plain(x) or not (shape := x.shape) or shape[0] % self._size:
            return None
        nbytes = x.nbytes
        return self._move(ALL_TO_ALL, x, _shaped(x, out, shape), nbytes // self._size, nbytes, label)

    def _move(self, kind: int, x: Tensor, out: Tensor | None, nbytes: int, home: int, label: str, *, op: int = SUM) -> Tensor | None:
        """From `x`, which is plain, to `out`, if possible; a share of `nbytes` goes to each other rank.

        home: `out` may overlap `x` if it begins exactly this many bytes after it: then what they share is this rank's own slice, which
              no other rank reads or writes
        """
        number = NUMBERS.get(x.dtype)
        if out is None or number is None or expects_gradient(x):
            return None
        source, target = x.data_ptr(), out.data_ptr()
        behind = target - source
        if not (behind >= x.nbytes or -behind >= out.nbytes or behind == home) or (nbytes and not (source and target)):
            return None
        self._call(kind, number, op, (source, target, nbytes), label)
        self._ledger.enter(nbytes * (self._size - 1), self._size - 1)
        return out

    def _call(self, kind: int, number: int, op: int, where: tuple[int, int, int], label: str) -> None:
        """Run a collective. where: the address to read, the address to write, and the number of bytes for each rank"""
        begin = time.perf_counter()
        if why := self._run(kind, number, op, 0, *where, self._channel.timeout):
            raise self._channel.explain(why, label or KINDS[kind])
        self._ledger.waited += time.perf_counter() - begin

    # ------------------------------------------------------------------ one to one

    def send(self, x: Tensor, to: int, tag: int, label: str) -> bool:
        """Send a tensor to a rank of the group."""
        if not (to in self._ranks and is_tag(tag) and _is_plain(x)):
            return False
        address, nbytes = x.data_ptr(), x.nbytes
        if nbytes and not address:
            return False
        if (sender := self._message(1, address, nbytes | SIZE_TYPE[x.dtype], to, tag, self._channel.timeout)) < 0:
            raise self._channel.explain(-sender, label or "send", peers=(to,))
        self._ledger.enter(nbytes, 1)
        return True

    def recv(self, into: Tensor, frm: int, tag: int, label: str) -> bool:
        """Receive a tensor from a rank of the group."""
        if not (frm in self._ranks and is_tag(tag) and _is_plain(into)):
            return False
        address, nbytes = into.data_ptr(), into.nbytes
        if nbytes and not address:
            return False
        if (sender := self._message(0, address, nbytes | SIZE_TYPE[into.dtype], frm, tag, self._channel.timeout)) < 0:
            raise self._channel.explain(-sender, label or "recv", peers=(frm,))
        return True

    def exchange(self, out: Tensor, to: int, into: Tensor, frm: int, *, tag: int, label: str) -> bool:
        """Send one tensor while receiving another; cannot deadlock, in whatever order ranks call it."""
        known = to in self._ranks and frm in self._ranks and is_tag(tag)
        if not (known and _is_plain(out) and _is_plain(into)):
            return False
        source, nbytes, target, room = out.data_ptr(), out.nbytes, into.data_ptr(), into.nbytes
        if (source < target + room and target < source + nbytes) or (nbytes and not source) or (room and not target):
            return False
        sizes = nbytes | SIZE_TYPE[out.dtype], room | SIZE_TYPE[into.dtype]
        if why := self._exchange(source, sizes[0], to, target, sizes[1], frm, tag, self._channel.timeout):
            raise self._channel.explain(why, label or "exchange", peers=(frm, to))
        self._ledger.enter(nbytes, 1)
        return True


def _is_plain(x: Tensor) -> bool:
    return (isinstance(x, Tensor) and x.is_cpu and x.layout is torch.strided and x.is_contiguous()
            and not (x.is_quantized or x.is_conj() or x.is_neg()))   # `is_lazy`, without the call


def _shaped(x: Tensor, out: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """`out` if it has this shape, or a new tensor like `x` of this shape; None if `out` cannot be written directly."""
    if out is None:
        return x.new_empty(shape)
    return out if _is_plain(out) and out.shape == shape and out.dtype == x.dtype else None
