"""Dropout that does not depend on the layout: its mask is keyed by (seed, step, module name, global micro-batch, tokens).

torch's own draws from one generator per process, so the masks change with the number of ranks, and a resumed run must
restore that generator. Here there is nothing to restore. `nn.Dropout` modules of a prepared model are replaced; a
functional `F.dropout` inside a model is out of reach and stays as it is, or is refused where training is deterministic (diagnose.py).

Where a sequence is cut over ranks (context parallel, sequence parallel, or both), each token is dropped as one process would drop
it, and no rank draws for all tokens: a mask is drawn in slabs of some tokens, each from a stream of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from rankloom.base.errors import ShapeMismatch
from rankloom.base.hooks import hooks_of
from rankloom.base.rng import stream
from rankloom.parallel.context import KEYED_DROPOUT
from rankloom.parallel.sequences import Spans, take_run

SLAB = 256   # tokens whose mask is drawn at a time


@dataclass(slots=True)
class DropoutKey:
    """Which micro-batch of which step is running: half of every mask's key."""

    seed: int
    step: int = 0
    microbatch: int = 0
    first: int = 0
    here: tuple[Spans, int] | None = None                 # the positions of the tokens that are here, of rows of how many; None: all
    calls: dict[str, int] = field(default_factory=dict)   # a module used twice must not repeat its mask

    def move_to(self, step: int, microbatch: int) -> None:
        """Before each micro-batch. `microbatch` counts over all ranks."""
        self.step, self.microbatch = step, microbatch
        self.calls.clear()

    def start_step(self, step: int, first: int) -> None:
        """Where micro-batches come in an order of their own: `first` is the number of this rank's first one."""
        self.step, self.first = step, first

    def move_on_to(self, microbatch: int) -> None:
        """To this rank's micro-batch of that number, from 0."""
        self.move_to(self.step, self.first + microbatch)

    def stand_at(self, spans: Spans, length: int) -> None:
        """The tokens that are here have these positions in rows of `length`, until somebody says otherwise."""
        self.here = spans, length

    def streams(self, name: str, device: torch.device) -> Callable[[int], torch.Generator]:
        """For the next call of module `name`: the stream of each slab, by its number."""
        call = self.calls[name] = self.calls.get(name, -1) + 1
        return partial(stream, self.seed, "dropout", self.step, self.microbatch, name, call, device=device)


class KeyedDropout(nn.Module):
    """Zero each element with probability `p` in training, and scale the others by 1/(1-p).

    part: which of how many parts of the tokens (the last dim but one) come here, of those that the key says are here
    """

    def __init__(self, p: float, name: str, key: DropoutKey, part: tuple[int, int] = (0, 1)):
        super().__init__()
        self.p, self.name, self.key, self.part = p, name, key, part
        self._place = _take_place(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._place = _take_place(self)   # a copy draws with its own key

    def extra_repr(self) -> str:
        """For printing the model."""
        return f"p={self.p}, keyed"

    def forward(self, x: Tensor) -> Tensor:
        """x: any shape"""
        if not self.training or self.p == 0.0:
            return x
        if self.p == 1.0:
            return x * 0.0
        return x * (keyed_mask(x.detach(), self._place) if torch.compiler.is_compiling() else self.mask(x))

    def mask(self, x: Tensor) -> Tensor:
        """What to multiply the next call's `x` by: 0 or 1/(1-p).

        memory: that of x, and where tokens are elsewhere, of one slab of tokens
        """
        kept = torch.empty_like(x)
        rows = kept if x.dim() > 1 else kept.view(1, -1)
        spans, length = self._places(x)
        streams, at = self.key.streams(self.name, x.device), 0
        for span in spans:
            for first in range(span.start // SLAB * SLAB, span.stop, SLAB):
                start, stop = max(span.start - first, 0), min(span.stop - first, SLAB)
                mine = rows.narrow(-2, at, stop - start)
                whole = (*rows.shape[:-2], min(SLAB, length - first), rows.shape[-1])
                # the order of draws must not depend on strides
                slab = mine if mine.shape == whole and mine.is_contiguous() else x.new_empty(whole)
                slab.bernoulli_(1.0 - self.p, generator=streams(first // SLAB))
                if slab is not mine:
                    mine.copy_(slab.narrow(-2, start, stop - start))
                at += stop - start
        return kept.mul_(1.0 / (1.0 - self.p))

    def _places(self, x: Tensor) -> tuple[Spans, int]:
        """Which positions the tokens of `x` have, in rows of how many."""
        at, parts = self.part
        tokens = x.shape[-2] if x.dim() > 1 else 1
        spans, length = self.key.here or ((range(parts * tokens),), parts * tokens)
        if self.key.here and (x.dim() != 3 or parts * tokens != sum(map(len, spans))):
            raise ShapeMismatch(f"dropout {self.name}: x has shape {tuple(x.shape)}, expected [rows, {sum(map(len, spans)) // parts}, "
                                "features]: where ranks share a sequence, a mask goes by token; set this dropout to 0")
        return take_run(spans, at * tokens, tokens), length


# A compiler cannot look into a generator, and must not write names and counters into its graph: blocks would each have a graph of
# their own. So it sees one operation, which is told by a tensor whose mask it is, and which it may neither repeat nor merge.
_places: WeakValueDictionary[int, KeyedDropout] = WeakValueDictionary()
_numbers = count()


def _take_place(module: KeyedDropout) -> Tensor:
    number = next(_numbers)
    _places[number] = module
    return torch.tensor(number)


@torch.library.custom_op("rankloom::keyed_mask", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def keyed_mask(x: Tensor, place: Tensor) -> Tensor:
    """The mask for `x` of the module at a place, as one operation of a compiled graph."""
    return _places[int(place)].mask(x)


@keyed_mask.register_fake
def _shape_of_mask(x: Tensor, place: Tensor) -> Tensor:
    return torch.empty_like(x)


def key_dropout(model: nn.Module, key: DropoutKey) -> int:
    """Replace every `nn.Dropout` inside `model` by a keyed one; returns how many there were."""
    # One module may hang in several places; each place has its own name, so its own masks.
    found = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if type(module) in KEYED_DROPOUT]
    for name, module in found:
        parent, _, child = name.rpartition(".")
        keyed = KeyedDropout(module.p, name, key, getattr(module, "part", (0, 1)))
        vars(keyed).update(hooks_of(module))
        setattr(model.get_submodule(parent), child, keyed.train(module.training))
    return len(found)
