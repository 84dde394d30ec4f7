"""torch.compile for each block's own forward, inside everything that is wrapped around it.

Compiling a whole model would trace its hooks, and break the graph at each one that communicates. So only the innermost forward is
compiled, once for all blocks of a class; hooks, recompute and offload stay outside. The `selective` policy of recompute is compiled in:
there the compiler fuses the cheap operations that it repeats with those after them.
Read wrap.py and ../recompute.py before this file.
"""

from collections.abc import Callable
from functools import cache, partial
from inspect import ismethod
from typing import Any

import torch
from torch import nn

from rankloom.train.blocks.wrap import Wrapped, blocks_of

WRAPPED = "_orig_mod"   # the attribute of torch's wrapper that has the module


def compile_blocks(model: nn.Module, *, blocks: tuple[type[nn.Module], ...] = (), dynamic: bool | None = None,
                   backend: Any = "inductor") -> None:
    """Compile the forward, and with it the backward, of the repeated blocks of `model`. Call this after all other wrapping.

    blocks:  their classes; left out: modules in a list with others of their class
    dynamic: of torch.compile. False: each length has a graph of its own, so that a forward that runs again, after forwards of other
             lengths, takes the graph that it had
    backend: of torch.compile
    raises:  ConfigError when they are compiled already; torch's own error at the first forward when recompute is "selective" and a
             block does not compile to one graph
    """
    compiler = cache(partial(torch.compile, backend=backend, dynamic=dynamic))   # one function for all blocks of a class
    for block in blocks_of(model, blocks).values():
        CompiledForward(block, partial(_compiled, compiler))


def is_compiled(model: nn.Module) -> bool:
    """Whether any part of the model is compiled, by `compile_blocks` or by torch: then each new input shape costs seconds."""
    return any(isinstance(vars(module).get("forward"), CompiledForward) or getattr(module, "_compiled_call_impl", None)
               for module in model.modules())


def compiled_in_place(model: nn.Module) -> nn.Module:
    """The model without wrappers of `torch.compile(module)` around it or its modules. Each compiles itself instead, as after
    `module.compile()` with the same options. Parameters get the plain model's names.
    """
    for module in list(model.modules()):
        for key, child in module.named_children():
            if key != WRAPPED and (plain := _unwrapped(child)) is not child:
                module._modules[key] = plain
    return _unwrapped(model)


def _unwrapped(module: nn.Module) -> nn.Module:
    inner = dict(module.named_children()).get(WRAPPED)   # not `_modules`, which is no dict in a script module
    if inner is None:
        return module
    inner._compiled_call_impl = module.dynamo_ctx(inner._call_impl)   # type: ignore[assignment, operator]
    return inner


class CompiledForward(Wrapped):
    """Marks a block whose innermost forward is compiled."""

    layer = 3

    def __init__(self, block: nn.Module, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]):
        super().__init__(block)
        self.compile(compiler)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the block's own forward."""
        return self.inner(*args, **kwargs)


class WithGradients:
    """The compiled function where gradients are recorded, else the plain one: evaluation and generation have other shapes."""

    def __init__(self, plain: Callable[..., Any], compiled: Callable[..., Any]):
        self._plain, self._compiled = plain, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the plain function."""
        return (self._compiled if torch.is_grad_enabled() else self._plain)(*args, **kwargs)


def _compiled(compiler: Callable[..., Callable[..., Any]], forward: Callable[..., Any]) -> Callable[..., Any]:
    if ismethod(forward):   # compile the function and bind it anew, so that a copy of the block calls itself
        return WithGradients(forward, partial(compiler(forward.__func__), forward.__self__))
    if isinstance(forward, partial):
        return WithGradients(forward, partial(compiler(forward.func, fullgraph=True), *forward.args, **forward.keywords))
    return WithGradients(forward, compiler(forward))
