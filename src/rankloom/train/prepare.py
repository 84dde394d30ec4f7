"""`rl.prepare`: a plain model becomes an engine. Techniques are applied in the one legal order, written here once.

    check       what has no meaning is refused before anything is changed: checks.py, rules.py
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
from typing import Any

import torch
from torch import nn

from rankloom.base.errors import ConfigError
from rankloom.base.events import Sink
from rankloom.comm.choose import BACKEND
from rankloom.comm.compress import EXACT
from rankloom.parallel.build import FirstValues, InitialValues, put_stand_ins
from rankloom.parallel.context import RING
from rankloom.parallel.equal_start import expect_same_tensors, make_replicas_equal
from rankloom.parallel.expert import TOKEN_AXES
from rankloom.parallel.model_split import ModelSplit
from rankloom.parallel.wrapping import AUTO, Policy
from rankloom.parallel.zero import ShardingStrategy
from rankloom.shard.optimizer import Build, expect_build
from rankloom.shard.unit import Fill
from rankloom.train.alike import code_of, expect_alike
from rankloom.train.blocks import classes_in
from rankloom.train.budget import NONE
from rankloom.train.checks import check_axes, check_blocks, check_model, check_numbers, check_options, check_types, logical_shards
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
    reshard_after_forward: stage 3. False: keep parameters between forward and backward. n: keep them sharded over n neighbouring ranks
                     (one node)
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
    check_types(model, world, loss=loss, schedule=schedule, sink=sink)
    model = compiled_in_place(model)
    shards = logical_shards(deterministic, world, accumulate)
    settings = Settings(loss, accumulate, clip, precision_named(precision), shards, schedule, world)
    summing: dict[str, Any] = {"all_reduce": all_reduce, "compress": compress, "compress_after": compress_after}
    cutting: dict[str, Any] = {"units": units, "reshard_after_forward": reshard_after_forward, "ahead": ahead, "offload": offload,
                               "gradient_memory": gradient_memory}
    changes_blocks = recompute != NONE or offload_activations or compile
    check_numbers(settings)
    check_model(model, world, settings)
    check_axes(model, world, context, tensor_plan)
    blocks_only = {"units": AUTO} if changes_blocks and classes_in(units) else {}   # classes are blocks then, at any stage
    check_options(world, settings, stage, {"pipe": pipe} | summing | cutting | blocks_only)
    check_blocks(model, world, stage, units, changes_blocks)
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


def _change_blocks(model: nn.Module, world: World, units: Policy, recompute: str | int, offload: bool, compiled: bool) -> Recompute | None:
    """Recompute, offload and compile, from the block outwards; hooks that gather parameters come around all three.

    Where units are module classes, these are the blocks.
    """
    blocks = classes_in(units)
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
