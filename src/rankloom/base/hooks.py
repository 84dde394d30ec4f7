"""Hooks on modules and parameters: those that users have made on what is about to be replaced, and ours on gradients."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn


def hooks_of(module: nn.Module) -> dict[str, Any]:
    """The attributes in which torch keeps what is hooked on a module. Who takes them over has its hooks, and their handles work on.

    >>> layer = nn.Identity()
    >>> any(hooks_of(layer).values())
    False
    >>> handle = layer.register_forward_hook(print)
    >>> any(hooks_of(layer).values())
    True
    """
    return {name: value for name, value in vars(module).items() if "hook" in name}


def is_hooked(param: nn.Parameter) -> bool:
    """Whether something waits for the parameter's gradient."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)


def hook_gradient(param: nn.Parameter, method: Callable[..., None], *args: str | int) -> None:
    """Have `method(*args, param)` called whenever backward has added to the parameter's gradient, for as long as the method's object lives.

    Torch does not show the garbage collector what hangs on a parameter: a hook that leads back to it, as ours do, would hold it, its
    model and its engine for good. So the parameter keeps no more than a weak reference.
    """
    weak = weakref.WeakMethod(method)

    def call(param: Tensor) -> None:
        if (method := weak()) is not None:
            method(*args, param)

    vars(call)["waits"] = weak
    param.register_post_accumulate_grad_hook(call)


def waiting_for(param: Tensor) -> Iterator[Any]:
    """The objects whose methods `hook_gradient` has hooked on the parameter, as long as they live."""
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        if (weak := getattr(hook, "waits", None)) is not None and (method := weak()) is not None:
            yield method.__self__


class Kept(list[Any]):
    """What lives as long as the module that it is an attribute of. A copy or a pickle of the module starts with none of it."""

    def __deepcopy__(self, memo: Any) -> "Kept":
        return Kept()

    def __reduce__(self) -> Any:
        return Kept, ()


def keep_with(module: nn.Module, what: Any) -> None:
    """Let something live as long as a module does."""
    vars(module).setdefault("_kept_by_rankloom", Kept()).append(what)


def keeps(module: nn.Module) -> bool:
    """Whether something lives as long as the module does."""
    return bool(vars(module).get("_kept_by_rankloom"))
