"""The short way of a small collective in shared memory: contiguous CPU tensors, waited for at once.

torch's options, work objects and enums cost several microseconds a call, many times what the call itself takes. Here are
addresses and lengths only. A method that returns False has done nothing: that case takes the long way (process_group.py).
"""

from torch import Tensor

from rankloom.world.transport.channel import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, KINDS, REDUCE_SCATTER, Channel
from rankloom.world.transport.operands import NUMBERS, SUM


class AtOnce:
    """Calls of one rank on one group, each of which returns when it is done."""

    def __init__(self, channel: Channel):
        self._channel, self._run, self._message = channel, channel.link.run, channel.link.message

    def all_reduce(self, x: Tensor, op: int, label: str) -> bool:
        """Combine over the ranks, in place; op: the kernel's number for it."""
        number = NUMBERS.get(x.dtype)
        if number is None or not (x.is_cpu and x.is_contiguous()):
            return False
        address = x.data_ptr()
        if why := self._run(ALL_REDUCE, number, op, 0, address, address, x.nbytes, self._channel.timeout):
            raise self._channel.explain(why, label or KINDS[ALL_REDUCE])
        return True

    def all_gather(self, x: Tensor, out: Tensor, label: str) -> bool:
        """All ranks' `x`, in rank order; it may be its part of `out`. x: [n, ...]  out: [p*n, ...]"""
        return self._call(ALL_GATHER, x, out, nbytes := x.nbytes, -self._channel.rank * nbytes, label)

    def reduce_scatter(self, x: Tensor, out: Tensor, label: str) -> bool:
        """The sum over ranks of this rank's slice of `x`, which may be `out`. x: [p*n, ...]  out: [n, ...]"""
        return self._call(REDUCE_SCATTER, x, out, nbytes := out.nbytes, self._channel.rank * nbytes, label)

    def all_to_all(self, x: Tensor, out: Tensor, label: str) -> bool:
        """The r-th slice of `x` goes to rank r. x, out: [p*n, ...]"""
        return self._call(ALL_TO_ALL, x, out, x.nbytes // self._channel.size, x.nbytes, label)

    def _call(self, kind: int, x: Tensor, out: Tensor, nbytes: int, home: int, label: str) -> bool:
        """home: how far `out` lies behind `x` where that is no harm, because only this rank reads or writes what they share"""
        number, source, target = NUMBERS.get(x.dtype), x.data_ptr(), out.data_ptr()
        behind = target - source
        is_safe = behind == home or behind >= x.nbytes or -behind >= out.nbytes
        if number is None or not (is_safe and x.is_cpu and x.is_contiguous()):
            return False
        if why := self._run(kind, number, SUM, 0, source, target, nbytes, self._channel.timeout):
            raise self._channel.explain(why, label or KINDS[kind])
        return True

    def send(self, x: Tensor, to: int, tag: int, label: str) -> Tensor:
        """Send a contiguous tensor to a rank of the group."""
        if (sender := self._message(1, x.data_ptr(), x.nbytes, to, tag, self._channel.timeout)) < 0:
            raise self._channel.explain(-sender, label or "send", peer=to)
        return x

    def exchange(self, out: Tensor, to: int, into: Tensor, frm: int, *, tag: int, label: str) -> Tensor:
        """Send one contiguous tensor while receiving another; no order of ranks can deadlock."""
        channel = self._channel
        if why := channel.link.exchange(out.data_ptr(), out.nbytes, to, into.data_ptr(), into.nbytes, frm, tag, channel.timeout):
            raise channel.explain(why, label or "exchange", peer=frm)
        return into

    def recv(self, x: Tensor, frm: int, tag: int, label: str) -> Tensor:
        """Receive into a contiguous tensor from a rank of the group."""
        if (sender := self._message(0, x.data_ptr(), x.nbytes, frm, tag, self._channel.timeout)) < 0:
            raise self._channel.explain(-sender, label or "recv", peer=frm)
        return x
