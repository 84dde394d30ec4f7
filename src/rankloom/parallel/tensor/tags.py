"""Layouts noted on tensors and modules, for debug mode (debug.py). Without it no tensor carries a tag."""

from dataclasses import dataclass

from torch import Tensor, nn

from rankloom.base.layout import Layout

_ENDS = "rankloom_ends"   # attribute of a module: what it reads and gives


@dataclass(slots=True)
class Tag:
    """A tensor's layout, what made it, and the version of it that was last compared."""

    layout: Layout
    name: str
    compared: int | None = None


def tag(x: Tensor, layout: Layout, name: str) -> None:
    """Note the layout of `x`. name: what made it, for messages"""
    x.rankloom_tag = Tag(layout, name)   # type: ignore[attr-defined]


def tag_of(x: Tensor) -> Tag | None:
    """The tag of `x`, if it has one."""
    return getattr(x, "rankloom_tag", None)


@dataclass(frozen=True, slots=True)
class Ends:
    """The layouts that a module of the plan reads and gives. None: derived, not declared.

    width: of the last dim of what it reads, on this rank
    """

    reads: Layout | None = None
    gives: Layout | None = None
    width: int | None = None


def declare(module: nn.Module, ends: Ends) -> None:
    """Declare what `module` reads and gives."""
    module.__dict__[_ENDS] = ends


def ends_of(module: nn.Module) -> Ends:
    """What `module` reads and gives, as far as it is known."""
    return module.__dict__.get(_ENDS, Ends())   # type: ignore[no-any-return]
