"""Clip gradients in a loop of your own, where ranks hold different parts of a model.

torch's function of this name would see the parts of one rank, so that ranks scale differently, and diverge.
"""

from torch import Tensor, nn

from rankloom.base.errors import ConfigError
from rankloom.parallel.axes import axes_of
from rankloom.parallel.model_split import ModelSplit
from rankloom.parallel.replicas.guards import is_sharded
from rankloom.shard.norm import clip_to_norm


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float | str = 2.0) -> Tensor:
    """Scale the gradients of a split model so that their norm over all its ranks is at most `max_norm`; returns the norm before.

    A collective of the ranks over which the model was cut. Gradients must be finished: those that are partial summed over tensor ranks, as
    `tensor_parallel` does unless told otherwise, and those of all but the experts over expert ranks. An element that several ranks hold
    counts once.

    model:     what `tensor_parallel` or `expert_parallel` returned, or a wrapper around it
    norm_type: 2, another power above 0, or infinity ("inf" too): the largest magnitude
    raises:    ConfigError for numbers that are no norm, for a model that was not cut, and for one of which `fully_shard` has cut a part
    """
    if hasattr(model, "clip_grad_norm_"):   # what `fully_shard` returned
        return model.clip_grad_norm_(max_norm, norm_type)   # type: ignore[no-any-return, operator]
    if sharded := next((name for name, param in model.named_parameters() if is_sharded(param)), None):
        raise ConfigError(f"clip_grad_norm_: each rank holds a slice of {sharded} only. Call the method of this name of what fully_shard "
                          "returned; if that is a part of your model, wrap the whole model instead")
    if not (axes := axes_of(model)):
        raise ConfigError(f"clip_grad_norm_: {type(model).__name__} was not cut by tensor_parallel or expert_parallel; every rank holds it "
                          "whole: take torch.nn.utils.clip_grad_norm_")
    split = ModelSplit.found_in(model, next(iter(axes.values())).alone())
    grads = [counted for name, param in model.named_parameters() if param.grad is not None for counted in split.counted(name, param.grad)]
    return clip_to_norm(grads, split.parts or [split.context], max_norm, norm_type)
