"""The whole state of a model in training: what a run needs to continue as if it had not stopped. Gathered, and loaded.

It consists of parameters, optimizer state, the step, the loss scale, and the amax history of fp8. Random numbers, the position in the
data and learning rates follow from the step. The error that compression has kept of gradients (comm/lossy.py) is left out, so a run that
resumes with compression does not give the same bits. On disk the state is a checkpoint: train/checkpoint.py.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from rankloom.base.errors import ConfigError, ModelMismatch
from rankloom.base.tensors import digest
from rankloom.parallel.sections.state_dict import without_values
from rankloom.shard.optimizer import Optimizer
from rankloom.shard.optimizer_state import load_optimizer_state, misfit
from rankloom.train.fp8 import Float8Layers
from rankloom.train.placement import Placement
from rankloom.world.world import World

NEW_RUN: dict[str, Any] = {"step": 0, "loss_scale": None, "amax": {}}


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The objects that hold an engine's state, and its numbers."""

    world: World
    placement: Placement
    optimizer: Optimizer
    float8: Float8Layers
    step: int
    loss_scale: dict[str, Any] | None

    def run(self) -> dict[str, Any]:
        """The state that belongs to no parameter."""
        return {"step": self.step, "loss_scale": self.loss_scale, "amax": self.float8.state_dict()}


def gather_state(state: TrainingState, rank: int | None) -> dict[str, dict[str, Any]]:
    """See `Engine.full_state_dict`."""
    _expect_one_receiver(state.world, rank)
    state.placement.expect_own_values()
    if problem := stray_state(state):   # on every rank alike
        raise ConfigError(problem)
    whole = {"model": state.placement.values(rank), "optimizer": state.placement.state(state.optimizer, rank)}
    if rank in (None, state.world.rank):
        whole["optimizer"]["run"] = state.run()
    return whole


def stray_state(state: TrainingState) -> str | None:
    """What the optimizer keeps that no state of a run has, in words, or None."""
    owners = {id(owner) for owner in state.placement.owners.values()}
    stray = next((key for key in state.optimizer.state if id(key) not in owners), None)
    where = f"under {stray!r}" if isinstance(stray, str) else "of a tensor"
    return None if stray is None else (
        f"the optimizer has state that belongs to none of its parameters ({where}), and the state of a run cannot have that: "
        "keep it in a parameter group")


def _expect_one_receiver(world: World, rank: Any) -> None:
    if rank is None:   # no check: the state may be held whole, when the other ranks are gone
        return
    asked = world.all_gather_object(repr(rank), label="who gets the whole state")
    if len(set(asked)) > 1:
        at = next(at for at, other in enumerate(asked) if other != asked[0])
        raise ConfigError(f"full_state_dict: rank 0 asks for rank={asked[0]}, rank {at} for rank={asked[at]}; all ranks give the same")
    if isinstance(rank, bool) or rank not in range(world.size):
        raise ConfigError(f"full_state_dict(rank={rank!r}): there are ranks 0 to {world.size - 1}; give one of them, or None for all")


def load_state(state: TrainingState, whole: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """See `Engine.load_full_state_dict`. Returns the state of the run: step, loss scale, amax."""
    world, placement = state.world, state.placement
    world.agree(_unusable(whole, f"rank {world.rank}"), error=ModelMismatch, label="load a state")
    saved, run = own_parts(state, whole["optimizer"]), NEW_RUN | whole["optimizer"].get("run", {})
    expect_fit(state, saved, run)
    _expect_one_state(world, whole, run)
    state.float8.drop_casts()   # of a failed step
    placement.load(whole["model"])
    load_optimizer_state(state.optimizer, placement.owners, placement.slices(), saved, rank=world.rank)
    state.float8.load_state_dict(run["amax"])
    return run


def _unusable(whole: Mapping[str, Mapping[str, Any]], where: str) -> str | None:
    """What is missing in a whole state, whatever the model, in words, or None. where: begins the text"""
    parts = whole if isinstance(whole, Mapping) else {}
    if lacks := " and ".join(key for key in ("model", "optimizer") if not isinstance(parts.get(key), Mapping) or not parts[key]):
        return (f"{where}: the state has nothing under {lacks}; was it gathered on one rank only? Values without an optimizer's, as of a "
                "plain model, are loaded into the model before `rl.prepare`")
    bare = next((name for name, held in whole["optimizer"].get("state", {}).items() if not isinstance(held, Mapping)), None)
    if bare is not None:
        return f"{where}: the optimizer state of {bare!r} has no values by name, such as 'exp_avg'"
    return without_values(whole["model"], where, own={})


def _expect_one_state(world: World, whole: Mapping[str, Mapping[str, Any]], run: Mapping[str, Any]) -> None:
    """Raise ModelMismatch, on all ranks, when ranks have not been given the same state: replicas would part, or wait for each other."""
    tensors = {str(path): value for path, value in tree_flatten_with_path([whole["model"], whole["optimizer"].get("state", {})])[0]
               if isinstance(value, Tensor)}
    names = sorted(tensors)
    mine = [run["step"], run["loss_scale"], _hash(names), _hash([digest(tensors[name]) for name in names])]
    everyone = world.all_gather_object(mine, label="load a state")
    if len({theirs[2] for theirs in everyone}) > 1:
        return   # other names do not fit the model of some rank, which says so later
    if other := next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), None):
        what = "values" if everyone[other][:2] == everyone[0][:2] else "numbers of the run"
        raise ModelMismatch(f"rank {other} loads a state with other {what} than rank 0: give all ranks what one `full_state_dict()` gave")


def _hash(values: list[str]) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def own_parts(state: TrainingState, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state, with each value cut to this rank's part of the model."""
    parts = {name: {key: state.placement.part(name, value) for key, value in held.items()}
             for name, held in optimizer.get("state", {}).items()}
    return {**optimizer, "state": parts}


def expect_fit(state: TrainingState, saved: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Raise ModelMismatch, on all ranks, unless the optimizer state `saved` (this rank's parts) and fp8's fit this engine."""
    placement = state.placement
    problem = (misfit(state.optimizer, placement.owners, placement.slices(), saved) or state.float8.misfit(run["amax"])
               or stray_state(state))   # which would be gone
    state.world.agree(problem, error=ModelMismatch, label="load an optimizer")
