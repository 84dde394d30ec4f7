"""What `rl.prepare` checks before it changes anything: every mistake that its arguments and the model show.

rules.py says which options exclude each other. A mistake that shows only when a technique is applied is checked there.
"""

from collections.abc import Mapping
from numbers import Integral
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import nn

from rankloom.base.compression import expect_exact_steps
from rankloom.base.errors import ConfigError
from rankloom.base.expect import expect_callable, expect_type
from rankloom.base.hooks import hooks_of
from rankloom.base.mesh import ROW_AXES
from rankloom.parallel.axes import axes_of
from rankloom.parallel.context.rows import RING, expect_kind
from rankloom.parallel.replicas.equal_start import expect_same_values, expect_same_values_in
from rankloom.parallel.replicas.refused import expect_fresh, expect_no_sync_batch_norm
from rankloom.parallel.sections.wrapping import Policy, comparable, expect_policy, section_names
from rankloom.parallel.tensor.apply import expect_overlap, expect_plan
from rankloom.parallel.zero import STAGES, expect_counts
from rankloom.train.batch_size import LOGICAL_SHARDS
from rankloom.train.blocks.wrap import blocks_of, classes_in
from rankloom.train.engine import Loss, Settings
from rankloom.train.pipeline.pipe import without_functions
from rankloom.train.recompute import parse_policy
from rankloom.train.rules import conflicts
from rankloom.train.split_model import beside_pipe, is_split
from rankloom.world.world import World


def logical_shards(deterministic: bool | int, world: World, accumulate: int) -> int:
    """The number of logical shards that the option asks for; 0 for none.

    raises: ConfigError for fewer logical shards than ranks, and for `accumulate` with logical shards
    """
    expect_type("deterministic", deterministic, int, "True, False, or a number of logical shards")
    shards = LOGICAL_SHARDS if deterministic is True else int(deterministic)
    if shards and not world.size <= shards:
        raise ConfigError(f"deterministic={shards} logical shards cannot feed {world.size} ranks; give at least one shard for each rank")
    if shards and accumulate != 1:
        raise ConfigError(f"accumulate={accumulate} has no meaning with deterministic={shards}: each logical shard is one micro-batch")
    return shards


def check_types(model: Any, world: Any, **functions: Any) -> None:
    """Check the types of model and world, and that functions are callable. A function other than the loss may be None."""
    expect_type("model", model, nn.Module, "a torch module")
    expect_type("world", world, World, "what rl.init gives, or what rl.simulate and rl.spawn give their body")
    for name, function in functions.items():
        if function is not None or name == "loss":
            expect_callable(name, function, "a function")


def check_plain(settings: Settings, *, seed: Any, **switches: Any) -> None:
    """Check the ranges of numbers, and the types of the seed and of what is on or off: a text such as "none" would count as on."""
    if isinstance(settings.accumulate, bool) or not isinstance(settings.accumulate, int) or settings.accumulate < 1:
        raise ConfigError(f"accumulate={settings.accumulate!r}, expected a whole number of micro-batches, 1 or more")
    expect_type("clip", settings.clip, (int, float, NoneType), "a norm above 0, or None")
    if isinstance(settings.clip, bool) or not (settings.clip is None or settings.clip > 0):
        raise ConfigError(f"clip={settings.clip!r}, expected a norm above 0, or None")
    expect_type("seed", seed, Integral, "a whole number")
    for name, switch in switches.items():
        expect_type(name, switch, (int, np.bool_, NoneType), "True or False")


def check_model(model: nn.Module, settings: Settings) -> None:
    """Check that the model can be trained: it has trainable parameters, is not yet prepared, and has no unsupported module."""
    world = settings.world
    if world.mesh.pipe > 1 and any(found for name, found in hooks_of(model).items() if "state_dict" not in name):
        raise ConfigError("the model itself has hooks, and no rank of a pipeline calls it: put them on its layers, or on modules inside")
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError("the model has no parameter that requires a gradient; there is nothing to train")
    _expect_all_in_model(settings.loss, model)
    if getattr(model, "_prepared_by_rankloom", False):
        raise ConfigError("this model has been prepared before, or is a copy of one that has: its hooks belong to another engine. Build "
                          "the model anew; to give it the values so far, first load `engine.full_state_dict()[\"model\"]` into it")
    expect_fresh(model)
    for axis, group in axes_of(model).items():
        if group.size > 1:
            raise ConfigError(f"the model was cut along the axis {axis!r} before. Give `prepare` the whole model, and a world made with a "
                              f"mesh, such as rl.init(mesh=rl.Mesh({axis}={group.size})): it cuts the model itself")
    expect_no_sync_batch_norm(model, world.group(*ROW_AXES).size)
    if (script := _script_with_parameters(model)) is not None:
        raise ConfigError(f"{script or 'the model'} is a TorchScript module with parameters: they cannot be laid out anew, and it takes no "
                          "hooks. Prepare the module that it was made of; compile=True makes blocks faster")
    if settings.logical_shards and any(getattr(module, "track_running_stats", False) for module in model.modules()):
        raise ConfigError("deterministic training cannot hold running batch statistics equal on any number of ranks; "
                          "use GroupNorm or LayerNorm in place of BatchNorm")
    if settings.accumulate > 1 or settings.logical_shards:
        _expect_no_frequencies(model)


def _expect_all_in_model(loss: Loss, model: nn.Module) -> None:
    """Check that a loss which is a module, or a method of one, has no trainable parameters outside the model."""
    owner, held = loss if isinstance(loss, nn.Module) else getattr(loss, "__self__", None), set(model.parameters())
    name = next((name for name, param in owner.named_parameters() if param.requires_grad and param not in held),
                None) if isinstance(owner, nn.Module) else None
    if name is not None:
        raise ConfigError(f"the loss has a parameter of its own, {name}, which nobody would train: make it a part of the "
                          "model, whose forward computes with it, or freeze it (`requires_grad_(False)`)")


def _script_with_parameters(model: nn.Module) -> str | None:
    """The name of a TorchScript module with parameters; those without parameters are allowed."""
    return next((name for name, module in model.named_modules()
                 if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None), None)


def _expect_no_frequencies(model: nn.Module) -> None:
    """Check that no embedding has scale_grad_by_freq. (On several ranks it is refused in any case.)"""
    name = next((name for name, module in model.named_modules() if getattr(module, "scale_grad_by_freq", False)), None)
    if name is not None:
        raise ConfigError(f"{name or 'the model'} has scale_grad_by_freq, which would count the rows of a micro-batch and not of the "
                          "batch: leave it out, or train on one rank with one micro-batch")


def check_options(settings: Settings, stage: int, asked: Mapping[str, Any]) -> None:
    """Check that every option has an effect. asked: the options of rules.py, except `deterministic`"""
    if isinstance(stage, bool) or stage not in (0, *STAGES):
        raise ConfigError(f"stage={stage!r} is none of 0 (everything whole), {', '.join(map(str, STAGES))}")
    expect_exact_steps(asked["compress_after"], asked["compress"])
    asked = {"deterministic": settings.logical_shards, "float8": settings.precision.float8 is not None, **asked}
    world = settings.world
    ranks = world.mesh.sizes() if world.axes_named else {"shard": world.size}
    for option, reason in conflicts(asked, stage=stage, ranks=ranks):
        raise ConfigError(f"{option}={asked[option]!r} {reason}; leave it out")
    expect_counts(ahead=asked["ahead"], gradient_memory=asked["gradient_memory"])


def check_axes(model: nn.Module, world: World, context: str, tensor_plan: Mapping[str, str] | None, tensor_overlap: int) -> None:
    """Check the options of the mesh axes context and tensor."""
    expect_kind(context)
    if context != RING and world.mesh.context == 1:
        raise ConfigError(f"context={context!r} has no meaning on a mesh without context ranks")
    if tensor_plan is not None and world.mesh.tensor == 1:   # the plan may be meant for other meshes; still check it
        expect_plan(model, tensor_plan)
    expect_overlap("tensor_overlap", tensor_overlap)


def check_blocks(model: nn.Module, world: World, stage: int, units: Policy, changes_blocks: bool, *, recompute: str | int) -> None:
    """Check that the model has the blocks and sections that options name, unless a split replaces modules first."""
    parse_policy(recompute)
    expect_policy(units)
    if changes_blocks and not is_split(world):
        blocks_of(model, classes_in(units))
    if stage and not is_split(world):
        section_names(model, units)


def check_alike(settings: Settings, stage: int, asked: Mapping[str, Any]) -> None:
    """Check that all ranks were given the same options, as far as results or the order of collectives depend on them. A collective.

    asked:  options that are not in `settings`, by name
    raises: ConfigError, on all ranks
    """
    world = settings.world
    mine = {"stage": int(stage), "clip": settings.clip and float(settings.clip), "precision": settings.precision,
            "deterministic": settings.logical_shards, **asked, "pipe": without_functions(asked["pipe"]),
            "units": comparable(asked["units"])}
    if isinstance(asked["tensor_plan"], Mapping):
        mine["tensor_plan"] = dict(asked["tensor_plan"])
    if stage > 1 or is_split(world):   # each micro-batch has collectives of its own
        mine["accumulate"] = settings.accumulate
    else:   # a rank may have less memory than others
        del mine["offload"]
    if not world.mesh.in_use().keys() & {"context", "tensor", "expert"}:   # no block has collectives; making a plan has
        mine["recompute"] = "a number of bytes" if parse_policy(asked["recompute"])[1] else "none, selective or full"
    of_stage: dict[str, Any] = {name: mine.pop(name) for name in ("offload", "recompute") if name in mine and world.mesh.pipe > 1}
    expect_same_values(world, "way to train", mine)
    if of_stage:   # the first stage of a pipeline holds the most micro-batches, and may recompute or offload more than the others
        expect_same_values_in(beside_pipe(world), world, "way to train", of_stage)
