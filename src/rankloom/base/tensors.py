"""A tensor's bytes, to hash, compare and send them, and for C code; copies, and how often it was written; dtypes to compute in."""

import ctypes
import hashlib
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from rankloom.base.errors import ConfigError
from rankloom.base.expect import expect_type


def expect_number_format(what: str, dtype: Any) -> None:
    """Raise ConfigError unless it is None, or a dtype of floating numbers in 16 bits or more."""
    expect_type(what, dtype, (torch.dtype, NoneType), "a torch dtype, such as torch.bfloat16")
    if dtype is not None and not (dtype.is_floating_point and dtype.itemsize >= 2):
        raise ConfigError(f"{what}={dtype}, expected a dtype of floating numbers in 16 bits or more, such as torch.bfloat16")


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype to add up many numbers of `dtype` in.

    >>> at_least_fp32(torch.bfloat16), at_least_fp32(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def version_of(x: Tensor) -> int:
    """How often `x` was written in place; 0 in inference mode, where torch does not count."""
    return 0 if x.is_inference() else x._version


def has_nan(dtype: torch.dtype) -> bool:
    """Whether numbers of this dtype may be NaN; integers and truth values may not."""
    return dtype.is_floating_point or dtype.is_complex


def keep_until_read(x: Tensor) -> None:
    """Call before dropping the last reference to `x` while the current CUDA stream may still have to read it.

    The allocator frees memory for the stream that allocated it; this (`record_stream`) makes it wait for the current stream, too.
    """
    if x.is_cuda and x.layout is torch.strided:   # torch can tell this of no other layout
        x.detach().record_stream(torch.cuda.current_stream(x.device))


@torch.no_grad()
def overwrite(x: Tensor, values: Tensor) -> None:
    """Write values to `x`; in new memory where several of its elements lie in one place, as those of an expanded tensor do."""
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape)):
        keep_until_read(x)   # by whoever has these values from it
        x.data = values.to(x.dtype, copy=True, memory_format=torch.contiguous_format)
    else:
        x.detach().copy_(values)


@torch.no_grad()
def copy_into(target: Tensor, x: Tensor) -> Tensor:
    """`target.copy_(x)`; returns the target. Faster for large tensors of another dtype on a GPU: where it widens, the kernel of `copy_`
    reads and writes single elements, torch's kernel for lists of tensors whole vectors."""
    torch._foreach_copy_([target], [x])
    return target


def as_bytes(x: Tensor) -> Tensor:
    """The memory of `x` as bytes [..., itemsize]: backends refuse some dtypes, gloo for example 16-bit integers. x: contiguous, [...]"""
    return x.detach().unsqueeze(-1).view(torch.uint8)


def as_reals(x: Tensor) -> Tensor:
    """The memory of complex numbers as pairs of real ones, which have the same sums: NCCL knows no others. Other tensors stay."""
    return torch.view_as_real(x.detach()) if x.is_complex() else x


def memory_of(x: Tensor) -> Any:
    """The memory of `x` for C code. A storage whose `numpy()` was asked for can never be resized again, so this does not ask.

    x: contiguous, on the CPU
    """
    assert x.is_contiguous() and x.is_cpu, "C code reads elements in order"
    memory: Any = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
    memory.owner = x   # lives as long as what C code holds
    return memory


def bytes_of(x: Tensor) -> Tensor:
    """The elements as bytes [n]: backends refuse some dtypes, and NaN != NaN. New memory, unless `x` is contiguous.

    A tensor that torch conjugates or negates only when it is read has the bytes that a reader sees.
    """
    return as_bytes(x.detach().resolve_conj().resolve_neg().contiguous()).view(-1)


def strided_parts(x: Tensor) -> list[Tensor]:
    """The strided tensors that hold `x`: itself; of a sparse tensor its indices and values. Of other layouts none."""
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [x.ccol_indices(), x.row_indices(), x.values()]
    return [x] if x.layout is torch.strided else [x._indices(), x._values()] if x.layout is torch.sparse_coo else []


def digest(x: Tensor) -> str:
    """A hash of every bit, to compare tensors by."""
    return hashlib.sha256(bytes_of(x.detach().cpu()).numpy().tobytes()).hexdigest()


def memory_address(tensor: Tensor) -> int:
    """The address of a dense tensor; 0 if it has no memory."""
    return tensor.data_ptr() if tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta else 0
