"""Cut a pipeline so that stages take equally long, from the measured time and memory of each piece, before the model is changed.

The model is measured as it was given, on every rank: along tensor, expert and context ranks all pieces get faster alike. Read
parallel/pipeline/measure.py before this file.
"""

from dataclasses import replace

import torch
from torch import nn

from rankloom.base.errors import ConfigError
from rankloom.base.modes import evaluating
from rankloom.base.nested import map_tensors
from rankloom.parallel.context.rows import RING
from rankloom.parallel.pipeline.build import sizes_by_measure
from rankloom.parallel.pipeline.measure import measure_pieces
from rankloom.parallel.pipeline.search import stages_a_rank
from rankloom.train.dropout import DropoutKey
from rankloom.train.pipeline.pipe import ChosenPipe
from rankloom.train.pipeline.running_microbatch import RunningMicrobatch
from rankloom.train.pipeline.stages import pieces_for
from rankloom.train.put_back import state_put_back
from rankloom.world.world import World


def cut_by_measure(chosen: ChosenPipe, model: nn.Module, world: World) -> ChosenPipe:
    """`chosen`, with the sizes of its stages if it has an example to measure with. A collective then, for all ranks to cut alike.

    raises: ConfigError for a model without values, or no cut within its memory
    """
    if chosen.example is None:
        return chosen
    if world.device.type == "meta" or any(param.is_meta for param in model.parameters()):
        raise ConfigError("pipe=rl.Pipe(example=...): a model on the meta device has no values to measure with; give `sizes`, how many "
                          "pieces each stage gets")
    running = RunningMicrobatch(DropoutKey(0), world.alone(), RING)
    pieces = pieces_for(chosen, model, running)
    running.begin(0, [range(1)])
    microbatch = running.take(*map_tensors(lambda t: t.to(world.device), chosen.example))
    running.select_microbatch(0)
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []), evaluating(model), state_put_back(model):
        measured = measure_pieces(pieces, microbatch, chosen.loss(model), world)
    sizes = sizes_by_measure(measured, world.mesh.pipe * stages_a_rank(chosen.schedule, chosen.chunks), chosen.memory)
    return replace(chosen, sizes=tuple(sizes))
