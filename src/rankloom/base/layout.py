"""How one tensor is laid out over the ranks of a mesh, in one line that code, errors and documents share.

    [out/tensor, in]              cut along `out` over the tensor axis, whole along `in`
    [..., width] +tensor          a partial sum: whole in shape, but every tensor rank holds one term (`partial`)
    [..., width] -tensor          whole, but its *gradient* is a partial sum: each tensor rank uses it for its own part (`grad_partial`)

A gradient is laid out like its tensor with `+` and `-` exchanged (`Layout.gradient`). Every term of a sum has the gradient of the sum; a
tensor that many ranks use has the sum of their gradients. So a pair of layouts determines the collective between them *and* that of the
gradient:

    from \\ to      whole           -axis           d/axis               +axis
    whole          nothing         nothing         slice(d)             (refused)
    -axis          (refused)       nothing         slice(d)             (refused)
    c/axis         all_gather(c)   all_gather(c)   all_to_all(c, d)     pad(c)
    +axis          all_reduce      all_reduce      reduce_scatter(d)    nothing

Pure arithmetic. `parallel/tensor/moves.py` executes it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from rankloom.base.cost import Bill, all_gather_bill, all_reduce_bill, scatter_bill
from rankloom.base.errors import ConfigError, ShapeMismatch, did_you_mean
from rankloom.base.expect import expect_type
from rankloom.base.mesh import Mesh

ANY = "..."   # any number of dims, whole; as the first dim only
_TEXT = re.compile(r"\[([^\[\]]*)\]((?:\s*[+-]\s*\w+)*)\s*")


class Span(NamedTuple):
    """Elements start..stop-1 along one dim."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Move:
    """The collective, or local operation, along one axis that turns one layout into another.

    >>> print(Move("all_to_all", "heads", "tokens"))
    all_to_all(heads, tokens)
    """

    kind: str              # nothing, slice, pad, all_gather, reduce_scatter, all_reduce, all_to_all
    dim: str | None = None
    to: str | None = None  # of an all_to_all: the dim that is cut afterwards

    def bill(self, nbytes: int, ranks: int) -> Bill:
        """What a rank sends if it starts with `nbytes` bytes."""
        match self.kind:
            case "all_reduce":
                return all_reduce_bill(nbytes, ranks)
            case "all_gather":
                return all_gather_bill(nbytes, ranks)
            case "reduce_scatter" | "all_to_all":
                return scatter_bill(nbytes, ranks)
        return Bill()

    def __str__(self) -> str:
        dims = ", ".join(dim for dim in (self.dim, self.to) if dim)
        return f"{self.kind}({dims})" if dims else self.kind


@dataclass(frozen=True, slots=True)
class Layout:
    """The names of the dims, the mesh axes that cut each, and the axes over which the tensor, or its gradient, is a partial sum.

    >>> weight = Layout.parse("[out/shard/tensor, in]")
    >>> weight.local_shape((32, 5), {"shard": 2, "tensor": 4})
    (4, 5)
    >>> weight.spans((32, 5), {"shard": 1, "tensor": 0}, {"shard": 2, "tensor": 4})
    (Span(start=16, stop=20), Span(start=0, stop=5))
    >>> print(Layout.parse("[ ..., width ]-tensor").gradient())
    [..., width] +tensor
    """

    dims: tuple[str, ...]
    cut: tuple[tuple[str, ...], ...]       # for each dim, the axes that cut it, outermost first
    partial: frozenset[str] = frozenset()        # +axis: each of its ranks holds one term of a sum
    grad_partial: frozenset[str] = frozenset()   # -axis: the same of the gradient

    def __post_init__(self) -> None:
        used = [axis for axes in self.cut for axis in axes] + sorted(self.partial) + sorted(self.grad_partial)
        known = Mesh().sizes()
        for axis in used:
            if axis not in known:
                raise ConfigError(f"layout {self}: no mesh axis {axis!r}. {did_you_mean(axis, known)}")
            if used.count(axis) > 1:
                raise ConfigError(f"layout {self}: axis {axis!r} is named twice; it can cut one dim, or be summed over, once")
        for dim in self.dims:
            if self.dims.count(dim) > 1 or not (dim.isidentifier() or dim == ANY):
                raise ConfigError(f"layout {self}: {dim!r} cannot name a dim; dims have names of their own, such as rows or width")
        if ANY in self.dims[1:] or (ANY in self.dims and self.cut[0]):
            raise ConfigError(f"layout {self}: {ANY!r} stands first, and whole; give the dim that is cut a name")

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """The layout of a line like `[rows/tensor, cols] +shard`.

        raises: ConfigError
        """
        expect_type("layout", text, str, "a line like '[rows/tensor, cols] +shard'")
        found = _TEXT.fullmatch(text.strip())
        if not found:
            raise ConfigError(f"{text!r} is not a layout; write it like '[rows/tensor, cols] +shard'")
        parts = [[word.strip() for word in dim.split("/")] for dim in found[1].split(",")] if found[1].strip() else []
        signs = re.findall(r"([+-])\s*(\w+)", found[2])
        named = {sign: [axis for s, axis in signs if s == sign] for sign in "+-"}
        for axis in {axis for axes in named.values() for axis in axes if axes.count(axis) > 1}:
            raise ConfigError(f"layout {text!r}: axis {axis!r} is named twice")
        return cls(tuple(dim for dim, *_ in parts), tuple(tuple(axes) for _, *axes in parts), frozenset(named["+"]), frozenset(named["-"]))

    def __str__(self) -> str:
        dims = ", ".join("/".join((dim, *axes)) for dim, axes in zip(self.dims, self.cut))
        signs = [f" +{axis}" for axis in sorted(self.partial)] + [f" -{axis}" for axis in sorted(self.grad_partial)]
        return f"[{dims}]" + "".join(signs)

    def gradient(self) -> "Layout":
        """The layout of the gradient of a tensor with this layout."""
        return Layout(self.dims, self.cut, partial=self.grad_partial, grad_partial=self.partial)

    def state(self, axis: str) -> str:
        """The tensor along `axis`: "" (whole), "+", "-", or the name of the dim that is cut."""
        if axis in self.partial | self.grad_partial:
            return "+" if axis in self.partial else "-"
        return next((dim for dim, axes in zip(self.dims, self.cut) if axis in axes), "")

    def place(self, dim: str) -> int:
        """The position of a dim, counted from the end (-1 is the last), so that leading dims do not matter."""
        if dim not in self.dims:
            raise ConfigError(f"layout {self} has no dim {dim!r}. {did_you_mean(dim, self.dims)}")
        return self.dims.index(dim) - len(self.dims)

    def local_shape(self, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of one rank's part of a tensor of `shape`. sizes: of the mesh axes; an axis left out has one rank.

        raises: ShapeMismatch when the ranks do not divide a dim, or for another number of dims
        """
        return tuple(span.stop - span.start for span in self.spans(shape, {}, sizes))

    def spans(self, shape: Sequence[int], coords: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[Span, ...]:
        """The elements of each dim that the rank at `coords` holds.

        raises: ShapeMismatch, as `local_shape`
        """
        return tuple(self._span(dim, length, axes, coords, sizes) for dim, length, axes in self._pairs(shape))

    def _pairs(self, shape: Sequence[int]) -> list[tuple[str, int, tuple[str, ...]]]:
        names, cut = list(self.dims), list(self.cut)
        if names and names[0] == ANY:
            more = len(shape) - len(names) + 1
            names, cut = [ANY] * more + names[1:], [()] * more + cut[1:]
        if len(names) != len(shape):
            raise ShapeMismatch(f"a tensor of shape {tuple(shape)} has {len(shape)} dims, but layout {self} names {len(self.dims)}")
        return list(zip(names, shape, cut))

    def _span(self, dim: str, length: int, axes: tuple[str, ...], coords: Mapping[str, int], sizes: Mapping[str, int]) -> Span:
        parts = prod(sizes.get(axis, 1) for axis in axes)
        if length % parts:
            ranks = " x ".join(f"{axis} {sizes.get(axis, 1)}" for axis in axes)
            raise ShapeMismatch(f"layout {self}: {dim} has {length} elements, which {ranks} = {parts} ranks do not divide; "
                                f"pad it to {-(-length // parts) * parts}")
        at = 0
        for axis in axes:
            at = at * sizes.get(axis, 1) + coords.get(axis, 0)
        return Span(at * (length // parts), (at + 1) * (length // parts))


def collective(src: Layout, dst: Layout, axis: str) -> Move:
    """The move along `axis` that turns `src` into `dst`.

    >>> go = lambda a, b: print(collective(Layout.parse(a), Layout.parse(b), "tensor"))
    >>> go("[rows/tensor, cols]", "[rows, cols]")
    all_gather(rows)
    >>> go("[rows, cols] +tensor", "[rows, cols/tensor]")
    reduce_scatter(cols)

    raises: ConfigError when there is none
    """
    _expect_one_step(src, dst, axis)
    match src.state(axis), dst.state(axis):
        case before, after if before == after:
            return Move("nothing")
        case ("" | "-"), "+":
            raise ConfigError(f"cannot turn {src} into {dst}: it is no partial sum over {axis}")
        case "-", "":
            raise ConfigError(f"cannot turn {src} into {dst}: its gradient is a partial sum over {axis}, that of a whole is not")
        case "", "-":
            return Move("nothing")
        case "+", ("" | "-"):
            return Move("all_reduce")
        case "+", dim:
            return Move("reduce_scatter", dim)
        case ("" | "-"), dim:
            return Move("slice", dim)
        case dim, "+":
            return Move("pad", dim)
        case dim, ("" | "-"):
            return Move("all_gather", dim)
        case dim, to:
            return Move("all_to_all", dim, to)


def conjugate(src: Layout, dst: Layout, axis: str) -> Move:
    """The move of the gradient in backward, for `collective(src, dst, axis)` in forward.

    >>> whole, used = Layout.parse("[..., width]"), Layout.parse("[..., width] -tensor")
    >>> print(collective(whole, used, "tensor"), conjugate(whole, used, "tensor"))
    nothing all_reduce
    """
    return collective(dst.gradient(), src.gradient(), axis)


def joined(layouts: Sequence[Layout], axis: str, where: str = "joined") -> Layout:
    """The layout along `axis` of a function's result, from those of its operands (at least one). Any other layout wins over `whole`.

    >>> whole, used, cut = map(Layout.parse, ("[..., width]", "[..., width] -tensor", "[..., width/tensor]"))
    >>> print(joined([whole, used], "tensor"), joined([cut, used], "tensor"), sep=", ")
    [..., width] -tensor, [..., width/tensor]

    raises: ConfigError, which begins with `where`, for two cuts, or a cut and a partial sum
    """
    strength = {"": 0, "-": 1}
    strongest = max(layouts, key=lambda layout: strength.get(layout.state(axis), 2))
    for other in layouts:
        if strength.get(other.state(axis), 2) == 2 and other.state(axis) != strongest.state(axis):
            raise ConfigError(f"{where} reads {strongest} together with {other}: no layout is that of the result; move one of them first")
    return strongest


def _expect_one_step(src: Layout, dst: Layout, axis: str) -> None:
    def without(layout: Layout) -> tuple[object, ...]:
        cut = tuple(tuple(a for a in axes if a != axis) for axes in layout.cut)
        return (layout.dims, cut, layout.partial - {axis}, layout.grad_partial - {axis})

    if without(src) != without(dst):
        raise ConfigError(f"{src} and {dst} differ in more than the axis {axis!r}; go one axis at a time")
    for layout in (src, dst):
        for axes in layout.cut:
            if axis in axes[:-1] and src != dst:
                raise ConfigError(f"layout {layout}: {axis!r} is not the innermost cut; move along {axes[-1]!r} first")
