"""The few calls of the CUDA driver that torch does not offer: memory that other processes map, and numbers as marks in a stream.

Memory is allocated here and not by torch, because a handle stands for a whole allocation, and torch splits its allocations.
It is reused, but never freed before the process ends: freeing what another process still maps is undefined, and the next
allocation at the same address may get the same handle, with which the other process would find the old memory.

A mark is a number that a stream writes when it has done all before, and that streams of other processes wait for. CUDA's
interprocess events could do the same. But they need a file in /dev/shm, and a stream that waits for the event of a process
that has died waits forever. A number can be written by any process that is left.
"""

import ctypes
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from rankloom.base.errors import DeviceError

UNIT = 2 << 20           # bytes: the driver packs smaller allocations together, and exports them together
OUT_OF_MEMORY = 2        # the driver's code
PEER_ACCESS = 1          # the only flag that the driver has for opening a handle; it is required
Handle = ctypes.c_char * 64
Address = ctypes.c_uint64


class _Handle(ctypes.Structure):
    """Identifies an allocation to other processes. The driver takes it by value."""

    _fields_ = [("bytes", Handle)]


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(ctypes.c_void_p),),
    "cuMemAlloc_v2": (ctypes.POINTER(Address), ctypes.c_size_t),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), Address),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(Address), _Handle, ctypes.c_uint),
    "cuStreamWriteValue64_v2": (ctypes.c_void_p, Address, ctypes.c_uint64, ctypes.c_uint),
    "cuStreamWaitValue64_v2": (ctypes.c_void_p, Address, ctypes.c_uint64, ctypes.c_uint),
}


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")   # torch has loaded it before there is any CUDA tensor
    for name, types in SIGNATURES.items():
        getattr(library, name).argtypes = types
        getattr(library, name).restype = ctypes.c_int
    return library


def _call(name: str, *args: Any) -> None:
    code = getattr(_library(), name)(*args)
    if code == OUT_OF_MEMORY and name == "cuMemAlloc_v2":
        raise MemoryError(f"{args[1]:,} bytes of device memory were asked for, and there are not so many in one piece")
    if code:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(code, ctypes.byref(text))
        raise DeviceError(f"the CUDA driver refused {name}: {(text.value or b'unknown error').decode()} (error {code})")


@cache
def _context(device: int) -> ctypes.c_void_p:
    """The context that torch uses. Never released, as in torch."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(number), device)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    return context


@contextmanager
def on_device(device: int) -> Iterator[None]:
    """The driver's calls inside are for this device: it uses the context of the thread, and a thread that is new to CUDA has none."""
    _call("cuCtxPushCurrent_v2", _context(device))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


# ------------------------------------------------------------------ memory


@dataclass(frozen=True, slots=True)
class Block:
    """An allocation that other processes can map: its address and length, and the handle that they open."""

    device: int
    address: int
    nbytes: int
    handle: str


_lock = threading.Lock()
_idle: dict[int, list[Block]] = defaultdict(list)   # by device
_opened: dict[tuple[int, str], int] = {}            # addresses in this process, by device and handle


def take_block(device: int, nbytes: int) -> tuple[Block, bool]:
    """A block of at least so many bytes, and whether it has been used before. raises: MemoryError"""
    size = max(1, -(-nbytes // UNIT)) * UNIT
    with _lock:
        fitting = [block for block in _idle[device] if size <= block.nbytes <= 2 * size]
        if fitting:
            best = min(fitting, key=lambda block: block.nbytes)
            _idle[device].remove(best)
            return best, True
    address, handle = Address(), _Handle()
    with on_device(device):
        _call("cuMemAlloc_v2", ctypes.byref(address), size)
        _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return Block(device, address.value, size, bytes(handle).hex()), False


def give_back(block: Block) -> None:
    """Return a block that this process no longer needs. Takes no lock: the garbage collector may call this at any moment."""
    _idle[block.device].append(block)


def open_block(device: int, handle: str) -> int:
    """The address in this process of another process's block. raises: DeviceError"""
    with _lock:
        if (device, handle) not in _opened:
            address = Address()
            with on_device(device):
                _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(bytes.fromhex(handle)), PEER_ACCESS)
            _opened[device, handle] = address.value
        return _opened[device, handle]


# ------------------------------------------------------------------ marks


def write_value(stream: int, address: int, value: int) -> None:
    """Write 64 bits when the stream has done all before; call it in `on_device`. A reader that sees them also sees what it wrote before."""
    _call("cuStreamWriteValue64_v2", stream, address, value, 0)


def wait_value(stream: int, address: int, value: int) -> None:
    """Make the stream wait until there is this value, or a greater one; call it in `on_device`."""
    _call("cuStreamWaitValue64_v2", stream, address, value, 0)
