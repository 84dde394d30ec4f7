"""Move activations from one layout to another, with the conjugate collective for the gradient.

base/layout.py derives the two collectives; this file runs them. Layouts name the last dims, so any number may come before.

All communication of forward and backward goes through `redistribute`, with two exceptions: the loss (vocabulary.py), and collectives beside
matrix products (overlap.py).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from rankloom.base.errors import ConfigError, ShapeMismatch
from rankloom.base.layout import Layout, Move, collective, conjugate
from rankloom.base.tensors import version_of
from rankloom.parallel.tensor.compare import expect_alike
from rankloom.parallel.tensor.tags import tag, tag_of
from rankloom.world.group import Group

AXIS = "tensor"
NEAR = 8   # steps of the autograd graph from a layer to the norm that it reads, at most
WHOLE = Layout.parse("[..., tokens, width]")
GRAD_PARTIAL = Layout.parse("[..., tokens, width] -tensor")     # whole, and each rank uses it for its own part of the weights
PARTIAL = Layout.parse("[..., tokens, width] +tensor")
BY_TOKENS = Layout.parse("[..., tokens/tensor, width]")
BY_WIDTH = Layout.parse("[..., tokens, width/tensor]")


@torch.compiler.disable   # communication cannot be compiled
def redistribute(x: Tensor, src: Layout, dst: Layout, group: Group, *, label: str, overwrite: bool = False, unread: bool = False) -> Tensor:
    """Turn `x` from layout `src` into `dst`; its gradient comes back by the conjugate move.

    x:         [..., tokens, width], or as `src` says, this rank's part
    overwrite: an all-reduce may use the memory of `x`, which is not read afterwards
    unread:    backward raises ConfigError if no split layer has claimed the result since: the plan may say a wrong word for a norm
    sent:      `collective(src, dst, "tensor").bill(x.nbytes, p)` forward, the conjugate's backward
    raises:    ShapeMismatch when the ranks do not divide a dim that is to be cut
    """
    if group.size == 1:
        return x
    there, back = collective(src, dst, AXIS), conjugate(src, dst, AXIS)
    if src.state(AXIS) == "+":
        _expect_term(x, group, label)
    if there.kind == back.kind == "nothing":
        return x
    moved: Tensor = _Redistribute.apply(x, _Way(there, back, src, dst, group, label), overwrite, unread)   # type: ignore[no-untyped-call]
    if group.debug:
        tag(moved, dst, label)
    return moved


def _expect_term(x: Tensor, group: Group, label: str) -> None:
    """In debug mode: raise ConfigError when `x`, which is to be added up, is known to be whole."""
    if (known := tag_of(x)) and known.layout.state(AXIS) == "":
        raise ConfigError(f"{group.where(label)}: a tensor of shape {tuple(x.shape)}, from {known.name}, is {known.layout}, whole on each "
                          f"rank, so its sum over them would be {group.size} times as large. Was it added up before?")


class _Way(NamedTuple):
    """A move, the conjugate move of the gradient, and the layouts before and after. Their dims have the same names."""

    there: Move
    back: Move
    src: Layout
    dst: Layout
    group: Group
    label: str


def is_watched() -> bool:
    """Whether operations are watched, as by selective recompute: it keeps products, and would miss that a sum is written over one."""
    return torch._C._len_torch_dispatch_stack() > 0


class _Redistribute(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: _Way, overwrite: bool, unread: bool) -> Tensor:
        ctx.way, ctx.unread = way, unread
        expect_alike(x, way.src, way.group, f"{way.label}: forward")
        if way.there.kind == "all_reduce" and overwrite and not is_watched() and x.is_contiguous():
            ctx.mark_dirty(x)
            return way.group.all_reduce(x, label=f"{way.label}: forward")   # type: ignore[no-any-return]
        return _carry_out(way.there, x, way, "forward")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.unread:
            raise ConfigError(f"{ctx.way.group.where(ctx.way.label)}: no split layer has read these, so all ranks have computed the same "
                              "with them, and their gradients would be added up; in the plan say sequence_parallel_rep for this norm")
        expect_alike(gradient, ctx.way.dst.gradient(), ctx.way.group, f"{ctx.way.label}: backward")
        return _carry_out(ctx.way.back, gradient, ctx.way, "backward"), None, None, None


def _gathers_for_split_layers(node: Any) -> bool:
    way = getattr(node, "way", None)
    return isinstance(way, _Way) and (way.there.kind, way.back.kind) == ("all_gather", "reduce_scatter")


@torch.compiler.disable
def claim(x: Tensor, group: Group, label: str) -> None:
    """Note, at the all-gather that `x` comes from, that a split layer reads it: each rank will have one term of its gradient.

    raises: ConfigError when x comes from no all-gather that would sum the terms
    """
    if group.size == 1 or x.grad_fn is None:
        return
    seen, nodes = False, [x.grad_fn]
    for _ in range(NEAR):   # through views, slices, dropout
        for node in nodes:
            if _gathers_for_split_layers(node):
                node.unread, seen = False, True   # type: ignore[attr-defined]
        local = [node for node in nodes if not hasattr(node, "way")]   # those with one exchange activations (overlap.py's, too)
        nodes = [before for node in local for before, _ in node.next_functions if before]
    if not seen:
        raise ConfigError(f"{group.where(label)} reads a tensor that no sequence_parallel norm has gathered, so its gradient "
                          "would not be summed over the ranks; name the norm before it in the plan")


def _carry_out(move: Move, x: Tensor, way: _Way, direction: str) -> Tensor:
    """The result of `move`, in new memory; of `nothing`, a view."""
    group, label = way.group, f"{way.label}: {direction}"
    dim = way.src.place(move.dim) if move.dim else 0
    match move.kind:
        case "all_reduce":
            return group.all_reduce(x.clone(memory_format=torch.contiguous_format), label=label)   # type: ignore[no-any-return]
        case "all_gather":
            return _with_dim_first(x, dim, lambda rows: group.all_gather(rows, label=label))
        case "reduce_scatter":
            expect_even(x.shape[dim], str(move.dim), x, group, label)
            return _with_dim_first(x, dim, lambda rows: group.reduce_scatter(rows, label=label))
        case "slice":
            expect_even(x.shape[dim], str(move.dim), x, group, label)
            return x.chunk(group.size, dim)[group.rank].clone(memory_format=torch.contiguous_format)
        case "pad":
            return _padded(x, dim, group)
        case "all_to_all":
            cut = way.src.place(str(move.to))
            expect_even(x.shape[cut], str(move.to), x, group, label)
            return _exchanged(x, dim, cut, group, label)
    return x.view_as(x)


def _with_dim_first(x: Tensor, dim: int, run: Any) -> Tensor:
    """Collectives cut and join along dim 0, so move `dim` there and back."""
    if x.shape[:dim].numel() == 1:   # moved without a copy
        flat = run(x.contiguous().view(x.shape[dim:]))
        return torch.ops.aten._unsafe_view(flat, [*x.shape[:dim], *flat.shape])   # not a view: models may add to it in place
    return run(x.movedim(dim, 0).contiguous()).movedim(0, dim).contiguous()   # type: ignore[no-any-return]


def _padded(x: Tensor, dim: int, group: Group) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= group.size
    whole = x.new_zeros(shape)
    whole.narrow(dim, group.rank * x.shape[dim], x.shape[dim]).copy_(x)
    return whole


def _exchanged(x: Tensor, joined: int, cut: int, group: Group, label: str) -> Tensor:
    """Cut `x` along one dim, exchange the pieces, and join what arrives along the other."""
    pieces = torch.stack(x.tensor_split(group.size, cut))
    came = group.all_to_all(pieces, label=label)
    return torch.cat(came.unbind(0), dim=joined)


def expect_even(length: int, dim: str, x: Tensor, group: Group, label: str) -> None:
    """Raise ShapeMismatch unless the ranks divide the `length` of a dim of `x`."""
    if length % group.size:
        raise ShapeMismatch(f"{group.where(label)}: the {length} {dim} of a tensor of shape {tuple(x.shape)} cannot be split over "
                            f"{group.size} ranks; pad to {-(-length // group.size) * group.size}")


class Entrance:
    """Where a whole activation enters the split layers of one module (queries, keys and values; gate and up).

    Each rank uses it for its own part of the weights, so its gradient is a partial sum. Layers that read the same tensor share an entrance:
    one all-reduce for all, not one a layer. It remembers the tensor until the forward of the module ends.
    """

    def __init__(self, group: Group, label: str):
        self.group, self.label = group, label
        self._seen: tuple[Tensor, int, bool] | None = None
        self._entered: Tensor | None = None

    @torch.compiler.disable
    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., width], whole -> the same, its gradient summed over the ranks.   sent: backward, an all-reduce of x"""
        now = (x, version_of(x), torch.is_grad_enabled())
        if self._entered is None or self._seen is None or self._seen[0] is not x or self._seen[1:] != now[1:]:
            self._seen, self._entered = now, self.enter(x)
        return self._entered

    def enter(self, x: Tensor) -> Tensor:
        """`x` as the layers read it."""
        return redistribute(x, WHOLE, GRAD_PARTIAL, self.group, label=self.label)

    def forget(self, *_: Any) -> None:
        """Drop the activation. A forward hook."""
        self._seen = self._entered = None

    def ends_with(self, module: nn.Module) -> "Entrance":
        """Forget after every forward of `module`, even one that raised; returns itself."""
        module.register_forward_hook(self.forget, always_call=True)
        return self
