"""Any torch optimizer over pieces of parameters.

From stage 1 on, a rank updates only those elements of each parameter that lie in its slice. The user's function is called with
parameters of the plain shapes all the same, because people group by them (weight decay for matrices only):

    stand_in               the shape of a parameter, without its memory
    make_optimizer         the user's groups of these: one optimizer, or several as one
    needs_whole_matrices   which tensors the layout must not cut (shard/matrices.py)
    give_owners            what this rank really updates, in the place of the stand-ins

An *owner* is the nn.Parameter that the optimizer updates: a 1-D view of this rank's slice, or a whole tensor in its own shape, or
empty. An elementwise optimizer, as most are, does the same to a slice as to the whole.
How the state becomes one again: `shard/optimizer_state.py`.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError

Build = Callable[[list[nn.Parameter]], Any]

# What one of these does to an element depends on that element and its own state only.
ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = tuple(getattr(torch.optim, name) for name in (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"))


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank owns of a parameter: its elements [start, stop), flattened.

    >>> Piece("w", torch.Size([2, 3]), 4, 6).cut(torch.arange(6).view(2, 3))
    tensor([4, 5])
    """

    name: str
    shape: torch.Size
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        """All of the parameter is here."""
        return (self.start, self.stop) == (0, self.shape.numel())

    @property
    def is_empty(self) -> bool:
        """Nothing of it is here."""
        return self.start == self.stop

    def cut(self, whole: Tensor) -> Tensor:
        """This piece of a tensor of the parameter's shape, 1-D; a view where `whole` is contiguous."""
        return whole.reshape(-1)[self.start : self.stop]


class Optimizers:
    """Several optimizers, each with parameters of its own, used as one: say Muon for matrices and AdamW for the rest.

    It offers what the engine asks of a torch optimizer. `grad_scale` and `found_inf` are handed on where all parts take them.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        self.parts = list(parts)
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts, in order: the parts' own dicts, so that a rate set here is set there."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """What all parts remember, by parameter: a new dict of the parts' own."""
        return {param: held for part in self.parts for param, held in part.state.items()}

    @property
    def _step_supports_amp_scaling(self) -> bool:   # the name by which torch's own optimizers tell
        return all(takes_factor(part) for part in self.parts)

    def step(self) -> None:
        """One step of each part."""
        for part in self.parts:
            if self._step_supports_amp_scaling:
                part.grad_scale, part.found_inf = self.grad_scale, self.found_inf   # type: ignore[attr-defined]
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters."""
        for part in self.parts:
            part.zero_grad(set_to_none)


Optimizer = torch.optim.Optimizer | Optimizers   # one, or several used as one


@dataclass(frozen=True, slots=True)
class AsBuilt:
    """What an optimizer was when it was built; parameters and hooks that come later are an error.

    rates:  of its groups           params: the ids of their parameters
    hooked: which of its parts have hooks
    cut:    whether it updates pieces of parameters
    """

    rates: list[float]
    params: list[list[int]]
    hooked: list[bool]
    cut: bool

    @classmethod
    def of(cls, optimizer: Optimizer, *, cut: bool) -> "AsBuilt":
        """As it is now."""
        groups = optimizer.param_groups
        return cls([float(group["lr"]) for group in groups], [[id(param) for param in group["params"]] for group in groups],
                   [_has_hooks(part) for part in parts_of(optimizer)], cut)

    def expect(self, optimizer: Optimizer, rank: int) -> None:
        """Raise ConfigError when it is another one now."""
        now = [[id(param) for param in group["params"]] for group in optimizer.param_groups]
        found = None if len(now) == len(self.params) else f"the optimizer has {len(now)} groups of parameters and had {len(self.params)}"
        for at, (here, built) in enumerate(zip(now, self.params)):
            if here != built and not found:
                found = f"group {at} of the optimizer has {len(here)} parameters, and had {len(built)}, or others,"
        if found:
            raise ConfigError(f"rank {rank}: {found} when the engine was made: nobody sums the gradients of those that came. Prepare the "
                              "model with all that will be trained, and freeze parts of it afterwards")
        for part, hooked in zip(parts_of(optimizer), self.hooked):
            if self.cut and _has_hooks(part) and not hooked and is_elementwise(part) and not hasattr(part, "elementwise"):
                raise ConfigError(f"rank {rank}: {type(part).__name__} has got a hook since the engine was made, and what it updates are "
                                  "pieces of parameters: the hook would take each for a whole one. Register it in the function that makes "
                                  "the optimizer, then tensors stay whole; if it treats each element by itself, say so by "
                                  "`optimizer.elementwise = True`")


def parts_of(optimizer: Optimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers that it is made of."""
    return optimizer.parts if isinstance(optimizer, Optimizers) else [optimizer]


def stand_in(plain: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> nn.Parameter:
    """A parameter like `plain` in shape, `requires_grad` and the user's own attributes, in no memory: one NaN for all elements.

    dtype, device: those of the owner, where they are not `plain`'s
    """
    # NaN, not 0: who computes with the values when the optimizer is built shall notice.
    one = torch.full((), math.nan, dtype=dtype or plain.dtype, device=device or plain.device)
    made = nn.Parameter(one.expand(plain.shape), requires_grad=plain.requires_grad)
    vars(made).update(vars(plain))
    return made


def expect_build(build: Any) -> None:
    """Raise ConfigError for an optimizer in place of a function that makes one."""
    if isinstance(build, torch.optim.Optimizer) or not callable(build):
        raise ConfigError("optimizer must be a function of the parameters, for example `lambda p: torch.optim.AdamW(p, lr=3e-4)`: "
                          "rankloom decides which tensors it updates")


def make_optimizer(build: Build, params: Mapping[str, nn.Parameter]) -> Optimizer:
    """What the user's function makes of `params`: a torch optimizer; of a list of them, `Optimizers`.

    params: owners, or stand-ins for them
    raises: ConfigError
    """
    expect_build(build)
    made = build(list(params.values()))
    parts = list(made) if isinstance(made, list | tuple) else [made]
    if not parts or not all(hasattr(part, "param_groups") for part in parts):
        raise ConfigError(f"the optimizer function returned {made!r}, expected a torch optimizer or a list of them")
    if any(isinstance(part, torch.optim.LBFGS) for part in parts):
        raise ConfigError("LBFGS evaluates the loss many times a step and looks at all parameters at once; here the loss is evaluated "
                          "once and each rank updates its own share. Use an optimizer that treats each tensor by itself")
    names = {id(param): name for name, param in params.items()}
    updated = Counter(names.get(id(param)) for part in parts for group in part.param_groups for param in group["params"])
    if None in updated:
        raise ConfigError("the optimizer updates tensors that it was not given; build it from the parameters it is called with")
    if twice := [name for name, times in updated.items() if times > 1]:
        raise ConfigError(f"{', '.join(map(str, twice))}: updated by more than one optimizer; give each parameter to one of them")
    return parts[0] if len(parts) == 1 else Optimizers(parts)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether to update slices is the same as to update the whole.

    Known of torch's own, and of what is derived from them with their very `step`: LARS may be derived from SGD. Another class says so
    with an attribute `elementwise = True`; else it gets whole tensors, which is right for every optimizer that treats each by itself.
    """
    base = _base_of_torch(optimizer)
    return bool(getattr(optimizer, "elementwise", base is not None and _steps_as(optimizer, base)))


def takes_factor(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step multiplies gradients by a factor on the way (a fused one), and nobody reads them before: no hook, no `step` that a
    class of the user's has put around torch's.
    """
    base = _base_of_torch(optimizer)
    return (getattr(optimizer, "_step_supports_amp_scaling", False) and not getattr(optimizer, "_optimizer_step_pre_hooks", None)
            and (base is None or _steps_as(optimizer, base)))


def _base_of_torch(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    return next((base for base in type(optimizer).__mro__ if base in ELEMENTWISE), None)


def _steps_as(optimizer: torch.optim.Optimizer, base: type[torch.optim.Optimizer]) -> bool:
    return unwrap(type(optimizer).step) is unwrap(base.step)   # torch wraps the steps of optimizers that have been made


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return any(getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))


def needs_whole_matrices(optimizer: Optimizer, params: Mapping[str, nn.Parameter]) -> set[str]:
    """The names of those `params` that must not be cut: the optimizer that updates them is not elementwise (Muon, Adafactor), or has
    hooks, which may look at a tensor as a whole, too (clip each, bound the norm of each), and does not say that it is.

    params: what the optimizer was built from, by name
    """
    names = {id(param): name for name, param in params.items()}
    return {names[id(param)] for part in parts_of(optimizer)
            if not is_elementwise(part) or (_has_hooks(part) and not hasattr(part, "elementwise"))
            for group in part.param_groups for param in group["params"]}


@torch.no_grad()
def give_owners(optimizer: Optimizer, stand_ins: Mapping[str, nn.Parameter],
                owners: Mapping[str, nn.Parameter], pieces: Mapping[str, Piece]) -> None:
    """Put the owners in the place of the stand-ins that `optimizer` was built from, in its groups and in its state.

    State that is there from the start (Adagrad) is cut to the pieces. Until then it takes the memory of the whole.
    Empty owners stay in their groups; torch passes over what has no gradient.
    """
    names = {id(param): name for name, param in stand_ins.items()}
    for name in needs_whole_matrices(optimizer, stand_ins):
        assert pieces[name].is_whole or pieces[name].is_empty, f"{name} is cut, but its optimizer needs it whole"
    for part in parts_of(optimizer):
        state = {names[id(param)]: held for param, held in part.state.items()}
        counters = counter_keys(state, pieces)
        part.state.clear()
        for group in part.param_groups:
            group["params"] = [owners[names[id(param)]] for param in group["params"]]
        for name, held in state.items():
            if not pieces[name].is_empty:
                part.state[owners[name]] = {key: cut_state(value, pieces[name], owners[name], is_counter=key in counters)
                                            for key, value in held.items()}


def counter_keys(state: Mapping[str, Mapping[str, Any]], pieces: Mapping[str, Piece]) -> set[str]:
    """Keys that hold one number for a whole tensor, as "step" does. Where a parameter has no dims, shapes do not tell.

    state: by parameter and key, whole
    """
    return {"step"} | {key for name, held in state.items() for key, value in held.items()
                       if isinstance(value, Tensor) and value.dim() == 0 and pieces[name].shape}


def cut_state(value: Any, piece: Piece, owner: nn.Parameter, *, is_counter: bool) -> Any:
    """A copy of one value of the state of a whole parameter, as the owner of `piece` has it."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    part = value if (is_counter and value.dim() == 0) or value.shape != piece.shape else piece.cut(value).view(owner.shape)
    return part.clone(memory_format=torch.contiguous_format)   # what was made like a stand-in of one element has its stride of 0
