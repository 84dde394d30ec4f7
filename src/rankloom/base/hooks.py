"""What hangs on modules and parameters: hooks and attributes of the user's, which must survive a replacement, and our gradient hooks."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import UnitError

_HOOKS = frozenset(name for name in vars(nn.Module()) if "hook" in name)   # torch's own: libraries keep others under such names


def hooks_of(module: nn.Module) -> dict[str, Any]:
    """The attributes in which torch keeps a module's hooks. A module that takes them over has its hooks, and their handles still work.

    >>> layer = nn.Identity()
    >>> any(hooks_of(layer).values())
    False
    >>> handle = layer.register_forward_hook(print)
    >>> any(hooks_of(layer).values())
    True
    """
    return {name: value for name, value in vars(module).items() if name in _HOOKS}


def copy_user_attributes(to: Tensor, frm: Tensor) -> None:
    """Give the tensor that replaces `frm` the attributes that the user has set on it: optimizers may group parameters by them."""
    vars(to).update(vars(frm))


def is_hooked(param: Tensor) -> bool:
    """Whether the parameter has gradient hooks."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)


def is_hooked_by_others(param: Tensor) -> bool:
    """Whether the parameter has gradient hooks that `hook_gradient` has not made. They may do anything with the sum over all its uses."""
    after = param._post_accumulate_grad_hooks or {}
    return bool(param._backward_hooks) or not all(hasattr(hook, "waits") for hook in after.values())


def hook_gradient(param: nn.Parameter, method: Callable[..., None], *args: str | int) -> None:
    """Call `method(*args, param)` whenever backward has added to the parameter's gradient, as long as the method's object lives.

    The parameter keeps only a weak reference. Torch hides a parameter's hooks from the garbage collector: a hook that refers back to the
    parameter, as ours do, would keep it, its model and its engine alive for good.
    """
    weak = weakref.WeakMethod(method)

    def call(param: Tensor) -> None:
        if param.requires_grad and (method := weak()) is not None:   # torch calls this for one that was frozen since its forward, too
            method(*args, param)

    vars(call)["waits"] = weak
    param.register_post_accumulate_grad_hook(call)


def hook_before_others(tensors: Sequence[Tensor], call: Callable[[Tensor], None]) -> None:
    """Call `call(gradient)` when a backward comes to the first of these tensors, before the hooks that they have already.

    torch calls the hooks of a tensor in the order in which they were registered. One of them may run a backward of its own, as an implicit
    layer does, and `call` must hear of the outer backward before that.
    """
    # If a view is changed in place later, autograd rebuilds its history from its base, and never calls the view's own hook.
    hooked = [*tensors, *(tensor._base for tensor in tensors if tensor._base is not None and tensor._base.requires_grad)]
    earlier = [(hooks, key) for tensor in hooked if (hooks := tensor._backward_hooks) for key in hooks]
    torch.autograd.graph.register_multi_grad_hook(hooked, call, mode="any")
    for hooks, key in earlier:
        hooks[key] = hooks.pop(key)   # to the end


def waiting_for(param: Tensor) -> Iterator[Any]:
    """The living objects whose methods `hook_gradient` has hooked on the parameter."""
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        if (weak := getattr(hook, "waits", None)) is not None and (method := weak()) is not None:
            yield method.__self__


def landed(param: Tensor, name: str, rank: int, *, sparse: bool = False) -> Tensor:
    """`param.grad`, right after backward has added to it.

    raises: UnitError if a user's hook removed it, or if it is sparse and `sparse` is False
    """
    if param.grad is None:
        raise UnitError(f"rank {rank}: a hook has taken the gradient of {name} away before it was summed over ranks. Hooks may read or "
                        "change gradients; clear them with `optimizer.zero_grad()`, after the step")
    if param.grad.layout is not torch.strided and not sparse:
        raise UnitError(f"rank {rank}: the gradient of {name} is sparse, as of F.embedding(sparse=True), and gradients lie end to end in "
                        "memory: leave `sparse` out (at stage 0 only the touched rows of embeddings travel anyway)")
    return param.grad


class Kept(list[Any]):
    """Objects that live as long as the module whose attribute this is. A copy or a pickle of the module has none of them."""

    def __deepcopy__(self, memo: Any) -> "Kept":
        return Kept()

    def __reduce__(self) -> Any:
        return Kept, ()


def keep_with(module: nn.Module, what: Any) -> None:
    """Keep an object alive as long as a module."""
    vars(module).setdefault("_kept_by_rankloom", Kept()).append(what)


def keeps(module: nn.Module) -> bool:
    """Whether `keep_with` has given the module anything to keep."""
    return bool(vars(module).get("_kept_by_rankloom"))
