"""What a rank holds of each parameter of a split model, and which gradients must still be summed over the ranks.

A parameter is cut along one dim. A rank's part is one or more spans of that dim, laid end to end: several where matrices are fused, and
padded with zeros where the ranks do not divide a vocabulary. A span is the same as another rank's where there are fewer KV heads than
ranks. A `Holding` cuts and joins any tensor shaped like the parameter (its gradient, its moments), and says which ranks hold the same
elements and whether the gradient is partial.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor, nn

from rankloom.base.errors import ConfigError, ShapeMismatch
from rankloom.base.layout import Span
from rankloom.base.names import full_name
from rankloom.base.spans import Box
from rankloom.world.group import Group

Spans = tuple[tuple[Span, ...], ...]   # of each rank
_HELD = "rankloom_holdings"            # attribute of a module: the holdings of its own parameters


@dataclass(frozen=True, slots=True)
class Holding:
    """How one parameter is cut over the ranks of the tensor axis.

    >>> one = Holding((6, 2), 3, dim=0, spans=cut_each([4, 2], 2))
    >>> one.spans[1], one.local_shape
    ((Span(start=2, stop=4), Span(start=5, stop=6)), (3, 2))
    """

    shape: tuple[int, ...]     # of the whole parameter
    length: int = 0            # of a rank's part, along `dim`, the same on every rank
    dim: int | None = None     # which is cut; None: every rank holds the whole
    spans: Spans = ()          # of `dim`, for each rank; shorter than `length` where the rest is padding
    grad_partial: bool = False   # each rank has one term of the gradient; sum each span over the ranks that hold the same elements

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of every rank's part."""
        return self.shape if self.dim is None else (*self.shape[:self.dim], self.length, *self.shape[self.dim + 1:])

    def sharers(self, rank: int, ranks: int, at: int = 0) -> tuple[int, ...]:
        """The ranks of the tensor axis that hold the same elements as `rank`, itself included: a norm counts them once.

        at: which span of the part; fused queries, keys and values are three, of which ranks may share two
        """
        if self.dim is None:
            return tuple(range(ranks))
        mine = self.spans[rank][at]
        return tuple(other for other, spans in enumerate(self.spans) if spans[at] == mine)

    def views_with_sharers(self, part: Tensor, rank: int, ranks: int) -> list[tuple[Tensor, tuple[int, ...]]]:
        """The part of `rank` in views, each with the ranks that hold the same elements."""
        own = self.spans[rank] if self.dim is not None else ()
        if len(own) < 2:   # maybe padded
            return [(part, self.sharers(rank, ranks))]
        views = part.split([stop - start for start, stop in own], self.dim)   # type: ignore[no-untyped-call]
        return [(view, self.sharers(rank, ranks, at)) for at, view in enumerate(views)]

    def holders(self, box: Box) -> int:
        """How many ranks hold a box of the whole that `boxes` returned."""
        assert self.dim is not None, "every rank holds it"
        first = box[self.dim].start
        return sum(any(start <= first < stop for start, stop in own) for own in self.spans)

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """The part of `rank`, in memory of its own.

        raises: ShapeMismatch
        """
        if whole.shape != self.shape:
            raise ShapeMismatch(f"rank {rank}: a tensor of shape {tuple(whole.shape)}, expected the whole of {self.shape}")
        return self.cut_into(whole.new_empty(self.local_shape), whole, rank)

    def cut_into(self, part: Tensor, whole: Tensor, rank: int) -> Tensor:
        """Write the part of `rank` into `part`; returns it."""
        if self.dim is None:
            return part.copy_(whole)
        at = 0
        for start, stop in self.spans[rank]:
            part.narrow(self.dim, at, stop - start).copy_(whole.narrow(self.dim, start, stop - start))
            at += stop - start
        part.narrow(self.dim, at, self.length - at).zero_()   # padding
        return part

    def boxes(self, box: Box, rank: int) -> Iterator[tuple[Box, Box]]:
        """A box of the part of `rank` -> boxes of it, and where each of them lies in the whole, without padding.

        >>> list(Holding((6,), 3, dim=0, spans=cut_each([4, 2], 2)).boxes((Span(1, 3),), rank=1))
        [((Span(start=1, stop=2),), (Span(start=3, stop=4),)), ((Span(start=2, stop=3),), (Span(start=5, stop=6),))]
        """
        if self.dim is None:
            yield box, box
            return
        at, (first, last) = 0, box[self.dim]
        for start, stop in self.spans[rank]:
            here = Span(max(first, at), min(last, at + stop - start))
            if here.start < here.stop:
                there = Span(here.start + start - at, here.stop + start - at)
                before, behind = box[:self.dim], box[self.dim + 1:]
                yield (*before, here, *behind), (*before, there, *behind)
            at += stop - start

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole, from the parts of all ranks, in rank order."""
        if self.dim is None:
            return parts[0]
        whole = parts[0].new_empty(self.shape)
        for part, spans in zip(parts, self.spans):
            at = 0
            for start, stop in spans:
                whole.narrow(self.dim, start, stop - start).copy_(part.narrow(self.dim, at, stop - start))
                at += stop - start
        return whole


def cut_each(lengths: Sequence[int], ranks: int) -> Spans:
    """Spans of matrices of `lengths`, fused end to end: every rank gets an equal part of each.

    >>> cut_each([4], 2)
    ((Span(start=0, stop=2),), (Span(start=2, stop=4),))

    raises: ShapeMismatch when one does not divide
    """
    for length in lengths:
        if length % ranks:
            raise ShapeMismatch(f"{length} does not divide by {ranks} ranks")
    starts = list(accumulate(lengths, initial=0))

    def part(rank: int, start: int, length: int) -> Span:
        each = length // ranks
        return Span(start + rank * each, start + (rank + 1) * each)

    return tuple(tuple(part(rank, start, length) for start, length in zip(starts, lengths)) for rank in range(ranks))


def cut_evenly(length: int, ranks: int, what: str, *, parts: int = 1) -> Spans:
    """Spans of `parts` fused matrices of equal size.

    raises: ConfigError that says what does not divide
    """
    if length % parts:
        raise ConfigError(f"{what}: {length} features are not {parts} fused matrices of equal size")
    try:
        return cut_each([length // parts] * parts, ranks)
    except ShapeMismatch as error:
        raise ConfigError(f"{what}: {length // parts} features do not divide by {ranks} ranks; choose a number of ranks that divides them, "
                          "or leave this layer out of the plan") from error


def cut_padded(length: int, ranks: int) -> tuple[int, Spans]:
    """Spans of equal length for all ranks, padded at the end: (length of a part, spans without padding).

    >>> cut_padded(5, 4)[1]
    ((Span(start=0, stop=2),), (Span(start=2, stop=4),), (Span(start=4, stop=5),), (Span(start=5, stop=5),))
    """
    part = -(-length // ranks)
    return part, tuple((Span(min(rank * part, length), min((rank + 1) * part, length)),) for rank in range(ranks))


def cut_shared(units: int, width: int, ranks: int) -> Spans:
    """Spans of fewer units (KV heads) than ranks: neighbours hold the same unit.

    >>> cut_shared(units=2, width=8, ranks=4)[1:3]
    ((Span(start=0, stop=8),), (Span(start=8, stop=16),))
    """
    unit_of = [rank * units // ranks for rank in range(ranks)]
    return tuple((Span(unit * width, (unit + 1) * width),) for unit in unit_of)


# ------------------------------------------------------------------ of a model


def hold(module: nn.Module, name: str, holding: Holding) -> None:
    """Note how parameter `name` of `module` is cut."""
    module.__dict__.setdefault(_HELD, {})[name] = holding


def holdings(model: nn.Module) -> dict[str, Holding]:
    """How every parameter of `model` is cut, whole ones included. Tied ones appear under each name."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            held = module.__dict__.get(_HELD, {}).get(name)
            found[full_name(prefix, name)] = held or Holding(tuple(param.shape))
    return found


def held_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Holding]]:
    """The parameters that are cut, or whose gradient is partial, with their names and holdings."""
    for prefix, module in model.named_modules():
        for name, held in module.__dict__.get(_HELD, {}).items():
            if (param := module._parameters.get(name)) is not None:
                yield full_name(prefix, name), param, held


# ------------------------------------------------------------------ gradients


@torch.no_grad()
def sum_partial_gradients(gradients: Iterable[tuple[str, Tensor]], held: Mapping[str, Holding], group: Group) -> None:
    """Sum partial gradients, in place.

    One all-reduce for all parameters that every rank holds whole (norms between split tokens), one exchange with each rank that holds the
    same KV heads. Call it once a step, after accumulation; the sum over other axes may come before or after.
    sent: 2n(p-1)/p elements of the former; n elements of the latter to each rank that shares them
    """
    parts: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
    partial = [(held[name], gradient) for name, gradient in gradients if name in held and held[name].grad_partial]
    for holding, gradient in partial:
        for view, sharers in holding.views_with_sharers(gradient, group.rank, group.size):
            if len(sharers) > 1:   # not of queries that are fused with shared keys and values: this rank has their whole gradient
                parts.setdefault((sharers, view.dtype), []).append(view)
    for (sharers, _), tensors in parts.items():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        total = _sum_among(flat, sharers, group)
        for tensor, summed in zip(tensors, total.split([prod(tensor.shape) for tensor in tensors])):
            tensor.copy_(summed.view(tensor.shape))


def _sum_among(flat: Tensor, sharers: tuple[int, ...], group: Group) -> Tensor:
    """The sum over these ranks, added in rank order, so that all get the same bits."""
    if len(sharers) == group.size:
        return group.all_reduce(flat, label="partial gradients")   # type: ignore[no-any-return]
    here = sharers.index(group.rank)
    terms = {here: flat}
    for hop in range(1, len(sharers)):
        to, frm = (here + hop) % len(sharers), (here - hop) % len(sharers)
        terms[frm] = group.exchange(flat, sharers[to], torch.empty_like(flat), sharers[frm], label="partial gradients")
    return torch.stack([terms[at] for at in range(len(sharers))]).sum(0)
