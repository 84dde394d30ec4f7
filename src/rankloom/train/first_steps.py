"""What is checked in the first steps only, because it would cost too much in each: were all ranks given what they must be given?

    the first step after `prepare`, in a resumed run too   each rank has brought the rows that it must bring
    the first step of a training                           the loss is a sum (train/sum_check.py), and ranks draw different noise
    the first two                                          deterministic: no forward depends on how many others its rank has run
    the first FEW_STEPS, and the first after `prepare`     tensor ranks agree on the loss, and on the gradients of what each holds whole
"""

import hashlib
import math
import os
import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rankloom.base.errors import BatchError, ConfigError, LossError
from rankloom.base.mesh import SHARING_AXES
from rankloom.base.nested import all_of
from rankloom.base.tensors import digest
from rankloom.train.batches import MicroBatches
from rankloom.train.blocks.compiled import is_compiled
from rankloom.train.placement import Placement
from rankloom.train.put_back import same_bits, untrained
from rankloom.train.sum_check import EQUAL_IF_WITHIN, SAME_IF_WITHIN, LimitedTo, expect_sum_of_step
from rankloom.world.group import Group
from rankloom.world.world import World

PROCESS = secrets.token_hex(8)   # with the process id: equal for simulated ranks, which share torch's generator
FEW_STEPS = 5


class FirstSteps:
    """The checks of one engine, in the order in which a step makes them.

    group:      the ranks over which rows are distributed     tokens: those over which losses are summed
    accumulate: the number of micro-batches of a step         shards: logical shards; 0: gradients may be added in any order
    """

    def __init__(self, world: World, group: Group, tokens: Group, placement: Placement, *, accumulate: int, shards: int):
        self.world, self.group, self.tokens, self.placement = world, group, tokens, placement
        self.accumulate, self.shards = accumulate, shards
        self._is_first = True   # no step has ended since `prepare`
        self._generator = ""    # the state of torch's generators before the forwards of the first step of a training
        self._drew: bool | None = None   # whether these forwards changed it; None: not known

    def before(self, step: int, batch: Any, totals_of: Callable[[Any], Tensor], limited_to: LimitedTo) -> None:
        """Before the forwards of a step. A collective of the world.

        step:      how many steps are done         batch: as it goes into the step
        totals_of: rows -> [loss sum, count]       limited_to: see `expect_sum_over_tokens`
        """
        self._drew = None
        if self._is_first:
            compare_rows(self.world.group(*SHARING_AXES), self.group, batch)
        if step == 0:
            rows, microbatches = (batch[0], 1) if isinstance(batch, MicroBatches) else (batch, self.accumulate)
            expect_sum_of_step(totals_of, self.placement.model, rows, world=self.world, group=self.group, tokens=self.tokens,
                               microbatches=microbatches, shards=self.shards, limited_to=limited_to)
            self.placement.abandon()   # no backward follows those forwards
            self._generator = generator_now(self.group.device)

    def forward(self, step: int) -> AbstractContextManager[None]:
        """A context around each forward."""
        # check the second step too: with the initial weights, a buffer may already hold what this forward would write
        is_checked = self.shards and step < 2 and not is_compiled(self.placement.model)
        return alike_on_any_ranks(self.placement.model, self.world.rank) if is_checked else nullcontext()

    def note_draws(self, step: int) -> None:
        """After all forwards, where ranks run them for different rows: note whether these drew random numbers."""
        if step == 0:
            self._drew = generator_now(self.group.device) != self._generator

    def after(self, step: int, totals: Tensor) -> None:
        """Before the update, when no other collective is in flight. A collective of the world. totals: of the step, [loss sum, count]"""
        if self._drew is not None:
            warn_of_equal_draws(self.group, self._generator if self._drew else None)
        if self._is_first or step < FEW_STEPS:
            expect_one_model(self.world, totals, self.placement.repeated_norms())
            self._is_first = False


def compare_rows(sharing: Group, dealt: Group, batch: Any) -> None:
    """Before the first step: raise BatchError, on all ranks of `sharing`, when their rows differ; warn when rows of `dealt` are equal.

    A collective of both groups.
    sharing: ranks that hold one model between them, and must bring the same rows
    dealt:   ranks over which rows are distributed: each must bring its own
    """
    if sharing.size == dealt.size == 1:
        return
    tensors = [part for t in all_of(Tensor, batch) for part in (t.unbind() if t.is_nested else [t.to_dense()])]
    described = [[list(tensor.shape), digest(tensor)] for tensor in tensors]
    if sharing.size > 1:
        _expect_same_rows(sharing, described)
    if dealt.size > 1:   # constant tensors, such as a mask of ones, may well be equal
        varied = any(x.numel() > 1 and digest(x[(0,) * x.dim()].expand(x.shape)) != seen for x, (_, seen) in zip(tensors, described))
        _warn_of_equal_rows(dealt, described if varied else None)


def _expect_same_rows(group: Group, described: list[list[Any]]) -> None:
    """described: this rank's tensors, [shape, digest] of each"""
    first, *others = group.all_gather_object(described, label="the same rows")
    for rank, theirs in zip(group.ranks[1:], others, strict=True):
        if theirs != first:
            number = next((n for n, (one, other) in enumerate(zip(first, theirs)) if one != other), min(len(first), len(theirs)))
            shown = [f"of shape {tensors[number][0]}" if number < len(tensors) else "missing" for tensors in (theirs, first)]
            raise BatchError(f"rank {rank} brought other rows to the first step than rank {group.ranks[0]}: tensor {number} of its batch "
                             f"is {shown[0]}, there {shown[1]}, with other values. Along the axes pipe, context and tensor ranks hold one "
                             "model between them, and bring the same rows: deal these by `engine.group.rank` of `engine.group.size`, not "
                             "by the rank in the world")


def _warn_of_equal_rows(group: Group, described: list[list[Any]] | None) -> None:
    """described: as in `_expect_same_rows`; None: not compared"""
    holders: dict[str, list[int]] = {}
    for rank, theirs in zip(group.ranks, group.all_gather_object(described, label="rows of one's own"), strict=True):
        holders.setdefault(str(theirs), []).append(rank)
    alike = max((ranks for theirs, ranks in holders.items() if theirs != "None"), key=len, default=[])
    if group.rank == 0 and len(alike) > 1:
        warnings.warn(f"ranks {alike} brought the same rows to the first step, so each row counts {len(alike)} times. Deal them: "
                      "`engine.group.rank` of `engine.group.size` says which are this rank's", stacklevel=5)   # of `engine.step`


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
    """What is wrong, in words, if the loss of a rank is not that of the first, or None. losses: in rank order"""
    first = losses[0]
    for rank, loss in zip(group.ranks, losses):
        bound = EQUAL_IF_WITHIN * max(abs(loss), abs(first))
        if math.isfinite(loss) != math.isfinite(first) or abs(loss - first) > bound:
            return (f"the loss of the same rows is {first:g} on rank {group.ranks[0]} and {loss:g} on rank {rank}, which hold parts of the "
                    "same layers (axis tensor). A loss that reads parameters sees a part of them: leave a penalty on weights to the "
                    "optimizer (weight_decay). Noise must be the same on these ranks: seed torch by `engine.group.rank`")
    return None


def _different_norms(group: Group, names: list[str], found: Sequence[list[float]]) -> str | None:
    """The same of the norms of gradients. found: for each rank, those of `names`"""
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


def warn_of_equal_draws(group: Group, drew_from: str | None) -> None:
    """After the first step: warn when ranks drew the same random numbers for different rows. A collective.

    drew_from: the state of torch's generator before this rank drew; None if it drew nothing
    """
    own = drew_from and [f"{PROCESS} {os.getpid()}", drew_from]
    drawn = {(process, state) for process, state in filter(None, group.all_gather_object(own, label="random numbers"))}
    processes_of_state = Counter(state for _, state in drawn)   # ranks that are threads of one process share a generator
    if group.rank == 0 and max(processes_of_state.values(), default=0) > 1:
        warnings.warn("the loss or the model draws from torch's own generator (noise, time steps, dropout that is no nn.Dropout), which "
                      "has the same seed on several ranks: they draw the same for different rows. Call `torch.manual_seed(seed + "
                      "engine.group.rank)` after `rl.prepare`", stacklevel=4)   # of `engine.step`


def generator_now(device: torch.device) -> str:
    """A hash of the states of torch's own generators."""
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()


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


def _draws_freely(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation that can draw random numbers does: its rate is not 0, and it was given no generator."""
    known = func._schema.arguments
    given = {a.name: a.default_value for a in known} | dict(zip((a.name for a in known), args)) | kwargs
    rates = [given[name] for name in ("dropout_p", "dropout", "p") if isinstance(given.get(name), float | int)]
    drops = all(rates) and given.get("train") is not False and given.get("training") is not False
    return drops and given.get("generator") is None
