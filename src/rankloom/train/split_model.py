"""Split a model over the axes of the mesh that are no data axes: tensor, expert, context. In that order, before anything is cut.

    tensor     layers are cut by a plan of name patterns       parallel/tensor/
    expert     each rank keeps some of the experts             parallel/expert.py
    context    each rank computes its tokens of every row      parallel/context.py

Rows are dealt over replicate, shard and expert; losses add up over these and context; ranks of the tensor axis compute the same loss.
"""

from collections.abc import Mapping

from torch import nn

from rankloom.parallel.context import KEYED_DROPOUT, RING, TellPositions, context_parallel, expect_no_dropout
from rankloom.parallel.expert import expert_parallel
from rankloom.parallel.model_split import ModelSplit
from rankloom.parallel.tensor.apply import tensor_parallel
from rankloom.world.connect import World

DATA_AXES = ("replicate", "shard")
ROW_AXES = ("replicate", "shard", "expert")
SHARING_AXES = ("pipe", "context", "tensor")        # along which ranks share their rows
PART_AXES = ("pipe", "shard", "tensor", "expert")   # along which ranks hold different elements


def is_split(world: World) -> bool:
    """Whether the mesh has ranks along any other axis than those of data."""
    return any(n > 1 for axis, n in world.mesh.sizes().items() if axis not in DATA_AXES)


def split_model(model: nn.Module, world: World, tensor_plan: Mapping[str, str] | None, context: str = RING,
          tell: TellPositions | None = None) -> ModelSplit:
    """Apply what the mesh asks for, in place; what this rank holds from then on.

    model:  it may be on the meta device, where only shapes are cut
    tell:   see `context_parallel`
    raises: what the techniques raise
    """
    sizes = world.mesh.sizes()
    if sizes["tensor"] > 1:
        tensor_parallel(model, tensor_plan, world.group("tensor"))
    if sizes["expert"] > 1:
        expert_parallel(model, world.group("expert"))
    if sizes["context"] > 1 and sizes["pipe"] == 1:
        context_parallel(model, world.group("context"), context, tell=tell)
    elif sizes["context"] > 1:   # stages are told their tokens by the engine (pipeline_stages.py)
        expect_no_dropout(model, world.group("context"), but=KEYED_DROPOUT)
    return ModelSplit.of(model, world.group("tensor"), world.group("expert"), world.group("context"))
