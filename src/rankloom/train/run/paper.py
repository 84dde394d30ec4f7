"""What each rank of a mesh would hold, before any rank is started.

There is no second model of memory here. The code of a real run (loop.py, ../prepare.py) builds an engine on a rank without peers or memory
(world/paper.py). The engine runs one step without a forward, and then reports what it holds, like a real one.
`tests/train/run/test_paper.py` compares the two.

One engine is built for each place along pipe. Ranks that differ along other axes run the same code on other elements:
parallel/model_split.py and shard/layout.py tell which. Their optimizers, which are elementwise in a config, hold state in proportion.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace

import torch

from rankloom.base.layout import Span
from rankloom.base.mesh import ROW_AXES
from rankloom.base.ranks import ParameterPart, RankPart
from rankloom.base.shares import share
from rankloom.models.config import GPTConfig
from rankloom.parallel.context.part import Context
from rankloom.parallel.model_split import ModelSplit
from rankloom.parallel.sections.state_dict import owned_slices
from rankloom.shard.optimizer import ParameterSlice
from rankloom.train.engine import Engine
from rankloom.train.memory_report import Held
from rankloom.train.pipeline.stages import PipelineEngine
from rankloom.train.run.loop import build_engine
from rankloom.train.run.schema import Config
from rankloom.train.sharded import ShardedPlacement
from rankloom.world.paper import NO_MEMORY, PaperWorld


def ranks_on_paper(config: Config, shape: GPTConfig) -> list[RankPart]:
    """What every rank of a run of `config` would hold, in rank order, for a model of `shape`.

    raises: ConfigError, as the run would before its first step
    """
    mesh = config.mesh.as_mesh()
    if config.train.offload:   # offload has the same bytes, but allocates them on the host
        config = config.model_copy(update={"train": config.train.model_copy(update={"offload": False})})
    parts, each = list[RankPart](), mesh.size // mesh.pipe   # ranks of one place along pipe follow each other
    for first in range(0, mesh.size, each):   # one engine at a time: without memory too, a large model has many objects
        engine = build_engine(config, shape, PaperWorld(first, mesh))
        step_on_paper(engine)
        held = engine.held()
        parts += [_part_of(engine, held, PaperWorld(rank, mesh), config) for rank in range(first, first + each)]
    return parts


def step_on_paper(engine: Engine) -> None:
    """A step without a forward. Afterwards memory is as after a real step: gradients and optimizer state have been made."""
    placement, shards = engine.placement, engine.settings.logical_shards
    if isinstance(placement, ShardedPlacement):
        placement.sharding.make_ready()
    totals = torch.zeros(2, dtype=torch.float64, device=NO_MEMORY)
    if shards:
        placement.begin_shards(shards)
        for shard in share(engine.group.rank, engine.group.size, shards):
            _backward(engine, last=False)
            placement.add_shard(shard, totals)
    else:
        _backward(engine, last=True)
    placement.finish(None if shards else totals, mark=0)
    engine.optimizer.step()
    placement.publish()


def _backward(engine: Engine, *, last: bool) -> None:
    placement = engine.placement
    with placement.sync(last):
        torch.stack([param.sum() for param in placement.model.parameters() if param.requires_grad]).sum().backward()
        if isinstance(engine, PipelineEngine):
            engine.placement.sharding.forward_backward.collect()


def _part_of(engine: Engine, held: Held, world: PaperWorld, config: Config) -> RankPart:
    """What the rank of `world` holds. engine: built for this rank, or for one at the same place along pipe, which holds `held`"""
    placement, rows, tokens = engine.placement, world.group(*ROW_AXES), world.group("context")
    slices, split = placement.slices(), None
    if isinstance(placement, ShardedPlacement):
        split = replace(placement.split, tensor=world.group("tensor"), expert=world.group("expert"))
        if placement.group.size > 1:
            of_this_rank = owned_slices(placement.sharding, world.group("shard").rank)
            held = replace(held, optimizer=held.optimizer * _elements(of_this_rank) // _elements(slices))
            slices = of_this_rank
    return RankPart(
        rank=world.rank, coords=world.mesh.coords(world.rank),
        stages=tuple(engine.pipeline.stages) if isinstance(engine, PipelineEngine) else (0,),
        parameters=tuple(_parameter(slices[name], split) for name, _ in placement.model.named_parameters() if name in slices),
        rows=share(rows.rank, rows.size, config.batch().global_),
        tokens=Context(tokens, config.train.seq_len).spans[tokens.rank],
        held=asdict(held))


def _elements(slices: Mapping[str, ParameterSlice]) -> int:
    return sum(owned.stop - owned.start for owned in slices.values())


def _parameter(owned: ParameterSlice, split: ModelSplit | None) -> ParameterPart:
    local = tuple(owned.shape)
    whole = local if split is None else tuple(split.whole_shape(owned.name, owned.shape))
    spans: list[tuple[Span, ...]] = [(Span(0, length),) for length in whole]
    if split is not None:
        holding = split.held[owned.name]
        if holding.dim is not None:
            spans[holding.dim] = holding.spans[split.tensor.rank]
        if owned.name in split.experts:
            mine = replace(split, held={}).cut(owned.name, torch.arange(whole[0], device="cpu")).tolist()
            spans[0] = (Span(mine[0], mine[-1] + 1),)
    return ParameterPart(owned.name, whole, tuple(spans), local, (owned.start, owned.stop))
