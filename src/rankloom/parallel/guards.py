"""Global step hooks that catch misuse: stepping before gradients are reduced would let ranks diverge.

An optimizer that was made before sharding would update freed memory, and one that is not elementwise would take slices for whole tensors:
both are errors too. Every other step waits, where ranks share memory, until all ranks have ended their backward. After it, the new
slices are published to the model's parameters.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankloom.base.errors import UnitError
from rankloom.base.hooks import waiting_for
from rankloom.parallel.gradients import GradientReducer
from rankloom.parallel.sharding import Sharding
from rankloom.shard.optimizer import is_elementwise

CUT, OWNED = "_rankloom_cut", "_rankloom_sharding"   # attributes of parameters: the plain name; the sharding to publish to


def guard_parameters(params: Mapping[str, nn.Parameter]) -> None:
    """From now on an optimizer of these parameters, the model's own, raises UnitError in its step: it should have slices."""
    for name, param in params.items():
        setattr(param, CUT, name)
    watch_optimizers()


def guard_owners(owners: Iterable[nn.Parameter], sharding: Sharding) -> None:
    """From now on a step of an optimizer of these slices is checked before, and published after."""
    for owner in owners:
        setattr(owner, OWNED, sharding)
    watch_optimizers()


@cache
def watch_optimizers() -> None:
    """From now on every optimizer step in this process is checked. Parameters of a `GradientReducer` need nothing more."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for param_group in optimizer.param_groups:
        for param in param_group["params"]:
            if name := getattr(param, CUT, None):
                raise UnitError(f"the optimizer updates {name} itself, whose memory was cut over the ranks: it was made before the model "
                                "was sharded, or of the inner module's parameters. Make it of `sharded.parameters()`")
            for reducer in _reducers(param):
                reducer.expect_summed(param)
    followers = _followers(optimizer)
    if followers and not is_elementwise(optimizer):
        raise UnitError(f"{type(optimizer).__name__} may look at whole tensors, but the parameters of a sharded model are flat slices. "
                        "`rl.prepare` gives it whole ones; if what it does to an element depends on that element only, say so by an "
                        "attribute of the class: elementwise = True")
    for sharding in followers:
        _expect_reduced(sharding)
        sharding.wait_for_readers()


def _reducers(param: torch.Tensor) -> list[GradientReducer]:
    return [who for who in waiting_for(param) if isinstance(who, GradientReducer)]


def _expect_reduced(sharding: Sharding) -> None:
    if any(gradient.landed for gradient in sharding.gradients()):
        raise UnitError(f"rank {sharding.group.world_rank}: an optimizer steps before gradients are reduced, and would find none: the last "
                        "backward ran inside of `no_sync`, or died. Step after a backward outside of `no_sync`, or forget the gradients: "
                        "`sharded.zero_grad()`")


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for sharding in _followers(optimizer):
        sharding.publish()


def _followers(optimizer: torch.optim.Optimizer) -> dict[Sharding, None]:
    found = (getattr(param, OWNED, None) for param_group in optimizer.param_groups for param in param_group["params"])
    return dict.fromkeys(sharding for sharding in found if sharding is not None)   # in one order on all ranks
