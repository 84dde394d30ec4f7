"""Models on the meta device: built without memory, given values where and when there is memory for them.

A model that is bigger than one rank's memory is cut while it is filled: each parameter exists whole only until its unit is cut.
"""

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError
from rankloom.base.rng import stream
from rankloom.parallel.replicas import named_state
from rankloom.shard.optimizer import stand_in
from rankloom.shard.unit import Fill

_drawing = threading.Lock()   # torch's generator is one for the process; ranks may be threads of it


def initial_values(model: nn.Module, initialize: Fill | None, seed: int) -> Fill:
    """What gives each tensor of a model on the meta device its values, by name: the user's function, or the modules' own.

    Tensors that are not on the meta device keep theirs.
    raises: ConfigError when there is neither
    """
    there = {name: tensor.detach() for name, tensor in named_state(model) if not tensor.is_meta}
    homes = {name: (module, key) for prefix, module in model.named_modules() for key in (*module._parameters, *module._buffers)
             for name in [f"{prefix}.{key}" if prefix else key]}
    for name, (module, _) in homes.items():
        if initialize is None and name not in there and not callable(getattr(module, "reset_parameters", None)):
            raise ConfigError(f"{name} is on the meta device, and its module {type(module).__name__} has no reset_parameters(); "
                              "give `initialize`, a function of (name, tensor) that fills the tensor in place")

    def fill(name: str, tensor: Tensor) -> None:
        module, key = homes[name]
        if name in there:
            tensor.copy_(there[name])
        elif initialize is not None:
            initialize(name, tensor)
        else:
            tensor.copy_(_reset(module, key, tensor, stream(seed, "init", name.rpartition(".")[0]).initial_seed()))

    return fill


def _reset(module: nn.Module, key: str, like: Tensor, seed: int) -> Tensor:
    """One tensor of what `module.reset_parameters()` makes, the module left as it was; the same draw for all its tensors."""
    params, buffers = dict(module._parameters), dict(module._buffers)
    kinds = {name: (t.shape, like.dtype if t.is_floating_point() and like.is_floating_point() else t.dtype)
             for name, t in (params | buffers).items() if t is not None}
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % (1 << 63))
        try:
            for name, (shape, dtype) in kinds.items():
                fresh = torch.zeros(shape, dtype=dtype)
                holder = module._parameters if name in params else module._buffers
                holder[name] = nn.Parameter(fresh) if name in params else fresh   # type: ignore[assignment]
            module.reset_parameters()   # type: ignore[operator]
            return (module._parameters.get(key) if key in params else module._buffers[key]).detach()   # type: ignore[union-attr]
        finally:
            module._parameters.update(params)
            module._buffers.update(buffers)


def put_stand_ins(model: nn.Module, fill: Fill, device: torch.device) -> None:
    """Replace parameters on the meta device by stand-ins that have a shape and no memory; buffers get memory and values."""
    _replace(model, lambda name, param: stand_in(param, device=device), fill, device)
    model.to(device)   # what was not on the meta device


def fill_whole(model: nn.Module, fill: Fill, device: torch.device) -> None:
    """Give all parameters and buffers on the meta device memory and values."""

    def filled(name: str, param: nn.Parameter) -> nn.Parameter:
        values = torch.empty(param.shape, dtype=param.dtype, device=device)
        with torch.no_grad():
            fill(name, values)
        return nn.Parameter(values, requires_grad=param.requires_grad)

    _replace(model, filled, fill, device)
    model.to(device)


@torch.no_grad()
def _replace(model: nn.Module, new: Callable[[str, nn.Parameter], nn.Parameter], fill: Fill, device: torch.device) -> None:
    names = {id(param): name for name, param in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}   # a tied parameter stays tied
    for prefix, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None and param.is_meta:
                made.setdefault(id(param), new(names[id(param)], param))
                module._parameters[key] = made[id(param)]
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
                fill(f"{prefix}.{key}" if prefix else key, module._buffers[key])   # type: ignore[arg-type]
