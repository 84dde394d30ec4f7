"""The repeated blocks of a model, and wrappers around their `forward`.

Recompute, activation offload and compile act on the same blocks: each replaces a block's `forward` by a `Wrapped`. Module hooks on
the block, such as those that gather and free its parameters, stay outside the wrapper: they run once, and are not compiled.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn

from rankloom.base.errors import ConfigError
from rankloom.base.names import full_name
from rankloom.base.tensors import version_of
from rankloom.parallel.sections.wrapping import Policy, has_forward, may_be_a_block, repeated_blocks

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


class Wrapped:
    """Replaces a block's `forward`. `inner` is the forward that it replaced.

    raises: ConfigError when the block already has this wrapper, or one that must be outside it
    """

    layer: ClassVar[int]   # position, counted from the block outwards

    def __init__(self, block: nn.Module):
        self.block = block
        self.inner: Callable[..., Any] = block.forward
        if isinstance(self.inner, Wrapped) and self.inner.layer >= self.layer:
            raise ConfigError(f"a {type(block).__name__} has {type(self.inner).__name__} already, so {type(self).__name__} cannot be put "
                              "on it: recompute comes first, then offload_activations, then compile_blocks, each once")
        block.forward = self   # type: ignore[assignment]

    def compile(self, compiler: "Compiler") -> None:
        """Compile the innermost forward."""
        if isinstance(self.inner, Wrapped):
            self.inner.compile(compiler)
        else:
            self.inner = compiler(self.inner)


@contextmanager
def arguments_unchanged(block: nn.Module, given: Sequence[Any]) -> Iterator[None]:
    """A context for a forward that will run again: raise ConfigError if it changes a tensor that it was given in place, or is given a cache
    of keys and values."""
    if any(hasattr(value, "get_seq_length") for value in given):   # of `transformers`
        raise ConfigError(f"a {type(block).__name__} is given a cache, to which it would append a second time when it is computed again in "
                          "backward: call the model with use_cache=False, or leave recompute out")
    before = [version_of(value) if isinstance(value, Tensor) else 0 for value in given]
    yield
    for number, (value, version) in enumerate(zip(given, before)):
        if isinstance(value, Tensor) and version_of(value) != version:
            raise ConfigError(f"the forward of a {type(block).__name__} changes its argument {number}, a tensor of shape "
                              f"{list(value.shape)}, in place; a block that is computed again in backward would get it as it is then. "
                              "Write `x = x + y` in place of `x += y`, or leave recompute out")


def classes_in(units: Policy) -> tuple[type[nn.Module], ...]:
    """The module classes in the policy, which say what is a block; empty if it has none."""
    return units if isinstance(units, tuple) else (units,) if isinstance(units, type) else ()


def blocks_of(model: nn.Module, classes: tuple[type[nn.Module], ...] = ()) -> dict[str, nn.Module]:
    """Name -> block, in the model's order: the outermost modules of `classes` that have a forward; without classes, the repeated blocks.

    If no block is repeated, the single block of a list. A block in several lists counts once, under its first name.

    raises: ConfigError when the model has none
    """
    if not classes:
        named = {name: model.get_submodule(name) for name in tuple(repeated_blocks(model)) or _only_blocks(model)}
        first = {id(block): name for name, block in reversed(named.items())}
        found = {name: block for name, block in named.items() if first[id(block)] == name}
    else:
        named = {name: module for name, module in model.named_modules() if name and isinstance(module, classes) and has_forward(module)}
        found = {name: module for name, module in named.items() if not any(name.startswith(outer + ".") for outer in named)}
    if not found:
        sought = (" or ".join(kind.__name__ for kind in classes) + " with a forward" if classes else
                  "blocks that stand in a list beside others of their class, and have a forward and modules inside")
        raise ConfigError(f"{type(model).__name__} has no {sought}; name the classes of its blocks: rl.prepare(..., units=(Block,))")
    return found


def _only_blocks(model: nn.Module) -> Iterator[str]:
    """Names of the outermost modules that are alone in a list, as in a model of one layer."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        alone = isinstance(module, nn.ModuleList) and len(module) == 1 and may_be_a_block(module[0])
        if alone and not f"{name}.".startswith(inside):
            block = full_name(name, "0")
            inside += (f"{block}.",)
            yield block
