"""Is a block whose layers are cut over ranks the same function as the whole block? This is checked once, before its first call.

With a wrong plan a model trains a little worse, without an error: queries, keys and values in one matrix, cut across each other; a softmax
or a mean over features of which a rank has only some; a bias that every rank adds. So `tensor_parallel` keeps two copies without memory,
whole and cut, of one block of each kind. When the block is first called, both copies are called with its arguments and with the same random
parameters, of which the cut copy gets this rank's parts. What they return must be equal, up to rounding. And if that call records
gradients, no module may return a part of its features with parameters that every rank has: each would have one term of their gradient.

The model's own parameters might hide a difference at first: output layers and gates often begin at zero. In debug mode debug.py follows the
layouts of all activations, too, and names the first that is wrong: more precise, but blind for a softmax over some of the features. So
there the copies are called behind the block, and have the last word.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from rankloom.base.errors import RankLost, ShapeMismatch
from rankloom.base.first_argument import first_parameter, with_first
from rankloom.base.layout import Layout
from rankloom.base.names import is_inside
from rankloom.base.rng import usual_values
from rankloom.parallel.sections.wrapping import repeated_blocks, tensors_in
from rankloom.parallel.tensor.compare import bits, fingerprint
from rankloom.parallel.tensor.debug import unwatched
from rankloom.parallel.tensor.holding import holdings
from rankloom.parallel.tensor.moves import WHOLE, redistribute
from rankloom.world.group import Group

Returned = dict[str, list[Tensor]]   # by module
ACROSS = ("Does the plan cut something across? Matrices fused in one (packed_colwise, packed_qkv_colwise), a head, or features that are "
          "looked at together (a softmax, a mean, a norm)")
A_SIZE = ("Does it use a size of the whole, such as `self.n_embd`, where a rank has a part? Take it from the tensor: `x.shape[-1]`. Else "
          "the plan may leave cut features without a rowwise layer behind them, or cut across matrices fused in one, which must be "
          "packed_colwise or packed_qkv_colwise")
OWN_TERMS = ("so each would have one term of its gradient, and nothing would sum them. In the plan say replicated_with_grad_allreduce for "
             "a module that is whole and reads what is split, or sequence_parallel for a norm between split tokens")
POSITIONS = ("Are its positions, or its mask, made from tokens that are cut already, as models of `transformers` make them? Then cut the "
             "stream behind that: say sequence_split for the first block; the embedding may stay embedding_rowwise")
AT_MOST = 1 << 30   # elements of a block that is looked at: it is whole, for a moment, on every rank
MANY = 0.25         # of the vectors in an output that may differ: a router of experts may send one of many elsewhere
OF_WHAT_IS_ADDED = 0.02   # that may be rounding, in 16 bits, whose sums are rounded once, or in another kernel
# The same in finer dtypes, in units of their eps. A sum of n products made in the dtype itself is off by about sqrt(n) of them, 2^8 for
# rows of 2^16 features, and the layers behind it (a softmax, a norm, many layers where there are no blocks) may grow that 16 times.
# Measured in fp32: at most 4. So 5e-4 in fp32, 9e-13 in fp64, and in 16 bits the 2 % above.
ROUNDINGS = 2.0**12
OF_SUMS = 1.5       # roundings of what comes out, where much is added to: two sums in a block, each rounded twice, a fifth of an eps each
TRIES = 3           # calls after which a block that cannot be looked at is left in peace
TF32 = 2.0**-10     # relative precision of a product of 32-bit matrices on a GPU, as some multiply them


def keep_whole(model: nn.Module, words: Mapping[str, str]) -> dict[str, nn.Module]:
    """Before the cut: one block of each kind that the plan cuts, by name, as a copy without memory. Without blocks, the model.

    Blocks are of one kind when they are of one class, with the same words and shapes. One that cannot be copied is left out.
    """
    kept: dict[Any, tuple[str, nn.Module]] = {}
    for name in list(repeated_blocks(model)) or [""]:
        block = model.get_submodule(name)
        inside = tuple((module.removeprefix(name), word) for module, word in words.items() if is_inside(module, name))
        kind = (type(block), inside, tuple(param.shape for param in block.parameters()))
        if inside and kind not in kept and (whole := without_memory(block)) is not None:
            kept[kind] = name, whole
    return dict(kept.values())


def without_memory(block: nn.Module) -> nn.Module | None:
    """A copy whose parameters and buffers have no memory; None for a block that is too large, has other parameters than floating-point
    numbers, or cannot be copied."""
    tensors = [*block.parameters(), *block.buffers()]
    if not all(param.is_floating_point() for param in block.parameters()) or sum(param.numel() for param in block.parameters()) > AT_MOST:
        return None
    empty = {id(x): torch.empty_like(x, device="meta") for x in tensors}
    memo: dict[int, Any] = {id(x): nn.Parameter(empty[id(x)], x.requires_grad) if isinstance(x, nn.Parameter) else empty[id(x)]
                            for x in tensors}
    try:
        return copy.deepcopy(block, memo)
    except Exception:   # anything may hang on a user's module: locks, handles, results of operations
        return None


def look_before_first_call(model: nn.Module, kept: Mapping[str, nn.Module], group: Group, stream: Layout) -> None:
    """After the cut: compare each block that `keep_whole` kept with its whole copy, before its first call.

    stream:  the layout of activations between blocks
    sent:    at that call, what a forward of the block sends, and two small collectives. Not in the ledger
    raises:  ConfigError, then, on all ranks
    """
    for name, whole in kept.items():
        block = model.get_submodule(name)
        if (cut := without_memory(block)) is not None:
            look = _Look(whole, cut, group, name, stream if name else WHOLE)
            block.register_forward_pre_hook(look, with_kwargs=True)


class _Look:
    """A forward pre-hook that compares a block's copies once, then removes itself. In debug mode they are compared behind that forward."""

    def __init__(self, whole: nn.Module, cut: nn.Module, group: Group, name: str, stream: Layout):
        self.whole, self.cut, self.group, self.name, self.stream = whole, cut, group, name, stream
        self.tries = TRIES
        for block in (whole, cut):
            block.eval()
            block._forward_pre_hooks.clear()   # what these change is changed already, or behind the block
            block._forward_hooks.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Look":
        return self   # a copy of the model has the same peers, and shares `tries`

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.group.debug:
            self._look(block, args, kwargs)
            return

        def behind(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
            once.remove()
            self._look(block, args, kwargs)

        once = block.register_forward_hook(behind, with_kwargs=True)   # only now: behind what else looks at the output

    def _look(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_first = any(isinstance(x, Tensor) for x in args[:1] or kwargs.values())
        if torch.compiler.is_compiling() or not has_first or any(x.is_meta for x in (*tensors_in((args, kwargs)), *block.buffers())):
            return
        trains = torch.is_grad_enabled()
        with torch.no_grad(), _disable_current_modes(), unwatched(), self.group.ledger.aside():
            difference = self._difference(block, args, kwargs, trains)
            self.tries -= 1
            if difference is None and self.tries > 0:
                return
            for key in [key for key, hook in block._forward_pre_hooks.items() if hook is self]:
                del block._forward_pre_hooks[key], block._forward_pre_hooks_with_kwargs[key]
            self.group.agree(difference and f"{self.group.where('tensor_parallel')}: {self.name or 'the model'}, a {type(block).__name__}, "
                             f"is another function when it is cut over ranks: {difference}", label="same function")

    def _difference(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool) -> str | None:
        """What differs, "" if nothing does; None if that could not be found out: the copies could not be called so, ranks got others'
        arguments, or the whole copy sent something, as a block does that moves its activations itself: it knows nothing of being whole."""
        whole_again = partial(redistribute, src=self.stream, dst=WHOLE, group=self.group, label="same function")
        given = with_first(args, kwargs, whole_again, first_parameter(block))
        call_whole = lambda values: _called(self.whole, values | _buffers(block), *given)
        values = _values(self.whole, next((x for x in tensors_in((args, kwargs)) if x.is_floating_point()), next(block.parameters())))
        sent = self.group.ledger.messages
        with _Rounding() as seen:
            whole = call_whole(values)
        failed, has_sent = isinstance(whole, Exception), self.group.ledger.messages != sent
        by_tokens = self.stream is not WHOLE
        if not self._is_alike_on_all_ranks(failed or has_sent, given) or (failed and not by_tokens) or (has_sent and not failed):
            return None
        cut = self._call_cut(block, values, args, kwargs)
        if isinstance(cut, Exception):
            return _error_of_shapes(cut, POSITIONS if failed else A_SIZE)
        if isinstance(whole, Exception):
            return None
        if by_tokens:
            cut[""] = [whole_again(x) for x in cut[""][:1]]
        differs = partial(_differs, x=next(tensors_in(given)), eps=seen.eps)
        wrong = [name for name in whole if name in cut and any(map(differs, cut[name], whole[name]))]
        if "" not in wrong:   # the block itself
            return self._own_terms(whole, cut) if trains else ""
        if ROUNDINGS * seen.eps < OF_WHAT_IS_ADDED:
            moved = call_whole(_moved(values, seen.eps))
            if not isinstance(moved, Exception) and any(map(differs, moved[""], whole[""])):
                return ""   # it is chaotic: moving each weight by one rounding changes the whole block as much
        return f"it returns other values{f', the first behind {wrong[0]}' if wrong[0] else ''}. {ACROSS}"

    def _is_alike_on_all_ranks(self, outcome: bool, given: Any) -> bool:
        """Whether all ranks have called the whole copy with the same arguments, with the same outcome. A collective."""
        device = self.group.device
        mine = fingerprint(torch.cat([torch.tensor([outcome], device=device), *(bits(x).to(device) for x in tensors_in(given))]))
        return bool((self.group.all_gather(mine[None], label="same function: arguments") == mine).all())

    def _call_cut(self, block: nn.Module, values: Mapping[str, Tensor], args: tuple[Any, ...],
                  kwargs: dict[str, Any]) -> Returned | Exception:
        """What the cut copy returns, with this rank's parts of the values."""
        held = holdings(self.cut)
        parts = {name: held[name].cut(value, self.group.rank) for name, value in values.items()}
        return _called(self.cut, parts | _buffers(block), args, kwargs)

    def _own_terms(self, whole: Returned, cut: Returned) -> str:
        """Of which parameter each rank would have one term of the gradient, which nothing sums, or "": that of a module whose parameters
        every rank has, and that returns a part of what the whole copy's does. One that has a group may sum it itself."""
        held = holdings(self.cut)
        for name in whole:
            if name not in cut or not any(map(_is_a_part, cut[name][:1], whole[name])):
                continue
            module = self.cut.get_submodule(name)
            inside = {place: held[place] for place, param in module.named_parameters(prefix=name) if param.requires_grad}
            trained = [place for place, holding in inside.items() if not holding.grad_partial]
            is_whole = all(inside[place].dim is None for place in trained)
            if trained and is_whole and not any(isinstance(value, Group) for value in vars(module).values()):
                return (f"its gradients are other ones: {trained[0]} is whole on every rank, and {name or 'the model'} uses it for a part "
                        f"of the features, {OWN_TERMS}")
        return ""


def _error_of_shapes(error: Exception, advice: str) -> str | None:
    """What the cut copy raised, in words, if it is of a kind that wrong shapes raise; other kinds have other causes: None."""
    is_of_shapes = type(error) in (RuntimeError, ValueError, ShapeMismatch)
    return f"it raises {type(error).__name__}: {error}. {advice}" if is_of_shapes else None


def _is_a_part(cut: Tensor, whole: Tensor) -> bool:
    """Whether it has fewer features, heads or tokens. Not of how many rows: a router of experts may send one of these elsewhere."""
    return cut.dim() == whole.dim() and cut.shape[:1] == whole.shape[:1] and 0 < cut.numel() < whole.numel()


def _values(block: nn.Module, like: Tensor) -> dict[str, Tensor]:
    return {name: usual_values(name, like.new_empty(()).expand(param.shape)) for name, param in block.named_parameters()}


def _moved(values: Mapping[str, Tensor], eps: float) -> dict[str, Tensor]:
    return {name: value * (1 + eps * usual_values(f"{name}, moved", value).sign()) for name, value in values.items()}


def _buffers(block: nn.Module) -> dict[str, Tensor]:
    """Copies: a forward may change them, as one that counts its calls, or keeps a running mean."""
    return {name: buffer.clone() for name, buffer in block.named_buffers()}


def _called(block: nn.Module, values: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Returned | Exception:
    """What the block and each module in it return, in the order in which they do, the block ("") last; or what it raises.

    Whatever it raises: if that is a mistake of the user's, the call that comes next raises it too.
    """
    returned: Returned = {}

    def note(name: str) -> Callable[..., None]:
        return lambda _module, _args, output: returned.update({name: [x.clone() for x in tensors_in(output)]})

    hooks = [module.register_forward_hook(note(name)) for name, module in block.named_modules()]
    try:
        functional_call(block, dict(values), _copied(args), _copied(kwargs))
        return returned
    except RankLost:
        raise
    except Exception as error:
        return error
    finally:
        for hook in hooks:
            hook.remove()


def _copied(value: Any) -> Any:
    """Arguments for a call that may change them, such as a cache of keys."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(map(_copied, value))
    return {key: _copied(each) for key, each in value.items()} if type(value) is dict else copy.deepcopy(value)


class _Rounding(TorchFunctionMode):
    """A context that finds the coarsest relative precision with which anything is computed inside: a norm in fp32 in a model in fp64, an
    attention in bf16 in one in fp32."""

    eps = 0.0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.eps = max([self.eps, *(_precision(x) for x in tensors_in(found) if x.is_floating_point())])
        return found


def _differs(cut: Tensor, whole: Tensor, x: Tensor, eps: float) -> bool:
    """Whether many of the vectors in what two copies return differ by more than rounding. Of other shapes, such as features that stay
    cut, nothing is known. x: what the block was given: what it adds to that must be the same. eps: of the coarsest number inside"""
    if cut.shape != whole.shape or not whole.is_floating_point() or not whole.isfinite().all():
        return False
    rows = [value.double().reshape(-1, value.shape[-1] if value.dim() else 1) for value in (cut, whole)]
    added = rows[1] - x.double().reshape(rows[1].shape) if x.shape == whole.shape else rows[1]
    allowed = min(OF_WHAT_IS_ADDED, ROUNDINGS * max(eps, _precision(whole)))
    bound = allowed * added.norm(dim=1) + OF_SUMS * _precision(whole) * rows[1].norm(dim=1)
    return float(((rows[0] - rows[1]).norm(dim=1) > bound).double().mean()) > MANY


def _precision(x: Tensor) -> float:
    """The relative precision with which `x` may have been computed."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return TF32 if dtype == torch.float32 and kind == "cuda" else torch.finfo(dtype).eps
