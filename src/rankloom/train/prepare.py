"""`rl.prepare`: a plain model becomes an engine. Techniques are applied in the one legal order, written here once.

    number formats   cast what is cast as a whole
    equality         all ranks hold the model of rank 0
    split            over the axes tensor, expert, context
    memory           a model on the meta device gets stand-ins without memory, and values unit by unit, when it is placed
    fp8              linear layers change their class
    dropout          keyed by name and step
    blocks           recompute, activation offload, compile
    optimizer        built from stand-ins in the plain shapes: it says which tensors must stay whole
    placement        whole (stage 0) or cut (stages 1 to 3)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import torch
from torch import nn

from rankloom.base.errors import ConfigError
from rankloom.base.events import Sink
from rankloom.base.expect import expect_callable, expect_type
from rankloom.comm.choose import BACKEND
from rankloom.comm.compress import EXACT, expect_exact_steps
from rankloom.parallel.build import FirstValues, InitialValues, SharedValues, give_memory, put_stand_ins
from rankloom.parallel.context import RING, expect_kind
from rankloom.parallel.expert import TOKEN_AXES
from rankloom.parallel.model_split import ModelSplit
from rankloom.parallel.replicas import expect_same_tensors, make_replicas_equal
from rankloom.parallel.sharding import Apart
from rankloom.parallel.wrapping import AUTO, Policy
from rankloom.parallel.zero import STAGES, ShardingStrategy, expect_counts, shard
from rankloom.shard.matrices import lay_out_matrices
from rankloom.shard.optimizer import give_owners, make_optimizer, needs_whole_matrices, stand_in
from rankloom.shard.unit import Fill
from rankloom.train.batch import LOGICAL_SHARDS
from rankloom.train.budget import NONE
from rankloom.train.compiled import compile_blocks, compiled_in_place
from rankloom.train.dropout import DropoutKey, key_dropout
from rankloom.train.engine import Engine, Loss, Settings
from rankloom.train.fp8 import Float8Layers, linear_layers, to_float8
from rankloom.train.offload import offload_activations as offload_blocks
from rankloom.train.pipe import Pipe
from rankloom.train.placement import Optimizer, Placement, Whole
from rankloom.train.precision import Precision, cast_activations, cast_floats, formats_of, full_parameters, precision_named
from rankloom.train.recompute import Recompute
from rankloom.train.recompute import recompute as recompute_blocks
from rankloom.train.sharded import Sharded, ShardedCanonical, ShardedParts
from rankloom.train.split import PART_AXES, ROW_AXES, is_split, split_model
from rankloom.train.stages import LocalStages, PipelineEngine, ShardedStages, Turn, make_local
from rankloom.world.connect import World
from rankloom.world.group import Group
from rankloom.world.launch import fix_cublas_workspace

Build = Callable[[list[nn.Parameter]], Any]

HAS_EFFECT: dict[str, tuple[Any, tuple[int, ...]]] = {   # option: its default, and the stages at which another value has an effect
    "all_reduce": (BACKEND, (0,)), "compress": (EXACT, (0,)), "compress_after": (0, (0,)),
    "units": (AUTO, (1, 2, 3)), "offload": (False, (1, 2, 3)),
    "gradient_memory": (0, (2, 3)), "reshard_after_forward": (True, (3,)), "ahead": (1, (3,))}


def prepare(model: nn.Module, *, loss: Loss, optimizer: Build, world: World, stage: int = 0, accumulate: int = 1,
            clip: float | None = None, precision: str | Precision | None = None, deterministic: bool | int = False, seed: int = 0,
            schedule: Callable[[int], float] | None = None, all_reduce: str = BACKEND, compress: str = EXACT, compress_after: int = 0,
            units: Policy = AUTO, reshard_after_forward: bool | int = True, ahead: int = 1, offload: bool = False, gradient_memory: int = 0,
            initialize: Fill | None = None, tensor_plan: Mapping[str, str] | None = None, context: str = RING,
            pipe: Pipe | str | None = None, recompute: str | int = NONE, offload_activations: bool = False, compile: bool = False,
            sink: Sink | None = None) -> Engine:
    """Make a plain model train over all ranks of `world`. Every rank calls it with an equal model.

    loss:            loss(model, micro-batch) -> (sum, count)
    optimizer:       parameters -> torch optimizer, e.g. `lambda p: torch.optim.AdamW(p, lr=3e-4)`, or a list of them
    stage:           what is cut over the mesh's axis `shard` (all ranks, if the mesh names no axes): 0 nothing (DDP), 1 optimizer state,
                     2 gradients too, 3 parameters too (FSDP); along `replicate` everything is repeated
    accumulate:      micro-batches a step; gradients are reduced once, or at stages 2 and 3 each time (see gradient_memory)
    clip:            the largest global gradient norm
    precision:       fp32, fp64, bf16, fp16, fp8, or a `Precision`; left out, the dtypes the model has
    deterministic:   the same bits on any number of ranks: True for 8 logical shards, or their number
    seed:            of dropout, and of initial values drawn here
    schedule:        step (from 0) -> learning rate of the first parameter group; the others keep their ratio to it
    all_reduce:      "backend", "ring", or a registered name (stage 0)
    compress:        "none", or how gradients travel: "bf16", "int8", "int4", "1bit", "topk", "powersgd", "powersgd:16" (stage 0)
    compress_after:  steps that sum exactly first; after a resume they are counted anew (stage 0)
    units:           stages 1 to 3: what is gathered and reduced together: "auto" (repeated blocks), a module class or several, a number of
                     parameters, or a function of (name, module). Classes are the blocks of recompute, offload_activations and compile
                     too, at every stage
    reshard_after_forward: stage 3: False: parameters stay from forward to backward: fewer gathers, more memory; a number n: cut over n
                     neighbours until then: inside a node, where n is its ranks
    offload:         stages 1 to 3: slices, gradients and optimizer state lie in the host's memory, the optimizer runs on the CPU
    ahead:           stage 3: how many units are gathered ahead of their use
    gradient_memory: stages 2 and 3: bytes of whole gradients that micro-batches may leave behind, so that these are reduced once
    initialize:      gives a model on the meta device its values: initialize(name, tensor) writes whole tensors, in place, under the names
                     of the plain model, on any mesh; left out, modules do by `reset_parameters`
    tensor_plan:     mesh axis tensor: pattern of module names -> a word of parallel/tensor/styles.py; left out, the model's own tp_plan
    context:         mesh axis context: "ring" or "all_to_all" (parallel/context.py)
    pipe:            mesh axis pipe: the name of a schedule, or a `Pipe` that says where to cut; `accumulate` micro-batches run through it
    recompute:       what blocks compute again in backward in place of keeping it: "none", "selective", "full", or the bytes that
                     activations may take, as a number or as "24 GiB"
    offload_activations: what blocks keep for backward waits in the host's memory
    compile:         blocks go through torch.compile
    sink:            gets a StepDone after each step of this rank
    raises:          ConfigError; ModelMismatch, on all ranks, when their models differ
    """
    _check_types(model, world, loss=loss, schedule=schedule, sink=sink)
    model = compiled_in_place(model)
    settings = Settings(loss, accumulate, clip, precision_named(precision), _leaves(deterministic, world, accumulate), schedule, world)
    _check(model, world, settings, pipe)
    expect_exact_steps(compress_after, compress)
    are_blocks = _classes(units) and (recompute != NONE or offload_activations or compile)
    _check_stage(stage, all_reduce=all_reduce, compress=compress, compress_after=compress_after, units=AUTO if are_blocks else units,
                 reshard_after_forward=reshard_after_forward, ahead=ahead, offload=offload, gradient_memory=gradient_memory)
    _check_sums(world, settings, all_reduce, compress)
    expect_kind(context)
    if settings.leaves:
        _compute_alike(model, world)
    vars(model)["_prepared_by_rankloom"] = True   # what was refused so far has changed nothing
    initial = _bring_to_device(model, world, settings.precision, initialize, seed)
    dropout = DropoutKey(seed)
    split = split_model(model, world, tensor_plan, context, dropout.stand_at) if is_split(world) else None
    fill = None if initial is None else _stand_in(model, world, initial, split)
    float8 = _in_float8(model, world, settings.precision)
    key_dropout(model, dropout)
    settings = replace(settings, float8=float8, recompute=_change_blocks(model, world, units, recompute, offload_activations, compile))
    if stage == 0 and split is None:
        placement, made = _whole(model, world, settings, optimizer, fill, all_reduce=all_reduce, compress=compress,
                                 compress_after=compress_after)
    else:
        axes = Axes.of(world, stage, split)
        strategy = ShardingStrategy(
                    stage, formats_of(model, settings.precision), units=units, reshard_after_forward=reshard_after_forward, ahead=ahead,
                    offload=offload, gradient_memory=gradient_memory, hooked=world.mesh.pipe == 1, float8=float8.readers(model),
                    apart=Apart(split.experts, axes.fewer, world.group("shard", "expert")) if split is not None and split.experts else None)
        local = None
        if world.mesh.pipe > 1:
            turn = Turn(dropout, world.group("context"), context)
            chosen = Pipe.of(pipe, model, loss, settings.precision)
            local = make_local(model, chosen, world.group("pipe"), accumulate, units, turn, sparing=recompute != NONE)
        placement, made = _sharded(model, axes, strategy, optimizer, settings, fill=fill, local=local)
    kind = Engine if world.mesh.pipe == 1 else PipelineEngine
    return kind(placement.model, world.group(*ROW_AXES), settings, placement, made,
                tokens=world.group(*TOKEN_AXES), dropout=dropout, sink=sink)


@dataclass(frozen=True, slots=True)
class Axes:
    """Who cuts, who repeats, and who holds other elements.

    shard:    over which units are cut; one rank at stage 0
    replicas: over which slices are summed; `fewer`: those of experts
    holders:  all ranks that hold different elements; `everyone`: all ranks
    """

    shard: Group
    replicas: Group
    fewer: Group
    holders: Group
    everyone: Group
    split: ModelSplit | None

    @classmethod
    def of(cls, world: World, stage: int, split: ModelSplit | None) -> "Axes":
        """Those of a mesh. Where only a number of ranks was given, all of them are the shard axis."""
        if not world.axes_named:
            return cls(world, world.alone(), world.alone(), world, world, split)
        cut = ("shard",) if stage else ()
        repeated = tuple(axis for axis in TOKEN_AXES if axis not in cut)
        shard, replicas, fewer, holders = (_along(world, *axes) for axes in (
            cut, repeated, [axis for axis in repeated if axis != "expert"], [axis for axis in PART_AXES if axis != "shard" or stage]))
        return cls(shard, replicas, fewer, holders, world, split)


def _along(world: World, *axes: str) -> Group:
    return world.group(*axes) if axes else world.alone()


def _classes(units: Policy) -> tuple[type[nn.Module], ...]:
    return units if isinstance(units, tuple) else (units,) if isinstance(units, type) else ()


def _change_blocks(model: nn.Module, world: World, units: Policy, recompute: str | int, offload: bool, compiled: bool) -> Recompute | None:
    """Recompute, offload and compile, from the block outwards; hooks that gather parameters come around all three.

    Where units are module classes, these are the blocks.
    """
    blocks = _classes(units)
    chosen = recompute_blocks(model, recompute, blocks=blocks, group=_along(world, *(axis for axis in world.mesh.sizes() if axis != "pipe"))
                              ) if recompute != NONE else None
    if offload:
        offload_blocks(model, blocks=blocks)
    if compiled:
        compile_blocks(model, blocks=blocks)
    return chosen


def _in_float8(model: nn.Module, world: World, precision: Precision) -> Float8Layers:
    """Convert the layers that multiply in eight bits; those that compute in the master format do not."""
    if precision.float8 is None:
        return Float8Layers({}, None)
    full = full_parameters(model, precision)
    kept = tuple(name for name, module in linear_layers(model).items() if id(module.weight) in full)
    return to_float8(model, replace(precision.float8, keep=precision.float8.keep + kept), world.group("pipe", "tensor"))


def _compute_alike(model: nn.Module, world: World) -> None:
    torch.set_num_threads(1)   # how a kernel splits its sums depends on its threads
    for param in model.parameters():   # and on strides: those of a flat buffer, into which each stage puts parameters at another time
        param.data = param.data.contiguous()
    if world.device.type == "cuda":
        fix_cublas_workspace()
        torch.use_deterministic_algorithms(True)


def _bring_to_device(model: nn.Module, group: World, precision: Precision, initialize: Fill | None, seed: int) -> InitialValues | None:
    """Cast, move, and make equal; a model on the meta device stays there, and what its values will be is returned."""
    if precision.compute is not None and precision.master is None:
        cast_floats(model, precision.compute)
    if group.device.type == "meta":   # ranks on paper (world/paper.py): no values anywhere
        return None
    if not any(param.is_meta for param in model.parameters()):
        if initialize is not None:
            raise ConfigError("initialize has no meaning: the model has its values already; build it under torch.device('meta')")
        model.to(group.device)
        make_replicas_equal(model, group)
        return None
    expect_same_tensors(model, group)
    return InitialValues(model, initialize, seed)


def _stand_in(model: nn.Module, world: World, initial: InitialValues, split: ModelSplit | None) -> FirstValues:
    """Parameters of a model on the meta device get shapes without memory. Returns what will give them values."""
    put_stand_ins(model, world.device)
    return FirstValues(initial, _along(world, *(axis for axis in world.mesh.sizes() if axis != "pipe")), split=split)


def _whole(model: nn.Module, world: World, settings: Settings, build: Build, fill: FirstValues | None,
           **how: Any) -> tuple[Placement, Optimizer]:
    """Stage 0. how: gradients are summed"""
    if fill is not None:
        give_memory(model, fill, world.device, lambda param: True)
        world.agree(fill.make.problem, label="initial values")
    placement = Whole(model, world, settings.precision, leaves=settings.leaves, **how)
    return placement, make_optimizer(build, placement.owners)


def _sharded(model: nn.Module, axes: Axes, strategy: ShardingStrategy, build: Build, settings: Settings, *, fill: FirstValues | None,
             local: LocalStages | None) -> tuple[Placement, Optimizer]:
    """Stages 1 to 3; stage 0 too, over one rank, where the model is split or cut into stages."""
    device = torch.device("cpu") if strategy.offload else axes.shard.device
    stand_ins = {name: stand_in(param, dtype=strategy.formats(name, param).master, device=device)
                 for name, param in model.named_parameters() if param.requires_grad}
    optimizer = make_optimizer(build, stand_ins)
    whole = frozenset(needs_whole_matrices(optimizer, stand_ins))
    cast_activations(model, settings.precision)
    if local is not None:
        model, strategy = local.body, replace(strategy, units=lambda name, module: name in local.units)
    values = None if fill is None else SharedValues(fill, local.shared if local else frozenset())
    if values is not None:   # what is frozen is no unit below stage 3
        give_memory(model, values, axes.shard.device, lambda param: strategy.stage < 3 and not param.requires_grad)
    if strategy.stage < 3:
        for name, param in model.named_parameters():
            param.data = param if param.requires_grad else param.data.to(strategy.formats(name, param).compute)
    sharding = shard(model, axes.shard, axes.replicas, strategy, whole=whole, lay_out_whole=lay_out_matrices,
                     canonical=bool(settings.leaves), fill=values)
    if values is not None:
        axes.everyone.agree(values.problem(local.pipeline.group if local else axes.shard.alone()), label="initial values")
    if local is not None and axes.split is not None:
        placement: Placement = ShardedStages(sharding, axes.holders, axes.split, local)
    elif axes.split is not None:
        placement = ShardedParts(model, sharding, axes.holders, axes.split)
    else:
        placement = (ShardedCanonical if settings.leaves else Sharded)(model, sharding, axes.everyone)
    give_owners(optimizer, stand_ins, placement.owners, placement.pieces())
    return placement, optimizer


def _leaves(deterministic: bool | int, world: World, accumulate: int) -> int:
    expect_type("deterministic", deterministic, int, "True, False, or a number of logical shards")
    leaves = LOGICAL_SHARDS if deterministic is True else int(deterministic)
    if leaves and not world.size <= leaves:
        raise ConfigError(f"deterministic={leaves} logical shards cannot feed {world.size} ranks; give at least one shard for each rank")
    if leaves and accumulate != 1:
        raise ConfigError(f"accumulate={accumulate} has no meaning with deterministic={leaves}: each logical shard is one micro-batch")
    return leaves


def _check_types(model: Any, world: Any, **functions: Any) -> None:
    expect_type("model", model, nn.Module, "a torch module")
    expect_type("world", world, World, "what rl.init gives, or what rl.simulate and rl.spawn give their body")
    for name, function in functions.items():
        if function is not None or name == "loss":
            expect_callable(name, function, "a function")


def _check(model: nn.Module, world: World, settings: Settings, pipe: Pipe | str | None) -> None:
    if pipe is not None and world.mesh.pipe == 1:
        raise ConfigError("pipe= has no meaning on a mesh without pipe ranks")
    if settings.leaves and is_split(world):
        raise ConfigError("deterministic holds bits equal along the data axes only; use a mesh of replicate and shard")
    _check_numbers(settings)
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError("the model has no parameter that requires a gradient; there is nothing to train")
    if getattr(model, "_prepared_by_rankloom", False):
        raise ConfigError("this model has been prepared before; prepare a fresh copy")
    if settings.leaves and any(getattr(module, "track_running_stats", False) for module in model.modules()):
        raise ConfigError("deterministic training cannot hold running batch statistics equal on any number of ranks; "
                          "use GroupNorm or LayerNorm in place of BatchNorm")


def _check_numbers(settings: Settings) -> None:
    if isinstance(settings.accumulate, bool) or not isinstance(settings.accumulate, int) or settings.accumulate < 1:
        raise ConfigError(f"accumulate={settings.accumulate!r}, expected a whole number of micro-batches, 1 or more")
    expect_type("clip", settings.clip, (int, float, NoneType), "a norm above 0, or None")
    if settings.clip is not None and not settings.clip > 0:
        raise ConfigError(f"clip={settings.clip!r}, expected a norm above 0, or None")


def _check_sums(world: World, settings: Settings, all_reduce: str, compress: str) -> None:
    if is_split(world) and (all_reduce, compress) != (BACKEND, EXACT):
        raise ConfigError("all_reduce and compress are for data parallel alone: not on a mesh with other axes than replicate and shard")
    if settings.leaves and all_reduce != BACKEND:
        raise ConfigError(f"all_reduce={all_reduce!r} has no meaning with deterministic, which adds in an order of its own")
    if settings.leaves and compress != EXACT:
        raise ConfigError(f"compress={compress!r} has no meaning with deterministic: what is lost depends on the number of ranks")


def _check_stage(stage: int, **asked: Any) -> None:
    """Nothing is accepted and then ignored."""
    if isinstance(stage, bool) or stage not in (0, *STAGES):
        raise ConfigError(f"stage={stage!r} is none of 0 (everything whole), {', '.join(map(str, STAGES))}")
    for name, (default, stages) in HAS_EFFECT.items():
        if repr(asked[name]) != repr(default) and stage not in stages:   # 1 is equal to True, and asks for something else
            raise ConfigError(f"{name}={asked[name]!r} has no meaning at stage {stage}, only at stage {' and '.join(map(str, stages))}")
    expect_counts(ahead=asked["ahead"], gradient_memory=asked["gradient_memory"])
