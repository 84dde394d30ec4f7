"""Debug mode: every activation of a split model carries a tag, which every module that reads it checks. Without debug mode: no hooks.

A tag is an attribute of a tensor: its layout over the tensor axis, and the name of what made it (tags.py). compare.py compares.

    declared   a layer that the plan names declares what it reads and gives (styles.py)
    derived    the layout of any other function's result follows from its operands (`joined` in base/layout.py)
    compared   before and after every module: a whole tensor has the same bits on all ranks, a split one the same shape. In backward the
               same holds for the gradient of a whole tensor, and of a whole parameter, unless that is summed later

Tags follow from the program, so all ranks that run one program raise the same error. Comparing bits is a collective.
An activation that you move by hand, and not by `redistribute`, needs a call of `tag`.

What it cannot see:
- results of numpy, of compiled graphs and of x[...] = y: they have no tag, and are taken to be what their reader expects; bits and widths
  are compared all the same
- a change of meaning: a mean over split features still counts as split; it is an error only where a whole tensor is read. What that
  changes in the result of a block is found behind it (same_function.py)
- latents and rotated keys, one tensor until a forward splits it (mla_kv_a_proj), have no tag either
- functions that run outside of a call of the model, and inputs of modules that were added after the cut
- errors that are the same on all ranks, and errors along other axes than tensor, where ranks differ by design
Rounding counts as an error: on a GPU, kernels that add in no fixed order need torch.use_deterministic_algorithms.

Price: a message of 8 bytes to each rank for every tensor before and after a module, and a pass over its elements.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from rankloom.base.errors import ConfigError, ShapeMismatch
from rankloom.base.layout import Layout, joined
from rankloom.base.names import full_name
from rankloom.base.tensors import version_of
from rankloom.parallel.tensor.compare import expect_alike
from rankloom.parallel.tensor.holding import Holding, holdings
from rankloom.parallel.tensor.moves import AXIS, BY_WIDTH, PARTIAL, WHOLE
from rankloom.parallel.tensor.tags import Ends, Tag, ends_of, tag, tag_of
from rankloom.world.group import Group

ALIKE = Layout.parse("[...]")               # a parameter that every rank holds whole
GRAD_PARTIAL_HERE = Layout.parse("[...] -tensor")  # the same, of which each rank has a term of the gradient
_UNSEEN = "rankloom_unseen"   # attribute of a tensor without a tag that is no constant: without gradients, there is no other sign
_ADDS = ("add", "add_", "__iadd__", "linear")   # functions that add their operands; linear its bias
_ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)

# (actual state, expected state) -> advice. States as in base/layout.py: "" whole, "+" partial sum, "-" whole with a gradient that is a
# partial sum, or the name of the dim that is cut.
_GATHER = "end the split features with a rowwise layer, or gather them with colwise_rep"
_ADVICE = {
    ("width", ""): _GATHER,
    ("width", "-"): _GATHER,
    ("tokens", ""): "gather the tokens by a sequence_parallel norm, or by sequence_parallel_rep before layers that are not split",
    ("tokens", "-"): "name the norm before it sequence_parallel, which gathers the tokens",
    ("+", ""): "each rank has one term of a sum; call the rowwise layer itself, which adds them up",
    ("-", ""): "split layers were to read it, whose gradients are added up; say sequence_parallel_rep for the norm before it",
    ("", "-"): "its gradient would not be summed; say sequence_parallel for the norm before it",
    ("", "width"): "say rowwise_rep, which takes this rank's features of a whole input",
    ("", "tokens"): "nothing has split the tokens before it; say sequence_split for the first module that is to have some of them",
}


def watch(model: nn.Module, group: Group) -> None:
    """From now on every call of `model`, or of a module in it, is checked as the head of this file says."""
    watcher = _Watch(model, group)
    for name, module in model.named_modules():
        module.register_forward_pre_hook(partial(watcher.enter, name), with_kwargs=True, prepend=True)
        module.register_forward_hook(partial(watcher.leave, name), always_call=True)


@contextmanager
def unwatched() -> Iterator[None]:
    """A context for calls of copies in the middle of a watched call: no layout is derived inside."""
    watchers = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, _Watch)]
    for watcher in watchers:
        watcher.running.append(("", True))
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.running.pop()


class _Watch(TorchFunctionMode):
    """Hooks before and after every module, and, while a call of the model runs, a hook on every torch function."""

    def __init__(self, model: nn.Module, group: Group):
        super().__init__()
        self.model, self.group = model, group
        self.running: list[tuple[str, bool]] = []   # modules, outermost first; True: its output is declared, so derive nothing inside

    # ------------------------------------------------------------------ the ends of modules

    @torch.compiler.disable
    def enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a module: check its inputs."""
        ends, given, what = ends_of(module), list(_floats((args, kwargs))), f"input of {name or 'the model'}"
        if not self.running:
            self._learn_parameters(module, name)
            self.__enter__()
        self.running.append((name, ends.gives is not None))
        if module is self.model:
            self._take_as(given, WHOLE, "the caller")
        if ends.reads and given:
            self._expect(given[0], ends.reads, what)
            self._expect_width(given[0], ends, what)
        for x in given:
            self._compare(x, what)

    @torch.compiler.disable
    def leave(self, name: str, module: nn.Module, _args: Any, output: Any = None) -> None:
        """After a module: check its output. One that raised has none."""
        if name not in (running for running, _ in self.running):
            return
        while self.running.pop()[0] != name:   # modules inside that raised may not have left
            pass
        if not self.running:
            self.__exit__(None, None, None)
        given, what = list(_floats(output)), f"output of {name or 'the model'}"
        if gives := ends_of(module).gives:
            for x in given:
                tag(x, gives, what)
        for x in given:
            if module is self.model:
                self._expect(x, WHOLE, what)
            self._compare(x, what)

    def _learn_parameters(self, module: nn.Module, prefix: str) -> None:
        """Tag the parameters that have no tag yet: at the first call all, later those of a copied model."""
        held = holdings(module)
        for name, param in module.named_parameters():
            if tag_of(param) is None:
                full = full_name(prefix, name)
                tag(param, _layout_of(held[name]), full)
                self._compare_gradient(param, f"gradient of {full}")

    # ------------------------------------------------------------------ between the ends

    @torch.compiler.disable
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = list(_floats((args, kwargs)))
        layout = None if self.running[-1][1] else self._derive(func, operands)
        result = func(*args, **kwargs)
        if layout:
            self._take_as(_floats(result), layout, f"{_name(func)} in {self.running[-1][0] or 'the model'}", anew=True)
        elif not _is_new(func) and any(tag_of(x) or _is_unseen(x) for x in operands):
            for x in _floats((args[0], result) if _name(func) == "__setitem__" else result):
                vars(x)[_UNSEEN] = True
        return result

    def _derive(self, func: Any, operands: list[Tensor]) -> Layout | None:
        """The layout of the result of `func`; None where its operands do not determine it."""
        if _name(func).endswith("_as"):   # only shape or dtype of the other operand is used
            operands = operands[:1]
        tags = [(x, known) for x in operands if (known := tag_of(x))]
        if not tags or _is_new(func) or any(map(_is_unseen, operands)):
            return None
        where = self.group.where(f"{_name(func)} in {self.running[-1][0] or 'the model'}")
        if func in _ATTENTION and tags[0][1].layout.state(AXIS) == "tokens":
            raise ConfigError(f"{where} attends to this rank's tokens only, for its input, {tags[0][1].name}, is {tags[0][1].layout}; "
                              f"{_ADVICE['tokens', '']}")
        layouts = [known.layout for x, known in tags]
        if func is F.linear and _is_cut_parameter(operands[1]):
            layout = BY_WIDTH if tag_of(operands[1]).layout.state(AXIS) == "out" else PARTIAL   # type: ignore[union-attr]
        elif any(_is_cut_parameter(x) for x, _ in tags):
            return None
        else:
            layout = joined(layouts, AXIS, where)
        if layout.state(AXIS) not in ("", "+"):
            self._expect_no_terms(tags, layout, where)
        elif layout.state(AXIS) == "+" and _name(func) in _ADDS:
            self._expect_terms(tags[1:] if func is F.linear else tags, where)
        return layout

    def _expect_no_terms(self, tags: list[tuple[Tensor, Tag]], layout: Layout, where: str) -> None:
        """Raise where a whole tensor goes into a split result: each rank gets one term of its gradient, and nothing sums them."""
        for x, known in tags:
            if torch.is_grad_enabled() and x.requires_grad and known.layout.state(AXIS) == "":
                raise ConfigError(
                    f"{where} reads {known.name}, which is {known.layout}, whole, for a result that is {layout}: each rank would have "
                    "one term of its gradient, and nothing would sum them. In the plan say sequence_parallel for a norm between split "
                    "tokens, sequence_parallel_rep for one before layers that are not split, replicated_with_grad_allreduce for another "
                    "module that is whole")

    def _expect_terms(self, tags: list[tuple[Tensor, Tag]], where: str) -> None:
        """Raise where a whole tensor is added to a term of a sum: every rank adds it, and the sum has it that often."""
        for _, known in tags:
            if known.layout.state(AXIS) == "":
                raise ConfigError(f"{where} adds {known.name}, which is {known.layout}, whole, to one term of a sum over the ranks, which "
                                  f"would have it {self.group.size} times: add it behind the sum")

    # ------------------------------------------------------------------ checks

    def _take_as(self, tensors: Any, layout: Layout, name: str, *, anew: bool = False) -> None:
        """Tag the tensors that have no tag yet; with `anew` also those whose tag has another layout."""
        for x in tensors:
            known = tag_of(x)
            if known is None or (anew and known.layout != layout):
                tag(x, layout, name)

    def _expect(self, x: Tensor, layout: Layout, what: str) -> None:
        """Raise unless the layout of `x` is `layout`; without a tag it is taken to be."""
        self._take_as([x], layout, what)
        known = tag_of(x)
        assert known, "it has a tag now"
        is_so, should = known.layout.state(AXIS), layout.state(AXIS)
        if is_so != should:
            advice = _ADVICE.get((is_so, should), "docs/tensor.md says what the layers of a plan read and give")
            raise ConfigError(f"{self.group.where(what)}: a tensor of shape {tuple(x.shape)}, from {known.name}, is {known.layout}; "
                              f"expected {layout}: {advice}")

    def _expect_width(self, x: Tensor, ends: Ends, what: str) -> None:
        if ends.width is not None and x.shape[-1] != ends.width:
            raise ShapeMismatch(f"{self.group.where(what)}: a tensor of shape {tuple(x.shape)}; expected {ends.reads}, with {ends.width} "
                                f"features on each of {self.group.size} ranks. Is what comes before it split as the plan says?")

    def _compare(self, x: Tensor, what: str) -> None:
        """Compare with the other ranks, unless that was done since `x` was last written."""
        known = tag_of(x)
        if known is None or known.compared == version_of(x) or isinstance(x, nn.Parameter):
            return
        expect_alike(x, known.layout, self.group, what)
        known.compared = version_of(x)
        if torch.is_grad_enabled():
            self._compare_gradient(x, f"gradient of the {what}")

    def _compare_gradient(self, x: Tensor, what: str) -> None:
        """Compare the gradient of `x` when backward computes it, if it must be whole."""
        known = tag_of(x)
        if known and x.requires_grad and known.layout.state(AXIS) in ("", "+"):
            layout = known.layout.gradient()
            x.register_hook(lambda gradient: expect_alike(gradient, layout, self.group, what))


def _layout_of(held: Holding) -> Layout:
    """[out/tensor, in] and the like."""
    if held.dim is None:
        return GRAD_PARTIAL_HERE if held.grad_partial else ALIKE
    names = ("out", "in") if len(held.shape) == 2 else tuple(f"dim{at}" for at in range(len(held.shape)))
    return Layout(names, tuple((AXIS,) if at == held.dim else () for at in range(len(names))))


def _is_cut_parameter(x: Tensor) -> bool:
    known = tag_of(x)
    return isinstance(x, nn.Parameter) and known is not None and known.layout.state(AXIS) not in ("", "-")


def _is_new(func: Any) -> bool:
    """Whether its result does not depend on the values of its operands."""
    return _name(func).startswith("new_") or _name(func).endswith("_like")


def _is_unseen(x: Tensor) -> bool:
    """Whether it was computed from activations by a function that debug mode has not seen, or whose result has no known layout."""
    return tag_of(x) is None and (x.grad_fn is not None or _UNSEEN in vars(x))


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _floats(tree: Any) -> Iterator[Tensor]:
    """All floating tensors of arguments or results."""
    if isinstance(tree, Tensor):
        if tree.is_floating_point():
            yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _floats(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _floats(value)
