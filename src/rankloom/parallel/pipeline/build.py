"""The front door: from a list of pieces and the name of a schedule to this rank's part of a pipeline."""

from collections.abc import Sequence

from rankloom.parallel.pipeline.cut import Piece, balance, find_tied, make_stages
from rankloom.parallel.pipeline.measure import measure_pieces
from rankloom.parallel.pipeline.passes import send_gradients_first
from rankloom.parallel.pipeline.runtime import HOOKS, Hooks, Loss, MicroBatch, Pipeline
from rankloom.parallel.pipeline.schedules import SCHEDULES, make_plan
from rankloom.world.group import Group


def pipeline(pieces: Sequence[Piece], loss: Loss, group: Group, *, microbatches: int, schedule: str = "1f1b", chunks: int | None = None,
             example: MicroBatch | None = None, hooks: Hooks = HOOKS) -> Pipeline:
    """Cut a model over the ranks of a group, for a loop of your own; every rank calls it with equal pieces.

    pieces:       of the model, in order, each of which takes what the one before gives (cut.py; `models.pieces.gpt_pieces`)
    loss:         loss(what the last piece gives, the second part of a micro-batch) -> (sum, count)
    microbatches: of a step
    schedule:     a name that `rankloom schedule list` knows
    chunks:       stages on each rank; left out, as few as the schedule allows
    example:      a micro-batch to measure the pieces with, so that stages take equally long; left out, they have equally many pieces
    raises:       ConfigError

    The parameters that this rank trains are those of `pipeline.stages`; drop the whole model, and the rest of its memory goes.
    """
    stages = group.size * (SCHEDULES[schedule].fewest if chunks is None and schedule in SCHEDULES else chunks or 1)
    plan = send_gradients_first(make_plan(schedule, stages, microbatches, chunks))
    times = [1.0] * len(pieces) if example is None else [piece.seconds for piece in measure_pieces(pieces, example, loss, group)]
    modules = make_stages(pieces, balance(times, stages))
    return Pipeline({stage: modules[stage] for stage in plan.held_by(group.rank)}, group, plan, loss, tied=find_tied(modules), hooks=hooks)
