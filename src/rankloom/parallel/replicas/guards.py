"""Global step hooks that catch misuse: stepping before gradients are reduced would let ranks diverge.

An optimizer that was made before sharding would update freed memory, and one that is not elementwise would take slices, or the parts that
tensor ranks hold, for whole tensors: both are errors too. Every other step waits, where ranks share memory, until all ranks have ended
their backward. After it, the new slices are published to the model's parameters: see `Updates`.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rankloom.base.errors import UnitError
from rankloom.base.hooks import waiting_for
from rankloom.base.scoped import temporarily
from rankloom.parallel.gradients.reducer import GradientReducer
from rankloom.parallel.replicas.combine_facts import combine_facts
from rankloom.parallel.sections.sharding import Sharding
from rankloom.shard.optimizer import is_elementwise

REGISTERING = threading.Lock()   # ranks may be threads, and hooks that are there twice would publish twice

# Attributes of parameters.
CUT = "_rankloom_cut"           # of one that sharding has cut: its plain name
UPDATES = "_rankloom_updates"   # of a slice: the `Updates` to tell
PART = "_rankloom_part"         # of one of which tensor ranks hold parts: its name


class Updates:
    """The steps of optimizers on the slices of one sharding. Where ranks share memory, a step is a collective, except inside of hooks."""

    def __init__(self, sharding: Sharding):
        self.sharding = sharding
        self._by_hooks, self._any = False, False   # whether hooks are running, and whether there was a step

    def begin(self, params: set[int]) -> None:
        """An optimizer will step on slices, of these ids. Raises UnitError if they are not reduced."""
        _expect_reduced(self.sharding, params)
        if not self._by_hooks:
            self.sharding.wait_for_readers()

    def end(self) -> None:
        """An optimizer has stepped on slices: give the model its new values."""
        self._any = True
        if not self._by_hooks:
            self.sharding.publish()

    @contextmanager
    def by_hooks(self) -> Iterator[None]:
        """A context to call the hooks of slices in, once all ranks have ended a backward. A collective where parameters stay after it.

        A rank calls the hooks of the parameters of which it has a slice. So in hooks that step, ranks step unequally often, and what all of
        them have changed is published at the end, once.
        """
        with temporarily(self, _by_hooks=True, _any=False):
            yield
            stepped = self._any
        if not self.sharding.gathering.reshards or any(unit.common for unit in self.sharding.units):
            (stepped,) = combine_facts([], [stepped], None, self.sharding.group).flags
        if stepped:
            self.sharding.publish()


def guard_parameters(params: Mapping[str, nn.Parameter]) -> None:
    """From now on an optimizer of these parameters, the model's own, raises UnitError in its step: it should have slices."""
    for name, param in params.items():
        setattr(param, CUT, name)
    watch_optimizers()


def guard_owners(owners: Iterable[nn.Parameter], sharding: Sharding) -> None:
    """From now on a step of an optimizer of these slices is checked before, and published after."""
    updates = Updates(sharding)
    for owner in owners:
        setattr(owner, UPDATES, updates)
    watch_optimizers()


def call_hooks(owners: Iterable[nn.Parameter]) -> None:
    """Call the hooks that the user has put on slices, of those that have a gradient; see `Updates.by_hooks`."""
    calls = [(owner, hook, owner.grad is not None) for owner in owners for hook in (owner._post_accumulate_grad_hooks or {}).values()]
    if not calls:
        return
    with getattr(calls[0][0], UPDATES).by_hooks():
        for owner, hook, has_gradient in calls:
            if has_gradient:
                hook(owner)


def guard_part(param: nn.Parameter, name: str) -> None:
    """From now on an optimizer of this parameter, of which tensor ranks hold parts, raises UnitError unless it is elementwise."""
    setattr(param, PART, name)
    watch_optimizers()


def is_sharded(param: nn.Parameter) -> bool:
    """Whether sharding has cut this parameter, or it is a slice that sharding has made."""
    return hasattr(param, CUT) or hasattr(param, UPDATES)


def watch_optimizers() -> None:
    """From now on every optimizer step in this process is checked. Parameters of a `GradientReducer` need nothing more."""
    with REGISTERING:
        if _before_step not in _global_optimizer_pre_hooks.values():
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    params = _params(optimizer)
    if name := next((getattr(param, CUT) for param in params if hasattr(param, CUT)), None):
        raise UnitError(f"the optimizer updates {name} itself, whose memory was cut over the ranks: it was made before the model was "
                        "sharded, or of the inner module's parameters. Make it of `sharded.parameters()`")
    for reducer in dict.fromkeys(who for param in params for who in waiting_for(param) if isinstance(who, GradientReducer)):
        reducer.expect_summed(params)
    all_updates = _updates_of(optimizer)
    if not is_elementwise(optimizer):
        _expect_whole_tensors(optimizer)
    for updates in all_updates:
        updates.begin({*map(id, params)})


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for param_group in optimizer.param_groups for param in param_group["params"]]


def _expect_whole_tensors(optimizer: torch.optim.Optimizer) -> None:
    found = [vars(param) for param in _params(optimizer)]
    part = next((of[PART] for of in found if PART in of), None)
    if part or any(UPDATES in of for of in found):
        why = (f"{part} was cut over the tensor ranks, each of which has a part" if part else
               "the parameters of a sharded model are flat slices. `rl.prepare` gives it whole ones")
        raise UnitError(f"{type(optimizer).__name__} may look at whole tensors, but {why}. If what it does to an element depends on that "
                        "element only, say so by an attribute of the class: elementwise = True")


def _expect_reduced(sharding: Sharding, params: set[int]) -> None:
    """Raise UnitError if gradients of the slices `params` are not reduced. Those of another optimizer's may be accumulating."""
    if any(id(gradient.unit.owners[name]) in params for gradient in sharding.gradients() for name in gradient.landed):
        raise UnitError(f"rank {sharding.group.world_rank}: an optimizer steps before gradients are reduced, and would find none: the last "
                        "backward ran inside of `no_sync`, or died. Step after a backward outside of `no_sync`, or forget the gradients: "
                        "`sharded.zero_grad()`")


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for updates in _updates_of(optimizer):
        updates.end()


def _updates_of(optimizer: torch.optim.Optimizer) -> dict[Updates, None]:
    """Those of the slices that it updates, each once."""
    found = (getattr(param, UPDATES, None) for param in _params(optimizer))
    return dict.fromkeys(updates for updates in found if updates is not None)   # in one order on all ranks
