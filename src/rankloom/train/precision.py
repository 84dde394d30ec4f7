"""Mixed precision: the dtypes that a model computes in and the optimizer keeps, and the loss scale of fp16.

bf16 and fp16 compute in 16 bits and keep fp32 master weights. Gradients are accumulated, summed over ranks and applied in fp32; after
each step the masters are rounded into the model. fp16 has too few exponents for small gradients, so the loss is multiplied by a
scale, which doubles after 2000 steps without overflow and halves at an overflow.

source: Micikevicius et al. 2018
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from math import isfinite, log2
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rankloom.base.errors import ConfigError, UnitError, did_you_mean
from rankloom.base.expect import expect_type
from rankloom.base.hooks import copy_user_attributes
from rankloom.base.names import is_inside
from rankloom.base.nested import cast_floats_in
from rankloom.base.tensors import expect_number_format, keep_until_read
from rankloom.parallel.sections.wrapping import has_forward, read_by
from rankloom.shard.away import watch, writes
from rankloom.shard.unit import Formats
from rankloom.train.fp8 import Recipe

GROW_AFTER = 2000        # steps without overflow until the scale doubles
FIRST_EXPONENT = 16      # the first scale is 2**16 for a loss that is a mean
HOPELESS_AFTER = 32      # overflows in a row: a mean is then scaled by 2**-16, so its gradient is not finite at any scale


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of one run. Frozen parameters are kept, and saved, in the compute dtype only: the optimizer needs no finer copy of them.

    compute: of forward, backward, and gathered parameters; None: the model keeps its dtypes
    master:  of the slices or copies that the optimizer updates; None: as compute
    reduce:  in which gradients are summed over ranks (stages 1 to 3); None: as master
    output:  to which the model's outputs are cast before the loss; None: not cast
    full:    patterns of names of modules (`*norm*`) that compute in the master dtype, with all modules inside them; their outputs are
             cast to the compute dtype. A module inside must be called only from there: another caller would give it, or get from it,
             the wrong dtype. Of modules with one parameter (tied weights) it names all or none
    scaled:  the loss is scaled, for a dtype with few exponents
    float8:  how linear layers multiply in 8 bits (fp8.py); None: they do not
    """

    name: str = "custom"
    compute: torch.dtype | None = None
    master: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    full: tuple[str, ...] = ()
    scaled: bool = False
    float8: Recipe | None = None

    def __post_init__(self) -> None:
        expect_type("name", self.name, str, "a name; dtypes go by keyword, as in Precision(compute=torch.bfloat16)")
        for name in ("compute", "master", "reduce", "output"):
            expect_number_format(name, getattr(self, name))
        expect_type("full", self.full, (tuple, list), "patterns of module names, in a tuple")
        if self.full and self.master is None:
            raise ConfigError(f"full={self.full!r} names modules that compute in the master dtype, and there is none: give master, as in "
                              "Precision(compute=torch.bfloat16, master=torch.float32, full=...)")


PRECISIONS = {p.name: p for p in (
    Precision("fp32", torch.float32),
    Precision("fp64", torch.float64),
    # output: a loss is a sum over thousands of items. fp16 ends at 65504, and bf16 has three digits.
    Precision("bf16", torch.bfloat16, master=torch.float32, output=torch.float32),
    Precision("fp16", torch.float16, master=torch.float32, output=torch.float32, scaled=True),
    Precision("fp8", torch.bfloat16, master=torch.float32, output=torch.float32, float8=Recipe()),
)}


def precision_named(name: str | Precision | None) -> Precision:
    """The precision of that name. None: keep the model's dtypes. A `Precision` is returned as it is."""
    if isinstance(name, Precision):
        return name
    if name is None:
        return Precision("as the model is")
    if name not in PRECISIONS:
        raise ConfigError(f"precision {name!r} is unknown. {did_you_mean(str(name), PRECISIONS)}")
    return PRECISIONS[name]


def full_modules(model: nn.Module, precision: Precision) -> dict[str, nn.Module]:
    """The modules that `full` names and those inside them, by name; a module comes before what is inside it.

    raises: ConfigError for a pattern that no module has
    """
    named = dict(model.named_modules())
    for pattern in precision.full:
        if not any(fnmatch(name, pattern) for name in named):
            raise ConfigError(f"full pattern {pattern!r} fits no module. {did_you_mean(pattern, named)}")
    full: dict[str, nn.Module] = {}
    for name, module in named.items():
        if _parent(name) in full or any(fnmatch(name, pattern) for pattern in precision.full):
            full[name] = module
    return full


def full_parameters(model: nn.Module, precision: Precision) -> set[int]:
    """The ids of parameters that compute in the master dtype, not in 16 bits.

    They are the parameters of batch norms, those of `full_modules`, and those that are not floating point.

    raises: ConfigError when a parameter of `full_modules` is tied to a module in 16 bits, which would multiply two formats
    """
    full = full_modules(model, precision)
    _expect_same_format(model, full, precision)
    return {id(param) for name, module in model.named_modules() for param in module.parameters(recurse=False)
            if not param.is_floating_point() or isinstance(module, _BatchNorm) or name in full}


def _expect_same_format(model: nn.Module, full: Mapping[str, nn.Module], precision: Precision) -> None:
    """Raise when a module that is not in `full` has, or says that it reads, a parameter of one that is, in another format.

    A module around that one may have the parameter, and not read it.
    """
    owners = {id(param): (name, key) for name, module in full.items() for key, param in module.named_parameters(recurse=False)
              if param.is_floating_point() and (precision.compute or param.dtype) != precision.master}
    for name, module in model.named_modules():
        if name in full or isinstance(module, _BatchNorm) or not has_forward(module):
            continue
        read = [owners[id(param)] for param in read_by(module) if id(param) in owners]
        held = [owners[id(param)] for param in module.parameters(recurse=False) if id(param) in owners]
        for owner, key in (*read, *((owner, key) for owner, key in held if not is_inside(owner, name))):
            raise ConfigError(f"full={precision.full!r}: {owner} computes in {precision.master}, and {name or 'the model itself'}, which "
                              f"uses its {key} too, in {precision.compute or 'its own format'}; let `full` name both, or none of them")


def formats_of(model: nn.Module, precision: Precision) -> Callable[[nn.Parameter], Formats]:
    """The dtypes of each parameter, for units. Integer, bool and complex parameters keep theirs."""
    full = full_parameters(model, precision)

    def formats(param: nn.Parameter) -> Formats:
        if not param.is_floating_point():
            return Formats(param.dtype, param.dtype, param.dtype)
        compute = precision.compute or param.dtype
        master = precision.master or compute
        return Formats(master if id(param) in full else compute, master, precision.reduce or master)

    return formats


def cast_floats(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating parameters and buffers. `model.to(dtype)` would also cast complex ones, and drop their imaginary parts."""
    def cast(tensor: Tensor) -> Tensor:
        keep_until_read(tensor)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    model._apply(cast)


def cast_activations(model: nn.Module, precision: Precision) -> None:
    """Add hooks: inputs are cast to the compute dtype, outputs to the output dtype; `full` modules compute in the master dtype."""
    if precision.compute is not None:
        outermost = list(_outermost(full_modules(model, precision)))
        compute = precision.master if model in outermost else precision.compute
        model.register_forward_pre_hook(partial(_cast_given, compute), with_kwargs=True)
        for module in outermost:
            module.register_forward_pre_hook(partial(_cast_given, precision.master), with_kwargs=True)
            module.register_forward_hook(partial(_cast_returned, compute))
    if precision.output is not None:
        model.register_forward_hook(partial(_cast_returned, precision.output))


def _outermost(full: Mapping[str, nn.Module]) -> Iterator[nn.Module]:
    """The modules that no other module in `full` calls. One without a forward, such as a ModuleList, calls none of its children."""
    called: set[str] = set()
    for name, module in full.items():
        if _parent(name) in called:
            called.add(name)
        elif type(module).forward is not nn.Module.forward:
            called.add(name)
            yield module


def _parent(name: str) -> str | None:
    """The name of the module that holds this one; None for the model itself."""
    return name.rpartition(".")[0] if name else None


class LastWrite(NamedTuple):
    """How often a parameter has been written, and where its memory is: one of them changes when the user writes to it, or replaces it."""

    writes: int
    address: int


class MasterWeights:
    """Casts a model to its compute dtype, and holds the master weights.

    owners: name -> the parameter that the optimizer updates: the model's own, or its fp32 master copy
    """

    def __init__(self, model: nn.Module, precision: Precision):
        self.params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.owners: dict[str, nn.Parameter] = self.params
        if precision.reduce not in (None, precision.master):
            raise ConfigError(f"precision {precision.name!r} reduces in {precision.reduce}: that is for stages 1 to 3; at stage 0 "
                              "gradients are summed in the master format, or travel compressed: compress='bf16'")
        cast_activations(model, precision)
        self._rounded: dict[str, LastWrite] = {}   # parameters with a master
        if precision.master is None:
            if precision.compute is not None:
                cast_floats(model, precision.compute)
            return
        formats, named = formats_of(model, precision), dict(model.named_parameters())
        wanted = {name: formats(param) for name, param in named.items()}
        self.owners = {name: param if wanted[name].compute == wanted[name].master else _copied(param, wanted[name].master)
                       for name, param in self.params.items()}
        for name, param in named.items():   # `full` ones too: the user's model may be in 16 bits
            keep_until_read(param)
            param.data = param.data.to(wanted[name].compute)
        rounded = [name for name, owner in self.owners.items() if owner is not self.params[name]]
        for name in rounded:
            watch(self.params[name])
        self._rounded = {name: self._last_write(name) for name in rounded}

    def _last_write(self, name: str) -> LastWrite:
        return LastWrite(writes(self.params[name]), self.params[name].data_ptr())

    def expect_own_values(self) -> None:
        """Raise UnitError when the model's values differ from its masters: the next step would overwrite them."""
        for name, own_write in self._rounded.items():
            param = self.params[name]
            # A value that was restored is no change.
            if self._last_write(name) != own_write and not torch.equal(param, self.owners[name].to(param)):
                raise UnitError(f"{name} was changed in the model, and what is trained is a copy in {self.owners[name].dtype}: the change "
                                "would be lost. Load values with `engine.load_full_state_dict`; a bound on a parameter goes into the "
                                "forward (`scale.clamp(max=...)`)")

    @torch.no_grad()
    def publish(self) -> None:
        """After the optimizer's step: round the masters into the model."""
        if self._rounded:
            torch._foreach_copy_([self.params[name] for name in self._rounded], [self.owners[name] for name in self._rounded])
            self._rounded = {name: self._last_write(name) for name in self._rounded}

    def full_values(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of `state` (a model's state dict) in CPU memory, with master values in place of rounded ones."""
        masters = {id(param): self.owners[name] for name, param in self.params.items()}
        whole = {name: masters.get(id(value), value) for name, value in state.items()}
        return {name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
                for name, value in whole.items()}


def _copied(param: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    made = nn.Parameter(param.detach().to(dtype, copy=True))
    copy_user_attributes(made, param)
    return made


def _cast_given(dtype: torch.dtype | None, module: nn.Module, args: tuple[Any, ...],
                kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(cast_floats_in(value, dtype) for value in args), {key: cast_floats_in(value, dtype) for key, value in kwargs.items()}


def _cast_returned(dtype: torch.dtype | None, module: nn.Module, args: Any, output: Any) -> Any:
    return cast_floats_in(output, dtype)


@dataclass(frozen=True, slots=True)
class LossScale:
    """The factor of the loss before backward: a power of two, so that it costs no precision.

    >>> LossScale(8.0).after(overflow=True)
    LossScale(value=4.0, good_steps=0, overflows=1)
    """

    value: float = 1.0
    good_steps: int = 0
    overflows: int = 0   # in a row

    @classmethod
    def first(cls, count: float) -> "LossScale":
        """For a loss that is a sum over `count` items: 2**16, divided by the power of two nearest to the count."""
        known = max(count, 1.0) if isfinite(count) else 1.0   # the step that has counted so is refused
        return cls(2.0 ** (FIRST_EXPONENT - round(log2(known))))

    def after(self, overflow: bool) -> "LossScale":
        """The scale of the next step."""
        if overflow:
            return LossScale(self.value / 2, overflows=self.overflows + 1)
        if self.good_steps + 1 == GROW_AFTER:
            return LossScale(self.value * 2)
        return LossScale(self.value, self.good_steps + 1)

    @property
    def is_hopeless(self) -> bool:
        """Whether a smaller scale cannot help."""
        return self.overflows >= HOPELESS_AFTER


UNMEASURED = LossScale()   # compared by identity: a measured scale may be 1 too
