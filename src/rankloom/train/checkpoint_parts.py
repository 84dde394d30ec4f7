"""For checkpoints: the elements of model and optimizer state that a rank holds, as boxes of whole tensors.

    a slice of a unit            a range of a parameter's flat memory: a few boxes                   base/spans.py
    a model split over ranks     a box of a rank's part is one or more boxes of the whole tensor     parallel/model_split.py

Read checkpoint/manifest.py before this file.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from rankloom.base.spans import Box, whole_box, within
from rankloom.checkpoint.manifest import Part
from rankloom.parallel.sections.state_dict import is_extra
from rankloom.shard.optimizer import ParameterSlice

MODEL, OPTIMIZER = "model/", "optimizer/"   # prefixes of saved tensors: model/NAME, optimizer/KEY/NAME

Place = Callable[[Box], Iterable[tuple[Box, Box]]]   # a box of the local tensor -> pairs (box of it, the same box in the whole)


def unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state dict, without copies or extra state; a tied parameter once, under its first name."""
    named = {name: value for name, value in model.state_dict(keep_vars=True).items() if not is_extra(name)}
    first = {id(value): name for name, value in reversed(named.items())}
    return {name: value for name, value in named.items() if first[id(value)] == name}


def computed_entries(model: nn.Module) -> list[str]:
    """Entries of the state dict that are not parameters, buffers or extra state, so they cannot be loaded."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return [name for name, value in unique_tensors(model).items() if id(value) not in own]


def whole_part(name: str, values: Tensor) -> Part:
    """The part of a tensor that this rank holds whole."""
    return Part(name, tuple(values.shape), whole_box(values.shape), values.detach())


def parts_of_slice(name: str, owned: ParameterSlice, values: Tensor, *, shape: torch.Size,
                   place: Place = lambda box: [(box, box)]) -> list[Part]:
    """The parts of a whole tensor that `values` holds.

    owned:  which elements of the local tensor `values` holds, in order, in any shape
    place:  where boxes of the local tensor are in the whole; left out, it is the whole
    shape:  of the whole
    """
    boxes = owned.boxes(values.detach())
    return [Part(name, tuple(shape), there, own[within(here, box)]) for box, own in boxes for here, there in place(box)]
