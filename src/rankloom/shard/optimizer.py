"""Any torch optimizer, over slices of parameters.

From stage 1 on, a rank updates only the elements of each parameter that lie in its slice. The user's function still gets parameters of
the plain shapes, because people group by shape (weight decay for matrices only):

    stand_in               has the shape of a parameter, without memory
    make_optimizer         calls the user's function with these: one optimizer, or several as one
    needs_whole_matrices   says which tensors the layout must not cut (shard/matrices.py)
    give_owners            turns the stand-ins into what this rank really updates

An *owner* is the nn.Parameter that the optimizer updates: a 1-D view of this rank's slice, or a whole tensor in its own shape, or
empty. An elementwise optimizer, as most are, does the same to a slice as to the whole.
shard/optimizer_state.py gathers the state again.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from rankloom.base.errors import ConfigError
from rankloom.base.hooks import copy_user_attributes
from rankloom.base.spans import Box, boxes_of_run, numel, shape_of, whole_box
from rankloom.base.tensors import has_nan

Build = Callable[[list[nn.Parameter]], Any]

# These update each element by itself: from the element, its gradient and its own state only. And what a step reads of that state, if any.
ELEMENTWISE: dict[type[torch.optim.Optimizer], set[str]] = {getattr(torch.optim, name): needed for name, needed in {
    "ASGD": {"eta", "mu", "ax"}, "Adadelta": {"square_avg", "acc_delta"}, "Adagrad": {"sum"}, "Adam": {"exp_avg", "exp_avg_sq"},
    "AdamW": {"exp_avg", "exp_avg_sq"}, "Adamax": {"exp_avg", "exp_inf"}, "NAdam": {"exp_avg", "exp_avg_sq", "mu_product"},
    "RAdam": {"exp_avg", "exp_avg_sq"}, "RMSprop": {"square_avg"}, "Rprop": {"prev", "step_size"}, "SGD": set[str]()}.items()}


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """What one rank owns of a parameter: elements [start, stop) of it, flattened.

    >>> ParameterSlice("w", torch.Size([2, 3]), 4, 6).cut(torch.arange(6).view(2, 3))
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
        """This slice of a tensor of the parameter's shape, 1-D; a view where `whole` is contiguous."""
        return whole.reshape(-1)[self.start : self.stop]

    def boxes(self, values: Tensor) -> list[tuple[Box, Tensor]]:
        """The boxes of the parameter that `values`, those of this slice in any shape, are of, each with a view of its values."""
        if values.shape == self.shape or not self.shape.numel():   # not sharded; maybe not contiguous
            return [(whole_box(self.shape), values.view(self.shape))]
        boxes = list(boxes_of_run(self.shape, self.start, self.stop))
        return [(box, own.view(shape_of(box))) for box, own in zip(boxes, values.view(-1).split([numel(box) for box in boxes]))]


class Optimizers:
    """Several optimizers, each with parameters of its own, used as one: say Muon for matrices and AdamW for the rest.

    It has what the engine uses of a torch optimizer. `grad_scale` and `found_inf` are passed on if all of them are fused optimizers.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self.optimizers = list(optimizers)
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in order: their own dicts, so that a rate set here is set there."""
        return [param_group for optimizer in self.optimizers for param_group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of all optimizers by parameter: a new dict of their own ones."""
        return {param: held for optimizer in self.optimizers for param, held in optimizer.state.items()}

    @property
    def _step_supports_amp_scaling(self) -> bool:   # the name that torch's own optimizers have for it
        return all(takes_factor(optimizer) for optimizer in self.optimizers)

    def step(self) -> None:
        """One step of each."""
        for optimizer in self.optimizers:
            optimizer.grad_scale, optimizer.found_inf = self.grad_scale, self.found_inf   # type: ignore[attr-defined]
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> list[dict[str, Any]]:
        """Those of all optimizers, in order."""
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Give each optimizer its own, in order. raises: ConfigError unless it is a list of as many"""
        if not isinstance(states, list | tuple) or len(states) != len(self.optimizers):
            given = f"a list of {len(states)}" if isinstance(states, list | tuple) else f"a {type(states).__name__}"
            raise ConfigError(f"the state of {len(self.optimizers)} optimizers was given as {given}; expected a list of one for each, in "
                              "the order in which the optimizer function returned them")
        for optimizer, state in zip(self.optimizers, states):
            optimizer.load_state_dict(state)


Optimizer = torch.optim.Optimizer | Optimizers   # one, or several used as one


@dataclass(frozen=True, slots=True)
class AsBuilt:
    """An optimizer as it was built: parameters added later are an error, and hooks where it updates slices.

    rates:  of its groups           params: the ids of their parameters
    hooked: which of its optimizers have hooks
    cut:    whether it updates slices of parameters
    """

    rates: list[float]
    params: list[list[int]]
    hooked: list[bool]
    cut: bool

    @classmethod
    def of(cls, optimizer: Optimizer, *, cut: bool) -> "AsBuilt":
        """The optimizer as it is now."""
        groups = optimizer.param_groups
        return cls([float(group["lr"]) for group in groups], [[id(param) for param in group["params"]] for group in groups],
                   [_has_hooks(one) for one in optimizers_of(optimizer)], cut)

    def expect(self, optimizer: Optimizer, rank: int) -> None:
        """Raise ConfigError when groups, parameters or hooks have changed."""
        now = [[id(param) for param in group["params"]] for group in optimizer.param_groups]
        if len(now) != len(self.params):
            found = f"the optimizer has {len(now)} groups of parameters and had {len(self.params)}"
        else:
            found = next((f"group {at} of the optimizer has {len(here)} parameters, and had {len(built)}, or others,"
                          for at, (here, built) in enumerate(zip(now, self.params)) if here != built), "")
        if found:
            raise ConfigError(f"rank {rank}: {found} when the engine was made: nobody sums the gradients of those that came. Prepare the "
                              "model with all that will be trained, and freeze parts of it afterwards")
        for one, hooked in zip(optimizers_of(optimizer), self.hooked):
            if self.cut and _has_hooks(one) and not hooked and is_elementwise(one) and not hasattr(one, "elementwise"):
                raise ConfigError(f"rank {rank}: {type(one).__name__} has got a hook since the engine was made, and what it updates are "
                                  "pieces of parameters: the hook would take each for a whole one. Register it in the function that makes "
                                  "the optimizer, then tensors stay whole; if it treats each element by itself, say so by "
                                  "`optimizer.elementwise = True`")


def optimizers_of(optimizer: Optimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers that it consists of."""
    return optimizer.optimizers if isinstance(optimizer, Optimizers) else [optimizer]


def expect_no_scheduler(optimizer: Optimizer, rank: int) -> None:
    """Raise ConfigError where a torch scheduler sets the rates, too: a schedule would overwrite what it sets, in each step."""
    if any(hasattr(one.step, "_wrapped_by_lr_sched") for one in optimizers_of(optimizer)):   # what torch's schedulers leave there
        raise ConfigError(f"rank {rank}: the learning rate has two masters, the `schedule` that was given to `prepare` and a scheduler of "
                          "torch.optim.lr_scheduler, whose rates would be overwritten. Leave one of them out")


def stand_in(plain: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> nn.Parameter:
    """A parameter like `plain` in shape, `requires_grad` and the user's attributes, without memory: one NaN (an integer is 0), expanded.

    dtype, device: those of the owner, where they are not `plain`'s
    """
    # NaN, not 0: an optimizer that computes with the values when it is built should show it.
    kept = dtype or plain.dtype
    one = torch.full((), math.nan if has_nan(kept) else 0, dtype=kept, device=device or plain.device)
    made = nn.Parameter(one.expand(plain.shape), requires_grad=plain.requires_grad)
    copy_user_attributes(made, plain)
    return made


def expect_build(build: Any) -> None:
    """Raise ConfigError unless it is a function that makes an optimizer."""
    if isinstance(build, torch.optim.Optimizer) or not callable(build):
        raise ConfigError("optimizer must be a function of the parameters, for example `lambda p: torch.optim.AdamW(p, lr=3e-4)`: "
                          "rankloom decides which tensors it updates")


def make_optimizer(build: Build, params: Mapping[str, nn.Parameter]) -> Optimizer:
    """The optimizer that the user's function makes of `params`; if that is a list, `Optimizers`.

    params: owners, or stand-ins for them
    raises: ConfigError
    """
    expect_build(build)
    made = build(list(params.values()))
    optimizers = list(made) if isinstance(made, list | tuple) else [made]
    if not optimizers or not all(hasattr(one, "param_groups") for one in optimizers):
        raise ConfigError(f"the optimizer function returned {made!r}, expected a torch optimizer or a list of them")
    if any(isinstance(one, torch.optim.LBFGS) for one in optimizers):
        raise ConfigError("LBFGS evaluates the loss many times a step and looks at all parameters at once; here the loss is evaluated "
                          "once and each rank updates its own share. Use an optimizer that treats each tensor by itself")
    if rateless := next((one for one in optimizers if any("lr" not in param_group for param_group in one.param_groups)), None):
        raise ConfigError(f"{type(rateless).__name__} has a group of parameters without a learning rate, which each step reports and a "
                          "schedule sets: keep it there as torch's do, `super().__init__(params, {'lr': lr})`, and read `group['lr']`")
    for one in optimizers:
        if inner := next((name for name, held in vars(one).items() if isinstance(held, torch.optim.Optimizer)), None):
            warnings.warn(f"{type(one).__name__} has another optimizer in it (`{inner}`): it trains, but checkpoints and "
                          "`full_state_dict` keep the state of the outer one only", stacklevel=2)
    names = {id(param): name for name, param in params.items()}
    updated = Counter(names.get(id(param)) for one in optimizers for param_group in one.param_groups for param in param_group["params"])
    if None in updated:
        raise ConfigError("the optimizer updates tensors that it was not given; build it from the parameters it is called with")
    if twice := [name for name, times in updated.items() if times > 1]:
        raise ConfigError(f"{', '.join(map(str, twice))}: updated by more than one optimizer; give each parameter to one of them")
    return optimizers[0] if len(optimizers) == 1 else Optimizers(optimizers)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether updating slices gives the same as updating whole tensors.

    Known for torch's own optimizers and for subclasses that keep their `step` (LARS may be derived from SGD, with another). Any other
    class says so with an attribute `elementwise = True`; else it gets whole tensors, which is right as long as it treats each by itself.
    """
    base = _base_of_torch(optimizer)
    return bool(getattr(optimizer, "elementwise", base is not None and _steps_as(optimizer, base)))


def keeps_shapes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the tensors of its state have the shapes of the parameters. That of other optimizers may have any shape."""
    return is_elementwise(optimizer) or isinstance(optimizer, torch.optim.Muon)


def needed_state(optimizer: torch.optim.Optimizer) -> set[str]:
    """Keys that every state of a parameter must have for the optimizer's next step; empty where that is not known."""
    base = _base_of_torch(optimizer)
    return ELEMENTWISE[base] if base is not None and _steps_as(optimizer, base) else set()


def fits(value: Any, *shapes: torch.Size) -> bool:
    """Whether a value of a parameter's state has one of these shapes; a single number, or what is no tensor, always fits."""
    return not isinstance(value, Tensor) or value.numel() <= 1 or value.shape in shapes


def takes_factor(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step, a fused one, can scale gradients by a factor or skip itself, and no code of the user's would notice: there are no
    hooks, which would read unscaled gradients or run after a skipped step, and `step` is not overridden."""
    base = _base_of_torch(optimizer)
    return (getattr(optimizer, "_step_supports_amp_scaling", False) and not _has_hooks(optimizer) and not _has_global_hooks()
            and (base is None or _steps_as(optimizer, base)))


def _base_of_torch(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    return next((base for base in type(optimizer).__mro__ if base in ELEMENTWISE), None)


def _steps_as(optimizer: torch.optim.Optimizer, base: type[torch.optim.Optimizer]) -> bool:
    return unwrap(type(optimizer).step) is unwrap(base.step)   # torch wraps the steps of optimizers that have been made


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return any(getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))


def _has_global_hooks() -> bool:
    """Whether the user has registered hooks for the steps of all optimizers; rankloom has some too, which look at no gradient."""
    hooks = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    return any(not getattr(hook, "__module__", "").startswith("rankloom.") for hook in hooks)


def needs_whole_matrices(optimizer: Optimizer, params: Mapping[str, nn.Parameter]) -> set[str]:
    """The names of the `params` that must not be cut: their optimizer is not elementwise (Muon, Adafactor), or does not say so and has
    hooks, which may look at whole tensors (clip each, bound the norm of each).

    params: those the optimizer was built from, by name
    """
    names = {id(param): name for name, param in params.items()}
    return {names[id(param)] for one in optimizers_of(optimizer)
            if not is_elementwise(one) or (_has_hooks(one) and not hasattr(one, "elementwise"))
            for param_group in one.param_groups for param in param_group["params"]}


@torch.no_grad()
def give_owners(optimizer: Optimizer, stand_ins: Mapping[str, nn.Parameter],
                owners: Mapping[str, nn.Parameter], slices: Mapping[str, ParameterSlice]) -> None:
    """Turn the stand-ins that `optimizer` was built from into the owners: they become views of the same memory, and take their places.

    Not the other way round: hooks, wrappers and an optimizer's own lists refer to what the optimizer's function was given.
    State that exists from the start (Adagrad) is whole until now, and is cut to the slices. So is a plain optimizer's state that is
    loaded later, by `optimizer.load_state_dict`. Empty owners stay in their groups; torch skips parameters without a gradient.

    raises: ConfigError for state that is neither a whole parameter's nor a slice's
    """
    names = {id(param): name for name, param in stand_ins.items()}
    for name in needs_whole_matrices(optimizer, stand_ins):
        assert slices[name].is_whole or slices[name].is_empty, f"{name} is cut, but its optimizer needs it whole"
    for one in optimizers_of(optimizer):
        built = {names[id(param)]: one.state.pop(param) for param in [*one.state] if id(param) in names}   # it may have other state, too
        one.state.update({stand_ins[name]: held for name, held in _cut_states(built, owners, slices, keeps_shapes(one)).items()})
        if isinstance(one, torch.optim.Optimizer):
            one.register_load_state_dict_pre_hook(partial(_cut_loaded, stand_ins, slices))
    for name, param in stand_ins.items():
        param.data = owners[name].data


def _cut_loaded(owners: Mapping[str, nn.Parameter], slices: Mapping[str, ParameterSlice], optimizer: torch.optim.Optimizer,
                loaded: dict[str, Any]) -> dict[str, Any]:
    """What `optimizer.load_state_dict` shall load in place of `loaded`, which may be a plain optimizer's."""
    names = {id(owner): name for name, owner in owners.items()}
    numbers = [number for param_group in loaded["param_groups"] for number in param_group["params"]]
    updated = [names[id(param)] for param_group in optimizer.param_groups for param in param_group["params"]]
    number_of = dict(zip(updated, numbers))   # where they are not equally many, torch raises an error
    states = {name: loaded["state"][number] for name, number in number_of.items() if number in loaded["state"]}
    cut = _cut_states(states, owners, slices, keeps_shapes(optimizer))
    of_none = {key: held for key, held in loaded["state"].items() if key not in numbers}   # what belongs to no parameter
    return loaded | {"state": of_none | {number_of[name]: held for name, held in cut.items()}}


def _cut_states(states: Mapping[str, Mapping[str, Any]], owners: Mapping[str, nn.Parameter], slices: Mapping[str, ParameterSlice],
                like_params: bool) -> dict[str, dict[str, Any]]:
    """The states of parameters, by name, cut to the slices; a rank has none of an empty slice. A state that is cut already stays so.

    like_params: tensors of the state must have a parameter's shape, or that of its slice
    """
    counters = counter_keys(states, slices)
    for name, key, value in ((name, key, value) for name, held in states.items() for key, value in held.items()):
        if like_params and not fits(value, slices[name].shape, owners[name].shape):
            raise ConfigError(f"the optimizer's state {key!r} of {name} has the shape {list(value.shape)}, expected "
                              f"{list(slices[name].shape)}, or this rank's slice of it, {list(owners[name].shape)}. A state that was "
                              "gathered from other ranks, or where ranks hold parts of a layer, is loaded by `engine.load_full_state_dict`")
    return {name: {key: cut_state(value, slices[name], owners[name], is_counter=key in counters) for key, value in held.items()}
            for name, held in states.items() if not slices[name].is_empty}


def counter_keys(state: Mapping[str, Mapping[str, Any]], slices: Mapping[str, ParameterSlice]) -> set[str]:
    """Keys that hold one number for a whole tensor, as "step" does. Shapes alone cannot say so for a parameter without dims.

    state: by parameter and key, whole
    """
    return {"step"} | {key for name, held in state.items() for key, value in held.items()
                       if isinstance(value, Tensor) and value.dim() == 0 and slices[name].shape}


def cut_state(value: Any, owned: ParameterSlice, owner: nn.Parameter, *, is_counter: bool) -> Any:
    """A copy of one value of a whole parameter's state, cut for the owner of `owned`."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    part = value if (is_counter and value.dim() == 0) or value.shape != owned.shape else owned.cut(value).view(owner.shape)
    return part.clone(memory_format=torch.contiguous_format)   # not the stride 0 of state made like a stand-in
