"""Split a model over the mesh axes tensor, expert and context, in this order, before its parameters are sharded.

    tensor     layers are cut by a plan of name patterns       parallel/tensor/
    expert     each rank keeps some of the experts             parallel/expert.py
    context    each rank computes its tokens of every row      parallel/context

Rows are dealt over replicate, shard and expert. Losses add up over these and context. Ranks along tensor compute the same loss.
"""

from collections.abc import Mapping

from torch import nn

from rankloom.base.mesh import DATA_AXES
from rankloom.parallel.context.apply import KEYED_DROPOUT, TellPositions, context_parallel, expect_no_dropout
from rankloom.parallel.expert import expert_parallel
from rankloom.parallel.model_split import ModelSplit
from rankloom.parallel.tensor.apply import tensor_parallel
from rankloom.world.group import Group
from rankloom.world.world import World


def is_split(world: World) -> bool:
    """Whether the mesh has ranks along any axis but the data axes."""
    return bool(world.mesh.in_use().keys() - DATA_AXES)


def beside_pipe(world: World) -> Group:
    """The ranks that hold parts of the same pipeline stage."""
    return world.group(*(axis for axis in world.mesh.sizes() if axis != "pipe"))


def split_model(model: nn.Module, world: World, tensor_plan: Mapping[str, str] | None, tensor_overlap: int, context: str,
                tell: TellPositions) -> ModelSplit:
    """Split `model` in place as the mesh says. Returns what this rank holds of it.

    model:  may be on the meta device; then only shapes are cut
    tensor_overlap: the `overlap` of `tensor_parallel`
    tell:   see `context_parallel`
    raises: what the three techniques raise
    """
    mesh = world.mesh
    if mesh.tensor > 1:
        tensor_parallel(model, tensor_plan, world.group("tensor"), overlap=tensor_overlap)
    if mesh.expert > 1:
        expert_parallel(model, world.group("expert"))
    if mesh.context > 1 and mesh.pipe == 1:
        context_parallel(model, world.group("context"), context, tell=tell)
    elif mesh.context > 1:   # stages are told their tokens by the engine (pipeline/running_microbatch.py)
        expect_no_dropout(model, world.group("context"), but=KEYED_DROPOUT)
    return ModelSplit.of(model, world.group("tensor"), world.group("expert"), world.group("context"))
