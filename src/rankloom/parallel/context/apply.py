"""Cut the rows of a model over ranks: from then on its calls take whole rows, and compute this rank's tokens of them."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from rankloom.base.documents import document_cuts
from rankloom.base.errors import ConfigError, DataError, ShapeMismatch
from rankloom.base.expect import expect_type
from rankloom.base.scoped import temporarily
from rankloom.parallel.context.part import Context
from rankloom.parallel.context.rows import RING, expect_kind
from rankloom.parallel.context.sequences import Spans
from rankloom.parallel.context.tokens_apart import SomeTokens, TokensApart, expect_tokens_apart
from rankloom.parallel.tensor.layers import TokenDropout
from rankloom.world.group import Group

KEYED_DROPOUT = (nn.Dropout, TokenDropout)     # rl.prepare makes these draw by position
_KINDS_OVER: "WeakKeyDictionary[Group, set[str]]" = WeakKeyDictionary()   # of the models that were cut over a group
TellPositions = Callable[[Spans, int], None]   # takes the positions of this rank's tokens, and the length of their rows


def context_parallel(model: nn.Module, group: Group, kind: str = RING, *, tell: TellPositions | None = None) -> nn.Module:
    """From now on a call of `model` takes whole rows on every rank, and computes only this rank's tokens of them.

    model: its forward takes `tokens` [B, T] and a `part`, as models/gpt.py does, and returns results of this rank's tokens. Other tensors,
           such as targets, are [B, T, ...] and cut alike, or [B], one value a row. With `documents` (see `document_cuts`) attention stays
           inside each document: the `part` knows them, and the model is called without them
    kind:  "ring" or "all_to_all"
    tell:  called before every forward. Callers that draw dropout by position (`rl.prepare`) give it, and may have `nn.Dropout`s
    sent:  per layer: `ring_attention_bill` or `all_to_all_attention_bill`
    raises: ConfigError for another kind, for a model without `tokens` or a `part` or with dropout, and the second time; on a call,
           DataError for a row longer than the model's `config.seq_len`, if it has one, or shorter than there are ranks; on the first call,
           ConfigError for a model in which tokens see each other outside of attention (tokens_apart.py)
    """
    expect_type("model", model, nn.Module, "a torch module")
    expect_type("group", group, Group, "a Group: the world that rl.init gives, or world.group(axis)")
    expect_kind(kind)
    signature = inspect.signature(model.forward)   # now: a compiler or wrapper may hide it later
    if "part" not in signature.parameters:
        raise ConfigError(f"{group.where('context_parallel')}: {type(model).__name__}.forward takes no `part`, so its "
                          "attention cannot see tokens on other ranks; see SequencePart in models/sequence_part.py")
    if "tokens" not in signature.parameters:
        raise ConfigError(f"{group.where('context_parallel')}: {type(model).__name__}.forward takes no `tokens`, the name of the rows "
                          f"[B, T] that are cut over ranks; it takes {', '.join(signature.parameters)}")
    expect_no_dropout(model, group, but=() if tell is None else KEYED_DROPOUT)
    if any(isinstance(hook, _OwnTokens) for hook in model._forward_pre_hooks.values()):
        raise ConfigError(f"{group.where('context_parallel')}: {type(model).__name__} is context parallel already")
    model.register_forward_pre_hook(_OwnTokens(group, kind, signature, tell), with_kwargs=True)
    _KINDS_OVER.setdefault(group, set()).add(kind)
    return model


def expect_no_dropout(model: nn.Module, group: Group, but: tuple[type[nn.Module], ...] = ()) -> None:
    """Raise ConfigError for a dropout whose mask on ranks would differ from that of one process. but: kinds that are allowed"""
    dropping = [name for name, module in model.named_modules()
                if isinstance(module, _DropoutNd) and type(module) not in but and module.p > 0]
    if dropping and group.size > 1:
        raise ConfigError(f"{group.where('context_parallel')}: {dropping[0]} draws its mask by how many tokens are here, not by which, "
                          "so ranks would not drop what one process drops; let rl.prepare draw for an nn.Dropout, set others to 0, "
                          "or use one context rank")


def own_tokens(x: Tensor, group: Group, kind: str | None = None) -> Tensor:
    """This rank's tokens of whole rows [B, T, ...] -> [B, about T/p, ...], in order.

    kind:   by default that of the models that were cut over the group, or "ring": each kind cuts other tokens
    raises: ShapeMismatch; ConfigError without a `kind` where models of several kinds were cut over the group
    """
    kinds = _KINDS_OVER.get(group, {RING}) if kind is None else {kind}
    if len(kinds) > 1:
        raise ConfigError(f"{group.where('own tokens')}: models were cut over this group as {' and '.join(sorted(kinds))}, which own other "
                          "tokens; name the kind of yours, the third argument")
    (kind,) = kinds
    if x.dim() < 2:
        raise ShapeMismatch(f"{group.where('own tokens')}: x has shape {tuple(x.shape)}, expected whole rows [B, T, ...]")
    return Context(group, x.shape[1], kind).own(x)


def limited_to(some: SomeTokens, model: nn.Module) -> AbstractContextManager[None]:
    """A context in which calls of a model get only some tokens of whole rows, each left to itself, on every rank the same."""
    (cutting,) = (hook for hook in model._forward_pre_hooks.values() if isinstance(hook, _OwnTokens))
    return temporarily(cutting, limited=some)


@dataclass
class _OwnTokens:
    """A forward pre-hook: cuts the inputs, and passes their `part`."""

    group: Group
    kind: str
    signature: inspect.Signature
    tell: TellPositions | None
    is_first: bool = True   # whether no call has come yet
    limited: SomeTokens | None = None   # to which tokens: see `limited_to`
    cuts_tokens: ClassVar[bool] = True   # for models/pieces.py

    def __deepcopy__(self, memo: dict[int, Any]) -> "_OwnTokens":
        return self   # a copy of the model has the same peers

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # generation uses a KV cache that lies wholly on this rank
        if kwargs.get("caches") is not None or isinstance(kwargs.get("part"), TokensApart):
            return args, kwargs
        documents = kwargs.pop("documents", None)
        bound = self.signature.bind(*args, **kwargs)
        if (by_position := bound.arguments.pop("documents", None)) is not None:
            documents, args, kwargs = by_position, bound.args, bound.kwargs
        tokens = bound.arguments["tokens"]
        self._expect_rows(model, tokens)
        length = tokens.shape[1]
        if self.limited is not None:
            apart = self.limited.part(length, tokens.device)
            cut_kwargs = {name: apart.cut(value, length) for name, value in kwargs.items()}
            return tuple(apart.cut(value, length) for value in args), {**cut_kwargs, "part": apart}
        part = Context(self.group, length, self.kind, documents=document_cuts(documents, length, len(tokens)), device=tokens.device)
        if self.is_first and self.group.size > 1:
            expect_tokens_apart(model, self.group, tokens, args, kwargs)
            self.is_first = False
        if self.tell:
            self.tell(part.spans[self.group.rank], length)

        def own(value: Any) -> Any:
            return part.own(value) if isinstance(value, Tensor) and value.dim() > 1 else value

        return tuple(map(own, args)), {**{name: own(value) for name, value in kwargs.items()}, "part": part}

    def _expect_rows(self, model: nn.Module, tokens: Tensor) -> None:
        if tokens.dim() < 2:
            raise ShapeMismatch(f"{self.group.where('context parallel')}: tokens of shape {tuple(tokens.shape)}, expected rows [B, T]")
        length, most = tokens.shape[1], getattr(getattr(model, "config", None), "seq_len", None)
        if most is not None and length > most:
            raise DataError(f"a sequence of {length} tokens, but the model reads at most {most}; raise seq_len or cut the sequence")
