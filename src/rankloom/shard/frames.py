"""Buffers that need memory now and then only: an open one uses that of those that are closed.

A window is a buffer that keeps its address: views of it, those included that autograd keeps for backward, mean the same elements
whenever it is open. The memory behind it, in frames of one size, comes when it is opened, and goes on to the next window that is.

    open     frames move in: those that it had, then spare ones, then fresh ones
    close    its frames are spare, and its elements lost

Why not let an allocator do that, by resizing storages: measured on a GPT of 27M parameters, glibc's heap keeps what was freed, in pieces
that the next tensor does not fit in, and a rank ends up with some 250 MiB that nobody uses; where it does give memory back, every page that
comes again costs a fault, 3 us, twenty times what copying into it takes. A frame that moves keeps its pages.

On devices with an allocator of their own, on systems without `mremap`, and for less than a frame, storages are resized all the same.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

FRAME = 1 << 20   # bytes
MAY_MOVE, TO_ADDRESS, KEEP_MAPPED = 1, 2, 4   # of mremap(2); the last since Linux 5.7


class Window(Protocol):
    """A flat tensor whose elements may be used while it is open."""

    tensor: Tensor

    def open(self) -> None:
        """Memory comes, with arbitrary contents."""

    def close(self) -> None:
        """Memory goes, where it does not stay for good."""

    @property
    def stays(self) -> bool:
        """Whether it is the same memory when it is opened again, if nobody else holds any of it."""

    @property
    def held(self) -> int:
        """Bytes of it in use."""


class Standing:
    """Memory that stays, open or not."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def open(self) -> None:
        """It is."""

    def close(self) -> None:
        """It stays."""

    @property
    def stays(self) -> bool:
        """It does."""
        return True

    @property
    def held(self) -> int:
        """All of it."""
        return self.tensor.nbytes


class Lasting(Standing):
    """Memory on a CPU that stays, unless somebody holds a view of it when it is closed: they keep it, and fresh memory takes its place.

    lent: collectives reduce this one where it lies, so it is taken again as soon as nobody else holds it
    """

    def __init__(self, tensor: Tensor, *, lent: bool = False):
        super().__init__(tensor)
        self._lent = tensor if lent else None

    def close(self) -> None:
        """It stays, where it is nobody else's."""
        if self._lent is not None and tensors_in(self._lent) == 1:
            self.tensor = self._lent
        elif tensors_in(self.tensor) > 1:
            self.tensor = torch.zeros_like(self.tensor)

    @property
    def stays(self) -> bool:
        """While it is not that which has taken its place."""
        return self._lent is None or self.tensor is self._lent


class Resized:
    """Memory from the device's allocator, freed when the window is closed."""

    def __init__(self, n: int, dtype: torch.dtype, device: torch.device):
        self.tensor = torch.empty(n, dtype=dtype, device=device)
        self.close()

    def open(self) -> None:
        """Allocate."""
        self.tensor.untyped_storage().resize_(self.tensor.nbytes)

    def close(self) -> None:
        """Free."""
        self.tensor.untyped_storage().resize_(0)

    @property
    def stays(self) -> bool:
        """It goes."""
        return False

    @property
    def held(self) -> int:
        """What is allocated."""
        return self.tensor.untyped_storage().nbytes()


class Fresh:
    """New memory from the device's allocator whenever the window is opened; who still holds a view of the old keeps that."""

    def __init__(self, n: int, dtype: torch.dtype, device: torch.device):
        self._n, self.tensor = n, torch.empty(0, dtype=dtype, device=device)

    def open(self) -> None:
        """Allocate."""
        if not self.held:
            self.tensor = self.tensor.new_empty(self._n)

    def close(self) -> None:
        """Let go."""
        self.tensor = self.tensor.new_empty(0)

    @property
    def stays(self) -> bool:
        """It goes."""
        return False

    @property
    def held(self) -> int:
        """What is allocated."""
        return self.tensor.nbytes


def between_steps(n: int, dtype: torch.dtype, device: torch.device) -> Window:
    """Memory for what lasts from a backward to the beginning of the next step, closed. Then activations can have it, where the device
    has an allocator of its own; on a CPU it stays, for pages that come again cost more than they save."""
    return Fresh(n, dtype, device) if has_allocator(device) else Lasting(torch.zeros(n, dtype=dtype))


def memory_lent(tensor: Tensor) -> Window:
    """Memory that a group lends for good: its ranks share that, or the device."""
    # Detached: torch lets a view hold what it is a view of, and that would count.
    return Standing(tensor) if has_allocator(tensor.device) else Lasting(tensor.detach(), lent=True)


def tensors_in(tensor: Tensor) -> int:
    """How many tensors lie in the memory of `tensor`, views of it and itself."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1   # that of what asks


def has_allocator(device: torch.device) -> bool:
    """Whether torch has an allocator of its own for the device, in which memory that is freed is at hand for the next tensor."""
    return device.type != "cpu"


class Frames:
    """The memory of windows on one rank: as much as ever was open at once, for as long as this lives."""

    def __init__(self, device: torch.device | str):
        self._device = torch.device(device)
        self._spare: dict[int, Tensor] = {}   # address of a frame -> the memory it lies in, so that this stays mapped

    def window(self, n: int, dtype: torch.dtype) -> Window:
        """A window of `n` elements, closed."""
        if has_allocator(self._device) or n * dtype.itemsize < FRAME or _calls() is None:
            return Resized(n, dtype, self._device)
        return _Moving(n, dtype, self._spare)


class _Moving:
    """A range of addresses, at which frames (pieces of FRAME bytes) are mapped while it is open."""

    def __init__(self, n: int, dtype: torch.dtype, spare: dict[int, Tensor]):
        size = -(-n * dtype.itemsize // FRAME) * FRAME
        self._memory = torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
        self.tensor = self._memory[: n * dtype.itemsize].view(dtype)
        start = self._memory.data_ptr()
        self._addresses, self._spare, self._open = range(start, start + size, FRAME), spare, False

    def open(self) -> None:
        """Memory comes back: its own frames, where nobody has taken them, else moved from others."""
        if self._open:   # or frames of others would take the place of its own
            return
        gone = [address for address in self._addresses if self._spare.pop(address, None) is None]
        for address in gone[: len(self._spare)]:
            other, memory = self._spare.popitem()
            _move(other, address)
            del memory   # only now: it may be the last of a window that is gone
        self._open = True

    def close(self) -> None:
        """From now on others may take its frames."""
        self._spare.update(dict.fromkeys(self._addresses, self._memory))
        self._open = False

    @property
    def stays(self) -> bool:
        """It goes."""
        return False

    @property
    def held(self) -> int:
        """Bytes that are used of its frames."""
        return self.tensor.nbytes if self._open else 0


def _move(frame: int, to: int) -> None:
    """Map the pages of a frame at another address, and no longer where they were. Where that fails, they are given back."""
    calls = _calls()
    assert calls is not None, "windows with frames need Linux"
    remap, advise = calls
    if remap(frame, FRAME, FRAME, MAY_MOVE | TO_ADDRESS | KEEP_MAPPED, to) != to:
        advise(frame, FRAME, mmap.MADV_DONTNEED)


@cache
def _calls() -> tuple[Callable[..., int], Callable[..., int]] | None:
    if sys.platform != "linux":
        return None
    remap, advise = (getattr(ctypes.CDLL(None), name) for name in ("mremap", "madvise"))
    remap.argtypes, remap.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return remap, advise
