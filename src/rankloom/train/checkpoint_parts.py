"""Which elements of the model and of the optimizer's state a rank holds, as boxes of whole tensors: for checkpoints.

    a slice of a unit            a run of the flat memory of a parameter, so a few boxes    base/spans.py
    a model split over ranks     each box of a rank's part is one or more of the whole      parallel/model_split.py

Read checkpoint/manifest.py before this file.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from rankloom.base.spans import Box, boxes_of_run, numel, shape_of, whole_box, within
from rankloom.checkpoint.manifest import Part
from rankloom.parallel.state_dict import is_extra
from rankloom.shard.optimizer import Piece

MODEL, OPTIMIZER = "model/", "optimizer/"   # how the names of saved tensors begin: model/NAME, optimizer/KEY/NAME

Place = Callable[[Box], Iterable[tuple[Box, Box]]]   # a box of what is here -> boxes of it, and where each of them lies in the whole


def stay(box: Box) -> Iterable[tuple[Box, Box]]:
    """The place of a tensor that nothing splits: what is here is the whole."""
    return [(box, box)]


def unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state dict, no copies; a tied parameter once, under its first name. Extra state is none of them."""
    named = {name: value for name, value in model.state_dict(keep_vars=True).items() if not is_extra(name)}
    first = {id(value): name for name, value in reversed(named.items())}
    return {name: value for name, value in named.items() if first[id(value)] == name}


def computed_entries(model: nn.Module) -> list[str]:
    """Entries of its state dict that are no parameter, no buffer and no extra state: nobody can write into them."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return [name for name, value in unique_tensors(model).items() if id(value) not in own]


def whole_part(name: str, values: Tensor) -> Part:
    """A tensor that is here as a whole."""
    return Part(name, tuple(values.shape), whole_box(values.shape), values.detach())


def parts_of_piece(name: str, piece: Piece, values: Tensor, *, shape: torch.Size, place: Place = stay) -> list[Part]:
    """What `values` are of the whole: those elements of a tensor that `piece` says, in order, in any shape.

    piece: of the tensor as it lies on this rank
    shape: of the whole
    """
    values = values.detach()
    if values.shape == piece.shape or not piece.shape.numel():   # whole, maybe in an order of memory of its own
        found = [(whole_box(piece.shape), values.view(piece.shape))]
    else:
        found, at, flat = [], 0, values.view(-1)
        for box in boxes_of_run(piece.shape, piece.start, piece.stop):
            found.append((box, flat[at : at + numel(box)].view(shape_of(box))))
            at += numel(box)
    return [Part(name, tuple(shape), there, own[within(here, box)]) for box, own in found for here, there in place(box)]
