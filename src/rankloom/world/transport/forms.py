"""torch's methods have two forms of arguments: lists of tensors and options; or single tensors with root, operation and time-out.

torch itself uses the first form, and process_group.py is written for it. This file converts the second to the first: for each
method, a function with torch's own names of the arguments returns the arguments of the first form.
"""

import datetime
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

Form = tuple[Any, ...]
Timeout = datetime.timedelta | None
Method = TypeVar("Method", bound=Callable[..., Any])
SUM: Any = dist.ReduceOp.SUM
OPTIONS = (c10d.AllreduceOptions, c10d.BroadcastOptions, c10d.ReduceOptions, c10d.AllgatherOptions, c10d.GatherOptions,
           c10d.ScatterOptions, c10d.ReduceScatterOptions, c10d.AllToAllOptions, c10d.BarrierOptions)


def _broadcast(tensor: Tensor, root: int, timeout: Timeout = None) -> Form:
    return [_one(tensor)], _options(c10d.BroadcastOptions, timeout, rootRank=root)


def _allreduce(tensor: Tensor | Sequence[Tensor], op: Any = SUM, timeout: Timeout = None) -> Form:
    return [tensor] if isinstance(tensor, Tensor) else tensor, _options(c10d.AllreduceOptions, timeout, reduceOp=op)


def _reduce(tensor: Tensor, root: int, op: Any = SUM, timeout: Timeout = None) -> Form:
    return [_one(tensor)], _options(c10d.ReduceOptions, timeout, rootRank=root, reduceOp=op)


def _allgather(output_tensors: Sequence[Tensor], input_tensor: Tensor, timeout: Timeout = None) -> Form:
    return [output_tensors], [_one(input_tensor)], _options(c10d.AllgatherOptions, timeout)


def _gather(output_tensors: Sequence[Tensor], input_tensor: Tensor, root: int, timeout: Timeout = None) -> Form:
    return [output_tensors], [_one(input_tensor)], _options(c10d.GatherOptions, timeout, rootRank=root)


def _scatter(output_tensor: Tensor, input_tensors: Sequence[Tensor], root: int, timeout: Timeout = None) -> Form:
    return [_one(output_tensor)], [input_tensors], _options(c10d.ScatterOptions, timeout, rootRank=root)


def _reduce_scatter(output: Tensor, input: Sequence[Tensor], op: Any = SUM, timeout: Timeout = None) -> Form:
    return [_one(output)], [input], _options(c10d.ReduceScatterOptions, timeout, reduceOp=op)


def _alltoall_base(output: Tensor, input: Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int],
                   timeout: Timeout = None) -> Form:
    return output, input, output_split_sizes, input_split_sizes, _options(c10d.AllToAllOptions, timeout)


def _barrier(timeout: Timeout = None) -> Form:
    return (_options(c10d.BarrierOptions, timeout),)


SECOND: dict[str, Callable[..., Form]] = {
    "broadcast": _broadcast, "allreduce": _allreduce, "reduce": _reduce, "allgather": _allgather, "gather": _gather, "scatter": _scatter,
    "reduce_scatter": _reduce_scatter, "alltoall_base": _alltoall_base, "all_to_all_single": _alltoall_base, "barrier": _barrier}


def _one(x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a tensor, not {type(x).__name__}: root, operation and time-out by themselves go with one tensor")
    return x


def _options(kind: type, timeout: Timeout, **more: Any) -> Any:
    options = kind()
    if timeout is not None:
        options.timeout = timeout
    for name, value in more.items():
        setattr(options, name, value)
    return options


def first_form(name: str, args: Form, named: dict[str, Any]) -> Form:
    """The arguments of a method in its first form, from those of either.

    raises: TypeError when they fit neither
    """
    if args and isinstance(args[-1], OPTIONS) and not named:   # the way torch calls it
        return args
    if "opts" in named:
        return (*args, *named.values()) if len(named) == 1 else SECOND[name](*args, **named)
    is_first = not named and all(isinstance(x, list | tuple | None) for x in args)
    return args if is_first else SECOND[name](*args, **named)


def in_either_form(method: Method) -> Method:
    """Make a method that is written for the first form accept both."""
    @wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        return method(self, *first_form(method.__name__, args, named))

    return call   # type: ignore[return-value]
