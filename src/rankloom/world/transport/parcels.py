"""Messages between ranks that share a device.

A message is sent at once: its bytes are copied to a block of memory of its sender, which its receiver maps, and a note says
where they are. Notes travel as messages on the host (channel.py), where sender and tag are matched. A receive is submitted
when it is waited for: it first waits on the host until the note has come; then the queue waits for the mark that the sender's
queue writes when the bytes are there. A receipt tells the sender that its block will be free, and after which mark.

So a send never waits for its receive, whichever is called first; messages that are not received yet take up memory.
"""

import json
import threading
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rankloom.base.errors import CollectiveMismatch
from rankloom.world.transport.channel import Channel
from rankloom.world.transport.codes import nbytes_of
from rankloom.world.transport.device import Device, Ending, Flags
from rankloom.world.transport.operands import Finish

HEADER = 256            # bytes of a block before its message: two flags, how often it was filled and how often emptied
SMALLEST = 1 << 20      # bytes of the smallest message that fits a block; other sizes are powers of two
NOTE = 256              # bytes
RECEIPTS = -(1 << 40)   # tags of receipts count down from here, one for each block


class _Parcel:
    """A block of memory, on the sender's or the receiver's side: the flags that each of them writes, and the bytes."""

    def __init__(self, memory: Tensor, handle: str, number: int):
        self.handle, self.number, self.uses = handle, number, 0
        self.filled, self.emptied = memory[:8].view(torch.int64), memory[8:16].view(torch.int64)
        self.bytes = memory[HEADER:]
        self.receipt: tuple[int, np.ndarray] | None = None   # the host message that will say that it is free, and its memory


class Parcels:
    """The messages of one rank."""

    def __init__(self, channel: Channel, device: Device, flags: Flags):
        self._channel, self._device, self._flags = channel, device, flags
        self._lock = threading.Lock()
        self._mine: list[_Parcel] = []
        self._theirs: dict[tuple[int, int], _Parcel] = {}   # by sender and number
        self._letters: list[tuple[int, np.ndarray]] = []    # host messages in flight, and their memory

    def send(self, x: Tensor, size: int, peer: int, tag: int) -> Ending:
        """Submit the sending of some bytes. Returns the place in the queue after which they may change. size: see codes.py"""
        device = self._device
        with self._lock, device.behind(device.caller()):
            parcel = self._empty_parcel(len(x))
            if parcel.uses:
                device.follow(parcel.emptied, parcel.uses)
            parcel.uses += 1
            device.run(partial(parcel.bytes[: len(x)].copy_, x))
            device.mark(parcel.filled, parcel.uses)
            ending = device.end()
            self._flags.add(peer, parcel.emptied)
            letter = np.zeros(1, np.uint8)
            parcel.receipt = self._channel.link.post(0, letter.ctypes.data, 1, peer, RECEIPTS - parcel.number), letter
            note = [size, parcel.number, parcel.uses, HEADER + len(parcel.bytes), parcel.handle]
            self._send_letter(np.frombuffer(json.dumps(note).encode().ljust(NOTE, b"\0"), np.uint8), peer, tag)
        return ending

    def take(self, note: np.ndarray, into: Tensor, size: int, sender: int, *, place: Ending, finish: Finish | None) -> Ending:
        """Submit the receiving of the message whose note has come. Returns the place in the queue after which it is there.

        size:   of the message that is expected, see codes.py
        place:  the place after which `into` may be written to
        raises: CollectiveMismatch if the message has another size; it is lost then
        """
        sent, number, uses, room, handle = json.loads(bytes(note).rstrip(b"\0"))
        device, fits = self._device, sent == size
        with self._lock, device.behind(place):
            parcel = self._their_parcel(sender, number, room, handle)
            device.follow(parcel.filled, uses)
            for work in (partial(into.copy_, parcel.bytes[: len(into)]), finish) if fits else ():
                device.run(work) if work else None
            device.mark(parcel.emptied, uses)
            ending = device.end()
            self._send_letter(np.zeros(1, np.uint8), sender, RECEIPTS - number)
        if not fits:
            raise CollectiveMismatch(f"{self._channel.where('recv')}: rank {self._channel.ranks[sender]} sends {nbytes_of(sent)} bytes, "
                                     f"but {len(into)} are expected, or another dtype; compare sizes and dtypes on both sides")
        return ending

    def _empty_parcel(self, nbytes: int) -> _Parcel:
        """A block of the right size whose receipt has come, or a new one."""
        size, link = max(SMALLEST, 1 << (nbytes - 1).bit_length()), self._channel.link
        for parcel in self._mine:
            receipt = parcel.receipt[0] if parcel.receipt and len(parcel.bytes) == size else 0
            # `settled` is also true if the receipt will never come.
            if receipt and link.settled(receipt) and link.settle(receipt, 0.0) >= 0:
                link.drop(receipt)
                parcel.receipt = None
                return parcel
        memory, handle = self._device.export(HEADER + size)
        self._mine.append(_Parcel(memory, handle, len(self._mine)))
        return self._mine[-1]

    def _their_parcel(self, sender: int, number: int, size: int, handle: str) -> _Parcel:
        if sender == self._channel.rank:
            return self._mine[number]   # CUDA lets no process open what it has exported itself
        if (sender, number) not in self._theirs:
            parcel = _Parcel(self._device.open(handle, size), handle, number)
            self._flags.add(sender, parcel.filled)
            self._theirs[sender, number] = parcel
        return self._theirs[sender, number]

    def _send_letter(self, letter: np.ndarray, peer: int, tag: int) -> None:
        """Send a short message on the host."""
        link, under_way = self._channel.link, []
        for handle, sent in self._letters:
            if link.settled(handle):
                link.drop(handle)
            else:
                under_way.append((handle, sent))
        self._letters = [*under_way, (link.post(1, letter.ctypes.data, letter.nbytes, peer, tag), letter)]
