"""Buffers that need memory only at times, and take turns with it.

A window is a buffer that keeps its address. Views of it, those that autograd keeps for backward included, stay valid whenever it is open.
The memory behind it comes in frames of one size. Closing a window makes its frames spare; the next window that opens takes them.

    open     map frames: its own if they are still spare, then other spare ones, then fresh ones
    close    its frames are spare, and its elements lost

Why not resize storages and leave the rest to the allocator? Measured on a GPT of 27M parameters, glibc's heap keeps freed memory in
fragments too small for the next tensor: some 250 MiB a rank lie unused. Where it does return memory, every page that comes again costs a
fault: 3 us, twenty times the copy into it. A frame that moves keeps its pages.

Storages are resized all the same on devices with an allocator of their own, on systems without `mremap`, and for less than a frame.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

FRAME = 1 << 20   # bytes
MAY_MOVE, TO_ADDRESS, KEEP_MAPPED = 1, 2, 4   # of mremap(2); the last since Linux 5.7


class Window:
    """A flat tensor whose elements may be used while it is open.

    stays: whether it finds the same memory when it is opened again, if nothing else holds a view of it
    """

    tensor: Tensor
    stays = False

    def open(self) -> None:
        """Memory comes, with arbitrary contents."""

    def close(self) -> None:
        """Memory goes, unless it stays for good."""

    @property
    def held(self) -> int:
        """Bytes in use."""
        return self.tensor.nbytes


class AlwaysOpen(Window):
    """Memory that stays for good."""

    stays = True

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class StaysUnlessViewed(AlwaysOpen):
    """CPU memory that stays between steps. If the user still holds a view when it closes, the view keeps it, and fresh memory takes over.

    lent: it is the group's, where sums need no copy: go back to it once nobody holds a view of it
    """

    def __init__(self, tensor: Tensor, *, lent: bool = False):
        super().__init__(tensor)
        self._lent = tensor if lent else None

    def close(self) -> None:
        """It stays, unless a view of it is held."""
        if self._lent is not None and count_users(self._lent) == 1:
            self.tensor, self.stays = self._lent, True
        elif count_users(self.tensor) > 1:
            with torch.inference_mode(False):   # a forward in that mode may close it, and no backward could write to memory of that mode
                self.tensor, self.stays = torch.zeros_like(self.tensor), self._lent is None


class _Resized(Window):
    """Memory from the device's allocator, freed when the window is closed; views of it stay valid."""

    def __init__(self, n: int, dtype: torch.dtype, device: torch.device):
        self.tensor = torch.empty(n, dtype=dtype, device=device)
        self.close()

    def open(self) -> None:
        self.tensor.untyped_storage().resize_(self.tensor.nbytes)

    def close(self) -> None:
        self.tensor.untyped_storage().resize_(0)

    @property
    def held(self) -> int:
        return self.tensor.untyped_storage().nbytes()


class _Fresh(Window):
    """New memory from the device's allocator at each opening; a view of the old memory keeps that alive."""

    def __init__(self, n: int, dtype: torch.dtype, device: torch.device):
        self._n, self.tensor = n, torch.empty(0, dtype=dtype, device=device)

    def open(self) -> None:
        if not self.held:
            self.tensor = self.tensor.new_empty(self._n)

    def close(self) -> None:
        self.tensor = self.tensor.new_empty(0)


def between_steps(n: int, dtype: torch.dtype, device: torch.device) -> Window:
    """A closed window for what lives from a backward to the start of the next step. On a device with an allocator, activations use its
    memory in between. On a CPU it stays: faulting pages in again would cost more than it saves."""
    return _Fresh(n, dtype, device) if has_allocator(device) else StaysUnlessViewed(torch.zeros(n, dtype=dtype, device=device))


def memory_lent(tensor: Tensor) -> Window:
    """A window on memory that a group lends for good: pages that its ranks share, or device memory."""
    # Detached: a view holds a reference to its base, which `count_users` would count.
    return AlwaysOpen(tensor) if has_allocator(tensor.device) else StaysUnlessViewed(tensor.detach(), lent=True)


def count_users(tensor: Tensor) -> int:
    """How many tensors lie in the memory of `tensor`, views of it and itself."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1   # not the storage object that asks


def has_allocator(device: torch.device) -> bool:
    """Whether torch caches freed memory of the device for the next tensor."""
    return device.type != "cpu"


class Frames:
    """The memory of one rank's windows. It grows to the most that was ever open at once, and lives as long as this object."""

    def __init__(self, device: torch.device | str):
        self._device = torch.device(device)
        self._spare: dict[int, Tensor] = {}   # address of a frame -> the tensor that keeps it mapped

    def window(self, n: int, dtype: torch.dtype) -> Window:
        """A window of `n` elements, closed."""
        if has_allocator(self._device) or n * dtype.itemsize < FRAME or _mremap_and_madvise() is None:
            return _Resized(n, dtype, self._device)
        return _Moving(n, dtype, self._spare)


class _Moving(Window):
    """A range of addresses, at which frames (pieces of FRAME bytes) are mapped while it is open."""

    def __init__(self, n: int, dtype: torch.dtype, spare: dict[int, Tensor]):
        size = -(-n * dtype.itemsize // FRAME) * FRAME
        self._memory = torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
        self.tensor = self._memory[: n * dtype.itemsize].view(dtype)
        start = self._memory.data_ptr()
        self._addresses, self._spare, self._open = range(start, start + size, FRAME), spare, False

    def open(self) -> None:
        """Take back its own frames that are still spare; move spare frames of other windows in for the rest."""
        if self._open:   # its own frames are not spare then, and others would replace them
            return
        gone = [address for address in self._addresses if self._spare.pop(address, None) is None]
        for address in gone[: len(self._spare)]:
            other, memory = self._spare.popitem()
            _move(other, address)
            del memory   # only now: this may be the last reference to memory of a window that no longer exists
        self._open = True

    def close(self) -> None:
        self._spare.update(dict.fromkeys(self._addresses, self._memory))
        self._open = False

    @property
    def held(self) -> int:
        return self.tensor.nbytes if self._open else 0


def _move(frame: int, to: int) -> None:
    """Move the pages of a frame to another address; where that fails, give them back to the system."""
    calls = _mremap_and_madvise()
    assert calls is not None, "windows with frames need Linux"
    remap, advise = calls
    if remap(frame, FRAME, FRAME, MAY_MOVE | TO_ADDRESS | KEEP_MAPPED, to) != to:
        advise(frame, FRAME, mmap.MADV_DONTNEED)


@cache
def _mremap_and_madvise() -> tuple[Callable[..., int], Callable[..., int]] | None:
    """The two system calls, as functions of libc; None on other systems than Linux."""
    if sys.platform != "linux":
        return None
    remap, advise = (getattr(ctypes.CDLL(None), name) for name in ("mremap", "madvise"))
    remap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    remap.restype = ctypes.c_void_p
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return remap, advise
