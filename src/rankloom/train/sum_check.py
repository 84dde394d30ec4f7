"""Before the first step: does the loss function return a sum, as it must, or a mean?

A loss that returns a mean, with a count, is a mistake that no type shows: training goes on with gradients that are too small by the
factor count. So the loss of some rows is compared with the losses of their two halves.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rankloom.base.errors import LossError
from rankloom.base.mesh import SHARING_AXES
from rankloom.base.modes import evaluating, runs_together
from rankloom.parallel.context.tokens_apart import ALL, EVEN, ODD, SomeTokens
from rankloom.train.batches import expect_rows, rows_if_any, rows_of, with_halves
from rankloom.train.blocks.compiled import is_compiled
from rankloom.train.put_back import state_put_back
from rankloom.world.group import Group
from rankloom.world.world import World

LimitedTo = Callable[[SomeTokens], AbstractContextManager[None]]   # a context in which the model is given these tokens only
EQUAL_IF_WITHIN = 1e-5   # of a loss: nondeterministic kernels make ranks differ by less when they compute the same
MEAN_IF_WITHIN = 0.05   # of the whole: a mean over unpadded items weighs the halves by counts that are not known here
SAME_IF_WITHIN = 1e-2   # of a loss: 16-bit rounding and nondeterministic kernels make two runs differ by less


@dataclass(frozen=True, slots=True)
class Trial:
    """What the loss function returned for some rows, or for some tokens of them; two NaN when it raised an error."""

    loss: float
    count: float


def expect_sum_of_step(totals_of: Callable[[Any], Tensor], model: nn.Module, batch: Any, *, world: World, group: Group, tokens: Group,
                       microbatches: int, shards: int, limited_to: LimitedTo) -> None:
    """Before the first step, on about one micro-batch: raise when the loss seems to return a mean, or a rank has too few rows; with
    context ranks also when it is no sum over tokens.

    group:  the ranks over which rows are distributed   tokens: those over which losses are summed
    microbatches: of a step                             shards: logical shards, over which rows are redistributed; 0: none
    limited_to: see `expect_sum_over_tokens`
    A collective of the world: all ranks run the same number of forwards, as a forward may be a collective. If the micro-batch of any rank
    cannot be cut by rows, no forward is run on any rank, and rank 0 warns that the loss was not checked.
    """
    rows = rows_of(batch, world.rank) if shards or microbatches > 1 else rows_if_any(batch)
    mine = torch.tensor([(-1 if rows is None else rows) * group.size + group.rank], device=group.device)
    held, rank = divmod(int(tokens.all_reduce(mine, "min", label="rows")), group.size)
    if not shards and held >= 0:
        expect_rows(held, microbatches, group.ranks[rank])
    if held < 0 and world.rank == 0:
        warnings.warn("a batch without tensors, or with tensors that are not equally long along dim 0, is one sample (a graph, packed "
                      "tokens). Its loss is not tried in halves: make sure that it is a sum, and that it counts what it sums. Where "
                      "samples are rows, give tensors, each with one row per sample", stacklevel=4)   # of `engine.step`
    if held < 1:   # on some rank
        return
    parts = with_halves(batch, min(held, max(2, held // (shards or microbatches))), world.rank)
    on_any = lambda here: bool(world.all_reduce(torch.tensor([here], dtype=torch.uint8, device=group.device), "max",
                                                label="is the loss a sum"))
    devices = [group.device] if group.device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=world.size == 1):   # on several ranks draws are not those of one process in any case
        expect_sum(totals_of, model, parts, world.rank, on_any, together=runs_together(model) or world.group(*SHARING_AXES).size > 1)
    if world.mesh.context > 1:
        expect_sum_over_tokens(totals_of, model, parts[0], world, limited_to, on_any)


def expect_sum(totals_of: Callable[[Any], Tensor], model: nn.Module, parts: Sequence[Any], rank: int, on_any: Callable[[bool], bool],
               together: bool = False) -> None:
    """Raise when the loss function seems to return a mean with the count of a sum.

    A loss that changes when it is computed again draws random numbers, and is not judged. Nor is one that raises an error: it may work in
    training mode only. The loss is called in evaluation mode, with gradients enabled, and equally often on every rank. What it changes
    in the model is put back (train/put_back.py), and on a single rank torch's own generator. What else it changes, such as another
    model's running statistics, it changes a few times before the first step. A compiled model is not checked: it would be compiled again
    for the halves.
    parts:    rows, and their two halves
    on_any:   whether a condition holds on any rank
    together: ranks wait for each other in a forward
    raises:   LossError
    """
    if on_any(is_compiled(model)):   # a pipeline stage may hold nothing that is
        return
    with evaluating(model), state_put_back(model):
        whole, first, second = [_try(totals_of, part, model, rank, together) for part in parts]
        rows = rows_of(parts[0], rank)
        if _is_mean_with_constant_count(whole, first, second, rows):
            warnings.warn(f"rank {rank}: the loss function returns a mean and counts {whole.count:g}, however many rows it gets ({rows} "
                          f"rows give {whole.loss:g}, their halves {first.loss:g} and {second.loss:g}): micro-batches of other lengths "
                          "weigh as much as this one. Return the sum, and how many items that were", stacklevel=5)   # of `engine.step`
        suspect = _is_mean(whole, first, second, rows)
        if not on_any(suspect):
            return
        again = _try(totals_of, parts[0], model, rank, together)
    if suspect and abs(again.loss - whole.loss) <= SAME_IF_WITHIN * abs(whole.loss):
        raise LossError(f"rank {rank}: the loss function counts {whole.count:g} items, but seems to return their mean, not their sum: "
                        f"a batch of {rows} rows gives {whole.loss:g}, its two halves {first.loss:g} and {second.loss:g}. Return the sum, "
                        "for example `F.cross_entropy(logits, targets, reduction='sum'), targets.numel()`")


def expect_sum_over_tokens(totals_of: Callable[[Any], Tensor], model: nn.Module, batch: Any, world: World, limited_to: LimitedTo,
                           on_any: Callable[[bool], bool]) -> None:
    """With context ranks: raise when the loss of a row is not the sum, nor its count, of what its tokens add.

    Each rank computes the loss of its own tokens. So a few tokens go through the model, each attending only to itself: first all, then
    those with even positions, then the others. The losses and counts of these two must add up. A loss that draws random numbers or raises
    an error is not judged; of a model that looks at whole rows (routers of experts), only the counts are.
    limited_to: limited_to(some tokens) is a context in which the model returns values of these only, as it does of a rank's own in training
    raises: LossError, on all ranks. A collective of the world, as `on_any`
    """
    if on_any(is_compiled(model)):
        return
    trials: list[Trial] = []
    tried = [SomeTokens(which) for which in (ALL, ALL, EVEN, ODD)]
    with evaluating(model), state_put_back(model):
        for some in tried:
            with torch.no_grad(), limited_to(some):   # as nothing is kept, the budget of a recompute sees none of it
                trials.append(_try(totals_of, batch, model, world.rank, together=True))
    whole, again, even, odd = trials
    loss_of_halves, count_of_halves = even.loss + odd.loss, even.count + odd.count
    is_judged = math.isfinite(whole.loss + loss_of_halves) and abs(again.loss - whole.loss) <= EQUAL_IF_WITHIN * abs(whole.loss)
    adds_up = on_any(any(some.shows_rows for some in tried)) or abs(loss_of_halves - whole.loss) <= MEAN_IF_WITHIN * abs(whole.loss)
    wrong = is_judged and not (adds_up and abs(count_of_halves - whole.count) <= SAME_IF_WITHIN * whole.count)   # counts may be weights
    group = world.group("context")
    said = " and ".join(f"{half.loss:g} and {half.count:g}" for half in (even, odd))
    group.agree(f"rank {world.rank}: with {group.size} context ranks each computes the loss of its own tokens, but this is no sum over "
                f"tokens: of a few tokens it gives {whole.loss:g} and counts {whole.count:g}, of their halves {said}. Sum over tokens, and "
                "count those that it got values of, as `model(tokens, targets=targets)` does; or use one context rank" if wrong else None,
                error=LossError, label="a sum over tokens")


def _is_mean(whole: Trial, first: Trial, second: Trial, rows: int) -> bool:
    """Whether the loss seems to be a mean. For a sum, the two halves add up to the whole. For a mean, the whole is the mean of the halves,
    weighted by items or by rows.

    (Halves that add up to twice the whole are no proof: a model may take another branch for a half.) When one half has hardly any
    items, a sum and a mean look alike, and the loss passes.
    """
    counts_add_up = first.count + second.count == whole.count > 1
    losses_add_up = abs(first.loss + second.loss - whole.loss) <= SAME_IF_WITHIN * abs(whole.loss)
    if not (counts_add_up and whole.loss) or losses_add_up:
        return False
    by_items, by_rows = (first.count, second.count), (rows - rows // 2, rows // 2)
    return any(abs((one * first.loss + other * second.loss) / ((one + other) * whole.loss) - 1.0) < MEAN_IF_WITHIN
               for one, other in (by_items, by_rows))


def _is_mean_with_constant_count(whole: Trial, first: Trial, second: Trial, rows: int) -> bool:
    """For a mean with a constant count, the whole is the mean of the halves, which differ unless it looks at no rows."""
    mean = (first.loss * (rows - rows // 2) + second.loss * (rows // 2)) / rows
    apart = abs(first.loss - second.loss)   # little where rows are many and the model knows nothing yet, as an untrained language model
    near = min(apart, SAME_IF_WITHIN * abs(whole.loss)) / 10   # tells the mean from one half, and from a sum beside a large constant
    is_constant = first.count == second.count == whole.count > 0
    return is_constant and abs(mean - whole.loss) <= near and apart > EQUAL_IF_WITHIN * abs(whole.loss)


def _try(totals_of: Callable[[Any], Tensor], part: Any, model: nn.Module, rank: int, together: bool) -> Trial:
    """Call the loss once. If it raises an error, the step will show whether it does so in training too.

    The error is passed on when ranks wait for each other in a forward and this rank did not finish its own.
    """
    begun, ended = list[int](), list[int]()
    try:
        with (model.register_forward_pre_hook(lambda *_: begun.append(1), prepend=True),
              model.register_forward_hook(lambda *_: ended.append(1))):
            return Trial(*totals_of(part).tolist())
    except Exception as error:
        if together and not len(begun) == len(ended) > 0:
            error.add_note(f"rank {rank}: the loss was tried in evaluation mode when this was raised, before the first step, to see "
                           "whether it is a sum; ranks share a forward here, so each must get through it in that mode too")
            raise
        return Trial(math.nan, math.nan)
