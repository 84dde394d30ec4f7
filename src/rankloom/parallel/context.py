"""Context parallel: one sequence over many ranks. Each holds the activations of its own tokens only.

Two ways to let a query see keys that another rank owns:

    ring          keys and values travel once around the ring, p-1 hops. Each rank merges the attention of its queries to each block
                  into a running softmax (parallel/tiles.py). Backward they travel again, followed by their gradients.
    all_to_all    every rank trades its tokens of all heads for all tokens of some heads, attends alone, and trades back.
                  With as many key-value as query heads it sends forward 2/p of what a ring sends; but p is at most the number of heads.

No rank ever holds the scores of all tokens against all, nor, in a ring, the keys of all. Nothing is padded: if the ranks do not divide
a length, their shares differ by a token or two, so no padding is counted in the loss or routed to an expert.

The loss is (sum, count) over a rank's own tokens: sums, counts and gradients are added over the ranks.
Read parallel/sequences.py (which rank owns what) and parallel/tiles.py (the arithmetic) before this file.

source: Liu et al. 2023 (ring attention); Jacobs et al. 2023 (DeepSpeed Ulysses)
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from rankloom.base.cost import Bill
from rankloom.base.documents import Documents, document_cuts
from rankloom.base.errors import ConfigError, DataError, ShapeMismatch, did_you_mean
from rankloom.base.expect import expect_type
from rankloom.base.scoped import temporarily
from rankloom.base.tensors import at_least_fp32
from rankloom.parallel.all_to_all import deal_rows
from rankloom.parallel.sequences import Spans, Tile, cut_sequence, merged, tiles
from rankloom.parallel.tensor.layers import TokenDropout
from rankloom.parallel.tiles import can_attend, merge, tile_backward, tile_forward
from rankloom.parallel.tokens_apart import Apart, TokensApart, expect_tokens_apart
from rankloom.world.group import Group, Handle

RING, ALL_TO_ALL = KINDS = ("ring", "all_to_all")
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
           ConfigError for a model in which tokens see each other outside of attention (parallel/tokens_apart.py)
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


def called_apart(apart: Apart, model: nn.Module) -> AbstractContextManager[None]:
    """A context in which calls of a model get some tokens of whole rows, each left to itself, on every rank the same."""
    (cutting,) = (hook for hook in model._forward_pre_hooks.values() if isinstance(hook, _OwnTokens))
    return temporarily(cutting, apart=apart)


def expect_kind(kind: str) -> None:
    """Raise ConfigError unless it is a kind of context parallelism."""
    if kind not in KINDS:
        raise ConfigError(f"there is no context parallelism {kind!r}. {did_you_mean(kind, KINDS)}")


@dataclass
class _OwnTokens:
    """A forward pre-hook: cuts the inputs, and passes their `part`."""

    group: Group
    kind: str
    signature: inspect.Signature
    tell: TellPositions | None
    is_first: bool = True   # whether no call has come yet
    apart: Apart | None = None   # see `called_apart`
    cuts_tokens: ClassVar[bool] = True   # for models/pieces.py

    def __deepcopy__(self, memo: dict[int, Any]) -> "_OwnTokens":
        return self   # a copy of the model has the same peers

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # generation uses a KV cache that lies wholly on this rank
        if kwargs.get("caches") is not None or isinstance(kwargs.get("part"), TokensApart):
            return args, kwargs
        documents = kwargs.pop("documents", None)
        tokens = self.signature.bind(*args, **kwargs).arguments["tokens"]
        if tokens.dim() < 2:
            raise ShapeMismatch(f"{self.group.where('context parallel')}: tokens of shape {tuple(tokens.shape)}, expected rows [B, T]")
        length, limit = tokens.shape[1], getattr(getattr(model, "config", None), "seq_len", None)
        if limit is not None and length > limit:
            raise DataError(f"a sequence of {length} tokens, but the model reads at most {limit}; raise seq_len or cut the sequence")
        if self.apart is not None:
            some = self.apart.some(length, tokens.device)
            return tuple(some.cut(value, length) for value in args), {
                **{name: some.cut(value, length) for name, value in kwargs.items()}, "part": some}
        part = Context(self.group, length, self.kind, documents=document_cuts(documents, length, len(tokens)), device=tokens.device)
        if self.is_first and self.group.size > 1:
            expect_tokens_apart(model, self.group, tokens, args, kwargs)
            self.is_first = False
        if self.tell:
            self.tell(part.spans[self.group.rank], length)
        cut = [part.own(value) if isinstance(value, Tensor) and value.dim() > 1 else value for value in (*args, *kwargs.values())]
        return tuple(cut[:len(args)]), {**dict(zip(kwargs, cut[len(args):])), "part": part}


@dataclass(frozen=True)
class Context:
    """Rows of `length` tokens, cut over the ranks of a group: which tokens are here, and how they attend to the rest."""

    group: Group
    length: int
    kind: str = RING
    causal: bool = True
    documents: Documents | None = None   # one row stands for all; None: each row is one document
    device: torch.device | None = None   # of `positions`

    def __post_init__(self) -> None:
        expect_kind(self.kind)
        if self.length < self.group.size:
            raise DataError(f"{self.group.where('context parallel')}: a sequence of {self.length} tokens leaves some of {self.group.size} "
                            "ranks without any; use longer sequences, or fewer context ranks")

    @cached_property
    def spans(self) -> tuple[Spans, ...]:
        """The positions that each rank owns."""
        return cut_sequence(self.length, self.group.size, zigzag=self.kind == RING and self.causal)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """How many tokens each rank owns."""
        return tuple(sum(map(len, spans)) for spans in self.spans)

    @cached_property
    def tiles(self) -> tuple[list[Tile], ...]:
        """For each rank, the tiles of this rank's queries against that rank's keys."""
        mine, documents = self.spans[self.group.rank], document_cuts(None, self.length) if self.documents is None else self.documents
        return tuple(merged(tiles(mine, theirs, causal=self.causal, documents=documents)) for theirs in self.spans)

    @cached_property
    def alone(self) -> "Context":
        """The same rows on a group of this rank only."""
        return replace(self, group=self.group.alone())

    @cached_property
    def positions(self) -> Tensor:
        """Of this rank's tokens, [T/p]."""
        return torch.cat([torch.arange(span.start, span.stop, device=self.device) for span in self.spans[self.group.rank]])

    def own(self, x: Tensor) -> Tensor:
        """This rank's tokens of whole rows [B, T, ...], contiguous."""
        if x.dim() < 2 or x.shape[1] != self.length:
            raise ShapeMismatch(f"{self.group.where('own tokens')}: x has shape {tuple(x.shape)}, expected rows of {self.length} tokens")
        return torch.cat([x[:, span.start:span.stop] for span in self.spans[self.group.rank]], dim=1)

    @torch.compiler.disable   # communication cannot be compiled
    @torch.no_grad()
    def gather(self, x: Tensor) -> Tensor:
        """The whole rows [B, T, ...], from each rank's tokens `x`; no gradient. sent: p-1 messages, n(p-1)"""
        longest, mine = max(self.tokens), x.transpose(0, 1)
        padded = mine.new_zeros((longest, *mine.shape[1:]))
        padded[:len(mine)] = mine
        shares = self.group.all_gather(padded, label="rows of all context ranks").split(longest)
        whole = x.new_empty((x.shape[0], self.length, *x.shape[2:]))
        for spans, share in zip(self.spans, shares, strict=True):
            starts = accumulate(map(len, spans), initial=0)
            for span, start in zip(spans, starts):
                whole[:, span.start:span.stop] = share[start:start + len(span)].transpose(0, 1)
        return whole

    @torch.compiler.disable
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention over whole rows: query [B, T/p, H, D], key and value [B, T/p, K, D] of this rank's tokens -> [B, T/p, H, D].

        raises: ShapeMismatch; ConfigError where all_to_all has more ranks than heads
        """
        self._expect(query, key, value)
        attend = ring_attention if self.kind == RING else all_to_all_attention
        return attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), self).transpose(1, 2)

    def _expect(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        rows, tokens = 1 if self.documents is None else len(self.documents), self.tokens[self.group.rank]
        if not can_attend(query, key, value) or query.shape[1] != tokens or rows not in (1, query.shape[0]):
            given = (f"{name} {tuple(x.shape)} {x.dtype}" for name, x in (("query", query), ("key", key), ("value", value)))
            raise ShapeMismatch(
                f"{self.group.where('context parallel attention')}: {', '.join(given)}; expected {tokens} of {self.length} tokens here, "
                f"documents for 1 row or for all, not {rows}, a key and a value like the query, in a divisor of its heads, floats alike")


# ---------------------------------------------------------------------- ring


def ring_attention(query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
    """Attention with keys and values passed around a ring, and its own backward.

    query: [B, H, T/p, D], key and value: [B, K, T/p, D] -> [B, H, T/p, D]
    sent:  p-1 messages with the keys and values of p-1 ranks; backward the same again, and p-1 with gradients, in fp32 at least
    memory: two blocks of keys and values at a time, backward two of gradients too, and one tile
    source: Liu, Zaharia & Abbeel 2023
    """
    out: Tensor = _RingAttention.apply(query, key, value, context)   # type: ignore[no-untyped-call]
    return out


def ring_attention_bill(tokens: Sequence[int], token_bytes: int, rank: int) -> Bill:
    """What `rank` sends forward. tokens: of each rank; token_bytes: of the keys and values of one token, in all rows."""
    p = len(tokens)
    return Bill(sum(tokens[(rank - hop) % p] for hop in range(p - 1)) * token_bytes, p - 1)


def ring_attention_backward_bill(tokens: Sequence[int], token_bytes: int, rank: int, *, wide: int = 1) -> Bill:
    """What `rank` sends backward. wide: bytes of a gradient element over those of a key, 2 for 16-bit attention"""
    p = len(tokens)
    gradients = sum(tokens[(rank - hop) % p] for hop in range(1, p)) * token_bytes * wide
    return ring_attention_bill(tokens, token_bytes, rank) + Bill(gradients, p - 1)


def _shift(block: Tensor, context: Context, owner: int, label: str, tag: int) -> Handle:
    """Start to pass a block to the right, and to receive the one of rank `owner` from the left."""
    group = context.group
    into = block.new_empty((*block.shape[:3], context.tokens[owner], block.shape[4]))
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return group.exchange(block, right, into, left, tag=tag, label=label, async_op=True)   # type: ignore[no-any-return]


def _around(block: Tensor, context: Context, label: str) -> Iterator[tuple[int, Tensor]]:
    """This rank's block, then those of the ranks to its left, nearest first, each with its owner.

    While the caller computes with a block, it is passed on and the next one arrives.
    """
    rank, p = context.group.rank, context.group.size
    for hop in range(p):
        following = _shift(block, context, (rank - hop - 1) % p, label, tag=0) if hop < p - 1 else None
        yield (rank - hop) % p, block
        block = following.wait() if following else block


def _send_home(gradients: Tensor, context: Context, owner: int) -> Tensor:
    """Pass the gradients of a block on; returns those of the tokens of rank `owner`."""
    return _shift(gradients, context, owner, "gradients of keys and values", tag=1).wait()


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        out = torch.zeros_like(query, dtype=at_least_fp32(query.dtype))
        lse = torch.full(query.shape[:3], -torch.inf, dtype=out.dtype, device=query.device)
        for owner, block in _around(torch.stack((key, value)), context, "keys and values"):
            for rows, asking, asked, causal in context.tiles[owner]:
                keys, values = block[:, rows, :, asked]
                part = tile_forward(query[rows, :, asking], keys, values, causal)
                merge(out[rows, :, asking], lse[rows, :, asking], *part)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.context = context
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        context: Context = ctx.context
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()   # the gradient of a plain sum has stride 0, which GPU kernels refuse
        of_query = torch.zeros_like(query, dtype=lse.dtype)
        own, travelling = None, None
        for owner, block in _around(torch.stack((key, value)), context, "keys and values, again"):
            # A block's gradients start at the owner's right neighbour and come home last, so the owner's own share never travels.
            of_block = torch.zeros_like(block, dtype=lse.dtype) if travelling is None else _send_home(travelling, context, owner)
            for rows, asking, asked, causal in context.tiles[owner]:
                saved = query[rows, :, asking], *block[:, rows, :, asked], out[rows, :, asking], lse[rows, :, asking]
                shares = tile_backward(grad[rows, :, asking], saved, causal)
                of_query[rows, :, asking] += shares[0]
                of_block[:, rows, :, asked] += torch.stack(shares[1:])
            own, travelling = (of_block, None) if own is None else (own, of_block)
        assert own is not None, "a ring has at least this rank"
        if travelling is not None:
            own += _send_home(travelling, context, context.group.rank)
        of_key, of_value = own.to(key.dtype)
        return of_query.to(query.dtype), of_key, of_value, None


# ---------------------------------------------------------------------- all to all


def all_to_all_attention(query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
    """Attention in which each rank computes all tokens of some heads.

    query: [B, H, T/p, D], key and value: [B, K, T/p, D] -> [B, H, T/p, D]; p need not divide H, and may be more than K
    sent:  4(p-1) messages, see `all_to_all_attention_bill`; the same backward
    raises: ConfigError when there are more ranks than query heads
    source: Jacobs et al. 2023
    """
    group, heads, shared = context.group, query.shape[1], query.shape[1] // key.shape[1]
    if group.size > heads:
        raise ConfigError(f"{group.where('all_to_all attention')}: {heads} query heads cannot be dealt to {group.size} ranks; "
                          "use kind='ring', or fewer context ranks")
    askers, asked = deal_heads(heads, key.shape[1], group.size)
    query, key, value = (_tokens_for_heads(x, wanted, context) for x, wanted in ((query, askers), (key, asked), (value, asked)))
    mine = [head // shared - asked[group.rank].start for head in askers[group.rank]]
    if len(mine) % key.shape[1] or mine != [i * key.shape[1] // len(mine) for i in range(len(mine))]:
        # Kernels want equally many query heads for each key-value head. The cut has left this rank an unequal number, so it gives every
        # query head a copy of its own.
        key, value = (torch.stack([heads[head] for head in mine], dim=1) for heads in (key.unbind(1), value.unbind(1)))
    return _heads_for_tokens(ring_attention(query, key, value, context.alone), askers, context)   # p = 1: plain attention over the tiles


def deal_heads(heads: int, kv_heads: int, ranks: int) -> tuple[tuple[range, ...], tuple[range, ...]]:
    """The query heads of each rank, and the key-value heads that they read; ranks may share some of these.

    >>> deal_heads(heads=6, kv_heads=2, ranks=4)[1]
    (range(0, 1), range(0, 2), range(1, 2), range(1, 2))
    """
    askers = tuple(span for (span,) in cut_sequence(heads, ranks, zigzag=False))
    shared = heads // kv_heads
    return askers, tuple(range(own.start // shared, (own.stop - 1) // shared + 1) for own in askers)


def all_to_all_attention_bill(tokens: Sequence[int], heads: int, kv_heads: int, head_bytes: int, rank: int) -> Bill:
    """What `rank` sends forward: queries, keys and values of its tokens, then its heads' results for the tokens of others.

    tokens: of each rank; head_bytes: of one head of one token, in all rows
    """
    askers, asked = deal_heads(heads, kv_heads, len(tokens))
    others = [other for other in range(len(tokens)) if other != rank]
    there = sum(len(askers[other]) + 2 * len(asked[other]) for other in others) * tokens[rank]
    back = sum(tokens[other] for other in others) * len(askers[rank])
    return Bill((there + back) * head_bytes, 4 * len(others))


def _tokens_for_heads(x: Tensor, wanted: Sequence[range], context: Context) -> Tensor:
    """[B, all heads, own tokens, D] -> [B, own heads, all tokens, D]; rank r wants the heads wanted[r]."""
    rank, tokens = context.group.rank, context.tokens
    heads = x.permute(1, 2, 0, 3).unbind()   # not by an index list: copying it to the device would synchronise
    rows = torch.stack([heads[head] for span in wanted for head in span]).flatten(0, 1)
    received = [len(wanted[rank]) * there for there in tokens]
    dealt = deal_rows(rows, context.group, [len(span) * tokens[rank] for span in wanted], received, "tokens for heads")
    blocks = [block.unflatten(0, (len(wanted[rank]), -1)) for block in dealt.split(received)]
    return torch.cat(blocks, dim=1).permute(2, 0, 1, 3)


def _heads_for_tokens(x: Tensor, owned: Sequence[range], context: Context) -> Tensor:
    """[B, own heads, all tokens, D] -> [B, all heads, own tokens, D]; rank r sends the heads owned[r]."""
    rank, tokens = context.group.rank, context.tokens
    rows = torch.cat([block.flatten(0, 1) for block in x.permute(1, 2, 0, 3).split(tokens, dim=1)])
    received = [len(heads) * tokens[rank] for heads in owned]
    dealt = deal_rows(rows, context.group, [len(owned[rank]) * there for there in tokens], received, "heads for tokens")
    return torch.cat([block.unflatten(0, (-1, tokens[rank])) for block in dealt.split(received)]).permute(2, 0, 1, 3)
