"""The repeated blocks of a model, and their `forward` replaced by one that does something around it.

Recompute, activation offload and compile act on the same blocks, and put a `Wrapped` in the place of a block's `forward`. Module
hooks on the block, such as those that gather and free its parameters, stay outside of it: they run once, and are not compiled.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from rankloom.base.errors import ConfigError

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


class Wrapped:
    """What stands in the place of a block's `forward`. `inner` is what stood there before.

    raises: ConfigError when the block has one like it, or one that must be put on later
    """

    layer: ClassVar[int]   # from the block outwards

    def __init__(self, block: nn.Module):
        self.block = block
        self.inner: Callable[..., Any] = block.forward
        if isinstance(self.inner, Wrapped) and self.inner.layer >= self.layer:
            raise ConfigError(f"a {type(block).__name__} has {type(self.inner).__name__} already, so {type(self).__name__} cannot be put "
                              "on it: recompute comes first, then offload_activations, then compile_blocks, each once")
        block.forward = self   # type: ignore[assignment]

    def compile(self, compiler: "Compiler") -> None:
        """Compile what is innermost."""
        if isinstance(self.inner, Wrapped):
            self.inner.compile(compiler)
        else:
            self.inner = compiler(self.inner)


def repeated_blocks(model: nn.Module, classes: tuple[type[nn.Module], ...] = ()) -> dict[str, nn.Module]:
    """Name -> block, in the model's order: the modules of `classes`, or with none the children of each `nn.ModuleList`.

    A block inside a block is not one of its own, and neither is a module without parameters.
    raises: ConfigError when the model has none
    """
    found: dict[str, nn.Module] = {}
    listed = {id(child) for module in model.modules() if isinstance(module, nn.ModuleList) for child in module}
    for name, module in model.named_modules():
        wanted = isinstance(module, classes) if classes else id(module) in listed
        inside = any(name.startswith(outer + ".") for outer in found)
        if wanted and name and not inside and any(True for _ in module.parameters()):
            found[name] = module
    if not found:
        sought = " or ".join(kind.__name__ for kind in classes) or "nn.ModuleList with parameters in it"
        raise ConfigError(f"{type(model).__name__} has no {sought}, so no repeated blocks; name the classes of its blocks, "
                          "for example blocks=(Block,)")
    return found
