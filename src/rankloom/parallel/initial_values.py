"""Models on the meta device: built without memory, and given values once they are cut.

    InitialValues    fills a whole tensor, by its name in the plain model; made before the model is split
    InitialParts     fills a rank's part: the first rank makes the whole tensor and broadcasts it, every rank cuts its part out
    put_stand_ins    replaces parameters by stand-ins, which have a shape but no memory until units (shard/unit.py) allocate it
    give_memory      allocates what is in no unit: buffers, and parameters that stay whole

So a model may be larger than one rank's memory: a tensor is whole only until a rank has taken its part.
"""

import math
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError
from rankloom.base.names import full_name
from rankloom.base.rng import stream
from rankloom.base.tensors import digest, has_nan
from rankloom.parallel.model_split import ModelSplit
from rankloom.parallel.replicas.equal_start import named_state
from rankloom.shard.optimizer import stand_in
from rankloom.shard.unit import Fill
from rankloom.world.group import Group

SHOWN = 5                      # names in an error
_drawing = threading.Lock()   # ranks may be threads, and torch's generator is one for the whole process


class InitialValues:
    """Fills whole tensors of a model on the meta device, by name: with the user's function, or the modules' `reset_parameters`.

    Make it before the model is split. Tensors that are not on the meta device keep their values. A tied parameter is always filled under
    the first of its names.
    option: the function's name in errors
    raises: ConfigError when there is neither a function nor a `reset_parameters` for some tensor
    """

    def __init__(self, model: nn.Module, initialize: Fill | None, seed: int, option: str = "initialize"):
        self.initialize, self.seed, self._option = initialize, seed, f"`{option}`"
        self.problems: list[str] = []
        self._unfilled: list[str] = []
        self._first_name: dict[str, str] = {}   # of the tensor that has this name
        self._homes: dict[str, tuple[nn.Module, str]] = {}
        seen: dict[int, str] = {}   # id of a tensor -> the first of its names
        twins = _twins(model)
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    name = full_name(prefix, key)
                    self._first_name[name] = seen.setdefault(id(tensor), name)
                    self._homes[name] = twins[module], key
        self._given = {name: tensor.detach() for name, tensor in named_state(model) if not tensor.is_meta}
        for name, (module, _) in self._homes.items():
            if initialize is None and self._first_name[name] not in self._given and not callable(getattr(module, "reset_parameters", None)):
                raise ConfigError(f"{name} is on the meta device, and its module {type(module).__name__} has no reset_parameters(); "
                                  "give `initialize`, a function of (name, tensor) that fills the tensor in place")

    def __call__(self, name: str, whole: Tensor) -> None:
        """Fill a tensor in place. `problem` collects what the user's function does wrong."""
        name = self._first_name[name]
        if name in self._given:
            whole.copy_(self._given[name])
        elif self.initialize is not None:
            self._fill_by_user(self.initialize, name, whole)
        else:
            module, key = self._homes[name]
            whole.copy_(_reset(module, key, whole, stream(self.seed, "init", name.rpartition(".")[0]).initial_seed()))

    @property
    def problem(self) -> str | None:
        """What was wrong so far, as one text."""
        names = ", ".join(self._unfilled[:SHOWN]) + (" ..." if len(self._unfilled) > SHOWN else "")
        missing = [f"{self._option} gave {len(self._unfilled)} tensors no values, or not all: {names}. It must write into the tensor that "
                   "it is given, for every name"] if self._unfilled else []
        return "\n".join((*self.problems, *missing)) or None

    def _fill_by_user(self, initialize: Fill, name: str, whole: Tensor) -> None:
        """Fill a tensor by the user's function; note what that does wrong."""
        whole.fill_(math.nan if has_nan(whole.dtype) else 0)   # to detect elements that are not written
        given = whole.detach()   # another tensor object: if the user resizes it, `whole` keeps its shape
        initialize(name, given)
        if (given.shape, given.dtype, given.data_ptr()) != (whole.shape, whole.dtype, whole.data_ptr()):
            self.problems.append(f"{self._option} made {name} another tensor, of shape {tuple(given.shape)} and {given.dtype}; it must "
                                 f"write into the one that it is given, of shape {tuple(whole.shape)} and {whole.dtype}")
        elif has_nan(whole.dtype) and whole.sum().isnan() and whole.isnan().any():   # the sum is quick; that of two infinities is NaN too
            self._unfilled.append(name)


class InitialParts:
    """Fills this rank's part of each tensor. All ranks hold parts of one whole, which the first rank makes.

    make:   fills whole tensors
    groups: a tensor is broadcast along each group in turn. The rank that is 0 in all of them makes it; after the last all ranks have it
    split:  how the model is split over them
    shared: tensors that several stages of a pipeline have and fill; `problem` compares their values
    sent:   each whole tensor, by broadcast
    memory: one whole tensor, and the part that is taken out of it
    """

    def __init__(self, make: InitialValues, *groups: Group, split: ModelSplit):
        self.make, self.groups, self.split = make, groups, split
        self.shared, self._digests = frozenset[str](), dict[str, str]()

    @torch.no_grad()
    def __call__(self, name: str, part: Tensor) -> None:
        """Fill this rank's part of a parameter, or a whole buffer, in place. A collective."""
        shape = self.split.whole_shape(name, part.shape)
        whole = part if shape == part.shape else part.new_empty(shape)
        if not any(group.rank for group in self.groups):
            self.make(name, whole)
        for group in self.groups:
            group.broadcast(whole, label=f"initial {name}")
        if whole is not part:
            self.split.cut_into(part, name, whole)
        if name in self.shared:
            self._digests[name] = digest(part)

    def problem(self, stages: Group) -> str | None:
        """What is wrong with the values, or None. A collective."""
        everyone = stages.all_gather_object(self._digests, label="values of tied parameters")
        differ = [name for name in sorted(self.shared) if len({digests[name] for digests in everyone if name in digests}) > 1]
        tied = [f"{', '.join(differ)}: `initialize` gave other values in another stage of the pipeline, but these are one parameter; "
                "what it writes must follow from the name"] if differ else []
        return "\n".join(filter(None, (self.make.problem, *tied))) or None


def _twins(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Each module as it is now, as cutting the model will change its attributes; all tensors on the meta device.

    What the `reset_parameters` of one writes to those inside of it, or asks them to do, is lost: each fills its own tensors.
    """
    twins = {module: _copy(module) for module in model.modules()}
    for twin in twins.values():
        vars(twin)["_modules"] = {key: None if child is None else twins[child] for key, child in twin._modules.items()}
        for held in (twin._parameters, twin._buffers):
            held.update({key: tensor.detach().to("meta").requires_grad_(tensor.requires_grad)   # type: ignore[misc]
                         for key, tensor in held.items() if tensor is not None and not tensor.is_meta})
    return twins


def _copy(module: nn.Module) -> nn.Module:
    """The module, with the same tensors."""
    twin = object.__new__(type(module))
    vars(twin).update(vars(module) | {"_parameters": dict(module._parameters), "_buffers": dict(module._buffers)})
    return twin


def _reset(module: nn.Module, key: str, like: Tensor, seed: int) -> Tensor:
    """One tensor of what `module.reset_parameters()` makes, on a copy. The same seed makes all tensors of a module agree."""
    twin = _copy(module)
    for held in (twin._parameters, twin._buffers):
        for name, tensor in held.items():
            if tensor is not None:
                dtype = like.dtype if tensor.is_floating_point() and like.is_floating_point() else tensor.dtype
                fresh = torch.zeros(tensor.shape, dtype=dtype, device="cpu")
                held[name] = nn.Parameter(fresh, tensor.requires_grad) if held is twin._parameters else fresh   # type: ignore[assignment]
    with _drawing, torch.random.fork_rng(devices=[]), torch.device("cpu"):   # what it draws elsewhere would have another seed
        torch.default_generator.manual_seed(seed % (1 << 63))   # not `torch.manual_seed`, which seeds all GPUs too
        twin.reset_parameters()   # type: ignore[operator]
    return (twin._parameters[key] if key in twin._parameters else twin._buffers[key]).detach()   # type: ignore[union-attr]


def put_stand_ins(model: nn.Module, device: torch.device) -> None:
    """Replace parameters on the meta device by stand-ins without memory; move all other tensors to `device`."""
    made = {param: _hooked(stand_in(param, device=device), param) for param in model.parameters() if param.is_meta}   # ties are kept
    for module in model.modules():
        module._parameters.update({key: made[param] for key, param in module._parameters.items() if param is not None and param in made})
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))   # not `to`: buffers may still be on it


def _hooked(stand_in: nn.Parameter, param: nn.Parameter) -> nn.Parameter:
    """`stand_in`, with the hooks that tensor parallel has put on `param`."""
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(stand_in, hooks, getattr(param, hooks))
    return stand_in


@torch.no_grad()
def give_memory(model: nn.Module, fill: Fill, device: torch.device, wanted: Callable[[nn.Parameter], bool]) -> None:
    """Give memory and values to all buffers, and to the stand-ins that are `wanted`. A collective of all ranks that fill."""
    made = {buffer: torch.empty(buffer.shape, dtype=buffer.dtype, device=device) if buffer.is_meta else buffer
            for buffer in model.buffers()}   # ties are kept
    for name, buffer in model.named_buffers():
        fill(name, made[buffer])
    for module in model.modules():
        module._buffers.update({key: made[buffer] for key, buffer in module._buffers.items() if buffer is not None})
    for name, param in model.named_parameters():
        if wanted(param):
            values = torch.empty(param.shape, dtype=param.dtype, device=device)
            fill(name, values)
            param.data = values
