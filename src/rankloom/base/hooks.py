"""What users have hooked on modules and parameters that are about to be replaced."""

from typing import Any

from torch import nn


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
