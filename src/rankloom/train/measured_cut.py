"""Cut a pipeline so that stages take equally long, from the measured time and memory of each piece, before the model is changed.

The model is measured as it was given, on every rank: along tensor, expert and context ranks all pieces get faster alike. Read
parallel/pipeline/measure.py before this file.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rankloom.base.errors import ConfigError
from rankloom.base.modes import evaluating
from rankloom.parallel.context import RING
from rankloom.parallel.pipeline.build import sizes_by_measure
from rankloom.parallel.pipeline.measure import MeasuredPiece, measure_pieces
from rankloom.parallel.pipeline.search import stages_a_rank
from rankloom.train.batches import map_tensors
from rankloom.train.dropout import DropoutKey
from rankloom.train.pipe import Pipe, WholeLoss
from rankloom.train.pipeline_stages import Turn, pieces_for
from rankloom.train.precision import Precision
from rankloom.world.connect import World


def cut_by_measure(asked: Pipe | str | None, model: nn.Module, loss: WholeLoss, world: World, precision: Precision) -> Pipe | str | None:
    """`asked`, with the sizes of its stages if it has an example to measure with. A collective then, for all ranks to cut alike.

    loss:   that of one process
    raises: ConfigError for a model without values, an example that is no batch of two parts, or no cut within its memory
    """
    if not isinstance(asked, Pipe) or asked.example is None:
        return asked
    if world.device.type == "meta" or any(param.is_meta for param in model.parameters()):
        raise ConfigError("pipe=rl.Pipe(example=...): a model on the meta device has no values to measure with; give `sizes`, how many "
                          "pieces each stage gets")
    if not (isinstance(asked.example, tuple | list) and len(asked.example) == 2):
        raise ConfigError(f"pipe=rl.Pipe(example=...): a micro-batch has two parts, what the first stage is called with and what the loss "
                          f"compares with; this is a {type(asked.example).__name__}")
    measured = _measure(asked, model, loss, world, precision)
    sizes = sizes_by_measure(measured, world.mesh.pipe * stages_a_rank(asked.schedule, asked.chunks), asked.memory)
    return replace(asked, sizes=tuple(sizes), example=None, memory=None)


def _measure(asked: Pipe, model: nn.Module, loss: WholeLoss, world: World, precision: Precision) -> list[MeasuredPiece]:
    chosen, turn = Pipe.of(asked, model, loss, precision), Turn(DropoutKey(0), world.alone(), RING)
    example: Any = map_tensors(lambda t: t.to(world.device), asked.example)
    pieces = pieces_for(chosen, model, turn)
    turn.begin(0, [range(1)])
    own = turn.own(*example)
    turn.note(own[0])
    turn.select_microbatch(0)
    devices = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices), evaluating(model):
        return measure_pieces(pieces, (own[0], own), chosen.loss(model), world)
