"""Parameters that are away: whoever computes with one is told so, where torch would take it for an empty tensor. And parameters that are
on their way, into memory where the old values lie: whoever reads one waits for the new. And parameters that only slices, or masters, may
write to: every write is counted.

While a unit is released its parameters are of the class `Away`, and every operation on them is an error. Modules do not notice: they
are called when their parameters are back. What only looks (a dtype, `.grad`, a hook) goes through; shapes and sizes are those that the
parameter has when it is here.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rankloom.base.errors import UnitError

WHOSE = "_rankloom_unit"   # attribute of a parameter: rank, name, unit, and a tensor of its shape without memory
ARRIVE = "_rankloom_arrive"   # another: what waits until it is here
PAST = "_rankloom_past"   # another: its values for who writes past autograd, once somebody has asked for them
DATA: Any = Tensor.data       # how torch reads and sets it
VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})   # attributes that are tensors
SIZES = frozenset({"shape", "ndim", "nbytes", "size", "dim", "numel", "nelement", "__len__", "stride", "is_contiguous"})
SHOWS = frozenset({"__repr__", "__format__", "data_ptr", "untyped_storage"})   # by which values may be read, if there are any
LOOKS = SHOWS | {"element_size", "storage_offset", "is_floating_point", "is_complex",
                 "register_hook", "register_post_accumulate_grad_hook", "requires_grad_"}


class Away(nn.Parameter):
    """A parameter without values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """raises: UnitError, where the values are asked for"""
        rank, name, unit, like = next(getattr(value, WHOSE) for value in tree_leaves((args, kwargs)) if isinstance(value, Away))
        if _asked(func) in SIZES:
            return func(like, *args[1:], **(kwargs or {}))
        if not _only_looks(func):
            raise UnitError(
                f"rank {rank}: {name} was used ({_asked(func)}) while it is away: unit {unit} is in memory only while its module runs (the "
                "root, which has what no other unit has, from the model's forward to the end of its backward). Use it there, cut the "
                "model by other `units`, or keep parameters: a stage below 3")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Watched(nn.Parameter):
    """A parameter in memory that only slices may write to: who writes by `param.data`, which autograd does not count, is seen, too."""

    @property
    def data(self) -> Tensor:
        """The values, as torch gives them; they count writes together, apart from the parameter's own."""
        if getattr(self, PAST) is None:
            setattr(self, PAST, DATA.__get__(self))
        found: Tensor = getattr(self, PAST).detach()
        return found

    @data.setter
    def data(self, values: Tensor) -> None:
        """Other memory."""
        setattr(self, PAST, None)   # those were of other memory
        DATA.__set__(self, values)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Nobody watches a copy, or what comes out of a pickle."""
        return copy.deepcopy(self._unwatched(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._unwatched().__reduce_ex__(protocol)

    def _unwatched(self) -> nn.Parameter:
        plain = nn.Parameter(self.detach(), self.requires_grad)
        vars(plain).update({key: value for key, value in vars(self).items() if key != PAST})
        return plain


class OnItsWay(nn.Parameter):
    """A parameter whose memory is being written: other ranks send their slices of it."""

    @property
    def data(self) -> Tensor:
        """Of the new values, as the parameter gives them that has come."""
        getattr(self, ARRIVE)()
        return self.data

    @data.setter
    def data(self, values: Tensor) -> None:
        """Other memory."""
        DATA.__set__(self, values)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Wait, where the values are asked for; that takes nothing from other ranks, who have sent them already."""
        if _asked(func) in SHOWS or not (_only_looks(func) or _asked(func) in SIZES):
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, OnItsWay):   # no more, once another of its unit has waited
                    getattr(value, ARRIVE)()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Of the new values, and of a parameter that is here."""
        getattr(self, ARRIVE)()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For a pickle, as for a copy."""
        getattr(self, ARRIVE)()
        return self.__reduce_ex__(protocol)


def _only_looks(func: Any) -> bool:
    if func.__name__ == "__get__":
        return func.__self__.__name__ not in VALUES
    return func.__name__ in LOOKS or func.__name__ in ("__set__", "__delete__")


def _asked(func: Any) -> str:
    return str(func.__self__.__name__ if func.__name__ == "__get__" else func.__name__)


def mark(params: Mapping[str, nn.Parameter], dtype: torch.dtype, rank: int, unit: str) -> None:
    """Say once whose they are. dtype: that of the values when they are here"""
    for name, param in params.items():
        setattr(param, WHOSE, (rank, name, unit, torch.empty_like(param, dtype=dtype, device="meta", requires_grad=False)))


def watch(param: nn.Parameter) -> None:
    """From now on writes by `param.data` are counted; see `writes`. A parameter of a class of the user's own keeps it."""
    if type(param) is nn.Parameter:
        setattr(param, PAST, None)
        param.__class__ = Watched


def writes(param: nn.Parameter) -> int:
    """How often it has been written in place."""
    past: Tensor | None = vars(param).get(PAST)
    return param._version + (0 if past is None else past._version)


def leave(param: nn.Parameter) -> None:
    """The values go. A parameter of a class of the user's own keeps it."""
    if type(param) is nn.Parameter:
        param.__class__ = Away


def set_out(param: nn.Parameter, arrive: Callable[[], None]) -> None:
    """New values are on their way. arrive: waits for them, and calls `come_back`"""
    if type(param) in (nn.Parameter, Watched):
        setattr(param, ARRIVE, arrive)
        param.__class__ = OnItsWay


def come_back(param: nn.Parameter) -> None:
    """They are here again."""
    if type(param) in (Away, OnItsWay):
        param.__class__ = Watched if PAST in vars(param) else nn.Parameter   # type: ignore[assignment]
        vars(param).pop(ARRIVE, None)   # a copy, or a pickle, would take the unit along
