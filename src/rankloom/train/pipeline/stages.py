"""The mesh axis `pipe` in an engine: this rank holds some stages of the model, and a step runs a schedule.

Parameters are gathered before the schedule and gradients reduced after it, because ranks run their stages in different orders. A stage's
parameters keep their names in the whole model, so optimizers, norms and saved states do not depend on the cut. A parameter in two
stages (a tied embedding) counts once.

Read parallel/pipeline/build.py and runtime.py before this file.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankloom.base.errors import BatchError, ConfigError, ModelMismatch, UnitError
from rankloom.base.hooks import hook_gradient
from rankloom.base.modes import evaluating
from rankloom.base.nested import map_tensors
from rankloom.base.tensors import as_bytes, digest
from rankloom.checkpoint.manifest import Part
from rankloom.comm.compress import Summing
from rankloom.parallel.context.tokens_apart import SomeTokens
from rankloom.parallel.expert import expert_layers
from rankloom.parallel.model_split import ModelSplit, PartCoords
from rankloom.parallel.pipeline.cut import Piece, Stage, expect_pieces, in_runs
from rankloom.parallel.pipeline.passes import send_gradients_first
from rankloom.parallel.pipeline.runtime import Hooks, Pipeline
from rankloom.parallel.pipeline.search import named_schedule, stages_a_rank
from rankloom.parallel.pipeline.tied import sum_tied
from rankloom.parallel.sections.sharding import Sharding
from rankloom.parallel.sections.state_dict import changed_parameter
from rankloom.parallel.sections.wrapping import Policy, section_names
from rankloom.shard.gradient import Gradient
from rankloom.shard.optimizer import ParameterSlice
from rankloom.shard.optimizer_state import PLAIN_VALUES, Entry
from rankloom.train.batches import cut_batch
from rankloom.train.engine import COUNT, Engine
from rankloom.train.expert_books import ExpertBooks
from rankloom.train.pipeline.pipe import ChosenPipe, expect_counted_on_one_rank, refuse_masks_in_several_stages
from rankloom.train.pipeline.running_microbatch import RunningMicrobatch
from rankloom.train.precision import UNMEASURED
from rankloom.train.sharded import SplitPlacement
from rankloom.world.group import Group
from rankloom.world.world import World


@dataclass(frozen=True, slots=True)
class LocalStages:
    """This rank's part of a pipelined model.

    body:    this rank's modules, under their names in the whole model; never called itself
    shapes:  those of the trainable parameters of the whole model, by name, in its order
    entries: the names in the state dict of the whole model, in its order
    holders: parameter -> the pipe ranks that have it
    """

    body: nn.Module
    pipeline: Pipeline
    running: RunningMicrobatch
    shapes: Mapping[str, torch.Size]
    entries: tuple[str, ...]
    holders: Mapping[str, tuple[int, ...]]
    units: frozenset[str]   # modules that are sections
    experts: tuple[str, ...]   # MoE layers of the whole model, in its order

    @property
    def shared(self) -> frozenset[str]:
        """Parameters that several pipe ranks have."""
        return frozenset(name for name, ranks in self.holders.items() if len(ranks) > 1)


def make_local(model: nn.Module, chosen: ChosenPipe, group: Group, microbatches: int, units: Policy,
               running: RunningMicrobatch, *, sparing: bool) -> LocalStages:
    """Cut `model` over the ranks of `group`. Afterwards the whole model is not needed.

    sparing: recompute is on: do not hold the factors of weight gradients while the input gradient is sent (`send_gradients_first`)
    raises:  ConfigError for an unknown or impossible schedule, or more stages than pieces
    """
    shapes = {name: param.shape for name, param in model.named_parameters() if param.requires_grad}
    sections, experts = frozenset(section_names(model, units)), tuple(expert_layers(model))
    pieces = pieces_for(chosen, model, running)
    count = group.size * stages_a_rank(chosen.schedule, chosen.chunks)
    schedule = named_schedule(chosen.schedule, count, microbatches, chosen.chunks)
    schedule = schedule if sparing else send_gradients_first(schedule)
    runs = [_under_first_names(run, model) for run in in_runs(pieces, chosen.cut(pieces, count))]
    stages = [Stage(run) for run in runs]
    _expect_all_in_stages(model, stages)
    expect_counted_on_one_rank(model, [(schedule.owner[number], stage) for number, stage in enumerate(stages)])
    refuse_masks_in_several_stages(stages)
    holders: dict[str, set[int]] = {}
    for number, stage in enumerate(stages):
        for name, _ in stage.named_parameters():
            holders.setdefault(name, set()).add(schedule.owner[number])
    mine = schedule.held_by(group.rank)
    pipeline = Pipeline({number: stages[number] for number in mine}, group, schedule, chosen.loss(model),
                        hooks=Hooks(before=running.select_microbatch, scale=lambda: running.scale))
    body = _Held([piece for number in mine for piece in runs[number]])
    body.training = model.training   # the engine looks at it, as at any model's
    return LocalStages(body, pipeline, running, shapes, tuple(model.state_dict()),
                       {name: tuple(sorted(ranks)) for name, ranks in holders.items()}, sections, experts)


class _Held(Stage):
    """The modules of all stages of a rank. Each stage runs by itself, when the schedule says so."""

    def forward(self, *values: Any) -> Any:
        raise ConfigError("a rank of a pipeline has some stages of the model and cannot call it: `step` and `evaluate` of the engine run "
                          "them. To generate, load engine.full_state_dict()[\"model\"] into a model of one process")


def _expect_all_in_stages(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Raise ConfigError for a parameter or a buffer that no stage has: it would be neither trained nor saved."""
    held = {id(value) for stage in stages for value in (*stage.parameters(), *stage.buffers())}
    saved = model.state_dict(keep_vars=True).keys()
    left = [name for name, param in model.named_parameters() if id(param) not in held]
    left += [name for name, buffer in model.named_buffers() if id(buffer) not in held and name in saved]
    if left:
        constant = "" if left[0] in dict(model.named_parameters()) else "; a constant buffer may be registered with persistent=False"
        raise ConfigError(f"{left[0]} of {type(model).__name__} is in no piece, so no stage would train and save it. A piece names all "
                          f"modules that its function uses: ({{\"layers.3\": module}}, function){constant}")


def pieces_for(chosen: ChosenPipe, model: nn.Module, running: RunningMicrobatch) -> list[Piece]:
    """The pieces of a model. What they ask of the running micro-batch they get from `running`.

    raises: ConfigError for pieces that know no `part`, where tokens are spread over context ranks
    """
    offered: dict[str, Any] = {"part": running.part, "inputs": running.inputs}
    if chosen.example is not None:
        offered["example"] = map_tensors(lambda t: t.to(running.context.device), chosen.example[0])
    asked = inspect.signature(chosen.pieces).parameters
    running.packs = "part" in asked
    if running.context.size > 1 and not running.packs:
        raise ConfigError(f"{running.context.where('pipeline')}: these pieces of a {type(model).__name__} take no `part`, so their "
                          "attention cannot see tokens on other ranks; see gpt_pieces in models/pieces.py, or use one context rank")
    given = chosen.pieces(model, **{name: offered[name] for name in offered if name in asked})
    pieces: Any = list(given) if isinstance(given, Iterable) else given   # a function may yield them
    expect_pieces(pieces)
    return pieces   # type: ignore[no-any-return]


def _under_first_names(pieces: Sequence[Piece], model: nn.Module) -> list[Piece]:
    """The pieces, with every tied parameter under its first name in the model, even if the module of that name is on another rank."""
    firsts = {id(param): name for name, param in model.named_parameters()}
    here = dict(Stage(pieces).named_parameters())
    named = {firsts.get(id(param), name): param for name, param in here.items()}
    (parts, run), *others = pieces
    return [({name: param for name, param in named.items() if name not in here} | dict(parts), run), *others]


class StageContents(NamedTuple):
    """What the stages of a rank hold.

    tensors: name, dtype and whole shape of each
    values:  those that are no tensors, by name
    buffers: name -> digest
    """

    tensors: list[list[Any]]
    values: dict[str, Any]
    buffers: dict[str, str]


class PipelinePlacement(SplitPlacement):
    """Slices of this rank's stages.

    After every backward, 16-bit gradients are added to a buffer of the dtype in which they are reduced. So are gradients of tied
    parameters, which are summed over stages.
    """

    def __init__(self, sharding: Sharding, world: World, split: ModelSplit, local: LocalStages, *, summing: Summing):
        super().__init__(local.body, sharding, world, split, summing=summing)
        self.local = local
        elsewhere = torch.empty(0, dtype=torch.float32, device=sharding.group.device)
        self.owners = {name: self.owners.get(name, nn.Parameter(elsewhere)) for name in local.shapes}
        self._tied: dict[str, Gradient] = {}
        for gradient in sharding.gradients():
            for name, param in gradient.unit.params.items():
                if len(local.holders[name]) > 1:
                    self._tied[name] = gradient
                if name in self._tied or param.dtype != gradient.unit.formats.reduce:
                    hook_gradient(param, gradient.land, name)

    @property
    def pipe(self) -> Group:
        """The ranks that hold the other stages."""
        return self.local.pipeline.group

    def _groups(self) -> tuple[Group, ...]:
        return *super()._groups(), self.pipe

    def slices(self) -> dict[str, ParameterSlice]:
        """The slices of all parameters; empty ones for those of other stages."""
        mine = super().slices()
        return {name: mine.get(name, ParameterSlice(name, shape, 0, 0)) for name, shape in self.local.shapes.items()}

    def abandon(self) -> None:
        """Clear all gradients, and those that an interrupted schedule left in `.grad`."""
        if problem := changed_parameter(self.sharding):   # without a pipeline, hooks of the forward look for it
            raise UnitError(problem)
        super().abandon()
        for param in self.model.parameters():
            param.grad = None

    def local_gradients(self) -> dict[str, Tensor]:
        """See Placement; here also those in `.grad`, where a schedule leaves them for `collect`."""
        left = {name: param.grad for gradient in self.sharding.gradients() for name, param in gradient.unit.params.items()}
        return {name: grad for name, grad in left.items() if grad is not None} | super().local_gradients()

    def collect(self) -> None:
        """After a schedule: sum the gradients of tied parameters over their stages, then reduce everything. A collective."""
        for name in (name for name in self.local.holders if name in self._tied):   # the same order on all ranks
            gradient = self._tied[name]
            like = torch.empty_like(gradient.unit.params[name], dtype=gradient.unit.formats.reduce)
            total = sum_tied(gradient.local().get(name), like, self.pipe, self.local.holders[name])
            if total is not None:
                gradient.set_landed(name, total)
        with self.sync(True):
            self.sharding.forward_backward.collect()

    def counted(self, owned: ParameterSlice, values: Tensor) -> list[tuple[Tensor, int]]:
        """A tied parameter has copies on each of its stages."""
        return [(view, copies * len(self.local.holders[owned.name])) for view, copies in super().counted(owned, values)]

    def parts_like(self, name: str, owned: ParameterSlice, values: Tensor) -> list[Part]:
        """As of any split model. A tied parameter is written by the first of its stages."""
        later = self.pipe.rank != min(self.local.holders[owned.name])
        return [replace(part, is_copy=later) for part in super().parts_like(name, owned, values)]

    def values(self, rank: int | None) -> dict[str, Tensor]:
        """The values, in the order of the model."""
        found = super().values(rank)
        return {name: found[name] for name in (*self.local.entries, *found) if name in found}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Each stage loads its part. Names that no stage has are passed on, so that they raise."""
        elsewhere = {*self.local.entries, *self.local.holders} - self.model.state_dict(keep_vars=True).keys()
        super().load({name: value for name, value in state.items() if name not in elsewhere})

    def _coords(self) -> PartCoords:
        return replace(super()._coords(), pipe=self.pipe.rank)

    def _collect(self, entries: list[Entry], goal: PartCoords | None) -> dict[str, Any]:
        """Stage by stage: gather the values, and send them to the rank of `goal`, or to all other stages."""
        mine, whole = {entry.name: entry for entry in entries}, dict[str, Any]()
        plain = {entry.name: entry.get() for entry in entries if entry.dtype is None}
        self.pipe.agree(_odd_value(plain), label="extra state of stages")
        tensors = [[entry.name, str(entry.dtype).removeprefix("torch."), list(self._whole_shape(entry))]
                   for entry in entries if entry.dtype]
        buffers = {name: digest(buffer) for name, buffer in self.model.named_buffers(remove_duplicate=False) if name in mine}
        contents = self.pipe.all_gather_object(StageContents(tensors, plain, buffers), label="what stages hold")
        stages = [StageContents(*fields) for fields in contents]   # as JSON, named tuples arrive as lists
        _expect_equal_buffers([stage.buffers for stage in stages])
        for root, stage in enumerate(stages):
            whole = stage.values | whole
            for name, kind, shape in (tensor for tensor in stage.tensors if tensor[0] not in whole):
                value = self._join(mine[name], goal) if root == self.pipe.rank else None
                whole[name] = self._pass_on(value, root, torch.empty(shape, dtype=getattr(torch, kind), device="meta"), goal)
        return whole if goal in (None, self._coords()) else {}

    def _pass_on(self, value: Tensor | None, root: int, like: Tensor, goal: PartCoords | None) -> Tensor | None:
        """Send the value that stage `root` has gathered. Returns it on the ranks that get it."""
        here = None if value is None else value.to(self.group.device).contiguous()
        if goal is None:
            sent = torch.empty_like(like, device=self.group.device) if here is None else here
            self.pipe.broadcast(sent, root, label="values of a stage")
            return sent.cpu()
        if self.pipe.rank == root != goal.pipe and here is not None:
            self.pipe.send(as_bytes(here), goal.pipe, label="values of a stage")
        if root != goal.pipe and self._coords() == goal:
            got = torch.empty_like(like, device=self.group.device)
            self.pipe.recv(as_bytes(got), root, label="values of a stage")
            return got.cpu()
        return value if root == goal.pipe else None


def _odd_value(values: Mapping[str, Any]) -> str | None:
    """Why values other than tensors cannot be sent to other stages, in words, or None."""
    found = next((name for name, value in values.items() if not isinstance(value, PLAIN_VALUES)), None)
    return None if found is None else (f"{found} is a {type(values[found]).__name__}, which stages cannot hand to each other: "
                                       "keep tensors, numbers, strings or None as extra state")


def _expect_equal_buffers(stages: Sequence[Mapping[str, str]]) -> None:
    """Raise ModelMismatch, on all pipe ranks, when a buffer differs between stages. stages: digests of each stage's buffers"""
    for name in dict.fromkeys(name for found in stages for name in found):
        ranks = [at for at, found in enumerate(stages) if name in found]
        other = next((at for at in ranks if stages[at][name] != stages[ranks[0]][name]), None)
        if other is not None:
            raise ModelMismatch(f"buffer {name} stands in stages of pipe ranks {ranks[0]} and {other}, and has other values there: each "
                                "has changed it by itself, where one process would have done so in turn. A buffer that changes in training "
                                "belongs in one stage: cut the model so, or give each of its users a buffer of its own")


class PipelineEngine(Engine):
    """An engine whose step is a schedule over the stages of all pipe ranks."""

    placement: PipelinePlacement

    @property
    def pipeline(self) -> Pipeline:
        """This rank's part of the pipeline."""
        return self.placement.local.pipeline

    def _run_in_free_order(self, batch: Any) -> Tensor:
        totals = self._run_schedule(batch)
        self.placement.begin_last_backward(totals[COUNT], self.scale.value)
        self.placement.collect()
        return self._finish(totals)

    def _run_schedule(self, batch: Any) -> Tensor:
        """Forward and backward of all micro-batches; gradients are left in `.grad`."""
        microbatches = cut_batch(batch, self.settings.accumulate, self.world_rank)
        if self.settings.precision.scaled and self.scale is UNMEASURED:   # the first backward comes before the last forward
            with evaluating(self.model):
                self._measure_scale(self._call_loss(microbatches[0])[1])
        self.placement.sharding.make_ready()
        rows = self._dropout.number_rows(microbatches, self.group)
        self.placement.local.running.begin(self.steps_done, rows, self.scale.value)
        return self._experts.split(self.pipeline.step([self._taken(microbatch) for microbatch in microbatches]))

    def _limited_to(self, some: SomeTokens) -> AbstractContextManager[None]:
        return self.placement.local.running.limited_to(some)

    def _call_loss(self, microbatch: Any) -> tuple[Tensor, Tensor]:
        """The loss without gradients, for evaluation."""
        self.placement.sharding.make_ready()
        self.placement.local.running.begin(self.steps_done, [range(1)])
        totals = self._experts.split(self.pipeline.evaluate([self._taken(microbatch)]))
        return totals[0], totals

    @cached_property
    def _experts(self) -> ExpertBooks:
        return ExpertBooks(self.model, self.tokens, self.pipeline.group, self.placement.local.experts)

    def _run_alone(self, batch: Any) -> Tensor:
        self.placement.abandon()
        return self._run_schedule(batch)

    def _taken(self, microbatch: Any) -> tuple[Any, Any]:
        """This rank's tokens of a micro-batch, which `running` takes. raises: BatchError unless it has two parts"""
        if not (isinstance(microbatch, tuple | list) and len(microbatch) == 2):
            raise BatchError(f"rank {self.world_rank}: a pipeline takes batches of two parts, what the first stage is called with and what "
                             f"the loss compares with; this is a {type(microbatch).__name__}")
        given, targets = microbatch
        return self.placement.local.running.take(given, targets, self.settings.precision.compute)
