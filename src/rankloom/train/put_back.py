"""A forward that belongs to no step: what it changes in the model is put back.

Before the first step the loss is called to see whether it is a sum (train/diagnose.py). Running statistics, a hidden state that a module
keeps from step to step, or a queue of features must not see that.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.tensors import bytes_of
from rankloom.train.draws import OF_EVERY_MODULE, generators_put_back

CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)


@contextmanager
def state_put_back(model: nn.Module) -> Iterator[None]:
    """Restore buffers, frozen parameters and attributes of modules afterwards: their generators, tensors and containers too.

    Frozen parameters only where they are few: see `untrained`. What modules of another model keep is not restored.
    """
    held = [(module._buffers, dict(module._buffers)) for module in model.modules() if isinstance(module._buffers, dict)]   # not TorchScript
    attributes = [(module, _attributes(module)) for module in model.modules()]
    contents = [(value, _flat(value)) for _, own in attributes for value in own.values() if type(value) in CONTAINERS]
    tensors = {id(kept): kept for kept in (*(kept for _, kept in untrained(model)), *_plain_tensors(attributes))}
    values = [(kept, kept.detach().clone()) for kept in tensors.values()]
    try:
        with generators_put_back(model):
            yield
    finally:
        for now, before in held:
            now.clear()
            now.update(before)
        for module, own in attributes:
            for name in _attributes(module).keys() - own.keys():
                del vars(module)[name]
            vars(module).update(own)
        for value, items in contents:
            _refill(value, items)
        for tensor, old in values:
            if tensor.shape != old.shape or tensor.dtype != old.dtype:   # resized, or replaced through `.data`
                tensor.data = old
            elif not same_bits(tensor, old):   # a write, even of equal values, would look like a change
                tensor.detach().copy_(old)


def untrained(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and frozen parameters that have memory here, such as those of a teacher that follows a student.

    These only if they are no more than the trained ones, whose gradients will need as much memory as copies of them: not a large model
    around a small adapter.
    """
    yield from ((name, buffer) for name, buffer in model.named_buffers() if buffer.layout is torch.strided)
    frozen = {name: param for name, param in model.named_parameters() if not param.requires_grad and param.untyped_storage().nbytes()}
    if sum(param.nbytes for param in frozen.values()) <= sum(param.nbytes for param in model.parameters() if param.requires_grad):
        yield from frozen.items()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape are equal, NaN and the sign of 0 included."""
    return one.dtype == other.dtype and torch.equal(bytes_of(one), bytes_of(other))


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE and name != "training"}


def _plain_tensors(attributes: list[tuple[nn.Module, dict[str, Any]]]) -> Iterator[Tensor]:
    """Tensors in attributes, but for those that share memory with parameters: these come and go."""
    params = {param.untyped_storage()._cdata for module, _ in attributes for param in module._parameters.values() if param is not None}
    for _, own in attributes:
        yield from (value for value in own.values() if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
                    and value.layout is torch.strided and value.untyped_storage()._cdata not in params)


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
