"""The last step of `rl.prepare`: make the optimizer, and lay out parameters, gradients and optimizer state.

    place_whole   stage 0: replicated on every rank
    place_cut     stages 1 to 3: sharded over the axis shard. Also stage 0 when the mesh splits the model: "sharded" over one rank

Read train/placement.py before this file, and parallel/zero.py for the stages.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from rankloom.base.errors import ConfigError
from rankloom.base.hooks import is_hooked
from rankloom.base.mesh import ROW_AXES, TOKEN_AXES
from rankloom.base.tensors import keep_until_read
from rankloom.comm.compress import Summing
from rankloom.parallel.data import embeddings
from rankloom.parallel.expert import ExpertReplicas
from rankloom.parallel.gradients.reducer import GradientReducer
from rankloom.parallel.gradients.same_bits import CanonicalReducer
from rankloom.parallel.initial_values import InitialParts, give_memory
from rankloom.parallel.model_split import ModelSplit
from rankloom.parallel.replicas.equal_start import expect_same_values
from rankloom.parallel.zero import ShardingStrategy, shard
from rankloom.shard.matrices import lay_out_matrices
from rankloom.shard.optimizer import Build, Optimizer, give_owners, make_optimizer, needs_whole_matrices, stand_in
from rankloom.train.engine import Settings
from rankloom.train.fingerprints import numbers_of
from rankloom.train.pipeline.stages import LocalStages, PipelinePlacement
from rankloom.train.placement import CanonicalReplicatedPlacement, Placement, ReplicatedPlacement
from rankloom.train.precision import cast_activations
from rankloom.train.sharded import CanonicalShardedPlacement, ShardedPlacement, SplitPlacement
from rankloom.train.split_model import is_split
from rankloom.world.group import Group
from rankloom.world.world import World


def place_whole(model: nn.Module, settings: Settings, build: Build, summing: Summing,
                fill: InitialParts | None) -> tuple[Placement, Optimizer]:
    """Replicate the model. fill: gives values to a model on the meta device"""
    world = settings.world
    if fill is not None:
        give_memory(model, fill, world.device, lambda param: True)
        world.agree(fill.make.problem, label="initial values")
    placement: ReplicatedPlacement
    if settings.logical_shards:
        placement = CanonicalReplicatedPlacement(model, world, settings.precision, CanonicalReducer)
    else:
        make_reducer = partial(GradientReducer, by_rows=embeddings(model), summing=summing)
        placement = ReplicatedPlacement(model, world, settings.precision, make_reducer)
    return placement, _make_same_optimizer(build, placement.owners, world)


def place_cut(model: nn.Module, settings: Settings, build: Build, strategy: ShardingStrategy, fill: InitialParts | None,
              *, split: ModelSplit, stages: LocalStages | None) -> tuple[Placement, Optimizer]:
    """Shard the model.

    split:  how its layers are already split over other axes
    stages: this rank's pipeline stages, if the mesh has a pipeline
    """
    world = settings.world
    cut, replicas = _ranks_of_slices(world, strategy.stage)
    device = torch.device("cpu") if strategy.offload else world.device
    stand_ins = {name: stand_in(param, dtype=strategy.formats(param).master, device=device)
                 for name, param in model.named_parameters() if param.requires_grad}
    optimizer = _make_same_optimizer(build, stand_ins, world)
    _expect_untouched(stand_ins)
    whole = frozenset(needs_whole_matrices(optimizer, stand_ins))
    _expect_uncut(whole, split)
    cast_activations(model, settings.precision)
    if stages is not None:
        model = stages.body
    strategy = _fitted_to_mesh(strategy, model, world, split, stages)
    in_no_unit = lambda param: strategy.stage < 3 and not param.requires_grad
    if fill is not None:
        fill.shared = stages.shared if stages else frozenset()
        give_memory(model, fill, world.device, in_no_unit)
    _cast_outside_units(model, strategy, in_no_unit)
    sharding = shard(model, cut, replicas, strategy, whole=whole, lay_out_whole=lay_out_matrices,
                     canonical=bool(settings.logical_shards), fill=fill)
    if fill is not None:
        world.agree(fill.problem(stages.pipeline.group if stages else world.alone()), label="initial values")
    placement: ShardedPlacement
    if stages is not None:
        placement = PipelinePlacement(sharding, world, split, stages, summing=strategy.summing)
    else:
        kind = SplitPlacement if is_split(world) else CanonicalShardedPlacement if settings.logical_shards else ShardedPlacement
        placement = kind(model, sharding, world, split, summing=strategy.summing)
    give_owners(optimizer, stand_ins, placement.owners, placement.slices())
    placement.hand_over(stand_ins)
    return placement, optimizer


def _fitted_to_mesh(strategy: ShardingStrategy, model: nn.Module, world: World, split: ModelSplit,
                    stages: LocalStages | None) -> ShardingStrategy:
    """The strategy, with the sections of stages, the ranks that sum gradients of experts, and the parameters that have copies."""
    if stages is not None:
        strategy = replace(strategy, units=lambda name, module: name in stages.units)
    if split.experts:
        experts = ExpertReplicas(split.experts, world.group(*_summed(strategy.stage, "expert")), world.group("shard", "expert"))
        strategy = replace(strategy, experts=experts)
    if strategy.summing.is_compressed:
        elsewhere = stages.shared if stages else frozenset[str]()
        strategy = replace(strategy, copied=elsewhere | {name for name, _ in model.named_parameters() if split.is_repeated(name)})
    return strategy


def _cast_outside_units(model: nn.Module, strategy: ShardingStrategy, in_no_unit: Callable[[nn.Parameter], bool]) -> None:
    """Cast parameters that are in no unit, which would cast them, to the dtype in which the model computes with them."""
    for param in model.parameters():
        if in_no_unit(param):
            keep_until_read(param)
            param.data = param.data.to(strategy.formats(param).compute)


def _expect_untouched(stand_ins: Mapping[str, nn.Parameter]) -> None:
    """Raise ConfigError, on all ranks, when the optimizer's function hooked or froze what it got: these are stand-ins."""
    for name, param in stand_ins.items():
        if is_hooked(param) or not param.requires_grad:
            raise ConfigError(f"the optimizer's function has {'hooked' if param.requires_grad else 'frozen'} {name}: it would do nothing. "
                              "From stage 1 on it gets this rank's pieces, and backward gives gradients to the model's own parameters. Do "
                              "it to these, before `rl.prepare`")


def _expect_uncut(whole: frozenset[str], split: ModelSplit) -> None:
    """Raise ConfigError, on all ranks, when an optimizer needs whole tensors and would get parts."""
    cut = [name for name in sorted(whole) if split.is_cut(name)]
    if cut:
        raise ConfigError(f"the optimizer of {cut[0]} (and of {len(cut) - 1} more) may look at whole tensors: it is not elementwise, as "
                          "Muon and Adafactor are not, or has hooks. Ranks along tensor and expert hold parts of it, and the update of a "
                          "part is not that part of the update. Give it an elementwise optimizer such as AdamW, or cut over shard or pipe "
                          "instead; one whose hooks treat each element by itself says so by `optimizer.elementwise = True`")


def _make_same_optimizer(build: Build, params: Mapping[str, nn.Parameter], world: World) -> Optimizer:
    """The optimizer of `params`. raises: ConfigError, on all ranks, when its numbers differ between ranks"""
    optimizer = make_optimizer(build, params)
    expect_same_values(world.group(*ROW_AXES), "optimizer", numbers_of(optimizer))
    return optimizer


def _ranks_of_slices(world: World, stage: int) -> tuple[Group, Group]:
    """The ranks over which units are sharded, and those over which gradients of slices are summed."""
    if not world.axes_named:   # a mesh without names: all ranks are the shard axis
        return world, world.alone()
    return world.group("shard") if stage else world.alone(), world.group(*_summed(stage))


def _summed(stage: int, *less: str) -> list[str]:
    """The axes over which gradients of slices are summed, without those in `less`."""
    return [axis for axis in TOKEN_AXES if axis not in less and not (stage and axis == "shard")]
