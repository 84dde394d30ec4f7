"""Recompute (activation checkpointing): blocks keep fewer activations for backward, and compute the others again there.

    recompute(model, "full")         each block keeps its inputs only; every forward runs twice, a third more work
    recompute(model, "selective")    also the outputs of matrix products and attention (selective.KEPT): the rest is cheap to repeat
    recompute(model, "24 GiB")       each block keeps as much as fits, decided by blocks/budget.py, measured in the first micro-batch

A recomputed forward sees the same state as the first one. Keyed dropout draws the masks of the first run's step, micro-batch and
call. torch's own generators are set back meanwhile, and so are those that the block's modules have as attributes (blocks/draws.py). Buffers
that the block changes have their earlier values, and are not changed twice (blocks/buffers.py); so do lists and dicts among its
arguments. So the gradient is the same bit for bit. torch's `checkpoint` keeps the inputs and runs the block again; the rest is here.
Not restored: other state that a forward changes (plain attributes, buffers around the block), Python's `random` and numpy's global
generator, and torch's own where ranks share it, as those of `simulate` do. Not repeated correctly: `F.rrelu` as a function.

A budget in bytes holds for micro-batches as large as the first. To measure, every forward of a block before the first backward is also
run once with each choice, so the first step takes longer. It is measured without torch.compile, which usually keeps less. Where a
compiled block is no single graph, a budget leaves `selective` out if ranks share the block, and otherwise runs that uncompiled. A graph
that the user compiles around a block ends before it, and another begins after it.

Of blocks/, read wrap.py, buffers.py, selective.py, forward_cost.py and budget.py before this file.

source: Chen et al. 2016 (checkpointing), Korthikanti et al. 2022 (selective)
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rankloom.base.errors import ConfigError, did_you_mean
from rankloom.base.quantities import parse_size
from rankloom.base.scoped import temporarily
from rankloom.models.moe import uncounted
from rankloom.train.blocks.budget import CHOICES, FULL, NONE, SELECTIVE, BlockCost, RecomputePlan, fit
from rankloom.train.blocks.buffers import Before, Values, on_copies, statistics
from rankloom.train.blocks.draws import Draws, generators_put_back
from rankloom.train.blocks.forward_cost import Trace
from rankloom.train.blocks.selective import Keep, Reuse, is_kept
from rankloom.train.blocks.wrap import Compiler, Wrapped, arguments_unchanged, blocks_of
from rankloom.train.dropout import Keyed
from rankloom.train.rules import NOT_ONE_GRAPH
from rankloom.world.group import Group

UNDECIDED = "undecided"   # runs as `full`, and measures, until the plan is made
TOO_MANY_GRAPHS = ('recompute="selective" with compile=True: a {kind} needs more graphs than torch keeps, one for each shape and for each '
                   "number that a forward reads of its block, such as that of a layer. Let it keep as many, "
                   "`torch._dynamo.config.recompile_limit = 64`, or make one graph for all numbers, "
                   "`torch._dynamo.config.allow_unspec_int_on_nn_module = True`, in the thread that trains; "
                   'or take recompute="full"')
_OF_CLASS: WeakKeyDictionary[type[nn.Module], Callable[..., Any]] = WeakKeyDictionary()


def recompute(model: nn.Module, policy: str | int, *, blocks: tuple[type[nn.Module], ...] = (), group: Group | None = None) -> "Recompute":
    """Make the repeated blocks of `model` recompute activations in backward. Sets `config.use_cache` of `transformers` models to False.

    policy:  "none", "full", "selective", or the bytes that all blocks together may keep on this rank: a number, or text as "24 GiB"
    blocks:  classes of the blocks; left out, modules that are in a list with others of their class
    group:   ranks that must make the same plan, as recomputed forwards may communicate. A block's cost is the highest of any rank
    sent:    with a group and a number of bytes, one gather of the costs in the first backward
    returns: what was decided for each block; it can be printed
    raises:  ConfigError; with too few bytes, in the first backward
    """
    choice, budget = parse_policy(policy)
    if choice == NONE:
        return Recompute({}, choice, budget, group)
    found = blocks_of(model, blocks)
    _expect_plain_calls(model, found)
    _keep_no_cache(model)
    made = Recompute(found, choice, budget, group)
    for forward in made.forwards.values():
        forward.shared = any(map(_exchanges, (model, *forward.block.modules())))
    return made


def _exchanges(thing: Any) -> bool:
    """Whether a module, or an argument of a block, exchanges activations with other ranks: it, its hooks or attributes have a group."""
    mine = vars(thing) if isinstance(thing, nn.Module) else {"": thing}
    hooks = [hook for name, hooked in mine.items() if "hook" in name and isinstance(hooked, dict) for hook in hooked.values()]
    groups = [getattr(value, "group", value) for value in (*mine.values(), *hooks)]
    return any(isinstance(group, Group) and group.size > 1 for group in groups)


def _expect_plain_calls(model: nn.Module, blocks: Iterable[str]) -> None:
    """Raise ConfigError when the user has compiled a block, or a module around it: a graph cannot contain a recomputed block."""
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None and any(f"{block}.".startswith(f"{name}." if name else "") for block in blocks):
            raise ConfigError(f"{name or 'the model'} is compiled as it is, and a graph cannot contain a recomputed block: do not "
                              "compile it, and let rankloom compile inside the blocks: rl.prepare(..., compile=True)")


def _keep_no_cache(model: nn.Module) -> None:
    """Turn off the key-value cache of `transformers` models: a recomputed block would append to it twice."""
    for module in model.modules():
        config: Any = vars(module).get("config")
        if getattr(config, "use_cache", False):
            config.use_cache = False


def parse_policy(policy: str | int) -> tuple[str, int]:
    """The choice for all blocks, and the budget in bytes.

    >>> parse_policy("full"), parse_policy("1 KiB"), parse_policy(4096)
    (('full', 0), ('undecided', 1024), ('undecided', 4096))
    """
    if isinstance(policy, str) and policy in CHOICES:
        return policy, 0
    if isinstance(policy, str) and policy.strip()[:1].isdigit():
        return UNDECIDED, parse_size(policy)
    if isinstance(policy, int) and not isinstance(policy, bool) and policy > 0:
        return UNDECIDED, policy
    hint = did_you_mean(policy, CHOICES) if isinstance(policy, str) else ""
    raise ConfigError(f"recompute = {policy!r}, expected 'none', 'selective', 'full', or the bytes that activations may take, "
                      f"such as '24 GiB'. {hint}".rstrip())


class _Measured(NamedTuple):
    """A forward of a block, and what it cost. replay: dead once autograd has dropped the forward"""

    block: str
    replay: "ref[Replay]"
    cost: BlockCost


class Recompute:
    """The choice of each block. With a budget: the measured costs, and from the first backward on the plan."""

    def __init__(self, blocks: dict[str, nn.Module], choice: str, budget: int, group: Group | None):
        self.budget = budget
        self._group = group
        self.plan: RecomputePlan | None = None
        self.forwards = {name: RecomputedForward(block, choice, partial(self._measure, name), self._decide)
                         for name, block in blocks.items()}
        self._waiting: list[_Measured] = []   # in forward order
        self._measures = True

    def __str__(self) -> str:
        if self.plan:
            return str(self.plan)
        return "\n".join(f"{name}  {forward.choice}" for name, forward in self.forwards.items()) or "nothing is computed again"

    def _measure(self, name: str, replay: "Replay", args: Any, kwargs: Any) -> None:
        """Before a forward: measure what it would keep and recompute with each choice."""
        if self._measures:
            _expect_to_be_measured(name)
            self._waiting.append(_Measured(name, ref(replay), _cost(self.forwards[name], args, kwargs)))

    def unmeasured(self) -> AbstractContextManager[None]:
        """A context for forwards that no backward follows, such as trials: measuring runs each block three times more."""
        return temporarily(self, _measures=False)

    def _decide(self) -> None:
        """Make the plan, in the first backward: autograd then holds the largest number of forwards at a time."""
        if self.plan:
            return
        seen: dict[str, list[BlockCost]] = {}
        for measured in self._waiting:
            if measured.replay() is not None:
                seen.setdefault(measured.block, []).append(measured.cost)
        costs = [replace(_highest_cost(name, found), calls=len(found)) for name, found in seen.items()]
        if self._group:
            costs = _over_ranks(self._group.all_gather_object([asdict(cost) for cost in costs], label="costs of blocks"))
        self.plan = fit(costs, self.budget)
        self._waiting.clear()
        decided = {decision.block: decision.choice for decision in self.plan.decisions}
        for name, forward in self.forwards.items():
            forward.choice = decided.get(name, NONE)   # a block without a gradient keeps nothing anyway


class RecomputedForward(Wrapped):
    """The forward of a block that recomputes what it does not keep."""

    layer = 1

    def __init__(self, block: nn.Module, choice: str, measure: Callable[["Replay", Any, Any], None], decide: Callable[[], None]):
        super().__init__(block)
        self.choice, self._planned = choice, choice == UNDECIDED
        self.plain = self.inner                          # before it is compiled
        self._in_graph: Callable[..., Any] | None = None   # `selective`, compiled
        self.shared = False   # whether ranks exchange activations inside the block
        self._stops_early = not any(isinstance(module, nn.RReLU) for module in block.modules())
        self._measure, self._decide = measure, decide
        self._products: int | None = None   # how many products `selective` has to keep
        self._changing: set[str] | None = None   # buffers that the forward changes; None: not known before the first training forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the block's own forward."""
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():   # something around the block is compiled; the other flag is shared by threads
            return _outside_graphs(self, args, kwargs)
        if self.choice == SELECTIVE and self._in_graph:
            return self._run_in_graph(self._in_graph, args, kwargs)
        if self.choice != UNDECIDED:
            return self.run(self.inner, self.choice, Replay(self.block), args, kwargs)
        replay = Replay(self.block, self._decide)
        self._measure(replay, args, kwargs)
        return self.run(self.inner, FULL, replay, args, kwargs)

    def _run_in_graph(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Raises ConfigError when ranks share the block, or it changes a buffer: the graph's backward would read the changed value.

        A block that is no single graph, or more graphs than torch keeps, is an error when the user chose `selective`. Chosen by a plan,
        it runs without the compiler.
        """
        before = Before(self.block) if self._changing is None else None
        try:
            out = forward(*args, **kwargs)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            too_many = isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit)
            if self._planned and (too_many or isinstance(error, torch._dynamo.exc.Unsupported)):
                self._in_graph, self.inner = None, self.plain
                return self(*args, **kwargs)
            if too_many:
                raise ConfigError(TOO_MANY_GRAPHS.format(kind=type(self.block).__name__)) from error
            if self.shares(args, kwargs):
                raise ConfigError(f'recompute="selective" {NOT_ONE_GRAPH}') from error
            error.add_note(f'(recompute="selective" with compile=True wants the forward of a {type(self.block).__name__} in one graph; '
                           'where it does not fit, as loops over experts, take recompute="full", or leave one of the two out)')
            raise
        if before:
            self._changed(before)
        if self._changing and (changed := self._changing - statistics(self.block)):
            raise ConfigError(f"the forward of a {type(self.block).__name__} changes its buffer {min(changed)}, which a graph with "
                              'recompute="selective" would not put back: take recompute="full", or compile=False')
        return out

    def compile(self, compiler: Compiler) -> None:
        """Compile the block's own forward, and, for `selective`, that forward and its recomputation as one graph.

        raises: ConfigError for `selective` if ranks share the block
        """
        if self.choice == SELECTIVE and self.shared:
            raise ConfigError(f'recompute="selective" {NOT_ONE_GRAPH}')
        super().compile(compiler)
        self._in_graph = compiler(partial(_selectively_of(type(self.block)), self.plain))

    def choices(self, args: Any, kwargs: Any) -> tuple[str, ...]:
        """What a plan may choose."""
        return (NONE, FULL) if self._in_graph and self.shares(args, kwargs) else CHOICES

    def shares(self, args: Any, kwargs: Any) -> bool:
        """Whether ranks exchange activations inside the block, or by means of its arguments."""
        return self.shared or any(map(_exchanges, tree_leaves((args, kwargs))))

    def run(self, forward: Callable[..., Any], choice: str, replay: "Replay", args: Any, kwargs: Any) -> Any:
        """Run the forward with one of the choices. replay: restores the present state when the forward runs again"""
        if choice == NONE:
            return forward(*args, **kwargs)
        # Positional arguments only: `checkpoint` detects changes only of these, and its own keywords might collide with kwargs.
        given, nesting = tree_flatten((args, kwargs), is_leaf=_is_no_container)
        of_flat, before = _OfFlatArguments(forward, args, kwargs, nesting), Before(self.block)
        around: Any = ExitStack() if choice == FULL else Keep(self._products)
        if choice != FULL:
            replay.reuse(around, self._learn)
        # RReLU hands its noise to autograd before it draws it. To stop there, once all is handed over, would leave the noise undrawn.
        with arguments_unchanged(self.block, given):
            out = checkpoint(of_flat, *given, use_reentrant=False, early_stop=self._stops_early,   # type: ignore[no-untyped-call]
                             context_fn=lambda: (around, replay))
        replay.draws.note_made()
        replay.buffers = self._changed(before)
        if choice != FULL:
            around.forget(out)   # the caller may change it
        return out

    def _changed(self, before: Before) -> Values:
        """Earlier values of the buffers that the last forward changed. After the first training forward, values are compared too."""
        changed = before.changed(known := self._changing or set(), compare=self._changing is None and self.block.training)
        if self.block.training:
            self._changing = known
        return changed

    def _learn(self, used: int) -> None:
        """A recomputation has used this many products: later forwards need not keep more."""
        self._products = max(used, self._products or 0)


@torch.compiler.disable   # a graph cannot contain a recomputed block
def _outside_graphs(forward: RecomputedForward, args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


class _OfFlatArguments:
    """A forward as a function of the values in its arguments: the first time with the caller's own lists and dicts, later
    with copies of these as they were then."""

    def __init__(self, forward: Callable[..., Any], args: Any, kwargs: Any, nesting: TreeSpec):
        self._forward, self._nesting = forward, nesting
        self._first: tuple[Any, Any] | None = (args, kwargs)

    def __call__(self, *given: Any) -> Any:
        (args, kwargs), self._first = self._first or tree_unflatten(given, self._nesting), None
        return self._forward(*args, **kwargs)


def _is_no_container(value: Any) -> bool:
    return not isinstance(value, tuple | list | dict)


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    once = is_kept(operation, args) or operation is torch.ops.rankloom.keyed_mask.default   # a graph that runs again has no Replay
    return CheckpointPolicy.MUST_SAVE if once else CheckpointPolicy.PREFER_RECOMPUTE


def _selectively(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`selective` as the compiler understands it: through torch's own policy. It repeats operations, not Python code."""
    around = partial(create_selective_checkpoint_contexts, _keep_products)
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, context_fn=around)   # type: ignore[no-untyped-call]


def _selectively_of(kind: type[nn.Module]) -> Callable[..., Any]:
    """`_selectively` for blocks of one class. torch keeps few graphs of a function, counted by its code: so each class has a copy."""
    return _OF_CLASS.setdefault(kind, FunctionType(_selectively.__code__.replace(), globals()))


class Replay:
    """The state that a block sees now, to be restored while the block runs again. May be entered several times.

    before:  called when it is restored
    buffers: set after the forward: earlier values of the buffers that it changed
    """

    def __init__(self, block: nn.Module, before: Callable[[], None] = lambda: None):
        self._before, self.draws = before, Draws(block)
        keys = {id(m.key): m.key for m in block.modules() if isinstance(m, Keyed)}.values()
        self._key_states = [(key, {"step": key.step, "rows": key.rows, "tokens": key.tokens}, dict(key.calls)) for key in keys]
        self._block, self.buffers = block, Values()
        self._reuse: Reuse | None = None
        self._learn: Callable[[int], None] = lambda used: None
        self._undo = ExitStack()

    def reuse(self, kept: Keep, learn: Callable[[int], None]) -> None:
        """Reuse the products of `kept` when the block runs again, and call `learn` with how many were used."""
        self._reuse, self._learn = Reuse(kept), learn

    def __enter__(self) -> None:
        self._before()
        for key, state, calls in self._key_states:
            self._undo.enter_context(temporarily(key, **state, calls=dict(calls), is_replayed=True))
        self.draws.set_back(self._undo)
        self._undo.enter_context(on_copies(self._block, self.buffers))
        if self._reuse:
            self._undo.enter_context(self._reuse)

    def __exit__(self, *raised: Any) -> None:
        self._undo.__exit__(*raised)
        if self._reuse:
            self._learn(self._reuse.used)


# ---------------------------------------------------------------------- what a block costs


def _expect_to_be_measured(block: str) -> None:
    """Raise ConfigError inside of a `checkpoint`, the model's own or that of a block which calls itself: it frees what the block keeps, and
    wants each forward alike."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if (hooks and hooks[0].__module__ == checkpoint.__module__) or torch._C._current_graph_task_id() != -1:
        raise ConfigError(f"{block} is called inside of torch.utils.checkpoint, or by itself, so a number of bytes decides nothing there: "
                          'turn checkpointing off (transformers: model.gradient_checkpointing_disable()), or take recompute="full"')


def _cost(forward: RecomputedForward, args: Any, kwargs: Any) -> BlockCost:
    """Run the block once with each choice, on copies of its state. A choice that is left out is given a cost that is never the best."""
    kept: dict[str, int] = {}
    work = product_work = 0
    buffers = Before(forward.block).values
    devices = {t.device for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.device.type == "cuda"}
    with uncounted(forward.block), arguments_unchanged(forward.block, tree_leaves((args, kwargs))):
        for choice in forward.choices(args, kwargs):
            with (torch.random.fork_rng(devices=list(devices)), generators_put_back(forward.block), Replay(forward.block),
                  on_copies(forward.block, buffers), Trace() as trace):
                tried = tree_map(lambda value: value, (args, kwargs), is_leaf=_is_no_container)   # copies of lists and dicts
                out = forward.run(forward.plain, choice, Replay(forward.block), *tried)
            kept[choice] = trace.kept(out)
            del out
            if choice == NONE:
                work, product_work = trace.work, trace.product_work
    repeated = {NONE: 0, SELECTIVE: work - product_work if SELECTIVE in kept else work + 1, FULL: work}
    return BlockCost("", {SELECTIVE: kept[NONE], **kept}, repeated, work)


def _highest_cost(name: str, costs: list[BlockCost]) -> BlockCost:
    """The highest cost of several forwards of one block."""
    most = {choice: max(cost.kept[choice] for cost in costs) for choice in CHOICES}
    return replace(max(costs, key=lambda cost: cost.work), name=name, kept=most)


def _over_ranks(everyone: list[list[dict[str, Any]]]) -> list[BlockCost]:
    seen: dict[str, list[BlockCost]] = {}
    for cost in (BlockCost(**fields) for costs in everyone for fields in costs):
        seen.setdefault(cost.name, []).append(cost)
    return [replace(_highest_cost(name, costs), calls=max(cost.calls for cost in costs)) for name, costs in seen.items()]
