"""Dropout that does not depend on the layout: its mask is keyed by (seed, step, module name, row of the global batch, token).

torch's dropout draws from one generator per process, so its masks change with the number of ranks, and a resumed run must restore
that generator. Here there is nothing to restore. Each element is dropped or kept as in one process, on whatever rank and in whatever
micro-batch its row is, and however the tokens of a row are split (context parallel, sequence parallel, or both). In a prepared model,
`nn.Dropout` modules, and those that drop channels, are replaced by subclasses of theirs: code that looks for dropout finds it, and may
set `p`. A functional `F.dropout` cannot be replaced. It stays as it is, or is refused when training is deterministic (first_steps.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, pairwise
from math import prod
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from rankloom.base.counter_rng import GOLDEN_32, coins, line_keys
from rankloom.base.errors import ConfigError, ShapeMismatch
from rankloom.base.hooks import hooks_of
from rankloom.base.rng import key_to_seed
from rankloom.parallel.context.apply import KEYED_DROPOUT
from rankloom.parallel.context.sequences import Spans, take_run
from rankloom.parallel.tensor.cut_region import CutRegion
from rankloom.train.batches import rows_if_any
from rankloom.world.group import Group

AT_ONCE = {"cpu": 1 << 18}   # elements whose mask is drawn at a time: what fits in a cache
AT_ONCE_ELSEWHERE = 1 << 24   # enough for a kernel to take longer than its launch; needs 128 MiB


class TokenPositions(NamedTuple):
    """The positions of this rank's tokens in their rows, and the length of these rows."""

    spans: Spans
    row_length: int


@dataclass
class DropoutKey:
    """The running step and rows of the global batch: a part of every mask's key."""

    seed: int
    is_used: bool = False                                 # whether a module drops anything
    step: int = 0
    rows: range = range(1)
    tokens: TokenPositions | None = None                  # None: this rank has all tokens of its rows
    calls: dict[str, int] = field(default_factory=dict)   # a module used twice must not repeat its mask
    is_replayed: bool = False                             # `recompute` has set all of this back
    _called_again: set[str] = field(default_factory=set)  # modules that were used twice
    _runs: Sequence[range] = ()

    def number_rows(self, microbatches: Sequence[Any], group: Group, first: int | None = None) -> list[range]:
        """For each micro-batch of this rank: the numbers of its rows in the global batch, which concatenates the ranks' batches.

        A micro-batch that cannot be cut by rows counts as one row: its masks depend on how many come before it, not on the ranks.
        first: the number of this rank's first row. Left out, ranks gather how many rows each has, if a module drops anything
        """
        held = [1 if (rows := rows_if_any(microbatch)) is None else rows for microbatch in microbatches]
        if first is None and self.is_used and group.size > 1:
            everyone = group.all_gather(torch.tensor([sum(held)], device="cpu"), label="rows")   # a GPU would have to be waited for
            first = int(everyone[:group.rank].sum())
        return [range(*ends) for ends in pairwise(accumulate(held, initial=group.rank * sum(held) if first is None else first))]

    def set_rows(self, step: int, rows: range) -> None:
        """Before each micro-batch. rows: the numbers of its rows in the global batch"""
        self._begin(step)
        self.rows = rows
        self.calls.clear()

    def set_microbatches(self, step: int, runs: Sequence[range]) -> None:
        """For a pipeline, whose micro-batches run in the order of the schedule: the rows of each of this rank's micro-batches."""
        self._begin(step)
        self._runs = runs

    def _begin(self, step: int) -> None:
        if step != self.step:   # forwards between two steps, as for samples, have no backward
            self._called_again.clear()
        self.step = step

    def select_microbatch(self, microbatch: int) -> None:
        """Before this rank's micro-batch of that number, from 0."""
        self.set_rows(self.step, self._runs[microbatch])

    def set_token_positions(self, spans: Spans, length: int) -> None:
        """From now on, this rank's tokens have these positions in rows of `length`."""
        self.tokens = TokenPositions(spans, length)

    def next_seed(self, name: str) -> int:
        """The seed of the next call of module `name`. When the model's own checkpoint runs the forward again in backward, it is the first
        run's seed, so the mask repeats.

        raises: ConfigError if the module was called several times in forward: which of its masks to repeat is then not known
        """
        if torch._C._current_graph_task_id() == -1 or self.is_replayed:
            call = self.calls[name] = self.calls.get(name, -1) + 1
            self._called_again |= {name} if call else set()
        elif name in self._called_again:
            raise ConfigError(f"dropout {name} is used several times, and a checkpoint of the model's own runs it again in backward, when "
                              "it cannot know which of its masks to repeat: leave the checkpoint out, and give `prepare` recompute='full'")
        else:
            call = 0
        return key_to_seed(self.seed, "dropout", self.step, name, call)


class Keyed(_DropoutNd):
    """In training, zero each element with probability `p`, and scale the others by 1/(1-p). inplace: overwrite the input

    part: (i, n): this module sees part i of n of this rank's tokens (the last dim but one), as in sequence parallel
    dims: how many dims at the end are dropped together: the positions of a channel
    """

    dims = 0

    def __init__(self, p: float, name: str, key: DropoutKey, part: tuple[int, int] = (0, 1), inplace: bool = False):
        self.name, self.key = name, key   # before `p`, whose setter uses the key
        super().__init__(p, inplace)
        self.part = part
        self.cut_region: CutRegion | None = None   # tensor parallel: says when features or heads are split
        self._place = _take_place(self)

    @property
    def p(self) -> float:   # type: ignore[override]
        """The probability. Every rank sets the same one."""
        return self._p

    @p.setter
    def p(self, p: float) -> None:
        """raises: ConfigError unless p is a probability"""
        if not 0 <= p <= 1:
            raise ConfigError(f"dropout {self.name}: p={p!r}, expected a probability from 0 to 1")
        self._p = p
        self.key.is_used |= p > 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._place = _take_place(self)   # a copy draws with its own key

    def extra_repr(self) -> str:
        """For printing the model."""
        return f"p={self.p}, {'inplace=True, ' if self.inplace else ''}keyed"

    def forward(self, x: Tensor) -> Tensor:
        """x: any shape"""
        if not self.training or self.p == 0.0:
            return x
        if self.p == 1.0:
            return x.mul_(0.0) if self.inplace else x * 0.0
        together = 1 if self.dims == 2 and x.dim() == 3 else self.dims   # as torch's Dropout2d: rows of [channels, positions]
        like = x.new_empty(x.shape[:-together]) if together else x.detach()
        is_cut = self.cut_region is not None and self.cut_region.is_cut
        if torch.compiler.is_compiling():
            kept = keyed_mask(like, self._place, torch.empty(0, device="cpu"), is_cut)
        else:
            kept = self.mask(like, is_cut)
        kept = kept.view(kept.shape + (1,) * together)
        return x.mul_(kept) if self.inplace else x * kept

    def mask(self, x: Tensor, is_cut: bool = False) -> Tensor:
        """What to multiply the next call's `x` by: 0 or 1/(1-p).

        is_cut: `x` holds this rank's features or heads only
        A line runs along the last dim. Dim 0 holds the rows of the micro-batch, or several lines of each row; dim 1 does if the tokens
        come first. If neither divides by the number of rows (a table that all rows share), all of `x` counts as the first row's.
        """
        rows, seed, kept = self.key.rows, self.key.next_seed(self.name), x.new_empty(x.shape)
        if not x.numel():
            return kept
        if self._has_tokens_first(x):
            keys = line_keys(seed, rows, torch.arange(x.shape[0], device=x.device))
            return self._draw(_from_column(keys.t().flatten(), self._first_head_and_column(x, 1, is_cut)[1]), kept)
        if x.dim() == 0 or not rows or x.shape[0] % len(rows):
            rows = range(rows.start, rows.start + 1)
        head, column = self._first_head_and_column(x, len(rows), is_cut)
        keys = line_keys(seed, rows, self._lines(x, len(rows), head)).flatten()
        return self._draw(_from_column(keys, column), kept)

    def _first_head_and_column(self, x: Tensor, rows: int, is_cut: bool) -> tuple[int, int]:
        """The indices, in the whole tensor, of the first head and the first column of `x`."""
        if not (is_cut and self.cut_region and x.dim()):
            return 0, 0
        heads = prod(x.shape[:-2]) // rows if x.dim() > 2 else 0
        if heads and heads == self.cut_region.heads and (x.dim() > 3 or x.shape[0] != rows or x.shape[-1] == x.shape[-2]):
            return self.cut_region.rank * heads, 0
        return 0, self.cut_region.rank * x.shape[-1]

    def _has_tokens_first(self, x: Tensor) -> bool:
        """Whether x is [tokens, rows, features], and not a square of attention, whose dim 0 may hold rows and heads."""
        rows = len(self.key.rows)
        return x.dim() == 3 and self.key.tokens is None and x.shape[1] == rows not in (x.shape[0], x.shape[2])

    def _draw(self, keys: Tensor, kept: Tensor) -> Tensor:
        """Fill `kept` with the masks of lines. keys: of each line, int64 [lines]"""
        columns = kept.numel() // len(keys)
        limit = min(round((1.0 - self.p) * 2**32) - 2**31, 2**31 - 1)   # coins are int32: below it lies a share 1 - p of them
        at_once = max(AT_ONCE.get(kept.device.type, AT_ONCE_ELSEWHERE) // columns, 1)
        for some, into in zip(keys.split(at_once), kept.view(len(keys), columns).split(at_once)):
            into.copy_(coins(some, columns) < limit)
        return kept.mul_(1.0 / (1.0 - self.p))

    def _lines(self, x: Tensor, rows: int, head: int = 0) -> Tensor:
        """The number of each line of `x` within its row, by token position in the whole sequence. int64 [lines]

        head: index of the first head that `x` holds
        """
        at, parts = self.part
        tokens = x.shape[-2] if x.dim() > 2 else x.shape[0] // rows if x.dim() == 2 else 1
        spans, row_length = self.key.tokens or ((range(parts * tokens),), parts * tokens)
        if self.key.tokens and (x.dim() != 3 or parts * tokens != sum(map(len, spans))):
            raise ShapeMismatch(f"dropout {self.name}: x has shape {tuple(x.shape)}, expected [rows, {sum(map(len, spans)) // parts}, "
                                "features]: where ranks share a sequence, a mask goes by token; set this dropout to 0")
        positions = torch.cat([torch.arange(span.start, span.stop, device=x.device) for span in take_run(spans, at * tokens, tokens)])
        others = prod(x.shape[:-2]) // rows if x.dim() > 2 else 1
        return (torch.arange(head, head + others, device=x.device).unsqueeze(-1) * row_length + positions).flatten()


class KeyedDropout(Keyed, nn.Dropout):
    """Drops single elements."""


class KeyedDropout1d(Keyed, nn.Dropout1d):
    """Drops channels, whose positions are the last dim."""

    dims = 1


class KeyedDropout2d(Keyed, nn.Dropout2d):
    """Drops channels, whose positions are the last two dims."""

    dims = 2


class KeyedDropout3d(Keyed, nn.Dropout3d):
    """Drops channels, whose positions are the last three dims."""

    dims = 3


KINDS: dict[type[nn.Module], type[Keyed]] = {**dict.fromkeys(KEYED_DROPOUT, KeyedDropout), nn.Dropout1d: KeyedDropout1d,
                                             nn.Dropout2d: KeyedDropout2d, nn.Dropout3d: KeyedDropout3d}


# The compiler must not see names, counters and keys: it would compile a graph for each block, and again in each step. So it sees one
# operation, which it may neither repeat nor merge. A tensor with a number tells this operation whose mask to draw. The tag below keeps
# torch from repeating it; but calls with equal arguments are merged, unless one is an empty tensor, which torch never takes for another.
_places: WeakValueDictionary[int, Keyed] = WeakValueDictionary()
_numbers = count()


def _take_place(module: Keyed) -> Tensor:
    number = next(_numbers)
    _places[number] = module
    return torch.tensor(number, device="cpu")


@torch.library.custom_op("rankloom::keyed_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def keyed_mask(x: Tensor, place: Tensor, call: Tensor, is_cut: bool = False) -> Tensor:
    """The mask for `x` of the module with number `place`, as one operation of a compiled graph. call: empty, another one in each call"""
    return _places[int(place)].mask(x, is_cut)


@keyed_mask.register_fake
def _shape_of_mask(x: Tensor, place: Tensor, call: Tensor, is_cut: bool = False) -> Tensor:
    return x.new_empty(x.shape)


def _from_column(keys: Tensor, first: int) -> Tensor:
    """Keys of lines -> keys of the same lines from column `first` on. The low half of a key counts columns. keys: int64"""
    return (keys >> 32 << 32) | ((keys + first * GOLDEN_32) & 0xFFFFFFFF) if first else keys


def key_dropout(model: nn.Module, key: DropoutKey) -> int:
    """Replace every `nn.Dropout` inside `model`, and those of channels, by keyed ones; returns how many."""
    # A module may be registered under several names. Each name gets its own masks.
    found = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if type(module) in KINDS]
    for name, module in found:
        parent, _, child = name.rpartition(".")
        keyed = KINDS[type(module)](module.p, name, key, getattr(module, "part", (0, 1)), module.inplace)
        keyed.cut_region = getattr(module, "cut_region", None)
        vars(keyed).update(hooks_of(module))
        setattr(model.get_submodule(parent), child, keyed.train(module.training))
    return len(found)
