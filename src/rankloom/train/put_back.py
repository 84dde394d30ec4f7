"""A forward that belongs to no step: what it changes in the model is put back.

Before the first step the loss is called to see whether it is a sum (train/sum_check.py). Running statistics, a hidden state that a module
keeps from step to step, or a queue of features must not see that.
"""

import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rankloom.base.tensors import bytes_of
from rankloom.parallel.replicas.guards import is_sharded
from rankloom.train.blocks.draws import OF_EVERY_MODULE, generators_put_back

CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
TABLES = ("_buffers", "_modules", *sorted(name for name in OF_EVERY_MODULE if "hooks" in name))   # of every module: also grow when called


@contextmanager
def state_put_back(model: nn.Module) -> Iterator[None]:
    """Restore modules afterwards: their buffers, hooks and attributes, with the generators, containers and tensors in these.

    Tensors, and frozen parameters, only where they are few: see `untrained`. Trained parameters where the forward writes to them (RWKV of
    `transformers` scales some in evaluation, and notes in an attribute that it did): these are copied just before. What objects of the
    user's own keep is not restored, nor what another model keeps.
    """
    tables = [(own, dict(own)) for module in model.modules() for name in TABLES if isinstance(own := vars(module).get(name), dict)]
    attributes = [(module, _attributes(module)) for module in model.modules()]
    containers, tensors = _found_in([value for _, own in attributes for value in own.values()])
    contents = [(container, _flat(container)) for container in containers]
    values = [(kept, kept.detach().clone()) for kept in _few(model, tensors)]
    written = _Written(model)
    try:
        with generators_put_back(model), written:
            yield
    finally:
        for now, before in tables:
            now.clear()
            now.update(before)
        for module, own in attributes:
            for name in _attributes(module).keys() - own.keys():
                del vars(module)[name]
            vars(module).update(own)
        for container, items in contents:
            _refill(container, items)
        for tensor, old in (*values, *written.old.items()):
            if tensor.shape != old.shape or tensor.dtype != old.dtype:   # resized, or replaced through `.data`
                tensor.data = old
            elif has_memory(tensor) and not same_bits(tensor, old):   # a write, even of equal values, would look like a change
                tensor.detach().copy_(old)


class _Written(TorchFunctionMode):
    """A context that copies a trained parameter just before something may write to it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.old: dict[nn.Parameter, Tensor] = {}
        self._trained = {id(param) for param in model.parameters() if param.requires_grad}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = kwargs or {}
        for target in (*(args[:1] if args and _may_write(func, args[0]) else ()), given.get("out")):
            for tensor in target if isinstance(target, list | tuple) else (target,):
                self._keep(tensor)
                self._keep(getattr(tensor, "_base", None))   # of a view
        return func(*args, **given)

    def _keep(self, tensor: Any) -> None:
        if id(tensor) in self._trained and tensor not in self.old and has_memory(tensor):
            self.old[tensor] = tensor.detach().clone()


def _may_write(func: Any, given: Any) -> bool:
    """Whether it may write to its first argument: `mul_` or another such function, `x *= y`, `x[...] = y`, `x.data` or `x.detach()`."""
    name = func.__self__.__name__ if func.__name__ in ("__get__", "__set__") else func.__name__
    if name == "detach":   # layers of tensor ranks read so; and writes to a sharded parameter are an error if autograd counts them
        return not is_sharded(given)
    return name in ("data", "__setitem__") or re.fullmatch(r"(?!__).*[^_]_|__i\w+__", name) is not None


def untrained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and frozen parameters that have memory here, such as those of a teacher that follows a student.

    These only if they are no more than the trained ones, whose gradients will need as much memory as copies of them: not a large model
    around a small adapter.
    """
    yield from ((name, buffer) for name, buffer in model.named_buffers() if buffer.layout is torch.strided)
    frozen = {name: param for name, param in model.named_parameters() if not param.requires_grad and has_memory(param)}
    if sum(param.nbytes for param in frozen.values()) <= sum(param.nbytes for param in model.parameters() if param.requires_grad):
        yield from frozen.items()


def has_memory(tensor: Tensor) -> bool:
    """False for a released parameter of a unit: it has nothing to put back, as a write to what is gathered is an error."""
    return tensor.untyped_storage().nbytes() > 0


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are equal, NaN and the sign of 0 included."""
    return one.dtype == other.dtype and torch.equal(bytes_of(one), bytes_of(other))


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE and name != "training"}


def _found_in(values: Iterable[Any]) -> tuple[list[Any], list[Tensor]]:
    """The containers among the values and in each other, and the plain tensors: subclasses may lack operators to copy them."""
    containers: list[Any] = []
    tensors: list[Tensor] = []
    waiting, seen = list(values), set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) in (*CONTAINERS, tuple):
            waiting += _flat(value)
            if type(value) is not tuple:   # which cannot be refilled, and need not be
                containers.append(value)
        elif type(value) is Tensor and value.layout is torch.strided and not (value.is_meta or value.is_nested or value.is_quantized):
            tensors.append(value)
    return containers, tensors


def _few(model: nn.Module, tensors: Iterable[Tensor]) -> list[Tensor]:
    """What `untrained` has, and of these tensors those that lie in no parameter, if they are no more than the trained parameters."""
    storage = lambda tensor: tensor.untyped_storage()._cdata
    taken, params = [kept for _, kept in untrained(model)], list(model.parameters())
    there = {storage(tensor) for tensor in (*params, *taken)}
    plain = {storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
    if sum(plain.values()) > sum(param.nbytes for param in params if param.requires_grad):
        return taken
    return [*taken, *(tensor for tensor in tensors if storage(tensor) not in there)]


def _flat(container: Any) -> list[Any]:
    return [*container.keys(), *container.values()] if isinstance(container, dict) else [*container]


def _refill(container: Any, items: list[Any]) -> None:
    """Give a container the items that `_flat` has read, if it has others now."""
    now = _flat(container)
    if len(now) == len(items) and all(one is other for one, other in zip(now, items)):
        return
    container.clear()
    if isinstance(container, dict):
        container.update(zip(items[:len(items) // 2], items[len(items) // 2:]))
    else:
        (container.update if isinstance(container, set) else container.extend)(items)
