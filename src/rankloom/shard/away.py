"""Three classes that a unit gives to its parameters in turn.

    Away       released. Using a released parameter raises UnitError; torch alone would silently see an empty tensor
    OnItsWay   being gathered into memory where the old values lie. Reading it waits for the new ones
    Watched    in memory, and a copy of slices or masters. Every write to it is counted, so that the unit can refuse it

Modules never notice: they are called while their parameters are gathered. Reading metadata of a released parameter (dtype, `.grad`, a
hook) is allowed; shapes and sizes are those of the gathered one.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rankloom.base.errors import UnitError

# Attributes of a parameter.
WHOSE = "_rankloom_unit"        # the fields of its `Whose`, as a plain tuple: torch.load refuses classes that it does not know
ARRIVE = "_rankloom_arrive"     # a function that waits until it is gathered
GIVEN_OUT = "_rankloom_past"    # what `.data` has given out: writes through it bypass autograd's count

DATA: Any = Tensor.data       # how torch reads and sets it
VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})   # attributes that are tensors
SIZES = frozenset({"shape", "ndim", "nbytes", "size", "dim", "numel", "nelement", "__len__", "stride", "is_contiguous"})
SHOWS = frozenset({"__repr__", "__format__", "data_ptr", "untyped_storage"})   # give access to values, if there are any
LOOKS = SHOWS | {"element_size", "storage_offset", "is_floating_point", "is_complex",
                 "register_hook", "register_post_accumulate_grad_hook", "requires_grad_"}


class Whose(NamedTuple):
    """Which parameter it is, and of which unit, for messages. like: of its gathered shape and dtype, without memory"""

    rank: int
    name: str
    unit: str
    like: Tensor


class Away(nn.Parameter):
    """A parameter without values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """raises: UnitError, unless only metadata is read"""
        whose = next(Whose(*getattr(value, WHOSE)) for value in tree_leaves((args, kwargs)) if isinstance(value, Away))
        if _asked(func) in SIZES:
            return func(whose.like, *args[1:], **(kwargs or {}))
        if not _only_looks(func):
            raise UnitError(
                f"rank {whose.rank}: {whose.name} was used ({_asked(func)}) while it is released: unit {whose.unit} is in memory only "
                "while its module runs (the root, which has the rest of the model, from its forward to the end of its backward). Use it "
                "there, cut the model by other `units`, or keep parameters: a stage below 3")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Watched(nn.Parameter):
    """A parameter in memory that only slices may write to. Writes through `param.data`, which autograd does not count, are counted too."""

    @property
    def data(self) -> Tensor:
        """The values, as torch gives them. All that are given out share one version counter, apart from the parameter's own."""
        if getattr(self, GIVEN_OUT) is None:
            setattr(self, GIVEN_OUT, DATA.__get__(self))
        values: Tensor = getattr(self, GIVEN_OUT).detach()
        return values

    @data.setter
    def data(self, values: Tensor) -> None:
        """Point it at other memory."""
        setattr(self, GIVEN_OUT, None)   # what was given out is of the old memory
        DATA.__set__(self, values)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy, or what comes out of a pickle, is a plain parameter."""
        return copy.deepcopy(self._unwatched(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._unwatched().__reduce_ex__(protocol)

    def _unwatched(self) -> nn.Parameter:
        plain = nn.Parameter(self.detach(), self.requires_grad)
        vars(plain).update({key: value for key, value in vars(self).items() if key != GIVEN_OUT})
        return plain


class OnItsWay(nn.Parameter):
    """A parameter whose memory is being written: other ranks send their slices of it."""

    @property
    def data(self) -> Tensor:
        """The new values: waits for them."""
        getattr(self, ARRIVE)()
        return self.data   # no recursion: the parameter's class has changed

    @data.setter
    def data(self, values: Tensor) -> None:
        """Point it at other memory."""
        DATA.__set__(self, values)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Wait, unless only metadata is read. No other rank need take part: all have sent their slices already."""
        if _asked(func) in SHOWS or not (_only_looks(func) or _asked(func) in SIZES):
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, OnItsWay):   # waiting for one parameter of a unit changes the class of all
                    getattr(value, ARRIVE)()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy of the new values; then the parameter's class copies itself."""
        getattr(self, ARRIVE)()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For a pickle, as for a copy."""
        getattr(self, ARRIVE)()
        return self.__reduce_ex__(protocol)


def _only_looks(func: Any) -> bool:
    """Whether a function, or access to an attribute, reads no values."""
    if func.__name__ == "__get__":
        return func.__self__.__name__ not in VALUES
    return func.__name__ in LOOKS or func.__name__ in ("__set__", "__delete__")


def _asked(func: Any) -> str:
    """The name of a function, or of the attribute that it reads."""
    return str(func.__self__.__name__ if func.__name__ == "__get__" else func.__name__)


def note_unit(params: Mapping[str, nn.Parameter], dtype: torch.dtype, rank: int, unit: str) -> None:
    """Note once which unit they belong to. dtype: of the gathered values"""
    for name, param in params.items():
        like = torch.empty_like(param, dtype=dtype, device="meta", requires_grad=False)
        setattr(param, WHOSE, tuple(Whose(rank, name, unit, like)))


def writes(param: nn.Parameter) -> int:
    """How often it has been written in place."""
    given_out: Tensor | None = vars(param).get(GIVEN_OUT)
    return param._version + (0 if given_out is None else given_out._version)


# These give a parameter one of the three classes; one of the user's own class keeps its class.


def watch(param: nn.Parameter) -> None:
    """From now on writes through `param.data` count, too (see `writes`)."""
    if type(param) is nn.Parameter:
        setattr(param, GIVEN_OUT, None)
        param.__class__ = Watched


def set_released(param: nn.Parameter) -> None:
    """Its unit is released: using it is an error."""
    if type(param) is nn.Parameter:
        param.__class__ = Away


def set_gathering(param: nn.Parameter, arrive: Callable[[], None]) -> None:
    """A gather has started: reading it waits. arrive: waits for the gather, and calls `set_gathered`"""
    if type(param) in (nn.Parameter, Watched):
        setattr(param, ARRIVE, arrive)
        param.__class__ = OnItsWay


def set_gathered(param: nn.Parameter) -> None:
    """Its unit is gathered: it may be used."""
    if type(param) in (Away, OnItsWay):
        param.__class__ = Watched if GIVEN_OUT in vars(param) else nn.Parameter   # type: ignore[assignment]
        vars(param).pop(ARRIVE, None)   # it refers to the unit, which a copy or a pickle would include
