"""`rl.prepare`: turns a plain model into an engine. Techniques are applied in the one order that works, written here once.

    check       options that make no sense are refused before anything is changed: checks.py, rules.py
    device      the model is cast, moved, and made equal to that of rank 0
    split       layers are split over the mesh axes tensor, expert and context
    memory      parameters on the meta device get shapes without memory; the placement step gives them values, unit by unit
    fp8         linear layers change their class to fp8 ones
    dropout     random masks are keyed by module name and step
    blocks      recompute, activation offload, compile
    stages      axis pipe: this rank's stages are cut out of the model
    placement   the optimizer is made; the model is replicated (stage 0) or sharded (stages 1 to 3): make_placement.py
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rankloom.base.compression import BACKEND, EXACT
from rankloom.base.errors import ConfigError
from rankloom.base.events import Sink
from rankloom.base.mesh import ROW_AXES, TOKEN_AXES
from rankloom.base.modes import with_memory
from rankloom.base.tensors import keep_until_read
from rankloom.comm.compress import Summing
from rankloom.parallel.context.rows import RING
from rankloom.parallel.initial_values import InitialParts, InitialValues, put_stand_ins
from rankloom.parallel.replicas.equal_start import expect_same_tensors, expect_same_values, make_replicas_equal
from rankloom.parallel.sections.wrapping import AUTO, Policy
from rankloom.parallel.zero import ShardingStrategy
from rankloom.shard.optimizer import Build, expect_build
from rankloom.shard.unit import Fill
from rankloom.train.blocks.activation_offload import offload_activations as offload_blocks
from rankloom.train.blocks.budget import NONE
from rankloom.train.blocks.compiled import compile_blocks, compiled_in_place
from rankloom.train.blocks.wrap import classes_in
from rankloom.train.checks import (
    check_alike,
    check_axes,
    check_blocks,
    check_model,
    check_options,
    check_plain,
    check_types,
    logical_shards,
)
from rankloom.train.dropout import DropoutKey, key_dropout
from rankloom.train.engine import Engine, Loss, Settings
from rankloom.train.fingerprints import code_of
from rankloom.train.fp8 import Float8Layers, linear_layers, to_float8
from rankloom.train.make_placement import place_cut, place_whole
from rankloom.train.pipeline.measured_cut import cut_by_measure
from rankloom.train.pipeline.pipe import Pipe
from rankloom.train.pipeline.running_microbatch import RunningMicrobatch
from rankloom.train.pipeline.stages import PipelineEngine, make_local
from rankloom.train.precision import Precision, cast_floats, formats_of, full_parameters, precision_named
from rankloom.train.recompute import Recompute
from rankloom.train.recompute import recompute as recompute_blocks
from rankloom.train.split_model import beside_pipe, is_split, split_model
from rankloom.world.launch import fix_cublas_workspace
from rankloom.world.world import World


@with_memory   # its argument may be built in the same `with torch.device("meta")`
def prepare(model: nn.Module, *, loss: Loss, optimizer: Build, world: World, stage: int = 0, accumulate: int = 1,
            clip: float | None = None, precision: str | Precision | None = None, deterministic: bool | int = False, seed: int = 0,
            schedule: Callable[[int], float] | None = None, all_reduce: str = BACKEND, compress: str = EXACT, compress_after: int = 0,
            units: Policy = AUTO, reshard_after_forward: bool | int = True, ahead: int = 1, offload: bool = False, gradient_memory: int = 0,
            initialize: Fill | None = None, tensor_plan: Mapping[str, str] | None = None, tensor_overlap: int = 1, context: str = RING,
            pipe: Pipe | str | None = None, recompute: str | int = NONE, offload_activations: bool = False, compile: bool = False,
            sink: Sink | None = None) -> Engine:
    """Prepare a plain model for training on all ranks of `world`. A collective: every rank passes an equal model.

    A step then computes what one process would compute with the whole batch:

        engine = rl.prepare(model, loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=3e-4), world=world, stage=3)
        report = engine.step(batch)   # this rank's rows

    loss:            loss(model, micro-batch) -> (sum, count): the loss summed over its items, and how many items there are
    optimizer:       a function: list of parameters -> torch optimizer, or list of optimizers
    stage:           what is sharded over the mesh axis `shard` (a mesh without named axes: over all ranks): 0 nothing (DDP), 1 optimizer
                     state, 2 gradients too, 3 parameters too (FSDP). Along the axis `replicate` everything is replicated
    accumulate:      micro-batches per step. Stages 0 and 1 reduce gradients once per step, stages 2 and 3 once per micro-batch (but see
                     gradient_memory; compressed gradients once)
    clip:            the largest global gradient norm
    precision:       "fp32", "fp64", "bf16", "fp16", "fp8", or a `Precision`. Left out, the model keeps its dtypes
    deterministic:   the same bits on any number of ranks. True: the batch is cut into 8 logical shards; or give their number
    seed:            seed of dropout, and of initial values where `prepare` draws them
    schedule:        a function: step (from 0) -> learning rate of the first parameter group. The others keep their ratio to it
    all_reduce:      stage 0: "backend", "ring", or a registered name
    compress:        how gradients are sent: "none", "bf16", "fp16", "int8", "int4", "1bit", "topk", "powersgd" or "powersgd:16". From
                     stage 1 on, and where the mesh splits the model: see shard/sums.py
    compress_after:  how many first steps send exact gradients; counted again after a resume
    units:           stages 1 to 3: which parameters are gathered and reduced together: "auto" (each repeated block), a module class or a
                     tuple of classes, a number of parameters, or a function of (name, module). At every stage, classes also say what is
                     a block for recompute, offload_activations and compile
    reshard_after_forward: stage 3. True: free gathered parameters after forward. False: keep them until backward. n: keep them
                     sharded over n neighbouring ranks (one node)
    ahead:           stage 3: how many units are prefetched, that is, gathered ahead of their use
    offload:         stages 1 to 3: slices, gradients and optimizer state are in host memory, and the optimizer runs on the CPU
    gradient_memory: stages 2 and 3: bytes of unsharded gradients that may be kept between micro-batches; these are reduced only once
    initialize:      for a model on the meta device: initialize(name, tensor) writes a tensor's initial values in place. Names are
                     those of the plain model, and tensors are whole, on any mesh. Left out, modules' `reset_parameters` is called
    tensor_plan:     axis tensor: pattern of module names -> a style of parallel/tensor/styles.py. Left out, the model's own tp_plan
    tensor_overlap:  axis tensor: in how many pieces a product of row-cut weights is computed, each sent while the next is multiplied. With
                     more than one, weight gradients are also computed while input gradients are summed (parallel/tensor/overlap.py)
    context:         axis context: "ring" or "all_to_all" (parallel/context)
    pipe:            axis pipe: the name of a schedule, or a `Pipe` that says where to cut, or measures it. Its micro-batches are the
                     `accumulate` ones
    recompute:       what blocks recompute in backward instead of keeping it: "none", "selective", "full"; or the most bytes that
                     activations may take, as a number or as "24 GiB"
    offload_activations: what blocks keep for backward is moved to host memory until then
    compile:         compile each block with torch.compile
    sink:            called with a `StepDone` after each step of this rank
    raises:          ConfigError for options that make no sense, alone or together, and, on all ranks, when ranks pass different ones;
                     ModelMismatch, on all ranks, when their models differ
    """
    expect_build(optimizer)
    check_types(model, world, loss=loss, schedule=schedule, sink=sink)
    model = compiled_in_place(model)
    shards = logical_shards(deterministic, world, accumulate)
    settings = Settings(loss, accumulate, clip, precision_named(precision), shards, schedule, world, sink)
    sharding: dict[str, Any] = {"units": units, "reshard_after_forward": reshard_after_forward, "ahead": ahead, "offload": offload,
                                "gradient_memory": gradient_memory}
    asked: dict[str, Any] = {"pipe": pipe, "tensor_overlap": tensor_overlap, "recompute": recompute, "all_reduce": all_reduce,
                             "compress": compress, "compress_after": compress_after, **sharding}
    changes_blocks = recompute != NONE or offload_activations or compile
    check_plain(settings, seed=seed, offload=offload, offload_activations=offload_activations, compile=compile)
    check_model(model, settings)
    check_axes(model, world, context, tensor_plan, tensor_overlap)
    units_name_blocks = changes_blocks and classes_in(units)   # which has an effect at any stage
    check_options(settings, stage, {**asked, "units": AUTO if units_name_blocks else units, "offload_activations": offload_activations})
    check_blocks(model, world, stage, units, changes_blocks, recompute=recompute)
    check_alike(settings, stage, {"seed": seed, "context": context, "tensor_plan": tensor_plan, **asked})
    vars(model)["_prepared_by_rankloom"] = True   # up to here nothing has been changed

    if settings.logical_shards:
        _compute_alike(model, world)
    initial = _bring_to_device(model, world, settings.precision, initialize, seed)
    expect_same_values(world, "model", code_of(model))

    chosen = None if world.mesh.pipe == 1 else cut_by_measure(Pipe.of(pipe, model, loss, settings.precision), model, world)
    dropout = DropoutKey(seed)
    split = split_model(model, world, tensor_plan, tensor_overlap, context, dropout.set_token_positions)
    fill = None if initial is None else InitialParts(initial, beside_pipe(world), split=split)
    if fill is not None:
        put_stand_ins(model, world.device)
    float8 = _in_float8(model, world, settings.precision)
    key_dropout(model, dropout)
    settings = replace(settings, float8=float8, recompute=_change_blocks(model, world, units, recompute, offload_activations, compile))
    stages = None if chosen is None else make_local(model, chosen, world.group("pipe"), accumulate, units,
                                                    RunningMicrobatch(dropout, world.group("context"), context), sparing=recompute != NONE)

    if stage == 0 and not is_split(world):
        placement, made_optimizer = place_whole(model, settings, optimizer, Summing(all_reduce, compress, compress_after), fill)
    else:
        strategy = ShardingStrategy(stage, formats_of(model, settings.precision), **sharding, hooked=stages is None,
                                    float8=float8.readers(model), summing=Summing(all_reduce, compress, compress_after))
        placement, made_optimizer = place_cut(model, settings, optimizer, strategy, fill, split=split, stages=stages)
    kind = Engine if stages is None else PipelineEngine
    return kind(world.group(*ROW_AXES), settings, placement, made_optimizer, tokens=world.group(*TOKEN_AXES), dropout=dropout)


def _change_blocks(model: nn.Module, world: World, units: Policy, recompute: str | int, offload: bool, compiled: bool) -> Recompute | None:
    """Apply recompute, offload and compile to the blocks, in this order. Hooks that gather parameters stay outside all three.

    Where `units` are module classes, modules of these classes are the blocks.
    """
    blocks = classes_in(units)
    chosen = recompute_blocks(model, recompute, blocks=blocks, group=beside_pipe(world)) if recompute != NONE else None
    if offload:
        offload_blocks(model, blocks=blocks)
    if compiled:
        compile_blocks(model, blocks=blocks, dynamic=False if chosen and world.mesh.pipe > 1 else None)
    return chosen


def _in_float8(model: nn.Module, world: World, precision: Precision) -> Float8Layers:
    """Convert the linear layers to fp8, except those that compute in the master dtype."""
    if precision.float8 is None:
        return Float8Layers({}, None)
    full = full_parameters(model, precision)
    kept = tuple(name for name, module in linear_layers(model).items() if id(module.weight) in full)
    return to_float8(model, replace(precision.float8, keep=precision.float8.keep + kept), world.group("pipe", "tensor"))


def _compute_alike(model: nn.Module, world: World) -> None:
    torch.set_num_threads(1)   # how a kernel splits its sums depends on the number of threads
    for param in model.parameters():   # and on strides, those of dims of length 1 too: flat buffers make them those of a new tensor
        keep_until_read(param)
        param.data = param.data.reshape(-1).view(param.shape)
    if world.device.type == "cuda":
        fix_cublas_workspace()
        torch.use_deterministic_algorithms(True)


def _bring_to_device(model: nn.Module, group: World, precision: Precision, initialize: Fill | None, seed: int) -> InitialValues | None:
    """Cast the model, move it, and make ranks equal. A model on the meta device stays there; returns what will give its values."""
    if precision.compute is not None and precision.master is None:
        cast_floats(model, precision.compute)
    if group.device.type == "meta":   # simulated on paper (world/paper.py): no rank has values
        return None
    if not any(param.is_meta for param in model.parameters()):
        if initialize is not None:
            raise ConfigError("initialize has no meaning: the model has its values already; build it under torch.device('meta')")
        model.to(group.device)
        make_replicas_equal(model, group)
        return None
    expect_same_tensors(model, group)
    return InitialValues(model, initialize, seed)
