"""`rl.pipeline`: from a list of pieces and the name of a schedule to this rank's part of a pipeline."""

from collections.abc import Sequence
from numbers import Real

from torch import nn

from rankloom.base.expect import expect_callable, expect_type
from rankloom.parallel.pipeline.cut import Piece, balance, expect_pieces, find_tied, make_stages
from rankloom.parallel.pipeline.measure import MeasuredPiece, expect_example, measure_pieces, stage_costs
from rankloom.parallel.pipeline.passes import send_gradients_first
from rankloom.parallel.pipeline.runtime import HOOKS, Hooks, Loss, MicroBatch, Pipeline
from rankloom.parallel.pipeline.search import named_schedule, stages_a_rank
from rankloom.parallel.replicas.equal_start import make_replicas_equal
from rankloom.world.connect import expect_cpu_backend
from rankloom.world.group import Group


def pipeline(pieces: Sequence[Piece], loss: Loss, group: Group, *, microbatches: int, schedule: str = "1f1b", chunks: int | None = None,
             example: MicroBatch | None = None, memory: float | None = None, hooks: Hooks = HOOKS) -> Pipeline:
    """Cut a model over the ranks of a group, for a loop of your own. Every rank gives the same pieces, and gets the values of rank 0.

    pieces:       of the model, in order; each takes what the one before returns (cut.py; `models.pieces.gpt_pieces`)
    loss:         loss(output of the last piece, second part of a micro-batch) -> (sum, count)
    microbatches: of a step
    schedule:     a name of `rankloom schedule list`
    chunks:       stages on each rank; left out, as few as the schedule allows
    example:      a micro-batch to measure the pieces with, for stages that take equally long; left out, stages have equally many pieces
    memory:       with an example: the most bytes a stage may hold of parameters and of what a micro-batch leaves for its backward
    sent:         the model once, from rank 0, as `data_parallel`; nothing of a model on the meta device
    raises:       ConfigError, also for a process group that carries no tensors of the CPU when parameters are tied over stages;
                  ModelMismatch, on all ranks, when their pieces differ

    This rank trains the parameters of `pipeline.stages`. Drop the whole model to free the rest.
    """
    expect_type("group", group, Group, "a Group: the world that rl.init gives, world.group(axis), or rl.Group(process_group)")
    expect_type("memory", memory, (Real, type(None)), "a number of bytes")
    expect_pieces(pieces)
    expect_callable("loss", loss, "a function of the last piece's output and the second part of a micro-batch")
    stages = group.size * stages_a_rank(schedule, chunks)
    expect_example(example, memory)
    measured = None if example is None else measure_pieces(pieces, example, loss, group)
    sizes = None if measured is None else sizes_by_measure(measured, stages, memory)
    costs = None if measured is None or sizes is None else stage_costs(measured, sizes)
    runs = send_gradients_first(named_schedule(schedule, stages, microbatches, chunks, costs))
    modules = make_stages(pieces, sizes or balance([1.0] * len(pieces), stages))
    if tied := find_tied(modules):
        expect_cpu_backend(group)   # stages tell each other there whether they have a gradient
    whole = nn.ModuleList(modules)
    if not any(param.is_meta for param in whole.parameters()):
        make_replicas_equal(whole, group)   # a tied parameter that differs would stay two
    return Pipeline({stage: modules[stage] for stage in runs.held_by(group.rank)}, group, runs, loss, tied=tied, hooks=hooks)


def sizes_by_measure(measured: Sequence[MeasuredPiece], stages: int, memory: float | None = None) -> list[int]:
    """How many pieces each stage gets, for stages that take equally long, and hold `memory` bytes at most.

    raises: ConfigError when no cut keeps that limit
    """
    held = [float(piece.parameters + piece.activations) for piece in measured]
    return balance([piece.seconds for piece in measured], stages, memory=held, limit=float("inf") if memory is None else memory)
