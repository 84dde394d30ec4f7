"""Find what is wrong with a step: a mean in place of a sum, randomness that depends on the ranks, equal noise on all ranks, the source
of a NaN or infinity.

A loss that returns a mean, with a count, is a mistake that no type shows: training goes on with gradients that are too small by the
factor count. So before the first step the loss of some rows is compared with the losses of their two halves.

Looking for a NaN in every gradient of every step would cost a pass over the gradients. So a step only looks at the global norm. If
that is not finite, there is no update, and each rank runs the same micro-batches again, alone, and looks at each gradient.
"""

import hashlib
import math
import os
import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rankloom.base.compression import EXACT
from rankloom.base.errors import BatchError, ConfigError, LossError, NonFinite
from rankloom.base.modes import evaluating, runs_together
from rankloom.parallel.build import digest
from rankloom.parallel.tokens_apart import ALL, EVEN, ODD, Apart
from rankloom.train.batches import expect_rows, map_tensors, rows_if_any, rows_of, with_halves
from rankloom.train.compiled import is_compiled
from rankloom.train.put_back import same_bits, state_put_back, untrained
from rankloom.train.split_model import SHARING_AXES
from rankloom.world.connect import World
from rankloom.world.group import Group

TokensApart = Callable[[Apart], AbstractContextManager[None]]
EQUAL_IF_WITHIN = 1e-5   # of a loss: nondeterministic kernels make ranks differ by less when they compute the same
MEAN_IF_WITHIN = 0.05   # of the whole: a mean over unpadded items weighs the halves by counts that are not known here
PROCESS = secrets.token_hex(8)   # with the process id: equal for simulated ranks, which share torch's generator
FEW_STEPS = 5
SHOWN = 8   # ranks, in an error
SAME_IF_WITHIN = 1e-2   # of a loss: 16-bit rounding and nondeterministic kernels make two runs differ by less


def explain_non_finite(group: Group, run_alone: Callable[[], Tensor], gradients: Callable[[], Mapping[str, Tensor]],
                       seen: str, compress: str = EXACT) -> NonFinite:
    """The error to raise, the same on every rank: which rank, and its first bad tensor. A collective.

    run_alone: forward and backward of this rank's batch without communication; returns [loss sum, count]
    gradients: name -> gradient, after `run_alone`
    seen:      what the step found, in words
    compress:  the compression of gradients
    """
    found = group.all_gather_object(_first_bad(run_alone(), gradients()), label="non-finite")
    named = [f"rank {rank}: {what}" for rank, what in zip(group.ranks, found, strict=True) if what]
    named[SHOWN:] = [f"and {len(named) - SHOWN} more ranks"] if len(named) > SHOWN else []
    where = "; ".join(named) or "repeated on each rank alone the step was finite: the cause is not in the model's own arithmetic"
    if not named and compress == "fp16":
        where += (f". compress='fp16' carries numbers up to {torch.finfo(torch.float16).max:g} only, and a mean gradient, or what a rank "
                  "adds to it, may be larger: 'bf16' is as short, and has the range of fp32")
    return NonFinite(f"{seen}. {where}. The parameters are those of the step before; lower the learning rate, clip, "
                     "or look at that rank's batch.")


def expect_sum_of_step(totals_of: Callable[[Any], Tensor], model: nn.Module, batch: Any, *, world: World, group: Group, tokens: Group,
                       pieces: int, shards: int, apart: TokensApart) -> None:
    """Before the first step, on about one micro-batch: raise when the loss seems to return a mean, or a rank has too few rows; with
    context ranks also when it is no sum over tokens.

    group:  the ranks over which rows are distributed   tokens: those over which losses are summed
    pieces: number of micro-batches                     shards: logical shards, over which rows are redistributed; 0: none
    apart:  see `expect_sum_over_tokens`
    A collective of the world: all ranks run the same number of forwards, as a forward may be a collective. None if a rank's micro-batch
    cannot be cut by rows (a graph, packed tokens), nor thus in halves: then rank 0 warns.
    """
    rows = rows_of(batch, world.rank) if shards or pieces > 1 else rows_if_any(batch)
    mine = torch.tensor([(-1 if rows is None else rows) * group.size + group.rank], device=group.device)
    held, rank = divmod(int(tokens.all_reduce(mine, "min", label="rows")), group.size)
    if not shards and held >= 0:
        expect_rows(held, pieces, group.ranks[rank])
    if held < 0 and world.rank == 0:
        warnings.warn("the tensors of a batch are not equally long along dim 0, so it is one sample (a graph, packed tokens). Its "
                      "loss is not tried in halves: make sure that it is a sum, and that it counts what it sums. Where samples are rows, "
                      "give every tensor one row per sample", stacklevel=4)   # of `engine.step`
    if held < 1:   # on some rank
        return
    parts = with_halves(batch, min(held, max(2, held // (shards or pieces))), world.rank)
    on_any = lambda here: bool(world.all_reduce(torch.tensor([here], dtype=torch.uint8, device=group.device), "max",
                                                label="does the loss seem a mean"))
    devices = [group.device] if group.device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=world.size == 1):   # on several ranks draws are not those of one process in any case
        expect_sum(totals_of, model, parts, world.rank, on_any, together=runs_together(model) or world.group(*SHARING_AXES).size > 1)
    if world.mesh.context > 1:
        expect_sum_over_tokens(totals_of, model, parts[0], world, apart, on_any)


def expect_sum(totals_of: Callable[[Any], Tensor], model: nn.Module, parts: Sequence[Any], rank: int, on_any: Callable[[bool], bool],
               together: bool = False) -> None:
    """Raise when the loss function seems to return a mean with the count of a sum.

    A loss that changes when it is computed again draws random numbers, and is not judged. Nor is one that raises an error, because a
    model may return other things in training. The loss is called without dropout, with gradients enabled, and equally often on
    every rank; what it changes in the model is put back (train/put_back.py), and on one rank torch's own generator. (What else a loss
    changes, such as another model's running statistics, it changes a few times before the first step.) A compiled model is not checked:
    it would be compiled again for the halves.
    parts:    rows, and their two halves
    on_any:   whether a condition holds on any rank
    together: ranks wait for each other in a forward
    raises:   LossError
    """
    if runs_compiled(model):
        return
    with evaluating(model), state_put_back(model):
        (whole, count), *halves = [_tried(totals_of, part, model, rank, together) for part in parts]
        rows = rows_of(parts[0], rank)
        if _is_mean_of_one(whole, count, halves, rows):
            warnings.warn(f"rank {rank}: the loss function returns a mean and counts {count:g}, however many rows it gets ({rows} rows "
                          f"give {whole:g}, their halves {halves[0][0]:g} and {halves[1][0]:g}): micro-batches of other lengths "
                          "weigh as much as this one. Return the sum, and how many items that were", stacklevel=2)
        suspect = _seems_mean(whole, count, halves, rows)
        if not on_any(suspect):
            return
        again, _ = _tried(totals_of, parts[0], model, rank, together)
    if suspect and abs(again - whole) <= SAME_IF_WITHIN * abs(whole):
        raise LossError(f"rank {rank}: the loss function counts {count:g} items, but seems to return their mean, not their sum: "
                        f"a batch of {rows} rows gives {whole:g}, its two halves {halves[0][0]:g} and {halves[1][0]:g}. Return the sum, "
                        "for example `F.cross_entropy(logits, targets, reduction='sum'), targets.numel()`")


def expect_sum_over_tokens(totals_of: Callable[[Any], Tensor], model: nn.Module, batch: Any, world: World, apart: TokensApart,
                           on_any: Callable[[bool], bool]) -> None:
    """With context ranks: raise when the loss of a row is not the sum, nor its count, of what its tokens add.

    Each rank computes the loss of its own tokens. So a few tokens go through the model with an attention that leaves each to itself: first
    all, then those with even positions, then the others, whose losses and counts must add up. A loss that draws random numbers or raises
    an error is not judged; of a model that looks at whole rows (routers of experts), only the counts are.
    apart:  apart(some tokens) is a context in which the model returns values of these only, as it does of a rank's own in training
    raises: LossError, on all ranks. A collective of the world, as `on_any`
    """
    if runs_compiled(model):
        return
    found, tried = [], [Apart(which) for which in (ALL, ALL, EVEN, ODD)]
    with evaluating(model), state_put_back(model):
        for some in tried:
            with torch.no_grad(), apart(some):   # as nothing is kept, the budget of a recompute sees none of it
                found.append(_tried(totals_of, batch, model, world.rank, together=True)[:2])
    (total, count), (again, _), *halves = found
    parts, counts = zip(*halves)
    is_judged = math.isfinite(total + sum(parts)) and abs(again - total) <= EQUAL_IF_WITHIN * abs(total)
    adds_up = on_any(any(some.shows_rows for some in tried)) or abs(sum(parts) - total) <= MEAN_IF_WITHIN * abs(total)
    wrong = is_judged and not (adds_up and abs(sum(counts) - count) <= SAME_IF_WITHIN * count)   # counts may be weights
    group, said = world.group("context"), " and ".join(f"{part:g} and {some:g}" for part, some in halves)
    group.agree(f"rank {world.rank}: with {group.size} context ranks each computes the loss of its own tokens, but this is no sum over "
                f"tokens: of a few tokens it gives {total:g} and counts {count:g}, of their halves {said}. Sum over tokens, and count "
                "those that it got values of, as `model(tokens, targets=targets)` does; or use one context rank" if wrong else None,
                error=LossError, label="a sum over tokens")


def _seems_mean(whole: float, count: float, halves: Sequence[Sequence[float]], rows: int) -> bool:
    """For a sum, the two halves add up to the whole. For a mean, the whole is the mean of the halves, weighted by items or by rows.

    (Halves that add up to twice the whole are no proof: a model may take another branch for a half.) When one half has hardly any
    items, a sum and a mean look alike, and the loss passes.
    """
    (one, some), (other, rest) = halves
    if not (some + rest == count > 1 and whole) or abs(one + other - whole) <= SAME_IF_WITHIN * abs(whole):
        return False
    return any(abs((first * one + second * other) / ((first + second) * whole) - 1.0) < MEAN_IF_WITHIN
               for first, second in ((some, rest), (rows - rows // 2, rows // 2)))


def _is_mean_of_one(whole: float, count: float, halves: Sequence[Sequence[float]], rows: int) -> bool:
    """For a mean with a constant count, the whole is the mean of the halves, which differ unless it looks at no rows."""
    (one, some), (other, rest) = halves
    mean = (one * (rows - rows // 2) + other * (rows // 2)) / rows
    near = SAME_IF_WITHIN * abs(whole)
    return some == rest == count > 0 and abs(mean - whole) <= near / 10 and abs(one - other) > near


def _tried(totals_of: Callable[[Any], Tensor], part: Any, model: nn.Module, rank: int, together: bool) -> list[float]:
    """[sum, count], or two NaN when the loss raised an error: the step will show whether it does so in training too.

    The error is passed on when ranks wait for each other in a forward and this rank did not finish its own.
    """
    begun, ended = list[int](), list[int]()
    hooks = [model.register_forward_pre_hook(lambda *_: begun.append(1), prepend=True),
             model.register_forward_hook(lambda *_: ended.append(1))]
    try:
        totals: list[float] = totals_of(part).tolist()
        return totals
    except Exception as error:
        if together and not len(begun) == len(ended) > 0:
            error.add_note(f"rank {rank}: the loss was tried in evaluation mode when this was raised, before the first step, to see "
                           "whether it is a sum; ranks share a forward here, so each must get through it in that mode too")
            raise
        return [math.nan, math.nan]
    finally:
        for hook in hooks:
            hook.remove()


def compare_rows(sharing: Group, dealt: Group, batch: Any) -> None:
    """Before the first step: raise BatchError, on all ranks of `sharing`, when their rows differ; warn when rows of `dealt` are equal.

    A collective of both groups.
    sharing: ranks that hold one model between them, and must bring the same rows
    dealt:   ranks over which rows are distributed: each must bring its own
    """
    if sharing.size == dealt.size == 1:
        return
    tensors: list[Tensor] = []
    map_tensors(lambda t: tensors.append(t.to_dense() if t.is_sparse else t), batch)
    mine = [[list(tensor.shape), digest(tensor)] for tensor in tensors]
    if sharing.size > 1:
        _expect_same_rows(sharing, mine)
    if dealt.size > 1:   # constant tensors, such as a mask of ones, may well be equal
        varied = any(x.numel() > 1 and digest(x[(0,) * x.dim()].expand(x.shape)) != seen for x, (_, seen) in zip(tensors, mine))
        _warn_of_equal_rows(dealt, mine if varied else None)


def _expect_same_rows(group: Group, mine: list[list[Any]]) -> None:
    first, *others = group.all_gather_object(mine, label="the same rows")
    for rank, theirs in zip(group.ranks[1:], others, strict=True):
        if theirs != first:
            at = next((at for at, (one, other) in enumerate(zip(first, theirs)) if one != other), min(len(first), len(theirs)))
            shown = [f"of shape {found[at][0]}" if at < len(found) else "missing" for found in (theirs, first)]
            raise BatchError(f"rank {rank} brought other rows to the first step than rank {group.ranks[0]}: tensor {at} of its batch is "
                             f"{shown[0]}, there {shown[1]}, with other values. Along the axes pipe, context and tensor ranks hold one "
                             "model between them, and bring the same rows: deal these by `engine.group.rank` of `engine.group.size`, not "
                             "by the rank in the world")


def _warn_of_equal_rows(group: Group, mine: list[list[Any]] | None) -> None:
    holders: dict[str, list[int]] = {}
    for rank, theirs in zip(group.ranks, group.all_gather_object(mine, label="rows of one's own"), strict=True):
        holders.setdefault(str(theirs), []).append(rank)
    alike = max((ranks for theirs, ranks in holders.items() if theirs != "None"), key=len, default=[])
    if group.rank == 0 and len(alike) > 1:
        warnings.warn(f"ranks {alike} brought the same rows to the first step, so each row counts {len(alike)} times. Deal them: "
                      "`engine.group.rank` of `engine.group.size` says which are this rank's", stacklevel=4)   # of `engine.step`


def expect_one_model(world: World, totals: Tensor, norms: Mapping[str, float]) -> None:
    """In each of the first FEW_STEPS, before the update: raise LossError, on all ranks, when tensor ranks differ in what must be equal.

    That is the loss, and the gradients of the parameters that each of them holds whole. (One step is not enough: no gradients come to what
    is multiplied with a matrix that begins with zeros.) A collective of the world.
    totals: [loss sum, count]
    norms:  name of such a parameter -> norm of its gradient
    """
    group = world.group("tensor")
    if world.mesh.tensor > 1:
        found = group.all_gather_object([float(totals[0]), list(norms.values())], label="one model")
        losses, gradients = zip(*found)
        problem = _different_losses(group, losses) or _different_norms(group, list(norms), gradients)
        world.agree(problem, error=LossError, label="one model")


def _different_losses(group: Group, losses: Sequence[float]) -> str | None:
    is_other = lambda loss: (math.isfinite(loss) != math.isfinite(losses[0])
                             or abs(loss - losses[0]) > EQUAL_IF_WITHIN * max(abs(loss), abs(losses[0])))
    rank, other = next(((rank, loss) for rank, loss in zip(group.ranks, losses) if is_other(loss)), (0, None))
    if other is None:
        return None
    return (f"the loss of the same rows is {losses[0]:g} on rank {group.ranks[0]} and {other:g} on rank {rank}, which hold "
            "parts of the same layers (axis tensor). A loss that reads parameters sees a part of them: leave a penalty on "
            "weights to the optimizer (weight_decay). Noise must be the same on these ranks: seed torch by `engine.group.rank`")


def _different_norms(group: Group, names: list[str], found: Sequence[list[float]]) -> str | None:
    largest = max(map(max, found), default=0.0) if names else 0.0
    for name, norms in zip(names, zip(*found)):
        low, high = min(norms), max(norms)
        if high - low > SAME_IF_WITHIN * high and high > EQUAL_IF_WITHIN * largest:   # rounding errors alone may differ by 100 %
            ranks = [group.ranks[norms.index(norm)] for norm in (low, high)]
            return (f"the gradient of {name}, which every tensor rank holds whole, has the norm {low:g} on rank {ranks[0]} and {high:g} on "
                    f"rank {ranks[1]}: each has a part of it, and these are not added. In the plan say replicated_with_grad_allreduce for "
                    "a module that is whole and reads what is split, or sequence_parallel for a norm between split tokens; "
                    "RANKLOOM_DEBUG=1 names the place, and docs/tensor.md has all styles. If the plan is right, they drew other noise "
                    "(dropout that is no nn.Dropout): seed torch by `engine.group.rank`")
    return None


def runs_compiled(model: nn.Module) -> bool:
    """Whether any part of the model is compiled by torch.compile."""
    return is_compiled(model) or any(getattr(module, "_compiled_call_impl", None) for module in model.modules())


class KeyedDrawsOnly(TorchDispatchMode):
    """A context in which an operation that draws from torch's own generator raises ConfigError: its state differs between processes.

    It intercepts every operation, those inside torch's modules too, and that is slow: use it in the first steps only.
    """

    def __init__(self, rank: int):
        super().__init__()
        self.rank = rank

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and func.namespace == "aten" and _draws_freely(func, args, kwargs or {}):
            raise ConfigError(
                f"rank {self.rank}: {func} draws from torch's own generator, so deterministic training would depend on the number of "
                "ranks. nn.Dropout modules draw by name and step; set other dropout (nn.MultiheadAttention, nn.LSTM, F.dropout ...) to 0, "
                "and give noise a generator of its own, or put it in the batch")
        return func(*args, **(kwargs or {}))


@contextmanager
def alike_on_any_ranks(model: nn.Module, rank: int) -> Iterator[None]:
    """For the first steps: a forward inside that draws from torch's own generator, or changes a buffer or a frozen parameter, raises
    ConfigError.

    How many forwards a rank runs depends on the number of ranks, and so would anything that one forward hands on to the next.
    """
    before = {name: value.detach().clone() for name, value in untrained(model)}
    with KeyedDrawsOnly(rank):
        yield
    for name, value in untrained(model):
        old = before.get(name, value)
        if old.shape == value.shape and not same_bits(old, value):   # a buffer of another shape is a cache that grew, not a statistic
            kind = "frozen parameter" if isinstance(value, nn.Parameter) else "buffer"
            raise ConfigError(f"rank {rank}: the forward has changed the {kind} {name}, and ranks run forward for their own rows only, so "
                              "deterministic training would depend on the number of ranks. Leave out what keeps statistics or counts in "
                              "forward (spectral_norm, codebooks ...), fill the buffer when the model is made, or let a teacher follow "
                              "after `engine.step`")


def warn_of_equal_draws(group: Group, drew_from: str | None) -> None:
    """After the first step: warn when ranks drew the same random numbers for different rows. A collective.

    drew_from: the state of torch's generator before this rank drew; None if it drew nothing
    """
    mine = drew_from and [f"{PROCESS} {os.getpid()}", drew_from]
    at = {tuple(each) for each in group.all_gather_object(mine, label="random numbers") if each}
    if group.rank == 0 and max(Counter(state for _, state in at).values(), default=0) > 1:
        warnings.warn("the loss or the model draws from torch's own generator (noise, time steps, dropout that is no nn.Dropout), which "
                      "has the same seed on several ranks: they draw the same for different rows. Call `torch.manual_seed(seed + "
                      "engine.group.rank)` after `rl.prepare`", stacklevel=4)   # of `engine.step`


def generator_now(device: torch.device) -> str:
    """A hash of the states of torch's own generators."""
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()


def _draws_freely(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation that can draw random numbers does: its rate is not 0, and it was given no generator."""
    known = func._schema.arguments
    given = {a.name: a.default_value for a in known} | dict(zip((a.name for a in known), args)) | kwargs
    rates = [given[name] for name in ("dropout_p", "dropout", "p") if isinstance(given.get(name), float | int)]
    drops = all(rates) and given.get("train") is not False and given.get("training") is not False
    return drops and given.get("generator") is None


def _first_bad(totals: Tensor, gradients: Mapping[str, Tensor]) -> str | None:
    """What is not finite on this rank alone. Gradients are searched in the order in which backward makes them."""
    if not torch.isfinite(totals[0]):
        return f"the loss of its own batch is {totals[0].item():g}"
    for name, gradient in reversed(list(gradients.items())):
        if not torch.isfinite(gradient).all():
            bad = int((~torch.isfinite(gradient)).sum())
            return f"the gradient of {name} has {bad} elements of {gradient.numel()} that are not finite"
    return None
