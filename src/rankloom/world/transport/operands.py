"""From torch's tensors to what the kernel takes: contiguous bytes, a number type, an operation. And back.

Moving bytes works for every dtype. The kernel has arithmetic for twelve number types; other dtypes are converted to those: complex
numbers to pairs, bool to bytes of 0 and 1 (a sum is an "or"), float8 to fp32 with one rounding at the end.
"""

import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from operator import index
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rankloom.base.errors import ConfigError, NotContiguous, ShapeMismatch
from rankloom.base.expect import expect_type
from rankloom.world.transport.codes import AVG, BAND, BOR, BXOR, MAX, MIN, NUMBER_AT, PRODUCT, SUM

NUMBERS = {dtype: code for code, dtype in enumerate((
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.uint16,
    torch.int32, torch.uint32, torch.int64, torch.uint64))}
BYTES = NUMBERS[torch.uint8]
_OF_PAIRS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}   # torch may send pairs
_DTYPES = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
SIZE_TYPE = {dtype: NUMBERS.get(_OF_PAIRS.get(dtype, dtype), BYTES) << NUMBER_AT for dtype in _DTYPES}
"""Added to the byte count of a message, so that two dtypes of as many bytes have different `size`s (codes.py)."""
_Op: Any = dist.ReduceOp.RedOpType
OPS = {_Op.SUM: SUM, _Op.AVG: AVG, _Op.PRODUCT: PRODUCT, _Op.MIN: MIN, _Op.MAX: MAX, _Op.BAND: BAND, _Op.BOR: BOR, _Op.BXOR: BXOR}
REDUCTIONS = {"mean": _Op.SUM, "sum": _Op.SUM, "max": _Op.MAX, "min": _Op.MIN, "product": _Op.PRODUCT}   # a mean: see `reduction`
_BITWISE = (_Op.BAND, _Op.BOR, _Op.BXOR)
_FLOAT8 = {dtype for dtype in _DTYPES if str(dtype).startswith("torch.float8_")}
_OF_BOOL = {_Op.SUM: _Op.MAX, _Op.PRODUCT: _Op.MIN}

Finish = Callable[[], object]
"""What to do once the bytes have arrived: copy them to where the caller wants them."""


def number_of(x: Tensor) -> int:
    """The number type that stands for the dtype of `x` if it is moved without arithmetic; ranks compare it."""
    return NUMBERS.get(x.dtype, BYTES)


def is_lazy(x: Tensor) -> bool:
    """Whether it is conjugated or negated only when read: its memory holds other values."""
    return x.is_conj() or x.is_neg()


def expects_gradient(x: Tensor) -> bool:
    """Whether gradients should flow back through `x`. They would stop at a collective, without an error.

    False for a single number: that is mostly a loss, which is summed only to be shown.
    """
    return x.grad_fn is not None and x.numel() > 1 and torch.is_grad_enabled()


@dataclass(frozen=True, slots=True)
class Reduction:
    """A way to combine tensors of one dtype: torch's operation, the kernel's, and what is wrong with it for this dtype, or None."""

    torch_op: Any
    kernel_op: int
    refusal: str | None


@cache   # torch's enums are slow to look up
def reduction(op: str, dtype: torch.dtype) -> Reduction:
    """The reduction of this name, for this dtype.

    A mean is a sum, then `completed`. The sum of a narrow dtype is rounded, or infinite, before that: the backend takes its mean.
    """
    refusal = None
    if op not in REDUCTIONS:
        refusal = f"op {op!r} is not one of {', '.join(REDUCTIONS)}"
    elif op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        refusal = f"the mean of {dtype} is not of that dtype; sum it, then divide"
    elif dtype.is_complex and op not in ("sum", "mean"):
        refusal = f"{op} of {dtype}: complex numbers have no order, and no backend multiplies them; gather, then combine"
    known = _Op.AVG if op == "mean" and is_narrow(dtype) else REDUCTIONS.get(op, _Op.SUM)
    return Reduction(known, OPS[known], refusal)


def reduction_of(op: str, x: Tensor, device: torch.device, where: Callable[[str], str], label: str) -> Reduction:
    """The reduction of this name for `x`. Other checks of `x` come after the fast path. raises: ConfigError, also for what is no tensor"""
    if not isinstance(x, Tensor):
        expect_movable(x, device, where(label))
    found = reduction(op, x.dtype)
    if found.refusal:
        raise ConfigError(f"{where(label)}: {found.refusal}")
    return found


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether its numbers are floats of less than 32 bits: they are added in fp32, and rounded once. (What NCCL does is its own affair.)"""
    return dtype.is_floating_point and dtype.itemsize < 4


def completed(total: Tensor, op: str, count: int) -> Tensor:
    """`total`, as `reduction` gave it over `count` ranks; a mean's sum is divided now, in place. It may be a parameter."""
    if op == "mean" and count > 1 and not is_narrow(total.dtype):
        total.detach().div_(count)
    return total


def expect_movable(x: Tensor, device: torch.device, where: str) -> None:
    """Refuse what a backend would misread: a tensor that it cannot reach, or whose memory does not hold its values in order.

    raises: ShapeMismatch, NotContiguous; ConfigError for what is no tensor
    """
    expect_type(f"{where}: operand", x, Tensor, "a tensor")
    if x.device.type not in ("cpu", device.type):
        raise ShapeMismatch(f"{where}: a tensor on {x.device} cannot be sent, expected one on {device}")
    if x.layout != torch.strided or x.is_quantized:
        raise misplaced(x, where)
    if is_lazy(x):
        raise NotContiguous(f"{where}: a view that is conjugated or negated only when read; pass x.resolve_conj().resolve_neg()")
    if not x.is_contiguous():
        raise NotContiguous(f"{where}: tensor of shape {tuple(x.shape)} has strides {x.stride()}, expected a contiguous one; "
                            "pass x.contiguous()")


def expect_operand(x: Tensor, device: torch.device, where: str, *, alone: bool = False) -> None:
    """Refuse what a collective would misread, and what gradients should flow through; raises as `expect_movable`, and ConfigError.

    alone: there is no other rank, so any strided tensor will do
    """
    if alone and isinstance(x, Tensor) and x.layout == torch.strided:
        return
    expect_movable(x, device, where)
    if expects_gradient(x):
        raise ConfigError(f"{where}: a tensor of shape {tuple(x.shape)} has a graph, and gradients do not go back through a collective: "
                          "pass x.detach(), or call it in a torch.autograd.Function that sends them back (docs/start.md)")


def dense(x: Tensor, label: str) -> Tensor:
    """`x` itself, or a contiguous copy of it; refuses anything but a plain tensor in memory that has addresses."""
    return _contiguous(_in_memory(x, label))


def _in_memory(x: Tensor, label: str) -> Tensor:
    """`x`, or for torch's AsyncCollectiveTensor, which is waited for, what it wraps; raises ShapeMismatch if there is no memory."""
    if x.layout != torch.strided or x.is_quantized or not (x.is_cpu or x.is_cuda):
        raise misplaced(x, label)
    if x.data_ptr() or not x.nbytes:
        return x
    if (wait := getattr(x, "trigger_wait", None)) is not None:
        wait()
        return cast(Tensor, getattr(x, "elem"))   # noqa: B009   # torch's types do not know it
    raise ShapeMismatch(f"{label}: a {type(x).__name__} of shape {tuple(x.shape)} has no memory, expected one of {x.nbytes} bytes; pass "
                        "the tensor that it wraps (of a DTensor x.to_local()), or one that is no fake and whose storage was not freed")


def _contiguous(x: Tensor) -> Tensor:
    if x.is_contiguous() and not is_lazy(x):
        return x
    return _copied_by(x.detach().resolve_conj().resolve_neg()).contiguous().view(x.dtype)


def _copied_by(x: Tensor) -> Tensor:
    """`x` as a dtype that torch can copy in every layout: it cannot transpose float4."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def misplaced(x: Tensor, label: str) -> ShapeMismatch:
    """The error for a tensor of a layout or device that the group does not take, or whose values are more than its memory holds."""
    if x.is_quantized:
        return ShapeMismatch(f"{label}: a quantised tensor cannot be sent: its scale would stay behind; send x.dequantize(), or "
                             "x.int_repr() and the scale")
    return ShapeMismatch(f"{label}: a tensor of layout {x.layout} on {x.device} cannot be sent; expected a strided tensor on the CPU")


def dense_output(x: Tensor, label: str) -> tuple[Tensor, Finish | None]:
    """Where to write a result for `x`, and a function that copies it to `x` afterwards (None: it is written to `x` directly)."""
    x = _in_memory(x, label)
    flat = _contiguous(x)
    if flat is x:
        return x, None
    _refuse_shared_places(x, label)
    return flat, lambda: _copied_by(x.detach()).copy_(_copied_by(flat))


def dense_outputs(outputs: Sequence[Tensor], label: str) -> tuple[list[Tensor], list[Finish | None]]:
    """The same for several, which would overwrite each other if they shared memory. raises: NotContiguous"""
    made = [dense_output(x, label) for x in outputs]
    spans = sorted((flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat, _ in made if flat.nbytes)
    begins = [at for x in outputs if x.nbytes and (at := x.data_ptr())]   # a tensor that is not contiguous has a copy of its own in `made`
    if any(begin < end for (_, end), (begin, _) in pairwise(spans)) or len({*begins}) < len(begins):
        raise NotContiguous(f"{label}: two of {len(outputs)} output tensors share memory; make one for each, as by "
                            "[torch.empty_like(x) for _ in range(n)], not [torch.empty_like(x)] * n")
    return [flat for flat, _ in made], [back for _, back in made]


def _refuse_shared_places(x: Tensor, label: str) -> None:
    """Refuse an output in which several elements have the same address: it is undefined which of them is kept."""
    reach = 0   # distance from the first element to the last, over all dims so far
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size > 1):
        if stride <= reach:
            raise NotContiguous(f"{label}: several elements of a tensor of shape {tuple(x.shape)} with strides {x.stride()} lie at "
                                "one place; pass x.contiguous()")
        reach += stride * (size - 1)


def untouched(given: Tensor, target: Tensor, rank: int = -1) -> Tensor:
    """`given`, or a copy of it if writing `target` would change it before it is read.

    rank: the one overlap allowed: the smaller tensor is exactly slice number `rank` of the larger (NCCL's "in place"). -1 allows none:
          that slice would lie just before it
    """
    small, large = (given, target) if given.nbytes <= target.nbytes else (target, given)
    behind = small.data_ptr() - large.data_ptr()
    if behind >= large.nbytes or -behind >= small.nbytes or behind == rank * small.nbytes:
        return given
    return given.detach().clone()


def all_untouched(given: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
    """`given`, with a copy for each that shares memory with any of `targets`."""
    written = [(target.data_ptr(), target.data_ptr() + target.nbytes) for target in targets]
    shares = lambda begin, nbytes: any(begin < end and at < begin + nbytes for at, end in written)
    return [x.detach().clone() if shares(x.data_ptr(), x.nbytes) else x for x in given]


def countable(x: Tensor, op: Any, label: str, size: int) -> tuple[Tensor, int, int, Finish | None]:
    """A contiguous tensor to reduce instead of `x`, its number type, the operation, and a function that copies the result to `x`.

    op:     torch's ReduceOp; the kernels add whole numbers for AVG, and the function divides by `size`, the number of ranks
    raises: ShapeMismatch for an operation that this dtype does not have
    """
    flat, back = dense_output(x, label)
    number, code, refusal = _arithmetic(x.dtype, op.op)
    if refusal:
        raise ShapeMismatch(f"{label}: {refusal}")
    if x.dtype in NUMBERS:
        return flat, number, code, partial(_divide, x, size, back) if code == AVG and not x.is_floating_point() else back
    if x.is_complex():
        return torch.view_as_real(flat.detach()), number, code, back
    if x.dtype == torch.bool:
        return flat.view(torch.uint8), number, code, back
    wide = flat.float()
    return wide, number, code, lambda: x.detach().copy_(wide.to(x.dtype))


def _divide(x: Tensor, size: int, back: Finish | None) -> None:
    """The mean of whole numbers, towards zero, as NCCL has it: Lightning asks for it where a backend is not named gloo."""
    if back is not None:
        back()
    x.detach().copy_(x.detach().to(torch.int64).div_(size, rounding_mode="trunc"))


@cache   # torch's enums are slow to compare
def _arithmetic(dtype: torch.dtype, op: Any) -> tuple[int, int, str | None]:
    """The kernel's number type and operation for this dtype and operation of torch, or why there are none."""
    if reason := _why_meaningless(dtype, op):
        return 0, 0, f"{op.name} of {dtype} {reason}"
    if dtype.is_complex:
        return NUMBERS[dtype.to_real()], OPS[op], None
    if dtype == torch.bool:
        return BYTES, OPS[_OF_BOOL.get(op, op)], None
    return NUMBERS.get(dtype, NUMBERS[torch.float32]), OPS[op], None


def _why_meaningless(dtype: torch.dtype, op: Any) -> str | None:
    is_float = dtype.is_floating_point or dtype.is_complex
    reason = None
    if op not in OPS:
        reason = "is not offered; sum, then multiply"
    elif dtype not in NUMBERS and dtype not in _FLOAT8 and not dtype.is_complex and dtype != torch.bool:
        reason = "has no arithmetic; send x.view(torch.uint8)"
    elif op in _BITWISE and is_float:
        reason = "is for whole numbers and bool"
    elif op == _Op.AVG and dtype in (torch.bool, torch.uint64):   # there is no wider dtype to divide the latter in
        reason = "is not of that dtype; sum, then divide"
    elif dtype.is_complex and op not in (_Op.SUM, _Op.AVG):
        reason = "has no meaning element by element for complex numbers here; gather, then combine"
    return reason


def dealt_rows(x: Tensor, send_rows: Sequence[int] | None, recv_rows: Sequence[int] | None, rank: int, size: int,
               where: str) -> tuple[Sequence[int], Sequence[int]]:
    """How many rows an all-to-all of `x` sends to each rank and receives from it. raises: ShapeMismatch where that cannot be"""
    there, (sends, expects) = sum(x.shape[:1]), (_row_counts(rows, size, where) for rows in (send_rows, recv_rows))
    if sends is None or expects is None or not len(sends) == len(expects) == size or x.dim() == 0 \
            or sum(sends) != there or min(*sends, *expects) < 0 or sends[rank] != expects[rank]:
        raise ShapeMismatch(f"{where}: {there} rows cannot be dealt as send_rows={sends}, recv_rows={expects}; give both, one number "
                            f"for each of {size} ranks")
    return sends, expects


def _row_counts(rows: Sequence[int] | None, size: int, where: str) -> list[int] | None:
    try:
        return None if rows is None else [*map(index, rows)]   # they may be numpy's
    except TypeError as error:
        raise ShapeMismatch(f"{where}: {rows!r} are no numbers of rows; expected a whole number for each of {size} ranks") from error


def lengths_table(in_at: Sequence[int], in_lengths: Sequence[int], out_at: Sequence[int], out_lengths: Sequence[int]) -> bytes:
    """The table that the kernel reads if lengths differ: for each rank, offset and length, in the input and in the output."""
    return array.array("Q", [*in_at, *in_lengths, *out_at, *out_lengths]).tobytes()


def table_of(given: Sequence[Tensor], targets: Sequence[Tensor], size: int) -> bytes:
    """`lengths_table` of tensors: of either kind one for each rank, one for all, or none."""
    rows: list[list[int]] = []
    for tensors in (given, targets):
        each = [*tensors] * (size if len(tensors) == 1 else 1)
        rows += [x.data_ptr() for x in each] or [0] * size, [x.nbytes for x in each] or [0] * size
    return lengths_table(*rows)


def cut_rows(x: Tensor, rows: Sequence[int], parts: int, label: str) -> tuple[list[int], list[int]]:
    """The offsets of shares of `rows` rows each in `x`, and their lengths, in bytes; if `rows` is empty, shares are equal."""
    there = x.shape[0] if x.dim() else 0
    rows = [index(count) for count in rows] or [there // parts] * parts
    if x.dim() == 0 or len(rows) != parts or sum(rows) != there or min(rows) < 0:
        raise ShapeMismatch(f"{label}: splits {rows} do not give the {there} rows of the tensor to {parts} ranks")
    row = x.nbytes // max(there, 1)
    lengths = [count * row for count in rows]
    return [0, *accumulate(lengths)][:-1], lengths


# ------------------------------------------------------------------ checks that need one rank only


def expect_rank(rank: Any, size: int, label: str) -> None:
    """raises: ConfigError when a root or a peer is not in the group"""
    try:
        known = 0 <= index(rank) < size
    except TypeError:   # no whole number, such as None or a tensor of fractions
        known = False
    if not known:
        raise ConfigError(f"{label}: there is no rank {rank!r} in a group of {size}")


def is_tag(tag: object) -> bool:
    """Whether messages can carry this tag."""
    return isinstance(tag, int) and 0 <= tag < 1 << 63


def expect_tag(tag: object, label: str) -> None:
    """raises: ConfigError when messages cannot carry this tag"""
    if not is_tag(tag):
        raise ConfigError(f"{label}: the tag is {tag!r}; expected a whole number from 0 to 2**63 - 1")


def only_one(items: Sequence[Any], label: str) -> Any:
    """The one tensor, or list of tensors, that a call of torch wraps in a list. raises: ShapeMismatch when there is not just one"""
    if len(items) != 1:
        raise ShapeMismatch(f"{label}: {len(items)} tensors given, expected 1: one device for each rank")
    return items[0]


def expect_one_each(tensors: Sequence[Tensor], size: int, label: str, what: str) -> None:
    """raises: ShapeMismatch when a list does not hold a tensor for each rank"""
    if len(tensors) != size:
        raise ShapeMismatch(f"{label}: {len(tensors)} {what} tensors, expected {size}, one for each rank")


def expect_size(actual: int, expected: int, label: str, what: str) -> None:
    """raises: ShapeMismatch when a number of elements is not as expected"""
    if actual != expected:
        raise ShapeMismatch(f"{label}: {what} has {actual} elements, expected {expected}")


def expect_dtype(x: Tensor, others: Sequence[Tensor], label: str) -> None:
    """raises: ShapeMismatch when tensors of one call differ in dtype, or some are on the CPU and some are not"""
    if any(other.dtype != x.dtype for other in others):
        raise ShapeMismatch(f"{label}: dtypes {x.dtype} and {', '.join(str(other.dtype) for other in others)}; expected all the same")
    if any(other.is_cpu != x.is_cpu for other in others):
        raise ShapeMismatch(f"{label}: tensors on {x.device} and {', '.join(str(other.device) for other in others)}; expected one place")
