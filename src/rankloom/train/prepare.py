"""`rl.prepare`: a plain model becomes an engine. Techniques are applied in the one legal order, written here once.

    check       what has no meaning is refused before anything is changed
    device      the model is cast, moved, and made equal to that of rank 0
    split       over the axes tensor, expert, context
    memory      a model on the meta device gets stand-ins without memory, and values unit by unit, when it is placed
    fp8         linear layers change their class
    dropout     keyed by name and step
    blocks      recompute, activation offload, compile
    stages      the axis pipe: this rank's are cut out of the model
    placement   the optimizer is made, and the model lies whole (stage 0) or cut (stages 1 to 3): make_placement.py
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import NoneType
from typing import Any

import torch
from torch import nn

from rankloom.base.compression import expect_exact_steps
from rankloom.base.errors import ConfigError
from rankloom.base.events import Sink
from rankloom.base.expect import expect_callable, expect_type
from rankloom.base.hooks import hooks_of
from rankloom.comm.choose import BACKEND
from rankloom.comm.compress import EXACT
from rankloom.parallel.build import FirstValues, InitialValues, put_stand_ins
from rankloom.parallel.context import RING, expect_kind
from rankloom.parallel.expert import TOKEN_AXES
from rankloom.parallel.model_split import ModelSplit
from rankloom.parallel.replicas import expect_not_averaged, expect_same_tensors, make_replicas_equal
from rankloom.parallel.tensor.apply import expect_plan
from rankloom.parallel.wrapping import AUTO, Policy, section_names
from rankloom.parallel.zero import STAGES, ShardingStrategy, expect_counts
from rankloom.shard.optimizer import Build, expect_build
from rankloom.shard.unit import Fill
from rankloom.train.alike import code_of, expect_alike
from rankloom.train.batch_size import LOGICAL_SHARDS
from rankloom.train.blocks import blocks_of
from rankloom.train.budget import NONE
from rankloom.train.compiled import compile_blocks, compiled_in_place
from rankloom.train.dropout import DropoutKey, key_dropout
from rankloom.train.engine import Engine, Loss, Settings
from rankloom.train.fp8 import Float8Layers, linear_layers, to_float8
from rankloom.train.make_placement import place_cut, place_whole
from rankloom.train.offload import offload_activations as offload_blocks
from rankloom.train.pipe import Pipe
from rankloom.train.pipeline_stages import PipelineEngine, Turn, make_local
from rankloom.train.precision import Precision, cast_floats, formats_of, full_parameters, precision_named
from rankloom.train.recompute import Recompute
from rankloom.train.recompute import recompute as recompute_blocks
from rankloom.train.split_model import ROW_AXES, is_split, split_model
from rankloom.world.connect import World
from rankloom.world.group import Group
from rankloom.world.launch import fix_cublas_workspace

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
    ahead:           stage 3: how many `units` are gathered ahead of their use
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
    raises:          ConfigError, on all ranks where they were given another way to train or optimizer; ModelMismatch, on all ranks, when
                     their models differ
    """
    expect_build(optimizer)
    _check_types(model, world, loss=loss, schedule=schedule, sink=sink)
    model = compiled_in_place(model)
    settings = Settings(loss, accumulate, clip, precision_named(precision), _leaves(deterministic, world, accumulate), schedule, world)
    summing: dict[str, Any] = {"all_reduce": all_reduce, "compress": compress, "compress_after": compress_after}
    cutting: dict[str, Any] = {"units": units, "reshard_after_forward": reshard_after_forward, "ahead": ahead, "offload": offload,
                               "gradient_memory": gradient_memory}
    changes_blocks = recompute != NONE or offload_activations or compile
    _check(model, world, settings)
    _check_axes(model, world, pipe=pipe, context=context, tensor_plan=tensor_plan, **cutting)
    _check_sums(world, settings, **summing)
    _check_stage(stage, summing | cutting | ({"units": AUTO} if changes_blocks and _classes(units) else {}))
    _check_blocks(model, world, stage, units, changes_blocks)
    expect_alike(world, "way to train", {"stage": int(stage), "clip": clip and float(clip), "precision": settings.precision, "seed": seed,
                                         "deterministic": settings.logical_shards, **summing})
    vars(model)["_prepared_by_rankloom"] = True   # what was refused so far has changed nothing

    if settings.logical_shards:
        _compute_alike(model, world)
    initial = _bring_to_device(model, world, settings.precision, initialize, seed)
    expect_alike(world, "model", code_of(model))
    dropout = DropoutKey(seed)
    split = split_model(model, world, tensor_plan, context, dropout.set_token_positions) if is_split(world) else None
    fill = None if initial is None else _stand_in(model, world, initial, split)
    float8 = _in_float8(model, world, settings.precision)
    key_dropout(model, dropout)
    settings = replace(settings, float8=float8, recompute=_change_blocks(model, world, units, recompute, offload_activations, compile))
    stages = None if world.mesh.pipe == 1 else make_local(
        model, Pipe.of(pipe, model, loss, settings.precision), world.group("pipe"), accumulate, units,
        Turn(dropout, world.group("context"), context), sparing=recompute != NONE)
    if stage == 0 and split is None:
        placement, made = place_whole(model, world, settings, optimizer, fill, **summing)
    else:
        strategy = ShardingStrategy(stage, formats_of(model, settings.precision), **cutting, hooked=stages is None,
                                    float8=float8.readers(model))
        placement, made = place_cut(model, world, settings, optimizer, strategy, fill=fill, split=split, stages=stages)
    kind = Engine if stages is None else PipelineEngine
    return kind(placement.model, world.group(*ROW_AXES), settings, placement, made,
                tokens=world.group(*TOKEN_AXES), dropout=dropout, sink=sink)


def _classes(units: Policy) -> tuple[type[nn.Module], ...]:
    return units if isinstance(units, tuple) else (units,) if isinstance(units, type) else ()


def _change_blocks(model: nn.Module, world: World, units: Policy, recompute: str | int, offload: bool, compiled: bool) -> Recompute | None:
    """Recompute, offload and compile, from the block outwards; hooks that gather parameters come around all three.

    Where units are module classes, these are the blocks.
    """
    blocks = _classes(units)
    chosen = recompute_blocks(model, recompute, blocks=blocks, group=_beside_pipe(world)) if recompute != NONE else None
    if offload:
        offload_blocks(model, blocks=blocks)
    if compiled:
        compile_blocks(model, blocks=blocks)
    return chosen


def _beside_pipe(world: World) -> Group:
    """The ranks that hold something of the same stage."""
    return world.group(*(axis for axis in world.mesh.sizes() if axis != "pipe"))


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
    return FirstValues(initial, _beside_pipe(world), split=split)


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


def _check_axes(model: nn.Module, world: World, *, pipe: Pipe | str | None, context: str, tensor_plan: Mapping[str, str] | None,
                **cutting: Any) -> None:
    """Nothing that is about an axis is accepted and then ignored."""
    expect_kind(context)
    if pipe is not None and world.mesh.pipe == 1:
        raise ConfigError("pipe= has no meaning on a mesh without pipe ranks")
    if context != RING and world.mesh.context == 1:
        raise ConfigError(f"context={context!r} has no meaning on a mesh without context ranks")
    if tensor_plan is not None and world.mesh.tensor == 1:   # the same plan may be for other meshes too
        expect_plan(model, tensor_plan)
    for name in ("gradient_memory", "reshard_after_forward", "ahead") if world.mesh.pipe > 1 else ():
        if repr(cutting[name]) != repr(HAS_EFFECT[name][0]):
            raise ConfigError(f"{name}={cutting[name]!r} has no meaning with pipe ranks: stages are gathered before the schedule and "
                              "reduced after it; leave it out")


def _check(model: nn.Module, world: World, settings: Settings) -> None:
    if world.mesh.pipe > 1 and any(found for name, found in hooks_of(model).items() if "state_dict" not in name):
        raise ConfigError("the model itself has hooks, and no rank of a pipeline calls it: put them on its layers, or on modules inside")
    if settings.logical_shards and is_split(world):
        raise ConfigError("deterministic holds bits equal along the data axes only; use a mesh of replicate and shard")
    _check_numbers(settings)
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError("the model has no parameter that requires a gradient; there is nothing to train")
    _expect_all_in_model(settings.loss, model)
    if getattr(model, "_prepared_by_rankloom", False):
        raise ConfigError("this model has been prepared before; prepare a fresh copy")
    expect_not_averaged(model)
    if (script := _script_with_parameters(model)) is not None:
        raise ConfigError(f"{script or 'the model'} is a TorchScript module with parameters: they cannot be laid out anew, and it takes no "
                          "hooks. Prepare the module that it was made of; compile=True makes blocks faster")
    if settings.logical_shards and any(getattr(module, "track_running_stats", False) for module in model.modules()):
        raise ConfigError("deterministic training cannot hold running batch statistics equal on any number of ranks; "
                          "use GroupNorm or LayerNorm in place of BatchNorm")
    if settings.accumulate > 1 or settings.logical_shards:
        _expect_no_frequencies(model)


def _expect_all_in_model(loss: Loss, model: nn.Module) -> None:
    """A loss may be a module, or a method of one."""
    owner, held = loss if isinstance(loss, nn.Module) else getattr(loss, "__self__", None), set(model.parameters())
    name = next((name for name, param in owner.named_parameters() if param.requires_grad and param not in held),
                None) if isinstance(owner, nn.Module) else None
    if name is not None:
        raise ConfigError(f"the loss has a parameter of its own, {name}, which nobody would train: make it a part of the "
                          "model, whose forward computes with it, or freeze it (`requires_grad_(False)`)")


def _script_with_parameters(model: nn.Module) -> str | None:
    """Activations and other functions may be scripts."""
    return next((name for name, module in model.named_modules()
                 if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None), None)


def _expect_no_frequencies(model: nn.Module) -> None:
    """On several ranks such an embedding is refused anyway."""
    name = next((name for name, module in model.named_modules() if getattr(module, "scale_grad_by_freq", False)), None)
    if name is not None:
        raise ConfigError(f"{name or 'the model'} has scale_grad_by_freq, which would count the rows of a micro-batch and not of the "
                          "batch: leave it out, or train on one rank with one micro-batch")


def _check_numbers(settings: Settings) -> None:
    if isinstance(settings.accumulate, bool) or not isinstance(settings.accumulate, int) or settings.accumulate < 1:
        raise ConfigError(f"accumulate={settings.accumulate!r}, expected a whole number of micro-batches, 1 or more")
    expect_type("clip", settings.clip, (int, float, NoneType), "a norm above 0, or None")
    if settings.clip is not None and not settings.clip > 0:
        raise ConfigError(f"clip={settings.clip!r}, expected a norm above 0, or None")


def _check_sums(world: World, settings: Settings, all_reduce: str, compress: str, compress_after: int) -> None:
    expect_exact_steps(compress_after, compress)
    if is_split(world) and (all_reduce, compress) != (BACKEND, EXACT):
        raise ConfigError("all_reduce and compress are for data parallel alone: not on a mesh with other axes than replicate and shard")
    if settings.logical_shards and all_reduce != BACKEND:
        raise ConfigError(f"all_reduce={all_reduce!r} has no meaning with deterministic, which adds in an order of its own")
    if settings.logical_shards and compress != EXACT:
        raise ConfigError(f"compress={compress!r} has no meaning with deterministic: what is lost depends on the number of ranks")


def _check_stage(stage: int, asked: Mapping[str, Any]) -> None:
    """Nothing is accepted and then ignored."""
    if isinstance(stage, bool) or stage not in (0, *STAGES):
        raise ConfigError(f"stage={stage!r} is none of 0 (everything whole), {', '.join(map(str, STAGES))}")
    for name, (default, stages) in HAS_EFFECT.items():
        if repr(asked[name]) != repr(default) and stage not in stages:   # 1 is equal to True, and asks for something else
            raise ConfigError(f"{name}={asked[name]!r} has no meaning at stage {stage}, only at stage {' and '.join(map(str, stages))}")
    expect_counts(ahead=asked["ahead"], gradient_memory=asked["gradient_memory"])


def _check_blocks(model: nn.Module, world: World, stage: int, units: Policy, changes_blocks: bool) -> None:
    """Whether they are found; on a split mesh modules become others first."""
    if changes_blocks and not is_split(world):
        blocks_of(model, _classes(units))
    if stage and not is_split(world):
        section_names(model, units)
